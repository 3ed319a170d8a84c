"""Moves blocks between pools on devices, by whatever carries them between two processes. Which way that is, a probe at connect decides
(`kvtransfer.choose`): a read of blocks with known content, whose digests the peer has told. What is not the peer's bytes carries no KV.

A pool has blocks for this alone, in one piece for what peers read and one for each way to land in: a probe that was given up may still
write to its own piece and hold up nothing else.
"""

import json
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Protocol, Self

import numpy as np

from baton.cluster.errors import BatonError
from baton.engine.core.kvcache import PROBE_PIECES, KvLayout, KvPool, Pool
from kvtransfer.choose import WAYS, Probe, choose, in_words, next_way
from kvtransfer.cuda_ipc_transport import SharedDeviceMemory
from kvtransfer.transport import ReadPending, Route, Transport, check_blocks, seal, transfer_failed, unseal

log = logging.getLogger(__name__)
PROBE_TIMEOUT_S = 2.0
READS = 3  # of a probe: the first one is not timed, because it may set something up
MAGIC = b"baton-device/1\0\0"
assert len(WAYS) < PROBE_PIECES


class DeviceKvPool(Pool, SharedDeviceMemory, Protocol):
    """`baton.engine.gpu.pool.DevicePool`."""

    layout: KvLayout
    probes: range  # PROBE_PIECES pieces of `layout.probe_blocks`, which are nobody's KV
    staged: KvPool  # the same blocks in host memory


