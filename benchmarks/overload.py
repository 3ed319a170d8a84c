"""Goodput under overload: the old policy (every request waits) compared with the policies that refuse requests that would be late.

    python benchmarks/overload.py [--model toy|tale|both] [--arms ARM ...] [--seconds 10] [--repeats 2] [--json FILE]

Real clusters through `baton up`, one prefill and one decode worker; clients arrive open-loop (Poisson) and do not retry. Prompts of 100
tokens, outputs of 40, client deadline 5 s. A request is good if it is complete and its first and last token came within the objectives, on
the client's clock. 1x is the rate at which a closed loop of 16 requests was served; each arm gets the same arrivals.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from machine import describe
from serving import cluster, cpu_s, router_pid

import baton.models
from baton.models.make_small import make_toy
from baton.v1 import generation_pb2 as pb

SEED = 12
PROMPT, OUTPUT, DEADLINE_S, AT_ONCE = 100, 40, 5.0, 16
ARMS = ("queue", "codel", "lifo")
TIMES = (1, 2, 5, 10)
COLUMNS = {
    "offered": "offered", "complete": "complete", "refused": "refused", " late": "late", "other": "other", "TTFT p99": "ttft_p99_ms",
    "E2E p99": "e2e_p99_ms", "refusal p50": "refusal_p50_ms", "p99, ms": "refusal_p99_ms", "retry, s": "retry_after_p50_s",
    "RSS, MiB": "rss_mib", "router, cores": "router_cores", "client": "client_cores",
}  # fmt: skip
METHOD = "/baton.v1.Generation/Generate"


@dataclass(frozen=True)
class Workload:
    """`ttft_s`, `e2e_s`: objectives. `ids`: how many different token ids the prompts use."""

    model: str
    ttft_s: float
    e2e_s: float
    ids: int
    flags: tuple[str, ...]


TOY = Workload("toy", 0.5, 1.0, 256, ("--engine.max-num-seqs", "8", "--engine.kv-memory-mib", "64"))
TALE = Workload("tale", 1.0, 2.0, 1000, ("--engine.max-num-seqs", "8", "--engine.kv-memory-mib", "64"))


@dataclass(slots=True)
class Seen:
    """What one client saw; seconds."""

    ttft_s: float = 0.0
    e2e_s: float = 0.0
    status: str = ""  # empty: complete
    retry_after_s: float | None = None


@dataclass
class Cell:
    """One arm at one rate."""

    seen: list[Seen] = field(default_factory=list)
    seconds: float = 0.0
    rss_mib: float = 0.0
    router_s: float = 0.0  # CPU time of the router
    client_s: float = 0.0  # CPU time of this process

    def row(self, work: Workload) -> dict[str, float]:
        complete = [one for one in self.seen if not one.status]
        good = [one for one in complete if one.ttft_s <= work.ttft_s and one.e2e_s <= work.e2e_s]
        refused = [one for one in self.seen if one.status == "RESOURCE_EXHAUSTED"]
        told = [one.retry_after_s for one in refused if one.retry_after_s is not None]
        return {
            "offered": len(self.seen) / self.seconds,
            "goodput": len(good) / self.seconds,
            "complete": len(complete) / self.seconds,
            "refused": len(refused) / self.seconds,
            "late": sum(one.status == "DEADLINE_EXCEEDED" for one in self.seen) / self.seconds,
            "other": sum(one.status not in ("", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED") for one in self.seen) / self.seconds,
            "ttft_p99_ms": percentile([one.ttft_s * 1000 for one in complete], 0.99),
            "e2e_p99_ms": percentile([one.e2e_s * 1000 for one in complete], 0.99),
            "refusal_p50_ms": percentile([one.e2e_s * 1000 for one in refused], 0.5),
            "refusal_p99_ms": percentile([one.e2e_s * 1000 for one in refused], 0.99),
            "retry_after_p50_s": percentile(told, 0.5),
            "rss_mib": self.rss_mib,
            "router_cores": self.router_s / self.seconds,
            "client_cores": self.client_s / self.seconds,
        }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


class Clients:
    """Light clients: requests are serialised before the clock runs, answers are not parsed. Messages: accepted, then one per token."""

    def __init__(self, address: str, work: Workload) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._call = self._channel.unary_stream(METHOD)
        self._rng = random.Random(SEED)
        self._work = work

    def request(self) -> bytes:
        ids = [self._rng.randrange(self._work.ids) for _ in range(PROMPT)]
        sampling = pb.SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        message: Message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)
        return message.SerializeToString()

    async def one(self, request: bytes) -> Seen:
        seen, began, messages = Seen(), time.perf_counter(), 0
        call = self._call(request, timeout=DEADLINE_S)
        try:
            async for _ in call:
                messages += 1
                if messages == 2:
                    seen.ttft_s = time.perf_counter() - began
            seen.e2e_s = time.perf_counter() - began
        except grpc.aio.AioRpcError as error:
            seen.e2e_s, seen.status = time.perf_counter() - began, error.code().name
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                seen.retry_after_s = retry_after(error)
        return seen

    async def closed(self, seconds: float) -> float:
        """Requests per second of `AT_ONCE` clients, each of which sends the next request as soon as it has its answer."""
        requests, until, done = [self.request() for _ in range(256)], time.perf_counter() + seconds, 0

        async def ask(number: int) -> None:
            nonlocal done
            while time.perf_counter() < until:
                number += 1
                seen = await self.one(requests[number % len(requests)])
                done += not seen.status

        await asyncio.gather(*(ask(number * 16) for number in range(AT_ONCE)))
        return done / seconds

    async def open(self, per_s: float, seconds: float, seed: int) -> list[Seen]:
        rng = random.Random(seed)
        requests = [self.request() for _ in range(512)]
        tasks: list[asyncio.Task[Seen]] = []
        due, began = 0.0, time.perf_counter()
        while (due := due + rng.expovariate(per_s)) < seconds:
            if (early := due - (time.perf_counter() - began)) > 0:
                await asyncio.sleep(early)
            tasks.append(asyncio.create_task(self.one(requests[len(tasks) % len(requests)])))
        return await asyncio.gather(*tasks)

    async def close(self) -> None:
        await self._channel.close()


def retry_after(error: grpc.aio.AioRpcError) -> float | None:
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        if detail.type_url.endswith("RetryInfo"):
            told = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
            return float(told.seconds + told.nanos / 1e9)
    return None


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(
    endpoints: dict[str, str], work: Workload, options: argparse.Namespace, rate: float | None
) -> tuple[float, dict[int, list[Cell]]]:
    """(the rate of 1x, cells by load)."""
    pid, clients = router_pid(endpoints["admin"]), Clients(endpoints["grpc"], work)
    with contextlib.suppress(asyncio.TimeoutError):
        await clients.closed(2.0)  # warm-up
    rate = rate or await clients.closed(options.seconds)
    cells: dict[int, list[Cell]] = {}
    for times in TIMES:
        for repeat in range(options.repeats):
            router_s, client_s = cpu_s(pid), time.process_time()
            seen = await clients.open(rate * times, options.seconds, SEED * 1000 + times * 10 + repeat)
            spent = cpu_s(pid) - router_s, time.process_time() - client_s
            cells.setdefault(times, []).append(Cell(seen, options.seconds, rss_mib(pid), *spent))
            await asyncio.sleep(1.0)
    await clients.close()
    return rate, cells


def run(work: Workload, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    if work is TOY:
        make_toy(model := folder / "toy", step_delay_ms=5)
    else:
        model = Path(baton.models.__file__).parent / "tale"
    slo = ("--slo.ttft-s", str(work.ttft_s), "--slo.e2e-s", str(work.e2e_s))
    rate, arms = options.rate, {}
    for arm in options.arms:
        with cluster(model, *work.flags, *slo, "--router.overload", arm) as endpoints:
            rate, cells = asyncio.run(measure(endpoints, work, options, rate))
        arms[arm] = {times: [cell.row(work) for cell in several] for times, several in cells.items()}
    peak = max(statistics.median(row["goodput"] for row in rows) for cells in arms.values() for rows in cells.values())
    print(f"\n{work.model}: 1x is {rate:.1f}/s; objectives TTFT {work.ttft_s} s, E2E {work.e2e_s} s; medians of {options.repeats} (range)")
    print(
        " ".join([f"{'arm':>6} {'load':>5} {'goodput':>8} {'range':>13} {'of peak':>8}", *(f"{title:>{len(title)}}" for title in COLUMNS)])
    )
    for arm, measured in arms.items():
        for times, rows in measured.items():
            middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
            spread = f"{min(row['goodput'] for row in rows):.1f}…{max(row['goodput'] for row in rows):.1f}"
            told = " ".join(f"{middle[name]:{len(title)}.1f}" for title, name in COLUMNS.items())
            print(f"{arm:>6} {times:>4}x {middle['goodput']:8.1f} {spread:>13} {middle['goodput'] / peak:8.0%} {told}")
    return {"rate": rate, "peak": peak, "ttft_s": work.ttft_s, "e2e_s": work.e2e_s, "arms": arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("toy", "tale", "both"), default="both")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--rate", type=float, help="rate of 1x, instead of measuring it")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = f"{describe()}, load average {os.getloadavg()[0]:.1f} at the start"
    print(machine)
    results: dict[str, Any] = {"machine": machine, "seed": SEED, "seconds": options.seconds, "repeats": options.repeats}
    with tempfile.TemporaryDirectory() as folder:
        for work in (TOY, TALE):
            if options.model in (work.model, "both"):
                results[work.model] = run(work, Path(folder), options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
