"""The loads of benchmarks/planner.py, and the objectives that are asked of them."""

import csv
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.cluster.config_router import RouterConfig, SloConfig
from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.shape import shape_of
from baton.plan.sheet import profile_of
from baton.profile.file import Profile
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.workers import Times
from router.slo import RequestTimes

CHUNK, SEQS, BLOCK, KV_BLOCKS = 2048, 64, 64, 900  # what 96 GB leave beside the weights
SHARE, TTFT_TIMES, TPOT_TIMES = 0.9, 2.5, 2.0  # objectives, of an idle cluster
ASKED = 200  # requests, about, by which an idle cluster is measured
TIMEOUT_S = 60.0
IDLE = Sizes(1, 1, SEQS, KV_BLOCKS, CHUNK, BLOCK)


@dataclass(frozen=True, slots=True)
class Sent:
    at: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Offered:
    """`part_s`: the oracle chooses sizes for each part of this length."""

    sent: list[Sent]
    seconds: float
    part_s: float

    @property
    def parts(self) -> int:
        return round(self.seconds / self.part_s)


def lengths(path: Path, least_output: int = 1) -> Iterator[tuple[int, int]]:
    while True:
        with path.open() as file:
            for row in csv.DictReader(file):
                if int(row["GeneratedTokens"]) >= least_output:
                    yield max(1, int(row["ContextTokens"])), int(row["GeneratedTokens"])


def poisson(rates: Callable[[float], list[float]], seconds: float, sources: list[Iterator[tuple[int, int]]], seed: int) -> list[Sent]:
    """`rates`: of each source at a moment, requests per second."""
    rng, found, now = random.Random(seed), list[Sent](), 0.0
    top = max(sum(rates(t)) for t in range(int(seconds)))
    while (now := now + rng.expovariate(top)) < seconds:
        now_rates = rates(now)
        if rng.random() * top < sum(now_rates):  # thinning (Lewis and Shedler 1979)
            found.append(Sent(now, *next(rng.choices(sources, now_rates)[0])))
    return found


def workload(name: str, traces: Path, quick: bool) -> Offered:
    code, conversations = traces / "azure_code_2023.csv", traces / "azure_conv_2023.csv"
    if name == "shift":
        phase = 60.0 if quick else 200.0

        def one_rate(now: float) -> list[float]:
            return [2.2, 0.0] if int(now // phase) % 2 == 0 else [0.0, 2.2]

        return Offered(poisson(one_rate, 3 * phase, [lengths(code), lengths(conversations, 200)], 1), 3 * phase, phase)
    hour = 10.0 if quick else 40.0

    return Offered(poisson(day_rates(hour), 24 * hour, [lengths(code), lengths(conversations)], 2), 24 * hour, 3 * hour)


def day_rates(hour_s: float, factor: float = 1.0) -> Callable[[float], list[float]]:
    """Rates of code, which is asked for by day, and of conversations, most in the evening."""

    def rates(now: float) -> list[float]:
        at = now / hour_s  # o'clock
        work = max(0.0, math.cos((at - 13) * math.pi / 12))
        evening = (1 + math.cos((at - 20) * math.pi / 12)) / 2
        return [factor * (0.1 + 1.5 * work**2), factor * (0.3 + 1.5 * evening**2)]

    return rates


def profile() -> Profile:
    return profile_of(shape_of("llama-3.1-70b"), DEVICES["a10"], MEASURED, devices=4, weight_bits=8)


def objectives(sent: Sequence[Sent], sizes: Sizes = IDLE, known: Profile | None = None) -> SloConfig:
    """Multiples of the times within which an idle cluster of these sizes, and of this profile, serves nine of ten requests of the mix."""
    idle = virtual_time.run(_alone(sent[:: max(1, len(sent) // ASKED)], sizes, known or profile()))
    ttft_s = _quantile([each.ttft_s for each in idle if each.ttft_s is not None])
    tpot_s = _quantile([each.tpot_s for each in idle if each.tpot_s is not None])
    return SloConfig(ttft_s=float(f"{TTFT_TIMES * ttft_s:.2g}"), tpot_s=float(f"{TPOT_TIMES * tpot_s:.2g}"))


def _quantile(values: list[float]) -> float:
    return sorted(values)[math.ceil(SHARE * len(values)) - 1]


async def _alone(sent: Sequence[Sent], sizes: Sizes, known: Profile) -> list[RequestTimes]:
    """One after the other."""
    cluster = SimulatedCluster(sizes, Times.of(known), RouterConfig(), large=True)
    async with cluster.watched():
        for number, one in enumerate(sent):
            await cluster.ask([number, *range(1, one.prompt)], one.output, TIMEOUT_S)
    return [record.times for record in cluster.routers[0].journal.last(len(sent))]
