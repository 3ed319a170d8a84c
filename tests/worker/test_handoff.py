"""The handoff, with everything that can go wrong in it. No token is ever served from KV that was not proven; nothing is left behind.

Each protection has its negative control: the same fault with the check off gives wrong tokens, which is what the check is for.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from handoff_pair import KEY, PROMPT, Pair, expected, greedy, pair

from baton.cluster.errors import BatonError, Reason
from baton.engine.block_key import root_key
from baton.engine.sequence import Sequence, State
from decode_worker.worker import Adopted, Event, Finished
from kvtransfer.digest import block_digests
from kvtransfer.handle import Piece
from kvtransfer.importer import Checks


async def test_same_tokens_and_nothing_recomputed() -> None:
    async with pair() as p:
        first = await p.hand_over()
        call = p.start(first)
        await call.task
        assert [first.sampled.token, *call.tokens] == expected()
        handoff = call.finished.handoff
        assert (handoff.recomputed_tokens, handoff.blocks, handoff.digests_checked, handoff.failure) == (0, 5, 5, "")
        await p.settled()


async def test_only_what_is_missing_is_fetched() -> None:
    async with pair() as p:
        for request, blocks, reused in (("a", 5, 0), ("b", 1, 4)):
            call = p.start(await p.hand_over(request), request)
            await call.task
            assert (call.finished.handoff.blocks, call.finished.handoff.blocks_reused) == (blocks, reused)
            assert call.tokens == expected(1)
        await p.settled()


def flip(p: Pair, block: int) -> None:
    p.engines[0].runner.pool.block(block)[3] ^= 0x10


async def test_flipped_byte_is_recomputed() -> None:
    async with pair() as p:
        first = await p.hand_over()
        flip(p, (await p.blocks_of(first.handle))[1])
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1)
        assert call.finished.handoff.failure == "DIGEST_MISMATCH"
        assert call.finished.handoff.recomputed_tokens == len(PROMPT)
        await p.settled()


async def test_flipped_byte_without_digests_gives_wrong_tokens() -> None:
    """Negative control."""
    async with pair(checks=Checks(digests=False)) as p:
        first = await p.hand_over()
        flip(p, (await p.blocks_of(first.handle))[1])
        call = p.start(first)
        await call.task
        assert call.tokens != expected(1) and call.finished.handoff.failure == ""


async def test_flipped_byte_under_fail_policy_is_an_error() -> None:
    async with pair(on_failure="fail") as p:
        first = await p.hand_over()
        flip(p, (await p.blocks_of(first.handle))[1])
        call = p.start(first)
        await call.task
        assert call.error.reason is Reason.DIGEST_MISMATCH and not call.tokens
        assert p.prefill.port.exporter.num_leases == 1  # whoever sent the request here decides what becomes of the lease
        p.clock.now += 1000
        await p.settled()


def expire_and_overwrite(p: Pair) -> None:
    """The lease runs out between the copy's permission and the copy; its blocks go to somebody else at once."""
    p.clock.now += 1000


async def overwrite(p: Pair, blocks: tuple[int, ...]) -> None:
    expire_and_overwrite(p)
    p.prefill.port.exporter.reap()
    for block in blocks:
        p.engines[0].runner.pool.array[block] = 7


async def late_read(checks: Checks) -> "tuple[list[int], str]":
    async with pair(checks=checks) as p:
        first = await p.hand_over()
        blocks = await p.blocks_of(first.handle)
        read = p.decode.port.importer.transport.read
        loop = asyncio.get_running_loop()

        def read_late(*arguments: object) -> None:
            asyncio.run_coroutine_threadsafe(overwrite(p, blocks), loop).result(5)
            read(*arguments)

        p.decode.port.importer.transport.read = read_late
        call = p.start(first)
        await call.task
        await p.settled()
        return call.tokens, call.finished.handoff.failure


async def test_lease_that_ended_before_the_read_voids_it() -> None:
    """Digests are off here: the lease alone must catch a read of blocks that were given to somebody else."""
    tokens, failure = await late_read(Checks(digests=False))
    assert tokens == expected(1) and failure == "LEASE_EXPIRED"


