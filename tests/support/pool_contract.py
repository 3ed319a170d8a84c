"""What every launcher must show, whoever owns the processes. tests/launch runs it over local processes and Ray, tests/kube over pods."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from baton.cluster.errors import BatonError, Reason
from baton.launch.launcher import PoolManager, ProcessState, Template


class Bench(Protocol):
    """A launcher with one pool of real processes, and ways to look at these from outside."""

    @property
    def manager(self) -> PoolManager: ...

    role: str
    patience_s: float  # for one thing to happen

    async def begin(self, count: int) -> None:
        """Makes it a pool of that many, whatever was there before."""
        ...

    async def ask(self, name: str) -> object:
        """Who answers as this process: equal as long as nothing was restarted. Raises if nobody answers."""
        ...

    async def end(self, name: str) -> None:
        """Ends the process without telling the launcher."""
        ...

    async def fill(self) -> None:
        """Leaves no room for one more."""
        ...

    def template(self) -> Template: ...


async def until(condition: Callable[[], Awaitable[Any]], within_s: float) -> Any:
    """Waits for and returns the first truthy answer; an error counts as none."""
    deadline = time.monotonic() + within_s
    while True:
        answer: Any = None
        error: Exception | None = None
        try:
            answer = await condition()
        except Exception as raised:
            error = raised
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{condition} is still {answer!r} ({error!r})"
        await asyncio.sleep(0.05)


async def states(bench: Bench) -> dict[str, ProcessState]:
    return {state.name: state for state in await bench.manager.processes() if state.role == bench.role}


async def answering(bench: Bench, name: str) -> object:
    """Who answers, once somebody does."""
    return await until(lambda: bench.ask(name), bench.patience_s)


async def resizing_does_not_interrupt_a_serving_process(bench: Bench) -> None:
    await bench.begin(1)
    [first] = await states(bench)
    who = await answering(bench, first)
    answers, quiet = 0, asyncio.Event()

    async def callers() -> None:
        nonlocal answers
        while not quiet.is_set():
            assert await bench.ask(first) == who
            answers += 1
            await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as group:
        group.create_task(callers())
        try:
            assert await bench.manager.resize(bench.role, 3) == []
            grown = set(await states(bench)) - {first}
            for name in grown:
                assert await answering(bench, name) != who
            ended = await bench.manager.resize(bench.role, 1)
            seen = answers
            await until(lambda: _true(answers > seen + 3), bench.patience_s)
        finally:
            quiet.set()
    # The surplus has ended, and only the surplus.
    assert len(grown) == 2 and {state.name for state in ended} == grown
    assert all((state.state, state.pid) == ("exited", None) and state.last_exit in (0, None) for state in ended)
    [left] = (await states(bench)).values()
    assert (left.name, left.state, left.restarts) == (first, "running", 0)
    # A name is never used twice.
    await bench.manager.resize(bench.role, 2)
    fresh = set(await states(bench)) - {first}
    assert len(fresh) == 1 and not fresh & grown


async def an_ended_process_comes_back_under_its_name(bench: Bench) -> None:
    await bench.begin(2)
    victim, other = sorted(await states(bench))
    who, unharmed = await answering(bench, victim), await answering(bench, other)
    await bench.end(victim)

    async def back() -> bool:
        now = (await states(bench))[victim]
        return now.state == "running" and now.restarts == 1 and await bench.ask(victim) != who

    await until(back, bench.patience_s)
    assert await bench.ask(other) == unharmed
    assert {name: state.restarts for name, state in (await states(bench)).items()} == {victim: 1, other: 0}


async def what_cannot_be_done_is_refused_and_nothing_starts(bench: Bench) -> None:
    await bench.begin(1)
    before = await states(bench)
    for attempt in (
        lambda: bench.manager.resize("encode", 1),
        lambda: bench.manager.resize(bench.role, -1),
        lambda: bench.manager.add(bench.template(), 1),
    ):
        with pytest.raises(BatonError) as refused:
            await attempt()
        assert refused.value.reason is Reason.INVALID_FIELD
    assert (await states(bench)).keys() == before.keys()


async def without_room_nothing_starts(bench: Bench) -> None:
    await bench.begin(1)
    await bench.fill()
    before = await states(bench)
    with pytest.raises(BatonError, match=f"{bench.role}: no room for 1 processes") as refused:
        await bench.manager.resize(bench.role, len(before) + 1)
    assert refused.value.reason is Reason.SATURATED
    assert (await states(bench)).keys() == before.keys()
    assert await bench.manager.resize(bench.role, len(before)) == []


async def _true(value: bool) -> bool:
    return value


CONTRACT = (
    resizing_does_not_interrupt_a_serving_process,
    an_ended_process_comes_back_under_its_name,
    what_cannot_be_done_is_refused_and_nothing_starts,
    without_room_nothing_starts,
)
