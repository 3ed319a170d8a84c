"""The planner on a real cluster, through a compressed day, against static splits and a rule as of a horizontal autoscaler.

    python benchmarks/planner_real.py --traces FOLDER [--hour-s 10] [--statics 2] [--arms ...] [--why] [--json FILE]

Real processes (`baton up`: router, workers, Redis, planner) with the toy model, whose steps sleep, so workers are parallel however few
cores there are. Every stream is compared token by token with what the toy must say.

The load is the day of benchmarks/planner.py (code by day, conversations with a peak in the evening; lengths of the Azure traces of 2023,
in their order; Poisson arrivals), made smaller: 24 hours of 10 s, twice the requests per second, a fourth of the tokens of a prompt and
half of those of an output. The toy computes a step in 40 ms and 0.8 ms for each token, 512 tokens and 8 sequences in one step at most.

The profile by which the planner judges is measured first, as `baton profile` does. Objectives follow the rule of benchmarks/planner.py:
2.5 times the TTFT and twice the TPOT within which an idle cluster of that profile, in the simulator, serves nine of ten requests.

    static   the simulator runs all splits of two to six workers with that profile; the `--statics` best are run here
    planner  `planner.enabled`; it begins with the best of these. Its times stand to its interval of 5 s, the shortest that there is, as
             those of benchmarks/planner.py to theirs
    hpa      begins with the same; each pool by its own load, as the registry has it, every 5 s; down after the planner's time. It asks as
             `baton scale` does, for sizes in the registry

What counts is the number of requests that met every objective, by the client's clock, per hour of a worker, from the wish that it starts
until its process is gone (`planner_ledger.py`). `lost`: requests that were neither served nor refused, nor had waited for 30 s.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import describe
from planner import ENOUGH, rank, serves, why
from planner_day import HOURS, SEED, TIMEOUT_S, Foreseen, day, foresee, prompt_of
from planner_hpa import Autoscaler
from planner_ledger import WorkerLedger, look
from planner_loads import PerHour, Sent, objectives

from baton.client import AsyncClient, GenerateError
from baton.clock import loop_time
from baton.cluster.config import Config
from baton.cluster.config_planner import PlannerConfig
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.connect import connect_registry
from baton.cluster.records import ROLES, Pools, RoleName
from baton.cluster.registry import Registry, RegistryUnavailable
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import naive
from baton.launch import state
from baton.models.make_small import make_toy
from baton.planner.capacity import PoolSizes
from baton.planner.records import decode
from baton.predict.fitted import profile_of
from baton.predict.measure import Amount, measure
from baton.profile.file import Profile
from baton.simulate.cluster import Sizes
from baton.stages import tpot, ttft
from loadtest.cluster import RunningCluster

NAME = "day"
STEP_MS, TOKEN_US, CHUNK, SEQS, BLOCK, CONTEXT, KV_MIB = 40, 800, 512, 8, 16, 4096, 16
KV_BLOCKS = 4096  # of the simulator's workers; no load needs so many
AMOUNT = Amount((64, 256, 768, 1280), (0.0, 0.5), (1, 4, 8), (32, 512), (4,), 24, 2, 20)
ENGINE = {"max_num_seqs": SEQS, "block_size": BLOCK}
BUDGET, LEAST = 6, 2
PLANNER = PlannerConfig(
    enabled=True, budget=BUDGET, interval_s=5, cooldown_s=5.0, hold_s=15.0, cold_s=2.5, stale_s=20.0, start_timeout_s=45.0,
    flip_timeout_s=15.0, period_s=0.0, least_prefill=1, target=ENOUGH, keep=10_000, lease_s=5.0,
)  # fmt: skip
TARGET: Mapping[RoleName, float] = {"prefill": 1.0, "decode": 3.0}  # of the autoscaler: 24 of 64 sequences, as in benchmarks/planner.py
HPA_EVERY_S, LOOK_EVERY_S, SETTLE_S = 5.0, 0.2, 2.0
REFUSED = ("SATURATED", "DEADLINE")


@dataclass(slots=True)
class Streamed:
    """What came of a request. Times are seconds since the load began. `error`: why it was not served."""

    number: int
    due: float
    first: float = 0.0
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)
    error: str = ""

    def met(self, slo: SloConfig) -> bool:
        pace = tpot(self.first, self.last, len(self.tokens))
        assert slo.ttft_s is not None and slo.tpot_s is not None
        return not self.error and ttft(self.due, self.first) <= slo.ttft_s and (pace is None or pace <= slo.tpot_s)


@dataclass(slots=True)
class DayRun(PerHour):
    """One arm. `wrong`: streams with a token that the toy does not say there."""

    arm: str
    offered: int
    met: int
    refused: int
    lost: int
    wrong: int
    worker_hours: float
    most: int
    longest_gap_s: float  # between two looks at the workers
    sizes: list[tuple[float, int, int]]
    starts_s: list[float]
    changes: dict[str, int]  # of the planner, by kind, and those that were undone
    notes: list[dict[str, Any]]

    def __str__(self) -> str:
        return (
            f"{self.arm:10} {self.attainment:6.1%} of {self.offered} met, {self.refused} refused, {self.lost} lost, {self.wrong} wrong;"
            f" {self.worker_hours:.3f} worker-hours, {self.most} workers at most, {self.rate:.0f} met an hour of a worker; {self.changes}"
        )

    def to_json(self) -> dict[str, Any]:
        told = {name: value for name, value in asdict(self).items() if name != "notes"}
        return told | {"attainment": self.attainment, "rate": self.rate}


def sizes_of(split: PoolSizes) -> Sizes:
    return Sizes(split.prefill, split.decode, SEQS, KV_BLOCKS, CHUNK, BLOCK, CONTEXT)


def engine_settings(model: Path) -> dict[str, str]:
    return {
        "model.path": str(model), "telemetry.log_level": "warning", "engine.max_num_batched_tokens": str(CHUNK),
        "engine.max_num_seqs": str(SEQS), "engine.block_size": str(BLOCK), "engine.kv_memory_mib": str(KV_MIB),
    }  # fmt: skip


async def profiled(model: Path, to: Path) -> Profile:
    """Measures the toy, without what two busy cores do to each other: its workers sleep."""
    found = await measure(engine_settings(model), AMOUNT, CHUNK, lambda line: print(f"profile: {line}", flush=True), ("colocated", "split"))
    profile = profile_of(found, model.name, ENGINE, AMOUNT, CHUNK)
    profile.save(to)
    return profile


def every_split() -> list[PoolSizes]:
    return [PoolSizes(total - few, few) for total in range(LEAST, BUDGET + 1) for few in range(1, total)]


def candidates(foreseen: Sequence[Foreseen], count: int) -> list[PoolSizes]:
    """The splits that are run for real: the best in the simulator, the best first."""
    best = sorted(foreseen, key=lambda one: rank(one.attainment, one.rate), reverse=True)
    return [one.split for one in best[:count]]


def changes_of(notes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many changes of each kind the planner made, and how many of them were undone."""
    made = Counter(str(note["action"]) for note in notes if note["kind"] == "outcome")
    undone = sum(note["kind"] == "outcome" and note["state"] != "settled" for note in notes)
    return dict(made) | {"undone": undone}


