"""What a beam search asks for and finds. `beam_search` decides it; the router and the configuration need neither that nor numpy."""

from dataclasses import dataclass
from typing import Literal, get_args

EarlyStopping = Literal["true", "false", "never"]
EARLY_STOPPING: tuple[str, ...] = get_args(EarlyStopping)


@dataclass(frozen=True, slots=True)
class Beams:
    """What a request asks for. `count`: how many of the hypotheses are its answer, `width` at most."""

    width: int
    count: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "false"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An output that has ended. `stopped`: by a stop token, which is its last."""

    tokens: tuple[int, ...]
    score: float
    stopped: bool


def most_blocks(outputs: int, known: int, longest: int, block_size: int) -> int:
    """Blocks that outputs of up to `longest` tokens, prompt included, need together, if they share those that their first `known` fill."""
    shared = known // block_size
    return shared + outputs * (-(-longest // block_size) - shared)
