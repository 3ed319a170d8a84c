"""Turns samples into medians, ratios and shares of the ceilings, and these into a table and a picture."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.cells import Model
from peers.engines import NUMERIC_TYPES, OURS, REFERENCE, Engine

# Okabe and Ito's colours: colour-blind readers can tell them apart.
COLOURS = {"float32": "#0072B2", "bfloat16": "#E69F00", "int8": "#009E73", "int4": "#CC79A7"}
HATCHES = {"float32": "", "bfloat16": "///", "int8": "...", "int4": "xxx"}
MIB = 1 << 20


@dataclass(slots=True)
class Samples:
    """The samples of one engine on one model."""

    engine: Engine
    rates: dict[str, dict[int, float]] = field(default_factory=dict)  # cell → repeat → tokens/s
    start_s: list[float] = field(default_factory=list)  # from the start of the process to its first token
    peak_rss: int = 0  # bytes
    needed: int = 0  # bytes, of weights and the room for KV
    same: tuple[int, int] = (0, 0)  # greedy tokens equal to the reference's, of how many


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    half_range: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        known = list(values)
        return cls(statistics.median(known), (max(known) - min(known)) / 2)


def ratio(over: Mapping[int, float], under: Mapping[int, float]) -> float | None:
    """The median of the ratios of the repeats that both have, so that drift between repeats cancels."""
    both = over.keys() & under.keys()
    return statistics.median(over[i] / under[i] for i in both) if both else None


def best_peer(samples: Sequence[Samples], precision: str, cell: str) -> Samples | None:
    """The fastest engine of a precision class other than Baton."""
    peers = [one for one in samples if one.engine.precision == precision and not one.engine.name.startswith(OURS) and one.rates.get(cell)]
    return max(peers, key=lambda one: statistics.median(one.rates[cell].values()), default=None)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Medians of the ceilings measured in the same run, with the keys of `peers.drivers.ceilings`."""

    found: Mapping[str, Spread]
    threads: int

    def flops(self, precision: str) -> float | None:
        """The rate of matmuls in float32, or in bfloat16 for every narrower class; float32 where bfloat16 has none. None: not measured."""
        names = [f"{dtype} matmul GFLOP/s" for dtype in ("bfloat16", "float32")]
        found = [self.found[name].median * 1e9 for name in names[precision == "float32" :] if name in self.found]
        return found[0] if found else None

    def prefill_tokens_per_s(self, model: Model, precision: str, tokens: int) -> float | None:
        flops = self.flops(precision)
        return flops * tokens / model.prefill_flops(tokens) if flops else None

    def decode_tokens_per_s(self, model: Model, engine: Engine) -> float | None:
        """At batch 1, where every weight is read once per token. An engine whose weights partly stay in the cache can exceed it."""
        read = self.found.get(f"read GB/s, {self.threads} threads")
        return read.median * 1e9 / (model.read_parameters * engine.bytes_per_weight) if read else None


def roof(ceilings: Ceilings, model: Model, engine: Engine, cell: str) -> float | None:
    """Tokens/s of a cell that has a ceiling: prefill (compute) and decode at batch 1 (memory)."""
    kind, _, size = cell.partition(" ")
    if kind == "prefill":
        return ceilings.prefill_tokens_per_s(model, engine.precision, int(size))
    return ceilings.decode_tokens_per_s(model, engine) if cell == "decode b1" else None


def summary(samples: Sequence[Samples], ceilings: Ceilings, model: Model) -> list[dict[str, Any]]:
    """A row per engine, as in the JSON file."""
    reference = next((one for one in samples if one.engine == REFERENCE), None)
    rows = []
    for one in samples:
        cells = {}
        for cell, rates in one.rates.items():
            middle, best = Spread.of(rates.values()), best_peer(samples, one.engine.precision, cell)
            limit = roof(ceilings, model, one.engine, cell)
            cells[cell] = {
                "tokens_per_s": middle.median,
                "spread": middle.half_range,
                "values": [rates[i] for i in sorted(rates)],
                "to_transformers": ratio(rates, reference.rates.get(cell, {})) if reference else None,
                "best_peer": best.engine.name if best else None,
                "to_best_peer": ratio(rates, best.rates[cell]) if best else None,
                "share_of_ceiling": middle.median / limit if limit else None,
            }
        start = Spread.of(one.start_s)
        rows.append(
            {
                "model": model.name,
                "engine": one.engine.name,
                "precision": one.engine.precision,
                "cells": cells,
                "peak_rss_mib": one.peak_rss / MIB,
                "weights_and_kv_mib": one.needed / MIB,
                "start_s": {"median": start.median, "spread": start.half_range, "values": one.start_s},
                "same_tokens": one.same[0] / one.same[1] if one.same[1] else None,
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]], cells: Sequence[str]) -> str:
    """One model's table: tokens/s, in brackets the ratio to transformers float32; below each class each arm of Baton over the best
    peer, then shares.

    `÷ need`: peak memory over weights and KV.
    """
    head = f"{'engine':24}" + "".join(f"{cell:>21}" for cell in cells) + f"{'peak MiB':>10}{'÷ need':>8}{'start s':>9}{'same tokens':>13}"
    lines = [head]
    for precision in NUMERIC_TYPES:
        members = [row for row in rows if row["precision"] == precision]
        if not members:
            continue
        lines.append(f"== {precision}")
        lines += [_line(row, cells) for row in members]
        for row in members:
            if row["engine"].startswith(OURS):
                versus = [_versus(row["cells"].get(cell)) for cell in cells]
                lines.append(f"{'  ' + row['engine'] + ' ÷ peer':24}" + "".join(f"{text:>21}" for text in versus))
        limited = [cell for cell in cells if any(row["cells"].get(cell, {}).get("share_of_ceiling") for row in members)]
        if limited:
            lines.append(f"  share of the ceiling ({', '.join(limited)}):")
            lines += [f"    {row['engine']:24}" + _shares(row, limited) for row in members if any(cell in row["cells"] for cell in limited)]
    return "\n".join(lines)


