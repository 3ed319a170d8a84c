"""Many clients at once with prompts of 220 KB (tens of thousands of tokens): what the router itself takes until the first token, requests
per second, and the longest gap in a small stream of a process beside them.

    python benchmarks/big_prompts.py [--clients 20 200] [--waves 3] [--json FILE]

Workers are toys, which compute such a prompt in one step, and the tokenizer is that of tale. The router's own time is what `stages` of the
answer calls the queue: to validate, tokenize, hash, admit and choose, waiting included. All processes share the machine's cores.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe
from serving import cluster, cpu_s, router_pid
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.client import AsyncClient
from baton.models.make_small import make_toy

BYTES, CONTEXT, SEED = 220_000, 1 << 17, 7
FLAGS = (
    "--engine.max-num-batched-tokens", str(CONTEXT), "--engine.kv-memory-mib", "3000", "--engine.max-num-seqs", "256",
    "--router.max-inflight", "256", "--router.default-timeout-s", "300",
)  # fmt: skip


def texts(count: int, rng: random.Random) -> list[str]:
    vocabulary = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    words = [word for i in range(vocabulary.get_vocab_size()) if (word := vocabulary.decode([i])).strip().isalpha()]
    made = []
    for _ in range(count):
        text = " ".join(rng.choices(words, k=BYTES // 4))
        made.append(text[:BYTES])
    return made


def watch_gaps(address: str, stop: Any, told: Any) -> None:
    """A process of its own: the longest times between two tokens of a stream that goes on until `stop`."""

    async def watch() -> list[float]:
        found: list[float] = []
        async with AsyncClient(address) as client:
            while not stop.is_set():
                last = 0.0
                async with client.generate(token_ids=[1, 2, 3], max_tokens=4000, temperature=0.0, ignore_eos=True, timeout_s=300) as stream:
                    async for _ in stream:
                        now = time.perf_counter()
                        if last:
                            found.append(now - last)
                        last = now
                        if stop.is_set():
                            break
        return sorted(found)

    told.put(asyncio.run(watch()))


async def wave(client: AsyncClient, prompts: list[str]) -> list[dict[str, float]]:
    async def one(text: str) -> dict[str, float]:
        began = time.perf_counter()
        async with client.generate(text, max_tokens=1, temperature=0.0, ignore_eos=True, timeout_s=300) as stream:
            async for _ in stream:
                pass
            return {"queue_ms": stream.result.stages_ms["queue"], "whole_ms": (time.perf_counter() - began) * 1000,
                    "tokens": float(stream.result.usage.prompt_tokens)}  # fmt: skip

    return list(await asyncio.gather(*(one(text) for text in prompts)))


async def measure(endpoints: dict[str, str], counts: list[int], waves: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rng = random.Random(SEED)
    processes = mp.get_context("spawn")
    async with AsyncClient(endpoints["grpc"]) as client:
        pid = router_pid(endpoints["admin"])
        await wave(client, texts(2, rng))
        for count in counts:
            prompts = [texts(count, rng) for _ in range(waves)]
            stop, told = processes.Event(), processes.Queue()
            watching = processes.Process(target=watch_gaps, args=(endpoints["grpc"], stop, told), daemon=True)
            watching.start()
            await asyncio.sleep(4)  # it has imported what it needs, and its stream flows
            began, used, all_ = time.perf_counter(), cpu_s(pid), []
            for texts_ in prompts:
                all_ += await wave(client, texts_)
            took, used = time.perf_counter() - began, cpu_s(pid) - used
            stop.set()
            gaps = await asyncio.to_thread(told.get, True, 60)
            queue = sorted(each["queue_ms"] for each in all_)
            found[str(count)] = {
                "requests/s": len(all_) / took,
                "router CPU ms": used / len(all_) * 1000,
                "queue ms": {"P50": statistics.median(queue), "P99": queue[int(0.99 * (len(queue) - 1))]},
                "tokens": statistics.mean(each["tokens"] for each in all_),
                "gap ms": {"P50": gaps[len(gaps) // 2] * 1000, "P99": gaps[int(0.99 * len(gaps))] * 1000, "longest": gaps[-1] * 1000},
            }
            print(f"{count} at once: {found[str(count)]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "toy"
        make_toy(model, vocab=2048, context=CONTEXT)
        shutil.copy(SHIPPED / "tokenizer.json", model)
        with cluster(model, *FLAGS) as endpoints:
            found = asyncio.run(measure(endpoints, options.clients, options.waves))
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "seed": SEED, "clients": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
