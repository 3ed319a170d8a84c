"""This engine compared with its peers on one machine: prefill, decode, a mixed workload, memory and start-up, as ratios and shares.

    python benchmarks/peers.py --install llama.cpp openvino ctranslate2 onnxruntime vllm     # once; each in an environment of its own
    python benchmarks/peers.py [--quick] [--json FILE] [--picture FILE] [--samples FILE]
    python benchmarks/peers.py --tables FILE [--json FILE] [--picture FILE]     # from the samples of an earlier run

All engines get the same random-initialised Llamas, token ids, cores, threads, batch limits and room for KV, and are stopped while another
one is measured. Within a cell they take turns; each repeat has prompts of its own. Ceilings are measured between the cells. Each
sample is written to a file as it comes, and tables are made from the file. A peer that is not installed or fails, and a ceiling that cannot
be measured, is a hole with a name. `transformers`, CTranslate2 and ONNX Runtime cannot admit a request while others run, so
their mixed workload runs in padded batches of 16.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import describe
from peers.cells import Cell, Model, Room, decode, mixed, prefill, room, same_tokens, warm
from peers.engines import ENGINES, PACKAGES, REFERENCE, Engine, Places, cache_home, environment
from peers.process import Driver, DriverError
from peers.record import Record, lines, results
from peers.report import picture, table
from safetensors.numpy import load_file, save_file

from baton.engine.machine import available_memory
from baton.models.folder import EOS_ID
from baton.models.make_small import make

MODELS = {
    "small": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "vocab": 4096, "context": 4096},
    "large": {"hidden": 768, "layers": 16, "heads": 12, "kv_heads": 4, "vocab": 4096, "context": 4096},
}
CHEAP = (prefill(512), prefill(2048), decode(1), decode(8))
ALL = (*CHEAP, decode(32), mixed(32))
QUICK = (prefill(512), decode(1), decode(8), mixed(8))
CELL_DEADLINE_S, START_DEADLINE_S, CONVERT_DEADLINE_S = 300, 300, 600
RESTARTS_BELOW_S = 5.0  # an engine that starts faster is started once per repeat, to measure the spread
SPARE_BYTES = 3 << 30


class Run:
    """The engines that take part, and the record of what they do."""

    def __init__(self, options: argparse.Namespace, record: Record) -> None:
        self.options, self.record = options, record
        self.places = Places(options.cache)
        self.ceilings_end: str | None = None  # why there are none any more
        self.engines = [engine for engine in ENGINES if not options.engines or engine.name in options.engines]
        for engine in list(self.engines):
            if not self.places.installed(engine.package):
                self.leave_out(engine, f"not installed: python benchmarks/peers.py --install {engine.package}")

    def drive(self, driver: str, package: str | None, name: str, more: Mapping[str, str]) -> Driver:
        settings = {**environment(driver, self.options.threads, self.options.cache), **more}
        return Driver(self.places.command(driver, package), settings, self.places.log(name))

    def leave_out(self, engine: Engine, why: object) -> None:
        self.engines.remove(engine)
        self.hole(engine.label, why)

    def hole(self, what: str, why: object) -> None:
        self.record.add(hole=what, why=str(why))
        print(f"left out: {what}: {why}", file=sys.stderr, flush=True)

    # Preparation

    def checkpoint(self, name: str) -> Path:
        recipe = {**MODELS[name], "seed": self.options.seed}
        path = self.places.model(name, recipe)
        if not path.exists():
            half = path.with_suffix(".part")
            make_silent(half, recipe)
            half.rename(path)
        return path

    def converted(self, engine: Engine, checkpoint: Path) -> Path:
        if engine.converted is None:
            return checkpoint
        path = checkpoint.with_name(f"{checkpoint.name}-{engine.package}-{engine.converted}")
        if not path.exists():
            half = path.with_suffix(".part")
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir(parents=True)
            message = {"do": "convert", "model": str(checkpoint), "out": str(half), "precision": engine.converted}
            with self.drive(engine.driver, engine.package, f"convert {engine.label}", engine.environment) as driver:
                driver.ask(message, CONVERT_DEADLINE_S)
            half.rename(path)
        return path

    # Measuring

    def model(self, name: str, cells: Sequence[Cell], deadline: float) -> None:
        checkpoint, space = self.checkpoint(name), room(cells)
        model = Model.of(json.loads((checkpoint / "config.json").read_text()), name)
        self.record.add_model(model, space.tokens, MODELS[name])
        with ExitStack() as stack:
            ceilings = stack.enter_context(self.drive("ceilings", None, "ceilings", {"THP_MEM_ALLOC_ENABLE": "1"}))
            self.measure_ceilings(ceilings, {"do": "start", "threads": self.options.threads})
            drivers: dict[str, Driver] = {}
            for engine in list(self.engines):
                try:
                    seconds, driver, found = self.started(engine, checkpoint, model, space)
                except DriverError as error:
                    self.leave_out(engine, f"{name}: {error}")
                    continue
                stack.callback(driver.end)
                drivers[engine.label] = driver
                needed = round(model.parameters * engine.bytes_per_weight) + engine.kv_bytes(model, space)
                self.record.add(model=name, engine=engine.label, start_s=seconds, needed=needed, version=found)
                print(f"  {engine.label}: first token after {seconds[0]:.1f} s", file=sys.stderr, flush=True)
            self.rounds(model, cells, drivers, ceilings, deadline)

    def measure_ceilings(self, ceilings: Driver, message: Mapping[str, Any]) -> None:
        """Without them, the run goes on."""
        if self.ceilings_end is not None:
            return
        try:
            with ceilings.awake():
                answer = ceilings.ask(message, CELL_DEADLINE_S)
        except DriverError as error:
            self.ceilings_end = str(error)
            self.hole("ceilings", error)
            return
        for name, value in answer.get("found", {}).items():
            self.record.add(ceiling=name, value=value)
        for name, why in answer.get("missing", {}).items():
            self.record.add(hole=f"ceiling, {name}", why=why)

    def started(self, engine: Engine, checkpoint: Path, model: Model, space: Room) -> tuple[list[float], Driver, str]:
        """Seconds to the first token of each start, the process of the last start, asleep, and the engine's version."""
        if (free := available_memory()) < SPARE_BYTES:
            raise DriverError(f"only {free / 2**30:.1f} GiB of memory are left")
        message = engine.message(self.converted(engine, checkpoint), model, space, self.options.threads)
        first = Cell("first token", "prefill", ((64, 1),))
        seconds: list[float] = []
        while True:
            driver = self.drive(engine.driver, engine.package, engine.label, engine.environment)
            try:
                found = driver.ask(message, START_DEADLINE_S)["version"]
                driver.ask({"do": "run", "prompts": first.prompts(model.vocab, "0"), "outputs": first.outputs()}, CELL_DEADLINE_S)
            except BaseException:
                driver.end()
                raise
            seconds.append(time.perf_counter() - driver.began)
            if len(seconds) >= self.options.repeats or seconds[-1] > RESTARTS_BELOW_S:
                driver.sleep()
                return seconds, driver, found
            driver.end()

    def rounds(self, model: Model, cells: Sequence[Cell], drivers: Mapping[str, Driver], ceilings: Driver, deadline: float) -> None:
        cost: dict[str, float] = {}
        for repeat in range(self.options.repeats):
            for cell in cells:
                began = time.monotonic()
                if repeat and began + cost[cell.name] > deadline:
                    self.record.add(note=f"{model.name} {cell.name}: no time for repeat {repeat + 1}")
                    continue
                self.measure_ceilings(ceilings, {"do": "run"})
                self.turn(model, cell, repeat, drivers)
                cost[cell.name] = time.monotonic() - began
                print(f"  {model.name} {cell.name}, repeat {repeat + 1}: {cost[cell.name]:.0f} s", file=sys.stderr, flush=True)

    def turn(self, model: Model, cell: Cell, repeat: int, drivers: Mapping[str, Driver]) -> None:
        """Runs every engine once, in an order that rotates with each repeat."""
        engines = [engine for engine in self.engines if cell.kind in engine.kinds]
        shift = repeat % max(1, len(engines))
        seed = f"{self.options.seed} {repeat}"
        tokens: dict[str, list[list[int]]] = {}
        first = {"do": "run", "prompts": warm(cell).prompts(model.vocab, seed + " warm"), "outputs": warm(cell).outputs()}
        timed = {"do": "run", "prompts": cell.prompts(model.vocab, seed), "outputs": cell.outputs()}
        for engine in (*engines[shift:], *engines[:shift]):
            this = {"model": model.name, "engine": engine.label}
            try:
                with drivers[engine.label].awake() as driver:
                    driver.ask(first, CELL_DEADLINE_S)
                    answer = driver.ask(timed, CELL_DEADLINE_S)
                rate = cell.tokens_per_s(answer["times"])
            except (DriverError, ValueError) as error:
                self.leave_out(engine, f"{model.name} {cell.name}, repeat {repeat + 1}: {error}")
                continue
            tokens[engine.label] = answer["tokens"]
            self.record.add(**this, cell=cell.name, repeat=repeat, tokens_per_s=rate)
            self.record.add(**this, peak_rss=drivers[engine.label].peak_rss())
        for label, theirs in tokens.items():
            if REFERENCE.label in tokens:
                self.record.add(model=model.name, engine=label, same=same_tokens(theirs, tokens[REFERENCE.label]))


