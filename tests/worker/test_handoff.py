"""The handoff and everything that can go wrong in it. No token is ever served from unproven KV, and nothing is left behind.

Each protection has a negative control: with the check off, the same fault produces wrong tokens.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from handoff_pair import KEY, PROMPT, Pair, expected, greedy, leased, pair
from host_pool import on_host

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.block_key import root_key
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import DraftKv
from baton.engine.core.sequence import Sequence, State
from decode_worker.call import Adopted, Event, Finished
from kvtransfer.handle import Piece
from kvtransfer.importer import Checks


async def test_a_handoff_yields_the_same_tokens_without_recomputing() -> None:
    async with pair() as p:
        first = await p.hand_over()
        call = p.start(first)
        await call.task
        assert [first.sampled.token, *call.tokens] == expected()
        handoff = call.finished.handoff
        assert (handoff.recomputed_tokens, handoff.blocks, handoff.digests_checked, handoff.failure) == (0, 5, 5, "")
        await p.settled()


async def test_the_time_to_connect_is_told_apart_from_the_read() -> None:
    """Only the first handoff between two processes connects them; without a name, its time would look like a slow read."""
    async with pair() as p:
        shaken = 0

        async def shake() -> None:
            nonlocal shaken
            shaken += 1
            await asyncio.sleep(0.05)

        p.wire.on["handshake"] = shake
        facts = []
        for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
            call = p.start(await p.hand_over(name, prompt), name, tokens=prompt)
            await call.task
            facts.append(call.finished.handoff)
        assert shaken == 1 and facts[0].blocks and facts[1].blocks
        assert facts[0].connect_ms > 45, "the first one waited for the handshake"
        assert facts[1].connect_ms < facts[0].connect_ms
        await p.settled()


async def test_only_missing_blocks_are_fetched() -> None:
    async with pair() as p:
        for request, blocks, reused in (("a", 5, 0), ("b", 1, 4)):
            call = p.start(await p.hand_over(request), request)
            await call.task
            assert (call.finished.handoff.blocks, call.finished.handoff.blocks_reused) == (blocks, reused)
            assert call.tokens == expected(1)
        await p.settled()


def flip(p: Pair, block: int) -> None:
    on_host(p.engines[0].runner.pool).block(block)[3] ^= 0x10


async def test_a_flipped_byte_is_recomputed() -> None:
    async with pair() as p:
        first = await p.hand_over()
        flip(p, (await p.blocks_of(first.handle))[1])
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1)
        assert call.finished.handoff.failure == "DIGEST_MISMATCH"
        assert call.finished.handoff.recomputed_tokens == len(PROMPT)
        await p.settled()


async def test_without_digests_a_flipped_byte_produces_wrong_tokens() -> None:
    """Negative control."""
    async with pair(checks=Checks(digests=False)) as p:
        first = await p.hand_over()
        flip(p, (await p.blocks_of(first.handle))[1])
        call = p.start(first)
        await call.task
        assert call.tokens != expected(1) and call.finished.handoff.failure == ""


async def test_a_flipped_byte_is_an_error_under_the_fail_policy() -> None:
    async with pair(on_failure="fail") as p:
        first = await p.hand_over()
        flip(p, (await p.blocks_of(first.handle))[1])
        call = p.start(first)
        await call.task
        assert call.error.reason is Reason.DIGEST_MISMATCH and not call.tokens
        assert p.prefill.port.exporter.num_leases == 1  # the router that sent the request decides what happens to the lease
        p.clock.now += 1000
        await p.settled()


async def overwrite(p: Pair, blocks: tuple[int, ...]) -> None:
    """The lease expires after the copy was permitted and before it happens, and its blocks are reused immediately."""
    p.clock.now += 1000
    p.prefill.port.exporter.reap()
    for block in blocks:
        on_host(p.engines[0].runner.pool).array[block] = 7


async def late_read(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], str]:
    async with pair(checks=checks) as p:
        first = await p.hand_over()
        blocks = await p.blocks_of(first.handle)
        read = p.decode.port.importer.transport.read
        loop = asyncio.get_running_loop()

        def read_late(*arguments: Any) -> None:
            asyncio.run_coroutine_threadsafe(overwrite(p, blocks), loop).result(5)
            read(*arguments)

        monkeypatch.setattr(p.decode.port.importer.transport, "read", read_late)
        call = p.start(first)
        await call.task
        await p.settled()
        return call.tokens, call.finished.handoff.failure


async def test_a_lease_that_ended_before_the_read_voids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are off, so the lease check alone must catch a read of blocks that were reused."""
    tokens, failure = await late_read(Checks(digests=False), monkeypatch)
    assert tokens == expected(1) and failure == "LEASE_EXPIRED"


async def test_without_the_lease_check_a_late_read_produces_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    tokens, failure = await late_read(Checks(digests=False, lease=False), monkeypatch)
    assert tokens != expected(1) and failure == ""


