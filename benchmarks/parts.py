"""Where the time of an engine's steps goes: marks (`record_function`) around the parts of a step, read by torch's profiler.

A mark costs about a microsecond, and a step has one or two hundred of them. A recorded step is one call into native code, so there
matrices, attention and what is between them are one part.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from peers.drivers import ceilings
from torch.profiler import ProfilerActivity, profile, record_function

from baton.engine import runner as runner_module
from baton.engine.core.engine import Engine
from baton.engine.cpu.recording import Recording
from baton.engine.model.attention import PagedAttention
from baton.engine.model.linear import Linear
from baton.engine.model.ops import Ops

SHAPE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "vocab": 4096, "context": 4096}  # 30 M parameters
ROUNDS = 5
Case = TypeVar("Case", bound=Hashable)
PARTS = {
    "matrices": "#0072B2",
    "attention": "#E69F00",
    "between": "#009E73",
    "recorded": "#56B4E9",
    "sampling": "#CC79A7",
    "rest": "#999999",  # Python, batch tensors
}
Spent = dict[str, float]  # part → ms a step


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


def spent(engine: Engine, steps: int) -> Spent:
    """By so many steps; aborts what the engine computes afterwards."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        whole = time.perf_counter() - began
    for name in list(engine.sequences):
        engine.abort(name)
    found: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        if event.key in PARTS:
            found[event.key] += event.cpu_time_total / 1e3 / steps
    found["rest"] = whole * 1e3 / steps - sum(found.values())
    return dict(found)


def arguments(text: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    return parser.parse_args()


def in_turns(
    cases: Sequence[Case], arms: Sequence[str], measure: Callable[[str, Case], Spent], threads: int
) -> tuple[dict[Case, dict[str, list[Spent]]], list[dict[str, float]]]:
    """ROUNDS samples of each arm in each case, after a warm-up; and what the machine reads (GB/s) and multiplies (GFLOP/s) at each round,
    as in `peers`."""
    samples: dict[Case, dict[str, list[Spent]]] = {case: {arm: [] for arm in arms} for case in cases}
    ceiling, found = ceilings.start({"threads": threads})[1], []
    for round_ in range(ROUNDS + 1):
        found.append(ceiling({})["found"])
        for case in cases:
            for arm in arms[:: 1 if round_ % 2 else -1]:
                sample = measure(arm, case)
                if round_:
                    samples[case][arm].append(sample)
    return samples, found


def draw(found: Mapping[str, Mapping[str, Spent]], title: str, of: str, file: Path) -> None:
    """`found[pane][arm]`: a bar for each arm, of its parts."""
    figure, panes = plt.subplots(1, len(found), figsize=(5.5 * len(found), 3.4), sharey=True)
    for axes, (pane, arms) in zip(panes, found.items(), strict=True):
        left = [0.0] * len(arms)
        for part, colour in PARTS.items():
            widths = [parts.get(part, 0.0) for parts in arms.values()]
            if any(widths):
                axes.barh(list(arms), widths, left=left, color=colour, label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for i, end in enumerate(left):
            axes.text(end, i, f" {end:.2f}" if end < 100 else f" {end:.0f}", va="center")
        axes.set(title=pane, xlabel=f"ms {of}", xlim=(0, 1.2 * max(left)))
    panes[0].invert_yaxis()  # of all panes, which share it
    named = dict(zip(*reversed(panes[0].get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(PARTS), frameon=False)
    figure.suptitle(f"{title}, {torch.get_num_threads()} threads", y=1.04)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)


def middle(values: Sequence[Spent]) -> Spent:
    """The medians of each part."""
    return {part: median(one.get(part, 0.0) for one in values) for part in PARTS}
