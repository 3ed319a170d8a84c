"""The planner against static splits, a rule as of a horizontal autoscaler, and one that knows the load: simulated, the same each time.

    python benchmarks/planner.py --traces FOLDER [--workloads day,shift:2] [--arms ...] [--tries N] [--quick] [--why] [--json FILE]
    python benchmarks/planner.py --traces FOLDER --rates

The router's and the engine's own code runs in virtual time; a worker is Llama-3.1-70B in 8 bits on four A10, by their sheet. Lengths
of prompts and outputs are those of the Azure traces of 2023 (code and conversations; Azure Public Dataset, CC BY 4.0), in their order.

    day    24 hours in 16 minutes: code by day, conversations with a peak in the evening; arrivals are Poisson. (The traces have an hour
           each, so the course of the day is made.)
    shift  code, conversations with answers of 200 tokens or more, code, of 200 s each, at one rate
    swing  prompts of code of 3,000 tokens or more, then conversations with short prompts and answers of 200 tokens or more, and both
           again, of 200 s each. A worker has so many sequences at once as have room in its KV if all are as long as the longest. Rates
           are what six of the eight workers serve of each phase alone, in the split that serves most (`--rates`)

Others, to see whether what is better on these is better elsewhere: "waves" of conversations, four minutes each; "steps" of both kinds;
"bursts", the code trace with its own arrivals, every other request; "books", few and long prompts of Mooncake's conversation trace (Apache
2.0). A name may end with a colon and a seed of the arrivals; of bursts, with the quarter of the hour.

Objectives: 2.5 times the TTFT and twice the TPOT within which an idle cluster serves nine of ten requests of the workload.

Each arm gets the same requests at the same moments. What counts is the number of requests that met every objective, per hour of a worker,
from the wish that it starts until it is gone. A static split counts as the best if at least 90 % of its requests met the objectives; where
none does, the one that met most.

    static   so many workers, always: one to five prefill workers, and one or two decode workers; on swing, every split of the budget
    hpa      each pool by its own load (sequences for each worker), every 15 s; down after the same time as the planner's
    oracle   the best schedule that a search found (`planner_oracle.py`): it knows the load, and simulates what it thinks of. A static split
             is one of its schedules. Starts and flips take their time; it knows when to ask for them
    planner  `baton.planner`, with no knowledge of what comes

`--json`: what is in the file and was not run again stays.
"""

import argparse
import asyncio
import json
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machine import describe
from planner_hpa import Autoscaler
from planner_loads import (
    BLOCK,
    CHUNK,
    KV_BLOCKS,
    SWING_SEQS,
    TIMEOUT_S,
    WORKERS_OF_RATES,
    Offered,
    PerHour,
    Sent,
    objectives,
    poisson,
    profile,
    swing_sources,
    workload,
)
from planner_oracle import Made, Schedule, by_part, frontier, neighbours, wanted

from baton.clock import loop_time
from baton.cluster.config_planner import PlannerConfig
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError
from baton.cluster.records import ROLES, Pools, RoleName, WorkerRecord
from baton.planner.capacity import Model, PoolSizes
from baton.planner.controller import Controller
from baton.planner.records import decode
from baton.planner.rehearsal import SimulatedDoors
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.pools import SimulatedPools
from baton.simulate.workers import Times

START_S, EVERY_S, ENOUGH = 15.0, 15.0, 0.9
CONFIG = PlannerConfig(
    budget=8, interval_s=10, cooldown_s=10.0, hold_s=2 * START_S, cold_s=5.0, stale_s=40.0, start_timeout_s=90.0, flip_timeout_s=30.0,
    period_s=0.0, least_prefill=1, target=ENOUGH, keep=10_000,
)  # fmt: skip
STATIC = tuple(PoolSizes(prefill, decode) for decode in (1, 2) for prefill in (1, 2, 3, 4, 5))
EVERY = tuple(PoolSizes(prefill, decode) for decode in range(1, 8) for prefill in range(1, CONFIG.budget - decode + 1))
START = PoolSizes(2, 2)  # of the arms that change
BEST = 3  # schedules of the frontier that are simulated
BUSY = 24 / 64  # of a decode worker's places: what the autoscaler aims at
RATE_STEP, RATE_MOST = 0.05, 6.0  # requests per second


