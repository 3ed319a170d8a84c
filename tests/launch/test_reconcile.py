"""Pools follow the wanted sizes immediately, even while another pool drains. Refused changes are retried. Phases follow their table."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import Pools
from baton.launch import reconcile
from baton.launch.reconcile import MOVES, RETRY_S, Phase, Reconciler, WorkerPool
from baton.moves import IllegalMove
from baton.simulate.memory_registry import MemoryRegistry


class Recorded:
    """Stands in for a launcher: a change ends when the test decides."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.answers: list[asyncio.Future[None]] = []

    async def resize(self, role: str, count: int) -> None:
        self.asked.append((role, count))
        self.answers.append(asyncio.get_running_loop().create_future())
        await self.answers[-1]


@pytest.fixture
def world() -> tuple[Reconciler, Recorded, MemoryRegistry, list[str]]:
    launcher, registry, notes = Recorded(), MemoryRegistry(), list[str]()
    return Reconciler(launcher, registry, Pools(2, 2), notes.append), launcher, registry, notes  # type: ignore[arg-type]


async def settle(reconciler: Reconciler) -> bool:
    reached = await reconciler.step()
    for _ in range(3):
        await asyncio.sleep(0)
    return reached


async def test_a_draining_pool_does_not_delay_other_changes(world: Any) -> None:
    reconciler, launcher, registry, notes = world
    await registry.desire(Pools(1, 2))
    await settle(reconciler)
    assert launcher.asked == [("prefill", 1)] and not launcher.answers[0].done()
    await registry.desire(Pools(1, 3))
    await settle(reconciler)
    await registry.desire(Pools(3, 3))
    await settle(reconciler)
    assert launcher.asked == [("prefill", 1), ("decode", 3), ("prefill", 3)] and not any(one.done() for one in launcher.answers)
    await settle(reconciler)
    assert len(launcher.asked) == 3, "a change under way was requested again"
    assert notes == ["prefill pool: 1 workers", "decode pool: 3 workers", "prefill pool: 3 workers"]
    await reconciler.close()


async def test_it_notices_that_the_cluster_should_end(world: Any) -> None:
    reconciler, launcher, registry, _ = world
    await registry.desire(Pools(2, 2))
    await settle(reconciler)
    assert not reconciler.stop
    await registry.desire(Pools(2, 2, stop=True))
    await settle(reconciler)
    assert reconciler.stop and launcher.asked == []


async def test_a_refused_change_is_retried(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reconciler, launcher, registry, notes = world
    monkeypatch.setattr(reconcile, "RETRY_S", 60.0)
    await registry.desire(Pools(2, 9))
    await settle(reconciler)
    launcher.answers[0].set_exception(BatonError(Reason.SATURATED, "no room"))
    for _ in range(3):
        await settle(reconciler)
    assert launcher.asked == [("decode", 9)], "it was retried too early"
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 60.0)
    await settle(reconciler)
    monkeypatch.undo()
    assert launcher.asked == [("decode", 9), ("decode", 9)]
    launcher.answers[1].set_exception(BatonError(Reason.SATURATED, "no room"))
    await settle(reconciler)
    assert len([note for note in notes if "no room" in note]) == 1, "the failure must be reported once"
    await registry.desire(Pools(2, 3))
    await settle(reconciler)
    assert launcher.asked[-1] == ("decode", 3), "a different size must not wait"
    await reconciler.close()


async def test_the_wanted_sizes_are_written_again_after_the_registry_lost_them(world: Any) -> None:
    reconciler, launcher, registry, _ = world
    await registry.desire(Pools(2, 3))
    await settle(reconciler)
    registry._pools = None  # flushed
    await settle(reconciler)
    assert await registry.desired() == Pools(2, 3) and launcher.asked == [("decode", 3)]
    await reconciler.close()


async def test_without_a_registry_the_last_sizes_remain(world: Any) -> None:
    reconciler, launcher, registry, _ = world
    registry.available = False
    assert not await settle(reconciler) and launcher.asked == []
    registry.available = True
    assert await settle(reconciler) and launcher.asked == []
    await reconciler.close()


async def test_closing_cancels_unfinished_changes(world: Any) -> None:
    reconciler, launcher, registry, _ = world
    await registry.desire(Pools(5, 5))
    await settle(reconciler)
    await reconciler.close()
    assert all(answer.cancelled() for answer in launcher.answers) and len(launcher.answers) == 2


# The decisions of a pool


def phase_of(pool: WorkerPool) -> Phase:
    return pool.phase


def test_a_pool_decides_when_to_change() -> None:
    pool = WorkerPool(2)
    assert not pool.decide(2, 0.0) and pool.decide(3, 0.0)
    first = pool.change(3)
    assert not pool.decide(3, 100.0) and pool.decide(1, 0.0)
    second = pool.change(1)
    pool.refuse(first, 0.0)
    assert phase_of(pool) is Phase.CHANGING, "the outcome of an outdated change must not count"
    pool.refuse(second, 7.0)
    assert not pool.decide(1, 7.0 + RETRY_S - 0.1) and pool.decide(1, 7.0 + RETRY_S) and pool.decide(2, 7.0)
    pool.done(pool.change(1))
    assert phase_of(pool) is Phase.SETTLED and not pool.decide(1, 99.0)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(
    ("event", "act"),
    [("change", lambda pool: pool.change(5)), ("done", lambda pool: pool.done(0)), ("refuse", lambda pool: pool.refuse(0, 1.0))],
)
def test_an_illegal_event_changes_nothing(phase: Phase, event: str, act: Callable[[WorkerPool], Any]) -> None:
    pool = WorkerPool(2, phase)
    if (phase, event) in MOVES:
        act(pool)
        assert pool.phase is MOVES[phase, event]
        return
    with pytest.raises(IllegalMove, match=phase.value):
        act(pool)
    assert pool == WorkerPool(2, phase)
