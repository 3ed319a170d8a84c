"""The engine beside `transformers.generate` on the same random-initialised Llama: prefill and decode tokens per second.

    python benchmarks/engine_speed.py [--threads 2] [--json FILE]

Interleaved repeats in one process; medians and spread; the ratio is what to read. `transformers` runs as its users run it: greedy, with
its KV cache, prompts of equal length. Every greedy token of both is compared, so both did the same work. `mixed`: output tokens/s over
requests of mixed lengths, 16 at once, continuous batching beside padded batches of 16.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from machine import describe

from engine.build import Options, build
from engine.engine import Engine
from engine.sampling import SamplingParams
from engine.scheduler import Limits
from engine.sequence import Sequence
from models.make_small import make

PROMPT, OUTPUT, REPEATS = 256, 64, 5
BATCHES = (1, 4, 16)
MIXED_REQUESTS, MIXED = 48, ((32, 512), (8, 160))  # prompt and output lengths, uniform
SHAPES = {
    "small (5.8 M)": {},
    "30 M": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "vocab": 2048},
}


def prompts(batch: int, vocab: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocab, (batch, PROMPT), generator=generator).tolist()


def run_ours(engine: Engine, batch: list[list[int]]) -> tuple[float, float, list[list[int]]]:
    """(seconds until every first token, seconds of the rest, tokens)."""
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    seqs = [Sequence(str(i), list(tokens), PROMPT, params, b"%016d" % time.perf_counter_ns()) for i, tokens in enumerate(batch)]
    began = time.perf_counter()
    for seq in seqs:
        engine.add(seq)
    while any(seq.output_len == 0 for seq in seqs):
        engine.step()
    first = time.perf_counter()
    ahead = sum(seq.output_len - 1 for seq in seqs)  # decodes that ran beside the last prefills
    while not engine.idle:
        engine.step()
    rest = (time.perf_counter() - first) * (len(batch) * (OUTPUT - 1)) / max(1, len(batch) * (OUTPUT - 1) - ahead)
    return first - began, rest, [seq.tokens[PROMPT:] for seq in seqs]


def run_theirs(model: torch.nn.Module, batch: list[list[int]]) -> tuple[float, float, list[list[int]]]:
    ids = torch.tensor(batch)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=1, **settings)
        first = time.perf_counter()
        out = model.generate(ids, max_new_tokens=OUTPUT, **settings)
        whole = time.perf_counter() - first
    return first - began, whole - (first - began), out[:, PROMPT:].tolist()


def run_mixed(engine: Engine, model: torch.nn.Module, vocab: int, seed: int) -> dict[str, float]:
    """Output tokens/s over requests of mixed lengths, 16 at once: ours takes a new one whenever one ends, theirs pads batches of 16."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [[int(torch.randint(low, high, (1,), generator=generator)) for low, high in MIXED] for _ in range(MIXED_REQUESTS)]
    asked = [torch.randint(10, vocab, (prompt,), generator=generator).tolist() for prompt, _ in sizes]
    began = time.perf_counter()
    for i, (tokens, (_, output)) in enumerate(zip(asked, sizes, strict=True)):
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        engine.add(Sequence(str(i), list(tokens), len(tokens), params, b"%016d" % time.perf_counter_ns()))
    while not engine.idle:
        engine.step()
    ours = time.perf_counter() - began
    began = time.perf_counter()
    for at in range(0, MIXED_REQUESTS, 16):
        batch, longest = asked[at : at + 16], max(len(tokens) for tokens in asked[at : at + 16])
        ids = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in batch])
        mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in batch])
        most = max(output for _, output in sizes[at : at + 16])
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0, eos_token_id=None)
    theirs = time.perf_counter() - began
    made = sum(output for _, output in sizes)
    return {"ours": made / ours, "theirs": made / theirs}


def measure_mixed(engine: Engine, model: torch.nn.Module, vocab: int) -> dict[str, object]:
    runs = [run_mixed(engine, model, vocab, seed) for seed in range(REPEATS + 1)][1:]  # the first warms up
    row: dict[str, object] = {"phase": "mixed", "ratio": statistics.median(run["ours"] / run["theirs"] for run in runs)}
    for who in ("ours", "theirs"):
        values = [run[who] for run in runs]
        row[who], row[f"{who} spread"] = statistics.median(values), (max(values) - min(values)) / 2
    return row


def measure(name: str, shape: dict[str, int], threads: int) -> tuple[list[dict[str, object]], dict[str, object]]:
    from transformers import AutoModelForCausalLM

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make(path, **shape)
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        torch.set_num_threads(threads)
        limits = Limits(max_num_seqs=16, max_num_batched_tokens=2048)
        engine = build(Options(path, limits=limits, prefix_caching=False, kv_memory_bytes=1 << 30, threads=threads)).engine
        vocab = engine.runner.vocab_size
        for batch in BATCHES:
            times: dict[str, list[float]] = {"ours prefill": [], "ours decode": [], "theirs prefill": [], "theirs decode": []}
            same = total = 0
            for repeat in range(REPEATS + 1):
                asked = prompts(batch, vocab, repeat)
                a, b = run_ours(engine, asked), run_theirs(theirs, asked)
                if repeat == 0:
                    continue  # warm-up
                for who, result in (("ours", a), ("theirs", b)):
                    times[f"{who} prefill"].append(batch * PROMPT / result[0])
                    times[f"{who} decode"].append(batch * (OUTPUT - 1) / result[1])
                same += sum(x == y for p, q in zip(a[2], b[2], strict=True) for x, y in zip(p, q, strict=True))
                total += batch * OUTPUT
            row: dict[str, object] = {"model": name, "batch": batch, "same_tokens": same / total}
            for key, values in times.items():
                row[key] = statistics.median(values)
                row[f"{key} spread"] = (max(values) - min(values)) / 2
            for phase in ("prefill", "decode"):
                row[f"{phase} ratio"] = statistics.median(
                    x / y for x, y in zip(times[f"ours {phase}"], times[f"theirs {phase}"], strict=True)
                )
            rows.append(row)
        mixed = measure_mixed(engine, theirs, vocab)
    return rows, mixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe())
    print(f"prompt {PROMPT}, output {OUTPUT}, float32, {options.threads} threads; tokens/s: median ± half the range of {REPEATS} repeats")
    print(f"{'model':14} {'batch':>5} {'phase':>8} {'baton':>16} {'transformers':>16} {'ratio':>6}  same greedy tokens")
    rows = []
    for name, shape in SHAPES.items():
        measured, mixed = measure(name, shape, options.threads)
        for row in measured:
            for phase in ("prefill", "decode"):
                cells = [f"{row[f'{who} {phase}']:8.0f} ±{row[f'{who} {phase} spread']:5.0f}" for who in ("ours", "theirs")]
                head = f"{name:14} {row['batch']:5} {phase:>8} {cells[0]:>16} {cells[1]:>16}"
                print(f"{head} {row[f'{phase} ratio']:5.2f}x  {row['same_tokens']:.1%}", flush=True)
        cells = [f"{mixed[who]:8.0f} ±{mixed[f'{who} spread']:5.0f}" for who in ("ours", "theirs")]
        print(f"{name:14} {16:5} {'mixed':>8} {cells[0]:>16} {cells[1]:>16} {mixed['ratio']:5.2f}x", flush=True)
        rows += [*measured, {"model": name, **mixed}]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
