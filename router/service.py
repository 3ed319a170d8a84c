"""One Generate request from question to answer, in plain objects: validate, tokenise, admit, dispatch, turn tokens into text.

The doors (gRPC, HTTP) only translate.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from baton.cluster import semconv
from baton.cluster.config import RouterConfig
from baton.cluster.errors import BatonError, Reason
from router.admission import Admission, Admitted, Refused
from router.detokenizer import Detokenizer
from router.dispatch import Dispatcher
from router.journal import Journal
from router.rates import Rates, Unlimited
from router.request import FinishReason, Request, Token
from router.stop import StopMatcher
from router.tokenizer import Tokenizer
from router.validate import Ask, Limits, check, resolve
from router.view import ClusterView


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: str
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of the output and the text that it completed."""

    index: int
    token: Token
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    request: Request
    reason: FinishReason
    text: str  # held back until now
    stop: str | None  # the stop string that ended the output


Event = Accepted | Piece | Finished
Draw = Callable[[], int]


class GenerateService:
    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        model_name: str,
        view: ClusterView,
        dispatcher: Dispatcher,
        admission: Admission,
        config: RouterConfig,
        journal: Journal,
        draw_seed: Draw,
        draw_id: Callable[[], str],
        limits: Limits | None = None,
        rates: Rates | Unlimited | None = None,
        shared_prefixes: bool = False,
    ) -> None:
        self._shared_prefixes = shared_prefixes
        self._tokenizer = tokenizer
        self.model_name = model_name
        self._view = view
        self._dispatcher = dispatcher
        self._admission = admission
        self._config = config
        self._journal = journal
        self._draw_seed = draw_seed
        self._draw_id = draw_id
        self._limits = limits or Limits()
        self._rates = rates or Unlimited()
        self._waiting: dict[str, asyncio.Event] = {}
        self._attempts = itertools.count(1)
        self.draining = False

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output, in tokens; None until the first worker has told."""
        return self._view.served.max_model_len if self._view.served else None

    @property
    def idle(self) -> bool:
        return self._admission.inflight == 0 and self._admission.queued == 0

    async def generate(self, ask: Ask, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        """Accepted, then Pieces, then Finished. Raises BatonError. Closing the generator ends the request everywhere."""
        operation = semconv.TEXT_COMPLETION if ask.messages is None else semconv.CHAT
        with self._journal.open(operation, ask.request_id, ask.traceparent) as entry:
            if self.draining:
                raise BatonError(Reason.DRAINING, "this router is draining")
            check(ask, self._limits, (self.model_name,), self._tokenizer.vocab_size)
            deadline = monotonic() + self._clamp(timeout_s)
            if deadline <= monotonic():
                raise BatonError(Reason.DEADLINE, "the deadline was over before the request came")
            served = self._view.served
            if served is None:
                raise BatonError(Reason.NO_WORKER, "no worker is ready")
            tokens = await self._tokenize(ask, deadline)
            params, stops = resolve(ask, len(tokens), served.max_model_len, self._draw_seed())
            request = Request(ask.request_id or self._draw_id(), tokens, len(tokens), params, self._salt(ask), deadline, entry.trace)
            entry.request = request
            await self._rates.admit(ask.tenant, request.prompt_len)
            async with self._charged(ask.tenant, request), self._admitted(request, ask.priority):
                yield Accepted(request.id, self.model_name, request.prompt_len)
                async with aclosing(self._run(request, stops)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            entry.finish = event.reason
                        yield event

    async def tokenize(self, ask: Ask) -> list[int]:
        """The prompt of `ask` as ids. Raises BatonError."""
        check(ask, self._limits, (self.model_name,), self._tokenizer.vocab_size)
        return await self._tokenize(ask, monotonic() + self._config.default_timeout_s)

    async def _run(self, request: Request, stops: tuple[str, ...]) -> AsyncGenerator[Event, None]:
        text = Detokenizer(self._tokenizer, request.tokens[-8:])
        matcher = StopMatcher(stops)
        matched: str | None = None
        async with aclosing(self._dispatcher.generate(request)) as tokens:
            async for token in tokens:
                visible, matched = matcher.push("" if _is_stop(request, token) else text.push(token.id))
                yield Piece(request.output_len - 1, token, visible)
                if matched is not None:
                    break
        request.trace.watch.stop()
        if matched is not None:
            yield Finished(request, "stop", "", matched)
            return
        visible, matched = matcher.push(text.flush())
        rest = visible if matched is not None else visible + matcher.flush()
        if request.finish is None:
            raise BatonError(Reason.INTERNAL, "the request ended without a reason")
        yield Finished(request, request.finish if matched is None else "stop", rest, matched)

    async def _tokenize(self, ask: Ask, deadline: float) -> list[int]:
        if ask.token_ids is not None:
            return list(ask.token_ids)
        try:
            async with asyncio.timeout(deadline - monotonic()):
                if ask.messages is not None:
                    return await asyncio.to_thread(self._tokenizer.render, ask.messages, ask.names)
                return await asyncio.to_thread(self._tokenizer.encode, ask.text or "")
        except TimeoutError:
            raise BatonError(Reason.DEADLINE, "the deadline was over before the prompt was tokenised") from None

    @asynccontextmanager
    async def _charged(self, tenant: str, request: Request) -> AsyncIterator[None]:
        """However it ends, its tenant has used what it got."""
        try:
            yield
        finally:
            await self._rates.charge(tenant, request.output_len)

    @asynccontextmanager
    async def _admitted(self, request: Request, priority: int) -> AsyncIterator[None]:
        """A place among the requests being served; waits for its turn, `queue_timeout_s` at most."""
        slot = f"{request.id}#{next(self._attempts)}"
        turn = self._waiting[slot] = asyncio.Event()
        try:
            answer = self._admission.enter(slot, priority)
            if isinstance(answer, Refused):
                raise BatonError(Reason.SATURATED, "too many requests are being served and waiting")
            if not isinstance(answer, Admitted):
                await self._wait(turn, request)
            yield
        finally:
            del self._waiting[slot]
            for next_slot in self._admission.leave(slot):
                self._waiting[next_slot].set()

    async def _wait(self, turn: asyncio.Event, request: Request) -> None:
        left = request.deadline - monotonic()
        try:
            async with asyncio.timeout(min(left, self._config.queue_timeout_s)):
                await turn.wait()
        except TimeoutError:
            if left <= self._config.queue_timeout_s:
                raise BatonError(Reason.DEADLINE, "the deadline was over before the request could be served") from None
            raise BatonError(Reason.SATURATED, f"waited {self._config.queue_timeout_s:g} s for admission") from None

    def _salt(self, ask: Ask) -> str:
        """What tells block keys apart: tenants do not share cached prefixes unless they are told to."""
        return ask.cache_salt if self._shared_prefixes or not ask.tenant else f"{ask.tenant}\0{ask.cache_salt}"

    def _clamp(self, timeout_s: float | None) -> float:
        return min(self._config.default_timeout_s if timeout_s is None else timeout_s, self._config.max_timeout_s)


def _is_stop(request: Request, token: Token) -> bool:
    """Whether `token`, the last of the output so far, is a stop token that ends it: such a token has no text."""
    return token.id in request.params.stop_token_ids and request.output_len >= request.params.min_tokens
