"""What to change now, and why. `decide` is a function of what is seen, of the load that is forecast, and of what was decided before.

In this order: a reason to do nothing (stale figures, a change that is not over, a supervisor that is not there) → what of an old change to
undo → the sizes that the load needs → the first of these that helps and that no invariant forbids:

    flip     a worker of a role with too many serves the one with too few: seconds, and no worker more
    grow     a pool
    shrink   a pool, if the role has had too many for `hold_s`

Every action passes `forbidden`, whatever led to it. It keeps three promises: the budget holds at each moment on the way, those that drain
and start counted; a worker that serves each role which must be served is there throughout; no role leaves its bounds.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median_high

from baton.cluster.records import ROLES, Pools, RoleName
from baton.planner.capacity import Effect, Model, PoolSizes
from baton.planner.change import Action, Change, ChangeState, Flip, Resize, Seen, Worker, sized
from baton.planner.demand import Demand
from baton.planner.learning import under_pressure
from baton.planner.memory import NONE, Alternative, Decision, Memory, Need, PlannerRules, Refusal, RoleHold, kind_of

AGAIN_S = 600.0  # before a worker is asked again that did not change its role when it should have
GAIN = 0.05  # of the attainment, at least, that a flip within a spent budget must bring
BACK_OFF, BACK_OFF_MOST_S = 2.0, 3600.0
BAD = 0.5  # attainment of sizes that must be left, whatever was changed last
REGRETTED = 4.0  # times the hold: workers that went so shortly before are missed
MOST_PATIENT = 4.0  # times `hold_s`
NEVER = -1e8  # `Seen.at` before the first figures
WRITTEN_S = 15.0  # by then, sizes that were asked for are the wanted ones
OTHER: dict[RoleName, RoleName] = {"prefill": "decode", "decode": "prefill"}


def decide(seen: Seen, demand: Demand, model: Model, memory: Memory, rules: PlannerRules, now: float) -> Decision:
    sizes = seen.sizes
    if hindered := hindrance(seen, rules, now):
        return Decision(None, hindered, sizes, demand, sizes, memory=memory, refused=(kind_of(hindered),))
    if seen.wanted is not None and (memory.awaited is None or memory.awaited[0] != seen.wanted):
        memory = replace(memory, awaited=(seen.wanted, now))
    memory = advance(memory, seen, rules, now)
    if memory.change is not None and memory.change.state is ChangeState.TIMED_OUT:
        return _undo(seen, demand, memory, rules, now)
    if demand.rate > 0 and not (demand.prompt and demand.output):
        return Decision(None, "no request has ended yet: how long they are is not known", sizes, demand, sizes, memory=memory)
    memory = _note_need(memory, model, demand, rules, now)
    if memory.change is not None and memory.change.alive:
        why, need = f"change {memory.change.number} is {memory.change.state.value}", memory.needs[-1].grow
        return Decision(None, why, sizes, demand, sizes, memory=memory, need=need)
    effect = model.effect(sizes, under_pressure(demand, memory))
    return _choose(seen, demand, effect, model, memory, rules, now)


def hindrance(seen: Seen, rules: PlannerRules, now: float) -> str:
    """Why nothing may be changed, whatever is needed; empty: nothing hinders."""
    if seen.wanted is None:
        return Refusal.of("no supervisor", "no supervisor keeps the sizes of the pools")
    if seen.wanted.stop:
        return Refusal.of("stopping", "the cluster is being stopped")
    if now - seen.at > rules.stale_s:
        told = f"the newest figures are {now - seen.at:.0f} s old" if seen.at > NEVER else "no figures have come yet"
        return Refusal.of("stale", told)
    if not seen.workers:
        return Refusal.of("no worker", "no worker is known")
    return NONE


def advance(memory: Memory, seen: Seen, rules: PlannerRules, now: float) -> Memory:
    """What has become of the change that is alive."""
    change = memory.change
    if change is None or not change.alive:
        return memory
    if change.state is ChangeState.ACTING and change.done(seen):
        change = replace(change.after("there"), there=now)
    if change.state is ChangeState.PROVING:
        if not change.done(seen):
            change = change.after("refuse", "its workers left again")
        elif now - change.there >= rules.cold_s or (isinstance(change.action, Resize) and not change.action.grows):
            change = change.after("proved")
    if change.state is ChangeState.ACTING and now >= change.deadline:
        change = change.after("late", f"it was not done within {change.deadline - change.began:.0f} s")
    elif change.state is ChangeState.ACTING and now - change.began >= WRITTEN_S and _overruled(change, seen):
        change = change.after("late", "other sizes are wanted by now")
    ended = now if not change.alive else memory.ended
    if change.state is ChangeState.SETTLED and isinstance(change.action, Resize) and change.action.grows:
        grown = {pool for pool in ROLES if getattr(change.action.pools, pool) > getattr(change.action.before, pool)}
        memory = replace(memory, blocked=tuple(one for one in memory.blocked if one[0] not in grown))
    return replace(memory, change=change, ended=ended)


def _overruled(change: Change, seen: Seen) -> bool:
    """Whether somebody else has asked for other sizes since, or Kubernetes had no room and took them back."""
    return isinstance(change.action, Resize) and seen.wanted != change.action.pools


def take_up(memory: Memory, change: Change, seen: Seen, now: float) -> Memory:
    """Goes on with what a planner that leads no more has begun, so that nothing is asked twice and what does not come is given up. What it
    asked for and did not write, or somebody else has asked for since, is left alone."""
    flipped = (now, change.action.to) if isinstance(change.action, Flip) else memory.flipped
    memory = replace(memory, changes=max(memory.changes, change.number), ended=now, flipped=flipped)
    if not change.alive or _overruled(change, seen):
        return memory
    return replace(memory, change=change)


def begin(memory: Memory, decision: Decision, rules: PlannerRules, now: float) -> Memory:
    """Notes that the decision's action is being taken. Its change is `proposed`."""
    action = decision.action
    assert action is not None, "nothing was decided"
    timeout = rules.flip_timeout_s if isinstance(action, Flip) else rules.start_timeout_s
    number = memory.changes + 1
    change = Change(number, action, decision.after, now + timeout, now)
    flipped = (now, action.to) if isinstance(action, Flip) else memory.flipped
    memory = replace(memory, change=change, changes=number, flipped=flipped)
    return _regret(memory, action, decision, rules, now) if isinstance(action, Resize) else memory


