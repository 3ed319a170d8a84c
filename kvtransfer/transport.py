"""The contract of the transports, which move blocks between workers. The reader pulls; no worker ever writes into another's pool.

`kvtransfer.nixl_transport` (UCX: RDMA, copy between processes on one host, TCP), `kvtransfer.tcp_transport` (plain sockets, any
platform) and `kvtransfer.cuda_ipc_transport` (from GPU to GPU) are its implementations, tested by the same behaviour suite. So are those
that choose among them for each peer: `kvtransfer.auto_transport` between pools on the host, `kvtransfer.device_transport` between pools on
devices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.kvcache import KvLayout, Region

SEAL_BYTES = 16


class Registered(Protocol):
    """A pool whose memory a library reads and writes by itself."""

    layout: KvLayout

    @property
    def region(self) -> Region: ...


@dataclass(frozen=True, slots=True)
class Route:
    """How the bytes of a peer come here."""

    carrier: str  # "nixl", "nixl_vram", "tcp" or "cuda_ipc"
    through_host: bool = True  # of both: `Pool.expose` there, `Pool.take_in` here
    read_bytes: int = 0  # size of one read of a fetch; 0: the pool's
    rate: float = 0.0  # bytes/s that a probe has measured; 0: it measured none
    lane: str = ""  # of NIXL: "memory" (the reader copies it), "rdma" or "tcp"; empty: the carrier says all, or UCX does not tell

    @property
    def label(self) -> str:
        """Carrier and lane, as people read them."""
        return f"{self.carrier} ({self.lane})" if self.lane else self.carrier


class Transport(Protocol):
    """Serves one pool to peers and reads theirs. Thread-safe. Its methods block: do not call them on the event loop."""

    name: str  # "nixl", "tcp", "cuda_ipc" or "auto"; must be the same for two workers

    def address(self) -> bytes:
        """Returns what a reader passes to `connect`. It is opaque and travels over the workers' authenticated gRPC."""
        ...

    def connect(self, peer: str, address: bytes) -> None:
        """Makes `peer` (a name unique to one incarnation of a process) readable. Does nothing if it already is; reconnects if its
        connection broke. Raises BatonError(TRANSFER_FAILED), also if the address is garbage or the peer's blocks have another size."""
        ...

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        """Copies whole blocks, `remote[i]` of the peer's pool to `local[i]` of ours. When it returns, every byte has landed.

        Raises BatonError(TRANSFER_FAILED) if no more bytes will land (what has landed so far is undefined), and ReadPending if some may:
        then the local blocks stay in quarantine until `settled()`. `timeout` is in seconds and covers the whole read.
        """
        ...

    def route(self, peer: str) -> Route | None:
        """Returns how the bytes of a connected peer come here. None: it is not connected, and only that decides it."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forgets the peer; it need not be known. Once its process is dead, too, pending reads from it settle."""
        ...

    def close(self) -> None:
        """Disconnects all, stops serving, ends the threads. Afterwards nothing touches the pool, and every pending read has settled."""
        ...

    def backend_detail(self) -> str:
        """Returns one line for people that says what carries the bytes."""
        ...


class ReadPending(BatonError):
    """A read that timed out or failed while its bytes may still land. Once `settled()` is True, none can, and it stays True."""

    def __init__(self, message: str, settled: Callable[[], bool]) -> None:
        super().__init__(Reason.TRANSFER_FAILED, message)
        self.settled = settled


def transfer_failed(message: str) -> BatonError:
    return BatonError(Reason.TRANSFER_FAILED, message)


def seal(magic: bytes, rest: bytes) -> bytes:
    """An address whose parts a library trusts: `magic`, a digest of `rest`, `rest`."""
    return magic + blake2b(rest, digest_size=SEAL_BYTES).digest() + rest


def unseal(magic: bytes, address: bytes, least: int, transport: str) -> bytes:
    """Returns the `rest` of `seal`. Raises BatonError(TRANSFER_FAILED) for bytes that it did not make, or fewer than `least` of `rest`."""
    rest = address[len(magic) + SEAL_BYTES :]
    if address != seal(magic, rest) or len(rest) < least:
        raise transfer_failed(f"not the address of a {transport} transport")
    return rest


def check_blocks(remote: Sequence[int], remote_blocks: int, local: Sequence[int], local_blocks: int) -> None:
    """Refuses a read that does not fit the two pools before any byte moves, because it would touch the memory of another request."""
    if len(remote) != len(local):
        raise transfer_failed(f"{len(remote)} remote blocks into {len(local)} local ones")
    for side, blocks, limit in (("remote", remote, remote_blocks), ("local", local, local_blocks)):
        if blocks and not 0 <= min(blocks) <= max(blocks) < limit:
            raise transfer_failed(f"{side} block out of range: {min(blocks)}..{max(blocks)} of a pool of {limit}")
    if len(set(local)) != len(local):
        raise transfer_failed("a local block is named twice")


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (first, count) for each run of neighbouring blocks, in order: [4, 5, 6, 2] → (4, 3), (2, 1)."""
    first = count = 0
    for block in blocks:
        if count and block == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block, 1
    if count:
        yield first, count
