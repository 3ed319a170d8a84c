"""Plans in the simulator: what the estimate promised holds there, or gets another worker."""

from dataclasses import replace

import pytest

from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.pools import Question, attained, decode_pool, prefill_pool
from baton.plan.search import Configuration, Search, Stock
from baton.plan.shape import KNOWN
from baton.plan.traffic import Length, Traffic, thinned
from baton.predict.offered import Offered, offered
from baton.predict.predict import Offer
from baton.predict.verify import verify
from loadtest.plan import Plan, Workload
from loadtest.slo import Slo
from loadtest.window import Window

# A device on which 10 requests a second are much.
SLOW = replace(DEVICES["a10"], name="slow", flop_per_s=6e12, bytes_per_s=200e9)
SLO = Slo.parse("ttft=1s,tpot=30ms")


def offer(rate: float, seconds: float = 15.0) -> Offer:
    workload = Workload(input="200-400", output="12", duration_s=seconds)
    items, _ = workload.items(rate, 1)
    return Offer(items, [at for at, _ in zip(workload.times(rate, 1, items), items, strict=False)], Window(seconds, 3.0))


def search(rate: float, count: int = 32) -> Search:
    lengths = thinned([Length(len(item.tokens), item.output_tokens) for item in offer(rate).items])
    asked = Question(KNOWN["qwen3-0.6b"], Traffic(rate, lengths), 1.0, 0.03, MEASURED)
    return Search(asked, [Stock(SLOW, count, 1.0, per_node=1)], [16], [16])


def split(of: Search, prefill: int, decode: int) -> Configuration:
    speed = of.speeds[0]
    before, after = prefill_pool(speed, prefill, of.asked), decode_pool(speed, decode, of.asked)
    return Configuration(before, after, attained(before.ttft, after.tpot), float(prefill + decode))


def test_what_the_estimate_holds_the_simulator_holds_and_half_of_it_gets_more() -> None:
    made = search(24.0)
    one = next(each for each in made.found().held if each.prefill is not None)
    assert one.prefill is not None and one.prefill.workers > 1, "a case in which too few is possible"
    told = verify(one, made, offer(24.0), SLO, 0)
    assert told.holds and told.made.gpus <= one.gpus + 1
    few = verify(split(made, 1, one.decode.workers), made, offer(24.0), SLO, 0)
    assert few.added > 0 and few.made.prefill is not None and few.made.prefill.workers > 1


def test_without_gpus_for_more_it_says_that_it_does_not_hold() -> None:
    made = search(24.0, count=2)
    told = verify(split(made, 1, 1), made, offer(24.0), SLO, 0)
    assert not told.holds and told.added == 0 and told.told.warning.startswith("Outside of what was validated: nothing was measured")


def test_unlike_pools_are_simulated_as_unlike() -> None:
    """A decode pool of faster memory has a shorter TPOT and the same TTFT."""
    made = search(4.0)
    asked = made.asked
    quick = replace(SLOW, name="quick", bytes_per_s=10 * SLOW.bytes_per_s)
    both = Search(asked, [Stock(SLOW, 8, 1.0, 1), Stock(quick, 8, 1.0, 1)], [16], [16])
    slow, fast = both.speeds
    figures = []
    for decode in (slow, fast):
        before, after = prefill_pool(slow, 2, asked), decode_pool(decode, 1, asked)
        one = Configuration(before, after, attained(before.ttft, after.tpot), 3.0)
        figures.append(verify(one, both, offer(4.0), SLO, 0).told.figures)
    assert figures[1]["TPOT P50 (ms)"].value < 0.5 * figures[0]["TPOT P50 (ms)"].value
    assert 0.9 < figures[1]["TTFT P50 (ms)"].value / figures[0]["TTFT P50 (ms)"].value < 1.1


def test_traffic_is_what_the_workload_says() -> None:
    """Shared prefixes count as cached, and so does a session's past; only what the load test leaves out is noted."""

    def of(rate: float = 10.0, **load: object) -> Offered:
        workload = Workload(**{"input": "300", "output": "20", "duration_s": 30.0, **load})  # type: ignore[arg-type]
        return offered(Plan(workload=workload, slo=SLO, seeds=(1,), warm_up_s=0.0, cool_down_s=0.0, timeout_s=60.0), rate)

    alone = of()
    assert alone.traffic.cached == 0 and alone.traffic.rate == pytest.approx(10, rel=0.3) and alone.notes == ()
    assert alone.offer.window.duration_s == 30.0 and of(100.0).offer.window.duration_s == 15.0, "no more than 15 s of what is much"
    shared = of(hit_rate=0.5, prefix_tokens=64, prefix_depth=3, prefix_branching=2)
    assert shared.traffic.cached == pytest.approx(0.5, abs=0.08) and shared.traffic.distinct_tokens < alone.traffic.distinct_tokens
    talks = of(turns="3")
    assert talks.traffic.prompt == pytest.approx((300 + 620 + 940) / 3, rel=0.05) and talks.traffic.cached == pytest.approx(0.5, abs=0.05)
    assert of(input="100-3000").notes[0].endswith("more than max_tokens")
    assert of(arrivals="gamma:0.2").traffic.cv2 > 2 > of(arrivals="constant").traffic.cv2
    for slo, words in (("ttft=1s", "slo: tpot is missing"), ("tpot=1s", "slo: ttft is missing")):
        with pytest.raises(ValueError, match=words):
            offered(Plan(workload=Workload(), slo=Slo.parse(slo), seeds=(1,), warm_up_s=0, cool_down_s=0, timeout_s=1), 1.0)
