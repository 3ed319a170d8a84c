"""The load of benchmarks/planner_real.py: a day, small enough for the toy model; and what the simulator says of static splits under it."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner_loads import Sent, day_rates, lengths, poisson

from baton.clock import loop_time
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError
from baton.planner.capacity import PoolSizes
from baton.profile.file import Profile
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.workers import Times

HOURS, SEED = 24, 2
SHORTER = 4, 2  # tokens of the trace for each of ours: of prompts, of outputs
MORE = 2.0  # times the requests per second of the simulated day
LONGEST = 4000  # tokens of a prompt and its output
FIRST, IDS = 1, 97
TIMEOUT_S = 30.0


def day(traces: Path, hour_s: float, seed: int = SEED) -> list[Sent]:
    """Requests of a day whose hours take so long. A prompt that is too long for the toy's context is cut."""
    sources = [lengths(traces / f"azure_{name}_2023.csv") for name in ("code", "conv")]
    return [smaller(one) for one in poisson(day_rates(hour_s, MORE), HOURS * hour_s, sources, seed)]


def smaller(one: Sent) -> Sent:
    output = max(1, round(one.output / SHORTER[1]))
    return replace(one, prompt=min(max(2, round(one.prompt / SHORTER[0])), LONGEST - output), output=output)


def prompt_of(number: int, tokens: int) -> list[int]:
    """No two of the first 9,409 begin alike, so none is cached."""
    high, low = divmod(number, IDS)
    return [FIRST + high % IDS, FIRST + low, *(FIRST + (number + place) % IDS for place in range(2, tokens))]


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What the simulator says of a split."""

    split: PoolSizes
    attainment: float
    rate: float  # requests that met all objectives, per hour of a worker


def foresee(sent: Sequence[Sent], seconds: float, slo: SloConfig, profile: Profile, sizes: Sizes, router: RouterConfig) -> Foreseen:
    """`sizes`: of the split."""

    async def ask(cluster: SimulatedCluster, number: int, one: Sent) -> None:
        with contextlib.suppress(BatonError):  # the journal has it
            await cluster.ask(prompt_of(number, one.prompt), one.output, TIMEOUT_S)

    async def run() -> int:
        cluster = SimulatedCluster(sizes, Times.of(profile), router, slo, large=True)
        async with cluster.watched():
            began = loop_time()
            async with asyncio.TaskGroup() as group:
                for number, one in enumerate(sent):
                    await asyncio.sleep(max(0.0, began + one.at - loop_time()))
                    group.create_task(ask(cluster, number, one))
            records = cluster.routers[0].journal.last(len(sent))
        return sum(one.outcome == "ok" and one.slo_missed is None for one in records)

    met, split = virtual_time.run(run()), PoolSizes(sizes.prefill, sizes.decode)
    return Foreseen(split, met / len(sent), met * 3600 / (split.total * seconds))
