"""Many requests come or end in one turn of the event loop: what concerns all of them is done once, not once for each."""

import asyncio
from typing import Any

import pytest
from fake_workers import MODEL

from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from baton.engine.core.beams import Beams
from router import gate
from router.admission import Admission
from router.gate import Gate
from router.journal import Journal
from router.validate import Ask
from router.view import ClusterView


async def test_requests_that_come_or_end_together_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"places": 0, "drop_hopeless": 0}

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, call)

    counted(gate, "places")
    counted(Admission, "drop_hopeless")
    admission, view, end, inside = Admission(50, 50), ClusterView({MODEL: "tokenizer"}), asyncio.Event(), 0
    door = Gate(admission, view.models[MODEL], RouterConfig(), {}, clock=lambda: 7.0)
    journal = Journal(Book("router"), Tracer(), "m", SloConfig(), keep=1)

    async def one() -> None:
        nonlocal inside
        with journal.open("chat") as entry:
            async with door.place(entry, Ask(), 1e9):
                inside += 1
                await end.wait()

    tasks = [asyncio.create_task(one()) for _ in range(100)]
    await asyncio.sleep(0)
    assert inside == 50 and admission.queued == 50 and calls == {"places": 1, "drop_hopeless": 0}
    end.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert inside == 100 and door.idle and calls["drop_hopeless"] <= 2
    view.members.next_epoch()
    view.update([], 1.0)
    end.clear()
    tasks = [asyncio.create_task(one()) for _ in range(3)]
    await asyncio.sleep(0)
    assert calls["places"] == 2  # the workers have changed
    end.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("overload", ["codel", "lifo"])
def test_the_lines_of_the_queue_hold_those_who_wait(overload: Any) -> None:
    admission = Admission(1, 50, overload)
    admission.enter("served")
    for i in range(20):
        assert admission.enter(f"r{i}", priority=i % 3, now=float(i))
    assert admission.leave("r3", 21.0) == [] and admission.leave("r0", 21.0) == []
    order = []
    (turn,) = admission.leave("served", 22.0)
    while turn:
        order.append(turn)
        turn = next(iter(admission.leave(turn, 22.0)), "")
        admission.check()
    first = [f"r{i}" for priority in range(3) for i in range(20) if i % 3 == priority and i not in (0, 3)]
    assert order == first and not admission._lines


@pytest.mark.parametrize(("ask", "places"), [(Ask(), 1), (Ask(n=3), 3), (Ask(n=2, best_of=5), 5), (Ask(beams=Beams(4, 2)), 4)])
async def test_a_request_holds_a_place_for_each_sequence_that_the_workers_run_for_it(ask: Ask, places: int) -> None:
    admission, view = Admission(8, 8), ClusterView({MODEL: "tokenizer"})
    door = Gate(admission, view.models[MODEL], RouterConfig(), {}, clock=lambda: 7.0)
    journal = Journal(Book("router"), Tracer(), "m", SloConfig(), keep=1)
    with journal.open("chat") as entry:
        async with door.place(entry, ask, 1e9):
            assert admission.inflight == places
    assert admission.inflight == 0


async def test_who_is_displaced_is_refused_at_once_with_a_time() -> None:
    admission, view = Admission(1, 8), ClusterView({MODEL: "tokenizer"})
    door = Gate(admission, view.models[MODEL], RouterConfig(), {}, clock=lambda: 7.0)
    journal = Journal(Book("router"), Tracer(), "m", SloConfig(), keep=1)
    admission.note_served(1.0, 0.1, 10)
    admission.enter("served", now=7.0)

    async def one(priority: int) -> None:
        with journal.open("chat") as entry:
            async with door.place(entry, Ask(priority=priority), 12.0):
                pass

    tasks = [asyncio.create_task(one(1)) for _ in range(2)]
    await asyncio.sleep(0)
    assert admission.queued == 2
    admission._refusals.extend([7.0] * 50)
    urgent = asyncio.create_task(one(0))
    for task in tasks:
        with pytest.raises(BatonError, match="better priority") as refused:
            await asyncio.wait_for(task, 30)
        assert refused.value.reason is Reason.SATURATED and refused.value.retry_after
    assert admission.queued == 1
    door._let_in(admission.leave("served", 7.0))
    await asyncio.wait_for(urgent, 30)
    assert door.idle
