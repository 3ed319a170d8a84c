"""What a request asks of the sampler and of the stopping rule: plain data, no torch.

A number that a request may set is declared here, once: its default and its range. The router's checks, its defaults and what travels to a
worker are derived from that. To add one, declare it here and in generation.proto under the same name, and give it a meaning in the samplers
(`baton.engine.sampler`, and `baton.engine.gpu.sampler` for devices).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

GREEDY_BELOW = 1e-5  # temperatures under this are 0: the division would leave float32
INT32 = 2**31 - 1
_MASK = (1 << 64) - 1
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that are allowed, both ends included unless `above_low`."""

    low: float
    high: float
    above_low: bool = False  # low itself is not allowed

    def refusal(self, value: float) -> str | None:
        """What is wrong with a value, None if nothing is. NaN is in no range."""
        inside = self.low <= value <= self.high and not (self.above_low and value == self.low)
        return (
            None if inside else f"must be {'greater than' if self.above_low else 'at least'} {self.low:.10g} and at most {self.high:.10g}"
        )


@dataclass(frozen=True, slots=True)
class Number:
    """A parameter that is a number: what it is where a request does not say, and what a request may say."""

    default: float
    range: Range

    @property
    def integer(self) -> bool:
        return isinstance(self.default, int)


def _number(default: float, low: float, high: float, above_low: bool = False) -> Any:
    return field(default=default, metadata={"number": Number(default, Range(low, high, above_low))})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Complete: the router fills every default before a worker sees the request."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = _number(1.0, 0, 100)  # 0 is greedy
    top_k: int = _number(0, -1, INT32)  # 0: off; so is -1 in a request
    top_p: float = _number(1.0, 0, 1, above_low=True)  # of the mass that top_k leaves, ties with the k-th token included
    min_p: float = _number(0.0, 0, 1)  # of the best token's probability
    # Of the square of the best token's probability (KoboldAI's top-a): much is cut where the model is sure, little where it is not.
    top_a: float = _number(0.0, 0, 1)
    # Over prompt and output. One below 0.01 would carry logits out of float32.
    repetition_penalty: float = _number(1.0, 0.01, 100)
    presence_penalty: float = _number(0.0, -2, 2)  # over output
    frequency_penalty: float = _number(0.0, -2, 2)  # over output
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


FIELDS = tuple(each.name for each in fields(SamplingParams))
NUMBERS: Mapping[str, Number] = MappingProxyType(
    {each.name: each.metadata["number"] for each in fields(SamplingParams) if "number" in each.metadata}
)


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
