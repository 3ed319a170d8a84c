"""The two doors of the router compared, each with and without `router.stream_interval_s`, in turns on two clusters of the toy model: the
router's CPU time for a request and for a streamed token (user + system, from /proc), what one core of the router could serve, and the
latency of a request that runs alone.

    python benchmarks/doors.py [--step-ms 0] [--json FILE]

--step-ms: how long each step of a worker takes. With 0, the router is the slowest part: tokens wait for it, and travel together.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from machine import describe
from serving import AT_ONCE, REQUESTS, TOKENS, ask, cluster, cpu_s, router_pid

from baton.client import AsyncClient
from baton.models.make_small import make_toy

ROUNDS, ALONE = 5, 100  # requests that run alone, in each round
INTERVAL_S = 0.05
Ask = Callable[[list[int], int], Awaitable[float]]  # prompt, output tokens → seconds until the first token


class HttpClient:
    """Keeps as many connections as there are concurrent requests. Parses as little of a stream as possible, so that it costs little."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: list[int], tokens: int) -> float:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        fields = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        began = time.perf_counter()
        writer.write(head.encode() + body)
        if not (await reader.readline()).startswith(b"HTTP/1.1 200"):
            raise RuntimeError("the request was refused")
        await reader.readuntil(b"data: ")
        first = time.perf_counter() - began
        await reader.readuntil(b"data: [DONE]\n\n")
        await reader.readuntil(b"0\r\n\r\n")
        self._idle.append((reader, writer))
        return first

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def load(ask: Ask, tokens: int, offset: int) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> None:
        async with gate:
            await ask([(offset + i * 31 + k) % 256 for k in range(64)], tokens)

    await asyncio.gather(*(one(i) for i in range(REQUESTS)))


async def measure(clusters: dict[str, dict[str, str]]) -> dict[str, dict[str, list[float]]]:
    """`clusters`: endpoints by name."""
    rows: dict[str, dict[str, list[float]]] = {}
    async with AsyncExitStack() as stack:
        doors: dict[str, tuple[int, Ask]] = {}
        for name, endpoints in clusters.items():
            pid, http = router_pid(endpoints["admin"]), HttpClient(endpoints["http"])
            stack.push_async_callback(http.close)
            doors[f"gRPC{name}"] = pid, over_grpc(await stack.enter_async_context(AsyncClient(endpoints["grpc"])))
            doors[f"HTTP{name}"] = pid, http.ask
        for round_ in range(ROUNDS + 1):  # the first is a warm-up
            for door in list(doors)[:: 1 if round_ % 2 else -1]:
                pid, asked = doors[door]
                spent, took = [], 0.0
                for tokens in (1, TOKENS):
                    before, began = cpu_s(pid), time.perf_counter()
                    await load(asked, tokens, 1000 * round_ + tokens)
                    spent.append((cpu_s(pid) - before) / REQUESTS)
                    took = time.perf_counter() - began
                alone = [await asked([(round_ * 20 + i + k) % 251 for k in range(64)], 2) * 1e3 for i in range(ALONE)]
                if round_:
                    row = rows.setdefault(door, defaultdict(list))
                    row["request_ms"].append(spent[0] * 1e3)
                    row["token_us"].append((spent[1] - spent[0]) / (TOKENS - 1) * 1e6)
                    row["tokens_per_s"].append(REQUESTS * TOKENS / took)
                    row["alone_p50_ms"].append(statistics.median(alone))
                    row["alone_p99_ms"].append(sorted(alone)[int(0.99 * ALONE)])
    return rows


def over_grpc(client: AsyncClient) -> Ask:
    async def one(prompt: list[int], tokens: int) -> float:
        return (await ask(client, prompt, tokens))[0]

    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe()}
    print(results["machine"])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_toy(Path(folder) / "toy", step_delay_ms=options.step_ms)
        clusters = {}
        for name, interval_s in {"": 0.0, f", joined for {INTERVAL_S * 1000:g} ms": INTERVAL_S}.items():
            flags = ("--engine.kv-memory-mib", "64", "--router.stream-interval-s", str(interval_s))
            clusters[name] = stack.enter_context(cluster(Path(folder) / "toy", *flags))
        results["doors"] = rows = asyncio.run(measure(clusters))
    print(f"\n{AT_ONCE} concurrent requests, everything on the same cores; median (range) of {ROUNDS} rounds of {REQUESTS} requests")
    for door, row in rows.items():
        cells = {name: f"{statistics.median(values):7.2f} ({min(values):.2f} … {max(values):.2f})" for name, values in row.items()}
        print(f"  {door}: router CPU {cells['request_ms']} ms a request, {cells['token_us']} µs a streamed token")
        per_core = 1e3 / statistics.median(row["request_ms"]), 1e6 / statistics.median(row["token_us"])
        print(f"        one core: {per_core[0]:.0f} requests/s of one token, {per_core[1]:.0f} streamed tokens/s")
        print(f"        seen: {cells['tokens_per_s']} tokens/s")
        print(f"        alone, to the first token: P50 {cells['alone_p50_ms']} ms, P99 {cells['alone_p99_ms']} ms")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
