"""KV that is read while the prompt is still being computed: the guarantees of an ordinary handoff, tested at more points in time.

The prompt has three chunks, so the handle exists after the first chunk, and the blocks arrive in three pieces.
"""

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from handoff_pair import PROMPT, Call, Pair, expected, pair
from host_pool import on_host

from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.engine.core.engine import Output
from baton.engine.core.protocol import Chunk, Tokens
from kvtransfer.handle import KvHandle
from kvtransfer.importer import Checks
from prefill_worker.worker import Prefilled

CHUNK = 8


@dataclass
class Live:
    """Does what the router does: starts the decode call when the prefill opens its lease, and passes on the first token."""

    p: Pair
    started: Call | None = None
    handle: KvHandle | None = None

    @property
    def call(self) -> Call:
        assert self.started is not None, "the decode call has not started"
        return self.started

    @property
    def first(self) -> "asyncio.Future[int]":
        assert self.call.first is not None
        return self.call.first

    async def run(self, request_id: str = "r", tokens: list[int] | None = None) -> Prefilled:
        done = await self.prefill(request_id, tokens)
        self.first.set_result(done.sampled.token)
        return done

    async def prefill(self, request_id: str = "r", tokens: list[int] | None = None) -> Prefilled:
        """Without passing on the first token."""

        def opened(handle: KvHandle) -> None:
            self.handle = handle
            self.started = self.p.start_live(handle, request_id, tokens=tokens)

        done = await self.p.hand_over(request_id, tokens, opened=opened)
        assert self.started is not None, "the prompt is too short"
        return done


