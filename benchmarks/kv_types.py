"""A decode step by what KV is stored as: bfloat16, int8 and int5, at long contexts.

    python benchmarks/kv_types.py [--model FOLDER] [--tokens 2000] [--batch 1 8 32] [--rounds 20] [--threads 1] [--json FILE]

Runners with the same model, all weights bfloat16, that differ in `engine.kv_dtype` alone take turns with a step in which each of `batch`
sequences of `--tokens` tokens computes one token more. Their KV is not computed but is one number everywhere: what a step takes does not
depend on it. Steps are measured by the thread's processor time. Ratios are of rounds: to bfloat16 in the same round.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from machine import describe

from baton.cli.up import SHIPPED
from baton.engine.build import build
from baton.engine.core.kvcache import KvPool
from baton.engine.core.protocol import Chunk, Runner
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options

ARMS: dict[str, dict[str, Any]] = {"bfloat16": {}, "int8": {"kv_dtype": "int8"}, "int5": {"kv_dtype": "int5"}}
BYTE = 0x3C  # repeated, a harmless number in every type
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def made(model: Path, tokens: int, most: int, threads: int, more: dict[str, Any]) -> Runner:
    """A runner whose pool holds `most` sequences of so many tokens and one more each."""
    shape = {"dtype": "bfloat16", "threads": threads, "max_model_len": tokens + 1, "max_num_seqs": most, **more}
    block = build(Options.of(model, kv_memory_mib=16, **shape)).engine.runner.layout
    need = (most * (tokens // block.block_size + 1) * block.block_bytes >> 20) + 1
    engine = build(Options.of(model, kv_memory_mib=need, **shape)).engine
    pool = engine.runner.pool
    assert isinstance(pool, KvPool)
    pool.array[:] = BYTE
    return engine.runner


def step(runner: Runner, batch: int, tokens: int) -> float:
    """Milliseconds of a thread."""
    blocks = tokens // runner.layout.block_size + 1
    chunks = []
    for i in range(batch):
        own = list(range(i * blocks, (i + 1) * blocks))
        seq = Sequence(f"s{i}", [7] * (tokens + 1), tokens, PARAMS, b"", computed=tokens, blocks=own)
        chunks.append(Chunk(seq, 1))
    began = time.thread_time()
    runner.run(chunks)
    return (time.thread_time() - began) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe())
    runners = {name: made(options.model, options.tokens, max(options.batch), options.threads, more) for name, more in ARMS.items()}
    rows = []
    for batch in options.batch:
        found: dict[str, list[float]] = {name: [] for name in runners}
        for turn in range(-2, options.rounds):
            for name in list(runners)[:: 1 if turn % 2 else -1]:
                took = step(runners[name], batch, options.tokens)
                found[name] += [took] if turn >= 0 else []  # the first ones compile and record
        for name, times in found.items():
            ratios = [a / b for a, b in zip(times, found["bfloat16"], strict=True)]
            layout = runners[name].layout
            row = {"kv": name, "batch": batch, "ms": times, "ratio": ratios, "token_bytes": layout.block_bytes / layout.block_size}
            rows.append(row)
            beside = f"{statistics.median(ratios):.2f} of bfloat16 ({min(ratios):.2f} … {max(ratios):.2f})"
            print(f"batch {batch:3} {name:9} {statistics.median(times):8.2f} ms a step, {beside}, {row['token_bytes']:.0f} bytes a token")
    if options.json:
        told = {
            "machine": describe(),
            "load_average": os.getloadavg()[0],
            "model": options.model.name,
            "tokens": options.tokens,
            "threads": options.threads,
            "rows": rows,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
