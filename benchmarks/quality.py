"""What rounding a model's weights costs: its loss on held-out text, and how far its predictions are from those in float32.

    python benchmarks/quality.py [--documents 96] [--json FILE]

The shipped checkpoint reads stories and dialogues that it was not trained on, token by token, on the path that serves decodes. After each
token its prediction of the next one is compared with float32's: the greedy choice, and the whole distribution (KL divergence).
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
from baton.models.train.evaluate import held_out

ARMS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weight_dtype": "int8"},
    "int8, the rest bfloat16": {"weight_dtype": "int8", "dtype": "bfloat16"},
    "int4": {"weight_dtype": "int4"},
    "int4, the rest bfloat16": {"weight_dtype": "int4", "dtype": "bfloat16"},
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=96)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe())
    texts = sorted(
        (ids.tolist() for ids in islice(held_out(Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))), options.documents)), key=len
    )
    runners = {arm: build(Options.of(SHIPPED, kv_memory_mib=128, **more)).engine.runner for arm, more in ARMS.items()}  # type: ignore[arg-type]
    totals: dict[str, dict[str, float]] = {}
    for start in range(0, len(texts), BATCH):
        for arm, sums in compare(runners, texts[start : start + BATCH]).items():
            totals[arm] = {key: value + totals.get(arm, {}).get(key, 0.0) for key, value in sums.items()}
    rows: list[dict[str, Any]] = []
    for arm, total in totals.items():
        loss, kl, same = (total[key] / total["count"] for key in ("loss", "kl", "same"))
        rows.append({"arm": arm, "tokens": int(total["count"]), "loss": loss, "perplexity": math.exp(loss), "kl": kl, "same_choice": same})
        print(
            f"{arm:24} {int(total['count'])} tokens: loss {loss:.4f}, perplexity {math.exp(loss):.3f}, KL {kl:.5f}, same choice {same:.1%}"
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
