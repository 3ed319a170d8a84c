"""What is measured: the requests, how token times become tokens per second, and how much of the machine's capacity that is. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

FIRST_ORDINARY = 10  # token ids below this may be special
CONTEXT = 2560  # tokens of one sequence
ROUND = 256  # a multiple of every engine's block


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    kind: Literal["prefill", "decode", "mixed"]
    requests: tuple[tuple[int, int], ...]  # (prompt tokens, output tokens)

    def prompts(self, vocab: int, seed: str) -> list[list[int]]:
        """Token ids `[request][prompt]`: the same for the same arguments, unrelated for another seed."""
        rng = random.Random(f"{self.name} {seed}")
        return [rng.choices(range(FIRST_ORDINARY, vocab), k=length) for length, _ in self.requests]

    def outputs(self) -> list[int]:
        return [output for _, output in self.requests]

    def tokens_per_s(self, times: Sequence[Sequence[float]]) -> float:
        """`times[i][k]`: seconds from the call to output token k of request i.

        prefill: prompt tokens over the time until the last request has its first token. decode: tokens generated while every request
        decodes, from the moment when the last one has its first token until the first one ends, so neither prefill nor a shrinking batch
        counts. mixed: output tokens over the whole time. Raises ValueError if the requests never decoded together.
        """
        if self.kind == "prefill":
            return sum(prompt for prompt, _ in self.requests) / max(row[0] for row in times)
        if self.kind == "mixed":
            return sum(self.outputs()) / max(row[-1] for row in times)
        start, end = max(row[0] for row in times), min(row[-1] for row in times)
        if end <= start:
            raise ValueError(f"{self.name}: a request ended before another had its first token")
        return sum(start < at <= end for row in times for at in row) / (end - start)


def prefill(tokens: int) -> Cell:
    return Cell(f"prefill {tokens}", "prefill", ((tokens, 1),))


def decode(batch: int) -> Cell:
    return Cell(f"decode b{batch}", "decode", ((480, 64),) * batch)


def mixed(requests: int) -> Cell:
    rng = random.Random("mixed")
    return Cell("mixed", "mixed", tuple((rng.randint(64, 512), rng.randint(32, 128)) for _ in range(requests)))


def warm(cell: Cell) -> Cell:
    """The cheap untimed run before a cell, which wakes the engine's threads and prepares its shapes."""
    if cell.kind == "prefill":
        return cell
    return Cell(f"warm {cell.name}", cell.kind, ((64, 8),) * len(cell.requests))


@dataclass(frozen=True, slots=True)
class Room:
    """What every engine is given: the number of concurrent sequences, and tokens of KV for each."""

    sequences: int
    tokens_each: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.tokens_each


def room(cells: Sequence[Cell]) -> Room:
    """The room for the largest cell, in whole blocks of every engine; a single sequence can use up to `CONTEXT`."""
    together = [sum(request) for cell in cells if len(cell.requests) > 1 for request in cell.requests]
    each = -(-max(together, default=0) // ROUND) * ROUND
    sequences = max(len(cell.requests) for cell in cells)
    return Room(sequences, max(each, CONTEXT // sequences))


@dataclass(frozen=True, slots=True)
class Model:
    """A Llama's shape."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    inner: int  # 3 * hidden, as made by `baton.models.make_small`
    context: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """The weights of all layers, without norms."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def read_parameters(self) -> int:
        """What one decode step reads: the layers and the LM head. Of the embedding it reads only a row, which does not count."""
        return self.layer_parameters + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.read_parameters + self.vocab * self.hidden

    @property
    def kv_numbers(self) -> int:
        """How many numbers a token stores in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def prefill_flops(self, tokens: int) -> float:
        """FLOPs of one prompt: two per weight and token, the head for the last token only, causal attention (q k^T and the value sums)."""
        attention = 4 * self.layers * self.hidden * tokens * (tokens + 1) / 2
        return 2.0 * self.layer_parameters * tokens + 2 * self.vocab * self.hidden + attention

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> "Model":
        """From a checkpoint's config.json."""
        return cls(
            name,
            config["hidden_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["vocab_size"],
            config["intermediate_size"],
            config["max_position_embeddings"],
        )


def same_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(equal tokens, tokens), compared position by position. Raises ValueError if their lengths differ."""
    equal = sum(x == y for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True))
    return equal, sum(len(row) for row in theirs)