def _regret(memory: Memory, action: Resize, decision: Decision, rules: PlannerRules, now: float) -> Memory:
    """Load that comes and goes finds too few workers again and again. If those that went lately are badly missed, the next ones stay twice
    as long, and that time halves once some have gone in time. What a role gave to the other one, of a spent budget, does not count."""
    holds, effect, need = dict(memory.holds), decision.now, decision.need
    assert effect is not None and need is not None, "nothing was decided"
    given = any(getattr(need, role) > getattr(decision.sizes, role) for role in ROLES)
    for role in ROLES:
        more, known = getattr(action.pools, role) - getattr(action.before, role), holds.get(role, RoleHold())
        lately = known.shrunk is not None and now - known.shrunk <= REGRETTED * memory.hold_s(role, rules)
        if more > 0 and lately and effect.attainment < BAD:
            holds[role] = RoleHold(min(MOST_PATIENT, 2 * known.times))
        elif more < 0 and not given:
            in_time = known.shrunk is not None and not lately
            holds[role] = RoleHold(max(1.0, known.times / 2) if in_time else known.times, now)
    return replace(memory, holds=holds)


def note(memory: Memory, event: str, now: float, why: str = "") -> Memory:
    """`act` or `refuse`: what came of the attempt. Raises IllegalMove."""
    assert memory.change is not None
    change = memory.change.after(event, why)
    if event == "refuse" and isinstance(change.action, Flip):
        memory = _without(memory, change.action.worker, now)
    return replace(memory, change=change, ended=memory.ended if change.alive else now)


