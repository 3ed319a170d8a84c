"""A request inside the router: the facts it arrived with, the tokens it has so far, and what became of it."""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal, NamedTuple

from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.telemetry import NO_SPAN, TraceSpan
from baton.engine.core.beams import Hypothesis
from baton.engine.core.sampling import SamplingParams
from baton.stages import STAGES, Stage, itl
from router.backlog import ENTRY_BYTES, TOP_BYTES, Backlog
from router.chat_map import ChatMap
from router.family import Family
from router.predictions import CheckedPrediction
from router.uncached import Uncached

MAX_STEPS = 256  # with guesses, that a record of the request keeps
MAX_PLACES = 16  # in the guess of a step, of which the page tells
PLACES = tuple(str(place) for place in range(1, MAX_PLACES + 1))
NEAR_DEADLINE_S = 0.05  # with less time left, another attempt is pointless, and a client that leaves has given up because of its deadline


@dataclass(slots=True)
class Lap:
    """A period spent in one stage. Times are on the stopwatch's clock; `end` is set by the next lap or by `stop`."""

    stage: Stage
    start: float
    worker: str = ""
    end: float = 0.0
    bypass: bool = False  # the decode worker computes the prompt


@dataclass(slots=True)
class Stopwatch:
    """Consecutive laps on one clock: each moment belongs to exactly one stage, so the stages add up to the total."""

    clock: Callable[[], float]
    laps: list[Lap] = field(init=False)

    def __post_init__(self) -> None:
        self.laps = [Lap("queue", self.clock())]

    @property
    def start(self) -> float:
        return self.laps[0].start

    @property
    def seconds(self) -> dict[Stage, float]:
        """Seconds spent in each stage, up to the last lap that has ended."""
        total = dict.fromkeys(STAGES, 0.0)
        for lap in self.laps:
            total[lap.stage] += max(0.0, lap.end - lap.start)
        return total

    def enter(self, stage: Stage, worker: str = "", bypass: bool = False) -> None:
        """Ends the lap and begins the next, unless stage and worker stay the same. Called for every token."""
        last = self.laps[-1]
        if stage == last.stage and worker == last.worker:
            return
        if stage == last.stage and not last.worker:
            last.worker, last.bypass = worker, bypass
            return
        last.end = self.clock()
        self.laps.append(Lap(stage, last.end, worker, bypass=bypass))

    def at(self, worker: str) -> None:
        """Continues the current stage at a worker."""
        last = self.laps[-1]
        self.enter(last.stage, worker, last.bypass)

    def stop(self) -> None:
        """Ends the last lap. A later call moves its end."""
        self.laps[-1].end = self.clock()


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that failed the request."""

    at: float  # on the stopwatch's clock
    worker: str
    reason: str


@dataclass(slots=True)
class Trace:
    """What became of a request; filled in by the dispatcher, reported to the client at the end."""

    watch: Stopwatch
    span: TraceSpan = NO_SPAN
    prefill_worker: str = ""
    decode_worker: str = ""
    step: str = ""  # within the queue: tokenizing, admission
    retries: int = 0
    cached_tokens: int = 0
    promised_tokens: int | None = None  # that were thought to be cached where the prompt was first sent to; None: nowhere yet
    fetched_tokens: int = 0  # prompt tokens whose KV the prefill worker fetched from another worker's cache
    prefill_wait_ms: float = 0.0
    prefill_compute_ms: float = 0.0
    handoff: Handoff = field(default_factory=Handoff)  # over all attempts
    choices: list[tuple[str, str]] = field(default_factory=list)  # role and reason of each choice of a worker
    bypasses: list[str] = field(default_factory=list)  # reasons
    shared_bypasses: int = 0  # of them: those of another request, with which it shares a prompt
    retry_reasons: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    put_aside: frozenset[str] = frozenset()  # workers that were not chosen because they behave badly
    retry_refused: bool = False  # the budget of all requests was spent
    first_at: float = 0.0  # when the first token came, on the stopwatch's clock; 0 before
    last_at: float = 0.0
    predictions: list[CheckedPrediction] = field(default_factory=list)
    uncached: Uncached | None = None  # None: the prompt was not computed here, or counts for another answer
    guesses: "Guesses" = field(default_factory=lambda: Guesses())
    gaps: "array[float]" = field(default_factory=lambda: array("d"))  # seconds between successive tokens

    @property
    def workers(self) -> frozenset[str]:
        """Those at which it was, or failed."""
        return frozenset([*(lap.worker for lap in self.watch.laps), *(failure.worker for failure in self.failures)]) - {""}

    def follow(self, other: "Trace") -> None:
        """What happened to the other request until now happened to this one, too: they have one prompt."""
        self.watch.laps = [replace(lap) for lap in other.watch.laps]
        self.bypasses = list(other.bypasses)
        self.shared_bypasses = len(self.bypasses)

    def credit(self, other: "Trace") -> None:
        """The other request's prefill served this one, too."""
        self.prefill_worker, self.put_aside = other.prefill_worker, other.put_aside
        self.prefill_wait_ms, self.prefill_compute_ms = other.prefill_wait_ms, other.prefill_compute_ms
        self.cached_tokens = self.cached_tokens or other.cached_tokens

    def note_token(self) -> None:
        now = self.watch.clock()
        if self.first_at:
            self.gaps.append(itl(self.last_at, now))
        else:
            self.first_at = now
        self.last_at = now

    def note_tokens(self, times: Sequence[float]) -> None:
        """`note_token` at each of these moments."""
        if not self.first_at:
            self.first_at = self.last_at = times[0]
            times = times[1:]
        self.gaps.extend(map(itl, chain((self.last_at,), times), times))
        if times:
            self.last_at = times[-1]


