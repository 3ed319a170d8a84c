"""What guesses bring on a device: tokens/s with each method, as a multiple of those without (section G10 of benchmarks/gpu.py).

`tale` and what ships beside it show what methods are worth on text that they were made for: stories, and recall, in which a list that the
prompt has is repeated. Whole engines, as a worker builds them: how many guesses a step gets follows from what was measured at start.

At full size no draft that fits is at hand, so both models are made to agree, and by how much is chosen. All matrices have the size of a
Llama 8B and of a Llama of 1 B, and are read and multiplied. But what layers add to the residual stream is small, and the head's row for the
successor of a token is the token's embedding: the model says the successor, a random permutation of the vocabulary. The draft has the same
permutation but for a share of the tokens, after which it says another one: `right` is the chance that a guess is accepted.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from shapes import LLAMA_8B, llama
from speculation import TEXTS
from tokenizers import Tokenizer
from torch import Tensor

from baton.cli.up import SHIPPED
from baton.engine.build import build
from baton.engine.choice import choose_ops
from baton.engine.core.drafting import Paced
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduler import Limits
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.device_draft import DeviceDraft
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.overlap import OverlapEngine
from baton.engine.gpu.runner import GpuRunner
from baton.engine.measure_steps import step_line
from baton.engine.model.checkpoint import ModelConfig, expected_tensors
from baton.engine.model.transformer import Transformer
from baton.engine.options import Options
from baton.engine.runner import ModelRunner

LLAMA_1B = llama(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
    vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
)  # fmt: skip
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
BOUND = 8  # guesses of a sequence in a step
QUIET = 1e-3  # of what layers add to the residual stream, as a share of random weights
CELL_S = 2.0  # of one measurement
METHODS = (("none", "story"), ("draft", "story"), ("none", "recall"), ("prompt_lookup", "recall"))
Row = Callable[[str, str, float | None, float | None], None]


def permutation(vocab: int, wrong: float, device: torch.device) -> Tensor:
    """The successor of each token; of this share of the tokens, another one than that of `wrong` 0."""
    random = torch.Generator().manual_seed(7)
    found = torch.randperm(vocab, generator=random)
    chosen = torch.randperm(vocab, generator=random)[: int(wrong * vocab)]
    found[chosen] = found[chosen].roll(1)
    return found.to(device)


def agreeing(config: ModelConfig, dtype: torch.dtype, device: torch.device, wrong: float) -> Transformer:
    """A model that says the successors of `permutation`."""
    shapes, successors = expected_tensors(config), permutation(config.vocab, wrong, device)
    embedding = torch.empty(shapes["model.embed_tokens.weight"], dtype=dtype, device=device).normal_(std=0.02)

    def read(name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name])
        if name == "model.embed_tokens.weight":
            return embedding
        if name == "lm_head.weight":
            return torch.empty_like(embedding).index_copy_(0, successors, embedding)
        matrix = torch.empty(shapes[name], dtype=dtype, device=device).normal_(std=0.02)
        return matrix.mul_(QUIET) if name.endswith(("o_proj.weight", "down_proj.weight")) else matrix

    return Transformer(config, read, dtype, device, choose_ops(device, dtype, True))


def runner_of(kind: type[ModelRunner], model: Transformer, name: str, dtype: torch.dtype, device: torch.device) -> Any:
    c = model.config
    layout = KvLayout(name, str(dtype).removeprefix("torch."), 16, c.layers, c.kv_heads, c.head_dim)
    return kind(model, layout, device)


def full_size(machine: Any, config_of: Callable[[dict[str, Any]], ModelConfig], row: Row, smoke: bool) -> dict[str, Any]:
    shapes = [{**shape, **(SMALL if smoke else {}), **({"vocab_size": 96} if smoke else {})} for shape in (LLAMA_8B, LLAMA_1B)]
    big, small = map(config_of, shapes)
    rights, batches, output = ((1.0,), (2,), 12) if smoke else ((0.9, 0.7), (1, 8), 192)
    device, dtype, found = machine.device, machine.dtype, dict[str, Any]()
    longest = 512 + output + 2 * BOUND if not smoke else 64
    target = agreeing(big, dtype, device, 0.0)
    for right in (None, *rights):
        runner = runner_of(GpuRunner, target, "target", dtype, device)
        drafter: DeviceDraft | None = None
        if right is not None:
            draft = agreeing(small, dtype, device, 1.0 - right)
            drafter = DeviceDraft(runner_of(ModelRunner, draft, "draft", dtype, device), BOUND)
            runner.pair(drafter)
        most = max(batches)
        capacity = Capacity(most, 64 if smoke else 2048, longest, guesses=0 if drafter is None else BOUND)
        runner.attach(KvPool(runner.layout, 2 * most * -(-longest // 16)), capacity=capacity, backend=machine.backend)
        paced = None
        if drafter is not None:
            costs, line = drafter.measure(most), step_line(runner, most, BOUND)
            found["costs"] = {"step": line.points, "one guess": costs.one.points, "several": costs.several.points}
            paced = Paced(drafter, BOUND, line)
        limits = Limits(most, capacity.max_num_batched_tokens, speculation_batch_tokens=64)
        engine = OverlapEngine(runner, limits, longest, prefix_caching=False, drafter=paced)
        for batch in batches:
            prompts = [[(97 * i + 5) % big.vocab] * (8 if smoke else 512) for i in range(batch)]
            cell = spoken(engine, prompts, output, 0.0)
            name = "none" if right is None else f"draft, right {right:.0%}"
            found[f"8B, {name}, batch {batch}"] = cell
            plain = found[f"8B, none, batch {batch}"]["tokens/s"]
            aim = 1.8 if right is not None and right >= 0.9 and batch == 1 else None
            told(row, f"G10 Llama 8B shape, {name}, batch {batch}", cell, None if right is None else cell["tokens/s"] / plain, aim)
        del engine, runner, drafter, paced
        gc.collect()
    return found


def shipped(machine: Any, row: Row, smoke: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    encoder = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    for method, text in METHODS:
        keys = {"device": "cuda" if machine.cuda else "cpu", "speculation": method, "kv_memory_mib": 256, "max_num_seqs": 8}
        engine = build(Options.of(SHIPPED, **keys)).engine
        for batch in (1,) if smoke else (1, 8):
            prompts = [encoder.encode(TEXTS["tale"][text](i), add_special_tokens=False).ids for i in range(batch)]
            cell = found[f"tale, {text}, {method}, batch {batch}"] = spoken(engine, prompts, 24 if smoke else 160, 0.0)
            plain = found[f"tale, {text}, none, batch {batch}"]["tokens/s"]
            aim = 1.8 if batch == 1 and method in ("prompt_lookup", "draft") else None
            told(row, f"G10 tale, {text}, {method}, batch {batch}", cell, None if method == "none" else cell["tokens/s"] / plain, aim)
        del engine
        gc.collect()
    return found


def spoken(engine: Engine, prompts: list[list[int]], output: int, temperature: float) -> dict[str, float]:
    """The median rate of several rounds, from the first step in which all of them speak to the end of the first one."""
    rates, lengths, before, begun = list[float](), list[float](), engine.counts.copy(), time.perf_counter()
    for turn in range(32):
        params = SamplingParams(max_tokens=output, temperature=temperature, ignore_eos=True)
        seqs = [Sequence(f"{turn}-{i}", [*prompt], len(prompt), replace(params, seed=i), b"") for i, prompt in enumerate(prompts)]
        for seq in seqs:
            engine.add(seq)
        while any(seq.output_len == 0 for seq in seqs):
            engine.step()
        spoke, at, steps = sum(seq.output_len for seq in seqs), time.perf_counter(), 0
        while len(engine.sequences) == len(seqs):
            engine.step()
            steps += 1
        took = time.perf_counter() - at
        tokens = sum(seq.output_len for seq in seqs) - spoke
        for seq in seqs:
            engine.abort(seq.id)
        while not engine.idle:
            engine.step()
        if turn:  # the first one compiles
            rates.append(tokens / took)
            lengths.append(tokens / steps / len(seqs))
            if time.perf_counter() - begun > CELL_S and len(rates) > 1:
                break
    drafted = engine.counts.drafted_tokens - before.drafted_tokens
    right = engine.counts.accepted_tokens - before.accepted_tokens
    found = {"tokens/s": statistics.median(rates), "tokens a step": statistics.median(lengths), "drafted": float(drafted)}
    return {**found, "accepted": right / drafted if drafted else 0.0}


def told(row: Row, what: str, cell: dict[str, float], factor: float | None, aim: float | None) -> None:
    guesses = f", {cell['tokens a step']:.1f} a step, {cell['accepted']:.0%} right" if cell["drafted"] else ""
    row(what, f"{cell['tokens/s']:.0f} tokens/s{guesses}", factor, aim)


def measure(machine: Any, config_of: Callable[[dict[str, Any]], ModelConfig], row: Row, smoke: bool) -> dict[str, Any]:
    return {**full_size(machine, config_of, row, smoke), **shipped(machine, row, smoke)}
