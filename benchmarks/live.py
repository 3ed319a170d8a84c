"""How much of the handoff remains after the first token, with and without live transfer.

    python benchmarks/live.py [--json FILE] [--rounds N]

Random Llama of 30 M parameters in float32, one request at a time through real clusters of one prefill and one decode worker on one host:
with live transfer and without (`kv.live`), over `auto` (NIXL here) and TCP. All four clusters are up; the arms take turns within each
round, so that drift affects them alike. The transfer stage is the router's: from the first token until the KV is reported to be there.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from machine import describe
from serving import ask, cluster

from baton.client import AsyncClient
from baton.models.make_small import make

SHAPE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "context": 8192}
SEED, OUTPUT, WARM_UP = 7, 4, 1
PROMPTS = (256, 512, 1000, 2000, 4000, 8000)
ROUNDS = 5
KV_MIB = 320  # two prompts of 8,000 tokens
ARMS = {
    ("auto", "live"): (),
    ("auto", "whole"): ("--kv.live", "false"),
    ("tcp", "live"): ("--kv.transport", "tcp"),
    ("tcp", "whole"): ("--kv.transport", "tcp", "--kv.live", "false"),
}
FACTS = ("transfer_ms", "read_ms", "verify_ms", "ttft_ms", "request_ms", "digest_share", "early_share")

Samples = dict[tuple[str, str, int], list[dict[str, float]]]  # by transport, arm, prompt


async def one(client: AsyncClient, prompt: list[int]) -> dict[str, Any]:
    first, result = await ask(client, prompt, OUTPUT)
    stages, handoff = result.stages_ms, result.handoff
    assert handoff["recomputed_tokens"] == 0 and not handoff["failure"] and not result.workers["retries"], handoff
    request = sum(stages[name] for name in ("queue", "prefill", "transfer", "decode"))
    return {
        "transfer_ms": stages["transfer"],
        "read_ms": stages["read"],
        "verify_ms": stages["verify"],
        "ttft_ms": first * 1000,
        "request_ms": request,
        "digest_share": stages["verify"] / request,
        "early_share": handoff["blocks_early"] / handoff["blocks"],
        "carrier": handoff["transport"],
    }


async def measure(endpoints: dict[tuple[str, str], str], rounds: int) -> Samples:
    rng = random.Random(SEED)
    samples: Samples = {}
    async with AsyncExitStack() as stack:
        clients = {arm: await stack.enter_async_context(AsyncClient(address)) for arm, address in endpoints.items()}
        for round_ in range(WARM_UP + rounds):
            for length in PROMPTS:
                arms = list(clients)
                rng.shuffle(arms)
                for arm in arms:
                    prompt = [rng.randrange(10, 2000) for _ in range(length)]
                    found = await one(clients[arm], prompt)
                    if round_ >= WARM_UP:
                        samples.setdefault((*arm, length), []).append(found)
    return samples


def summary(samples: Samples) -> list[dict[str, Any]]:
    rows = []
    for (transport, arm, length), found in samples.items():
        spread = {name: [f(one[name] for one in found) for f in (statistics.median, min, max)] for name in FACTS}
        rows.append({"transport": transport, "carrier": found[0]["carrier"], "arm": arm, "prompt": length, **spread})
    return sorted(rows, key=lambda row: (row["transport"], row["prompt"], row["arm"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{describe()}; load average {load:.1f}; seed {SEED}, {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make(model := Path(folder) / "model", **SHAPE)
        fixed = ("--engine.kv-memory-mib", str(KV_MIB), "--engine.threads", "1", "--router.bypass-tokens", "0")
        endpoints = {arm: stack.enter_context(cluster(model, *fixed, *flags))["grpc"] for arm, flags in ARMS.items()}
        rows = summary(asyncio.run(measure(endpoints, options.rounds)))
    print(
        "ms, median (range); digests: checks as a share of the request's time; early: share of the blocks that moved before the first token"
    )
    print(
        f"{'prompt':>7} {'transport':10} {'arm':6} {'after the first token':>26} {'read':>7} {'verify':>7} {'TTFT':>8} {'digests':>8} early"
    )
    for row in rows:
        middle, least, most = row["transfer_ms"]
        print(
            f"{row['prompt']:7} {row['carrier']:10} {row['arm']:6} {middle:9.1f} ({least:6.1f} … {most:5.1f}) {row['read_ms'][0]:7.1f}"
            f" {row['verify_ms'][0]:7.1f} {row['ttft_ms'][0]:8.1f} {row['digest_share'][0]:8.2%} {row['early_share'][0]:.0%}"
        )
    if options.json:
        told = {"machine": describe(), "load_average": load, "seed": SEED, "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
