"""What tiers under the KV pool are worth: conversations that come back after their KV has left the pool, and what tiers cost if none does.

    python benchmarks/tiers.py [--json FILE] [--rounds N] [--conversations N] [--trace mooncake_conversation.jsonl] [--useless]

The checkpoint that ships; one prefill worker, one decode worker, one thread each, one host. The conversations together need five times
the pool of a worker; they speak in turn, so whatever one needs has left the pool when its turn comes. Each arm has its own cluster, and the
arms take turns. Then the workers of the arm with a disk are killed, and every conversation speaks again. Then prompts that never come back
go to new clusters: without tiers, with one that keeps all that it gets (as each does until it has seen that nothing returns), and with one
that has seen it, and only watches. At first a stream runs beside them, and the gaps between its tokens are compared; afterwards processor
time of both workers and time are compared, in turns; `--useless` does nothing else, and changes that part of a file. With a trace, a part
of it is replayed at last (`tier_trace.py`).
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from conversation import last_record
from machine import describe
from serving import ask, cluster, cpu_s
from tier_trace import RECENT, replay, reusable, visits
from tier_trace import ROOM_MIB as TRACE_MIB

from baton.cli.admin import read_status
from baton.cli.up import SHIPPED
from baton.client import AsyncClient
from baton.v1 import worker_pb2, worker_pb2_grpc

POOL_MIB, BLOCK_KIB = 16, 64
SEED, LENGTH, NEW, ANSWER = 3, 1500, 24, 8  # tokens
CONVERSATIONS, ROUNDS = 14, 4
FRESH, BATCH, BATCHES = 400, 8, 10
STREAM, STREAMING_S = 160, 24.0  # tokens of a stream; how long there are streams
FIXED = ("--engine.threads", "1", "--engine.kv-memory-mib", str(POOL_MIB), "--router.bypass-tokens", "0")
ROOM_MIB = 128
USELESS_MIB, MOST_FILLING = 32, 50  # room of tiers to which nothing returns; batches of prompts until they are full and have seen that


def arms(folder: Path, mib: int = ROOM_MIB) -> dict[str, tuple[str, ...]]:
    memory = ("--tiers.memory-mib", str(mib))
    disk = ("--tiers.disk", str(folder), "--tiers.disk-mib", str(mib), "--tiers.save", "at_once")
    return {"none": (), "memory": memory, "disk": disk}


@dataclass
class Turn:
    prompt: int
    cached: int
    ttft_ms: float


@dataclass
class Arm:
    endpoints: dict[str, str]
    client: AsyncClient
    said: list[list[int]]
    turns: list[list[Turn]] = field(default_factory=list)  # by round

    async def speak(self, number: int, rng: random.Random) -> None:
        said = self.said[number]
        said += [rng.randrange(10, 2000) for _ in range(NEW)]
        first, result = await ask(self.client, said, ANSWER)
        record = await asyncio.to_thread(last_record, self.endpoints["admin"])
        assert record["prompt_tokens"] == len(said)
        self.turns[-1].append(Turn(len(said), record["cached_tokens"] + record["fetched_tokens"], first * 1000))
        said += result.token_ids

    def row(self, number: int) -> dict[str, Any]:
        turns = self.turns[number]
        ttft = sorted(turn.ttft_ms for turn in turns)
        prompts = [turn.prompt for turn in turns]
        hits = sum(turn.cached for turn in turns) / sum(prompts)
        return {"ttft_ms": [statistics.median(ttft), ttft[0], ttft[-1]], "hit_rate": hits, "prompt": statistics.median(prompts)}


def workers(admin: str) -> list[dict[str, Any]]:
    with grpc.insecure_channel(admin, [("grpc.enable_http_proxy", 0)]) as channel:
        answer = worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=5)
    found: list[dict[str, Any]] = read_status(answer)["workers"]
    return found


async def restart(arm: Arm) -> float:
    """Kills the workers. Returns when both are ready again, with the seconds that this took."""
    old = {worker["pid"] for worker in workers(arm.endpoints["admin"])}
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    began = time.perf_counter()
    while True:
        await asyncio.sleep(0.1)
        now = [worker for worker in workers(arm.endpoints["admin"]) if worker["state"] == "ready" and "error" not in worker]
        if len(now) == len(old) and not old & {worker["pid"] for worker in now}:
            return time.perf_counter() - began


async def converse(found: dict[str, Arm], rounds: int, conversations: int) -> None:
    for round_ in range(rounds):
        for arm in found.values():
            arm.turns.append([])
        for number in range(conversations):
            for name in random.Random(round_ * 1000 + number).sample(list(found), len(found)):
                await found[name].speak(number, random.Random(SEED + round_ * 1000 + number))


async def after_restart(arm: Arm, conversations: int) -> dict[str, Any]:
    ready_s = await restart(arm)
    began = time.perf_counter()
    arm.turns.append([])
    for number in range(conversations):
        await arm.speak(number, random.Random(SEED + 10**6 + number))
    return {"ready_s": ready_s, "all_s": time.perf_counter() - began, **arm.row(-1)}


def fresh(rng: random.Random) -> list[int]:
    return [rng.randrange(10, 2000) for _ in range(FRESH)]


async def gaps(arm: Arm, rng: random.Random) -> list[float]:
    """Seconds between the tokens of a stream, beside which prompts are computed that never come back."""
    times: list[float] = []

    async def stream() -> None:
        answer = arm.client.generate(token_ids=fresh(rng)[:32], max_tokens=STREAM, temperature=0.0, ignore_eos=True, timeout_s=120)
        async with answer as tokens:
            async for _ in tokens:
                times.append(time.perf_counter())

    task = asyncio.create_task(stream())
    while not task.done():
        await ask(arm.client, fresh(rng), 2)
    await task
    return [after - before for before, after in itertools.pairwise(times)]


Found = dict[str, list[Any]]  # by arm: "none", "open" and "watching"


async def fill(arms: dict[str, Arm]) -> None:
    """Until the tiers of one arm are full (the first touch of memory costs more than what is copied there), and those of the other have
    seen that nothing returns."""
    rng = random.Random(SEED + 2)
    for _ in range(MOST_FILLING):
        tiers = {name: [tier for each in workers(arm.endpoints["admin"]) for tier in each["tiers"]] for name, arm in arms.items()}
        full = all(tier["blocks"] == tier["capacity"] for tier in tiers["open"])
        if full and all(tier["state"] == "watching" for tier in tiers["watching"]):
            return
        for prompt in [fresh(rng) for _ in range(BATCH)]:
            for name in ("open", "watching"):
                await ask(arms[name].client, prompt, ANSWER)
    raise SystemExit(f"after {MOST_FILLING * BATCH} prompts: {tiers}")


async def beside(arms: dict[str, Arm]) -> Found:
    """The gaps between the tokens of streams."""
    found: Found = {name: [] for name in arms}
    began, rng = time.perf_counter(), random.Random(SEED + 1)
    while time.perf_counter() - began < STREAMING_S:
        for name in random.Random(len(found["none"])).sample(list(arms), len(arms)):
            found[name] += await gaps(arms[name], rng)
    return found


async def cost(arms: dict[str, Arm]) -> Found:
    """(processor time of both workers, time) of each batch of prompts that never come back."""
    rng, spent = random.Random(SEED), Found({name: [] for name in arms})
    pids = {name: [worker["pid"] for worker in workers(arm.endpoints["admin"])] for name, arm in arms.items()}
    for number in range(1 + BATCHES):
        prompts = [fresh(rng) for _ in range(BATCH)]
        for name in random.Random(number).sample(list(arms), len(arms)):
            before, began = sum(map(cpu_s, pids[name])), time.perf_counter()
            for prompt in prompts:
                await ask(arms[name].client, prompt, ANSWER)
            took = time.perf_counter() - began
            await asyncio.sleep(0.2)  # what is still to be written
            if number:  # the first warms up
                spent[name].append((sum(map(cpu_s, pids[name])) - before, took))
    return spent


def beside_none(name: str, times: Found, spent: Found) -> dict[str, Any]:
    """An arm beside the one without tiers."""
    p99 = [1000 * statistics.quantiles(times[arm], n=100)[98] for arm in ("none", name)]
    told: dict[str, Any] = {"decode": {"p99_ms": p99, "tokens": len(times[name])}}
    for place, what in enumerate(("cpu", "time")):
        bare, full = ([each[place] for each in spent[arm]] for arm in ("none", name))
        ratios = sorted(b / a for a, b in zip(bare, full, strict=True))
        sums = {"without_s": sum(bare) / BATCH / BATCHES, "with_s": sum(full) / BATCH / BATCHES, "of_sums": sum(full) / sum(bare)}
        told[what] = {"ratio": [statistics.median(ratios), ratios[0], ratios[-1]], **sums}
    return told


async def useless(ends: dict[str, dict[str, str]]) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        found = {name: Arm(at, await stack.enter_async_context(AsyncClient(at["grpc"])), []) for name, at in ends.items()}
        await fill(found)
        times, spent = await beside(found), await cost(found)
        return {**beside_none("open", times, spent), "watching": beside_none("watching", times, spent)}


async def measure(endpoints: dict[str, dict[str, str]], rounds: int, conversations: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        found = {}
        for name, at in endpoints.items():
            said = [random.Random(SEED + number).choices(range(10, 2000), k=LENGTH) for number in range(conversations)]
            found[name] = Arm(at, await stack.enter_async_context(AsyncClient(at["grpc"])), said)
        await converse(found, 1 + rounds, conversations)
        returns = {name: [arm.row(number) for number in range(1, 1 + rounds)] for name, arm in found.items()}
        tiers = {name: {each["name"]: each["tiers"] for each in workers(arm.endpoints["admin"])} for name, arm in found.items()}
        again = await after_restart(found["disk"], conversations)
    return {"returns": returns, "tiers": tiers, "restart": again}


def measure_useless(folder: Path) -> dict[str, Any]:
    told = {}
    for name in ("memory", "disk"):
        watching = arms(folder / f"watching-{name}", USELESS_MIB)[name]
        flags = {"none": (), "open": (*arms(folder / f"open-{name}", USELESS_MIB)[name], "--tiers.keep", "all"), "watching": watching}
        with ExitStack() as stack:
            told[name] = asyncio.run(useless({arm: stack.enter_context(cluster(SHIPPED, *FIXED, *own)) for arm, own in flags.items()}))
    return told


def measure_trace(path: Path, folder: Path) -> dict[str, Any]:
    trace = visits(path)
    told: dict[str, Any] = {"requests": len(trace), "reusable": reusable(trace)}
    for name, flags in arms(folder / "trace", TRACE_MIB).items():
        with cluster(SHIPPED, *FIXED, *RECENT, *flags) as endpoints:
            told[name] = asyncio.run(replay(endpoints, trace))
    return told


def show_useless(told: dict[str, Any]) -> None:
    both = [(f"{name} {how}", one) for name, open_ in told.items() for how, one in (("keeps all", open_), ("watches", open_["watching"]))]
    for name, one in both:
        bare, full = one["decode"]["p99_ms"]
        print(f"beside prompts that never return, {name}: P99 between tokens {bare:.1f} ms without, {full:.1f} with, x{full / bare:.3f}")
        for what in ("cpu", "time"):
            row = one[what]
            each = f"{1000 * row['without_s']:.1f} ms a request without, {1000 * row['with_s']:.1f} with"
            pairs = f"pairs {row['ratio'][1]:.3f} … {row['ratio'][2]:.3f}"
            print(f"prompts that never return, {name}, {what}: {each}; x{row['of_sums']:.3f}, {pairs}")


def show(told: dict[str, Any]) -> None:
    base = statistics.median(row["ttft_ms"][0] for row in told["returns"]["none"])
    print("arm       TTFT of a returning conversation, ms    of none   tokens not computed")
    for name, rows in told["returns"].items():
        middle, hits = (statistics.median(values) for values in ([row["ttft_ms"][0] for row in rows], [row["hit_rate"] for row in rows]))
        least, most = min(row["ttft_ms"][1] for row in rows), max(row["ttft_ms"][2] for row in rows)
        print(f"{name:9} {middle:6.1f} ({least:.1f} … {most:.1f}) {middle / base:22.2f} {hits:12.0%}")
    again = told["restart"]
    print(f"all workers killed: ready after {again['ready_s']:.1f} s, hit rate {again['hit_rate']:.0%} {again['all_s']:.1f} s later")
    show_useless(told["useless"])
    if trace := told.get("trace"):
        print(f"trace of {trace['requests']} requests, {trace['reusable']:.0%} of whose prompt tokens had been there before")
        for name in told["returns"]:
            one, (p50, p90) = trace[name], trace[name]["ttft_ms"]
            print(f"{name:9} TTFT {p50:.0f} ms, P90 {p90:.0f}; not computed {one['hit_rate']:.0%}; goodput {one['goodput']:.2f}/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--useless", action="store_true")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    need = options.conversations * (LENGTH + options.rounds * (NEW + ANSWER)) / 16 * BLOCK_KIB / 1024
    print(f"{describe()}; load average {load:.1f}; seed {SEED}; working set {need / POOL_MIB:.1f} x the pool")
    if options.useless:
        with tempfile.TemporaryDirectory() as folder:
            useless = measure_useless(Path(folder))
        show_useless(useless)
        if options.json:
            options.json.write_text(json.dumps(json.loads(options.json.read_text()) | {"useless": useless}, indent=1))
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        endpoints = {name: stack.enter_context(cluster(SHIPPED, *FIXED, *flags)) for name, flags in arms(Path(folder)).items()}
        told = asyncio.run(measure(endpoints, options.rounds, options.conversations))
    with tempfile.TemporaryDirectory() as folder:
        told["useless"] = measure_useless(Path(folder))
        if options.trace:
            told["trace"] = measure_trace(options.trace, Path(folder))
    show(told)
    if options.json:
        facts = {
            "machine": describe(),
            "load_average": load,
            "seed": SEED,
            "rounds": options.rounds,
            "conversations": options.conversations,
        }
        options.json.write_text(json.dumps({**facts, **told}, indent=1))


if __name__ == "__main__":
    main()
