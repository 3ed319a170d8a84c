"""How many tokens a conversation computes: fetching KV back from the decode worker against computing it again.

    python benchmarks/conversation.py [--json FILE] [--repeats N]

Random Llama of 30 M parameters in float32; two prefill workers, one decode worker, one host. Conversations have eight turns: each prompt is
the previous prompt, its answer, and about a hundred new tokens. Computed tokens are those of the prefill workers: the prompt's tokens less
those in their own cache and those fetched. Each setting of `router.fetch_tokens` has its own cluster; the conversations take turns.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from machine import describe
from serving import ask, cluster

from baton.cli.admin import read_records
from baton.client import AsyncClient
from baton.models.make_small import make
from baton.v1 import worker_pb2, worker_pb2_grpc

SHAPE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "context": 4096}
SEED, TURNS, NEW, ANSWER = 11, 8, (90, 110), 60
REPEATS, WARM_UP = 4, 1
PAUSE_S = 0.5  # between turns: a person who reads an answer takes longer, and the router learns of the blocks meanwhile
ARMS = {"default (128)": (), "small (16)": ("--router.fetch-tokens", "16"), "off": ("--router.fetch-tokens", "0")}


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: int  # tokens
    cached: int
    fetched: int
    bypassed: bool
    ttft_ms: float

    @property
    def computed(self) -> int:
        return self.prompt - self.cached - self.fetched


def last_record(admin: str) -> dict[str, Any]:
    with grpc.insecure_channel(admin, [("grpc.enable_http_proxy", 0)]) as channel:
        answer = worker_pb2_grpc.AdminStub(channel).Trace(worker_pb2.TraceRequest(last=1), timeout=5)
    return read_records(answer)[0]


class Conversation:
    def __init__(self, client: AsyncClient, admin: str, seed: int) -> None:
        self._client, self._admin, self._rng = client, admin, random.Random(seed)
        self._said: list[int] = []
        self.turns: list[Turn] = []

    async def turn(self) -> None:
        self._said += [self._rng.randrange(10, 2000) for _ in range(self._rng.randint(*NEW))]
        first, result = await ask(self._client, self._said, ANSWER)
        record = await asyncio.to_thread(last_record, self._admin)
        assert record["prompt_tokens"] == len(self._said) and not record["handoff"]["recomputed_tokens"]
        told = record["cached_tokens"], record["fetched_tokens"], bool(record["bypasses"])
        self.turns.append(Turn(len(self._said), *told, first * 1000))
        self._said += result.token_ids


async def measure(endpoints: dict[str, dict[str, str]], repeats: int) -> dict[str, list[list[Turn]]]:
    """Conversations by arm."""
    done: dict[str, list[list[Turn]]] = {arm: [] for arm in endpoints}
    async with AsyncExitStack() as stack:
        clients = {arm: await stack.enter_async_context(AsyncClient(at["grpc"])) for arm, at in endpoints.items()}
        for repeat in range(WARM_UP + repeats):
            talks = {arm: Conversation(clients[arm], endpoints[arm]["admin"], SEED + repeat) for arm in endpoints}
            for _ in range(TURNS):
                for talk in talks.values():
                    await talk.turn()
                await asyncio.sleep(PAUSE_S)
            if repeat >= WARM_UP:
                for arm, talk in talks.items():
                    done[arm].append(talk.turns)
    return done


def summary(done: dict[str, list[list[Turn]]]) -> list[dict[str, Any]]:
    rows = []
    for arm, talks in done.items():
        for number, turns in enumerate(zip(*talks, strict=True), 1):
            ttft = [turn.ttft_ms for turn in turns]
            facts = {name: statistics.median(getattr(turn, name) for turn in turns) for name in ("prompt", "cached", "fetched", "computed")}
            row = {"fetch_tokens": arm, "turn": number, **facts, "bypassed": sum(turn.bypassed for turn in turns)}
            rows.append({**row, "ttft_ms": [statistics.median(ttft), min(ttft), max(ttft)]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{describe()}; load average {load:.1f}; seed {SEED}, {options.repeats} conversations an arm")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make(model := Path(folder) / "model", **SHAPE)
        fixed = ("--prefill.replicas", "2", "--engine.threads", "1", "--engine.kv-memory-mib", "192", "--router.bypass-tokens", "0")
        endpoints = {arm: stack.enter_context(cluster(model, *fixed, *flags)) for arm, flags in ARMS.items()}
        rows = summary(asyncio.run(measure(endpoints, options.repeats)))
    print(f"{'fetch_tokens':14} {'turn':>4} {'prompt':>7} {'cached':>7} {'fetched':>8} {'computed':>9}   TTFT, ms (range)")
    for row in rows:
        middle, least, most = row["ttft_ms"]
        facts = f"{row['prompt']:7.0f} {row['cached']:7.0f} {row['fetched']:8.0f} {row['computed']:9.0f}"
        print(f"{row['fetch_tokens']:14} {row['turn']:4} {facts}   {middle:.0f} ({least:.0f} … {most:.0f})")
    for arm in ARMS:
        print(f"{arm:14} {sum(row['computed'] for row in rows if row['fetch_tokens'] == arm):.0f} tokens computed in {TURNS} turns")
    if options.json:
        told = {"machine": describe(), "load_average": load, "seed": SEED, "conversations": options.repeats, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
