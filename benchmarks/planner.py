"""The planner against static splits, a rule as of a horizontal autoscaler, and one that knows the load: simulated, the same each time.

    python benchmarks/planner.py --traces FOLDER [--workloads day,shift] [--arms ...] [--quick] [--json FILE]

The router's and the engine's own code runs in virtual time; a worker is Llama-3.1-70B in 8 bits on four A10, by their sheet. Lengths
of prompts and outputs are those of the Azure traces of 2023 (code and conversations; Azure Public Dataset, CC BY 4.0), in their order.

    day    24 hours in 16 minutes: code by day, conversations with a peak in the evening; arrivals are Poisson. (The traces have an hour
           each, so the course of the day is made.)
    shift  code, conversations with answers of 200 tokens or more, code, of 200 s each, at one rate

Each arm gets the same requests at the same moments. What counts is the number of requests that met every objective, per hour of a worker,
from the wish that it starts until it is gone. A static split counts as the best if at least 90 % of its requests met the objectives; where
none does, the one that met most.

    static   so many workers, always
    hpa      each pool by its own load (sequences for each worker), every 15 s; down after the same time as the planner's
    oracle   sizes by the planner's model for the load that really comes, a start ahead, without cooldown
    planner  `baton.planner`, with no knowledge of what comes
"""

import argparse
import asyncio
import csv
import json
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machine import describe

from baton.clock import loop_time
from baton.cluster.config_planner import PlannerConfig
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError
from baton.cluster.records import ROLES, Pools
from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.shape import shape_of
from baton.plan.sheet import profile_of
from baton.planner.capacity import Model
from baton.planner.capacity import Sizes as Serving
from baton.planner.controller import Controller, rules_of
from baton.planner.decide import needed
from baton.planner.demand import Demand
from baton.planner.rehearsal import SimulatedDoors
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.pools import SimulatedPools
from baton.simulate.workers import Times

SLO = SloConfig(ttft_s=7.0, tpot_s=0.055)
START_S, EVERY_S, ENOUGH = 15.0, 15.0, 0.9
CHUNK, SEQS, KV_BLOCKS = 2048, 64, 3600  # what 96 GB leave beside the weights
CONFIG = PlannerConfig(
    budget=8, interval_s=10, cooldown_s=10.0, hold_s=60.0, cold_s=5.0, stale_s=40.0, start_timeout_s=90.0, flip_timeout_s=30.0,
    period_s=0.0, least_prefill=1, target=0.95,
)  # fmt: skip
STATIC = ((2, 2), (3, 2), (3, 3), (4, 2), (4, 3), (5, 3))
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sent:
    at: float
    prompt: int
    output: int


@dataclass(slots=True)
class Result:
    workload: str
    arm: str
    offered: int
    met: int
    failed: int  # neither served nor refused
    worker_hours: float
    changes: int
    sizes: list[tuple[float, int, int]]
    seconds: float  # of real time, for the simulation

    @property
    def attainment(self) -> float:
        return self.met / self.offered

    @property
    def rate(self) -> float:
        """Requests that met all objectives, per hour of a worker."""
        return self.met / self.worker_hours


def lengths(path: Path, least_output: int = 1) -> Iterator[tuple[int, int]]:
    while True:
        with path.open() as file:
            for row in csv.DictReader(file):
                if int(row["GeneratedTokens"]) >= least_output:
                    yield max(1, int(row["ContextTokens"])), int(row["GeneratedTokens"])


def poisson(rates: Callable[[float], list[float]], seconds: float, sources: list[Iterator[tuple[int, int]]], seed: int) -> list[Sent]:
    """`rates`: of each source at a moment, requests per second."""
    rng, found, now = random.Random(seed), list[Sent](), 0.0
    top = max(sum(rates(t)) for t in range(int(seconds)))
    while (now := now + rng.expovariate(top)) < seconds:
        now_rates = rates(now)
        if rng.random() * top < sum(now_rates):  # thinning (Lewis and Shedler 1979)
            found.append(Sent(now, *next(rng.choices(sources, now_rates)[0])))
    return found


