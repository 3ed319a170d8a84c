"""Makes an engine of a folder and a memory budget: which runner, how many blocks, how long a sequence may be."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.engine.core import toy
from baton.engine.core.drafting import Drafter
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.progress import Step, tell
from baton.engine.core.protocol import Chunk, NonFiniteLogits, OutOfDeviceMemory, Runner
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import NONE
from baton.engine.defaults import DeviceFacts, settle, stored_dtype
from baton.engine.facts.fields import Fields
from baton.engine.facts.fingerprint import check_sums, fingerprint, tokenizer_fingerprint
from baton.engine.facts.model_facts import context_length
from baton.engine.machine import available_memory
from baton.engine.options import Options
from baton.engine.speculation import BESIDE, BRANCHING, draft_kv, exact, make_drafter, pair

log = logging.getLogger(__name__)
WARM_UP_TOKENS = 256  # more would take longer and gain little
LEAST_BLOCKS = 8  # of a pool, half of which is the window of a longer sequence
ODD_TOKENS = 45  # compilers for devices make other kernels for lengths that are not multiples of 16


class BuildError(ValueError):
    """The model and the options do not fit together. The text names the key to change."""


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    model_fingerprint: str
    tokenizer_fingerprint: str
    max_model_len: int


def check(options: Options) -> None:
    """Raises BuildError, which names the configuration key, for options of which one excludes another."""
    if options.engine.batch_invariant and options.engine.kind != "vllm":
        raise BuildError("engine.batch_invariant is a mode of vLLM; set engine.kind to vllm")
    if options.engine.speculation == "heads" and options.engine.kind == "baton" and options.engine.device != "cpu":
        raise BuildError("engine.speculation: heads needs engine.device cpu")
    for key, given in (("draft_model", options.engine.draft_model is not None), ("draft_dtype", options.engine.draft_dtype != "auto")):
        if given and options.engine.speculation not in BESIDE:
            raise BuildError(f"engine.{key}: needs engine.speculation {' or '.join(BESIDE)}")
    branches, method = options.engine.speculation_branches, options.engine.speculation
    if branches > 1 and options.engine.kind != "baton":
        raise BuildError(f"engine.speculation_branches: {branches} needs engine.kind baton")
    if branches > 1 and method not in BRANCHING:
        raise BuildError(f"engine.speculation_branches: {branches} needs engine.speculation {' or '.join(BRANCHING)}, not {method}")
    if options.direct and (options.engine.device == "cpu" or options.engine.kind == "vllm"):
        raise BuildError("kv.transport: cuda_ipc needs engine.device cuda and engine.kind baton")
    if options.long_contexts and (options.engine.kind != "baton" or options.engine.device != "cpu"):
        raise BuildError("tiers.long_contexts needs engine.kind baton and engine.device cpu")
    if options.long_contexts and method in BESIDE:
        raise BuildError(f"tiers.long_contexts: needs an engine.speculation other than {method}, whose KV has to be in the pool")
    if options.describes and options.engine.kind != "baton":
        raise BuildError("kv.events: needs engine.kind baton")


def build(options: Options) -> Built:
    """Load the model and lay out its pool, and tell `baton.engine.core.progress` about it.

    Raises CheckpointError, BuildError or OSError, each naming what is wrong."""
    check(options)
    try:
        return _build(options)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which a toy cluster does not load
            raise
        text = str(error).partition(" If reserved")[0].partition("\n")[0]
        raise BuildError(f"engine.device: the GPU has too little free memory for this model: {text}") from error


def _build(options: Options) -> Built:
    try:
        check_sums(options.path)
    except ValueError as error:
        raise BuildError(f"model.path: {error}") from None
    config = _read_config(options.path)
    if not (options.path / "tokenizer.json").is_file():
        raise BuildError(f"model.path: {options.path} holds no tokenizer.json")
    runner, options = _load(options, config)
    if options.engine.speculation in BESIDE:
        try:
            pair(runner, options)
        except ValueError as error:
            raise BuildError(str(error)) from None
    longest = options.model.max_model_len or runner.max_positions
    if longest > runner.max_positions:
        place = context_length(Fields.read(options.path / "config.json")).place
        raise BuildError(f"model.max_model_len: {longest} is more than the context of the model, {runner.max_positions} tokens ({place})")
    try:
        engine = _on_device(runner, options, longest) if options.engine.device != "cpu" else _on_cpu(runner, options, longest)
        tell(Step("warming up"))
        _warm_up(runner, options, longest)
    except NonFiniteLogits:
        raise BuildError(f"model.path: the weights in {options.path} produce logits that are not numbers") from None
    return Built(engine, runner.layout.model_fingerprint, tokenizer_fingerprint(options.path), longest)


def _load(options: Options, config: Mapping[str, Any]) -> tuple[Any, Options]:
    """The runner with its weights, without a pool, and the settled options."""
    if config.get("architectures") == [toy.ARCHITECTURE]:
        if options.engine.device != "cpu":
            raise BuildError(f"engine.device: the toy computes on a CPU, not on {options.engine.device}")
        if options.engine.kv_stored:
            raise BuildError(f"engine.kv_dtype: the toy's KV are exact sums, which {options.engine.kv_dtype} cannot hold; leave it at auto")
        options = _settled(options, config, DeviceFacts("cpu"))
        return toy.ToyRunner.load(options.path, fingerprint(options.path), options.block_size), options
    # Torch is loaded only here, so that a toy cluster starts without it.
    import torch

    from baton.engine.choice import load
    from baton.engine.runner import ModelRunner

    if options.engine.threads is not None:
        torch.set_num_threads(options.engine.threads)
    kind, device = ModelRunner, DeviceFacts("cpu")
    if options.engine.device != "cpu":
        from baton.engine.gpu.device import share_memory, why_not
        from baton.engine.gpu.runner import GpuRunner

        if why := why_not(options.engine.device):
            raise BuildError(f"engine.device: this torch cannot use a {options.engine.device} device: {why}")
        share_memory(options.share)
        found = torch.cuda.get_device_properties(0)
        kind, device = GpuRunner, DeviceFacts("cuda", found.total_memory, (found.major, found.minor))
    options = _settled(options, config, device)
    return load(kind, options, lambda done, total: tell(Step("loading weights", done, total, "tensors"))), options


def pool_bytes(options: Options) -> int:
    """Size of the pool that `build` would make now for a model on a CPU, without its weights. Raises CheckpointError, BuildError."""
    from baton.engine.model.config_json import read_config

    config, options = read_config(options.path), settle(options, DeviceFacts("cpu")).options
    dims = config.layers, config.kv_heads, config.head_dim
    parts, stored = config.kv_parts, options.engine.kv_stored
    layout = KvLayout("", options.model.dtype, options.block_size, *dims, parts=parts, value_dim=config.kv_value_dim, stored=stored)
    try:
        layout = replace(layout, draft=draft_kv(options))
    except ValueError as error:
        raise BuildError(str(error)) from None
    longest = options.model.max_model_len or config.max_positions
    return layout.block_bytes * count_blocks(options, longest, layout.block_bytes, available_memory())


def _on_cpu(runner: Any, options: Options, longest: int) -> Engine:
    blocks = count_blocks(options, longest, runner.layout.block_bytes, available_memory())
    runner.attach(KvPool(runner.layout, blocks))
    engine = options.engine
    longer = options.long_contexts
    return Engine(runner, engine.limits, longest, engine.prefix_caching, engine.reuse_output, _drafter(options, runner, longest), longer)


def _on_device(runner: Any, options: Options, longest: int) -> Engine:
    """The pool is on the device, and one step is in flight."""
    from torch import OutOfMemoryError

    from baton.engine.gpu.footprint import DeviceMemory, largest_step, spare
    from baton.engine.gpu.inputs import Capacity
    from baton.engine.gpu.overlap import OverlapEngine

    limits, engine = options.engine.limits, options.engine
    guesses = engine.speculation_tokens if engine.speculation != NONE else 0
    capacity = Capacity(limits.max_num_seqs, limits.max_num_batched_tokens, longest, limits.speculation_branches, guesses)
    tell(Step("trying attention backends"))
    try:
        backend = runner.choose_attention(engine.attention_backend, engine.equal_arithmetic)

        def attach(blocks: int) -> None:
            runner.attach(KvPool(runner.layout, blocks), capacity=capacity, backend=backend)

        left = 0
        if engine.kv_memory_bytes is None:
            tell(Step("measuring memory"))
            left = spare(runner, capacity, attach, DeviceMemory(runner.device, options.share))
            log.info("%.0f MiB are left for KV beside weights, graphs and the largest step, and for what is in reserve", left / 2**20)
            if not options.direct:
                left = min(left, available_memory())  # each block may get a place on the host, too
        attach(count_blocks(options, longest, runner.layout.block_bytes, left))
        chunks, needed = largest_step(capacity, runner.layout.block_size)
        if needed <= runner.pool.num_blocks:
            runner.run(chunks)
    except (OutOfDeviceMemory, OutOfMemoryError) as error:
        raise BuildError(
            f"engine.max_num_batched_tokens: a step of {limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} sequences does not"
            f" fit beside weights and KV; lower it, engine.max_num_seqs, engine.kv_memory_mib or engine.kv_memory_fraction: {error}"
        ) from None
    except ValueError as error:
        raise BuildError(str(error)) from None
    return OverlapEngine(runner, limits, longest, engine.prefix_caching, _drafter(options, runner, longest))


def _drafter(options: Options, runner: Runner, longest: int) -> Drafter | None:
    """Call it when the runner has its pool."""
    if options.engine.speculation != NONE and not exact(runner):
        log.warning(
            "engine.speculation: this arithmetic has other last bits for several tokens in a step than for one, so a token may differ"
        )
    if options.engine.speculation_branches > 1 and not (exact(runner) or runner.on_device):
        raise BuildError("engine.speculation_branches: this arithmetic has other last bits for several tokens in a step than for one")
    return make_drafter(options, runner, longest)


def _settled(options: Options, config: Mapping[str, Any], device: DeviceFacts) -> Options:
    settled = settle(options, device, stored_dtype(config))
    said = [f"{name} {value}, {settled.why[name]}" for name, value in settled.values.items()]
    log.info("nobody has set, so it is decided here: %s", "; ".join(said))
    return settled.options


def _warm_up(runner: Any, options: Options, longest: int) -> None:
    tokens = min(longest - 1, WARM_UP_TOKENS, options.engine.limits.max_num_batched_tokens, runner.pool.num_blocks * options.block_size - 1)
    warm_up(runner, tokens)
    if options.engine.device != "cpu":
        warm_up(runner, min(tokens, ODD_TOKENS))
        runner.pool.warm_up()


def warm_up(runner: Runner, tokens: int) -> None:
    """One prefill and one decode. The first ones of a process are several times slower, and no request should pay for that.

    No record refers to what they leave in the pool's first blocks.
    """
    blocks = list(range(-(-(tokens + 1) // runner.layout.block_size)))
    seq = Sequence("warm-up", [0] * tokens, tokens, SamplingParams(max_tokens=2), b"", blocks=blocks)
    for n in (tokens, 1):
        runner.run([Chunk(seq, n)])
        seq.tokens.append(0)
        seq.computed += n


def count_blocks(options: Options, longest: int, block_bytes: int, available: int) -> int:
    """Blocks of the pool: as many as the budget holds, but no more than twice what `max_num_seqs` sequences of full length can use.

    The second half is room for prefixes that no sequence is using right now.
    """
    per_sequence = -(-longest // options.block_size)
    assert options.engine.kv_memory_fraction is not None, "settle the options first"
    budget = options.engine.kv_memory_bytes or int(available * options.engine.kv_memory_fraction)
    blocks = min(budget // block_bytes, 2 * options.engine.limits.max_num_seqs * per_sequence)
    if blocks < (min(per_sequence, LEAST_BLOCKS) if options.long_contexts else per_sequence):
        key = "engine.kv_memory_mib" if options.engine.kv_memory_bytes else "engine.kv_memory_fraction"
        if options.long_contexts:
            raise BuildError(f"{key}: {budget / 2**20:.1f} MiB hold {blocks} blocks of KV; tiers.long_contexts needs {LEAST_BLOCKS}")
        raise BuildError(
            f"{key}: {budget / 2**20:.1f} MiB hold {blocks * options.block_size} tokens of KV, fewer than one sequence of"
            f" {longest} tokens needs ({per_sequence * block_bytes / 2**20:.1f} MiB); give more memory or lower model.max_model_len"
        )
    return blocks


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise BuildError(f"model.path: {path} holds no config.json")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise BuildError(f"model.path: {file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise BuildError(f"model.path: {file} is not a JSON object")
    return config