def name_the_stage(error: BatonError, trace: Trace) -> None:
    """Adds to a DEADLINE where the request was when its time ran out, and how it was spent, unless it says that of another choice. The
    trace's watch must have been stopped."""
    if "stage" in error.metadata:
        return
    last, seconds = trace.watch.laps[-1], trace.watch.seconds
    stage = trace.step if last.stage == "queue" and trace.step else last.stage
    place = f" at {last.worker}" if last.worker else ""
    retries = f", after {trace.retries} {'retry' if trace.retries == 1 else 'retries'}" if trace.retries else ""
    split = ", ".join(f"{name} {seconds[name]:.3f} s" for name in STAGES if seconds[name])
    error.message = f"{error.message}: it ended in {stage}{place}{retries} ({split or 'no time was left'})"
    error.metadata = {**error.metadata, "stage": stage, **{f"{name}_s": f"{seconds[name]:.3f}" for name in STAGES}}


class Token(NamedTuple):
    """A token as a worker generated it. A tuple, as are `TextPiece` and `Said`: a frozen dataclass takes five times as long to make, and
    each token is one of each."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    guessed: bool = False
    rejected: int = 0  # guesses of its step that did not become output

    @property
    def size(self) -> int:
        """Bytes, about as it waits for its client: the measure of the work on it (`router.turn_budget`)."""
        return ENTRY_BYTES + TOP_BYTES * len(self.top)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt, and what the model says of it before it."""

    index: int  # position in the prompt
    id: int
    logprob: float | None = None  # of the first token: none
    rank: int = 0  # 1: no token is likelier
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of successive tokens of the prompt; told with the first choice."""

    tokens: tuple[PromptToken, ...]
    choice: int = 0

    @property
    def size(self) -> int:
        """See `Token.size`."""
        return sum(ENTRY_BYTES + TOP_BYTES * (1 + len(token.top)) for token in self.tokens)


Tokens = tuple[Token, ...]  # successive ones that were ready together; at least one


class Timed(tuple[Token, ...]):
    """Tokens, and the moments, on the request's clock, at which they came: told together afterwards by workers that are modelled
    (`baton.simulate`). Moments that are equal are those of tokens that were ready together."""

    times: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The suspicion that a request kills its workers (`router.poison`)."""

    position: int = -1  # tokens that it had when a process last died under it
    deaths: int = 0  # of processes, at that position
    without_token: int = 0  # of those deaths, how many came before the process had produced a token for it


