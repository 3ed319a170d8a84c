"""A fetch that fails or waits does not disturb its neighbours."""

import asyncio
import threading
import time
from typing import Any

import pytest
from handoff_pair import Pair, expected, pair

from baton.cluster.errors import BatonError, Reason
from kvtransfer.importer import READERS


class Reads:
    """Wraps the transport: the first read fails when `failing` is set, the others wait for `gate` and then really read."""

    def __init__(self, p: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, self.gate, self.inside = threading.Event(), threading.Event(), threading.Semaphore(0)
        self.disconnects: list[str] = []
        self.handshakes = 0
        transport = p.decode.port.importer.transport
        self._read, self._disconnect, self._count = transport.read, transport.disconnect, 0
        monkeypatch.setattr(transport, "read", self.read)
        monkeypatch.setattr(transport, "disconnect", self.disconnect)
        p.wire.on["handshake"] = self.note_handshake

    def note_handshake(self) -> None:
        self.handshakes += 1

    def read(self, *arguments: Any) -> None:
        self._count += 1
        first = self._count == 1
        self.inside.release()
        if first:
            self.failing.wait(10)
            raise BatonError(Reason.TRANSFER_FAILED, "the link broke")
        self.gate.wait(10)
        self._read(*arguments)

    def disconnect(self, peer: str) -> None:
        self.disconnects.append(peer)
        self._disconnect(peer)


async def inside(reads: Reads, count: int) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(reads.inside.acquire, timeout=10)


async def test_a_failed_read_does_not_interrupt_other_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others succeed. The next fetch after them reconnects the peer."""
    async with pair() as p:
        reads = Reads(p, monkeypatch)
        names = ["a", "b", "c"]
        calls = []
        for name in names:
            calls.append(p.start(await p.hand_over(name), name))
            await inside(reads, 1)
        reads.failing.set()
        await calls[0].task
        assert calls[0].finished.handoff.failure == "TRANSFER_FAILED" and calls[0].tokens == expected(1)
        assert not reads.disconnects
        late = p.start(await p.hand_over("d"), "d")  # waits for those two reads, then shakes hands
        await asyncio.sleep(0.05)
        assert reads.handshakes == 1
        reads.gate.set()
        await asyncio.gather(*(call.task for call in (*calls, late)))
        for call in (*calls[1:], late):
            assert call.finished.handoff.failure == "" and call.tokens == expected(1)
        assert reads.disconnects == ["prefill-0:7"] and reads.handshakes == 2
        await p.settled()


async def test_disconnecting_during_a_read_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what used to happen to the neighbours."""
    async with pair() as p:
        reads = Reads(p, monkeypatch)
        reads._count = 1  # no read fails
        call = p.start(await p.hand_over("a"), "a")
        await inside(reads, 1)
        await asyncio.to_thread(p.decode.port.importer.transport.disconnect, "prefill-0:7")
        reads.gate.set()
        await call.task
        assert call.finished.handoff.failure == "TRANSFER_FAILED"
        await p.settled()


async def test_the_lease_does_not_expire_while_it_waits_for_a_reader() -> None:
    """All readers are busy for three times the lifetime of the lease, which is renewed until the read begins."""
    async with pair(ttl_s=0.3) as p:
        first = await p.hand_over()
        busy = [p.decode.port.importer.readers.submit(time.sleep, 0.9) for _ in range(READERS)]
        call = p.start(first)
        await call.task
        assert any(future.done() for future in busy), "a reader was free too early"
        assert call.finished.handoff.failure == "" and call.tokens == expected(1)
        await p.settled()


async def test_a_lease_that_is_not_renewed_while_it_waits_expires_unread() -> None:
    """Negative control."""
    async with pair(ttl_s=0.3) as p:
        first = await p.hand_over()

        def fail() -> None:
            raise BatonError(Reason.TRANSFER_FAILED, "the peer does not answer")

        p.wire.on["renew"] = fail
        for _ in range(READERS):
            p.decode.port.importer.readers.submit(time.sleep, 0.9)
        call = p.start(first)
        await call.task
        assert call.finished.handoff.failure == "LEASE_EXPIRED" and call.finished.handoff.blocks == 0
        assert call.tokens == expected(1)
        await p.settled()


async def test_a_broken_peer_with_a_read_that_never_ends_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that never ends does not delay later fetches forever."""
    async with pair(ttl_s=0.5) as p:
        reads = Reads(p, monkeypatch)
        calls = []
        for name in ("a", "b"):  # the read of "a" is the first
            calls.append(p.start(await p.hand_over(name), name))
            await inside(reads, 1)
        reads.failing.set()
        await calls[0].task
        late = p.start(await p.hand_over("c"), "c")
        await late.task
        assert late.finished.handoff.failure == "TRANSFER_FAILED" and late.tokens == expected(1)
        reads.gate.set()
        await calls[1].task
        await p.settled()
