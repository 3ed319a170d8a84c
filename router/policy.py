"""Chooses the workers for a request. Pure functions of what is known of its model; the unit of every cost is one token.

    choose_prefill   the prefill worker on which the prompt is computed soonest:
                     cost = uncached tokens that wait there (ours exactly, others' about) + uncached tokens of this prompt.
                     Ties: fewer waiting tokens, then without a fetch, then the request's `tie`.
                     Bypass, so that the decode worker computes the prompt itself: if no prefill worker is left, or if the decode
                     worker that would be chosen lacks at most `bypass_tokens` of the prompt, or serves both roles and is the best for
                     both, or has a pool that the prompt does not fit: KV longer than a pool is not handed over.
                     Saturated while no decode worker can take the sequence: a prompt computed now would have nowhere to go.
                     Blocks that another worker caches can be fetched from it, the `source`, if it lends them. A fetch costs as much as
                     `fetch_tokens` tokens, so it is used if it saves more. In the same way, loading what a worker keeps in its tiers costs
                     `load_tokens`, and the time of a token as its record tells it of the medium. A source may have to load, too, if it
                     lends from its tiers (`brings`).
    choose_decode    among the decode workers with enough credit for the sequence, the one with the lowest
                     cost = tokens it has promised to hold + uncached prompt tokens that wait there
                            - `overlap_weight` times the tokens of this sequence that it caches (or can load, less `load_tokens`, where
                              no prefill worker computes the prompt).
                     If none has enough credit, the one with the most: the request queues there. Workers with `max_queue` waiting
                     requests are left out; if that leaves none, Saturated.
                     Ties: more credit (lower cost if the request queues), then the request's `tie`.
    choose_hint      the worker that may load what it keeps in its tiers while the request still waits: the one that would be chosen if
                     there were room.
    places           how many requests the workers can be given at a time; the rest wait in the router, where waiting costs nothing.

Both choices depend on which decode worker would be chosen, and both get the answer from `_choose_decode` with the same `Terms` and the
same length of the sequence, so they cannot contradict each other.

A decode worker can take a sequence if its credit covers it. Credit counts every sequence at its full length, which few reach. So a worker
without enough credit can still take one while no request waits there and it has fewer than `max_num_seqs`: its engine knows better than
the router what fits.

Parameters of both choices:
    keys             block keys of the full blocks of the tokens known so far
    longest          the most tokens that the sequence may reach, prompt included
    now              on the clock of `PrefixIndex.predict` and `Members.note_others`
    exclude          workers that failed this request: (name, incarnation)
    tie              a hash of the request (`Request.tie`): of n equal workers, in order of their names, it gets the one with this number
                     modulo n. By the name alone, an idle cluster would send every request to the same two workers. By a count of the
                     router's own, routers that see the same would choose the same worker at the same moment.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from baton.cluster.records import WorkerRecord
from router.served import ServedModel
from router.standings import decode_cost

LOADED = "loaded prefix"
AHEAD = 4  # a worker gets a quarter more sequences than it runs, so that it never waits for the next one
Identity = tuple[str, int]  # name and incarnation of a worker
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Terms:
    """Parameters that are the same for every choice of a router."""

    bypass_tokens: int = 32  # uncached prompt tokens that a decode worker computes itself
    fetch_tokens: int = 128  # tokens that a prefill worker could compute in the time of a fetch; 0: nothing is fetched
    load_tokens: int = 64  # tokens that a worker could compute while it loads from its tiers; 0: these do not count
    overlap_weight: float = 1.0  # a token that need not be fetched or computed outweighs this many tokens of load
    max_queue: int = 256  # requests that may wait in one worker; `engine.max_queue` of the configuration


TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Cached:
    """A worker and how many leading blocks of the prompt it is thought to hold."""

    worker: str
    blocks: int
    load: float = 0.0  # tokens that could be computed while it loads them from a tier; 0: they are in its pool


@dataclass(frozen=True, slots=True)
class Held:
    """Leading blocks that each worker is thought to hold."""

    device: Mapping[str, int]
    anywhere: Mapping[str, int]  # in its pool or its tiers; empty: these do not count
    trust: Mapping[str, float]  # the share of that which counts (`router.trust`), if not all
    keys: Sequence[bytes]

    def counted(self, name: str, blocks: int, block_size: int) -> float:
        """Tokens."""
        return blocks * block_size * self.trust.get(name, 1.0) if self.trust else blocks * block_size


@dataclass(frozen=True, slots=True)
class Choice:
    worker: str
    overlap_blocks: int  # leading blocks that it is thought to hold, or to fetch from `source`
    cost: float  # tokens
    reason: str
    source: Cached | None = None  # for a prefill worker: the worker that holds more of the prompt
    # A worker that holds the most of the prompt, whether it can be asked for it or not: told with the choice, and no part of it.
    most: Cached | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Bypass:
    """No handoff: the decode worker computes the prompt."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No worker could decode after a prefill."""