def workload(name: str, traces: Path, quick: bool) -> list[Sent]:
    code, conversations = traces / "azure_code_2023.csv", traces / "azure_conv_2023.csv"
    if name == "shift":
        part = 60.0 if quick else 200.0
        return poisson(
            lambda now: [2.2, 0.0] if int(now // part) % 2 == 0 else [0.0, 2.2], 3 * part, [lengths(code), lengths(conversations, 200)], 1
        )
    hour = 10.0 if quick else 40.0

    def rates(now: float) -> list[float]:
        at = now / hour  # o'clock
        work = max(0.0, math.cos((at - 13) * math.pi / 12))
        evening = (1 + math.cos((at - 20) * math.pi / 12)) / 2
        return [0.1 + 1.5 * work**2, 0.3 + 1.5 * evening**2]

    return poisson(rates, 24 * hour, [lengths(code), lengths(conversations)], 2)


def model() -> Model:
    profile = profile_of(shape_of("llama-3.1-70b"), DEVICES["a10"], MEASURED, devices=4, weight_bits=8)
    start = replace(profile.models["start"], values={"base": START_S})
    return Model(replace(profile, models={**profile.models, "start": start}), SLO.ttft_s, SLO.tpot_s, SEQS, KV_BLOCKS * 16, CHUNK)


class Arm:
    """One run: the cluster and whoever sizes it."""

    def __init__(self, sent: list[Sent], sizes: Serving) -> None:
        self.sent, self.model = sent, model()
        self.sizes = Sizes(sizes.prefill, sizes.decode, SEQS, KV_BLOCKS, CHUNK, max_queue=512)
        self.cluster = SimulatedCluster(self.sizes, Times.of(self.model.profile), RouterConfig(max_queue=4096), SLO, large=True)
        self.pools = SimulatedPools(self.cluster, self.sizes, START_S)
        self.doors = SimulatedDoors(self.cluster, self.pools)
        self.failed = 0

    async def ask(self, number: int, one: Sent) -> None:
        try:
            await self.cluster.ask([number, *range(1, one.prompt)], one.output, TIMEOUT_S)
        except BatonError as error:
            self.failed += error.reason.name not in ("SATURATED", "DEADLINE")

    async def offer(self) -> None:
        began = loop_time()
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(self.sent):
                await asyncio.sleep(max(0.0, began + one.at - loop_time()))
                group.create_task(self.ask(number, one))

    async def run(self, actor: Coroutine[Any, Any, None] | None) -> None:
        async with self.cluster.watched():
            pools = asyncio.create_task(self.pools.run())
            await asyncio.sleep(1.0)
            acting = asyncio.create_task(actor) if actor is not None else None
            await self.offer()
            for task in (pools, acting):
                if task is not None:
                    if task.done():
                        task.result()
                    task.cancel()
            await self.pools.close()

    async def follow(self, wants: Callable[[float], Serving], every_s: float) -> None:
        """Flips what can be flipped, and asks for the rest."""
        began = loop_time()
        while True:
            want = wants(loop_time() - began)
            await self.reach(want)
            await asyncio.sleep(every_s)

    async def reach(self, want: Serving) -> None:
        names = {
            role: [n for n, w in self.cluster.fleet.workers.items() if w.record.roles == (role,) and w.record.state == "ready"]
            for role in ROLES
        }
        short: dict[str, int] = {role: getattr(want, role) - len(names[role]) for role in ROLES}
        for to, other in ((ROLES[0], ROLES[1]), (ROLES[1], ROLES[0])):
            for name in names[other][: min(max(0, short[to]), max(0, -short[other]))]:
                self.pools.set_roles(name, (to,))
                short[to] -= 1
                short[other] += 1
        pools = {
            role: sum(w.record.role == role and w.record.state == "ready" for w in self.cluster.fleet.workers.values()) for role in ROLES
        }
        asked = {role: max(0 if role == "prefill" else 1, pools[role] + short[role]) for role in ROLES}
        await self.cluster.registry.desire(Pools(asked["prefill"], asked["decode"]))

    def oracle(self) -> Coroutine[Any, Any, None]:
        rules = rules_of(CONFIG)

        def wants(now: float) -> Serving:
            sizes = [needed(self.model, self.coming(at), rules) for at in (now, now + START_S)]
            both = Serving(max(one.prefill for one in sizes), max(one.decode for one in sizes))
            return both if both.total <= CONFIG.budget else sizes[1]

        return self.follow(wants, 5.0)

    def coming(self, at: float) -> Demand:
        """The load that really comes in the 30 s around a moment."""
        found = [one for one in self.sent if at - 15 <= one.at < at + 15]
        if not found:
            return Demand()
        prompt, output = (sum(getattr(one, name) for one in found) / len(found) for name in ("prompt", "output"))
        return Demand(len(found) / 30.0, prompt, prompt, output)

    def hpa(self) -> Coroutine[Any, Any, None]:
        """Kubernetes' rule: ceil(size * load / target), unchanged within a tenth, down to the highest wish of the last while."""
        target = {"prefill": 1.0, "decode": 24.0}
        wished: list[tuple[float, Serving]] = []

        def wants(now: float) -> Serving:
            sizes = {}
            for role in ROLES:
                serving = [w for w in self.cluster.fleet.workers.values() if w.record.serves(role) and w.record.state == "ready"]
                load = sum(w.load_now().running + w.load_now().waiting for w in serving)
                ratio = load / (target[role] * max(1, len(serving)))
                sizes[role] = len(serving) if abs(ratio - 1) < 0.1 else math.ceil(len(serving) * ratio)
            least, most = (CONFIG.least_prefill, CONFIG.least_decode), CONFIG.budget // 2
            wished.append((now, Serving(min(most, max(least[0], sizes["prefill"])), min(most, max(least[1], sizes["decode"])))))
            lately = [one for at, one in wished if now - at <= CONFIG.hold_s]
            return Serving(max(one.prefill for one in lately), max(one.decode for one in lately))

        async def resize() -> None:
            began = loop_time()
            while True:
                want = wants(loop_time() - began)
                await self.cluster.registry.desire(Pools(want.prefill, want.decode))
                await asyncio.sleep(EVERY_S)

        return resize()

    def planned(self) -> Coroutine[Any, Any, None]:
        return Controller(CONFIG, self.model, self.cluster.registry, self.doors, "planner-0 1", loop_time).run()


def run(name: str, arm: str, sent: list[Sent]) -> Result:
    began = time.perf_counter()
    split = Serving(*map(int, arm.removeprefix("static ").split("+"))) if arm.startswith("static") else Serving(2, 2)

    async def main() -> Result:
        made = Arm(sent, split)
        actors = {"hpa": made.hpa, "oracle": made.oracle, "planner": made.planned}
        await made.run(actors[arm]() if arm in actors else None)
        totals = made.cluster.routers[0].journal.totals
        changes = len(made.pools.history) - 1
        return Result(
            name, arm, len(sent), int(totals.met), made.failed, made.pools.worker_s / 3600, changes, made.pools.history,
            time.perf_counter() - began,
        )  # fmt: skip

    return virtual_time.run(main())


def best_static(results: list[Result]) -> Result:
    static = [one for one in results if one.arm.startswith("static")]
    good = [one for one in static if one.attainment >= ENOUGH]
    return max(good, key=lambda one: one.rate) if good else max(static, key=lambda one: one.attainment)


def main() -> None:
    logging.disable(logging.ERROR)  # of requests that are too late: they are counted
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--workloads", default="shift,day")
    parser.add_argument("--arms", default=",".join([*(f"static {p}+{d}" for p, d in STATIC), "hpa", "oracle", "planner"]))
    parser.add_argument("--quick", action="store_true", help="a third of the time, for a test of the program")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: list[Result] = []
    for name in asked.workloads.split(","):
        sent = workload(name, asked.traces, asked.quick)
        for arm in asked.arms.split(","):
            found.append(run(name, arm, sent))
            one = found[-1]
            print(
                f"{name:6} {arm:12} {one.attainment:6.1%} of {one.offered} met, {one.worker_hours:5.2f} worker-hours,"
                f" {one.rate:7.0f} met an hour of a worker, {one.changes} changes, {one.failed} failed ({one.seconds:.0f} s)",
                flush=True,
            )
    if asked.json:
        rows = [asdict(one) | {"attainment": one.attainment, "rate": one.rate} for one in found]
        best = {name: best_static([one for one in found if one.workload == name]).arm for name in asked.workloads.split(",")}
        told = {"machine": describe(), "simulated": True, "slo": SLO.model_dump(), "start_s": START_S, "best_static": best, "rows": rows}
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