def _without(memory: Memory, worker: str, now: float) -> Memory:
    """A worker that did not flip is not asked again soon."""
    rest = tuple(one for one in memory.blocked if one[0] != worker and now < one[1] + BACK_OFF_MOST_S)
    return replace(memory, blocked=(*rest, (worker, now + AGAIN_S, AGAIN_S)))


def needed(model: Model, demand: Demand, rules: PlannerRules) -> PoolSizes:
    """The fewest workers with which `target` of the requests meet each objective, within the bounds. The budget may allow less."""
    least, most = rules.least, rules.most
    if demand.rate <= 0:
        return PoolSizes(least.prefill, max(1, least.decode))
    apart = PoolSizes(
        model.least(demand, "prefill", rules.target, least.prefill, most.prefill) if most.prefill else 0,
        model.least(demand, "decode", rules.target, least.decode, most.decode, prefill=min(1, most.prefill)),
    )
    if least.prefill or not most.prefill:
        return apart
    alone = PoolSizes(0, model.least(demand, "decode", rules.target, least.decode, most.decode, prefill=0))
    enough = model.effect(alone, demand)
    return alone if alone.total < apart.total and min(enough.ttft, enough.tpot) >= rules.target else apart


def with_spares(need: PoolSizes, spares: int, rules: PlannerRules) -> PoolSizes:
    """Adds so many to each role that is needed."""
    prefill = min(need.prefill + spares, rules.most.prefill) if need.prefill else 0
    return PoolSizes(prefill, min(need.decode + spares, rules.most.decode))


def spares_of(need: PoolSizes, rules: PlannerRules) -> int:
    """How many spares the budget has room for, the same number of each role: no role waits for what is a spare of the other."""
    for spares in range(rules.spares, 0, -1):
        more = with_spares(need, spares, rules)
        if more.prefill * rules.costs[0] + more.decode * rules.costs[1] <= rules.budget + 1e-9:
            return spares
    return 0


def _note_need(memory: Memory, model: Model, demand: Demand, rules: PlannerRules, now: float) -> Memory:
    pressed = under_pressure(demand, memory)
    need, margin = needed(model, pressed, rules), needed(model, pressed.times(1 + rules.margin), rules)
    longest_s = max(memory.hold_s(role, rules) for role in ROLES)
    old = [each for each in memory.needs if now - each.at > longest_s]
    kept = [each for each in memory.needs if now - each.at <= longest_s]
    return replace(memory, needs=(*old[-1:], *kept, Need(now, need, margin)))


def _surplus(memory: Memory, role: RoleName, size: int, within_s: float, now: float, spares: int = 0) -> int:
    """How many workers of a role more there are than were needed at any moment of that time, or with the margin half of it, and `spares`; 0
    if so much time has not been looked at. With the margin at any moment, chance alone would keep workers: it would count twice."""
    needs = [each for each in memory.needs if now - each.at <= within_s]
    if not needs or now - memory.needs[0].at < within_s:
        return 0
    most: int = max(*(getattr(each.grow, role) for each in needs), median_high(getattr(each.shrink, role) for each in needs))
    return max(0, size - most - (spares if most else 0))


def _choose(seen: Seen, demand: Demand, effect: Effect, model: Model, memory: Memory, rules: PlannerRules, now: float) -> Decision:
    sizes, need = seen.sizes, memory.needs[-1].grow
    pressed = under_pressure(demand, memory)
    found = [Alternative(sizes, effect, "as it is")]
    wants = _candidates(seen, need, pressed, model, memory, rules, now)
    chosen: tuple[str, Action, Alternative] | None = None
    refused: list[str] = []
    for why, action in wants:
        after = sizes_after(seen, action)
        told = model.effect(after, pressed)
        against = forbidden(action, seen, rules, now) or waits(action, effect, memory, rules, now)
        found.append(Alternative(after, told, f"{action}: {against or ('chosen' if chosen is None else 'would do as well')}"))
        if against:
            refused.append(kind_of(against))
        elif chosen is None:
            chosen = why, action, found[-1]
    if chosen is not None:
        why, action, taken = chosen
        return Decision(
            action, why, sizes, demand, taken.sizes, effect, taken.effect, tuple(found), memory, refused=tuple(refused), need=need
        )
    why = f"{sizes} is what the load needs" if need == sizes else f"the load needs {need}, and {sizes} serves"
    if wants:
        why += f"; {found[1].verdict}"
    return Decision(None, why, sizes, demand, sizes, effect, effect, tuple(found), memory, refused=tuple(refused), need=need)


