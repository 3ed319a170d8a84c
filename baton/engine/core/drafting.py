"""What guesses the next tokens of a sequence, and how many guesses are worth the step that verifies them. Pure.

A draft is verified by sampling as if there were none (`baton.engine.core.protocol`), so a drafter changes how many steps an output takes,
and nothing else. A method is a `Drafter`; `Paced` stands before any of them and asks for as many tokens as their acceptance is worth, and
`Chosen` before all: it asks the one that a request names.

How many are worth it, `baton.engine.core.step_costs` says: it follows from the acceptance of each sequence, and from what steps take.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Self

from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import NOTHING_OFFERED, PREDICTION, UNASKED, Offer
from baton.engine.core.step_costs import (
    ASSUMED,
    NO_UPKEEP,
    NOTHING_BESIDE,
    Beside,
    Drafting,
    Line,
    OtherGuess,
    Upkeep,
    allot,
    allot_others,
    least_chance,
    remember,
)

FIRST_ACCEPTANCE = 0.6  # of a method of which nothing is known
NEWEST, NEWEST_OF_ALL = 1 / 8, 1 / 16  # weight of the newest verified token in the estimate of a sequence, and of the method
FIRST_OTHER = 0.1  # how often the second choice of such a method is right; the third half as often, and so on
OTHERS_ASKED = 8  # known tokens between two such questions
NEWEST_OTHER, NEWEST_OTHER_OF_ALL = 1 / 32, 1 / 64  # the same of other choices, which are rarely right
TRIED_IN = 128  # tokens for each token's time that a trial takes: trials of bad guesses cost less than a hundredth
DOUBLINGS = 3  # of what lies between two trials, or two questions that had no answer
MARGIN = 1.25  # what a guess must bring for what it takes: what was measured at the start is near it, and no more
LEVELS, MOST_LEVELS = 8, 64  # of what a step takes beside its rows, and a guess beside its own, as shares of what rows take
CELLS = 32  # steps of the chances by which it is remembered how many guesses a single sequence gets


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What follows `seq.tokens`? All are known, and those of an earlier question are still there. No more than `most >= 1` guesses, for
    which `seq.blocks` has room."""

    seq: Sequence
    most: int
    others: bool = False  # whether other choices of the first guess are of use, too


class Tree(tuple[int, ...]):
    """Guesses, and others that begin with another token, the likeliest first, which are verified, too, if there is room for more."""

    others: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, first: Iterable[int], others: Iterable[Iterable[int]]) -> Self:
        made = cls(first)
        made.others = tuple(tuple(other) for other in others)
        return made


class Drafter:
    """One for all sequences of an engine. This one knows nothing and remembers nothing."""

    name = "other"  # of the method, in metrics
    offer = NOTHING_OFFERED
    bound = 64  # tokens that it drafts at most
    other_tokens = 0  # of each other guess that it has, at most

    @property
    def remembered(self) -> int:
        """Sequences of which it knows something: at most those that are in the engine."""
        return 0

    def ready(self, seq: Sequence) -> bool:
        """Whether it would guess what follows the known tokens. If not, a step in flight need not be read before the next one begins."""
        return True

    def most(self, seqs: Seq[Sequence], rows: int) -> Seq[int]:
        """How many guesses it may make for each of `seqs`, which decode in a step that has so many rows without guesses. Once a step, for
        all of them. Nobody makes room for more, and who gets 0 is not asked; nothing at all: nobody is."""
        return [self.bound] * len(seqs)

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        """Guesses what follows, or nothing, for each of `asks`; a `Tree`, if others are of use and it knows some. It is asked once a step,
        for all its sequences: a model drafts them together."""
        return [() for _ in asks]

    def source(self, seq: Sequence) -> str:
        """Name of the method that has made the last guesses for `seq`."""
        return self.name

    def drafting(self, sequences: int) -> Drafting:
        """What it takes if so many sequences are asked for together."""
        return Drafting()

    def study(self, seq: Sequence, drafts: Seq[int], sampled: Seq[Sampled]) -> None:
        """What was sampled after the known tokens and after each guess, also after wrong ones. Before `observe`, and before any of it is
        known."""

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """So many guesses were verified in a step, and so many of them, the first ones, were what the target said."""

    def forget(self, seq: Sequence) -> None:
        """The sequence has left the engine, whether or not anything was proposed for it."""


