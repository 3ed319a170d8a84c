"""Which worker gets a request. Pure functions of the view; the unit of every cost is one token.

    choose_prefill   the prefill worker on which the prompt is computed soonest:
                     cost = uncached tokens that wait there (ours exactly, others' as last reported) + uncached tokens of this prompt.
                     Ties: fewer waiting tokens, then the name.
                     Bypass, so that the decode worker computes the prompt itself: when no prefill worker is left, and when the decode
                     worker that would be chosen lacks `bypass_tokens` or fewer of the prompt, or serves both roles and is the best for
                     either.
                     Saturated while no decode worker can take the sequence: a prompt computed now would have nowhere to go.
                     What another worker caches can be fetched from it, the `source`. A fetch costs as much as `fetch_tokens` tokens, so
                     it is done where it saves more.
    choose_decode    among the decode workers whose credit holds the sequence, the one with the least
                     cost = tokens it has promised to hold + uncached prompt tokens that wait there
                            - `overlap_weight` times the tokens of this sequence that it caches.
                     If none has the credit, the one with the most of it: the request queues there. Workers with `max_queue` requests
                     waiting are left out; if that leaves nobody, Saturated.
                     Ties: more credit (lower cost where it queues), then the name.
    places           how many requests the workers can be given at a time; the rest wait in the router, where waiting costs nothing.

Both choices ask which decode worker would be chosen, and both get the answer from `_choose_decode` with the same `Terms` and the same
length of the sequence, so they cannot contradict each other.

A decode worker can take a sequence if its credit holds it. Credit counts every sequence at its full length, which few reach, so a worker
without it also takes one while nobody waits there and it has fewer than `max_num_seqs`: its engine knows better than we do what fits.

Parameters that both choices take:
    keys             block keys of the full blocks of the tokens known so far
    longest          tokens that the sequence may come to, prompt included
    now              moment at which predictions of the prefix index are judged; the clock that `PrefixIndex.predict` got
    exclude          workers that failed this request: (name, incarnation)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton.cluster.records import WorkerRecord
from router.view import ClusterView

AHEAD = 4  # a worker is given a quarter more sequences than it runs, so that it never waits for the next one
Identity = tuple[str, int]  # name and incarnation of a worker


@dataclass(frozen=True, slots=True)
class Terms:
    """What every choice of a router is computed with."""

    bypass_tokens: int = 32  # uncached prompt tokens that a decode worker computes itself
    fetch_tokens: int = 128  # tokens that a prefill worker could compute in the time of a fetch; 0: nothing is fetched
    overlap_weight: float = 1.0  # a token that need not be fetched or computed outweighs so many tokens of load
    max_queue: int = 256  # requests that wait in one worker; `engine.max_queue` of the configuration


TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Cached:
    """A worker and how many leading blocks of the prompt it is thought to hold."""

    worker: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Choice:
    worker: str
    overlap_blocks: int  # leading blocks that it is thought to hold, or to fetch from `source`
    cost: float  # tokens
    reason: str
    source: Cached | None = None  # of a prefill worker: who holds more of the prompt


@dataclass(frozen=True, slots=True)
class Bypass:
    """No handoff: the decode worker computes the prompt."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No worker could decode what a prefill worker makes."""


@dataclass(frozen=True, slots=True)
class Saturated:
    """No decode worker can take the sequence now."""


def choose_prefill(
    view: ClusterView,
    keys: Sequence[bytes],
    prompt_tokens: int,
    longest: int,
    now: float,
    exclude: Collection[Identity] = frozenset(),
    terms: Terms = TERMS,
) -> Choice | Bypass | NoWorker | Saturated:
    """Excluded decode workers still count against NoWorker: by the time of the decode one of them may be back."""
    if not view.decode_workers():
        return NoWorker()
    overlaps = view.index.overlap(keys, now)
    decoder = _choose_decode(view, overlaps, longest, exclude, terms)
    if isinstance(decoder, Saturated) or (decoder is not None and not _takes(view, decoder, longest)):
        return Saturated()
    workers = [worker for worker in view.prefill_workers() if _identity(worker) not in exclude]
    if not workers:
        return Bypass("no prefill worker")
    if decoder is not None:
        missing = prompt_tokens - decoder.overlap * view.record(decoder.name).block_size
        if missing <= terms.bypass_tokens:
            return Bypass("cached" if prompt_tokens > terms.bypass_tokens else "short")
    most = _most_cached(view, overlaps, exclude) if terms.fetch_tokens else None
    choices = [_prefill_choice(view, worker, overlaps, prompt_tokens, most, terms.fetch_tokens) for worker in workers]
    best = min(choices, key=lambda choice: (choice.cost, view.prefill_tokens(choice.worker), choice.source is not None, choice.worker))
    if decoder is not None and best.worker == decoder.name:
        return Bypass("same worker")  # it serves both roles
    return best


