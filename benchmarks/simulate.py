"""The simulator against real clusters: profiles fitted first, then 32 configurations that were not fitted, measured and predicted.

    python benchmarks/simulate.py --profiles FOLDER --json FILE [--quick] [--models tale,30m] [--seconds 15]
    python benchmarks/simulate.py --profiles FOLDER --json FILE --predict    # again, of what FILE says was measured

Two models: `tale`, and an untrained one of 30 M parameters. Each gets a profile of its own (`baton.predict.measure`). The cases differ in
mix, rate, split, chunk, bypass, prefix share, memory for KV, guesses and a tier; each is a real cluster (router, workers, Redis and the
load generator on this machine's cores, engine.threads 1), under the load test, and the same requests at the same moments in the simulator.
Rates are shares of what one core-second after another would serve, by the profile, and objectives are multiples of an idle split cluster's
times, so that they mean the same on any machine. Cases of one letter differ in one thing: of two, the simulator also says which is better.

All cases are measured once, and then all again: what is judged is the mean, and how far the two are apart is told, since no prediction can
be nearer to both than they are to each other.

Aims: the median of the relative errors of goodput, TTFT P50, TPOT P50 and hit rate is at most 5 %, their P90 10 %, that of TTFT P99 15 %;
the 90 % intervals cover 85 to 95 %. Nothing else may run on the machine while it measures, forty minutes; predictions come after that.
`--quick`: few cases, a coarse profile.
"""

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from machine import describe
from parts import SHAPE
from predicting import BODY, JUDGED, TAIL, Judged, drive_measured, errors_of, idle, judged, middle, objectives, whole_offer

from baton.cluster import config_layers
from baton.models.make_small import make
from baton.predict.fitted import profile_of
from baton.predict.measure import QUICK, Amount, measure
from baton.predict.predict import FIGURES, Offer, Prediction, predict
from baton.predict.setting import ClusterSetting, setting_of
from baton.profile.file import Profile
from loadtest.cluster import RunningCluster
from loadtest.plan import Workload
from loadtest.slo import Slo
from loadtest.summary import summarise
from loadtest.window import Window

