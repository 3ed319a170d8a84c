"""What one planner remembers from look to look: load, decisions, and what came of them. It acts on nothing and has no clock."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baton.planner.capacity import Effect, Model
from baton.planner.change import Change, ChangeState, Resize, Seen
from baton.planner.decide import begin, decide, note, take_up
from baton.planner.demand import Interval, LoadForecast
from baton.planner.learning import learn
from baton.planner.memory import Decision, Memory, PlannerRules
from baton.planner.present import present

LATE = 4.0  # times the time between two looks: what is remembered is then too old to act on


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a change: `attainment` in the first interval after it had settled (None: nothing was asked), and what was expected."""

    number: int
    action: str  # grow, shrink, flip
    state: str
    why: str
    seconds: float  # that it took
    attainment: float | None = None
    expected: float | None = None


class Planner:
    def __init__(self, model: Model, rules: PlannerRules, every_s: float, period_s: float = 0.0) -> None:
        """`every_s`: of an interval, and between two looks. `period_s`: in which load repeats; 0: it does not."""
        self.model, self.rules, self._every_s = model, rules, every_s
        # A worker that is started now serves only later: that is the load to size for.
        self.load = LoadForecast(1 + round(model.start_s / every_s), round(period_s / every_s))
        self.memory = Memory()
        self._looked: float | None = None
        self._told = True  # the outcome of the change
        self._expected: Effect | None = None  # of it
        self._owed: Outcome | None = None  # of one before that

    def look(self, seen: Seen, intervals: Iterable[Interval], now: float) -> Decision:
        """The caller takes the action of the decision, if it has one, and then says `acted` or `refused`."""
        fresh = [each for each in intervals if self.load.last is None or each.number > self.load.last]
        self.load.add(fresh)
        late_s = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        demand, rules = present(self.load.demand, seen, self.model), self.rules
        if late_s > LATE * self._every_s:
            # Loads and workers of that time were not seen. An unfinished change stays, so that it is not made twice.
            self.memory = replace(self.memory, needs=(), misses=())
            why = f"this planner did not look for {late_s:.0f} s"
            return Decision(None, why, seen.sizes, demand, seen.sizes, memory=self.memory, refused=("late",))
        for each in fresh:
            self.memory = learn(self.memory, each, seen, self.model, demand, rules, now)
        decision = decide(seen, demand, self.model, self.memory, rules, now)
        self.memory = decision.memory
        if decision.action is not None and not decision.undoes:
            self._owed = self._outcome(fresh[-1] if fresh else None)  # of the change before, which nobody has asked for yet
            self._told, self._expected = False, decision.expected
            self.memory = begin(self.memory, decision, rules, now)
        return decision

    def take_up(self, change: Change, seen: Seen, now: float) -> None:
        """Takes up, before the first look, what the planner that led before has noted."""
        self.memory = take_up(self.memory, change, seen, now)
        self._told = self.memory.change is None

    def acted(self, now: float) -> None:
        """What the last decision asked for was written."""
        if self.memory.change is not None and self.memory.change.state is ChangeState.PROPOSED:
            self.memory = note(self.memory, "act", now)

    def refused(self, now: float, why: str) -> None:
        """Nothing was changed, or a worker turned out bad."""
        if self.memory.change is not None and self.memory.change.alive:
            self.memory = note(self.memory, "refuse", now, why)

    def outcome(self, interval: Interval | None, now: float) -> Outcome | None:
        """The outcome of a change that is over, once: when a whole interval has passed since, or the next change begins. `interval`: the
        last one."""
        if self._owed is not None:
            owed, self._owed = self._owed, None
            return owed
        change = self.memory.change
        if change is not None and change.state is ChangeState.SETTLED and now - self.memory.ended < 2 * self._every_s:
            return None
        return self._outcome(interval)

    def _outcome(self, interval: Interval | None) -> Outcome | None:
        change = self.memory.change
        if change is None or change.alive or self._told:
            return None
        settled = change.state is ChangeState.SETTLED
        self._told = True
        expected = self._expected.attainment if settled and self._expected is not None else None
        came = interval.attainment if settled and interval is not None else None
        took = self.memory.ended - change.began
        return Outcome(change.number, change.action.kind, change.state.value, change.why, took, came, expected)

    @property
    def growing(self) -> bool:
        """Whether workers were asked for that are not there yet."""
        change = self.memory.change
        return change is not None and change.alive and isinstance(change.action, Resize) and change.action.grows
