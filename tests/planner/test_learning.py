"""What the planner learns from misses, and what it does not."""

from dataclasses import replace

import pytest
from planned_world import CHAT, EVERY_S, MODEL, RULES, World

from baton.cluster.records import Pools
from baton.planner import learning
from baton.planner.capacity import Model, PoolSizes
from baton.planner.change import Seen
from baton.planner.demand import Interval
from baton.planner.learning import MISSING, learn
from baton.planner.memory import Memory
from baton.planner.planner import Planner

PAIR = Pools(2, 2)


def seen(pools: Pools = PAIR) -> Seen:
    return World(Planner(MODEL, RULES, EVERY_S), lambda now: CHAT, pools).seen()


def taught(memory: Memory, met: int, first: int, pools: Pools = PAIR, model: Model = MODEL) -> Memory:
    """By as many intervals as one conclusion takes: of 50 requests, so many are met, the others were slow to decode."""
    for number in range(first, first + MISSING):
        interval = Interval(number, EVERY_S, arrived=50, prompts=50, completed=50, met=met, missed={"decode": 50 - met})
        memory = learn(memory, interval, seen(pools), model, CHAT, RULES, number * EVERY_S)
    return memory


def test_a_pressure_that_helps_stays_and_one_that_does_not_is_taken_back() -> None:
    raised = taught(Memory(), met=30, first=1)
    assert raised.pressure[0] == 1.0 and raised.pressure[1] == pytest.approx(1.15) and raised.trial is not None
    again = taught(raised, met=30, first=10)
    assert again.pressure[1] > raised.pressure[1], "no worker has come yet, so nothing is known"
    useless = taught(again, met=31, first=20, pools=Pools(2, 3))
    assert useless.pressure == (1.0, 1.0) and useless.reach == pytest.approx(0.6)
    assert taught(useless, met=31, first=30, pools=PAIR).pressure == (1.0, 1.0), "so many misses are no reason again"
    assert taught(useless, met=20, first=30, pools=PAIR).pressure[1] > 1.0, "more of them are"
    useful = taught(again, met=42, first=20, pools=Pools(2, 3))
    assert useful.pressure[1] > again.pressure[1] and useful.reach == 1.0, "it helped, and there are still too many"


def test_misses_that_no_worker_cures_do_not_buy_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(hopeless: float) -> PoolSizes:
        return World(Planner(MODEL, RULES, EVERY_S), lambda now: CHAT, Pools(1, 1), hopeless=hopeless).run(2500).sizes[-1]

    assert sizes(0.2).total <= sizes(0.0).total + 1
    monkeypatch.setattr(learning, "WORTH", -1e9)  # negative control: whatever comes of it, a raise has helped
    assert sizes(0.2).total >= sizes(0.0).total + 2


def test_what_was_learned_of_a_reach_is_forgotten() -> None:
    memory = Memory(reach=0.6)
    for number in range(1, 2000):
        interval = Interval(number, EVERY_S, arrived=50, prompts=50, completed=50, met=50)
        memory = learn(memory, interval, seen(), MODEL, CHAT, RULES, number * EVERY_S)
    assert memory.reach > 0.9


def test_requests_that_came_before_a_change_teach_nothing() -> None:
    """Answers of 1,000 tokens take 20 s or so: those that end 15 s after a change came before it."""
    slow = replace(CHAT, output=1000.0, rate=2.0)
    stay_s = MODEL.stay_s(PoolSizes(2, 2), slow)
    assert 5 < stay_s < 60

    def misses(now: float) -> tuple[float, ...]:
        interval = Interval(100, EVERY_S, arrived=50, prompts=50, completed=50, met=30, missed={"decode": 20})
        return learn(Memory(ended=0.0), interval, seen(), MODEL, slow, RULES, now).misses

    assert misses(EVERY_S + 0.9 * stay_s) == () and misses(EVERY_S + 1.1 * stay_s) == (0.4,)