def right(answer: Streamed, one: Sent) -> bool:
    """Whether all tokens are those of the toy. An answer that broke off has the first of them."""
    params = SamplingParams(max_tokens=one.output, temperature=0.0, ignore_eos=True)
    expected = naive(prompt_of(answer.number, one.prompt), params)
    return answer.tokens == (expected[: len(answer.tokens)] if answer.error else expected)


class DayLoad:
    def __init__(self, sent: Sequence[Sent]) -> None:
        self._sent = sent
        self.answers: list[Streamed] = []

    async def run(self, client: AsyncClient) -> None:
        began = loop_time()
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(self._sent):
                await asyncio.sleep(max(0.0, began + one.at - loop_time()))
                group.create_task(self._ask(client, number, one, began))

    async def _ask(self, client: AsyncClient, number: int, one: Sent, began: float) -> None:
        answer = Streamed(number, one.at)
        self.answers.append(answer)
        asked: dict[str, Any] = {"max_tokens": one.output, "temperature": 0.0, "ignore_eos": True, "timeout_s": TIMEOUT_S}
        try:
            async with client.generate(token_ids=prompt_of(number, one.prompt), **asked) as stream:
                async for token in stream:
                    answer.tokens.append(token.id)
                    answer.last = loop_time() - began
                    answer.first = answer.first or answer.last
        except GenerateError as error:
            answer.error = error.reason or error.code


