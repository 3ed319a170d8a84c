"""From a plan to a campaign: which requests, against what, in which order."""

import asyncio
import math
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loadtest import arrivals, traces, workload
from loadtest.campaign import Arm, Campaign, Probe, this_machine
from loadtest.cluster import ClusterError, Hardware, RunningCluster, check_equal, make_arms
from loadtest.compare import abba, measure_arm
from loadtest.drive import NO_SERVER, Live, Run, drive
from loadtest.grpc_door import GrpcDoor
from loadtest.slo import Slo
from loadtest.summary import summarise
from loadtest.window import Window
from loadtest.workload import Item

FIRST_ID = 10  # above the special tokens
WARM_UP_REQUESTS = 4  # before anything is measured: connections, handshakes, first steps
MAX_TRACE = 100_000  # requests of a trace, from its beginning: a public one holds more than fit into memory
TRACE = "trace"  # arrivals: the trace's own times
INTERRUPTED = "interrupted"

Show = Callable[["asyncio.Task[Run]", Live, str], Any]  # awaited while a run is on


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent. A trace where one is named, else synthetic; functions of rate and seed."""

    input: str
    output: str
    hit_rate: float
    turns: str
    think: str
    prefix_tokens: int
    prefix_branching: int
    prefix_depth: int
    trace: str | None
    format: Any
    tokenizer: str | None
    scale: float
    max_tokens: int
    vocab: int
    lenient: bool
    arrivals: str
    duration_s: float

    def items(self, rate: float, seed: int) -> tuple[list[Item], Mapping[str, int]]:
        """What is to be sent, and what was left out, by reason. Raises WorkloadError."""
        if self.trace:
            encode = _encoder(self.tokenizer) if self.tokenizer else None
            trace = traces.read(
                self.trace, self.format, first_id=FIRST_ID, vocab=self.vocab, seed=seed, encode=encode,
                factor=self.scale, max_tokens=self.max_tokens, lenient=self.lenient, limit=MAX_TRACE,
            )  # fmt: skip
            speed = rate if self.arrivals == TRACE else 1.0
            return [item if item.at is None else replace(item, at=item.at / speed) for item in trace.items], trace.skipped
        turns = workload.parse_tokens(self.turns, "turns")
        made = workload.Synthetic(
            prompt=workload.parse_tokens(self.input, "input"), output=workload.parse_tokens(self.output, "output"),
            first_id=FIRST_ID, vocab=self.vocab, hit_rate=self.hit_rate, prefix_depth=self.prefix_depth,
            prefix_branching=self.prefix_branching, prefix_tokens=self.prefix_tokens, turns=turns,
            think=workload.parse_seconds(self.think, "think"),
        )  # fmt: skip
        rng = random.Random(0)
        turns_each = sum(turns.tokens(rng) for _ in range(100)) / 100
        enough = math.ceil((rate * self.duration_s * 1.5 + 50) * turns_each)
        bounded = workload.bound(workload.scale(made.items(enough, seed), self.scale), self.max_tokens)
        return list(bounded.items), {"more than max_tokens": bounded.dropped} if bounded.dropped else {}

    def times(self, rate: float, seed: int, items: list[Item]) -> Iterator[float]:
        """When they are due. Raises ValueError."""
        if self.arrivals == TRACE:
            if any(item.at is None and not item.session for item in items):
                raise ValueError("arrivals: trace: this workload has no times of its own")
            return iter(())
        if any(item.at is not None for item in items):
            raise ValueError(f"arrivals: this trace has times of its own, so it is not {self.arrivals}; say --arrivals trace")
        return arrivals.parse(self.arrivals)(rate).times(random.Random(f"{seed} arrivals"))


def _encoder(path: str) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """What both kinds of campaign need."""

    workload: Workload
    slo: Slo
    seeds: tuple[int, ...]
    warm_up_s: float
    cool_down_s: float
    timeout_s: float
    show: Show

    def __post_init__(self) -> None:
        """Raises ValueError when nothing would be left to measure."""
        self.window  # noqa: B018

    @property
    def window(self) -> Window:
        return Window(self.workload.duration_s, self.warm_up_s, self.cool_down_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What only `compare` needs. `vary`: a field of Workload, or `chunk`, and its values; ("", ("",)) varies nothing."""

    model: str
    arms: tuple[str, ...]
    hardware: Hardware
    ratio: tuple[int, int]
    chunk: int
    rates: tuple[float, ...]
    vary: tuple[str, tuple[str, ...]]
    bisections: int


async def measure_endpoint(plan: Plan, address: str, rate: float) -> Campaign:
    """One endpoint at one rate, once for each seed. Raises ConnectionError, WorkloadError, ValueError."""
    notes = _Notes()
    machine = this_machine()
    try:
        await warm_up(address, plan.timeout_s)
        for seed in plan.seeds:
            probe = await notes.measure(plan, plan.workload, address, "endpoint", rate, seed)
            if probe.partial:
                break
    except (KeyboardInterrupt, asyncio.CancelledError):
        notes.partial = INTERRUPTED
    return notes.campaign(plan, f"{address} at {rate:g} requests/s", (Arm("endpoint", {}, address),), {}, machine)


