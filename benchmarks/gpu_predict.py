"""What the simulator says of a GPU beside what the GPU does: the load test on one worker that does both, and the same requests predicted by
the sheet of the device and by a profile that was measured on it.

    python benchmarks/gpu_predict.py OUT.json [--cpu-smoke]    measures: where the GPU is, for about four minutes
    python benchmarks/gpu_predict.py OUT.json --predict        predicts, anywhere, and writes that into the same file

A whole cluster (`baton up`) of Llama 8B shapes with random weights in bfloat16. First the worker is profiled (`baton.predict.measure`),
then it gets several mixes, most of them at two rates. Objectives are multiples of the times of an idle worker by its profile.
`--cpu-smoke` walks through the same with a toy. Exits with status 2 without a CUDA device.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe
from shapes import LLAMA_8B, TINY, TOKENIZER_VOCAB, weight_bytes, write
from simulate import JUDGED, SEED, TAIL, TPOT_TIMES, TTFT_TIMES, error, idle, measured

from baton.cluster import config_layers
from baton.plan import hardware, sheet
from baton.plan.shape import shape_of
from baton.predict.measure import Amount, measure_one, profile_of
from baton.predict.predict import FIGURES, Offer, predict
from baton.predict.setting import setting_of
from baton.profile.file import Profile
from loadtest.cluster import RunningCluster
from loadtest.grpc_door import GrpcDoor
from loadtest.plan import Workload
from loadtest.slo import Slo
from loadtest.summary import summarise
from loadtest.window import Window

WARM_UP_S, COOL_DOWN_S = 3.0, 1.0
WARM = 20  # requests at once of each mix, before anything is measured: shapes of steps are compiled or captured when they are first met
ANSWER_S = 60.0
LONGEST = 9000  # tokens of a prompt and its output


@dataclass(frozen=True, slots=True)
class Case:
    """`rate`: requests/s."""

    name: str
    rate: float
    load: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    raw: Mapping[str, Any]
    amount: Amount
    chunk: int  # tokens of a step
    longest: int
    cases: tuple[Case, ...]
    seconds: float  # of each case
    settings: Mapping[str, str] = field(default_factory=dict)


CHAT: Mapping[str, Any] = {"input": "500-3000", "output": "150"}
LONG: Mapping[str, Any] = {"input": "4000-8000", "output": "64"}
TALK: Mapping[str, Any] = {"input": "100-400", "output": "300"}
SHARED: Mapping[str, Any] = {"input": "2000-3000", "output": "100", "hit_rate": 0.4, "prefix_tokens": 1024, "prefix_branching": 6}
DEVICE = Sizes(
    LLAMA_8B, Amount((256, 512, 1024, 2048, 4096, 8000), (0.0, 0.5), (1, 4, 16, 64), (128, 1000, 3000), (4, 32), 48, 3, 60), 8192, LONGEST,
    (
        Case("chat", 4, CHAT), Case("chat, more", 9, CHAT), Case("long", 1.5, LONG), Case("long, more", 3.5, LONG), Case("talk", 6, TALK),
        Case("talk, more", 14, TALK), Case("shared prefixes", 6, SHARED),
    ),
    16.0, {"engine.device": "cuda", "engine.attention_backend": "triton", "model.dtype": "bfloat16"},
)  # fmt: skip
WALK = Sizes(
    {**TINY, "vocab_size": TOKENIZER_VOCAB, "dtype": "float32"}, Amount((32, 64, 128), (0.0, 0.5), (1, 4), (32, 100), (2,), 16, 2, 6), 512,
    400, (Case("chat", 8, {"input": "30-100", "output": "8"}),), 6.0, {"engine.device": "cpu", "engine.threads": "1"},
)  # fmt: skip


def settings(sizes: Sizes, folder: Path) -> dict[str, str]:
    same = {"model.path": str(folder), "model.max_model_len": str(sizes.longest), "engine.max_num_batched_tokens": str(sizes.chunk)}
    pools = {"prefill.replicas": "0", "decode.replicas": "1", "kv.transport": "tcp", "telemetry.log_level": "warning"}
    return {**same, **pools, **sizes.settings}


def offer_of(case: Case, seconds: float) -> Offer:
    load = Workload(duration_s=seconds, max_tokens=LONGEST, **case.load)
    items, left_out = load.items(case.rate, SEED)
    if left_out:
        raise ValueError(f"{case.name}: requests were left out, {dict(left_out)}")
    times = [at for at, _ in zip(load.times(case.rate, SEED, items), items, strict=False)]
    return Offer(items, times, Window(seconds, WARM_UP_S, COOL_DOWN_S))


def objectives(case: Case, profile: Profile, chunk: int) -> Slo:
    least, _, most = case.load["input"].partition("-")
    first, token, _ = idle(profile, (int(least) + int(most)) // 2, int(case.load["output"]), chunk)
    return Slo(ttft_s=float(f"{first * TTFT_TIMES:.2g}"), tpot_s=float(f"{token * TPOT_TIMES:.2g}"))


async def warm(address: str, sizes: Sizes) -> None:
    """Nothing that is compiled once is measured."""
    async with GrpcDoor(address, "warm") as door:
        for case in sizes.cases:
            items = offer_of(case, 30.0).items[:WARM]
            await asyncio.gather(*(door.ask(item.tokens, item.output_tokens, ANSWER_S, lambda count: None) for item in items))


async def measure(sizes: Sizes, folder: Path, file: Path, found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Fills `found`, and writes the profile to `file`; `keep` is called when there is more. A case that fails is told by its error."""
    began = time.perf_counter()
    async with RunningCluster(settings(sizes, folder), "predict") as endpoints:
        found["start_s"] = time.perf_counter() - began
        await warm(endpoints["grpc"], sizes)
        found["warm_s"] = time.perf_counter() - began - found["start_s"]
        profile = profile_of(await measure_one(endpoints, sizes.amount, sizes.chunk), "8b", {}, sizes.amount, sizes.chunk)
        found["profile_s"] = time.perf_counter() - began - found["start_s"] - found["warm_s"]
        profile.save(file)
        keep()
        for case in sizes.cases:
            slo, offer = objectives(case, profile, sizes.chunk), offer_of(case, sizes.seconds)
            cell = found["cases"][case.name] = {"rate": case.rate, "load": dict(case.load), "slo": [slo.ttft_s, slo.tpot_s]}
            try:
                done = await measured(endpoints["grpc"], offer, case.name)
                summary = summarise(done.records, offer.window, slo, due=done.due)
                cell |= {"void": summary.void, "measured": {name: of(summary) for name, of in FIGURES.items()}}
            except Exception:  # the others have their figures
                cell["failed"] = traceback.format_exc()[-1500:]
            keep()


