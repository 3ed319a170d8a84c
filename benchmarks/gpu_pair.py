"""Prefill and decode as two processes that share one device, beside one process that does both: their tokens, the way of the KV, and what a
decode feels of prompts.

    python benchmarks/gpu_pair.py OUT.json [--cpu-smoke]

Both are whole clusters (`baton up`) over the same random weights. With one prefill and one decode worker every prompt is handed over, by
cuda_ipc, and every digest is compared; with one worker nothing is. Requests come one by one, so both compute the same steps: every token
must be equal, and logprobs are compared to the last bit. Then streams decode while prompts arrive.

Exits with status 1 if a token differs or KV took another way, with 2 without a CUDA device. `--cpu-smoke` walks through the same code with
a toy on the CPU, whose KV goes by TCP. It is the last section of `benchmarks/gpu.py`.
"""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe
from shapes import LLAMA_8B, QWEN3_06B, TINY, TOKENIZER_VOCAB, weight_bytes, write

from baton.client import AsyncClient
from loadtest.cluster import RunningCluster

SHARE = 0.4  # of the device's memory, for each process: what starts this holds some, too
ROOM = 6 << 30  # bytes of each process beside its weights: KV, activations, graphs, libraries
ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Sizes:
    shapes: tuple[Mapping[str, Any], ...]  # the first that fits
    prompts: tuple[int, ...]  # tokens
    output: int
    streams: int  # that decode while prompts arrive
    stream_tokens: int
    arriving: int  # tokens of each such prompt


DEVICE = Sizes((LLAMA_8B, QWEN3_06B), (37, 500, 2048, 8192), 64, 8, 400, 4096)
WALK = Sizes(({**TINY, "vocab_size": TOKENIZER_VOCAB, "dtype": "float32"},), (7, 40, 90), 6, 2, 12, 60)


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    handoff: Mapping[str, Any]
    first_s: float
    gaps_s: tuple[float, ...]


def fitting(sizes: Sizes, memory: float, disk: float) -> Mapping[str, Any]:
    """The largest shape that two processes hold, and whose checkpoint the disk does; both in bytes. Raises MemoryError."""
    for raw in sizes.shapes:
        if SHARE * memory >= weight_bytes(raw) + ROOM and disk >= 2 * weight_bytes(raw):
            return raw
    raise MemoryError(f"{memory / 2**30:.1f} GiB of device memory and {disk / 2**30:.1f} GiB of disk hold no model twice")


def settings(folder: Path, sizes: Sizes, device: str, prefill: int) -> dict[str, str]:
    """`prefill`: workers that only prefill, 0 or 1."""
    made = {
        "model.path": str(folder), "model.max_model_len": str(max(*sizes.prompts, sizes.arriving) + max(sizes.output, sizes.stream_tokens)),
        "prefill.replicas": str(prefill), "decode.replicas": "1", "engine.device": device, "engine.max_num_seqs": str(2 * sizes.streams),
        "router.bypass_tokens": "0", "telemetry.log_level": "warning",
    }  # fmt: skip
    if device == "cuda":
        return {**made, "kv.transport": "cuda_ipc", "prefill.gpus": str(SHARE), "decode.gpus": str(SHARE)}
    return {**made, "kv.transport": "tcp", "engine.kv_memory_mib": "64", "engine.threads": "1"}


