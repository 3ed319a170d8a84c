"""Prefix hit rate and time to the first token with one, two and three routers over the same workers, under the same load.

    python benchmarks/routers.py [--repeats 3] [--rate 40] [--seconds 20] [--seed 1] [--json FILE]

Two prefill workers of the toy model, which waits 60 µs for each prompt token that it computes: a missed prefix costs 46 ms. Each keeps two
thirds of the prefixes: a request at the wrong worker computes its prefix and pushes another one out. Each request goes to a router drawn
at random. Requests arrive as a Poisson process, whether or not earlier ones have ended. Each repeat draws its own load, which
all arms get, in turned order; each arm starts with empty caches. Ratios are to the one router of the same repeat. Arms with idle routers
show what these cost the machine's cores: the rest of a difference is the routers' choices.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from machine import describe
from serving import ask, cluster

from baton.client import AsyncClient
from baton.models.make_small import make_toy
from baton.v1 import worker_pb2, worker_pb2_grpc

ARMS = {"1": (1, 1), "2": (2, 2), "3": (3, 3), "2, one used": (2, 1), "3, one used": (3, 1)}  # routers, and how many get requests
PREFIXES, PREFIX, SUFFIX, OUTPUT = 64, 768, 64, 8  # prefixes; tokens of each, of what follows it, and of the output
WAIT_S = 20.0
SKEW = 0.8  # exponent of Zipf's law: how much more often the first prefixes are asked for than the last
FLAGS = ("--prefill.replicas", "2", "--decode.replicas", "2", "--engine.kv-memory-mib", "4", "--router.bypass-tokens", "0")


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt: list[int]
    draw: float  # chooses the router


def arrivals(rng: random.Random, rate: float, seconds: float) -> list[Arrival]:
    prefixes = [[rng.randrange(256) for _ in range(PREFIX)] for _ in range(PREFIXES)]
    weights = [1 / (rank + 1) ** SKEW for rank in range(PREFIXES)]
    made, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        (prefix,) = rng.choices(prefixes, weights)
        made.append(Arrival(at_s, [*prefix, *(rng.randrange(256) for _ in range(SUFFIX))], rng.random()))
    return made


def doors(admin: str, count: int) -> list[str]:
    until, found = time.monotonic() + WAIT_S, list[str]()
    while len(found) != count:  # they learn of each other a moment after they listen
        if time.monotonic() > until:
            raise RuntimeError(f"{len(found)} of {count} routers are there")
        time.sleep(0.1)
        with grpc.insecure_channel(admin, [("grpc.enable_http_proxy", 0)]) as channel:
            told = worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=10)
        found = [router.endpoints["grpc"] for router in told.routers]
    return found


async def run(addresses: list[str], plan: list[Arrival]) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(address)) for address in addresses]
        for client in clients:
            await ask(client, [1, 2, 3], 2)
        began = time.perf_counter()

        async def one(arrival: Arrival) -> tuple[float, int]:
            await asyncio.sleep(arrival.at_s - (time.perf_counter() - began))
            due = began + arrival.at_s
            client = clients[int(arrival.draw * len(clients))]
            late = time.perf_counter() - due
            first, result = await ask(client, arrival.prompt, OUTPUT)
            return late + first, result.usage.cached_tokens

        done = await asyncio.gather(*map(one, plan))
    firsts = sorted(first for first, _ in done)
    return {
        "hit_rate": sum(cached for _, cached in done) / (len(done) * (PREFIX + SUFFIX)),
        "ttft_p50_ms": statistics.median(firsts) * 1e3,
        "ttft_p99_ms": firsts[int(0.99 * len(firsts))] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe(), "rate": options.rate, "seconds": options.seconds, "seed": options.seed}
    print(results["machine"])
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        make_toy(Path(folder) / "toy", token_delay_us=60)
        for repeat in range(options.repeats):
            plan = arrivals(random.Random(f"{options.seed} {repeat}"), options.rate, options.seconds)
            for arm in list(ARMS)[:: -1 if repeat % 2 else 1]:
                there, used = ARMS[arm]
                with cluster(Path(folder) / "toy", *FLAGS, "--router.replicas", str(there)) as endpoints:
                    rows[arm].append(asyncio.run(run(doors(endpoints["admin"], there)[:used], plan)))
                print(f"  repeat {repeat}, {arm} routers, {len(plan)} requests: {shown(rows[arm][-1])}", flush=True)
    results["routers"] = rows
    print(f"\nmedian ratio to one router (range over {options.repeats} repeats)")
    for arm in list(ARMS)[1:]:
        cells = []
        for name in rows[arm][0]:
            ratios = [many[name] / one[name] for many, one in zip(rows[arm], rows["1"], strict=True)]
            cells.append(f"{name} {statistics.median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f})")
        print(f"  {arm} routers: " + ", ".join(cells))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def shown(row: dict[str, float]) -> str:
    return f"hit rate {row['hit_rate']:.3f}, TTFT P50 {row['ttft_p50_ms']:.1f} ms, P99 {row['ttft_p99_ms']:.1f} ms"


if __name__ == "__main__":
    main()
