"""What a campaign is to measure: which requests, under which SLO, with which seeds, against which arms."""

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadtest import arrivals, traces, workload
from loadtest.access import DoorAccess
from loadtest.arms import Ratio, check_engines, make_arms, over_engines
from loadtest.campaign import Arm
from loadtest.cluster import RunningCluster, check_equal
from loadtest.drive import Live, Run
from loadtest.hardware import Cores, Hardware, with_ranks
from loadtest.release import Release
from loadtest.release import make_arms as release_arms
from loadtest.slo import Slo
from loadtest.window import Window
from loadtest.workload import Item

FIRST_ID = 10  # above the special tokens
MAX_TRACE = 100_000  # requests of a trace that one run holds: a whole public trace would not fit into memory
TRACE = "trace"  # arrivals: the trace's own times
VLLM_BLOCK = "32"  # tokens: vLLM on a CPU takes only multiples of it
CHUNK = "chunk"  # the only parameter that can be varied and is not a field of Workload
VARIED = ("input", "output", "hit_rate", CHUNK)

Show = Callable[["asyncio.Task[Run]", Live, Slo, float, str], Any]  # awaited during a run of so many seconds, with its title
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sent: a trace if one is named, else synthetic requests. Both are functions of rate and seed."""

    input: str = "100-300"
    output: str = "32"
    hit_rate: float = 0.0
    turns: str = "1"
    think: str = "0"
    prefix_tokens: int = 64
    prefix_branching: int = 4
    prefix_depth: int = 1
    trace: str | None = None
    format: str = "auto"
    tokenizer: str | None = None
    scale: float = 1.0
    max_tokens: int = 2048
    vocab: int = 256
    lenient: bool = False
    arrivals: str = "poisson"
    duration_s: float = 30.0

    def items(self, rate: float, seed: int, note: Note = lambda line: None) -> tuple[list[Item], Mapping[str, int]]:
        """The items to send, and how many were left out, by reason. Raises WorkloadError."""
        return self._recorded(rate, seed, note) if self.trace else self._synthetic(rate, seed)

    def _recorded(self, rate: float, seed: int, note: Note) -> tuple[list[Item], Mapping[str, int]]:
        timed = self.arrivals == TRACE
        reading = traces.Reading(
            first_id=FIRST_ID, vocab=self.vocab, seed=seed, format=self.format, encode=_encoder(self.tokenizer) if self.tokenizer else None,
            factor=self.scale, max_tokens=self.max_tokens, lenient=self.lenient, limit=MAX_TRACE,
            openings=None if timed else self._enough(rate), within_s=self.duration_s * rate if timed else None,
        )  # fmt: skip
        trace = traces.read(str(self.trace), reading, lambda rows: note(f"{self.trace}: {rows} rows read"))
        speed = rate if timed else 1.0
        return [item if item.at is None else replace(item, at=item.at / speed) for item in trace.items], trace.skipped

    def _synthetic(self, rate: float, seed: int) -> tuple[list[Item], Mapping[str, int]]:
        turns = workload.parse_tokens(self.turns, "turns")
        made = workload.Synthetic(
            prompt=workload.parse_tokens(self.input, "input"), output=workload.parse_tokens(self.output, "output"),
            first_id=FIRST_ID, vocab=self.vocab, hit_rate=self.hit_rate, prefix_depth=self.prefix_depth,
            prefix_branching=self.prefix_branching, prefix_tokens=self.prefix_tokens, turns=turns,
            think=workload.parse_seconds(self.think, "think"),
        )  # fmt: skip
        rng = random.Random(0)
        turns_each = sum(turns.tokens(rng) for _ in range(100)) / 100
        items = made.items(math.ceil(self._enough(rate) * turns_each), seed)
        bounded = workload.bound(workload.scale(items, self.scale), self.max_tokens)
        return list(bounded.items), {"more than max_tokens": bounded.dropped} if bounded.dropped else {}

    def _enough(self, rate: float) -> int:
        """More arrivals than any run of this length needs."""
        return math.ceil(rate * self.duration_s * 1.5 + 50)

    def times(self, rate: float, seed: int, items: list[Item]) -> Iterator[float]:
        """When the items are due. Raises ValueError."""
        if self.arrivals == TRACE:
            if any(item.at is None and not item.session for item in items):
                raise ValueError("arrivals: trace: this workload has no times of its own")
            return iter(())
        if any(item.at is not None for item in items):
            raise ValueError(f"arrivals: this trace has times of its own, so they are not {self.arrivals}; use --arrivals trace")
        return arrivals.parse(self.arrivals)(rate).times(random.Random(f"{seed} arrivals"))

    def vary(self, key: str, value: str) -> "Workload":
        """A copy with another value of one field; CHUNK and "" change nothing here."""
        changed: Any = {"hit_rate": float(value)} if key == "hit_rate" else {key: value} if key in ("input", "output") else {}
        return replace(self, **changed)


def _encoder(path: str) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    if not Path(path).is_file():
        raise ValueError(f"tokenizer: {path}: no such file")
    tokenizer = Tokenizer.from_file(path)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


async def _show_nothing(running: "asyncio.Task[Run]", live: Live, slo: Slo, duration_s: float, title: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What both kinds of campaign need. The first of several seeds chooses the rates of a comparison (`results.Best`)."""

    workload: Workload
    slo: Slo
    seeds: tuple[int, ...]
    warm_up_s: float
    cool_down_s: float
    timeout_s: float
    access: DoorAccess = field(default_factory=DoorAccess)
    show: Show = _show_nothing
    note: Note = lambda line: None

    def __post_init__(self) -> None:
        """Raises ValueError if nothing would be left to measure, or a seed occurs twice."""
        self.window  # noqa: B018
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {','.join(map(str, self.seeds))}: a seed that occurs twice repeats the same requests")

    @property
    def window(self) -> Window:
        """The window of a run that has the workload's length."""
        return self.window_of(self.workload.duration_s)

    def window_of(self, duration_s: float) -> Window:
        return Window(duration_s, self.warm_up_s, self.cool_down_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan:
    """What only `compare` needs.

    vary       one of VARIED and its values; ("", ("",)) varies nothing
    within_s   that what is in `chosen` may take in all: nobody said "duration", "seeds" or "rates", so the comparison chooses them
    proposed   what a look at the first arm proposed for the report to repeat; empty if objectives and rates were given
    """

    model: str
    arms: tuple[str, ...]
    hardware: Hardware
    ratio: Ratio
    chunk: int | None  # None: the engine's own
    rates: tuple[float, ...]
    vary: tuple[str, tuple[str, ...]]
    bisections: int
    engines: tuple[str, ...] = ("baton",)
    vllm: str = "{}"  # engine.vllm of the arms over vLLM
    parallel: int = 1  # tensor-parallel ranks of each worker
    dtype: str | None = None  # None: the engine's own
    within_s: float = math.inf
    chosen: frozenset[str] = frozenset()
    start_s: float = 8.0  # that a cluster takes to start and stop
    proposed: Mapping[str, Any] = field(default_factory=dict)
    release: Release | None = None  # on which the arms run, instead of clusters of their own

    @property
    def common(self) -> dict[str, str]:
        """The settings that all arms share."""
        found = {"model.path": self.model, **self.hardware.settings, "telemetry.log_level": "warning"}
        if self.dtype is not None:
            found["model.dtype"] = self.dtype
        if "vllm" in self.engines and isinstance(self.hardware, Cores):
            found["engine.block_size"] = VLLM_BLOCK
        return found

    def make_arms(self) -> tuple[Arm, ...]:
        """Raises ClusterError for an arm or an engine that does not exist or does not fit the hardware, and ValueError for ranks that do
        not."""
        if self.release is not None:
            return release_arms(self.arms, self.hardware.workers, self.ratio)
        check_engines(self.engines)
        arms = make_arms(self.arms, self.hardware, self.ratio, self.chunk)
        if self.engines == ("baton",) and self.parallel == 1:
            return arms
        return over_engines(arms, self.engines, with_ranks(self.vllm, self.parallel, self.engines))

    def check(self, arms: Sequence[Arm]) -> dict[str, Any]:
        """The configuration that all arms share. Raises ValueError and ClusterError."""
        return check_equal(arms, self.common, self.hardware) if self.release is None else self.release.config

    def running(self, arm: Arm) -> AbstractAsyncContextManager[dict[str, str]]:
        """Runs the arm and yields the addresses of its doors. Raises ClusterError."""
        return RunningCluster({**self.common, **arm.topology}, "loadtest") if self.release is None else self.release.running(arm)
