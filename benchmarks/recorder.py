"""What the flight recorder costs: processor time with it and without, in turns, in one process.

    python benchmarks/recorder.py [--json FILE]

A worker: a batch of 8 requests of 100 tokens, from its arrival to the last of 40 tokens, on one thread, on `tale` and on an engine whose
steps compute nothing: there the recorder is a large part, and its cost is not lost in the noise. A router: its own path of a request (see
`observability.py`), without the doors. What the recorder puts around methods is taken away and put back between two measurements, so both
arms are the same objects.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from machine import describe
from observability import burn, make_service

import baton.models
from baton.cluster.config import RecorderConfig
from baton.cluster.lifecycle import settle
from baton.cluster.telemetry import Tracer
from baton.engine.build import build
from baton.engine.core.engine import Engine
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from baton.models.make_small import make_toy
from baton.worker.taped import EngineTape
from router.journal import Journal
from router.service import GenerateService
from router.taped import RouterTape
from router.tokenizer import Tokenizer

SEED = 12
BATCH, PROMPT, OUTPUT = 8, 100, 40
PAIRS = {"tale": 24, "idle engine": 400, "router": 60}
RECORDED = RecorderConfig()
LIMITS = RECORDED.minutes * 60, int(RECORDED.mib * 2**20)


class Switch:
    """What `follow` puts around the methods of some objects, which can be taken away and put back."""

    def __init__(self, things: Iterable[Any], follow: Callable[[], object]) -> None:
        before = [(thing, dict(vars(thing))) for thing in things]
        self._kept = follow()
        changed = [(thing, name, was.get(name), now) for thing, was in before for name, now in vars(thing).items() if callable(now)]
        self._changed = [each for each in changed if each[2] is not each[3]]
        assert self._changed

    def turn(self, on: bool) -> None:
        for thing, name, was, wrapped in self._changed:
            if on or was is not None:
                setattr(thing, name, wrapped if on else was)
            elif name in vars(thing):
                delattr(thing, name)


def in_turns(switch: Switch, spend: Callable[[], float], pairs: int) -> dict[str, float]:
    """Medians of seconds; the quartiles of what recording adds in a pair; and `whole_s`, what it adds on average, which has what happens
    rarely: a new stretch of the ring, a full collection of garbage."""
    rng, spent = random.Random(SEED), {True: list[float](), False: list[float]()}
    for _ in range(pairs + 2):
        for on in rng.sample((True, False), 2):
            switch.turn(on)
            spent[on].append(spend())
    without, with_ = spent[False][2:], spent[True][2:]  # the first ones warm up
    low, more, high = statistics.quantiles([on - off for on, off in zip(with_, without, strict=True)], n=4)
    told = {"off_s": statistics.median(without), "on_s": statistics.median(with_), "more_s": more, "low_s": low, "high_s": high}
    return told | {"whole_s": statistics.mean(with_) - statistics.mean(without)}


def serve(engine: Engine, rng: random.Random) -> float:
    """Processor seconds of one batch."""
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    prompts = [rng.choices(range(10, 250), k=PROMPT) for _ in range(BATCH)]
    before = time.process_time()
    for prompt in prompts:
        engine.add(Sequence(str(rng.random()), prompt, PROMPT, params, b""))
    while engine.sequences:
        engine.step()
    return time.process_time() - before


def worker(model: Path, pairs: int) -> dict[str, float]:
    engine = build(Options.of(model, threads=1, kv_memory_mib=64)).engine
    switch, rng = Switch((engine, engine.runner), lambda: EngineTape(*LIMITS, engine)), random.Random(SEED)
    return in_turns(switch, lambda: serve(engine, rng), pairs)


def router(tokenizer: Tokenizer, pairs: int) -> dict[str, float]:
    """Of one request."""
    loop = asyncio.new_event_loop()
    service = make_service(tokenizer, Journal, Tracer())
    objects = followed(service)
    switch = Switch(objects.values(), lambda: RouterTape(*LIMITS, loop.time, objects))
    return in_turns(switch, lambda: loop.run_until_complete(burn(service, 1)), pairs)


def followed(service: GenerateService) -> dict[str, Any]:
    """As `RouterProcess` names them."""
    model, conduct = service._model, service._dispatcher.conduct
    journal = service._journal
    return {
        "admission": service._gate._admission, "members": model.members, "index": model.index, "policy": service._dispatcher.policy,
        "trust": model.trust, "outliers": conduct.outliers, "budget": conduct.budget, "degradation": journal.degradation,
        "split": journal.split,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = f"{describe()}, load average {os.getloadavg()[0]:.1f} at the start"
    print(machine)
    results: dict[str, Any] = {"machine": machine, "seed": SEED, "batch": BATCH, "prompt": PROMPT, "output": OUTPUT}
    settle()  # as each process does
    with tempfile.TemporaryDirectory() as folder:
        make_toy(Path(folder) / "toy")
        results["tale"] = worker(Path(baton.models.__file__).parent / "tale", PAIRS["tale"])
        results["idle engine"] = worker(Path(folder) / "toy", PAIRS["idle engine"])
        results["router"] = router(Tokenizer.load(Path(folder) / "toy"), PAIRS["router"])
    for name, told in results.items():
        if name in PAIRS:
            cells = [f"{told[key] * 1e6:9.1f}" for key in ("off_s", "on_s", "more_s", "low_s", "high_s", "whole_s")]
            print(
                f"{name:12} {cells[0]} µs without, {cells[1]} with; a pair {cells[2]} more ({cells[3]} … {cells[4]}), on average {cells[5]}"
            )
    more = results["idle engine"]["more_s"] / BATCH + results["router"]["more_s"]
    request_s = results["tale"]["off_s"] / BATCH + results["router"]["off_s"]
    print(f"a request on `tale`: {more * 1e6:.0f} µs of {request_s * 1e3:.1f} ms, {more / request_s:.2%}; the doors are not counted")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
