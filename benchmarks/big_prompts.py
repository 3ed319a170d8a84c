"""Prompts of 220 KB (tens of thousands of tokens): what the router itself takes until the first token, requests per second, and the longest
gap in a small stream of a process beside them.

    python benchmarks/big_prompts.py [--clients 20 200] [--waves 3] [--rates 1 4] [--seconds 30] [--burners 0 4] [--step-ms 5]
        [--conversations 6] [--json FILE]

--clients: so many at once, and the next wave when all have their answer. A burst of distinct prompts waits for its own tokenization.
--rates: an open loop, so many requests a second at random moments (a Poisson process), whether the earlier ones have ended or not.
--burners: no prompts at all, but so many processes that compute, which have nothing to do with Baton: what gap the machine's own
scheduling makes, with as many threads that want a core as the prompts have (two that tokenize, a prefill worker's, and the clients').
--conversations: so many chats of 220 KB, each sent again with three short turns more, with and without `router.known_texts_mib`.

Workers are toys, which compute such a prompt in one step, and the tokenizer is that of tale. A step takes `--step-ms` at least: a stream as
fast as a toy can make it would keep two cores busy by itself, and its gaps would be those of the scheduler. The router's own time is what
`stages` of the answer calls the queue: to validate, tokenize, hash, admit and choose, waiting included. All processes share the machine's
cores.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing as mp
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from machine import describe
from serving import cluster, cpu_s, router_pid
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.client import AsyncClient
from baton.models.make_small import make_toy

BYTES, CONTEXT, SEED = 220_000, 1 << 17, 7
MESSAGE_BYTES, TURNS = 20_000, 3
FLAGS = (
    "--engine.max-num-batched-tokens", str(CONTEXT), "--engine.kv-memory-mib", "3000", "--engine.max-num-seqs", "256",
    "--router.max-inflight", "256", "--router.default-timeout-s", "300",
)  # fmt: skip


class Writer:
    def __init__(self) -> None:
        self.rng = random.Random(SEED)
        vocabulary = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
        self._words = [word for i in range(vocabulary.get_vocab_size()) if (word := vocabulary.decode([i])).strip().isalpha()]

    def text(self, size: int = BYTES) -> str:
        return " ".join(self.rng.choices(self._words, k=size // 4))[:size]


def watch_gaps(address: str, flows: Any, stop: Any, told: Any) -> None:
    """A process of its own: the longest times between two tokens of a stream that goes on until `stop`. `flows`: it has begun."""

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
                            flows.set()
                        last = now
                        if stop.is_set():
                            break
        return sorted(found)

    told.put(asyncio.run(watch()))


async def ask(client: AsyncClient, text: str | None = None, **more: Any) -> dict[str, float]:
    async with client.generate(text, max_tokens=1, temperature=0.0, ignore_eos=True, timeout_s=300, **more) as stream:
        async for _ in stream:
            pass
        return {"queue_ms": stream.result.stages_ms["queue"], "tokens": float(stream.result.usage.prompt_tokens)}


async def burn(count: int, seconds: float) -> list[dict[str, float]]:
    code = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: sum(range(1000))"
    burning = [await asyncio.create_subprocess_exec(sys.executable, "-c", code) for _ in range(count)]
    await asyncio.sleep(seconds)
    for process in burning:
        await process.wait()
    return []


async def wave(client: AsyncClient, prompts: list[str]) -> list[dict[str, float]]:
    return list(await asyncio.gather(*(ask(client, text) for text in prompts)))


async def open_loop(client: AsyncClient, rate: float, seconds: float, writer: Writer) -> list[dict[str, float]]:
    asked: list[asyncio.Task[dict[str, float]]] = []
    prompts = [writer.text() for _ in range(int(rate * seconds))]
    due = time.perf_counter()
    for prompt in prompts:
        due += writer.rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asked.append(asyncio.create_task(ask(client, prompt)))
    return list(await asyncio.gather(*asked))


async def watched(endpoints: dict[str, str], load: Callable[[], Awaitable[list[dict[str, float]]]]) -> dict[str, Any]:
    """What `load` gives, beside a small stream."""
    processes = mp.get_context("spawn")
    flows, stop, told = processes.Event(), processes.Event(), processes.Queue()
    watching = processes.Process(target=watch_gaps, args=(endpoints["grpc"], flows, stop, told), daemon=True)
    watching.start()
    await asyncio.to_thread(flows.wait, 60)
    began = time.perf_counter()
    ended = await load()
    took = time.perf_counter() - began
    stop.set()
    gaps = await asyncio.to_thread(told.get, True, 60)
    found: dict[str, Any] = {
        "gap ms": {"P50": gaps[len(gaps) // 2] * 1000, "P99": gaps[int(0.99 * len(gaps))] * 1000, "longest": gaps[-1] * 1000}
    }
    if ended:
        queue = sorted(each["queue_ms"] for each in ended)
        found |= {"requests": len(ended), "requests/s": len(ended) / took, "tokens": statistics.mean(each["tokens"] for each in ended)}
        found["queue ms"] = {"P50": statistics.median(queue), "P99": queue[int(0.99 * (len(queue) - 1))]}
    return found


async def measure(endpoints: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"burners": {}, "clients": {}, "rates": {}}
    writer = Writer()

    async def waves(client: AsyncClient, prompts: list[list[str]]) -> list[dict[str, float]]:
        return [one for texts in prompts for one in await wave(client, texts)]

    async with AsyncClient(endpoints["grpc"]) as client:
        await wave(client, [writer.text() for _ in range(2)])
        for count in options.burners:
            found["burners"][str(count)] = one = await watched(endpoints, partial(burn, count, options.seconds))
            print(f"{count} processes that compute: {one}", flush=True)
        for count in options.clients:
            prompts = [[writer.text() for _ in range(count)] for _ in range(options.waves)]
            found["clients"][str(count)] = one = await watched(endpoints, partial(waves, client, prompts))
            print(f"{count} at once: {one}", flush=True)
        for rate in options.rates:
            found["rates"][f"{rate:g}"] = one = await watched(endpoints, partial(open_loop, client, rate, options.seconds, writer))
            print(f"{rate:g} a second: {one}", flush=True)
    return found


async def converse(endpoints: dict[str, str], count: int) -> dict[str, list[float]]:
    """The router's processor time and its own, for the first turn of each conversation, which has 220 KB, and for the mean of the later
    ones, which send it again and a little more."""
    writer, pid = Writer(), router_pid(endpoints["admin"])
    found: dict[str, list[float]] = {"first_cpu_ms": [], "later_cpu_ms": [], "first_queue_ms": [], "later_queue_ms": []}
    async with AsyncClient(endpoints["grpc"]) as client:
        await ask(client, writer.text())
        for _ in range(count):
            roles = itertools.cycle(("user", "assistant"))
            messages = [{"role": next(roles), "content": writer.text(MESSAGE_BYTES)} for _ in range(BYTES // MESSAGE_BYTES)]
            for name, turns in (("first", 1), ("later", TURNS)):
                before, queue = cpu_s(pid), 0.0
                for _ in range(turns):
                    queue += (await ask(client, messages=messages))["queue_ms"]
                    messages += [{"role": next(roles), "content": writer.text(400)} for _ in range(2)]
                found[f"{name}_cpu_ms"].append((cpu_s(pid) - before) * 1000 / turns)
                found[f"{name}_queue_ms"].append(queue / turns)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[20, 200])
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0, 4.0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--burners", type=int, nargs="*", default=[0, 4])
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": describe(), "seed": SEED, "load_average": os.getloadavg()[0]}
    found |= {"conversations": options.conversations, "seconds": options.seconds, "step_ms": options.step_ms}
    print(found["machine"])
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "toy"
        make_toy(model, vocab=2048, context=CONTEXT, step_delay_ms=options.step_ms)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SHIPPED / file, model)
        if options.clients or options.rates or options.burners:
            with cluster(model, *FLAGS) as endpoints:
                found |= asyncio.run(measure(endpoints, options))
        found["turns"] = {}
        for mib in ("0", "64") if options.conversations else ():
            with cluster(model, *FLAGS, "--router.known-texts-mib", mib) as endpoints:
                found["turns"][mib] = one = asyncio.run(converse(endpoints, options.conversations))
            print(f"known texts of {mib} MiB: {statistics.median(one['later_cpu_ms']):.1f} ms of the router's CPU a later turn", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
