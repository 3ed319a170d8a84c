"""Compiles every Triton kernel for a real device, through the functions that launch them, on a machine without one. Prints a JSON object:
kernel → the most shared memory (bytes) that any of its variants needs. `test_compiles.py` runs this in a separate process."""

import json
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class NoDevice:
    """The part of a driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


shared: dict[str, int] = {}
binaries: list[tuple[str, bytes]] = []


def compile_only(kernel: JITFunction, grid: object) -> object:
    def launch(*args: object, **kwargs: object) -> None:
        compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
        name = kernel.fn.__name__
        shared[name] = max(shared.get(name, 0), compiled.metadata.shared)
        binaries.append((f"{name}-{len(binaries)}", compiled.asm["cubin"]))

    return launch


def main() -> None:
    triton.runtime.driver.set_active(NoDevice(int(sys.argv[1])))
    JITFunction.__getitem__ = compile_only

    from baton.engine.gpu import triton_attention, triton_blocks, triton_sampling
    from baton.engine.gpu.sampler import Filters
    from baton.engine.gpu.triton_ops import TritonOps
    from baton.engine.model.checkpoint import LayerAttention

    plain, gemma = LayerAttention(), LayerAttention(window=4096, softcap=50.0, scale=0.0625)
    bf16, f32 = torch.bfloat16, torch.float32
    # Hq, Hkv, D, Dv, P, block size, dtype, how: Llama 8B, a window, Gemma 2, Phi-3, latent attention, and float32 with odd sizes.
    models = [
        (32, 8, 128, 128, 2, 16, bf16, plain),
        (32, 8, 128, 128, 2, 1, torch.float16, LayerAttention(window=512)),
        (8, 4, 256, 256, 2, 256, bf16, gemma),
        (32, 32, 96, 96, 2, 16, bf16, plain),
        (128, 1, 576, 512, 1, 16, bf16, plain),
        (6, 2, 24, 24, 2, 5, f32, plain),
    ]
    for heads, kv_heads, dim, dv, parts, block, dtype, how in models:
        pool = torch.empty(4, 2, parts, kv_heads, block, dim, dtype=dtype)
        tables, seats = torch.zeros(9, 64, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        lens, firsts = torch.ones(8, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
        q, out = torch.empty(8, heads, dim, dtype=dtype), torch.empty(8, heads, dv, dtype=dtype)
        for splits in (1, 64):
            triton_attention.decode(q, pool[:, 1], tables, seats, lens, how, out, splits)
        triton_attention.prefill(q, pool[:, 1], tables, seats, lens, triton_attention.Queries(firsts, 0, 8), how, out)
        slots = torch.zeros(8, dtype=torch.int64)
        triton_attention.store(torch.empty(8, parts, kv_heads, dim, dtype=dtype), pool[:, 1], slots, slots)
    triton_attention.flatten_tables(tables, seats, firsts, 1, lens)

    words, blocks = torch.empty(4, 6000, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    triton_blocks.gather(words, blocks, words)
    triton_blocks.scatter(words, blocks, words)
    triton_blocks.digest(words, blocks)
    triton_blocks.move(words, blocks, words, blocks)

    ops = TritonOps()
    for dtype in (bf16, f32):
        for width in (2560, 4096, 16384):
            x = torch.empty(4, width, dtype=dtype)
            ops.add_rms_norm(x, None, x[0], 1e-5)
            ops.add_rms_norm(x, x, x[0], 1e-5)
            ops.silu_mul(x)
            ops.gelu_tanh_mul(x)
        ops.rotate_(torch.empty(4, 40, 128, dtype=dtype)[:, :36], torch.empty(4, 1, 64, dtype=torch.complex64))

    for vocab in (128256, 151937):
        scores, best = torch.empty(4, vocab), torch.empty(4)
        filters = Filters(best, blocks, best.double(), best, best > 0, blocks, True)
        triton_sampling.race(scores, best, triton_sampling.cutoff(scores, best, filters), filters)

    if len(sys.argv) > 2:
        for name, binary in binaries:
            (Path(sys.argv[2]) / f"{name}.cubin").write_bytes(binary)
    print(json.dumps(shared))


main()
