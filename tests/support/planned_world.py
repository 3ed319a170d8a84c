"""A cluster that a planner is given, in virtual time and without a request: workers that start, drain and change roles after so much time,
and counts of requests that follow from a model. It notes each promise of the planner that was broken, by its own account of workers."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.cluster.records import ROLES, Pools, RoleName
from baton.planner.capacity import Effect, Model, PoolSizes
from baton.planner.change import Action, Change, Flip, Seen, Worker
from baton.planner.demand import Demand, Interval
from baton.planner.memory import Decision, Memory, PlannerRules
from baton.planner.planner import Planner
from baton.profile.file import Profile
from baton.profile.models import Fitted

EVERY_S = 5.0
NAP_S = 40.0  # for which a planner may be stopped
LATE_S = 20.0  # without a look, after which a planner looks once more before it acts
# A worker computes 10,000 tokens of prompts per second; 32 sequences decode with 20 ms a token.
STEP = {"step": 0.004, "tokens": 1e-4, "decodes": 5e-4}
PROFILE = Profile("test", "", "", {}, 1000.0, "sum", {"step": Fitted(STEP), "start": Fitted({"base": 10.0})})
MODEL = Model(PROFILE, ttft_s=0.5, tpot_s=0.02, max_num_seqs=64, kv_tokens=100_000)
CHAT = Demand(10.0, 400.0, 400.0, 100.0)
RULES = PlannerRules(
    PoolSizes(1, 1), PoolSizes(8, 8), budget=8, cooldown_s=15, hold_s=60, start_timeout_s=60, flip_timeout_s=20, cold_s=5, stale_s=20
)


def heavy(role: str, rate: float = 10.0) -> Demand:
    return Demand(rate, 2000.0, 2000.0, 20.0) if role == "prefill" else Demand(rate, 200.0, 200.0, 300.0)


@dataclass
class World:
    """`starts`, `flips`: whether workers that are asked for come, and whether those that should change do."""

    planner: Planner
    demand: Callable[[float], Demand]
    pools: Pools = field(default=Pools(2, 2))
    noise: float = 0.0
    seed: int = 0
    start_s: float = 10.0
    drain_s: float = 8.0
    flip_s: float = 1.0
    cold_s: float = 5.0  # how long a new worker serves badly
    starts: bool = True
    flips: bool = True
    liars: frozenset[str] = frozenset()  # workers that do not prove themselves
    truth: float = 1.0  # tokens take so many times as long as the model says
    hopeless: float = 0.0  # share of requests that miss an objective whatever serves
    stale: tuple[float, float] | None = None  # from when until when no figures come
    naps: frozenset[int] = frozenset()  # looks before which the planner is stopped for a while
    deaths: frozenset[int] = frozenset()  # looks at which the planner dies
    dies: str = "after"  # its act, or before it
    takes_up: bool = True  # whether the next planner goes on with what the dead one noted
    now: float = 0.0
    wanted: Pools = field(init=False)
    broken: list[str] = field(default_factory=list)
    actions: list[tuple[float, Action]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    sizes: list[PoolSizes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.wanted = self.pools
        self._workers = {
            f"{role}-{i}": Worker(f"{role}-{i}", role, (role,), -1e3) for role in ROLES for i in range(getattr(self.pools, role))
        }
        self._next = {role: getattr(self.pools, role) for role in ROLES}
        self._due: list[tuple[float, str, Worker]] = []  # when, what, which worker
        self._counted = self.now
        self._noted: bytes | None = None
        self._looks = self._vacant = 0
        self._looked: float | None = None  # when this planner did
        self._waits: dict[RoleName, float] = {}  # since when a pool has less workers than are wanted
        self._flipping: dict[str, float] = {}  # until when nobody else may flip the worker

    def run(self, seconds: float) -> "World":
        end = self.now + seconds
        while self.now < end:
            self.step()
        return self

    def step(self) -> None:
        self.now += EVERY_S
        if not self._vacant and self._looks + 1 in self.naps:
            self.now += NAP_S
        self._pass()
        acts, rules = self._leads() and self._look(), self.planner.rules
        self._judge_wishes(rules, acts)
        self.sizes.append(self.seen().sizes)
        if self.sizes[-1].decode < 1 or (rules.least.prefill and self.sizes[-1].prefill < 1):
            self.broken.append(f"{self.now}: {self.sizes[-1]} serves")
        if self.alive > rules.budget:
            self.broken.append(f"{self.now}: {self.alive} workers are alive, of {rules.budget}")

    def _leads(self) -> bool:
        """Nobody does until the lease of a dead planner is over."""
        if not self._vacant:
            return True
        self._vacant -= 1
        if not self._vacant and self.takes_up and self._noted is not None:
            self.planner.take_up(Change.of_note(self._noted, self.now), self.seen(), self.now)
        return not self._vacant

    def _look(self) -> bool:
        """Returns whether it could act on what it saw."""
        rules, intervals = self.planner.rules, self._intervals(self.seen())
        seen, before = self.seen(), self.planner.memory
        decision = self.planner.look(seen, intervals, self.now)
        self.decisions.append(decision)
        self._looks += 1
        dies = self._looks in self.deaths
        late, self._looked = self._looked is not None and self.now - self._looked > LATE_S, self.now
        if intervals and self._cold(seen):
            self._judge_lesson(before)
        if decision.action is not None:
            if late:
                self.broken.append(f"{self.now}: {decision.action} at the first look after a nap")
            self._judge(decision, seen, rules)
            if not decision.undoes:
                self._note()
            if not dies or self.dies == "after":
                self.actions.append((self.now, decision.action))
                self._act(decision.action)
        if dies:
            self.planner, self._vacant, self._looked = Planner(self.planner.model, rules, EVERY_S), 2, None
            return False
        self._note()
        self.planner.outcome(None, self.now)
        return not late and self.now - seen.at <= rules.stale_s

    def _act(self, action: Action) -> None:
        if isinstance(action, Flip) and action.worker in self.liars:
            self.planner.refused(self.now, "it lies")
        else:
            self._obey(action)
            self.planner.acted(self.now)

    def _note(self) -> None:
        change = self.planner.memory.change
        if change is not None:
            self._noted = change.noted(self.now)

    def seen(self) -> Seen:
        starting: dict[str, int] = {role: sum(what == "start" and worker.pool == role for _, what, worker in self._due) for role in ROLES}
        return Seen(self._counted, tuple(self._workers.values()), self.wanted, starting)

    def effect(self, demand: Demand, sizes: PoolSizes) -> Effect:
        return MODEL.effect(sizes, replace(demand, uncached=demand.uncached * self.truth, output=demand.output * self.truth))

    @property
    def alive(self) -> int:
        return len(self._workers) + sum(what == "start" for _, what, _ in self._due)

    def _pass(self) -> None:
        for due in [each for each in self._due if each[0] <= self.now]:
            self._due.remove(due)
            at, what, worker = due
            if what == "start":
                self._workers[worker.name] = replace(worker, since=at)
            elif what == "end":
                del self._workers[worker.name]
            elif worker.name in self._workers:
                self._workers[worker.name] = replace(self._workers[worker.name], serves=worker.serves, since=at)

    def _intervals(self, seen: Seen) -> list[Interval]:
        if self.stale is not None and self.stale[0] <= self.now < self.stale[1]:
            return []
        self._counted = self.now
        asked = self.demand(self.now)
        rate = max(0.0, asked.rate * (1 + self.noise * self.rng.uniform(-1, 1)))
        arrived = round(rate * EVERY_S)
        told = self.effect(replace(asked, rate=rate), seen.sizes)
        if self._cold(seen):
            told = replace(told, tpot=0.0)  # who compiles and loads serves nobody well
        first, met = round(arrived * told.ttft), round(arrived * told.attainment * (1 - self.hopeless))
        return [
            Interval(
                round(self.now / EVERY_S), EVERY_S, arrived, arrived, round(arrived * asked.prompt), round(arrived * asked.uncached),
                arrived, round(arrived * asked.output), met, {"prefill_wait": arrived - first, "decode": first - met},
            )
        ]  # fmt: skip

    def _cold(self, seen: Seen) -> bool:
        return any(self.now - worker.since < self.cold_s for worker in seen.workers)

    def _obey(self, action: Action) -> None:
        if isinstance(action, Flip):
            if self.flips:
                worker = self._workers[action.worker]
                self._workers[action.worker] = replace(worker, serves=(action.to,), since=self.now + self.flip_s)
            return
        self.wanted = action.pools
        for role in ROLES:
            self._reconcile(role, getattr(action.pools, role))

    def _reconcile(self, pool: RoleName, size: int) -> None:
        seen = self.seen()
        pending = [each for each in self._due if each[1] == "start" and each[2].pool == pool]
        for _ in range(size - len(seen.of(pool)) - len(pending)):
            name = f"{pool}-{self._next[pool]}"
            self._next[pool] += 1
            when = self.now + self.start_s if self.starts else float("inf")
            self._due.append((when, "start", Worker(name, pool, (pool,), when)))
        surplus = max(0, len(seen.of(pool)) + len(pending) - size)
        for late in pending[len(pending) - min(surplus, len(pending)) :]:
            self._due.remove(late)
            surplus -= 1
        for worker in seen.of(pool)[::-1][:surplus]:
            self._workers[worker.name] = replace(worker, draining=True)
            self._due.append((self.now + self.drain_s, "end", worker))

    def _judge(self, decision: Decision, seen: Seen, rules: PlannerRules) -> None:
        action = decision.action
        if isinstance(action, Flip) and not decision.undoes:
            if self._flipping.get(action.worker, 0.0) > self.now:
                self.broken.append(f"{self.now}: {action} while another flip of it may be under way")
            if not self.flips:
                self._flipping[action.worker] = self.now + rules.flip_timeout_s
        if seen.at < self.now - rules.stale_s:
            self.broken.append(f"{self.now}: {action} on figures from {seen.at}")

    def _judge_lesson(self, before: Memory) -> None:
        """What was counted while a worker was cold."""
        after = self.planner.memory
        if after.misses or (after.pressure, after.reach) != (before.pressure, before.reach):
            self.broken.append(f"{self.now}: a cold worker taught {after.misses}, {after.pressure}, {after.reach}")

    def _judge_wishes(self, rules: PlannerRules, acts: bool) -> None:
        """`acts`: a planner could have taken back what does not come. One that takes over counts on from the last note."""
        dead = {look for look in self.deaths if look <= self._looks}
        patience_s = rules.start_timeout_s + 3 * EVERY_S * len(dead) + NAP_S * len(dead & self.naps)
        for pool in ROLES:
            if getattr(self.wanted, pool) <= len(self.seen().of(pool)):
                self._waits.pop(pool, None)
            elif self.now - self._waits.setdefault(pool, self.now) > patience_s and acts:
                self.broken.append(f"{self.now}: the {pool} pool waits since {self._waits[pool]}")

    def reversals(self, within_s: float) -> list[str]:
        """Pairs of actions of which the second takes back the first soon after."""
        found = []
        for number, (at, one) in enumerate(self.actions):
            for later, other in self.actions[number + 1 :]:
                if later - at < within_s and directions(one) & {(what, -step) for what, step in directions(other)}:
                    found.append(f"{at:g}: {one}; {later:g}: {other}")
        return found


def directions(action: Action) -> set[tuple[str, int]]:
    """What it changes, and whether to more or to less."""
    if isinstance(action, Flip):
        return {("flip", 1 if action.to == "prefill" else -1)}
    steps = {role: getattr(action.pools, role) - getattr(action.before, role) for role in ROLES}
    return {(role, 1 if step > 0 else -1) for role, step in steps.items() if step}
