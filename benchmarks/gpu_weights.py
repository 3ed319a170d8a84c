"""Section G14 of `gpu.py`: weights that are computed as a checkpoint has them, beside bfloat16, with the shapes of the large model."""

import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu import Machine, Report, prefill, random_runner, sequences, steps
from torch import Tensor

from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.runner import GpuRunner
from baton.engine.gpu.triton_groups import GroupProduct
from baton.engine.model.quantised.matrix import Matrix, Quantised

BATCHES, CONTEXT = (1, 32), 1024
KINDS = ("as the model", "int4, groups of 128", "float8, blocks of 128")
AIM = 2.2  # of int4 at batch 1
PROMPT = 2048
PREFIXES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # what tools quantise


def stored(kind: str, shape: tuple[int, ...], device: torch.device) -> Quantised:
    """A matrix of random numbers."""
    outs, width = shape
    group = min(128, width)
    scales = torch.full((outs, -(-width // group)), 0.004, device=device)
    if kind.startswith("int4"):
        return Quantised(4, group, torch.randint(0, 16, shape, dtype=torch.uint8, device=device), scales.half())
    numbers = (torch.randn(shape, device=device, dtype=torch.bfloat16) * 5).to(torch.float8_e4m3fn).view(torch.uint8)
    return Quantised(8, group, numbers, scales, float8=True)


def changed(kind: str, device: torch.device) -> Callable[[str, tuple[int, ...]], Matrix | None]:
    """None: the tensor is as in the model."""

    def read(name: str, shape: tuple[int, ...]) -> Matrix | None:
        return stored(kind, shape, device) if any(f".{part}.weight" in name for part in PREFIXES) else None

    return read


def runner_of(machine: Machine, kind: str) -> GpuRunner:
    batch, context = (max(BATCHES), CONTEXT) if machine.cuda else (2, 20)
    longest = max(context + 200, PROMPT + 16) if machine.cuda else 64
    capacity = Capacity(batch, PROMPT if machine.cuda else 64, longest)
    blocks = batch * -(-longest // 16) + 8
    graphs = BATCHES if machine.cuda else (1, 2)
    read = None if kind == KINDS[0] else changed(kind, machine.device)
    return random_runner(machine, machine.sizes.model, capacity, blocks, graphs, read=read)


def errors(machine: Machine) -> dict[str, float]:
    """Of products of one matrix against float64, as shares of it; and that of the matrix dequantised to the model's type."""
    found = {}
    shape = (4096, 14336) if machine.cuda else (64, 256)
    for kind in KINDS[1:]:
        matrix = stored(kind, shape, machine.device)
        exact = matrix.dequantised().double()
        product, plain = GroupProduct(matrix, None, machine.device), exact.to(machine.dtype)
        for rows in (1, 32, 300):
            if not machine.cuda and rows == 300:
                continue
            x = torch.randn(rows, shape[1], device=machine.device).to(machine.dtype)
            expected = x.double() @ exact.t()
            size = expected.square().mean().sqrt()

            def error(y: Tensor, expected: Tensor = expected, size: Tensor = size) -> float:
                return float((y.double() - expected).square().mean().sqrt() / size)

            found[f"{kind}, {rows} rows"] = error(product(x))
            found[f"{kind}, {rows} rows, dequantised"] = error(x @ plain.t())
    return found


def measure(machine: Machine, report: Report) -> dict[str, Any]:
    found: dict[str, Any] = {"errors": errors(machine)}
    for name, error in found["errors"].items():
        if "dequantised" not in name:
            report.row(f"G14 {name}: error; dequantised", f"{error:.2e}; {found['errors'][name + ', dequantised']:.2e}")
    for kind in KINDS:
        runner = runner_of(machine, kind)
        cell = found[kind] = {"forms": dict(runner.model.forms)}
        for batch in BATCHES if machine.cuda else (1, 2):
            context, count = (CONTEXT, 60) if machine.cuda else (20, 2)
            seqs = sequences(runner, batch, context, count + 20)
            list(steps(runner, seqs, 5))
            cell[str(batch)] = seconds = statistics.median(steps(runner, seqs, count))
            faster = found[KINDS[0]][str(batch)] / seconds
            aim = AIM if kind == KINDS[1] and batch == 1 else None
            report.row(f"G14 decode, batch {batch}, {kind}; times as fast", f"{seconds * 1e3:.2f} ms", faster, aim)
        prompt = PROMPT if machine.cuda else 24
        cell["prefill"] = took = machine.seconds(partial(prefill, runner, prompt, prompt), repeats=3, warm=1)
        faster = found[KINDS[0]]["prefill"] / took
        report.row(f"G14 prefill {prompt}, {kind}; times as fast", f"{prompt / took:.0f} tokens/s", faster)
        del runner
        gc.collect()
        if machine.cuda:
            torch.cuda.empty_cache()
    return found
