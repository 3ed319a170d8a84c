"""How often greedy outputs over vLLM differ from those computed alone: because of the batch they were in, and because a worker died.

    .venv-vllm/bin/python benchmarks/vllm_divergence.py [--dtypes float32 bfloat16] [--prompts 24] [--tokens 100] [--json FILE]

One prefill and two decode workers. The same prompts are asked one at a time, twice all at once, and once more all at once while a decode
worker is killed in the middle. Matrix kernels may sum in another order at another batch size, and a continued output computes its KV in
other pieces, so the last bits of logits differ; a token changes where the two best are nearly equal.

    differ      outputs that are not those computed alone
    first       median position of the first token that differs
    gap         largest difference of the two tokens' log-probabilities there, as computed alone ("more": the other token is not among
                the five best)
    continued   outputs that a dead worker had begun
"""

import argparse
import asyncio
import json
import math
import random
import signal
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import describe
from tokenizers import Tokenizer
from vllm_stacks import Settings, Stack, baton

from baton.cli.up import SHIPPED
from baton.client import AsyncClient, Token
from baton.models.train.stories import story

SENTENCES = 6  # of each prompt
KILL_AFTER = 0.25  # of the tokens, in half of the outputs
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Output:
    tokens: list[Token]
    continued: bool


@dataclass(frozen=True, slots=True)
class Row:
    outputs: int
    differ: int
    first: float | None
    gap: float | None


def prompts(model: Path, count: int, seed: int) -> list[list[int]]:
    tokenizer, rng = Tokenizer.from_file(str(model / "tokenizer.json")), random.Random(seed)
    return [tokenizer.encode(f"{number} " + " ".join(story(rng, 4).sentences[:SENTENCES])).ids for number in range(count)]


class Run:
    """Asks for all prompts, each time with another salt: a cached prefix would spare the computations that are compared."""

    def __init__(self, client: AsyncClient, stack: Stack, asked: list[list[int]], tokens: int) -> None:
        self._client, self._stack, self._asked, self._tokens = client, stack, asked, tokens

    async def alone(self) -> list[Output]:
        return [await self._one(prompt, "alone") for prompt in self._asked]

    async def together(self, salt: str) -> list[Output]:
        return await asyncio.gather(*(self._one(prompt, salt) for prompt in self._asked))

    async def killed(self) -> list[Output]:
        victim = (await asyncio.to_thread(self._stack.parts))["decode"]
        begun = 0

        def reached() -> None:
            nonlocal begun
            begun += 1
            if begun == len(self._asked) // 2:
                victim.send_signal(signal.SIGKILL)

        return await asyncio.gather(*(self._one(prompt, "killed", reached) for prompt in self._asked))

    async def _one(self, prompt: list[int], salt: str, reached: Any = None) -> Output:
        how: dict[str, Any] = {
            "max_tokens": self._tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 5,
            "cache_salt": salt,
            "timeout_s": TIMEOUT_S,
        }
        tokens = []
        async with self._client.generate(token_ids=prompt, **how) as stream:
            async for token in stream:
                tokens.append(token)
                if reached is not None and len(tokens) == int(self._tokens * KILL_AFTER):
                    reached()
            return Output(tokens, stream.result.workers["retries"] > 0)


def compared(outputs: list[Output], alone: list[Output]) -> Row:
    places, gaps = [], []
    for output, reference in zip(outputs, alone, strict=True):
        for mine, other in zip(output.tokens, reference.tokens, strict=True):
            if mine.id != other.id:
                places.append(other.index)
                gaps.append(dict(other.top)[other.id] - dict(other.top).get(mine.id, -math.inf))
                break
    return Row(len(outputs), len(places), statistics.median(places) if places else None, max(gaps, default=None))


def shown(row: Row) -> str:
    gap = "" if row.gap is None else f", first at {row.first:g}, gap {'more' if math.isinf(row.gap) else f'{row.gap:.2g}'}"
    return f"{row.differ} of {row.outputs} differ{gap}"


async def measure(stack: Stack, asked: list[list[int]], tokens: int) -> dict[str, Row]:
    async with AsyncClient(stack.grpc) as client:
        run = Run(client, stack, asked, tokens)
        alone = await run.alone()
        rows = {f"together, {salt} time": compared(await run.together(salt), alone) for salt in ("first", "second")}
        struck = await run.killed()
        for name, continued in (("killed: continued", True), ("killed: the others", False)):
            pairs = [(output, reference) for output, reference in zip(struck, alone, strict=True) if output.continued is continued]
            rows[name] = compared([output for output, _ in pairs], [reference for _, reference in pairs])
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-invariant", action="store_true", help="vLLM's mode; GPUs alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heading = {name: getattr(options, name) for name in ("tokens", "seed", "batch_invariant")}
    print(describe())
    flags = ["--router.bypass-tokens", "0", *(["--engine.batch-invariant", "true"] if options.batch_invariant else [])]
    results: dict[str, dict[str, Any]] = {}
    for dtype in options.dtypes:
        with baton("vllm", 1, 2, *flags)(Settings(options.model, 1024, device=options.device, dtype=dtype)) as stack:
            rows = asyncio.run(measure(stack, prompts(options.model, options.prompts, options.seed), options.tokens))
        for name, row in rows.items():
            print(f"{dtype:9} {name:22} {shown(row)}", flush=True)
        results[dtype] = {name: asdict(row) for name, row in rows.items()}
        if options.json:
            options.json.write_text(json.dumps({"machine": describe(), **heading, "dtypes": results}, indent=1))


if __name__ == "__main__":
    main()
