"""KV that comes back: a prefill worker fetches what another worker's prefix cache holds and computes only the rest.

The decode worker keeps the blocks of the first turn, including generated ones. The prompt of the next turn begins with that conversation.
Another prefill worker keeps the blocks of the prompts that it computed.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

import pytest
from handoff_pair import KEY, PROMPT, Pair, another_prefill, expected, greedy, leased, pair
from host_pool import on_host

from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import from_status
from baton.engine.core.block_key import extend_keys, root_key
from baton.engine.core.sequence import Sequence as EngineSequence
from baton.engine.core.toy import naive
from baton.v1 import generation_pb2, worker_pb2
from baton.worker import kv_port
from baton.worker.identity import WorkerIdentity
from baton.worker.kv_port import KvPlace
from baton.worker.prompts import Prompts
from kvtransfer.handle import Wish
from kvtransfer.importer import Checks
from prefill_worker.door import PrefillDoor
from prefill_worker.worker import Prefilled, PrefillWorker, Source

ME = WorkerIdentity("prefill-0", 7, "toy")
HOLDER = KvPlace("decode-0", 7, "at decode-0")
NEIGHBOUR = KvPlace("prefill-1", 7, "at prefill-1")


def block_keys(root: bytes, tokens: list[int], size: int) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root, tokens, size)
    return keys


async def first_turn(p: Pair) -> list[int]:
    """Returns the conversation so far: 18 prompt tokens and 12 generated ones. The prefill worker forgets it."""
    call = p.start(await p.hand_over())
    await call.task
    await p.settled()
    await p.loops[0].call(lambda engine: engine.pool.forget(range(64)))
    return [*PROMPT, *expected()]


async def second_turn(p: Pair, conversation: list[int], blocks: int = 7, place: KvPlace = HOLDER) -> tuple[list[int], Prefilled]:
    prompt = [*conversation, 50, 51, 52, 53, 54]
    first = await p.hand_over("next", prompt, source=Source(place, blocks))
    call = p.start(first, "next", tokens=prompt)
    await call.task
    assert [first.sampled.token, *call.tokens] == naive(prompt, greedy())
    assert call.finished.handoff.recomputed_tokens == 0
    return prompt, first


def computed(p: Pair) -> int:
    return p.engines[0].counts.computed_tokens


@pytest.mark.parametrize("blocks", [1, 3, 7, 100])
async def test_only_tokens_that_the_source_lacks_are_computed(blocks: int) -> None:
    async with pair() as p:
        conversation = await first_turn(p)
        before = computed(p)
        prompt, first = await second_turn(p, conversation, blocks)
        fetched = 4 * min(blocks, 7)  # 29 of the conversation's 30 tokens have KV: 7 full blocks
        assert (first.fetched_tokens, first.cached_tokens) == (fetched, 0)
        assert computed(p) - before == len(prompt) - fetched
        await p.settled()


async def test_without_a_source_the_whole_prompt_is_computed() -> None:
    """Negative control."""
    async with pair() as p:
        conversation = await first_turn(p)
        before = computed(p)
        first = await p.hand_over("next", conversation)
        assert first.fetched_tokens == 0 and computed(p) - before == len(conversation)
        await p.start(first, "next", tokens=conversation).task
        await p.settled()


async def test_locally_cached_blocks_are_not_fetched() -> None:
    async with pair() as p:
        conversation = await first_turn(p)
        await second_turn(p, conversation)
        events = dict(p.decode.port.exporter.events)
        prompt = [*conversation, 50, 51, 52, 53, 54]
        first = await p.hand_over("again", prompt, source=Source(HOLDER, 8))
        assert (first.fetched_tokens, first.cached_tokens) == (0, 32) and p.decode.port.exporter.events == events
        await p.start(first, "again", tokens=prompt).task
        await p.settled()


async def test_blocks_that_the_source_no_longer_has_are_computed() -> None:
    async with pair() as p:
        conversation = await first_turn(p)
        await p.loops[1].call(lambda engine: engine.pool.forget(range(64)))
        _, first = await second_turn(p, conversation)
        assert first.fetched_tokens == 0
        await p.settled()


@pytest.mark.parametrize("place", [KvPlace("decode-0", 6, "at decode-0"), KvPlace("decode-1", 7, "at decode-0")])
async def test_a_source_that_another_worker_replaced_is_not_read(place: KvPlace) -> None:
    async with pair() as p:
        conversation = await first_turn(p)
        _, first = await second_turn(p, conversation, place=place)
        assert first.fetched_tokens == 0 and p.decode.port.exporter.events["granted"] == 0
        await p.settled()


def flip(p: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    read = p.prefill.port.importer.transport.read

    def read_wrong(name: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        read(name, remote, local, timeout)
        on_host(p.engines[0].runner.pool).block(local[1])[3] ^= 0x10

    monkeypatch.setattr(p.prefill.port.importer.transport, "read", read_wrong)


async def test_a_flipped_byte_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as p:
        conversation = await first_turn(p)
        flip(p, monkeypatch)
        _, first = await second_turn(p, conversation)
        assert first.fetched_tokens == 0
        await p.settled()


async def test_without_digests_a_flipped_byte_produces_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    async with pair(checks=Checks(digests=False)) as p:
        conversation = await first_turn(p)
        flip(p, monkeypatch)
        first = await p.hand_over("next", conversation, source=Source(HOLDER, 7))
        assert first.fetched_tokens == 28 and first.sampled.token != naive(conversation, greedy(max_tokens=1))[0]


@pytest.mark.parametrize("checks", [Checks(digests=False), Checks(digests=False, lease=False)], ids=["checked", "negative control"])
async def test_a_loan_that_ended_during_the_read_is_void(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(checks=checks) as p:
        conversation = await first_turn(p)
        read, loop = p.prefill.port.importer.transport.read, asyncio.get_running_loop()

        async def end_and_overwrite(blocks: list[int]) -> None:
            p.clock.now += 1000
            p.decode.port.exporter.reap()
            on_host(p.engines[1].runner.pool).array[blocks] = 7

        def read_late(name: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
            asyncio.run_coroutine_threadsafe(end_and_overwrite(list(remote)), loop).result(5)
            read(name, remote, local, timeout)

        monkeypatch.setattr(p.prefill.port.importer.transport, "read", read_late)
        first = await p.hand_over("next", conversation, source=Source(HOLDER, 7))
        right = first.sampled.token == naive(conversation, greedy(max_tokens=1))[0]
        assert (right, first.fetched_tokens) == ((True, 0) if checks.lease else (False, 28))


async def test_lent_cached_blocks_are_not_evicted() -> None:
    async with pair(decode_blocks=16) as p:
        conversation = await first_turn(p)
        keys = block_keys(root_key("toy"), conversation, 4)
        handle = await p.back.lend(Wish("decode-0", 7, "x", 0, b"".join(keys)).sealed(KEY))
        assert (handle.start, handle.end) == (0, 28) and p.engines[1].pool.num_owned == 7
        assert await p.loops[1].call(lambda engine: engine.pool.allocate(10)) is None
        assert p.decode.port.exporter.release(handle, "x")
        await p.settled()


WISHES: dict[str, tuple[Callable[[Wish], Wish], str]] = {
    "without the key": (lambda wish: wish, "was altered"),
    "for another worker": (lambda wish: Wish("prefill-0", 7, "x", 0, wish.keys).sealed(KEY), "the wish is for"),
    "for no block": (lambda wish: Wish("decode-0", 7, "x", 0, b"").sealed(KEY), "0 bytes of keys"),
    "for half a key": (lambda wish: Wish("decode-0", 7, "x", 0, b"k" * 24).sealed(KEY), "24 bytes of keys"),
    "for more than the pool holds": (lambda wish: Wish("decode-0", 7, "x", 0, bytes(16 * 65)).sealed(KEY), "1040 bytes of keys"),
    "from the middle of a block": (lambda wish: Wish("decode-0", 7, "x", 3, wish.keys).sealed(KEY), "position 3"),
    "for blocks that are not cached": (lambda wish: Wish("decode-0", 7, "x", 0, b"k" * 16).sealed(KEY), "none of these blocks"),
}


@pytest.mark.parametrize(("make", "words"), WISHES.values(), ids=WISHES)
async def test_refused_wishes_pin_nothing(make: Callable[[Wish], Wish], words: str) -> None:
    async with pair() as p:
        keys = block_keys(root_key("toy"), await first_turn(p), 4)
        wish = make(Wish("decode-0", 7, "x", 0, b"".join(keys)))
        with pytest.raises(BatonError, match=words) as caught:
            await p.back.lend(wish)
        assert caught.value.reason is Reason.LEASE_REFUSED
        await p.settled()


async def test_loans_are_limited_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_port, "MAX_LENT", 2)
    async with pair() as p:
        wish = Wish("decode-0", 7, "x", 0, b"".join(block_keys(root_key("toy"), await first_turn(p), 4))).sealed(KEY)
        for _ in range(2):
            await p.back.lend(wish)
        with pytest.raises(BatonError) as caught:
            await p.back.lend(wish)
        assert caught.value.reason is Reason.SATURATED
        p.clock.now += 1000
        await p.settled()
        await p.back.lend(wish)
        p.clock.now += 1000
        await p.settled()


async def prefilled_by(worker: PrefillWorker, tokens: list[int]) -> Prefilled:
    """The worker computes the prompt and leases its KV to a reader that has not come yet."""
    return await worker.prefill(EngineSequence("a#p", list(tokens), len(tokens), greedy(), root_key("toy"), hold=True), "a")


@pytest.mark.parametrize("held", [True, False], ids=["still leased", "only cached"])
async def test_a_prefill_worker_lends_to_another_prefill_worker(held: bool) -> None:
    """The prompts have the first 18 tokens in common: four full blocks."""
    prompt = [*PROMPT, 50, 51, 52, 53, 54]
    async with pair() as p, another_prefill(p) as (lender, engine):
        lent = leased(await prefilled_by(lender, PROMPT))
        if not held:
            assert lender.port.exporter.release(lent, "a")
        first = await p.hand_over("next", prompt, source=Source(NEIGHBOUR, 4))
        call = p.start(first, "next", tokens=prompt)
        await call.task
        assert [first.sampled.token, *call.tokens] == naive(prompt, greedy()) and call.finished.handoff.recomputed_tokens == 0
        assert (first.fetched_tokens, computed(p), engine.counts.computed_tokens) == (16, len(prompt) - 16, len(PROMPT))
        await p.settled()
        assert lender.port.exporter.release(lent, "a") is held  # the loan did not end the lease
        assert lender.port.exporter.events["granted"] == 2 and p.decode.port.exporter.events["granted"] == 0


async def test_without_a_source_the_neighbours_kv_is_computed_again() -> None:
    """Negative control."""
    async with pair() as p, another_prefill(p) as (lender, _):
        lender.port.exporter.release(leased(await prefilled_by(lender, PROMPT)), "a")
        first = await p.hand_over("next")
        await p.start(first, "next").task
        assert (first.fetched_tokens, computed(p), lender.port.exporter.events["granted"]) == (0, len(PROMPT), 1)
        await p.settled()


async def at_the_door(p: Pair, prompt: list[int], timeout_s: float) -> worker_pb2.PrefillEvent:
    """Asks for a prefill, with the KV of `HOLDER`, and returns the last event."""
    sampling = generation_pb2.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    job = worker_pb2.Job(request_id="late", token_ids=prompt, prompt_tokens=len(prompt), sampling=sampling)
    to = worker_pb2.Addressee(worker=ME.worker, incarnation=ME.incarnation, model_fingerprint=ME.model_fingerprint)
    source = worker_pb2.KvSource(worker=HOLDER.worker, incarnation=HOLDER.incarnation, address=HOLDER.address, blocks=7)
    start = worker_pb2.PrefillStart(job=job, to=to, source=source, timeout_ms=int(timeout_s * 1000))

    async def commands() -> AsyncIterator[worker_pb2.PrefillCommands]:
        yield worker_pb2.PrefillCommands(commands=[worker_pb2.PrefillCommand(call_id=1, start=start)])
        await asyncio.Event().wait()

    stream = PrefillDoor(p.prefill, ME, Prompts()).Session(commands(), None)
    assert isinstance(stream, AsyncGenerator)
    async with aclosing(stream):
        async for message in stream:
            for event in message.events:
                return event  # type: ignore[no-any-return]
    raise AssertionError("the stream has ended")


@pytest.mark.parametrize("place", ["lend", "handshake", "piece", "release"])
async def test_a_deadline_during_the_fetch_frees_everything(place: str) -> None:
    """The source does not answer until the time is up. The loan is then released, not left to expire: the clock of leases stands still."""
    async with pair() as p:
        conversation = await first_turn(p)
        reached, gate = p.back.hang(place)
        event = await at_the_door(p, [*conversation, 50, 51], 1.0)
        assert from_status(event.error.status).reason is Reason.DEADLINE and reached.is_set()
        p.back.on.clear()
        gate.set()
        await p.settled()
        assert p.decode.port.exporter.events["expired"] == 0
        _, first = await second_turn(p, conversation)
        assert first.fetched_tokens == 28
        await p.settled()


@pytest.mark.parametrize("place", ["lend", "handshake", "piece", "release"])
async def test_cancelling_during_any_peer_call_frees_everything(place: str) -> None:
    async with pair() as p:
        conversation = await first_turn(p)
        reached, gate = p.back.hang(place)
        task = asyncio.create_task(p.hand_over("next", conversation, source=Source(HOLDER, 7)))
        await reached.wait()
        p.back.on.clear()
        task.cancel()
        gate.set()
        await asyncio.gather(task, return_exceptions=True)
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("turns", [1, 2, 5, 9, 14, 20, 30, 45])
async def test_cancelling_at_any_time_frees_everything(turns: int) -> None:
    async with pair() as p:
        conversation = await first_turn(p)
        task = asyncio.create_task(p.hand_over("next", conversation, source=Source(HOLDER, 7)))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        p.clock.now += 1000
        await p.settled()


async def test_the_prompt_is_computed_when_the_source_fails() -> None:
    async with pair() as p:
        conversation = await first_turn(p)

        def fail() -> None:
            raise BatonError(Reason.TRANSFER_FAILED, "the peer is gone")

        for place in ("lend", "handshake", "piece", "release"):
            p.back.on = {place: fail}
            _, first = await second_turn(p, conversation)
            assert first.fetched_tokens == 0, place
            await p.loops[0].call(lambda engine: engine.pool.forget(range(64)))
            p.clock.now += 1000
            await p.settled()


async def test_without_free_blocks_nothing_is_fetched() -> None:
    """A prompt that has to wait anyway is computed; room is granted in order of arrival."""
    async with pair() as p:
        conversation = await first_turn(p)
        held = await p.loops[0].call(lambda engine: engine.pool.allocate(60))
        assert held is not None
        task = asyncio.create_task(p.hand_over("next", conversation, source=Source(HOLDER, 7)))
        await asyncio.sleep(0.05)
        assert not task.done() and p.decode.port.exporter.events["granted"] == 0
        await p.loops[0].call(lambda engine: engine.release(held))
        first = await task
        assert first.sampled.token == naive(conversation, greedy(max_tokens=1))[0] and first.fetched_tokens == 0
        await p.start(first, "next", tokens=conversation).task
        await p.settled()
