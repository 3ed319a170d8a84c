"""Serves one Generate request from start to finish, in plain objects: validate, admit, tokenize, dispatch, turn tokens into text.

The doors (gRPC, HTTP) only translate. Before a request is admitted, only its bounds are checked (bytes and counts), so a refused request
costs next to nothing and is not charged.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from baton.cluster import semconv
from baton.cluster.config import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.engine.block_key import extend_keys, root_key
from router.admission import Admission
from router.detokenizer import Detokenizer
from router.dispatch import Dispatcher
from router.gate import Gate
from router.journal import REFUSALS, Entry, Journal
from router.rates import Rates, Unlimited
from router.request import FinishReason, Request, Token, Trace
from router.stop import StopMatcher
from router.tokenizer import Tokenizer
from router.tokenizer_pool import TokenizerPool
from router.validate import Ask, Context, Limits, check, resolve
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
    text: str  # what was held back until now
    stop: str | None  # the stop string that ended the output


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that requests ask for, and the tokenizer that turns their text into tokens."""

    name: str
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Draws:
    """The seed and the id for a request that does not bring its own."""

    seed: Callable[[], int]
    request_id: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Tenancy:
    """What tenants may use, and whether they share cached prefixes."""

    rates: Rates | Unlimited = field(default_factory=Unlimited)
    shared_prefixes: bool = False


LONG_PROMPT = 4096  # tokens; the block keys of a longer prompt are computed off the event loop
Event = Accepted | Piece | Finished
_LIMITS = Limits()


class GenerateService:
    def __init__(
        self,
        *,
        model: ServedModel,
        view: ClusterView,
        dispatcher: Dispatcher,
        admission: Admission,
        config: RouterConfig,
        journal: Journal,
        draws: Draws,
        tenancy: Tenancy | None = None,
    ) -> None:
        self._tokenizer = model.tokenizer
        self.model_name = model.name
        self._view = view
        self._dispatcher = dispatcher
        self._gate = Gate(admission, view, config, journal.objectives)
        self._pool = TokenizerPool(config.tokenizer_threads, config.max_inflight)
        self._config = config
        self._journal = journal
        self._draws = draws
        tenancy = tenancy or Tenancy()
        self._rates = tenancy.rates
        self._shared_prefixes = tenancy.shared_prefixes
        self.draining = False

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output, in tokens; None until the first worker reports it."""
        return self._view.served.max_model_len if self._view.served else None

    @property
    def idle(self) -> bool:
        return self._gate.idle

    def close(self) -> None:
        self._pool.close()

    async def generate(self, ask: Ask, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        """Yields Accepted, then Pieces, then Finished. Raises BatonError. Closing the generator ends the request everywhere."""
        operation = semconv.TEXT_COMPLETION if ask.messages is None else semconv.CHAT
        with self._journal.open(operation, ask.request_id, ask.traceparent) as entry:
            if self.draining:
                raise BatonError(Reason.DRAINING, "this router is draining")
            self._check(ask)
            deadline = monotonic() + self._clamp(timeout_s)
            if deadline <= monotonic():
                raise BatonError(Reason.DEADLINE, "the deadline had passed before the request arrived")
            if self._view.served is None:
                raise BatonError(Reason.NO_WORKER, "no worker is ready")
            await self._rates.check(ask.tenant)
            async with aclosing(self._serve(ask, deadline, entry)) as events:
                async for event in events:
                    yield event

    async def tokenize(self, ask: Ask) -> list[int]:
        """Returns the prompt of `ask` as token ids. Raises BatonError: CONTEXT_LENGTH for a prompt that is longer than the context."""
        self._check(ask)
        return await self._tokenize(ask, monotonic() + self._config.default_timeout_s)

    def _check(self, ask: Ask) -> None:
        longest = self.max_model_len
        context = None if longest is None else Context(longest, self._tokenizer.longest_token)
        check(ask, _LIMITS, (self.model_name,), self._tokenizer.vocab_size, context)

    async def _serve(self, ask: Ask, deadline: float, entry: Entry) -> AsyncGenerator[Event, None]:
        entry.trace.step = "admission"
        async with self._gate.place(entry, ask, deadline):
            entry.trace.step = "tokenizing"
            request, stops = await self._make_request(ask, deadline, entry.trace)
            entry.request, entry.trace.step = request, ""
            async with self._charged(ask.tenant, request), aclosing(self._run(request, stops)) as events:
                yield Accepted(request.id, self.model_name, request.prompt_len)
                async for event in events:
                    if isinstance(event, Finished):
                        entry.finish = event.reason
                    yield event

    async def _make_request(self, ask: Ask, deadline: float, trace: Trace) -> tuple[Request, tuple[str, ...]]:
        served = self._view.served
        if served is None:
            raise BatonError(Reason.NO_WORKER, "no worker is ready")
        tokens = await self._tokenize(ask, deadline)
        params, stops = resolve(ask, len(tokens), served.max_model_len, self._draws.seed())
        request = Request(ask.request_id or self._draws.request_id(), tokens, len(tokens), params, self._salt(ask), deadline, trace)
        if len(tokens) > LONG_PROMPT:
            request.model = served.model_fingerprint
            root = root_key(served.model_fingerprint, request.salt)
            await self._pool.run(extend_keys, request.keys, root, tokens, served.block_size, within_s=deadline - monotonic())
        return request, stops

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
        left, most = deadline - monotonic(), self.max_model_len
        if ask.messages is not None:
            return await self._pool.run(self._tokenizer.render, ask.messages, ask.names, most, within_s=left)
        return await self._pool.run(self._tokenizer.encode, ask.text or "", most, within_s=left)

    @asynccontextmanager
    async def _charged(self, tenant: str, request: Request) -> AsyncIterator[None]:
        """Charges the quota; no other code does. The prompt is charged on admission, the output at the end, however the request ends. A
        request that is refused later, before anything was computed for it, costs nothing."""
        await self._rates.admit(tenant, request.prompt_len)
        try:
            yield
        except BatonError as error:
            if error.reason in REFUSALS and not request.output_len:
                await self._rates.refund(tenant, request.prompt_len)
            raise
        finally:
            await self._rates.charge(tenant, request.output_len)

    def _salt(self, ask: Ask) -> str:
        """Separates the block keys of tenants, who share cached prefixes only if the configuration says so."""
        return ask.cache_salt if self._shared_prefixes or not ask.tenant else f"{ask.tenant}\0{ask.cache_salt}"

    def _clamp(self, timeout_s: float | None) -> float:
        return min(self._config.default_timeout_s if timeout_s is None else timeout_s, self._config.max_timeout_s)


def _is_stop(request: Request, token: Token) -> bool:
    """Whether `token`, the last of the output so far, is a stop token that ends it: such a token has no text."""
    return token.id in request.params.stop_token_ids and request.output_len >= request.params.min_tokens
