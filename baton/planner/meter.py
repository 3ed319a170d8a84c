"""The planner's numbers for /metrics."""

from collections.abc import Mapping

from baton.clock import loop_time
from baton.cluster.metric_table import Number
from baton.cluster.metrics import Book, Key
from baton.cluster.records import ROLES
from baton.planner.change import Seen
from baton.planner.demand import Interval
from baton.planner.memory import Decision
from baton.planner.planner import Outcome


class Meter:
    def __init__(self, book: Book) -> None:
        self._refusals = book.counters("baton_planner_refusals_total")
        self._changes = book.counters("baton_planner_changes_total")
        self._leads = False
        self._seen: Seen | None = None
        self._decision: Decision | None = None
        self._interval: Interval | None = None
        book.read("baton_planner_leads", lambda: int(self._leads))
        book.read("baton_planner_load_requests_per_second", self._load)
        book.read("baton_planner_workers", self._workers)
        book.read("baton_planner_attainment_ratio", self._attainment)
        book.read("baton_planner_pressure_ratio", self._pressure)
        book.read("baton_planner_change_age_seconds", self._age)

    def leads(self, leads: bool) -> None:
        self._leads = leads
        if not leads:
            self._seen = self._decision = self._interval = None  # who leads tells them

    def looked(self, seen: Seen, decision: Decision, interval: Interval | None) -> None:
        self._seen, self._decision, self._interval = seen, decision, interval
        for kind in dict.fromkeys(decision.refused):
            self._refusals[kind].inc()

    def refused(self, kind: str) -> None:
        self._refusals[kind].inc()

    def ended(self, outcome: Outcome) -> None:
        self._changes[outcome.action, outcome.state].inc()

    def _load(self) -> Mapping[Key, Number]:
        told: dict[Key, Number] = {}
        if self._decision is not None:
            told["forecast"] = self._decision.demand.rate
        if self._interval is not None:
            told["came"] = self._interval.arrived / self._interval.seconds
        return told

    def _workers(self) -> Mapping[Key, Number]:
        if self._seen is None or self._decision is None:
            return {}
        told: dict[Key, Number] = {}
        for role in ROLES:
            told[role, "serving"] = getattr(self._seen.sizes, role)
            told[role, "starting"] = self._seen.starting.get(role, 0)
            if self._seen.wanted is not None:
                told[role, "wanted"] = getattr(self._seen.wanted, role)
            if self._decision.need is not None:
                told[role, "needed"] = getattr(self._decision.need, role)
        return told

    def _attainment(self) -> Mapping[Key, Number]:
        told: dict[Key, Number] = {}
        if self._decision is not None and self._decision.now is not None:
            told["now"] = self._decision.now.attainment
        if self._interval is not None and self._interval.attainment is not None:
            told["came"] = self._interval.attainment
        return told

    def _pressure(self) -> Mapping[Key, Number]:
        return {} if self._decision is None else dict(zip(ROLES, self._decision.memory.pressure, strict=True))

    def _age(self) -> Number:
        change = self._decision.memory.change if self._decision is not None else None
        return loop_time() - change.began if change is not None and change.alive else 0.0
