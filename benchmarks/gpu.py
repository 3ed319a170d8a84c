"""The engine on one CUDA device: checked, then timed, as shares of what the device achieved in the same run (sections G1-G14).

    python benchmarks/gpu.py OUT [--only g2,g3] [--backend auto] [--budget 420] [--cpu-smoke]

Full numbers go to OUT/gpu.json after each section, with the cost table of steps (seconds by batch, context and chunk); a short table is
printed last. Needs torch, transformers, triton and safetensors, and under eight minutes: a section that fails, or that no time is left
for, says so, and the others run. G12 starts whole clusters, with what scripts/gpu_wheels.py collects. A device whose memory cannot hold the
shapes of 8 B gets those of 0.6 B, and cells whose KV it cannot hold are left out by name. Without a CUDA device it exits with status 2;
`--cpu-smoke` walks through the same code with toy shapes on the CPU.

Weights are random, which does not affect speed. Correctness (G1) is measured against `transformers` on the same weights.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from machine import describe
from quick_interpreter import quicken
from shapes import LLAMA_8B, QWEN3_06B, TINY
from torch import Tensor

from baton.engine.choice import choose_ops, load_runner
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.choice import BACKENDS, BackendFacts, why_not
from baton.engine.gpu.inputs import Capacity, Seat
from baton.engine.gpu.overlap import UNKNOWN, OverlapEngine
from baton.engine.gpu.runner import GpuRunner
from baton.engine.gpu.sampler import Sampler, pick_plainly
from baton.engine.gpu.staging import Staging
from baton.engine.gpu.triton_blocks import digest, gather, scatter, words_of
from baton.engine.gpu.triton_sampling import pick
from baton.engine.model.checkpoint import ModelConfig, expected_tensors
from baton.engine.model.config_json import read_config
from baton.engine.model.quantised.matrix import Matrix
from baton.engine.model.transformer import Transformer

SMOKE = "--cpu-smoke" in sys.argv
RESERVE = 10 << 30  # bytes for activations, graphs and libraries
LEAST_TOKENS = 40_000  # of KV, with which a model is worth measuring
SPARE_BLOCKS = 256
CLUSTERS_S = 120.0  # how long two clusters may need to start
COMPILE_S = 90.0  # how long `transformers` may need to compile for one batch size
SLEEP_CYCLES = 30_000_000  # at 2 GHz 15 ms, longer than the host needs to submit what is timed
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, on a device or in a walk through the code."""

    model: dict[str, Any]  # config.json of G2-G9
    small: dict[str, Any]  # config.json of G1 and G11
    copy_bytes: int
    matmul: int
    contexts: tuple[int, ...]
    batches: tuple[tuple[int, int], ...]  # (sequences, context)
    prefills: tuple[int, ...]
    chunks: tuple[int, ...]
    interference: tuple[int, int, int, int]  # decodes, their context, prompt tokens, steps between two prompts
    steps: int
    handoffs: tuple[int, ...]  # tokens
    sampled: tuple[int, int]  # rows, vocabulary
    generate: tuple[tuple[int, int, int], ...]  # batch, prompt, output


H200 = Sizes(
    LLAMA_8B, QWEN3_06B, 2 << 30, 8192, (1024, 8192, 32768),
    ((8, 1024), (8, 4096), (32, 1024), (32, 4096), (128, 1024), (128, 4096), (256, 1024), (256, 2048)),
    (512, 2048, 8192, 32768), (512, 2048), (32, 1024, 8192, 20), 30, (2048, 8192, 32768), (256, 128256),
    ((1, 512, 128), (8, 512, 128), (32, 512, 128)),
)  # fmt: skip
WALK = Sizes(
    TINY, {**TINY, "dtype": "float32"}, 1 << 20, 64, (20,), ((2, 20),), (24,), (16,), (2, 20, 24, 2), 2, (32,), (2, 96), ((2, 8, 3),),
)  # fmt: skip


@dataclass(slots=True)
class Report:
    sections: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str, str]] = field(default_factory=list)  # what, measured, share of the ceiling, aim, verdict
    costs: list[dict[str, float]] = field(default_factory=list)
    write: Callable[[], None] = lambda: None  # of what has been found so far

    def keep(self, section: str, found: dict[str, Any]) -> None:
        """Of a section that has not ended."""
        self.sections[section] = found
        self.write()

    def row(self, what: str, measured: str, share: float | None = None, aim: float | None = None, most: bool = False) -> None:
        """`aim`: the least that the share should be, or with `most` the most."""
        ok = share is not None and aim is not None and (share <= aim if most else share >= aim)
        verdict = "" if aim is None or share is None or SMOKE else "yes" if ok else "NO"
        shown = "" if share is None else f"{share:.0%}" if share < 10 else f"{share:.1f}x"
        self.rows.append((what, measured, shown, "" if aim is None else f"{'<=' if most else '>='} {aim:.0%}", verdict))


