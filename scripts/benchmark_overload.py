"""The tables of docs/benchmarks/overload.md, for scripts/benchmark_tables.py."""

from collections.abc import Iterable
from statistics import median

from benchmark_results import load, markdown, number, spread


def overload(results: str, model: str) -> str:
    found = load(results)[model]
    arms = found["arms"]
    judged = [arm for arm in ("codel", "degrade") if arm in arms]
    weighed = [arm for arm in ("queue", "codel") if arm in arms and arms[arm]["1"][0]["rss_mib"]]  # nothing, if it is simulated
    table = []
    for times in ("1", "2", "5", "10"):
        runs = {arm: arms[arm][times] for arm in arms}
        good = {arm: [run["goodput"] for run in each] for arm, each in runs.items()}
        table.append(
            [
                f"{times}x",
                number(median(run["offered"] for run in runs["codel"])),
                *(spread(good[arm]) for arm in arms),
                *(f"{median(good[arm]) / found['peak']:.0%}" for arm in judged),
                *(_refused(runs[arm]) for arm in arms if arm != "queue"),
                *(f"{median(run['rss_mib'] for run in runs[arm]):.0f} MiB" for arm in weighed),
            ]
        )
    after = [f"refused after, ms, P50 / P99: `{arm}`" for arm in arms if arm != "queue"]
    memory = [f"router's memory: `{arm}`" if arm == weighed[0] else f"`{arm}`" for arm in weighed]
    shares = [f"`{arm}` of the peak" for arm in judged]
    title = f"1x = {found['rate']:.1f}/s, peak {found['peak']:.1f}/s"
    return markdown([title, "offered", *(f"good: `{arm}`" for arm in arms), *shares, *after, *memory], table)


def _refused(runs: Iterable[dict[str, float]]) -> str:
    refusing = [run for run in runs if run["refused"]]
    return " / ".join(number(median(run[f"refusal_{at}_ms"] for run in refusing)) for at in ("p50", "p99")) if refusing else ""
