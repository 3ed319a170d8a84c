"""What rounding weights or KV costs: the loss on held-out text, how far predictions are from those in float32, and whether the model still
finds what it was told long ago.

    python benchmarks/quality.py [--documents 96] [--trials 20] [--model FOLDER] [--arms NAME …] [--json FILE]

The shipped checkpoint reads stories and dialogues that it was not trained on, token by token, on the path that serves decodes. After each
token its prediction of the next one is compared with float32's: the greedy choice, and the whole distribution (KL divergence). Then one of
four facts is asked for, up to 1,800 tokens after it was told; the whole answer must be right. Another model than those trained here is not
asked.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from machine import describe
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from baton.cli.up import SHIPPED
from baton.engine.build import build
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from baton.models.train.evaluate import DISTANCES, held_out, recall_question
from baton.models.train.recipe import CONTEXT

ARMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weight_dtype": "int8"},
    "int8, the rest bfloat16": {"weight_dtype": "int8", "dtype": "bfloat16"},
    "int4": {"weight_dtype": "int4"},
    "int4, the rest bfloat16": {"weight_dtype": "int4", "dtype": "bfloat16"},
    "KV int8": {"kv_dtype": "int8"},
    "bfloat16, KV int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "KV int5": {"kv_dtype": "int5"},
    "bfloat16, KV int5": {"dtype": "bfloat16", "kv_dtype": "int5"},
}
BATCH, BLOCK = 16, 16


def predictions(runner: Any, texts: list[list[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """For each position at which a text goes on: the next tokens `[n]` of the texts that long, and their logits `[n, vocab]`."""
    room = -(-max(map(len, texts)) // BLOCK)
    blocks = [list(range(i * room, (i + 1) * room)) for i in range(len(texts))]
    for at in range(max(map(len, texts)) - 1):
        going = [i for i, text in enumerate(texts) if at + 1 < len(text)]
        sequences = (
            Sequence(str(i), texts[i][: at + 1], 1, SamplingParams(max_tokens=1), b"", blocks=blocks[i], computed=at) for i in going
        )
        yield [texts[i][at + 1] for i in going], runner.run_logits([Chunk(seq, 1) for seq in sequences])


def compare(runners: Mapping[str, Any], texts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Sums over all positions."""
    sums = {arm: {"loss": 0.0, "kl": 0.0, "same": 0.0, "count": 0.0} for arm in runners}
    for steps in zip(*(predictions(runner, texts) for runner in runners.values()), strict=True):
        exact = steps[0][1].log_softmax(-1)
        for total, (tokens, logits) in zip(sums.values(), steps, strict=True):
            total["loss"] += functional.cross_entropy(logits, torch.tensor(tokens), reduction="sum").item()
            total["kl"] += functional.kl_div(logits.log_softmax(-1), exact, reduction="sum", log_target=True).item()
            total["same"] += int((logits.argmax(-1) == exact.argmax(-1)).sum())
            total["count"] += len(tokens)
    return sums


def recalls(runner: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of the answer is the best choice after the right ones before it."""
    blocks = list(range(-(-(len(prompt) + len(answer)) // BLOCK)))
    seq = Sequence("recall", list(prompt), len(prompt), SamplingParams(max_tokens=len(answer)), b"", blocks=blocks)
    for token in answer:
        pending = seq.pending
        if int(runner.run_logits([Chunk(seq, pending)])[0].argmax()) != token:
            return False
        seq.computed += pending
        seq.tokens.append(token)
    return True


def recall(runner: Any, tokenizer: Tokenizer, distance: int, trials: int) -> float:
    """The share of questions answered right."""
    return sum(recalls(runner, *recall_question(tokenizer, distance, trial)[:2]) for trial in range(trials)) / trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=96)
    parser.add_argument("--trials", type=int, default=20, help="questions for each distance")
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="beside float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe())
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    texts = sorted((ids.tolist() for ids in islice(held_out(tokenizer), options.documents)), key=len)
    arms = {arm: more for arm, more in ARMS.items() if arm in ("float32", *options.arms)}
    room: dict[str, Any] = {"block_size": BLOCK, "kv_memory_mib": 1536, "max_num_seqs": BATCH, "max_model_len": CONTEXT}
    runners = {arm: build(Options.of(options.model, **room, **more)).engine.runner for arm, more in arms.items()}
    totals: dict[str, dict[str, float]] = {}
    for start in range(0, len(texts), BATCH):
        for arm, sums in compare(runners, texts[start : start + BATCH]).items():
            totals[arm] = {key: value + totals.get(arm, {}).get(key, 0.0) for key, value in sums.items()}
    rows: list[dict[str, Any]] = []
    for arm, total in totals.items():
        loss, kl, same = (total[key] / total["count"] for key in ("loss", "kl", "same"))
        row = {"arm": arm, "tokens": int(total["count"]), "loss": loss, "perplexity": math.exp(loss), "kl": kl, "same_choice": same}
        found = {n: recall(runners[arm], tokenizer, n, options.trials) for n in DISTANCES if options.model == SHIPPED and options.trials}
        rows.append(row | {"recall": found})
        print(
            f"{arm:24} {int(total['count'])} tokens: loss {loss:.4f}, perplexity {math.exp(loss):.3f}, KL {kl:.5f}, same choice {same:.1%}"
            f"{', recall ' if found else ''}{', '.join(f'{distance}: {share:.0%}' for distance, share in found.items())}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
