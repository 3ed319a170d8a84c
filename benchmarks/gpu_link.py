"""KV from the pool of one process to that of another through the transports of workers: seconds and rate, with and without digests.

    python benchmarks/gpu_link.py OUT.json [--kinds cuda_ipc,nixl_vram,nixl] [--gib 4] [--repeats 5]

cuda_ipc, nixl_vram: both pools on one CUDA device; what the probe passes over is said and not measured. nixl: both in the host's memory,
which is the middle part of the staged path. The reader pulls scattered blocks of 2 MiB (Llama 3.1 8B, 16 tokens) into scattered places, as
a decode worker does; then it compares the digests with the holder's. Exits with status 1 if a byte differs, with 2 without a device.
"""

import argparse
import json
import multiprocessing as mp
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe

from baton.engine.core.kvcache import DIGEST_BYTES, KvLayout, KvPool
from kvtransfer.select import make_transport
from kvtransfer.transport import Transport

LAYOUT = KvLayout("link", "bfloat16", 16, 32, 8, 128)
TOKENS = (512, 2048, 8192, 32768)


def open_side(kind: str, name: str, blocks: int) -> tuple[Any, Transport]:
    """A pool filled with noise, and its transport."""
    seed = len(name)
    if kind != "nixl":
        from baton.engine.gpu.pool import DevicePool, rows

        torch.manual_seed(seed)
        pool: Any = DevicePool(LAYOUT, torch.randn(rows(LAYOUT, blocks), *LAYOUT.block_shape, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
    else:
        pool = KvPool(LAYOUT, blocks)
        pool.array[:] = np.random.default_rng(seed).integers(0, 255, LAYOUT.block_bytes, dtype=np.uint8)
        pool.array[:, :8] = np.arange(blocks)[:, None]
    return pool, make_transport(kind.partition("_vram")[0], peer=name, pool=pool, host="127.0.0.1", key=b"link")


def hold(kind: str, blocks: int, told: Any, asked: Any) -> None:
    pool, transport = open_side(kind, "holder", blocks)
    told.put((transport.address(), pool.digests(range(blocks))))
    asked.get()
    transport.close()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(kind: str, blocks: int, repeats: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    told, asked = context.Queue(), context.Queue()
    child = context.Process(target=hold, args=(kind, blocks, told, asked), daemon=True)
    child.start()
    found: dict[str, Any] = {}
    try:
        address, theirs = told.get(timeout=120)
        pool, transport = open_side(kind, "reader", blocks)
        found["connect seconds"] = timed(lambda: transport.connect("holder", address))
        route = transport.route("holder")
        found |= {"carrier": route and route.carrier, "probed GB/s": route and route.rate / 1e9, "detail": transport.backend_detail()}
        if found["carrier"] != kind:
            print(f"{kind}: not measured, KV would go by {found['carrier']}: {found['detail']}", flush=True)
            return found
        with ThreadPoolExecutor(1) as threads:  # a worker reads in threads of its own, too
            for tokens in TOKENS:
                if tokens // LAYOUT.block_size <= blocks:
                    found[str(tokens)] = threads.submit(cell, pool, transport, theirs, tokens // LAYOUT.block_size, repeats).result()
                    rates = found[str(tokens)]
                    checked = f"{rates['copy GB/s']:.1f} GB/s, with digests {rates['with digests GB/s']:.1f}"
                    print(f"{kind}: {tokens} tokens in {rates['seconds'] * 1e3:.2f} ms, {checked}, {rates['wrong']} wrong", flush=True)
        transport.close()
    finally:
        asked.put(None)
        child.join(timeout=10)
        if child.is_alive():
            child.terminate()
    return found


def cell(pool: Any, transport: Transport, theirs: bytes, count: int, repeats: int) -> dict[str, Any]:
    rng, copies, checks, wrong = np.random.default_rng(count), [], [], 0
    for _ in range(repeats + 1):
        remote, local = (rng.permutation(pool.num_blocks)[:count].tolist() for _ in range(2))
        copies.append(timed(lambda remote=remote, local=local: transport.read("holder", remote, local, 30.0)))  # type: ignore[misc]
        mine: list[bytes] = []
        checks.append(timed(lambda local=local, mine=mine: mine.append(pool.digests(local))))  # type: ignore[misc]
        wrong += mine[0] != b"".join(theirs[DIGEST_BYTES * block : DIGEST_BYTES * (block + 1)] for block in remote)
    size, copy, check = count * LAYOUT.block_bytes / 1e9, statistics.median(copies[1:]), statistics.median(checks[1:])
    rates = {"copy GB/s": size / copy, "with digests GB/s": size / (copy + check)}
    return {"seconds": copy, "digest seconds": check, "samples": copies, "wrong": wrong, **rates}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", default="cuda_ipc,nixl_vram,nixl")
    parser.add_argument("--gib", type=float, default=4.0, help="size of each pool")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.kinds != "nixl" and not torch.cuda.is_available():
        print("gpu_link.py: no CUDA device here", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    found: dict[str, Any] = {"where": f"{device}; {describe()}"}
    for kind in options.kinds.split(","):
        found[kind] = measure(kind, int(options.gib * 2**30) // LAYOUT.block_bytes, options.repeats)
        options.out.write_text(json.dumps(found, indent=1))
    return int(any(cell["wrong"] for kind in options.kinds.split(",") for cell in found[kind].values() if isinstance(cell, dict)))


if __name__ == "__main__":
    sys.exit(main())
