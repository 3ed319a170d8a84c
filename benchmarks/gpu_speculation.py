"""What guesses bring on a device: tokens/s with each method, as a multiple of those without (section G10 of benchmarks/gpu.py).

`tale` and what ships beside it show what methods are worth on text that they were made for: stories, and recall, in which a list that the
prompt has is repeated. Whole engines, as a worker builds them: how many guesses a step gets follows from what was measured at start.

At full size no draft that fits is at hand, so both models are made to agree, and by how much is chosen. All matrices have the size of a
Llama 8B and of a Llama of 1 B, and are read and multiplied. But what layers add to the residual stream is small, and the head's row for the
successor of a token is the token's embedding: the model says the successor, a random permutation of the vocabulary. The draft has the same
permutation but for a share of the tokens, after which it says another one: RIGHT is the chance that a guess is accepted.

The parts are independent, print what they do, and end when they have taken too long. With `--backend auto` attention is our own kernels:
FlashInfer compiles its own for each shape, for longer than all of this takes.
"""

import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.device_draft import DeviceDraft
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
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "vocab_size": 96,
}  # fmt: skip
BOUND = 8  # guesses of a sequence in a step, at most
RIGHT = 0.8  # share of the guesses of the draft of full size that are right
SHOWN = 4  # guesses of the steps that are told
QUIET = 1e-3  # of what layers add to the residual stream, as a share of random weights
CELL_S = 2.0  # of one measurement
PART_S = 25.0  # after which a part ends
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


@dataclass
class Part:
    """One part of the section: what it prints, and how long it may take."""

    name: str
    row: Row
    begun: float
    endless: bool = False  # a walk through the code

    def tell(self, what: str) -> None:
        print(f"g10, {self.name}, {time.perf_counter() - self.begun:.1f} s: {what}", flush=True)

    def check(self) -> None:
        """Raises TimeoutError when its time is over."""
        if time.perf_counter() - self.begun > PART_S and not self.endless:
            raise TimeoutError(f"{self.name} has taken more than {PART_S:.0f} s")

    def result(self, what: str, cell: dict[str, float], plain: dict[str, float] | None = None, aim: float | None = None) -> None:
        guesses = f", {cell['tokens a step']:.1f} a step, {cell['accepted']:.0%} right" if cell["drafted"] else ""
        factor = None if plain is None else cell["tokens/s"] / plain["tokens/s"]
        told = f"{cell['tokens/s']:.0f} tokens/s{guesses}"
        self.tell(f"{what}: {told}" + (f", {factor:.2f} x" if factor else ""))
        self.row(f"G10 {self.name}, {what}", told, factor, aim)


