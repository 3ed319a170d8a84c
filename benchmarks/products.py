"""Products of a matrix of weights with few rows or many: Baton's kernel, oneDNN's packed one and plain torch, beside the rate at which
memory can be read.

    python benchmarks/products.py [--outs 2048] [--width 512] [--threads 1 2] [--rounds 20] [--json FILE]

There are as many matrices as fill 128 MiB, one for each call in turn, so weights come from memory and not from a cache. The
arms take turns; a figure is the sum of each matrix's best time.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import describe
from torch import Tensor

from baton.engine.choice import choose_ops
from baton.engine.model import onednn
from baton.engine.model.linear import Linear
from baton.engine.model.ops import Ops

TOTAL = 128 << 20  # bytes of weights
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512)
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5625}
CPU = torch.device("cpu")
Calls = list[Callable[[Tensor], Tensor]]


def arms(kind: str, weights: list[Tensor], ops: Ops) -> dict[str, Calls]:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    how = kind if kind.startswith("int") else "auto"
    found: dict[str, Calls] = {"Baton": [Linear([weight], [], dtype, CPU, how, ops) for weight in weights]}
    if onednn.multiplies(dtype) and kind != "int4":
        found["oneDNN"] = [Linear([weight], [], dtype, CPU, how, Ops(packs=True)) for weight in weights]
    if how == "auto":
        found["torch"] = [partial(F.linear, weight=weight.to(dtype)) for weight in weights]
    return found


def seconds(arms: dict[str, Calls], x: Tensor, rounds: int) -> dict[str, float]:
    best = {arm: np.full(len(calls), np.inf) for arm, calls in arms.items()}
    for _ in range(rounds):
        for arm, calls in arms.items():
            for i, call in enumerate(calls):
                began = time.perf_counter()
                call(x)
                best[arm][i] = min(best[arm][i], time.perf_counter() - began)
    return {arm: float(each.sum()) for arm, each in best.items()}


def roof(rounds: int) -> float:
    """Bytes that torch's threads read in a second."""
    memory = torch.ones(TOTAL // 4)
    best = np.inf
    for _ in range(rounds):
        began = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - began)
    return float(TOTAL / best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outs", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe())
    results: list[dict[str, Any]] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        read = roof(options.rounds)
        print(f"{threads} threads read {read / 1e9:.1f} GB/s")
        for kind, size in BYTES.items():
            count = max(1, int(TOTAL / (options.outs * options.width * size)))
            weights = [torch.randn(options.outs, options.width) for _ in range(count)]
            made = arms(kind, weights, choose_ops(CPU, torch.bfloat16 if kind == "bfloat16" else torch.float32, True))
            for rows in ROWS:
                few = {arm: calls[: max(1, 8 * count // max(8, rows))] for arm, calls in made.items()}
                x = torch.randn(rows, options.width).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
                taken = seconds(few, x, options.rounds)
                numbers = len(few["Baton"]) * options.outs * options.width
                row: dict[str, Any] = {"threads": threads, "kind": kind, "rows": rows, "roof_gb_s": read / 1e9}
                for arm, each in taken.items():
                    row[arm] = {"gb_s": numbers * size / each / 1e9, "gflop_s": 2 * rows * numbers / each / 1e9}
                results.append(row)
                shown = ", ".join(f"{arm} {row[arm]['gb_s']:.1f} GB/s {row[arm]['gflop_s']:.0f} GFLOP/s" for arm in taken)
                print(f"{threads} threads, {kind:8} {rows:3} rows: {shown}", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": describe(), "outs": options.outs, "width": options.width, "rows": results}, indent=1)
        )


if __name__ == "__main__":
    main()