def _candidates(
    seen: Seen, need: PoolSizes, demand: Demand, model: Model, memory: Memory, rules: PlannerRules, now: float
) -> "list[tuple[str, Action]]":
    """The candidates in the order in which they are tried."""
    sizes = seen.sizes
    assert seen.wanted is not None
    found: list[tuple[str, Action]] = []
    short = {role: getattr(need, role) - getattr(sizes, role) - _coming(seen, role, memory, rules, now) for role in ROLES}
    for role in ROLES:
        if short[role] <= 0:
            continue
        why = f"the load needs {need}: {role} has {short[role]} too few"
        flip = _flip(seen, role, memory, rules, now)
        if flip is not None and _surplus(memory, OTHER[role], getattr(sizes, OTHER[role]), rules.cooldown_s, now):
            found.append((why, flip))
        if not _blocked(memory, role, now):
            count = min(short[role], max(1, _room(seen, role, rules)))
            found.append((why, Resize(sized(seen.wanted, {role: getattr(seen.wanted, role) + count}), seen.wanted)))
        if flip is not None and _better(seen, flip, demand, model):
            found.append((f"{why}, which costs {OTHER[role]} less than it brings", flip))
    if both := _both(seen, {role: short[role] for role in ROLES if not _blocked(memory, role, now)}, rules, now):
        found.insert(0, (f"the load needs {need}: both roles have too few", both))  # before those of one pool
    needy = any(count > 0 for count in short.values())
    if not needy and (grown := _more_spares(seen, need, memory, rules, now)):
        found.append((f"the load needs {need}, and so many spares fit into the budget", grown))
    if all(forbidden(action, seen, rules, now) for _, action in found):  # or nothing is short: else a spent budget would hold for ever
        for role in ROLES:
            hold_s = rules.hold_s if needy else memory.hold_s(role, rules)
            spare = _surplus(memory, role, getattr(sizes, role), hold_s, now, 0 if needy else rules.spares)
            if spare:
                why = f"{spare} of {getattr(sizes, role)} {role} workers were not needed for {hold_s:.0f} s"
                found += [(why, action) for action in _shrinks(seen, role, spare, memory, rules, now)]
    return found


def _both(seen: Seen, short: Mapping[RoleName, int], rules: PlannerRules, now: float) -> Resize | None:
    """Both pools in one change, if both roles are short and the budget has room: else one would wait until the other has started."""
    assert seen.wanted is not None
    if len(short) < len(ROLES) or min(short.values()) <= 0:
        return None
    sizes: dict[str, int] = {role: getattr(seen.wanted, role) + count for role, count in short.items()}
    grown = Resize(sized(seen.wanted, sizes), seen.wanted)
    return None if forbidden(grown, seen, rules, now) else grown


def _more_spares(seen: Seen, need: PoolSizes, memory: Memory, rules: PlannerRules, now: float) -> Resize | None:
    """Spares are only added, where there is room: for their sake no worker flips or goes, so they do not come and go with noise."""
    assert seen.wanted is not None
    target = with_spares(need, spares_of(need, rules), rules)
    there = {role: getattr(seen.sizes, role) + _coming(seen, role, memory, rules, now) for role in ROLES}
    missing = {role: getattr(target, role) - there[role] for role in ROLES if not _blocked(memory, role, now)}
    grown: dict[str, int] = {role: getattr(seen.wanted, role) + count for role, count in missing.items() if count > 0}
    return Resize(sized(seen.wanted, grown), seen.wanted) if grown else None


def _coming(seen: Seen, pool: RoleName, memory: Memory, rules: PlannerRules, now: float) -> int:
    """Workers of a pool that somebody has asked for and that may still come."""
    if seen.wanted is None or memory.awaited is None or now - memory.awaited[1] >= rules.start_timeout_s:
        return 0
    wanted: int = getattr(seen.wanted, pool)
    return max(0, wanted - len(seen.of(pool)))


