"""A handoff between two devices by way of their hosts. What crosses the bus waits for as long as a test likes, and nobody else does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from handoff_pair import BLOCK, CONFIG, PROMPT, Pair, expected, greedy, pair
from late_toy import LateEngine, LatePool, LateToy

from baton.engine.core.block_key import root_key
from baton.engine.core.engine import Output
from baton.engine.core.limits import Limits
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import naive
from decode_worker.call import Adopted
from kvtransfer.handle import Wish

OTHER = list(range(50, 63))


def late_engine(kind: type[LateEngine] = LateEngine) -> LateEngine:
    return kind(LateToy(64, CONFIG, BLOCK), Limits(8, 64), 128)


@asynccontextmanager
async def devices(**more: Any) -> AsyncIterator[tuple[Pair, LatePool, LatePool]]:
    engines = more.pop("engines", None) or (late_engine(), late_engine())
    source, target = (engine.runner.pool for engine in engines)
    assert isinstance(source, LatePool) and isinstance(target, LatePool)
    async with pair(engines=engines, **more) as p:
        yield p, source, target


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


async def decoded(p: Pair, side: int, name: str) -> list[int]:
    """Another request, from its prompt to its last token, in the engine of one of the two."""
    seq = Sequence(name, list(OTHER), len(OTHER), greedy(), root_key("toy"))
    await p.loops[side].add(seq)
    await until(lambda: len(seq.tokens) == len(OTHER) + 12)
    return seq.tokens[len(OTHER) :]


async def test_the_first_token_and_the_steps_of_others_do_not_wait_for_the_way_out() -> None:
    async with devices() as (p, source, _):
        source.bus.clear()
        first = await p.hand_over()  # its token is told while its KV is on the device alone
        assert first.sampled.token == expected()[0] and first.handle is not None
        await until(lambda: source.waiting == 1)
        call = p.start(first)
        assert (await p.hand_over("second", OTHER)).sampled.token == naive(OTHER, greedy())[0]
        assert await decoded(p, 0, "third") == naive(OTHER, greedy())
        assert source.waiting == 2 and not call.events
        source.bus.set()
        await call.task
        assert call.tokens == expected(1) and call.adopted.handoff.digests_failed == 0 and call.finished.handoff.recomputed_tokens == 0


async def test_negative_control_an_engine_that_copies_in_its_own_thread_keeps_the_first_token() -> None:
    class Copying(LateEngine):
        def _land_chunk(self, chunk: Any, tokens: Any) -> list[Output]:
            outputs = super()._land_chunk(chunk, tokens)
            if chunk.seq.hold:
                self.runner.pool.expose(chunk.seq.blocks)
            return outputs

    async with devices(engines=(late_engine(Copying), late_engine())) as (p, source, _):
        source.bus.clear()
        handing = asyncio.create_task(p.hand_over())
        await until(lambda: source.waiting == 1)
        await asyncio.sleep(0.2)
        assert not handing.done()
        source.bus.set()
        first = await handing
        await p.start(first).task


async def test_memory_that_peers_reach_is_copied_to_the_host_only_for_those_who_go_through_it() -> None:
    engines = late_engine(), late_engine()
    engines[0].runner.pool.direct = True
    async with devices(engines=engines) as (p, source, _):
        first = await p.hand_over()
        assert first.handle is not None
        exporter, n = p.prefill.port.exporter, -(-len(PROMPT) // BLOCK)
        piece = await exporter.piece(first.handle, first.handle.request_id, 0, 5.0, True)
        assert len(piece.block_ids) == n and not source.exposed
        call = p.start(first)  # through the host
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.recomputed_tokens == 0
        assert source.exposed == list(piece.block_ids)
        before = len(source.exposed)
        await p.hand_over("next", OTHER)  # from now on somebody does, and need not wait
        await until(lambda: len(source.exposed) > before)


async def test_a_piece_for_the_host_holds_no_block_that_is_not_there_yet() -> None:
    engines = late_engine(), late_engine()
    engines[0].runner.pool.direct = True
    async with devices(engines=engines) as (p, source, _):
        first = await p.hand_over()
        assert first.handle is not None
        exporter, asked = p.prefill.port.exporter, (first.handle, first.handle.request_id, 0, 5.0)
        whole = await exporter.piece(*asked, True)
        source.bus.clear()
        piece = asyncio.create_task(exporter.piece(*asked, False))
        await until(lambda: source.waiting == 1)
        assert not piece.done() and (await exporter.piece(*asked, True)).block_ids == whole.block_ids
        source.bus.set()
        assert (await piece).block_ids == whole.block_ids == tuple(source.exposed)


async def test_streams_go_on_while_the_kv_of_another_comes_in() -> None:
    async with devices() as (p, _, target):
        first = await p.hand_over()
        target.bus.clear()
        call = p.start(first)
        await until(lambda: target.waiting == 1)
        assert await decoded(p, 1, "other") == naive(OTHER, greedy())
        assert target.waiting == 1 and not any(isinstance(event, Adopted) for event in call.events)
        target.bus.set()
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.recomputed_tokens == 0


@pytest.mark.parametrize("side", ["out", "in"])
async def test_a_request_that_is_cancelled_on_the_bus_gives_its_blocks_back_once_nothing_crosses_it(side: str) -> None:
    async with devices() as (p, source, target):
        bus = source if side == "out" else target
        if side == "in":
            first = await p.hand_over()
            bus.bus.clear()
        else:
            bus.bus.clear()
            first = await p.hand_over()
        call = p.start(first)
        await until(lambda: bus.waiting == 1)
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        if side == "in":
            await asyncio.sleep(0.1)
            assert p.engines[1].pool.num_owned and p.decode.port.importer.quarantined_blocks, "a byte may still land"
        bus.bus.set()
        await p.settled()
        again = await p.hand_over("again")
        later = p.start(again, "again")
        await later.task
        assert later.tokens == expected(1)


async def test_damage_on_the_bus_is_seen_and_the_prompt_computed_again() -> None:
    """A digest of the host's copy would agree."""
    async with devices() as (p, _, target):
        target.damages = True
        call = p.start(await p.hand_over())
        await call.task
        assert call.adopted.handoff.failure == "DIGEST_MISMATCH" and call.tokens == expected(1)
        assert call.finished.handoff.recomputed_tokens == len(PROMPT)


async def test_cached_blocks_are_lent_from_a_device_too() -> None:
    async with devices() as (p, source, target):
        source.bus.clear()
        whole = Sequence("kept", list(PROMPT), len(PROMPT), greedy(), root_key("toy"))
        await p.loops[0].add(whole)
        await until(lambda: len(whole.tokens) == len(PROMPT) + 12)
        keys = b"".join(whole.keys[: len(PROMPT) // BLOCK])
        wish = Wish("prefill-0", 7, "r", 0, keys).sealed(p.decode.port.importer.key)
        handle = await p.prefill.port.lend(wish)
        await until(lambda: source.waiting == 1)
        assert await decoded(p, 0, "other") == naive(OTHER, greedy())
        source.bus.set()
        fetch = p.decode.port.importer.open(handle, "r")
        blocks = await p.loops[1].call(lambda engine: engine.pool.allocate(4))
        assert blocks is not None
        await fetch.read(blocks)
        assert (target._device.array[blocks] == source._device.array[list(p.engines[0].pool.match(whole.keys[:4]))]).all()
