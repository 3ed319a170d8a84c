"""How long a large cluster takes to simulate: 1,000 workers for an hour of a real trace, on one core.

    python benchmarks/scale.py --trace FILE [--times 8] [--workers 250+750] [--seconds 3600] [--steps] [--json FILE]

FILE is one of the Azure traces of 2023 (an hour; Azure Public Dataset, CC BY 4.0) or Mooncake's (JSON lines, with the hashes of its blocks
of 512 tokens; Apache 2.0). It is read as it is played. `--times`: so many copies at once, each later than the one before by an equal part
of the hour, and with prompts of its own. A worker is Llama-3.1-70B in 8 bits on four A10, by their sheet, with 3,600 blocks of 16 tokens.

Told are processor seconds of the whole program, tokens, the peak of its memory at each quarter of the time, how busy the cluster was, and a
digest of the moment of each token and the workers of each request: two runs are the same if it is. `--steps` jumps over no steps
(`baton.simulate.jumps`): the digest must be the same, and the time shows what jumps save.
"""

import argparse
import asyncio
import csv
import gc
import heapq
import json
import logging
import resource
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import Any

from machine import describe

from baton.clock import loop_time
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError
from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.shape import shape_of
from baton.plan.sheet import profile_of
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.jumps import VOCABULARY, ids
from baton.simulate.virtual_time import until
from baton.simulate.workers import Times

HOUR, QUARTERS, TIMEOUT_S = 3600.0, 4, 120.0
SEQS, KV_BLOCKS, CHUNK, HASHED = 64, 3600, 2048, 512
SLO = SloConfig(ttft_s=7.0, tpot_s=0.055)


@dataclass(frozen=True, slots=True)
class Sent:
    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()  # hashes of its blocks, if they are known


def azure(path: Path) -> Iterator[Sent]:
    first = None
    with path.open() as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            yield Sent((at - first).total_seconds(), max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))


def mooncake(path: Path) -> Iterator[Sent]:
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            yield Sent(row["timestamp"] / 1000, row["input_length"], max(1, row["output_length"]), tuple(row["hash_ids"]))


def played(path: Path, times: int, seconds: float, longest: int) -> Iterator[tuple[float, int, Sent]]:
    """When, which copy, what; in order of time. The trace is read once by each copy, so that none is kept."""
    read = mooncake if path.suffix == ".jsonl" else azure

    def copy(number: int) -> Iterator[tuple[float, int, Sent]]:
        late = number * HOUR / times
        for hour in count():
            for one in read(path):
                if one.prompt + one.output <= longest:
                    yield hour * HOUR + one.at - late, number, one

    merged = heapq.merge(*(copy(number) for number in range(times)), key=lambda each: each[:2])
    for at, number, one in merged:
        if at >= seconds:
            return
        if at >= 0:
            yield at, number, one


def prompt_of(number: int, copy: int, one: Sent) -> list[int]:
    """Tokens that no other prompt begins with, or those of its hashed blocks, which are the copy's own."""
    if not one.blocks:
        return [number % VOCABULARY, number // VOCABULARY, *ids(2, one.prompt)][: max(2, one.prompt)]
    tokens = list[int]()
    for block in one.blocks:
        tokens += [block % VOCABULARY, block // VOCABULARY, copy, *ids(3, HASHED)]
    return tokens[: one.prompt]


@dataclass
class Tally:
    """Of flat memory: two numbers a request, and a digest."""

    ttft: "array[float]" = field(default_factory=lambda: array("f"))
    tpot: "array[float]" = field(default_factory=lambda: array("f"))
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    busy: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})  # seconds of all requests
    peaks: list[float] = field(default_factory=list)  # MiB
    digest: Any = field(default_factory=lambda: blake2b(digest_size=16))

    def note(self, came: float, times: "array[float]", request: Any) -> None:
        trace = request.trace
        self.ttft.append(times[0] - came)
        if len(times) > 1:
            self.tpot.append((times[-1] - times[0]) / (len(times) - 1))
        self.prompt_tokens += request.prompt_len
        self.cached_tokens += trace.cached_tokens
        self.tokens += len(times)
        self.busy["prefill"] += trace.prefill_compute_ms / 1000
        self.busy["decode"] += trace.watch.seconds["decode"]
        self.digest.update(times.tobytes() + f"{trace.prefill_worker} {trace.decode_worker}".encode())