async def test_an_expired_lease_is_refused_before_the_copy() -> None:
    async with pair() as p:
        first = await p.hand_over()
        p.clock.now += 1000
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == "LEASE_EXPIRED"
        assert call.finished.handoff.blocks == 0
        await p.settled()


async def test_the_lease_is_renewed_while_the_reader_waits_for_room() -> None:
    """A renewal arrives every third of the TTL. The exporter's clock stands still, so the test counts the renewals."""
    async with pair(decode_blocks=8, ttl_s=1.0) as p:
        renewals = 0

        def count() -> None:
            nonlocal renewals
            renewals += 1

        filler = await p.hand_over("filler", list(range(50, 68)))
        blocker = p.start(filler, "filler", tokens=list(range(50, 68)))
        await blocker.task  # its blocks are only cached now, so the test itself holds the pool
        held = await p.loops[1].call(lambda engine: engine.pool.allocate(6))
        assert held is not None
        first = await p.hand_over()
        p.wire.on["renew"] = count
        call = p.start(first)
        async with asyncio.timeout(60):
            while renewals < 3:
                await asyncio.sleep(0.01)
        assert not call.events
        await p.loops[1].call(lambda engine: engine.release(held))
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == ""
        await p.settled()


CONTRACT = [
    ("dtype", "float32"),
    ("num_layers", 2),
    ("num_kv_heads", 2),
    ("head_dim", 16),
    ("layout_version", 2),
    ("parts", 1),
    ("value_dim", 4),
    ("model_fingerprint", "another model"),
    ("draft", DraftKv("a draft", "float32", 2, 1, 8)),
]


@pytest.mark.parametrize(("name", "value"), CONTRACT)
async def test_the_handshake_names_the_field_that_differs(name: str, value: object) -> None:
    change: dict[str, Any] = {name: value}
    async with pair() as p:
        with pytest.raises(BatonError) as caught:
            p.prefill.port.exporter.handshake(replace(p.wire.port.pool.layout, **change))
        assert caught.value.reason is Reason.HANDSHAKE_MISMATCH and name in caught.value.message


async def test_kv_with_another_layout_is_never_read() -> None:
    async with pair() as p:
        first = await p.hand_over()
        stranger = replace(leased(first), layout_fingerprint=b"\x00" * 16).sealed(KEY)
        call = p.start(first, handle=stranger)
        await call.task
        assert call.finished.handoff.failure == "HANDSHAKE_MISMATCH" and call.tokens == expected(1)
        p.clock.now += 1000
        await p.settled()


async def test_without_the_handshake_kv_of_another_model_produces_wrong_tokens() -> None:
    """Negative control: a worker whose KV means something else answers with blocks of the same shape."""
    for layout_check in (True, False):
        async with pair(checks=Checks(layout=layout_check), decode_layout={"model_fingerprint": "toy with other weights"}) as p:
            # The KV of the other model: every element is one higher.
            first = await p.hand_over()
            pool, blocks = p.engines[0].runner.pool, await p.blocks_of(first.handle)
            on_host(pool).array.view("int64")[list(blocks)] += 1
            digests = pool.digests(blocks)
            p.wire.forge = partial(altered, digests=digests)
            call = p.start(first)
            await call.task
            assert (call.tokens == expected(1)) is layout_check


async def test_a_handle_is_valid_only_for_its_request() -> None:
    async with pair() as p:
        first = await p.hand_over("mine")
        call = p.start(first, "yours")
        await call.task
        assert call.finished.handoff.failure == "LEASE_REFUSED"
        p.clock.now += 1000
        await p.settled()


async def test_a_handle_is_refused_after_its_release() -> None:
    async with pair() as p:
        first = await p.hand_over()
        await p.start(first).task
        # Without this, the cache would still hold all but the last block. Now everything behind the handle is needed again.
        await p.loops[1].call(lambda engine: engine.pool.forget(range(engine.pool.num_blocks)))
        again = p.start(first)
        await again.task
        assert again.tokens == expected(1)
        assert (again.finished.handoff.blocks, again.finished.handoff.failure) == (0, "LEASE_EXPIRED")
        await p.settled()


async def test_a_handle_of_an_earlier_incarnation_is_refused() -> None:
    async with pair() as p:
        first = await p.hand_over()
        p.prefill.port.exporter.incarnation = 8
        call = p.start(first)
        await call.task
        assert call.finished.handoff.failure == "LEASE_REFUSED" and call.tokens == expected(1)
        p.clock.now += 1000
        await p.settled()


