"""What multiplies matrices of weights on this machine: Baton's kernels, oneDNN or plain torch, whichever is fastest when it is tried.

That depends on the processor: on its instructions (and whether the kernels were compiled for them), its caches, and on how many threads
are needed to read its memory at full rate. The first process that multiplies in some precision therefore times all three, for a few
hundred milliseconds, and keeps the result beside the compiled kernels. Others that start meanwhile wait; all processes with as many threads
take the same one, now and later, so their results have the same bits. On a processor that is busy with other work, times say nothing: then
the first candidate multiplies, and that is kept, because a worker that starts again must not multiply otherwise than the others.

What is kept is known on one machine, and in a container only until it ends. So the workers of a cluster agree on what the first of them has
found or kept (`baton.engine.core.agreed`), on whatever machine, if their kernels are compiled for the same processors.
"""

import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.core.agreed import agreed
from baton.engine.cpu.features import host
from baton.engine.cpu.kernel_cache import OWN, key_of, place_of
from baton.engine.model.ops import Multiply

log = logging.getLogger(__name__)

CANDIDATES = ("baton", "onednn", "torch")
OUTS, WIDTH = 4096, 1024  # of the matrix that is tried: more than a core's own caches hold
# A decode step of one sequence and of a batch, and a prefill; and how often each is timed. On a busy machine a short call is often cut.
ROWS = {1: 20, 8: 20, 256: 5}
HOPELESS = 5.0  # a candidate that takes this many times as long as the best one is not tried further
BETTER = 1.1
TRIES = 3
WAIT_S, POLL_S = 60.0, 0.05  # for another process that tries
UNDISTURBED = 0.75  # of the threads' time on a core; 0.8 and more on an idle machine, 0.6 to 0.7 beside one other busy process on two cores


@dataclass(frozen=True, slots=True)
class ProductChoice:
    by: str  # one of CANDIDATES
    seconds: dict[str, list[float]]  # of each candidate that can multiply here, for as many of ROWS as it was tried with; else only `by`

    def __str__(self) -> str:
        if not self.seconds[self.by]:
            return f"{self.by} (not compared with others)"
        others = [
            f"{name} {' '.join(f'{a / b:.2f}' for a, b in zip(times, self.seconds[self.by], strict=False))}"
            for name, times in self.seconds.items()
            if name != self.by
        ]
        return f"{self.by} ({', '.join(others)} times as long)" if others else self.by


def decide(seconds: Mapping[str, list[float]]) -> str:
    """The candidate with the smallest mean. The first one, a row of whose results has the same bits in any batch, gives way only to one
    that is a tenth faster. Pure."""
    complete = {name: _mean(times) for name, times in seconds.items() if len(times) == len(ROWS)}
    first, best = next(iter(complete)), min(complete, key=complete.__getitem__)
    return best if complete[best] * BETTER < complete[first] else first


def _mean(times: list[float]) -> float:
    return prod(times) ** (1 / len(times))


def measured(arms: Mapping[str, Multiply], dtype: torch.dtype) -> dict[str, list[float]]:
    """The least time of each arm, seconds, for each number of ROWS. The arms take turns."""
    arms, seconds = dict(arms), {name: list[float]() for name in arms}
    for rows, rounds in ROWS.items():
        x, best = torch.ones(rows, WIDTH, dtype=dtype), dict.fromkeys(arms, float("inf"))
        for turn in range(1 + rounds):
            for name, multiply in arms.items():
                began = time.perf_counter()
                multiply(x)
                if turn:  # the first one may compile
                    best[name] = min(best[name], time.perf_counter() - began)
        for name, taken in best.items():
            seconds[name].append(taken)
            if taken > HOPELESS * min(best.values()):
                del arms[name]
    return seconds


