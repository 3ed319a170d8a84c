"""The vectorised sampler against a plain one that handles one row in numpy, and the properties that a comparison alone would not show."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from baton.engine.core.masks import Words, allows
from baton.engine.core.protocol import NonFiniteLogits, NothingAllowed
from baton.engine.core.sampling import SamplingParams, mix64, noise_key
from baton.engine.core.sequence import Sequence
from baton.engine.cpu.draw import draw as compiled_draw
from baton.engine.model.sampler import draw_plainly as plain_draw
from baton.engine.model.sampler import sample

VOCAB = 97
EOS = frozenset({3, 4})
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
Row = npt.NDArray[np.float64]


@pytest.fixture(params=["plain", "compiled"], autouse=True)
def draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both draws keep every promise."""
    if request.param == "compiled":
        monkeypatch.setattr("baton.engine.model.sampler.draw_plainly", compiled_draw)


def sequence(params: SamplingParams, tokens: list[int] | None = None, prompt_len: int = 5) -> Sequence:
    return Sequence("s", [7, 8, 9, 10, 11] if tokens is None else tokens, prompt_len, params, root=b"")


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.4 else off

    return SamplingParams(
        max_tokens=100,
        min_tokens=maybe(rng.randint(0, 8), 0),
        temperature=rng.choice((0.0, 0.3, 1.0, 1.7)),
        top_k=maybe(rng.randint(1, 2 * VOCAB), 0),
        top_p=maybe(rng.uniform(0.05, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.5), 0.0),
        top_a=maybe(rng.uniform(0, 1), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        seed=rng.getrandbits(64),
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(5)}, {}),
        logprobs=maybe(rng.randint(0, 5), None),
        stop_token_ids=maybe(frozenset({rng.randrange(VOCAB)}), frozenset()),
        ignore_eos=rng.random() < 0.3,
    )


# --- one row, one line per rule ---------------------------------------------------------------------------------------------------


def plain_scores(logits: Row, seq: Sequence) -> Row:
    p, scores = seq.params, logits.copy()
    for token, bias in p.logit_bias.items():
        scores[token] += bias
    for token in set(seq.tokens):
        scores[token] *= 1 / p.repetition_penalty if scores[token] > 0 else p.repetition_penalty
    for token, count in Counter(seq.tokens[seq.prompt_len :]).items():
        scores[token] -= p.presence_penalty + count * p.frequency_penalty
    if len(seq.tokens) - seq.prompt_len < p.min_tokens:
        scores[list(p.stop_token_ids | (frozenset() if p.ignore_eos else EOS))] = -math.inf
    return scores


def plain_filter(scaled: Row, p: SamplingParams) -> list[int]:
    """Ids that may be drawn. Each filter is a minimum score, so ids that tie with the last one kept are kept too."""
    left = list(range(len(scaled)))
    if 0 < p.top_k < len(left):
        left = at_least(scaled, left, sorted(scaled, reverse=True)[p.top_k - 1])
    probs, mass = np.exp(scaled - scaled.max()), 0.0
    best = probs.max() / probs.sum()
    surest = [i for i in range(len(scaled)) if probs[i] / probs.sum() >= p.top_a * best**2]
    probs /= probs[left].sum()
    for token in sorted(left, key=lambda i: -scaled[i]):
        mass += probs[token]
        if p.top_p < 1 and mass >= p.top_p:
            left = at_least(scaled, left, scaled[token])
            break
    return [i for i in left if probs[i] >= p.min_p * probs.max() and i in surest]


def at_least(scaled: Row, ids: list[int], least: float) -> list[int]:
    return [i for i in ids if scaled[i] >= least]


def plain_gumbel(seed: int, position: int, token: int) -> float:
    bits = mix64(noise_key(seed, position) + (token + 1) * 0x9E3779B97F4A7C15) >> 11
    return -math.log(-math.log(bits / 2**53))


def plain_sample(logits: Row, seq: Sequence) -> int:
    scores = plain_scores(logits, seq)
    if seq.params.temperature == 0:
        return int(scores.argmax())
    scaled = scores / seq.params.temperature
    return max(plain_filter(scaled, seq.params), key=lambda i: scaled[i] + plain_gumbel(seq.params.seed, len(seq.tokens), i))


def random_sequences(count: int, seed: int) -> list[Sequence]:
    rng = random.Random(seed)
    lengths = [rng.randint(5, 30) for _ in range(count)]
    return [sequence(random_params(rng), [rng.randrange(VOCAB) for _ in range(length)], rng.randint(1, 5)) for length in lengths]


