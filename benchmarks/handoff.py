"""What a handoff costs: the read time by size, compared with a plain copy of the same bytes, and what digests and the lease check add.

    python benchmarks/handoff.py [--transport nixl] [--json FILE]
    python benchmarks/handoff.py --transport tcp --transport tls     what encryption costs
    python benchmarks/handoff.py --kv                                KV of one prompt in each of the pool's types

Two processes and a real transport. Ratios are taken within one run, as medians over interleaved repeats, with their spread. With `--kv` the
file holds the types only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

from baton.cli import certs
from baton.cluster.config import SecurityConfig
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.worker.kv_tls import kv_tls
from kvtransfer.digest import mismatches
from kvtransfer.select import Tcp, make_transport
from kvtransfer.transport import Transport
from kvtransfer.ucx import Ucx

SIZES = [1, 8, 64, 256, 1024, 2048]  # blocks: 64 KiB … 128 MiB
LAYOUTS = {
    "": KvLayout("bench", "float32", 16, 4, 4, 128),  # blocks of 64 KiB
    # Llama-3.1-8B
    "bfloat16": KvLayout("bench", "bfloat16", 16, 32, 8, 128),
    "int8": KvLayout("bench", "bfloat16", 16, 32, 8, 128, stored="int8"),
    "int5": KvLayout("bench", "bfloat16", 16, 32, 8, 128, stored="int5"),
}
TYPES = [kv for kv in LAYOUTS if kv]
PROMPT = 125  # blocks: 2,000 tokens
REPEATS = 15
KEY = b"k" * 32
TLS_FOLDER = "BATON_TEST_TLS"
Times = dict[str, list[float]]


def make_pool(kv: str) -> KvPool:
    return KvPool(LAYOUTS[kv], PROMPT if kv else max(SIZES))


def make(kind: str, name: str, pool: KvPool) -> Transport:
    """`kind` "tls": TCP inside TLS, with the certificates of the folder BATON_TEST_TLS."""
    folder = os.environ.get(TLS_FOLDER)
    files = SecurityConfig(tls_cert=f"{folder}/server.pem", tls_key=f"{folder}/server.key", tls_ca=f"{folder}/ca.pem")
    tcp = Tcp(tls=kv_tls(files) if kind == "tls" else None)
    kind = "tcp" if kind == "tls" else kind
    return make_transport(kind, peer=name, pool=pool, host="127.0.0.1", key=KEY, tcp=tcp, ucx=Ucx(net_devices="lo"))


def serve(kind: str, kv: str) -> None:
    pool = make_pool(kv)
    pool.array[:] = np.random.default_rng(0).integers(0, 255, pool.array.shape, dtype=np.uint8)
    transport = make(kind, "bench-peer", pool)
    digests = pool.digests(range(pool.num_blocks))
    print(json.dumps({"address": transport.address().hex(), "digests": digests.hex()}), flush=True)
    sys.stdin.read()
    transport.close()


class Pair:
    """A process that has KV, and this one, which reads it."""

    def __init__(self, kind: str, kv: str, transport: Transport, pool: KvPool, digests: bytes) -> None:
        self.kind, self.kv, self._transport, self._pool, self._digests = kind, kv, transport, pool, digests
        self._source = make_pool(kv)
        self._pool.array[:] = self._source.array[:] = 1  # touch every page: the first touch costs more than a copy
        self._rng = np.random.default_rng(1)

    @classmethod
    @contextmanager
    def of(cls, kind: str, kv: str = "") -> Iterator["Pair"]:
        peer = subprocess.Popen([sys.executable, __file__, "--serve", kind, kv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert peer.stdout is not None
        told = json.loads(peer.stdout.readline())
        pool = make_pool(kv)
        transport = make(kind, "bench-reader", pool)
        try:
            transport.connect("bench-peer", bytes.fromhex(told["address"]))
            yield cls(kind, kv, transport, pool, bytes.fromhex(told["digests"]))
        finally:
            transport.close()
            peer.communicate("", timeout=20)

    def once(self, blocks: int, times: Times) -> None:
        """Adds the seconds of one handoff of so many blocks and of a copy of as many bytes."""
        remote, local = ([int(i) for i in self._rng.permutation(self._pool.num_blocks)[:blocks]] for _ in range(2))
        expected = b"".join(self._digests[i * 16 : i * 16 + 16] for i in remote)
        began = time.perf_counter()
        self._transport.read("bench-peer", remote, local, 30.0)
        times["read"].append(time.perf_counter() - began)
        began = time.perf_counter()
        assert not mismatches(self._pool, local, expected)
        times["digest"].append(time.perf_counter() - began)
        began = time.perf_counter()
        for a, b in zip(local, remote, strict=True):
            self._pool.array[a] = self._source.array[b]
        times["copy"].append(time.perf_counter() - began)

    def row(self, blocks: int, times: Times) -> dict[str, float]:
        """Medians and half the distances between the quartiles, ms."""
        row: dict[str, float] = {"blocks": blocks, "bytes": blocks * self._pool.layout.block_bytes}
        for name, values in times.items():
            low, middle, high = statistics.quantiles(values, n=4)
            row[f"{name}_ms"], row[f"{name}_spread_ms"] = 1000 * middle, 500 * (high - low)
        return row


def measure(kind: str) -> list[dict[str, float]]:
    rows = []
    with Pair.of(kind) as pair:
        for blocks in SIZES:
            times: Times = {"read": [], "copy": [], "digest": []}
            for _ in range(REPEATS):
                pair.once(blocks, times)
            rows.append(pair.row(blocks, times))
    return rows


def measure_types(kind: str) -> dict[str, dict[str, float]]:
    """The KV of one prompt in each type, in turns."""
    times: dict[str, Times] = {kv: {"read": [], "copy": [], "digest": []} for kv in TYPES}
    with ExitStack() as open_pairs:
        pairs = [open_pairs.enter_context(Pair.of(kind, kv)) for kv in TYPES]
        for _ in range(REPEATS):
            for pair in pairs:
                pair.once(PROMPT, times[pair.kv])
        return {pair.kv: pair.row(PROMPT, times[pair.kv]) for pair in pairs}


def show(rows: dict[str, dict[str, float]]) -> None:
    print(f"{'':>8} {'MiB':>8} {'read ms':>16} {'GB/s':>7} {'copy ms':>16} {'read/copy':>10} {'digest ms':>16} {'digest/read':>12}")
    for name, row in rows.items():
        cells = [f"{row[f'{name}_ms']:9.3f} ±{row[f'{name}_spread_ms']:5.3f}" for name in ("read", "copy", "digest")]
        print(
            f"{name:>8} {row['bytes'] / 2**20:8.2f} {cells[0]:>16} {row['bytes'] / row['read_ms'] / 1e6:7.2f} {cells[1]:>16}"
            f" {row['read_ms'] / row['copy_ms']:9.2f}x {cells[2]:>16} {row['digest_ms'] / row['read_ms']:11.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", action="append", choices=("nixl", "tcp", "tls"))
    parser.add_argument("--kv", action="store_true", help="the pool's types, instead of sizes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    results: dict[str, Any] = {"machine": describe(), "seed": 1, "repeats": REPEATS, "types" if options.kv else "transports": {}}
    print(results["machine"])
    folder = tempfile.TemporaryDirectory()
    certs.make(Path(folder.name) / "tls", renew=False)
    os.environ[TLS_FOLDER] = f"{folder.name}/tls"
    for kind in options.transport or ("nixl", "tcp"):
        print(f"\n{kind}: scattered blocks on both sides; median ± half the interquartile range")
        if options.kv:
            results["types"][kind] = types = measure_types(kind)
            show(types)
        else:
            results["transports"][kind] = rows = measure(kind)
            show({str(row["blocks"]): row for row in rows})
    folder.cleanup()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
