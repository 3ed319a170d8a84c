"""Where requests wait until they may be served. `admission` decides; the gate waits, and takes the measurements for the decision."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

from baton.clock import loop_time
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from router.admission import Admission, Admitted, Due, NotAdmitted, Queued
from router.journal import JournalEntry
from router.policy import places
from router.predictions import CheckedPrediction
from router.request import Trace
from router.served import ServedModel
from router.validate import Ask, AskSampling

LOOK_S = 0.02  # between two checks of the waiting requests: workers come and go, and a deadline passes without an event
LEAST = Ask(sampling=AskSampling(max_tokens=1))  # that a request can ask for
JUDGE_S = 0.005  # the whole queue is judged at most this often, for many requests may end at once


class Expected(NamedTuple):
    """How long a request that waits was expected to wait."""

    trace: Trace
    wait_s: float
    since: float


class Gate:
    def __init__(
        self,
        admission: Admission,
        model: ServedModel,
        config: RouterConfig,
        objectives: Mapping[str, float],
        clock: Callable[[], float] = loop_time,
    ) -> None:
        """`objectives`: seconds; only "ttft" and "e2e" are used. `clock`: the clock of the requests' deadlines and stopwatches."""
        self._admission = admission
        self._model = model
        self._config = config
        self._objectives = objectives
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._expected: dict[str, Expected] = {}
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._judged_at = -math.inf
        self._places: tuple[int, int | None] = (-1, None)  # a shape of the view, and what its workers take

    @property
    def idle(self) -> bool:
        return not self._waiting and self._admission.inflight == 0 and self._admission.queued == 0

    @asynccontextmanager
    async def place(self, entry: JournalEntry, ask: Ask, deadline: float) -> AsyncIterator[None]:
        """Holds the places of a request that is served. Raises DEADLINE, and SATURATED with the time after which a retry can succeed."""
        slot = self._name(ask)
        turn = self._waiting[slot] = asyncio.get_running_loop().create_future()
        try:
            await self._enter(slot, turn, ask, self._due(entry.trace.watch.start, ask, deadline), entry.trace)
            began = self._clock()
            try:
                yield
            except BatonError as error:
                if error.reason is Reason.DEADLINE:
                    self._admission.note_failure(self._clock() - began)
                raise
            self._note_pace(entry, began)
        finally:
            del self._waiting[slot]
            self._expected.pop(slot, None)
            if self._clock() - self._judged_at >= JUDGE_S:
                self._drop_hopeless()
            self._let_in(self._admission.leave(slot, self._clock()))

    def check(self, entry: JournalEntry, ask: Ask, deadline: float) -> None:
        """Raises what `place` would raise at once. Under overload most requests end here: nothing has been prepared for them, and nobody
        else has been asked about them."""
        entry.trace.step = "admission"
        self._judge(ask, self._due(entry.trace.watch.start, ask, deadline))

    def refusal(self, priority: int, deadline: float) -> BatonError | None:
        """What `check` raises for every request of this priority, whatever else it asks. None: it may be let in. One that asks for much is
        not held to the objective of its last token if it cannot meet that, so none is here."""
        due = replace(self._due(self._clock(), LEAST, deadline), end=math.inf)
        try:
            self._judge(replace(LEAST, priority=priority), due)
        except BatonError as refusal:
            return refusal
        return None

    def _judge(self, ask: Ask, due: Due) -> None:
        """Raises the refusal of one that would be late."""
        now = self._clock()
        self._let_in(self._admission.resize(self._count_places(), now))
        if self._admission.late_by(ask.priority, now, due, ask.sequences) is not None:
            self._ask(self._name(ask), ask, due, now)

    async def _enter(self, slot: str, turn: "asyncio.Future[None]", ask: Ask, due: Due, trace: Trace) -> None:
        now = self._clock()
        self._let_in(self._admission.resize(self._count_places(), now))
        answer = self._ask(slot, ask, due, now)
        if isinstance(answer, Admitted):
            return
        if answer.wait_s is not None:
            self._expected[slot] = Expected(trace, answer.wait_s, now)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        left, longest = due.deadline - now, self._config.queue_timeout_s
        try:
            async with asyncio.timeout(min(left, longest)):
                await turn
        except TimeoutError:
            self._note_wait(slot)
            if left <= longest:
                raise BatonError(Reason.DEADLINE, "the deadline of the request passed while it waited for admission") from None
            after = self._admission.retry_after(self._clock())
            raise BatonError(Reason.SATURATED, f"waited {longest:g} s for admission", retry_after=after) from None

    def _ask(self, slot: str, ask: Ask, due: Due, now: float) -> Admitted | Queued:
        """Raises SATURATED."""
        answer = self._admission.enter(slot, ask.priority, now, due, ask.sequences)
        if isinstance(answer, NotAdmitted):
            message = "more requests wait than can be served in time" if answer.late else "too many requests are being served and waiting"
            raise BatonError(Reason.SATURATED, message, retry_after=answer.retry_after)
        for displaced in answer.displaced if isinstance(answer, Queued) else ():
            self._drop(displaced, "made room for a request of a better priority", now)
        return answer

    def _name(self, ask: Ask) -> str:
        return f"{ask.request_id}#{next(self._numbers)}"  # callers may give two requests the same id

    def _due(self, began: float, ask: Ask, deadline: float) -> Due:
        asked = ask.sampling
        limits = {name: began + limit for name, limit in self._objectives.items()}
        most = asked.default_max_tokens if asked.max_tokens is None else asked.max_tokens
        left = max(1, most - len(ask.output_so_far))
        never = float("inf")
        return Due(deadline, limits.get("ttft", never), limits.get("e2e", never), left)

    def _note_pace(self, entry: JournalEntry, began: float) -> None:
        """Measures the pace from a request that ends well. One that runs out of time is a failure, and one that its client gave up does
        not count."""
        if entry.request is not None and entry.trace.first_at:
            self._admission.note_served(self._clock() - began, entry.trace.first_at - began, entry.request.made)

    def _look(self) -> None:
        self._timer = None
        self._drop_hopeless()
        self._let_in(self._admission.resize(self._count_places(), self._clock()))
        if self._admission.queued:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _count_places(self) -> int | None:
        if self._places[0] != self._model.members.shape:
            self._places = self._model.members.shape, places(self._model)
        return self._places[1]

    def _drop_hopeless(self) -> None:
        self._judged_at = now = self._clock()
        for slot in self._admission.drop_hopeless(now):
            self._note_wait(slot)
            self._drop(slot, "waited until it could no longer be served in time", now)

    def _drop(self, slot: str, why: str, now: float) -> None:
        turn = self._waiting.get(slot)  # None: it is leaving already
        if turn is not None and not turn.done():
            turn.set_exception(BatonError(Reason.SATURATED, why, retry_after=self._admission.retry_after(now)))

    def _let_in(self, slots: Iterable[str]) -> None:
        for slot in slots:
            if not self._waiting[slot].done():
                self._note_wait(slot)
                self._waiting[slot].set_result(None)

    def _note_wait(self, slot: str) -> None:
        """Its wait is over, or was too long. Of those who make room for others, nobody knows how long it would have been."""
        if expected := self._expected.pop(slot, None):
            expected.trace.predictions.append(CheckedPrediction("wait", expected.wait_s, self._clock() - expected.since))
