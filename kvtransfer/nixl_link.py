"""What this process knows of a peer's NIXL agent: its address, and how far the link to it is.

    event →     copies    sends     break     drop      free
    opening     copied    sent      broken    dropped
    copied                          broken    dropped
    sent                            broken    dropped
    broken                          broken    dropped
    dropped                         dropped             freed

`copies`: the probes were copied within `transfer()`; `sends`: an adapter or the peer sends the bytes. `break`: no read can succeed any
more. `drop`: it is no longer the link to its peer. `free`: nothing of it is left in NIXL, which must not happen while something reads.
"""

import struct
import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from baton.engine.core.kvcache import Region
from baton.moves import Moves
from kvtransfer.transport import seal, unseal

MAGIC = b"baton-nixl/2\r\n\0\0"
POOL = struct.Struct("<QQQ4sI")


@dataclass(frozen=True, slots=True)
class NixlAddress:
    """Sealed: where the peer's pool is, the metadata."""

    region: Region
    block_bytes: int
    metadata: bytes  # of the NIXL agent

    def pack(self) -> bytes:
        place = self.region
        return seal(MAGIC, POOL.pack(place.address, place.blocks, self.block_bytes, place.kind.encode(), place.device) + self.metadata)

    @classmethod
    def parse(cls, data: bytes) -> "NixlAddress":
        """Raises BatonError(TRANSFER_FAILED) for data that `pack` did not make: UCX trusts its input, and bad input may crash it."""
        rest = unseal(MAGIC, data, POOL.size, "NIXL")
        address, blocks, block_bytes, kind, device = POOL.unpack_from(rest)
        return cls(Region(address, blocks, kind.decode("ascii", "replace"), device), block_bytes, rest[POOL.size :])


class LinkState(Enum):
    OPENING = "opening"
    COPIED = "copied"
    SENT = "sent"
    BROKEN = "broken"
    DROPPED = "dropped"
    FREED = "freed"


MOVES = Moves(
    {
        (LinkState.OPENING, "copies"): LinkState.COPIED,
        (LinkState.OPENING, "sends"): LinkState.SENT,
        (LinkState.OPENING, "break"): LinkState.BROKEN,
        (LinkState.OPENING, "drop"): LinkState.DROPPED,
        (LinkState.COPIED, "break"): LinkState.BROKEN,
        (LinkState.COPIED, "drop"): LinkState.DROPPED,
        (LinkState.SENT, "break"): LinkState.BROKEN,
        (LinkState.SENT, "drop"): LinkState.DROPPED,
        (LinkState.BROKEN, "break"): LinkState.BROKEN,
        (LinkState.BROKEN, "drop"): LinkState.DROPPED,
        (LinkState.DROPPED, "break"): LinkState.DROPPED,
        (LinkState.DROPPED, "free"): LinkState.FREED,
    }
)
OPEN = frozenset({LinkState.COPIED, LinkState.SENT})


@dataclass(slots=True, eq=False)
class Link:
    peer: str
    address: NixlAddress
    state: LinkState = LinkState.OPENING
    why: str = ""  # the first reason why no read can succeed any more
    agent: str = ""  # its name, once NIXL knows it
    blocks: Any = None  # prepared descriptors of its pool, one per block, once the link is open
    calls: int = 0  # of ours that use it: `connect` and reads under way. Reads that were given up count apart
    opening: threading.Lock = field(default_factory=threading.Lock)

    @property
    def usable(self) -> bool:
        """Whether a read may succeed, one that opens it included."""
        return self.state is LinkState.OPENING or self.state in OPEN

    def open(self, copied: bool, blocks: Any) -> None:
        self._move("copies" if copied else "sends")
        self.blocks = blocks

    def break_(self, why: str) -> None:
        self._end("break", why)

    def drop(self, why: str) -> None:
        self._end("drop", why)

    def free(self) -> None:
        self._move("free")
        self.blocks = None

    def _end(self, event: str, why: str) -> None:
        self._move(event)
        self.why = self.why or why

    def _move(self, event: str) -> None:
        self.state = MOVES.after(self.state, event, f"the link to {self.peer}")


class ReadState(Enum):
    UNDER_WAY = "under way"
    PENDING = "pending"  # given up, and bytes may still land
    BLIND = "blind"  # given up, and its state can no longer be queried; it settles when its link is freed
    SETTLED = "settled"


READS = Moves(
    {
        (ReadState.UNDER_WAY, "give up"): ReadState.PENDING,
        (ReadState.UNDER_WAY, "lose sight"): ReadState.BLIND,
        (ReadState.PENDING, "lose sight"): ReadState.BLIND,
        (ReadState.PENDING, "settle"): ReadState.SETTLED,
        (ReadState.BLIND, "settle"): ReadState.SETTLED,
    }
)


@dataclass(slots=True, eq=False)
class Read:
    """A posted transfer. Only this object holds NIXL's handle, so that a traceback that is kept somewhere does not keep the agent alive."""

    link: Link
    handle: Any
    state: ReadState = ReadState.UNDER_WAY

    def move(self, event: str) -> None:
        self.state = READS.after(self.state, event, f"a read from {self.link.peer}")
