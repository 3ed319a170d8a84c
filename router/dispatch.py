"""The owner of a request from admission to its last token: it alone decides the request's fate.

    generate
      1 choose_prefill → prefill worker            or bypass: the decode worker prefills itself
      2 Prefill → first token, handle              the token goes to the client at once
      3 choose_decode → decode worker              late, with fresh load; another one if it fails before it holds the KV
      4 Decode → adopted, tokens, ended

A worker that fails costs a retry: the tokens that were sent become part of the prompt and the request starts at 1, elsewhere. The
sampler's noise is a function of (seed, position), so the continued stream is the undisturbed one. Whatever the request holds on the
way (a lease, a place on a worker, a number in the view) is given back where it was taken, in a `finally`.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from time import monotonic

from baton.cluster.config import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import WorkerRecord
from baton.engine.block_key import extend_keys, root_key
from router.clients import Adopted, Ended, FirstToken, Workers
from router.policy import MAX_QUEUE, Bypass, Choice, NoWorker, Saturated, choose_decode, choose_prefill
from router.request import Failure, Request, Token
from router.view import ClusterView

log = logging.getLogger(__name__)
RECOVER_POLL_S = 0.05
# The decode worker failed, not the KV: what the prefill worker holds is as good as before.
LEASE_STANDS = frozenset({Reason.WORKER_LOST, Reason.DRAINING, Reason.SATURATED})
NEAR_DEADLINE_S = 0.05  # too little left to try again


class Dispatcher:
    def __init__(
        self, view: ClusterView, workers: Workers, config: RouterConfig, clock: Callable[[], float] = monotonic, max_queue: int = MAX_QUEUE
    ) -> None:
        """`max_queue`: sequences that a worker lets wait."""
        self._view = view
        self._workers = workers
        self._config = config
        self._clock = clock
        self._max_queue = max_queue
        self._numbers = itertools.count(1)

    async def generate(self, request: Request) -> AsyncGenerator[Token, None]:
        """Every token of the output, once and in order; `request.finish` says at the end why there is no more.

        Closing the generator ends the request everywhere. Raises BatonError when it cannot be continued.
        """
        failed: set[str] = set()  # workers that failed this request
        while request.finish is None:
            try:
                async with aclosing(self._attempt(request, failed)) as tokens:
                    async for token in tokens:
                        request.tokens.append(token.id)
                        request.trace.note_token()
                        yield token
            except BatonError as error:
                self._spend_retry(request, error)

    async def _attempt(self, request: Request, failed: set[str]) -> AsyncGenerator[Token, None]:
        prefiller, first = None, None
        choice = await self._choose_prefill(request, failed)
        if isinstance(choice, Choice):
            prefiller = self._view.record(choice.worker)
            first = await self._prefill(request, prefiller, choice, failed)
        else:
            request.trace.bypasses.append(choice.reason)
            request.trace.watch.enter("prefill")
        handle = first.handle if first else b""
        try:
            if first:
                yield first.token
                if first.finish:
                    request.finish = first.finish
                    return
                request.trace.watch.enter("transfer")
            while request.finish is None:
                try:
                    async with aclosing(self._decode(request, handle, failed)) as events:
                        async for event in events:
                            if isinstance(event, Token):
                                yield event
                            else:
                                handle = b""  # the decode worker has the KV, or gave it up: the lease is its business
                except BatonError as error:
                    if not handle or error.reason not in LEASE_STANDS:
                        raise
                    self._spend_retry(request, error)  # another decode worker reads the same lease
        finally:
            if handle and prefiller:
                self._workers.release(prefiller, handle, request.id)

    async def _prefill(self, request: Request, worker: WorkerRecord, choice: Choice, failed: set[str]) -> FirstToken:
        view, trace, work = self._view, request.trace, self._work(request)
        keys = self._keys(request)
        view.start_prefill(work, worker.name, len(request.tokens) - choice.overlap_blocks * worker.block_size)
        view.index.predict(worker.name, keys, self._clock() + self._config.predict_ttl_s)
        trace.watch.enter("prefill", worker.name)
        trace.choices.append(("prefill", choice.reason))
        trace.prefill_worker = ""
        try:
            first = await self._workers.prefill(worker, request, self._remaining(request))
        except BatonError as error:
            self._blame(request, worker, error, failed)
            raise
        finally:
            view.end_prefill(work)
        trace.prefill_worker = worker.name
        trace.prefill_wait_ms += first.wait_ms
        trace.prefill_compute_ms += first.compute_ms
        if not request.output_len:
            trace.cached_tokens = first.cached_tokens
        return first

    async def _decode(self, request: Request, handle: bytes, failed: set[str]) -> AsyncGenerator[Token | Adopted, None]:
        """Tokens of one decode worker, and Adopted when it no longer needs the lease. Sets `request.finish` at the end."""
        choice = await self._choose_decode(request, failed)
        worker = self._view.record(choice.worker)
        view, trace, work = self._view, request.trace, self._work(request)
        trace.decode_worker = worker.name
        trace.watch.at(worker.name)
        trace.choices.append(("decode", choice.reason))
        known = len(request.tokens)
        view.start_decode(work, worker.name, request.longest)
        view.index.predict(worker.name, self._keys(request), self._clock() + self._config.predict_ttl_s)
        try:
            async with aclosing(self._workers.decode(worker, request, handle, self._remaining(request))) as events:
                async for event in events:
                    match event:
                        case Token():
                            trace.watch.enter("decode", worker.name)
                            yield event
                        case Adopted():
                            trace.watch.enter("decode", worker.name)
                            trace.handoff += event.handoff
                            yield event
                        case Ended():
                            trace.handoff.recomputed_tokens += event.recomputed_tokens
                            if not handle and known == request.prompt_len:
                                trace.cached_tokens = event.cached_tokens
                            request.finish = event.finish
        except BatonError as error:
            self._blame(request, worker, error, failed)
            raise
        finally:
            view.end_decode(work)

    async def _choose_prefill(self, request: Request, failed: set[str]) -> Choice | Bypass:
        choice = choose_prefill(
            self._view, self._keys(request), len(request.tokens), self._config.bypass_tokens, self._clock(), frozenset(failed)
        )
        if isinstance(choice, NoWorker):
            await self._wait_for_workers(request, failed)
            return Bypass("no prefill worker")
        return choice

    async def _choose_decode(self, request: Request, failed: set[str]) -> Choice:
        while True:
            choice = choose_decode(
                self._view, self._keys(request), request.longest, self._clock(), frozenset(failed), max_queue=self._max_queue
            )
            if isinstance(choice, Choice):
                return choice
            if isinstance(choice, Saturated):
                raise BatonError(Reason.SATURATED, "every decode worker's queue is full")
            await self._wait_for_workers(request, failed)

    async def _wait_for_workers(self, request: Request, failed: set[str]) -> None:
        """Returns when there is a decode worker. A new request is refused at once; one that was begun waits for the next to appear."""
        if self._view.decode_workers() and not failed:
            return
        if request.trace.retries == 0 and not request.output_len:
            raise BatonError(Reason.NO_WORKER, "no decode worker is ready")
        until = self._clock() + self._config.recover_wait_s
        failed.clear()  # better one that failed once than none
        while not self._view.decode_workers():
            now = self._clock()
            if now >= request.deadline:
                raise _too_late(request)
            if now >= until:
                raise BatonError(Reason.RETRIES_SPENT, "no decode worker came back", metadata=_emitted(request))
            await asyncio.sleep(RECOVER_POLL_S)

    def _blame(self, request: Request, worker: WorkerRecord, error: BatonError, failed: set[str]) -> None:
        failed.add(worker.name)
        request.trace.failures.append(Failure(request.trace.watch.clock(), worker.name, error.reason.name))
        if error.reason in (Reason.WORKER_LOST, Reason.DRAINING):  # of a drain the registry tells a moment later
            self._view.mark_down(worker.name, worker.incarnation)

    def _spend_retry(self, request: Request, error: BatonError) -> None:
        """Raises unless the request may be tried once more."""
        if not error.reason.value.retry_elsewhere:
            raise error
        if request.deadline - self._clock() < NEAR_DEADLINE_S:
            raise _too_late(request) from error
        if request.trace.retries >= self._config.max_retries:
            message = f"given up after {request.trace.retries} retries: {error.message}"
            reason = Reason.SATURATED if error.reason is Reason.SATURATED else Reason.RETRIES_SPENT
            raise BatonError(reason, message, metadata=_emitted(request)) from error
        request.trace.retries += 1
        request.trace.retry_reasons.append(error.reason.name)
        log.info("request %s is retried (%d) after %s", request.id, request.trace.retries, error.reason.name)

    def _work(self, request: Request) -> str:
        """A name in the view's books for one stretch of work: callers may give two requests the same id."""
        return f"{request.id}#{next(self._numbers)}"

    def _keys(self, request: Request) -> list[bytes]:
        """Block keys of all tokens so far. Empty while no worker has told what model it serves.

        Raises BatonError(RETRIES_SPENT) when that is another model than the one that began: its tokens would not continue this output.
        """
        served = self._view.served
        if served is None:
            return []
        if request.model is None:
            request.model = served.model_fingerprint
        elif request.model != served.model_fingerprint:
            raise BatonError(Reason.RETRIES_SPENT, "the cluster serves another model now", metadata=_emitted(request))
        extend_keys(request.keys, root_key(served.model_fingerprint, request.salt), request.tokens, served.block_size)
        return request.keys

    def _remaining(self, request: Request) -> float:
        return max(0.001, request.deadline - self._clock())


def _emitted(request: Request) -> dict[str, str]:
    return {"tokens_emitted": str(request.output_len)}


def _too_late(request: Request) -> BatonError:
    return BatonError(Reason.DEADLINE, "the deadline of the request is over", metadata=_emitted(request))
