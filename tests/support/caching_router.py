"""A router with workers whose caches the test sets, and which deliver what these hold, or what the test says."""

import asyncio
import itertools
import math
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from fake_workers import MODEL, TOKENIZER, FakeWorkers, record

from baton.cluster.config_router import RouterConfig
from baton.cluster.handoff import Handoff
from baton.cluster.records import WorkerRecord
from baton.engine.core.block_key import extend_keys, root_key
from baton.engine.core.sampling import SamplingParams
from baton.uncached import UNCACHED
from router.dispatch import Dispatcher
from router.request import Request, Stopwatch, Trace
from router.uncached import Uncached
from router.view import ClusterView
from router.workers import Adopted, Ended, FirstToken, PrefillEvent

BLOCK = 16
SOME_PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


class Caching(FakeWorkers):
    """Workers that cache what the index says, unless they are told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.tells_early = True  # what a decode worker found cached: an older one tells it at the end alone
        self.delivers: Callable[[str, Request], int] = lambda worker, request: 0
        self.waits: dict[str, asyncio.Event] = {}  # prefill worker → for what it waits with its answer

    async def prefill(self, worker: WorkerRecord, request: Request, *args: Any, **kwargs: Any) -> AsyncGenerator[PrefillEvent, None]:
        async for event in super().prefill(worker, request, *args, **kwargs):
            if (until := self.waits.get(worker.name)) is not None:
                await until.wait()
            yield replace(event, cached_tokens=self.delivers(worker.name, request)) if isinstance(event, FirstToken) else event

    async def tokens(self, known: list[int], request: Request, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        if self.tells_early and len(known) == request.prompt_len:
            yield Adopted(Handoff(), self.delivers("d0", request))
        async for event in super().tokens(known, request, *args, **kwargs):
            yield replace(event, cached_tokens=self.delivers("d0", request)) if isinstance(event, Ended) else event


class World:
    """A router with workers whose caches the test sets."""

    def __init__(self, names: str = "p0 p1 d0", caching: bool = True, lends: bool = True, **config: Any) -> None:
        self.view = ClusterView({MODEL: TOKENIZER})
        self.records = [record(name, lends=lends) for name in names.split()]
        self.view.update(self.records, 0.0)
        self.model = self.view.models[MODEL]
        self.workers = Caching()
        self.workers.delivers = self.held
        self.config = RouterConfig(bypass_tokens=8, **{"fetch_tokens": 0, **config})
        self.dispatcher = Dispatcher(self.model, self.workers, self.config, caching=caching)
        self.numbers, self.sequences = itertools.count(), dict.fromkeys((one.name for one in self.records), 0)

    def keys(self, prompt: list[int], salt: str = "") -> list[bytes]:
        keys: list[bytes] = []
        extend_keys(keys, root_key("model", salt), prompt, BLOCK)
        return keys

    def holds(self, worker: str, keys: list[bytes]) -> None:
        """From now on it holds exactly these."""
        self.sequences[worker] += 100
        incarnation = self.view.members.record(worker).incarnation
        self.model.index.snapshot(worker, incarnation, self.sequences[worker], keys)

    def held(self, worker: str, request: Request) -> int:
        """Tokens of its prompt that the worker holds according to the index, predictions left out."""
        keys = self.keys(request.tokens[: request.prompt_len - 1], request.salt)
        index = self.model.index
        known = index.overlap(keys, 0.0).get(worker, 0)
        while known and index.is_predicted(worker, keys[known - 1]):
            known -= 1
        return known * BLOCK

    def request(self, prompt: list[int], salt: str = "", tenant: str = "", **params: Any) -> Request:
        clock = asyncio.get_running_loop().time
        name, asked = f"r{next(self.numbers)}", replace(SOME_PARAMS, **params)
        return Request(name, list(prompt), len(prompt), asked, salt, clock() + 10, Trace(Stopwatch(clock)), tenant=tenant)

    async def ask(self, prompt: list[int], salt: str = "", tenant: str = "", **params: Any) -> tuple[Request, Uncached]:
        request = self.request(prompt, salt, tenant, **params)
        async for _ in self.dispatcher.generate(request):
            pass
        found = request.trace.uncached
        assert found is not None
        assert sum(tokens for _, tokens in found.causes) + request.trace.cached_tokens == request.prompt_len
        assert all(tokens > 0 for _, tokens in found.causes) and {cause for cause, _ in found.causes} <= set(UNCACHED)
        return request, found

    async def first(self, prompt: list[int], **more: Any) -> str:
        """Asks, and then only the worker that computed the prompt holds it."""
        request, _ = await self.ask(prompt, **more)
        worker = request.trace.prefill_worker or request.trace.decode_worker
        self.model.index.overlap([], math.inf)  # ends the predictions: the decode worker keeps nothing
        self.holds(worker, self.keys(prompt, more.get("salt", "")))
        return worker


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(250), k=length)


PROMPT = prompt_of(200)
FULL = 192  # its blocks
