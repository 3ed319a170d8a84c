"""The simulator against real clusters: profiles fitted first, then 28 configurations that were not fitted, measured and predicted.

    python benchmarks/simulate.py [--quick] [--models tale,30m] [--seconds 30] [--json FILE] [--profiles FOLDER]

Two models: `tale`, and an untrained one of 30 M parameters. Each gets a profile of its own (`baton.predict.measure`). The cases differ in
mix, rate, split, chunk, bypass, prefix share, memory for KV and a tier under it; each is a real cluster (router, workers, Redis and the
load generator on this machine's cores, engine.threads 1), under the load test, and the same requests at the same moments in the simulator.
Rates are shares of what one core-second after another would serve, by the profile, and objectives are multiples of an idle cluster's times,
so that they mean the same on any machine. Cases of one letter differ in one thing: of two, the simulator also says which is better.

Aims: the median of the relative errors of goodput, TTFT P50, TPOT P50 and hit rate is at most 5 %, their P90 10 %, that of TTFT P99 15 %;
the 90 % intervals cover 85 to 95 %. Nothing else may run on the machine; all takes half an hour. `--quick`: few cases, a coarse profile.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import describe
from parts import SHAPE
from predicting import JUDGED, TAIL, Judged, drive_measured, errors_of, idle, judged, middle, objectives, whole_offer

from baton.cluster import config_layers
from baton.models.make_small import make
from baton.predict.measure import QUICK, Amount, measure, profile_of
from baton.predict.predict import FIGURES, Prediction, predict
from baton.predict.setting import ClusterSetting, setting_of
from baton.profile.file import Profile
from loadtest.cluster import RunningCluster
from loadtest.plan import Workload
from loadtest.slo import Slo
from loadtest.summary import Summary, summarise
from loadtest.window import Window

TALE = Path(__file__).parent.parent / "baton" / "models" / "tale"
CORES, CHUNK, WARM_UP_S, COOL_DOWN_S = 2, 512, 2.0, 2.0
TTFT_TIMES, TPOT_TIMES = 2.5, 2.0  # objectives, in times of an idle cluster
SMALL_MIB, SMALL_LEN = {"tale": 12, "30m": 48}, 2048  # a pool of 3,072 tokens, by model, and its longest sequence


@dataclass(frozen=True, slots=True)
class Case:
    """`name`: a letter for the pair that differs in one thing, and what it is. `share`: of what the cores could serve."""

    name: str
    split: tuple[int, int]  # prefill and decode workers
    share: float
    load: Mapping[str, Any]
    settings: Mapping[str, str] = field(default_factory=dict)
    small: bool = False  # its pools

    @property
    def key(self) -> str:
        """Cases with the same one may share a cluster."""
        return json.dumps([self.split, dict(self.settings), self.small])


SHORT: Mapping[str, Any] = {"input": "64-300", "output": "24"}
LONG: Mapping[str, Any] = {"input": "500-1000", "output": "12"}
TALK: Mapping[str, Any] = {"input": "32-128", "output": "64"}
SHARED: Mapping[str, Any] = {"input": "300-500", "output": "16", "hit_rate": 0.5, "prefix_tokens": 256, "prefix_branching": 6}
# Prefixes that do not fit the small pool, of which it caches little more than half of what a large one does.
SPREAD: Mapping[str, Any] = {**SHARED, "prefix_branching": 10}
TIER: Mapping[str, str] = {"tiers.memory_mib": "512"}
CASES = (
    Case("a colocated", (0, 2), 0.25, SHORT),
    Case("a split", (1, 1), 0.25, SHORT, {"router.bypass_tokens": "0"}),
    Case("b colocated, more", (0, 2), 0.45, SHORT),
    Case("b split, more", (1, 1), 0.45, SHORT, {"router.bypass_tokens": "0"}),
    Case("c long, chunks of 128", (0, 1), 0.2, LONG, {"engine.max_num_batched_tokens": "128"}),
    Case("c long, chunks of 512", (0, 1), 0.2, LONG),
    Case("d mix, bypass 0", (1, 1), 0.3, {**SHORT, "input": "16-200"}, {"router.bypass_tokens": "0"}),
    Case("d mix, bypass 128", (1, 1), 0.3, {**SHORT, "input": "16-200"}, {"router.bypass_tokens": "128"}),
    Case("e shared, split", (1, 1), 0.3, SHARED, {"router.bypass_tokens": "0"}),
    Case("e shared, small pool", (1, 1), 0.3, SHARED, {"router.bypass_tokens": "0"}, small=True),
    Case("f talk, 1:1", (1, 1), 0.3, TALK, {"router.bypass_tokens": "0"}),
    Case("f talk, 1:2", (1, 2), 0.3, TALK, {"router.bypass_tokens": "0"}),
    Case("h shared, small pool, no tier", (1, 1), 0.3, SPREAD, {"router.bypass_tokens": "0"}, small=True),
    Case("h shared, small pool, tier", (1, 1), 0.3, SPREAD, {"router.bypass_tokens": "0", **TIER}, small=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case: what was measured, what was predicted, and the objectives."""

    model: str
    case: Case
    rate: float
    slo: Slo
    measured: Summary
    predicted: Prediction

    def judged(self) -> Iterable[Judged]:
        told = {name: (each.value, each.low, each.high) for name, each in self.predicted.figures.items()}
        return judged(f"{self.model} {self.case.name}", {name: FIGURES[name](self.measured) for name in JUDGED}, told)


