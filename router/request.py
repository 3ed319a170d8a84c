"""A request inside the router: the facts it arrived with, the tokens it has got so far, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.sampling import SamplingParams

Stage = Literal["queue", "prefill", "transfer", "decode"]
STAGES: tuple[Stage, ...] = ("queue", "prefill", "transfer", "decode")


@dataclass(slots=True)
class Stopwatch:
    """Consecutive stretches of one clock: each moment belongs to exactly one stage, so the stages add up to the whole."""

    clock: Callable[[], float]
    stage: Stage = "queue"
    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    since: float = field(init=False)

    def __post_init__(self) -> None:
        self.since = self.clock()

    def enter(self, stage: Stage) -> None:
        now = self.clock()
        self.seconds[self.stage] += now - self.since
        self.stage, self.since = stage, now

    def stop(self) -> None:
        self.enter(self.stage)


@dataclass(slots=True)
class Handoff:
    """How the KV got to the decode worker, over all attempts."""

    transport: str = ""
    blocks: int = 0
    bytes: int = 0
    blocks_reused: int = 0
    digests_checked: int = 0
    recomputed_tokens: int = 0
    failure: str = ""


@dataclass(slots=True)
class Trace:
    """What became of a request; filled by the dispatcher, told to the client at the end."""

    watch: Stopwatch
    prefill_worker: str = ""
    decode_worker: str = ""
    retries: int = 0
    cached_tokens: int = 0
    prefill_wait_ms: float = 0.0
    prefill_compute_ms: float = 0.0
    read_ms: float = 0.0
    verify_ms: float = 0.0
    handoff: Handoff = field(default_factory=Handoff)


@dataclass(frozen=True, slots=True)
class Token:
    """A token as a worker made it."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Request:
    """`tokens` is the prompt and everything that was generated: what the next attempt starts from."""

    id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    salt: str
    deadline: float  # on the clock of the dispatcher
    trace: Trace
    finish: FinishReason | None = None
    model: str | None = None  # fingerprint of the model that began to answer: no other may go on
    keys: list[bytes] = field(default_factory=list)  # of the full blocks of `tokens`, as far as they were needed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def longest(self) -> int:
        """Tokens that it may come to, prompt included."""
        return self.prompt_len + self.params.max_tokens
