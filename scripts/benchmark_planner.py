"""The tables of docs/benchmarks/planner.md: splits and who changes them, and forecasts of load."""

from collections.abc import Mapping

from benchmark_results import load, markdown, number, spread

SHOWN = 4  # static splits: the best, and those that come next


def planner(workload: str) -> str:
    """Arms beside the best static split and, where it was run, the oracle. Of the static splits, those that come first."""
    found = load("planner")["workloads"][workload]
    rows = {row["arm"]: row for row in found["rows"]}
    static = [rows[arm] for arm in found["static"][:SHOWN]]  # the best comes first
    best = static[0]
    table = []
    for row in (*static, *(rows[arm] for arm in ("hpa", "oracle", "planner") if arm in rows)):
        oracle = f"{row['rate'] / rows['oracle']['rate']:.2f}" if "oracle" in rows else "not run"
        name = _named(row["arm"]) + (" (the best)" if row is best else "")
        cells = [f"{row['attainment']:.1%}", number(row["worker_hours"]), number(row["rate"]), f"{row['rate'] / best['rate']:.2f}", oracle]
        table.append([name, *cells])
    return markdown(["arm", "met", "worker-hours", "met per worker-hour", "÷ best static", "÷ oracle"], table)


def planner_real() -> str:
    """The same on a real cluster."""
    found = load("planner_real")
    rows = {row["arm"]: row for row in found["rows"]}
    static = [rows[arm] for arm in found["static"]]  # the best comes first
    table = []
    for row in (*static, *(rows[arm] for arm in ("hpa", "planner") if arm in rows)):
        name = _named(row["arm"]) + (" (the best)" if row is static[0] else "")
        counts = [f"{row['attainment']:.1%}", *(number(row[key]) for key in ("refused", "lost", "wrong"))]
        costs = [number(row["worker_hours"]), number(row["rate"]), f"{row['rate'] / static[0]['rate']:.2f}"]
        table.append([name, *counts, *costs, _changes(row["changes"]), spread(row["starts_s"]) if row["starts_s"] else ""])
    heads = ["arm", "met", "refused", "lost", "wrong", "worker-hours", "met per worker-hour", "÷ best static", "changes", "a start, s"]
    return markdown(heads, table)


def _changes(counts: Mapping[str, int]) -> str:
    """What the planner did."""
    kinds = {"flip": "flips", "grow": "growths", "shrink": "shrinks", "undone": "undone"}
    return ", ".join(f"{name} {counts[kind]}" for kind, name in kinds.items() if counts.get(kind))


def planner_loads() -> str:
    """Other loads and arrivals: the planner and the autoscaler beside the best static split of each."""
    table = []
    for name, found in load("planner_loads")["workloads"].items():
        rows = {row["arm"]: row for row in found["rows"]}
        best = rows[found["static"][0]]
        kind, _, seed = name.partition(":")
        cells = [
            f"{kind} {seed}".strip(),
            number(found["offered"]),
            f"{_named(best['arm'])}: {best['attainment']:.1%}",
            number(best["rate"]),
        ]
        for arm in ("hpa", "planner"):
            cells += [f"{rows[arm]['attainment']:.1%}", f"{rows[arm]['rate'] / best['rate']:.2f}"]
        table.append(cells)
    heads = ["load", "requests", "best static: met", "met per worker-hour", "autoscaler met", "÷ static", "planner met", "÷ static"]
    return markdown(heads, table)


def _named(arm: str) -> str:
    if arm == "hpa":
        return "as a horizontal autoscaler"
    return arm.replace("+", "P") + "D" if arm.startswith("static") else arm


def flips() -> str:
    found = load("flips")
    cells = [
        number(len(found["first_token_s"])),
        spread(found["first_token_s"]),
        *(number(found[key]) for key in ("requests", "lost", "wrong")),
    ]
    return markdown(["flips", "to the first token, s", "requests", "lost", "wrong"], [cells])


CANDIDATES = {
    "steady": "steady",
    "smoothed": "smoothed",
    "trend": "trend",
    "believed": "the planner's",
    "harmonic": "harmonic, told its period",
}


def forecast() -> str:
    """The error of each candidate ÷ that of the last value."""
    table = []
    for row in load("forecast")["rows"]:
        ratios = [_ratio(*row["ratios"][name]) if name in row["ratios"] else "" for name in CANDIDATES]
        table.append([row["trace"].replace("_", " "), number(row["horizon_s"]), number(row["rate"]), number(row["last"]), *ratios])
    return markdown(["trace", "ahead, s", "requests/s", "last value is off by", *CANDIDATES.values()], table)


def _ratio(value: float, low: float, high: float) -> str:
    return f"{value:.2f} ({low:.2f} … {high:.2f})"
