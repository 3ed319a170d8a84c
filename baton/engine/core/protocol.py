"""What the engine asks of the thing that computes: a batch of chunks in, the tokens that each chunk yields out. No torch here.

A chunk first yields what it says of the prompt, if that was asked for (`Chunk.scored`). Then nothing while it does not reach the last known
token, else one token, or several if somebody has guessed what comes next:
the runner computes the guesses' positions in the same step, and samples after each as if it were known. Up to the first wrong guess, and
one further (`accepted`), the tokens are those that one step for each would have sampled (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023). Noise is a function of seed and position, so that holds for drawn tokens without their
rejection rule.

Beside the first guess there may be others, *branches*, which begin with another token. A mask over one row of tokens, as tree attention has
it (Miao et al., "SpecInfer", 2024), would leave gaps in the sums of a branch, and so other last bits. Here each branch has a block table:
it shares the full blocks before it, and its rows are computed as those of a sequence that said so.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from baton.engine.core.kvcache import KvLayout, Pool
from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Branch:
    """Guesses that begin with another token than the first ones. `blocks`: a table for the sequence with these guesses. The first `shared`
    blocks are the sequence's own. The next has what the sequence has computed of its last block; the runner writes the KV of the last known
    token, which is computed in the same step, there, too."""

    drafts: tuple[int, ...]
    blocks: tuple[int, ...]
    shared: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the KV of `seq.tokens[seq.computed : seq.computed + n]`, and then of the guesses `drafts`; `seq.blocks` has room for all.

    One chunk per sequence and batch, `n >= 1`; with drafts it samples, and with branches n is 1 and that token is output. The runner
    changes nothing in `seq` but `drafted`.
    """

    seq: Sequence
    n: int
    drafts: tuple[int, ...] = ()
    branches: tuple[Branch, ...] = ()

    @property
    def guesses(self) -> int:
        """Tokens of all guesses."""
        return len(self.drafts) + sum(len(branch.drafts) for branch in self.branches) if self.branches else len(self.drafts)

    @property
    def positions(self) -> int:
        """How many are computed. Those of wrong guesses do not count afterwards."""
        return self.n + self.guesses

    @property
    def tokens(self) -> list[int]:
        """Those at the positions that are computed: branches come last."""
        others = (token for branch in self.branches for token in branch.drafts)
        return [*self.seq.tokens[self.seq.computed : self.seq.computed + self.n], *self.drafts, *others]

    @property
    def scored(self) -> int:
        """How many of its first positions are followed by a token that is to be scored, because it belongs to the prompt."""
        return max(0, min(self.n, self.seq.prompt_len - 1 - self.seq.computed)) if self.seq.unscored else 0

    @property
    def rows(self) -> list[Sequence]:
        """The sequence as it is when each row of logits is sampled: as it is known, with one guess, two, …, and with one guess, two, … of
        each branch. Empty if nothing samples."""
        if not self.samples:
            return []
        seq, guesses = self.seq, (self.drafts, *(branch.drafts for branch in self.branches))
        guessed = ([*seq.tokens, *drafts[: count + 1]] for drafts in guesses for count in range(len(drafts)))
        return [
            seq,
            *(Sequence(seq.id, tokens, seq.prompt_len, seq.params, seq.root, matcher=seq.matcher, guessed=True) for tokens in guessed),
        ]

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token, so that the next one can be sampled."""
        return self.seq.computed + self.n == len(self.seq.tokens)


# What a chunk yields: `Chunk.scored` of them are `Scored`; then come those that were sampled for `Chunk.rows`.
Tokens = tuple[Sampled, ...]


def accepted(drafts: Seq[int], sampled: Seq[Sampled]) -> Tokens:
    """What was sampled after the known tokens and after each guess, up to the first token that was not guessed."""
    right = takewhile(lambda pair: pair[0] == pair[1].token, zip(drafts, sampled, strict=False))
    return tuple(sampled[: sum(1 for _ in right) + 1])


def path(chunk: Chunk, sampled: Seq[Sampled]) -> tuple[Branch | None, list[int]]:
    """The branch that begins with what was sampled, None if none does, and the rows of what is accepted."""
    row = 1 + len(chunk.drafts)
    for branch in chunk.branches:
        end = row + len(branch.drafts)
        if branch.drafts[0] == sampled[0].token:
            return branch, [0, *range(row, row + len(accepted(branch.drafts, (sampled[0], *sampled[row:end]))) - 1)]
        row = end
    return None, list(range(len(accepted(chunk.drafts, sampled))))


class NothingToSample(ArithmeticError):
    """No token can be sampled for `sequence_ids`."""

    why: str

    def __init__(self, sequence_ids: list[str]) -> None:
        super().__init__(f"{self.why} for {', '.join(sequence_ids)}")
        self.sequence_ids = sequence_ids


class NonFiniteLogits(NothingToSample):
    """The logits are not finite: the weights, or these sequences' keys and values, are broken."""

    why = "logits are not finite"


class NothingAllowed(NothingToSample):
    """The grammar allows no token, or the library gave it up."""

    why = "the grammar allows no token"


class OutOfDeviceMemory(RuntimeError):
    """A step needed more memory than the device has left. What it had begun has ended, and no sequence has a sampled token: the same
    batch without some of its chunks may be run again."""


class Runner(Protocol):
    """One model on one device: `baton.engine.runner.ModelRunner` (torch), `baton.engine.gpu.runner.GpuRunner`, and the toy."""

    layout: KvLayout
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_positions: int
    on_device: bool  # the thread that runs it only waits while something else computes
    matrices: str  # how many of a quantised checkpoint's are computed as stored, and how many dequantised; empty: it is not quantised
    separates_output: bool  # KV of output has other bits than that of the same tokens in a prompt, and those bits whenever it is computed

    @property
    def pool(self) -> Pool: ...

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        """Writes the KV of every chunk into the pool. Returns what each chunk of `batch` yields: after the tokens of the prompt that it
        scores, one token more than it has drafts, fewer if it fails after a guess, or nothing.

        When it returns, the KV is written, and another process may read the blocks. Raises NothingToSample or OutOfDeviceMemory; then no
        sequence of the batch has a sampled token.
        """
        ...

    def copy(self, source: int, target: int) -> None:
        """Copies one block, after what the steps so far have written."""
        ...