def choose_decode(
    view: ClusterView,
    keys: Sequence[bytes],
    longest: int,
    now: float,
    exclude: Collection[Identity] = frozenset(),
    terms: Terms = TERMS,
) -> Choice | Saturated | None:
    """None: there is no worker that has not failed this request."""
    best = _choose_decode(view, view.index.overlap(keys, now), longest, exclude, terms)
    if isinstance(best, _Candidate):
        return Choice(best.name, best.overlap, best.cost, "fits" if best.credit >= longest else "queues")
    return best


def places(view: ClusterView) -> int | None:
    """Requests that the workers are given at a time. None: there is no decode worker, or one does not say how many it runs."""
    decoders, prefillers = view.decode_workers(), view.prefill_workers()
    if not decoders or any(worker.max_num_seqs < 1 for worker in decoders):
        return None
    return sum(worker.max_num_seqs for worker in decoders) + sum(-(-worker.max_num_seqs // AHEAD) for worker in (*decoders, *prefillers))


def _most_cached(view: ClusterView, overlaps: Mapping[str, int], exclude: Collection[Identity]) -> Cached | None:
    usable = {worker.name for worker in (*view.prefill_workers(), *view.decode_workers()) if _identity(worker) not in exclude}
    cached = [Cached(name, blocks) for name, blocks in overlaps.items() if name in usable]
    return max(cached, key=lambda c: (c.blocks, c.worker), default=None)


def _prefill_choice(
    view: ClusterView, worker: WorkerRecord, overlaps: Mapping[str, int], prompt_tokens: int, most: Cached | None, fetch_tokens: int
) -> Choice:
    overlap, waiting = overlaps.get(worker.name, 0), view.prefill_tokens(worker.name)
    if most is not None and (most.blocks - overlap) * worker.block_size > fetch_tokens:
        cost = waiting + fetch_tokens + max(0, prompt_tokens - most.blocks * worker.block_size)
        return Choice(worker.name, most.blocks, cost, "fetched prefix", most)
    cost = waiting + max(0, prompt_tokens - overlap * worker.block_size)
    return Choice(worker.name, overlap, cost, "cached prefix" if overlap else "least work")


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    overlap: int  # blocks
    cost: float
    credit: int  # tokens


def _choose_decode(
    view: ClusterView, overlaps: Mapping[str, int], longest: int, exclude: Collection[Identity], terms: Terms
) -> _Candidate | Saturated | None:
    workers = [worker for worker in view.decode_workers() if _identity(worker) not in exclude]
    if not workers:
        return None
    open_ = [_candidate(view, worker, overlaps, terms.overlap_weight) for worker in workers if worker.load.waiting < terms.max_queue]
    if not open_:
        return Saturated()
    fitting = [c for c in open_ if c.credit >= longest]
    if fitting:
        return min(fitting, key=lambda c: (c.cost, -c.credit, c.name))
    return min(open_, key=lambda c: (-c.credit, c.cost, c.name))


def _takes(view: ClusterView, candidate: _Candidate, longest: int) -> bool:
    record = view.record(candidate.name)
    crowded = record.load.waiting > 0 or 0 < record.max_num_seqs <= view.decodes(candidate.name)
    return candidate.credit >= longest or not crowded


def _candidate(view: ClusterView, worker: WorkerRecord, overlaps: Mapping[str, int], overlap_weight: float) -> _Candidate:
    overlap = overlaps.get(worker.name, 0)
    credit = worker.load.credit_tokens - view.unreported_decode_tokens(worker.name)
    promised = worker.kv_blocks * worker.block_size - credit
    cost = promised + worker.load.waiting_tokens - overlap_weight * overlap * worker.block_size
    return _Candidate(worker.name, overlap, cost, credit)


def _identity(worker: WorkerRecord) -> Identity:
    return worker.name, worker.incarnation
