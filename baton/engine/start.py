"""Starts an engine from options, whichever it is."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.engine.build import BuildError, Built, build, check
from baton.engine.core.agreed import Agree, agreeing, alone
from baton.engine.core.colder import ColderTiers
from baton.engine.core.contract import Listener, ServingEngine
from baton.engine.core.engine import Engine
from baton.engine.core.loop import EngineLoop
from baton.engine.core.progress import Progress, Step, ignore, told_to
from baton.engine.grammars.store import GrammarStore
from baton.engine.options import Options

T = TypeVar("T")


async def start_engine(
    options: Options,
    listener: Listener,
    progress: Progress = ignore,
    tiers: ColderTiers | None = None,
    built: Callable[[Engine], object] = lambda engine: None,
    agree: Agree = alone,
) -> ServingEngine:
    """`tiers`: colder places for KV; the caller closes them before the engine. `built`: called with our own engine before it runs. `agree`:
    called in a thread of its own. Raises CheckpointError, BuildError or OSError, each naming what is wrong."""
    check(options)
    engine = options.engine
    if tiers is not None and not (engine.kind == "baton" and engine.prefix_caching):
        raise BuildError("tiers need engine.kind baton and engine.prefix_caching")
    if options.long_contexts and tiers is None:
        raise BuildError("tiers.long_contexts: there is no tier")
    if options.engine.kind == "vllm":
        progress(Step("starting vLLM"))
        from baton.engine.vllm.engine import VllmEngine  # the others start without it

        vllm = VllmEngine(options, listener)
        await vllm.start()
        return vllm

    def told() -> Built:
        with told_to(progress), agreeing(agree):
            return build(options)

    made = await in_a_thread_that_ends(told)
    made.engine.pool.describes = options.describes
    runner = made.engine.runner
    grammars = GrammarStore(options.path, runner.vocab_size, runner.eos_token_ids)
    loop = EngineLoop(made.engine, listener, made.tokenizer_fingerprint, grammars)
    if tiers is not None:
        progress(Step("opening tiers"))
        try:
            await asyncio.to_thread(loop.attach, tiers)
        except ValueError as error:
            raise BuildError(str(error)) from None
    built(made.engine)
    loop.start()
    return loop


async def in_a_thread_that_ends(function: Callable[..., T], *arguments: object) -> T:
    """Runs a function that computes with torch before the engine's thread does. If the caller is cancelled, the function goes on: nobody
    waits for it, because it may wait for the event loop.

    A thread keeps the OpenMP threads that it has computed with. With more of these than cores, libgomp no longer lets any of them spin, and
    every operation of the engine would begin by waking one. This costs a sixth of the throughput on two cores.
    """
    alone, cancelled = ThreadPoolExecutor(1), False
    try:
        return await asyncio.get_running_loop().run_in_executor(alone, function, *arguments)
    except asyncio.CancelledError:
        cancelled = True
        raise
    finally:
        alone.shutdown(wait=not cancelled)
