"""What serving costs in addition to computing: the router per request and per token, and a handoff's checks as a share of the request.

    python benchmarks/serving.py [--json FILE]

Starts real clusters through `baton up`. The router's cost is the CPU time of its process (user + system, from /proc), on the toy model,
whose steps cost almost nothing. The handoff is measured on the small model: the decode worker times the read, the digests and the lease
check.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from machine import describe

from baton.client import AsyncClient, Result
from baton.models.make_small import make, make_toy
from baton.v1 import worker_pb2, worker_pb2_grpc

SEED, ROUNDS = 7, 5
REQUESTS, TOKENS, AT_ONCE = 300, 101, 32
PROMPTS = (256, 512, 1024, 1900)


@contextmanager
def cluster(model: Path, *flags: str) -> Iterator[dict[str, str]]:
    """Endpoints of a cluster with one prefill and one decode worker. SIGTERM ends it, too: nothing else would."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "BATON_STATE_DIR": folder}
        ports = ("--router.port", "0", "--router.admin-port", "0", "--router.http-port", "0", "--router.page-port", "0")
        fixed = ("--detach", "--model", str(model), "--cluster.name", "bench", *ports)
        up = subprocess.run([sys.executable, "-m", "baton", "up", *fixed, *flags], env=env, capture_output=True, text=True, timeout=180)
        if up.returncode:
            sys.exit(up.stderr)
        try:
            yield json.loads(up.stdout)["endpoints"]
        finally:
            subprocess.run([sys.executable, "-m", "baton", "down", "--name", "bench"], env=env, capture_output=True, timeout=90)


def router_pid(admin: str) -> int:
    with grpc.insecure_channel(admin) as channel:
        answer = worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=5)
    return int(answer.router.pid)


def cpu_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3); /proc counts in hundredths of a second


async def ask(client: AsyncClient, prompt: list[int], tokens: int) -> tuple[float, Result]:
    """(seconds until the first token, result)."""
    began, first = time.perf_counter(), 0.0
    async with client.generate(token_ids=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, timeout_s=120) as stream:
        async for token in stream:
            if token.index == 0:
                first = time.perf_counter() - began
        return first, stream.result


async def load(client: AsyncClient, tokens: int, offset: int) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> None:
        async with gate:
            await ask(client, [(offset + i * 31 + k) % 256 for k in range(64)], tokens)

    await asyncio.gather(*(one(i) for i in range(REQUESTS)))


async def measure_router(endpoints: dict[str, str]) -> dict[str, Any]:
    pid = router_pid(endpoints["admin"])
    rows: dict[str, list[float]] = {"request_ms": [], "token_us": [], "requests_per_s": [], "tokens_per_s": [], "alone_ttft_ms": []}
    async with AsyncClient(endpoints["grpc"]) as client:
        await load(client, 2, 0)  # warm-up
        for round_ in range(ROUNDS):
            costs = {}
            for tokens in (1, TOKENS):
                before, began = cpu_s(pid), time.perf_counter()
                await load(client, tokens, 1000 * round_ + tokens)
                costs[tokens] = (cpu_s(pid) - before, time.perf_counter() - began)
            rows["request_ms"].append(costs[1][0] / REQUESTS * 1000)
            rows["token_us"].append((costs[TOKENS][0] - costs[1][0]) / (REQUESTS * (TOKENS - 1)) * 1e6)
            rows["requests_per_s"].append(REQUESTS / costs[1][1])
            rows["tokens_per_s"].append(REQUESTS * TOKENS / costs[TOKENS][1])
            for i in range(20):
                first, _ = await ask(client, [(round_ * 20 + i + k) % 251 for k in range(64)], 2)
                rows["alone_ttft_ms"].append(first * 1000)
    return {name: (statistics.median(values), min(values), max(values)) for name, values in rows.items()}


async def measure_handoff(endpoints: dict[str, str]) -> list[dict[str, float]]:
    rows = []
    async with AsyncClient(endpoints["grpc"]) as client:
        for length in PROMPTS:
            results = []
            for i in range(12):
                prompt = [(SEED + i * 7919 + length * 31 + k * (i + 3)) % 2000 + 8 for k in range(length)]
                results.append(await ask(client, prompt, 8))
            results = results[2:]
            rows.append(
                {
                    "prompt": length,
                    "mib": results[0][1].handoff["bytes"] / 2**20,
                    "ttft_ms": statistics.median(first * 1000 for first, _ in results),
                    **{
                        name: statistics.median(result.stages_ms[name] for _, result in results)
                        for name in ("queue", "prefill", "prefill_compute", "transfer", "read", "verify")
                    },
                    "recomputed": sum(result.handoff["recomputed_tokens"] for _, result in results),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe())
    results: dict[str, Any] = {"machine": describe(), "seed": SEED}
    with tempfile.TemporaryDirectory() as folder:
        make_toy(Path(folder) / "toy")
        make(Path(folder) / "small")
        with cluster(Path(folder) / "toy", "--engine.kv-memory-mib", "64") as endpoints:
            results["router"] = router = asyncio.run(measure_router(endpoints))
        print(f"\nrouter, toy model, {AT_ONCE} concurrent requests; everything shares the cores; median (range) of {ROUNDS}")
        units = {"request_ms": "CPU ms per request", "token_us": "CPU µs per streamed token", "requests_per_s": "requests/s (1 token)"}
        units |= {"tokens_per_s": f"tokens/s ({TOKENS} per request)", "alone_ttft_ms": "ms to the first token, alone, with a handoff"}
        for name, unit in units.items():
            middle, least, most = router[name]
            print(f"  {middle:10.2f}  ({least:.2f} … {most:.2f})  {unit}")
        with cluster(Path(folder) / "small") as endpoints:
            results["handoff"] = rows = asyncio.run(measure_handoff(endpoints))
        print("\nhandoff, small model (5.8 M parameters, float32), one at a time; ms, medians of 10; share = verify / (TTFT + transfer)")
        print(f"{'prompt':>7} {'MiB':>6} {'TTFT':>8} {'prefill':>8} {'transfer':>9} {'read':>7} {'verify':>7} {'share':>7} recomputed")
        for row in rows:
            share = row["verify"] / (row["ttft_ms"] + row["transfer"])
            print(
                f"{row['prompt']:7} {row['mib']:6.2f} {row['ttft_ms']:8.1f} {row['prefill_compute']:8.1f} {row['transfer']:9.2f}"
                f" {row['read']:7.2f} {row['verify']:7.2f} {share:7.1%} {row['recomputed']:10}"
            )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