async def test_late_read_without_the_lease_check_gives_wrong_tokens() -> None:
    """Negative control."""
    tokens, failure = await late_read(Checks(digests=False, lease=False))
    assert tokens != expected(1) and failure == ""


async def test_expired_lease_is_refused_before_the_copy() -> None:
    async with pair() as p:
        first = await p.hand_over()
        p.clock.now += 1000
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == "LEASE_EXPIRED"
        assert call.finished.handoff.blocks == 0
        await p.settled()


async def test_lease_is_renewed_while_the_reader_waits_for_room() -> None:
    """The clock stands still but for the renewals' sake: each third of the ttl a renewal arrives."""
    async with pair(decode_blocks=8, ttl_s=0.15) as p:
        renewals = 0

        def count() -> None:
            nonlocal renewals
            renewals += 1

        filler = await p.hand_over("filler", list(range(50, 68)))
        blocker = p.start(filler, "filler", tokens=list(range(50, 68)))
        await blocker.task  # its blocks are only cached now; hold the pool by hand instead
        held = await p.decode.loop.call(lambda engine: engine.pool.allocate(6))
        first = await p.hand_over()
        p.wire.on["renew"] = count
        call = p.start(first)
        await asyncio.sleep(0.4)
        assert renewals >= 3 and not call.events
        await p.decode.loop.call(lambda engine: engine.release(held))
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == ""
        await p.settled()


CONTRACT = [
    ("dtype", "float32"),
    ("num_layers", 2),
    ("num_kv_heads", 2),
    ("head_dim", 16),
    ("layout_version", 2),
    ("tensor_parallel", 2),
    ("parts", 1),
    ("value_dim", 4),
    ("model_fingerprint", "another model"),
]


@pytest.mark.parametrize(("name", "value"), CONTRACT)
async def test_handshake_names_the_field_that_differs(name: str, value: object) -> None:
    async with pair() as p:
        with pytest.raises(BatonError) as caught:
            p.prefill.port.exporter.handshake(replace(p.wire.port.pool.layout, **{name: value}))
        assert caught.value.reason is Reason.HANDSHAKE_MISMATCH and name in caught.value.message


async def test_other_layout_is_never_read() -> None:
    async with pair() as p:
        first = await p.hand_over()
        stranger = replace(first.handle, layout_fingerprint=b"\x00" * 16).sealed(KEY)
        call = p.start(first, handle=stranger)
        await call.task
        assert call.finished.handoff.failure == "HANDSHAKE_MISMATCH" and call.tokens == expected(1)
        p.clock.now += 1000
        await p.settled()


async def test_other_model_without_the_handshake_gives_wrong_tokens() -> None:
    """Negative control: a worker whose KV means something else answers in the same shapes."""
    for layout_check in (True, False):
        async with pair(checks=Checks(layout=layout_check), decode_layout={"model_fingerprint": "toy with other weights"}) as p:
            # The other model's KV: every element one higher.
            first = await p.hand_over()
            pool, blocks = p.engines[0].runner.pool, await p.blocks_of(first.handle)
            pool.array.view("int64")[list(blocks)] += 1
            digests = block_digests(pool, blocks)
            p.wire.forge = partial(altered, digests=digests)
            call = p.start(first)
            await call.task
            assert (call.tokens == expected(1)) is layout_check


async def test_handle_is_good_for_its_request_only() -> None:
    async with pair() as p:
        first = await p.hand_over("mine")
        call = p.start(first, "yours")
        await call.task
        assert call.finished.handoff.failure == "LEASE_REFUSED"
        p.clock.now += 1000
        await p.settled()


async def test_handle_after_release_is_refused() -> None:
    async with pair() as p:
        first = await p.hand_over()
        await p.start(first).task
        # The cache would have all but the last block: without it, everything behind the handle is needed again.
        await p.decode.loop.call(lambda engine: engine.pool.forget(range(engine.pool.num_blocks)))
        again = p.start(first)
        await again.task
        assert again.tokens == expected(1)
        assert (again.finished.handoff.blocks, again.finished.handoff.failure) == (0, "LEASE_EXPIRED")
        await p.settled()