def rank(attainment: float, rate: float) -> tuple[bool, float]:
    """The larger, the better."""
    return (True, rate) if attainment >= ENOUGH else (False, attainment)


def serves(record: WorkerRecord, role: RoleName) -> bool:
    return record.serves(role) and record.state == "ready"


@dataclass(slots=True)
class Result(PerHour):
    workload: str
    arm: str
    offered: int
    met: int
    failed: int  # neither served nor refused
    worker_hours: float
    changes: int
    sizes: list[tuple[float, int, int]]
    seconds: float  # of real time, for the simulation
    good: set[int]  # numbers of the requests that met every objective
    notes: list[dict[str, Any]]  # of the planner
    schedule: list[str]  # of the oracle

    @property
    def rank(self) -> tuple[bool, float]:
        return rank(self.attainment, self.rate)

    def __str__(self) -> str:
        return (
            f"{self.workload:6} {self.arm:12} {self.attainment:6.1%} of {self.offered} met, {self.worker_hours:5.2f} worker-hours,"
            f" {self.rate:7.0f} met an hour of a worker, {self.changes} changes, {self.failed} failed ({self.seconds:.0f} s)"
        )

    def to_json(self) -> dict[str, Any]:
        told = {name: value for name, value in asdict(self).items() if name not in ("good", "notes", "workload")}
        return told | {"attainment": self.attainment, "rate": self.rate}


def model(slo: SloConfig, seqs: int) -> Model:
    known = profile()
    start = replace(known.models["start"], values={"base": START_S})
    return Model(replace(known, models={**known.models, "start": start}), slo.ttft_s, slo.tpot_s, seqs, KV_BLOCKS * BLOCK, CHUNK)


class Arm:
    """One run: the cluster and whoever sizes it."""

    def __init__(self, offered: Offered, slo: SloConfig, sizes: PoolSizes) -> None:
        self.sent, self.model = offered.sent, model(slo, offered.seqs)
        self.sizes = Sizes(sizes.prefill, sizes.decode, offered.seqs, KV_BLOCKS, CHUNK, BLOCK, max_queue=512)
        self.cluster = SimulatedCluster(self.sizes, Times.of(self.model.profile), RouterConfig(max_queue=4096), slo, large=True)
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

    async def follow(self, wants: Callable[[float], PoolSizes], every_s: float) -> None:
        """Flips what can be flipped, and asks for the rest."""
        began = loop_time()
        while True:
            want = wants(loop_time() - began)
            await self.reach(want)
            await asyncio.sleep(every_s)

    async def reach(self, want: PoolSizes) -> None:
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
            pool: sum(w.record.pool == pool and w.record.state == "ready" for w in self.cluster.fleet.workers.values()) for pool in ROLES
        }
        asked = {role: max(0 if role == "prefill" else 1, pools[role] + short[role]) for role in ROLES}
        await self.cluster.registry.desire(Pools(asked["prefill"], asked["decode"]))

    def follows(self, schedule: Schedule, part_s: float) -> Coroutine[Any, Any, None]:
        return self.follow(lambda now: wanted(schedule, part_s, now, START_S, CONFIG.budget), 1.0)

    def hpa(self) -> Coroutine[Any, Any, None]:
        rule = Autoscaler({"prefill": 1.0, "decode": BUSY * self.sizes.max_num_seqs}, CONFIG)

        async def resize() -> None:
            while True:
                there = self.cluster.fleet.workers.values()
                loads = {role: [one.load_now() for one in there if serves(one.record, role)] for role in ROLES}
                want = rule.wants(loads, loop_time())
                await self.cluster.registry.desire(Pools(want.prefill, want.decode))
                await asyncio.sleep(EVERY_S)

        return resize()

    def planned(self) -> Coroutine[Any, Any, None]:
        return Controller(CONFIG, self.model, self.cluster.registry, self.doors, "planner-0 1", loop_time).run()