@dataclass(frozen=True, slots=True)
class Saturated:
    """No decode worker can take the sequence now."""


def choose_prefill(
    model: ServedModel,
    keys: Sequence[bytes],
    prompt_tokens: int,
    longest: int,
    now: float,
    exclude: Collection[Identity] = frozenset(),
    terms: Terms = TERMS,
    tie: int = 0,
) -> Choice | Bypass | NoWorker | Saturated:
    """Returns NoWorker only if there is no decode worker at all. An excluded one counts: it may be back by the time of the decode."""
    if not model.count("decode"):
        return NoWorker()
    held = _held(model, keys, now, terms)
    decoder = _choose_decode(model, held, longest, exclude, terms, tie)
    if isinstance(decoder, Saturated) or (decoder is not None and not _takes(model, decoder, longest)):
        return Saturated()
    if decoder is not None and not _holds(model.members.record(decoder.name), prompt_tokens):
        return Bypass("longer than the pool")
    ranked = not exclude and prompt_tokens <= model.standings.room
    workers = [] if ranked else [w for w in model.prefill_workers() if _identity(w) not in exclude and _holds(w, prompt_tokens)]
    if not (model.count("prefill") if ranked else workers):
        return Bypass("no prefill worker")
    if decoder is not None:
        missing = prompt_tokens - held.counted(decoder.name, decoder.overlap, model.members.record(decoder.name).block_size)
        if missing <= terms.bypass_tokens:
            return Bypass("cached" if prompt_tokens > terms.bypass_tokens else "short")
    if ranked:
        best = _ranked_prefill(model, held, prompt_tokens, now, terms, tie)
    else:
        best = _best_prefill(model, workers, held, prompt_tokens, now, exclude, terms, tie)
    if decoder is not None and best.worker == decoder.name:
        return Bypass("same worker")  # it serves both roles
    return replace(best, most=_holding_most(held))


def choose_hint(
    model: ServedModel,
    keys: Sequence[bytes],
    prompt_tokens: int,
    now: float,
    exclude: Collection[Identity] = frozenset(),
    terms: Terms = TERMS,
    tie: int = 0,
) -> Cached | None:
    """None: nobody has anything to load for it."""
    held = _held(model, keys, now, terms)
    if not held.anywhere:
        return None
    workers = [worker for worker in model.prefill_workers() if _identity(worker) not in exclude]
    if workers:
        best = _best_prefill(model, workers, held, prompt_tokens, now, exclude, terms, tie)
        loads = best.source.load > 0 if best.source else best.reason == LOADED
        hint = (best.source or Cached(best.worker, best.overlap_blocks)) if loads else None
    else:
        reaching = [worker for worker in model.decode_workers() if held.anywhere.get(worker.name, 0) > held.device.get(worker.name, 0)]
        hint = max((Cached(worker.name, held.anywhere[worker.name]) for worker in reaching), key=lambda c: c.blocks, default=None)
    return hint if hint is not None and model.members.record(hint.worker).brings else None


