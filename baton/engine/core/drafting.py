"""What guesses the next tokens of a sequence, and how many guesses are worth the step that verifies them. Pure.

A draft is verified by sampling as if there were none (`baton.engine.core.protocol`), so a drafter changes how many steps an output takes,
and nothing else. A method is a `Drafter`; `Paced` stands before any of them and asks for as many tokens as their acceptance is worth, and
`Chosen` before all: it asks the one that a request names.

How many are worth it, `baton.engine.core.step_costs` says: it follows from the acceptance of each sequence, and from what steps take.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import NOTHING_OFFERED, PREDICTION, UNASKED, Offer
from baton.engine.core.step_costs import ASSUMED, Line, allot

FIRST_ACCEPTANCE = 0.6  # of a method of which nothing is known
NEWEST, NEWEST_OF_ALL = 1 / 8, 1 / 64  # weight of the newest verified token in the estimate of a sequence, and of the method
RETRY_TOKENS = 32  # without a draft, before a sequence whose drafts are bad gets one of one token


@dataclass(frozen=True, slots=True)
class Ask:
    """What follows `seq.tokens`? All are known, and those of an earlier question are still there. No more than `most >= 1` guesses, for
    which `seq.blocks` has room."""

    seq: Sequence
    most: int
    rows: int = 1  # that the step has without guesses


class Drafter:
    """One for all sequences of an engine. This one knows nothing and remembers nothing."""

    name = "other"  # of the method, in metrics
    offer = NOTHING_OFFERED
    bound = 64  # tokens that it drafts at most

    @property
    def remembered(self) -> int:
        """Sequences of which it knows something: at most those that are in the engine."""
        return 0

    def ready(self, seq: Sequence) -> bool:
        """Whether it would guess what follows the known tokens. If not, a step in flight need not be read before the next one begins."""
        return True

    def most(self, seq: Sequence) -> int:
        """How many guesses it may make for `seq` in a step; 0: there will be none, and nobody makes room for them."""
        return self.bound

    def propose(self, asks: Seq[Ask]) -> list[Seq[int]]:
        """For each of `asks`, guesses of what follows, or none. Once a step, for all its sequences: a model drafts them together."""
        return [() for _ in asks]

    def source(self, seq: Sequence) -> str:
        """Name of the method that has made the last guesses for `seq`."""
        return self.name

    def wants(self, rows: int) -> bool:
        """Whether it may guess in a step with so many rows. If not, it is not asked."""
        return True

    def seconds(self, sequences: int) -> float:
        """What it takes to guess one token for each of so many sequences."""
        return 0.0

    def study(self, seq: Sequence, drafts: Seq[int], sampled: Seq[Sampled]) -> None:
        """What was sampled after the known tokens and after each guess, also after wrong ones. Before `observe`, and before any of it is
        known."""

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """So many guesses were verified in a step, and so many of them, the first ones, were what the target said."""

    def forget(self, seq: Sequence) -> None:
        """The sequence has left the engine, whether or not anything was proposed for it."""


@dataclass(slots=True)
class Pace:
    acceptance: float  # exponentially decaying estimate
    drafted_at: int = 0  # tokens that were known


class Paced(Drafter):
    """Asks another drafter for as many tokens as are worth it, `bound` at most."""

    def __init__(self, drafter: Drafter, bound: int, step: Line = ASSUMED) -> None:
        """`step`: seconds of a step by its rows."""
        self.drafter = drafter
        self.name = drafter.name
        self._step = step
        self._usual = FIRST_ACCEPTANCE  # of the method: what is expected of a new sequence
        self.bound = min(bound, drafter.bound)
        self._paces: dict[Sequence, Pace] = {}

    @property
    def remembered(self) -> int:
        return max(len(self._paces), self.drafter.remembered)

    def ready(self, seq: Sequence) -> bool:
        """As if it were alone in the step."""
        return any(self._worth([Ask(seq, self.bound)])) and self.drafter.ready(seq)

    def wants(self, rows: int) -> bool:
        """Where not even a guess that is surely right is worth its row, as where a step is bound by computing, there is none."""
        return any(allot([1.0], [1], rows, self._step, self.drafter.seconds(rows) / rows))

    def propose(self, asks: Seq[Ask]) -> list[Seq[int]]:
        drafts: list[Seq[int]] = [()] * len(asks)
        asked = {i: replace(asks[i], most=most) for i, most in enumerate(self._worth(asks)) if most}
        for i, guesses in zip(asked, self.drafter.propose([*asked.values()]) if asked else (), strict=True):
            if guesses:
                drafts[i] = guesses
                self._paces[asks[i].seq].drafted_at = len(asks[i].seq.tokens)
        return drafts

    def study(self, seq: Sequence, drafts: Seq[int], sampled: Seq[Sampled]) -> None:
        self.drafter.study(seq, drafts, sampled)

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """What comes after the first wrong guess says nothing about acceptance."""
        pace = self._paces[seq]
        for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
            pace.acceptance += NEWEST * (outcome - pace.acceptance)
            self._usual += NEWEST_OF_ALL * (outcome - self._usual)
        self.drafter.observe(seq, drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        self._paces.pop(seq, None)
        self.drafter.forget(seq)

    def _worth(self, asks: Seq[Ask]) -> list[int]:
        """How many guesses each gets. One whose guesses were bad gets one from time to time, where a good one would be worth it."""
        if not asks or not self.wants(asks[0].rows):
            return [0] * len(asks)
        drafting = self.drafter.seconds(len(asks)) / len(asks)
        paces = [self._paces.setdefault(ask.seq, Pace(self._usual)) for ask in asks]
        most = [min(ask.most, self.bound) for ask in asks]
        counts = allot([pace.acceptance for pace in paces], most, asks[0].rows, self._step, drafting)
        return [
            count or int(len(ask.seq.tokens) - pace.drafted_at >= RETRY_TOKENS)
            for count, ask, pace in zip(counts, asks, paces, strict=True)
        ]


class Chosen(Drafter):
    """Several methods, of which each sequence is guessed for by the one that its request names: by `default` if it names none, or one that
    another worker had; by nobody if it names `NONE`. What a request predicts goes before what its method guesses."""

    def __init__(self, methods: Mapping[str, Drafter], default: str, bound: int) -> None:
        """`methods` by name, `PREDICTION` among them and first, if requests may bring one. `bound`: of the guesses in a step."""
        self.offer = Offer(tuple(dict.fromkeys((default, *reversed([*methods])))), bound)
        self.bound = bound
        self._methods = dict(methods)
        self._default = default
        self._sources: dict[Sequence, str] = {}  # who has made the last guesses for it

    @property
    def remembered(self) -> int:
        return max(len(self._sources), *(drafter.remembered for drafter in self._methods.values()), 0)

    def ready(self, seq: Sequence) -> bool:
        return any(self._methods[name].ready(seq) for name in self._names(seq))

    def most(self, seq: Sequence) -> int:
        asked = seq.params.speculation
        if asked is UNASKED:
            return self.bound if self._default in self._methods else 0
        return min(self.bound, self.bound if asked.max_tokens is None else asked.max_tokens) if self._names(seq) else 0

    def wants(self, rows: int) -> bool:
        return any(drafter.wants(rows) for drafter in self._methods.values())

    def propose(self, asks: Seq[Ask]) -> list[Seq[int]]:
        if all(ask.seq.params.speculation is UNASKED for ask in asks):  # nearly always, and a step of a small model is short
            return self._by_default(asks)
        drafts: list[Seq[int]] = [()] * len(asks)
        names = [self._names(ask.seq) for ask in asks]
        for name, drafter in self._methods.items():  # the prediction first
            asked = [i for i in range(len(asks)) if name in names[i] and not drafts[i]]
            if not asked:
                continue
            for i, guesses in zip(asked, drafter.propose([asks[i] for i in asked]), strict=True):
                drafts[i] = guesses
                self._sources[asks[i].seq] = name
        return drafts

    def _by_default(self, asks: Seq[Ask]) -> list[Seq[int]]:
        if self._default not in self._methods:
            return [()] * len(asks)
        drafts = self._methods[self._default].propose(asks)
        for ask, guesses in zip(asks, drafts, strict=True):
            if guesses:
                self._sources[ask.seq] = self._default
        return drafts

    def source(self, seq: Sequence) -> str:
        return self._sources.get(seq, self.name)

    def study(self, seq: Sequence, drafts: Seq[int], sampled: Seq[Sampled]) -> None:
        self._methods[self._sources[seq]].study(seq, drafts, sampled)

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._methods[self._sources[seq]].observe(seq, drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        self._sources.pop(seq, None)
        for drafter in self._methods.values():
            drafter.forget(seq)

    def _names(self, seq: Sequence) -> list[str]:
        asked = seq.params.speculation
        names = [PREDICTION] if asked.prediction else []
        method = asked.method if asked.method in self.offer.names else self._default
        return [name for name in (*names, method) if name in self._methods]
