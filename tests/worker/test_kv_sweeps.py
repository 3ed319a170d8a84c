"""The KV port and the importer, cancelled at every await: no block stays pinned, and no lease, read or broken peer is left behind."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from handoff_pair import KEY, PROMPT, Pair, leased, pair
from sweep import cancelled, until

from baton.engine.core.block_key import extend_keys, root_key
from kvtransfer.handle import Wish
from kvtransfer.importer import Fetch, Importer


def keys() -> list[bytes]:
    made: list[bytes] = []
    extend_keys(made, root_key("toy"), PROMPT, 4)
    return made


def handshakes_done(importer: Importer) -> bool:
    return all(task.done() for task in importer._handshakes.values())


async def computed(p: Pair) -> None:
    """Puts the prompt's blocks into the caches of both workers."""
    await p.start(await p.hand_over()).task
    await p.settled()


async def lend(p: Pair) -> None:
    wish = Wish("decode-0", 7, "next", 0, b"".join(keys())).sealed(KEY)
    handle = await p.decode.port.lend(wish)
    assert await p.back.release(handle)


async def borrow(p: Pair) -> None:
    fetch = await p.prefill.port.importer.borrow("decode-0", 7, "at decode-0", "next", 0, keys())
    await fetch.release()


async def shake_hands(p: Pair) -> None:
    """Forgets earlier handshakes first."""
    importer = p.decode.port.importer
    handle = leased(await p.hand_over("next"))
    try:
        importer._handshakes.clear()
        assert await importer.shake_hands(handle, p.wire) == "prefill-0:7"
    finally:
        p.prefill.port.exporter.release(handle, "next")


async def reading(p: Pair) -> None:
    importer = p.decode.port.importer
    handle = leased(await p.hand_over("next"))
    try:
        async with importer.reading(handle):
            await asyncio.sleep(0)
    finally:
        p.prefill.port.exporter.release(handle, "next")


@pytest.mark.parametrize("work", [lend, borrow, shake_hands, reading])
async def test_calls_between_workers_can_be_cancelled_at_every_await(work: Callable[[Pair], Awaitable[None]]) -> None:
    async with pair() as p:
        await computed(p)
        async for _ in cancelled(lambda: work(p), fine=25, coarse=1.4):
            p.clock.now += 1000  # the lease of a cancelled holder expires
            await p.settled()
            for worker in (p.prefill, p.decode):
                importer = worker.port.importer
                assert not importer._reads and not importer._broken and worker.port._lent == 0
                await until(partial(handshakes_done, importer))


@pytest.mark.parametrize("fetching", [True, False])
async def test_withdraw_can_be_cancelled_at_every_await_and_repeated(fetching: bool) -> None:
    """A caller that is cancelled in `withdraw` calls it again with the same list of blocks."""
    async with pair() as p:
        await computed(p)
        port = p.decode.port
        state: list[tuple[Fetch | None, list[int]]] = []

        async def prepare() -> None:
            handle = leased(await p.hand_over("next"))
            fetch = port.importer.open(handle, "next") if fetching else None
            blocks = await p.loops[1].call(lambda engine: engine.pool.allocate(3))
            assert blocks is not None
            state[:] = [(fetch, blocks)]

        await prepare()
        async for _ in cancelled(lambda: port.withdraw(None, *state[0]), fine=25, coarse=1.4):
            fetch, filling = state[0]
            await port.withdraw(None, fetch, filling)
            assert filling == []
            p.clock.now += 1000
            await p.settled()
            await prepare()
        await port.withdraw(None, *state[0])
        p.clock.now += 1000
        await p.settled()
