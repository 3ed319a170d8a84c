"""Sequences that decode and prompts that wait are load as well, whatever the rate says."""

from dataclasses import replace

from planned_world import CHAT, EVERY_S, MODEL, RULES, World

from baton.cluster.records import Pools
from baton.planner.change import Seen
from baton.planner.decide import needed
from baton.planner.demand import Demand
from baton.planner.planner import Planner
from baton.planner.present import present

SHORT = replace(CHAT, output=10.0)
PAIR = Pools(2, 2)


def seen(busy: int = 0, waiting_tokens: int = 0, pools: Pools = PAIR) -> Seen:
    """Each decode worker has so many sequences, and each prefill worker so many tokens to compute."""
    found = World(Planner(MODEL, RULES, EVERY_S), lambda now: CHAT, pools).seen()
    workers = (
        replace(one, busy=busy) if one.pool == "decode" else replace(one, busy=1, waiting_tokens=waiting_tokens) for one in found.workers
    )
    return replace(found, workers=tuple(workers))


def test_sequences_that_decode_need_their_workers_before_the_first_of_them_ends() -> None:
    """Answers have become long, and all that have ended were short."""
    assert needed(MODEL, SHORT, RULES).decode == 1
    assert present(SHORT, seen(busy=1), MODEL) == SHORT
    many = present(SHORT, seen(busy=50), MODEL)
    assert many.decode > 10 and needed(MODEL, many, RULES).decode >= 2
    assert many.prompt == SHORT.prompt and many.output == SHORT.output and many.prefill == 1.0


def test_as_many_as_the_load_means_are_no_more_load() -> None:
    expected = CHAT.rate * CHAT.output * MODEL.step_s(8, 450.0) / 2  # a worker
    assert present(CHAT, seen(busy=round(expected)), MODEL).decode == 1.0
    assert present(CHAT, seen(busy=round(1.2 * expected)), MODEL).decode == 1.0, "nor are some more, by chance"


def test_after_a_rate_has_fallen_what_is_in_flight_needs_no_more_than_before() -> None:
    expected = round(CHAT.rate * CHAT.output * MODEL.step_s(8, 450.0) / 2)
    fallen = present(replace(CHAT, rate=0.1), seen(busy=expected), MODEL)
    assert needed(MODEL, fallen, RULES).decode <= needed(MODEL, CHAT, RULES).decode


def test_prompts_that_wait_too_long_are_load() -> None:
    """A worker computes 10,000 tokens per second, and 0.5 s are allowed."""
    assert present(CHAT, seen(waiting_tokens=1500), MODEL) == CHAT, "a queue that is short is no matter"
    queued = present(CHAT, seen(waiting_tokens=30_000), MODEL)
    assert queued.prefill > 1.2 and queued.decode == 1.0
    assert needed(MODEL, queued, RULES).prefill > needed(MODEL, CHAT, RULES).prefill


def test_who_has_no_lengths_or_no_load_is_left_alone() -> None:
    for demand in (Demand(), Demand(3.0)):
        assert present(demand, seen(busy=50, waiting_tokens=30_000), MODEL) == demand