def _line(row: Mapping[str, Any], cells: Sequence[str]) -> str:
    shown = "".join(f"{_rate(row['cells'].get(cell)):>21}" for cell in cells)
    same = "-" if row["same_tokens"] is None else f"{row['same_tokens']:.1%}"
    memory = f"{row['peak_rss_mib']:10.0f}{row['peak_rss_mib'] / row['weights_and_kv_mib']:8.1f}"
    return f"{row['engine']:24}{shown}{memory}{row['start_s']['median']:9.1f}{same:>13}"


def _rate(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    to = cell["to_transformers"]
    return f"{cell['tokens_per_s']:.0f} ±{cell['spread']:.0f}" + (f" ({to:.2f}x)" if to else "")


def _versus(cell: Mapping[str, Any] | None) -> str:
    return f"{cell['to_best_peer']:.2f}x {cell['best_peer']}" if cell and cell["to_best_peer"] else "-"


def _shares(row: Mapping[str, Any], cells: Sequence[str]) -> str:
    shares = [row["cells"].get(cell, {}).get("share_of_ceiling") for cell in cells]
    return "".join(f"{'-' if share is None else format(share, '.0%'):>14}" for share in shares)


def picture(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str], cells: Sequence[str], file: Path, note: str) -> None:
    """A row of panels per model, a panel per cell, a bar per engine; a tick marks the ceiling if the cell has one."""
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: NUMERIC_TYPES.index(row["precision"]))
    figure = Figure(figsize=(3.1 * len(cells) + 1.5, 0.26 * len(rows) + 1.4 * len(titles) + 0.8), layout="constrained")
    panels = figure.subplots(len(titles), len(cells), squeeze=False)
    for line, (model, title) in zip(panels, titles.items(), strict=True):
        mine = [row for row in rows if row["model"] == model]
        for panel, cell in zip(line, cells, strict=True):
            for place, row in enumerate(mine):
                _bar(panel, place, row, cell)
            panel.set_yticks(range(len(mine)), [row["engine"] for row in mine] if panel is line[0] else [""] * len(mine), fontsize=8)
            panel.set_ylim(len(mine) - 0.4, -0.6)
            panel.set_xlim(left=0)
            panel.set_visible(any(cell in row["cells"] for row in mine))
            panel.set_xlabel("prompt tokens/s" if cell.startswith("prefill") else "output tokens/s", fontsize=8)
            panel.set_title(cell, fontsize=9)
            panel.tick_params(axis="x", labelsize=8)
            panel.grid(axis="x", alpha=0.3)
            panel.set_axisbelow(True)
        line[0].set_ylabel(title, fontsize=9)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    classes = [kind for kind in NUMERIC_TYPES if any(row["precision"] == kind for row in rows)]
    marks: list[Any] = [Patch(facecolor=COLOURS[kind], hatch=HATCHES[kind], edgecolor="white", label=kind) for kind in classes]
    marks.append(Patch(facecolor="white", edgecolor="black", linewidth=1.6, label="baton"))
    marks.append(Line2D([], [], color="black", marker="|", linestyle="", markersize=11, label="ceiling of the class, measured"))
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=8, frameon=False)
    figure.suptitle(note, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})


def _bar(panel: Any, place: int, row: Mapping[str, Any], cell: str) -> None:
    one = row["cells"].get(cell)
    if one is None:
        return
    kind, ours = row["precision"], row["engine"] == OURS
    panel.barh(place, one["tokens_per_s"], color=COLOURS[kind], hatch=HATCHES[kind], edgecolor="white", linewidth=0)
    panel.errorbar(one["tokens_per_s"], place, xerr=one["spread"], color="black", capsize=2, linewidth=0.8)
    if ours:
        panel.barh(place, one["tokens_per_s"], facecolor="none", edgecolor="black", linewidth=1.6)
    if one["share_of_ceiling"]:
        panel.plot(one["tokens_per_s"] / one["share_of_ceiling"], place, "|", color="black", markersize=11)
