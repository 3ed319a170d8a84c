"""What keeps units of KV outside the pool. A store is a container: it decides nothing, waits for its medium and has no thread.

A *unit* is all the bytes of one block (`KvLayout.block_bytes`): the model's keys and values, their scales, the draft's. It is whole or
absent, and known by the block's key, in which model, tenant's salt and number type already are. Whoever saves a unit brings the digest of
the pool's bytes, taken before they left; a store gives a unit back only if what lies in the reader's memory has that digest. (Under a
device's pool the nearest store leaves that to the device: `locked_store`.)
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class PinSet(Protocol):
    """`baton.tiers.slots.Pins`."""

    def __len__(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...

    def add(self, keys: Iterable[bytes]) -> None: ...

    def remove(self, keys: Iterable[bytes]) -> None: ...


class StoreFailed(Exception):
    """The medium refuses: it is full beyond what this store owns, read-only, gone, or does not answer. No unit was half given back."""


class Unit(NamedTuple):
    key: bytes  # KEY_BYTES
    digest: bytes  # DIGEST_BYTES, XXH3-128 of `data`
    data: memoryview  # block_bytes; to be read now, not kept


class Wanted(NamedTuple):
    key: bytes
    into: memoryview  # block_bytes, writable; undefined afterwards if the unit is not given back


class Store(Protocol):
    """Thread-safe. A call may wait for the medium; `keys` and `holds` answer from memory."""

    medium: str  # one of MEDIA but the device
    unit_bytes: int
    capacity: int  # units

    @property
    def pins(self) -> PinSet | None:
        """Keys that `put` does not give up for others. None: others put units there, too."""
        ...

    def keys(self) -> list[bytes]:
        """Those that are held, the longest unused first."""
        ...

    def holds(self, keys: Sequence[bytes]) -> list[bool]: ...

    def put(self, units: Sequence[Unit]) -> list[bytes]:
        """Holds these, too; returns the keys that had to go for them, the longest unused first. A key that is held stays as it is. A unit
        that cannot be found again after the call is one of those returned. Raises StoreFailed; then none of `units` is held."""
        ...

    def get(self, wanted: Sequence[Wanted]) -> list[bool]:
        """Which of these were copied and have their digest. What does not verify is dropped. Raises StoreFailed."""
        ...

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forgets these. Raises nothing: what cannot be erased is not given back either."""
        ...

    def close(self) -> None: ...