def compute_after_reads(p: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the prefill worker computes a chunk when the reader has the blocks of the chunk before."""
    compute, note = p.runners[0].run, Handoff.note_moved
    may_compute = threading.Semaphore(1)

    def compute_after_read(batch: Sequence[Chunk]) -> list[Tokens]:
        assert may_compute.acquire(timeout=30), "the reader did not take the blocks of the last chunk"
        return compute(batch)

    def note_moved(report: Handoff, *facts: Any) -> None:
        note(report, *facts)
        may_compute.release()

    monkeypatch.setattr(p.runners[0], "run", compute_after_read)
    monkeypatch.setattr(Handoff, "note_moved", note_moved)


async def test_blocks_are_read_while_the_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(chunk=CHUNK) as p:
        compute_after_reads(p, monkeypatch)
        read, live = p.decode.port.importer.transport.read, Live(p)
        reads: list[tuple[int, bool]] = []  # blocks, and whether the first token was known

        def count(name: str, remote: Sequence[int], *more: Any) -> None:
            reads.append((len(remote), live.first.done()))
            read(name, remote, *more)

        monkeypatch.setattr(p.decode.port.importer.transport, "read", count)
        first = await live.run()
        await live.call.task
        assert [first.sampled.token, *live.call.tokens] == expected()
        handoff = live.call.finished.handoff
        assert (handoff.recomputed_tokens, handoff.blocks, handoff.digests_checked, handoff.failure) == (0, 5, 5, "")
        assert handoff.blocks_early == 4
        assert [blocks for blocks, _ in reads] == [2, 2, 1] and not reads[0][1] and not reads[1][1]
        await p.settled()


async def test_blocks_that_moved_just_before_the_first_token_are_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token arrives when all blocks have moved, and before the call asks for it."""
    async with pair(chunk=CHUNK) as p:
        live, fill = Live(p), p.decode.port.fill
        token = asyncio.get_running_loop().create_future()

        async def fill_and_tell(*args: Any) -> int:
            reused = await fill(*args)
            live.first.set_result(await token)
            return reused

        monkeypatch.setattr(p.decode.port, "fill", fill_and_tell)
        token.set_result((await live.prefill()).sampled.token)
        await live.call.task
        handoff = live.call.adopted.handoff
        assert (handoff.blocks, handoff.blocks_early) == (5, 5)
        await p.settled()


async def test_a_one_chunk_prompt_is_not_opened_early() -> None:
    async with pair() as p:
        opened: list[KvHandle] = []
        first = await p.hand_over(opened=opened.append)
        assert not opened
        await p.start(first).task
        await p.settled()


async def test_without_live_transfer_no_prompt_is_opened_early() -> None:
    async with pair(chunk=CHUNK, live=False) as p:
        opened: list[KvHandle] = []
        first = await p.hand_over(opened=opened.append)
        assert not opened
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and (call.finished.handoff.blocks, call.finished.handoff.blocks_early) == (5, 0)
        await p.settled()


async def test_a_late_reader_reads_the_whole_range_of_an_opened_handle() -> None:
    """The decode worker was chosen after the prompt was computed, and starts in the ordinary way with the same handle."""
    async with pair(chunk=CHUNK) as p:
        opened: list[KvHandle] = []
        first = await p.hand_over(opened=opened.append)
        assert opened == [first.handle]
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.recomputed_tokens == 0
        await p.settled()


async def test_a_live_reader_does_not_read_blocks_that_it_caches() -> None:
    """The decode worker caches all four blocks of the prompt, but reuses only those before the block of the last token."""
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


async def test_a_flipped_byte_is_recomputed_once_the_first_token_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(chunk=CHUNK) as p:
        p.runners[0].step_delay_s = 0.02
        read, live = p.decode.port.importer.transport.read, Live(p)

        def read_wrong(name: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
            read(name, remote, local, timeout)
            on_host(p.engines[1].runner.pool).block(local[0])[3] ^= 0x10

        monkeypatch.setattr(p.decode.port.importer.transport, "read", read_wrong)
        first = await live.run()
        await live.call.task
        assert [first.sampled.token, *live.call.tokens] == expected()
        assert live.call.finished.handoff.failure == "DIGEST_MISMATCH"
        assert live.call.finished.handoff.recomputed_tokens == len(PROMPT)
        await p.settled()


async def revoked_in_the_middle(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], str]:
    """Just before the last copy, the holder takes its blocks back and another sequence overwrites them."""
    async with pair(checks=checks, chunk=CHUNK) as p:
        compute_after_reads(p, monkeypatch)
        read, loop, live = p.decode.port.importer.transport.read, asyncio.get_running_loop(), Live(p)

        async def take_back() -> None:
            port, pool = p.prefill.port, p.engines[0].runner.pool
            assert live.handle is not None
            export = port.exporter._exports[live.handle.lease_id]
            blocks = list(export.block_ids)
            port.exporter.revoke(export)
            on_host(pool).array[blocks] = 7

        def read_late(name: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
            if live.first.done():  # the last piece
                asyncio.run_coroutine_threadsafe(take_back(), loop).result(5)
            read(name, remote, local, timeout)

        monkeypatch.setattr(p.decode.port.importer.transport, "read", read_late)
        gate = asyncio.Event()
        calls = iter(range(100))

        async def wait_for_the_end() -> None:
            if next(calls) >= 2:  # two pieces have been read; the last is requested once the first token is known
                await gate.wait()

        p.wire.on["piece"] = wait_for_the_end
        await live.run()
        gate.set()
        await live.call.task
        await p.settled()
        return live.call.tokens, live.call.finished.handoff.failure


async def test_a_lease_revoked_during_the_read_voids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are off, so the lease check alone must catch a read of blocks that were reused."""
    tokens, failure = await revoked_in_the_middle(Checks(digests=False), monkeypatch)
    assert tokens == expected(1) and failure == "LEASE_EXPIRED"


async def test_without_the_lease_check_a_revoked_lease_produces_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    tokens, failure = await revoked_in_the_middle(Checks(digests=False, lease=False), monkeypatch)
    assert tokens != expected(1) and failure == ""


async def test_a_reader_that_gives_up_early_does_not_disturb_the_prefill() -> None:
    """The lease ends while the prompt is computed: the first token still comes, without a handle, and the blocks are freed."""
    async with pair(chunk=CHUNK) as p:
        p.runners[0].step_delay_s = 0.02
        first = await p.hand_over(opened=lambda handle: p.prefill.port.exporter.release(handle, "r"))
        assert first.handle is None and first.sampled.token == expected()[0]
        await p.settled()


async def test_a_lease_does_not_expire_while_the_prompt_is_computed() -> None:
    async with pair(chunk=CHUNK) as p:
        p.runners[0].step_delay_s = 0.02

        def opened(handle: KvHandle) -> None:
            p.clock.now += 90  # the TTL is 10 s, and no reader has come yet

        step = p.prefill.on_step

        def on_step(outputs: list[Output]) -> None:
            p.clock.now += 60
            step(outputs)

        p.loops[0]._listener = replace(p.loops[0]._listener, on_step=on_step)
        first = await p.hand_over(opened=opened)
        assert first.handle is not None
        p.loops[0]._listener = replace(p.loops[0]._listener, on_step=step)
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == ""
        await p.settled()


@pytest.mark.parametrize("passing", range(3))
@pytest.mark.parametrize("place", ["handshake", "piece", "release", "first"])
async def test_cancelling_during_any_peer_call_frees_everything(place: str, passing: int) -> None:
    async with pair(chunk=CHUNK) as p:
        p.runners[0].step_delay_s = 0.01
        reached, gate = p.wire.hang(place, passing)
        live = Live(p)
        prefill = asyncio.create_task(live.run())
        if place == "first" or (passing and place != "piece"):
            while live.started is None or not live.started.events:
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
async def test_a_prefill_cancelled_in_any_chunk_leaves_nothing_behind(chunks: int) -> None:
    """The decode call hears nothing more: the router cancels it as well, or its deadline ends it."""
    async with pair(chunk=CHUNK) as p:
        p.runners[0].step_delay_s = 0.02
        live, steps = Live(p), 0
        step = p.prefill.on_step

        def on_step(outputs: list[Output]) -> None:
            nonlocal steps
            steps += 1
            step(outputs)
            if steps == chunks:
                prefill.cancel()

        p.loops[0]._listener = replace(p.loops[0]._listener, on_step=on_step)
        prefill = asyncio.create_task(live.run())
        if not chunks:
            await asyncio.sleep(0)
            prefill.cancel()
        await asyncio.gather(prefill, return_exceptions=True)
        if live.started is not None:
            live.call.task.cancel()
            await asyncio.gather(live.call.task, return_exceptions=True)
            assert not live.call.tokens
        p.clock.now += 1000
        await p.settled()


async def test_a_call_whose_first_token_never_comes_ends_at_its_deadline() -> None:
    async with pair(chunk=CHUNK) as p:
        handles: list[KvHandle] = []
        await p.hand_over(opened=handles.append)
        call = p.start_live(handles[0], timeout_s=0.2)
        await call.task
        assert call.error.reason is Reason.DEADLINE and not call.tokens
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("seed", range(4))
async def test_a_storm_of_cancels_and_failed_fetches_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    async with pair(decode_blocks=24, chunk=CHUNK) as p:
        p.runners[0].step_delay_s = p.runners[1].step_delay_s = 0.002

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
                if live.started is not None:
                    live.call.task.cancel()
            await asyncio.gather(prefill, return_exceptions=True)
            if live.started is not None:
                if not live.first.done():
                    live.call.task.cancel()
                await asyncio.gather(live.call.task, return_exceptions=True)
                assert live.call.tokens == expected(1)[: len(live.call.tokens)]

        await asyncio.gather(*(one(f"r{i}") for i in range(30)))
        p.clock.now += 1000
        await p.settled()
