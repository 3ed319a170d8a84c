"""Four vLLM engines: four servers that are asked in turn, and Baton's router over four workers, on prompts that share prefixes.

    .venv-vllm/bin/python benchmarks/vllm_routing.py [--repeats 3] [--rate 5] [--ramp 20] [--seconds 60] [--seed 1] [--json FILE]

The model that ships, float32. Prompts begin with one of 64 prefixes, by Zipf's law, and each engine has room for a third of them: whoever
sends a prompt to any engine computes its prefix again and pushes another one out. Requests arrive as a Poisson process, whether or not
earlier ones have ended. Each repeat draws its own load, which both arms get, in turned order. Requests of the ramp fill the caches and are
not counted; before it, each engine computes a few prompts of full length, because the first ones of a process take longer.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from machine import describe
from vllm_stacks import Answer, Settings, ask, baton, several_vllm

from baton.cli.up import SHIPPED

ENGINES = 4
PREFIXES, PREFIX, SUFFIX, OUTPUT = 64, 768, 64, 8  # prefixes; tokens of each, of what follows it, and of the output
SKEW = 0.8  # exponent of Zipf's law
KV_MIB = 64
WARM_UPS = 4  # prompts of each engine
Plan = list[tuple[float, list[int]]]


@contextmanager
def in_turn(settings: Settings) -> Iterator[list[str]]:
    with several_vllm(settings, ENGINES) as addresses:
        yield addresses


@contextmanager
def routed(settings: Settings) -> Iterator[list[str]]:
    with baton("vllm", 0, ENGINES)(settings) as stack:
        yield [stack.address]


ARMS = {"vllm, in turn": in_turn, "Baton over vllm": routed}


def arrivals(rng: random.Random, rate: float, seconds: float) -> Plan:
    prefixes = [[rng.randrange(10, 2000) for _ in range(PREFIX)] for _ in range(PREFIXES)]
    weights = [1 / (rank + 1) ** SKEW for rank in range(PREFIXES)]
    made, at = [], 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        (prefix,) = rng.choices(prefixes, weights)
        made.append((at, [*prefix, *(rng.randrange(10, 2000) for _ in range(SUFFIX))]))
    return made


async def run(addresses: list[str], plan: Plan, ramp_s: float) -> tuple[dict[str, float], list[list[int]]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        rng = random.Random(0)
        for _ in range(WARM_UPS):
            prompts = [[rng.randrange(10, 2000) for _ in range(PREFIX + SUFFIX)] for _ in range(ENGINES)]
            await asyncio.gather(*(ask(session, addresses[i % len(addresses)], prompt, OUTPUT) for i, prompt in enumerate(prompts)))
        began = time.monotonic()

        async def one(number: int, due: float, prompt: list[int]) -> Answer:
            await asyncio.sleep(began + due - time.monotonic())
            answer = await ask(session, addresses[number % len(addresses)], prompt, OUTPUT)
            answer.asked_at = began + due
            return answer

        done = await asyncio.gather(*(one(number, *each) for number, each in enumerate(plan)))
    if failed := [answer.error for answer in done if answer.error]:
        raise RuntimeError(failed[0])
    counted = [answer for answer in done if answer.asked_at >= began + ramp_s]
    ttft = sorted(answer.ttft for answer in counted)
    row = {
        "requests": len(counted),
        "hit_rate": sum(answer.cached for answer in counted) / (len(counted) * (PREFIX + SUFFIX)),
        **{f"ttft_p{percent}_ms": ttft[int(percent / 100 * (len(ttft) - 1))] * 1e3 for percent in (50, 90, 99)},
    }
    return row, [answer.tokens for answer in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--ramp", type=float, default=20.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="after the ramp")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-mib", type=int, default=KV_MIB, help="of each engine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = Settings(options.model, 1024, kv_mib=options.kv_mib, device=options.device)
    results: dict[str, Any] = {"machine": describe(), "load_average": os.getloadavg()[0]}
    results |= {name: getattr(options, name) for name in ("rate", "ramp", "seconds", "seed")}
    print(json.dumps(results))
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for repeat in range(options.repeats):
        plan = arrivals(random.Random(f"{options.seed} {repeat}"), options.rate, options.ramp + options.seconds)
        tokens = {}
        for arm in list(ARMS)[:: -1 if repeat % 2 else 1]:
            with ARMS[arm](settings) as addresses:
                row, tokens[arm] = asyncio.run(run(addresses, plan, options.ramp))
            rows[arm].append(row)
        one, other = tokens.values()
        equal = sum(a == b for a, b in zip(one, other, strict=True))
        for arm, each in rows.items():
            print(f"  repeat {repeat}, {len(plan)} requests, {equal} with equal tokens, {arm}: {json.dumps(each[-1])}", flush=True)
    base, ours = rows.values()
    for metric in [name for name in base[0] if name != "requests"]:
        ratios = [b[metric] / a[metric] for a, b in zip(base, ours, strict=True)]
        print(f"{metric}: Baton's router / in turn {statistics.median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f})")
    if options.json:
        options.json.write_text(json.dumps({**results, "arms": rows}, indent=1))


if __name__ == "__main__":
    main()
