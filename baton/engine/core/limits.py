"""What a scheduler may do in one step, and with how many sequences. The configuration reads it, so nothing large is imported here."""

from dataclasses import dataclass
from typing import Literal

Batching = Literal["continuous", "dynamic", "static"]


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    reserve_growth: float = 0.5
    max_queue: int = 256
    batching: Batching = "continuous"
    batch_wait_s: float = 0.5
    speculation_batch_tokens: int = 1 << 20  # a step that is as large gets no guesses, and none grows larger by them
    speculation_branches: int = 1  # guesses of a sequence that begin with different tokens

    def __post_init__(self) -> None:
        """Raises ValueError, with the name of the limit, if no sequence could ever run."""
        ones = "max_num_seqs", "max_num_batched_tokens", "max_queue", "speculation_batch_tokens", "speculation_branches"
        for name, least in (*((name, 1) for name in ones), ("batch_wait_s", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"engine.{name}: must be {least} or more, got {getattr(self, name)}")
        if not 0 <= self.reserve_growth <= 1:
            raise ValueError(f"engine.reserve_growth: must be from 0 to 1, got {self.reserve_growth}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must hold one token of each of max_num_seqs ({self.max_num_seqs})"
            )
