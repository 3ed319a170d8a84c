"""Each experiment runs in the simulator and shows what it says. Time is virtual: the same settings have the same figures everywhere."""

import asyncio
from typing import Any, cast

import pytest

from baton.cockpit.bench import Bench, RunKept
from baton.cockpit.experiments import STEPS


async def simulated(experiment: str, **settings: Any) -> RunKept:
    bench = Bench(cast(Any, None))
    run = await bench.start({"experiment": experiment, "where": "simulated", "settings": {"duration_s": 6, **settings}})
    async with asyncio.timeout(120):
        while run.state == "running":
            await asyncio.sleep(0.02)
    await bench.close()
    assert run.state == "done", run.message
    assert run.label == "simulated" and "nothing was measured" in run.doubts[0]
    assert run.points and run.figures["requests"] == run.figures["completed"] > 0
    return run


def most(run: RunKept, what: str) -> float:
    return float(max(point[what] for point in run.points))


async def test_a_batch_follows_the_rate_and_a_token_takes_little_longer() -> None:
    few, many = [await simulated("continuous", rate=rate, spread=0, output=64) for rate in (4.0, 16.0)]
    assert many.figures["tokens_per_s"] > 3 * few.figures["tokens_per_s"] and most(many, "batch") > 1.5 * most(few, "batch")
    assert few.figures["tpot_p50"] < many.figures["tpot_p50"] < 1.5 * few.figures["tpot_p50"]


async def test_what_requests_share_is_computed_once() -> None:
    on, off = [await simulated("caching", shared=0.8, caching=caching) for caching in ("on", "off")]
    assert on.figures["requests"] == off.figures["requests"], "the same requests"
    assert 0.7 < on.figures["cached"] < 0.8 and off.figures["cached"] == 0, "all but the first of those that begin alike"
    assert on.figures["ttft_p50"] < off.figures["ttft_p50"] / 2


async def test_guesses_pay_less_in_a_large_batch_and_cost_where_they_are_wrong() -> None:
    async def token_s(rate: float, **settings: Any) -> float:
        run = await simulated("speculation", rate=rate, output=64, **settings)
        assert any("guesses are assumed" in doubt for doubt in run.doubts) == (settings["speculation"] == "on")
        return float(run.figures["tpot_p50"])

    gain = {rate: await token_s(rate, speculation="off") / await token_s(rate, speculation="on") for rate in (2.0, 60.0)}
    assert gain[2.0] > gain[60.0] > 1
    assert await token_s(2.0, speculation="on", acceptance=0) > await token_s(2.0, speculation="off")


async def test_more_workers_help_if_they_are_of_the_role_that_is_short() -> None:
    short, prefill, decode = [await simulated("workers", rate=30.0, prefill=p, decode=d) for p, d in ((1, 2), (2, 2), (1, 4))]
    assert short.figures["attainment"] < 0.5 and prefill.figures["attainment"] == 1 and most(prefill, "queued") < most(short, "queued") / 5
    assert decode.figures["attainment"] == short.figures["attainment"] and most(decode, "batch") < most(short, "batch")


async def test_beyond_the_breaking_point_the_queue_does_not_empty() -> None:
    run = await simulated("breaking", rate=40.0, duration_s=15)
    held, broke = run.figures["breaks"]["held"], run.figures["breaks"]["broke"]
    assert broke - held == pytest.approx(40.0 / STEPS), "a step of the rate lies between"
    points = [point for point in run.points if point["at"] <= run.duration_s]
    queued = {rate: [point["queued"] for point in points if point["rate"] == rate] for rate in (held, broke, 40.0)}
    assert max(queued[held]) < min(queued[broke]) and max(queued[broke]) < min(queued[40.0]) and most(run, "queued") == queued[40.0][-1]


async def test_a_token_takes_as_long_as_the_weights_are_large() -> None:
    small, bits, large = [
        (await simulated("size", gpus=2, model=model, weight_bits=bits)).figures["tpot_p50"]
        for model, bits in (("llama-3.1-8b", "16"), ("llama-3.1-8b", "8"), ("llama-3.1-70b", "8"))
    ]
    assert bits < small < 2 * bits, "half the bytes, and what does not shrink with them"
    assert large > 4 * bits
