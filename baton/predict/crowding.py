"""How much slower steps go where the threads of a cluster share cores, found by a load: the numbers with which the simulator tells the
times that were measured.

    loaded        puts a cluster under a load that is far from what it can serve
    crowding_of   the two numbers of `crowding`, by least squares of the logarithms of simulated over measured times

A simulated run has no formula, so the minimum is sought by trying: one number after the other, up and down by a factor that shrinks
(pattern search; Hooke and Jeeves, "Direct Search Solution of Numerical and Statistical Problems", 1961).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.cluster import config_layers
from baton.predict.predict import FIGURES, Offer, run
from baton.predict.report import offer_of
from baton.predict.setting import setting_of
from baton.profile.file import Profile
from baton.profile.models import NUMBERS, Fitted
from loadtest.drive import drive
from loadtest.grpc_door import GrpcDoor
from loadtest.plan import Workload
from loadtest.slo import Slo
from loadtest.summary import Summary, summarise
from loadtest.window import Window

LOAD_PROMPT, LOAD_OUTPUT = 200, 32  # tokens, in the middle
SHARE = 0.7  # of the requests that one after the other would serve
LEAST_S, LONGEST_S, EDGE_S = 12.0, 40.0, 1.0  # of a load, and what does not count of it at either end
SEED = 7
COMPARED = ("TTFT P50 (ms)", "TTFT P90 (ms)", "TPOT P50 (ms)", "TPOT P90 (ms)")
FIRST = (0.7, 0.5)
FACTORS = (1.6, 1.25, 1.1)
LEAST = 0.05  # of a speed
NEARLY = 1.25  # what explains the times up to so much worse than the best might be true as well
NO_SLO = Slo(ttft_s=60.0)
Point = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A cluster of this configuration (`section.key`) under this load. `measured`: by the names in COMPARED."""

    settings: Mapping[str, str]
    offer: Offer
    measured: Mapping[str, float]


async def loaded(address: str, settings: Mapping[str, str], alone_s: float, requests: int) -> LoadedRun:
    """`alone_s`: of a request of LOAD_PROMPT and LOAD_OUTPUT tokens alone. Raises ValueError if too few requests were served."""
    rate = SHARE / alone_s
    seconds = min(LONGEST_S, max(LEAST_S, 2 * EDGE_S + requests / rate))
    load = Workload(input=f"{LOAD_PROMPT // 2}-{LOAD_PROMPT * 3 // 2}", output=str(LOAD_OUTPUT), duration_s=seconds)
    offer, _ = offer_of(load, rate, SEED, Window(seconds, EDGE_S, EDGE_S))
    async with GrpcDoor(address, "load") as door:
        done = await drive(offer.items, offer.times, door, duration_s=seconds, timeout_s=offer.timeout_s)
    measured = _compared(summarise(done.records, offer.window, NO_SLO, due=done.due))
    if len(measured) < len(COMPARED):
        raise ValueError(f"a load of {rate:.2g} requests/s: too few were served to tell how long they took")
    return LoadedRun(settings, offer, measured)


def crowding_of(profile: Profile, runs: Sequence[LoadedRun], cores: int) -> Fitted:
    """`profile`: all but these numbers. `cores`: which all processes of a run shared."""
    settings = [setting_of(config_layers.load(env={}, flags=dict(one.settings)).config, profile, cores) for one in runs]

    def off(point: Point) -> float:
        """The root of the mean square of the logarithms."""
        tried = _with(profile, point)
        logs = list[float]()
        for one, setting in zip(runs, settings, strict=True):
            done = run(setting, tried, one.offer)
            told = _compared(summarise(done.records, one.offer.window, NO_SLO, due=done.due))
            logs += [math.log(told[name] / one.measured[name]) for name in one.measured if name in told]
        return math.sqrt(sum(each * each for each in logs) / len(logs)) if logs else math.inf

    found = search(off, FIRST, FACTORS)
    best = min(found, key=found.__getitem__)
    draws = tuple(_named(point) for point, error in found.items() if error <= NEARLY * found[best])
    return Fitted(_named(best), draws, found[best], sum(len(one.measured) for one in runs), "loads, told by the simulator")


def search(off: Callable[[Point], float], first: Point, factors: Sequence[float]) -> dict[Point, float]:
    """All that was tried, each number from LEAST to 1, with how far it is off."""
    found = {first: off(first)}
    best = first
    for factor in factors:
        moved = True
        while moved:
            moved = False
            for point in _around(best, factor):
                if point not in found:
                    found[point] = off(point)
                if found[point] < found[best]:
                    best, moved = point, True
                    break
    return found


def _around(point: Point, factor: float) -> Iterator[Point]:
    for i, value in enumerate(point):
        for moved in (value / factor, value * factor):
            yield (*point[:i], min(1.0, max(LEAST, moved)), *point[i + 1 :])


def _with(profile: Profile, point: Point) -> Profile:
    return replace(profile, models={**profile.models, "crowding": Fitted(_named(point))})


def _named(point: Point) -> dict[str, float]:
    return dict(zip(NUMBERS["crowding"], point, strict=True))


def _compared(summary: Summary) -> dict[str, float]:
    return {name: value for name in COMPARED if (value := FIGURES[name](summary))}
