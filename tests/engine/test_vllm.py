"""vLLM with several ranks, in a cache that is too small, and with one sequence at a time (`make test-vllm`). Each rank writes and reads its
part of a staged block, so KV passes between any numbers of ranks."""

import asyncio
import importlib.util
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_bench import BLOCK, PROMPT, VLLM_DEVICE, Bench, started

from baton.engine.core.contract import EngineStopped
from baton.engine.core.engine import QueueFull
from baton.engine.core.sequence import State
from baton.engine.cpu.features import FEATURES
from baton.engine.options import Options
from baton.engine.vllm.engine import VllmEngine
from baton.engine.vllm.link import SHARED_MEMORY

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here (make test-vllm)"),
    pytest.mark.timeout(900),
]
TALE = Path(__file__).resolve().parents[2] / "baton" / "models" / "tale"
ONE = Options.of(
    TALE,
    block_size=BLOCK,
    max_model_len=512,
    kv_memory_mib=32,
    threads=1,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    kind="vllm",
    device=VLLM_DEVICE,
)
ROOM_S = 30.0
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}


async def moved(source: Bench, target: Bench) -> list[int]:
    """The tokens of a prompt that one computes and the other goes on with."""
    holder = source.seq(PROMPT, hold=True, salt="moved", **SEEDED)
    [first] = await source.run(holder)
    reader = target.seq([*PROMPT, first], len(PROMPT), **SEEDED)
    await target.reserve(reader)
    source.copy(holder, reader, target)
    source.engine.forget(holder.id)
    await target.engine.adopt(reader, len(PROMPT))
    return [first, *await target.ended(reader)]


def shared_memory(names: list[str]) -> list[Path]:
    return [each for each in SHARED_MEMORY.iterdir() if any(each.name.startswith(name) for name in names)]


async def test_kv_passes_between_one_rank_and_two_and_a_dead_rank_is_a_dead_engine() -> None:
    """In float32 the tokens are the same, too; in bfloat16 the sums of two ranks are rounded elsewhere."""
    one = await started(ONE.but(vllm={"enforce_eager": True}))
    two = await started(ONE.but(vllm={"enforce_eager": True, "tensor_parallel_size": 2}))
    try:
        alone = await one.run(one.seq(PROMPT, salt="alone", **SEEDED))
        assert await two.run(two.seq(PROMPT, salt="alone", **SEEDED)) == alone
        assert one.engine.pool.layout == two.engine.pool.layout
        assert one.engine.traits.model_fingerprint != two.engine.traits.model_fingerprint
        assert await moved(two, one) == await moved(one, two) == alone
        await one.quiet()
        await two.quiet()

        assert isinstance(two.engine, VllmEngine)
        folder = two.engine._link.folder
        names = [file.name for file in folder.glob("vllm_dist_*")]
        if "avx512f" in FEATURES:  # the ranks of vLLM's build for AVX2 share none
            assert shared_memory(names), "nothing would be found below"
        ranks = [each for each in psutil.Process().children(recursive=True) if "Worker_TP" in " ".join(each.cmdline())]
        assert len(ranks) == 2
        ranks[1].send_signal(signal.SIGKILL)
        await two.until(lambda: two.failures)
        with pytest.raises(EngineStopped):
            await two.engine.add(two.seq(PROMPT))
        await two.until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks))
        async with asyncio.timeout(ROOM_S):
            while folder.exists() or shared_memory(names):
                await asyncio.sleep(0.05)
        assert not one.failures and await one.run(one.seq(PROMPT, **SEEDED)) == alone
    finally:
        await asyncio.gather(one.engine.close(), two.engine.close())


async def test_kv_passes_between_a_pipeline_of_two_and_one_rank() -> None:
    """Each stage writes and reads its own layers of a staged block. Without compilation, vLLM's pipeline does not run on a CPU."""
    one = await started(ONE.but(vllm={"enforce_eager": True}))
    two = await started(ONE.but(vllm={"pipeline_parallel_size": 2, "compilation_config": {"backend": "eager"}}))
    try:
        alone = await one.run(one.seq(PROMPT, salt="alone", **SEEDED))
        assert one.engine.pool.layout == two.engine.pool.layout
        assert await moved(two, one) == await moved(one, two) == alone
        await one.quiet()
        await two.quiet()
    finally:
        await asyncio.gather(one.engine.close(), two.engine.close())


async def test_sequences_whose_kv_came_from_a_peer_are_preempted_and_go_on_exactly() -> None:
    """The cache holds three of the four. Who is preempted is computed again here: its staged blocks were given back long before."""
    engine = await started(ONE.but(kv_memory_mib=4, vllm={"enforce_eager": True}, staging_mib=8))
    try:
        params = [{**SEEDED, "seed": seed, "max_tokens": 250} for seed in range(4)]
        alone = [await engine.run(engine.seq(PROMPT, **each)) for each in params]
        readers = []
        for each, tokens in zip(params, alone, strict=True):
            holder = engine.seq(PROMPT, hold=True, **each)
            await engine.run(holder)
            reader = engine.seq([*PROMPT, tokens[0]], len(PROMPT), salt=str(each["seed"]), **each)
            await engine.reserve(reader)
            engine.copy(holder, reader)
            engine.engine.forget(holder.id)
            readers.append(reader)
        for reader in readers:
            await engine.engine.adopt(reader, len(PROMPT))
        assert [[tokens[0], *await engine.ended(reader)] for tokens, reader in zip(alone, readers, strict=True)] == alone
        assert (await engine.quiet()).counts.preemptions > 0 and sum(reader.preemptions for reader in readers) > 0
    finally:
        await engine.engine.close()


async def test_a_sequence_that_is_held_makes_room_for_the_next_at_once() -> None:
    """One runs at a time, and nothing else happens: no command, and no other sequence ends."""
    engine = await started(ONE.but(max_num_seqs=1, max_num_batched_tokens=64, vllm={"enforce_eager": True}))
    try:
        holder, behind = engine.seq(PROMPT, hold=True), engine.seq(PROMPT, salt="behind")
        await engine.engine.add(holder)
        await engine.engine.add(behind)
        assert behind.state is State.WAITING
        async with asyncio.timeout(ROOM_S):
            assert len(await engine.ended(behind)) == 24
        assert holder.state is State.HELD
        engine.engine.forget(holder.id)
        await engine.quiet()
    finally:
        await engine.engine.close()


async def test_a_refusal_that_gives_up_a_claim_lets_those_behind_it_run() -> None:
    """One waits behind the claim of a sequence that came earlier and then finds the queue full. Nothing else happens."""
    engine = await started(ONE.but(max_num_seqs=1, max_num_batched_tokens=64, max_queue=1, vllm={"enforce_eager": True}))
    try:
        reader, claimant, behind = engine.seq(PROMPT), engine.seq(PROMPT), engine.seq(PROMPT, salt="behind")
        await engine.reserve(reader)
        assert not await engine.engine.reserve(claimant)
        await engine.engine.add(behind)
        filling: list[int] = []
        await engine.engine.abort(reader.id, filling)
        await engine.engine.release(filling)
        assert behind.state is State.WAITING, "it overtook a claim"
        with pytest.raises(QueueFull):
            await engine.engine.add(claimant)
        async with asyncio.timeout(ROOM_S):
            assert len(await engine.ended(behind)) == 24
        await engine.quiet()
    finally:
        await engine.engine.close()