def settings_of(model: Path, case: Case) -> dict[str, str]:
    prefill, decode = case.split
    same = {"model.path": str(model), "engine.threads": "1", "telemetry.log_level": "warning"}
    if case.small:
        same |= {"engine.kv_memory_mib": str(SMALL_MIB[model.name]), "model.max_model_len": str(SMALL_LEN)}
    return {**same, "prefill.replicas": str(prefill), "decode.replicas": str(decode), **case.settings}


def setting(model: Path, case: Case, profile: Profile) -> ClusterSetting:
    return setting_of(config_layers.load(env={}, flags=settings_of(model, case)).config, profile, CORES)


def offered(case: Case, profile: Profile, seconds: float) -> tuple[Workload, float, Slo]:
    load = Workload(duration_s=seconds, **case.load)
    prompt, output = middle(load.input), middle(load.output)
    first, token, spent = idle(profile, prompt, output, CHUNK)
    slo = objectives(first, token, TTFT_TIMES, TPOT_TIMES)
    return load, float(f"{case.share * CORES / spent:.2g}"), slo


async def run_model(name: str, model: Path, cases: Sequence[Case], profile: Profile, seconds: float) -> AsyncIterator[Outcome]:
    for key in dict.fromkeys(case.key for case in cases):
        same = [case for case in cases if case.key == key]
        async with RunningCluster(settings_of(model, same[0]), "simulate") as endpoints:
            for case in same:
                load, rate, slo = offered(case, profile, seconds)
                offer = whole_offer(load, rate, Window(seconds, WARM_UP_S, COOL_DOWN_S))
                done = await drive_measured(endpoints["grpc"], offer, f"{time.time_ns()}")
                real = summarise(done.records, offer.window, slo, due=done.due)
                told = await asyncio.to_thread(predict, setting(model, case, profile), profile, offer, slo)
                yield Outcome(name, case, rate, slo, real, told)


def show(outcome: Outcome) -> None:
    cells = [
        f"{each.figure} {each.measured:.3g} / {each.value:.3g} [{each.low:.3g}, {each.high:.3g}] {each.error:+.0%}"
        for each in outcome.judged()
    ]
    flaw = f"; VOID: {outcome.measured.void}" if outcome.measured.void else ""
    print(f"  {outcome.model} {outcome.case.name}, {outcome.rate:g}/s, {outcome.slo}{flaw}\n    " + "\n    ".join(cells), flush=True)