@cache
def choice(kind: torch.dtype, threads: int, arm: Callable[[str, Tensor], Multiply], alike: str = "") -> ProductChoice:
    """The choice for such weights. `arm(candidate, matrix)` raises ValueError if the candidate cannot multiply `[OUTS, WIDTH]` here.
    `alike`: what must be the same for the results of one candidate to have the same bits elsewhere."""
    topic = f"products of {kind}, {alike}, torch {torch.__version__}"
    place = place_of(OWN)
    file = place.folder / f"products-{_machine(kind, threads):08x}.json" if place else None
    mine, held = _kept(file) if file else None, agreed(topic)
    if not held:
        mine = mine or _tried(kind, arm, file)
        held = agreed(topic, mine.by)  # another process may have been faster
    if mine is not None and held == mine.by:
        return mine
    if _can(held, kind, arm):
        return ProductChoice(held, {held: []})
    mine = mine or _tried(kind, arm, file)
    log.warning("other workers of this cluster multiply %s by %s, which cannot do it here: %s does", kind, held, mine.by)
    return mine


def _can(by: str, kind: torch.dtype, arm: Callable[[str, Tensor], Multiply]) -> bool:
    if by not in CANDIDATES:
        return False
    try:
        arm(by, torch.ones(OUTS, WIDTH).to(kind))
    except ValueError:
        return False
    return True


def _tried(kind: torch.dtype, arm: Callable[[str, Tensor], Multiply], file: Path | None) -> ProductChoice:
    """Tries what multiplies fastest here, and keeps it in the file."""
    arms = _arms(kind, arm)
    first = next(iter(arms))
    untried = ProductChoice(first, {first: []})
    if file is None:
        log.warning("there is no place to keep what multiplies fastest, so %s does", first)
        return untried
    with _alone(file.with_name("products.lock")):
        if kept := _kept(file):
            return kept
        for _ in range(TRIES):
            found, share = _try(kind, arms)
            if share >= UNDISTURBED:
                return _keep(file, found, untried)
        log.warning("other work disturbed the trial of products of %s, so %s multiplies; to try again, delete %s", kind, first, file)
        return _keep(file, untried, untried)


def _arms(kind: torch.dtype, arm: Callable[[str, Tensor], Multiply]) -> dict[str, Multiply]:
    matrix, arms = torch.ones(OUTS, WIDTH).to(kind), {}
    for name in CANDIDATES:
        with suppress(ValueError):
            arms[name] = arm(name, matrix)
    return arms


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other process of this machine tries: two would disturb each other, and might find different things. Goes on without
    the lock where there is none, or after WAIT_S."""
    try:
        import fcntl

        file = lock.open("a")
    except (OSError, ImportError):
        yield
        return
    with file:
        ends = time.monotonic() + WAIT_S
        while time.monotonic() < ends:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(POLL_S)
        yield


def _try(kind: torch.dtype, arms: Mapping[str, Multiply]) -> tuple[ProductChoice, float]:
    """Tries all arms. Returns the choice, and what share of the time the threads were on a core."""
    began, before = _clocks()
    with torch.inference_mode():
        seconds = measured(arms, torch.float32 if kind == torch.int8 else kind)
    ended, after = _clocks()
    return ProductChoice(decide(seconds), seconds), (after - before) / (ended - began) / torch.get_num_threads()


def _clocks() -> tuple[float, float]:
    """Seconds that pass, and that this process's threads spend on cores."""
    return time.perf_counter(), time.process_time()


def _machine(kind: torch.dtype, threads: int) -> int:
    """A checksum of whatever the times depend on."""
    return zlib.crc32(repr((host(), str(kind), threads, torch.__version__, key_of(OWN))).encode())


def _kept(file: Path) -> ProductChoice | None:
    try:
        found = ProductChoice(**json.loads(file.read_text()))
        if found.by in found.seconds:
            return found
    except OSError:
        return None
    except (ValueError, TypeError):
        pass
    with suppress(OSError):  # not what this version writes
        file.unlink()
    return None


def _keep(file: Path, found: ProductChoice, otherwise: ProductChoice) -> ProductChoice:
    """What the first process found, if several try at once; `otherwise` if it cannot be kept: the next one might find something else."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".json") as whole:
            whole.write(json.dumps(asdict(found)))
            whole.flush()
            os.chmod(whole.name, 0o644)
            with suppress(FileExistsError):
                os.link(whole.name, file)
    except OSError as error:
        log.warning("what multiplies fastest cannot be kept, so %s does: %s", otherwise.by, error)
    return _kept(file) or otherwise
