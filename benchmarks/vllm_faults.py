"""What becomes of requests when a part of a stack is killed, is stopped for ten seconds, or reads KV after its lease: vLLM's own
disaggregation (under both policies for failed loads) beside Baton over vLLM.

    .venv-vllm/bin/python benchmarks/vllm_faults.py [--stacks a b B c d] [--faults kill-prefill ...] [--json FILE]

The stacks are in `vllm_stacks`. Poisson arrivals of prompts that never repeat, with the model that ships in float32; the fault comes after
a third of them. Clients wait 60 s and never try again. A killed part is started again at once, in each stack. One undisturbed vLLM has told
before which tokens are right.

    right, wrong     complete answers, and whether all tokens are those
    refused          at once, with a status that says: try again later (429, 503)
    lost             ended with another error, some of them in the middle of the answer
    hung             no end within 60 s
    slowest          seconds, of the complete ones
    held             seconds from the last answer until no worker that answers holds KV for anybody
    back             seconds from the last answer until one more request is answered
    handoffs         of Baton: how many failed, and as what

`late` delays the read of a handoff until its lease is over, with a cache so small that the blocks are somebody else's by then. With vLLM,
the proxy waits between its two calls for every fifth request. With Baton, a failpoint stops the decode worker once, between the reservation
of blocks and the read.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil
from machine import describe
from vllm_stacks import STACKS, Answer, Settings, Stack, ask, status

from baton.cli.admin import read_records
from baton.cli.up import SHIPPED
from baton.v1 import worker_pb2, worker_pb2_grpc

RATE, SECONDS, PROMPT, OUTPUT = 3.0, 14.0, (150, 300), 80
STOP_S, TIMEOUT_S, BACK_WITHIN_S, HELD_WITHIN_S = 10.0, 60.0, 120.0, 60.0
FAULTS = ("none", "kill-prefill", "kill-decode", "kill-front", "stop-prefill", "stop-decode", "stop-front")
# A late read: the lease, how long after the prefill the read begins, and a cache so small that its blocks are another request's by then.
LATE = {"b": (6.0, 8.0), "B": (6.0, 8.0), "d": (2.0, 2.6)}
LATE_KV_MIB, LATE_RATE = 8, 6.0
NAMES = {
    "a": ("a: vllm", "recompute"), "b": ("b: vllm pair (NIXL)", "recompute"), "B": ("b: vllm pair (NIXL)", "fail"),
    "c": ("c: Baton over vllm", ""), "d": ("d: Baton over vllm, 1:1", ""),
}  # fmt: skip
FRONT = ("proxy", "router")
Plan = list[tuple[float, list[int]]]


def plan(seed: str, rate: float = RATE) -> Plan:
    rng = random.Random(seed)
    made, at = [], 0.0
    while (at := at + rng.expovariate(rate)) < SECONDS:
        made.append((at, [rng.randrange(10, 2000) for _ in range(rng.randint(*PROMPT))]))
    return made


def tree(stack: Stack, part: str) -> list[psutil.Process]:
    """The processes of a part; `front` is the proxy or the router."""
    found = stack.parts()
    root = next((found[name] for name in found if name == part or (part == "front" and name in FRONT)), None)
    return [] if root is None else [root, *root.children(recursive=True)]


def send(processes: list[psutil.Process], number: int) -> None:
    for each in processes:
        with suppress(psutil.Error):
            each.send_signal(number)


async def strike(stack: Stack, fault: str) -> None:
    kind, _, part = fault.partition("-")
    if kind not in ("kill", "stop"):
        return
    await asyncio.sleep(SECONDS / 3)
    processes = await asyncio.to_thread(tree, stack, part)
    send(processes, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if kind == "stop":
        await asyncio.sleep(STOP_S)
        send(processes, signal.SIGCONT)


async def answers(stack: Stack, requests: Plan, fault: str = "none", late_s: float = 0.0) -> list[Answer]:
    """`late_s`: for the proxy, which then makes every fifth request so much late."""
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int, due: float, prompt: list[int]) -> Answer:
            await asyncio.sleep(began + due - time.monotonic())
            late = {"x-late-s": str(late_s)} if late_s and number % 5 == 0 else {}
            answer = await ask(session, stack.address, prompt, OUTPUT, TIMEOUT_S, **late)
            answer.late = bool(late)
            return answer

        struck = asyncio.create_task(strike(stack, fault))
        done = await asyncio.gather(*(one(number, *each) for number, each in enumerate(requests)))
        await struck
        return list(done)


def holding(stack: Stack) -> bool:
    """Whether a worker holds KV for anybody."""
    if stack.admin:
        workers = status(stack.admin)["workers"]
        return any("error" not in each and (each["leases"] or each["blocks_in_use"] or each["quarantined_blocks"]) for each in workers)
    for address in stack.metrics:
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("vllm:kv_cache_usage_perc") and float(line.split()[-1]) > 0:
                    return True
    return False


def failures(stack: Stack, requests: int) -> dict[str, int]:
    """How the last handoffs failed, by reason; of Baton alone."""
    if not stack.admin:
        return {}
    with grpc.insecure_channel(stack.admin, [("grpc.enable_http_proxy", 0)]) as channel:
        answer = worker_pb2_grpc.AdminStub(channel).Trace(worker_pb2.TraceRequest(last=requests), timeout=10)
    return dict(Counter(record["handoff"]["failure"] for record in read_records(answer) if record["handoff"]["failure"]))


async def seconds_until(condition: Callable[[], bool], within_s: float) -> float | None:
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        with suppress(OSError, grpc.RpcError):
            if await asyncio.to_thread(condition):
                return round(time.monotonic() - began, 1)
        await asyncio.sleep(0.1)
    return None


async def back(stack: Stack) -> float | None:
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while time.monotonic() - began < BACK_WITHIN_S:
            if not (await ask(session, stack.address, [random.randrange(10, 2000) for _ in range(200)], 8, 20.0)).error:
                return round(time.monotonic() - began, 1)
            await asyncio.sleep(0.2)
    return None


def judged(done: list[Answer], right: list[list[int]]) -> dict[str, Any]:
    hung = sum(answer.error.startswith("no end") for answer in done)
    whole = [(answer, tokens) for answer, tokens in zip(done, right, strict=True) if not answer.error]
    errors = sorted({answer.error for answer in done if answer.error})
    return {
        "requests": len(done),
        "right": sum(answer.tokens == tokens for answer, tokens in whole),
        "wrong": sum(answer.tokens != tokens for answer, tokens in whole),
        "refused": sum(answer.refused for answer in done),
        "lost": sum(bool(answer.error) and not answer.refused for answer in done) - hung,
        "hung": hung,
        "wrong_finishes": sorted({answer.finish for answer, tokens in whole if answer.tokens != tokens}),
        "wrong_and_late": sum(answer.tokens != tokens and answer.late for answer, tokens in whole),
        "late": sum(answer.late for answer in done),
        "slowest": round(max((answer.at[-1] - answer.asked_at for answer, _ in whole), default=0.0), 2),
        "errors": errors,
    }


async def trial(stack: Stack, fault: str, right: list[list[int]], requests: Plan, late_s: float = 0.0) -> dict[str, Any]:
    done = await answers(stack, requests, fault, late_s)
    told = await asyncio.to_thread(failures, stack, len(done))
    held, again = await asyncio.gather(seconds_until(lambda: not holding(stack), HELD_WITHIN_S), back(stack))
    return {**judged(done, right), "handoffs": told, "held": held, "back": again}


@contextmanager
def started(letter: str, settings: Settings) -> Iterator[Stack]:
    name, policy = NAMES[letter]
    with STACKS[name](replace(settings, policy=policy)) as stack:
        if asyncio.run(back(stack)) is None:
            raise RuntimeError(f"{name} does not answer")
        yield stack


def concerned(letter: str, fault: str) -> bool:
    """One vLLM has no such parts, a colocated stack has no prefill worker, and the policy matters only where a load can fail."""
    return {"a": fault == "none", "B": "prefill" in fault, "c": "prefill" not in fault}.get(letter, True)


def faults(letter: str, wanted: list[str], right: dict[str, list[list[int]]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    todo = [fault for fault in wanted if fault in FAULTS and concerned(letter, fault)]
    while todo:
        with started(letter, settings) as stack:
            while todo:
                fault = todo.pop(0)
                row = asyncio.run(trial(stack, fault, right[fault], plan(fault)))
                yield fault, row
                if row["back"] is None or row["held"] is None:
                    break  # what is broken for good is started anew for the next fault
    if "late" in wanted and letter in LATE:
        lease_s, late_s = LATE[letter]
        points = f"kv.reserved=sleep:{late_s}@9" if letter == "d" else ""
        with started(letter, replace(settings, lease_s=lease_s, kv_mib=LATE_KV_MIB, failpoints=points)) as stack:
            yield "late", asyncio.run(trial(stack, "late", right["late"], plan("late", LATE_RATE), 0.0 if letter == "d" else late_s))


def expected(wanted: list[str], settings: Settings) -> dict[str, list[list[int]]]:
    """Fault → the tokens of each request, from one vLLM that is asked four at a time."""
    found: dict[str, list[list[int]]] = {}

    async def collect(stack: Stack) -> None:
        gate = asyncio.Semaphore(4)

        async def one(session: aiohttp.ClientSession, prompt: list[int]) -> list[int]:
            async with gate:
                answer = await ask(session, stack.address, prompt, OUTPUT)
                if answer.error:
                    raise RuntimeError(answer.error)
                return answer.tokens

        async with aiohttp.ClientSession() as session:
            for fault in wanted:
                requests = plan(fault, LATE_RATE if fault == "late" else RATE)
                found[fault] = await asyncio.gather(*(one(session, prompt) for _, prompt in requests))

    with STACKS["a: vllm"](settings) as stack:
        asyncio.run(collect(stack))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", default=["b", "B", "d"], choices=NAMES, help="B: b, whose failed loads fail the request")
    parser.add_argument("--faults", nargs="+", default=[*FAULTS, "late"], choices=[*FAULTS, "late"])
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heading = {"machine": describe(), "load_average": os.getloadavg()[0], "rate": RATE, "seconds": SECONDS}
    print(json.dumps(heading))
    settings = Settings(options.model, 1024, device=options.device)
    right = expected(options.faults, settings)
    rows: dict[str, dict[str, Any]] = {}
    for letter in options.stacks:
        label = " ".join(filter(None, (NAMES[letter][0], NAMES[letter][1] if letter in "bB" else "")))
        for fault, row in faults(letter, options.faults, right, settings):
            rows.setdefault(label, {})[fault] = row
            print(f"{label:34} {fault:13} {json.dumps(row)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps({**heading, "stacks": rows}, indent=1))


if __name__ == "__main__":
    main()