async def ask(client: AsyncClient, prompt: Sequence[int], output: int) -> Answer:
    how: dict[str, Any] = {"max_tokens": output, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    began, times, told = time.perf_counter(), [], []
    async with client.generate(token_ids=prompt, timeout_s=ANSWER_S, **how) as stream:
        async for token in stream:
            times.append(time.perf_counter())
            told.append(token)
    gaps = tuple(after - before for before, after in itertools.pairwise(times))
    return Answer(tuple(token.id for token in told), tuple(token.logprob for token in told), stream.result.handoff, times[0] - began, gaps)


def prompts_of(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """None begins as another one does, so nothing of them is cached."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, TOKENIZER_VOCAB, length).tolist() for length in lengths]


async def beside_prompts(client: AsyncClient, sizes: Sizes) -> dict[str, float]:
    """Seconds between two tokens of the streams, from when all of them decode, while one prompt after another is computed."""
    prompts = prompts_of(1, [sizes.prompts[0]] * sizes.streams)
    streams = [asyncio.create_task(ask(client, prompt, sizes.stream_tokens)) for prompt in prompts]
    arrived = 0
    while not any(stream.done() for stream in streams):
        await ask(client, prompts_of(2 + arrived, [sizes.arriving])[0], 1)
        arrived += 1
    answers = await asyncio.gather(*streams)
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s)
    return {"p50": statistics.median(gaps), "p99": gaps[int(0.99 * (len(gaps) - 1))], "max": gaps[-1], "prompts": arrived}


async def cluster(name: str, given: Mapping[str, str], sizes: Sizes) -> tuple[list[Answer], dict[str, float]]:
    async with RunningCluster(given, f"{name}-{os.getpid()}") as endpoints, AsyncClient(endpoints["grpc"]) as client:
        await ask(client, prompts_of(1000, sizes.prompts[:1])[0], 2)  # what is compiled or connected once
        answers = [await ask(client, prompt, sizes.output) for prompt in prompts_of(0, sizes.prompts)]
        return answers, await beside_prompts(client, sizes)


def wrong(two: Sequence[Answer], one: Sequence[Answer], way: str) -> list[str]:
    """What is not as it must be."""
    found = []
    for ours, theirs in zip(two, one, strict=True):
        if ours.tokens != theirs.tokens:
            at = next(i for i, (mine, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if mine != other)
            found.append(f"tokens differ from number {at} on")
        moved = ours.handoff
        if moved["failure"] or moved["transport"] != way or not moved["blocks"] or moved["digests_checked"] != moved["blocks"]:
            found.append(f"KV was not handed over by {way} with all digests compared: {dict(moved)}")
        if theirs.handoff["blocks"]:
            found.append("the one process handed KV over")
    return found


def measure(device: str, sizes: Sizes) -> dict[str, Any]:
    """`failed` in what it returns says what was wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        raw = sizes.shapes[0]
        if device == "cuda":
            raw = fitting(sizes, torch.cuda.mem_get_info()[0], shutil.disk_usage(name).free)
        write(raw, folder, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        way = settings(folder, sizes, device, 1)["kv.transport"]
        two, two_beside = asyncio.run(cluster("two-processes", settings(folder, sizes, device, 1), sizes))
        one, one_beside = asyncio.run(cluster("one-process", settings(folder, sizes, device, 0), sizes))
    same = [ours.logprobs == theirs.logprobs for ours, theirs in zip(two, one, strict=True)]
    cells = {
        str(length): {
            "first token, two processes": ours.first_s, "first token, one": theirs.first_s, "handoff": dict(ours.handoff),
            "same tokens": ours.tokens == theirs.tokens, "same logprobs": equal,
        }
        for length, ours, theirs, equal in zip(sizes.prompts, two, one, same, strict=True)
    }  # fmt: skip
    failures = wrong(two, one, way)
    found = {"weights": weight_bytes(raw), "way": way, "prompts": cells, "beside prompts": {"two processes": two_beside, "one": one_beside}}
    return {**found, "failed": "; ".join(failures)} if failures else found


def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """For a person."""
    made = []
    for length, cell in found["prompts"].items():
        moved, both = cell["handoff"], (cell["first token, two processes"], cell["first token, one"])
        what = f"{moved['blocks']} blocks by {moved['transport']}, {moved['digests_checked']} digests"
        exact = "tokens and logprobs equal" if cell["same logprobs"] else "tokens equal" if cell["same tokens"] else "OTHER TOKENS"
        made.append(
            (f"G12 two processes, prompt of {length}", f"{what}; {exact}; first token {both[0] * 1e3:.1f} ms, in one {both[1] * 1e3:.1f}")
        )
    for who, gaps in found["beside prompts"].items():
        said = f"P50 {gaps['p50'] * 1e3:.1f}, P99 {gaps['p99'] * 1e3:.1f} ms between tokens, {gaps['prompts']:g} prompts"
        made.append((f"G12 decodes beside prompts, {who}", said))
    return [*made, *([("G12", f"WRONG: {found['failed']}")] if "failed" in found else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu-smoke", action="store_true")
    options = parser.parse_args()
    if not options.cpu_smoke and not torch.cuda.is_available():
        print("gpu_pair.py: no CUDA device here; --cpu-smoke walks through the code without one", file=sys.stderr)
        return 2
    found = measure("cpu", WALK) if options.cpu_smoke else measure("cuda", DEVICE)
    where = f"{'no CUDA device' if options.cpu_smoke else torch.cuda.get_device_name()}; {describe()}"
    options.out.write_text(json.dumps({"where": where, **found}, indent=1))
    for what, said in rows(found):
        print(f"{what}: {said}")
    return int("failed" in found)


if __name__ == "__main__":
    sys.exit(main())
