"""Turns requests away at the door, before anything of them is read: while a flood stands, every request of a priority is refused whatever
else it asks, and most requests come then.

Nothing is decided here: the gate is asked about the least that a request can ask for. What it refuses then, it would refuse later, too,
after the request was read and checked. So under overload a request that is also wrong is told of the overload.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from baton.cluster.errors import BatonError
from router.gate import Gate
from router.journal import Journal
from router.served import ServedModel


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a door knows of a request before it reads it."""

    operation: str  # a name from OpenTelemetry's GenAI conventions
    request_id: str
    tenant: str
    traceparent: str
    tracestate: str
    priority: int = 0


class Doorman:
    def __init__(
        self,
        gate: Gate,
        journal: Journal,
        model: ServedModel,
        clock: Callable[[], float],
        clamp: Callable[[float | None], float],
        opens: Callable[[], bool],
    ) -> None:
        """`clamp`: how long a request with this timeout may take. `opens`: whether this router serves anybody, as one that drains does
        not."""
        self._gate, self._journal, self._model = gate, journal, model
        self._clock, self._clamp, self._opens = clock, clamp, opens

    def look(self, arrival: Arrival, timeout_s: float | None) -> BatonError | None:
        """The refusal of a request that has no chance, which is journaled then as any other; None: it is to be read."""
        within_s = self._clamp(timeout_s)
        if not self._opens() or self._model.served is None or within_s <= 0 or self._journal.degradation.declines(arrival.priority):
            return None  # it is refused for another reason
        deadline = self._clock() + within_s
        if (refusal := self._gate.refusal(arrival.priority, deadline)) is None:
            return None
        opened = self._journal.open(
            arrival.operation, arrival.request_id, arrival.traceparent, arrival.tenant, tracestate=arrival.tracestate
        )
        with suppress(BatonError), opened as entry:
            entry.deadline, entry.trace.step = deadline, "admission"
            raise refusal
        return refusal
