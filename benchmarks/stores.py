"""How fast each store of KV takes units and gives them back, what encryption costs, and how soon a folder is usable after `kill -9`.

    python benchmarks/stores.py [--folder DIR] [--mib 256] [--repeats 3] [--json FILE]

Units are put in batches of 16, as a tier does, and read in an order of conversations: 8 neighbours at a time, the groups shuffled, in one
thread. They take the room of others, as in a store that is full; what is written is flushed within the time, and is out of the page cache
before it is read. The S3 server is moto's, in this process: its figures say what the client costs, and nothing of a real one. CPU: of this
process (with S3, of the server, too).
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from machine import describe
from xxhash import xxh3_128_digest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from s3_server import bucket

from baton.tiers.disk_files import Rates, measure
from baton.tiers.disk_store import DiskStore
from baton.tiers.kind import UnitKind
from baton.tiers.memory_store import MemoryStore
from baton.tiers.object_store import ObjectStore
from baton.tiers.sealed_store import SEAL_BYTES, SealedStore, seal_name
from baton.tiers.store import Store, Unit, Wanted

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
BATCH, PIECE = 16, 8
REOPENED = 100_000  # units
SMALL = 512  # bytes of each
SECRET = bytes(32)
KIND = UnitKind(bytes(16), 0)
WAYS = {"direct": Rates(1.0, 0.0), "buffered": Rates(0.0, 1.0)}
CHILD = f"""
import sys; from pathlib import Path; from xxhash import xxh3_128_digest
from baton.tiers.disk_store import DiskStore; from baton.tiers.kind import UnitKind; from baton.tiers.store import Unit
store = DiskStore(Path(sys.argv[1]), UnitKind(bytes(16), {SMALL}), {REOPENED})
for start in range(0, {REOPENED}, {BATCH}):
    data = [n.to_bytes(16, "little") * ({SMALL} // 16) for n in range(start, min(start + {BATCH}, {REOPENED}))]
    store.put([Unit(each[:16], xxh3_128_digest(each), memoryview(each)) for each in data])
print("put", flush=True)
sys.stdin.read()
"""
Make = Callable[[int, int], Store]  # bytes of a unit, units


def in_memory(size: int, count: int) -> Store:
    return MemoryStore(size, count)


def on_disk(folder: Path, way: str, seal: str = "") -> Make:
    def make(size: int, count: int) -> Store:
        shutil.rmtree(folder, ignore_errors=True)
        with mock.patch("baton.tiers.disk_store.measure", lambda *_: WAYS[way]):
            return DiskStore(folder, replace(KIND, unit_bytes=size, seal=seal), count)

    return make


def sealed(make: Make) -> Make:
    return lambda size, count: SealedStore(make(size + SEAL_BYTES, count), SECRET)


def objects(url: str, options: dict[str, str]) -> Make:
    return lambda size, count: ObjectStore(f"{url}/{random.randbytes(8).hex()}", replace(KIND, unit_bytes=size), count, options)


@contextmanager
def timed(into: dict[str, list[float]], name: str, size: int) -> Iterator[None]:
    """MB/s, and seconds of the processor for a GB."""
    cpu, began = time.process_time(), time.perf_counter()
    yield
    took, used = time.perf_counter() - began, time.process_time() - cpu
    into.setdefault(f"{name}_mb_s", []).append(size / took / 1e6)
    into.setdefault(f"{name}_cpu_s_gb", []).append(used / size * 1e9)


def measured(make: Make, size: int, total: int, folder: Path, into: dict[str, list[float]]) -> None:
    count = max(PIECE, total // size // PIECE * PIECE)
    rows = np.random.default_rng(1).integers(0, 256, (BATCH, size), np.uint8)
    store = make(size, count)
    units = []
    for n in range(count):
        data = rows[n % BATCH].data
        units.append(Unit(n.to_bytes(16, "little"), xxh3_128_digest(data), data))
    try:
        for start in range(0, count, BATCH):
            store.put([unit._replace(key=b"before" + unit.key[:10]) for unit in units[start : start + BATCH]])
        evict(folder)
        with timed(into, "write", count * size):
            for start in range(0, count, BATCH):
                store.put(units[start : start + BATCH])
            evict(folder)
        groups = [units[start : start + PIECE] for start in range(0, count, PIECE)]
        random.Random(1).shuffle(groups)
        copies = [bytearray(size) for _ in range(PIECE)]
        with timed(into, "read", count * size):
            for group in groups:
                assert all(store.get([Wanted(unit.key, memoryview(copy)) for unit, copy in zip(group, copies, strict=False)]))
    finally:
        store.close()


def evict(folder: Path) -> None:
    """Out of the page cache."""
    for path in folder.rglob("units-*"):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def reopened(folder: Path) -> dict[str, float]:
    """A child puts REOPENED units and is killed; then the folder is opened here."""
    shutil.rmtree(folder, ignore_errors=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", CHILD, folder], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "put\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    evict(folder)
    cpu, began = time.process_time(), time.perf_counter()
    store = DiskStore(folder, replace(KIND, unit_bytes=SMALL), REOPENED)
    took, used = time.perf_counter() - began, time.process_time() - cpu
    keys = store.keys()
    good = store.get([Wanted(key, memoryview(bytearray(SMALL))) for key in keys[:1000]])
    assert len(keys) == REOPENED and all(good)
    store.close()
    return {"seconds": took, "cpu_seconds": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; it gets a folder of its own there")
    parser.add_argument("--mib", type=int, default=256, help="of units that each store gets; object stores get an eighth")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    results: dict[str, Any] = {"machine": describe(), "load_average": load, "mib": options.mib, "repeats": options.repeats, "stores": {}}
    print(results["machine"], flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as made, bucket() as (url, endpoint):
        folder = Path(made) / "kv"
        seal = seal_name(SECRET)
        arms: dict[str, tuple[Make, int]] = {
            "memory": (in_memory, 1),
            "memory, encrypted": (sealed(in_memory), 1),
            "disk, direct": (on_disk(folder, "direct"), 1),
            "disk, buffered": (on_disk(folder, "buffered"), 1),
            "disk, direct, encrypted": (sealed(on_disk(folder, "direct", seal)), 1),
            "objects in files": (objects(f"file://{made}/objects", {}), 8),
            "objects in S3 (moto)": (objects(url, {"endpoint_url": endpoint}), 8),
        }
        for name, size in SIZES.items():
            rows: dict[str, dict[str, list[float]]] = {arm: {} for arm in arms}
            for _ in range(options.repeats):
                for arm, (make, part) in arms.items():
                    measured(make, size, (options.mib << 20) // part, folder, rows[arm])
                    shutil.rmtree(Path(made) / "objects", ignore_errors=True)
            for arm, found in rows.items():
                results["stores"].setdefault(arm, {})[name] = found
                told = "  ".join(f"{what} {statistics.median(values):8.2f}" for what, values in found.items())
                print(f"{name:8} {arm:24} {told}", flush=True)
            folder.mkdir(exist_ok=True)
            results.setdefault("probe", {})[name] = rates = measure(folder, size)
            print(f"{name:8} the probe at the opening: {rates}", flush=True)
        results["reopened"] = [reopened(folder) for _ in range(options.repeats)]
        print(f"{REOPENED} units after kill -9: {results['reopened']}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