def make_silent(path: Path, recipe: Mapping[str, int]) -> None:
    """Makes a random Llama that never generates a special token, so no engine can end a request early."""
    make(path, **recipe)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][EOS_ID] = 0  # like those of the other special tokens
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def measure(options: argparse.Namespace, record: Record) -> None:
    began = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)  # every driver inherits it
    machine = describe()
    record.add(
        run={
            "machine": machine,
            "commit": machine.rpartition("commit ")[2],
            "cores": cores,
            "threads": options.threads,
            "seed": options.seed,
            "versions": {"torch": version("torch")},
        }
    )
    run = Run(options, record)
    for place, name in enumerate(options.models):
        cells = QUICK if options.quick else ALL if name == "small" or options.all_cells else CHEAP
        left = options.minutes * 60 - (time.monotonic() - began)
        run.model(name, cells, time.monotonic() + left / (len(options.models) - place))
        record.add(minutes=(time.monotonic() - began) / 60)


def show(results: Mapping[str, Any]) -> None:
    print(results["machine"])
    print(f"cores {results['cores']}, {results['threads']} threads, seed {results['seed']}, {results['minutes']:.0f} minutes")
    print("versions: " + ", ".join(f"{name} {found}" for name, found in results["versions"].items()))
    for name, one in results["ceilings"].items():
        print(f"ceiling, {name}: {one['median']:.1f} ±{one['spread']:.1f}")
    print(f"tokens/s: median ± half the range of {results['repeats']}; in brackets ÷ transformers float32, the median of pairs")
    for name, model in results["models"].items():
        rows = [row for row in results["rows"] if row["model"] == name]
        print(f"\n{name}: {model['parameters'] / 1e6:.0f} M parameters, {model['read_per_token'] / 1e6:.0f} M read per token")
        print(table(rows, cell_names(rows)))
    for label, why in results["left_out"].items():
        print(f"left out: {label}: {why}")
    for note in results["notes"]:
        print(note)