async def test_a_holder_refuses_a_handle_of_its_earlier_incarnation_itself() -> None:
    """Whatever its reader knows: one that is still connected to the process before shakes no hands."""
    async with pair() as p:
        handle, exporter = leased(await p.hand_over()), p.prefill.port.exporter
        exporter.incarnation = 8
        with pytest.raises(BatonError, match=r"the handle is from .*:7; this is .*:8"):
            await exporter.piece(handle, "r", 0, 0.0)
        with pytest.raises(BatonError, match="the handle is from"):
            exporter.release(handle, "r")
        assert exporter.num_leases == 1 and exporter.events["fenced"] == 2
        p.clock.now += 1000
        await p.settled()


async def test_a_second_reader_can_use_the_lease_of_a_reader_that_died() -> None:
    """When a decode worker dies before its read ends, the lease stays alive and another worker reads the same KV."""
    async with pair() as p:
        first = await p.hand_over()
        reader = p.decode.port.importer.open(leased(first), "r")
        name = await p.decode.port.importer.shake_hands(leased(first), p.wire)
        p.decode.port.importer.transport.read(name, (await p.blocks_of(first.handle))[:2], [60, 61], 2.0)
        del reader  # killed here
        call = p.start(first)
        await call.task
        assert call.finished.handoff.blocks == 5 and call.finished.handoff.recomputed_tokens == 0
        await p.settled()


@pytest.mark.parametrize("place", ["handshake", "piece", "release"])
async def test_cancelling_during_any_peer_call_frees_everything(place: str) -> None:
    async with pair() as p:
        first = await p.hand_over()
        reached, gate = p.wire.hang(place)
        call = p.start(first)
        await reached.wait()
        p.wire.on.clear()
        call.task.cancel()
        gate.set()
        await asyncio.gather(call.task, return_exceptions=True)
        await p.settled()
        assert not call.tokens


@pytest.mark.parametrize("after", range(1, 12, 3))
async def test_cancelling_while_decoding_frees_everything(after: int) -> None:
    async with pair() as p:
        p.runners[1].step_delay_s = 0.002
        call = p.start(await p.hand_over())
        while len(call.tokens) < after:
            await asyncio.sleep(0.001)
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        await p.settled()
        made = len(call.tokens)
        await asyncio.sleep(0.02)
        assert len(call.tokens) == made <= after + 3


