"""Goodput under overload: what the policies of `router.overload` are worth, and what `router.degrade` adds to them.

    python benchmarks/overload.py [--quick] [--model toy|tale|both] [--arms ARM ...] [--door grpc|http] [--niceness N] [--json FILE]
    python benchmarks/overload.py --simulated [--json FILE]
    python benchmarks/overload.py --refusals [--json FILE]

Real clusters through `baton up`, one prefill and one decode worker, on the cores of this machine, with clients that cost little
(`benchmarks/flood.py`), come at their moments (Poisson) and do not retry. Prompts of 100 tokens, outputs of 40, client deadline 5 s. A
request is good if it is complete and its first and last token came within the objectives, on the client's clock. 1x is the rate at which a
closed loop of 16 requests was served; each arm gets the same arrivals. Arms are the policies, and `degrade`: codel with all measures of
`router.degrade`, after which half of 1x is offered until the last level is left.

The peak is the best goodput of an arm that takes nothing from requests. `--simulated`: the same in virtual time, with the router's and the
scheduler's own code, where computing takes nobody's time: what the policy alone loses. `--refusals`: what a refused request costs the
router, on each door. Everything has a deadline: `--quick` takes four minutes, at most ten; without, count six minutes for an arm.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from flood import PATIENCE_S, Run, Seen
from machine import describe
from serving import cluster, cpu_s, router_pid

import baton.models
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError
from baton.cluster.rpc import CHANNEL_OPTIONS
from baton.models.make_small import make_toy
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.engine import StepPace
from baton.simulate.workers import Times
from baton.v1 import worker_pb2, worker_pb2_grpc

SEED = 12
PROMPT, OUTPUT, DEADLINE_S, AT_ONCE, SEQUENCES = 100, 40, 5.0, 16, 8
PROCESSES = 2  # of clients
DEGRADE, HOLD_S = ("speculation", "max_tokens=20", "priority=0"), 5.0
ARMS = {"queue": "queue", "codel": "codel", "lifo": "lifo", "degrade": "codel"}
TIMES = (1, 2, 5, 10)
CALM, CALM_S, CALM_MOST = 0.5, 5.0, 12  # of 1x after the overload, in so many pieces at most
LOOK_S, SPARE_S = 0.5, 60.0  # SPARE_S: how much longer than planned a run may take
REFUSED_PER_S, REFUSED_S = 200.0, 4.0
COLUMNS = {
    "offered": "offered", "complete": "complete", "refused": "refused", " late": "late", "other": "other", "urgent": "urgent",
    "tokens/s": "tokens", "told": "degraded", "TTFT p99": "ttft_p99_ms", "E2E p99": "e2e_p99_ms", "refusal p50": "refusal_p50_ms",
    "p99, ms": "refusal_p99_ms", "retry, s": "retry_after_p50_s", "RSS, MiB": "rss_mib", "router, cores": "router_cores",
    "client": "client_cores", "lag p99, ms": "lag_p99_ms", "level": "level", "up": "entered", "down": "left", "turns": "turns",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """`ttft_s`, `e2e_s`: objectives. `ids`: how many different token ids the prompts use."""

    model: str
    ttft_s: float
    e2e_s: float
    ids: int
    flags: tuple[str, ...]


FLAGS = ("--engine.max-num-seqs", str(SEQUENCES), "--engine.kv-memory-mib", "64")
TOY = Workload("toy", 0.5, 1.0, 256, FLAGS)
TALE = Workload("tale", 1.0, 2.0, 1000, FLAGS)


@dataclass
class Cell:
    """One arm at one rate."""

    seen: list[Seen] = field(default_factory=list)
    seconds: float = 0.0
    rss_mib: float = 0.0
    router_s: float = 0.0  # CPU time of the router
    client_s: float = 0.0  # CPU time of the clients
    lags_s: list[float] = field(default_factory=list)  # by which requests were sent too late
    levels: list[int] = field(default_factory=list)  # measures of `router.degrade` in force, one look after another

    def row(self, work: Workload) -> dict[str, float]:
        complete = [one for one in self.seen if not one.status]
        good = [one for one in complete if one.ttft_s <= work.ttft_s and one.e2e_s <= work.e2e_s]
        refused = [one for one in self.seen if one.status == "RESOURCE_EXHAUSTED"]
        told = [one.retry_after_s for one in refused if one.retry_after_s is not None]
        steps = [after - before for before, after in pairwise(self.levels) if after != before]
        counts = {
            "offered": len(self.seen),
            "goodput": len(good),
            "complete": len(complete),
            "refused": len(refused),
            "late": sum(one.status == "DEADLINE_EXCEEDED" for one in self.seen),
            "other": sum(one.status not in ("", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED") for one in self.seen),
            "urgent": sum(one.urgent for one in good),
            "tokens": sum(one.tokens for one in good),
            "degraded": sum(one.degraded for one in complete),
            "router_cores": self.router_s,
            "client_cores": self.client_s,
        }
        return {name: count / self.seconds for name, count in counts.items()} | {
            "ttft_p99_ms": percentile([one.ttft_s * 1000 for one in complete], 0.99),
            "e2e_p99_ms": percentile([one.e2e_s * 1000 for one in complete], 0.99),
            "refusal_p50_ms": percentile([one.e2e_s * 1000 for one in refused], 0.5),
            "refusal_p99_ms": percentile([one.e2e_s * 1000 for one in refused], 0.99),
            "retry_after_p50_s": percentile(told, 0.5),
            "rss_mib": self.rss_mib,
            "lag_p99_ms": percentile([lag * 1000 for lag in self.lags_s], 0.99),
            "level": self.levels[-1] if self.levels else 0,
            "entered": sum(step for step in steps if step > 0),
            "left": -sum(step for step in steps if step < 0),
            "turns": sum(one * other < 0 for one, other in pairwise(steps)),
        }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


class Clients:
    """Processes of `flood.py`, which share each run's rate."""

    def __init__(self, processes: "list[asyncio.subprocess.Process]", base: Run) -> None:
        self._processes, self._base = processes, base

    @classmethod
    @asynccontextmanager
    async def started(cls, base: Run, count: int = PROCESSES) -> "AsyncIterator[Clients]":
        command = (sys.executable, str(Path(__file__).parent / "flood.py"))
        pipe, processes = asyncio.subprocess.PIPE, list[asyncio.subprocess.Process]()
        try:
            for _ in range(count):
                processes.append(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 28))
            yield cls(processes, base)
        finally:
            for process in processes:
                process.kill()
                await process.wait()

    async def run(self, seconds: float, rate: float = 0.0, seed: int = 0, at_once: int = 0) -> Cell:
        """Raises TimeoutError for clients that do not come to an end."""
        cell, parts = Cell(seconds=seconds), len(self._processes)
        for number, process in enumerate(self._processes):
            asked = replace(self._base, seconds=seconds, rate=rate / parts, at_once=at_once // parts, seed=seed * parts + number)
            assert process.stdin
            process.stdin.write(json.dumps(asdict(asked)).encode() + b"\n")
        async with asyncio.timeout(seconds + DEADLINE_S + PATIENCE_S + SPARE_S):
            for process in self._processes:
                assert process.stdout
                told = json.loads(await process.stdout.readline())
                cell.seen += [Seen(**one) for one in told["seen"]]
                cell.client_s += told["cpu_s"]
                cell.lags_s += told["lags_s"]
        return cell


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def watched(admin: Any, pid: int, running: Awaitable[Cell]) -> Cell:
    """A run, with what the router spent on it, and the levels that were in force."""
    levels = list[int]()

    async def look() -> None:
        while True:
            told = await admin.Live(worker_pb2.LiveRequest(alone=True), timeout=10)
            levels.append(told.router.degraded)
            await asyncio.sleep(LOOK_S)

    before, looking = cpu_s(pid), asyncio.create_task(look())
    try:
        cell = await running
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
    cell.router_s, cell.rss_mib, cell.levels = cpu_s(pid) - before, rss_mib(pid), levels
    return cell


async def measure(
    endpoints: dict[str, str], work: Workload, options: argparse.Namespace, rate: float | None
) -> tuple[float, dict[str, list[Cell]]]:
    """(the rate of 1x, cells by load)."""
    pid, cells = router_pid(endpoints["admin"]), dict[str, list[Cell]]()
    sent = {"prompt": PROMPT, "output": OUTPUT, "ids": work.ids, "urgent": options.urgent, "deadline_s": DEADLINE_S}
    base = Run(options.door, endpoints[options.door], 0.0, **sent)
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(Clients.started(base))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(endpoints["admin"], options=CHANNEL_OPTIONS))
        admin = worker_pb2_grpc.AdminStub(channel)
        await clients.run(2.0, at_once=AT_ONCE, seed=1)  # warm-up
        if rate is None:
            closed = await clients.run(options.seconds, at_once=AT_ONCE, seed=2)
            rate = sum(not one.status for one in closed.seen) / options.seconds
        for times in TIMES:
            for repeat in range(options.repeats):
                seed = SEED * 1000 + times * 10 + repeat
                cell = await watched(admin, pid, clients.run(options.seconds, rate * times, seed))
                cells.setdefault(str(times), []).append(cell)
                await asyncio.sleep(1.0)
        if cells[str(TIMES[-1])][-1].levels[-1]:
            cells["calm"] = [await calm(admin, pid, clients, rate)]
    return rate, cells


