"""vLLM as a `ServingEngine`: AsyncLLM as a library in our process, its scheduler and ranks in children of its own (`baton.engine.vllm`)."""

import asyncio
import logging
import mmap
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import psutil

from baton.engine.build import WARM_UP_TOKENS, BuildError
from baton.engine.core.block_key import DEVICE
from baton.engine.core.blocks import CacheChange
from baton.engine.core.commands import prepare
from baton.engine.core.contract import EngineLoad, EngineStopped, Listener, Traits, cache_events, taken
from baton.engine.core.counts import Counts
from baton.engine.core.engine import Output
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.masks import NOTHING, allows
from baton.engine.core.protocol import NothingAllowed
from baton.engine.core.sampling import Sampled, SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.defaults import DeviceFacts, settle
from baton.engine.facts.fields import Fields
from baton.engine.facts.fingerprint import check_sums, fingerprint, tokenizer_fingerprint
from baton.engine.facts.model_facts import end_tokens
from baton.engine.grammars.store import GrammarStore
from baton.engine.options import Options, ranks
from baton.engine.vllm import arguments
from baton.engine.vllm.desk import Desk, EngineBounds, Job
from baton.engine.vllm.forms import RankForms
from baton.engine.vllm.ledger import KEY, PUBLISHER, Order
from baton.engine.vllm.link import LinkHost, RankReport

log = logging.getLogger(__name__)
START_S = 600.0  # the first start compiles
CLOSE_S = 5.0
CLOSED_WITHIN_S = 30.0  # a prompt's copies land in the step that samples its first token


@dataclass(frozen=True, slots=True)
class StartedVllm:
    """What a start of vLLM has found."""

    llm: Any
    pool: KvPool
    traits: Traits
    bounds: EngineBounds


