"""What the router asks of its workers, and what they tell it. `router.clients` asks them over gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.records import Load, RoleName, WorkerRecord, WorkerState
from baton.engine.core.beams import Hypothesis
from baton.engine.core.block_key import DEVICE
from router.request import FinishReason, Request, Scores, Token, Tokens


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: Token
    handle: bytes  # empty when the token ends the output
    finish: FinishReason | None
    cached_tokens: int
    wait_ms: float
    compute_ms: float
    fetched_tokens: int = 0  # prompt tokens whose KV came from the source


@dataclass(frozen=True, slots=True)
class Opened:
    """The prefill has begun, and its KV can be read while the rest is computed (live transfer)."""

    handle: bytes


@dataclass(frozen=True, slots=True)
class Source:
    """A worker that is thought to cache the leading `blocks` blocks of a prompt."""

    worker: WorkerRecord
    blocks: int


PrefillEvent = Opened | FirstToken


@dataclass(frozen=True, slots=True)
class Adopted:
    handoff: Handoff
    cached_tokens: int = 0  # of a prompt that was computed there without a handoff. An older worker tells them at the end alone


@dataclass(frozen=True, slots=True)
class Searched:
    """How far a search has come. An older worker does not tell."""

    tokens: int  # that were computed for each beam


@dataclass(frozen=True, slots=True)
class Ended:
    finish: FinishReason
    recomputed_tokens: int
    cached_tokens: int


DecodeEvent = (
    Tokens | Scores | Searched | Hypothesis | Adopted | Ended
)  # hypotheses, the best first, instead of tokens if the request has beams


class Died(BatonError):
    """The process was lost while it served the call. A call that reached no process has the same reason but is not a Died."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.WORKER_LOST, message)


@dataclass(frozen=True, slots=True)
class CachePage:
    """A part of what the worker's cache held after event `sequence`."""

    incarnation: int
    sequence: int
    keys: list[bytes]
    medium: str = DEVICE


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a probe."""

    state: WorkerState
    load: Load
    roles: tuple[RoleName, ...]  # what it serves
    stalled_s: float  # for how long the engine has made no progress
    others_tokens: int = 0  # uncached tokens of the prompts of other routers that wait there or are computed


class Fork(Protocol):
    """A decode call that begins with another one, for another answer to the same prompt."""

    def events(self) -> AsyncGenerator[DecodeEvent, None]:
        """The events are those of `Workers.decode`. Called once. The call may also end with an error of the one that it begins with."""
        ...

    def close(self) -> None:
        """Nobody will read its events any more: ends the call on the worker, if it has not ended."""
        ...


class Workers(Protocol):
    """Those who compute. Every call may raise BatonError; closing a generator early cancels the call."""

    def prefill(
        self, worker: WorkerRecord, request: Request, timeout_s: float, source: Source | None = None, uncached_tokens: int = 0
    ) -> AsyncGenerator[PrefillEvent, None]:
        """Yields Opened at most once, when a long prompt has begun, then FirstToken. `source`: a worker that caches more of the prompt.
        `uncached_tokens`: what we count for it, which the worker tells other routers."""
        ...

    def decode(
        self,
        worker: WorkerRecord,
        request: Request,
        handle: bytes,
        timeout_s: float,
        first: "asyncio.Future[int] | None" = None,
        forks: Sequence[Any] = (),
    ) -> AsyncGenerator[DecodeEvent, None]:
        """Yields Adopted once the worker holds the KV of `handle` (empty: it computes the prompt itself), then tokens, then Ended. `first`:
        the token after the known ones, which is not known yet. `forks`, which `fork` has returned, begin with this call."""
        ...

    def fork(self, worker: WorkerRecord, request: Request, timeout_s: float) -> Fork:
        """A call that will begin with another one's `decode`, which is to follow at once."""
        ...

    def release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        """Ends a lease that no decode worker took over, without waiting."""
        ...

    async def hint(self, worker: WorkerRecord, keys: Sequence[bytes], within_s: float) -> int:
        """A prompt that begins with these blocks may come. Lasts as long as the worker loads; cancelled, the load ends. Returns how many
        blocks have come. Called only for one whose record says `brings`."""
        ...

    async def probe(self, worker: WorkerRecord, timeout_s: float) -> Answer:
        """Whether it answers, and how it is."""
        ...


OnOthers = Callable[[WorkerRecord, int], None]


class WatchedWorkers(Protocol):
    """Those who are members of the cluster."""

    on_others: OnOthers  # called with a worker and its `Answer.others_tokens`, when these change by much between two probes

    async def probe(self, worker: WorkerRecord, timeout_s: float) -> Answer:
        """See `Workers`."""
        ...

    def snapshot(self, worker: WorkerRecord) -> AsyncGenerator[CachePage, None]:
        """What its prefix cache holds. Raises BatonError."""
        ...

    def welcome(self, worker: WorkerRecord) -> None:
        """It has joined."""
        ...

    async def forget(self, worker: WorkerRecord) -> None:
        """It has left: nothing is opened to it any more."""
        ...

    async def lose(self, worker: WorkerRecord) -> None:
        """It hangs: its calls end as if it had died."""
        ...
