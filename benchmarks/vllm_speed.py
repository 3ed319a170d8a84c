"""vLLM alone, vLLM's own disaggregation, and Baton over vLLM: latency of requests alone, goodput under load, and processor time.

    .venv-vllm/bin/python benchmarks/vllm_speed.py [--repeats 3] [--stacks a c d] [--json FILE]

The stacks are in `vllm_stacks`. A random Llama of 30 M parameters in float32; prompts are random and never repeat; greedy outputs.

    alone   one request at a time; every engine computes with one thread
    load    Poisson arrivals; a stack with one engine gives it all cores, one with two gives each half

The stacks are started anew for each repeat, in turned order, and get the same requests. Ratios are taken within a repeat. `equal`: answers
with the tokens that the first stack gave. `cores`: processor time over wall time, of all the stack's processes. A vLLM engine with NIXL
loaded keeps one core busy even when it has nothing to do, and on few cores that is most of what the pair's row shows.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from machine import describe
from vllm_stacks import STACKS, TWO_ENGINES, Answer, Settings, Stack, ask

from baton.cli.admin import read_records
from baton.models.make_small import make
from baton.v1 import worker_pb2, worker_pb2_grpc

SHAPE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "context": 2048}
ALONE, ALONE_EACH, OUTPUT = (300, 1500), 6, 32
LOAD_PROMPT, SLO_TTFT_S, SLO_TPOT_S = (100, 600), 1.0, 0.06
IDLE_S = 3.0
Plan = list[tuple[float, list[int]]]  # when it is due, seconds; prompt


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 2000) for _ in range(length)]


def load_plan(rng: random.Random, rate: float, seconds: float) -> Plan:
    made, at = [], 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        made.append((at, prompt(rng, rng.randint(*LOAD_PROMPT))))
    return made


async def warm(session: aiohttp.ClientSession, stack: Stack) -> None:
    """Both sides meet, and every shape of a step is computed once."""
    rng = random.Random("warm")
    for length in (40, 300, 1500, 300):
        if error := (await ask(session, stack.address, prompt(rng, length), 4)).error:
            raise RuntimeError(error)


def transfers(stack: Stack, requests: int) -> tuple[float, float]:
    """What the stack itself reports: (milliseconds, transfers), of the last requests (Baton) or of all so far (vLLM)."""
    if stack.admin:
        with grpc.insecure_channel(stack.admin, [("grpc.enable_http_proxy", 0)]) as channel:
            answer = worker_pb2_grpc.AdminStub(channel).Trace(worker_pb2.TraceRequest(last=requests), timeout=10)
        moved = [record["stages"]["transfer"] * 1e3 for record in read_records(answer) if record["handoff"]["blocks"]]
        return sum(moved), len(moved)
    total = count = 0.0
    for address in stack.metrics:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("vllm:nixl_xfer_time_seconds_sum"):
                    total += float(line.split()[-1])
                elif line.startswith("vllm:nixl_xfer_time_seconds_count"):
                    count += float(line.split()[-1])
    return total * 1e3, count


async def alone(stack: Stack, prompts: dict[int, list[list[int]]]) -> tuple[dict[str, float | None], list[list[int]]]:
    row: dict[str, float | None] = {}
    tokens = []
    async with aiohttp.ClientSession() as session:
        await warm(session, stack)
        cpu, began = stack.cpu_s(), time.monotonic()
        await asyncio.sleep(IDLE_S)
        row["idle_cores"] = (stack.cpu_s() - cpu) / (time.monotonic() - began)
        cpu, asked = stack.cpu_s(), 0
        for length, each in prompts.items():
            before = (0.0, 0.0) if stack.admin else await asyncio.to_thread(transfers, stack, 0)
            answers = [await ask(session, stack.address, one, OUTPUT) for one in each]
            if failed := [answer.error for answer in answers if answer.error]:
                raise RuntimeError(failed[0])
            tokens += [answer.tokens for answer in answers]
            row[f"ttft_{length}_ms"] = statistics.median(answer.ttft for answer in answers) * 1e3
            row[f"tpot_{length}_ms"] = statistics.median(answer.tpot for answer in answers) * 1e3
            total, count = (a - b for a, b in zip(await asyncio.to_thread(transfers, stack, len(each)), before, strict=True))
            row[f"transfer_{length}_ms"] = total / count if count else None
            asked += len(each)
        row["cpu_s_per_request"] = (stack.cpu_s() - cpu) / asked
    return row, tokens


async def load(stack: Stack, plan: Plan, seconds: float) -> tuple[dict[str, float | None], list[list[int]]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await warm(session, stack)
        cpu, began = stack.cpu_s(), time.monotonic()

        async def one(due: float, tokens: list[int]) -> Answer:
            await asyncio.sleep(began + due - time.monotonic())
            answer = await ask(session, stack.address, tokens, OUTPUT)
            answer.asked_at = began + due
            return answer

        answers = await asyncio.gather(*(one(*each) for each in plan))
        wall, used = time.monotonic() - began, stack.cpu_s() - cpu
    whole = [answer for answer in answers if not answer.error]
    good = sum(answer.ttft <= SLO_TTFT_S and answer.tpot <= SLO_TPOT_S for answer in whole)
    ttft = sorted(answer.ttft for answer in whole)
    row: dict[str, float | None] = {
        "failed": float(len(answers) - len(whole)),
        "goodput": good / seconds,
        "ttft_p50_ms": statistics.median(ttft) * 1e3,
        "ttft_worst_ms": ttft[-1] * 1e3,
        "tpot_p50_ms": statistics.median(answer.tpot for answer in whole) * 1e3,
        "cores": used / wall,
        "cpu_s_per_request": used / len(answers),
    }
    return row, [answer.tokens for answer in answers]


def visit(name: str, settings: Settings, plan: Plan, prompts: dict[int, list[list[int]]], seconds: float) -> tuple[dict[str, Any], Any]:
    """Both kinds of one stack. One engine is started again for the load, with the threads of two."""
    with STACKS[name](settings) as stack:
        row, tokens = asyncio.run(alone(stack, prompts))
        if name in TWO_ENGINES:
            more, others = asyncio.run(load(stack, plan, seconds))
            return {"alone": row, "load": more}, tokens + others
    with STACKS[name](replace(settings, threads=2 * settings.threads)) as stack:
        more, others = asyncio.run(load(stack, plan, seconds))
    return {"alone": row, "load": more}, tokens + others


def shown(rows: Sequence[dict[str, Any]], kind: str, metric: str) -> str:
    values = [row[kind][metric] for row in rows if row[kind].get(metric) is not None]
    return f"{statistics.median(values):.2f} ({min(values):.2f} … {max(values):.2f})" if values else "-"


def ratio(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], kind: str, metric: str) -> str:
    pairs = [(one[kind][metric], other[kind][metric]) for one, other in zip(ours, theirs, strict=True)]
    each = [one / other for one, other in pairs if one and other]
    return f"{statistics.median(each):.3f} ({min(each):.3f} … {max(each):.3f})" if each else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stacks", nargs="+", default=sorted({name[0] for name in STACKS}), help="first letters")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second under load")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="instead of the random one; its vocabulary must have 2,000 tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = [name for name in STACKS if name[0] in options.stacks]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    heading = {"machine": describe(), "load_average": os.getloadavg()[0], **{k: getattr(options, k) for k in ("rate", "seconds", "seed")}}
    print(json.dumps(heading))
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            make(Path(folder) / "model", **SHAPE)
        settings = Settings(
            options.model or Path(folder) / "model", SHAPE["context"], max(1, len(os.sched_getaffinity(0)) // 2), options.device
        )
        for repeat in range(options.repeats):
            tokens, rng = {}, random.Random(f"{options.seed} {repeat}")
            prompts = {length: [prompt(rng, length) for _ in range(ALONE_EACH)] for length in ALONE}
            plan = load_plan(rng, options.rate, options.seconds)
            for name in names[:: -1 if repeat % 2 else 1]:
                print(f"  repeat {repeat}, {name} at {time.strftime('%H:%M:%S')}", file=sys.stderr, flush=True)
                row, tokens[name] = visit(name, settings, plan, prompts, options.seconds)
                rows[name].append(row)
            for name in names:
                pairs = list(zip(tokens[name], tokens[names[0]], strict=True))
                rows[name][-1]["equal"], rows[name][-1]["answers"] = sum(a == b for a, b in pairs), len(pairs)
                print(f"  repeat {repeat}, {name}: {json.dumps(rows[name][-1])}", flush=True)
    report(rows)
    if options.json:
        options.json.write_text(json.dumps({**heading, "stacks": rows}, indent=1))


def report(rows: dict[str, list[dict[str, Any]]]) -> None:
    first = next(iter(rows))
    for kind in ("alone", "load"):
        print(f"\n{kind}: median (range) of the repeats; then the ratio to {first}")
        for metric in rows[first][0][kind]:
            for name, each in rows.items():
                print(f"  {metric:18} {name:26} {shown(each, kind, metric):32} {ratio(each, rows[first], kind, metric)}")
    equal = [f"{name} {sum(row['equal'] for row in each)} of {sum(row['answers'] for row in each)}" for name, each in rows.items()]
    print("\nequal tokens: " + ", ".join(equal))


if __name__ == "__main__":
    main()
