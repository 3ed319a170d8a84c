"""Which worker gets a request. Pure functions of the view; the unit of every cost is one token.

    choose_prefill   the prefill worker on which the prompt is computed soonest:
                     cost = uncached tokens that wait there (ours exactly, others' as last reported) + uncached tokens of this prompt.
                     Ties: fewer waiting tokens, then the name.
                     Bypass, so that the decode worker computes the prompt itself: when no prefill worker is left, and when the decode
                     worker that would be chosen lacks `bypass_tokens` or fewer of the prompt.
    choose_decode    among the decode workers whose credit holds the sequence, the one with the least
                     cost = tokens it has promised to hold + uncached prompt tokens that wait there
                            - `overlap_weight` times the tokens of this sequence that it caches.
                     If none has the credit, the one with the most of it: the request queues there. Workers with `max_queue` requests
                     waiting are left out; if that leaves nobody, Saturated.
                     Ties: more credit (lower cost where it queues), then the name.

Parameters that both take:
    keys             block keys of the full blocks of the tokens known so far
    now              moment at which predictions of the prefix index are judged; the clock that `PrefixIndex.predict` got
    exclude          workers that failed this request
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton.cluster.records import WorkerRecord
from router.view import ClusterView

OVERLAP_WEIGHT = 1.0  # a token that need not be fetched or computed outweighs so many tokens of load
MAX_QUEUE = 256  # requests; `engine.max_queue` of the configuration


@dataclass(frozen=True, slots=True)
class Choice:
    worker: str
    overlap_blocks: int  # leading blocks that it is thought to hold
    cost: float  # tokens
    reason: str


@dataclass(frozen=True, slots=True)
class Bypass:
    """No handoff: the decode worker computes the prompt."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoWorker:
    """Nobody could decode what a prefill worker makes."""


@dataclass(frozen=True, slots=True)
class Saturated:
    """Every decode worker's queue is full."""


def choose_prefill(
    view: ClusterView, keys: Sequence[bytes], prompt_tokens: int, bypass_tokens: int, now: float, exclude: Collection[str] = frozenset()
) -> Choice | Bypass | NoWorker:
    """Excluded decode workers still count against NoWorker: by the time of the decode one of them may be back."""
    if not view.decode_workers():
        return NoWorker()
    workers = [worker for worker in view.prefill_workers() if worker.name not in exclude]
    if not workers:
        return Bypass("no prefill worker")
    overlaps = view.index.overlap(keys, now)
    decoder = _choose_decode(view, overlaps, prompt_tokens, exclude, OVERLAP_WEIGHT, MAX_QUEUE)
    if isinstance(decoder, Choice):
        missing = prompt_tokens - decoder.overlap_blocks * view.record(decoder.worker).block_size
        if missing <= bypass_tokens:
            return Bypass("cached" if prompt_tokens > bypass_tokens else "short")
    choices = [_prefill_choice(view, worker, overlaps, prompt_tokens) for worker in workers]
    return min(choices, key=lambda choice: (choice.cost, view.prefill_tokens(choice.worker), choice.worker))


def choose_decode(
    view: ClusterView,
    keys: Sequence[bytes],
    tokens_needed: int,
    now: float,
    exclude: Collection[str] = frozenset(),
    *,
    overlap_weight: float = OVERLAP_WEIGHT,
    max_queue: int = MAX_QUEUE,
) -> Choice | Saturated | None:
    """`tokens_needed`: what the sequence may come to, prompt included. None: there is no worker that has not failed this request."""
    return _choose_decode(view, view.index.overlap(keys, now), tokens_needed, exclude, overlap_weight, max_queue)


def _prefill_choice(view: ClusterView, worker: WorkerRecord, overlaps: Mapping[str, int], prompt_tokens: int) -> Choice:
    overlap = overlaps.get(worker.name, 0)
    waiting = view.prefill_tokens(worker.name)
    cost = waiting + max(0, prompt_tokens - overlap * worker.block_size)
    return Choice(worker.name, overlap, cost, "cached prefix" if overlap else "least work")


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    overlap: int  # blocks
    cost: float
    credit: int  # tokens


def _choose_decode(
    view: ClusterView, overlaps: Mapping[str, int], tokens_needed: int, exclude: Collection[str], overlap_weight: float, max_queue: int
) -> Choice | Saturated | None:
    workers = [worker for worker in view.decode_workers() if worker.name not in exclude]
    if not workers:
        return None
    open_ = [_candidate(view, worker, overlaps, overlap_weight) for worker in workers if worker.load.waiting < max_queue]
    if not open_:
        return Saturated()
    fitting = [c for c in open_ if c.credit >= tokens_needed]
    if fitting:
        best, reason = min(fitting, key=lambda c: (c.cost, -c.credit, c.name)), "fits"
    else:
        best, reason = min(open_, key=lambda c: (-c.credit, c.cost, c.name)), "queues"
    return Choice(best.name, best.overlap, best.cost, reason)


def _candidate(view: ClusterView, worker: WorkerRecord, overlaps: Mapping[str, int], overlap_weight: float) -> _Candidate:
    overlap = overlaps.get(worker.name, 0)
    credit = worker.load.credit_tokens - view.unreported_decode_tokens(worker.name)
    promised = worker.kv_blocks * worker.block_size - credit
    cost = promised + worker.load.waiting_tokens - overlap_weight * overlap * worker.block_size
    return _Candidate(worker.name, overlap, cost, credit)