def choose_decode(
    model: ServedModel,
    keys: Sequence[bytes],
    longest: int,
    now: float,
    exclude: Collection[Identity] = frozenset(),
    terms: Terms = TERMS,
    tie: int = 0,
) -> Choice | Saturated | None:
    """Returns None if every decode worker has failed this request."""
    held = _held(model, keys, now, terms)
    best = _choose_decode(model, held, longest, exclude, terms, tie)
    if isinstance(best, _Candidate):
        reason = "fits" if best.credit >= longest else "queues"
        return Choice(best.name, best.overlap, best.cost, reason, most=_holding_most(held))
    return best


def places(model: ServedModel) -> int | None:
    """How many requests the workers are given at a time. None: there is no decode worker, or one does not report how many it runs."""
    decoders, prefillers = model.decode_workers(), model.prefill_workers()
    if not decoders or any(worker.max_num_seqs < 1 for worker in decoders):
        return None
    return sum(worker.max_num_seqs for worker in decoders) + sum(-(-worker.max_num_seqs // AHEAD) for worker in (*decoders, *prefillers))


class Policy:
    """Both choices for one model under one set of terms."""

    def __init__(self, model: ServedModel, terms: Terms) -> None:
        self.model = model
        self.terms = terms

    def prefill(
        self, keys: Sequence[bytes], prompt_tokens: int, longest: int, now: float, exclude: Collection[Identity], tie: int
    ) -> Choice | Bypass | NoWorker | Saturated:
        """See `choose_prefill`."""
        return choose_prefill(self.model, keys, prompt_tokens, longest, now, exclude, self.terms, tie)

    def decode(self, keys: Sequence[bytes], longest: int, now: float, exclude: Collection[Identity], tie: int) -> Choice | Saturated | None:
        """See `choose_decode`."""
        return choose_decode(self.model, keys, longest, now, exclude, self.terms, tie)

    def hint(self, keys: Sequence[bytes], prompt_tokens: int, now: float, exclude: Collection[Identity], tie: int) -> Cached | None:
        """See `choose_hint`."""
        return choose_hint(self.model, keys, prompt_tokens, now, exclude, self.terms, tie)


def _holding_most(held: Held) -> Cached | None:
    blocks = held.anywhere or held.device
    if not blocks:
        return None
    name = max(blocks, key=lambda worker: (blocks[worker], worker))
    return Cached(name, blocks[name])


def _most_cached(model: ServedModel, held: Held, exclude: Collection[Identity], terms: Terms, tie: int) -> Cached | None:
    """The loan that saves most. A worker is asked for what its pool has, or for what its tiers have, too."""
    holding = sorted(name for name in held.device.keys() | held.anywhere.keys() if model.serves(name))
    lenders = [worker for worker in map(model.members.record, holding) if worker.lends and _identity(worker) not in exclude]
    size = lenders[0].block_size if lenders else 1
    cached = [Cached(worker.name, blocks) for worker in lenders if (blocks := held.device.get(worker.name, 0))]
    for worker in lenders:
        if worker.brings and (reach := held.anywhere.get(worker.name, 0)) > held.device.get(worker.name, 0):
            cached.append(Cached(worker.name, reach, _load_cost(model, worker, held, terms)))
    return _lowest(cached, lambda c: (c.load - c.blocks * size,), tie) if cached else None


def _held(model: ServedModel, keys: Sequence[bytes], now: float, terms: Terms) -> Held:
    return Held(model.index.overlap(keys, now), model.index.reach(keys) if terms.load_tokens else {}, model.trust.shares(now), keys)


def _load_cost(model: ServedModel, worker: WorkerRecord, held: Held, terms: Terms) -> float:
    """Tokens that could be computed while it loads what only its tiers hold. The last block tells the medium."""
    reach = held.anywhere.get(worker.name, 0)
    more = reach - held.device.get(worker.name, 0)
    if more <= 0 or not any(tier.cost for tier in worker.tiers):
        return terms.load_tokens
    media = model.index.media(worker.name, held.keys[reach - 1])
    share = min((tier.cost for tier in worker.tiers if tier.medium in media), default=0.0)
    return terms.load_tokens + share * more * worker.block_size


def _best_prefill(
    model: ServedModel,
    workers: Sequence[WorkerRecord],
    held: Held,
    prompt_tokens: int,
    now: float,
    exclude: Collection[Identity],
    terms: Terms,
    tie: int,
) -> Choice:
    most = _most_cached(model, held, exclude, terms, tie) if terms.fetch_tokens else None
    waiting = {worker.name: model.members.prefill_tokens(worker.name, now) for worker in workers}
    choices = [_prefill_choice(model, worker, held, waiting[worker.name], prompt_tokens, most, terms) for worker in workers]
    return _lowest(choices, lambda c: (c.cost, waiting[c.worker], c.source is not None), tie)


def _ranked_prefill(model: ServedModel, held: Held, prompt_tokens: int, now: float, terms: Terms, tie: int) -> Choice:
    """`_best_prefill` of all prefill workers. Those that hold nothing of the prompt differ in what waits there alone."""
    most = _most_cached(model, held, frozenset(), terms, tie) if terms.fetch_tokens else None
    standings = model.standings
    places, names, ranks = standings.places["prefill"], standings.names["prefill"], standings.prefill
    apart = {places[name] for name in held.device.keys() | held.anywhere.keys() if name in places} | standings.sharing

    def choice(place: int) -> tuple[tuple[float, float, bool], Choice]:
        worker = model.members.record(names[place])
        waiting = model.members.prefill_tokens(worker.name, now)
        found = _prefill_choice(model, worker, held, waiting, prompt_tokens, most, terms)
        return (found.cost, waiting, found.source is not None), found

    judged = {place: choice(place)[0] for place in apart}
    lowest = min(judged.values(), default=None)
    least, equal = ranks.first(apart), 0
    if least is not None:
        key, _ = choice(ranks.nth(least, 0, apart))
        if lowest is None or key <= lowest:
            lowest, equal = key, ranks.count(least, apart)
    same = [place for place, its in judged.items() if its == lowest]
    number = tie % (equal + len(same))
    place = ranks.nth(least, number, apart, same) if equal and least is not None else sorted(same)[number]
    return choice(place)[1]


def _prefill_choice(
    model: ServedModel, worker: WorkerRecord, held: Held, waiting: float, prompt_tokens: int, most: Cached | None, terms: Terms
) -> Choice:
    """The cheapest of computing, loading and fetching."""
    overlap, size = held.device.get(worker.name, 0), worker.block_size
    blocks, more, reason, source = overlap, 0.0, "cached prefix" if overlap else "least work", None
    counted = held.counted(worker.name, overlap, size)
    reach = held.anywhere.get(worker.name, 0)
    load = _load_cost(model, worker, held, terms) if reach else terms.load_tokens
    if (reached := held.counted(worker.name, reach, size)) - load > counted:
        blocks, more, reason, counted = reach, load, LOADED, reached
    fetch = 0.0 if most is None else terms.fetch_tokens + most.load
    if most is not None and (fetched := held.counted(most.worker, most.blocks, size)) - fetch > counted - more:
        blocks, more, reason, source, counted = most.blocks, fetch, "fetched prefix", most, fetched
    return Choice(worker.name, blocks, waiting + more + max(0, prompt_tokens - counted), reason, source)


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    overlap: int  # blocks
    cost: float
    credit: int  # tokens


def _choose_decode(
    model: ServedModel, held: Held, longest: int, exclude: Collection[Identity], terms: Terms, tie: int
) -> _Candidate | Saturated | None:
    ranked = not exclude and model.standings.queued < terms.max_queue
    if ranked and (found := _ranked_decode(model, held, longest, terms, tie)) is not None:
        return found
    workers = [worker for worker in model.decode_workers() if _identity(worker) not in exclude]
    if not workers:
        return None
    if model.count("prefill"):
        held = replace(held, anywhere={})  # who decodes gets the KV of the prompt: what it loads itself is its own choice
    open_ = [_candidate(model, worker, held, terms) for worker in workers if worker.load.waiting < terms.max_queue]
    if not open_:
        return Saturated()
    fitting = [c for c in open_ if c.credit >= longest]
    if fitting:
        return _lowest(fitting, lambda c: (c.cost, -c.credit), tie)
    return _lowest(open_, lambda c: (-c.credit, c.cost), tie)


def _ranked_decode(model: ServedModel, held: Held, longest: int, terms: Terms, tie: int) -> _Candidate | None:
    """`_choose_decode` of all decode workers. None: none has enough credit, which is left to that."""
    if model.count("prefill") and held.anywhere:
        held = replace(held, anywhere={})
    standings = model.standings
    places, names, ranks = standings.places["decode"], standings.names["decode"], standings.decode
    apart = [places[name] for name in held.device.keys() | held.anywhere.keys() if name in places]
    fitting = {}
    for place in apart:
        cost, low = ranks.key(place)
        if -low >= longest:
            fitting[place] = cost - terms.overlap_weight * _known(model, model.members.record(names[place]), held, terms), low
    lowest = min(fitting.values(), default=None)
    least, equal = ranks.first(apart, lambda key: -key[1] >= longest), 0
    if least is not None and (lowest is None or least <= lowest):
        lowest, equal = least, ranks.count(least, apart)
    same = [place for place, its in fitting.items() if its == lowest]
    if not equal + len(same):
        return None
    number = tie % (equal + len(same))
    place = ranks.nth(least, number, apart, same) if equal and least is not None else sorted(same)[number]
    return _candidate(model, model.members.record(names[place]), held, terms)


def _lowest(candidates: Sequence[T], key: Callable[[T], tuple[float, ...]], tie: int) -> T:
    """One of those with the lowest key. `candidates`: in order of their names."""
    keys = [key(candidate) for candidate in candidates]
    lowest = min(keys)
    equal = [candidate for candidate, its in zip(candidates, keys, strict=True) if its == lowest]
    return equal[tie % len(equal)]


def _holds(worker: WorkerRecord, tokens: int) -> bool:
    """Whether its pool has room for a prompt; all have that but for contexts that are longer than a pool (`tiers.long_contexts`)."""
    return tokens <= worker.kv_blocks * worker.block_size or worker.max_model_len <= worker.kv_blocks * worker.block_size


def _takes(model: ServedModel, candidate: _Candidate, longest: int) -> bool:
    record = model.members.record(candidate.name)
    crowded = record.load.waiting > 0 or 0 < record.max_num_seqs <= model.members.decodes(candidate.name)
    return candidate.credit >= longest or not crowded


def _candidate(model: ServedModel, worker: WorkerRecord, held: Held, terms: Terms) -> _Candidate:
    cost, credit = decode_cost(model.members, worker)
    known = _known(model, worker, held, terms)
    return _Candidate(worker.name, held.device.get(worker.name, 0), cost - terms.overlap_weight * known, credit)


def _known(model: ServedModel, worker: WorkerRecord, held: Held, terms: Terms) -> float:
    """Tokens of the prompt that the worker need not compute, less what loading them takes."""
    overlap, reach = held.device.get(worker.name, 0), held.anywhere.get(worker.name, 0)
    if not overlap and not reach:  # of a thousand workers, few have any of a prompt
        return 0.0
    known = held.counted(worker.name, overlap, worker.block_size)
    if not reach:
        return known
    return max(known, held.counted(worker.name, reach, worker.block_size) - _load_cost(model, worker, held, terms))


def _identity(worker: WorkerRecord) -> Identity:
    return worker.name, worker.incarnation
