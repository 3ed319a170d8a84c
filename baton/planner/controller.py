"""Looks at the cluster, asks the planner, and acts: one look every `planner.interval_s`, while this process leads.

Who leads has a lease in the registry. Sizes are written by a script that checks the lease and what is wanted now, at one moment, so who
lost the lease changes nothing. A role is changed by a call to a worker, which cannot ask the registry: the call is made only if it must end
before the lease does. When the registry or the routers do not answer, nothing changes.

A change is noted in the registry before it is made, and while it lives. Who leads next goes on with it: so nothing is asked for twice, and
what a dead planner asked for, and does not come, is taken back.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from baton.clock import loop_time
from baton.cluster.config_planner import PlannerConfig
from baton.cluster.errors import BatonError
from baton.cluster.metrics import Book
from baton.cluster.records import ROLES, RoleName, WorkerRecord
from baton.cluster.registry import Registry, RegistryUnavailable
from baton.planner.capacity import Model, PoolSizes
from baton.planner.change import Change, ChangeState, Resize, Seen, Worker
from baton.planner.decide import victims
from baton.planner.demand import Interval, together
from baton.planner.memory import Decision, PlannerRules
from baton.planner.meter import Meter
from baton.planner.planner import Planner
from baton.planner.records import decision_note, encode, outcome_note, reason_of
from baton.planner.sizing import Lease, RegistrySizing, Sizing

log = logging.getLogger(__name__)
RENEW_SHARE = 1 / 3  # of the lease
CALL_S = 8.0  # for a worker to prove itself and to change its role
SPARE_S = 0.5  # between the end of such a call and that of the lease
NOTED_S = 5.0  # how old the note of a change that lives may be
BACK = 1000  # intervals; routers whose clock was set back so far start again


class Doors(Protocol):
    """The routers' doors."""

    async def counts(self) -> list[Interval]:
        """What all routers counted lately. Raises BatonError."""

    async def set_roles(self, worker: str, roles: Sequence[RoleName], timeout_s: float) -> None:
        """Lets a worker serve these roles. Raises BatonError; after `timeout_s` nothing is changed any more."""


def rules_of(config: PlannerConfig) -> PlannerRules:
    return PlannerRules(
        PoolSizes(config.least_prefill, config.least_decode), PoolSizes(config.most_prefill, config.most_decode), config.budget,
        target=config.target, flips=config.flips, margin=config.margin, spares=config.spares, cooldown_s=config.cooldown_s,
        hold_s=config.hold_s, start_timeout_s=config.start_timeout_s, flip_timeout_s=config.flip_timeout_s, cold_s=config.cold_s,
        stale_s=config.stale_s,
    )  # fmt: skip


