"""Logits in, one token per row out: every stage works on all rows that ask for it together, and on no others.

Order, as in vLLM and Hugging Face: logit bias, repetition penalty, presence and frequency penalties, min_tokens, and the grammar, which
takes the score of what it forbids; then, for rows that are not greedy, temperature, top-k, top-p, min-p, top-a, and the draw.
Log-probabilities are those of the model's unchanged logits, or of what the token was drawn from (`LOGPROBS_MODES`).

A row's result depends only on its own logits and sequence: stages compute row by row, and the noise of a token is a function of (seed,
position, token id).

The filters never renormalise. Each is a least score that a token must reach, so tied tokens stay in together. Top-k keeps those that
tie with the k-th, and top-p is a share of the mass of all that top-k keeps. Min-p and top-a look at the distribution after temperature and
before top-k and top-p.
"""

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.masks import NOTHING, Words, allows, stacked
from baton.engine.core.protocol import NonFiniteLogits, NothingAllowed
from baton.engine.core.sampling import GOLDEN, GREEDY_BELOW, MIXERS, PROCESSED, Sampled, SamplingParams, Scored, noise_key
from baton.engine.core.sequence import Sequence

SELECTED = 256  # top-p is searched for among this many of the best; rows that need more search among more
WIDEN = 8  # times as many
NOISE_ELEMENTS = 1 << 16  # noise is made for this many tokens at a time, so that its dozen passes stay in the cache


# (scores [B, V], rows to draw from, their sequences, what each may be) → token ids: `draw_plainly`, or the same faster. A greedy row
# gets the first of the likeliest tokens, and one whose form allows nothing that is likelier than never gets -1.
Draw = Callable[[Tensor, Seq[int], Seq[Sequence], Seq[Words | None]], list[int]]


def sample(
    logits: Tensor, seqs: Seq[Sequence], eos_token_ids: frozenset[int], best: list[int] | None = None, draw: Draw | None = None
) -> list[Sampled]:
    """The next token of each sequence; `logits` is `[B, V]` float32 with a row per sequence and is not changed. `best` is what `greatest`
    finds in it, if that is known.

    A row in which bias and min_tokens leave nothing is sampled as if it had no bias, penalty or min_tokens. Raises NonFiniteLogits, and
    NothingAllowed for rows in which a grammar leaves nothing.
    """
    if not seqs:
        return []
    best = greatest(logits).tolist() if best is None else best
    if min(best) < 0:
        raise NonFiniteLogits([seq.id for seq, token in zip(seqs, best, strict=True) if token < 0])
    forms = {i: words for i, seq in enumerate(seqs) if seq.matcher is not None and (words := seq.words(eos_token_ids)) is not None}
    if empty := [seqs[i].id for i, words in forms.items() if words is NOTHING]:
        raise NothingAllowed(empty)
    if all(takes_greatest(seq.params) for seq in seqs) and all(allows(words, best[i]) for i, words in forms.items()):
        return [Sampled(token) for token in best]
    return _sample(logits, best, seqs, eos_token_ids, draw or draw_plainly, forms)


@torch.inference_mode()
def greatest(logits: Tensor) -> Tensor:
    """The first id of the greatest logit of each row, or -1 if that is not finite; NaN counts as the greatest."""
    ids = logits.argmax(dim=-1)
    return ids.where(logits.gather(1, ids[:, None])[:, 0].isfinite(), -1)


def takes_greatest(p: SamplingParams) -> bool:
    """Whether the greatest logit alone is the answer."""
    return p.temperature < GREEDY_BELOW and p.logprobs is None and not _adjusts(p)


def draws_alone(p: SamplingParams) -> bool:
    """Whether a token is drawn from the logits as they are, whatever was said before."""
    return p.temperature >= GREEDY_BELOW and not _adjusts(p)


def _adjusts(p: SamplingParams) -> bool:
    return bool(p.logit_bias or p.min_tokens or p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty)


@torch.inference_mode()
def _sample(
    logits: Tensor, best: list[int], seqs: Seq[Sequence], eos_token_ids: frozenset[int], draw: Draw, forms: Mapping[int, Words]
) -> list[Sampled]:
    scores = _adjusted(logits, seqs, eos_token_ids)
    tokens = best if scores is logits else scores.argmax(dim=-1).tolist()
    drawn = [i for i, seq in enumerate(seqs) if seq.params.temperature >= GREEDY_BELOW or (i in forms and not allows(forms[i], tokens[i]))]
    if drawn:
        found = draw(scores, drawn, [seqs[i] for i in drawn], [forms.get(i) for i in drawn])
        if dead := [seqs[i].id for i, token in zip(drawn, found, strict=True) if token < 0]:
            raise NothingAllowed(dead)
        for i, token in zip(drawn, found, strict=True):
            tokens[i] = token
    return _answers(logits, scores, seqs, tokens, forms)


