"""What `baton simulate` says of a GPU beside what the GPU does: the load test on one worker that does both, and the same requests predicted
by the sheet of the device and by a profile that was measured on it.

    python benchmarks/gpu_predict.py OUT.json [--cpu-smoke] [--within 310]    measures, where the GPU is: five minutes
    python benchmarks/gpu_predict.py OUT.json --predict                       predicts, anywhere, and adds that to the same file

A whole cluster (`baton up`) of Llama 8B shapes with random weights in bfloat16. First the worker is profiled (`baton.predict.measure`, what
one worker can tell), then it gets several mixes at rates that are shares of what it would serve by that profile. Objectives are multiples
of an idle worker's times by the profile. What a part has found is in the file before the next one begins, and one that fails is told by
its error; cases that would end after `--within` seconds are left out, so the most important ones come first.

`--cpu-smoke` walks through the same with a toy. Exits with status 2 without a CUDA device, with 1 if a part failed.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import describe
from predicting import JUDGED, drive_measured, errors_of, fingerprint, idle, judged, middle, objectives, whole_offer
from shapes import LLAMA_8B, TINY, TOKENIZER_VOCAB, weight_bytes, write

from baton.cluster import config_layers
from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.pools import WorkerKind, sized
from baton.plan.shape import shape_of
from baton.plan.sheet import profile_of as of_sheet
from baton.predict.asker import Processes
from baton.predict.fitted import profile_of
from baton.predict.measure import Amount, measure_one
from baton.predict.predict import DRAWS, FIGURES, Offer, predict
from baton.predict.setting import setting_of
from baton.profile.file import Profile
from baton.profile.models import Work, step_seconds, works_of_prompt
from loadtest.cluster import RunningCluster
from loadtest.grpc_door import GrpcDoor
from loadtest.latency import tpot, ttft
from loadtest.plan import Workload
from loadtest.record import Record
from loadtest.slo import Slo
from loadtest.summary import summarise
from loadtest.window import Window

WARM_UP_S, COOL_DOWN_S, DRAIN_S = 3.0, 1.0, 4.0  # DRAIN_S: after the last request of a case, about
# Requests of each mix before anything is measured, one by one and at once: kernels are compiled when a step first has their shape.
ALONE, TOGETHER = 6, 24
WARM_WITHIN_S, PROFILE_WITHIN_S, ANSWER_S = 60.0, 110.0, 60.0
# Objectives, in times of an idle worker. One that does both computes prompts in many of its steps at the higher rates, and its TPOT is then
# about twice an idle one's: a nearer objective would decide over most requests by a tenth of a step.
TTFT_TIMES, TPOT_TIMES = 2.5, 3.0
DECODING = 64  # sequences at once, for what a worker would serve
BELIEVED = 2.0  # a profile that differs by more than that from the sheet in what would be served chooses no rate


@dataclass(frozen=True, slots=True)
class Case:
    """`share`: of what a worker would serve."""

    name: str
    share: float
    load: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    raw: Mapping[str, Any]
    amount: Amount
    chunk: int  # tokens of a step
    longest: int
    cases: tuple[Case, ...]
    seconds: float  # of each case
    most: float  # requests/s
    settings: Mapping[str, str] = field(default_factory=dict)

    def load(self, case: Case) -> dict[str, Any]:
        return {**case.load, "max_tokens": self.longest}


# A pool that every device of 80 GB holds beside the weights, and room for 64 sequences of 6,000 tokens: what runs at once never fills it.
POOL_MIB = 48 << 10
SHARE = 0.9  # of the device's memory: this process, which made the weights there, holds some
CHAT: Mapping[str, Any] = {"input": "500-3000", "output": "100-200"}
LONG: Mapping[str, Any] = {"input": "4000-8000", "output": "64"}
TALK: Mapping[str, Any] = {"input": "100-400", "output": "300"}
SHARED: Mapping[str, Any] = {"input": "2000-3000", "output": "100", "hit_rate": 0.5, "prefix_tokens": 1536, "prefix_branching": 6}
DEVICE = Sizes(
    LLAMA_8B, Amount((256, 512, 1024, 2048, 4096, 8000), (0.0, 0.5), (1, 4, 16, 64), (128, 1000, 4000), (4, 32), 48, 3, 60), 8192, 9000,
    (
        Case("chat", 0.25, CHAT), Case("chat, more", 0.6, CHAT), Case("talk, more", 0.6, TALK), Case("long, more", 0.6, LONG),
        Case("shared prefixes", 0.5, SHARED), Case("talk", 0.25, TALK), Case("long", 0.25, LONG), Case("chat, much", 0.85, CHAT),
    ),
    18.0, 40.0,
    {
        "engine.device": "cuda", "engine.attention_backend": "triton", "model.dtype": "bfloat16", "engine.kv_memory_mib": str(POOL_MIB),
        "decode.gpus": str(SHARE), "kv.transport": "cuda_ipc",
    },
)  # fmt: skip
WALK = Sizes(
    {**TINY, "vocab_size": TOKENIZER_VOCAB, "dtype": "float32"}, Amount((32, 64, 128), (0.0, 0.5), (1, 4), (32, 100), (2,), 16, 2, 6), 512,
    400,
    (
        Case("chat", 0.2, {"input": "30-100", "output": "8"}),
        Case("shared prefixes", 0.2, {"input": "60-120", "output": "4-8", "hit_rate": 0.5, "prefix_tokens": 48, "prefix_branching": 2}),
    ),
    6.0, 8.0, {"engine.device": "cpu", "engine.threads": "1"},
)  # fmt: skip


def settings(sizes: Sizes) -> dict[str, str]:
    same = {"model.max_model_len": str(sizes.longest), "engine.max_num_batched_tokens": str(sizes.chunk)}
    pools = {"prefill.replicas": "0", "decode.replicas": "1", "kv.transport": "tcp", "telemetry.log_level": "warning"}
    return {**same, **pools, **sizes.settings}


def sheet_profile(raw: Mapping[str, Any], device: str) -> Profile:
    """What `baton simulate --sheet` takes. `device`: as its driver names it; of one that the sheet does not have, an H200's."""
    known = next((each for each in DEVICES.values() if each.product == device.replace(" ", "-")), DEVICES["h200"])
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(dict(raw)))
        shape = shape_of(name)
    return sized(of_sheet(shape, known, MEASURED), WorkerKind(known), shape)