def full_size(machine: Any, config_of: Callable[[dict[str, Any]], ModelConfig], part: Part) -> dict[str, Any]:
    """A pair of the sizes of 8 B and 1 B, without guesses and with them, and what the steps cost."""
    smoke, device, dtype = part.endless, machine.device, machine.dtype
    big, small = (config_of({**shape, **(SMALL if smoke else {})}) for shape in (LLAMA_8B, LLAMA_1B))
    batches, output, prompt, bound = ((1,), 4, 8, 2) if smoke else ((1, 8), 128, 256, BOUND)
    most, longest = max(batches), max(64, prompt + output) + 2 * bound
    runner = runner_of(GpuRunner, agreeing(big, dtype, device, 0.0), "target", dtype, device)
    part.tell("the model is made")
    drafter = DeviceDraft(runner_of(ModelRunner, agreeing(small, dtype, device, 1.0 - RIGHT), "draft", dtype, device), bound)
    runner.pair(drafter)
    part.tell("the draft is made")
    capacity = Capacity(most, 16 if smoke else 2048, longest, guesses=bound)
    pool = KvPool(runner.layout, 2 * most * -(-longest // 16))
    runner.attach(pool, capacity=capacity, backend=own_kernels(machine), graph_sizes=(1, 4) if smoke else None)
    part.tell(f"steps of {runner.graphs.sizes} decodes are captured")
    costs, line = drafter.measure(most), step_line(runner, most, bound, longest)
    step, shown = line.at(1), min(SHOWN, bound)
    found: dict[str, Any] = {"step": line.points, "one guess": costs.one.points, "several guesses": costs.several.points}
    verified, drafted = line.at(1 + shown), costs.several.at(1)
    told = {f"verifying {shown} guesses": verified, "a draft of 1": costs.one.at(1), f"a draft of {shown}": drafted}
    for what, took in told.items():
        part.tell(f"{what}: {took * 1e3:.2f} ms; step of one token {step * 1e3:.2f} ms")
        part.row(f"G10 {part.name}, {what}, of a step", f"{took * 1e3:.2f} of {step * 1e3:.2f} ms", took / step, None)
    limits = Limits(most, capacity.max_num_batched_tokens, speculation_batch_tokens=64)
    for batch in batches:
        prompts = [[(97 * i + 5) % big.vocab] * prompt for i in range(batch)]
        cells = dict[str, dict[str, float]]()
        for name, paced in (("none", None), ("draft", Paced(drafter, bound, line))):
            engine = OverlapEngine(runner, limits, longest, prefix_caching=False, drafter=paced)
            cells[name] = found[f"{name}, batch {batch}"] = spoken(engine, prompts, output, part)
            plain = None if paced is None else cells["none"]
            part.result(f"{name}, batch {batch}", cells[name], plain, None if plain is None else 1.8 if batch == 1 else 1.0)
    return found


def shipped(machine: Any, method: str, text: str, part: Part) -> dict[str, Any]:
    """`tale` as a worker builds it, without guesses and with those of a method."""
    smoke = part.endless
    keys: dict[str, Any] = {
        "device": "cuda" if machine.cuda else "cpu",
        "speculation": method,
        "kv_memory_mib": 64,
        "max_num_seqs": 1 if smoke else 8,
    }
    keys |= {"compiled": False, "dtype": "float32"} if smoke else {"attention_backend": own_kernels(machine)}
    engine = build(Options.of(SHIPPED, **keys)).engine
    part.tell("the engine is built")
    encoder, found = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")), dict[str, Any]()
    plain_engine = type(engine)(engine.runner, engine.scheduler.limits, engine.max_len, prefix_caching=False)
    for batch in (1,) if smoke else (1, 8):
        prompts = [encoder.encode(TEXTS["tale"][text](i), add_special_tokens=False).ids for i in range(batch)]
        plain = found[f"none, batch {batch}"] = spoken(plain_engine, prompts, 6 if smoke else 160, part)
        part.result(f"none, batch {batch}", plain)
        cell = found[f"{method}, batch {batch}"] = spoken(engine, prompts, 6 if smoke else 160, part)
        part.result(f"{method}, batch {batch}", cell, plain, 1.8 if batch == 1 else 1.0)
    return found


def own_kernels(machine: Any) -> str:
    chosen: str = machine.backend
    return "triton" if chosen == "auto" else chosen


def spoken(engine: Engine, prompts: list[list[int]], output: int, part: Part) -> dict[str, float]:
    """The median rate of several rounds, from the first step in which all of them speak to the end of the first one."""
    rates, lengths, before, begun = list[float](), list[float](), engine.counts.copy(), time.perf_counter()
    for turn in range(32):
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        seqs = [Sequence(f"{turn}-{i}", [*prompt], len(prompt), replace(params, seed=i), b"") for i, prompt in enumerate(prompts)]
        for seq in seqs:
            engine.add(seq)
        while any(seq.output_len == 0 for seq in seqs):
            engine.step()
            part.check()
        spoke, at, steps = sum(seq.output_len for seq in seqs), time.perf_counter(), 0
        while len(engine.sequences) == len(seqs):
            engine.step()
            steps += 1
            part.check()
        took = time.perf_counter() - at
        tokens = sum(seq.output_len for seq in seqs) - spoke
        for seq in seqs:
            engine.abort(seq.id)
        while not engine.idle:
            engine.step()
        if turn and steps:  # the first one compiles
            rates.append(tokens / took)
            lengths.append(tokens / steps / len(seqs))
            if len(rates) > 1 and (part.endless or time.perf_counter() - begun > CELL_S):
                break
    drafted = engine.counts.drafted_tokens - before.drafted_tokens
    right = engine.counts.accepted_tokens - before.accepted_tokens
    found = {"tokens/s": statistics.median(rates), "tokens a step": statistics.median(lengths), "drafted": float(drafted)}
    return {**found, "accepted": right / drafted if drafted else 0.0}


def measure(machine: Any, config_of: Callable[[dict[str, Any]], ModelConfig], row: Row, smoke: bool) -> dict[str, Any]:
    """All parts, each on its own. Raises RuntimeError, which names them, if some failed."""
    found, failed = dict[str, Any](), list[str]()
    parts: dict[str, Callable[[Part], dict[str, Any]]] = {
        "tale, recall": partial(shipped, machine, "prompt_lookup", "recall"),
        "tale, story": partial(shipped, machine, "draft", "story"),
        "Llama 8B and 1B": partial(full_size, machine, config_of),
    }
    for name, work in parts.items():
        part = Part(name, row, time.perf_counter(), smoke)
        try:
            found[name] = work(part)
        except Exception as error:
            part.tell(f"failed: {error}")
            traceback.print_exc()
            failed.append(name)
        gc.collect()
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")
    return found
