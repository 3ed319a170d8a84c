"""Where the time of a decode step on the CPU goes: matrices, attention, the operations between them, sampling, and the rest (Python, batch
tensors). A recorded step is one call into native code, so there matrices, attention and what is between them are one part.

    python benchmarks/step_profile.py [--json FILE] [--picture FILE]

Marks (`record_function`) around those parts are read by torch's profiler; the arms take turns. A mark costs about a microsecond, and a step
has one or two hundred of them.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from machine import describe
from torch.profiler import ProfilerActivity, profile, record_function

from baton.engine import runner as runner_module
from baton.engine.attention import PagedAttention
from baton.engine.build import Options, build
from baton.engine.cpu.recording import Recording
from baton.engine.engine import Engine
from baton.engine.linear import Linear
from baton.engine.ops import Ops
from baton.engine.runner import ModelRunner
from baton.engine.sampling import SamplingParams
from baton.engine.scheduler import Limits
from baton.engine.sequence import Sequence
from baton.models.make_small import make

SHAPE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "vocab": 4096, "context": 2048}
ARMS: dict[str, dict[str, Any]] = {
    "plain torch": {"compiled": False},
    "compiled, call by call": {},
    "compiled": {},
    "compiled, bfloat16": {"dtype": "bfloat16"},
    "compiled, int8": {"weight_dtype": "int8"},
    "compiled, int4": {"weight_dtype": "int4"},
}
CALL_BY_CALL = "compiled, call by call"  # not recorded
BATCHES, CONTEXT, STEPS, ROUNDS = (1, 8), 512, 40, 5
PARTS = {
    "matrices": "#0072B2",
    "attention": "#E69F00",
    "between": "#009E73",
    "recorded": "#56B4E9",
    "sampling": "#CC79A7",
    "rest": "#999999",
}


def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*arguments, **options)

    return call


def mark_parts() -> None:
    Linear.__call__ = marked("matrices", Linear.__call__)  # type: ignore[method-assign]
    Recording.__call__ = marked("recorded", Recording.__call__)  # type: ignore[method-assign]
    PagedAttention.__call__ = marked("attention", PagedAttention.__call__)  # type: ignore[method-assign]
    runner_module.sample = marked("sampling", runner_module.sample)  # type: ignore[attr-defined]
    for kind in (Ops, *Ops.__subclasses__()):
        for name in ("add_rms_norm", "silu_mul", "gelu_tanh_mul", "rotate_", "embed", "rotation", "norm_heads_", "logits"):
            if name in vars(kind):
                setattr(kind, name, marked("between", vars(kind)[name]))


def decoding(engine: Engine, batch: int) -> None:
    for i in range(batch):
        prompt = [(17 * i + 31 * k) % 4000 + 10 for k in range(CONTEXT)]
        params = SamplingParams(max_tokens=1400, temperature=0.0, ignore_eos=True)
        engine.add(Sequence(f"{batch}-{i}-{time.perf_counter_ns()}", prompt, CONTEXT, params, b""))
    while any(seq.computed < CONTEXT for seq in engine.sequences.values()):
        engine.step()
    engine.step()


def measure(engine: Engine, batch: int) -> dict[str, float]:
    """part → ms per step."""
    decoding(engine, batch)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        whole = time.perf_counter() - began
    for name in list(engine.sequences):
        engine.abort(name)
    spent: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        if event.key in PARTS:
            spent[event.key] += event.cpu_time_total / 1e3 / STEPS
    spent["rest"] = whole * 1e3 / STEPS - sum(spent.values())
    return dict(spent)


def draw(found: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    figure, panes = plt.subplots(1, len(BATCHES), figsize=(11, 3.4), sharey=True)
    for axes, batch in zip(panes, BATCHES, strict=True):
        left = [0.0] * len(found)
        for part, colour in PARTS.items():
            widths = [found[arm][batch].get(part, 0.0) for arm in found]
            axes.barh(list(found), widths, left=left, color=colour, label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for i, end in enumerate(left):
            axes.text(end, i, f" {end:.2f}", va="center")
        axes.set(title=f"batch {batch}", xlabel="ms a decode step", xlim=(0, 1.15 * max(left)))
    panes[0].invert_yaxis()  # of both panes, which share it
    panes[0].legend(loc="upper center", bbox_to_anchor=(1.0, -0.2), ncols=len(PARTS), frameon=False)
    figure.suptitle(f"A decode step, 30 M parameters, {CONTEXT} tokens of context, {torch.get_num_threads()} cores", y=1.04)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    limits = Limits(max_num_seqs=32, max_num_batched_tokens=2048)
    with tempfile.TemporaryDirectory() as folder:
        make(model := Path(folder) / "model", **SHAPE)
        same: dict[str, Any] = {"threads": options.threads, "kv_memory_bytes": 512 << 20, "prefix_caching": False, "limits": limits}
        engines = {arm: build(Options(model, **same, **more)).engine for arm, more in ARMS.items()}
    runner = engines[CALL_BY_CALL].runner
    assert isinstance(runner, ModelRunner)
    runner._steps = None
    mark_parts()
    samples: dict[str, dict[int, list[dict[str, float]]]] = {arm: {batch: [] for batch in BATCHES} for arm in ARMS}
    for round_ in range(ROUNDS + 1):
        for batch in BATCHES:
            for arm in list(ARMS)[:: 1 if round_ % 2 else -1]:
                sample = measure(engines[arm], batch)
                if round_:  # the first is a warm-up
                    samples[arm][batch].append(sample)
    print(describe())
    found: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in ARMS}
    for batch in BATCHES:
        print(f"\nbatch {batch}, {CONTEXT} tokens of context; ms a step, medians of {ROUNDS} rounds of {STEPS} steps")
        for arm in ARMS:
            told = samples[arm][batch]
            parts = found[arm][batch] = {part: statistics.median(one.get(part, 0.0) for one in told) for part in PARTS}
            wholes = [sum(one.values()) for one in told]
            cells = "  ".join(f"{part} {parts[part]:6.2f}" for part in PARTS)
            print(f"  {arm:20} {statistics.median(wholes):6.2f} ({min(wholes):.2f} … {max(wholes):.2f})  {cells}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": describe(), "ms": found}, indent=1))
    if options.picture:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