def serves(profile: Profile, load: Mapping[str, Any], chunk: int) -> float:
    """Requests/s that would keep a worker busy: each takes the steps of its prompt, and its share of those in which DECODING decode."""
    prompt, output = middle(load["input"]), middle(load["output"])
    cached = int(prompt * load.get("hit_rate", 0.0))
    step = profile.values("step")
    prefill = sum(step_seconds(step, profile.form, work) for work in works_of_prompt(prompt, cached, chunk))
    decode = step_seconds(step, profile.form, Work(decodes=DECODING, context=DECODING * (prompt + output // 2)))
    return 1 / (prefill + output * decode / DECODING)


def rate_of(case: Case, sizes: Sizes, profile: Profile, sheet: Profile | None) -> float:
    """Requests/s, with two digits. `sheet`: what must not be far from the profile, if anything."""
    most = serves(profile, case.load, sizes.chunk)
    if sheet is not None:
        formula = serves(sheet, case.load, sizes.chunk)
        most = min(max(most, formula / BELIEVED), formula * BELIEVED)
    return float(f"{min(case.share * most, sizes.most):.2g}")


def asked(cell: Mapping[str, Any], seconds: float) -> tuple[Offer, Slo]:
    """Of a case as it is in the file: the same on every machine."""
    window = Window(seconds, WARM_UP_S, COOL_DOWN_S)
    return whole_offer(Workload(duration_s=seconds, **cell["load"]), cell["rate"], window), Slo(*cell["slo"])


@contextmanager
def part(found: dict[str, Any], name: str, keep: Callable[[], None]) -> Iterator[None]:
    """A part of the run: its seconds, and its error if it failed, after which the next one goes on."""
    cell: dict[str, Any] = {}
    found["parts"][name] = cell
    began = time.perf_counter()
    try:
        yield
    except Exception:
        cell["failed"] = traceback.format_exc()[-3000:]
    cell["seconds"] = round(time.perf_counter() - began, 2)
    keep()
    print(f"{name}: {cell['seconds']:.1f} s{'; FAILED: ' + cell['failed'] if 'failed' in cell else ''}", flush=True)


async def warm(address: str, sizes: Sizes) -> None:
    """Nothing that is compiled once is measured."""
    async with GrpcDoor(address, "warm") as door, asyncio.timeout(WARM_WITHIN_S):
        for load in {json.dumps(case.load): sizes.load(case) for case in sizes.cases}.values():
            items = whole_offer(Workload(**load), 1.0, Window(30.0)).items
            for item in items[:ALONE]:
                await door.ask(item.tokens, 2, ANSWER_S, lambda count: None)
            more = items[ALONE : ALONE + TOGETHER]
            await asyncio.gather(*(door.ask(item.tokens, item.output_tokens, ANSWER_S, lambda count: None) for item in more))


def lines(records: Sequence[Record]) -> list[str]:
    """Of each request: when it was due (s), tokens of its prompt, of these cached, tokens of its answer, TTFT and TPOT (ms)."""
    told = []
    for one in records:
        times = [f"{1000 * each:.2f}" if each is not None else one.outcome for each in (ttft(one), tpot(one))]
        told.append(f"{one.scheduled:.3f} {one.prompt_tokens} {one.cached_tokens} {one.output_tokens} {' '.join(times)}")
    return told


async def measured(address: str, name: str, cell: dict[str, Any], seconds: float) -> None:
    """Adds to the case."""
    offer, slo = asked(cell, seconds)
    cell["requests"] = fingerprint(offer)
    async with asyncio.timeout(seconds + offer.timeout_s + 15):
        done = await drive_measured(address, offer, name)
    summary = summarise(done.records, offer.window, slo, due=done.due)
    cell |= {"void": summary.void, "measured": {figure: of(summary) for figure, of in FIGURES.items()}}
    cell |= {"counted": summary.requests, "failures": dict(summary.failures), "at once": summary.mean_concurrent_requests}
    cell |= {"lag P99 (ms)": summary.lag_ms.p99, "each": lines(done.records)}


async def measure(sizes: Sizes, folder: Path, found: dict[str, Any], keep: Callable[[], None], ends: float) -> None:
    """Fills `found`. No case begins that would not have ended at `ends`, of `time.perf_counter`."""
    sheet = sheet_profile(sizes.raw, found["device"])
    profile, endpoints = sheet, dict[str, str]()
    async with AsyncExitStack() as stack:
        with part(found, "start", keep):
            endpoints = await stack.enter_async_context(RunningCluster({**settings(sizes), "model.path": str(folder)}, "predict"))
            found["engine"] = Processes.of(endpoints["admin"]).facts
        if "failed" in found["parts"]["start"]:
            return
        with part(found, "warm", keep):
            await warm(endpoints["grpc"], sizes)
        with part(found, "profile", keep):
            async with asyncio.timeout(PROFILE_WITHIN_S):
                told = await measure_one(endpoints, sizes.amount, sizes.chunk)
            found["rows"] = told.rows  # another form of the models can be fitted to them later
            profile = profile_of(told, "8b", {}, sizes.amount, sizes.chunk)
            found["profile"] = profile.plain()
        for case in sizes.cases:
            if time.perf_counter() + sizes.seconds + DRAIN_S > ends:
                found["left out"].append(case.name)
                continue
            with part(found, case.name, keep):
                rate = rate_of(case, sizes, profile, sheet if found["device"] else None)
                first, token, _ = idle(profile, middle(case.load["input"]), middle(case.load["output"]), sizes.chunk)
                slo = objectives(first, token, TTFT_TIMES, TPOT_TIMES)
                cell = {"share": case.share, "rate": rate, "load": sizes.load(case), "slo": [slo.ttft_s, slo.tpot_s]}
                await measured(endpoints["grpc"], case.name, cell, sizes.seconds)
                found["cases"][case.name] = cell


def predicted(found: dict[str, Any], draws: int) -> None:
    """Adds `predicted` to the cases, and the errors. Raises ValueError if the requests made here are not those that were measured."""
    profiles = {"sheet": sheet_profile(found["raw"], found["device"])}
    if "profile" in found:
        profiles["fit"] = Profile.read(found["profile"])
    found["sheet"] = {"source": profiles["sheet"].source, "engine": dict(profiles["sheet"].engine)}
    for name, cell in found["cases"].items():
        offer, slo = asked(cell, found["seconds"])
        if fingerprint(offer) != cell["requests"]:
            raise ValueError(f"{name}: other requests than were measured: this Python draws other numbers")
        for by, profile in profiles.items():
            config = config_layers.load(env={}, flags={**found["settings"], "model.path": "model"}).config
            # No cores that are shared: of sixteen, router, worker and load generator each have their own.
            told = predict(setting_of(config, profile), profile, offer, slo, draws)
            figures = {figure: [each.value, each.low, each.high] for figure, each in told.figures.items()}
            cell.setdefault("predicted", {})[by] = figures
            cell.setdefault("doubts", {})[by] = list(told.doubts)
    found["judged"] = {by: judge(found["cases"], by) for by in profiles}


def judge(cases: Mapping[str, Any], by: str) -> dict[str, Any]:
    """Of one profile's predictions. Cases that are void or were not predicted are none."""
    sound = {name: cell for name, cell in cases.items() if not cell.get("void") and by in cell.get("predicted", {})}
    return errors_of(each for name, cell in sound.items() for each in judged(name, cell["measured"], cell["predicted"][by]))


def report(found: Mapping[str, Any]) -> None:
    """For a person."""
    for name, cell in found["cases"].items():
        flaw = f"; VOID: {cell['void']}" if cell["void"] else ""
        limits = f"TTFT {1000 * cell['slo'][0]:g}, TPOT {1000 * cell['slo'][1]:g} ms"
        print(f"{name}, {cell['rate']:g}/s, {cell['at once']:.1f} at once, {limits}, failed {cell['failures']}{flaw}")
        told = {by: {each.figure: each for each in judged(name, cell["measured"], of)} for by, of in cell.get("predicted", {}).items()}
        for figure in JUDGED:
            if (value := cell["measured"][figure]) is not None:
                each = [f"{by} {one[figure].value:.4g}, {one[figure].error:+.0%}" for by, one in told.items() if figure in one]
                print(f"  {figure:14} {value:8.4g}  {'; '.join(each)}")
    for by, of in found.get("judged", {}).items():
        print(f"relative errors by the {by}")
        for figure, row in of["errors"].items():
            print(f"  {figure:18} {row['cases']:3} cases, median {row['median']:6.1%}, P90 {row['p90']:6.1%}, worst {row['worst']:6.1%}")
        if of["covered"] is not None:
            print(f"  the 90 % intervals cover {of['covered']:.0%}; outside: {'; '.join(of['outside'])}")
    if found["left out"]:
        print(f"left out, as there was no time: {', '.join(found['left out'])}")


def main() -> int:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu-smoke", action="store_true")
    parser.add_argument("--within", type=float, default=310.0, help="seconds, for all that is measured")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--draws", type=int, default=DRAWS, help="further predictions, for the intervals")
    options = parser.parse_args()
    if options.predict:
        found = json.loads(options.out.read_text())
        predicted(found, options.draws)
        options.out.write_text(json.dumps(found, indent=1))
        report(found)
        return 0
    if not options.cpu_smoke and not torch.cuda.is_available():
        print("gpu_predict.py: no CUDA device here; --cpu-smoke walks through the code without one", file=sys.stderr)
        return 2
    sizes, device = (WALK, "") if options.cpu_smoke else (DEVICE, torch.cuda.get_device_name())
    found = {
        "machine": f"{device or 'no CUDA device'}; {describe()}", "device": device, "seconds": sizes.seconds, "raw": dict(sizes.raw),
        "weights": weight_bytes(sizes.raw), "settings": settings(sizes), "amount": asdict(sizes.amount), "parts": {}, "cases": {},
        "left out": [],
    }  # fmt: skip

    def keep() -> None:
        options.out.write_text(json.dumps(found, indent=1))

    with tempfile.TemporaryDirectory() as name, part(found, "whole", keep):
        folder = Path(name) / "model"
        with part(found, "checkpoint", keep):
            write(sizes.raw, folder, "cuda" if device else "cpu")
        if device:
            torch.cuda.empty_cache()
        asyncio.run(measure(sizes, folder, found, keep, began + options.within))
    report(found)
    return int(any("failed" in each for each in found["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
