"""The whole cluster compared with the bare engine on the same cores: output tokens/s of a mixed workload.

    python benchmarks/whole.py [--json FILE]

The same requests, all sent at the start, go to an engine that is called directly and to clusters with everything that a request passes
through: router, admission, tokens streamed over gRPC and, if prefill is separate, handoff, lease and digests. They take turns, so that
drift affects all alike.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from machine import describe
from serving import ask, cluster

from baton.client import AsyncClient
from baton.engine.build import build
from baton.engine.core.engine import Engine
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from baton.models.make_small import make

SHAPE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4}
REQUESTS, PROMPT, OUTPUT, REPEATS = 32, (64, 512), (32, 128), 5
WARM_UP, KV_MIB = 2, 384  # repeats until every page of the pools has been touched
CLUSTERS = {
    "colocated, 1 worker of 2 cores": ("--prefill.replicas", "0", "--engine.threads", "2"),
    "colocated, 2 workers of 1 core": ("--prefill.replicas", "0", "--decode.replicas", "2", "--engine.threads", "1"),
    "prefill and decode, 1 core each": ("--engine.threads", "1", "--router.bypass-tokens", "0"),
    "prefill and decode, 2 cores shared": ("--engine.threads", "2", "--router.bypass-tokens", "0"),
}

Work = list[tuple[list[int], int]]  # (prompt, output tokens)


def requests(seed: int, vocab: int) -> Work:
    rng = random.Random(seed)
    return [([rng.randrange(10, vocab) for _ in range(rng.randint(*PROMPT))], rng.randint(*OUTPUT)) for _ in range(REQUESTS)]


def run_engine(engine: Engine, work: Work) -> float:
    """Seconds."""
    began = time.perf_counter()
    for i, (prompt, output) in enumerate(work):
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        engine.add(Sequence(str(i), list(prompt), len(prompt), params, b"%016d" % time.perf_counter_ns()))
    while not engine.idle:
        engine.step()
    return time.perf_counter() - began


async def run_cluster(address: str, work: Work) -> float:
    """Seconds."""
    async with AsyncClient(address) as client:
        began = time.perf_counter()
        await asyncio.gather(*(ask(client, prompt, output) for prompt, output in work))
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bare_rates: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in CLUSTERS}
    with tempfile.TemporaryDirectory() as folder:
        make(model := Path(folder) / "model", **SHAPE)
        engine = build(Options.of(model, max_num_seqs=64, kv_memory_mib=KV_MIB, threads=2)).engine
        vocab = engine.runner.vocab_size
        for number, (name, flags) in enumerate(CLUSTERS.items()):
            with cluster(model, "--engine.kv-memory-mib", str(KV_MIB), *flags) as endpoints:
                for repeat in range(WARM_UP + REPEATS):
                    work = requests(100 * number + repeat, vocab)
                    made = sum(output for _, output in work)
                    bare, whole = made / run_engine(engine, work), made / asyncio.run(run_cluster(endpoints["grpc"], work))
                    if repeat >= WARM_UP:
                        bare_rates.append(bare)
                        shares[name].append(whole / bare)
    print(describe())
    print(f"{REQUESTS} concurrent requests, prompts {PROMPT[0]}-{PROMPT[1]}, outputs {OUTPUT[0]}-{OUTPUT[1]}, float32, {REPEATS} repeats")
    print(f"bare engine, 2 cores: {statistics.median(bare_rates):.0f} tokens/s ({min(bare_rates):.0f} … {max(bare_rates):.0f})")
    for name, ratios in shares.items():
        print(f"{name:35} {statistics.median(ratios):4.0%} of it ({min(ratios):.0%} … {max(ratios):.0%})")
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "bare_tokens_s": bare_rates, "shares": shares}, indent=1))


if __name__ == "__main__":
    main()