class RealArm:
    """One cluster, and whoever sizes it."""

    def __init__(self, name: str, split: PoolSizes, model: Path, profile: Path, slo: SloConfig) -> None:
        self.name, self.slo = name, slo
        planner = {f"planner.{key}": _text(value) for key, value in PLANNER.model_dump(exclude_defaults=True).items()}
        self._settings = {
            **engine_settings(model), "prefill.replicas": str(split.prefill), "decode.replicas": str(split.decode),
            "router.bypass_tokens": "0", "slo.ttft_s": str(slo.ttft_s), "slo.tpot_s": str(slo.tpot_s),
            **(planner | {"planner.profile": str(profile)} if name == "planner" else {}),
        }  # fmt: skip
        self.ledger = WorkerLedger()

    async def run(self, sent: Sequence[Sent]) -> DayRun:
        load = DayLoad(sent)
        async with RunningCluster(self._settings, NAME) as endpoints, self._registry() as (registry, supervisor):
            async with AsyncClient(endpoints["grpc"]) as client:
                await asyncio.sleep(SETTLE_S)
                async with beside(self._look(registry, supervisor), *([self._scale(registry)] if self.name == "hpa" else [])):
                    await load.run(client)
            notes = decode(await registry.noted_plans(PLANNER.keep))
        return self._told(sent, load.answers, notes)

    @asynccontextmanager
    async def _registry(self) -> AsyncIterator[tuple[Registry, int]]:
        known = state.need(NAME)
        registry = connect_registry(Config.model_validate({"cluster": {"name": NAME}, "redis": {"url": known.redis_url}}))
        try:
            yield registry, known.pid
        finally:
            await registry.close()

    async def _look(self, registry: Registry, supervisor: int) -> None:
        began = loop_time()
        while True:
            with suppress(RegistryUnavailable):  # until the next look, there are as many as at the last one
                found = await look(registry, supervisor, loop_time() - began)
                if found is not None:
                    self.ledger.note(found)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _scale(self, registry: Registry) -> None:
        rule = Autoscaler(TARGET, PLANNER)
        while True:
            with suppress(RegistryUnavailable):
                members = await registry.members()
                want = rule.wants({role: [one.load for one in members if serves(one, role)] for role in ROLES}, loop_time())
                await registry.desire(Pools(want.prefill, want.decode))
            await asyncio.sleep(HPA_EVERY_S)

    def _told(self, sent: Sequence[Sent], answers: Sequence[Streamed], notes: list[dict[str, Any]]) -> DayRun:
        refused = sum(one.error in REFUSED for one in answers)
        served = [one for one in answers if not one.error]
        wrong = sum(not right(one, sent[one.number]) for one in answers)
        ledger = self.ledger
        return DayRun(
            self.name, len(sent), sum(one.met(self.slo) for one in served), refused, len(sent) - len(served) - refused, wrong,
            ledger.worker_s / 3600, ledger.most, ledger.longest_gap_s, ledger.sizes, ledger.starts, changes_of(notes), notes,
        )  # fmt: skip


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs what does not end by itself until the block does. What it raises ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()


def foreseen_of(sent: Sequence[Sent], seconds: float, slo: SloConfig, profile: Profile) -> list[Foreseen]:
    found = []
    for split in every_split():
        found.append(foresee(sent, seconds, slo, profile, sizes_of(split), RouterConfig()))
        print(f"simulated {split}: {found[-1].attainment:.1%} met, {found[-1].rate:.0f} an hour of a worker", flush=True)
    return found


def report(
    load_average: float, hour_s: float, slo: SloConfig, profile: Profile, foreseen: Sequence[Foreseen], runs: Sequence[DayRun]
) -> str:
    ranked = sorted((run for run in runs if run.arm.startswith("static")), key=lambda run: rank(run.attainment, run.rate), reverse=True)
    told = {
        "machine": describe(), "load_average": load_average, "seed": SEED, "hour_s": hour_s, "slo": slo.model_dump(), "enough": ENOUGH,
        "planner": PLANNER.model_dump(), "profile": {name: dict(fitted.values) for name, fitted in profile.models.items()},
        "foreseen": [{**asdict(one), "split": str(one.split)} for one in foreseen],
        "static": [run.arm for run in ranked], "rows": [run.to_json() for run in runs],
    }  # fmt: skip
    return json.dumps(told, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with azure_code_2023.csv and azure_conv_2023.csv")
    parser.add_argument("--hour-s", type=float, default=10.0)
    parser.add_argument("--statics", type=int, default=2)
    parser.add_argument("--arms", default="static,planner,hpa")
    parser.add_argument("--why", action="store_true", help="tell what the planner decided, and why")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # of the simulated routers
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # which ends the cluster, too
    load_average, runs = os.getloadavg()[0], list[DayRun]()
    sent, seconds = day(options.traces, options.hour_s), HOURS * options.hour_s
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BATON_STATE_DIR"] = folder
        model, known = Path(folder) / "toy", Path(folder) / "profile.yaml"
        make_toy(model, context=CONTEXT, step_delay_ms=STEP_MS, token_delay_us=TOKEN_US)
        profile = asyncio.run(profiled(model, known))
        slo = objectives(sent, sizes_of(PoolSizes(1, 1)), profile)
        print(f"{len(sent)} requests in {seconds:.0f} s; TTFT {slo.ttft_s} s, TPOT {slo.tpot_s} s; {profile.models['step'].values}")
        foreseen = foreseen_of(sent, seconds, slo, profile)
        splits = candidates(foreseen, options.statics)
        arms = {f"static {split.prefill}+{split.decode}": split for split in splits} | dict.fromkeys(("planner", "hpa"), splits[0])
        for arm, split in arms.items():
            if arm.split()[0] not in options.arms.split(","):
                continue
            runs.append(asyncio.run(RealArm(arm, split, model, known, slo).run(sent)))
            print(runs[-1], flush=True)
            if options.why:
                why(runs[-1].notes)
            if options.json:
                options.json.write_text(report(load_average, options.hour_s, slo, profile, foreseen, runs))


if __name__ == "__main__":
    main()
