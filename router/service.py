"""Serves one Generate request from start to finish, in plain objects: validate, admit, tokenize, dispatch, turn tokens into text.

The doors (gRPC, HTTP) only translate. Before a request is admitted, only its bounds are checked (bytes and counts), so a refused request
costs next to nothing and is not charged.

A request may bring the beginning of its output, which another router has streamed. It is replayed for the text's sake, and the dispatcher
goes on from there, as it does after the death of a worker. A receipt (`router.resume`) shows that the request was charged before.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import time
from typing import Any, TypeVar

from baton.clock import loop_time
from baton.cluster import semconv
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason, invalid
from baton.engine.core.block_key import extend_keys, root_key
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.speculation import Speculation
from baton.engine.core.thinking import ThinkingBudget
from baton.engine.facts.model_facts import Recommended
from router.admission import Admission
from router.beams import check_fit, refusals
from router.best import Best
from router.chat_map import ChatMap
from router.choices import COPIED_A_TURN, siblings
from router.conversation import PLAIN, Setting, with_effort
from router.degradation import Lost
from router.dispatch import Dispatcher
from router.doorman import Doorman
from router.events import Accepted, Event, Finished, Pieces, TextPiece
from router.found import Found, found
from router.gate import Gate
from router.grammar_check import GrammarCheck
from router.journal import REFUSALS, Journal, JournalEntry
from router.kept import Kept
from router.known_texts import KnownTexts
from router.merging import merge
from router.rates import Rates, Unlimited
from router.request import FinishReason, PromptToken, Request, Scores, Stopwatch, Tokens, Trace
from router.resume import Receipt, prompt_digest, receipt_key
from router.served import Served, ServedModel
from router.tokenizer import Tokenizer
from router.tokenizer_pool import TokenizerPool
from router.tools import generic
from router.tools.forms import TAIL, Forms
from router.tools.reading import Reader
from router.transcript import Said, Transcript
from router.turnstile import Turnstile
from router.validate import Ask, AskSampling, Context, RequestLimits, check, predicts_too_much, recommend, resolve


@dataclass(frozen=True, slots=True)
class Rendered:
    """A request as the workers would see it."""

    prompt: Sequence[int]
    params: SamplingParams
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelText:
    """How the text of requests for a model becomes tokens."""

    tokenizer: Tokenizer
    recommended: Recommended = field(default_factory=Recommended)  # for requests that do not say otherwise
    forms: Forms = field(default_factory=Forms)
    path: Path | None = None  # of the model's folder; without one, no output can be held to a grammar


@dataclass(frozen=True, slots=True)
class Draws:
    """The seed and the id for a request that does not bring its own, and the time."""

    seed: Callable[[], int]
    request_id: Callable[[], str]
    clock: Callable[[], float] = loop_time  # of the running loop


@dataclass(frozen=True, slots=True)
class Tenancy:
    """What tenants may use, whether they share cached prefixes, and where their answers are kept."""

    rates: Rates | Unlimited = field(default_factory=Unlimited)
    shared_prefixes: bool = False
    receipt_key: bytes = field(default_factory=lambda: receipt_key(None, secrets.token_bytes), repr=False)
    kept: Kept | None = None  # None: nowhere


@dataclass(frozen=True, slots=True)
class _Plan:
    """A request that is ready to be dispatched."""

    id: str
    request: Request  # the first choice
    text: Transcript
    blank: Callable[[], Transcript]  # another one
    others: tuple[tuple[Request, Transcript], ...]  # the other choices
    stops: tuple[str, ...]
    receipt: bytes
    paid: bool  # an earlier call was charged for the prompt and the output so far
    relaxed: tuple[str, ...]


LONG_ANSWER = 512  # tokens of one answer of a search, whose text is made at once
LONG_PROMPT = 4096  # tokens; what is computed from every token of a longer prompt is computed off the event loop
CLOCKS_DIFFER_S = 60.0  # a receipt lives longer than any request, by this
SCORES_AT_ONCE = 64  # tokens of the prompt in one event
T = TypeVar("T")
NOTHING = Recommended()


class GenerateService:
    def __init__(
        self,
        *,
        model: ServedModel,
        text: ModelText,
        dispatcher: Dispatcher,
        admission: Admission,
        config: RouterConfig,
        journal: Journal,
        draws: Draws,
        tenancy: Tenancy | None = None,
    ) -> None:
        self._model = model
        self.model_name = model.name
        self._tokenizer = text.tokenizer
        self._recommended = text.recommended
        self._limits = RequestLimits(max_choices=config.max_choices, max_answer_tokens=config.max_answer_tokens)
        self._forms = text.forms
        self._grammars = GrammarCheck(text.path, text.tokenizer.vocab_size, draws.clock)
        self._dispatcher = dispatcher
        self._clock = draws.clock
        self._gate = Gate(admission, model, config, journal.objectives, draws.clock)
        self.doorman = Doorman(self._gate, journal, model, draws.clock, self._clamp, lambda: not self.draining)
        self._turns = Turnstile(COPIED_A_TURN)
        self._pool = TokenizerPool(config.tokenizer_threads, config.max_inflight)
        self.texts = KnownTexts(config.known_texts_mib << 20)
        self._config, self._journal = config, journal
        self._draws = draws
        tenancy = tenancy or Tenancy()
        self._rates, self._receipt_key = tenancy.rates, tenancy.receipt_key
        self._shared_prefixes = tenancy.shared_prefixes
        self.kept = tenancy.kept
        self.draining = False

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output, in tokens; None until the first worker reports it."""
        return self._model.served.max_model_len if self._model.served else None

    @property
    def idle(self) -> bool:
        return self._gate.idle

    def close(self) -> None:
        self._pool.close()
        self._grammars.close()

    async def generate(self, ask: Ask, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        """Yields Accepted, Scores if the prompt's are asked for, Pieces, or Found for each answer of a beam search, and then Finished.
        Raises BatonError. Closing the generator ends the request everywhere."""
        operation = semconv.TEXT_COMPLETION if ask.messages is None else semconv.CHAT
        with self._journal.open(operation, ask.request_id, ask.traceparent, ask.tenant, tracestate=ask.tracestate) as entry:
            if self.draining:
                raise BatonError(Reason.DRAINING, "this router is draining")
            if self._recommended != NOTHING:
                ask = self._with_defaults(ask)
            self._check(ask)
            entry.deadline = deadline = (now := self._clock()) + self._clamp(timeout_s)
            if deadline <= now:
                raise BatonError(Reason.DEADLINE, "the deadline had passed before the request arrived")
            receipt = self._check_receipt(ask, self._served())
            ask, degraded = self._journal.degradation.serve(ask, self._served().offer)
            self._gate.check(entry, ask, deadline)
            if receipt is None:
                await self._rates.check(ask.tenant)
            async with aclosing(self._serve(ask, receipt, deadline, entry, degraded)) as events:
                async for event in events:
                    yield event

    async def tokenize(self, ask: Ask) -> list[int]:
        """Returns the prompt of `ask` as token ids. Raises BatonError: CONTEXT_LENGTH for a prompt that is longer than the context."""
        self._check(ask)
        ids, _ = await self._tokenize(ask, self._clock() + self._config.default_timeout_s)
        return ids

    async def render(self, ask: Ask) -> Rendered:
        """What `generate` would compute of `ask`. Nothing is computed, and nothing is charged. Raises BatonError."""
        ask = self._with_defaults(ask)
        self._check(ask)
        plan = await self._make_plan(ask, None, self._clock() + self._config.default_timeout_s, Trace(Stopwatch(self._clock)))
        return Rendered(plan.request.tokens, plan.request.params, plan.stops)

    def _with_defaults(self, ask: Ask) -> Ask:
        """A search draws nothing: how to draw is recommended to others."""
        recommended = self._recommended if ask.beams is None else replace(self._recommended, numbers={})
        return replace(ask, sampling=recommend(ask.sampling, recommended))

    async def detokenize(self, ask: Ask) -> str:
        """Returns the text of the token ids of `ask`. Raises BatonError as `tokenize` does."""
        return await asyncio.to_thread(self._tokenizer.decode, await self.tokenize(ask))

    def _check(self, ask: Ask) -> None:
        most, spelled = self.max_model_len, ask.text is not None and ask.parse_special is not False
        longest = self._tokenizer.longest_spelling if spelled else self._tokenizer.longest_token
        context = None if most is None else Context(most, longest)
        offer = None if self._model.served is None else self._model.served.offer
        more = () if ask.beams is None else refusals(ask, ask.beams)
        check(ask, self._limits, (self.model_name,), self._tokenizer.vocab_size, context, offer, more)
        if ask.sampling.stop:
            self._tokenizer.stop_tokens(ask.sampling.stop)
        if ask.setting is not PLAIN:
            if ask.setting.offered and ask.sampling.structured is not None:
                raise invalid("sampling.structured", "cannot be combined with tools, unless tool_choice is none: a call has another form")
            self._forms.check(ask.setting)
            self._setting(ask)

    def _served(self) -> Served:
        if self._model.served is None:
            raise BatonError(Reason.NO_WORKER, "no worker is ready")
        return self._model.served

    def _check_receipt(self, ask: Ask, served: Served) -> Receipt | None:
        if not ask.resume:
            return None
        receipt = Receipt.unseal(ask.resume, self._receipt_key)
        receipt.check(ask.request_id, ask.tenant, served.model_fingerprint, time())
        return receipt

    async def _serve(
        self, ask: Ask, receipt: Receipt | None, deadline: float, entry: JournalEntry, degraded: Lost
    ) -> AsyncGenerator[Event, None]:
        async with self._gate.place(entry, ask, deadline):
            entry.trace.step = "tokenizing"
            plan = await self._make_plan(ask, receipt, deadline, entry.trace)
            request, text = plan.request, plan.text
            entry.request, entry.trace.step = request, ""
            with self._journal.shared(entry, ask.traceparent, ask.tracestate, [other for other, _ in plan.others]) as entries:
                async with self._charged(ask.tenant, plan), aclosing(self._answers(plan, ask, entries, deadline)) as events:
                    facts = (plan.id, self.model_name, request.prompt_len, _told(request.params, ask.sampling))
                    yield Accepted(*facts, plan.stops, plan.receipt, request.resumed, text.shown, plan.relaxed, ask.n, degraded)
                    async for event in events:
                        yield event

    def _answers(
        self, plan: _Plan, ask: Ask, entries: Sequence[JournalEntry], deadline: float
    ) -> AsyncGenerator[Scores | Pieces | Found | Finished, None]:
        if ask.beams is not None:
            return self._search(plan, entries[0], deadline)
        return self._choices(plan, ask, entries) if plan.others else self._run(plan.request, plan.text, entries[0])

    async def _choices(self, plan: _Plan, ask: Ask, entries: Sequence[JournalEntry]) -> AsyncGenerator[Scores | Pieces | Finished, None]:
        runs = [self._run(*each, entry) for each, entry in zip(((plan.request, plan.text), *plan.others), entries, strict=True)]
        best = Best(ask.n, len(runs), ask.sampling.logprobs) if ask.computed > ask.n else None
        async with aclosing(merge(runs)) as merged:
            async for choice, event in merged:
                if best is None or isinstance(event, Scores):
                    yield replace(event, choice=choice)
                else:
                    best.take(choice, event)
        if best is not None:
            for event in best.events():
                yield event

    async def _make_plan(self, ask: Ask, receipt: Receipt | None, deadline: float, trace: Trace) -> _Plan:
        served = self._served()
        relaxed = await self._grammars.form(ask, served, deadline)
        prompt, chat_map = await self._tokenize(ask, deadline)
        end = "" if ask.setting is PLAIN and ask.messages is None else self._tokenizer.spelled(prompt[-TAIL:])
        thinking = self._forms.budget(ask.setting, end, partial(self._tokenizer.encode, add_special_tokens=False))
        if ask.messages is not None:
            ask, more = self._demanded(ask, end)
            relaxed = (relaxed or await self._grammars.form(ask, served, deadline)) + more
        await self._grammars.output(ask, thinking, served, deadline)
        params, stops = await self._params(ask, len(prompt), thinking, served, deadline)
        id_ = ask.request_id or (receipt.request_id if receipt else self._draws.request_id())
        output = list(ask.output_so_far)
        digest = await self._off_loop(len(prompt) > LONG_PROMPT, deadline, prompt_digest, prompt)
        check_fit(params, len(prompt), self._model.decode_workers())
        name = f"{id_}-0" if ask.computed > 1 else id_
        blank = partial(self._transcript, ask, prompt, params, stops, self._forms.call_id(name, digest))
        text = blank()
        tokens = [*prompt, *output] if output else prompt
        facts = name, tokens, len(prompt), params, self._salt(ask), deadline, trace
        request = Request(*facts, resumed=len(output), priority=ask.priority, backlog=ask.backlog, tenant=ask.tenant, chat_map=chat_map)
        long = len(prompt) > LONG_PROMPT
        if receipt is not None:
            receipt.check_model(served.model_fingerprint)  # it may have changed while the request waited
            receipt.check_prompt(digest)
        if long:
            root = root_key(served.model_fingerprint, request.salt)
            await self._off_loop(long, deadline, extend_keys, request.keys, root, tokens, served.block_size, len(prompt))
        if long or receipt is not None:
            request.model = served.model_fingerprint
        if output:
            request.finish = await self._off_loop(True, deadline, text.replay, output, served.eos_token_ids)
        expires_at = time() + self._config.max_timeout_s + CLOCKS_DIFFER_S
        new = Receipt.of(id_, digest, served.model_fingerprint, ask.tenant, expires_at)
        text_of = lambda one: self._transcript(ask, prompt, one.params, stops, self._forms.call_id(one.id, digest))  # noqa: E731
        others = await siblings(request, id_, ask.computed, text_of, self._turns)
        sealed = b"" if others else ask.resume or new.sealed(self._receipt_key)
        return _Plan(id_, request, text, blank, others, stops, sealed, receipt is not None, relaxed)

    async def _params(
        self, ask: Ask, prompt_tokens: int, thinking: ThinkingBudget | None, served: Served, deadline: float
    ) -> tuple[SamplingParams, tuple[str, ...]]:
        """The parameters of the first choice, and the stop strings. Raises as `resolve` and `_speculation` do."""
        params, stops = resolve(ask, prompt_tokens, served.max_model_len, self._draws.seed(), self._limits)
        if stops:
            params = replace(params, stop_token_ids=params.stop_token_ids | self._tokenizer.stop_tokens(stops))
        params = replace(params, thinking=thinking) if thinking is not None else params
        params = replace(params, speculation=await self._speculation(ask, served, deadline)) if ask.guides else params
        params = replace(params, logprobs=params.logprobs or 0) if ask.computed > ask.n else params
        return params, stops

    def _demanded(self, ask: Ask, prompt_end: str) -> tuple[Ask, tuple[str, ...]]:
        """The ask with the form of the whole output, of demanded calls and of thinking; and what of it is not enforced."""
        form, relaxed = ask.sampling.structured, tuple[str, ...]()
        if demand := self._forms.demand(ask.setting, prompt_end):
            form, relaxed = demand.grammar, demand.relaxed
        elif form is not None:
            form = self._forms.beside_thinking(form, ask.setting, prompt_end)
        if form is ask.sampling.structured:
            return ask, relaxed
        return replace(ask, sampling=replace(ask.sampling, structured=form)), relaxed

    def _finished(self, request: Request, reason: FinishReason, text: Transcript, rest: Said) -> Finished:
        eos = self._model.served.eos_token_ids if self._model.served else frozenset()
        complete = reason == "stop" and text.stop is None and (text.ended or request.tokens[-1] in eos)
        incomplete, calls = request.params.structured is not None and not complete, text.reader.calls if text.reader is not None else 0
        told = rest.text, text.stop, rest.deltas, calls, text.reasoning_tokens, incomplete, text.predicted
        return Finished(request, reason, *told, uncached=request.trace.uncached)

    def _transcript(
        self, ask: Ask, prompt: Sequence[int], params: SamplingParams, stops: Sequence[str], id_of: Callable[[int], str]
    ) -> Transcript:
        format = None
        if ask.messages is not None:
            format = self._forms.format(ask.setting, self._tokenizer.spelled(prompt[-TAIL:]), id_of)
        if format is None:
            return Transcript(self._tokenizer, prompt, params, stops)
        return Transcript(self._tokenizer, prompt, params, stops, Reader(format), self._forms.marks)

    def _setting(self, ask: Ask) -> Setting:
        """Raises INVALID_FIELD."""
        return with_effort(ask.setting, self._tokenizer.variables, self._forms.thinking is not None)

    async def _run(self, request: Request, text: Transcript, entry: JournalEntry) -> AsyncGenerator[Scores | Pieces | Finished, None]:
        if request.finish is None:  # else the output had ended when its stream broke
            async with aclosing(self._dispatcher.generate(request)) as batches:
                async for tokens in batches:
                    for scores in _scores(request) if request.made == len(tokens) else ():
                        yield scores
                    pieces = _pieces(tokens, request.output_len - len(tokens), text)
                    request.cut(tokens[len(pieces) :])
                    yield Pieces(pieces)
                    if text.ended:
                        break
        request.trace.watch.stop()
        rest = text.flush(None if text.ended else request.finish)
        reason = "stop" if text.ended else request.finish
        if reason is None:
            raise BatonError(Reason.INTERNAL, "the request ended without a reason")
        entry.finish = reason
        yield self._finished(request, reason, text, rest)

    async def _search(self, plan: _Plan, entry: JournalEntry, deadline: float) -> AsyncGenerator[Found | Finished, None]:
        request = plan.request
        async with aclosing(self._dispatcher.generate(request)) as batches:
            async for _ in batches:
                raise BatonError(Reason.INTERNAL, "a beam search streamed tokens")
        request.trace.watch.stop()
        assert request.finish is not None
        for index, one in enumerate(request.found):
            yield await self._off_loop(len(one.tokens) > LONG_ANSWER, deadline, found, index, one, plan.blank())
        entry.finish = request.finish
        yield Finished(request, request.finish, "", None, uncached=request.trace.uncached)

    async def _tokenize(self, ask: Ask, deadline: float) -> tuple[list[int], ChatMap | None]:
        if ask.token_ids is not None:
            return list(ask.token_ids), None
        left, most = deadline - self._clock(), self.max_model_len
        if ask.messages is not None:
            messages, names, setting = ask.messages, ask.names, self._setting(ask)
            if not self._forms.templated and (setting.offered or setting.asides):
                messages, setting = generic.told(messages, setting), replace(setting, tools=(), asides=())
                names = ()
            chat_map = ChatMap([content for _, content in ask.messages], self.texts.of(self._salt(ask)), self._tokenizer.decode)
            return await self._pool.run(self._tokenizer.render, messages, names, most, setting, chat_map.ids, within_s=left), chat_map
        parsed, around = ask.parse_special is not False, ask.add_special_tokens is not False
        encode = partial(self._tokenizer.encode, parse_special=parsed, add_special_tokens=around)
        return await self._pool.run(encode, ask.text or "", most, within_s=left), None

    async def _speculation(self, ask: Ask, served: Served, deadline: float) -> Speculation:
        """The speculation with the token ids of a prediction that is text. Raises INVALID_FIELD, as `check` does for what it can know."""
        if ask.predicted_text is None:
            return ask.speculation
        field = "prediction.text"
        within_s = deadline - self._clock()
        ids = await self._pool.run(self._tokenizer.encode_output, ask.predicted_text, field, within_s=within_s, begun=True)
        if wrong := predicts_too_much(len(ids), ask, served.max_model_len):
            raise invalid(field, wrong)
        return replace(ask.speculation, prediction=tuple(ids))

    async def _off_loop(self, long: bool, deadline: float, function: Callable[..., T], *arguments: Any) -> T:
        """Calls `function`, if it takes `long` in a thread."""
        if long:
            return await self._pool.run(function, *arguments, within_s=deadline - self._clock(), begun=True)
        return function(*arguments)

    @asynccontextmanager
    async def _charged(self, tenant: str, plan: _Plan) -> AsyncIterator[None]:
        """Charges the quota; no other code does. The prompt is charged on admission, the output at the end, however the request ends. A
        request that is refused later, before anything was computed for it, costs nothing. Output of an earlier call counts as a prompt,
        and like the prompt, it is free if it was charged before."""
        requests, known = [plan.request, *(other for other, _ in plan.others)], len(plan.request.tokens)
        if not plan.paid:
            await self._rates.admit(tenant, known)
        try:
            yield
        except BatonError as error:
            if error.reason in REFUSALS and not any(request.made for request in requests) and not plan.paid:
                await self._rates.refund(tenant, known)
            raise
        finally:
            await self._rates.charge(tenant, sum(request.spent for request in requests))

    def _salt(self, ask: Ask) -> str:
        """Separates the block keys of tenants, who share cached prefixes only if the configuration says so."""
        return ask.cache_salt if self._shared_prefixes or not ask.tenant else f"{ask.tenant}\0{ask.cache_salt}"

    def _clamp(self, timeout_s: float | None) -> float:
        return min(self._config.default_timeout_s if timeout_s is None else timeout_s, self._config.max_timeout_s)


def _told(params: SamplingParams, asked: AskSampling) -> SamplingParams:
    """What the client sends back to go on: its own form, not the one that follows from tools and thinking."""
    if params.structured is asked.structured and params.logprobs == asked.logprobs:
        return params
    return replace(params, structured=asked.structured, logprobs=asked.logprobs)


def _scores(request: Request) -> Iterator[Scores]:
    """What was asked of the prompt; nothing comes before its first token. Raises INTERNAL if a worker did not tell all, as an older one."""
    if request.params.prompt_logprobs is None or request.resumed:
        return
    told = [PromptToken(0, request.tokens[0]), *request.scores]
    if len(told) != request.prompt_len:
        raise BatonError(Reason.INTERNAL, f"the worker told what it thinks of {len(told)} of {request.prompt_len} tokens of the prompt")
    for start in range(0, len(told), SCORES_AT_ONCE):
        yield Scores(tuple(told[start : start + SCORES_AT_ONCE]))


def _pieces(tokens: Tokens, start: int, text: Transcript) -> tuple[TextPiece, ...]:
    """The pieces of the tokens, up to a stop string that ends the output. `start`: index of the first token in the output."""
    made = []
    for index, token in enumerate(tokens, start):
        said = text.push(token.id)
        made.append(TextPiece(index, token, said.text, said.deltas))
        if text.ended:
            break
    return tuple(made)
