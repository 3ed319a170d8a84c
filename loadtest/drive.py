"""The open loop: requests go out when they are due, whether or not the server has answered those before.

A closed loop waits for answers and so slows down together with the server: the queue that users of an overloaded server see is never
measured (Schroeder et al., NSDI 2006, "Open versus closed: a cautionary tale"). Here only the turns of one session wait for each other.
How late the generator itself was is part of each record, and a run in which it was late is void.
"""

import asyncio
import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, Protocol

from loadtest.record import Record
from loadtest.workload import Item

Outcome = Literal["ok", "refused", "failed", "timeout", "cancelled"]
MAX_IN_FLIGHT = 20_000  # streams; what is due beyond that is refused by the generator itself, and counted
GONE_AFTER = 20  # requests in a row that found nobody there
GENERATOR_FULL = "GENERATOR_FULL"
NO_SERVER = "NO_SERVER"


@dataclass(slots=True)
class Answer:
    """What a door says of one request. `tokens` are carried into the next turn of a session."""

    outcome: Outcome
    reason: str = ""
    tokens: Sequence[int] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stages_ms: dict[str, float] = field(default_factory=dict)
    prefill_worker: str = ""
    decode_worker: str = ""
    retries: int = 0
    transport: str = ""
    kv_bytes: int = 0
    kv_blocks: int = 0
    recomputed_tokens: int = 0


class Door(Protocol):
    """An endpoint that generates. One implementation for each protocol."""

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: Callable[[int], None]) -> Answer:
        """`on_tokens(n)` as n tokens arrive. Raises nothing but CancelledError: what went wrong is in the answer."""


@dataclass(slots=True)
class Live:
    """What may be read while a run is on, and what is left of one that was interrupted."""

    due: int = 0
    sent: int = 0
    in_flight: int = 0
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """`partial` says why a run ended before its plan did; its records are those that came to an end."""

    records: tuple[Record, ...]
    duration_s: float  # from the first moment to the last due time's window
    partial: str = ""


async def drive(
    items: Iterable[Item],
    arrivals: Iterable[float],
    door: Door,
    *,
    duration_s: float,
    timeout_s: float,
    live: Live | None = None,
    max_in_flight: int = MAX_IN_FLIGHT,
) -> Run:
    """Sends what is due within `duration_s` and waits for all answers, each at most `timeout_s`.

    A session's first turn, and every request of its own, takes the next of `arrivals` (or its own `at`); a later turn is due when the
    answer before it has come and its pause is over. Ends early, as partial, when the server is gone.
    """
    plan = _plan(items, arrivals, duration_s)
    loop = _Loop(door, timeout_s, live or Live(), max_in_flight, duration_s)
    with _no_collection():
        partial = await loop.run(plan)
    return Run(tuple(sorted(loop.live.records, key=lambda record: record.number)), duration_s, partial)


def _plan(items: Iterable[Item], arrivals: Iterable[float], duration_s: float) -> list[tuple[float, list[Item]]]:
    """(due, turns) in order of time."""
    sessions: dict[str, list[Item]] = {}
    times = iter(arrivals)
    plan: list[tuple[float, list[Item]]] = []
    for item in items:
        if item.session and item.session in sessions:
            sessions[item.session].append(item)
            continue
        due = item.at if item.at is not None else next(times, None)
        if due is None or (due >= duration_s and item.at is None):
            break
        if due >= duration_s:
            continue
        turns = [item]
        if item.session:
            sessions[item.session] = turns
        plan.append((due, turns))
    return sorted(plan, key=lambda entry: entry[0])


class _Loop:
    def __init__(self, door: Door, timeout_s: float, live: Live, max_in_flight: int, duration_s: float) -> None:
        self._door = door
        self._timeout_s = timeout_s
        self.live = live
        self._max_in_flight = max_in_flight
        self._duration_s = duration_s
        self._numbers = itertools.count()
        self._nobody = 0  # answers in a row that found no server
        self._begun = 0.0

    async def run(self, plan: list[tuple[float, list[Item]]]) -> str:
        self._begun = perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        self.live.due = len(plan)
        try:
            for due, turns in plan:
                await asyncio.sleep(max(0.0, due - self._now()))
                if self._nobody >= GONE_AFTER:
                    return f"the server is gone: {GONE_AFTER} requests in a row found nobody there"
                task = asyncio.create_task(self._session(due, turns))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return ""

    def _now(self) -> float:
        return perf_counter() - self._begun

    async def _session(self, due: float, turns: list[Item]) -> None:
        said: list[int] = []
        for number, turn in enumerate(turns):
            if number:
                due = self._now() + turn.think_s
            if due >= self._duration_s:
                return
            await asyncio.sleep(max(0.0, due - self._now()))
            said += turn.tokens
            answer = await self._request(due, turn, said)
            if answer.outcome != "ok":
                return  # whoever gets no answer does not go on talking
            said += answer.tokens

    async def _request(self, due: float, item: Item, prompt: list[int]) -> Answer:
        number, sent = next(self._numbers), self._now()
        times: list[float] = []

        def on_tokens(count: int) -> None:
            times.extend([self._now()] * count)

        if self.live.in_flight >= self._max_in_flight:
            answer = Answer("refused", GENERATOR_FULL)
        else:
            self.live.sent += 1
            self.live.in_flight += 1
            try:
                answer = await self._door.ask(prompt, item.output_tokens, self._timeout_s, on_tokens)
            finally:
                self.live.in_flight -= 1
        record = Record(
            number=number,
            session=item.session,
            scheduled=due,
            sent=sent,
            token_times=tuple(times),
            ended=self._now(),
            outcome=answer.outcome,
            reason=answer.reason,
            prompt_tokens=answer.prompt_tokens or len(prompt),
            output_tokens=len(times),
            asked_tokens=item.output_tokens,
            cached_tokens=answer.cached_tokens,
            stages_ms=answer.stages_ms,
            prefill_worker=answer.prefill_worker,
            decode_worker=answer.decode_worker,
            retries=answer.retries,
            transport=answer.transport,
            kv_bytes=answer.kv_bytes,
            kv_blocks=answer.kv_blocks,
            recomputed_tokens=answer.recomputed_tokens,
        )
        self.live.records.append(record)
        self._nobody = self._nobody + 1 if answer.reason == NO_SERVER else 0
        return answer


@contextmanager
def _no_collection() -> Any:
    """A collection stops every stream at once: with thousands of them it is what a generator's lag is made of."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
