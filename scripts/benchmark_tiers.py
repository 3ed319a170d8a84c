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
        useless = f"{_lasting(found['useless'][name])['cpu']['of_sums']:.3f}" if name in found["useless"] else "1"
        hits = f"{median(row['hit_rate'] for row in rows):.0%}"
        table.append([name, middle([typical, *ends]), f"{typical / base:.2f}", hits, useless])
    heads = ["tiers", "TTFT P50 of a returning conversation, ms", "of none", "not computed", "CPU if nothing returns"]
    return markdown(heads, table) + _idle_tiers(found) + _traced_tiers(found)


def _lasting(told: dict[str, Any]) -> dict[str, Any]:
    """What a tier to which nothing returns costs once it has seen that."""
    lasting: dict[str, Any] = told.get("watching", told)  # results of before had nothing else
    return lasting


def _idle_tiers(found: dict[str, Any]) -> str:
    table = []
    for name, told in found["useless"].items():
        for which, one in ((name, told), (f"{name}, which only watches", told.get("watching"))):
            if one is not None:
                bare, full = one["decode"]["p99_ms"]
                sums = [f"{one[what]['of_sums']:.3f}" for what in ("cpu", "time")]
                table.append([which, *sums, f"{bare:.1f} / {full:.1f}", f"{full / bare:.3f}"])
    heads = ["nothing returns", "CPU of none", "time of none", "P99 between tokens while it writes, none / tier, ms", "of none"]
    return "\n\n" + markdown(heads, table)


def _traced_tiers(found: dict[str, Any]) -> str:
    if "trace" not in found:
        return ""
    told = {name: found["trace"][name] for name in found["returns"]}
    table = [
        [name, *(f"{ms:.0f}" for ms in one["ttft_ms"]), f"{one['hit_rate']:.0%}", f"{one['goodput']:.2f}"] for name, one in told.items()
    ]
    heads = [f"{found['trace']['requests']} requests of the trace", "TTFT P50, ms", "P90, ms", "not computed", "goodput, requests/s"]
    return "\n\n" + markdown(heads, table)
