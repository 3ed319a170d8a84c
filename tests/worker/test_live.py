"""KV that is read while the prompt is still computed: the same promises as for a handoff that comes whole, at more moments.

The prompt has three chunks, so the handle is there after the first, and blocks come in three pieces.
"""

import asyncio
import random
from dataclasses import dataclass

import pytest
from handoff_pair import PROMPT, Call, Pair, expected, pair

from baton.cluster.errors import BatonError, Reason
from kvtransfer.handle import KvHandle
from kvtransfer.importer import Checks
from prefill_worker.worker import Prefilled

CHUNK = 8


@dataclass
class Live:
    """What the router does: starts the decode call when the prefill has begun, and hands the first token on."""

    p: Pair
    call: Call | None = None

    async def run(self, request_id: str = "r", tokens: list[int] | None = None) -> Prefilled:
        started = asyncio.Event()

        def opened(handle: KvHandle) -> None:
            self.call = self.p.start_live(handle, request_id, tokens=tokens)
            started.set()

        done = await self.p.hand_over(request_id, tokens, opened=opened)
        assert self.call is not None, "the prompt is short"
        self.call.first.set_result(done.sampled.token)
        return done


async def test_blocks_are_read_while_the_prompt_is_computed() -> None:
    async with pair(chunk=CHUNK) as p:
        p.engines[0].runner.step_delay_s = 0.05
        read, before_the_end, live = p.decode.port.importer.transport.read, [], Live(p)

        def count(name: str, remote: list[int], *more: object) -> None:
            before_the_end.append((len(remote), live.call.first.done()))
            read(name, remote, *more)

        p.decode.port.importer.transport.read = count
        first = await live.run()
        await live.call.task
        assert [first.sampled.token, *live.call.tokens] == expected()
        handoff = live.call.finished.handoff
        assert (handoff.recomputed_tokens, handoff.blocks, handoff.digests_checked, handoff.failure) == (0, 5, 5, "")
        assert [blocks for blocks, _ in before_the_end] == [2, 2, 1] and not before_the_end[0][1] and not before_the_end[1][1]
        await p.settled()


async def test_a_prompt_of_one_chunk_is_not_opened() -> None:
    async with pair() as p:
        opened: list[KvHandle] = []
        first = await p.hand_over(opened=opened.append)
        assert not opened
        await p.start(first).task
        await p.settled()


async def test_a_handle_that_was_opened_is_read_whole_by_who_comes_late() -> None:
    """The decode worker was chosen after the prompt was computed: the same handle, started the ordinary way."""
    async with pair(chunk=CHUNK) as p:
        opened: list[KvHandle] = []
        first = await p.hand_over(opened=opened.append)
        assert opened == [first.handle]
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.recomputed_tokens == 0
        await p.settled()


async def test_what_the_reader_has_is_not_read_again_and_the_prefill_learns_that_nobody_reads() -> None:
    """All full blocks are cached at the decode worker; of a prompt that ends with a block, nothing is left to read."""
    prompt = list(range(1, 17))
    async with pair(chunk=CHUNK) as p:
        live = Live(p)
        await live.run("a", prompt)
        await live.call.task
        p.engines[0].pool.forget(range(64))
        live = Live(p)
        await live.run("b", prompt)
        await live.call.task
        assert (live.call.finished.handoff.blocks, live.call.finished.handoff.blocks_reused) == (1, 3)
        await p.settled()


async def test_a_flipped_byte_is_recomputed_once_the_first_token_is_known() -> None:
    async with pair(chunk=CHUNK) as p:
        p.engines[0].runner.step_delay_s = 0.02
        read, live = p.decode.port.importer.transport.read, Live(p)

        def read_wrong(name: str, remote: list[int], local: list[int], timeout: float) -> None:
            read(name, remote, local, timeout)
            p.engines[1].runner.pool.block(local[0])[3] ^= 0x10

        p.decode.port.importer.transport.read = read_wrong
        first = await live.run()
        await live.call.task
        assert [first.sampled.token, *live.call.tokens] == expected()
        assert live.call.finished.handoff.failure == "DIGEST_MISMATCH"
        assert live.call.finished.handoff.recomputed_tokens == len(PROMPT)
        await p.settled()


async def revoked_in_the_middle(checks: Checks) -> tuple[list[int], str]:
    """The holder takes its blocks back between the last copy and the reader's last word, and somebody else writes into them."""
    async with pair(checks=checks, chunk=CHUNK) as p:
        p.engines[0].runner.step_delay_s = 0.02
        read, loop, live = p.decode.port.importer.transport.read, asyncio.get_running_loop(), Live(p)

        async def take_back() -> None:
            port, pool = p.prefill.port, p.engines[0].runner.pool
            export = port.exporter._exports[live.call_handle.lease_id]
            blocks = list(export.block_ids)
            port.exporter.revoke(export)
            pool.array[blocks] = 7

        def read_late(name: str, remote: list[int], local: list[int], timeout: float) -> None:
            if live.call.first.done():  # the last piece
                asyncio.run_coroutine_threadsafe(take_back(), loop).result(5)
            read(name, remote, local, timeout)

        p.decode.port.importer.transport.read = read_late
        p.wire.on["handshake"] = lambda: None
        original = p.start_live

        def start_live(handle: KvHandle, *arguments: object, **more: object) -> Call:
            live.call_handle = handle
            return original(handle, *arguments, **more)

        p.start_live = start_live
        gate = asyncio.Event()
        words = iter(range(100))

        async def wait_for_the_end() -> None:
            if next(words) >= 2:  # two pieces are read; the last one is asked for when the first token is known
                await gate.wait()

        p.wire.on["piece"] = wait_for_the_end
        await live.run()
        gate.set()
        await live.call.task
        await p.settled()
        return live.call.tokens, live.call.finished.handoff.failure


