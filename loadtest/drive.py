"""The open loop: requests go out when they are due, whether or not the server has answered the earlier ones.

A closed loop waits for answers, so it slows down together with the server and never measures the queue in which users of an overloaded
server wait (Schroeder et al., NSDI 2006, "Open versus closed: a cautionary tale"). Here only the turns of one session wait for each other.
Each record says how late the generator itself was, and a run in which it was late is void.

Every request that becomes due leaves exactly one record, whatever happens to it. A run counts the requests that became due separately from
its records, so that a lost record is noticed (`summary.lost_reason`).
"""

import asyncio
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from loadtest.record import Outcome, Record
from loadtest.workload import Item

MAX_IN_FLIGHT = 20_000  # streams; the generator refuses requests beyond that, and counts them
GONE_AFTER = 20  # requests in a row that found no server
GENERATOR_FULL = "GENERATOR_FULL"
NO_SERVER = "NO_SERVER"
DEADLINE = "DEADLINE"  # whether client, router or worker notices it first
GRACE_S = 1.0  # the server has to keep the deadline; this long after it, the generator enforces it
MAX_REASON = 200  # characters of an exception that are kept


@dataclass(slots=True)
class Answer:
    """What a door reports about one request. `tokens` are carried into the next turn of a session."""

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


OnTokens = Callable[..., None]  # (how many tokens have arrived, and when each did, on the loop's clock, if that is not now)


class Door(Protocol):
    """An endpoint that generates. One implementation for each protocol."""

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: OnTokens) -> Answer:
        """Calls `on_tokens(n)` as n tokens arrive. The answer says what went wrong; an exception is recorded as a failed request."""


@dataclass(slots=True)
class Live:
    """What may be read during a run, and what an interrupted run leaves."""

    planned: int = 0  # sessions and single requests
    due: int = 0  # requests that became due so far
    in_flight: int = 0
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """`partial` says why a run stopped before the end of its plan; its records are those of the requests that ended."""

    records: tuple[Record, ...]
    due: int  # requests that became due
    duration_s: float  # from the start to the end of the time in which requests become due
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
    collects: bool = False,
) -> Run:
    """Sends the requests that are due within `duration_s` and waits for all answers, each for at most `timeout_s`.

    A single request and the first turn of a session take the next of `arrivals` (or their own `at`). A later turn is due when the previous
    answer has arrived and the turn's pause is over. A run ends early, as partial, when the server is gone. The clock is the event loop's,
    so a door may be in virtual time. `collects`: memory is collected during the run, too, where no time is lost by it.
    """
    plan = _plan(items, arrivals, duration_s)
    loop = _Loop(door, timeout_s, live or Live(), max_in_flight, duration_s)
    with nullcontext() if collects else _no_collection():
        partial = await loop.run(plan)
    return Run(tuple(sorted(loop.live.records, key=lambda record: record.number)), loop.live.due, duration_s, partial)


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._broke = ""  # an exception in a session's own code: a fault of the generator

    async def run(self, plan: list[tuple[float, list[Item]]]) -> str:
        """Returns why the run ended early, "" if it did not."""
        self._begun = asyncio.get_running_loop().time()
        self.live.planned = len(plan)
        try:
            for due, turns in plan:
                await asyncio.sleep(max(0.0, due - self._now()))
                if self._nobody >= GONE_AFTER:
                    return f"the server is gone: {GONE_AFTER} requests in a row found no server"
                self.live.due += 1
                task = asyncio.create_task(self._session(due, turns))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._broke

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke = f"the generator failed: {_told(error)}"

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._begun

    async def _session(self, due: float, turns: list[Item]) -> None:
        """The caller has counted the first turn as due."""
        said: list[int] = []
        for number, turn in enumerate(turns):
            if number:
                due = self._now() + turn.think_s
                if due >= self._duration_s:
                    return
                self.live.due += 1
            await asyncio.sleep(max(0.0, due - self._now()))
            said += turn.tokens
            answer = await self._request(due, turn, said)
            if answer.outcome != "ok":
                return  # a user who gets no answer does not continue the conversation
            said += answer.tokens

    async def _request(self, due: float, item: Item, prompt: list[int]) -> Answer:
        number, sent = next(self._numbers), self._now()
        times: list[float] = []

        def on_tokens(count: int, at: Sequence[float] = ()) -> None:
            times.extend([each - self._begun for each in at] if at else [self._now()] * count)

        if self.live.in_flight >= self._max_in_flight:
            answer = Answer("refused", GENERATOR_FULL)
        else:
            answer = await self._ask(item, prompt, on_tokens)
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

    async def _ask(self, item: Item, prompt: list[int], on_tokens: OnTokens) -> Answer:
        """If the door raises, the request failed. It must not disappear, or the arm that loses the most requests would look best."""
        self.live.in_flight += 1
        try:
            return await self._door.ask(prompt, item.output_tokens, self._timeout_s, on_tokens)
        except Exception as error:
            return Answer("failed", _told(error))
        finally:
            self.live.in_flight -= 1


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


@contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection stops all streams; with thousands of streams it would cause most of the generator's lag."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