async def test_handle_of_an_earlier_incarnation_is_refused() -> None:
    async with pair() as p:
        first = await p.hand_over()
        p.prefill.port.exporter.incarnation = 8
        call = p.start(first)
        await call.task
        assert call.finished.handoff.failure == "LEASE_REFUSED" and call.tokens == expected(1)
        p.clock.now += 1000
        await p.settled()


async def test_second_reader_of_a_lease_that_the_first_did_not_finish() -> None:
    """A decode worker that dies before the end of its read leaves the lease alive: another reads the same KV."""
    async with pair() as p:
        first = await p.hand_over()
        reader = p.decode.port.importer.open(first.handle, "r")
        name = await p.decode.port.importer.shake_hands(first.handle, p.wire)
        p.decode.port.importer.transport.read(name, (await p.blocks_of(first.handle))[:2], [60, 61], 2.0)
        del reader  # killed here
        call = p.start(first)
        await call.task
        assert call.finished.handoff.blocks == 5 and call.finished.handoff.recomputed_tokens == 0
        await p.settled()


@pytest.mark.parametrize("place", ["handshake", "piece", "release"])
async def test_cancel_at_every_word_of_the_wire_frees_everything(place: str) -> None:
    async with pair() as p:
        first = await p.hand_over()
        reached, gate = asyncio.Event(), asyncio.Event()

        async def hang() -> None:
            reached.set()
            await gate.wait()

        p.wire.on[place] = hang
        call = p.start(first)
        await reached.wait()
        p.wire.on.clear()
        call.task.cancel()
        gate.set()
        await asyncio.gather(call.task, return_exceptions=True)
        await p.settled()
        assert not call.tokens


@pytest.mark.parametrize("after", range(1, 12, 3))
async def test_cancel_while_decoding_frees_everything(after: int) -> None:
    async with pair() as p:
        p.engines[1].runner.step_delay_s = 0.002
        call = p.start(await p.hand_over())
        while len(call.tokens) < after:
            await asyncio.sleep(0.001)
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        await p.settled()
        made = len(call.tokens)
        await asyncio.sleep(0.02)
        assert len(call.tokens) == made <= after + 3


async def test_blocks_of_a_cancelled_read_wait_until_nothing_can_land() -> None:
    async with pair() as p:
        first = await p.hand_over()
        transport = p.decode.port.importer.transport
        read, gate, reading = transport.read, asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow_read(*arguments: object) -> None:
            loop.call_soon_threadsafe(reading.set)
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(5)
            read(*arguments)

        transport.read = slow_read
        call = p.start(first)
        await reading.wait()
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        assert p.decode.port.importer.quarantined_blocks == 5
        assert p.engines[1].pool.num_owned == p.decode.port.importer.quarantined_blocks
        gate.set()
        await p.settled()


async def test_prefill_cancelled_on_the_way_frees_everything() -> None:
    async with pair() as p:
        p.engines[0].runner.step_delay_s = 0.01
        for pause in (0.0, 0.002, 0.012):
            task = asyncio.create_task(p.hand_over("r"))
            await asyncio.sleep(pause)
            task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(result, BaseException):
                p.clock.now += 1000
            await p.settled()


async def test_deadline_ends_a_call_within_a_step() -> None:
    async with pair() as p:
        p.engines[1].runner.step_delay_s = 0.02
        call = p.start(await p.hand_over(), timeout_s=0.1)
        await call.task
        assert call.error.reason is Reason.DEADLINE and 0 < len(call.tokens) < 11
        await p.settled()


def refuse() -> None:
    raise BatonError(Reason.DRAINING, "the worker is draining")


async def test_draining_workers_refuse_at_once() -> None:
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


async def test_finish_at_the_first_token_leases_nothing() -> None:
    async with pair() as p:
        first = await p.hand_over(params=greedy(max_tokens=1))
        assert first.handle is None and first.finish is not None
        await p.settled()


def altered(piece: Piece, **change: object) -> Piece:
    """By a peer that has the key."""
    return replace(piece, **change).sealed(KEY)


