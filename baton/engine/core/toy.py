"""A runner whose results can be computed by hand: it stands in for torch wherever the cluster, not the model, is under test.

The KV of token `t` at position `p` is the number (t + 1)·(p + 1), written into every element of the slot. The next token is the sum of
all KV elements so far modulo the vocabulary, plus the request's noise unless it is greedy. So every byte of every block affects every later
token, and a wrong block is visible in the text. The vocabulary is 257, a prime: no single flipped byte can cancel out.
"""

import json
import math
import os
import signal
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.long_contexts import Shelf, ShelfFailed, Unreadable
from baton.engine.core.masks import Matcher, Words, allowed_ids
from baton.engine.core.protocol import Chunk, NothingAllowed, Tokens
from baton.engine.core.sampling import Sampled, SamplingParams, Scored, noise_key
from baton.engine.core.sequence import Sequence

ARCHITECTURE = "BatonToyForCausalLM"


class Before(NamedTuple):
    """What the blocks hold that come before a table."""

    blocks: int = 0
    total: int = 0


NONE = Before()


class ToyRunner:
    matrices = ""
    separates_output = False  # integers
    on_device = False

    def __init__(self, config: dict[str, int], fingerprint: str, block_size: int) -> None:
        self.vocab_size = config["vocab_size"]
        self.eos_token_ids = frozenset([config["eos_token_id"]])
        self.max_positions = config["max_position_embeddings"]
        self.step_delay_s = config.get("step_delay_ms", 0) / 1000
        self.token_delay_s = config.get("token_delay_us", 0) / 1e6
        self.poison = config.get("poison_token")  # the process dies when it computes this one
        self.layout = KvLayout(fingerprint, "int64", block_size, 1, 1, config["kv_width"])

    @classmethod
    def load(cls, path: Path, fingerprint: str, block_size: int) -> "ToyRunner":
        return cls(json.loads((path / "config.json").read_text()), fingerprint, block_size)

    def attach(self, pool: KvPool) -> None:
        self.pool = pool
        self._shelf: Shelf | None = None
        # [num_blocks, 2, block_size, kv_width]
        self._kv = pool.array.view(np.int64).reshape(pool.num_blocks, 2, self.layout.block_size, self.layout.head_dim)

    def read_from(self, shelf: Shelf, longest: int) -> None:
        self._shelf = shelf

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        delay = self.step_delay_s + self.token_delay_s * sum(chunk.positions for chunk in batch)
        if delay:
            time.sleep(delay)
        if any(self.poison in chunk.tokens for chunk in batch):
            os.kill(os.getpid(), signal.SIGKILL)
        return [self._run(chunk) for chunk in batch]

    def copy(self, source: int, target: int) -> None:
        self.pool.array[target] = self.pool.array[source]

    def _run(self, chunk: Chunk) -> Tokens:
        seq, known = chunk.seq, chunk.seq.tokens[chunk.seq.computed : chunk.seq.computed + chunk.n]
        before = self._before(seq)
        blocks = self._write(seq.blocks, seq.computed, [*known, *chunk.drafts], before.blocks)
        tables = [blocks] * (1 + len(chunk.drafts))
        for branch in chunk.branches:
            tables += [self._write(branch.blocks, seq.computed, [*known, *branch.drafts])] * len(branch.drafts)
        scored = [self._score(blocks, seq, seq.computed + i, before) for i in range(chunk.scored)]
        return (*scored, *(self._sample(table, row, before) for table, row in zip(tables, chunk.rows, strict=False)))

    def _before(self, seq: Sequence) -> Before:
        if not seq.away or self._shelf is None:
            return NONE
        sums = [0] * seq.away

        def take(i: int, unit: memoryview) -> None:
            sums[i] = int(np.frombuffer(unit, np.int64).sum())

        try:
            self._shelf.read(seq.keys[: seq.away], take)
        except ShelfFailed as error:
            raise Unreadable(seq.id, str(error)) from error
        return Before(seq.away, sum(sums))

    def _write(self, blocks: Seq[int], start: int, tokens: list[int], before: int = 0) -> "np.ndarray[Any, Any]":
        positions, table, size = np.arange(start, start + len(tokens)), np.asarray(blocks), self.layout.block_size
        values = (np.asarray(tokens) + 1) * (positions + 1)
        self._kv[table[positions // size - before], :, positions % size, :] = values[:, None, None]
        return table

    def _score(self, blocks: "np.ndarray[Any, Any]", seq: Sequence, position: int, before: Before) -> Scored:
        """The toy is sure of the token that it would sample if it were greedy."""
        token = seq.tokens[position + 1]
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        expected = self._sample(blocks, Sequence(seq.id, seq.tokens[: position + 1], seq.prompt_len, greedy, seq.root), before).token
        best = ((expected, 0.0),) if seq.params.prompt_logprobs else ()
        return Scored(token, 0.0, best, 1) if token == expected else Scored(token, -math.inf, best, 2)

    def _sample(self, blocks: "np.ndarray[Any, Any]", seq: Sequence, before: Before = NONE) -> Sampled:
        """The token that follows those of `seq`."""
        words = seq.words(self.eos_token_ids)
        if words is not None and not words.any():
            raise NothingAllowed([seq.id])
        full, rest = divmod(len(seq.tokens), self.layout.block_size)
        full -= before.blocks
        total = before.total + int(self._kv[blocks[:full]].sum())
        if rest:
            total += int(self._kv[blocks[full], :, :rest].sum())
        return sample(total, seq.params, len(seq.tokens), self.vocab_size, words)


def sample(total: int, params: SamplingParams, position: int, vocab_size: int, words: Words | None = None) -> Sampled:
    """Takes the token in `words` whose place is (sum + noise) modulo their count."""
    noise = noise_key(params.seed, position) if params.temperature > 0 else 0
    if words is None:
        token = (total + noise) % vocab_size
    else:
        ids = allowed_ids(words, vocab_size)
        token = int(ids[(total + noise) % len(ids)])
    if params.logprobs is None:
        return Sampled(token)
    step = (1 + total % 7) / 8  # exact in float32; sums of such numbers are often equal
    ranks = range(min(params.logprobs, vocab_size))
    return Sampled(token, 0.0, tuple(((token + rank) % vocab_size, -rank * step) for rank in ranks))


def naive(
    tokens: Seq[int], params: SamplingParams, width: int = 8, vocab_size: int = 257, eos: int = 256, matcher: Matcher | None = None
) -> list[int]:
    """The oracle: what the runner must produce, without blocks, batches or caches. Stops at the end token or at max_tokens."""
    known, prompt_len = list(tokens), len(tokens)
    while (made := len(known) - len(tokens)) < params.max_tokens:
        total = 2 * width * sum((token + 1) * (position + 1) for position, token in enumerate(known))
        words = Sequence("", known, prompt_len, params, b"", matcher=matcher).words(frozenset([eos]))
        known.append(sample(total, params, len(known), vocab_size, words).token)
        if known[-1] == eos and (params.structured is not None or (not params.ignore_eos and made + 1 >= params.min_tokens)):
            break
    return known[len(tokens) :]