TALE = Path(__file__).parent.parent / "baton" / "models" / "tale"
CORES, CHUNK, WARM_UP_S, COOL_DOWN_S = 2, 512, 2.0, 2.0
ROUNDS, LEAST, LONGEST_S = 2, 16, 60.0  # times that each case is measured, and requests of one, about, if they come within that
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
STORY: Mapping[str, Any] = {**TALK, "output": "160"}  # the longer it is, the more of it repeats itself
GUESSES: Mapping[str, str] = {"engine.speculation": "prompt_lookup"}
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
    Case("g story, no guesses", (0, 1), 0.25, STORY),
    Case("g story, guesses", (0, 1), 0.25, STORY, GUESSES),
    Case("h shared, small pool, no tier", (1, 1), 0.3, SPREAD, {"router.bypass_tokens": "0"}, small=True),
    Case("h shared, small pool, tier", (1, 1), 0.3, SPREAD, {"router.bypass_tokens": "0", **TIER}, small=True),
)


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """`rounds`: figures, by the names in `FIGURES`, of each time that it was measured. `void`: why it does not count, if so."""

    model: str
    case: Case
    rate: float
    slo: Slo
    seconds: float
    rounds: Sequence[Mapping[str, float]]
    void: str

    def mean(self, figure: str) -> float | None:
        found = [told[figure] for told in self.rounds if figure in told]
        return sum(found) / len(found) if found else None

    def apart(self, figure: str) -> float | None:
        """The distance of the farthest two rounds, as a share of the mean."""
        found, mean = [told[figure] for told in self.rounds if figure in told], self.mean(figure)
        return (max(found) - min(found)) / mean if mean and len(found) > 1 else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case: what was measured, and what was predicted."""

    measured: MeasuredCase
    predicted: Prediction

    def judged(self) -> Iterable[Judged]:
        told = {name: (each.value, each.low, each.high) for name, each in self.predicted.figures.items()}
        of = self.measured
        return judged(f"{of.model} {of.case.name}", {name: of.mean(name) for name in JUDGED}, told)


def settings_of(model: Path, case: Case) -> dict[str, str]:
    prefill, decode = case.split
    same = {"model.path": str(model), "engine.threads": "1", "telemetry.log_level": "warning"}
    if case.small:
        same |= {"engine.kv_memory_mib": str(SMALL_MIB[model.name]), "model.max_model_len": str(SMALL_LEN)}
    return {**same, "prefill.replicas": str(prefill), "decode.replicas": str(decode), **case.settings}


def setting(model: Path, case: Case, profile: Profile) -> ClusterSetting:
    return setting_of(config_layers.load(env={}, flags=settings_of(model, case)).config, profile, CORES)


def offered(case: Case, profile: Profile, least_s: float) -> tuple[Offer, float, Slo]:
    """Items at their moments, their rate, and the objectives. Where few come, the run is longer."""
    prompt, output = middle(case.load["input"]), middle(case.load["output"])
    first, token, spent = idle(profile, prompt, output, CHUNK)
    handoff = profile.values("handoff")
    moved = handoff["base"] + handoff["byte"] * profile.kv_token_bytes * prompt
    slo = objectives(first, token + moved / (output - 1), TTFT_TIMES, TPOT_TIMES)
    rate = float(f"{case.share * CORES / spent:.2g}")
    seconds = max(least_s, min(LONGEST_S, math.ceil(LEAST / rate) + WARM_UP_S + COOL_DOWN_S))
    load = Workload(duration_s=seconds, **case.load)
    return whole_offer(load, rate, Window(seconds, WARM_UP_S, COOL_DOWN_S)), rate, slo


async def measure_model(name: str, model: Path, cases: Sequence[Case], profile: Profile, least_s: float) -> AsyncIterator[MeasuredCase]:
    """Each case once."""
    for key in dict.fromkeys(case.key for case in cases):
        same = [case for case in cases if case.key == key]
        async with RunningCluster(settings_of(model, same[0]), "simulate") as endpoints:
            for case in same:
                offer, rate, slo = offered(case, profile, least_s)
                done = await drive_measured(endpoints["grpc"], offer, f"{time.time_ns()}")
                told = summarise(done.records, offer.window, slo, due=done.due)
                figures = {figure: value for figure, of in FIGURES.items() if (value := of(told)) is not None}
                yield MeasuredCase(name, case, rate, slo, least_s, [figures], told.void or "")


def merged(first: MeasuredCase, second: MeasuredCase) -> MeasuredCase:
    return replace(first, rounds=[*first.rounds, *second.rounds], void=first.void or second.void)


def predicted(measured: MeasuredCase, model: Path, profile: Profile) -> Outcome:
    offer, rate, slo = offered(measured.case, profile, measured.seconds)
    if (rate, str(slo)) != (measured.rate, str(measured.slo)):
        raise ValueError(f"{measured.model} {measured.case.name}: measured with another profile")
    return Outcome(measured, predict(setting(model, measured.case, profile), profile, offer, slo))


def show(outcome: Outcome) -> None:
    cells = [
        f"{each.figure} {each.measured:.3g} / {each.value:.3g} [{each.low:.3g}, {each.high:.3g}] {each.error:+.0%}"
        for each in outcome.judged()
    ]
    of = outcome.measured
    flaw = f"; VOID: {of.void}" if of.void else ""
    print(f"  {of.model} {of.case.name}, {of.rate:g}/s, {of.slo}{flaw}\n    " + "\n    ".join(cells), flush=True)


def apart(cases: Sequence[MeasuredCase]) -> dict[str, Any]:
    """How far the rounds of a case are apart, by figure."""
    found: dict[str, list[float]] = {name: [] for name in (*JUDGED, BODY)}
    for case, name in product(cases, JUDGED):
        if (off := case.apart(name)) is not None:
            found[name].append(off)
            if name != TAIL:
                found[BODY].append(off)
    return {name: {"median": median(off), "p90": float(np.percentile(off, 90)), "worst": max(off)} for name, off in found.items() if off}


def judge(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Errors and covers by figure, and the pairs whose winner is called wrong."""
    sound = [outcome for outcome in outcomes if not outcome.measured.void]
    found = errors_of(each for outcome in sound for each in outcome.judged())
    wrong = [told for told in (_winner(pair) for pair in _pairs(sound)) if told]
    rounds = apart([outcome.measured for outcome in sound])
    return {**found, "wrong": wrong, "void": len(outcomes) - len(sound), "apart": rounds}


def _pairs(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.measured.model, outcome.measured.case.name[0]), []).append(outcome)
    return [(one, other) for one, other, *_ in (each for each in found.values() if len(each) == 2)]


def _winner(pair: tuple[Outcome, Outcome]) -> str:
    """What was called wrong; empty: nothing. A difference of 3 %, or one that the rounds do not agree about, is none."""
    wrong = []
    for name in ("goodput (/s)", TAIL):
        real = [outcome.measured.mean(name) or 0.0 for outcome in pair]
        told = [outcome.predicted.figures[name].value for outcome in pair]
        rounds = zip(*(outcome.measured.rounds for outcome in pair), strict=True)
        agree = len({one.get(name, 0.0) > other.get(name, 0.0) for one, other in rounds}) == 1
        if agree and max(real) > 1.03 * min(real) and (real[0] > real[1]) != (told[0] > told[1]):
            wrong.append(f"{name}: measured {real[0]:.3g} and {real[1]:.3g}, predicted {told[0]:.3g} and {told[1]:.3g}")
    one, other = (outcome.measured for outcome in pair)
    return f"{one.model} {one.case.name} / {other.case.name}: {'; '.join(wrong)}" if wrong else ""


def as_json(measured: MeasuredCase, outcome: Outcome | None) -> dict[str, Any]:
    told = {"model": measured.model, **asdict(measured.case), "rate": measured.rate, "slo": str(measured.slo), "seconds": measured.seconds}
    told |= {"void": measured.void, "rounds": measured.rounds}
    if outcome is None:
        return told
    figures = {
        each.figure: {"measured": each.measured, "predicted": each.value, "low": each.low, "high": each.high} for each in outcome.judged()
    }
    return told | {"figures": figures, "doubts": outcome.predicted.doubts}


