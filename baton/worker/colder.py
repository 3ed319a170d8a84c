"""The tiers of one worker, as `tiers` in the configuration describes them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from baton.cluster.config_engine import TiersConfig
from baton.cluster.records import TierRecord
from baton.engine.core.colder import TierPolicy
from baton.engine.core.kvcache import Pool
from baton.tiers.disk_folder import padded
from baton.tiers.disk_store import DiskStore
from baton.tiers.kind import UnitKind
from baton.tiers.locked_store import memory_store, slot_bytes
from baton.tiers.object_store import HEAD_BYTES, ObjectStore
from baton.tiers.sealed_store import SEAL_BYTES, SealedStore, read_secret, seal_name
from baton.tiers.store import Store
from baton.tiers.tier import DISK_READERS, Bounds, TierReport
from baton.tiers.tiers import Tiers

MIB = 1 << 20
OBJECT_READERS = 4
MEMORY_READERS = 2  # under a device's pool: what one asks for crosses the bus while the other one asks
T = TypeVar("T")


def make_tiers(config: TiersConfig, name: str) -> Tiers | None:
    """`name`: of the folder on a disk (`lasting_name`)."""
    if not config.any:
        return None
    return Tiers(lambda pool: _stores(config, name, pool), TierPolicy(config.save == "at_once", config.wait_s, config.keep == "all"))


def records(tiers: Tiers | None) -> tuple[TierRecord, ...]:
    """The tiers' records, which people read."""
    return tuple(_record(tier) for tier in tiers.told()) if tiers is not None else ()


def _record(told: TierReport) -> TierRecord:
    reads, hits, gain = told.tally.reads, told.tally.hits, (round(told.saved_s, 3), round(told.spent_s, 3))
    return TierRecord(told.medium, told.state, told.why, told.units, told.capacity, reads, hits, *gain, round(told.cost, 4))


def _stores(config: TiersConfig, name: str, pool: Pool) -> list[tuple[Store, Bounds]]:
    """Raises ValueError, which names the key."""
    made: list[tuple[Store, Bounds]] = []
    rate, size = None if config.save_mib_per_s is None else config.save_mib_per_s * MIB, pool.unit_bytes
    secret = None if (file := config.key_file) is None else _named("key_file", lambda: read_secret(Path(file)))
    print_ = pool.layout.fingerprint
    kind = UnitKind(print_, size) if secret is None else UnitKind(print_, size + SEAL_BYTES, seal_name(secret))
    if config.memory_mib is not None:
        room = _room("memory_mib", config.memory_mib, slot_bytes(pool))
        made.append((_named("memory_mib", lambda: memory_store(pool, room)), Bounds(rate, 1 if pool.dma is None else MEMORY_READERS)))
    if config.disk is not None and config.disk_mib is not None:
        folder, room = Path(config.disk) / name, _room("disk_mib", config.disk_mib, padded(kind.unit_bytes))
        made.append((_sealed(_named("disk", lambda: DiskStore(folder, kind, room)), secret), Bounds(rate, DISK_READERS)))
    if config.object is not None and config.object_mib is not None:
        url, room = config.object, _room("object_mib", config.object_mib, kind.unit_bytes + HEAD_BYTES)
        options = {} if config.object_endpoint is None else {"endpoint_url": config.object_endpoint}
        store = _named("object", lambda: ObjectStore(url, kind, room, options))
        made.append((_sealed(store, secret), Bounds(rate, OBJECT_READERS, store.refresh)))
    return made


def _sealed(store: Store, secret: bytes | None) -> Store:
    return store if secret is None else SealedStore(store, secret)


def _room(key: str, mib: int, size: int) -> int:
    """How many units fit."""
    if mib * MIB < size:
        raise ValueError(f"tiers.{key}: {mib} MiB hold no block: one takes {size / MIB:.1f} MiB")
    return mib * MIB // size


def _named(key: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"tiers.{key}: {error}") from None
