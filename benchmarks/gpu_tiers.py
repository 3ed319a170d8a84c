"""Section G13 of `gpu.py`: host memory under a GPU's pool.

Blocks go from the pool to a memory tier and come back, through the threads, bounds and digests of a worker's tiers: what that achieves of
the bus, what it does to decode steps beside it, and after which time a prompt that returns has its first token.
"""

import itertools
import statistics
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from gpu import Machine, Report, sequences, steps

from baton.engine.core.colder import Colder, TierPolicy
from baton.engine.core.kvcache import DIGEST_BYTES, Pool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence as Seq
from baton.engine.gpu.overlap import OverlapEngine
from baton.engine.gpu.runner import GpuRunner
from baton.tiers.locked_store import LockedStore, memory_store
from baton.tiers.tier import Bounds
from baton.tiers.tiers import MakeStores, Tiers
from baton.worker.colder import MEMORY_READERS

AT_ONCE = 16  # blocks of one save
WITHIN_S = 20.0
STEPS, WALK_STEPS = 300, 6


class Watched(Tiers):
    """Remembers what has come."""

    def __init__(self, make: MakeStores, policy: TierPolicy) -> None:
        super().__init__(make, policy)
        self.came: list[tuple[int, bytes]] = []  # (block, key)
        self._wanted: dict[int, Sequence[tuple[int, bytes, str]]] = {}

    def load(self, number: int, wanted: Sequence[tuple[int, bytes, str]], compute_s: float) -> None:
        self._wanted[number] = wanted
        super().load(number, wanted, compute_s)

    def end(self, number: int) -> list[bool | None]:
        arrived = super().end(number)
        wanted = self._wanted.pop(number)
        self.came += [(block, key) for (block, key, _), came in zip(wanted, arrived, strict=True) if came]
        return arrived