class Controller:
    def __init__(
        self,
        config: PlannerConfig,
        model: Model,
        registry: Registry,
        doors: Doors,
        who: str,
        wall_clock: Callable[[], float],
        sizing: Sizing | None = None,
        meter: Meter | None = None,
    ) -> None:
        """`who`: a name that no other process has. `wall_clock`: for people; seconds since the epoch. `sizing`: by default, a supervisor
        reads the sizes in the registry."""
        self._config, self._model = config, model
        self._registry, self._doors = registry, doors
        self._sizing = sizing or RegistrySizing(registry)
        self._meter = meter or Meter(Book("planner"))
        self._who, self._wall_clock = who, wall_clock
        self._term, self._until = 0, 0.0  # of the lease, and when it ends
        self.planner = self._fresh()
        self._takes_up = False  # what a planner before has noted was not read yet
        self._noted: tuple[Change, float] | None = None  # the note in the registry, and when it was made
        self._since: dict[tuple[str, int, tuple[RoleName, ...]], float] = {}
        self._newest: tuple[int, float] | None = None  # the last count, and when it was first seen
        self._reason = ""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_lease())
            group.create_task(self._run_looks())

    async def resign(self) -> None:
        """Lets another planner lead at once."""
        if self._term:
            with contextlib.suppress(RegistryUnavailable):  # it ends by itself
                await self._registry.resign(self._who, self._term)
        self._term = 0

    @property
    def leads(self) -> bool:
        return self._config.dry_run or (self._term > 0 and loop_time() < self._until)

    async def renew(self) -> None:
        """Takes or keeps the lease. While the registry is away, it runs out."""
        asked = loop_time()  # the lease begins later than this
        try:
            term = await self._registry.lead(self._who, self._config.lease_s, self._term)
        except RegistryUnavailable as error:
            log.debug("the lease was not renewed: %s", error)
            return
        if term != self._term:
            log.info("this planner leads" if term else "another planner leads")
            self.planner, self._takes_up, self._noted = self._fresh(), True, None
        self._term, self._until = term, asked + self._config.lease_s

    async def look(self) -> Decision | None:
        """One look, and what follows from it. None: this planner does not lead, or cannot see."""
        self._meter.leads(self.leads)
        if not self.leads:
            return None
        try:
            seen, intervals = await self._see()
            if intervals and self.planner.load.last is not None and intervals[-1].number < self.planner.load.last - BACK:
                self.planner, self._takes_up = self._fresh(), True
            await self._take_up(seen)
        except (RegistryUnavailable, BatonError) as error:
            log.debug("cannot see the cluster: %s", error)
            self._meter.refused("cannot see")
            return None
        before = self.planner.memory.change
        decision = self.planner.look(seen, intervals, loop_time())
        last = intervals[-1] if intervals else None
        self._meter.looked(seen, decision, last)
        done = decision.action is None or await self._act(decision, seen)
        if not done and decision.undoes and isinstance(decision.action, Resize):
            self.planner.memory = replace(self.planner.memory, change=before)  # the wish still stands
        await self._note()
        await self._tell(decision, last, before is not self.planner.memory.change)
        return decision

    async def _run_lease(self) -> None:
        while not self._config.dry_run:
            await self.renew()
            await asyncio.sleep(self._config.lease_s * RENEW_SHARE)

    async def _run_looks(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        """Seconds until the next look; fewer while something changes."""
        change = self.planner.memory.change
        return min(1.0, self._config.interval_s) if change is not None and change.alive else float(self._config.interval_s)

    def _fresh(self) -> Planner:
        return Planner(self._model, rules_of(self._config), float(self._config.interval_s), self._config.period_s)

    async def _see(self) -> tuple[Seen, list[Interval]]:
        """Raises RegistryUnavailable, BatonError."""
        members, starts, wanted = await asyncio.gather(self._registry.members(), self._registry.starts(), self._sizing.wanted())
        counts = await self._doors.counts()
        now = loop_time()
        if counts and (self._newest is None or counts[-1].number != self._newest[0]):
            self._newest = counts[-1].number, now
        names = {record.name for record in members}
        coming = {(one.name, one.pool) for one in starts if one.name not in names}
        unproven = {record.name for record in members if record.unproven and record.state == "ready"}  # they serve nobody yet, either
        coming |= {(record.name, record.pool) for record in members if record.name in unproven}
        starting: dict[str, int] = {pool: sum(its == pool and self._sizing.in_pool(name, pool) for name, its in coming) for pool in ROLES}
        workers = tuple(self._worker(record, now) for record in members if record.name not in unproven)
        self._since = {key: at for key, at in self._since.items() if key[0] in names}
        self.planner.model = _fitting(self._model, members)
        at = self._newest[1] if self._newest is not None else -1e9
        return Seen(at, workers, wanted, starting), together(counts, self._config.interval_s)

    def _worker(self, record: WorkerRecord, now: float) -> Worker:
        serves = record.serving
        since = self._since.setdefault((record.name, record.incarnation, serves), now)
        for key in [key for key in self._since if key[0] == record.name and key[1:] != (record.incarnation, serves)]:
            del self._since[key]
        pool = record.pool if self._sizing.in_pool(record.name, record.pool) else ""
        load, draining = record.load, record.state == "draining"
        return Worker(record.name, pool, serves, since, draining, load.running + load.waiting, load.waiting_tokens)

    async def _take_up(self, seen: Seen) -> None:
        """Once, before the first look: goes on with the change that the planner before has noted. Raises RegistryUnavailable."""
        if not self._takes_up or self._config.dry_run:
            return
        note = await self._registry.noted_change()
        self._takes_up = False
        if note is None:
            return
        try:
            change = Change.of_note(note, loop_time())
        except ValueError as error:
            log.warning("what a planner before has noted is not read: %s", error)
            return
        self.planner.take_up(change, seen, loop_time())
        if self.planner.memory.change is not None:
            log.info("takes up change %d of a planner before: %s", change.number, change.action)

    async def _act(self, decision: Decision, seen: Seen) -> bool:
        """Returns whether it was done."""
        action, planner = decision.action, self.planner
        assert action is not None
        if self._config.dry_run:
            planner.refused(loop_time(), "dry run")
            return False
        try:
            if not decision.undoes and not await self._note():
                refused = "this planner does not lead any more, or the registry does not answer"
            elif isinstance(action, Resize):
                term = self._term
                lease = Lease(self._who, term, lambda: self._term == term and loop_time() < self._until)
                refused = await self._sizing.resize(lease, action, [worker.name for worker in victims(action, seen)])
            else:
                refused = await self._flip(action.worker, action.to)
        except (RegistryUnavailable, BatonError) as error:
            # The call may have been done all the same. The next look sees what is there.
            refused = str(error)
        if refused:
            log.warning("%s: refused: %s", action, refused)
            self._meter.refused("not done")
            planner.refused(loop_time(), refused)
        else:
            planner.acted(loop_time())
        return not refused

    async def _note(self) -> bool:
        """Notes the change for the planner that may take over, if the note is not as it should be. Returns whether this planner leads."""
        change, now = self.planner.memory.change, loop_time()
        if change is None or self._config.dry_run:
            return True
        if self._noted is not None:
            noted, at = self._noted
            same = (noted.number, noted.alive) == (change.number, change.alive)
            if same and (not change.alive or now - at < NOTED_S):
                return True
        try:
            leads = await self._registry.note_change(self._who, self._term, change.noted(now))
        except RegistryUnavailable as error:
            log.debug("a change was not noted: %s", error)
            return False
        self._noted = (change, now) if leads else None
        return leads

    async def _flip(self, worker: str, to: RoleName) -> str:
        left = min(CALL_S, self._until - loop_time() - SPARE_S)
        if left <= 0:
            return "the lease ends too soon"
        await self._doors.set_roles(worker, (to,), left)
        return ""

    async def _tell(self, decision: Decision, interval: Interval | None, changed: bool) -> None:
        """Tells the log, and `baton planner --why`. If the registry does not take it, nothing changes."""
        planner, notes = self.planner, list[dict[str, Any]]()
        change = planner.memory.change
        reason = reason_of(decision)
        waits = change is not None and change.alive and decision.action is None  # what it waits for was told when it was decided
        if decision.action is not None or (reason != self._reason and not waits):
            number = change.number if change is not None and decision.action is not None else 0
            notes.append(decision_note(decision, planner.load.forecast, number, self._wall_clock(), self._who, self._config.dry_run))
            told = f"{decision.action}: {decision.why}" if decision.action is not None else decision.why
            log.info("%s%s", "would: " if self._config.dry_run and decision.action is not None else "", told)
        self._reason = reason
        if (outcome := planner.outcome(interval, loop_time())) is not None and not self._config.dry_run:
            self._meter.ended(outcome)
            notes.append(outcome_note(outcome, self._wall_clock(), self._who))
            log.info(
                "change %d %s after %.1f s%s", outcome.number, outcome.state, outcome.seconds, f": {outcome.why}" if outcome.why else ""
            )
        if changed and change is not None and change.state is not ChangeState.PROPOSED:
            log.debug("change %d is %s", change.number, change.state.value)
        for note in notes:
            try:
                await self._registry.note_plan(encode(note), self._config.keep)
            except RegistryUnavailable as error:
                log.debug("a decision was not noted: %s", error)


def _fitting(model: Model, members: Sequence[WorkerRecord]) -> Model:
    """The model with the sizes that the workers tell."""
    places = [record.max_num_seqs for record in members if record.max_num_seqs]
    tokens = [record.kv_blocks * record.block_size for record in members if record.kv_blocks]
    return replace(model, max_num_seqs=min(places, default=model.max_num_seqs), kv_tokens=min(tokens, default=model.kv_tokens))