class VllmEngine:
    """A `ServingEngine`. Everything here runs on the event loop; what comes from the link's thread is passed to it."""

    def __init__(self, options: Options, listener: Listener) -> None:
        """Raises BuildError for what cannot be; starts nothing yet."""
        arguments.check_version()
        arguments.check(options)
        self._options, self._listener = settle(options, DeviceFacts(options.engine.device)).options, listener
        self._keys: dict[bytes, None] = {}
        self._cache_sequence = self._steps = 0
        self._free: int | None = None
        self._progress_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closings: dict[str, asyncio.Event] = {}
        self._outputs: list[Output] = []
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    async def start(self) -> None:
        """Raises BuildError or CheckpointError."""
        self._loop = asyncio.get_running_loop()
        link = LinkHost(ranks(self._options.engine.vllm), self._from_thread(self._on_news), self._from_thread(self._on_end))
        try:
            started = await asyncio.to_thread(_start, self._options, link)
        except BaseException:
            link.close()
            raise
        self._llm, self._link, self.pool, self._traits = started.llm, link, started.pool, started.traits
        store = GrammarStore(self._options.path, started.bounds.vocab_size, started.traits.eos_token_ids)
        self._forms = RankForms(store, link.tell_ranks, ranks(self._options.engine.vllm))
        self._desk = Desk(started.pool.num_blocks, started.pool.layout.block_size, started.bounds)
        await self._warm_up()

    @property
    def traits(self) -> Traits:
        return self._traits

    # --- commands ---

    async def add(self, seq: Sequence, forks: list[Sequence] | None = None) -> None:
        self._check()
        await prepare(self._forms, seq, *(forks or ()))
        try:
            self._desk.add(seq, taken(forks))
        finally:
            self._admit()  # also after a refusal: the sequence has given up the place that it claimed

    async def reserve(self, seq: Sequence) -> bool:
        self._check()
        await prepare(self._forms, seq)
        return self._desk.reserve(seq)

    async def adopt(self, seq: Sequence, end: int | None = None, first: int | None = None, forks: list[Sequence] | None = None) -> None:
        self._check()
        await prepare(self._forms, *(forks or ()))
        self._follow(self._desk.adopt(seq, end, first, taken(forks)))

    async def give_up(self, seq: Sequence, filling: list[int], first: int | None = None, forks: list[Sequence] | None = None) -> None:
        self._check()
        await prepare(self._forms, *(forks or ()))
        try:
            filling.extend(self._desk.give_up(seq, first, taken(forks)))
        finally:
            self._admit()

    async def abort(self, seq_id: str, filling: list[int]) -> None:
        self._check()
        filling.extend(self._abort(seq_id))

    def forget(self, seq_id: str) -> None:
        self._desk.release(self._abort(seq_id))

    async def pin(self, keys: Seq[bytes], pinned: list[int]) -> None:
        """vLLM's cached blocks are in its own memory, and nothing public reaches them between two requests: none is lent."""

    async def bring(self, keys: Seq[bytes], wait_s: float, rival_s: float | None = None, hint: bool = False) -> int:
        """vLLM's connectors keep what leaves its pool: there is nothing that could be loaded from here."""
        return 0

    async def release(self, blocks: Seq[int]) -> None:
        self.release_soon(blocks)

    def release_soon(self, blocks: Seq[int]) -> None:
        self._desk.release(blocks)
        self._admit()

    async def look(self) -> EngineLoad:
        self._check()
        desk, total = self._desk, self._traits.num_blocks
        free = total if self._free is None else self._free
        return EngineLoad(
            running=desk.running,
            waiting=desk.queued,
            waiting_tokens=desk.waiting_tokens(),
            free_blocks=free,
            cached_blocks=min(free, len(self._keys)),
            owned_blocks=total - free,
            sequences=len(desk.sequences),
            credit_tokens=(free - desk.promised_blocks()) * self.pool.layout.block_size,
            counts=desk.counts.copy(),
        )

    async def snapshot(self) -> tuple[int, dict[str, list[bytes]]]:
        self._check()
        return self._cache_sequence, {DEVICE: list(self._keys)}

    def activity(self) -> tuple[int, float | None, float | None]:
        busy = any(not job.over for job in self._desk.jobs.values() if not (job.seq.hold and job.closed))
        # vLLM's ranks spin while a GPU computes.
        cpu_s = _cpu_seconds(self._link.pids) if self._options.engine.device == "cpu" else 0.0
        return self._steps, self._progress_at if busy else None, cpu_s

    async def close(self) -> None:
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._link.closing()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.to_thread(self._llm.shutdown, 1)
        self._link.close()  # whoever is left of the children ends now
        self._forms.close()

    # --- requests ---

    async def _warm_up(self) -> None:
        """Warms up before anybody listens: first requests take seconds; vLLM compiles for log-probabilities of one and of several rows."""
        listener, ended = self._listener, asyncio.Semaphore(0)

        def note(outputs: list[Output]) -> None:
            for _ in [output for output in outputs if output.finish or output.failure or output.expired]:
                ended.release()

        self._listener = Listener(note, lambda events: None, listener.on_failure)
        params = SamplingParams(max_tokens=4, seed=1, logprobs=1, ignore_eos=True)
        prompt = [0] * min(WARM_UP_TOKENS, self._traits.max_model_len - 4)
        try:
            for name in ("warm-up", "beside it"):
                await self.add(Sequence(name, prompt, len(prompt), params, b"warm-up"))
            async with asyncio.timeout(START_S):
                _ = await ended.acquire(), await ended.acquire()
        finally:
            self._listener, self._desk.counts = listener, Counts()

    def _check(self) -> None:
        if self._over:
            raise EngineStopped("the engine has stopped")

    def _abort(self, seq_id: str) -> list[int]:
        filling, job = self._desk.abort(seq_id)
        if job is not None:
            self._spawn(self._llm.abort(job.id))
        self._admit()
        return filling

    def _admit(self) -> None:
        if self._over:
            return
        plan = self._desk.admit(time.monotonic())
        for output in plan.expired:
            self._emit(output)
        for job in plan.jobs:
            self._follow(job)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        soonest = min((seq.expires_at for seq in self._desk.waiting), default=float("inf"))
        if soonest != float("inf"):
            self._timer = self._loop.call_later(max(0.0, soonest - time.monotonic()), self._admit)

    def _follow(self, job: Job) -> None:
        if all(other is job or other.over for other in self._desk.jobs.values()):
            self._progress_at = time.monotonic()  # it rested until now
        self._closings[job.id] = asyncio.Event()
        self._spawn(self._run(job))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Job) -> None:
        try:
            queue = await self._llm.add_request(job.id, _prompt(job.seq), _params(job, self._traits.eos_token_ids))
            if job.over:  # aborted while vLLM did not know it yet
                await self._llm.abort(job.id)
            finished = False
            while not finished:
                out = queue.get_nowait() or await queue.get()
                finished = out.finished
                await self._take(job, out)
            if (output := self._desk.failed(job, "vLLM ended the sequence before its last token")) is not None:
                self._emit(output)
        except Exception as error:
            if self._llm.errored:
                self._fail(error)
                return
            self._closed(job.id)  # vLLM never had it
            if (output := self._desk.failed(job, str(error))) is not None:
                self._emit(output)
        finally:
            self._admit()  # a sequence that has ended, or is held, makes room for the next

    async def _take(self, job: Job, out: Any) -> None:
        completion = out.outputs[0]
        for i, token in enumerate(completion.token_ids):
            if job.seq.hold and not job.closed:  # its reader may copy the staged blocks from now on
                async with asyncio.timeout(CLOSED_WITHIN_S):
                    await self._closings[job.id].wait()
            if (misfit := _misfit(job.seq, token, self._traits.eos_token_ids)) is not None:
                output = self._desk.failed(job, misfit)
            else:
                output = self._desk.sampled(job, _sampled(token, completion.logprobs[i] if completion.logprobs else None, job.seq))
            if self._desk.queue_forks(job.seq):
                self._admit()
            if output is None:
                return
            self._emit(output)
            if (output.finish is not None or output.failure is not None) and not out.finished:
                await self._llm.abort(job.id)

    def _emit(self, output: Output) -> None:
        if not self._outputs:
            self._loop.call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        self._listener.on_step(outputs)

    # --- what vLLM's children say ---

    def _from_thread(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(function, *arguments)

        return call

    def _on_end(self) -> None:
        self._fail(EngineStopped("a process of vLLM has ended"))

    def _fail(self, error: BaseException) -> None:
        if not self._over and hasattr(self, "_desk"):
            self._over = True
            self._listener.on_failure(error)
            self._link.close()

    def _on_news(self, news: dict[str, Any]) -> None:
        now = time.monotonic()
        if "cache" in news:
            self._cache_changed([CacheChange(stored, bytes.fromhex(key)) for stored, key in news["cache"]])
            return
        if "compiled" in news:
            self._forms.answered(news["compiled"], news["why"])
            return
        self._free = news["free"]
        if news["step"] is not None:
            self._steps += 1
            self._progress_at = now
            seconds, tokens, sequences = news["step"]
            if sequences:
                self._desk.counts.chunks += sequences
                self._desk.counts.computed_tokens += tokens
                self._listener.on_batch(seconds, tokens, sequences)
        for job, cached, loaded in news["started"]:
            self._desk.started(job, cached, loaded, now - news["step"][0])
        for job in news["preempted"]:
            self._desk.preempted(job)
        for job, full in news["staged"]:
            if (output := self._desk.staged_up_to(job, full)) is not None:
                self._emit(output)
        for job in news["closed"]:
            self._closed(job)
        if news["closed"]:
            self._admit()

    def _closed(self, job_id: str) -> None:
        self._desk.closed(job_id)
        if (event := self._closings.pop(job_id, None)) is not None:
            event.set()

    def _cache_changed(self, changes: list[CacheChange]) -> None:
        for change in changes:
            if change.stored:
                self._keys[change.key] = None
            else:
                self._keys.pop(change.key, None)
        events = cache_events(changes, self._cache_sequence)
        self._cache_sequence += len(events)
        self._listener.on_cache(events)


def _start(options: Options, link: LinkHost) -> StartedVllm:
    """Starts vLLM and waits for it. Runs in a thread."""
    try:
        check_sums(options.path)
    except ValueError as error:
        raise BuildError(f"model.path: {error}") from None
    arguments.set_environment(options)
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    _check_platform(options, current_platform)
    pools: list[KvPool] = []

    def allot(whole: RankReport, fd: int) -> int:
        pools.append(_staged_pool(options, whole, fd))
        return pools[-1].num_blocks

    link.open(allot)
    try:
        wanted = arguments.arguments(options, link.given, KEY)
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        events.publisher = PUBLISHER
        with arguments.temporary_files(link.folder):
            # As `vllm serve` would be started: its defaults for a step are those of a server.
            llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**wanted, kv_events_config=events), usage_context=UsageContext.OPENAI_API_SERVER
            )
    except Exception as error:
        raise BuildError(f"engine.vllm: vLLM does not start: {link.refusal or error}") from error
    (pool,) = pools
    return StartedVllm(llm, pool, *_facts(llm, pool, options))


