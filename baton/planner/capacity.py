"""What so many workers of each role would do with a load: from the fitted steps of a profile and two formulae of queues.

Prompts wait for one of p prefill workers: an M/G/p queue, whose mean wait is taken from Sakasegawa ("An approximation formula", 1977), with
an exponential tail. Sequences that decode share a worker's steps: by Little's law a worker that must make r tokens per second runs the
batch b for which b / step(b) = r. How many run at one moment is taken as normal around that, with the variance of a Poisson distribution.

Without prefill workers, the decode workers compute the prompts between their steps, which then take longer.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from baton.plan.formulae import normal_below
from baton.planner.demand import Demand
from baton.profile.file import Profile
from baton.profile.models import Form, Work, step_seconds, works_of_prompt

VARIATION = 1.0  # squared, of the time that prompts take: as exponential
CERTAIN = 0.999
PAIRS_MOST = 1 << 17  # tokens of a prompt that are looked at


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Workers that serve each role."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True, slots=True)
class Effect:
    """Shares of requests that are expected to meet the objective of the first token and of the others, and how busy the workers are."""

    ttft: float
    tpot: float
    prefill_use: float
    decode_use: float

    @property
    def attainment(self) -> float:
        return self.ttft * self.tpot


@dataclass(frozen=True)
class Model:
    """`ttft_s`, `tpot_s`: objectives; None: whatever the cluster can bear."""

    profile: Profile
    ttft_s: float | None
    tpot_s: float | None
    max_num_seqs: int = 64
    kv_tokens: int = 1 << 16  # of one worker
    chunk: int = 512

    @cached_property
    def _step(self) -> tuple[dict[str, float], Form]:
        return dict(self.profile.values("step")), self.profile.form

    @property
    def start_s(self) -> float:
        return self.profile.values("start")["base"]

    def prompt_s(self, uncached: float) -> float:
        """The time of a prompt alone."""
        numbers, form = self._step
        tokens = min(round(uncached), PAIRS_MOST)
        return sum(step_seconds(numbers, form, work) for work in works_of_prompt(tokens, 0, self.chunk))

    def step_s(self, batch: int, context: float) -> float:
        numbers, form = self._step
        return step_seconds(numbers, form, Work(decodes=batch, context=round(batch * context)))

    def stay_s(self, sizes: PoolSizes, demand: Demand) -> float:
        """The time of a request from its arrival to its last token, without queues."""
        running = demand.rate * demand.output * self.step_s(1, demand.prompt) / max(1, sizes.decode)
        batch = max(1, min(self.max_num_seqs, round(running)))
        return self.prompt_s(demand.uncached) + demand.output * self.step_s(batch, demand.prompt + demand.output / 2)

    def effect(self, sizes: PoolSizes, demand: Demand) -> Effect:
        if sizes.decode < 1:
            return Effect(0.0, 0.0, 1.0, 1.0)  # nobody is served
        if demand.rate <= 0:
            return Effect(1.0, 1.0, 0.0, 0.0)
        busy = demand.rate * demand.prefill * self.prompt_s(demand.uncached)  # workers, on average
        if sizes.prefill:
            ttft = self._ttft(busy / sizes.prefill, sizes.prefill, demand)
            tpot, use = self._tpot(sizes.decode, demand, 1.0)
            return Effect(ttft, tpot, busy / sizes.prefill, use)
        share = busy / sizes.decode  # of a worker's time that prompts take
        if share >= CERTAIN:
            return Effect(0.0, 0.0, share, share)
        tpot, use = self._tpot(sizes.decode, demand, 1 - share)
        ttft = self._ttft(min(1.5, share + use / 2), sizes.decode, demand)
        return Effect(ttft, tpot, share, share + use)

    def _ttft(self, use: float, workers: int, demand: Demand) -> float:
        """Share of requests whose first token comes in time."""
        if use >= CERTAIN:
            return min(1.0, 0.5 / use)  # the queue grows: whatever is not refused comes late
        own = self.prompt_s(demand.uncached)
        left = (self.ttft_s - own) if self.ttft_s is not None else 10 * own
        if left <= 0:
            return 0.0
        waits = use ** (math.sqrt(2 * (workers + 1)) - 1)  # probability
        wait = (1 + VARIATION) / 2 * own * waits / (workers * (1 - use))
        return 1 - waits * math.exp(-left * waits / wait) if wait > 0 else 1.0

    def _tpot(self, workers: int, demand: Demand, pace: float) -> tuple[float, float]:
        """Share of requests whose tokens come in time, and how much of what a worker can bear is used. `pace`: share of the time that is
        left for decoding."""
        context = demand.prompt + demand.output / 2
        room = min(self.max_num_seqs, int(self.kv_tokens // max(context, 1.0)))
        most = self._most(context, pace, room)
        if most == 0:
            return 0.0, 1.0
        per_worker = demand.rate * demand.decode * demand.output / workers  # tokens per second
        batch = self._batch(per_worker, context, pace, room)
        use = per_worker / (most * pace / self.step_s(most, context))
        if batch is None:
            return min(1.0, 0.5 / max(use, 1.0)), use
        return normal_below(most + 0.5, batch, math.sqrt(batch)), use

    def _most(self, context: float, pace: float, room: int) -> int:
        """The largest batch whose tokens come in time, of those that have `room`."""
        tpot_s = self.tpot_s
        if tpot_s is None:
            return room
        return bisect_left(range(1, room + 1), True, key=lambda batch: self.step_s(batch, context) / pace > tpot_s)

    def _batch(self, tokens_per_s: float, context: float, pace: float, room: int) -> float | None:
        """The batch that makes so many tokens per second; None: none does."""
        if room * pace / self.step_s(room, context) < tokens_per_s:
            return None
        batch = 1 + bisect_left(range(1, room), True, key=lambda batch: batch * pace / self.step_s(batch, context) >= tokens_per_s)
        return batch if batch > 1 else tokens_per_s * self.step_s(1, context) / pace  # less than one sequence at a time

    def least(self, demand: Demand, role: str, target: float, least: int, most: int, prefill: int = 1) -> int:
        """The fewest workers of a role with which `target` of the requests meet its objective; `most` if no number does. `prefill`: 0 asks
        how many decode workers serve without any prefill worker."""

        def enough(size: int) -> bool:
            if role == "prefill":
                return self.effect(PoolSizes(size, 1), demand).ttft >= target
            effect = self.effect(PoolSizes(prefill, size), demand)
            return effect.tpot >= target and (prefill > 0 or effect.ttft >= target)

        low = max(least, 1)
        return low + bisect_left(range(low, max(most, low)), True, key=enough)