async def calm(admin: Any, pid: int, clients: Clients, rate: float) -> Cell:
    """Half the load, until nothing is taken from requests any more."""
    whole = Cell()
    for piece in range(CALM_MOST):
        cell = await watched(admin, pid, clients.run(CALM_S, CALM * rate, SEED * 2000 + piece))
        whole.seen += cell.seen
        whole.levels += cell.levels
        whole.lags_s += cell.lags_s
        whole.seconds, whole.rss_mib = whole.seconds + CALM_S, cell.rss_mib
        whole.router_s, whole.client_s = whole.router_s + cell.router_s, whole.client_s + cell.client_s
        if not whole.levels[-1]:
            break
    return whole


def degrading(arm: str) -> tuple[str, ...]:
    return ("--router.degrade", f"[{', '.join(DEGRADE)}]", "--router.degrade-hold-s", str(HOLD_S)) if arm == "degrade" else ()


def run(work: Workload, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = toy(folder, 5) if work is TOY else Path(baton.models.__file__).parent / "tale"
    slo = ("--slo.ttft-s", str(work.ttft_s), "--slo.e2e-s", str(work.e2e_s))
    rate, arms = options.rate, dict[str, dict[str, list[Cell]]]()
    for arm in options.arms:
        way = ("--router.overload", ARMS[arm], "--launcher.worker-niceness", str(options.niceness))
        with cluster(model, *work.flags, *slo, *way, *degrading(arm)) as endpoints:
            rate, arms[arm] = asyncio.run(measure(endpoints, work, options, rate))
    return told(work, rate, arms)


def toy(folder: Path, step_ms: int) -> Path:
    make_toy(model := folder / f"toy-{step_ms}", step_delay_ms=step_ms)
    return model


def told(work: Workload, rate: float, measured: dict[str, dict[str, list[Cell]]]) -> dict[str, Any]:
    """Prints the table of a model."""
    arms = {arm: {times: [cell.row(work) for cell in several] for times, several in cells.items()} for arm, cells in measured.items()}
    plain = [cells for arm, cells in arms.items() if arm != "degrade"] or [*arms.values()]
    peak = max(statistics.median(row["goodput"] for row in rows) for cells in plain for rows in cells.values())
    print(f"\n{work.model}: 1x is {rate:.1f}/s, peak {peak:.1f}/s; objectives TTFT {work.ttft_s} s, E2E {work.e2e_s} s; medians (range)")
    print(
        " ".join([f"{'arm':>7} {'load':>5} {'goodput':>8} {'range':>13} {'of peak':>8}", *(f"{title:>{len(title)}}" for title in COLUMNS)])
    )
    for arm, loads in arms.items():
        for times, rows in loads.items():
            middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
            spread = f"{min(row['goodput'] for row in rows):.1f}…{max(row['goodput'] for row in rows):.1f}"
            line = " ".join(f"{middle[name]:{len(title)}.1f}" for title, name in COLUMNS.items())
            load = times if times == "calm" else f"{times}x"
            print(f"{arm:>7} {load:>5} {middle['goodput']:8.1f} {spread:>13} {middle['goodput'] / peak:8.0%} {line}")
    return {"rate": rate, "peak": peak, "ttft_s": work.ttft_s, "e2e_s": work.e2e_s, "arms": arms}


# What a refusal costs


async def refused(endpoints: dict[str, str]) -> dict[str, dict[str, float]]:
    """By door. The only place is taken by one long request, and nobody may wait: every request is refused."""
    pid, doors = router_pid(endpoints["admin"]), dict[str, dict[str, float]]()
    async with Clients.started(Run("grpc", endpoints["grpc"], 0.0, output=1000, deadline_s=300.0), 1) as holders:
        holder = asyncio.create_task(holders.run(60.0, at_once=1))
        await asyncio.sleep(2.0)
        for door in ("grpc", "http", "grpc", "http"):  # the first time is a warm-up
            base = Run(door, endpoints[door], 0.0, prompt=PROMPT, output=OUTPUT, deadline_s=DEADLINE_S)
            async with Clients.started(base) as clients:
                idle, began = cpu_s(pid), time.perf_counter()
                await asyncio.sleep(REFUSED_S)
                idle = (cpu_s(pid) - idle) / (time.perf_counter() - began)
                before, began = cpu_s(pid), time.perf_counter()
                cell = await clients.run(REFUSED_S, REFUSED_PER_S, SEED)
                spent = cpu_s(pid) - before - idle * (time.perf_counter() - began)
            waited = [one.e2e_s * 1000 for one in cell.seen if one.status == "RESOURCE_EXHAUSTED"]
            doors[door] = {
                "requests": len(cell.seen),
                "refused": len(waited),
                "router_ms": spent / len(cell.seen) * 1000,
                "client_ms": cell.client_s / len(cell.seen) * 1000,
                "p50_ms": percentile(waited, 0.5),
                "p99_ms": percentile(waited, 0.99),
            }
        holder.cancel()
        with suppress(asyncio.CancelledError):
            await holder
    return doors


def refusals(folder: Path) -> dict[str, dict[str, float]]:
    bounds = ("--router.max-inflight", "1", "--router.max-queue", "0", "--engine.kv-memory-mib", "64")
    with cluster(toy(folder, 200), *bounds) as endpoints:
        doors = asyncio.run(refused(endpoints))
    for door, one in doors.items():
        print(
            f"{door}: {one['refused']:.0f} of {one['requests']:.0f} refused, {one['router_ms']:.2f} ms of the router and"
            f" {one['client_ms']:.2f} ms of the client each, after {one['p50_ms']:.1f} ms at P50, {one['p99_ms']:.1f} ms at P99"
        )
    return doors


# In virtual time

PACE = StepPace(step_s=0.004, prompt_token_s=0.0001, sequence_s=0.001)


async def simulated_calls(cluster: SimulatedCluster, rate: float, seconds: float, seed: int, urgent: float) -> list[Seen]:
    rng, loop, found = random.Random(seed), asyncio.get_running_loop(), list[Seen]()

    async def one(seen: Seen) -> None:
        began, prompt = loop.time(), [rng.randrange(1 << 16) for _ in range(PROMPT)]
        try:
            request = await cluster.ask(prompt, OUTPUT, DEADLINE_S, 0 if seen.urgent else 1)
        except BatonError as error:
            seen.status, seen.retry_after_s = error.reason.value.grpc, error.retry_after
        else:
            seen.status, seen.ttft_s, seen.tokens = "", request.trace.first_at - began, request.output_len
            seen.degraded = request.output_len < OUTPUT
        seen.e2e_s = loop.time() - began

    async with asyncio.TaskGroup() as group:
        until = loop.time() + seconds
        while loop.time() < until:
            await asyncio.sleep(rng.expovariate(rate))
            found.append(Seen(urgent=rng.random() < urgent))
            group.create_task(one(found[-1]))
    return found


async def simulated_arm(
    arm: str, work: Workload, rate: float, seconds: float, repeats: int = 1, urgent: float = 0.5
) -> dict[str, list[Cell]]:
    config = RouterConfig(overload=ARMS[arm], degrade=DEGRADE if arm == "degrade" else (), degrade_hold_s=HOLD_S)  # type: ignore[arg-type]
    sizes = Sizes(max_num_seqs=SEQUENCES)
    cluster = SimulatedCluster(sizes, Times(PACE), config, SloConfig(ttft_s=work.ttft_s, e2e_s=work.e2e_s))
    cells, loop, degradation = dict[str, list[Cell]](), asyncio.get_running_loop(), cluster.routers[0].journal.degradation

    async def cell(per_s: float, seed: int) -> Cell:
        levels = list[int]()

        async def look() -> None:
            while True:
                levels.append(degradation.level)
                await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        seen = await simulated_calls(cluster, per_s, seconds, seed, urgent)
        looking.cancel()
        return Cell(seen, seconds, levels=levels)

    async with cluster.watched():
        await asyncio.sleep(1.0)
        for times in TIMES:
            cells[str(times)] = [await cell(rate * times, SEED * 1000 + times * 10 + repeat) for repeat in range(repeats)]
        if degradation.level:
            began = loop.time()
            while degradation.level and loop.time() - began < CALM_S * CALM_MOST:
                cells.setdefault("calm", []).append(await cell(CALM * rate, SEED))
    return cells


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # of each request that is late
    work = replace(TALE, model="simulated")
    held = OUTPUT * (PACE.step_s + SEQUENCES * PACE.sequence_s)
    rate = 0.9 * SEQUENCES / held  # as a closed loop of two requests a sequence is served
    cells: dict[str, dict[str, list[Cell]]] = {}
    for arm in options.arms:
        cells[arm] = virtual_time.run(simulated_arm(arm, work, rate, options.seconds, options.repeats, options.urgent))
    return told(work, rate, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("toy", "tale", "both"), default="tale")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=("codel", "degrade"))
    parser.add_argument("--door", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--urgent", type=float, default=1.0, help="share of the requests of priority 0; the others have 1")
    parser.add_argument("--niceness", type=int, default=0, help="of the workers, beside router and clients")
    parser.add_argument("--rate", type=float, help="rate of 1x, instead of measuring it")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="runs of 6 s, each once")
    parser.add_argument("--refusals", action="store_true", help="only what a refused request costs")
    parser.add_argument("--simulated", action="store_true", help="in virtual time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.repeats = 6.0, 1
    machine = f"{describe()}, load average {os.getloadavg()[0]:.1f} at the start"
    print(machine)
    given = {name: getattr(options, name) for name in ("seconds", "repeats", "urgent", "niceness")}
    results: dict[str, Any] = {"machine": machine, "seed": SEED, **given}
    with tempfile.TemporaryDirectory() as folder:
        if options.simulated:
            results["simulated"] = simulated(options)
        else:
            results["refusals"] = refusals(Path(folder))
            for work in () if options.refusals else (TOY, TALE):
                if options.model in (work.model, "both"):
                    results[work.model] = run(work, Path(folder), options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
