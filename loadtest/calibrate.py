"""A short look at a model before a comparison: what to ask of it where nobody said. The proposal is printed as flags, and reported.

Objectives are multiples of the latencies of a request that is alone (DistServe's "SLO scale"): an arm that serves many at once may be so
much slower. Rates lie around what the first arm serves when it always has something to do.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from loadtest.access import DoorAccess
from loadtest.drive import Door
from loadtest.measure import warm_up
from loadtest.plan import ComparePlan, Note, Workload
from loadtest.slo import Slo, rounded_up
from loadtest.workload import Item

ALONE, ALONE_S = 8, 10.0  # requests one after the other, at most so many seconds
AT_ONCE, BUSY_S, RAMP_S = 16, 6.0, 1.5  # requests at once, for so many seconds after a ramp
TTFT_SCALE, TPOT_SCALE = 5.0, 3.0
LEAST_TTFT_S, LEAST_TPOT_S = 0.1, 0.01  # below these, the delays of an ordinary machine decide
SHARES = (0.25, 0.5, 1.0)  # of the capacity
MANY = 64.0  # requests/s for which there are enough
SEED = 0  # its requests are those of no other seed


@dataclass(frozen=True, slots=True)
class Seen:
    """What the first arm showed. Times in s, capacity in requests/s."""

    arm: str
    ttft_s: float
    tpot_s: float | None  # None: answers of one token
    capacity: float
    start_s: float  # of its cluster, with its end

    @property
    def slo(self) -> Slo:
        tpot = None if self.tpot_s is None else rounded_up(max(TPOT_SCALE * self.tpot_s, LEAST_TPOT_S))
        return Slo(ttft_s=rounded_up(max(TTFT_SCALE * self.ttft_s, LEAST_TTFT_S)), tpot_s=tpot)

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(float(f"{share * self.capacity:.2g}") for share in SHARES)

    def __str__(self) -> str:
        tpot = "" if self.tpot_s is None else f", TPOT {1000 * self.tpot_s:.3g} ms"
        return f"{self.arm}: TTFT {1000 * self.ttft_s:.3g} ms{tpot} alone, {self.capacity:.3g} requests/s with {AT_ONCE} at once"

    def as_json(self) -> dict[str, Any]:
        tpot = None if self.tpot_s is None else round(1000 * self.tpot_s, 2)
        return {"arm": self.arm, "ttft_ms": round(1000 * self.ttft_s, 2), "tpot_ms": tpot, "capacity": round(self.capacity, 3)}


async def calibrate(comparison: ComparePlan, workload: Workload, access: DoorAccess, timeout_s: float, note: Note) -> Seen:
    """Raises ClusterError, ConnectionError, WorkloadError and ValueError."""
    arm = comparison.make_arms()[0]
    items, _ = workload.items(MANY, SEED, note)
    note(f"looking at {arm.name} for about {ALONE_S / 2 + BUSY_S:.0f} s, to propose objectives and rates")
    began = perf_counter()
    async with comparison.running(arm) as endpoints:
        address = endpoints[access.protocol]
        await warm_up(address, timeout_s, access)
        started = perf_counter()
        async with access.door(address, "calibration") as door:
            rest = iter(items)
            alone = await _alone(door, rest, timeout_s)
            capacity = await _busy(door, items, timeout_s)
        stopped = perf_counter()
    tpots = [tpot for _, tpot in alone if tpot is not None]
    start_s = perf_counter() - stopped + started - began
    return Seen(arm.name, median(ttft for ttft, _ in alone), median(tpots) if tpots else None, capacity, start_s)


async def _alone(door: Door, items: Iterator[Item], timeout_s: float) -> list[tuple[float, float | None]]:
    """(TTFT, TPOT) of requests that each have the server to themselves."""
    seen: list[tuple[float, float | None]] = []
    end = perf_counter() + ALONE_S
    for item in items:
        sent, times = perf_counter(), await _ask(door, item, timeout_s)
        gaps = len(times) - 1
        seen.append((times[0] - sent, (times[-1] - times[0]) / gaps if gaps else None))
        if len(seen) == ALONE or perf_counter() > end:
            break
    return seen


async def _busy(door: Door, items: list[Item], timeout_s: float) -> float:
    """Requests/s that end while AT_ONCE are always in flight; at least one does."""
    begin = perf_counter() + RAMP_S
    ended: list[float] = []

    async def client(number: int) -> None:
        for item in items[number::AT_ONCE]:
            if perf_counter() > begin + BUSY_S:
                return
            ended.append((await _ask(door, item, timeout_s))[-1])

    await asyncio.gather(*(client(number) for number in range(AT_ONCE)))
    within = [at for at in ended if begin < at <= begin + BUSY_S]
    if within:
        return len(within) / (max(within) - begin)
    return len(ended) / (max(ended) - begin + RAMP_S)


async def _ask(door: Door, item: Item, timeout_s: float) -> list[float]:
    """When each token arrived. Raises ConnectionError for a request that did not end well."""
    times: list[float] = []
    answer = await door.ask(list(item.tokens), item.output_tokens, timeout_s, lambda count: times.extend([perf_counter()] * count))
    if answer.outcome != "ok" or not times:
        raise ConnectionError(f"a request of the calibration ended with {answer.outcome}: {answer.reason or 'no token'}")
    return times
