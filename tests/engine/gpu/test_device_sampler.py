"""The sampler that never waits for the device draws the same tokens and log-probabilities as the reference, for any mix of requests."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.core.masks import NOTHING, allowed_ids
from baton.engine.core.sampling import LOGPROBS_MODES, Sampled, SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.inputs import Seat
from baton.engine.gpu.overlap import UNKNOWN
from baton.engine.gpu.sampler import Pick, Sampler, answers, pick_plainly
from baton.engine.model import sampler as reference

EOS = frozenset([1, 2])
VOCAB = 320
SEATS = 16
ROWS = 25  # each of ten tokens is drawn in two times so many
FEW = 8  # rows, where the interpreter of kernels takes its time for each


def kernels() -> Pick:
    pick: Pick = pytest.importorskip("baton.engine.gpu.triton_sampling", reason="needs triton", exc_type=ImportError).pick
    return pick


PICKS = [pytest.param(lambda: pick_plainly, id="plain"), pytest.param(kernels, id="triton")]


def sampler(device: torch.device, pick: Pick) -> Sampler:
    return Sampler(EOS, SEATS, device, pick)


def draw(sampler: Sampler, logits: torch.Tensor, seqs: list[Sequence], seats: list[Seat] | None = None) -> list[Sampled | None]:
    seated = [Seat(i) for i in range(len(seqs))] if seats is None else seats
    return answers(sampler.draw(logits, seqs, seated), seqs)


def random_logits(rng: random.Random, rows: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(rows, VOCAB, generator=generator) * rng.choice((0.1, 1.0, 5.0))
    if rng.random() < 0.3:
        logits = logits.round(decimals=1)  # many ties
    return logits.to(device)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=50,
        min_tokens=rng.choice((0, 0, 30)),
        temperature=rng.choice((0.0, 0.3, 1.0, 1.7)),
        top_k=rng.choice((0, 1, 7, 200, 10**6)),
        top_p=rng.choice((1.0, 0.05, 0.5, 0.95)),
        min_p=rng.choice((0.0, 0.0, 0.2)),
        top_a=rng.choice((0.0, 0.0, 0.4)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3, 0.8)),
        presence_penalty=rng.choice((0.0, 0.0, 0.7)),
        frequency_penalty=rng.choice((0.0, 0.0, -0.4)),
        seed=rng.getrandbits(63),
        logit_bias=rng.choice(({}, {}, {5: 3.0, VOCAB + 3: 1.0, 9: -100.0})),
        logprobs=rng.choice((None, None, 0, 4)),
        logprobs_mode=rng.choice(LOGPROBS_MODES),
        stop_token_ids=rng.choice((frozenset(), frozenset([3, VOCAB + 9]))),
        ignore_eos=rng.random() < 0.3,
    )


def random_sequence(rng: random.Random, name: str) -> Sequence:
    tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
    return Sequence(name, tokens, rng.randint(1, len(tokens)), random_params(rng), root=b"")


def same(found: Sampled | None, expected: Sampled) -> bool:
    if found is None or found.token != expected.token or (found.logprob is None) != (expected.logprob is None):
        return False
    pairs = list(zip(found.top, expected.top, strict=True))
    close = [(found.logprob or 0.0, expected.logprob or 0.0), *((a[1], b[1]) for a, b in pairs)]
    return all(a[0] == b[0] for a, b in pairs) and all(abs(a - b) < 1e-5 for a, b in close)


@pytest.mark.parametrize("pick", PICKS)
def test_draws_match_the_reference(device: torch.device, pick: Callable[[], Pick]) -> None:
    rng, ours = random.Random(1), sampler(device, pick())
    drawn = 0
    for _ in range(12):
        seqs = [random_sequence(rng, str(i)) for i in range(rng.choice((1, 5, SEATS)))]
        logits = random_logits(rng, len(seqs), device)
        before = logits.clone()
        expected = reference.sample(logits, seqs, EOS)
        found = draw(ours, logits, seqs)
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(logits, before)
        drawn += sum(seq.params.temperature > 0 for seq in seqs)
    assert drawn > 40


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize(
    "filters",
    [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.3}, {"top_p": 1e-9}, {"top_k": VOCAB - 1}, {"min_p": 0.5}, {"top_a": 0.8}],
    ids=str,
)
def test_each_filter_alone_matches_the_reference(device: torch.device, pick: Callable[[], Pick], filters: dict[str, Any]) -> None:
    """On scores with many ties, some of them masked."""
    rng, ours = random.Random(2), sampler(device, pick())
    logits = torch.randn(FEW, VOCAB, generator=torch.Generator().manual_seed(3)).round(decimals=1).to(device)
    logits[:, 100:200] = -torch.inf
    seqs = [Sequence(str(i), [0], 1, SamplingParams(max_tokens=9, seed=rng.getrandbits(63), **filters), root=b"") for i in range(FEW)]
    expected = reference.sample(logits, seqs, EOS)
    assert [answer and answer.token for answer in draw(ours, logits, seqs)] == [answer.token for answer in expected]


@pytest.mark.parametrize(("pick", "rows"), [(lambda: pick_plainly, ROWS), (kernels, FEW)], ids=["plain", "triton"])
def test_the_mass_of_top_k_includes_ties_with_the_last_token(device: torch.device, pick: Callable[[], Pick], rows: int) -> None:
    """Four scores of 2, six of 1: top-k 5 keeps ten, so a nucleus of 0.9 needs more than the first four."""
    logits = torch.full((rows, VOCAB), -30.0, device=device)
    logits[:, :4], logits[:, 4:10] = 2.0, 1.0
    ours, found = sampler(device, pick()), []
    for first in (0, 1):
        asked = [SamplingParams(max_tokens=9, seed=2 * i + first, top_k=5, top_p=0.9) for i in range(rows)]
        seqs = [Sequence(str(i), [0], 1, params, root=b"") for i, params in enumerate(asked)]
        drawn = [answer.token for answer in draw(ours, logits, seqs) if answer]
        assert drawn == [answer.token for answer in reference.sample(logits, seqs, EOS)]
        found += drawn
    assert set(found) == set(range(10)) if rows == ROWS else set(found) & set(range(4, 10))


def test_penalties_count_tokens_that_the_host_does_not_know_yet(device: torch.device) -> None:
    """Six steps in a row, with the host one step behind, against the reference, which knows every token."""
    rng, ours = random.Random(3), sampler(device, pick_plainly)
    params = SamplingParams(max_tokens=50, temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.9, presence_penalty=0.3)
    known = Sequence("a", [4, 4, 8], 2, params, root=b"")
    late = Sequence("a", [4, 4, 8], 2, params, root=b"")
    seat = Seat(3)
    for _ in range(6):
        logits = random_logits(rng, 1, device).abs()
        expected = reference.sample(logits, [known], EOS)[0].token
        found = draw(ours, logits, [late], [seat])[0]
        assert found is not None and found.token == expected
        if late.tokens[-1] == UNKNOWN:
            late.tokens[-1] = known.tokens[-1]
        known.tokens.append(expected)
        late.tokens.append(UNKNOWN)


def test_a_reassigned_seat_forgets_its_previous_sequence(device: torch.device) -> None:
    rng, ours, seat = random.Random(4), sampler(device, pick_plainly), Seat(0)
    params = SamplingParams(max_tokens=50, temperature=0.0, repetition_penalty=10.0)
    logits = random_logits(rng, 1, device).abs() + 1
    for tokens in ([5, 6], [7], [8, 9], [7], [10, 11, 12]):
        seq = Sequence("x", tokens, 1, params, root=b"")
        for _ in range(2):  # the second time as if the first step had been undone
            assert draw(ours, logits, [seq], [seat]) == reference.sample(logits, [seq], EOS)


@pytest.mark.parametrize("pick", PICKS)
def test_rows_with_nan_fail_alone(device: torch.device, pick: Callable[[], Pick]) -> None:
    logits = torch.randn(3, VOCAB, device=device)
    logits[1, 5] = torch.nan
    seqs = [Sequence(str(i), [0], 1, SamplingParams(max_tokens=9, seed=i, top_p=0.9), root=b"") for i in range(3)]
    found = draw(sampler(device, pick()), logits, seqs)
    assert [answer is None for answer in found] == [False, True, False]
    rest = reference.sample(logits[[0, 2]], [seqs[0], seqs[2]], EOS)
    assert [found[0], found[2]] == rest


def test_a_fully_masked_row_is_sampled_as_if_nothing_were_masked(device: torch.device) -> None:
    logits = torch.randn(2, VOCAB, device=device)
    biases = ({token: -torch.inf for token in range(VOCAB)}, {3: 1.0})
    seqs = [Sequence(str(i), [0], 1, SamplingParams(max_tokens=9, seed=i, logit_bias=bias), root=b"") for i, bias in enumerate(biases)]
    assert draw(sampler(device, pick_plainly), logits, seqs) == reference.sample(logits, seqs, EOS)


@pytest.mark.parametrize("pick", PICKS)
def test_a_row_does_not_depend_on_the_others(device: torch.device, pick: Callable[[], Pick]) -> None:
    rng, ours = random.Random(5), sampler(device, pick())
    seqs = [random_sequence(rng, str(i)) for i in range(8)]
    logits = random_logits(rng, 8, device)
    together = draw(ours, logits, seqs)
    assert together == [draw(ours, logits[i : i + 1], seqs[i : i + 1], [Seat(i)])[0] for i in range(8)]


class Allows:
    """A form whose next tokens are these."""

    failure = ""

    def __init__(self, tokens: list[int]) -> None:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[tokens] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self, output: Any) -> Any:
        return self._words if self._words.any() else NOTHING


@pytest.mark.parametrize("pick", PICKS)
def test_rows_that_are_held_to_a_form_match_the_reference(device: torch.device, pick: Callable[[], Pick]) -> None:
    rng, made = random.Random(11), pick()
    for _ in range(10):
        seqs = [random_sequence(rng, str(i)) for i in range(6)]
        for seq in seqs[::2]:
            seq.matcher = Allows(rng.sample(range(VOCAB), rng.choice((1, 5, 200))))
        logits = random_logits(rng, len(seqs), device)
        before = logits.clone()
        found = draw(sampler(device, made), logits, seqs)
        expected = reference.sample(logits.cpu(), seqs, EOS)
        assert all(same(mine, theirs) for mine, theirs in zip(found, expected, strict=True)) and torch.equal(logits, before)
        for seq, one in zip(seqs[::2], found[::2], strict=True):
            assert one is not None and one.token in allowed_ids(seq.matcher.mask([]), VOCAB)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("pick", PICKS)
def test_a_row_whose_form_allows_nothing_is_denied_alone(device: torch.device, pick: Callable[[], Pick]) -> None:
    rng = random.Random(3)
    seqs = [random_sequence(rng, str(i)) for i in range(3)]
    seqs[1].matcher = Allows([])
    logits = random_logits(rng, 3, device)
    found = sampler(device, pick()).draw(logits, seqs, [Seat(i) for i in range(3)])
    assert found.denied == {1}
    expected = reference.sample(logits.cpu()[[0, 2]], [seqs[0], seqs[2]], EOS)
    others = answers(found, seqs)
    assert same(others[0], expected[0]) and same(others[2], expected[1])
