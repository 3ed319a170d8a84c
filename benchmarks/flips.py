"""How soon a worker that is asked to serve the other role serves somebody in it: real processes, the proof included.

    python benchmarks/flips.py [--flips 20] [--json FILE]

A cluster of the toy model through `baton up`, two workers of each role, requests of 40 tokens of prompt and 16 of output at equal
distances, each checked token by token. The worker decode-1 is asked, as the planner asks, to serve prefill, and then decode again. Told
are the time from the question to its first token in the new role, and requests that were lost or had a wrong token.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from live_cluster import Cluster, cluster, toy, toy_output

from baton.client import AsyncClient, GenerateError
from baton.v1 import worker_pb2, worker_pb2_grpc

EVERY_S, PROMPT, OUTPUT, STEP_MS, WITHIN_S = 0.05, 40, 16, 5, 60.0
WORKER = "decode-1"


class Load:
    def __init__(self) -> None:
        self.firsts: list[tuple[float, str, str]] = []  # when a request's first token came, and from whom
        self.requests = self.lost = self.wrong = 0

    async def run(self, client: AsyncClient, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                self.requests += 1
                group.create_task(self._ask(client, [1 + (self.requests + place) % 97 for place in range(PROMPT)]))
                await asyncio.sleep(EVERY_S)

    async def _ask(self, client: AsyncClient, prompt: list[int]) -> None:
        times = []
        try:
            async with client.generate(token_ids=prompt, max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, timeout_s=60) as stream:
                async for _ in stream:
                    times.append(time.monotonic())
                result = stream.result
        except GenerateError:
            self.lost += 1
            return
        self.wrong += list(result.token_ids) != toy_output(prompt, max_tokens=OUTPUT)
        # A prefill worker makes the first token, a decode worker the second.
        self.firsts += [(times[place], role, result.workers.get(role, "")) for place, role in enumerate(("prefill", "decode"))]

    async def first(self, role: str, since: float) -> float:
        """Until the worker's first token in this role after that moment."""
        while True:
            found = [at - since for at, its, worker in self.firsts if (its, worker) == (role, WORKER) and at >= since]
            if found:
                return min(found)
            if time.monotonic() > since + WITHIN_S:
                raise TimeoutError(f"{WORKER} serves nobody as {role}")
            await asyncio.sleep(0.01)


def flip(live: Cluster, role: str) -> None:
    with live._channel() as channel:
        asked = worker_pb2.AdminSetRolesRequest(worker=WORKER, roles=[role], prove=True)
        worker_pb2_grpc.AdminStub(channel).SetRoles(asked, timeout=30)


async def measure(live: Cluster, flips: int) -> dict[str, Any]:
    load, stop, seconds = Load(), asyncio.Event(), list[float]()
    async with live.client() as client, asyncio.TaskGroup() as group:
        group.create_task(load.run(client, stop))
        await asyncio.sleep(2.0)
        for number in range(flips):
            role = ("prefill", "decode")[number % 2]
            asked = time.monotonic()
            await asyncio.to_thread(flip, live, role)
            seconds.append(await load.first(role, asked))
            await asyncio.sleep(0.5)
        stop.set()
    return {"first_token_s": seconds, "requests": load.requests, "lost": load.lost, "wrong": load.wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model = toy(Path(folder) / "toy", step_delay_ms=STEP_MS)
        with cluster(model, "--router.bypass-tokens", "0", prefill=2, decode=2) as live:
            told = asyncio.run(measure(live, asked.flips))
    print(json.dumps(told))
    if asked.json:
        asked.json.write_text(json.dumps({"machine": describe(), "load_average": load, **told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
