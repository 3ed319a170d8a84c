"""Where the time of a decode step on the CPU goes: matrices, attention, the operations between them, sampling, and the rest (see `parts`),
and how fast it reads weights and KV beside the rate at which memory can be read. The arms take turns.

    python benchmarks/step_profile.py [--json FILE] [--picture FILE]
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe
from parts import PARTS, ROUNDS, SHAPE, Spent, arguments, draw, in_turns, mark_parts, middle, spent
from peers.cells import Model
from products import BYTES

from baton.engine.build import build
from baton.engine.core.engine import Engine
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from baton.engine.runner import ModelRunner
from baton.models.make_small import make

ARMS: dict[str, dict[str, Any]] = {
    "plain torch": {"compiled": False},
    "compiled, call by call": {},
    "compiled": {},
    "compiled, bfloat16": {"dtype": "bfloat16"},
    "compiled, int8": {"weight_dtype": "int8"},
    "compiled, int4": {"weight_dtype": "int4"},
}
CALL_BY_CALL = "compiled, call by call"  # not recorded
BATCHES, CONTEXT, STEPS = (1, 8), 512, 40


def decoding(engine: Engine, batch: int) -> None:
    for i in range(batch):
        prompt = [(17 * i + 31 * k) % 4000 + 10 for k in range(CONTEXT)]
        params = SamplingParams(max_tokens=1400, temperature=0.0, ignore_eos=True)
        engine.add(Sequence(f"{batch}-{i}-{time.perf_counter_ns()}", prompt, CONTEXT, params, b""))
    while any(seq.computed < CONTEXT for seq in engine.sequences.values()):
        engine.step()
    engine.step()


def measure(engine: Engine, batch: int) -> Spent:
    decoding(engine, batch)
    return spent(engine, STEPS)


def step_bytes(model: Model, arm: str, batch: int) -> float:
    """What a step must read."""
    kind = arm.rpartition(", ")[2]
    weights = model.read_parameters * BYTES.get(kind, 4)
    return weights + batch * CONTEXT * model.kv_numbers * (2 if kind == "bfloat16" else 4)


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        make(path := Path(folder) / "model", **SHAPE)
        model = Model.of(json.loads((path / "config.json").read_text()), "30 M")
        same: dict[str, Any] = {"threads": options.threads, "kv_memory_mib": 512, "prefix_caching": False}
        same |= {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
        engines = {arm: build(Options.of(path, **same, **more)).engine for arm, more in ARMS.items()}
    runner = engines[CALL_BY_CALL].runner
    assert isinstance(runner, ModelRunner)
    runner._steps = None
    mark_parts()
    samples, ceilings = in_turns(BATCHES, list(ARMS), lambda arm, batch: measure(engines[arm], batch), options.threads)
    reads = [each[f"read GB/s, {options.threads} threads"] for each in ceilings]
    print(describe())
    print(f"{options.threads} threads read {min(reads):.1f} … {max(reads):.1f} GB/s")
    found: dict[str, dict[str, Spent]] = {}
    for batch, arms in samples.items():
        print(f"\nbatch {batch}, {CONTEXT} tokens of context; ms a step, medians of {ROUNDS} rounds of {STEPS} steps")
        found[f"batch {batch}"] = {arm: middle(told) for arm, told in arms.items()}
        for arm, told in arms.items():
            parts, wholes = found[f"batch {batch}"][arm], sorted(sum(one.values()) for one in told)
            rate = step_bytes(model, arm, batch) / wholes[ROUNDS // 2] / 1e6
            cells = "  ".join(f"{part} {parts[part]:6.2f}" for part in PARTS)
            print(f"  {arm:22} {wholes[ROUNDS // 2]:6.2f} ({wholes[0]:.2f} … {wholes[-1]:.2f})  {cells}  {rate:5.1f} GB/s")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        wholes_of = {
            f"batch {batch}": {arm: [sum(one.values()) for one in told] for arm, told in arms.items()} for batch, arms in samples.items()
        }
        options.json.write_text(json.dumps({"machine": describe(), "read_gb_s": reads, "ms": found, "wholes_ms": wholes_of}, indent=1))
    if options.picture:
        draw(found, f"A decode step, 30 M parameters, {CONTEXT} tokens of context", "a decode step", options.picture)


if __name__ == "__main__":
    main()
