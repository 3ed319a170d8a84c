"""What the engine asks of the thing that computes: a batch of chunks in, at most one sampled token per chunk out. No torch here."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the KV of `seq.tokens[seq.computed : seq.computed + n]`; `seq.blocks` already has room for it.

    One chunk per sequence and batch, `n >= 1`. The runner changes nothing in `seq`.
    """

    seq: Sequence
    n: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token, so that the next one can be sampled."""
        return self.seq.computed + self.n == len(self.seq.tokens)


class NonFiniteLogits(ArithmeticError):
    """The logits of `sequence_ids` are not finite: the weights, or these sequences' keys and values, are broken."""

    def __init__(self, sequence_ids: list[str]) -> None:
        super().__init__(f"logits are not finite for {', '.join(sequence_ids)}")
        self.sequence_ids = sequence_ids


class Runner(Protocol):
    """One model on one device. Two implementations: `baton.engine.runner.ModelRunner` (torch) and `baton.engine.core.toy.ToyRunner`."""

    layout: KvLayout
    pool: KvPool
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_positions: int
    separates_output: bool  # KV of output has other bits than that of the same tokens in a prompt, and those bits whenever it is computed

    def run(self, batch: Seq[Chunk]) -> list[Sampled | None]:
        """Writes the KV of every chunk into the pool. Returns one answer for each chunk of `batch`: None if the chunk does not sample.

        When it returns, the KV is written, and another process may read the blocks. Raises NonFiniteLogits; then no sequence of the batch
        has a sampled token.
        """
        ...
