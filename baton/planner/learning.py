"""What misses teach: by how much each role needs more than the profile says.

Misses that the model did not foresee mean that it is wrong, and the role to blame is sized for more (its pressure). That is a guess, so it
is checked: if more workers of the role did not do away with a good part of the misses, the pressure is taken back, and so many misses are
no reason for more workers again. (A prompt that is too long for its objective misses it on an idle cluster as well.)

What happens while a worker is cold, or while something changes, says nothing and is left out, and so do requests that came before a change
and ended after it.
"""

from dataclasses import replace

from baton.cluster.records import ROLES, RoleName
from baton.planner.capacity import Model
from baton.planner.change import Seen
from baton.planner.demand import Demand, Interval
from baton.planner.memory import Memory, PlannerRules, Trial

PREFILL_STAGES = frozenset({"queue", "prefill", "prefill_wait", "prefill_compute"})
PRESSURE_STEP, PRESSURE_MOST = 1.15, 4.0
FORGET_S = 3600.0  # after which half of what was learned is gone; twice as long each time that a pressure had to be raised again
MISSING = 3  # intervals with too many misses in a row, before the model is thought to be wrong
WORTH = 0.25  # of the misses, at least, that more workers must do away with
JUDGED = 5  # requests, at least, that an interval must have judged


def learn(memory: Memory, interval: Interval, seen: Seen, model: Model, demand: Demand, rules: PlannerRules, now: float) -> Memory:
    if interval.number <= memory.learned:
        return memory
    memory = replace(memory, learned=interval.number)
    changing = memory.change is not None and memory.change.alive
    lately = now - memory.ended < interval.seconds + model.stay_s(seen.sizes, demand)
    attainment = interval.attainment
    if cold(seen, rules, now) or changing or lately or attainment is None or interval.judged < JUDGED:
        return replace(memory, misses=())
    slack = 1 - rules.target
    if attainment >= min(rules.target, memory.reach) - slack:
        kept = 0.5 ** (interval.seconds / (FORGET_S * 2 ** min(memory.raised, 10)))
        prefill, decode, reach = (1 + (each - 1) * kept for each in (*memory.pressure, memory.reach))
        return replace(memory, misses=(), pressure=(prefill, decode), reach=reach)
    if model.effect(seen.sizes, under_pressure(demand, memory)).attainment < rules.target - slack:
        return replace(memory, misses=())  # it was foreseen
    misses = (*memory.misses, 1 - attainment)
    if len(misses) < MISSING:
        return replace(memory, misses=misses)
    return _conclude(replace(memory, misses=()), sum(misses) / len(misses), _blamed(interval, seen, model, demand), seen)


def _conclude(memory: Memory, missed: float, role: RoleName, seen: Seen) -> Memory:
    """`missed`: share of requests, in the last intervals."""
    trial = memory.trial
    if trial is not None and getattr(seen.sizes, trial.role) > getattr(trial.sizes, trial.role):
        if missed > (1 - WORTH) * trial.missed:
            return replace(memory, pressure=trial.pressure, trial=None, reach=1 - max(missed, trial.missed))
        trial = None
    if trial is None or trial.role != role:
        trial = Trial(role, seen.sizes, memory.pressure, missed)
    pressure = dict(zip(ROLES, memory.pressure, strict=True))
    pressure[role] = min(PRESSURE_MOST, pressure[role] * PRESSURE_STEP)
    return replace(memory, raised=memory.raised + 1, pressure=(pressure["prefill"], pressure["decode"]), trial=trial)


def cold(seen: Seen, rules: PlannerRules, now: float) -> bool:
    """Whether some worker is so young that what the cluster does says nothing about it."""
    return any(now - worker.since < rules.cold_s for worker in seen.workers) or any(seen.starting.values())


def under_pressure(demand: Demand, memory: Memory) -> Demand:
    prefill, decode = memory.pressure
    return replace(demand, prefill=demand.prefill * prefill, decode=demand.decode * decode)


def _blamed(interval: Interval, seen: Seen, model: Model, demand: Demand) -> RoleName:
    shares = {role: 0.0 for role in ROLES}
    effect = model.effect(seen.sizes, demand)
    for stage, count in interval.missed.items():
        if stage == "error" or stage == "queue":  # for want of room: that of the busier role
            shares["prefill" if effect.prefill_use > effect.decode_use else "decode"] += count
        else:
            shares["prefill" if stage in PREFILL_STAGES else "decode"] += count
    return "prefill" if shares["prefill"] > shares["decode"] and seen.sizes.prefill else "decode"
