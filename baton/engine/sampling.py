"""What a request asks of the sampler and of the stopping rule: plain data, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

GREEDY_BELOW = 1e-5  # temperatures under this are 0: the division would leave float32
_MASK = (1 << 64) - 1
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Complete: the router fills every default before a worker sees the request."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token. Log-probabilities are those of the model's own distribution (before temperature and filters)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection on 64 bits whose every output bit depends on every input bit."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def noise_key(seed: int, position: int) -> int:
    """The 64-bit counter base of a token's noise: a function of request seed and position in the sequence, and of nothing else.

    Batch, worker, time and retries do not enter, so a stream that is continued elsewhere draws the noise it would have drawn.
    """
    return mix64(mix64(seed + 0x9E3779B97F4A7C15) + position)
