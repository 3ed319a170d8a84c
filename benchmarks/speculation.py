"""What guessing the next tokens is worth: tokens/s, time between tokens and acceptance, with each method that `engine.speculation` has and
without.

    python benchmarks/speculation.py [--smollm2 FOLDER] [--json FILE]      FOLDER: a checkpoint of SmolLM2-135M-Instruct (docs/models.md)

The arms are engines of one process with the same options but `engine.speculation`. They take turns on the same prompts, in an order that
turns with the round (A B C, C B A, …). `batch` streams begin together. A figure counts what they say from the moment when each has a token
until the first one ends, so the batch has one size all the time. Ratios are of rounds: of one arm to `none` in the same round, by the clock
and by processor time, which other processes on the machine disturb less.

Texts: of `tale`, stories and recall (a list that the prompt has is repeated); of SmolLM2, code that is changed in one place, a quotation,
and free text. Each at temperature 0 and 1, seeded. All arms must give the same tokens, or else the run fails.

With `--branches 1 2 3` the methods that have second choices are arms with so many first tokens of a guess (`draft/2`).
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from machine import describe
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.engine.build import build
from baton.engine.core.engine import Engine
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import EngineOptions, Options
from baton.engine.speculation import BRANCHING
from baton.models.train import corpus, words
from baton.models.train.dialogues import Message

NONE = "none"
TOKENS = 80  # of each answer, at most
CODE = """def total(orders):
    total = 0
    for order in orders:
        if order.paid:
            total += order.price * order.count
    return total


def names(orders):
    found = []
    for order in orders:
        if order.paid:
            found.append(order.customer.name)
    return found