def run(name: str, arm: str, offered: Offered, slo: SloConfig, schedule: Schedule = (START,)) -> Result:
    """`schedule`: of sizes, which the arms "static" and "oracle" follow; the others begin with the first of them."""
    began = time.perf_counter()

    async def main() -> Result:
        made = Arm(offered, slo, schedule[0])
        actors: dict[str, Callable[[], Coroutine[Any, Any, None]]]
        actors = {"hpa": made.hpa, "planner": made.planned, "oracle": lambda: made.follows(schedule, offered.part_s)}
        await made.run(actors[arm]() if arm in actors else None)
        records = made.cluster.routers[0].journal.last(len(offered.sent))
        good = {int(one.request_id[1:]) for one in records if one.outcome == "ok" and one.slo_missed is None}
        notes = decode(await made.cluster.registry.noted_plans(CONFIG.keep))
        return Result(
            name, arm, len(offered.sent), len(good), made.failed, made.pools.worker_s / 3600, len(made.pools.history) - 1,
            made.pools.history, time.perf_counter() - began, good, notes, [str(size) for size in schedule] if arm == "oracle" else [],
        )  # fmt: skip

    return virtual_time.run(main())


def oracle(name: str, offered: Offered, slo: SloConfig, static: dict[PoolSizes, Result], tries: int) -> Result:
    """The best of the static splits, of the frontier, and of what differs a little from the best of these, part for part; `tries`: of that
    at most."""
    pieces = [
        Offered([replace(offered.sent[number], at=offered.sent[number].at - part * offered.part_s) for number in numbers],
                offered.part_s, offered.part_s, offered.seqs)
        for part, numbers in enumerate(by_part([one.at for one in offered.sent], offered.part_s, offered.parts))
    ]  # fmt: skip
    splits = {
        size: Made(tuple(run(name, "static", piece, slo, (size,)).met for piece in pieces), offered.part_s * size.total) for size in static
    }
    tried: dict[Schedule, Result] = {}

    def attempt(schedule: Schedule) -> Result:
        if schedule not in tried:
            tried[schedule] = run(name, "oracle", offered, slo, schedule)
            print(f"    {tried[schedule]}: {' '.join(tried[schedule].schedule)}", flush=True)
        return tried[schedule]

    for size, one in static.items():
        schedule = (size,) * offered.parts
        tried[schedule] = replace(one, arm="oracle", schedule=[str(size)] * offered.parts)
    for schedule in frontier(splits, len(offered.sent), ENOUGH)[:BEST]:
        attempt(schedule)
    best = max(tried, key=lambda schedule: tried[schedule].rank)
    more = len(tried) + tries
    for part in range(offered.parts):
        for schedule in neighbours(best, part, CONFIG.budget):
            if len(tried) < more and attempt(schedule).rank > tried[best].rank:
                best = schedule
    return replace(tried[best], seconds=sum(one.seconds for one in tried.values()))


def why(notes: Sequence[Mapping[str, Any]]) -> None:
    """What the planner decided, and why."""
    for note in notes:
        if note["kind"] == "outcome":
            print(f"    {note['at']:6.0f} change {note['change']} {note['state']} after {note['seconds']:.0f} s: {note['why']}")
            continue
        demand, pressure = note["demand"], note["pressure"]
        load = f"{demand['rate']:.2f}/s of {demand['uncached']:.0f} + {demand['output']:.0f}, pressure {pressure}"
        print(f"    {note['at']:6.0f} {note['serving']} {load}: {note['action'] or 'nothing'}: {note['why']}")


def compare(name: str, offered: Offered, slo: SloConfig, arms: Sequence[str], tries: int, path: Path | None) -> list[Result]:
    found: list[Result] = []
    static: dict[PoolSizes, Result] = {}
    for arm in arms:
        if arm.startswith("static"):
            size = PoolSizes(*map(int, arm.removeprefix("static ").split("+")))
            found.append(run(name, arm, offered, slo, (size,)))
            static[size] = found[-1]
        else:
            found.append(oracle(name, offered, slo, static, tries) if arm == "oracle" else run(name, arm, offered, slo))
        print(found[-1], flush=True)
        if path is not None:
            write(path, name, offered, slo, found)
    return found


