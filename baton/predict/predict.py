"""The load test in virtual time: the same requests, records and figures, of a cluster that is simulated, with intervals.

    run       one run, as `loadtest.drive` would have measured it
    predict   runs with the profile as it is, and with others that its measurements also allow

The intervals are those of the profile: what a figure would be if its numbers were others that fit the measurements as well, or if the
models were as wrong as they were about what was not fitted. A figure's logarithm is taken as normal, since a time that is off is off by a
factor.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import stdev

from baton.predict.door import SimulatedDoor
from baton.predict.setting import ClusterSetting
from baton.profile.file import Profile
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster
from baton.simulate.cores import Cores, OwnCores, Speeds, Thread
from baton.simulate.workers import Times
from loadtest.drive import Run, drive
from loadtest.slo import Slo
from loadtest.summary import Summary, summarise
from loadtest.window import Window
from loadtest.workload import Item

DRAWS = 8
TIMEOUT_S = 60.0  # of a request, unless somebody says otherwise
Z = 1.645  # of a normal distribution: 90 % lie within so many standard deviations
FIGURES: Mapping[str, Callable[[Summary], float | None]] = {
    "goodput (/s)": lambda s: s.goodput,
    "attainment": lambda s: s.attainment,
    "TTFT P50 (ms)": lambda s: s.ttft_ms.p50,
    "TTFT P90 (ms)": lambda s: s.ttft_ms.p90,
    "TTFT P99 (ms)": lambda s: s.ttft_ms.p99,
    "TPOT P50 (ms)": lambda s: s.tpot_ms.p50,
    "TPOT P90 (ms)": lambda s: s.tpot_ms.p90,
    "ITL P99 (ms)": lambda s: s.itl_ms.p99,
    "E2E P90 (ms)": lambda s: s.e2e_ms.p90,
    "output tokens/s": lambda s: s.output_tokens / s.window.length,
    "hit rate": lambda s: s.cached_share,
}
SHARES = ("attainment", "hit rate")


@dataclass(frozen=True, slots=True)
class Offer:
    """What is sent: `items` at `times` (those without times of their own), in a run whose `window` counts."""

    items: Sequence[Item]
    times: Sequence[float]
    window: Window
    timeout_s: float = TIMEOUT_S

    @property
    def asked(self) -> dict[str, float]:
        """What is asked, by the names of a profile's region."""
        return {
            "prompt tokens": max((len(item.tokens) for item in self.items), default=0),
            "output tokens": max((item.output_tokens for item in self.items), default=0),
        }


@dataclass(frozen=True, slots=True)
class Simulated:
    """A figure and its 90 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Prediction:
    run: Run
    summary: Summary
    figures: Mapping[str, Simulated]  # without those that do not exist
    doubts: tuple[str, ...]  # why the question lies outside what was measured; empty: it does not

    @property
    def warning(self) -> str:
        """The warning that precedes any figure; empty: none."""
        return f"Outside of what was validated: {'; '.join(self.doubts)}." if self.doubts else ""


def run(
    setting: ClusterSetting, profile: Profile, offer: Offer, large: bool = False, collects: bool = False, decode: Profile | None = None
) -> Run:
    """Always the same for the same arguments. `large`: see `SimulatedCluster`. `decode`: of decode workers, if theirs is another one."""

    async def main() -> Run:
        async with standing(setting, profile, Times.of(profile, decode=decode), large) as (_, door):
            return await drive(
                offer.items, offer.times, door, duration_s=offer.window.duration_s, timeout_s=offer.timeout_s, collects=collects
            )

    return virtual_time.run(main())


@asynccontextmanager
async def standing(
    setting: ClusterSetting, profile: Profile, times: Times, large: bool = False
) -> AsyncIterator[tuple[SimulatedCluster, SimulatedDoor]]:
    """A cluster, and the door to it, once it is ready. Within a loop of virtual time."""
    cores = OwnCores() if setting.cores is None else Cores(setting.cores, _speeds(profile))
    cluster = SimulatedCluster(setting.sizes, times, setting.router, setting.slo, setting.routers, cores, large)
    async with cluster.watched():
        await asyncio.sleep(1.0)  # the first records have been read, and the first probes answered
        yield cluster, SimulatedDoor(cluster, profile, Thread(cores))


def _speeds(profile: Profile) -> Speeds:
    """A number that was not measured is 0. One that was drawn may be above 1."""
    shared = {name: min(1.0, value) for name, value in profile.values("sharing").items() if value}
    crowded = {f"{name}_crowded": min(1.0, value) for name, value in profile.values("crowding").items() if value}
    return Speeds(**shared, **crowded)


def predict(
    setting: ClusterSetting, profile: Profile, offer: Offer, slo: Slo, draws: int = DRAWS, seed: int = 0, large: bool = False,
    decode: Profile | None = None,
) -> Prediction:  # fmt: skip
    """`draws`: further runs, for the intervals; 0: each interval is its figure. `large`, `decode`: see `run`. Two profiles are wrong
    together: what both assume is the same."""
    rng = random.Random(seed)
    first = run(setting, profile, offer, large, decode=decode)
    summary = _summary(first, offer, slo)
    others = []
    for _ in range(draws):
        drawn, unlike = _drawn(profile, decode, rng)
        others.append(_summary(run(setting, drawn, offer, large, decode=unlike), offer, slo))
    figures = {}
    for name, of in FIGURES.items():
        if (value := of(summary)) is not None:
            figures[name] = interval(value, [each for other in others if (each := of(other)) is not None], name in SHARES)
    return Prediction(first, summary, figures, doubts(setting, profile, offer))


def _drawn(profile: Profile, decode: Profile | None, rng: random.Random) -> tuple[Profile, Profile | None]:
    if decode is None:
        return profile.drawn(rng), None
    seed = rng.random()
    return profile.drawn(random.Random(seed)), decode.drawn(random.Random(seed))


def interval(value: float, others: Iterable[float], share: bool = False) -> Simulated:
    """The interval of a figure, by what it is with other profiles. A share, or a figure that was 0 once, is not taken as a factor."""
    every = [value, *others]
    if len(every) < 2:
        return Simulated(value, value, value)
    if share or min(every) <= 0:
        half = Z * stdev(every)
        return Simulated(value, max(0.0, value - half), min(1.0, value + half) if share else value + half)
    factor = math.exp(Z * stdev([math.log(each) for each in every]))
    return Simulated(value, value / factor, value * factor)


def doubts(setting: ClusterSetting, profile: Profile, offer: Offer) -> tuple[str, ...]:
    found = [*setting.unknown, *profile.outside(setting.asked | offer.asked)]
    if profile.source != "measured":
        found.append(f"nothing was measured: the profile is from the {profile.source}")
    elif missing := [name for name in _needed(setting) if name in profile.unmeasured]:
        found.append(f"not measured, and so without a time: {', '.join(missing)}")
    return tuple(found)


def _needed(setting: ClusterSetting) -> list[str]:
    """Models that not every cluster has an occasion for."""
    return [*(["handoff"] if setting.sizes.prefill else []), *(["sharing", "crowding"] if setting.cores is not None else [])]


def _summary(done: Run, offer: Offer, slo: Slo) -> Summary:
    return summarise(done.records, offer.window, slo, due=done.due)
