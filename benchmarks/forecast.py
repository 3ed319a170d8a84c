"""Which forecast of load wins on real traces: every candidate of the planner, and what it believes, beside "last value".

    python benchmarks/forecast.py --traces FOLDER [--json FILE]

FOLDER has the Azure traces of 2023 (Azure Public Dataset, CC BY 4.0) and Mooncake's (Apache 2.0). Requests are counted in intervals of 15
s, and each forecast is of one interval: the next, or one that lies so much later. A ratio below 1 is better than to say that the last
interval comes again: mean absolute error of the candidate ÷ that of "last", over the same intervals, from a third of the trace on. Its
range holds 90 % of the ratios of traces that were put together anew from blocks of ten intervals (a bootstrap).

A trace has an hour, or 17 minutes, so no wave of a day is in it: with the planner's own `period_s` the harmonic says nothing. It is given
the better of two short periods, chosen afterwards: no planner could have known it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe
from numpy.typing import NDArray
from scale import azure, mooncake

from baton.planner.forecast import LAST, Forecaster

TRACES = ("azure_code_2023.csv", "azure_conv_2023.csv", "mooncake_conversation.jsonl", "mooncake_synthetic.jsonl")
EVERY_S, HORIZONS_S, PERIODS_S = 15, (15, 60, 120, 300), (300, 600)
SCORED = 1 / 3  # of a trace, from which on forecasts are scored
BLOCK, DRAWS, SEED = 10, 2000, 1
BELIEVED, HARMONIC = "believed", "harmonic"

Errors = NDArray[np.float64]


def counts(path: Path) -> list[int]:
    """Requests of each whole interval."""
    times = [sent.at for sent in (mooncake if path.suffix == ".jsonl" else azure)(path)]
    found = [0] * int(times[-1] // EVERY_S)
    for at in times:
        if at // EVERY_S < len(found):
            found[int(at // EVERY_S)] += 1
    return found


def errors(rates: Sequence[float], ahead: int, period: int) -> dict[str, Errors]:
    """Absolute errors of each candidate, and of what is believed, for the same intervals. Without those that did not speak for all."""
    forecaster, said = Forecaster(ahead, period), list[Mapping[str, float]]()
    for rate in rates:
        forecaster.add(rate, seconds=EVERY_S)
        said.append({**forecaster.candidates, BELIEVED: forecaster.forecast().value})
    targets = range(max(ahead, int(SCORED * len(rates))), len(rates))
    names = set.intersection(*(set(said[target - ahead]) for target in targets))
    return {name: np.array([abs(said[target - ahead][name] - rates[target]) for target in targets]) for name in sorted(names)}


def ratio(ours: Errors, last: Errors) -> list[float]:
    """Of the means, and the ends of its range."""
    starts = np.random.default_rng(SEED).integers(0, len(last) - BLOCK + 1, (DRAWS, -(-len(last) // BLOCK)))
    places = (starts[:, :, None] + np.arange(BLOCK)).reshape(DRAWS, -1)[:, : len(last)]
    drawn = ours[places].mean(1) / last[places].mean(1)
    return [float(ours.mean() / last.mean()), *(float(each) for each in np.quantile(drawn, (0.05, 0.95)))]


def judged(rates: Sequence[float], horizon_s: int) -> dict[str, Any]:
    ahead = horizon_s // EVERY_S
    plain = errors(rates, ahead, 0)
    ratios = {name: ratio(each, plain[LAST]) for name, each in plain.items() if name != LAST}
    waves = {period_s: errors(rates, ahead, period_s // EVERY_S) for period_s in PERIODS_S}
    spoke = {period_s: each for period_s, each in waves.items() if HARMONIC in each}
    told: dict[str, Any] = {"horizon_s": horizon_s, "last": float(plain[LAST].mean()), "ratios": ratios}
    if spoke:
        period_s = min(spoke, key=lambda one: float(spoke[one][HARMONIC].mean()))
        told["period_s"] = period_s
        ratios[HARMONIC] = ratio(spoke[period_s][HARMONIC], plain[LAST])
        ratios["believed with it"] = ratio(spoke[period_s][BELIEVED], plain[LAST])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    for name in TRACES:
        rates = [count / EVERY_S for count in counts(asked.traces / name)]
        for horizon_s in HORIZONS_S:
            rows.append({"trace": Path(name).stem, "rate": float(np.mean(rates)), "intervals": len(rates)} | judged(rates, horizon_s))
            print(json.dumps(rows[-1]), flush=True)
    if asked.json:
        told = {"machine": describe(), "seed": SEED, "every_s": EVERY_S, "versions": {"numpy": version("numpy")}, "rows": rows}
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
