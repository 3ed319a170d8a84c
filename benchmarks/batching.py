"""What continuous batching is worth: output tokens/s of one engine under `engine.batching` continuous, dynamic and static.

All requests are present at the start. The modes take turns on the same ones (A B C C B A …). Prompt lengths are uniform and output lengths
exponential, so that a few are long (the long tail that makes whole batches wait). Finished sequences leave a whole batch and are no longer
computed, which engines with padded batches cannot do: the static figure is the best that static batching can reach.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

from machine import describe

from baton.engine.build import build
from baton.engine.core.limits import Batching, Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from baton.models.make_small import make

SHAPE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4}
REQUESTS, AT_ONCE, REPEATS = 96, 16, 5
PROMPT, OUTPUT_MEAN, OUTPUT = (16, 128), 64, (4, 512)
MODES: tuple[Batching, ...] = get_args(Batching)


def requests(seed: int, vocab: int) -> list[tuple[list[int], int]]:
    """(prompt, output tokens)"""
    rng = random.Random(seed)
    lengths = [(rng.randint(*PROMPT), min(max(OUTPUT[0], round(rng.expovariate(1 / OUTPUT_MEAN))), OUTPUT[1])) for _ in range(REQUESTS)]
    return [([rng.randrange(10, vocab) for _ in range(prompt)], output) for prompt, output in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    limits = Limits(max_num_seqs=AT_ONCE, max_num_batched_tokens=512, max_queue=REQUESTS)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "model", **SHAPE)
        engine = build(
            Options.of(Path(folder) / "model", **asdict(limits), prefix_caching=False, kv_memory_mib=1024, threads=options.threads)
        ).engine

    def run(mode: Batching, seed: int) -> float:
        engine.scheduler = Scheduler(engine.pool, replace(limits, batching=mode, batch_wait_s=0.0), engine.block_size)
        work = requests(seed, engine.runner.vocab_size)
        for i, (prompt, output) in enumerate(work):
            params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
            engine.add(Sequence(str(i), list(prompt), len(prompt), params, b""))
        began = time.perf_counter()
        while not engine.idle:
            engine.step(time.perf_counter())
        return sum(output for _, output in work) / (time.perf_counter() - began)

    found: dict[Batching, list[float]] = {mode: [] for mode in MODES}
    for seed in range(REPEATS + 1):
        for mode in MODES if seed % 2 else reversed(MODES):
            rate = run(mode, seed)
            if seed:  # the first round is a warm-up
                found[mode].append(rate)
    print(describe())
    lengths = f"prompts {PROMPT[0]}-{PROMPT[1]}, outputs exponential with mean {OUTPUT_MEAN} within {OUTPUT[0]}-{OUTPUT[1]}"
    print(f"{REQUESTS} requests, {lengths}, {AT_ONCE} at once, {options.threads} threads, float32; seeds 1-{REPEATS}")
    rows = []
    for mode in MODES:
        ratio = statistics.median(a / b for a, b in zip(found["continuous"], found[mode], strict=True))
        rates = found[mode]
        spread = (max(rates) - min(rates)) / 2
        rows.append({"batching": mode, "tokens_s": rates, "continuous_over_this": ratio})
        print(f"{mode:11} {statistics.median(rates):7.0f} tokens/s ± {spread:4.0f}   continuous is {ratio:.2f}x of it")
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
