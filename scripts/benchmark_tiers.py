"""The tables of docs/benchmarks/tiers.md, for scripts/benchmark_tables.py."""

from statistics import median
from typing import Any

from benchmark_results import load, markdown, middle


def tiers() -> str:
    found = load("tiers")
    base = median(row["ttft_ms"][0] for row in found["returns"]["none"])
    table = []
    for name, rows in found["returns"].items():
        typical = median(row["ttft_ms"][0] for row in rows)
        ends = [pick(row["ttft_ms"][end] for row in rows) for pick, end in ((min, 1), (max, 2))]
        useless = f"{_useless(found, name)['of_sums']:.3f}" if name in found["useless"] else "1"
        hits = f"{median(row['hit_rate'] for row in rows):.0%}"
        table.append([name, middle([typical, *ends]), f"{typical / base:.2f}", hits, useless])
    heads = ["tiers", "TTFT P50 of a returning conversation, ms", "of none", "not computed", "CPU if nothing returns"]
    return markdown(heads, table) + _idle_tiers(found) + _traced_tiers(found)


def _useless(found: dict[str, Any], name: str) -> dict[str, Any]:
    """Of a tier to which nothing returns: processor time."""
    told: dict[str, Any] = found["useless"][name]
    cpu: dict[str, Any] = told.get("cpu", told)  # results of before had nothing else
    return cpu


def _idle_tiers(found: dict[str, Any]) -> str:
    table = []
    for name, one in found["useless"].items():
        if "cpu" in one:
            bare, full = one["decode"]["p99_ms"]
            table.append(
                [name, f"{one['cpu']['of_sums']:.3f}", f"{one['time']['of_sums']:.3f}", f"{bare:.1f} / {full:.1f}", f"{full / bare:.3f}"]
            )
    heads = ["nothing returns", "CPU of none", "time of none", "P99 between tokens while it writes, none / tier, ms", "of none"]
    return "\n\n" + markdown(heads, table) if table else ""


def _traced_tiers(found: dict[str, Any]) -> str:
    if "trace" not in found:
        return ""
    told = {name: found["trace"][name] for name in found["returns"]}
    table = [
        [name, *(f"{ms:.0f}" for ms in one["ttft_ms"]), f"{one['hit_rate']:.0%}", f"{one['goodput']:.2f}"] for name, one in told.items()
    ]
    heads = [f"{found['trace']['requests']} requests of the trace", "TTFT P50, ms", "P90, ms", "not computed", "goodput, requests/s"]
    return "\n\n" + markdown(heads, table)