def from_json(told: Mapping[str, Any]) -> MeasuredCase:
    case = Case(told["name"], tuple(told["split"]), told["share"], told["load"], told["settings"], told["small"])
    return MeasuredCase(told["model"], case, told["rate"], Slo.parse(told["slo"]), told["seconds"], told["rounds"], told["void"])


def report(judged: Mapping[str, Any]) -> None:
    print("\nrelative errors of what was predicted")
    for name, row in judged["errors"].items():
        print(f"  {name:18} {row['cases']:3} cases, median {row['median']:6.1%}, P90 {row['p90']:6.1%}, worst {row['worst']:6.1%}")
    if judged["covered"] is not None:
        print(f"  the 90 % intervals cover {judged['covered']:.0%}; void: {judged['void']}")
    for name, row in judged["apart"].items():
        shares = ", ".join(f"{which} {row[which]:6.1%}" for which in ("median", "p90", "worst"))
        print(f"  {name:18} rounds apart: {shares}")
    for told in judged["wrong"]:
        print(f"  called wrong: {told}")


async def profile_for(name: str, model: Path, amount: Amount, folder: Path) -> Profile:
    """Read from the folder if it is there, else measured, and written to it."""
    file = folder / f"{name}.yaml"
    if file.is_file():
        return Profile.load_file(file)
    same = {"model.path": str(model), "engine.threads": "1", "telemetry.log_level": "warning", **GUESSES, **TIER}
    found = await measure(same, amount, CHUNK, lambda line: print(f"  {name}, {line}", flush=True))
    engine = {"threads": 1, "speculation": GUESSES["engine.speculation"]}
    profile = await asyncio.to_thread(profile_of, found, name, engine, amount, CHUNK)  # it simulates, in a loop of its own
    file.parent.mkdir(parents=True, exist_ok=True)
    profile.save(file)
    return Profile.load_file(file)  # with as many digits as a later prediction has


def written(options: argparse.Namespace, told: Mapping[str, Any], cases: Sequence[MeasuredCase], outcomes: Sequence[Outcome]) -> None:
    by = {(one.measured.model, one.measured.case.name): one for one in outcomes}
    rows = [as_json(case, by.get((case.model, case.case.name))) for case in cases]
    verdict = {"judged": judge(outcomes)} if outcomes else {}
    options.json.write_text(json.dumps({**told, **verdict, "cases": rows}, indent=1))


async def measure_all(options: argparse.Namespace, models: Mapping[str, Path]) -> None:
    """What has been measured is in the file after each case."""
    cases = [case for case in CASES if not options.cases or case.name[0] in options.cases][: 4 if options.quick else None]
    profiles = {}
    for name, model in models.items():
        profiles[name] = profile = await profile_for(name, model, QUICK if options.quick else Amount(), options.profiles)
        for part, fitted in profile.models.items():
            values = ", ".join(f"{key} {value:.3g}" for key, value in fitted.values.items())
            print(f"  {name} {part}: {values}; error {fitted.error:.1%}, {fitted.rows} rows", flush=True)
    told = {"machine": describe(), "seconds": options.seconds, "profiles": {name: _told(one) for name, one in profiles.items()}}
    found = dict[tuple[str, str], MeasuredCase]()
    for number in range(ROUNDS):
        for name, model in models.items():
            async for one in measure_model(name, model, cases, profiles[name], options.seconds):
                key = name, one.case.name
                found[key] = merged(found[key], one) if key in found else one
                figures = ", ".join(f"{figure} {one.mean(figure) or 0:.3g}" for figure in JUDGED)
                print(f"  round {number + 1}, {name} {one.case.name}, {one.rate:g}/s: {figures} {one.void}", flush=True)
                written(options, told, [*found.values()], [])


def _told(profile: Profile) -> dict[str, Any]:
    return {part: {"values": dict(fitted.values), "error": fitted.error} for part, fitted in profile.models.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--predict", action="store_true", help="measure nothing: predict again what the file says was measured")
    parser.add_argument("--models", default="tale,30m")
    parser.add_argument("--cases", default="", help="letters of those that are measured; empty: all")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run, at least")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--profiles", type=Path, required=True, help="profiles that are used if they are there, and else written")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        models = {name: TALE if name == "tale" else Path(folder) / name for name in options.models.split(",")}
        for name in models.keys() - {"tale"}:
            make(models[name], **SHAPE)
        if not options.predict:
            print(describe())
            asyncio.run(measure_all(options, models))
        told = json.loads(options.json.read_text())
        cases, outcomes = [from_json(case) for case in told["cases"]], list[Outcome]()
        profiles = {name: Profile.load_file(options.profiles / f"{name}.yaml") for name in {case.model for case in cases}}
        for case in cases:
            outcomes.append(predicted(case, models[case.model], profiles[case.model]))
            show(outcomes[-1])
        written(options, {key: told[key] for key in ("machine", "seconds", "profiles")}, cases, outcomes)
    report(judge(outcomes))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
