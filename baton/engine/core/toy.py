"""A runner whose results can be computed by hand: it stands in for torch wherever the cluster, not the model, is under test.

The KV of token `t` at position `p` is the number (t + 1)·(p + 1), written into every element of the slot. The next token is the sum of
all KV elements so far modulo the vocabulary, plus the request's noise unless it is greedy. So every byte of every block affects every later
token, and a wrong block is visible in the text. The vocabulary is 257, a prime: no single flipped byte can cancel out.
"""

import json
import os
import signal
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.protocol import Chunk, Tokens, accepted
from baton.engine.core.sampling import Sampled, SamplingParams, noise_key

ARCHITECTURE = "BatonToyForCausalLM"


class ToyRunner:
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
        # [num_blocks, 2, block_size, kv_width]
        self._kv = pool.array.view(np.int64).reshape(pool.num_blocks, 2, self.layout.block_size, self.layout.head_dim)

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
        seq, size = chunk.seq, self.layout.block_size
        positions = np.arange(seq.computed, seq.computed + chunk.positions)
        blocks = np.asarray(seq.blocks)
        values = (np.asarray(chunk.tokens) + 1) * (positions + 1)
        self._kv[blocks[positions // size], :, positions % size, :] = values[:, None, None]
        return accepted(chunk.drafts, [self._sample(blocks, len(row.tokens), row.params) for row in chunk.rows])

    def _sample(self, blocks: "np.ndarray[Any, Any]", end: int, params: SamplingParams) -> Sampled:
        """The token at position `end`."""
        full, rest = divmod(end, self.layout.block_size)
        total = int(self._kv[blocks[:full]].sum())
        if rest:
            total += int(self._kv[blocks[full], :, :rest].sum())
        return sample(total, params, end, self.vocab_size)


def sample(total: int, params: SamplingParams, position: int, vocab_size: int) -> Sampled:
    noise = noise_key(params.seed, position) if params.temperature > 0 else 0
    token = (total + noise) % vocab_size
    if params.logprobs is None:
        return Sampled(token)
    return Sampled(token, 0.0, ((token, 0.0),) if params.logprobs else ())


def naive(tokens: Seq[int], params: SamplingParams, width: int = 8, vocab_size: int = 257, eos: int = 256) -> list[int]:
    """The oracle: what the runner must produce, without blocks, batches or caches. Stops at the end token or at max_tokens."""
    known = list(tokens)
    while (made := len(known) - len(tokens)) < params.max_tokens:
        total = 2 * width * sum((token + 1) * (position + 1) for position, token in enumerate(known))
        known.append(sample(total, params, len(known), vocab_size).token)
        if known[-1] == eos and not params.ignore_eos and made + 1 >= params.min_tokens:
            break
    return known[len(tokens) :]
