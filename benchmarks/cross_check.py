"""The numbers of `baton loadtest` beside those of an independent generator, `vllm bench serve`: both through the HTTP door, in turns.

    python benchmarks/peers.py --install vllm                                            # once
    ~/.cache/baton-peers/venvs/vllm/bin/pip install pandas datasets                      # once
    python benchmarks/cross_check.py [--json FILE]

Arrivals are constant, all prompts have one length and all outputs another, so the only remaining difference is how the two measure.
"""

import argparse
import json
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe
from peers.engines import Places
from serving import cluster

from baton.models.make_small import make
from loadtest.campaign import Campaign
from router.tokenizer import Tokenizer

SHAPE = {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4}  # a step takes much longer than a client's work on the same cores
RATE, REQUESTS, PROMPT, OUTPUT, ROUNDS = 1.0, 40, 200, 64, 5
CONSTANT = "1000000"  # burstiness: the shape of a gamma distribution
# The command `vllm` queries the version of a package that has another name in a build for the CPU.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
NUMBERS = ("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "mean_e2el_ms", "output_throughput")


def prompts(path: Path, tokenizer: Tokenizer, seed: int) -> Path:
    """Writes texts of exactly PROMPT tokens, as lines of JSON."""
    rng = random.Random(seed)
    lines: list[str] = []
    while len(lines) < REQUESTS:
        text = " ".join("".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(PROMPT))
        ids = tokenizer.encode(text)[:PROMPT]
        text = tokenizer.decode(ids)
        if len(tokenizer.encode(text)) == PROMPT:
            lines.append(json.dumps({"prompt": text}))
    path.write_text("\n".join(lines) + "\n")
    return path


def theirs(python: Path, endpoints: dict[str, str], model: Path, dataset: Path, out: Path) -> dict[str, float]:
    command = [
        str(python), "-c", BENCH, "--backend", "openai", "--base-url", f"http://{endpoints['http']}",
        "--endpoint", "/v1/completions", "--model", model.name, "--tokenizer", str(model), "--dataset-name", "custom",
        "--dataset-path", str(dataset), "--custom-output-len", str(OUTPUT), "--skip-chat-template",
        "--num-prompts", str(REQUESTS), "--request-rate", str(RATE), "--burstiness", CONSTANT, "--ignore-eos", "--disable-shuffle",
        "--percentile-metrics", "ttft,tpot,e2el", "--save-result", "--result-dir", str(out), "--result-filename", "theirs.json",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode:
        sys.exit(f"vllm bench serve:\n{(done.stdout + done.stderr)[-3000:]}")
    told = json.loads((out / "theirs.json").read_text())
    if told["completed"] != REQUESTS:
        sys.exit(f"vllm bench serve: {told['completed']} of {REQUESTS} completed: {told.get('errors', '')}")
    return {name: float(told[name]) for name in NUMBERS}


def ours(endpoints: dict[str, str], out: Path, seed: int) -> dict[str, float]:
    command = [
        sys.executable, "-m", "baton", "loadtest", "run", "--slo", "ttft=10s", "--rate", str(RATE), "--address", endpoints["http"],
        "--door", "http", "--arrivals", "constant", "--input", str(PROMPT), "--output", str(OUTPUT),
        "--duration", str(REQUESTS / RATE), "--warm-up", "0",
        "--cool-down", "0", "--seeds", str(seed), "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"baton loadtest:\n{(done.stdout + done.stderr)[-3000:]}")
    campaign = Campaign.load(out)
    [probe] = campaign.probes
    records = probe.records
    ttft = [1e3 * (record.token_times[0] - record.sent) for record in records]
    tpot = [1e3 * (record.token_times[-1] - record.token_times[0]) / (record.output_tokens - 1) for record in records]
    return {
        "mean_ttft_ms": statistics.mean(ttft),
        "median_ttft_ms": statistics.median(ttft),
        "mean_tpot_ms": statistics.mean(tpot),
        "median_tpot_ms": statistics.median(tpot),
        "mean_e2el_ms": statistics.mean(1e3 * (record.token_times[-1] - record.sent) for record in records),
        "output_throughput": sum(record.output_tokens for record in records) / max(record.ended for record in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "baton-peers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    python = Places(options.cache).python("vllm")
    rows: dict[str, list[dict[str, float]]] = {"baton loadtest": [], "vllm bench serve": []}
    with tempfile.TemporaryDirectory() as folder:
        make(model := Path(folder) / "model", **SHAPE)
        tokenizer = Tokenizer.load(model)
        with cluster(model, "--engine.threads", "1", "--engine.prefix-caching", "false", "--router.bypass-tokens", "0") as endpoints:
            for round_ in range(ROUNDS + 1):
                dataset = prompts(Path(folder) / "prompts.jsonl", tokenizer, round_)
                told = {
                    "vllm bench serve": theirs(python, endpoints, model, dataset, Path(folder)),
                    "baton loadtest": ours(endpoints, Path(folder) / f"ours-{round_}", round_ + 1),
                }
                for name, row in told.items():
                    if round_:  # the first is a warm-up
                        rows[name].append(row)
    print(describe())
    shape = f"prompts of {PROMPT} tokens, outputs of {OUTPUT}"
    print(f"{REQUESTS} requests, {RATE:g}/s constant, {shape}; medians of {ROUNDS} rounds, in turns\n")
    found: dict[str, Any] = {}
    for number in NUMBERS:
        mine, other = (statistics.median(row[number] for row in rows[name]) for name in rows)
        found[number] = {"ours": mine, "theirs": other, "ratio": mine / other}
        print(f"{number:20} ours {mine:9.2f}   theirs {other:9.2f}   {mine / other - 1:+6.1%}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": describe(), "door": "http", "rows": rows, "numbers": found}, indent=1))


if __name__ == "__main__":
    main()