def _rows(seqs: Seq[Sequence], asks: Callable[[SamplingParams], bool]) -> list[int]:
    return [i for i, seq in enumerate(seqs) if asks(seq.params)]


# --- what the request adds to the logits -------------------------------------------------------------------------------------------


def _adjusted(logits: Tensor, seqs: Seq[Sequence], eos_token_ids: frozenset[int]) -> Tensor:
    """`logits` itself if no row asks for anything."""
    biased = _rows(seqs, lambda p: bool(p.logit_bias))
    repeated = _rows(seqs, lambda p: p.repetition_penalty != 1.0)
    counted = [i for i in _rows(seqs, lambda p: p.presence_penalty != 0.0 or p.frequency_penalty != 0.0) if seqs[i].output_len]
    young = [i for i, seq in enumerate(seqs) if seq.output_len < seq.params.min_tokens and seq.matcher is None]
    if not (biased or repeated or counted or young):
        return logits
    scores = logits.clone()
    if biased:
        _add_bias(scores, biased, seqs)
    if repeated:
        _penalise_repetition(scores, repeated, seqs)
    if counted:
        _penalise_counts(scores, counted, seqs)
    if young:
        _mask_stops(scores, young, seqs, eos_token_ids)
    if not (biased or young):
        return scores
    dead = scores.amax(dim=-1, keepdim=True) == -torch.inf
    return torch.where(dead, logits, scores) if dead.any() else scores


def _add_bias(scores: Tensor, rows: list[int], seqs: Seq[Sequence]) -> None:
    entries = [(i, token, bias) for i in rows for token, bias in seqs[i].params.logit_bias.items() if 0 <= token < scores.shape[1]]
    index = _index([(i, token) for i, token, _ in entries], scores.device)
    scores[index] += torch.tensor([bias for *_, bias in entries], dtype=scores.dtype, device=scores.device)


def _penalise_repetition(scores: Tensor, rows: list[int], seqs: Seq[Sequence]) -> None:
    """Keskar et al. 2019 (CTRL), on prompt and output: positive logits divided, negative ones multiplied."""
    lists = [seqs[i].tokens for i in rows]
    index = _flat_index(rows, lists, scores)
    penalty = _column([seqs[i].params.repetition_penalty for i in rows], scores)[:, 0].repeat_interleave(_lengths(lists, scores.device))
    flat = scores.view(-1)
    seen = flat[index]  # a token seen twice is computed twice from the same logit, and written twice with the same value
    flat[index] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalise_counts(scores: Tensor, rows: list[int], seqs: Seq[Sequence]) -> None:
    """OpenAI's two penalties, on output only."""
    outputs = _flat_index(rows, [seqs[i].tokens[seqs[i].prompt_len :] for i in rows], scores)
    index, counts = torch.unique(outputs, return_counts=True)
    owner = index // scores.shape[1]
    presence = _column([seq.params.presence_penalty for seq in seqs], scores)[:, 0]
    frequency = _column([seq.params.frequency_penalty for seq in seqs], scores)[:, 0]
    scores.view(-1)[index] -= presence[owner] + frequency[owner] * counts