def _staged_pool(options: Options, whole: RankReport, fd: int) -> KvPool:
    """A pool in the memory behind `fd`, which gets the size that it needs."""
    shape = (whole.dtype, whole.block_size, whole.layers, whole.heads, whole.width)
    layout = KvLayout(fingerprint(options.path), *shape, parts=1, packing=whole.packing)
    blocks = _staged_blocks(options, layout, whole.blocks)
    os.ftruncate(fd, blocks * layout.block_bytes)
    return KvPool(layout, blocks, mmap.mmap(fd, blocks * layout.block_bytes))


def _facts(llm: Any, pool: KvPool, options: Options) -> tuple[Traits, EngineBounds]:
    """The facts of a vLLM that runs."""
    model, cache = llm.model_config, llm.vllm_config.cache_config
    eos = frozenset(end_tokens(options.path))
    traits = Traits(
        model_fingerprint=_fingerprint(pool.layout, model.dtype, options),
        tokenizer_fingerprint=tokenizer_fingerprint(options.path),
        max_model_len=model.max_model_len,
        max_num_seqs=llm.vllm_config.scheduler_config.max_num_seqs,
        num_blocks=cache.num_gpu_blocks - 1,  # the first is no sequence's
        eos_token_ids=eos,
        lends=False,
    )
    bounds = EngineBounds(traits.max_num_seqs, options.engine.limits.max_queue, traits.max_model_len, model.get_vocab_size(), eos)
    return traits, bounds


