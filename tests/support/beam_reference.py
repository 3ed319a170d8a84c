"""Beam search over whole vocabularies, with masks and sentinels as `transformers` has them: what `baton.engine.core.beams` must find."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.engine.core.beams import Beams, Hypothesis
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import sample

Row = npt.NDArray[np.float32]  # a log-probability for each token
NEVER = np.float32(-1e9)


def best(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """The places of the best, the first of equal ones first."""
    return np.argsort(-scores, kind="stable")[:count]


def search(
    row: Callable[[tuple[int, ...]], Row], beams: Beams, stops: frozenset[int], max_tokens: int, min_tokens: int = 0
) -> list[Hypothesis]:
    """`row`: of an output, what may follow it."""
    width, keep = beams.width, max(2, 1 + len(stops)) * beams.width
    running = [((), np.float32(0))] + [((), NEVER)] * (width - 1)
    kept: list[tuple[tuple[int, ...], np.float32, bool]] = [((), NEVER, False)] * width
    for length in range(1, max_tokens + 1):
        rows = []
        for tokens, score in running:
            logprobs = row(tokens).copy()
            if length <= min_tokens:
                logprobs[list(stops)] = -np.inf
            rows.append(logprobs + score)
        flat = np.concatenate(rows)
        top = best(flat, keep)
        vocab = len(rows[0])
        outputs = [(*running[i // vocab][0], int(i % vocab)) for i in top]
        scores = flat[top]
        hits = np.array([tokens[-1] in stops or length == max_tokens for tokens in outputs])
        going = scores + np.where(hits, NEVER, np.float32(0))
        running = [(outputs[i], going[i]) for i in best(going, width)]
        ends = hits & (np.arange(keep) < width)
        final = scores / np.float32(length**beams.length_penalty) + np.where(ends, np.float32(0), NEVER)
        merged = [*kept, *zip(outputs, final, ends.tolist(), strict=True)]
        kept = [merged[i] for i in best(np.array([score for _, score, _ in merged]), width)]
        far = max_tokens if beams.early_stopping == "never" and beams.length_penalty > 0 else length
        hope = running[0][1] / np.float32(far**beams.length_penalty)
        worst = min(score for _, score, _ in kept)
        improves = any(hope > (worst if ended else NEVER) for _, _, ended in kept)
        open_ = not (all(ended for _, _, ended in kept) and beams.early_stopping == "true")
        if hits.all() or not improves or not open_:
            break
    return [Hypothesis(tokens, float(score), tokens[-1] in stops) for tokens, score, _ in kept[: beams.count]]


def toy_search(prompt: list[int], params: SamplingParams, width: int = 8, vocab: int = 257) -> list[Hypothesis]:
    """What the toy's beams must find. `width`: of its KV."""

    def row(tokens: tuple[int, ...]) -> Row:
        known = [*prompt, *tokens]
        total = 2 * width * sum((token + 1) * (position + 1) for position, token in enumerate(known))
        made: Row = np.zeros(vocab, np.float32)
        for token, logprob in sample(total, SamplingParams(1, temperature=0.0, logprobs=vocab), len(known), vocab).top:
            made[token] = logprob
        return made

    assert params.beams is not None
    stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | {vocab - 1}
    return search(row, params.beams, frozenset(stops), params.max_tokens, params.min_tokens)
