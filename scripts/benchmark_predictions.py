"""The tables of docs/benchmarks/simulate.md, for scripts/benchmark_tables.py."""

from collections.abc import Mapping
from typing import Any

from benchmark_results import load, markdown, number

FIGURES = ("goodput (/s)", "TTFT P50 (ms)", "TTFT P99 (ms)", "TPOT P50 (ms)", "hit rate")


def predictions() -> str:
    """Relative errors of each figure, and what else is judged."""
    judged = load("simulate")["judged"]
    rows = [[name, str(row["cases"]), *(f"{row[key]:.1%}" for key in ("median", "p90", "worst"))] for name, row in judged["errors"].items()]
    return markdown(["relative error of", "cases", "median", "P90", "worst"], rows)


def predicted() -> str:
    """Each case: measured, predicted, error."""
    table = []
    for case in load("simulate")["cases"]:
        name = f"{case['model']} {case['name']}{', void' if case['void'] else ''}"
        table.append([name, number(float(case["rate"])), *(_cell(case["figures"].get(figure)) for figure in FIGURES)])
    return markdown(["case", "requests/s", *FIGURES], table)


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return ""
    real, told = figure["measured"], figure["predicted"]
    away = f"{told / real - 1:+.0%}" if real else "of nothing"
    inside = "" if figure["low"] <= real <= figure["high"] else " °"
    return f"{number(real)} / {number(told)}, {away}{inside}"