@pytest.mark.parametrize("seed", range(10))
def test_samples_match_the_plain_sampler(seed: int) -> None:
    seqs, logits = random_sequences(50, seed), random_logits(50, seed)
    expected = [plain_sample(row.double().numpy(), seq) for row, seq in zip(logits, seqs, strict=True)]
    assert [answer.token for answer in sample(logits, seqs, EOS)] == expected


def test_sampling_does_not_change_the_logits() -> None:
    logits = random_logits(20, seed=1)
    before = logits.clone()
    sample(logits, random_sequences(20, seed=1), EOS)
    assert torch.equal(logits, before)


# --- each row is independent --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [VOCAB, 2048, 50001])
def test_a_row_does_not_depend_on_the_batch(vocab: int) -> None:
    seqs = random_sequences(12, seed=3)
    logits = random_logits(12, seed=3, vocab=vocab)
    together = sample(logits, seqs, EOS)
    backwards = sample(logits.flip(0), seqs[::-1], EOS)[::-1]
    alone = [sample(row[None], [seq], EOS)[0] for row, seq in zip(logits, seqs, strict=True)]
    assert together == alone == backwards  # tokens and, bit for bit, log-probabilities


def test_noise_is_a_function_of_seed_and_position_only() -> None:
    logits, params = torch.zeros(1, VOCAB), SamplingParams(max_tokens=9, seed=5)

    def token(params: SamplingParams, tokens: list[int], prompt_len: int = 1) -> int:
        return sample(logits, [sequence(params, tokens, prompt_len)], EOS)[0].token

    at_position_4 = token(params, [1, 2, 3, 4])
    assert token(params, [9, 9, 9, 9], prompt_len=4) == at_position_4
    others = [token(params, [1, 2, 3]), token(replace(params, seed=6), [1, 2, 3, 4]), token(params, [1, 2, 3, 4, 5])]
    assert others != [at_position_4] * 3


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 2,000 draws that differ only in position, and over 20,000 that differ only in seed. 30 degrees of freedom: p = 0.001
    at 59.7."""
    logits = random_logits(1, seed=8, vocab=31) / 3
    expected = logits[0].double().softmax(0).numpy() * 20000
    by_position = [sequence(SamplingParams(max_tokens=1, seed=1), [0] * (1 + i)) for i in range(2000)]
    by_seed = [sequence(SamplingParams(max_tokens=1, seed=i)) for i in range(20000)]
    few = expected / 10
    for seqs, mean in ((by_position, few), (by_seed, expected)):
        tokens = [answer.token for answer in sample(logits.expand(len(seqs), -1), seqs, EOS)]
        counts = np.bincount(tokens, minlength=31)
        assert ((counts - mean) ** 2 / mean).sum() < 59.7


# --- single rules -------------------------------------------------------------------------------------------------------------------


def drawn(params: SamplingParams, logits: Tensor, tries: int = 400) -> set[int]:
    seqs = [sequence(replace(params, seed=i)) for i in range(tries)]
    return {answer.token for answer in sample(logits.expand(tries, -1), seqs, EOS)}


RAMP = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log()


@pytest.mark.parametrize(
    ("params", "left"),
    [
        (SamplingParams(max_tokens=1), {0, 1, 2, 3, 4}),
        (SamplingParams(max_tokens=1, top_k=2), {0, 1}),
        (SamplingParams(max_tokens=1, top_k=4), {0, 1, 2, 3, 4}),  # ties stay together
        (SamplingParams(max_tokens=1, top_p=0.5), {0}),
        (SamplingParams(max_tokens=1, top_p=0.51), {0, 1}),
        (SamplingParams(max_tokens=1, top_p=1e-9), {0}),
        (SamplingParams(max_tokens=1, top_k=2, top_p=0.66), {0}),  # top_p counts what top_k left: 0.5 of 0.75
        (SamplingParams(max_tokens=1, min_p=0.3), {0, 1}),
        (SamplingParams(max_tokens=1, min_p=1.0), {0}),
        (SamplingParams(max_tokens=1, top_a=0.3), {0, 1, 2}),  # at least 0.3 · 0.5² = 0.075
        (SamplingParams(max_tokens=1, top_a=0.25), {0, 1, 2, 3, 4}),  # at least 0.0625: equal is enough
        (SamplingParams(max_tokens=1, top_a=1.0), {0, 1}),
        (SamplingParams(max_tokens=1, top_a=0.3, top_k=2), {0, 1}),
        (SamplingParams(max_tokens=1, temperature=0.5, top_a=0.3), {0, 1}),  # best is 0.74, so at least 0.17: 0.19 is kept, 0.05 is not
        (SamplingParams(max_tokens=1, temperature=0.5, min_p=0.3), {0}),  # temperature comes first
        (SamplingParams(max_tokens=1, temperature=1e-30), {0}),
        (SamplingParams(max_tokens=1, temperature=0.0), {0}),
    ],
)
def test_each_filter_keeps_the_right_tokens(params: SamplingParams, left: set[int]) -> None:
    assert drawn(params, RAMP) == left


TIES = torch.tensor([[2.0] * 4 + [1.0] * 6 + [-30.0] * 20])


@pytest.mark.parametrize(
    ("params", "left"),
    [
        (SamplingParams(max_tokens=1, top_k=5), 10),
        # Top-p counts the mass of everything that top-k kept, ties included: the first four of the ten tokens have 0.64 of it.
        (SamplingParams(max_tokens=1, top_k=5, top_p=0.9), 10),
        (SamplingParams(max_tokens=1, top_k=5, top_p=0.6), 4),
        (SamplingParams(max_tokens=1, top_k=3, top_p=0.9), 4),
        (SamplingParams(max_tokens=1, top_p=0.9), 10),
    ],
)
@pytest.mark.parametrize("selected", [1, 5, 9, 256])
def test_filters_keep_tied_tokens_together(monkeypatch: pytest.MonkeyPatch, selected: int, params: SamplingParams, left: int) -> None:
    """Ties are common in bfloat16. `selected` 5 and 9: the ties with the fifth extend beyond what is sorted first."""
    monkeypatch.setattr("baton.engine.model.sampler.SELECTED", selected)
    assert drawn(params, TIES, 600) == set(range(left)) == set(plain_filter(TIES[0].double().numpy(), params))


@pytest.mark.parametrize("seed", range(4))
def test_samples_match_the_plain_sampler_on_scores_that_tie(seed: int) -> None:
    seqs, logits = random_sequences(50, seed), (random_logits(50, seed) / 3).round()
    expected = [plain_sample(row.double().numpy(), seq) for row, seq in zip(logits, seqs, strict=True)]
    found = [answer.token for answer in sample(logits, seqs, EOS)]
    assert found == expected


@pytest.mark.parametrize("vocab", [1, 2, 1023, 1024, 5000, 50257])
def test_both_draws_give_the_same_tokens(vocab: int) -> None:
    seqs, logits = random_sequences(60, seed=vocab), random_logits(60, seed=vocab, vocab=vocab)
    for i, seq in enumerate(seqs):
        temperature = (0.01, 0.7, 1.0, 2.0, 100.0)[i % 5]
        seq.params = replace(seq.params, temperature=temperature, top_k=seq.params.top_k * vocab // VOCAB)
    logits[20:40] = logits[20:40].bfloat16().float()  # with ties
    logits[40:, 1:] = logits[40:, 1:].masked_fill(logits[40:, 1:] < -1, -torch.inf)
    rows = [i for i in range(60) if i % 7]
    drawn = [seqs[i] for i in rows]
    free: list[Words | None] = [None] * len(rows)
    assert compiled_draw(logits, rows, drawn, free) == plain_draw(logits, rows, drawn, free)
    rng = np.random.default_rng(vocab)
    forms = [None if i % 5 == 0 else packed(rng.random(vocab) < (0.9, 0.1, 2 / vocab, 0.0)[i % 4]) for i in rows]
    for seq in drawn[::3]:
        seq.params = replace(seq.params, temperature=0.0)
    found = compiled_draw(logits, rows, drawn, forms)
    assert found == plain_draw(logits, rows, drawn, forms)
    for token, words in zip(found, forms, strict=True):
        assert words is None or (allows(words, token) if token >= 0 else not words.any())


def packed(allowed: "np.ndarray[Any, np.dtype[np.bool_]]") -> Words:
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


@pytest.mark.parametrize("selected", [1, 10, VOCAB])
def test_filters_do_not_depend_on_how_many_are_sorted(monkeypatch: pytest.MonkeyPatch, selected: int) -> None:
    seqs, logits = random_sequences(200, seed=4), random_logits(200, seed=4)
    for seq in seqs:  # a large top_k in one row makes every row sort that many
        seq.params = replace(seq.params, top_k=seq.params.top_k % 3, temperature=1.5)
    before = sample(logits, seqs, EOS)
    monkeypatch.setattr("baton.engine.model.sampler.SELECTED", selected)
    assert sample(logits, seqs, EOS) == before
    assert [answer.token for answer in before] == [plain_sample(row.double().numpy(), seq) for row, seq in zip(logits, seqs, strict=True)]


def test_greedy_takes_the_first_of_equal_scores() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 40:] = 1
    assert [answer.token for answer in sample(logits, [sequence(GREEDY)] * 2, EOS)] == [0, 40]


def test_only_the_repetition_penalty_counts_the_prompt() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 20], logits[0, 21], logits[0, 22] = 3.0, 2.0, 1.0

    def token(tokens: list[int], **penalty: Any) -> int:
        return sample(logits, [sequence(replace(GREEDY, **penalty), tokens, 2)], EOS)[0].token

    assert token([20, 20], presence_penalty=2.0, frequency_penalty=2.0) == 20
    assert token([20, 20, 20], presence_penalty=1.5) == 21
    assert token([20, 20, 20, 20, 21], frequency_penalty=1.2) == 22  # 3 - 2.4, 2 - 1.2, 1
    assert token([20, 1], repetition_penalty=2.0) == 21
    assert token([20, 20], repetition_penalty=1.2) == 20  # seen twice, penalised once


def test_min_tokens_masks_tokens_that_would_end_the_sequence() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 50], logits[0, 60] = 9.0, 8.0, 7.0, 6.0
    params = replace(GREEDY, min_tokens=2, stop_token_ids=frozenset({50}))

    def token(params: SamplingParams, outputs: int) -> int:
        return sample(logits, [sequence(params, [1] * (5 + outputs))], EOS)[0].token

    assert [token(params, outputs) for outputs in (0, 1, 2)] == [60, 60, 3]
    assert token(replace(params, ignore_eos=True), 0) == 3  # EOS does not end it


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_are_ignored_when_everything_is_masked(temperature: float) -> None:
    logits = random_logits(1, seed=2, vocab=5)
    params = SamplingParams(max_tokens=9, min_tokens=3, temperature=temperature, stop_token_ids=frozenset({0, 1, 2, 90}), logprobs=2)
    free = replace(params, min_tokens=0)
    assert sample(logits, [sequence(params)], EOS) == sample(logits, [sequence(free)], EOS)


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    logits = random_logits(1, seed=2)
    params = replace(GREEDY, min_tokens=9, logit_bias={VOCAB: 99.0, -1: 99.0}, stop_token_ids=frozenset({VOCAB + 5}), ignore_eos=True)
    assert sample(logits, [sequence(params)], EOS)[0].token == int(logits.argmax())


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(2, seed=6)
    params = SamplingParams(max_tokens=9, temperature=0.7, logprobs=4, logit_bias={5: 50.0}, repetition_penalty=1.5)
    asked, silent = sample(logits, [sequence(params), sequence(GREEDY)], EOS)
    expected = logits[0].log_softmax(0)
    assert asked.token == 5
    assert asked.logprob == float(expected[5])
    values, ids = expected.topk(4)
    assert asked.top == tuple(zip(ids.tolist(), values.tolist(), strict=True))
    assert (silent.logprob, silent.top) == (None, ())


@pytest.mark.parametrize("seed", range(3))
def test_processed_logprobs_are_of_what_the_token_was_drawn_from(seed: int) -> None:
    rng, logits = random.Random(seed), random_logits(40, seed)
    seqs = random_sequences(40, seed)
    for seq in seqs:
        seq.params = replace(seq.params, logprobs=rng.choice((0, 3, VOCAB)), logprobs_mode="processed_logprobs")
    for row, seq, answer in zip(logits, seqs, sample(logits, seqs, EOS), strict=True):
        scores = plain_scores(row.double().numpy(), seq)
        if seq.params.temperature:
            scores /= seq.params.temperature
            left = plain_filter(scores, seq.params)
            scores[[i for i in range(VOCAB) if i not in left]] = -math.inf
        expected = scores - np.logaddexp.reduce(scores)
        assert answer.logprob == pytest.approx(expected[answer.token], abs=1e-4)
        possible = [i for i in np.argsort(-expected, kind="stable") if expected[i] > -math.inf]
        assert [id_ for id_, _ in answer.top] == possible[: seq.params.logprobs]
        assert [logprob for _, logprob in answer.top] == pytest.approx([expected[i] for i in possible[: seq.params.logprobs]], abs=1e-4)


def test_processed_logprobs_are_of_what_a_form_allows() -> None:
    logits = random_logits(1, seed=4)
    seq = sequence(replace(GREEDY, logprobs=9, logprobs_mode="processed_logprobs"))
    seq.matcher = Allows([1, 3, 5])
    (answer,) = sample(logits, [seq], frozenset())
    assert {id_ for id_, _ in answer.top} == {1, 3, 5} and sum(math.exp(logprob) for _, logprob in answer.top) == pytest.approx(1)


def test_top_logprobs_break_ties_by_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 30] = 1.0
    (answer,) = sample(logits, [sequence(replace(GREEDY, logprobs=4))], EOS)
    assert [token for token, _ in answer.top] == [30, 0, 1, 2]
    (chosen_only,) = sample(logits, [sequence(replace(GREEDY, logprobs=0))], EOS)
    assert chosen_only.logprob is not None
    assert chosen_only.top == ()


@pytest.mark.parametrize(
    "break_row", [lambda row: row.fill_(math.nan), lambda row: row[5:6].fill_(math.nan), lambda row: row.fill_(-math.inf)]
)
def test_non_finite_logits_raise_an_error_that_names_the_sequence(break_row: Callable[[Tensor], Tensor]) -> None:
    logits = random_logits(3, seed=1)
    break_row(logits[1])
    seqs = [sequence(GREEDY) for _ in range(3)]
    seqs[1].id = "broken"
    with pytest.raises(NonFiniteLogits) as caught:
        sample(logits, seqs, EOS)
    assert caught.value.sequence_ids == ["broken"]


def test_an_empty_batch_gives_no_answers() -> None:
    assert sample(torch.empty(0, VOCAB), [], EOS) == []


class Allows:
    """A form whose next tokens are these."""

    failure = ""

    def __init__(self, tokens: list[int]) -> None:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[tokens] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self, output: Any) -> Any:
        return self._words


@pytest.mark.parametrize("seed", range(20))
def test_a_form_is_the_same_as_a_vocabulary_without_the_others(seed: int) -> None:
    """With every other parameter: what is forbidden counts as a bias of minus infinity, added last. Rows beside it do not notice."""
    rng = random.Random(seed)
    seqs, logits = random_sequences(8, seed), random_logits(8, seed)
    forms = {i: sorted(rng.sample(range(VOCAB), rng.choice((1, 3, 60)))) for i in range(0, 8, 2)}
    for i, tokens in forms.items():
        seqs[i].matcher = Allows(tokens)
    found = sample(logits, seqs, EOS)
    for i, seq in enumerate(seqs):
        if i not in forms:
            assert found[i].token == plain_sample(logits[i].double().numpy(), seq)
            continue
        early = EOS | seq.params.stop_token_ids if seq.output_len < seq.params.min_tokens else EOS if seq.params.ignore_eos else set()
        left = [token for token in forms[i] if token not in early] or forms[i]
        bias = {token: -np.inf if token not in left else 0.0 for token in range(VOCAB)}
        bias = {token: value + seq.params.logit_bias.get(token, 0.0) for token, value in bias.items()}
        free = Sequence(seq.id, seq.tokens, seq.prompt_len, replace(seq.params, logit_bias=bias, min_tokens=0), b"")
        assert found[i].token == sample(logits[i : i + 1], [free], frozenset())[0].token and found[i].token in left


def test_a_form_that_allows_nothing_is_never_ignored() -> None:
    for tokens, bias in (([], {}), ([5, 6], {5: -math.inf, 6: -math.inf})):
        for temperature in (0.0, 1.0):
            seqs = [sequence(SamplingParams(9, temperature=temperature, logit_bias=bias)) for _ in range(2)]
            seqs[1].id, seqs[1].matcher = "held", Allows(tokens)
            with pytest.raises(NothingAllowed) as caught:
                sample(random_logits(2, 1), seqs, EOS)
            assert caught.value.sequence_ids == ["held"]


def test_a_greedy_row_whose_best_token_is_allowed_is_not_drawn() -> None:
    def never(*arguments: Any) -> Any:
        raise AssertionError("nothing has to be drawn")

    logits = random_logits(1, 5)
    seq = sequence(GREEDY)
    seq.matcher = Allows([int(logits.argmax()), 2])
    assert sample(logits, [seq], EOS, draw=never)[0].token == int(logits.argmax())
