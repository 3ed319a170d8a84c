"""What is in the cluster already, and follows from no rate: sequences that decode, and prompts that wait for too long.

Outputs are known when they end. When answers become longer, those that have ended are still the short ones, but the sequences that decode
are there: so many at one moment are, by Little's law, rate times length times time of a token, and whatever their length will be, they need
their workers.

A queue that is there stays as it is with workers for the rate alone. If it is so long that who comes now is nearly late, it counts as load
that should be gone by the time at which a worker that is started now has served somebody.
"""

import math
from dataclasses import replace

from baton.planner.capacity import Model
from baton.planner.change import Seen
from baton.planner.demand import Demand
from baton.planner.forecast import CHANCE

LONG = 0.5  # of the time that the objective leaves, from which on a queue is too long


def present(demand: Demand, seen: Seen, model: Model) -> Demand:
    """The demand with what is there beyond it."""
    if demand.rate <= 0 or not (demand.prompt and demand.output):
        return demand
    return replace(demand, prefill=_with_queue(demand, seen, model), decode=max(1.0, _in_flight(demand, seen, model)))


def _in_flight(demand: Demand, seen: Seen, model: Model) -> float:
    """How many times the sequences that the demand says decode at one moment. They are counted, so it is at least those without chance."""
    workers = seen.serving("decode")
    running = sum(worker.busy for worker in workers)
    if not workers:
        return 0.0
    step_s = model.step_s(max(1, round(running / len(workers))), demand.prompt + demand.output / 2)
    return max(0.0, running - CHANCE * math.sqrt(running)) / (demand.rate * demand.output * step_s)


def _with_queue(demand: Demand, seen: Seen, model: Model) -> float:
    """How many times the work of the prompts that come there is, with those that wait for too long."""
    own_s = model.prompt_s(demand.uncached)
    workers = seen.serving("prefill") or seen.serving("decode")
    if model.ttft_s is None or demand.uncached <= 0 or not workers:
        return 1.0
    queued_s = sum(worker.waiting_tokens for worker in workers) * own_s / demand.uncached
    if queued_s / len(workers) <= LONG * (model.ttft_s - own_s):
        return 1.0
    return 1 + queued_s / (model.start_s + model.ttft_s) / (demand.rate * own_s)
