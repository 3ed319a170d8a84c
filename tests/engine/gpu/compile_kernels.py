"""Compiles every Triton kernel for real devices, through the functions that launch them, on a machine without one:

    python tests/engine/gpu/compile_kernels.py [--all] [--json FILE] [--cubins FOLDER] CAPABILITY...        such as 80 89 90 100 120

Prints, for each variant, the shared memory (bytes), the registers of a thread, and the bytes that it spills. `--all`: more models, which
take half a minute for each capability. `--thin`: every other capability for each variant, but all for the first one of each kernel.
`test_compiles.py` runs this in a separate process.
"""

import argparse
import contextlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(TRITON_DUMP_PTXAS_LOG="1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from baton.engine.core.int5_rows import row_bytes
from baton.engine.gpu import tiles, triton_attention, triton_blocks, triton_chain, triton_groups, triton_sampling, triton_store
from baton.engine.gpu.attention import Packed, RoundedKv
from baton.engine.gpu.choice import INT5_HEAD
from baton.engine.gpu.inputs import Following
from baton.engine.gpu.sampler import Filters
from baton.engine.gpu.triton_ops import TritonOps
from baton.engine.model.checkpoint import LayerAttention
from baton.engine.model.quantised.matrix import Quantised

PLAIN, GEMMA = LayerAttention(), LayerAttention(window=4096, softcap=50.0, scale=0.0625)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Hq, Hkv, D, Dv, P, block size, dtype, how
FEW = [
    (32, 8, 128, 128, 2, 16, BF16, PLAIN),  # Llama 8B
    (64, 1, 256, 256, 2, 256, F16, GEMMA),  # the widest group of the widest heads
    (128, 1, 576, 512, 1, 16, BF16, PLAIN),  # latent attention
    (128, 1, 576, 512, 1, 16, F32, PLAIN),
]
MORE = [
    (32, 8, 64, 64, 2, 16, BF16, PLAIN),
    (32, 8, 128, 128, 2, 1, F16, LayerAttention(window=512)),
    (64, 1, 128, 128, 2, 16, BF16, PLAIN),
    (8, 4, 256, 256, 2, 16, BF16, GEMMA),
    (32, 32, 96, 96, 2, 16, BF16, PLAIN),  # Phi-3
    (16, 1, 576, 512, 1, 64, BF16, PLAIN),
    (6, 2, 24, 24, 2, 5, F32, PLAIN),
    (32, 8, 64, 64, 2, 16, F32, PLAIN),
    (32, 8, 128, 128, 2, 16, F32, PLAIN),
    (8, 4, 256, 256, 2, 16, F32, GEMMA),
]


class NoDevice:
    """The part of a driver that compiling needs. A device's number is its capability, so that each has its own kernels."""

    capability = 0

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Survey:
    """What was compiled: (capability, kernel, shared bytes, registers, spilled bytes) of each variant."""

    def __init__(self, cubins: Path | None, thin: bool) -> None:
        self.rows: list[tuple[int, str, int, int, int]] = []
        self.driver = NoDevice()
        self.model = ""
        self._cubins = cubins
        self._thin, self._nth, self._launched = thin, -1, Counter[str]()

    def begin(self, capability: int) -> None:
        self.driver.capability = capability
        self._nth += 1
        self._launched.clear()

    def launcher(self, kernel: JITFunction, grid: object) -> Callable[..., None]:
        """Takes the place of `kernel[grid]`."""

        def launch(*args: object, **options: object) -> None:
            name: str = kernel.fn.__name__
            before = self._launched[name]
            self._launched[name] += 1
            if self._thin and before and (before + self._nth) % 2:
                return
            with contextlib.redirect_stdout(io.StringIO()) as log:
                compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            if not log.getvalue():
                return  # it was compiled before
            registers, spilled = (
                max(map(int, re.findall(pattern, log.getvalue()))) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
            )
            self.rows.append((self.driver.capability, name, compiled.metadata.shared, registers, spilled))
            print(
                f"sm_{self.driver.capability:<4}{name:22}{self.model:44}{compiled.metadata.shared:>8}{registers:>5}{spilled:>7}", flush=True
            )
            if self._cubins:
                (self._cubins / f"{self.driver.capability}-{name}-{len(self.rows)}.cubin").write_bytes(compiled.asm["cubin"])

        return launch


def attention(survey: Survey, models: list[tuple[Any, ...]]) -> None:
    tables, seats, slots = torch.zeros(9, 64, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    lens, firsts = torch.ones(8, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    for heads, kv_heads, dim, dv, parts, block, dtype, how in models:
        layer = torch.empty(4, 2, parts, kv_heads, block, dim, dtype=dtype)[:, 1]
        q, out = torch.empty(8, heads, dim, dtype=dtype), torch.empty(8, heads, dv, dtype=dtype)
        rounded = RoundedKv(layer.to(torch.int8), torch.empty(layer.shape[:-1]))
        rows = torch.empty(4, 2, parts, kv_heads, block, row_bytes(dim), dtype=torch.uint8)[:, 1]
        packed = Packed(rows, dim, torch.empty(layer.shape[:-1], dtype=torch.bfloat16))
        for kv, kind in ((layer, ""), (rounded, ", KV int8"), (packed, ", KV int5"))[: 1 + (dtype == BF16) * (1 + (dim <= INT5_HEAD))]:
            survey.model = f"{heads}/{kv_heads} heads of {dim}, {str(dtype)[6:]}{kind}"
            triton_attention.decode(q, kv, tables, seats, lens, how, out, 64)
            triton_attention.prefill(q, kv, tables, seats, lens, triton_attention.Queries(firsts, 0, 8), how, out)
            new = torch.empty(8, parts, kv_heads, dim, dtype=dtype)
            triton_store.store(new, kv, slots, slots)
            triton_store.store(new, kv, slots, slots, slots)
    triton_attention.flatten_tables(tables, seats, firsts, 1, lens)
    following = Following(slots, slots, slots, slots, lens, seats, slots)
    triton_chain.advance(slots, slots, slots, slots, slots, following, tables, 16)


def others(survey: Survey, every: bool) -> None:
    survey.model = ""
    words, blocks = torch.empty(4, 6000, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    triton_blocks.gather(words, blocks, words)
    triton_blocks.scatter(words, blocks, words)
    triton_blocks.digest(words, blocks)
    triton_blocks.move(words, blocks, words, blocks)

    ops = TritonOps()
    for dtype in (BF16, F32) if every else (BF16,):
        x = torch.empty(4, 16384, dtype=dtype)
        ops.add_rms_norm(x, None, x[0], 1e-5)
        ops.add_rms_norm(x, x, x[0], 1e-5)
        ops.silu_mul(x)
        ops.gelu_tanh_mul(x)
        ops.turn_(torch.empty(4, 40, 128, dtype=dtype), 128)
        ops.rotate_(torch.empty(4, 40, 128, dtype=dtype)[:, :36], torch.empty(4, 1, 64, dtype=torch.complex64))

    for vocab in (128256, 151937) if every else (128256,):
        scores, best = torch.empty(4, vocab), torch.empty(4)
        filters = Filters(best, blocks, best.double(), best, best > 0, blocks, True)
        triton_sampling.race(scores, best, triton_sampling.cutoff(scores, best, filters), filters)


def stored(survey: Survey, every: bool) -> None:
    """Matrices as checkpoints have them: bits, group, whether there are shifts, whether it is float8."""
    kinds = [(4, 128, False, False), (4, 32, True, False), (8, 128, False, True)]
    for bits, group, shifted, float8 in kinds + ([(8, 4096, False, False), (8, 32, True, False), (4, 128, True, False)] if every else []):
        survey.model = f"{bits} bits, groups of {group}{', shifts' if shifted else ''}{', float8' if float8 else ''}"
        factors = torch.rand(256, 4096 // group).half()
        matrix = Quantised(bits, group, torch.zeros(256, 4096, dtype=torch.uint8), factors, factors if shifted else None, float8)
        for dtype in (BF16, F32) if every else (BF16,):
            product = triton_groups.GroupProduct(matrix, torch.zeros(256, dtype=dtype), torch.device("cpu"))
            for rows in (1, 8, 32, 200):
                product(torch.empty(rows, 4096, dtype=dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="+")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--thin", action="store_true")
    parser.add_argument("--json", type=Path, help="a list of (capability, kernel, shared, registers, spilled)")
    parser.add_argument("--cubins", type=Path)
    options = parser.parse_args()
    survey = Survey(options.cubins, options.thin)
    triton.runtime.driver.set_active(survey.driver)
    JITFunction.__getitem__ = lambda kernel, grid: survey.launcher(kernel, grid)
    mock.patch.object(triton_attention, "capability", lambda _: divmod(survey.driver.capability, 10)).start()
    print(f"{'':70}  shared regs spilled")
    for capability in options.capabilities:
        survey.begin(capability)
        attention(survey, FEW + (MORE if options.all else []))
        others(survey, options.all)
        stored(survey, options.all)
    over = [row for row in survey.rows if row[2] > tiles.most_shared(divmod(row[0], 10))]
    print(f"{len(survey.rows)} variants; more shared memory than the chip has: {over or 'none'}")
    if options.json:
        options.json.write_text(json.dumps(survey.rows))


if __name__ == "__main__":
    main()