class Machine:
    """The device, its clock, and its limits."""

    def __init__(self, device: torch.device, sizes: Sizes, backend: str) -> None:
        self.device, self.sizes, self.backend = device, sizes, backend
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.copy = self.matmul = self.to_device = self.to_host = 0.0  # bytes/s read + written, FLOP/s, bytes/s, bytes/s

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int = 7, warm: int = 2, ahead: bool = False) -> float:
        """Median time of one call, by the device's own clock if it has one.

        `ahead`: the device is kept busy until the host has submitted everything, so that only the device's time counts. `work` must not
        wait.
        """
        if SMOKE:
            repeats, warm = 1, 0
        times: list[float] = []
        for i in range(warm + repeats):
            if self.cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if ahead:
                    torch.cuda._sleep(SLEEP_CYCLES)
                begin.record()
                work()
                end.record()
                end.synchronize()
                took = begin.elapsed_time(end) / 1000
            else:
                began = time.perf_counter()
                work()
                took = time.perf_counter() - began
            if i >= warm:
                times.append(took)
        return statistics.median(times)


def ceilings(machine: Machine, report: Report) -> dict[str, float]:
    size, n = machine.sizes.copy_bytes, machine.sizes.matmul
    a = torch.empty(size, dtype=torch.uint8, device=machine.device)
    b, host = torch.empty_like(a), torch.empty(size // 4, dtype=torch.uint8, pin_memory=machine.cuda)
    machine.copy = 2 * size / machine.seconds(lambda: b.copy_(a))
    machine.to_device = len(host) / machine.seconds(lambda: a[: len(host)].copy_(host, non_blocking=True))
    machine.to_host = len(host) / machine.seconds(lambda: host.copy_(a[: len(host)], non_blocking=True))
    x, y = (torch.randn(n, n, device=machine.device).to(machine.dtype) for _ in range(2))
    machine.matmul = 2 * n**3 / machine.seconds(lambda: x @ y)
    report.row("device copy, read + write", f"{machine.copy / 1e12:.2f} TB/s")
    report.row(f"matmul {n}^3, {machine.dtype}", f"{machine.matmul / 1e12:.0f} TFLOP/s")
    report.row("pinned copy, to the device / to the host", f"{machine.to_device / 1e9:.1f} / {machine.to_host / 1e9:.1f} GB/s")
    return {"copy": machine.copy, "matmul": machine.matmul, "to_device": machine.to_device, "to_host": machine.to_host}


# Models and sequences


def config_of(raw: dict[str, Any]) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        return read_config(Path(folder))


def random_runner(
    machine: Machine, raw: dict[str, Any], capacity: Capacity, blocks: int, graph_sizes: Iterable[int], **how: Any
) -> GpuRunner:
    """A model with random weights, made without a file, and a pool filled with noise. `read`: gives a matrix in place of a random one."""
    config = config_of(raw)
    shapes = expected_tensors(config)

    other: Callable[[str, tuple[int, ...]], Matrix | None] | None = how.pop("read", None)

    def read(name: str) -> Matrix:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name])
        if other is not None and (matrix := other(name, shapes[name])) is not None:
            return matrix
        return torch.empty(shapes[name], dtype=machine.dtype, device=machine.device).normal_(std=0.02)

    model = Transformer(config, read, machine.dtype, machine.device, choose_ops(machine.device, machine.dtype, True))
    name = str(machine.dtype).removeprefix("torch.")
    layout = KvLayout("random", name, how.pop("block_size", BLOCK), config.layers, config.kv_heads, config.head_dim)
    runner = GpuRunner(model, layout, machine.device)
    attach(machine, runner, blocks, capacity, tuple(graph_sizes), **how)
    runner.blocks.normal_()
    return runner


def attach(machine: Machine, runner: GpuRunner, blocks: int, capacity: Capacity, graph_sizes: tuple[int, ...], backend: str = "") -> None:
    runner.attach(KvPool(runner.layout, blocks), capacity=capacity, backend=backend or machine.backend, graph_sizes=graph_sizes)