def tie_of(request_id: str) -> int:
    """A hash of the id, the same in every router."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big")


@dataclass(slots=True)
class Guesses:
    """What became of the guesses of a request's tokens. A step's last token is the one that was not guessed, or that ended the output."""

    drafted: int = 0
    accepted: int = 0
    _steps: bytearray = field(default_factory=bytearray)
    _run: int = 0  # accepted ones since the last step ended

    def note(self, token: Token) -> None:
        self.accepted += token.guessed
        self.drafted += token.guessed + token.rejected
        self._run += token.guessed
        if (token.rejected or not token.guessed) and (self._run or token.rejected):
            if len(self._steps) < 2 * MAX_STEPS:
                self._steps += bytes((min(self._run, 255), min(token.rejected, 255)))
            self._run = 0

    def take_back(self, tokens: Tokens) -> None:
        """They are no output: it ended before them."""
        self.accepted -= sum(token.guessed for token in tokens)

    @property
    def steps(self) -> bytes:
        """Two bytes for each of the first `MAX_STEPS` steps with guesses: how many were accepted, and how many were not."""
        return bytes(self._steps) + bytes((min(self._run, 255), 0)) * bool(self._run)

    @property
    def places(self) -> tuple[Counter[str], Counter[str]]:
        """(guesses, right ones) at each place of those steps, from "1" to `MAX_PLACES`."""
        drafted, right = Counter[str](), Counter[str]()
        steps = self.steps
        for accepted, rejected in zip(steps[::2], steps[1::2], strict=True):
            drafted.update(PLACES[: accepted + rejected])
            right.update(PLACES[:accepted])
        return drafted, right


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
    model: str | None = None  # fingerprint of the model that began to answer: no other may continue
    suspicion: Suspicion = Suspicion()
    keys: list[bytes] = field(default_factory=list)  # of the full blocks of `tokens`, as far as they were needed
    arrival: int = 0  # its place in the order of arrival at this router
    priority: int = 0  # among those that wait: the lowest goes first
    backlog: Backlog = field(default_factory=Backlog)  # what waits for its client, with the other choices of the answer
    scores: list[PromptToken] = field(default_factory=list)  # of the prompt's tokens but the first, if they are asked for
    resumed: int = 0  # output tokens that it arrived with: an earlier call has streamed them
    family: "Family[Request, Any] | None" = None  # the answers to the same prompt
    choice: int = 0  # its place there
    tenant: str = ""
    chat_map: ChatMap | None = None  # of a chat
    found: tuple[Hypothesis, ...] = ()  # the answer of a beam search: `tokens` stays the prompt
    searched: int = 0  # tokens of each beam that a worker has computed, as it has told

    @property
    def tie(self) -> int:
        """Which of several equal workers it gets."""
        return tie_of(self.id)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len + sum(len(one.tokens) for one in self.found)

    @property
    def made(self) -> int:
        """Output tokens that were generated here."""
        return self.output_len - self.resumed

    @property
    def spent(self) -> int:
        """The same for which its tenant pays: of a search, all that it has computed, also if it was given up: an
        older worker tells only its answers."""
        beams = self.params.beams
        return self.made if beams is None else beams.width * max(self.searched, *(len(one.tokens) for one in self.found), 0)

    @property
    def unscored(self) -> bool:
        """Whether a worker is to say what the model thinks of the prompt. It told a client that has output."""
        return self.params.prompt_logprobs is not None and not self.output_len

    def note_scores(self, scores: Scores) -> None:
        """Another worker begins again, and says the same."""
        for each in scores.tokens:
            if each.index == len(self.scores) + 1:
                self.scores.append(each)

    def grow(self, tokens: Tokens) -> None:
        if isinstance(tokens, Timed):  # nothing of them was guessed
            self.tokens += [token.id for token in tokens]
            self.trace.note_tokens(tokens.times)
            return
        for token in tokens:
            self.tokens.append(token.id)
            self.trace.note_token()
            self.trace.guesses.note(token)

    def cut(self, tokens: Tokens) -> None:
        """Removes its last tokens, which are these: the output ended before them."""
        del self.tokens[len(self.tokens) - len(tokens) :]
        del self.trace.gaps[len(self.trace.gaps) - len(tokens) :]
        self.trace.guesses.take_back(tokens)

    @property
    def longest(self) -> int:
        """The most tokens that it may reach, prompt included, and all beams."""
        beams = self.params.beams
        return self.prompt_len + self.params.max_tokens * (1 if beams is None else beams.width)

    @property
    def longest_together(self) -> int:
        """The same with the answers that will begin with this one. Their prompt counts once."""
        return self.longest + sum(other.params.max_tokens for other in (self.family.waiting.values() if self.family else ()))


def emitted(request: Request) -> dict[str, str]:
    return {"tokens_emitted": str(request.output_len)}


def too_late(request: Request, when: str = "before it could be tried again") -> BatonError:
    return BatonError(Reason.DEADLINE, f"the deadline of the request passed {when}", metadata=emitted(request))
