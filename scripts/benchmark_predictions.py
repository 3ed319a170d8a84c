"""The tables of docs/benchmarks/simulate.md, and of predictions in docs/gpus.md, for scripts/benchmark_tables.py."""

from collections.abc import Mapping
from typing import Any

from benchmark_results import load, markdown, number

FIGURES = ("goodput (/s)", "TTFT P50 (ms)", "TTFT P99 (ms)", "TPOT P50 (ms)", "hit rate")


def predictions() -> str:
    """Relative errors of each figure, and how far two measurements of the same case are apart."""
    judged, shares = load("simulate")["judged"], ("median", "p90", "worst")
    rows = []
    for name, row in judged["errors"].items():
        apart = judged.get("apart", {}).get(name)
        rows.append(
            [name, str(row["cases"]), *(f"{row[key]:.1%}" for key in shares), *(f"{apart[key]:.1%}" if apart else "" for key in shares)]
        )
    return markdown(["relative error of", "cases", "median", "P90", "worst", "two measurements apart: median", "P90", "worst"], rows)


def predicted() -> str:
    """Each case: measured, predicted, error."""
    table = []
    for case in load("simulate")["cases"]:
        name = f"{case['model']} {case['name']}{', void' if case['void'] else ''}"
        table.append([name, number(float(case["rate"])), *(_cell(case["figures"].get(figure)) for figure in FIGURES)])
    return markdown(["case", "requests/s", *FIGURES], table)


def gpu_predictions(results: str) -> str:
    """Relative errors of each figure, by the sheet of the device and by a profile that was measured on it."""
    judged = load(results)["judged"]
    rows = []
    for figure in judged["sheet"]["errors"]:
        found = [of["errors"].get(figure) for of in judged.values()]
        cells = [" / ".join(f"{row[key]:.1%}" for key in ("median", "p90", "worst")) if row else "" for row in found]
        rows.append([figure, str(judged["sheet"]["errors"][figure]["cases"]), *cells])
    covered = [f"{of['covered']:.0%}" for of in judged.values()]
    rows.append(["measured figures within the 90 % interval", "", *covered])
    return markdown(["relative error of", "cases", *(f"{BY[by]}: median / P90 / worst" for by in judged)], rows)


def gpu_predicted(results: str) -> str:
    """Each case: measured, and what was predicted with its error."""
    table = []
    for name, case in load(results)["cases"].items():
        cells = [name + (", void" if case["void"] else ""), number(float(case["rate"]))]
        for figure in FIGURES:
            real, told = case["measured"][figure], [of.get(figure) for of in case["predicted"].values()]
            there = real is not None and (real or any(each and each[0] for each in told))
            cells.append(" / ".join([number(real), *(_told(real, *each) for each in told if each)]) if there else "")
        table.append(cells)
    return markdown(["case", "requests/s", *FIGURES], table)


BY = {"sheet": "sheet", "fit": "profile measured there"}


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return ""
    return f"{number(figure['measured'])} / {_told(*(figure[key] for key in ('measured', 'predicted', 'low', 'high')))}"


def _told(real: float, told: float, low: float, high: float) -> str:
    """A prediction, its error, and whether what was measured is outside of its interval."""
    away = f"{told / real - 1:+.0%}" if real else "of nothing"
    return f"{number(told)}, {away}{'' if low <= real <= high else ' °'}"
