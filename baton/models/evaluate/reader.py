"""An engine in this process that reads text and tells what it expects: what is measured is what serves."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from baton.engine.build import build
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options

PROMPT_PIECE, STEPS_PIECE = 256, 32  # tokens whose logits exist at once: of a prompt, and of output
SEQUENCES = 4  # that may run together, unless the options say otherwise: no pool for many is needed


class Reader:
    """It keeps nothing between two calls."""

    def __init__(self, options: Options) -> None:
        """Raises ValueError, which names the key or the file, for what cannot be built and for an engine whose logits cannot be read;
        OSError."""
        if options.engine.kind != "baton":
            raise ValueError(f"engine.kind: the logits of {options.engine.kind} cannot be read, only those of baton")
        built = build(options.but(prefix_caching=False, max_num_seqs=options.engine.max_num_seqs or SEQUENCES))
        self.engine: Any = built.engine
        self._runner: Any = built.engine.runner
        if not hasattr(self._runner, "run_logits"):
            raise ValueError(f"model.path: {options.path} holds a toy, which has no logits")
        self.folder = options.path
        self.max_len = built.max_model_len
        self.vocab: int = self._runner.vocab_size

    def read(self, tokens: list[int], prompt: int, first: int = 0, known: int = 0) -> Iterator[Tensor]:
        """The logits after `tokens[first]` and each later token but the last, piece by piece: float32 `[n, vocab]`.

        The first `prompt` tokens (1 at least) are computed as a prompt, the others as output, each on the path that serves it. `known`: so
        many leading tokens, `first` at most, are those of the call before, which has computed them. Raises ValueError for too many."""
        if len(tokens) > self.max_len:
            raise ValueError(f"model.max_model_len: a question of {len(tokens)} tokens does not fit into {self.max_len}")
        blocks = list(range(-(-len(tokens) // self._runner.layout.block_size)))
        plain, scores = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, prompt_logprobs=0)
        for start, end in self._pieces(known, len(tokens) - 1, prompt, first):
            sure = start + 1 if start >= prompt else end  # what follows is computed as guesses are
            asked = scores if start < prompt and start >= first else plain
            seq = Sequence("read", tokens[:sure], min(prompt, sure), asked, b"", computed=start, blocks=blocks)
            logits = self._runner.run_logits([Chunk(seq, sure - start, tuple(tokens[sure:end]))])
            if start >= first:
                yield logits

    def _pieces(self, start: int, count: int, prompt: int, first: int) -> Iterator[tuple[int, int]]:
        """Parts of the positions from `start` to `count`. None is both prompt and output, nor both before `first` and after. A device gives
        one row a step."""
        while start < count:
            edge = min(each for each in (first, prompt, count) if each > start)
            room = 1 if self._runner.on_device and start >= first else PROMPT_PIECE if start < prompt else STEPS_PIECE
            yield start, (end := min(start + room, edge))
            start = end

    def go_on(self, prompt: Seq[int], tokens: int) -> list[int]:
        """The greedy continuation, of so many tokens at most, whoever guesses. Raises ValueError if logits are not finite."""
        seq = Sequence("go on", list(prompt), len(prompt), SamplingParams(max_tokens=tokens, temperature=0.0), b"")
        self.engine.add(seq)
        while not self.engine.idle:
            if failed := [output.failure for output in self.engine.step() if output.failure]:
                raise ValueError(failed[0])
        return seq.tokens[seq.prompt_len :]