def _mask_stops(scores: Tensor, rows: list[int], seqs: Seq[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Masks the tokens that would end the sequence too early."""
    stops = [(i, token) for i in rows for token in _stop_ids(seqs[i].params, eos_token_ids) if 0 <= token < scores.shape[1]]
    scores[_index(stops, scores.device)] = -torch.inf


def _stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids


# --- the draw ------------------------------------------------------------------------------------------------------------------------


def draw_plainly(scores: Tensor, rows: Seq[int], seqs: Seq[Sequence], forms: Seq[Words | None]) -> list[int]:
    """Draws from softmax(scores / temperature) under the filters."""
    scores = _held_to_forms(scores[torch.tensor(rows, device=scores.device)], forms)
    best = scores.max(dim=-1)
    tokens = best.indices.where(best.values > -torch.inf, -1).tolist()
    alive = [i for i, seq in enumerate(seqs) if tokens[i] >= 0 and seq.params.temperature >= GREEDY_BELOW]
    if alive:
        for i, token in zip(alive, _drawn(scores[torch.tensor(alive, device=scores.device)], [seqs[i] for i in alive]), strict=True):
            tokens[i] = token
    return tokens


def _held_to_forms(scores: Tensor, forms: Seq[Words | None]) -> Tensor:
    """Takes the scores `[R, V]` of what the forms forbid, in place."""
    words, vocab = stacked(forms, scores.shape[1]), scores.shape[1]
    if words is not None:
        allowed = np.unpackbits(words.view(np.uint8), axis=1, count=vocab, bitorder="little")
        scores.masked_fill_(torch.from_numpy(allowed == 0).to(scores.device), -torch.inf)
    return scores


def _drawn(scores: Tensor, seqs: Seq[Sequence]) -> list[int]:
    keys = [_signed(noise_key(seq.params.seed, len(seq.tokens))) for seq in seqs]
    return argmax_with_noise(_filtered(scores, seqs), torch.tensor(keys, device=scores.device)).tolist()


def _filtered(scores: Tensor, seqs: Seq[Sequence]) -> Tensor:
    """`scores` `[R, V]`, of rows that are not greedy, by their temperature; -inf for what a filter takes away."""
    # Relative to the best token, so that no temperature overflows.
    scaled = (scores - scores.amax(dim=-1, keepdim=True)) / _column([seq.params.temperature for seq in seqs], scores)
    for least in (_least_top(scaled, seqs), _least_min_p(scaled, seqs), _least_top_a(scaled, seqs)):
        if least is not None:
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
    return scaled


def _least_min_p(scaled: Tensor, seqs: Seq[Sequence]) -> Tensor | None:
    """A token needs min_p times the best one's probability; the best one's score is 0."""
    min_p = [seq.params.min_p for seq in seqs]
    return _column(min_p, scaled).log() if any(min_p) else None


def _least_top_a(scaled: Tensor, seqs: Seq[Sequence]) -> Tensor | None:
    """A token needs top_a times the square of the best one's probability, which is 1 / Σ e^score, for the best one's score is 0."""
    top_a = [seq.params.top_a for seq in seqs]
    return _column(top_a, scaled).log() - scaled.logsumexp(dim=-1, keepdim=True) if any(top_a) else None


def _least_top(scaled: Tensor, seqs: Seq[Sequence]) -> Tensor | None:
    """Least score `[R, 1]` that top-k, and top-p of what top-k leaves, let through; -inf for a row that asks for neither."""
    vocab = scaled.shape[1]
    top_k = [seq.params.top_k if 0 < seq.params.top_k < vocab else vocab for seq in seqs]
    rows = [i for i, seq in enumerate(seqs) if top_k[i] < vocab or seq.params.top_p < 1.0]
    if not rows:
        return None
    index = torch.tensor(rows, device=scaled.device)
    k = torch.tensor([top_k[i] for i in rows], device=scaled.device)[:, None]
    top_p = torch.tensor([seqs[i].params.top_p if seqs[i].params.top_p < 1.0 else torch.inf for i in rows], device=scaled.device)[:, None]
    width = min(vocab, max(SELECTED, *(size for size in top_k if size < vocab), 0))
    chosen = scaled[index]
    found, enough = _cutoff(chosen, k, top_p, width)
    while not enough.all():
        width, short = min(vocab, width * WIDEN), (~enough).nonzero()[:, 0]
        found[short], enough[short] = _cutoff(chosen[short], k[short], top_p[short], width)
    least = scaled.new_full((len(seqs), 1), -torch.inf)
    least[index] = found
    return least


def _cutoff(scaled: Tensor, k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The least score kept `[r, 1]`, searched for among each row's `width` best, and whether these were enough to find it `[r]`.

    `top_p` is infinite for a row that does not ask for it. Sums are running sums in a fixed order, so neither the width nor the other rows
    change them.
    """
    best = scaled.topk(width).values  # descending
    weights = best.exp()
    mass = weights.double().cumsum(dim=-1)
    limited = k < scaled.shape[1]
    # Tokens that top-k keeps: k, and those that tie with the k-th.
    left = torch.where(limited, (scaled >= best.gather(1, k.clamp(max=width) - 1)).sum(dim=-1, keepdim=True), k)
    bounded = left <= width
    everything = scaled.exp().double().cumsum(dim=-1)[:, -1:] if not bounded.all() else mass[:, -1:]
    total = torch.where(bounded, mass.gather(1, left.clamp(max=width) - 1), everything)
    # A token stays while the mass before it is less than p: the one that crosses p is the last.
    kept = torch.minimum(((mass - weights) < top_p * total).sum(dim=-1, keepdim=True).clamp_(min=1), left)
    enough = torch.where(limited, top_p.isinf(), mass[:, -1:] >= top_p * total)
    return best.gather(1, kept - 1), (bounded | enough)[:, 0]


def argmax_with_noise(scaled: Tensor, keys: Tensor) -> Tensor:
    """Draws one id per row from softmax(scaled); scaled is `[R, V]`, at most 0; keys `[R]`, the bits of `noise_key` as int64.

    The Gumbel-max trick: argmax of s + g with g = -log(-log u) is argmax of exp(s) / e with e = -log u. `u` is the top 53 bits of
    mix64(key + (id + 1) · golden ratio), SplitMix64's own sequence, so that a stream that began elsewhere draws the same.
    """
    vocab = scaled.shape[1]
    steps = _golden_steps(vocab, scaled.device)
    drawn, count = [], max(1, NOISE_ELEMENTS // vocab)
    for first in range(0, len(keys), count):
        bits = _mix64_(keys[first : first + count, None] + steps)
        e = _shift_right(bits, 11).double().mul_(2.0**-53).log_().neg_()  # u = 0 makes e infinite, so that token cannot win
        drawn.append((scaled[first : first + count].double().exp_() / e).argmax(dim=-1))
    return torch.cat(drawn)


@lru_cache(maxsize=4)
def _golden_steps(vocab: int, device: torch.device) -> Tensor:
    """(id + 1) · GOLDEN modulo 2^64, int64 `[V]`."""
    return torch.arange(1, vocab + 1, dtype=torch.int64, device=device) * _signed(GOLDEN)


def _mix64_(x: Tensor) -> Tensor:
    """`baton.engine.core.sampling.mix64` in place: int64 multiplication wraps like uint64's."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_signed(MIXERS[0]))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_signed(MIXERS[1]))
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts as if the numbers were unsigned."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of the uint64 `x`."""
    return x - (1 << 64) if x >> 63 else x


# --- the answer ----------------------------------------------------------------------------------------------------------------------


def _answers(logits: Tensor, scores: Tensor, seqs: Seq[Sequence], tokens: list[int], forms: Mapping[int, Words]) -> list[Sampled]:
    answers = [Sampled(token) for token in tokens]
    asked = _rows(seqs, lambda p: p.logprobs is not None)
    if not asked:
        return answers
    told = logits[torch.tensor(asked, device=logits.device)]  # [r, V]
    for at, i in enumerate(asked):
        if seqs[i].params.logprobs_mode == PROCESSED:
            told[at] = _processed(scores[i : i + 1].clone(), seqs[i], forms.get(i))[0]
    logprobs = told.log_softmax(dim=-1)
    for i, row in zip(asked, logprobs, strict=True):
        answers[i] = Sampled(tokens[i], float(row[tokens[i]]), _best(row, seqs[i].params.logprobs or 0))
    return answers


@torch.inference_mode()
def score(logits: Tensor, tokens: Seq[int], count: int) -> list[Scored]:
    """What the logits `[R, V]` before each of `tokens` said of it, and of the `count` best. They may be changed."""
    logprobs = logits.log_softmax(dim=-1)
    said = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > said).sum(dim=-1).tolist()
    found = zip(tokens, said[:, 0].tolist(), ranks, logprobs, strict=True)
    return [Scored(token, logprob, _best(row, count), above + 1) for token, logprob, above, row in found]


def _processed(scores: Tensor, seq: Sequence, form: Words | None) -> Tensor:
    """What the token of a row was drawn from, `[1, V]`. `scores` may be changed."""
    scores = _held_to_forms(scores, [form])
    return scores if seq.params.temperature < GREEDY_BELOW else _filtered(scores, [seq])


def _best(logprobs: Tensor, n: int) -> tuple[tuple[int, float], ...]:
    """The n best of `[V]`, by (log-probability descending, id ascending): ties at the end are cut by id, not by chance. No token that
    cannot be drawn is among them."""
    if n == 0:
        return ()
    least = logprobs.topk(min(n, len(logprobs))).values[-1]
    ids = ((logprobs >= least) & (logprobs > -torch.inf)).nonzero()[:, 0]  # ascending
    best = sorted(zip(logprobs[ids].tolist(), ids.tolist(), strict=True), key=lambda pair: -pair[0])
    return tuple((token, logprob) for logprob, token in best[:n])


# --- index tensors -------------------------------------------------------------------------------------------------------------------


def _column(values: Seq[float], like: Tensor) -> Tensor:
    """`[R, 1]`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _index(pairs: Seq[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(row, token) pairs as an index of two tensors."""
    rows, tokens = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2).unbind(dim=1)
    return rows, tokens


def _lengths(lists: Seq[Seq[int]], device: torch.device) -> Tensor:
    return torch.tensor([len(tokens) for tokens in lists], device=device)


def _flat_index(rows: list[int], lists: Seq[Seq[int]], scores: Tensor) -> Tensor:
    """Every token of every list in the row its list belongs to, as an index into the flattened `scores`."""
    tokens = torch.frombuffer(array("q", chain.from_iterable(lists)), dtype=torch.int64).to(scores.device)
    starts = torch.tensor(rows, device=scores.device) * scores.shape[1]
    return starts.repeat_interleave(_lengths(lists, scores.device)).add_(tokens)
