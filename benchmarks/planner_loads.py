"""The loads of benchmarks/planner.py, and the objectives that are asked of them."""

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from scale import azure

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
LONG_PROMPT, LONGEST_PROMPT = 3000, 7437  # tokens, of the code trace: from which on swing takes a prompt, and the longest that there is
LONG_ANSWER, SHORT_PROMPT = 200, 1000  # of the conversations that swing takes
SWING_SEQS = KV_BLOCKS // -(-LONGEST_PROMPT // BLOCK)  # so many of the longest prompts have room in a worker at once
SWING_RATES = 1.8, 2.35  # requests per second: see `planner.py --rates`
WORKERS_OF_RATES = 6
MOONCAKE_MOST = 32_000, 600  # tokens of a prompt and of an output


class PerHour:
    """What counts of an arm: `met` of the `offered` requests met all objectives, in so many `worker_hours`."""

    __slots__ = ()
    offered: int
    met: int
    worker_hours: float

    @property
    def attainment(self) -> float:
        return self.met / self.offered

    @property
    def rate(self) -> float:
        """Requests that met all objectives, per hour of a worker."""
        return self.met / self.worker_hours


@dataclass(frozen=True, slots=True)
class Sent:
    at: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Offered:
    """`part_s`: the oracle chooses sizes for each part of this length. `seqs`: sequences that a worker has at once, at most."""

    sent: list[Sent]
    seconds: float
    part_s: float
    seqs: int = SEQS

    @property
    def parts(self) -> int:
        return round(self.seconds / self.part_s)


Lengths = Iterator[tuple[int, int]]


def lengths(path: Path, fits: Callable[[int, int], bool] = lambda prompt, output: True) -> Lengths:
    """Of prompts and outputs, in the order of the trace, over and over."""
    while True:
        with path.open() as file:
            for row in csv.DictReader(file):
                prompt, output = max(1, int(row["ContextTokens"])), int(row["GeneratedTokens"])
                if output and fits(prompt, output):
                    yield prompt, output


def mooncake_lengths(path: Path) -> Lengths:
    """Of those that one worker can hold and that end in time."""
    while True:
        with path.open() as file:
            for row in map(json.loads, file):
                if row["input_length"] <= MOONCAKE_MOST[0] and row["output_length"] <= MOONCAKE_MOST[1]:
                    yield row["input_length"], max(1, row["output_length"])


def poisson(rates: Callable[[float], Sequence[float]], seconds: float, sources: Sequence[Lengths], seed: int) -> list[Sent]:
    """`rates`: of each source at a moment, requests per second."""
    rng, found, now = random.Random(seed), list[Sent](), 0.0
    top = max(sum(rates(t)) for t in range(int(seconds)))
    while (now := now + rng.expovariate(top)) < seconds:
        now_rates = rates(now)
        if rng.random() * top < sum(now_rates):  # thinning (Lewis and Shedler 1979)
            found.append(Sent(now, *next(rng.choices(sources, now_rates)[0])))
    return found


def workload(name: str, traces: Path, quick: bool) -> Offered:
    """`name` may end with a colon and the seed of the arrivals."""
    kind, _, seed = name.partition(":")
    make, usual = LOADS[kind]
    return make(traces, quick, int(seed) if seed else usual)


def _code(traces: Path) -> Path:
    return traces / "azure_code_2023.csv"


def _conversations(traces: Path) -> Path:
    return traces / "azure_conv_2023.csv"


def _shift(traces: Path, quick: bool, seed: int) -> Offered:
    phase = 60.0 if quick else 200.0
    sources = [lengths(_code(traces)), lengths(_conversations(traces), lambda prompt, output: output >= 200)]
    return Offered(poisson(_by_turns((2.2, 2.2), phase), 3 * phase, sources, seed), 3 * phase, phase)