def write(path: Path, name: str, offered: Offered, slo: SloConfig, found: Sequence[Result]) -> None:
    """Arms that were run before and not again stay, if they had the same requests and objectives."""
    told = json.loads(path.read_text()) if path.exists() else {"workloads": {}}
    made = {"slo": slo.model_dump(), "offered": len(offered.sent)}
    before = told["workloads"].get(name, {})
    rows = {row["arm"]: row for row in before["rows"]} if made.items() <= before.items() else {}
    rows |= {one.arm: one.to_json() for one in found}
    static = [arm for arm in rows if arm.startswith("static")]
    static.sort(key=lambda arm: rank(rows[arm]["attainment"], rows[arm]["rate"]), reverse=True)
    told["workloads"][name] = made | {"static": static, "rows": list(rows.values())}
    told |= {"machine": describe(), "simulated": True, "start_s": START_S, "enough": ENOUGH, "planner": CONFIG.model_dump()}
    path.write_text(json.dumps(told, indent=1) + "\n")


def splits(name: str) -> tuple[PoolSizes, ...]:
    """The static splits of a workload."""
    return EVERY if name.startswith("swing") else STATIC


def arms_of(name: str, asked: str) -> list[str]:
    found = []
    for arm in asked.split(","):
        found += [f"static {size.prefill}+{size.decode}" for size in splits(name)] if arm == "static" else [arm]
    return found


def most_served(traces: Path, source: int, split: PoolSizes, slo: SloConfig, seconds: float) -> float:
    """The highest rate of one phase of swing, alone, at which the split still meets the objectives of enough requests."""

    def misses(step: int) -> bool:
        sent = poisson(lambda now: [step * RATE_STEP], seconds, [swing_sources(traces)[source]], 1)
        return run("rate", f"static {split}", Offered(sent, seconds, seconds, SWING_SEQS), slo, (split,)).attainment < ENOUGH

    return RATE_STEP * bisect_left(range(1, round(RATE_MOST / RATE_STEP) + 1), True, key=misses)


def rates(traces: Path, quick: bool) -> None:
    """The rule of the rates of swing: in each phase, what the best split of six workers serves. The objectives are those of as many
    requests of the one kind as of the other."""
    sources = swing_sources(traces)
    slo = objectives([Sent(0.0, *next(source)) for _ in range(100) for source in sources])
    print(f"TTFT {slo.ttft_s:g} s, TPOT {1000 * (slo.tpot_s or 0):g} ms", flush=True)
    for source, kind in enumerate(("long prompts", "long answers")):
        for split in (size for size in EVERY if size.total == WORKERS_OF_RATES):
            print(f"{kind}: {split} {most_served(traces, source, split, slo, 60.0 if quick else 200.0):.2f}/s", flush=True)


def main() -> None:
    logging.disable(logging.ERROR)  # of requests that are too late: they are counted
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--workloads", default="shift,swing,day")
    parser.add_argument("--arms", default="static,hpa,oracle,planner")
    parser.add_argument("--rates", action="store_true", help="tell, instead, what six workers serve of each phase of swing")
    parser.add_argument("--tries", type=int, default=100, help="schedules that the oracle tries beyond those of the frontier")
    parser.add_argument("--quick", action="store_true", help="a third of the time, for a test of the program")
    parser.add_argument("--why", action="store_true", help="tell each decision of the planner")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.rates:
        return rates(asked.traces, asked.quick)
    if "oracle" in asked.arms and "static" not in asked.arms:
        parser.error("the oracle begins with static splits: name some before it")
    for name in asked.workloads.split(","):
        offered = workload(name, asked.traces, asked.quick)
        slo = objectives(offered.sent)
        print(f"{name}: TTFT {slo.ttft_s:g} s, TPOT {1000 * (slo.tpot_s or 0):g} ms", flush=True)
        found = compare(name, offered, slo, arms_of(name, asked.arms), asked.tries, asked.json)
        if asked.why:
            for one in found:
                why(one.notes)


if __name__ == "__main__":
    main()
