"""Stores of small units for the suite that every store passes, and a way to damage what one of them keeps."""

import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from s3_server import bucket
from xxhash import xxh3_128_digest

from baton.tiers.disk_folder import padded, units_name
from baton.tiers.disk_store import DiskStore
from baton.tiers.kind import UnitKind
from baton.tiers.memory_store import MemoryStore
from baton.tiers.object_store import ObjectStore
from baton.tiers.sealed_store import SEAL_BYTES, SealedStore
from baton.tiers.store import Store, Unit, Wanted

UNIT = 5000  # bytes: no multiple of a page, a sector or a word
CAPACITY = 12
SECRET = bytes(range(32))
KIND = UnitKind(bytes(range(16)), UNIT)


class Bench(Protocol):
    @property
    def store(self) -> Store: ...

    exact: bool  # whether what goes first is the longest unused unit, and not one beside it

    def damage(self, key: bytes) -> None:
        """Flips a bit of the unit where it is kept."""
        ...


class MemoryBench:
    exact = True

    def __init__(self) -> None:
        self.store = MemoryStore(UNIT, CAPACITY)

    def damage(self, key: bytes) -> None:
        damage(self.store, key)


def damage(store: MemoryStore, key: bytes) -> None:
    entry = store._slots.find([key])[0]
    assert entry is not None and store._memory is not None
    store._memory[entry.slot, UNIT // 2] ^= 1


@contextmanager
def memory() -> Iterator[Bench]:
    yield MemoryBench()


class DiskBench:
    exact = True

    def __init__(self, folder: Path) -> None:
        self.store = DiskStore(folder, KIND, CAPACITY)

    def damage(self, key: bytes) -> None:
        entry = self.store._slots.find([key])[0]
        assert entry is not None
        flip(self.store.path, entry.slot)


def flip(folder: Path, slot: int) -> None:
    """A bit of a unit in a folder of one file."""
    with open(folder / units_name(0), "r+b") as file:
        place = slot * padded(UNIT) + UNIT // 2
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@contextmanager
def disk() -> Iterator[Bench]:
    with TemporaryDirectory() as folder:
        yield DiskBench(Path(folder))


class SealedBench:
    exact = True

    def __init__(self) -> None:
        self.inside = MemoryStore(UNIT + SEAL_BYTES, CAPACITY)
        self.store = SealedStore(self.inside, SECRET)

    def damage(self, key: bytes) -> None:
        damage(self.inside, key)


@contextmanager
def sealed() -> Iterator[Bench]:
    yield SealedBench()


class ObjectBench:
    exact = True

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self.store = ObjectStore(url, KIND, CAPACITY, options)

    def damage(self, key: bytes) -> None:
        name = f"units/{key.hex()}"
        data = bytearray(self.store._objects.read(name) or b"")
        data[UNIT // 2] ^= 1
        self.store._objects.write(name, bytes(data))


@contextmanager
def objects_in_memory() -> Iterator[Bench]:
    yield ObjectBench(f"memory://{uuid.uuid4().hex}/kv")


@contextmanager
def objects_in_files() -> Iterator[Bench]:
    with TemporaryDirectory() as folder:
        yield ObjectBench(f"file://{folder}/kv")


@contextmanager
def objects_in_a_bucket() -> Iterator[Bench]:
    with bucket() as (url, endpoint):
        yield ObjectBench(url, {"endpoint_url": endpoint})


BENCHES = {
    "memory": memory,
    "disk": disk,
    "sealed": sealed,
    "objects in memory": objects_in_memory,
    "objects in files": objects_in_files,
    "objects in a bucket": objects_in_a_bucket,
}


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int, size: int = UNIT) -> bytes:
    return random.Random(number).randbytes(size)


def unit(number: int, size: int = UNIT) -> Unit:
    data = content(number, size)
    return Unit(key(number), xxh3_128_digest(data), memoryview(data))


def put(store: Store, *numbers: int) -> list[bytes]:
    return store.put([unit(number, store.unit_bytes) for number in numbers])


def get(store: Store, *numbers: int) -> list[bool]:
    """Asserts that what is given back is what was put."""
    copies = [bytearray(store.unit_bytes) for _ in numbers]
    good = store.get([Wanted(key(number), memoryview(copy)) for number, copy in zip(numbers, copies, strict=True)])
    for number, copy, whole in zip(numbers, copies, good, strict=True):
        assert not whole or copy == content(number, store.unit_bytes), f"unit {number} has other bytes"
    return good


def held(store: Store, numbers: Sequence[int]) -> list[int]:
    holds = store.holds([key(number) for number in numbers])
    assert {key(number) for number, held in zip(numbers, holds, strict=True) if held} == set(store.keys()) & set(map(key, numbers))
    return [number for number, held in zip(numbers, holds, strict=True) if held]
