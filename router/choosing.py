"""Which worker takes a request, and when: requests wait in line for one with room, and choices are spread over turns of the event loop.

What makes a worker a good choice is decided in `router.policy`.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.engine.core.block_key import extend_keys, root_key
from router.conduct import Conduct
from router.hints import Hints
from router.policy import Bypass, Choice, Identity, NoWorker, Policy, Saturated, Terms
from router.request import Request, emitted, too_late
from router.served import ServedModel
from router.turnstile import Turnstile
from router.waiting_room import WaitingRoom, no_room

CHOSEN_A_TURN = 8192  # keys of the prompts for which workers are chosen; a worker that is judged costs as much as KEYS_A_WORKER
KEYS_A_WORKER = 8
LONG_PROMPT = 4096  # tokens
Found = TypeVar("Found", bound=Choice | Bypass)


class Choosing:
    def __init__(
        self, model: ServedModel, config: RouterConfig, conduct: Conduct, clock: Callable[[], float], max_queue: int, hints: Hints
    ) -> None:
        """`max_queue`: how many sequences a worker lets wait."""
        self._hints = hints
        self._model = model
        self._config = config
        self._conduct = conduct
        self._clock = clock
        self.policy = Policy(model, Terms(config.bypass_tokens, config.fetch_tokens, config.load_tokens, max_queue=max_queue))
        self._turns = Turnstile(CHOSEN_A_TURN)
        self._room = WaitingRoom()
        self._staffed = asyncio.Event()  # a decode worker has come since somebody found none
        self._ranks = itertools.count()
        model.members.listen(self._call)

    async def prefill(self, request: Request, failed: set[Identity]) -> Choice | Bypass:
        def choose() -> Choice | Bypass | NoWorker | Saturated:
            keys, now = self.keys(request), self._clock()
            found = self.policy.prefill(keys, len(request.tokens), request.longest_together, now, failed, request.tie)
            return Bypass("prompt_logprobs") if request.unscored and isinstance(found, Choice) else found

        return await self._chosen(request, failed, choose, begun=False)

    async def decode(self, request: Request, failed: set[Identity]) -> Choice:
        def choose() -> Choice | NoWorker | Saturated:
            keys, now = self.keys(request), self._clock()
            return self.policy.decode(keys, request.longest_together, now, failed, request.tie) or NoWorker()

        return await self._chosen(request, failed, choose, begun=True)

    def reader(self, request: Request, failed: set[Identity]) -> Choice | None:
        """A decode worker that has room for a live call at this moment."""
        found = self.policy.decode(self.keys(request), request.longest_together, self._clock(), failed, request.tie)
        return found if isinstance(found, Choice) and found.reason == "fits" else None

    async def _chosen(
        self, request: Request, failed: set[Identity], choose: Callable[[], Found | NoWorker | Saturated], begun: bool
    ) -> Found:
        """Waits in line for a decode worker with room. Those whose prompt is computed (`begun`) go first: they hold blocks of a prefill
        worker. Among the others priority decides, then arrival. Admission bounds how many wait.

        Raises DEADLINE, and SATURATED after `router.queue_timeout_s`.
        """
        until = self._clock() + self._config.queue_timeout_s
        with self._hinted(request), self._room.enter((not begun, request.priority, request.arrival, next(self._ranks))) as place:
            if not place.may_look and not begun:
                await self._hint(request, failed)
            while True:
                if self._model.count("decode") and not await place.called(min(request.deadline, until) - self._clock()):
                    raise no_room(request, self._clock(), self._config.queue_timeout_s)
                await self.turn(request)
                found = choose()
                if isinstance(found, NoWorker):
                    await self._wait_for_workers(request, failed)
                    place.call()
                elif isinstance(found, Saturated):
                    if not begun:
                        await self._hint(request, failed)
                    place.wait_on(let_pass=bool(failed))
                else:
                    request.trace.put_aside |= self._conduct.aside
                    if isinstance(found, Choice):
                        self._hints.leave(request.arrival, (found.source or found).worker)
                    return found

    @contextmanager
    def _hinted(self, request: Request) -> Iterator[None]:
        """A request that leaves is not expected any more."""
        try:
            yield
        except BaseException:
            self._hints.leave(request.arrival)
            raise

    async def _hint(self, request: Request, failed: set[Identity]) -> None:
        """The request has to wait: the worker that it would go to may load what it needs."""
        if not self._model.index.tiered:
            return
        await self.turn(request)
        keys, now = self.keys(request), self._clock()
        hint = self.policy.hint(keys, len(request.tokens), now, failed, request.tie)
        if hint is not None:
            self._hints.tell(request.arrival, self._model.members.record(hint.worker), keys[: hint.blocks], request.deadline - now)

    def _call(self) -> None:
        staffed = bool(self._model.count("decode"))
        if staffed:
            self._staffed.set()
        self._room.call(everybody=not staffed)

    async def turn(self, request: Request) -> None:
        """Waits until the work for the request's keys fits into a turn of the event loop: all streams of a worker may fail at once."""
        served = self._model.served
        keys = len(request.tokens) // served.block_size if served else 0
        await self._turns.enter(keys + KEYS_A_WORKER * self._model.count("decode"))

    async def turn_to_send(self, request: Request) -> None:
        """Putting a long prompt into a message takes as long as choosing a worker for it: they share no turn."""
        if len(request.tokens) > LONG_PROMPT:
            await self.turn(request)

    async def _wait_for_workers(self, request: Request, failed: set[Identity]) -> None:
        """Returns when there is a decode worker. A new request is refused immediately; a request that has begun waits for one to appear."""
        if self._model.count("decode") and not failed:
            return
        if request.trace.retries == 0 and not request.output_len:
            raise BatonError(Reason.NO_WORKER, "no decode worker is ready")
        until = self._clock() + self._config.recover_wait_s
        failed.clear()  # a worker that failed once is better than none
        while not self._model.count("decode"):
            now = self._clock()
            if now >= request.deadline:
                raise too_late(request, "while no decode worker was available")
            if now >= until:
                raise BatonError(Reason.RETRIES_SPENT, "no decode worker came back", metadata=emitted(request))
            self._staffed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(request.deadline, until) - now):
                    await self._staffed.wait()

    def keys(self, request: Request) -> list[bytes]:
        """Returns the block keys of all tokens so far; empty until a worker reports which model it serves.

        Raises BatonError(RETRIES_SPENT) if that is not the model that began the output.
        """
        served = self._model.served
        if served is None:
            return []
        if request.model not in (None, served.model_fingerprint):
            if request.output_len:
                raise BatonError(Reason.RETRIES_SPENT, "the cluster serves another model now", metadata=emitted(request))
            request.keys.clear()
        request.model = served.model_fingerprint
        root = root_key(served.model_fingerprint, request.salt)
        extend_keys(request.keys, root, request.tokens, served.block_size, request.prompt_len)
        return request.keys