def _check_platform(options: Options, platform: Any) -> None:
    """Raises BuildError, which names the key."""
    if platform.device_type != options.engine.device:
        raise BuildError(f"engine.device: this vLLM runs on {platform.device_type}, not on {options.engine.device}")
    if options.engine.device == "cuda":
        capability = platform.get_device_capability()
        known = None if capability is None else (capability.major, capability.minor)
        arguments.check_device(options, known, platform.device_count())


def _fingerprint(layout: KvLayout, dtype: Any, options: Options) -> str:
    """A digest of everything that may change a token."""
    identity = (layout.model_fingerprint, layout.packing, dtype, sorted(options.engine.vllm.items()), options.engine.batch_invariant)
    return blake2b("\n".join(map(str, identity)).encode(), digest_size=16, person=b"baton.vllm").hexdigest()


def _staged_blocks(options: Options, layout: KvLayout, blocks: int) -> int:
    """Raises BuildError if a sequence of full length would not fit."""
    longest = options.model.max_model_len or Fields.read(options.path / "config.json").get("max_position_embeddings") or layout.block_size
    one = -(-longest // layout.block_size)
    if options.engine.staging_bytes is None:
        return max(blocks // 2, 2 * one)
    if (staged := options.engine.staging_bytes // layout.block_bytes) < one:
        raise BuildError(f"engine.staging_mib: {staged} blocks of {layout.block_bytes} bytes are less than one sequence needs ({one})")
    return staged


def _prompt(seq: Sequence) -> Any:
    # vLLM's prefix cache separates what has another salt. Ours is the root of the sequence's block keys: model, tenant, adapter.
    return {"prompt_token_ids": list(seq.tokens), "cache_salt": seq.root.hex()}


def _params(job: Job, eos: frozenset[int]) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    from baton.engine.vllm import sampler

    seq = job.seq
    stops = seq.params.stop_token_ids | (frozenset() if seq.params.ignore_eos and seq.params.structured is None else eos)
    order = Order(job.id, tuple(job.blocks), job.loaded, job.save_to)
    return VllmParams(
        temperature=0.0,
        max_tokens=1 if seq.hold else max(1, seq.remaining),
        # A stop before min_tokens is not one: then this process ends the request, by the rule that all engines share.
        stop_token_ids=sorted(stops) if seq.output_len + 1 >= seq.params.min_tokens else [],
        ignore_eos=True,
        detokenize=False,
        logprobs=seq.params.logprobs,
        output_kind=RequestOutputKind.DELTA,
        extra_args={
            "kv_transfer_params": {KEY: order.pack()},
            sampler.KEY: sampler.pack(seq.params, seq.prompt_len, eos),
        },
    )


def _misfit(seq: Sequence, token: int, eos: frozenset[int]) -> str | None:
    """Why a sequence whose next token is `token` does not end with it: its document is not complete, and nothing fits."""
    if seq.matcher is None or token not in eos:
        return None
    words = seq.words(eos)
    if words is None or (words is not NOTHING and allows(words, token)):
        return None
    return f"{NothingAllowed.why}: {seq.matcher.failure}" if seq.matcher.failure else NothingAllowed.why


def _sampled(token: int, logprobs: Any, seq: Sequence) -> Sampled:
    if logprobs is None or seq.params.logprobs is None:
        return Sampled(token)
    best = sorted(((each.rank, name, each.logprob) for name, each in logprobs.items()), key=lambda each: each[0])
    return Sampled(token, logprobs[token].logprob, tuple((name, value) for _, name, value in best[: seq.params.logprobs]))


def _cpu_seconds(pids: set[int]) -> float | None:
    """Processor time of vLLM's children so far."""
    total = 0.0
    for pid in list(pids):
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total
