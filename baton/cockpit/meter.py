"""What a run does while it runs: one point a second, from what the client sees and what the workers tell. No clock of its own: the caller
passes times in, so it measures real and virtual time alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.clock import loop_time
from baton.stages import tpot
from loadtest.distribution import percentile
from loadtest.drive import Answer, Door, OnTokens


class Looked(NamedTuple):
    """What the router and its workers tell at one moment; None: nobody told. `kv` and `batch` are shares: of the blocks of the decode
    workers, and of the sequences that their batches may have."""

    queued: float | None = None
    kv: float | None = None
    batch: float | None = None


class WorkerUsage(NamedTuple):
    """What one worker holds."""

    decodes: bool
    running: int
    waiting: int
    free_blocks: int
    kv_blocks: int
    max_num_seqs: int


def looked(queued: int, workers: Sequence[WorkerUsage]) -> Looked:
    """`queued`: at the routers."""
    decoding = [worker for worker in workers if worker.decodes]
    blocks, places = (sum(getattr(worker, name) for worker in decoding) for name in ("kv_blocks", "max_num_seqs"))
    free, running = (sum(getattr(worker, name) for worker in decoding) for name in ("free_blocks", "running"))
    return Looked(
        queued + sum(worker.waiting for worker in workers),
        max(0.0, 1 - free / blocks) if blocks else None,
        min(1.0, running / places) if places else None,
    )


@dataclass(slots=True)
class Meter:
    """Collects a step's first tokens and gaps, and gives the step's point when it ends."""

    step_s: float = 1.0
    last: float = 0.0  # when the last step ended
    tokens: int = 0
    in_flight: int = 0
    firsts: list[float] = field(default_factory=list)  # TTFT, s
    gaps: list[float] = field(default_factory=list)  # TPOT of the answers that ended, s

    def point(self, at: float, rate: float, seen: Looked) -> dict[str, Any]:
        """The point of the step that ends `at`; a new one begins."""
        told = {
            "at": at, "rate": rate, "tokens": self.tokens / max(at - self.last, 1e-3), "in_flight": self.in_flight,
            **{f"ttft_p{share}": percentile(self.firsts, share) for share in (50, 95)},
            **{f"tpot_p{share}": percentile(self.gaps, share) for share in (50, 95)},
            **seen._asdict(),
        }  # fmt: skip
        self.last, self.tokens, self.firsts, self.gaps = at, 0, [], []
        return told


class MeteredDoor:
    """A `loadtest.drive.Door` that tells a meter what passes through it."""

    def __init__(self, door: Door, meter: Meter) -> None:
        self._door, self._meter = door, meter

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: OnTokens) -> Answer:
        meter, sent = self._meter, loop_time()
        first = last = 0.0
        count = 0

        def note(tokens: int, at: Sequence[float] = ()) -> None:
            nonlocal first, last, count
            last = at[-1] if at else loop_time()
            if not count:
                first = at[0] if at else last
                meter.firsts.append(first - sent)
            count += tokens
            meter.tokens += tokens
            on_tokens(tokens, at)

        meter.in_flight += 1
        try:
            answer = await self._door.ask(prompt, output_tokens, timeout_s, note)
        finally:
            meter.in_flight -= 1
        if answer.outcome == "ok" and (each := tpot(first, last, count)) is not None:
            meter.gaps.append(each)
        return answer