async def compare_arms(plan: Plan, comparison: Comparison, note: Callable[[str], None]) -> Campaign:
    """Every arm at every rate, as `loadtest.compare` orders them. Raises WorkloadError, ValueError, and ClusterError before anything was
    measured; what is measured by then is kept."""
    notes = _Notes()
    machine = this_machine()
    common = {"model.path": comparison.model, "engine.threads": str(comparison.hardware.threads), "telemetry.log_level": "warning"}
    key, values = comparison.vary
    all_arms: dict[str, Arm] = {}
    config: dict[str, Any] = {}
    try:
        for value in values:
            chunk = int(value) if key == "chunk" else comparison.chunk
            varied = _vary(plan.workload, key, value)
            arms = make_arms(comparison.arms, comparison.hardware, comparison.ratio, chunk)
            all_arms |= {arm.name: arm for arm in arms}
            config = check_equal(arms, common, comparison.hardware)
            note(f"{', '.join(all_arms)}: the same in every key but their topology, {len(comparison.hardware.cores)} cores each")
            for seed, arm in abba(arms, plan.seeds):
                async with RunningCluster({**common, **arm.topology}, "loadtest") as address:
                    await warm_up(address, plan.timeout_s)
                    measure = partial(notes.measure, plan, varied, address, arm.name, seed=seed, variant=f"{key}={value}" if key else "")
                    await measure_arm(
                        comparison.rates, partial(_measure_again, measure, plan, note), partial(_attained, plan), comparison.bisections
                    )
    except (KeyboardInterrupt, asyncio.CancelledError):
        notes.partial = INTERRUPTED
    except (ClusterError, ConnectionError) as error:  # what was measured before is worth keeping
        if not notes.probes:
            raise
        notes.partial = f"the next cluster did not come up: {error}"
    title = f"{Path(comparison.model).name} on {len(comparison.hardware.cores)} cores"
    return notes.campaign(plan, title, tuple(all_arms.values()), config, machine)


async def _measure_again(measure: Callable[..., Awaitable[Probe]], plan: Plan, note: Callable[[str], None], rate: float, why: str) -> Probe:
    """A run at one rate; once more where it is void. Both are kept, and the report lists what was void."""
    for last in (False, True):
        probe = await measure(rate=rate, why=why)
        told = summarise(probe.records, plan.window, plan.slo, due=probe.due)
        said = told.void or probe.partial or f"{told.attainment or 0.0:.0%} of {told.requests} within the SLO"
        note(" ".join(filter(None, (probe.variant, f"{probe.arm}, {rate:.3g}/s, seed {probe.seed}: {said}"))))
        if last or not told.void:
            break
    return probe


def _attained(plan: Plan, probe: Probe) -> float | None:
    """None where the run does not count."""
    told = summarise(probe.records, plan.window, plan.slo, due=probe.due)
    return None if told.void else told.attainment


def _vary(load: Workload, key: str, value: str) -> Workload:
    changed: Any = {"hit_rate": float(value)} if key == "hit_rate" else {key: value} if key in ("input", "output") else {}
    return replace(load, **changed)


async def warm_up(address: str, timeout_s: float) -> None:
    """Raises ConnectionError when nobody answers."""
    async with GrpcDoor(address) as door:
        for number in range(WARM_UP_REQUESTS):
            answer = await door.ask([FIRST_ID + number] * 64, 4, timeout_s, lambda count: None)
            if answer.reason == NO_SERVER:
                raise ConnectionError(f"nobody answers at {address}")


class _Notes:
    """What was measured so far: an interrupted campaign keeps it."""

    def __init__(self) -> None:
        self.probes: list[Probe] = []
        self.skipped: dict[str, int] = {}
        self.partial = ""

    async def measure(
        self, plan: Plan, load: Workload, address: str, arm: str, rate: float, seed: int, why: str = "sweep", variant: str = ""
    ) -> Probe:
        items, skipped = load.items(rate, seed)
        self.skipped |= skipped
        live = Live()
        # A salt of its own: prompts of the run before, which may be the same ones, are not found in the caches.
        async with GrpcDoor(address, salt=secrets.token_hex(8)) as door:
            times = load.times(rate, seed, items)
            run = asyncio.create_task(drive(items, times, door, duration_s=load.duration_s, timeout_s=plan.timeout_s, live=live))
            try:
                await plan.show(run, live, " ".join(filter(None, (arm, variant, f"{rate:.3g}/s seed {seed}"))))
                done = await run
            except asyncio.CancelledError:
                run.cancel()
                await asyncio.wait({run})
                self.probes.append(Probe(arm, rate, seed, tuple(live.records), live.due, load.duration_s, why, variant, INTERRUPTED))
                raise
        probe = Probe(arm, rate, seed, done.records, done.due, done.duration_s, why, variant, done.partial)
        self.probes.append(probe)
        return probe

    def campaign(self, plan: Plan, title: str, arms: tuple[Arm, ...], config: Mapping[str, Any], machine: Mapping[str, Any]) -> Campaign:
        """Raises ValueError when there is nothing to tell."""
        if not self.probes:
            raise ValueError(f"nothing was measured: {self.partial or 'no run'}")
        said = {name: getattr(plan.workload, name) for name in Workload.__slots__}
        broken = self.partial or next((probe.partial for probe in self.probes if probe.partial), "")
        return Campaign(
            title, plan.slo, plan.warm_up_s, plan.cool_down_s, arms, tuple(self.probes), said, config, machine, self.skipped, broken
        )
