"""`baton.engine.model.sampler` for a device, without waiting for it: what a row asks for is known on the host, and everything that depends
on logits stays on the device. The answer is read when it is needed.

Order, filters and noise are the same, so the tokens are the same, up to the last bit of a logarithm. Penalties need the tokens so far, the
last of which the host may not know yet: they are counted on the device, in the sequence's seat, as they are sampled.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.masks import NOTHING, WORD
from baton.engine.core.sampling import GREEDY_BELOW, PROCESSED, Sampled, SamplingParams, noise_key
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.device import upload
from baton.engine.gpu.inputs import Seat
from baton.engine.gpu.overlap import UNKNOWN
from baton.engine.model.sampler import argmax_with_noise

_ID_BITS = 32
ALIGNED = 16  # numbers


@dataclass(frozen=True, slots=True)
class Draw:
    """What `Sampler.draw` found, all on the device."""

    tokens: Tensor  # [R] int64
    finite: Tensor  # [R] bool
    asked: list[int]  # rows that want log-probabilities
    denied: frozenset[int]  # rows for which a grammar allows no token
    logprobs: Tensor | None  # [r, 1 + n] float32: of the token, then the n best
    ids: Tensor | None  # [r, n] int64


@dataclass(frozen=True, slots=True)
class Filters:
    """What the rows of one draw ask for, `[R]` each, on the device."""

    temperature: Tensor  # float32, 1 where greedy
    top_k: Tensor  # int64, at least V for none
    top_p: Tensor  # float64 of a float32, more than 1 for none
    floor: Tensor  # float32, the least scaled score that min-p and top-a let through, -inf for none
    greedy: Tensor  # bool
    keys: Tensor  # int64
    any_top: bool


# (scores [R, V], the best of each [R], filters) → token ids [R]
Pick = Callable[[Tensor, Tensor, Filters], Tensor]


class Sampler:
    def __init__(self, eos_token_ids: frozenset[int], seats: int, device: torch.device, pick: Pick) -> None:
        self._eos = eos_token_ids
        self._device = device
        self._pick = pick
        self._histories: dict[bool, TokenCounts] = {}
        self._seats = seats

    def draw(self, logits: Tensor, seqs: Seq[Sequence], seated: Seq[Seat], guessed: bool = False) -> Draw:
        """The next token of each sequence; logits `[R, V]` float32, not changed. The host may not know a sequence's last token.

        `guessed`: `seqs` may be several versions of one sequence, whose tokens the host knows. `seated` then numbers the rows, and nothing
        that is kept for a seat changes.
        """
        best = logits.amax(dim=-1)
        finite = best.isfinite()
        penalised = _rows(seqs, _penalises)
        history = self._remembered(logits.shape[1], len(seqs), guessed) if penalised else None
        scores = self._adjusted(logits, seqs, seated, penalised, history)
        scores, denied = self._held_to_forms(scores, logits, seqs)
        if scores is not logits:
            best = scores.amax(dim=-1)
        if all(seq.params.temperature < GREEDY_BELOW for seq in seqs):
            tokens = scores.argmax(dim=-1)
        else:
            tokens = self._pick(scores, best, self._filters(seqs, scores, best))
        if history is not None:
            history.note([seqs[i] for i in penalised], [seated[i] for i in penalised], tokens[self._index(penalised)])
        asked = _rows(seqs, lambda p: p.logprobs is not None)
        if not asked:
            return Draw(tokens, finite, asked, denied, None, None)
        told = logits
        if processed := _rows(seqs, lambda p: p.logprobs is not None and p.logprobs_mode == PROCESSED):
            rows = self._index(processed)
            told = logits.index_copy(0, rows, filtered(scores, best, self._filters(seqs, scores, best))[rows])
        return Draw(tokens, finite, asked, denied, *self._logprobs(told, tokens, asked, max(seqs[i].params.logprobs or 0 for i in asked)))

    def _index(self, values: Seq[int]) -> Tensor:
        return upload(np.array(values, dtype=np.int64), self._device)

    def _remembered(self, vocab: int, rows: int, guessed: bool) -> "TokenCounts":
        """Made when the first row asks for penalties, because it is large."""
        seats, history = max(rows, self._seats), self._histories.get(guessed)
        if history is None or history.seats < seats:
            history = self._histories[guessed] = TokenCounts(seats, vocab, self._device)
        return history

    def _adjusted(
        self, logits: Tensor, seqs: Seq[Sequence], seated: Seq[Seat], penalised: list[int], history: "TokenCounts | None"
    ) -> Tensor:
        """Bias, penalties, min_tokens; `logits` itself if no row asks for anything."""
        vocab = logits.shape[1]
        bias = [
            (i, t, b) for i in _rows(seqs, lambda p: bool(p.logit_bias)) for t, b in seqs[i].params.logit_bias.items() if 0 <= t < vocab
        ]
        stops = [
            (i, token)
            for i, seq in enumerate(seqs)
            if seq.output_len < seq.params.min_tokens and seq.matcher is None
            for token in (seq.params.stop_token_ids if seq.params.ignore_eos else seq.params.stop_token_ids | self._eos)
            if 0 <= token < vocab
        ]
        if not (bias or penalised or stops):
            return logits
        scores = logits.clone()
        flat = scores.view(-1)
        if bias:
            added = upload(np.array([b for *_, b in bias], dtype=np.float32), self._device)
            flat.index_add_(0, self._index([i * vocab + t for i, t, _ in bias]), added)
        if history is not None:
            history.refresh([seqs[i] for i in penalised], [seated[i] for i in penalised])
            rows = self._index(penalised)
            changed = history.penalise(scores[rows], [seqs[i].params for i in penalised], [seated[i] for i in penalised])
            scores.index_copy_(0, rows, changed)
        if stops:
            flat.index_fill_(0, self._index([i * vocab + token for i, token in stops]), -torch.inf)
        if bias or stops:
            dead = scores.amax(dim=-1, keepdim=True) == -torch.inf
            scores = torch.where(dead, logits, scores)
        return scores

    def _held_to_forms(self, scores: Tensor, logits: Tensor, seqs: Seq[Sequence]) -> tuple[Tensor, frozenset[int]]:
        """What a grammar forbids has no score; the masks are made while the device computes, and travel packed. And the rows for which
        nothing is allowed, whose scores do not change."""
        forms = {i: words for i, seq in enumerate(seqs) if seq.matcher is not None and (words := seq.words(self._eos)) is not None}
        denied = frozenset(i for i, words in forms.items() if words is NOTHING)
        if not (rows := [i for i in forms if i not in denied]):
            return scores, denied
        packed = upload(np.stack([forms[i] for i in rows]), self._device)  # [r, ceil(V / 32)] int32
        bits = torch.arange(WORD, dtype=torch.int32, device=self._device)
        allowed = ((packed[:, :, None] >> bits) & 1).view(len(rows), -1)[:, : scores.shape[1]].bool()
        at = self._index(rows)
        scores = scores.clone() if scores is logits else scores
        return scores.index_copy_(0, at, scores[at].masked_fill_(~allowed, -torch.inf)), denied

    def _filters(self, seqs: Seq[Sequence], scores: Tensor, best: Tensor) -> Filters:
        params, vocab = [seq.params for seq in seqs], scores.shape[1]
        # Rows of an aligned length: Triton compiles a kernel again for a pointer with another alignment.
        facts = np.ones((6, -(-len(params) // ALIGNED) * ALIGNED))
        for i, p in enumerate(params):
            cold = p.temperature < GREEDY_BELOW
            facts[:, i] = (1.0, vocab, 2.0, 0.0, 1.0, 0.0) if cold else (p.temperature, p.top_k or vocab, p.top_p, p.min_p, 0.0, p.top_a)
        facts[1] = np.where((facts[1] > 0) & (facts[1] < vocab), facts[1], vocab)
        facts[2] = np.where(facts[2] < 1, facts[2], 2.0)
        keys = np.array([noise_key(p.seed, len(seq.tokens)) for p, seq in zip(params, seqs, strict=True)], dtype=np.uint64)
        sent = upload(facts, self._device)[:, : len(params)]
        narrow = upload(facts.astype(np.float32), self._device)[:, : len(params)]
        any_top = bool(((facts[1] < vocab) | (facts[2] < 1))[: len(params)].any())
        noise = upload(keys.view(np.int64), self._device)
        floor = narrow[3].log()
        if facts[5, : len(params)].any():
            scaled = (scores - best[:, None]) / narrow[0][:, None]
            floor = torch.maximum(floor, narrow[5].log() - scaled.logsumexp(dim=-1))  # see `baton.engine.model.sampler`
        return Filters(narrow[0], sent[1].long(), narrow[2].double(), floor, sent[4] > 0, noise, any_top)

    def _logprobs(self, logits: Tensor, tokens: Tensor, asked: list[int], n: int) -> tuple[Tensor, Tensor]:
        """Logarithms of the probabilities `[r, 1 + n]`, and ids `[r, n]`, by (log-probability descending, id ascending)."""
        rows = self._index(asked)
        logprobs = logits[rows].log_softmax(dim=-1)  # [r, V]
        chosen = logprobs.gather(1, tokens[rows][:, None])
        # Both in one integer, so that the id decides between equals: float32's bits, made to order as integers, above the id's complement.
        bits = logprobs.view(torch.int32)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << _ID_BITS
        last = logprobs.shape[1] - 1
        order = ordered | (last - torch.arange(last + 1, device=logits.device))
        ids = last - (order.topk(min(n, last + 1)).values & ((1 << _ID_BITS) - 1))
        return torch.cat((chosen, logprobs.gather(1, ids)), dim=1), ids


class TokenCounts:
    """Which tokens each penalised sequence contains, and how often, by seat: `[seats, V]`."""

    def __init__(self, seats: int, vocab: int, device: torch.device) -> None:
        self.seats = seats
        self._device = device
        self._in_prompt = torch.zeros(seats, vocab, dtype=torch.bool, device=device)
        self._in_output = torch.zeros(seats, vocab, dtype=torch.int32, device=device)
        self._noted: list[tuple[Sequence | None, int]] = [(None, 0)] * seats  # whose tokens, and how many

    def refresh(self, seqs: Seq[Sequence], seated: Seq[Seat]) -> None:
        """Counts anew for sequences that took a seat, or whose last token was taken back."""
        for seq, seat in zip(seqs, seated, strict=True):
            if self._noted[seat.index] == (seq, len(seq.tokens)):
                continue
            assert seq.tokens[-1] != UNKNOWN, "a sequence with an unknown token was in the step before, in this seat"
            tokens = upload(np.array(seq.tokens), self._device)
            self._in_prompt[seat.index].zero_().index_fill_(0, tokens[: seq.prompt_len], True)
            outputs = tokens[seq.prompt_len :]
            self._in_output[seat.index].zero_().index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
            self._noted[seat.index] = (seq, len(seq.tokens))

    def note(self, seqs: Seq[Sequence], seated: Seq[Seat], tokens: Tensor) -> None:
        """Counts the tokens `[r]` that they have sampled."""
        places = upload(np.array([seat.index for seat in seated]), self._device) * self._in_output.shape[1] + tokens
        self._in_output.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        for seq, seat in zip(seqs, seated, strict=True):
            self._noted[seat.index] = (seq, len(seq.tokens) + 1)

    def penalise(self, scores: Tensor, params: Seq[SamplingParams], seated: Seq[Seat]) -> Tensor:
        """scores `[r, V]` of the sequences in these seats, under their penalties; see `baton.engine.model.sampler`."""
        asked = np.array([(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params], dtype=np.float32)
        repetition, presence, frequency = upload(asked, self._device)[:, :, None].unbind(dim=1)  # [r, 1] each
        seats = upload(np.array([seat.index for seat in seated]), self._device)
        counts = self._in_output[seats]
        given = counts > 0
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(self._in_prompt[seats] | given, repeated, scores)
        return torch.where(given, scores - (presence + frequency * counts), scores)


def answers(draw: Draw, seqs: Seq[Sequence]) -> list[Sampled | None]:
    """A draw whose tensors are on the host, as `Sampled`; None if the logits are not finite."""
    sampled = [Sampled(token) if finite else None for token, finite in zip(draw.tokens.tolist(), draw.finite.tolist(), strict=True)]
    if draw.logprobs is not None and draw.ids is not None:
        for i, row, ids in zip(draw.asked, draw.logprobs.tolist(), draw.ids.tolist(), strict=True):
            if found := sampled[i]:
                n = seqs[i].params.logprobs or 0
                best = ((id_, logprob) for id_, logprob in zip(ids[:n], row[1 : n + 1], strict=True) if logprob > -math.inf)
                sampled[i] = Sampled(found.token, row[0], tuple(best))
    return sampled


def _rows(seqs: Seq[Sequence], asks: Callable[[SamplingParams], bool]) -> list[int]:
    return [i for i, seq in enumerate(seqs) if asks(seq.params)]


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def pick_plainly(scores: Tensor, best: Tensor, filters: Filters) -> Tensor:
    """Picks in plain torch, by sorting. `baton.engine.gpu.triton_sampling.pick` is compared with it."""
    drawn = argmax_with_noise(filtered(scores, best, filters), filters.keys)
    return torch.where(filters.greedy, scores.argmax(dim=-1), drawn)


def filtered(scores: Tensor, best: Tensor, filters: Filters) -> Tensor:
    """Scores `[R, V]` relative to the best, by their temperature; -inf for what a filter takes away. A greedy row has neither."""
    scaled = (scores - best[:, None]) / filters.temperature[:, None]
    least = filters.floor[:, None]
    if filters.any_top:
        ordered = scaled.sort(dim=-1, descending=True).values
        weights = ordered.exp()
        mass = weights.double().cumsum(dim=-1)
        kth = ordered.gather(1, filters.top_k[:, None].clamp(max=scores.shape[1]) - 1)
        left = (ordered >= kth).sum(dim=-1, keepdim=True).clamp_(min=1)  # k, and those that tie with the k-th
        total = mass.gather(1, left - 1)
        kept = ((mass - weights) < filters.top_p[:, None] * total).sum(dim=-1, keepdim=True).clamp_(min=1)
        least = torch.maximum(least, ordered.gather(1, torch.minimum(kept, left) - 1))
    return scaled.masked_fill(scaled < least, -torch.inf)
