"""Random load on a cluster whose processes are killed and stopped at random, and what became of every request.

    python benchmarks/nemesis.py --minutes 5 --seed 1 [--json FILE]
    python benchmarks/nemesis.py --target decode --how kill        one kind of fault
    python benchmarks/nemesis.py --cancelled 1 --target none       cancels only

Three routers, two prefill and three decode workers and a Redis on this host, with the toy model, whose tokens are known. Prompts share
prefixes, half of the requests draw their tokens with a seed, one in ten is cancelled at a random token. Every few seconds, one process is
killed, or stopped for 0.5 to 15 s; the next fault comes when everything is back.

    exact      all tokens are those that the model must produce
    wrong      some are not
    refused    an error before the first token, by reason
    lost       an error after it, by reason
    back       from the fault, or from the end of a stop, until every process answers and is ready
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from live_cluster import Cluster, cluster, toy, toy_output

from baton.client import AsyncClient, GenerateError

ROUTERS, PREFILL, DECODE = 3, 2, 3
STREAMS = 24
QUIET_S = 3.0  # between two faults
BACK_WITHIN_S = 120.0
STOPS_S = (0.5, 15.0)
TARGETS = ("router", "prefill", "decode", "redis")


@dataclass(frozen=True)
class Plan:
    minutes: float
    seed: int
    targets: tuple[str, ...]
    how: tuple[str, ...]
    cancelled: float  # share of the requests


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    retried: int = 0  # attempts that moved to another worker
    resumed: int = 0  # streams that moved to another router
    gaps: list[float] = field(default_factory=list)  # the longest of each request: seconds without a token
    back: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


async def load(client: AsyncClient, rng: random.Random, cancelled: float, tally: Tally, until: float) -> None:
    shared = [[rng.randrange(256) for _ in range(160)] for _ in range(8)]
    while time.monotonic() < until:
        prompt = rng.choice(shared)[: rng.choice((0, 64, 160))] + [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
        params: dict[str, Any] = {"max_tokens": rng.randrange(1, 400), "temperature": 0.0, "ignore_eos": True}
        if rng.random() < 0.5:
            params |= {"temperature": 0.8, "seed": rng.randrange(1 << 31)}
        leave_after = rng.randrange(params["max_tokens"]) if rng.random() < cancelled else None
        await one(client, prompt, params, leave_after, tally)


async def one(client: AsyncClient, prompt: list[int], params: dict[str, Any], leave_after: int | None, tally: Tally) -> None:
    got: list[int] = []
    last, gap = time.monotonic(), 0.0
    try:
        async with client.generate(token_ids=prompt, timeout_s=120, **params) as stream:
            async for token in stream:
                now = time.monotonic()
                last, gap = now, max(gap, now - last)
                got.append(token.id)
                if len(got) - 1 == leave_after:
                    break
            else:
                tally.retried += stream.result.workers["retries"]
                tally.resumed += stream.result.resumes > 0
    except GenerateError as error:
        tally.outcomes[f"{'lost' if got else 'refused'} {error.reason or error.code}"] += 1
        return
    tally.gaps.append(gap)
    expected = await asyncio.to_thread(toy_output, prompt, **params)
    if leave_after is None:
        tally.outcomes["exact" if got == expected else "wrong"] += 1
    else:
        tally.outcomes["cancelled" if got == expected[: len(got)] else "wrong"] += 1


async def trouble(live: Cluster, rng: random.Random, plan: Plan, tally: Tally, until: float) -> None:
    while plan.targets and time.monotonic() < until:
        target, kill = rng.choice(plan.targets), rng.choice(plan.how) == "kill"
        pid = rng.choice(await asyncio.to_thread(pids, live, target))
        if kill:
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(*STOPS_S))
            with contextlib.suppress(ProcessLookupError):  # its supervisor may have given up on it
                os.kill(pid, signal.SIGCONT)
        began = time.monotonic()
        await asyncio.to_thread(live.wait, partial(whole, live, pid if kill else None), BACK_WITHIN_S)
        tally.back[f"{target} {'killed' if kill else 'stopped'}"].append(time.monotonic() - began)
        await asyncio.sleep(QUIET_S)


def pids(live: Cluster, target: str) -> list[int]:
    if target == "redis":
        return [child.pid for child in psutil.Process(live.pid).children() if child.name().startswith("redis-server")]
    status = live.wait(live.status, BACK_WITHIN_S)
    known = status["routers"] if target == "router" else [worker for worker in status["workers"] if worker["role"] == target]
    return [process["pid"] for process in known]


def whole(live: Cluster, without: int | None = None) -> bool:
    """Whether every process is there, answers and is ready, and the process `without` is not among them."""
    try:
        status = live.status()
    except grpc.RpcError:
        return False
    alive = [router["pid"] for router in status["routers"]] + [worker["pid"] for worker in status["workers"] if "error" not in worker]
    redis = pids(live, "redis")
    ready = all(worker["state"] == "ready" for worker in status["workers"])
    there = len(alive) == ROUTERS + PREFILL + DECODE and len(redis) == 1 and status["router"]["registry"] == "reachable"
    return ready and there and without not in (*alive, *redis)


async def run(live: Cluster, plan: Plan) -> Tally:
    await asyncio.to_thread(live.wait, partial(whole, live), BACK_WITHIN_S)
    tally, until = Tally(), time.monotonic() + 60 * plan.minutes
    addresses = [router["endpoints"]["grpc"] for router in live.status()["routers"]]
    async with AsyncClient(addresses) as client, asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(load(client, random.Random(f"{plan.seed} {number}"), plan.cancelled, tally, until))
        group.create_task(trouble(live, random.Random(plan.seed), plan, tally, until))
    await live.quiet(60)
    return tally


def longest_waits(tally: Tally) -> dict[str, float]:
    gaps = statistics.quantiles(tally.gaps, n=1000) if len(tally.gaps) > 1 else [0.0] * 999
    return {"median": gaps[499], "P99": gaps[989], "P99.9": gaps[998]}


def report(tally: Tally) -> None:
    print(f"\nrequests {tally.outcomes.total()}: {', '.join(f'{name} {count}' for name, count in sorted(tally.outcomes.items()))}")
    print(f"moved to another worker {tally.retried}, to another router {tally.resumed}; left behind: nothing")
    waits = longest_waits(tally)
    print(f"longest wait for a token, per request: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in waits.items())}")
    print(f"\n{'fault':<18} {'times':>6} {'back, s (median)':>17} {'longest':>8}")
    for name, times in sorted(tally.back.items()):
        print(f"{name:<18} {len(times):6} {statistics.median(times):17.2f} {max(times):8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", choices=(*TARGETS, "none"))
    parser.add_argument("--how", action="append", choices=("kill", "stop"))
    parser.add_argument("--cancelled", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    targets = tuple(target for target in options.target or TARGETS if target != "none")
    plan = Plan(options.minutes, options.seed, targets, tuple(options.how or ("kill", "stop")), options.cancelled)
    machine = describe()
    print(machine)
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--router.replicas", str(ROUTERS), "--router.bypass-tokens", "0", "--engine.threads", "1")
        with cluster(toy(Path(folder) / "toy", step_delay_ms=5), *flags, prefill=PREFILL, decode=DECODE) as live:
            tally = asyncio.run(run(live, plan))
    report(tally)
    if options.json:
        told = {
            "outcomes": tally.outcomes,
            "retried": tally.retried,
            "resumed": tally.resumed,
            "longest_waits_s": longest_waits(tally),
            "back": tally.back,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, **asdict(plan), **told}, indent=1))
    if tally.outcomes["wrong"] or any(name.startswith("lost") for name in tally.outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