async def test_blocks_of_a_cancelled_read_stay_quarantined_until_nothing_can_land(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as p:
        first = await p.hand_over()
        transport = p.decode.port.importer.transport
        read, gate, reading = transport.read, asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow_read(*arguments: Any) -> None:
            loop.call_soon_threadsafe(reading.set)
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(5)
            read(*arguments)

        monkeypatch.setattr(transport, "read", slow_read)
        call = p.start(first)
        await reading.wait()
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        assert p.decode.port.importer.quarantined_blocks == 5
        assert p.engines[1].pool.num_owned == p.decode.port.importer.quarantined_blocks
        gate.set()
        await p.settled()


async def test_cancelling_a_prefill_frees_everything() -> None:
    async with pair() as p:
        p.runners[0].step_delay_s = 0.01
        for pause in (0.0, 0.002, 0.012):
            task = asyncio.create_task(p.hand_over("r"))
            await asyncio.sleep(pause)
            task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(result, BaseException):
                p.clock.now += 1000
            await p.settled()


async def test_a_deadline_ends_a_call_within_one_step() -> None:
    async with pair() as p:
        p.runners[1].step_delay_s = 0.3  # the whole output takes 3.3 s
        call = p.start(await p.hand_over(), timeout_s=1.5)
        await call.task
        assert call.error.reason is Reason.DEADLINE and 0 < len(call.tokens) < 11
        await p.settled()


def refuse() -> None:
    raise BatonError(Reason.DRAINING, "the worker is draining")


async def test_draining_workers_refuse_new_calls() -> None:
    async with pair() as p:
        first = await p.hand_over()
        p.prefill.admit = p.decode.admit = refuse
        with pytest.raises(BatonError) as caught:
            await p.hand_over("s")
        assert caught.value.reason is Reason.DRAINING
        call = p.start(first)
        await call.task
        assert call.error.reason is Reason.DRAINING
        p.clock.now += 1000
        await p.settled()


async def test_an_output_that_ends_at_the_first_token_leases_nothing() -> None:
    async with pair() as p:
        first = await p.hand_over(params=greedy(max_tokens=1))
        assert first.handle is None and first.finish is not None
        await p.settled()


def altered(piece: Piece, **change: Any) -> Piece:
    """A piece altered by a peer that has the key."""
    return replace(piece, **change).sealed(KEY)


FORGERIES: dict[str, Callable[[Piece], Piece]] = {
    "too few blocks": lambda piece: replace(piece, block_ids=piece.block_ids[:3], digests=piece.digests[:48]),
    "too many blocks": lambda piece: replace(piece, block_ids=piece.block_ids * 2, digests=piece.digests * 2),
    "too few digests": lambda piece: replace(piece, digests=piece.digests[:16]),
    "other blocks of the range": lambda piece: replace(piece, first=1),
    "another lease": lambda piece: replace(piece, lease_id=piece.lease_id + 1),
    "another request": lambda piece: replace(piece, request_id="x"),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
async def test_a_piece_that_contradicts_its_handle_is_refused(forge: Callable[[Piece], Piece]) -> None:
    """A faulty peer made it with the right key. With too few blocks, for example, some of ours would keep their old contents."""
    async with pair() as p:
        first = await p.hand_over()
        p.wire.forge = lambda piece: forge(piece).sealed(KEY)
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == "LEASE_REFUSED"
        p.clock.now += 1000
        await p.settled()


async def test_a_piece_altered_in_transit_is_refused() -> None:
    async with pair() as p:
        first = await p.hand_over()
        p.wire.forge = lambda piece: replace(piece, block_ids=tuple(reversed(piece.block_ids)))
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == "LEASE_REFUSED"
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("change", [{"start": 4}, {"start": 2}, {"end": 16}, {"end": 19}, {"start": 18}])
async def test_a_handle_for_other_positions_is_refused(change: dict[str, Any]) -> None:
    async with pair() as p:
        first = await p.hand_over()
        call = p.start(first, handle=replace(leased(first), **change).sealed(KEY))
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == "LEASE_REFUSED"
        p.clock.now += 1000
        await p.settled()


async def test_release_does_not_wait_for_the_holders_step() -> None:
    """Otherwise a long step of the holder would make every reader miss its deadline and discard what it read."""
    async with pair() as p:
        first = await p.hand_over("a")
        entered, leave = threading.Event(), threading.Event()

        def long_step(engine: Engine) -> None:
            entered.set()
            leave.wait(10)

        p.loops[0].tell(long_step)
        await asyncio.to_thread(entered.wait)
        call = p.start(first, "a")
        await call.task
        assert not leave.is_set() and call.finished.handoff.failure == ""
        leave.set()
        await p.settled()


async def test_a_deadline_during_a_failed_fetch_leaves_nothing_behind() -> None:
    """After the error is reported, the decode worker ends the lease. The blocks being filled are returned exactly once."""
    async with pair() as p:
        first = await p.hand_over()
        leave = threading.Event()

        def fail() -> None:
            p.loops[1].tell(lambda engine: leave.wait(10))  # the engine is in a step
            raise BatonError(Reason.TRANSFER_FAILED, "the peer is gone")

        p.wire.on["handshake"] = fail
        call = p.start(first, timeout_s=0.2)
        while not (call.events and isinstance(call.events[-1], BatonError)):
            await asyncio.sleep(0.01)
        leave.set()
        await call.task
        await p.settled()


async def test_cancelling_a_recomputed_call_that_finished_before_its_task_woke_leaves_nothing() -> None:
    """On a busy machine, the engine can finish a request before its task learns that the request was queued."""
    async with pair() as p:
        first = await p.hand_over()
        seq = Sequence("r#d", [*PROMPT, first.sampled.token], len(PROMPT), greedy(), root_key("toy"))
        ends: list[bool] = []

        def fail() -> None:
            raise BatonError(Reason.LEASE_EXPIRED, "the lease was released")

        def hold_up() -> None:
            done = threading.Event()
            while seq.state is not State.DONE:
                time.sleep(0.001)
            p.loops[1].tell(lambda engine: done.set())  # by then, the results of the last step have been posted
            done.wait(10)

        def emit(event: Event) -> None:
            if isinstance(event, Adopted):
                asyncio.get_running_loop().call_soon(hold_up)
            if isinstance(event, Finished):
                ends.append(task.cancel())

        p.wire.on["piece"] = fail
        task = asyncio.create_task(p.decode.serve(p.decode.open(seq, "r", first.handle, emit), 20.0))
        await asyncio.gather(task, return_exceptions=True)
        assert ends == [True] and task.cancelled()
        await p.settled()


@pytest.mark.parametrize("seed", range(6))
async def test_a_storm_of_cancels_and_failed_fetches_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    async with pair(decode_blocks=24) as p:
        p.runners[0].step_delay_s = p.runners[1].step_delay_s = 0.002

        def sometimes() -> None:
            if rng.random() < 0.5:
                raise BatonError(Reason.TRANSFER_FAILED, "the peer is gone")

        p.wire.on["piece"] = sometimes

        async def one(name: str) -> None:
            call = p.start(await p.hand_over(name), name)
            if rng.random() < 0.7:
                await asyncio.sleep(rng.random() * 0.08)
                call.task.cancel()
            await asyncio.gather(call.task, return_exceptions=True)
            assert call.tokens == expected(1)[: len(call.tokens)]

        await asyncio.gather(*(one(f"r{i}") for i in range(30)))
        p.clock.now += 1000
        await p.settled()