def judge(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Errors and covers by figure, and the pairs whose winner is called wrong."""
    sound = [outcome for outcome in outcomes if not outcome.measured.void]
    found = errors_of(each for outcome in sound for each in outcome.judged())
    wrong = [told for told in (_winner(pair) for pair in _pairs(sound)) if told]
    return {**found, "wrong": wrong, "void": len(outcomes) - len(sound)}


def _pairs(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.model, outcome.case.name[0]), []).append(outcome)
    return [(one, other) for one, other, *_ in (each for each in found.values() if len(each) == 2)]


def _winner(pair: tuple[Outcome, Outcome]) -> str:
    """What was called wrong; empty: nothing. A difference of 3 % is none."""
    wrong = []
    for name in ("goodput (/s)", TAIL):
        real = [FIGURES[name](outcome.measured) or 0.0 for outcome in pair]
        told = [outcome.predicted.figures[name].value for outcome in pair]
        if max(real) > 1.03 * min(real) and (real[0] > real[1]) != (told[0] > told[1]):
            wrong.append(f"{name}: measured {real[0]:.3g} and {real[1]:.3g}, predicted {told[0]:.3g} and {told[1]:.3g}")
    return f"{pair[0].model} {pair[0].case.name} / {pair[1].case.name}: {'; '.join(wrong)}" if wrong else ""


def as_json(outcome: Outcome) -> dict[str, Any]:
    figures = {
        each.figure: {"measured": each.measured, "predicted": each.value, "low": each.low, "high": each.high} for each in outcome.judged()
    }
    case = asdict(outcome.case) | {"rate": outcome.rate, "slo": str(outcome.slo)}
    return {"model": outcome.model, **case, "void": outcome.measured.void, "figures": figures, "doubts": outcome.predicted.doubts}


def report(judged: Mapping[str, Any]) -> None:
    print("\nrelative errors of what was predicted")
    for name, row in judged["errors"].items():
        print(f"  {name:18} {row['cases']:3} cases, median {row['median']:6.1%}, P90 {row['p90']:6.1%}, worst {row['worst']:6.1%}")
    if judged["covered"] is not None:
        print(f"  the 90 % intervals cover {judged['covered']:.0%}; void: {judged['void']}")
    for told in judged["wrong"]:
        print(f"  called wrong: {told}")


async def profile_for(name: str, model: Path, amount: Amount, folder: Path | None) -> Profile:
    """Read from the folder if it is there, else measured, and written to it."""
    file = folder / f"{name}.yaml" if folder else None
    if file is not None and file.is_file():
        return Profile.load_file(file)
    same = {"model.path": str(model), "engine.threads": "1", "telemetry.log_level": "warning", **TIER}
    found = await measure(same, amount, CHUNK, lambda line: print(f"  {name}, {line}", flush=True))
    profile = profile_of(found, name, {"threads": 1}, amount, CHUNK)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        profile.save(file)
    return profile


async def run(options: argparse.Namespace, folder: Path) -> list[Outcome]:
    """What has been measured is in the file after each case."""
    outcomes, profiles = list[Outcome](), dict[str, Any]()
    for name in options.models.split(","):
        model = TALE
        if name != "tale":
            make(model := folder / name, **SHAPE)
        profile = await profile_for(name, model, QUICK if options.quick else Amount(), options.profiles)
        profiles[name] = {part: {"values": dict(fitted.values), "error": fitted.error} for part, fitted in profile.models.items()}
        for part, fitted in profile.models.items():
            values = ", ".join(f"{key} {value:.3g}" for key, value in fitted.values.items())
            print(f"  {name} {part}: {values}; error {fitted.error:.1%}, {fitted.rows} rows", flush=True)
        async for outcome in run_model(name, model, CASES[:4] if options.quick else CASES, profile, options.seconds):
            outcomes.append(outcome)
            show(outcome)
            if options.json:
                told = {"machine": describe(), "seconds": options.seconds, "profiles": profiles, "judged": judge(outcomes)}
                options.json.write_text(json.dumps({**told, "cases": [as_json(outcome) for outcome in outcomes]}, indent=1))
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", default="tale,30m")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profiles", type=Path, help="profiles that are used if they are there, and else written")
    options = parser.parse_args()
    print(describe())
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report(judge(asyncio.run(run(options, Path(folder)))))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
