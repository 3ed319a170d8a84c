"""A part of the Mooncake conversation trace against tiers: real block hashes, one cluster after the other.

The trace (Qin et al., "Mooncake", 2024; `mooncake_conversation.jsonl`) has 12,031 requests of an hour, with a hash for each block of 512
tokens. It is scaled to a small machine: a block becomes one of 16 tokens, which is a block of the pool, so lengths are a 32nd; of the
conversations, which their second block tells apart (the first is the same in all), one in THIN is kept, whole; an hour takes REPLAY_S.
Requests longer than the model's context are left out. Arrivals do not wait for answers.
"""

import asyncio
import json
import random
import statistics
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from serving import ask

from baton.cli.admin import read_records
from baton.client import AsyncClient
from baton.v1 import worker_pb2, worker_pb2_grpc

HASHED, BLOCK = 512, 16  # tokens of a hash, there and here
SCALE, THIN, REPLAY_S, CONTEXT = HASHED // BLOCK, 32, 90.0, 2000
SLO_S = 1.0  # of the first token
ROOM_MIB = 512
RECENT = ("--telemetry.recent-requests", "2000")


@dataclass(frozen=True)
class Visit:
    at: float  # seconds
    prompt: list[int]
    answer: int  # tokens


def visits(path: Path) -> list[Visit]:
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        hashes, length, answer = row["hash_ids"], row["input_length"] // SCALE, max(2, row["output_length"] // SCALE)
        if len(hashes) < 2 or zlib.crc32(str(hashes[1]).encode()) % THIN or length + answer > CONTEXT:
            continue
        tokens = [token for each in hashes for token in random.Random(each).choices(range(10, 2000), k=BLOCK)]
        found.append(Visit(row["timestamp"] / 1000 * REPLAY_S / 3600, tokens[:length], answer))
    return found


def reusable(trace: list[Visit]) -> float:
    """The share of all prompt tokens that a cache without a bound would know."""
    seen, known, total = set[tuple[int, ...]](), 0, 0
    for visit in trace:
        blocks = [tuple(visit.prompt[: end + BLOCK]) for end in range(0, len(visit.prompt) - BLOCK, BLOCK)]
        known += BLOCK * next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        total += len(visit.prompt)
        seen.update(blocks)
    return known / total


def records(admin: str) -> list[dict[str, Any]]:
    with grpc.insecure_channel(admin, [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]) as channel:
        answer = worker_pb2_grpc.AdminStub(channel).Trace(worker_pb2.TraceRequest(last=2000), timeout=30)
    found: list[dict[str, Any]] = read_records(answer)
    return found


async def replay(endpoints: dict[str, str], trace: list[Visit]) -> dict[str, Any]:
    """TTFT in ms (median, 90 %), the share of prompt tokens that were not computed, answers per second whose first token was in time."""
    ttft: list[float] = []

    async def visit(one: Visit) -> None:
        await asyncio.sleep(max(0.0, began + one.at - time.perf_counter()))
        first, _ = await ask(client, one.prompt, one.answer)
        ttft.append(first)

    async with AsyncClient(endpoints["grpc"]) as client:
        began = time.perf_counter()
        results = await asyncio.gather(*map(visit, trace), return_exceptions=True)
        took = time.perf_counter() - began
    failed = sum(isinstance(result, BaseException) for result in results)
    told = [record for record in await asyncio.to_thread(records, endpoints["admin"]) if record["prompt_tokens"]]
    hits = sum(record["cached_tokens"] + record["fetched_tokens"] for record in told) / sum(record["prompt_tokens"] for record in told)
    good = sum(first <= SLO_S for first in ttft) / took
    p50, p90 = (1000 * statistics.quantiles(ttft, n=10)[place] for place in (4, 8))
    return {"ttft_ms": [p50, p90], "hit_rate": hits, "goodput": good, "failed": failed, "seconds": took}