@dataclass(slots=True)
class DraftPace:
    """What is known of one sequence. The chances are exponentially decaying estimates."""

    first: float  # that a first guess is right
    further: float  # that one is if all before it are
    try_at: int  # known tokens from which on a guess is tried, though none is worth it
    ask_at: int = 0  # from which on there is a question again, after one without an answer
    trials: int = 0  # since a guess was right
    unanswered: int = 0  # questions one after another
    others: list[float] = field(default_factory=list)  # that its second choice is right, its third, …, whether or not they are verified
    offered: tuple[int, ...] = ()  # what these choices were in this step


def _leveled(seconds: float, whole: float) -> float:
    return min(int(LEVELS * seconds / whole), MOST_LEVELS) / LEVELS * whole


class Paced(Drafter):
    """Asks another drafter for as many tokens as are worth it, `bound` at most."""

    def __init__(
        self, drafter: Drafter, bound: int, step: Line = ASSUMED, others: int = 0, branch_s: float = 0.0, upkeep: Upkeep = NO_UPKEEP
    ) -> None:
        """`step`: seconds of a step by its rows; `upkeep`: what it takes beside them. `others`: so many other choices may be verified;
        `branch_s`: seconds to begin one."""
        self.drafter = drafter
        self._others, self._branch_s = (others if drafter.other_tokens else 0), branch_s
        self._usual_others = [FIRST_OTHER / 2**rank for rank in range(self._others)]
        # In this step: guesses, and those of other choices, if any is worth it.
        self._chosen_others: dict[Sequence, tuple[int, list[int]]] = {}
        self.name = drafter.name
        self._step, self._upkeep = step, upkeep
        self._margin = 1.0 if step is ASSUMED else MARGIN
        self._usual = [FIRST_ACCEPTANCE, FIRST_ACCEPTANCE]  # of the method, as in `DraftPace`: what is expected of a new sequence
        self.bound = min(bound, drafter.bound)
        self._paces: dict[Sequence, DraftPace] = {}
        self._least: dict[tuple[int, Beside], float] = {}  # rows, `_beside` → `least_chance`
        self._least_others: dict[tuple[int, Beside], float] = {}  # and the same of other choices
        # rows, `_beside`, and chances in parts of CELLS → what a single one that is asked gets
        self._alone: dict[tuple[int, Beside, int, int], Seq[int]] = {}
        self._rest = 1  # tokens between two trials, in the step for which `most` was asked last

    @property
    def remembered(self) -> int:
        return max(len(self._paces), self.drafter.remembered)

    def ready(self, seq: Sequence) -> bool:
        """It answers as if the sequence were alone in the step."""
        least = self._least_chance(1, self._beside([seq], 1))
        pace, known = self._pace(seq), len(seq.tokens)
        if least > 1 or pace.ask_at > known or (pace.first < least and pace.try_at > known):
            return False
        if found := self.drafter.ready(seq):
            return found
        self._wait(pace, known)
        return False

    def most(self, seqs: Seq[Sequence], rows: int) -> Seq[int]:
        """It grants as many as are worth it, and from time to time one more. A sequence that is to get none takes next to no time here."""
        beside = self._beside(seqs, rows)
        least, self._chosen_others = self._least_chance(rows, beside), {}
        if least > 1:
            return ()
        self._rest = 1 + int(TRIED_IN * least)
        paces, asked = self._paces, dict[int, DraftPace]()
        for i, seq in enumerate(seqs):
            pace, known = paces.get(seq) or self._pace(seq), len(seq.tokens)
            if pace.ask_at <= known and (pace.first >= least or pace.try_at <= known):
                asked[i] = pace
        if not asked:
            return ()
        counts, worth = [0] * len(seqs), self._allot([*asked.values()], rows, beside)
        for (i, pace), count in zip(asked.items(), worth, strict=True):
            known = len(seqs[i].tokens)
            if count:
                counts[i] = count
            elif pace.try_at <= known:
                counts[i], pace.trials = 1, pace.trials + 1
            else:
                pace.ask_at = known + (1 << DOUBLINGS)  # it is no other sooner
        if self._others and any(max(pace.others) >= self._least_other(rows, beside) for pace in asked.values()):
            self._add_others(seqs, asked, worth, counts, rows, beside)
        return counts

    def _add_others(
        self, seqs: Seq[Sequence], asked: Mapping[int, DraftPace], worth: Seq[int], counts: list[int], rows: int, beside: Beside
    ) -> None:
        """Adds the guesses of other choices that are worth it to those of each sequence."""
        paces = [*asked.values()]
        others = [
            OtherGuess(k, (chance, pace.further), min(self.drafter.other_tokens, self.bound - worth[k]))
            for k, pace in enumerate(paces)
            for chance in pace.others
        ]
        chances = [(pace.first, pace.further) for pace in paces]
        drafting = self.drafter.drafting(len(asked))
        found = allot_others(others, chances, worth, rows, self._step, drafting, self._branch_s, beside)
        for k, i in enumerate(asked):
            own = [count for other, count in zip(others, found, strict=True) if other.of == k]
            if any(own):
                self._chosen_others[seqs[i]] = counts[i], own
                counts[i] = min(self.bound, counts[i] + sum(own))

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        drafts = self.drafter.propose([self._with_others(ask) for ask in asks] if self._others else asks)
        for ask, guesses in zip(asks, drafts, strict=True):
            pace, known = self._pace(ask.seq), len(ask.seq.tokens)
            if guesses:
                pace.unanswered = 0
                pace.try_at = known + (self._rest << min(pace.trials, DOUBLINGS))
            else:
                self._wait(pace, known)
        return [self._pruned(ask.seq, guesses) if isinstance(guesses, Tree) else guesses for ask, guesses in zip(asks, drafts, strict=True)]

    def _with_others(self, ask: DraftRequest) -> DraftRequest:
        """Asks for other choices, too, where some are worth their rows. To know them takes time, so elsewhere it asks only from time to
        time, to learn how often they would have been right."""
        if (found := self._chosen_others.get(ask.seq)) is not None:
            return DraftRequest(ask.seq, min(ask.most, found[0]), True)
        return replace(ask, others=True) if len(ask.seq.tokens) % OTHERS_ASKED == 0 else ask

    def _pruned(self, seq: Sequence, tree: Tree) -> Tree:
        """Keeps those of the other choices that are worth it. How often they are right is counted for all."""
        self._paces[seq].offered = tuple(other[0] for other in tree.others[: self._others])
        _, counts = self._chosen_others.get(seq, (0, []))
        return Tree.of(tree, [other[:count] for other, count in zip(tree.others, counts, strict=False) if count])

    def study(self, seq: Sequence, drafts: Seq[int], sampled: Seq[Sampled]) -> None:
        if (pace := self._paces.get(seq)) is not None and pace.offered:
            for rank, token in enumerate(pace.offered):
                right = float(token == sampled[0].token)
                pace.others[rank] += NEWEST_OTHER * (right - pace.others[rank])
                self._usual_others[rank] += NEWEST_OTHER_OF_ALL * (right - self._usual_others[rank])
            pace.offered = ()
        self.drafter.study(seq, drafts, sampled)

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """What comes after the first wrong guess says nothing about acceptance. After a right one, the next may be tried at once."""
        pace, usual = self._pace(seq), self._usual
        right = float(accepted > 0)
        pace.first += NEWEST * (right - pace.first)
        usual[0] += NEWEST_OF_ALL * (right - usual[0])
        for outcome in [1.0] * (accepted - 1) + [0.0] * (0 < accepted < drafted):
            pace.further += NEWEST * (outcome - pace.further)
            usual[1] += NEWEST_OF_ALL * (outcome - usual[1])
        if right:
            pace.try_at = pace.trials = 0
        self.drafter.observe(seq, drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        self._paces.pop(seq, None)
        self._chosen_others.pop(seq, None)
        self.drafter.forget(seq)

    def _beside(self, seqs: Seq[Sequence], rows: int) -> Beside:
        """What a step with `seqs` and so many rows takes beside these, in a few levels, so that what follows from it is remembered."""
        if self._upkeep == NO_UPKEEP:
            return NOTHING_BESIDE
        plain, tokens = self._step.at(rows), sum([len(seq.tokens) for seq in seqs])
        step = self._upkeep.sequence * len(seqs) + self._upkeep.token * tokens
        guess = self._upkeep.guess + self._upkeep.guess_token * tokens / len(seqs)
        return Beside(_leveled(step, plain), _leveled(guess, plain / rows))

    def _allot(self, paces: Seq[DraftPace], rows: int, beside: Beside) -> Seq[int]:
        chances = [(pace.first / self._margin, pace.further) for pace in paces]
        if len(chances) > 1:
            return allot(chances, [self.bound] * len(paces), rows, self._step, self.drafter.drafting(len(paces)), beside)
        first, further = chances[0]
        about = rows, beside, int(first * CELLS), int(further * CELLS)
        if (found := self._alone.get(about)) is None:
            near = [((about[2] + 0.5) / CELLS, (about[3] + 0.5) / CELLS)]
            found = allot(near, [self.bound], rows, self._step, self.drafter.drafting(1), beside)
            remember(self._alone, about, found)
        return found

    def _pace(self, seq: Sequence) -> DraftPace:
        pace = self._paces.get(seq)
        if pace is None:
            first, further = self._usual
            pace = self._paces[seq] = DraftPace(first, further, len(seq.tokens) + self._rest, others=[*self._usual_others])
        return pace

    def _wait(self, pace: DraftPace, known: int) -> None:
        """A question costs more than its answer is worth where there is none most of the time."""
        pace.ask_at = known + (1 << min(pace.unanswered, DOUBLINGS))
        pace.unanswered += 1

    def _least_other(self, rows: int, beside: Beside) -> float:
        """Same as `_least_chance`, for another choice."""
        if (least := self._least_others.get((rows, beside))) is None:
            least = least_chance(rows, self.bound, self._step, Drafting(0.0, self._branch_s), beside)
            remember(self._least_others, (rows, beside), least)
        return least

    def _least_chance(self, rows: int, beside: Beside) -> float:
        if (least := self._least.get((rows, beside))) is None:
            least = self._margin * least_chance(rows, rows * self.bound, self._step, self.drafter.drafting(rows), beside)
            remember(self._least, (rows, beside), least)
        return least


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
        self._worth: dict[tuple[str, Sequence], int] = {}  # in this step, if a request in it names a method, a limit or a prediction

    @property
    def remembered(self) -> int:
        return max(len(self._sources), *(drafter.remembered for drafter in self._methods.values()), 0)

    def ready(self, seq: Sequence) -> bool:
        return any(self._methods[name].ready(seq) for name in self._names(seq))

    def most(self, seqs: Seq[Sequence], rows: int) -> Seq[int]:
        self._worth = {}
        if not [seq for seq in seqs if seq.params.speculation is not UNASKED]:  # nearly always, and a step of a small model is short
            return self._methods[self._default].most(seqs, rows) if self._default in self._methods else ()
        names, counts = [self._names(seq) for seq in seqs], [0] * len(seqs)
        for name, drafter in self._methods.items():
            own = [i for i in range(len(seqs)) if name in names[i]]
            if not own:
                continue
            for i, count in zip(own, drafter.most([seqs[i] for i in own], rows), strict=False):
                limit = seqs[i].params.speculation.max_tokens
                self._worth[name, seqs[i]] = count if limit is None else min(count, limit)
                counts[i] = min(self.bound, max(counts[i], self._worth[name, seqs[i]]))
        return counts

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        worth, self._worth = self._worth, {}
        if not worth:
            return self._by_default(asks)
        drafts: list[Seq[int]] = [()] * len(asks)
        for name, drafter in self._methods.items():  # the prediction first
            most = [0 if drafts[i] else min(ask.most, worth.get((name, ask.seq), 0)) for i, ask in enumerate(asks)]
            own = [i for i, count in enumerate(most) if count]
            if not own:
                continue
            for i, guesses in zip(own, drafter.propose([DraftRequest(asks[i].seq, most[i]) for i in own]), strict=True):
                drafts[i] = guesses
                self._sources[asks[i].seq] = name
        return drafts

    def _by_default(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
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
        return [name for name in (*names, self.offer.method_for(asked)) if name in self._methods]
