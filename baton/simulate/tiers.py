"""Tiers under a modelled engine, in the event loop's time. What they decide is the real code's: `Colder` what goes down and comes up,
`Tiers` what a load is cut into and whether it is worth it, `Tier` what waits, what is dropped, what is handed down and whether the tier
pays, `Slots` what has to go for others. Only bytes and threads are modelled: a write or a read moves nothing and takes as long as
`TierPace` says, and who does it is a task of the event loop.

Nothing fails here, and a store is empty at the start. An object store, which others write to as well, is not modelled.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from baton.clock import clock_of_loop
from baton.cluster.records import TierRecord
from baton.engine.core.block_key import DISK, HOST
from baton.engine.core.colder import Report, TierPolicy
from baton.engine.core.kvcache import Carrier, KvPool, Pool
from baton.profile.file import Profile
from baton.simulate.cores import Computes
from baton.simulate.virtual_time import until
from baton.tiers.disk_folder import padded
from baton.tiers.slots import Pins, Slots
from baton.tiers.store import Store, Unit, Wanted
from baton.tiers.tier import DISK_READERS, Bounds, LoadPiece, Save, Tier, TierState
from baton.tiers.tiers import Tiers
from baton.tiers.ways import Way

MODELS: Mapping[str, str] = {"tier_memory": HOST, "tier_disk": DISK}  # model in a profile → medium; the nearest first
READERS: Mapping[str, int] = {HOST: 1, DISK: DISK_READERS}
LOOK_EVERY_S = 10.0  # at whether a tier pays: a real one looks each second, of the ten minutes that count
NO_BYTES = memoryview(b"")
Moved = Callable[[bool, list[bytes]], None]


@dataclass(frozen=True, slots=True)
class TierPace:
    """How long moving takes, in seconds."""

    base: float = 0.0  # until a thread that rests begins to read
    byte: float = 0.0  # of reading
    write: float = 0.0  # of writing a byte: processor time

    @classmethod
    def of(cls, profile: Profile) -> dict[str, "TierPace"]:
        """The pace of each medium; one that was not measured takes no time."""
        return {medium: cls(**profile.values(model)) for model, medium in MODELS.items()}


@dataclass(frozen=True, slots=True)
class TierSizes:
    """The tiers of one worker. Raises ValueError for a medium that is not modelled, and for a block without bytes."""

    blocks: tuple[tuple[str, int], ...]  # medium, and how many blocks it has room for; the nearest first
    block_bytes: int
    policy: TierPolicy = field(default_factory=TierPolicy)
    save_bytes_per_s: float | None = None  # None: as fast as it goes

    def __post_init__(self) -> None:
        if unknown := [medium for medium, _ in self.blocks if medium not in READERS]:
            raise ValueError(f"tiers: {unknown[0]} is not modelled; those that are: {', '.join(READERS)}")
        if self.block_bytes < 1:
            raise ValueError(f"tiers: a block of {self.block_bytes} bytes")

    @classmethod
    def of(
        cls, rooms: Mapping[str, int], block_bytes: int, save_bytes_per_s: float | None, at_once: bool, wait_s: float, keeps_all: bool
    ) -> Self:
        """`rooms`: bytes, by the model in a profile. The others: see `TierPolicy`."""
        blocks = tuple((medium, _blocks(medium, rooms[model], block_bytes)) for model, medium in MODELS.items() if model in rooms)
        return cls(blocks, block_bytes, TierPolicy(at_once, wait_s, keeps_all), save_bytes_per_s)

    @property
    def media(self) -> tuple[str, ...]:
        """Those that have room."""
        return tuple(medium for medium, blocks in self.blocks if blocks > 0)


def _blocks(medium: str, size: int, block_bytes: int) -> int:
    """How many have room in `size` bytes."""
    return size // (padded(block_bytes) if medium == DISK else block_bytes)


class ModelledCarrier:
    """A `baton.engine.core.kvcache.Carrier` of no bytes."""

    def __init__(self, count: int) -> None:
        self.units = [NO_BYTES] * count

    def out(self, blocks: Seq[int]) -> Seq[memoryview]:
        return [NO_BYTES] * len(blocks)

    def into(self, blocks: Seq[int], places: Seq[int]) -> list[bool]:
        return [True] * len(blocks)


class UnmovedPool(KvPool):
    """A pool whose blocks are as large as real ones, and are never copied."""

    def __init__(self, pool: KvPool, unit_bytes: int) -> None:
        super().__init__(pool.layout, pool.num_blocks, pool.memory)
        self._unit_bytes = unit_bytes

    @property
    def unit_bytes(self) -> int:
        return self._unit_bytes

    def carrier(self, count: int) -> Carrier:
        return ModelledCarrier(count)


class ModelledStore:
    """A `baton.tiers.store.Store` that knows which units it would hold."""

    def __init__(self, medium: str, unit_bytes: int, capacity: int, pace: TierPace) -> None:
        self.medium, self.unit_bytes, self.capacity = medium, unit_bytes, capacity
        self.pins = Pins()
        self.read_s, self.write_s = unit_bytes * pace.byte, unit_bytes * pace.write  # of a unit
        self.written_s = 0.0  # in all
        self._slots = Slots(capacity, self.pins)

    def keys(self) -> list[bytes]:
        return self._slots.keys()

    def holds(self, keys: Seq[bytes]) -> list[bool]:
        return self._slots.holds(keys)

    def put(self, units: Seq[Unit]) -> list[bytes]:
        placed = self._slots.reserve(units)
        self._slots.commit(placed.entries)
        self.written_s += len(placed.entries) * self.write_s
        return placed.lost

    def get(self, wanted: Seq[Wanted]) -> list[bool]:
        found = self._slots.find([one.key for one in wanted])
        self._slots.use(entry for entry in found if entry is not None)
        return [entry is not None for entry in found]

    def drop(self, keys: Seq[bytes]) -> None:
        self._slots.forget(keys)

    def close(self) -> None:
        self._slots.restore([])


class ModelledTier(Tier):
    """A tier whose threads are tasks, each of which lasts as long as there is something to do."""

    def __init__(self, store: ModelledStore, bounds: Bounds, pool: Pool, moved: Moved, pace: TierPace, cores: Computes) -> None:
        super().__init__(store, bounds, pool, moved, clock_of_loop(), lambda: store.written_s)
        self._modelled, self._pace, self._cores = store, pace, cores
        self._writes = self._looks = False
        self._resting = list(self._reading)  # ways of readers that have nothing to do
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """It is empty, and tasks begin when there is something to do."""

    def save(self, save: Save) -> None:
        super().save(save)
        self._look_later()
        if not self._writes and self._saves:
            self._writes = True
            self._begin(self._write_all())

    def load(self, piece: LoadPiece) -> None:
        super().load(piece)
        self._look_later()
        if self._pieces and self._resting:
            self._begin(self._read_all(self._resting.pop()))

    def drop(self, keys: Seq[bytes]) -> None:
        super().drop(keys)
        self._drop()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        super().close()

    async def _write_all(self) -> None:
        while self._saves:
            with self._lock:
                save = self._next_save()
            if save is None:
                await until(self._next_write)
                continue
            await self._cores.work(self._writing_s(save))
            self._write_one(save)
        self._writes = False

    def _writing_s(self, save: Save) -> float:
        """What is handed down is read for it."""
        news = self.store.holds([key for key, _ in save.units]).count(False)
        down = max(0, self.units + news - self.store.capacity) if self.below is not None and self.below.on else 0
        return news * self._modelled.write_s + down * self._modelled.read_s

    async def _read_all(self, way: Way) -> None:
        await asyncio.sleep(self._pace.base)
        while self._pieces and (piece := self._next_piece()) is not None:
            if not piece.wanted():
                piece.done()
                continue
            began = self._clock()
            await self._cores.work(len(piece.keys) * self._modelled.read_s)
            self._read_one(way, piece, began)
        self._resting.append(way)

    def _copies(self, count: int) -> list[memoryview]:
        return [NO_BYTES] * count

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look_later(self) -> None:
        """Looks at it every LOOK_EVERY_S, as long as something counts, or it rests."""
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._looks = False
        if self.state is TierState.CLOSED:
            return
        self._look()
        if self.state is TierState.RESTING or any(self.worth.lately(self._clock())):
            self._look_later()


class ModelledTiers(Tiers):
    """Must be made and used within a loop of virtual time."""

    def __init__(self, sizes: TierSizes, paces: Mapping[str, TierPace], cores: Computes) -> None:
        """`paces`: by medium. `cores`: where what is moved takes processor time."""
        super().__init__(self._stores, sizes.policy, clock_of_loop())
        self._sizes, self._paces, self._cores = sizes, paces, cores

    def open(self, pool: Pool, report: Report) -> None:
        assert isinstance(pool, KvPool)
        super().open(UnmovedPool(pool, self._sizes.block_bytes), report)

    def records(self) -> tuple[TierRecord, ...]:
        """What routers decide by."""
        return tuple(TierRecord(told.medium, told.state, cost=round(told.cost, 4)) for told in self.told())

    def _stores(self, pool: Pool) -> list[tuple[Store, Bounds]]:
        sizes, made = self._sizes, list[tuple[Store, Bounds]]()
        for medium, blocks in sizes.blocks:
            if blocks > 0:
                bounds = Bounds(sizes.save_bytes_per_s, READERS[medium])
                made.append((ModelledStore(medium, sizes.block_bytes, blocks, self._pace(medium)), bounds))
        return made

    def _tier(self, store: Store, bounds: Bounds, pool: Pool) -> Tier:
        assert isinstance(store, ModelledStore)
        return ModelledTier(store, bounds, pool, partial(self._moved, store.medium), self._pace(store.medium), self._cores)

    def _pace(self, medium: str) -> TierPace:
        return self._paces.get(medium, TierPace())
