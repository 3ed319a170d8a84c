"""What the form of an answer costs on a CPU: a step of sequences with a grammar beside the same without one, and the first mask.

Sequences with a grammar and those without take turns, and both see the same logits only by chance: a form changes the output. So each
case is long enough for masks of every width: names and punctuation that are forced, numbers, and free text.

    python benchmarks/structured.py [--model FOLDER] [--json FILE]
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from machine import describe

import baton.models
from baton.engine.build import build
from baton.engine.core.engine import Engine
from baton.engine.core.grammar import Grammar, GrammarRefused
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.grammars.library import Compiled, Vocabulary, compile_grammar
from baton.engine.options import Options

SUITE = Path(__file__).parents[1] / "tests" / "engine" / "grammars" / "json_schema_suite" / "draft2020-12.jsonl"
BATCHES, CONTEXT, STEPS, ROUNDS, SEED = (1, 32), 64, 60, 7, 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "story": {"type": "string", "minLength": 400},
    },
    "required": ["name", "age", "tags", "story"],
    "additionalProperties": False,
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
}


def add(engine: Engine, batch: int, form: Compiled | None, how: dict[str, Any]) -> None:
    """Sequences whose prompts have been computed."""
    structured = None if form is None else Grammar("json_schema", json.dumps(SCHEMA))
    for i in range(batch):
        prompt = [(17 * i + 31 * k) % 900 + 50 for k in range(CONTEXT)]
        params = SamplingParams(max_tokens=600, ignore_eos=form is None, seed=SEED + i, structured=structured, **how)
        sequence = Sequence(f"{i}-{time.perf_counter_ns()}", prompt, CONTEXT, params, b"")
        sequence.matcher = None if form is None else form.matcher()
        engine.add(sequence)
    while any(seq.computed < CONTEXT for seq in engine.sequences.values()):
        engine.step()


def step_ms(engine: Engine, batch: int, form: Compiled | None, how: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a step: by the clock, and of processor time."""
    add(engine, batch, form, how)
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        engine.step()
    spent = time.perf_counter() - clock, time.process_time() - processor
    if len(engine.sequences) != batch:
        raise SystemExit("a sequence ended during the measurement: its schema is too short")
    for name in list(engine.sequences):
        engine.abort(name)
    return spent[0] * 1e3 / STEPS, spent[1] * 1e3 / STEPS


def schemas() -> Iterator[str]:
    for line in SUITE.read_text().splitlines():
        yield json.dumps(json.loads(line)["schema"])


def first_masks(vocabulary: Vocabulary) -> list[float]:
    """Milliseconds from a schema to its first mask, of each schema of the official suite that is accepted."""
    spent = []
    for text in schemas():
        began = time.perf_counter()
        try:
            compile_grammar(vocabulary, Grammar("json_schema", text))
        except GrammarRefused:
            continue
        spent.append((time.perf_counter() - began) * 1e3)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(baton.models.__file__).parent / "tale")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    built = build(Options.of(options.model, threads=options.threads, kv_memory_mib=1024, max_num_seqs=max(BATCHES)))
    engine = built.engine
    vocabulary = Vocabulary.load(options.model, engine.runner.vocab_size, sorted(engine.runner.eos_token_ids))
    form = compile_grammar(vocabulary, Grammar("json_schema", json.dumps(SCHEMA)))
    print(describe())
    found: dict[str, Any] = {}
    for batch in BATCHES:
        for name, how in SAMPLING.items():
            ratios, plain, held = [], [], []
            for round_ in range(ROUNDS + 1):
                arms = {}
                for arm in (None, form)[:: 1 if round_ % 2 else -1]:
                    arms[arm is not None] = step_ms(engine, batch, arm, how)
                if round_:
                    ratios.append((arms[True][0] / arms[False][0], arms[True][1] / arms[False][1]))
                    plain.append(arms[False][0])
                    held.append(arms[True][0])
            by_clock, by_processor = (median(each) - 1 for each in zip(*ratios, strict=True))
            case = {"plain_ms": median(plain), "held_ms": median(held), "more": by_clock, "more_processor": by_processor}
            found[f"batch {batch}, {name}"] = case | {"ratios": ratios}
            print(f"batch {batch:2}, {name:27} {case['plain_ms']:7.2f} → {case['held_ms']:7.2f} ms   {by_clock:+.1%} ({by_processor:+.1%})")
    masks = first_masks(vocabulary)
    shares = dict(zip(("P50", "P90", "P99", "most"), map(float, np.percentile(masks, (50, 90, 99, 100))), strict=True))
    print(f"first mask of {len(masks)} schemas: " + ", ".join(f"{name} {value:.2f} ms" for name, value in shares.items()))
    if options.json:
        told = {"machine": describe(), "model": options.model.name, "seed": SEED, "steps": found, "first_mask_ms": shares}
        options.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