class Reports:
    """Implements `baton.engine.core.colder.Report`: an engine without a loop is told between its steps."""

    def __init__(self) -> None:
        self.told: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.changed = threading.Event()

    def _tell(self, name: str, *arguments: Any) -> None:
        self.told.append((name, arguments))
        self.changed.set()

    def saved(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        self._tell("saved", blocks)

    def landed(self, number: int) -> None:
        self._tell("landed", number)

    def given_back(self, blocks: Sequence[int]) -> None:
        self._tell("given_back", blocks)

    def moved(self, stored: bool, medium: str, keys: Sequence[bytes]) -> None:
        self._tell("moved", stored, medium, keys)

    def wait_for(self, name: str) -> None:
        """Takes what is told until that has been."""
        until = time.monotonic() + WITHIN_S
        while True:
            while self.told:
                if self.told.popleft()[0] == name:
                    return
            if not self.changed.wait(until - time.monotonic()):
                raise TimeoutError(f"nobody told {name}")
            self.changed.clear()


@contextmanager
def opened(pool: Pool, units: int, policy: TierPolicy) -> Iterator[tuple[Watched, Reports]]:
    tiers, reports = Watched(lambda pool: [(memory_store(pool, units), Bounds(readers=MEMORY_READERS))], policy), Reports()
    tiers.open(pool, reports)
    try:
        yield tiers, reports
    finally:
        tiers.close()


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def save(tiers: Tiers, reports: Reports, blocks: Sequence[int]) -> None:
    """All of them, with two saves at a time, as many as a tier takes."""
    parts = [[(block, key(block)) for block in blocks[i : i + AT_ONCE]] for i in range(0, len(blocks), AT_ONCE)]
    for i, part in enumerate(parts):
        tiers.save(part)
        if i:
            reports.wait_for("saved")
    reports.wait_for("saved")


def load(tiers: Tiers, reports: Reports, number: int, into: Sequence[int], blocks: Sequence[int]) -> int:
    """How many have come of `blocks`, saved before."""
    tiers.load(number, [(here, key(block), "host") for here, block in zip(into, blocks, strict=True)], 1.0)
    reports.wait_for("landed")
    return sum(map(bool, tiers.end(number)))


def page_locked(tiers: Tiers) -> bool:
    """Whether the memory that was used first is."""
    store = tiers.tiers[0].store
    assert isinstance(store, LockedStore) and store._memory is not None
    return torch.from_numpy(store._memory[0]).is_pinned()


def round_trip(machine: Machine, report: Report, runner: GpuRunner, blocks: Sequence[int], into: Sequence[int]) -> dict[str, Any]:
    size, pool = len(blocks) * runner.layout.block_bytes, runner.pool
    with opened(pool, 2 * len(blocks), TierPolicy()) as (tiers, reports):
        times: dict[str, list[float]] = {"down": [], "up": []}
        for turn in range(3):  # memory is touched for the first time in the first
            tiers.drop([key(block) for block in blocks])
            time.sleep(0.05)
            began = time.perf_counter()
            save(tiers, reports, blocks)
            saved = time.perf_counter()
            came = load(tiers, reports, turn, into, blocks)
            times["down"].append(saved - began)
            times["up"].append(time.perf_counter() - saved)
        locked = page_locked(tiers)
    if came != len(blocks) or pool.digests(blocks) != pool.digests(into):
        raise AssertionError(f"{came} of {len(blocks)} blocks came back")
    found: dict[str, Any] = {"bytes": size, "page-locked": locked}
    if machine.cuda and not locked:
        report.row("G13", "the driver did not page-lock the memory")
    for way, ceiling in (("down", machine.to_host), ("up", machine.to_device)):
        rate = size / min(times[way][1:])
        found[way] = {"bytes/s": rate, "share": rate / ceiling, "seconds": times[way]}
        report.row(f"G13 {len(blocks)} blocks {way}, of the pinned copy", f"{rate / 1e9:.1f} GB/s", found[way]["share"])
    return found


@contextmanager
def traffic(pool: Pool, blocks: Sequence[int], into: Sequence[int]) -> Iterator[Callable[[], int]]:
    """Blocks go down and come up all the time. Tells how many have."""
    over, moved, wrong = threading.Event(), [0], list[BaseException]()

    def run() -> None:
        try:
            with opened(pool, 2 * len(blocks), TierPolicy()) as (tiers, reports):
                for number in itertools.count():
                    if over.is_set():
                        return
                    tiers.drop([key(block) for block in blocks])
                    save(tiers, reports, blocks)
                    moved[0] += len(blocks) + load(tiers, reports, number, into, blocks)
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + WITHIN_S
    try:
        while not moved[0] and not wrong and time.monotonic() < until:
            time.sleep(0.01)
        yield lambda: moved[0]
    finally:
        over.set()
        thread.join(WITHIN_S)
    if wrong or not moved[0]:
        raise AssertionError("no blocks were moved beside the steps") from (wrong[0] if wrong else None)


def beside(machine: Machine, report: Report, runner: GpuRunner, blocks: Sequence[int], into: Sequence[int], count: int) -> dict[str, Any]:
    """Decode steps, alone and while blocks go down and come up all the time."""
    batch, context = machine.sizes.interference[:2]
    found: dict[str, Any] = {}
    arounds: dict[str, AbstractContextManager[Callable[[], int]]] = {
        "alone": nullcontext(lambda: 0),
    }
    if machine.cuda:  # Triton's interpreter keeps the place in the grid for all threads: two kernels at once write anywhere
        arounds["beside a tier"] = traffic(runner.pool, blocks, into)
    for name, around in arounds.items():
        seqs = sequences(runner, batch, context, count + 16)
        with around as moved:
            began, before = time.perf_counter(), moved()
            times = sorted(steps(runner, seqs, count))
            rate = (moved() - before) * runner.layout.block_bytes / (time.perf_counter() - began)
        found[name] = {"p50": statistics.median(times), "p99": times[int(0.99 * (len(times) - 1))], "bytes/s": rate}
    for name, cell in found.items():
        said = f"P50 {cell['p50'] * 1e3:.2f}, P99 {cell['p99'] * 1e3:.2f} ms, {cell['bytes/s'] / 1e9:.1f} GB/s moved"
        share = None if name == "alone" else cell["p99"] / found["alone"]["p99"]
        report.row(
            f"G13 {batch} decodes, context {context}, {name}; P99 of that alone", said, share, None if share is None else 1.03, most=True
        )
    return found


def first_token(engine: OverlapEngine, reports: Reports, seq: Seq) -> float:
    """Seconds until it is there."""
    colder, began = engine.colder, time.perf_counter()
    assert colder is not None
    engine.add(seq)
    while engine.sequences:
        while reports.told:
            name, arguments = reports.told.popleft()
            getattr(colder, name)(*arguments)
        outputs = engine.step(time.monotonic())
        colder.noted(engine.pool.drain_changes())
        if any(output.sampled for output in outputs):
            return time.perf_counter() - began
        if engine.idle:
            reports.changed.wait(0.001)
            reports.changed.clear()
    raise AssertionError("it ended without a token")


def returning(machine: Machine, report: Report, runner: GpuRunner, tokens: int) -> dict[str, Any]:
    """The same prompt again after its blocks have left the pool."""
    size, chunk = runner.layout.block_size, max(machine.sizes.prefills)
    engine = OverlapEngine(runner, Limits(4, chunk), tokens + 64)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    found: dict[str, Any] = {"computed": [], "loaded": [], "loaded tokens": []}
    with opened(runner.pool, 4 * (tokens // size), TierPolicy(at_once=True, wait_s=10.0)) as (tiers, reports):
        engine.colder = colder = Colder(tiers, engine.pool, engine.scheduler, both=False)
        for turn in range(3):
            prompt = [(17 * i + turn) % (runner.vocab_size - 1) for i in range(tokens)]
            known: dict[bytes, bytes] = {}
            for how in ("computed", "loaded"):
                tiers.came.clear()
                seq = Seq(f"{turn} {how}", list(prompt), tokens, params, b"")
                took = first_token(engine, reports, seq)
                found[how].append(took)
                if how == "computed":
                    colder.paced(took, tokens, 1)
                    known = settle(engine, reports, seq)
            right = sum(known[key] == digest for key, digest in digests(runner.pool, tiers.came).items())
            if right != len(tiers.came):
                raise AssertionError(f"{len(tiers.came) - right} of {len(tiers.came)} blocks that were loaded are wrong")
            found["loaded tokens"].append(right * size)
    if not any(found["loaded tokens"]):
        raise AssertionError("nothing was loaded")
    computed, loaded = (min(found[how][1:]) for how in ("computed", "loaded"))
    said = f"{loaded * 1e3:.0f} ms; computed {computed * 1e3:.0f} ms; {found['loaded tokens']} tokens were loaded"
    report.row(f"G13 first token of a returning prompt of {tokens}, of computing", said, loaded / computed, 0.35, most=True)
    return found


def digests(pool: Pool, blocks: Sequence[tuple[int, bytes]]) -> dict[bytes, bytes]:
    """Key → digest. `blocks`: (block, key)."""
    found = pool.digests([block for block, _ in blocks])
    return {key: found[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)] for i, (_, key) in enumerate(blocks)}


def settle(engine: OverlapEngine, reports: Reports, seq: Seq) -> dict[bytes, bytes]:
    """Waits until all is saved, and forgets what the pool has of it. Returns the digest of each key's block."""
    until = time.monotonic() + WITHIN_S
    while engine.pool.num_owned or not engine.idle or any(key not in engine.colder.held["host"] for key in seq.keys):  # type: ignore[union-attr]
        if time.monotonic() > until:
            raise TimeoutError("the prompt was not saved")
        while reports.told:
            name, arguments = reports.told.popleft()
            getattr(engine.colder, name)(*arguments)
        engine.step(time.monotonic())
        engine.colder.noted(engine.pool.drain_changes())  # type: ignore[union-attr]
        reports.changed.wait(0.001)
        reports.changed.clear()
    blocks = engine.pool.match(seq.keys)
    found = digests(engine.runner.pool, list(zip(blocks, seq.keys, strict=True)))
    engine.pool.release(blocks)
    engine.pool.forget(range(engine.pool.num_blocks))
    engine.pool.drain_changes()
    return found


def measure(machine: Machine, report: Report, runner: GpuRunner) -> dict[str, Any]:
    """Each part is kept as it ends, and one that fails stops no other."""
    tokens = min(8192, max(machine.sizes.prefills))
    count = max(2, tokens // runner.layout.block_size)
    last = runner.pool.num_blocks
    blocks, into = range(last - count, last), range(last - 2 * count, last - count)
    steps_ = WALK_STEPS if not machine.cuda else STEPS
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "round trip": lambda: round_trip(machine, report, runner, blocks, into),
        "beside decodes": lambda: beside(machine, report, runner, blocks, into, steps_),
        "returning prompt": lambda: returning(machine, report, runner, tokens),
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:
            traceback.print_exc()
            found["failed"] = found.get("failed", "") + f"{name}: {traceback.format_exc()}"
            report.row(f"G13 {name}", f"FAILED: {type(error).__name__}: {str(error)[:70]}")
        report.keep("g13", found)
    return found
