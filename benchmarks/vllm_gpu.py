"""Everything about vLLM that only a GPU can show, in one go: `pip install ".[serve,vllm]"`, then

    python benchmarks/vllm_gpu.py [--out FOLDER] [--only STEP ...] [--shapes 0.6b 8b] [--model FOLDER] [--budget 540] [--cpu-smoke]

    speed-0.6b, speed-8b   vLLM alone, its own disaggregation, Baton over it (benchmarks/vllm_speed.py)
    suite       the behaviours that all engines pass, on the device (tests/engine/test_contract.py)
    ranks       tensor and pipeline parallel ranks, preemption (tests/engine/test_vllm.py); needs two GPUs
    cluster     handoffs and their faults (tests/system/test_vllm.py)
    invariant   the suite in vLLM's batch-invariant mode
    faults      what is lost, hung or wrong when parts die (benchmarks/vllm_faults.py)
    routing     the router over four workers (benchmarks/vllm_routing.py)
    divergence, divergence-invariant   outputs that are not those computed alone (benchmarks/vllm_divergence.py)

bfloat16, CUDA graphs and the engines' own defaults; a shape that two engines cannot hold in the memory found is left out by name. Each step
is a process of its own, ends with the budget at the latest, and stops no other. What each printed is in FOLDER, and after each step
FOLDER/vllm-gpu.json says how all of them ended. CUDA_VISIBLE_DEVICES names the GPUs that workers and servers get in turn.
None of this has run on a GPU yet. `--cpu-smoke` writes toy checkpoints of the shapes, and has every step's script say its arguments instead
of running it: no GPU and no vLLM are needed, and no number is measured.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe
from shapes import SHAPES, TINY, TOKENIZER_VOCAB, weight_bytes, write

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("-m", "pytest", "-q", "-k", "vllm")
ROOM = 6 << 30  # bytes beside the weights that an engine needs at least: KV, activations, graphs
ENGINES = 2  # of a stack, on one GPU


@dataclass(frozen=True, slots=True)
class Step:
    arguments: Sequence[str]  # of Python
    env: Mapping[str, str]


def steps(device: str, out: Path, models: Mapping[str, Path]) -> dict[str, Step]:
    """In the order of what matters if time runs out. `models`: name → checkpoint; the first serves the benchmarks that take one."""
    on = {"BATON_VLLM_DEVICE": device}
    made: dict[str, Step] = {}

    def benchmark(name: str, script: str, *more: str) -> None:
        command = (f"benchmarks/vllm_{script}.py", "--device", device, *more, "--json", str(out / f"{name}.json"))
        made[name] = Step(command, {})

    for name, model in models.items():
        benchmark(f"speed-{name}", "speed", "--model", str(model), "--repeats", "1", "--stacks", "a", "b", "c", "d")
    first = ("--model", str(next(iter(models.values())))) if models else ()
    for name, file in (("suite", "engine/test_contract"), ("cluster", "system/test_vllm"), ("ranks", "engine/test_vllm")):
        made[name] = Step((*TESTS, f"tests/{file}.py"), on)
    benchmark("divergence", "divergence", *first, "--dtypes", "bfloat16")
    benchmark("routing", "routing", *first, "--repeats", "1")
    benchmark("faults", "faults", *first)
    if device != "cpu":
        made["invariant"] = Step((*TESTS, "tests/engine/test_contract.py"), {**on, "BATON_VLLM_INVARIANT": "1"})
        benchmark("divergence-invariant", "divergence", *first, "--dtypes", "bfloat16", "--batch-invariant")
    return made


def fitting(names: Sequence[str], memory: int, gpus: int) -> tuple[list[str], dict[str, str]]:
    """The shapes of which the GPUs, of `memory` bytes each, hold the engines of a stack; and why others are left out."""
    each = -(-ENGINES // max(1, gpus))
    out = {}
    for name in names:
        needed = each * (weight_bytes(SHAPES[name]) + ROOM)
        if needed > memory:
            out[name] = f"{each} engines need {needed / 2**30:.0f} GiB, and there are {memory / 2**30:.0f}"
    return [name for name in names if name not in out], out


def run(step: Step, log: Path, within_s: float) -> int | str:
    with log.open("w") as file:
        begun = subprocess.Popen(
            [sys.executable, *step.arguments], cwd=ROOT, env={**os.environ, **step.env}, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return begun.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(begun.pid, signal.SIGKILL)
            begun.wait()
            return f"not done after {within_s:.0f} s"


def run_all(made: Mapping[str, Step], out: Path, budget_s: float, report: dict[str, Any]) -> bool:
    """Whether all succeeded. `report` is written after each."""
    began = time.monotonic()
    ended: dict[str, Any] = report.setdefault("steps", {})
    for name, step in made.items():
        at, left = time.monotonic(), budget_s - (time.monotonic() - began)
        code = run(step, out / f"{name}.log", left) if left > 0 else "left out: no time"
        ended[name] = {"ended": code, "seconds": round(time.monotonic() - at, 1)}
        (out / "vllm-gpu.json").write_text(json.dumps(report, indent=1))
        print(f"{name:20} {'ok' if code == 0 else f'failed ({code})'} in {ended[name]['seconds']:.0f} s: {out / f'{name}.log'}", flush=True)
    return all(each["ended"] == 0 for each in ended.values())


def device_memory() -> tuple[int, int]:
    """Bytes of the smallest GPU, and how many there are. Raises SystemExit without one."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("vllm_gpu.py: no CUDA device here; --cpu-smoke walks through without one")
    found = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(found), len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint for the benchmarks, instead of the shapes")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--out", type=Path, default=Path("vllm-gpu"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all steps")
    parser.add_argument("--cpu-smoke", action="store_true")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    smoke = options.cpu_smoke
    if not smoke and importlib.util.find_spec("vllm") is None:
        sys.exit('vllm is not installed here: pip install ".[serve,vllm]"')
    report: dict[str, Any] = {"machine": describe(), "smoke": smoke}
    print(report["machine"])
    models = {"given": options.model} if options.model else {}
    if not models:
        names, report["left out"] = (options.shapes, {}) if smoke or options.device == "cpu" else fitting(options.shapes, *device_memory())
        for name in names:
            models[name] = out / "models" / name
            write(
                {**SHAPES[name], **TINY, "vocab_size": TOKENIZER_VOCAB} if smoke else SHAPES[name],
                models[name],
                "cpu" if smoke else options.device,
            )
    made = {name: step for name, step in steps(options.device, out, models).items() if not options.only or name in options.only}
    if smoke:
        made = {name: Step((*step.arguments, "--help"), step.env) for name, step in made.items()}
    sys.exit(not run_all(made, out, options.budget, report))


if __name__ == "__main__":
    main()