async def test_lease_that_was_revoked_under_the_read_voids_it() -> None:
    """Digests are off here: the lease alone must catch a read of blocks that were given to somebody else."""
    tokens, failure = await revoked_in_the_middle(Checks(digests=False))
    assert tokens == expected(1) and failure == "LEASE_EXPIRED"


async def test_revoked_lease_without_the_lease_check_gives_wrong_tokens() -> None:
    """Negative control."""
    tokens, failure = await revoked_in_the_middle(Checks(digests=False, lease=False))
    assert tokens != expected(1) and failure == ""


async def test_a_reader_that_gives_up_early_costs_the_prefill_nothing() -> None:
    """The lease ends while the prompt is computed: the first token still comes, without a handle, and the blocks go."""
    async with pair(chunk=CHUNK) as p:
        p.engines[0].runner.step_delay_s = 0.02
        first = await p.hand_over(opened=lambda handle: p.prefill.port.exporter.release(handle, "r"))
        assert first.handle is None and first.sampled.token == expected()[0]
        await p.settled()


async def test_a_lease_does_not_run_out_while_the_prompt_is_computed() -> None:
    async with pair(chunk=CHUNK) as p:
        p.engines[0].runner.step_delay_s = 0.02

        def opened(handle: KvHandle) -> None:
            p.clock.now += 90  # of 10 s; nobody reads yet

        step = p.prefill.on_step

        def on_step(outputs: list[object]) -> None:
            p.clock.now += 60
            step(outputs)

        p.prefill.loop._on_step = on_step
        first = await p.hand_over(opened=opened)
        assert first.handle is not None
        p.prefill.loop._on_step = step
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == ""
        await p.settled()


@pytest.mark.parametrize("passing", range(3))
@pytest.mark.parametrize("place", ["handshake", "piece", "release", "first"])
async def test_cancel_at_every_word_of_the_wire_frees_everything(place: str, passing: int) -> None:
    async with pair(chunk=CHUNK) as p:
        p.engines[0].runner.step_delay_s = 0.01
        reached, gate, passed = asyncio.Event(), asyncio.Event(), 0

        async def hang() -> None:
            nonlocal passed
            passed += 1
            if passed > passing:
                reached.set()
                await gate.wait()

        p.wire.on[place] = hang
        live = Live(p)
        prefill = asyncio.create_task(live.run())
        if place == "first" or (passing and place != "piece"):
            while live.call is None or not live.call.events:
                await asyncio.sleep(0.005)
                if prefill.done():
                    break
        else:
            while not (reached.is_set() or prefill.done()):  # the last two pieces may have come as one
                await asyncio.sleep(0.005)
        p.wire.on.clear()
        live.call.task.cancel()
        prefill.cancel()
        gate.set()
        await asyncio.gather(live.call.task, prefill, return_exceptions=True)
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("chunks", [0, 1, 2, 3])
async def test_a_prefill_that_is_cancelled_in_any_chunk_leaves_nothing(chunks: int) -> None:
    """The decode call learns nothing more: its router cancels it, too, or its deadline ends it."""
    async with pair(chunk=CHUNK) as p:
        p.engines[0].runner.step_delay_s = 0.02
        live, steps = Live(p), 0
        step = p.prefill.on_step

        def on_step(outputs: list[object]) -> None:
            nonlocal steps
            steps += 1
            step(outputs)
            if steps == chunks:
                prefill.cancel()

        p.prefill.loop._on_step = on_step
        prefill = asyncio.create_task(live.run())
        if not chunks:
            await asyncio.sleep(0)
            prefill.cancel()
        await asyncio.gather(prefill, return_exceptions=True)
        if live.call is not None:
            live.call.task.cancel()
            await asyncio.gather(live.call.task, return_exceptions=True)
            assert not live.call.tokens
        p.clock.now += 1000
        await p.settled()


async def test_a_first_token_that_never_comes_ends_with_the_deadline() -> None:
    async with pair(chunk=CHUNK) as p:
        handles: list[KvHandle] = []
        await p.hand_over(opened=handles.append)
        call = p.start_live(handles[0], timeout_s=0.2)
        await call.task
        assert call.error.reason is Reason.DEADLINE and not call.tokens
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("seed", range(4))
async def test_storm_of_cancels_and_failed_fetches_leaves_nothing(seed: int) -> None:
    rng = random.Random(seed)
    async with pair(decode_blocks=24, chunk=CHUNK) as p:
        p.engines[0].runner.step_delay_s = p.engines[1].runner.step_delay_s = 0.002

        def sometimes() -> None:
            if rng.random() < 0.25:
                raise BatonError(Reason.TRANSFER_FAILED, "the peer is gone")

        p.wire.on["piece"] = sometimes

        async def one(name: str) -> None:
            live = Live(p)
            prefill = asyncio.create_task(live.run(name))
            if rng.random() < 0.6:
                await asyncio.sleep(rng.random() * 0.1)
                prefill.cancel()
                if live.call is not None:
                    live.call.task.cancel()
            await asyncio.gather(prefill, return_exceptions=True)
            if live.call is not None:
                if not live.call.first.done():
                    live.call.task.cancel()
                await asyncio.gather(live.call.task, return_exceptions=True)
                assert live.call.tokens == expected(1)[: len(live.call.tokens)]

        await asyncio.gather(*(one(f"r{i}") for i in range(30)))
        p.clock.now += 1000
        await p.settled()
