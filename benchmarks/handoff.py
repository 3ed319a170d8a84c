"""What a handoff costs: the read time by size, compared with a plain copy of the same bytes, and what digests and the lease check add.

    python benchmarks/handoff.py [--transport nixl] [--json FILE]
    python benchmarks/handoff.py --transport tcp --transport tls     what encryption costs

Two processes and a real transport. Ratios are taken within one run, as medians over interleaved repeats, with their spread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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

BLOCK_BYTES = 64 << 10
SIZES = [1, 8, 64, 256, 1024, 2048]  # blocks: 64 KiB … 128 MiB
REPEATS = 15
KEY = b"k" * 32
TLS_FOLDER = "BATON_TEST_TLS"


def make_pool(blocks: int) -> KvPool:
    return KvPool(KvLayout("bench", "float32", 16, 4, 4, BLOCK_BYTES // (4 * 2 * 4 * 16 * 4)), blocks)


def make(kind: str, name: str, pool: KvPool) -> Transport:
    """`kind` "tls": TCP inside TLS, with the certificates of the folder BATON_TEST_TLS."""
    folder = os.environ.get(TLS_FOLDER)
    files = SecurityConfig(tls_cert=f"{folder}/server.pem", tls_key=f"{folder}/server.key", tls_ca=f"{folder}/ca.pem")
    tcp = Tcp(tls=kv_tls(files) if kind == "tls" else None)
    kind = "tcp" if kind == "tls" else kind
    return make_transport(kind, peer=name, pool=pool, host="127.0.0.1", key=KEY, tcp=tcp, ucx=Ucx(net_devices="lo"))


def serve(kind: str) -> None:
    pool = make_pool(max(SIZES))
    pool.array[:] = np.random.default_rng(0).integers(0, 255, pool.array.shape, dtype=np.uint8)
    transport = make(kind, "bench-peer", pool)
    digests = pool.digests(range(pool.num_blocks))
    print(json.dumps({"address": transport.address().hex(), "digests": digests.hex()}), flush=True)
    sys.stdin.read()
    transport.close()


def median(times: list[float]) -> tuple[float, float]:
    """(median, half the distance between the quartiles), seconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / 2


def measure(kind: str) -> list[dict[str, float]]:
    peer = subprocess.Popen([sys.executable, __file__, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdout is not None
    told = json.loads(peer.stdout.readline())
    pool, source = make_pool(max(SIZES)), make_pool(max(SIZES))
    pool.array[:] = source.array[:] = 1  # touch every page: the first touch costs more than a copy
    transport = make(kind, "bench-reader", pool)
    transport.connect("bench-peer", bytes.fromhex(told["address"]))
    digests, rows = bytes.fromhex(told["digests"]), []
    rng = np.random.default_rng(1)
    try:
        for blocks in SIZES:
            remote, local = ([int(i) for i in rng.permutation(max(SIZES))[:blocks]] for _ in range(2))
            expected = b"".join(digests[i * 16 : i * 16 + 16] for i in remote)
            times: dict[str, list[float]] = {"read": [], "copy": [], "digest": []}
            for _ in range(REPEATS):
                began = time.perf_counter()
                transport.read("bench-peer", remote, local, 30.0)
                times["read"].append(time.perf_counter() - began)
                began = time.perf_counter()
                assert not mismatches(pool, local, expected)
                times["digest"].append(time.perf_counter() - began)
                began = time.perf_counter()
                for a, b in zip(local, remote, strict=True):
                    pool.array[a] = source.array[b]
                times["copy"].append(time.perf_counter() - began)
            row: dict[str, float] = {"blocks": blocks, "bytes": blocks * BLOCK_BYTES}
            for name, values in times.items():
                row[f"{name}_ms"], row[f"{name}_spread_ms"] = (1000 * value for value in median(values))
            rows.append(row)
    finally:
        transport.close()
        peer.communicate("", timeout=20)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", action="append", choices=("nixl", "tcp", "tls"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    results: dict[str, Any] = {"machine": describe(), "seed": 1, "repeats": REPEATS, "transports": {}}
    print(results["machine"])
    folder = tempfile.TemporaryDirectory()
    certs.make(Path(folder.name) / "tls", renew=False)
    os.environ[TLS_FOLDER] = f"{folder.name}/tls"
    for kind in options.transport or ("nixl", "tcp"):
        rows = results["transports"][kind] = measure(kind)
        print(f"\n{kind}: blocks of {BLOCK_BYTES >> 10} KiB, scattered on both sides; median ± half the interquartile range")
        print(f"{'MiB':>8} {'read ms':>16} {'GB/s':>7} {'copy ms':>16} {'read/copy':>10} {'digest ms':>16} {'digest/read':>12}")
        for row in rows:
            cells = [f"{row[f'{name}_ms']:9.3f} ±{row[f'{name}_spread_ms']:5.3f}" for name in ("read", "copy", "digest")]
            print(
                f"{row['bytes'] / 2**20:8.2f} {cells[0]:>16} {row['bytes'] / row['read_ms'] / 1e6:7.2f} {cells[1]:>16}"
                f" {row['read_ms'] / row['copy_ms']:9.2f}x {cells[2]:>16} {row['digest_ms'] / row['read_ms']:11.0%}"
            )
    folder.cleanup()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
