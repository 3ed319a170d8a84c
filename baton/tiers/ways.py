"""How units get from a pool into a store, and back. Each thread of a tier has a way of its own.

`Through` the memory of a carrier: the host copies and digests. `Straight` between a device and the slots of a store: no processor touches
the bytes, so more of them go at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from xxhash import xxh3_128_digest

from baton.engine.core.kvcache import Carrier, Channel, Pool
from baton.tiers.locked_store import LockedStore
from baton.tiers.slots import SlotEntry
from baton.tiers.store import Store, StoreFailed, Unit, Wanted

BATCH, BATCH_BYTES = 16, 32 << 20  # units of one write, and their bytes
PIECE, PIECE_BYTES = 8, 8 << 20  # units of one read, and their bytes: a reader has memory for so many
STRAIGHT, STRAIGHT_BYTES = 64, 32 << 20  # units of one copy of a device, and their bytes: it has memory for so many for each thread
Saved = tuple[bytes, int | memoryview]  # key, and a block of the pool or the content
Asks = Callable[[], AbstractContextManager[None]]  # while a store is asked that may not answer


class Landing(Protocol):
    """Where units are that have come, for those who want them."""

    @property
    def units(self) -> Sequence[memoryview]:
        """The units that the host sees; none of those that a device copies."""
        ...

    def into(self, blocks: Sequence[int], places: Sequence[int]) -> list[bool]:
        """See `Carrier.into`."""
        ...


# The units of these numbers have come. Puts them into the pool, and tells which are whole there.
Take = Callable[[Sequence[int], Landing], Sequence[bool]]


class Way(Protocol):
    def put(self, units: Sequence[Saved], wanted: Callable[[], bool]) -> list[bytes] | None:
        """Puts these, none of which is held, into the store; returns the keys that it does not have afterwards. None: they were not
        `wanted` any more when they had been copied, and it has none of them. Raises StoreFailed."""
        ...

    def get(self, keys: Sequence[bytes], take: Take) -> list[bool]:
        """Which of these have come, and are whole where `take` has put them; the store forgets those that are not. Raises StoreFailed."""
        ...


class Ways(NamedTuple):
    """The ways of one tier."""

    batch: int  # units of one `put`
    piece: int  # units of one `get`
    make: Callable[[int, Asks], Way]  # for so many units. Raises RuntimeError if the pool's device has no room


def ways(store: Store, pool: Pool) -> Ways:
    if isinstance(store, LockedStore) and (dma := pool.dma) is not None:
        most = _most(STRAIGHT, STRAIGHT_BYTES, store.slot_bytes)
        return Ways(most, most, lambda count, _: Straight(store, dma.channel(count, store.slot_bytes)))
    sizes = _most(BATCH, BATCH_BYTES, store.unit_bytes), _most(PIECE, PIECE_BYTES, store.unit_bytes)
    return Ways(*sizes, lambda count, asks: Through(store, pool.carrier(count), asks))


def _most(units: int, size: int, each: int) -> int:
    return max(1, min(units, size // each))


class Through:
    def __init__(self, store: Store, carrier: Carrier, asks: Asks) -> None:
        self._store, self._carrier, self._asks = store, carrier, asks

    def put(self, units: Sequence[Saved], wanted: Callable[[], bool]) -> list[bytes] | None:
        contents = zip(units, self._contents([content for _, content in units]), strict=True)
        batch = [Unit(key, xxh3_128_digest(data), data) for (key, _), data in contents]
        if not wanted():
            return None
        with self._asks():
            return self._store.put(batch)

    def get(self, keys: Sequence[bytes], take: Take) -> list[bool]:
        with self._asks():
            came = self._store.get([Wanted(*one) for one in zip(keys, self._carrier.units, strict=False)])
        return _taken(self._store, keys, came, take, self._carrier)

    def _contents(self, contents: Sequence[int | memoryview]) -> Sequence[memoryview]:
        blocks = [content for content in contents if isinstance(content, int)]
        if not blocks:
            return [content for content in contents if not isinstance(content, int)]
        try:
            return self._carrier.out(blocks)
        except RuntimeError as error:
            raise _not_given(error) from error


class Straight:
    def __init__(self, store: LockedStore, channel: Channel) -> None:
        self._store, self._channel = store, channel

    def put(self, units: Sequence[Saved], wanted: Callable[[], bool]) -> list[bytes] | None:
        blocks = [(key, block) for key, block in units if isinstance(block, int)]
        assert len(blocks) == len(units), "no tier is nearer that could hand contents down"
        try:
            return self._store.save(blocks, self._channel, wanted)
        except RuntimeError as error:
            raise _not_given(error) from error

    def get(self, keys: Sequence[bytes], take: Take) -> list[bool]:
        found = self._store.find(keys)
        return _taken(self._store, keys, [entry is not None for entry in found], take, _Found(self._store, found, self._channel))


class _Found:
    """See `Landing`. They are still in the store, unless they have gone meanwhile."""

    units: Sequence[memoryview] = ()

    def __init__(self, store: LockedStore, found: Sequence[SlotEntry | None], channel: Channel) -> None:
        self._store, self._found, self._channel = store, found, channel

    def into(self, blocks: Sequence[int], places: Sequence[int]) -> list[bool]:
        entries = [entry for place in places if (entry := self._found[place]) is not None]
        return self._store.load(entries, blocks, self._channel)


def _taken(store: Store, keys: Sequence[bytes], came: list[bool], take: Take, landing: Landing) -> list[bool]:
    """Which of those that came are whole in the pool. Those that are not have not come, and are dropped."""
    here = [i for i, good in enumerate(came) if good]
    try:
        whole = take(here, landing) if here else ()
    except RuntimeError as error:
        raise StoreFailed(f"the pool's device does not take blocks: {error}") from error
    bad = [i for i, good in zip(here, whole, strict=True) if not good]
    if bad:
        store.drop([keys[i] for i in bad])
    return [good and i not in bad for i, good in enumerate(came)]


def _not_given(error: RuntimeError) -> StoreFailed:
    return StoreFailed(f"the pool's device does not give blocks: {error}")
