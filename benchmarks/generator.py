"""Checks that the load generator measures the server and not itself.

    python benchmarks/generator.py [--json FILE]

First a queue whose times are known: M/D/1 (Poisson arrivals, one server, constant service). The measured percentiles of its answer times,
with a 95 % interval over the seeds, are printed beside the theory's; if the theory lies outside the interval, that is a miss. Then a real
cluster of the toy model, whose steps take time but no core, like an accelerator's. It is offered five times what it can serve until more
than a thousand streams are open, and the script reports how late the generator was. `--quick` only shows, in seconds, that this works.
"""

import argparse
import asyncio
import json
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import describe

from baton.models.make_small import make_toy
from loadtest.access import DoorAccess
from loadtest.arrivals import Poisson
from loadtest.cluster import RunningCluster
from loadtest.drive import Answer, Run, drive
from loadtest.estimate import mean_and_interval
from loadtest.grpc_door import GrpcDoor
from loadtest.measure import warm_up
from loadtest.plan import FIRST_ID
from loadtest.summary import Summary, summarise
from loadtest.window import Window
from loadtest.workload import Item

SERVICE_S, LOADS = 0.020, (0.5, 0.8)
STEP_MS, AT_ONCE = 30, 32  # of a worker
PROMPT, OUTPUT, OVERLOAD, STREAMS, TIMEOUT_S = 64, 64, 5.0, 1000, 120.0
WORDS = 256  # prompts are made of the model's token ids below this


@dataclass(frozen=True, slots=True)
class Size:
    seeds: int
    queue_s: float  # length of each run of the queue
    streams: int  # how many should be open at the same time


WHOLE, QUICK = Size(5, 30.0, STREAMS), Size(2, 2.0, 20)


def md1_percentile(percent: float, load: float, service: float) -> float:
    """The percentile of wait + service in an M/D/1 queue, in seconds, by bisection of the waiting time's distribution:

    P(W ≤ t) = (1 - λD) Σ_{k=0}^{⌊t/D⌋} e^{λ(t - kD)} (-λ(t - kD))^k / k!   (Erlang 1909; Crommelin 1932)
    """
    rate = load / service

    def below(t: float) -> float:
        terms = ((rate * (t - k * service), k) for k in range(math.floor(t / service) + 1))
        return (1 - load) * math.fsum(math.exp(x) * (-x) ** k / math.factorial(k) for x, k in terms)

    low, high = 0.0, 30 * service  # beyond that, the alternating sum loses its precision
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < percent / 100 else (low, middle)
    return high + service


class Queue:
    """A door with one server: each answer comes `service` after the previous answer or after its own arrival, whichever is later."""

    def __init__(self, service: float) -> None:
        self._service, self._free = service, 0.0

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: Callable[[int], None]) -> Answer:
        loop = asyncio.get_running_loop()
        self._free = max(self._free, loop.time()) + self._service
        await asyncio.sleep(self._free - loop.time())
        on_tokens(1)
        return Answer("ok", tokens=(1,))


async def measure_queue(load: float, seed: int, queue_s: float) -> Summary:
    items = [Item((1,), 1)] * int(2 * queue_s * load / SERVICE_S)
    times = Poisson(load / SERVICE_S).times(random.Random(seed))
    run = await drive(items, times, Queue(SERVICE_S), duration_s=queue_s, timeout_s=queue_s)
    return summarise(run.records, Window(queue_s, queue_s / 10), due=run.due)


async def compare_queue(load: float, size: Size) -> dict[str, object]:
    told = [await measure_queue(load, seed, size.queue_s) for seed in range(1, size.seeds + 1)]
    void = [one.void for one in told if one.void]
    row: dict[str, object] = {"load": load, "requests": sum(one.requests for one in told), "void": void}
    for percent in (50, 90):
        measured = mean_and_interval([getattr(one.ttft_ms, f"p{percent}") for one in told])
        theory = 1000 * md1_percentile(percent, load, SERVICE_S)
        hit = measured.low is not None and measured.high is not None and measured.low <= theory <= measured.high
        row |= {f"p{percent}": measured.mean, f"p{percent} interval": measured.half_width}
        row |= {f"p{percent} theory": theory, f"p{percent} hit": hit}
        interval = f"{measured.mean:6.1f} ms ± {measured.half_width or math.nan:4.1f}"
        print(f"load {load}: P{percent} {interval}, M/D/1 {theory:6.1f} ms: {'inside' if hit else 'MISSED'}")
    lag = max(one.lag_ms.p99 or 0.0 for one in told)
    print(f"          lag P99 {lag:.1f} ms; {len(told) - len(void)} of {len(told)} runs count")
    return row | {"lag_p99_ms": lag}


async def flood(address: str, rate: float, duration_s: float) -> Run:
    rng = random.Random(1)
    items = [Item(tuple(rng.randrange(FIRST_ID, WORDS) for _ in range(PROMPT)), OUTPUT) for _ in range(int(rate * duration_s * 1.3) + 50)]
    async with GrpcDoor(address) as door:
        return await drive(items, Poisson(rate).times(random.Random(2)), door, duration_s=duration_s, timeout_s=TIMEOUT_S)


async def compare_cluster(model: Path, size: Size) -> dict[str, object]:
    make_toy(model, step_delay_ms=STEP_MS)
    settings = {
        "model.path": str(model),
        "engine.max_num_seqs": str(AT_ONCE),
        "prefill.replicas": "0",
        "decode.replicas": "2",
        "engine.threads": "1",
        "router.max_queue": "8192",
        "telemetry.log_level": "warning",
    }
    async with RunningCluster(settings, "generator") as endpoints:
        address = endpoints["grpc"]
        await warm_up(address, TIMEOUT_S, DoorAccess())
        full = await flood(address, 60.0, 5.0)
        done = [record for record in full.records if record.outcome == "ok"]
        served = len(done) / max(record.ended for record in done)
        rate = OVERLOAD * served
        run = await flood(address, rate, 1.3 * size.streams / (rate - served))
    told = summarise(run.records, Window(run.duration_s), due=run.due)
    lag, most = told.lag_ms, told.max_concurrent_requests
    print(f"cluster: serves {served:.1f} requests/s; offered {rate:.0f}/s: {told.requests} requests, up to {most} concurrent streams")
    print(f"         lag P50 {lag.p50:.1f} ms, P99 {lag.p99:.1f} ms, max {lag.max:.1f} ms; {told.void or 'the run counts'}")
    found: dict[str, object] = {"served": served, "offered": rate, "requests": told.requests, "streams": most, "void": told.void}
    return found | {"lag_p50_ms": lag.p50, "lag_p99_ms": lag.p99}


async def measure(size: Size) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        return {"queue": [await compare_queue(load, size) for load in LOADS], "cluster": await compare_cluster(Path(folder), size)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="short runs, whose numbers mean nothing")
    options = parser.parse_args()
    print(describe())
    found = asyncio.run(measure(QUICK if options.quick else WHOLE))
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), **found}, indent=1))


if __name__ == "__main__":
    main()
