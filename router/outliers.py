"""Finds the workers that do much worse than their peers, and decides when to put one aside and when to take it back. It only decides: time
is an argument.

    evidence   against a worker
    errors     5 calls in a row failed, or a fifth of at least 10
    digests    3 reads of KV that it held, or read, had a wrong digest
    pace       the median of its seconds per token is `pace` times that of its peers, each of at least 5 calls

Peers serve the same role and are not put aside themselves. Errors and digests count only if the worker's rate is twice that of all its
peers together in the same time, and if that is hardly chance (the test for two proportions). For 5 in a row it is ten times, and since the
row began as well. So nobody is judged while nothing is known of the peers: a client whose requests fail everywhere, or a network that
damages everything, is no worker's fault.

A wrong digest counts against both ends of a read. The bad end is the one that differs from its peers, because theirs meet the same
partners; if both do, it is the holder. What reads with a worker that is put aside said about their other ends is forgotten.

A pace must be slow in both ways of counting, per token, and per token and sequence that shared the worker: a busy worker takes longer for
each token, and an idle one for each sequence. With a single peer nobody can say which of the two is unusual, so it takes twice the factor.
A worker that stops once is not slow: of calls that end together one counts, and each without its longest wait (`Stride`).

No more than a share of a role's workers is aside at a time, rounded down, so an only worker never is. A term lasts `base_s` times the
number of times that the worker was put aside, at most `LONGEST` times; each 2 `base_s` of service take one off that number.

    state        event        becomes
    serving      eject        ejected      its evidence is dropped
    ejected      end          due          the term is over
    due          answer       serving      it has answered a probe since
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from itertools import chain
from operator import add, sub
from statistics import median
from typing import Literal

from baton.cluster.records import ROLES, RoleName
from baton.moves import Moves

WINDOW_S = 120.0  # how long evidence counts
CALLS = 64  # that are remembered, of each worker and role
READS = 256  # of each worker
ROW = 5
LEAST_CALLS = 10
PEERS = 32  # that a worker is compared with, at most
LEAST_RATE = 0.2
LEAST_DIGESTS = 3
# How far a rate must be above that of the peers: how many times as high, and by how many standard deviations.
BAR = 2.0, 3.5
BAR_OF_A_ROW = 10.0, 3.5  # where one call in three fails, five in a row soon do
BAR_OF_DIGESTS = 2.0, 2.0  # a wrong digest is graver, and rare
PACES = 15  # that are remembered
LEAST_PACES = 5
PACES_APART_S = 0.5
FLOOR_S: Mapping[RoleName, float] = {"prefill": 0.0002, "decode": 0.005}  # per token; what is faster is never slow
LEAST_EVENTS = 4  # of a decode call after its first, for it to show a pace
LONGEST = 10
Identity = tuple[str, int]  # name and incarnation of a worker
Cause = Literal["errors", "digests", "pace"]
Pools = Callable[[RoleName], Collection[Identity]]  # those that answer, whether or not they are aside


class State(Enum):
    SERVING = "serving"
    EJECTED = "ejected"
    DUE = "due"


MOVES = Moves(
    {
        (State.SERVING, "eject"): State.EJECTED,
        (State.EJECTED, "end"): State.DUE,
        (State.DUE, "answer"): State.SERVING,
    }
)


@dataclass(frozen=True, slots=True)
class EjectionTerms:
    share: float = 0.5  # of a role's workers that may be aside at a time; 0: none ever is
    base_s: float = 30.0
    pace: float = 4.0


@dataclass(frozen=True, slots=True)
class Ejected:
    worker: Identity
    cause: Cause
    why: str  # for a person
    term_s: float


class Stride:
    """The pace of one decode call: its waits for the worker between two batches of tokens, without the longest."""

    def __init__(self) -> None:
        self._came: float | None = None  # the last batch
        self._left: float | None = None  # the reader came back for more
        self._waits: list[float] = [0.0, 0.0]  # all, and the longest
        self._tokens: list[int] = [0, 0]  # that came with all of them, and with the longest
        self._events = 0
        self._away_s = 0.0  # time that its reader took

    def come(self, tokens: int, now: float) -> None:
        if self._left is not None:
            wait = now - self._left
            self._events += 1
            self._waits[0] += wait
            self._tokens[0] += tokens
            if wait > self._waits[1]:
                self._waits[1], self._tokens[1] = wait, tokens
        self._came = now

    def come_each(self, times: Sequence[float]) -> None:
        """`come` and `leave` of tokens that came at these moments, each to a reader that waited. Those of one moment came together."""
        waits = list(map(sub, times if self._left is not None else times[1:], chain(() if self._left is None else (self._left,), times)))
        if waits and min(waits) > 0:  # each came by itself, which is usual: no step of Python for each
            self._events += len(waits)
            self._waits[0] = reduce(add, waits, self._waits[0])  # one after the other, as `come` adds: `sum` of floats rounds otherwise
            self._tokens[0] += len(waits)
            if (longest := max(waits)) > self._waits[1]:
                self._waits[1], self._tokens[1] = longest, 1
            self._came = self._left = times[-1]
            return
        for now, tokens in Counter(times).items():
            self.come(tokens, now)
            self._left = now

    def leave(self, now: float) -> None:
        assert self._came is not None
        self._away_s += now - self._came
        self._left = now

    @property
    def begun(self) -> bool:
        return self._came is not None

    @property
    def token_s(self) -> float | None:
        """Seconds per token. None: too few, or the reader was slower than the worker, and then the waits say nothing about the worker."""
        if self._events < LEAST_EVENTS or self._away_s > self._waits[0]:
            return None
        return (self._waits[0] - self._waits[1]) / (self._tokens[0] - self._tokens[1])


@dataclass(slots=True)
class _Tally:
    """The last outcomes, each with the partner in it."""

    most: int = CALLS
    outcomes: deque[tuple[float, bool, Identity | None]] = field(default_factory=deque)
    failures: int = 0
    row: int = 0  # failures since the last success

    def note(self, ok: bool, now: float, partner: Identity | None = None) -> None:
        self.expire(now)
        self.outcomes.append((now, ok, partner))
        self.failures += not ok
        self.row = 0 if ok else self.row + 1
        if len(self.outcomes) > self.most:
            self._drop()
            self.row = min(self.row, self.failures)

    def expire(self, now: float) -> None:
        while self.outcomes and now - self.outcomes[0][0] > WINDOW_S:
            self._drop()
        self.row = min(self.row, self.failures)

    def without(self, partner: Identity) -> "_Tally":
        left = _Tally(self.most)
        for at, ok, other in self.outcomes:
            if other != partner:
                left.note(ok, at, other)
        return left

    def _drop(self) -> None:
        self.failures -= not self.outcomes.popleft()[1]


@dataclass(slots=True)
class _Paces:
    """`token_s`: the median of the last ones; `shared_s`: of the same, each divided by the number of sequences that shared the worker."""

    last: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=PACES))
    token_s: float = 0.0
    shared_s: float = 0.0

    def note(self, token_s: float, company: int, now: float) -> bool:
        """Returns whether it counts."""
        if self.last and now - self.last[-1][0] < PACES_APART_S:
            return False
        self.last.append((now, token_s, token_s / max(1, company)))
        while now - self.last[0][0] > WINDOW_S:
            self.last.popleft()
        self.token_s = median([token_s for _, token_s, _ in self.last])
        self.shared_s = median([shared_s for _, _, shared_s in self.last])
        return True

    def known(self, now: float) -> bool:
        return len(self.last) >= LEAST_PACES and now - self.last[-1][0] <= WINDOW_S


@dataclass(slots=True)
class _Worker:
    state: State = State.SERVING
    calls: dict[RoleName, _Tally] = field(default_factory=lambda: {"prefill": _Tally(), "decode": _Tally()})
    paces: dict[RoleName, _Paces] = field(default_factory=lambda: {"prefill": _Paces(), "decode": _Paces()})
    reads: _Tally = field(default_factory=lambda: _Tally(READS))
    times: int = 0  # that it was put aside
    since: float = 0.0  # when it last began to serve
    until: float = 0.0  # the end of its term
    answers: int = 0  # that it had given when its term ended

    def move(self, event: str) -> None:
        self.state = MOVES.after(self.state, event, "a worker")


class Outliers:
    def __init__(self, terms: EjectionTerms) -> None:
        self._terms = terms
        self._workers: dict[Identity, _Worker] = {}
        self._aside: set[Identity] = set()

    def __contains__(self, worker: Identity) -> bool:
        return worker in self._workers

    @property
    def aside(self) -> Collection[Identity]:
        return self._aside

    def state(self, worker: Identity) -> State:
        return self._workers[worker].state if worker in self._workers else State.SERVING

    def join(self, worker: Identity, present: Collection[Identity], now: float) -> None:
        """Begins to note what the worker does. Forgets those that are not `present`."""
        there = set(present)
        self._workers = {known: facts for known, facts in self._workers.items() if known in there}
        self._aside &= there
        self._workers.setdefault(worker, _Worker(since=now))

    # Evidence, of workers that have joined. What a worker does while it is aside does not count.

    def note_call(self, worker: Identity, role: RoleName, ok: bool, pools: Pools, now: float) -> Ejected | None:
        """A call ended well, or in an error that is the worker's."""
        facts = self._workers[worker]
        if facts.state is not State.SERVING:
            return None
        tally = facts.calls[role]
        tally.note(ok, now)
        failures, calls, bar = tally.failures, len(tally.outcomes), BAR
        if tally.row >= ROW:
            failures, calls, bar = tally.row, tally.row, BAR_OF_A_ROW
        if ok or (tally.row < ROW and calls < LEAST_CALLS) or failures < LEAST_RATE * calls:
            return None
        peers = [peer.calls[role] for peer in self._peers(worker, pools(role))]
        for since in (tally.outcomes[0][0], tally.outcomes[-calls][0]):
            failed, of = _count(peers, since)
            if not _stands_out(failures, calls, failed, of, bar):
                return None
        which = "the last" if failures == calls else f"{failures} of"
        return self._eject(worker, "errors", f"{which} {calls} calls failed; of its peers' {failed} of {of}", pools, now)

    def note_read(self, holder: Identity, reader: Identity, ok: bool, pools: Pools, now: float) -> Ejected | None:
        """KV was read from `holder`; `ok`: with the right digests."""
        ends: tuple[tuple[Identity, Identity, RoleName], ...] = ((holder, reader, "prefill"), (reader, holder, "decode"))
        if any(self._workers[worker].state is not State.SERVING for worker, _, _ in ends):
            return None
        for worker, partner, _ in ends:
            self._workers[worker].reads.note(ok, now, partner)
        if ok:
            return None
        for worker, _, role in ends:
            reads = self._workers[worker].reads
            since = reads.outcomes[0][0]
            failed, of = _count((peer.reads for peer in self._peers(worker, pools(role))), since)
            if reads.failures < LEAST_DIGESTS or not _stands_out(reads.failures, len(reads.outcomes), failed, of, BAR_OF_DIGESTS):
                continue
            why = f"{reads.failures} of {len(reads.outcomes)} reads of KV had wrong digests; of its peers' {failed} of {of}"
            if (ejected := self._eject(worker, "digests", why, pools, now)) is not None:
                return ejected
        return None

    def note_pace(self, worker: Identity, role: RoleName, token_s: float, company: int, pools: Pools, now: float) -> Ejected | None:
        """`token_s`: seconds per token of one call. `company`: the calls that were there with it, itself included."""
        facts = self._workers[worker]
        own = facts.paces[role]
        if facts.state is not State.SERVING or not own.note(token_s, company, now):
            return None
        if len(own.last) < LEAST_PACES or own.token_s < FLOOR_S[role]:
            return None
        peers = [pace for peer in self._peers(worker, pools(role)) if (pace := peer.paces[role]).known(now)]
        if not peers:
            return None
        factor = self._terms.pace * (1 if len(peers) > 1 else 2)
        theirs = median([peer.token_s for peer in peers])
        if own.token_s < factor * theirs or own.shared_s < factor * median([peer.shared_s for peer in peers]):
            return None
        why = f"it takes {own.token_s * 1000:.3g} ms a token, its peers {theirs * 1000:.3g} ms"
        return self._eject(worker, "pace", why, pools, now)

    # The way back

    def take_back(self, answers: Callable[[Identity], int | None], now: float) -> list[Identity]:
        """Returns those that serve again. `answers`: how many probes a worker has answered; None: it has left. Call it often."""
        back: list[Identity] = []
        for worker in sorted(self._aside):
            facts, count = self._workers[worker], answers(worker)
            if count is None:
                self._aside.discard(worker)
                del self._workers[worker]
            elif facts.state is State.EJECTED and now >= facts.until:
                facts.move("end")
                facts.answers = count
            elif facts.state is State.DUE and count > facts.answers:
                facts.move("answer")
                facts.since = now
                self._aside.discard(worker)
                back.append(worker)
        return back

    def _peers(self, worker: Identity, pool: Collection[Identity]) -> list[_Worker]:
        peers, workers = list[_Worker](), self._workers
        for other in pool:
            if other != worker and (peer := workers.get(other)) is not None and peer.state is State.SERVING:
                peers.append(peer)
                if len(peers) == PEERS:
                    break
        return peers

    def _eject(self, worker: Identity, cause: Cause, why: str, pools: Pools, now: float) -> Ejected | None:
        """Returns None if too many are aside already."""
        for pool in map(pools, ROLES):
            aside = sum(other in self._aside for other in pool)
            if worker in pool and aside + 1 > int(self._terms.share * len(pool) + 1e-9):
                return None
        facts = self._workers[worker]
        facts.move("eject")
        facts.times = 1 + max(0, facts.times - int((now - facts.since) / (2 * self._terms.base_s)))
        term_s = self._terms.base_s * min(facts.times, LONGEST)
        facts.until = now + term_s
        fresh = _Worker()
        facts.calls, facts.paces, facts.reads = fresh.calls, fresh.paces, fresh.reads
        self._aside.add(worker)
        for other in self._workers.values():
            other.reads = other.reads.without(worker)
        return Ejected(worker, cause, why, term_s)


def _count(tallies: Iterable[_Tally], since: float) -> tuple[int, int]:
    """Failures, and outcomes."""
    failed = of = 0
    for tally in tallies:
        for at, ok, _ in reversed(tally.outcomes):
            if at < since:
                break
            failed, of = failed + (not ok), of + 1
    return failed, of


def _stands_out(failures: int, outcomes: int, failed: int, of: int, bar: tuple[float, float]) -> bool:
    """Whether the rate is far above that of the peers, of whose `of` outcomes `failed` were failures, and not by chance."""
    times, sure = bar
    if not of or failures / outcomes < times * failed / of:
        return False
    both = (failures + failed) / (outcomes + of)
    deviation = math.sqrt(both * (1 - both) * (1 / outcomes + 1 / of))
    return failures / outcomes - failed / of >= sure * deviation > 0
