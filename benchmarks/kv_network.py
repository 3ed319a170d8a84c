"""How fast KV crosses a network over TCP, compared with what `iperf3` gets on the same wire at the same time of day.

    python benchmarks/kv_network.py [--mbit 1000] [--json FILE]

Two network namespaces, joined by a bridge: the wire is this kernel, and both ends share the cores. With --mbit, both ends are limited to
that rate. Reads are scattered on both sides. `streams`: how many reads run at the same time, and how many streams iperf3 uses.
Needs root, iproute2 and iperf3. Ratios are taken within one run, as medians over interleaved repeats, with their spread.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from hosts import Host, hosts

from baton.engine.core.kvcache import KvLayout, KvPool
from kvtransfer.tcp_transport import TcpTransport

KEY = b"k" * 32
BLOCKS = {"64 KiB": 64 << 10, "2 MiB": 2 << 20}  # of `tale` and of a model with 8 billion parameters
POOL = 512 << 20  # bytes
REPEATS = 7
SPAN_S = 2.0  # of one measurement


def make_pool(block_bytes: int) -> KvPool:
    pool = KvPool(KvLayout("bench", "float32", 16, 4, 4, block_bytes // (4 * 2 * 4 * 16 * 4)), POOL // block_bytes)
    pool.array[:] = 1
    return pool


def serve(address: str) -> None:
    transports = [TcpTransport(make_pool(block_bytes), address, KEY) for block_bytes in BLOCKS.values()]
    print(json.dumps([transport.address().hex() for transport in transports]), flush=True)
    sys.stdin.read()
    for transport in transports:
        transport.close()


def read(addresses: list[str]) -> None:
    """Answers each line (block size, streams, bytes per read) with the rate, in bytes per second."""
    transports = {}
    for (name, block_bytes), address in zip(BLOCKS.items(), addresses, strict=True):
        transports[name] = transport = TcpTransport(make_pool(block_bytes), "127.0.0.1", KEY)
        transport.connect("peer", bytes.fromhex(address))
    rng = np.random.default_rng(1)
    for line in sys.stdin:
        name, streams, size = json.loads(line)
        count = size // BLOCKS[name]
        order = [[int(i) for i in rng.permutation(POOL // BLOCKS[name])] for _ in range(2)]
        began = time.perf_counter()
        pull = partial(_pull, transports[name], count, order, began + SPAN_S)
        with ThreadPoolExecutor(streams) as threads:
            reads = sum(threads.map(pull, range(streams)))
        print(json.dumps(reads * count * BLOCKS[name] / (time.perf_counter() - began)), flush=True)
    for transport in transports.values():
        transport.close()


def _pull(transport: TcpTransport, count: int, order: list[list[int]], until: float, stream: int) -> int:
    """Reads the same blocks again and again. Returns how many times."""
    reads, at = 0, stream * count
    while time.perf_counter() < until:
        transport.read("peer", order[0][at : at + count], order[1][at : at + count], 60.0)
        reads += 1
    return reads


@contextmanager
def process(host: Host, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = ["ip", "netns", "exec", host.name, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.communicate("", timeout=30) if arguments[0] == sys.executable else started.terminate()


def iperf(host: Host, server: str, streams: int) -> float:
    """Bytes per second that the reader's host receives."""
    told = json.loads(host.run("iperf3", "-c", server, "-R", "-J", "-t", f"{SPAN_S:g}", "-P", str(streams), "-O", "0"))
    return float(told["end"]["sum_received"]["bits_per_second"]) / 8


def measure(mbit: int | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with hosts(2) as (far, near):
        if mbit is not None:
            for host in (far, near):
                host.limit(mbit)
        with (
            process(far, sys.executable, __file__, "--serve", far.address) as server,
            process(far, "iperf3", "-s"),
        ):
            assert server.stdout is not None
            addresses = json.loads(server.stdout.readline())
            with process(near, sys.executable, __file__, "--read", *addresses) as reader:
                assert reader.stdin is not None and reader.stdout is not None
                say, hear = reader.stdin, reader.stdout

                def ours(name: str, streams: int, size: int) -> float:
                    say.write(json.dumps([name, streams, size]) + "\n")
                    say.flush()
                    return float(json.loads(hear.readline()))

                for streams in (1, 4):
                    cells = [(name, size) for name in BLOCKS for size in (4 << 20, 64 << 20)]
                    rates: dict[Any, list[float]] = {cell: [] for cell in ["iperf3", *cells]}
                    for _ in range(REPEATS):
                        rates["iperf3"].append(iperf(near, far.address, streams))
                        for name, size in cells:
                            rates[name, size].append(ours(name, streams, size))
                    for name, size in cells:
                        shares = [rate / peer for rate, peer in zip(rates[name, size], rates["iperf3"], strict=True)]
                        low, middle, high = statistics.quantiles(shares, n=4)
                        row = {"streams": streams, "block": name, "read_mib": size >> 20, "share": middle, "spread": (high - low) / 2}
                        row |= {
                            "gbit_s": statistics.median(rates[name, size]) * 8e-9,
                            "iperf3_gbit_s": statistics.median(rates["iperf3"]) * 8e-9,
                        }
                        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve")
    parser.add_argument("--read", nargs="+")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.read:
        read(options.read)
        return
    results: dict[str, Any] = {"machine": describe(), "seed": 1, "repeats": REPEATS, "wires": {}}
    print(results["machine"])
    for mbit in (None, 1000) if options.mbit is None else (options.mbit or None,):
        wire = f"{mbit} Mbit/s" if mbit else "no limit"
        rows = results["wires"][wire] = measure(mbit)
        print(f"\n{wire}")
        print(f"{'streams':>8} {'block':>8} {'read MiB':>9} {'Gbit/s':>8} {'iperf3':>8} {'share':>16}")
        for row in rows:
            share = f"{row['share']:.0%} ±{row['spread']:.0%}"
            print(f"{row['streams']:8} {row['block']:>8} {row['read_mib']:9} {row['gbit_s']:8.2f} {row['iperf3_gbit_s']:8.2f} {share:>16}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