async def play(trace: Iterator[tuple[float, int, Sent]], cluster: SimulatedCluster, tally: Tally, seconds: float) -> None:
    began = loop_time()

    async def ask(number: int, copy: int, one: Sent) -> None:
        came, times, loop = loop_time(), array("d"), asyncio.get_running_loop()

        def told(tokens: int, at: Sequence[float]) -> None:
            times.extend(at or [loop.time()] * tokens)

        try:
            request = await cluster.ask(prompt_of(number, copy, one), one.output, TIMEOUT_S, told=told)
        except BatonError as error:
            tally.failed += 1
            tally.digest.update(f"{loop.time()} {error.reason.name}".encode())
            return
        tally.note(came, times, request)

    async with asyncio.TaskGroup() as group:
        for number, (at, copy, one) in enumerate(trace):
            while at >= (len(tally.peaks) + 1) * seconds / QUARTERS:
                tally.peaks.append(peak_mib())
            await until(began + at)
            tally.requests += 1
            group.create_task(ask(number, copy, one))
    tally.peaks.append(peak_mib())


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def simulate(path: Path, times: int, split: tuple[int, int], seconds: float, jumps: bool) -> Tally:
    profile = profile_of(shape_of("llama-3.1-70b"), DEVICES["a10"], MEASURED, devices=4, weight_bits=8)
    sizes = Sizes(*split, SEQS, KV_BLOCKS, CHUNK, max_model_len=KV_BLOCKS * 16)

    async def main() -> Tally:
        tally = Tally()
        config = RouterConfig(max_inflight=1 << 16, max_queue=1 << 16)
        cluster = SimulatedCluster(sizes, Times.of(profile), config, SLO, large=True, jumps=jumps)
        async with cluster.watched():
            await asyncio.sleep(1.0)
            await play(played(path, times, seconds, sizes.max_model_len), cluster, tally, seconds)
        return tally

    return virtual_time.run(main())


def quantile(values: "array[float]", share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def report(tally: Tally, spent: float, wall: float, split: tuple[int, int], seconds: float) -> dict[str, Any]:
    told = {
        "processor_s": spent, "wall_s": wall, "requests": tally.requests, "failed": tally.failed, "tokens": tally.tokens,
        "prompt_tokens": tally.prompt_tokens, "cached_tokens": tally.cached_tokens,
        "us_a_token": 1e6 * spent / max(1, tally.tokens), "us_a_request": 1e6 * spent / max(1, tally.requests),
        "prefill_busy": tally.busy["prefill"] / (seconds * max(1, split[0])),
        "decoding": tally.busy["decode"] / (seconds * max(1, split[1])),
        "ttft_s": [quantile(tally.ttft, share) for share in (0.5, 0.99)], "tpot_s": [quantile(tally.tpot, share) for share in (0.5, 0.99)],
        "peak_mib": tally.peaks, "digest": tally.digest.hexdigest(),
    }  # fmt: skip
    print(
        f"{seconds:g} s of {sum(split)} workers: {spent:.0f} s of a processor ({wall:.0f} s), {tally.requests} requests"
        f" ({tally.failed} failed), {tally.tokens} tokens, {tally.prompt_tokens} of prompts ({tally.cached_tokens} cached)\n"
        f"  {told['us_a_token']:.1f} us a token, {told['us_a_request']:.0f} us a request;"
        f" TTFT P50 {told['ttft_s'][0]:.2f} s, P99 {told['ttft_s'][1]:.2f} s; TPOT P50 {1000 * told['tpot_s'][0]:.1f} ms\n"
        f"  a prefill worker computes {told['prefill_busy']:.0%} of the time, a decode worker has {told['decoding']:.2f} sequences\n"
        f"  peak of memory at each quarter: {', '.join(f'{each:.0f}' for each in tally.peaks)} MiB; digest {told['digest']}"
    )
    return told


def main() -> None:
    logging.disable(logging.ERROR)  # of requests that are too late: they are counted
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--times", type=int, default=8, help="copies of it that are played at once")
    parser.add_argument("--workers", default="250+750", help="prefill+decode")
    parser.add_argument("--seconds", type=float, default=HOUR)
    parser.add_argument("--steps", action="store_true", help="jump over none")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    prefill, decode = islice(map(int, asked.workers.split("+")), 2)
    print(describe(), flush=True)
    gc.set_threshold(200_000, 20, 1000)  # nearly all that is let go has no cycles
    spent, wall = time.process_time(), time.perf_counter()
    tally = simulate(asked.trace, asked.times, (prefill, decode), asked.seconds, not asked.steps)
    told = report(tally, time.process_time() - spent, time.perf_counter() - wall, (prefill, decode), asked.seconds)
    if asked.json:
        settings = {name: getattr(asked, name) for name in ("times", "workers", "seconds", "steps")} | {"trace": asked.trace.name}
        asked.json.write_text(json.dumps({"machine": describe(), **settings, **told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