def predicted(sizes: Sizes, found: dict[str, Any], profiles: Mapping[str, Profile]) -> None:
    """Adds `predicted` to the cases of `found`."""
    for name, profile in profiles.items():
        config = config_layers.load(env={}, flags=settings(sizes, Path("model"))).config
        for case in sizes.cases:
            cell = found["cases"][case.name]
            if "measured" not in cell:
                continue
            # Router, worker and client have cores of their own there, of sixteen.
            told = predict(setting_of(config, profile), profile, offer_of(case, found["seconds"]), Slo(*cell["slo"]))
            cell.setdefault("predicted", {})[name] = {key: [each.value, each.low, each.high] for key, each in told.figures.items()}
    found["errors"] = {name: errors(found["cases"], name) for name in profiles}


def errors(cases: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Relative errors of one profile's predictions, by figure, and the share of figures that lie within their intervals. A figure that is 0
    in both is no case."""
    off: dict[str, list[float]] = {figure: [] for figure in JUDGED}
    covered = []
    for cell in cases.values():
        if cell.get("void") or "predicted" not in cell:
            continue
        for figure in JUDGED:
            value, told = cell["measured"].get(figure), cell["predicted"][name].get(figure)
            if value is not None and told is not None and (value or told[0]):
                off[figure].append(abs(error(value, told[0])))
                covered.append(told[1] <= value <= told[2])
    body = [each for figure, every in off.items() if figure != TAIL for each in every]
    table = {
        figure: {"cases": len(every), "median": float(np.median(every)), "worst": max(every)}
        for figure, every in {**off, "all but TTFT P99": body}.items()
        if every
    }
    return {"table": table, "covered": float(np.mean(covered)) if covered else None}


def sheet_profile(device: str, raw: Mapping[str, Any], engine: Mapping[str, Any]) -> Profile:
    """What `baton simulate --sheet` would take, with the sizes that the worker told."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(dict(raw)))
        shape = shape_of(name)
    made = sheet.profile_of(shape, hardware.DEVICES[device], hardware.MEASURED)
    return replace(made, engine={**engine, **made.engine})


def report(found: Mapping[str, Any]) -> None:
    for name, cell in found["cases"].items():
        for figure in JUDGED:
            if (value := cell.get("measured", {}).get(figure)) is not None:
                told = [
                    f"{of} {each[figure][0]:.3g} {error(value, each[figure][0]):+.0%}" for of, each in cell.get("predicted", {}).items()
                ]
                print(f"  {name}, {cell['rate']:g}/s, {figure}: {value:.4g}; {', '.join(told)}")
        if "failed" in cell:
            print(f"  {name}: {cell['failed']}")
    for name, each in found.get("errors", {}).items():
        print(f"{name}: {json.dumps(each)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu-smoke", action="store_true")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--sheet", default="h200", help="the device that the sheet is of")
    options = parser.parse_args()
    sizes = WALK if options.cpu_smoke else DEVICE
    if options.predict:
        found = json.loads(options.out.read_text())
        fitted = Profile.load_file(options.out.with_suffix(".yaml"))
        predicted(sizes, found, {"sheet": sheet_profile(options.sheet, sizes.raw, fitted.engine), "fit": fitted})
        options.out.write_text(json.dumps(found, indent=1))
        report(found)
        return 0
    if not options.cpu_smoke and not torch.cuda.is_available():
        print("gpu_predict.py: no CUDA device here; --cpu-smoke walks through the code without one", file=sys.stderr)
        return 2
    where = f"{'no CUDA device' if options.cpu_smoke else torch.cuda.get_device_name()}; {describe()}"
    found = {"where": where, "seconds": sizes.seconds, "weights": weight_bytes(sizes.raw), "cases": {}}
    profile = options.out.with_suffix(".yaml")

    def keep() -> None:
        options.out.write_text(json.dumps(found, indent=1))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write(sizes.raw, folder, "cpu" if options.cpu_smoke else "cuda")
        if not options.cpu_smoke:
            torch.cuda.empty_cache()
        asyncio.run(measure(sizes, folder, profile, found, keep))
    keep()
    report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
