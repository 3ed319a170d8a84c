"""Where the time of a prefill on the CPU goes (see `parts`), and how much of the machine's rate of multiplication its matrices and its
attention reach. The arms take turns.

    python benchmarks/prefill_profile.py [--json FILE] [--picture FILE]

A prompt is computed in one step, or in chunks of 256 tokens beside 8 sequences that decode with 512 tokens of context; there, attention is
that of both.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe
from parts import PARTS, ROUNDS, SHAPE, Spent, arguments, draw, in_turns, mark_parts, middle, spent
from peers.cells import Model

from baton.engine.build import build
from baton.engine.core.engine import Engine
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from baton.models.make_small import make

ARMS: dict[str, dict[str, Any]] = {
    "plain torch, float32": {"compiled": False},
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weight_dtype": "int8"},
    "int8, rest bfloat16": {"dtype": "bfloat16", "weight_dtype": "int8"},
    "int4": {"weight_dtype": "int4"},
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt: int
    chunk: int
    decoding: int = 0  # sequences beside it
    context: int = 512  # of these

    @property
    def steps(self) -> int:
        return self.prompt // self.chunk

    def flops(self, model: Model) -> tuple[float, float]:
        """Of a step's matrices and of its attention, on average. Only the last token's row, and those of the decodes, meet the head."""
        beside = self.decoding * self.steps
        matrices = 2.0 * model.layer_parameters * (self.prompt + beside) + 2 * model.vocab * model.hidden * (1 + beside)
        seen = self.prompt * (self.prompt + 1) / 2 + beside * self.context
        return matrices / self.steps, 4 * model.layers * model.hidden * seen / self.steps


CASES = (Case("512 tokens", 512, 512), Case("2,048 tokens", 2048, 2048), Case("256 of 2,048 beside 8 decodes", 2048, 256, 8))


def add(engine: Engine, name: str, tokens: int, most: int) -> None:
    prompt = [(17 * len(name) + 31 * k) % 4000 + 10 for k in range(tokens)]
    params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    engine.add(Sequence(f"{name}-{time.perf_counter_ns()}", prompt, tokens, params, b""))


def measure(engine: Engine, case: Case) -> Spent:
    for i in range(case.decoding):
        add(engine, f"decode {i}", case.context, 100)
    while any(seq.computed < case.context for seq in engine.sequences.values()):
        engine.step()
    add(engine, "prompt", case.prompt, 2)
    return spent(engine, case.steps)


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        make(path := Path(folder) / "model", **SHAPE)
        model = Model.of(json.loads((path / "config.json").read_text()), "30 M")
        same: dict[str, Any] = {"threads": options.threads, "kv_memory_mib": 256, "prefix_caching": False}
        engines = {
            (arm, case): build(Options.of(path, max_num_seqs=32, max_num_batched_tokens=case.chunk + case.decoding, **same, **more)).engine
            for arm, more in ARMS.items()
            for case in CASES
        }
    mark_parts()
    samples, ceilings = in_turns(CASES, list(ARMS), lambda arm, case: measure(engines[arm, case], case), options.threads)
    print(describe())
    for name in sorted(ceilings[0]):
        print(f"{name}: {min(one[name] for one in ceilings):.0f} … {max(one[name] for one in ceilings):.0f}")
    found: dict[str, dict[str, Spent]] = {}
    rows = []
    for case, arms in samples.items():
        matrices, attention = case.flops(model)
        print(f"\n{case.name}; ms a step, medians of {ROUNDS} rounds (GFLOP/s)")
        found[case.name] = {arm: middle(told) for arm, told in arms.items()}
        for arm, told in arms.items():
            parts, wholes = found[case.name][arm], sorted(sum(one.values()) for one in told)
            rates = {"matrices": matrices / parts["matrices"] / 1e6, "attention": attention / parts["attention"] / 1e6}
            cells = "  ".join(
                f"{part} {parts[part]:6.2f}" + (f" ({rates[part]:4.0f})" if part in rates else "") for part in PARTS if part != "recorded"
            )
            print(f"  {arm:22} {wholes[ROUNDS // 2]:7.2f} ({wholes[0]:.2f} … {wholes[-1]:.2f})  {cells}")
            rows.append({"case": case.name, "arm": arm, "ms": parts, "wholes_ms": wholes, "gflop_s": rates})
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": describe(), "ceilings": ceilings, "rows": rows}, indent=1))
    if options.picture:
        draw(found, "A step of prefill, 30 M parameters", "a step", options.picture)


if __name__ == "__main__":
    main()
