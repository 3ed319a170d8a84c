"""The two doors of the router compared, in turns on one cluster of the toy model: the router's CPU time for a request and for a streamed
token (user + system, from /proc), what one core of the router could serve, and the latency of a request that runs alone.

    python benchmarks/doors.py [--json FILE]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from machine import describe
from serving import AT_ONCE, REQUESTS, TOKENS, ask, cluster, cpu_s, router_pid

from baton.client import AsyncClient
from baton.models.make_small import make_toy

ROUNDS, ALONE = 5, 100  # requests that run alone, in each round
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


async def measure(endpoints: dict[str, str]) -> dict[str, dict[str, list[float]]]:
    pid = router_pid(endpoints["admin"])
    rows: dict[str, dict[str, list[float]]] = {}
    http = HttpClient(endpoints["http"])
    async with AsyncClient(endpoints["grpc"]) as grpc:

        async def over_grpc(prompt: list[int], tokens: int) -> float:
            return (await ask(grpc, prompt, tokens))[0]

        doors: dict[str, Ask] = {"gRPC": over_grpc, "HTTP": http.ask}
        for round_ in range(ROUNDS + 1):  # the first is a warm-up
            for door in list(doors)[:: 1 if round_ % 2 else -1]:
                spent = []
                for tokens in (1, TOKENS):
                    before = cpu_s(pid)
                    await load(doors[door], tokens, 1000 * round_ + tokens)
                    spent.append((cpu_s(pid) - before) / REQUESTS)
                alone = [await doors[door]([(round_ * 20 + i + k) % 251 for k in range(64)], 2) * 1e3 for i in range(ALONE)]
                if round_:
                    row = rows.setdefault(door, {"request_ms": [], "token_us": [], "alone_p50_ms": [], "alone_p99_ms": []})
                    row["request_ms"].append(spent[0] * 1e3)
                    row["token_us"].append((spent[1] - spent[0]) / (TOKENS - 1) * 1e6)
                    row["alone_p50_ms"].append(statistics.median(alone))
                    row["alone_p99_ms"].append(sorted(alone)[int(0.99 * ALONE)])
    await http.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe()}
    print(results["machine"])
    with tempfile.TemporaryDirectory() as folder:
        make_toy(Path(folder) / "toy")
        with cluster(Path(folder) / "toy", "--engine.kv-memory-mib", "64") as endpoints:
            results["doors"] = rows = asyncio.run(measure(endpoints))
    print(f"\n{AT_ONCE} concurrent requests, everything on the same cores; median (range) of {ROUNDS} rounds of {REQUESTS} requests")
    for door, row in rows.items():
        cells = {name: f"{statistics.median(values):7.2f} ({min(values):.2f} … {max(values):.2f})" for name, values in row.items()}
        print(f"  {door}: router CPU {cells['request_ms']} ms a request, {cells['token_us']} µs a streamed token")
        per_core = 1e3 / statistics.median(row["request_ms"]), 1e6 / statistics.median(row["token_us"])
        print(f"        one core: {per_core[0]:.0f} requests/s of one token, {per_core[1]:.0f} streamed tokens/s")
        print(f"        alone, to the first token: P50 {cells['alone_p50_ms']} ms, P99 {cells['alone_p99_ms']} ms")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