def cell_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(cell for row in rows for cell in row["cells"]))


def draw(results: Mapping[str, Any], file: Path) -> None:
    titles = {name: f"{model['parameters'] / 1e6:.0f} M parameters" for name, model in results["models"].items()}
    spread = "one repeat" if results["repeats"] == 1 else f"median and range of {results['repeats']}"
    note = f"{results['machine'].partition(', Linux')[0]}; {results['threads']} threads; {spread}"
    picture(results["rows"], titles, cell_names(results["rows"]), file, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", nargs="+", choices=PACKAGES, metavar="NAME", help=f"any of {', '.join(PACKAGES)}")
    parser.add_argument("--cache", type=Path, default=cache_home(), help="environments, models, conversions, logs (%(default)s)")
    parser.add_argument("--engines", nargs="+", choices=sorted({engine.name for engine in ENGINES}), metavar="NAME")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--all-cells", action="store_true", help="run decode b32 and mixed on the large model, too")
    parser.add_argument("--quick", action="store_true", help="one repeat of few cells on the small model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20, help="after the first repeat, skip any that would end later than this")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--samples", type=Path, help="where samples are written as they come (in the cache, named for the time)")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="measure nothing: tables of these samples")
    options = parser.parse_args()
    if options.install:
        failed = [name for name in options.install if not installed(Places(options.cache), name)]
        sys.exit(f"not installed: {', '.join(failed)}" if failed else 0)
    if options.quick:
        options.models, options.repeats = ["small"], 1
    file = options.tables or options.samples or options.cache / "samples" / f"{time.strftime('%Y%m%dT%H%M%S')}.jsonl"
    if not options.tables:
        file.unlink(missing_ok=True)
        print(f"samples: {file} (tables of them, also while this runs: --tables {file})", file=sys.stderr, flush=True)
        measure(options, Record(file))
    found = results(lines(file))
    show(found)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.picture:
        draw(found, options.picture)


def installed(places: Places, name: str) -> bool:
    try:
        places.install(name)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