def _better(seen: Seen, flip: Flip, demand: Demand, model: Model) -> bool:
    """Whether a flip helps although the role that gives has none to spare."""
    after = sizes_after(seen, flip)
    return model.effect(after, demand).attainment >= model.effect(seen.sizes, demand).attainment + GAIN


def _room(seen: Seen, pool: RoleName, rules: PlannerRules) -> int:
    """How many workers more of a pool the budget has room for."""
    assert seen.wanted is not None
    spent = _cost(seen.wanted, seen, rules)
    cost = rules.costs[ROLES.index(pool)]
    return int((rules.budget - spent + 1e-9) / cost) if cost > 0 else seen.sizes.total + 1


def _flip(seen: Seen, to: RoleName, memory: Memory, rules: PlannerRules, now: float) -> Flip | None:
    """The worker to take: one that comes home if there is one, and of these the least busy."""
    if not rules.flips:
        return None
    able = [worker for worker in seen.serving(OTHER[to]) if worker.serves == (OTHER[to],) and now - worker.since >= rules.cold_s]
    able = [worker for worker in able if not _blocked(memory, worker.name, now)]
    if not able:
        return None
    taken = min(able, key=lambda worker: (worker.pool != to, worker.busy, worker.name))
    return Flip(taken.name, to, OTHER[to])


def _shrinks(seen: Seen, role: RoleName, spare: int, memory: Memory, rules: PlannerRules, now: float) -> list[Action]:
    """A launcher takes the newest workers of a pool. If none of the newest serves this role, one of the role is flipped first, so that the
    next one can go."""
    assert seen.wanted is not None
    found: list[Action] = []
    for pool in (role, OTHER[role]):
        workers = seen.of(pool)
        if len(workers) != getattr(seen.wanted, pool) or seen.starting.get(pool, 0):
            continue  # one of them is being started again: which one would go is not known
        count = 0
        while count < min(spare, len(workers)) and workers[-1 - count].serves == (role,):
            count += 1
        for fewer in range(count, 0, -1):
            found.append(Resize(sized(seen.wanted, {pool: len(workers) - fewer}), seen.wanted))
    if not found and (flip := _flip(seen, OTHER[role], memory, rules, now)) is not None:
        found.append(flip)
    return found


def _blocked(memory: Memory, who: str, now: float) -> bool:
    return any(name == who and now < until for name, until, _ in memory.blocked)


def waits(action: Action, effect: Effect, memory: Memory, rules: PlannerRules, now: float) -> str:
    """Why an action must wait, for the sake of a cluster that does not swing; empty: it need not."""
    if now - memory.ended < rules.cooldown_s and not _goes_on(action, memory.change):
        return Refusal.of("cooldown", f"the last change ended {now - memory.ended:.0f} s ago")
    if isinstance(action, Flip) and memory.flipped is not None:
        at, to = memory.flipped
        if action.to != to and now - at < rules.hold_s and effect.attainment >= BAD:
            return Refusal.of("hold", f"a worker was flipped to {to} {now - at:.0f} s ago")
    return NONE


def _goes_on(action: Action, change: Change | None) -> bool:
    """Whether a flip goes on with the one before it. That is no swing."""
    if change is None or change.state is not ChangeState.SETTLED:
        return False
    return isinstance(action, Flip) and isinstance(change.action, Flip) and action.to == change.action.to


def forbidden(action: Action, seen: Seen, rules: PlannerRules, now: float) -> str:
    """Why an action may never be taken here; empty: it may."""
    return _over_budget(action, seen, rules) or _out_of_bounds(action, seen, rules) or _unroutable(action, seen, rules, now)


def _cost(wanted: Pools, seen: Seen, rules: PlannerRules) -> float:
    """The highest cost on the way to these sizes."""
    return sum(count * each for count, each in zip(seen.most(wanted).values(), rules.costs, strict=True))


