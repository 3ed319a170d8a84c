"""An output is followed through what its client has predicted: edits, pieces that are left out, put in or moved; at a bounded cost."""

import random
from collections.abc import Sequence as Seq

import pytest

from baton.engine.core.drafting import Chosen, Drafter, DraftRequest, Paced
from baton.engine.core.prediction import CAUGHT_UP, Prediction
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import CANDIDATES, LONGEST, SHORTEST, TAKEN_IN, Follower, Offer, Speculation
from baton.engine.core.step_costs import Upkeep

FILE = list(range(100, 160))


def followed(prediction: Seq[int], output: Seq[int]) -> tuple[Follower, int]:
    """And how many tokens of the output were predicted when they came."""
    follower, right = Follower(prediction), 0
    for token in output:
        right += list(follower.coming(1)) == [token]
        follower.follow(token)
    return follower, right


@pytest.mark.parametrize(
    ("output", "unpredicted", "rejected"),
    [
        (FILE, 0, 0),
        ([*FILE[:20], 7, *FILE[21:]], 1 + SHORTEST, 1),
        ([*FILE[:20], *FILE[30:]], SHORTEST, 10),
        ([*FILE[:20], 7, 8, 9, *FILE[20:]], 3 + SHORTEST, 0),
        ([*FILE[30:], *FILE[:30]], 2 * SHORTEST, 0),
        ([7, *FILE], 1 + SHORTEST, 0),
        ([*FILE, 7, 8, 9], 3, 0),
        ([7] * 50, 50, 60),
        (FILE * 3, 2 * SHORTEST, 0),
    ],
    ids=["equal", "changed", "left out", "put in", "moved", "before", "longer", "another", "thrice"],
)
def test_an_edit_costs_the_tokens_that_it_changes_and_two_more(output: list[int], unpredicted: int, rejected: int) -> None:
    follower, right = followed(FILE, output)
    assert len(output) - right == unpredicted
    assert (follower.accepted, follower.rejected) == (len(FILE) - rejected, rejected)


def test_of_several_places_the_longest_match_counts_and_then_the_next_one() -> None:
    body = [1, 2, 3, 50, 1, 2, 4, 60, 9, 9, 1, 2, 5, 70]
    assert followed(body, [1, 2, 3, 8, 1, 2])[0].place == 6, "where it was lost, or after"
    assert followed(body, [*body[:9], 8, 9, 1, 2])[0].place == 12, "the longest match"
    assert followed(body, [*body, 8, 1, 2])[0].place == 12, "nothing follows: the nearest before"


class Counted(list[int]):
    """Counts the tokens that are read."""

    reads = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        found = super().__getitem__(at)
        self.reads += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("symbols", [1, 2, 50, 5000])
def test_a_token_costs_as_much_in_a_prediction_of_8000_tokens_as_in_any(symbols: int) -> None:
    rng = random.Random(symbols)
    prediction = Counted(rng.randrange(symbols) for _ in range(8000))
    follower = Follower(prediction)
    for _ in range(500):
        prediction.reads = 0
        follower.follow(rng.randrange(symbols))
        assert prediction.reads <= SHORTEST * TAKEN_IN + 2 * CANDIDATES * LONGEST + 1


def sequence(tokens: Seq[int], asked: Speculation, prompt_len: int = 2) -> Sequence:
    return Sequence("a", list(tokens), prompt_len, SamplingParams(max_tokens=9000, speculation=asked), b"")


def ask(drafter: Drafter, seq: Sequence, most: int) -> list[int]:
    return [*drafter.propose([DraftRequest(seq, most)])[0]]


def test_an_engine_that_has_been_given_the_beginning_catches_up_over_several_steps() -> None:
    file = list(range(3 * CAUGHT_UP + 50))
    seq, drafter = sequence([0, 1, *file[:-10]], Speculation(prediction=tuple(file))), Prediction()
    assert [ask(drafter, seq, 4) for _ in range(4)] == [[], [], [], file[-10:-6]] and drafter.remembered == 1
    assert drafter.ready(seq) and not drafter.ready(sequence([0, 1], Speculation()))
    drafter.forget(seq)
    assert drafter.remembered == 0


class Says(Drafter):
    def __init__(self, token: int) -> None:
        self._token = token
        self.asked: list[int] = []

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        self.asked.append(len(asks))
        return [[self._token] * ask.most for ask in asks]


def test_each_request_is_guessed_for_as_it_asks_and_a_method_is_asked_once_a_step() -> None:
    one, two = Says(1), Says(2)
    drafter = Chosen({"prediction": Paced(Prediction(), 8), "one": one, "two": two}, "one", 8)
    assert drafter.offer == Offer(("one", "two", "prediction"), 8) and drafter.offer.names == ("one", "two", "none")
    asked = {
        "default": (Speculation(), [1] * 4, "one"),
        "named": (Speculation("two"), [2] * 4, "two"),
        "limited": (Speculation("two", 2), [2] * 2, "two"),
        "none": (Speculation("none"), [], "other"),
        "that another worker had": (Speculation("three"), [1] * 4, "one"),
        "predicted": (Speculation(prediction=(5, 6, 7)), [5, 6], "prediction"),
        "predicted, and none": (Speculation("none", 1, (5, 6, 7)), [5], "prediction"),
        "predicted before": (Speculation("two", prediction=(5,)), [2] * 4, "two"),
    }
    seqs = {name: sequence([0, 1, *([5, 6] if name == "predicted before" else [])], given) for name, (given, _, _) in asked.items()}
    worth = drafter.most([*seqs.values()], 1)
    drafts = drafter.propose([DraftRequest(seq, min(4, most)) for seq, most in zip(seqs.values(), worth, strict=True) if most])
    assert [list(draft) for draft in drafts] == [wanted for _, wanted, _ in asked.values() if wanted]
    assert [drafter.source(seq) for seq in seqs.values()] == [source for *_, source in asked.values()]
    assert (one.asked, two.asked) == ([2], [3])
    for seq in seqs.values():
        drafter.forget(seq)
    assert drafter.remembered == 0


def test_a_method_that_no_sequence_of_a_step_names_is_not_asked() -> None:
    """What a guess takes was measured, as with every model that has a method: it is that of a mean sequence."""
    upkeep = Upkeep(guess_token=1e-6)
    drafter = Chosen({"prediction": Paced(Prediction(), 8, upkeep=upkeep), "one": Paced(Says(1), 8, upkeep=upkeep)}, "one", 8)
    assert drafter.most([sequence([0, 1], Speculation("none"))], 1) == [0]
    [some] = drafter.most([sequence([0, 1], Speculation("one", 2))], 1)
    assert some <= 2