"""
TEXT = (
    "The harbour of the old town was built by fishermen. They laid the stones of the pier by hand, one winter after another, and paid for"
    " the lamp at its end with a tenth of every catch. The lamp still burns. Each evening the keeper climbs forty steps, trims the wick and"
    " writes the hour into a book that his grandmother began."
)
STORIES = ("Tell me a story.", "Tell me a long story.", "Tell me a story about a cat.", "Tell me a story about a boat.")
FREE = ("Why is the sky blue?", "How do I learn to swim?", "What makes a good teacher?", "Describe a walk through a forest.")


def of_tale(user: str) -> str:
    return corpus.render([Message("user", user)], reply=True)


def of_smollm2(user: str) -> str:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    return f"{system}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def recall(i: int) -> str:
    rng = random.Random(i)
    return of_tale(f"Repeat this: {', '.join(rng.choice((words.thing, words.place))(rng) for _ in range(20))}.")


TEXTS: dict[str, dict[str, Callable[[int], str]]] = {
    "tale": {"story": lambda i: of_tale(STORIES[i % len(STORIES)]), "recall": recall},
    "smollm2": {
        "code": lambda i: of_smollm2(f"Rename orders to {('items', 'sales', 'jobs', 'bills')[i % 4]} in this code:\n```python\n{CODE}```"),
        "quote": lambda i: of_smollm2(f"Repeat this text word for word:\n{' '.join([TEXT[i % 7 * 9 :], TEXT[: i % 7 * 9]]).strip()}"),
        "free": lambda i: of_smollm2(FREE[i % len(FREE)]),
    },
}


@dataclass
class Cell:
    """One arm, text, temperature and batch: a value for each round."""

    rates: list[float] = field(default_factory=list)  # tokens/s
    cpu: list[float] = field(default_factory=list)  # tokens per second of processor time
    itl_ms: list[float] = field(default_factory=list)  # mean time between two tokens of a stream
    longest_ms: list[float] = field(default_factory=list)  # P99 of the time between two steps
    step_tokens: list[float] = field(default_factory=list)  # of a stream in one step
    guesses: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # method → place → drafted, accepted

    def note(self, tokens: int, steps: list[float], cpu_s: float, batch: int) -> None:
        self.rates.append(tokens / sum(steps))
        self.cpu.append(tokens / cpu_s)
        self.itl_ms.append(1000 * sum(steps) * batch / tokens)
        self.longest_ms.append(1000 * sorted(steps)[int(0.99 * (len(steps) - 1))])
        self.step_tokens.append(tokens / batch / len(steps))


def prompts_of(engine: Engine, encoder: Tokenizer, text: Callable[[int], str], temperature: float, batch: int, seed: int) -> list[Sequence]:
    made = []
    for i in range(batch):
        ids = encoder.encode(text(i + 100 * seed), add_special_tokens=False).ids
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=1000 * seed + i)
        made.append(Sequence(f"{seed}-{i}", ids, len(ids), params, b""))
    return made


def measure(engine: Engine, seqs: list[Sequence], cell: Cell) -> list[list[int]]:
    """What the streams have said until the first one ended."""
    before = engine.counts.copy()
    for seq in seqs:
        engine.add(seq)
    while any(seq.output_len == 0 for seq in seqs) and len(engine.sequences) == len(seqs):
        engine.step(time.perf_counter())
    begun, cpu = sum(seq.output_len for seq in seqs), time.process_time()
    steps: list[float] = []
    while len(engine.sequences) == len(seqs):
        at = time.perf_counter()
        engine.step(at)
        steps.append(time.perf_counter() - at)
    if len(steps) > 3:
        cell.note(sum(seq.output_len for seq in seqs) - begun, steps, time.process_time() - cpu, len(seqs))
    said = [seq.tokens[seq.prompt_len :] for seq in seqs]
    for seq in seqs:
        engine.abort(seq.id)
    for (method, place), each in engine.counts.guesses.items():
        old = before.guesses.get((method, place))
        counted = cell.guesses.setdefault(method, {}).setdefault(place, [0, 0])
        counted[0] += each.drafted - (old.drafted if old else 0)
        counted[1] += each.accepted - (old.accepted if old else 0)
    return said


def same(one: list[list[int]], other: list[list[int]]) -> bool:
    return all(a[: len(b)] == b[: len(a)] for a, b in zip(one, other, strict=True))


def run(model: str, path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    texts = {name: write for name, write in TEXTS[model].items() if options.text is None or name in options.text}
    if not texts:
        return []
    most, arms = max(options.batch), dict[str, Engine]()
    methods = options.method or [name for name in get_args(EngineOptions.model_fields["speculation"].annotation) if name != NONE]
    branches = [(method, count) for method in (NONE, *methods) for count in (options.branches if method in BRANCHING else (1,))]
    for method, count in branches:
        made = Options.of(
            path,
            speculation=method,
            speculation_branches=count,
            predictions=False,
            threads=options.threads,
            kv_memory_mib=64 + (8 if model == "tale" else 32) * most,
            max_num_seqs=most,
            max_num_batched_tokens=2048,
            prefix_caching=False,
            max_model_len=1024,
            products="baton",
        )
        arms[method if count == 1 else f"{method}/{count}"] = build(made).engine
    encoder, rows = Tokenizer.from_file(str(path / "tokenizer.json")), []
    for text, write in texts.items():
        for temperature in options.temperature:
            for batch in options.batch:
                cells = {arm: Cell() for arm in arms}
                for turn in range(options.rounds + 1):
                    said: dict[str, list[list[int]]] = {}
                    for arm in arms if turn % 2 else reversed(arms):
                        cell = cells[arm] if turn else Cell()  # the first round is a warm-up
                        said[arm] = measure(arms[arm], prompts_of(arms[arm], encoder, write, temperature, batch, turn), cell)
                    if wrong := [arm for arm in arms if not same(said[arm], said[NONE])]:
                        sys.exit(f"{model}, {text}, T = {temperature:g}, batch {batch}: {', '.join(wrong)} says something else than {NONE}")
                rows += [told(model, text, temperature, batch, arm, cells) for arm in arms]
                print(*(line(row) for row in rows[-len(arms) :]), sep="\n", flush=True)
                gc.collect()
    return rows


def told(model: str, text: str, temperature: float, batch: int, arm: str, cells: dict[str, Cell]) -> dict[str, Any]:
    cell, base = cells[arm], cells[NONE]
    return {
        "model": model, "text": text, "temperature": temperature, "batch": batch, "method": arm,
        "tokens_s": cell.rates, "itl_ms": cell.itl_ms, "step_p99_ms": cell.longest_ms, "step_tokens": cell.step_tokens,
        "to_none": [a / b for a, b in zip(cell.rates, base.rates, strict=False)],
        "to_none_cpu": [a / b for a, b in zip(cell.cpu, base.cpu, strict=False)],
        "acceptance": {
            method: [[place, *places[place]] for place in sorted(places) if places[place][0]] for method, places in cell.guesses.items()
        },
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    name = f"{row['model']:8} {row['text']:7} T={row['temperature']:g} batch {row['batch']:3} {row['method']:14}"
    if not row["tokens_s"]:
        return f"{name} ended too soon"
    accepted = sum(each[2] for places in row["acceptance"].values() for each in places)
    drafted = sum(each[1] for places in row["acceptance"].values() for each in places)
    ratios = statistics.median(row["to_none"]), statistics.median(row["to_none_cpu"])
    told = f"{statistics.median(row['tokens_s']):7.0f} tokens/s, ITL {statistics.median(row['itl_ms']):6.2f} ms"
    told += f", {statistics.mean(row['step_tokens']):.2f} a step"
    return f"{name} {told}, {ratios[0]:.2f}x (processor {ratios[1]:.2f}x), {accepted} of {drafted} accepted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--method", action="append", help="instead of all")
    parser.add_argument("--branches", type=int, nargs="+", default=[1])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", action="append", help="instead of all")
    parser.add_argument("--json", type=Path, help="cells that are in the file and not measured again stay there")
    options = parser.parse_args()
    print(describe())
    rows = run("tale", SHIPPED, options)
    if options.smollm2 is not None:
        rows += run("smollm2", options.smollm2, options)
    if options.json:
        cells = {cell_of(row) for row in rows}
        kept = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
        rows += [row for row in kept if cell_of(row) not in cells]
        load_average = os.getloadavg()[0]
        found = {"machine": describe(), "load_average": load_average, "threads": options.threads, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "text", "temperature", "batch", "method"))


if __name__ == "__main__":
    main()