def sequences(runner: GpuRunner, count: int, context: int, room: int, first_block: int = 0, **params: Any) -> list[Sequence]:
    """Sequences as if all of their `context` tokens but the last were computed, with blocks for `room` more."""
    width = -(-(context + room) // runner.layout.block_size)
    order = np.random.default_rng(0).permutation(count * width) + first_block
    how = SamplingParams(**{"max_tokens": 1 << 20, "temperature": 0.0, "ignore_eos": True, **params})
    tables = order.reshape(count, width).tolist()
    return [Sequence(str(i), [1] * context, context, how, b"", computed=context - 1, blocks=tables[i]) for i in range(count)]


def steps(runner: GpuRunner, seqs: list[Sequence], count: int) -> Iterator[float]:
    """Decode steps of all sequences, one in flight, as in `OverlapEngine`. Yields the seconds from one result to the next."""
    before, last = None, 0.0
    for _ in range(count + 1):
        pending = runner.submit([Chunk(seq, 1) for seq in seqs])
        if before is not None:
            before.result()
            now = time.perf_counter()
            if last:
                yield now - last
            last = now
        before = pending
        for seq in seqs:
            seq.tokens[-1] = 1 if seq.tokens[-1] == UNKNOWN else seq.tokens[-1]
            seq.tokens.append(UNKNOWN)
            seq.computed += 1
    if before is not None:
        before.result()


def weight_bytes(runner: GpuRunner) -> int:
    """Bytes that every decode step reads: all matrices, and the embedding only if it is also the head."""
    config = runner.model.config
    shapes = expected_tensors(config)
    numbers = sum(int(np.prod(shape)) for name, shape in shapes.items() if config.tied or "embed_tokens" not in name)
    return numbers * runner.blocks.element_size()


def kv_bytes(runner: GpuRunner) -> int:
    """KV bytes of one token."""
    return runner.layout.block_bytes // runner.layout.block_size


def flops(runner: GpuRunner, start: int, n: int) -> float:
    """FLOPs of n prompt tokens after `start` others: two per weight and token, four per query, visible key and head dimension."""
    c = runner.model.config
    matrices = sum(
        int(np.prod(s)) for name, s in expected_tensors(c).items() if len(s) == 2 and "embed" not in name and "lm_head" not in name
    )
    return 2.0 * matrices * n + 4.0 * c.layers * c.heads * c.head_dim * (n * start + n * (n + 1) / 2)


# Sections


def possible(machine: Machine, head_dim: int) -> list[str]:
    facts = BackendFacts(machine.device.type, machine.dtype, BLOCK, head_dim, 2)
    return [backend for backend in BACKENDS if why_not(backend, facts) is None]


def save_small(machine: Machine, folder: Path) -> None:
    """Has `transformers` make and write the model of G1 and G11."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = machine.sizes.small
    (folder / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(machine.dtype)
    model.save_pretrained(folder)


def reload(folder: Path, machine: Machine, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    loaded: torch.nn.Module = model.to(machine.device).eval()
    return loaded


def small_runner(machine: Machine, folder: Path, batch: int, tokens: int, longest: int, **how: Any) -> GpuRunner:
    name = str(machine.dtype).removeprefix("torch.")
    runner = load_runner(GpuRunner, folder, dtype=name, block_size=BLOCK, device=str(machine.device))
    assert isinstance(runner, GpuRunner)
    sizes = (batch,) if batch < 4 else (1, batch)
    attach(machine, runner, 2 * batch * -(-longest // BLOCK), Capacity(batch, tokens, longest), sizes, **how)
    return runner


def g1(machine: Machine, report: Report) -> dict[str, Any]:
    """Logits of a batch of mixed lengths, prefilled in chunks and then decoded, compared with float32; also with the blocks permuted."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        save_small(machine, folder)
        rng = np.random.default_rng(1)
        longest = 40 if SMOKE else 900
        prompts = [rng.integers(5, machine.sizes.small["vocab_size"], n).tolist() for n in (1, 7, longest // 3, longest - 9, longest)]
        exact, theirs = reload(folder, machine, torch.float32), reload(folder, machine, machine.dtype)
        reference = [exact(torch.tensor([p], device=machine.device)).logits[0].float() for p in prompts]
        error = [theirs(torch.tensor([p], device=machine.device)).logits[0].float() - r for p, r in zip(prompts, reference, strict=True)]
        del exact, theirs
        picked = [r[[-3, -2, -1] if len(r) > 2 else [-1]] for r in reference]
        floor = max(1e-6, rms(torch.cat([e[-len(p) :] for e, p in zip(error, picked, strict=True)])))
        for backend in possible(machine, machine.sizes.small["head_dim"]):
            runner = small_runner(machine, folder, 8, 512, longest + 4, backend=backend)
            ours = [mixed_logits(runner, prompts, seed) for seed in (0, 1)]
            worst = [rms(torch.cat(a) - torch.cat(picked)) / floor for a in ours]
            found[backend] = {"error over transformers'": worst}
            report.row(
                f"G1 logits, {backend}: error over transformers' own", f"{worst[0]:.2f} / {worst[1]:.2f}", max(worst), 1.5, most=True
            )
            del runner
    return found


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def mixed_logits(runner: GpuRunner, prompts: list[list[int]], seed: int) -> list[Tensor]:
    """Logits at the last three tokens of each prompt: the rest is prefilled in chunks, those are decoded, all in one batch."""
    width = -(-max(map(len, prompts)) // runner.layout.block_size)
    order = np.random.default_rng(seed).permutation(len(prompts) * width).reshape(len(prompts), width).tolist()
    params = SamplingParams(max_tokens=9)
    seqs = [Sequence(str(i), p[: max(1, len(p) - 2)], 1, params, b"", blocks=order[i]) for i, p in enumerate(prompts)]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while any(len(found) < min(3, len(p)) and (len(p) > 2 or not found) for found, p in zip(logits, prompts, strict=True)):
        budget, batch = 400, []
        for seq in seqs:
            if (n := min(seq.pending, budget)) > 0:
                batch.append(Chunk(seq, n))
                budget -= n
        rows = iter(runner.run_logits(batch))
        for chunk in batch:
            seq, i = chunk.seq, int(chunk.seq.id)
            if chunk.samples:
                logits[i].append(next(rows).clone())
            seq.computed += chunk.n
            if seq.pending == 0 and len(seq.tokens) < len(prompts[i]):
                seq.tokens.append(prompts[i][len(seq.tokens)])
    return [torch.stack(found) for found in logits]


def decode_cell(machine: Machine, report: Report, runner: GpuRunner, batch: int, context: int) -> dict[str, float]:
    count = machine.sizes.steps
    seqs = sequences(runner, batch, context, 3 * count + 8)
    list(steps(runner, seqs, 3))
    walls = sorted(steps(runner, seqs, count))
    wall = statistics.median(walls)
    device = device_step(machine, runner, sequences(runner, batch, context, 16))
    floor = (weight_bytes(runner) + batch * context * kv_bytes(runner)) / machine.copy
    report.costs.append({"decodes": batch, "context": context, "prefill_tokens": 0, "seconds": wall})
    return {
        "seconds": wall,
        "p99": walls[int(0.99 * (len(walls) - 1))],
        "device seconds": device,
        "floor seconds": floor,
        "share": floor / wall,
    }


def device_step(machine: Machine, runner: GpuRunner, seqs: list[Sequence]) -> float:
    """A step without the host's time: the same step repeatedly, queued behind work that lasts longer than its preparation."""
    batch = [Chunk(seq, 1) for seq in seqs]
    return machine.seconds(lambda: runner.submit(batch), ahead=True)


def profile(machine: Machine, runner: GpuRunner, out: Path) -> dict[str, Any]:
    """A few decode steps in torch's profiler."""
    seqs = sequences(runner, 1, machine.sizes.contexts[0], 40)
    list(steps(runner, seqs, 3))
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if machine.cuda else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        list(steps(runner, seqs, 5))
    by = "self_cuda_time_total" if machine.cuda else "self_cpu_time_total"
    (out / "decode.txt").write_text(profiler.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=90))
    return {"steps": 5}


def g2(machine: Machine, report: Report, runner: GpuRunner) -> dict[str, Any]:
    found: dict[str, Any] = {"backend": runner.attention.name, "graphs": runner.graphs.sizes}
    report.row("G2-G8 attention backend; captured batch sizes", f"{runner.attention.name}; {runner.graphs.sizes}")
    for context in machine.sizes.contexts:
        cell = found[str(context)] = decode_cell(machine, report, runner, 1, context)
        gap = cell["seconds"] - cell["device seconds"]
        report.row(
            f"G2 decode, batch 1, context {context}", f"{cell['seconds'] * 1e3:.2f} ms, host {gap * 1e3:+.2f} ms", cell["share"], 0.8
        )
    return found


def g3(machine: Machine, report: Report, runner: GpuRunner) -> dict[str, Any]:
    found = {}
    for batch, context in machine.sizes.batches:
        cell = found[f"{batch} x {context}"] = decode_cell(machine, report, runner, batch, context)
        report.row(
            f"G3 decode, batch {batch}, context {context}",
            f"{batch / cell['seconds']:.0f} tokens/s, {cell['seconds'] * 1e3:.2f} ms",
            cell["share"],
            0.7,
        )
    return found


def g4(machine: Machine, report: Report, runner: GpuRunner) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for n in machine.sizes.prefills:
        for chunk in (n, *(c for c in machine.sizes.chunks if c < n)):
            took = machine.seconds(partial(prefill, runner, n, chunk), repeats=3, warm=1)
            share = flops(runner, 0, n) / took / machine.matmul
            found[f"{n} in {chunk}"] = {"seconds": took, "tokens/s": n / took, "share": share}
            report.costs.append({"decodes": 0, "context": 0, "prefill_tokens": n, "chunk": chunk, "seconds": took})
            what = f"G4 prefill {n}" + (f" in chunks of {chunk}" if chunk < n else "")
            report.row(what, f"{n / took:.0f} tokens/s", share, 0.65 if n >= 2048 and chunk == n else None)
    return found


def prefill(runner: GpuRunner, n: int, chunk: int) -> None:
    seq = fresh(runner, n, 0)
    pending = None
    while seq.pending:
        pending = runner.submit([Chunk(seq, min(chunk, seq.pending))])
        seq.computed += min(chunk, seq.pending)
    if pending is not None:
        pending.result()


def fresh(runner: GpuRunner, n: int, first_block: int) -> Sequence:
    blocks = list(range(first_block, first_block + -(-n // runner.layout.block_size)))
    return Sequence("prompt", [1] * n, n, SamplingParams(max_tokens=1, temperature=0.0), b"", blocks=blocks)


def g5(machine: Machine, report: Report, runner: GpuRunner) -> dict[str, Any]:
    """Time between two tokens of decodes while prompts arrive, each in one step or in chunks, compared with the same decodes alone."""
    found: dict[str, Any] = {}
    decodes, context, prompt, every = machine.sizes.interference
    for label, chunk in (("alone", 0), ("whole prompts", prompt), *((f"chunks of {c}", c) for c in machine.sizes.chunks if c < prompt)):
        rounds = 2 if SMOKE else 6
        seqs = sequences(runner, decodes, context, rounds * every + 8)
        first_free = sum(len(seq.blocks) for seq in seqs)
        times, incoming = [], None
        for i in range(rounds * every):
            if chunk and (i % every == 0) and incoming is None:
                incoming = fresh(runner, prompt, first_free)
            batch = [Chunk(seq, 1) for seq in seqs]
            if incoming is not None:
                batch.append(Chunk(incoming, min(chunk, incoming.pending)))
            began = time.perf_counter()
            runner.submit(batch).result()
            times.append(time.perf_counter() - began)
            for taken in batch:
                taken.seq.computed += taken.n
                if taken.seq.pending == 0:
                    taken.seq.tokens.append(1)
            if incoming is not None and incoming.computed >= prompt:
                incoming = None
        times = sorted(times[1:])
        found[label] = {"p50": statistics.median(times), "p99": times[int(0.99 * (len(times) - 1))], "max": times[-1]}
        report.costs.append({"decodes": decodes, "context": context, "prefill_tokens": prompt, "chunk": chunk, "seconds": times[-1]})
        measured = f"P50 {found[label]['p50'] * 1e3:.1f}, P99 {found[label]['p99'] * 1e3:.1f} ms"
        report.row(f"G5 {decodes} decodes, prompts of {prompt}: {label}", measured)
    return found


def g6(machine: Machine, report: Report, runner: GpuRunner) -> dict[str, Any]:
    pool = words_of(runner.blocks)
    count = min(len(pool) - 1, max(2, machine.sizes.copy_bytes // (pool.shape[1] * 8)))
    blocks = torch.randperm(len(pool) - 1)[:count].to(machine.device)
    out = torch.empty(count, pool.shape[1], dtype=torch.int64, device=machine.device)
    size, found = out.numel() * 8, {}
    for name, work, moved in (
        ("gather", lambda: gather(pool, blocks, out), 2 * size),
        ("scatter", lambda: scatter(pool, blocks, out), 2 * size),
        ("digest", lambda: digest(pool, blocks), size),
    ):
        took = machine.seconds(work, ahead=True)
        found[name] = {"bytes/s": size / took, "share": moved / took / machine.copy}
        report.row(f"G6 {name} of blocks of {pool.shape[1] * 8 >> 10} KiB", f"{size / took / 1e9:.0f} GB/s", found[name]["share"], 0.5)
    return found


def g7(machine: Machine, report: Report, runner: GpuRunner) -> dict[str, Any]:
    """Blocks from this process's pool to another process, which reads them in place (CUDA IPC) and writes them into its own pool."""
    words = runner.layout.block_bytes // 8
    most = max(machine.sizes.handoffs) // runner.layout.block_size
    pool = torch.randint(0, 1 << 40, (most, words), dtype=torch.int64, device=machine.device)
    if not machine.cuda:
        pool.share_memory_()
    machine.wait()
    context = mp.get_context("spawn")
    asked, told = context.Queue(), context.Queue()
    child = context.Process(target=reader, args=(machine.device, asked, told), daemon=True)
    child.start()
    found: dict[str, Any] = {}
    try:
        asked.put(pool)
        for tokens in machine.sizes.handoffs:
            count = max(1, tokens // runner.layout.block_size)
            asked.put(count)
            took, same = told.get(timeout=90)
            moved = 2 * count * words * 8
            found[str(tokens)] = {"seconds": took, "share": moved / took / machine.copy, "same": same}
            report.row(f"G7 handoff of {tokens} tokens between processes", f"{took * 1e3:.2f} ms", found[str(tokens)]["share"], 0.5)
            if not same:
                report.row(f"G7 handoff of {tokens} tokens", "WRONG BYTES")
    finally:
        asked.put(None)
        child.join(timeout=20)
        if child.is_alive():
            child.terminate()
    return found


def reader(device: torch.device, asked: Any, told: Any) -> None:
    """The other process of G7."""
    theirs = asked.get()
    machine = Machine(device, WALK if SMOKE else H200, "auto")
    mine = torch.zeros_like(theirs)
    while (count := asked.get()) is not None:
        blocks = torch.randperm(len(theirs))[:count].to(device)

        def put(count: int = count, blocks: Tensor = blocks) -> None:
            scatter(mine, blocks, theirs[:count])

        took = machine.seconds(put, repeats=5)
        told.put((took, torch.equal(mine[blocks], theirs[:count])))


def g8(machine: Machine, report: Report, runner: GpuRunner) -> dict[str, Any]:
    slots = max(2, min(len(runner.blocks) - 1, machine.sizes.copy_bytes // 4 // runner.layout.block_bytes))
    staging = Staging(runner.blocks, slots)
    blocks = np.random.default_rng(0).permutation(len(runner.blocks) - 1)[:slots]
    size, found = slots * runner.layout.block_bytes, {}
    for name, work, ceiling in (
        ("to the host", staging.begin_out, machine.to_host),
        ("to the device", staging.begin_in, machine.to_device),
    ):

        def move(work: Callable[[np.ndarray], object] = work) -> None:
            work(blocks)
            staging.wait()

        took = machine.seconds(move)
        found[name] = {"bytes/s": size / took, "share": size / took / ceiling}
        report.row(f"G8 {slots} blocks {name}", f"{size / took / 1e9:.1f} GB/s", found[name]["share"], 0.85)
    return found


def g9(machine: Machine, report: Report) -> dict[str, Any]:
    rows, vocab = machine.sizes.sampled
    logits = torch.randn(rows, vocab, device=machine.device) * 4
    one_read, found = logits.numel() * 4 / machine.copy, {}
    step = next((cost["seconds"] for cost in reversed(report.costs) if cost["decodes"] == rows), None)
    filters = SamplingParams(max_tokens=9, temperature=0.8, top_k=50, top_p=0.9, min_p=0.05)
    for label, params in (
        ("all filters and penalties", replace(filters, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2)),
        ("all filters", filters),
        ("top-p", replace(filters, top_k=0, min_p=0.0)),
        ("no filter", SamplingParams(max_tokens=9)),
        ("greedy", SamplingParams(max_tokens=9, temperature=0.0)),
    ):
        kernels, plain = (Sampler(frozenset([2]), rows, machine.device, how) for how in (pick, pick_plainly))
        seqs = [Sequence(str(i), [3, 5, 7], 2, replace(params, seed=i), b"") for i in range(rows)]
        seated = [Seat(i) for i in range(rows)]
        same = kernels.draw(logits, seqs, seated).tokens == plain.draw(logits, seqs, seated).tokens

        def draw(kernels: Sampler = kernels, seqs: list[Sequence] = seqs, seated: list[Seat] = seated) -> None:
            for seq in seqs:
                seq.tokens.append(11)
            kernels.draw(logits, seqs, seated)

        took = machine.seconds(draw, ahead=True)
        share = None if step is None else took / step
        found[label] = {
            "seconds": took,
            "reads of the logits": took / one_read,
            "share": share,
            "as plain torch": float(same.double().mean()),
        }
        report.row(f"G9 sample {rows} x {vocab}, {label}; of a decode step", f"{took * 1e3:.2f} ms", share, 0.05, most=True)
        if not same.all():
            report.row(f"G9 {label}: same tokens as plain torch", f"{float(same.double().mean()):.1%}")
    return found


def g10(machine: Machine, report: Report) -> dict[str, Any]:
    """Tokens/s with guesses, as a multiple of those without."""
    import gpu_speculation  # alone needs what ships

    gc.collect()
    if machine.cuda:
        torch.cuda.empty_cache()
    return gpu_speculation.measure(machine, config_of, report.row, SMOKE)


def g11(machine: Machine, report: Report, left: Callable[[], float]) -> dict[str, Any]:
    """Prompt and output of one batch, greedy, compared with `transformers` (as it is, and compiled with a static cache) and a plain torch
    loop."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_small(machine, folder)
        theirs = reload(folder, machine, machine.dtype)
        for batch, prompt, output in machine.sizes.generate:
            ids = torch.randint(5, machine.sizes.small["vocab_size"], (batch, prompt), device=machine.device)
            runner = small_runner(machine, folder, batch, max(2048, batch), prompt + output + 1)
            loops: dict[str, Callable[[], object]] = {
                "ours": partial(ours_generate, runner, ids, output),
                "transformers": partial(generate, theirs, ids, output),
                "torch loop": partial(torch_loop, theirs, ids, output),
            }
            if machine.cuda and left() > COMPILE_S:
                loops["transformers, compiled"] = partial(generate, theirs, ids, output, cache_implementation="static")
            cell = found[str(batch)] = {
                who: batch * output / machine.seconds(loop, repeats=3, warm=2 if "compiled" in who else 1) for who, loop in loops.items()
            }
            best = max(speed for who, speed in cell.items() if who != "ours")
            others = ", ".join(f"{who} {speed:.0f}" for who, speed in cell.items() if who != "ours")
            report.row(
                f"G11 batch {batch}, {prompt} + {output} tokens ({others})", f"{cell['ours']:.0f} tokens/s", cell["ours"] / best, 1.0
            )
            del runner
    return found


def g12(machine: Machine, report: Report, left: Callable[[], float]) -> dict[str, Any]:
    """Prefill and decode as two processes on this device, KV by CUDA IPC, compared with one process; whole clusters."""
    import gpu_pair  # alone needs what a server needs

    if machine.cuda and left() < CLUSTERS_S:
        report.row("G12", "left out: no time")
        return {}
    gc.collect()
    if machine.cuda:
        torch.cuda.empty_cache()
    found = gpu_pair.measure(machine.device.type, gpu_pair.WALK if SMOKE else gpu_pair.DEVICE)
    for what, said in gpu_pair.rows(found):
        report.row(what, said)
    return found


def g13(machine: Machine, report: Report, runner: GpuRunner) -> dict[str, Any]:
    """Host memory under the pool."""
    import gpu_tiers

    return gpu_tiers.measure(machine, report, runner)


def g14(machine: Machine, report: Report) -> dict[str, Any]:
    """Weights as a checkpoint has them."""
    import gpu_weights

    return gpu_weights.measure(machine, report)


def ours_generate(runner: GpuRunner, ids: Tensor, output: int) -> None:
    batch, prompt = ids.shape
    engine = OverlapEngine(runner, Limits(batch, max(2048, batch)), prompt + output + 1, prefix_caching=False)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    for i, tokens in enumerate(ids.tolist()):
        engine.add(Sequence(str(i), tokens, prompt, params, b""))
    while not engine.idle:
        engine.step()


def generate(model: Any, ids: Tensor, output: int, **how: Any) -> None:
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, min_new_tokens=output, do_sample=False,
                       pad_token_id=0, eos_token_id=None, **how)  # fmt: skip


@torch.inference_mode()
def torch_loop(model: torch.nn.Module, ids: Tensor, output: int) -> None:
    """The simplest loop: the model, its cache, argmax."""
    cache = None
    for _ in range(output):
        answer = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = answer.past_key_values, answer.logits[:, -1].argmax(dim=-1, keepdim=True)
    ids.cpu()


# The run


class Run:
    """Runs sections in order, each on its own: a failure of one does not affect the others. What has been found is written after each."""

    def __init__(self, only: set[str], report: Report, budget_s: float, file: Path, where: str) -> None:
        self.only, self.report, self.began = only, report, time.perf_counter()
        self._budget_s, self._file, self._where = budget_s, file, where
        report.write = self.write

    def left(self) -> float:
        """Seconds during which a section may still begin."""
        return self._budget_s - (time.perf_counter() - self.began)

    def section(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        if self.only and name not in self.only and name not in ("ceilings", "load", "profile"):
            return
        began = time.perf_counter()
        if self.left() < 0:
            self.report.row(name.upper(), "left out: no time")
            return
        try:
            self.report.sections[name] = work()
        except Exception as error:
            traceback.print_exc()
            self.report.sections[name] = {"failed": traceback.format_exc()}
            self.report.row(name.upper(), f"FAILED: {type(error).__name__}: {str(error).splitlines()[0][:70] if str(error) else ''}")
        print(f"{name}: {time.perf_counter() - began:.1f} s, {time.perf_counter() - self.began:.0f} s since the start", flush=True)
        self.write()

    def write(self) -> None:
        found = self.report
        whole = {"where": self._where, "seconds": time.perf_counter() - self.began, "sections": found.sections, "costs": found.costs}
        self._file.write_text(json.dumps({**whole, "table": found.rows}, indent=1))


def token_bytes(raw: dict[str, Any], element: int) -> int:
    """KV bytes of one token; `element`: bytes of a number."""
    config = config_of(raw)
    return 2 * config.layers * config.kv_heads * config.head_dim * element


def fitting(sizes: Sizes, memory: float, element: int = 2) -> tuple[Sizes, list[str]]:
    """The sizes that `memory` bytes of a device hold, and what was left out. `element`: bytes of a number. Raises MemoryError if even the
    small model does not fit."""
    out: list[str] = []
    for raw in (sizes.model, sizes.small):
        each = token_bytes(raw, element)
        weights = element * sum(int(np.prod(shape)) for shape in expected_tensors(config_of(raw)).values())
        tokens = int(memory - weights - RESERVE) // each
        if tokens >= LEAST_TOKENS or raw is sizes.small:
            break
        out.append(f"the model of {weights >> 30} GiB; the small one is measured instead")
    slack = 3 * sizes.steps + 2 * BLOCK + 8

    def room(what: str, count: int, tokens_each: int) -> bool:
        held = count * (tokens_each + slack) + SPARE_BLOCKS * BLOCK <= tokens
        if not held:
            out.append(f"{what}: {count * tokens_each * each / 2**30:.1f} GiB of KV")
        return held

    decodes, context, prompt, every = sizes.interference
    made = replace(
        sizes,
        model=raw,
        contexts=tuple(c for c in sizes.contexts if room(f"batch 1, context {c}", 1, c)),
        batches=tuple((n, c) for n, c in sizes.batches if room(f"batch {n}, context {c}", n, c)),
        prefills=tuple(n for n in sizes.prefills if room(f"prefill {n}", 1, n)),
        handoffs=tuple(n for n in sizes.handoffs if room(f"handoff of {n}", 2, n)),
    )
    while not (decodes + 1) * (max(context, prompt // decodes) + 6 * every + slack) + SPARE_BLOCKS * BLOCK <= tokens and decodes > 1:
        decodes //= 2
    if not (made.contexts and made.prefills):
        raise MemoryError(f"{memory / 2**30:.1f} GiB of device memory hold neither model with a prompt")
    return replace(made, interference=(decodes, context, prompt, every)), out


def big_runner(machine: Machine, report: Report) -> GpuRunner:
    """The model of G2 to G8, with only the batch sizes that are measured, and room for the largest cell. `machine.sizes` becomes what fits
    into the device's memory."""
    if machine.cuda:
        machine.sizes, left_out = fitting(machine.sizes, torch.cuda.mem_get_info()[0])
        for what in left_out:
            report.row("G2-G8 left out", what)
    sizes = machine.sizes
    slack = 3 * sizes.steps + 2 * BLOCK + 8
    decodes, context, prompt, every = sizes.interference
    cells = [(1, c) for c in sizes.contexts] + list(sizes.batches) + [(1, n) for n in sizes.prefills]
    most = max(batch * (c + slack) for batch, c in (*cells, (decodes + 1, max(context, prompt // decodes) + 6 * every)))
    longest = max(c for _, c in (*cells, (1, prompt))) + slack
    capacity = Capacity(max(*(batch for batch, _ in cells), decodes + 1), max(*sizes.prefills, prompt + decodes), longest)
    graphs = sorted({batch for batch, _ in cells} | {decodes})
    return random_runner(machine, sizes.model, capacity, -(-most // BLOCK) + SPARE_BLOCKS, graphs)


def describe_device(device: torch.device) -> str:
    if device.type != "cuda":
        return "no CUDA device"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split()
    name = torch.cuda.get_device_name(device)
    return f"{name}, driver {driver[0] if driver else '?'}, CUDA {torch.version.cuda}"


def show(report: Report) -> None:
    width = max(len(row[0]) for row in report.rows)
    wide = max(len(row[1]) for row in report.rows)
    print(f"\n{'':{width}}  {'measured':>{wide}}  {'of the ceiling':>14}  {'aim':>8}  reached")
    for what, measured, share, aim, verdict in report.rows:
        print(f"{what:{width}}  {measured:>{wide}}  {share:>14}  {aim:>8}  {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no section begins")
    parser.add_argument("--profile", action="store_true", help="also write OUT/decode.txt: what decode steps spend their time on")
    parser.add_argument("--cpu-smoke", action="store_true")
    options = parser.parse_args()
    if not SMOKE and not torch.cuda.is_available():
        print("gpu.py: no CUDA device here; --cpu-smoke walks through the code without one", file=sys.stderr)
        return 2
    if SMOKE and "TRITON_INTERPRET" not in os.environ:  # it must be set before the kernels are imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    if SMOKE:
        quicken()
    device = torch.device("cpu" if SMOKE else "cuda")
    machine, report = Machine(device, WALK if SMOKE else H200, options.backend), Report()
    where = f"{describe_device(device)}; {describe()}"
    print(where)
    only = {name for name in options.only.split(",") if name}
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(only, report, options.budget, options.out / "gpu.json", where)
    run.section("ceilings", lambda: ceilings(machine, report))
    run.section("g1", lambda: g1(machine, report))
    sections = {"g2": g2, "g3": g3, "g4": g4, "g5": g5, "g6": g6, "g7": g7, "g8": g8, "g13": g13}
    if not only or only & sections.keys():
        big: list[GpuRunner] = []

        def load() -> dict[str, Any]:
            big.append(big_runner(machine, report))
            return {"blocks": len(big[0].blocks), "graphs": big[0].graphs.sizes}

        def on_big(work: Callable[[GpuRunner], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
            def call() -> dict[str, Any]:
                if not big:
                    raise RuntimeError("there is no model: `load` failed")
                return work(big[0])

            return call

        run.section("load", load)
        if options.profile:
            run.section("profile", on_big(lambda runner: profile(machine, runner, options.out)))
        for name, work in sections.items():
            run.section(name, on_big(partial(work, machine, report)))
        big.clear()
    run.section("g9", lambda: g9(machine, report))
    run.section("g10", lambda: g10(machine, report))
    run.section("g11", lambda: g11(machine, report, run.left))
    run.section("g14", lambda: g14(machine, report))
    run.section("g12", lambda: g12(machine, report, run.left))
    run.write()
    show(report)
    if SMOKE:
        print("toy shapes on the CPU, kernels in an interpreter: no number above means anything")
    return 1 if any("failed" in section for section in report.sections.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