FORGERIES = {
    "too few blocks": lambda piece: replace(piece, block_ids=piece.block_ids[:3], digests=piece.digests[:48]),
    "too many blocks": lambda piece: replace(piece, block_ids=piece.block_ids * 2, digests=piece.digests * 2),
    "too few digests": lambda piece: replace(piece, digests=piece.digests[:16]),
    "other blocks of the range": lambda piece: replace(piece, first=1),
    "another lease": lambda piece: replace(piece, lease_id=piece.lease_id + 1),
    "another request": lambda piece: replace(piece, request_id="x"),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
async def test_piece_that_contradicts_its_handle_is_refused(forge: Callable[[Piece], Piece]) -> None:
    """Made with the right key by a peer that is wrong: too few blocks would leave the rest of ours as they were."""
    async with pair() as p:
        first = await p.hand_over()
        p.wire.forge = lambda piece: forge(piece).sealed(KEY)
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == "LEASE_REFUSED"
        p.clock.now += 1000
        await p.settled()


async def test_piece_that_was_altered_on_the_way_is_refused() -> None:
    async with pair() as p:
        first = await p.hand_over()
        p.wire.forge = lambda piece: replace(piece, block_ids=tuple(reversed(piece.block_ids)))
        call = p.start(first)
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == "LEASE_REFUSED"
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("change", [{"start": 4}, {"start": 2}, {"end": 16}, {"end": 19}, {"start": 18}])
async def test_handle_for_other_positions_is_refused(change: dict[str, int]) -> None:
    async with pair() as p:
        first = await p.hand_over()
        call = p.start(first, handle=replace(first.handle, **change).sealed(KEY))
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure == "LEASE_REFUSED"
        p.clock.now += 1000
        await p.settled()


async def test_release_does_not_wait_for_the_holders_step() -> None:
    """A holder in a long step would otherwise let every reader run into its deadline, and void what it read."""
    async with pair() as p:
        first = await p.hand_over("a")
        entered, leave = threading.Event(), threading.Event()
        p.prefill.loop.tell(lambda engine: (entered.set(), leave.wait(10)))
        await asyncio.to_thread(entered.wait)
        call = p.start(first, "a")
        await call.task
        assert not leave.is_set() and call.finished.handoff.failure == ""
        leave.set()
        await p.settled()


async def test_deadline_in_the_middle_of_a_failed_fetch_leaves_nothing() -> None:
    """The lease is ours to end once the router was told; the blocks that were being filled are given back whoever comes first."""
    async with pair() as p:
        first = await p.hand_over()
        leave = threading.Event()

        def fail() -> None:
            p.decode.loop.tell(lambda engine: leave.wait(10))  # the engine is in a step
            raise BatonError(Reason.TRANSFER_FAILED, "the peer is gone")

        p.wire.on["handshake"] = fail
        call = p.start(first, timeout_s=0.2)
        while not (call.events and isinstance(call.events[-1], BatonError)):
            await asyncio.sleep(0.01)
        leave.set()
        await call.task
        await p.settled()


async def test_cancel_of_a_recomputed_call_that_is_done_before_its_task_wakes_leaves_nothing() -> None:
    """On a busy machine the engine can be through with a request before its task learns that the request was queued."""
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
            p.decode.loop.tell(lambda engine: done.set())  # what the last step produced has been posted by then
            done.wait(10)

        def emit(event: Event) -> None:
            if isinstance(event, Adopted):
                asyncio.get_running_loop().call_soon(hold_up)
            if isinstance(event, Finished):
                ends.append(task.cancel())

        p.wire.on["piece"] = fail
        task = asyncio.create_task(p.decode.run(seq, "r", first.handle, 20.0, emit))
        await asyncio.gather(task, return_exceptions=True)
        assert ends == [True] and task.cancelled()
        await p.settled()


@pytest.mark.parametrize("seed", range(6))
async def test_storm_of_cancels_and_failed_fetches_leaves_nothing(seed: int) -> None:
    rng = random.Random(seed)
    async with pair(decode_blocks=24) as p:
        p.engines[0].runner.step_delay_s = p.engines[1].runner.step_delay_s = 0.002

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
