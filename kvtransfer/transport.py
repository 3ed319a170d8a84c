"""What moves blocks between workers: the contract that every transport keeps. The reader pulls; nobody ever writes into another's pool.

`kvtransfer.nixl_transport` (UCX: RDMA, copy between processes of one host, TCP) and `kvtransfer.tcp_transport` (plain sockets, any
platform) are its two implementations, held to one behaviour suite; `kvtransfer.auto_transport` chooses
between them for each peer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from baton.cluster.errors import BatonError, Reason


class Transport(Protocol):
    """Serves one pool to peers and reads theirs. Safe to use from several threads at once. Blocking: call it off the event loop."""

    name: str  # "nixl", "tcp" or "auto"; two workers must have the same

    def address(self) -> bytes:
        """Opaque: what a reader gives to `connect`. Travels over the workers' authenticated gRPC."""
        ...

    def connect(self, peer: str, address: bytes) -> None:
        """Make `peer` (a name unique to one incarnation of a process) readable. Does nothing if it is; opens it anew if its connection
        broke. Raises BatonError(TRANSFER_FAILED), also for garbage and for a peer whose blocks have another size."""
        ...

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        """Copy whole blocks, `remote[i]` of the peer's pool to `local[i]` of ours. When it returns every byte has landed.

        Raises BatonError(TRANSFER_FAILED): no byte will land any more (what landed so far is undefined). Raises ReadPending: some may;
        the local blocks stay quarantined until `settled()`. `timeout` in seconds, over the whole read.
        """
        ...

    def carrier(self, peer: str) -> str:
        """What carries the bytes from a connected peer: "nixl" or "tcp"."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget the peer; unknown is fine. Once its process is dead too, reads that are pending from it settle."""
        ...

    def close(self) -> None:
        """Disconnect all, stop serving, end the threads. Afterwards nothing touches the pool, and every pending read has settled."""
        ...

    def backend_detail(self) -> str:
        """One line for people: what carries the bytes."""
        ...


class ReadPending(BatonError):
    """A read that timed out or failed while its bytes may still land. They cannot while `settled()` is True, which then stays so."""

    def __init__(self, message: str, settled: Callable[[], bool]) -> None:
        super().__init__(Reason.TRANSFER_FAILED, message)
        self.settled = settled


def transfer_failed(message: str) -> BatonError:
    return BatonError(Reason.TRANSFER_FAILED, message)


def check_blocks(remote: Sequence[int], remote_blocks: int, local: Sequence[int], local_blocks: int) -> None:
    """Refuse a read that does not fit the two pools, before any byte moves: it would touch memory of another request."""
    if len(remote) != len(local):
        raise transfer_failed(f"{len(remote)} remote blocks into {len(local)} local ones")
    for side, blocks, limit in (("remote", remote, remote_blocks), ("local", local, local_blocks)):
        if blocks and not 0 <= min(blocks) <= max(blocks) < limit:
            raise transfer_failed(f"{side} block out of range: {min(blocks)}..{max(blocks)} of a pool of {limit}")
    if len(set(local)) != len(local):
        raise transfer_failed("a local block is named twice")


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbours in memory, in order: [4, 5, 6, 2] → (4, 3), (2, 1)."""
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
