"""What a request asks of the sampler and of the stopping rule: plain data, no torch.

A number that a request may set is declared here, once: its default, its range and its meaning. The router's checks, its defaults, the
message to a worker and the flags of the command line are derived from that. To add one, declare it here and in generation.proto under the
same name, and implement it in the samplers (`baton.engine.model.sampler`, and `baton.engine.gpu.sampler` for devices).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from baton.engine.core.beams import Beams
from baton.engine.core.grammar import Grammar
from baton.engine.core.speculation import UNASKED, Speculation
from baton.engine.core.thinking import ThinkingBudget

LEAST_TOP_P = 1e-9  # what 0 becomes: samplers search for a share that is more than nothing
GREEDY_BELOW = 1e-5  # temperatures below this count as 0: the division would overflow float32
INT32 = 2**31 - 1
_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's step: 2^64 over the golden ratio
MIXERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of `mix64`
# Of which distribution log-probabilities are: the model's own, or the one that the token is drawn from, after bias, penalties, min_tokens
# and grammar, and, unless it is greedy, temperature and filters. vLLM's names.
RAW, PROCESSED = LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that are allowed, both ends included unless `above_low`."""

    low: float
    high: float
    above_low: bool = False  # low itself is not allowed

    def __str__(self) -> str:
        return f"{'greater than' if self.above_low else 'at least'} {self.low:.10g} and at most {self.high:.10g}"

    def refusal(self, value: float) -> str | None:
        """What is wrong with a value, None if nothing is. NaN is in no range."""
        inside = self.low <= value <= self.high and not (self.above_low and value == self.low)
        return None if inside else f"must be {self}"


@dataclass(frozen=True, slots=True)
class Number:
    """A parameter that is a number."""

    default: float  # of a request that does not set it
    range: Range
    meaning: str

    @property
    def integer(self) -> bool:
        return isinstance(self.default, int)


def _number(default: float, low: float, high: float, meaning: str, above_low: bool = False) -> Any:
    return field(default=default, metadata={"number": Number(default, Range(low, high, above_low), meaning)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Complete: the router fills in every default before a worker sees the request."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = _number(1.0, 0, 100, "0 is greedy")
    top_k: int = _number(0, -1, INT32, "keep the k likeliest tokens and those that tie with the last of them; 0 or -1: keep all")
    top_p: float = _number(1.0, 0, 1, "keep the likeliest tokens that hold this share of the probability left by top_k; 0: the likeliest")
    min_p: float = _number(0.0, 0, 1, "keep the tokens with at least this share of the likeliest token's probability")
    # KoboldAI's top-a: it cuts a lot when the model is sure, and little when it is not.
    top_a: float = _number(0.0, 0, 1, "keep the tokens with at least this share of the square of the likeliest token's probability")
    # A penalty below 0.01 could take logits out of float32's range.
    repetition_penalty: float = _number(1.0, 0.01, 100, "divides or multiplies the logits of tokens in the prompt or the output")
    presence_penalty: float = _number(0.0, -2, 2, "subtracted once from the logits of tokens in the output")
    frequency_penalty: float = _number(0.0, -2, 2, "subtracted from a token's logit for each time that it is in the output")
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    logprobs_mode: str = RAW  # one of LOGPROBS_MODES
    prompt_logprobs: int | None = None  # None: none; n: of each token of the prompt but the first, and of the n best in its place
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    structured: Grammar | None = None  # the form of the output; min_tokens and ignore_eos then hold where anything but the end may follow
    thinking: ThinkingBudget | None = None  # from the marks of the model's family, which a client does not know
    speculation: Speculation = UNASKED  # how it may be guessed; no token depends on it
    beams: Beams | None = None  # a search instead of sampling: only max_tokens, min_tokens, stop_token_ids and ignore_eos apply


BESIDE = ("thinking", "speculation", "beams")  # not in SamplingParams of generation.proto
FIELDS = tuple(each.name for each in fields(SamplingParams) if each.name not in BESIDE)
NUMBERS: Mapping[str, Number] = MappingProxyType(
    {each.name: each.metadata["number"] for each in fields(SamplingParams) if "number" in each.metadata}
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token. Of which distribution its log-probabilities are: see LOGPROBS_MODES."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scored(Sampled):
    """A token of the prompt, and what the model's own distribution said of it before it."""

    rank: int = 0  # 1: it was the likeliest, or as likely


def mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection on 64 bits whose every output bit depends on every input bit."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * MIXERS[0]) & _MASK
    x = ((x ^ (x >> 27)) * MIXERS[1]) & _MASK
    return x ^ (x >> 31)


def noise_key(seed: int, position: int) -> int:
    """The 64-bit counter base of a token's noise. It depends on the request's seed and the position in the sequence, and on nothing else.

    Batch, worker, time and retries have no influence, so a stream that continues elsewhere draws the noise that it would have drawn here.
    """
    return mix64(mix64(seed + GOLDEN) + position)