def _swing(traces: Path, quick: bool, seed: int) -> Offered:
    phase = 60.0 if quick else 200.0
    sent = poisson(_by_turns(SWING_RATES, phase), 4 * phase, swing_sources(traces), seed)
    return Offered(sent, 4 * phase, phase, SWING_SEQS)


def swing_sources(traces: Path) -> tuple[Lengths, Lengths]:
    """Long prompts with short answers, and short prompts with long answers."""
    return (
        lengths(_code(traces), lambda prompt, output: prompt >= LONG_PROMPT),
        lengths(_conversations(traces), lambda prompt, output: output >= LONG_ANSWER and prompt <= SHORT_PROMPT),
    )


def _by_turns(rates: tuple[float, float], phase_s: float) -> Callable[[float], list[float]]:
    return lambda now: [rates[0], 0.0] if int(now // phase_s) % 2 == 0 else [0.0, rates[1]]


def _day(traces: Path, quick: bool, seed: int) -> Offered:
    hour = 10.0 if quick else 40.0

    sources = [lengths(_code(traces)), lengths(_conversations(traces))]
    return Offered(poisson(day_rates(hour), 24 * hour, sources, seed), 24 * hour, 3 * hour)


def day_rates(hour_s: float, factor: float = 1.0) -> Callable[[float], list[float]]:
    """Rates of code, which is asked for by day, and of conversations, most in the evening."""

    def rates(now: float) -> list[float]:
        at = now / hour_s  # o'clock
        work = max(0.0, math.cos((at - 13) * math.pi / 12))
        evening = (1 + math.cos((at - 20) * math.pi / 12)) / 2
        return [factor * (0.1 + 1.5 * work**2), factor * (0.3 + 1.5 * evening**2)]

    return rates


def _waves(traces: Path, quick: bool, seed: int) -> Offered:
    wave, waves = (80.0 if quick else 240.0), 4

    def rates(now: float) -> list[float]:
        return [2.5 - 2.0 * math.cos(2 * math.pi * now / wave)]

    return Offered(poisson(rates, waves * wave, [lengths(_conversations(traces))], seed), waves * wave, wave / 4)


def _steps(traces: Path, quick: bool, seed: int) -> Offered:
    step, levels = (40.0 if quick else 160.0), (0.6, 1.8, 0.9, 2.4, 0.3, 1.5)

    def rates(now: float) -> list[float]:
        level = levels[min(int(now // step), len(levels) - 1)]
        return [level / 2, level / 2]

    sent = poisson(rates, len(levels) * step, [lengths(_code(traces)), lengths(_conversations(traces))], seed)
    return Offered(sent, len(levels) * step, step)


def _bursts(traces: Path, quick: bool, seed: int) -> Offered:
    """The code trace with its own arrivals, every other request; `seed`: from which quarter of an hour on."""
    seconds, begin = (300.0 if quick else 900.0), 900.0 * (seed - 1)
    rows = takewhile(lambda row: row.at < begin + seconds, azure(_code(traces)))
    sent = [Sent(row.at - begin, row.prompt, row.output) for row in rows if row.at >= begin][::2]
    return Offered(sent, seconds, seconds / 6)


def _books(traces: Path, quick: bool, seed: int) -> Offered:
    """Few and long prompts, with the course of a day."""
    seconds = 240.0 if quick else 960.0

    def rates(now: float) -> list[float]:
        return [0.05 + 0.35 * math.sin(math.pi * now / seconds) ** 2]

    return Offered(poisson(rates, seconds, [mooncake_lengths(traces / "mooncake_conversation.jsonl")], seed), seconds, seconds / 8)


LOADS: dict[str, tuple[Callable[[Path, bool, int], Offered], int]] = {
    "shift": (_shift, 1), "swing": (_swing, 1), "day": (_day, 2), "waves": (_waves, 1), "steps": (_steps, 1), "bursts": (_bursts, 1),
    "books": (_books, 1),
}  # fmt: skip


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
