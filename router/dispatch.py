"""The dispatcher owns a request from admission to its last token, and it alone decides what becomes of the request.

    generate
      1 choose_prefill → prefill worker            or bypass: the decode worker computes the prompt itself
      2 Prefill → first token, handle              the token goes to the client immediately
        opened (long prompts only): live transfer. The KV can be read while the rest is computed, so step 3 and the start of 4 happen now
      3 choose_decode → decode worker              late, with fresh load; another one if it fails before it holds the KV
      4 Decode → adopted, tokens, ended

A worker failure costs a retry: the tokens already sent become part of the prompt, and the request starts again at 1 on another worker.
The sampler's noise is a function of (seed, position), so the continued stream equals the undisturbed one. Whatever the request holds
(a lease, a place on a worker, a number in the view) is released where it was acquired, in a `finally`.

It is not a failure if all decode workers are full: the request waits for one before its prompt is computed.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from baton.clock import loop_time
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.records import WorkerRecord
from baton.engine.core.beams import Hypothesis
from baton.engine.core.block_key import root_key
from router.choosing import Choosing
from router.conduct import Conduct
from router.hints import Hints
from router.life import Life
from router.live_decode import LiveDecode
from router.outliers import Stride
from router.poison import Poison
from router.policy import TERMS, Choice, Identity
from router.predictions import CheckedPrediction
from router.prompt_lease import JoinedCall, PromptLease, Started
from router.request import NEAR_DEADLINE_S, Failure, Request, Scores, Timed, Tokens, emitted, too_late
from router.request_log import RequestLog, name
from router.served import ServedModel
from router.uncached import Explainer, Prompt, Sought
from router.waiting_room import NoRoom, WaitingRoom
from router.workers import Adopted, DecodeEvent, Died, Ended, FirstToken, Fork, Opened, Searched, Source, Workers

log = logging.getLogger(__name__)
# The decode worker failed, not the KV: the prefill worker's lease is still good.
LEASE_STANDS = frozenset({Reason.WORKER_LOST, Reason.WRONG_WORKER, Reason.DRAINING, Reason.SATURATED})
Given = Callable[[], AsyncGenerator[DecodeEvent, None]]  # what yields the events of a decode call, which may be running already


class Dispatcher:
    def __init__(
        self,
        model: ServedModel,
        workers: Workers,
        config: RouterConfig,
        clock: Callable[[], float] = loop_time,
        max_queue: int = TERMS.max_queue,
        caching: bool = True,
    ) -> None:
        """`max_queue`: how many sequences a worker lets wait. `caching`: whether workers keep what they have computed."""
        self._model, self._members = model, model.members
        self._workers = workers
        self._config = config
        self._clock = clock
        self._numbers = itertools.count(1)
        self._arrivals = itertools.count()
        self.conduct = Conduct(model, config, clock)
        self._poison = Poison()
        self._suspects = WaitingRoom()  # those that wait until another one has been tried
        self._log = RequestLog(log)
        self._life = Life(workers, config.hang_s)
        self._explainer = Explainer(model, config.fetch_tokens, config.load_tokens, caching)
        self._choosing = Choosing(model, config, self.conduct, clock, max_queue, Hints(workers.hint))
        self.policy = self._choosing.policy

    async def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        """Yields every token of the output once and in order. At the end, `request.finish` says why the output ended.

        Closing the generator ends the request everywhere. Raises BatonError if the request cannot be continued.
        """
        request.arrival = next(self._arrivals)
        failed: set[Identity] = set()  # workers that failed this request
        self._refuse_poison(request)
        try:
            joined = await self._turn_in_family(request)
            while request.finish is None:
                await self._wait_for_trial(request)
                attempt = self._attempt(request, failed) if joined is None else self._join(request, joined, failed)
                joined = None
                async with aclosing(attempt) as batches:
                    async for tokens in batches:
                        self._grow(request, tokens)
                        yield tokens
        finally:
            if self._poison.forget(request):
                self._suspects.call()
            self._leave_family(request)

    def _grow(self, request: Request, tokens: Tokens) -> None:
        request.grow(tokens)
        if self._poison.trial is request:
            self._suspects.call()

    async def _attempt(self, request: Request, failed: set[Identity]) -> AsyncGenerator[Tokens, None]:
        """Yields tokens until the request is finished or a failure costs it a retry. Raises BatonError if it cannot be retried."""
        lease = PromptLease()
        try:
            choice = await self._choosing.prefill(request, failed)
            if isinstance(choice, Choice):
                first = await self._prefill(request, choice, failed, lease)
                if request.params.beams is None:  # a search has its own
                    yield (first.token,)
                if first.finish:
                    request.finish = first.finish
                    return
                request.trace.watch.enter("transfer")
            else:
                request.trace.bypasses.append(choice.reason)
                request.trace.watch.enter("prefill", bypass=True)
            while request.finish is None:
                async with aclosing(self._decode_leased(request, lease, failed)) as batches:
                    async for tokens in batches:
                        yield tokens
        except BatonError as error:
            self._spend_retry(request, error)
        finally:
            try:
                await self._dismiss(request, lease)
            finally:  # a second cancel may end the wait
                if lease.held and lease.holder:
                    self._workers.release(lease.holder, lease.release(), request.id)

    async def _turn_in_family(self, request: Request) -> JoinedCall | None:
        """Waits until one of several answers to a prompt can begin. None: it begins by itself. Raises DEADLINE."""
        if request.family is None:
            return None
        try:
            async with asyncio.timeout(self._remaining(request)):
                joined: JoinedCall | None = await request.family.turn(request.choice)
                return joined
        except TimeoutError:
            raise too_late(request, "while its prompt was computed for another answer") from None

    def _leave_family(self, request: Request) -> None:
        if request.family is not None and (joined := request.family.leave(request.choice)) is not None:
            joined.fork.close()
            self._end_start(joined.started)

    def _forks(self, leader: Request, worker: WorkerRecord, whole_prompt: bool) -> list[Fork]:
        """Calls that begin with the leader's, for the answers that wait for it. Raises WORKER_LOST."""
        family, forks = leader.family, list[Fork]()
        if family is None or family.leader != leader.choice:
            return []
        if not worker.forks:
            family.disband()
        for place, request in family.waiting.items():
            forks.append(fork := self._workers.fork(worker, request, self._remaining(request)))
            started = Started(worker, self._work(request), len(request.tokens), whole_prompt)
            self._poison.begin(started.work, request, worker.name, worker.incarnation)
            self._members.start_decode(started.work, worker.name, request.params.max_tokens)
            family.join(place, JoinedCall(leader, started, fork))
        return forks

    async def _join(self, request: Request, joined: JoinedCall, failed: set[Identity]) -> AsyncGenerator[Tokens, None]:
        """Does what `_attempt` does, with the call that has begun with the leader's. The leader's stages until then are those of all."""
        trace, theirs = request.trace, joined.leader.trace
        trace.follow(theirs)
        try:
            async with aclosing(self._read(request, joined.started, joined.fork.events, None, failed)) as events:
                async for event in events:
                    if isinstance(event, tuple):
                        yield event
        except BatonError as error:
            self._spend_retry(request, error)
        finally:
            joined.fork.close()  # its events may never have been asked for
            trace.credit(theirs)

    async def _decode_leased(self, request: Request, lease: PromptLease, failed: set[Identity]) -> AsyncGenerator[Tokens, None]:
        """Yields the tokens of one decode worker. Returns early, with a retry spent, if another worker may read the same lease."""
        try:
            started, given = await self._begin(request, lease, failed)
            async with aclosing(self._read(request, started, given, lease.holder, failed)) as events:
                async for event in events:
                    if isinstance(event, tuple):
                        yield event
                    else:
                        lease.adopt()
        except BatonError as error:
            if not lease.held or error.reason not in LEASE_STANDS:
                raise
            self._spend_retry(request, error)

    async def _prefill(self, request: Request, choice: Choice, failed: set[Identity], lease: PromptLease) -> FirstToken:
        members, trace, work = self._members, request.trace, self._work(request)
        worker = lease.holder = members.record(choice.worker)
        trace.watch.enter("prefill", worker.name)
        trace.choices.append(("prefill", choice.reason))
        trace.prefill_worker = ""
        try:
            self._poison.begin(work, request, worker.name, worker.incarnation)
            uncached = len(request.tokens) - choice.overlap_blocks * worker.block_size
            sought = self._seek(request, choice, failed, bypass=False)
            sent = self.conduct.send(worker, choice.cost, uncached)
            members.start_prefill(work, worker.name, uncached)
            self._model.index.predict(worker.name, self._choosing.keys(request), self._clock() + self._config.predict_ttl_s)
            await self._choosing.turn_to_send(request)
            began = self._clock()
            first = await self._first_token(request, choice, uncached, failed, lease)
            self.conduct.prefilled(worker, request, first, self._clock() - began, sent)
        except BatonError as error:
            self.conduct.failed(worker, "prefill", error)
            await self._blame(request, worker, error, failed, work)
            raise
        finally:
            self._poison.end(work)
            members.end_prefill(work)
        lease.prefilled(first.handle)
        trace.prefill_worker = worker.name
        trace.fetched_tokens += first.fetched_tokens
        trace.prefill_wait_ms += first.wait_ms
        trace.prefill_compute_ms += first.compute_ms
        if not request.made:
            self._note_cached(request, first.cached_tokens, sought)
        return first

    async def _first_token(self, request: Request, choice: Choice, uncached: int, failed: set[Identity], lease: PromptLease) -> FirstToken:
        """Starts a live decode call if the prompt is long and a decode worker has room at that moment."""
        worker, source = self._members.record(choice.worker), None
        if choice.source is not None:
            source = Source(self._members.record(choice.source.worker), choice.source.blocks)
        async with aclosing(self._workers.prefill(worker, request, self._remaining(request), source, uncached)) as events:
            async for event in events:
                if isinstance(event, Opened):
                    if lease.reader is None:
                        await self._start_live(request, event.handle, failed, lease)
                    continue
                if lease.reader is not None and lease.reader.live is not None:
                    await self._tell_first(request, lease, event)
                return event
        raise BatonError(Reason.INTERNAL, "the prefill ended without a token")

    async def _start_live(self, request: Request, handle: bytes, failed: set[Identity], lease: PromptLease) -> None:
        await self._choosing.turn(request)
        choice = self._choosing.reader(request, failed)
        if choice is None:
            return  # the lease waits for a decode worker with room
        lease.read(started := self._start(request, choice))
        started.live = LiveDecode(lambda first: self._open(request, started, handle, first))
        await asyncio.sleep(0)  # the call is sent before a token is added to the request

    async def _tell_first(self, request: Request, lease: PromptLease, first: FirstToken) -> None:
        assert lease.reader is not None and lease.reader.live is not None
        if first.finish:
            await self._dismiss(request, lease)
        else:
            lease.reader.live.first.set_result(first.token.id)

    async def _dismiss(self, request: Request, lease: PromptLease) -> None:
        """Ends a live decode call that was not taken over."""
        reader, lease.reader = lease.reader, None
        if reader is not None:
            self._end_start(reader)
            if reader.live is not None:
                self._model.index.retract(reader.worker.name, request.keys)
                await reader.live.close()

    def _start(self, request: Request, choice: Choice) -> Started:
        """Counts a decode call in the view. The caller must end it there."""
        worker, work = self._members.record(choice.worker), self._work(request)
        request.trace.choices.append(("decode", choice.reason))
        self._model.index.predict(worker.name, self._choosing.keys(request), self._clock() + self._config.predict_ttl_s)
        # These come last: after an earlier failure there is nothing to undo.
        self._poison.begin(work, request, worker.name, worker.incarnation)
        self._members.start_decode(work, worker.name, request.longest)
        return Started(worker, work, len(request.tokens))

    async def _begin(self, request: Request, lease: PromptLease, failed: set[Identity]) -> tuple[Started, Given]:
        """A decode call, and what yields its events: the live one, or a new one, which is sent then."""
        started, lease.reader = lease.reader, None
        if started is not None and started.live is not None:
            return started, started.live.events
        choice = await self._choosing.decode(request, failed)
        sought = None if lease.handle else self._seek(request, choice, failed, bypass=True)
        started = self._start(request, choice)
        started.whole_prompt = not lease.handle and started.known == request.prompt_len + request.resumed
        started.sought = sought if started.whole_prompt else None
        return started, partial(self._open, request, started, lease.handle)

    async def _read(
        self, request: Request, started: Started, given: Given, holder: WorkerRecord | None, failed: set[Identity]
    ) -> AsyncGenerator[Tokens | Adopted, None]:
        """Yields the tokens of a decode call, and Adopted when it no longer needs the lease. Sets `request.finish` at the end. `holder`: of
        the KV that it reads."""
        worker, trace = started.worker, request.trace
        trace.decode_worker = worker.name
        trace.watch.at(worker.name)
        stride, found = Stride(), list[Hypothesis]()
        try:
            if started.live is None:
                await self._choosing.turn_to_send(request)
            async with aclosing(given()) as events:
                async for event in events:
                    if isinstance(event, Timed):
                        trace.watch.enter("decode", worker.name)
                        stride.come_each(event.times)
                        yield event
                    elif isinstance(event, tuple):
                        trace.watch.enter("decode", worker.name)
                        stride.come(len(event), self._clock())
                        yield event
                        stride.leave(self._clock())
                    elif isinstance(event, Adopted):
                        self._note_adopted(request, started, holder, event)
                        yield event
                    else:
                        self._note_told(request, started, event, found)
        except (GeneratorExit, asyncio.CancelledError):
            if stride.begun:  # its reader has enough, such as a stop string
                self.conduct.decoded(worker)
            raise
        except BatonError as error:
            if error.reason is not Reason.STALLED:  # the client's doing
                await self._note_failure(request, started, holder, error, failed)
            raise
        finally:
            self.conduct.streamed(worker, stride)
            self._end_start(started)

    def _end_start(self, started: Started) -> None:
        self._poison.end(started.work)
        self._members.end_decode(started.work)

    async def _note_failure(
        self, request: Request, started: Started, holder: WorkerRecord | None, error: BatonError, failed: set[Identity]
    ) -> None:
        """A decode call has failed. `holder`: of the KV that it was to read. Raises BatonError as `_blame` does."""
        worker = started.worker
        self.conduct.failed(worker, "decode", error)
        self.conduct.handed_over(holder, worker, Handoff(failure=error.reason.name))
        if error.reason is Reason.DIGEST_MISMATCH and holder is not None:
            failed.add((holder.name, holder.incarnation))  # either end may be the bad one
        await self._blame(request, worker, error, failed, started.work)

    def _note_adopted(self, request: Request, started: Started, holder: WorkerRecord | None, adopted: Adopted) -> None:
        """A decode worker no longer needs the lease. `holder`: of the KV that it has read."""
        worker, trace = started.worker, request.trace
        trace.watch.enter("decode", worker.name)
        trace.handoff += adopted.handoff
        self.conduct.handed_over(holder, worker, adopted.handoff)
        self._note_whole(request, adopted.cached_tokens, started)

    def _note_told(
        self, request: Request, started: Started, event: Scores | Searched | Hypothesis | Ended, found: list[Hypothesis]
    ) -> None:
        """What a decode call tells besides tokens. `found`: the hypotheses that it has told, which this one joins. Raises as
        `_note_found` does."""
        if isinstance(event, Hypothesis):
            found.append(event)
        elif isinstance(event, Scores):
            request.note_scores(event)
        elif isinstance(event, Searched):
            request.searched = max(request.searched, event.tokens)
        else:
            self._note_found(request, found)
            self.conduct.decoded(started.worker)
            request.trace.handoff.recomputed_tokens += event.recomputed_tokens
            self._note_whole(request, event.cached_tokens, started)
            request.finish = event.finish

    def _note_found(self, request: Request, found: list[Hypothesis]) -> None:
        """The answer is told when it is complete: another worker would begin anew, and find the same. Raises INTERNAL if a search ended
        without one, or something else with one."""
        if (request.params.beams is not None) != bool(found):
            raise BatonError(Reason.INTERNAL, f"the worker ended with {len(found)} hypotheses")
        request.found = tuple(found)
        if found:
            request.trace.note_token()

    def _note_whole(self, request: Request, cached_tokens: int, started: Started) -> None:
        """Once, for a call that computes the prompt: its cache is the one that counts."""
        if started.whole_prompt:
            started.whole_prompt = False
            self._note_cached(request, cached_tokens, started.sought)

    def _seek(self, request: Request, choice: Choice, failed: set[Identity], bypass: bool) -> Sought:
        served = self._model.served
        size = served.block_size if served else 0
        keys = self._choosing.keys(request)[: (request.prompt_len - 1) // size] if size else []
        sought = self._explainer.seek(choice, bypass, keys, failed)
        if request.trace.promised_tokens is None:
            request.trace.promised_tokens = sought.promised * size
        return sought

    def _note_cached(self, request: Request, cached_tokens: int, sought: Sought | None) -> None:
        """The prompt was computed, with so many cached tokens. `sought`: None if it counts for another answer."""
        trace = request.trace
        trace.cached_tokens = min(cached_tokens, request.prompt_len)
        if sought is not None:
            scored = request.params.prompt_logprobs is not None
            prompt = Prompt(request.tokens, request.prompt_len, request.keys, request.tenant, request.salt, scored, request.chat_map)
            found = trace.uncached = self._explainer.explain(prompt, sought, trace.cached_tokens)
            if found.promised and sought.broken == "stale":  # what others compute, lend or load is another matter
                trace.predictions.append(CheckedPrediction("cached", found.promised, min(found.promised, trace.cached_tokens)))
                self._compare(sought.worker, found.promised, trace.cached_tokens)

    def _compare(self, worker: Identity, promised: int, delivered: int) -> None:
        if self._model.trust.note(*worker, promised, delivered, self._clock()):
            log.warning("%s lacks most of what it is thought to cache: its promises count for less", worker[0])

    def _open(
        self, request: Request, started: Started, handle: bytes, first: "asyncio.Future[int] | None" = None
    ) -> AsyncGenerator[DecodeEvent, None]:
        """The events of a new decode call, with which those of the answers that wait for this one begin."""

        async def opened() -> AsyncGenerator[DecodeEvent, None]:
            forks = self._forks(request, started.worker, started.whole_prompt)
            events = self._workers.decode(started.worker, request, handle, self._remaining(request), first, forks)
            async with aclosing(events):
                async for event in events:
                    yield event

        if request.family is None:
            return self._workers.decode(started.worker, request, handle, self._remaining(request), first)
        return opened()

    async def _blame(self, request: Request, worker: WorkerRecord, error: BatonError, failed: set[Identity], work: str) -> None:
        """Raises BatonError(POISONOUS) if the request killed the worker."""
        failed.add((worker.name, worker.incarnation))
        request.trace.failures.append(Failure(request.trace.watch.clock(), worker.name, error.reason.name))
        dead = isinstance(error, Died) and not await self._life.confirmed(worker)
        await self._choosing.turn(request)
        self._model.index.retract(worker.name, request.keys)
        if dead and self._poison.died(work):
            parents, block_size, prompt = self._prompt(request)
            self._poison.quarantine(parents, block_size, prompt, self._clock() + self._config.quarantine_s)
            message = f"{request.suspicion.deaths} workers died of this request"
            log.warning("giving up request %s: %s", name(request.id), message)
            raise BatonError(Reason.POISONOUS, message, metadata=emitted(request)) from error

    def _refuse_poison(self, request: Request) -> None:
        if not self._poison.quarantines or self._model.served is None:
            return
        if (left_s := self._poison.refusal(*self._prompt(request), self._clock())) is not None:
            raise BatonError(Reason.POISONOUS, f"workers died of this prompt; it is refused for another {left_s:.0f} s")

    async def _wait_for_trial(self, request: Request) -> None:
        """Waits while another suspect is being tried; those that wait are tried in the order of their arrival. Raises DEADLINE."""
        if self._poison.may_try(request):
            return
        with self._suspects.enter((request.arrival,)) as place:
            while await place.called(request.deadline - self._clock()):
                if self._poison.may_try(request):
                    return
                place.wait_on(let_pass=False)
        raise too_late(request)

    def _prompt(self, request: Request) -> tuple[list[bytes], int, list[int]]:
        """Returns the root key and the keys of the prompt's full blocks, the block size in tokens, and the prompt."""
        served = self._model.served
        assert served is not None
        keys, full = self._choosing.keys(request), request.prompt_len // served.block_size
        return [root_key(served.model_fingerprint, request.salt), *keys[:full]], served.block_size, request.tokens[: request.prompt_len]

    def _spend_retry(self, request: Request, error: BatonError) -> None:
        """Raises unless the request may be retried."""
        if isinstance(error, NoRoom) or not error.reason.value.retry_elsewhere:
            raise error
        if request.deadline - self._clock() < NEAR_DEADLINE_S:
            raise too_late(request) from error
        spent = ""
        if request.trace.retries >= self._config.max_retries:
            spent = f"given up after {request.trace.retries} retries"
        elif not self.conduct.may_retry(request, error):
            spent = "not tried again, because too many requests fail (router.retry_budget)"
        if spent:
            reason = Reason.SATURATED if error.reason is Reason.SATURATED else Reason.RETRIES_SPENT
            raise BatonError(reason, f"{spent}: {error.message}", metadata=emitted(request)) from error
        request.trace.retries += 1
        request.trace.retry_reasons.append(error.reason.name)
        text = f"request {name(request.id)} is retried ({request.trace.retries}) after {error.reason.name}"
        self._log.line(self._clock(), logging.INFO, "retried", text)

    def _work(self, request: Request) -> str:
        """Names one stretch of work in the view: callers may give two requests the same id."""
        return f"{request.id}#{next(self._numbers)}"

    def _remaining(self, request: Request) -> float:
        return max(0.001, request.deadline - self._clock())