@dataclass(frozen=True, slots=True)
class _Address:
    num_blocks: int
    ways: Mapping[str, bytes]  # the addresses of the transports
    lacking: Mapping[str, str]  # why there is none
    sample: Sequence[int]  # blocks with known content
    digests: bytes  # theirs

    def pack(self) -> bytes:
        told = {
            "num_blocks": self.num_blocks,
            "ways": {way: address.hex() for way, address in self.ways.items()},
            "lacking": dict(self.lacking),
            "sample": list(self.sample),
            "digests": self.digests.hex(),
        }
        return seal(MAGIC, json.dumps(told).encode())

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises BatonError(TRANSFER_FAILED) for data that `pack` did not make."""
        told = json.loads(unseal(MAGIC, data, 2, "device"))
        ways = {way: bytes.fromhex(address) for way, address in told["ways"].items()}
        return cls(told["num_blocks"], ways, told["lacking"], told["sample"], bytes.fromhex(told["digests"]))


@dataclass(frozen=True, slots=True)
class _Link:
    address: bytes
    num_blocks: int
    way: str
    route: Route


class DeviceTransport:
    """`ways`: the transports that this process could open, by the names of `kvtransfer.choose.WAYS`; they are closed with this one.
    `lacking`: why it could not open others that are wanted. `name`: of the configuration."""

    def __init__(self, name: str, pool: DeviceKvPool, ways: Mapping[str, Transport], lacking: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._pool = pool
        self._ways = dict(ways)
        self._lacking = dict(lacking or {})
        self._lock = threading.Lock()  # guards the tables
        self._probing = threading.Lock()  # probes share the pieces, and would slow each other down
        self._links: dict[str, _Link] = {}
        self._unsettled: dict[str, Callable[[], bool]] = {}  # ways of which a probe may still write
        size = pool.layout.probe_blocks
        pieces = [list(pool.probes[at : at + size]) for at in range(0, len(pool.probes), size)]
        sample, self._landings = pieces[0], dict(zip(WAYS, pieces[1:], strict=True))
        content = secrets.token_bytes(size * pool.layout.block_bytes)
        pool.staged.array[sample] = np.frombuffer(content, dtype=np.uint8).reshape(size, -1)
        pool.take_in(sample)
        addresses = {way: transport.address() for way, transport in self._ways.items()}
        self._address = _Address(pool.num_blocks, addresses, self._lacking, sample, pool.digests(sample)).pack()

    def address(self) -> bytes:
        return self._address

    def backend_detail(self) -> str:
        with self._lock:
            links = [f"{peer}: {link.way} at {in_words(link.route.rate)}" for peer, link in self._links.items()]
        ways = [f"{way} ({transport.backend_detail()})" for way, transport in self._ways.items()]
        return "; ".join([*ways, *(f"no {way}: {why}" for way, why in self._lacking.items()), *links])

    def connect(self, peer: str, address: bytes) -> None:
        told = _Address.parse(address)
        if self._reconnected(peer, address, told):
            return
        with self._probing:
            if self._reconnected(peer, address, told):  # another thread has connected it meanwhile
                return
            self.disconnect(peer)
            offered = [way for way in WAYS if way in self._ways and way in told.ways]
            probes: list[Probe] = []
            while (way := next_way(offered, probes)) is not None:
                probes.append(self._probe(way, peer, told))
            theirs = {way: f"{peer} has none: {why}" for way, why in told.lacking.items()}
            choice = choose(probes, theirs | self._lacking)
            for probe in probes:
                if probe.way != choice.way:
                    self._ways[probe.way].disconnect(peer)
            reasons = "; ".join(f"{way}: {why}" for way, why in choice.passed_over.items())
            route = self._ways[choice.way].route(peer) if choice.way else None
            if route is None:
                raise transfer_failed(f"nothing carries KV from {peer}: {reasons or 'both must have the same kv.transport'}")
            log.info("KV from %s: %s, %s%s", peer, choice.way, in_words(choice.rate), f"; passed over: {reasons}" if reasons else "")
            with self._lock:
                self._links[peer] = _Link(address, told.num_blocks, choice.way, replace(route, rate=choice.rate))

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        with self._lock:
            link = self._links.get(peer)
        if link is None:
            raise transfer_failed(f"not connected to {peer}")
        check_blocks(remote, link.num_blocks, local, self._pool.num_blocks)
        self._ways[link.way].read(peer, remote, local, timeout)

    def route(self, peer: str) -> Route | None:
        with self._lock:
            link = self._links.get(peer)
        return link.route if link else None

    def disconnect(self, peer: str) -> None:
        with self._lock:
            link = self._links.pop(peer, None)
        if link is not None:
            self._ways[link.way].disconnect(peer)

    def close(self) -> None:
        with self._lock:
            self._links.clear()
        for transport in self._ways.values():
            transport.close()

    def _reconnected(self, peer: str, address: bytes, told: _Address) -> bool:
        """Whether the peer has a way already, which works or could be connected again."""
        with self._lock:
            link = self._links.get(peer)
        if link is None or link.address != address:
            return False
        with suppress(BatonError):
            self._ways[link.way].connect(peer, told.ways[link.way])
            return True
        return False

    def _probe(self, way: str, peer: str, told: _Address) -> Probe:
        """Reads the peer's sample a few times, each time into blocks that hold something else."""
        if way in self._unsettled and not self._unsettled[way]():
            return Probe(way, why="an earlier probe has not ended")
        self._unsettled.pop(way, None)
        landing, transport, quickest = self._landings[way], self._ways[way], float("inf")
        if len(told.sample) != len(landing):
            return Probe(way, why=f"{peer} has another number of blocks to probe")
        try:
            transport.connect(peer, told.ways[way])
            route = transport.route(peer)
            for attempt in range(READS):
                self._pool.staged.array[landing] = 0
                self._pool.take_in(landing)
                began = monotonic()
                transport.read(peer, told.sample, landing, PROBE_TIMEOUT_S)
                if route is not None and route.through_host:
                    self._pool.take_in(landing)
                if attempt:
                    quickest = min(quickest, monotonic() - began)
                if self._pool.digests(landing) != told.digests:
                    return Probe(way, why="it delivers other bytes than the peer has")
        except ReadPending as error:
            self._unsettled[way] = error.settled
            return Probe(way, why=error.message)
        except BatonError as error:
            return Probe(way, why=error.message)
        except RuntimeError as error:
            return Probe(way, why=f"the device has failed: {error}")
        return Probe(way, len(landing) * self._pool.layout.block_bytes / max(quickest, 1e-6))