def _over_budget(action: Action, seen: Seen, rules: PlannerRules) -> str:
    if isinstance(action, Flip) or not action.grows:
        return NONE
    cost = _cost(action.pools, seen, rules)
    if cost <= rules.budget + 1e-9:
        return NONE
    return Refusal.of("budget", f"{cost:g} of a budget of {rules.budget:g}, with those that drain")


def _out_of_bounds(action: Action, seen: Seen, rules: PlannerRules) -> str:
    after = sizes_after(seen, action)
    for role in ROLES:
        before, size, least, most = (getattr(each, role) for each in (seen.sizes, after, rules.least, rules.most))
        if size < least and size < before:
            return Refusal.of("bounds", f"{role} may not have less than {least}")
        if size > most and size > before:
            return Refusal.of("bounds", f"{role} may not have more than {most}")
    return NONE


def _unroutable(action: Action, seen: Seen, rules: PlannerRules, now: float) -> str:
    """Who stays must serve each role that has to be served, and not be cold."""
    leaving = {action.worker} if isinstance(action, Flip) else {worker.name for worker in victims(action, seen)}
    if not leaving:
        return NONE
    for role in ROLES:
        gone = [worker for worker in seen.serving(role) if worker.name in leaving]
        stay = [worker for worker in seen.serving(role) if worker.name not in leaving and now - worker.since >= rules.cold_s]
        if gone and not stay and (role == "decode" or rules.least.prefill):
            return Refusal.of("pair", f"no proven worker would be left that serves {role}")
    return NONE


def victims(action: Resize, seen: Seen) -> list[Worker]:
    """Those that go."""
    gone: list[Worker] = []
    for pool in ROLES:
        workers, wanted = seen.of(pool), getattr(action.pools, pool)
        gone += workers[wanted:] if wanted < getattr(action.before, pool) else []
    return gone


def sizes_after(seen: Seen, action: Action) -> PoolSizes:
    """What serves once an action has settled."""
    sizes = seen.sizes
    if isinstance(action, Flip):
        step = 1 if action.to == "prefill" else -1
        return PoolSizes(sizes.prefill + step, sizes.decode - step)
    gone = victims(action, seen)
    return PoolSizes(*(
        getattr(sizes, role)
        + max(0, getattr(action.pools, role) - getattr(action.before, role))
        - sum(role in worker.serves for worker in gone)
        for role in ROLES
    ))  # fmt: skip


def _undo(seen: Seen, demand: Demand, memory: Memory, rules: PlannerRules, now: float) -> Decision:
    """A change that did not come about in time: what was asked for is taken back, and the plan goes on with what there is."""
    change = memory.change
    assert change is not None and seen.wanted is not None
    action: Action | None = None
    blocked = memory.blocked
    if isinstance(change.action, Resize) and change.action.grows:
        asked, before = change.action.pools, change.action.before
        grown = [pool for pool in ROLES if getattr(asked, pool) > getattr(before, pool)]
        there: dict[str, int] = {pool: min(getattr(asked, pool), max(getattr(before, pool), len(seen.of(pool)))) for pool in grown}
        if seen.wanted == asked and sized(asked, there) != asked:  # else somebody else has asked for other sizes since
            action = Resize(sized(asked, there), asked)
        for pool in (pool for pool in grown if there[pool] < getattr(asked, pool)):
            wait = next((each[2] for each in blocked if each[0] == pool), rules.start_timeout_s)
            rest = tuple(each for each in blocked if each[0] != pool)
            blocked = (*rest, (pool, now + wait, min(wait * BACK_OFF, BACK_OFF_MOST_S)))
    elif isinstance(change.action, Flip):
        back = change.action.back()
        flipped = any(worker.name == back.worker and worker.serves != (back.to,) for worker in seen.workers)
        action = back if flipped and not forbidden(back, seen, rules, now) else None
        blocked = _without(memory, back.worker, now).blocked
    undone = replace(memory, change=change.after("undo"), ended=now, blocked=blocked)
    after = sizes_after(seen, action) if isinstance(action, Flip) else seen.sizes
    return Decision(
        action, f"change {change.number} ({change.action}): {change.why}", seen.sizes, demand, after, memory=undone, undoes=True
    )
