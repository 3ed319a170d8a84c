"""What an engine can be told: each option once, with its type, its bounds, its default, its meaning, and the module that acts on it. The
configuration, the flags, the chart's schema and the engine itself take them from here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from baton.engine.core.limits import Limits
from baton.section import Section

MIB = 1 << 20
RANKS = ("tensor_parallel_size", "pipeline_parallel_size")  # arguments of vLLM; each of its ranks needs a GPU


def ranks(given: Mapping[str, Any]) -> int:
    """How many ranks vLLM has with these arguments. One that cannot be counts as 1 here; the engine refuses it by name."""
    return prod(count for name in RANKS if isinstance(count := given.get(name, 1), int) and count > 0)


@dataclass(frozen=True, slots=True)
class ReadBy:
    """The module that acts on an option; others may look at it."""

    module: str

    opens: bool = False  # the option may be left open, by the word auto or by null

    def __call__(self, schema: dict[str, Any]) -> None:
        """Adds the word to the JSON Schema of such an option."""
        if self.opens:
            schema["anyOf"] = [*schema["anyOf"], {"const": "auto", "type": "string"}]


def option(default: Any, meaning: str, reader: str, **bounds: Any) -> Any:
    """`bounds`: as in `pydantic.Field`."""
    return Field(default=default, description=meaning, json_schema_extra=ReadBy(reader), **bounds)


# The families of `router.tools.families`.
ToolFormat = Literal[
    "auto", "qwen3_xml", "hermes", "mistral", "mistral_list", "deepseek_v41", "deepseek_v4", "deepseek_v32", "deepseek_v3",
    "deepseek_v31", "llama_pythonic", "llama_json", "json",
]  # fmt: skip


def by_device(meaning: str, reader: str, **bounds: Any) -> Any:
    """An option that `baton.engine.defaults` decides if nobody sets it."""
    return Field(default=None, description=meaning, json_schema_extra=ReadBy(reader, opens=True), **bounds)


class ModelOptions(Section):
    """`model` in the configuration."""

    path: str = option("", "Folder of the checkpoint (config.json, tokenizer.json, *.safetensors).", "baton.engine.build")
    served_name: str | None = option(None, "Name that clients request; by default the folder's name.", "router.wiring", min_length=1)
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = option(
        "auto", "Type of weights and KV. auto: on cuda, the checkpoint's; on a CPU, float32.", "baton.engine.runner"
    )
    max_model_len: int | None = option(
        None, "Maximum length of prompt plus output, in tokens; by default the model's own limit.", "baton.engine.build", ge=2
    )
    generation_config: Literal["auto", "baton"] = option(
        "auto",
        "Sampling of requests that do not set it. auto: as the model's generation_config.json recommends. baton: Baton's own"
        " defaults (temperature 1, nothing cut off).",
        "router.wiring",
    )
    tool_format: ToolFormat = option("auto", "How the model writes tool calls. auto: as its chat template does.", "router.wiring")
    reasoning_format: Literal["auto", "none", "think", "mistral"] = option(
        "auto",
        "What a thinking model puts around its thoughts. auto: as in its chat template; none: it does not think; think: <think>;"
        " mistral: [THINK].",
        "router.wiring",
    )


class EngineOptions(Section):
    """`engine` in the configuration."""

    kind: Literal["baton", "vllm"] = option("baton", "Baton's own engine, or vLLM 0.32 if it is installed.", "baton.engine.start")
    vllm: dict[str, Any] = option({}, "Arguments of vLLM (AsyncEngineArgs) that no other key sets.", "baton.engine.vllm.arguments")
    staging_mib: int | None = option(
        None, "Memory between vLLM and peers, MiB; by default half of its KV cache.", "baton.engine.vllm.engine", ge=1
    )
    batch_invariant: bool = option(
        False, "vLLM, on some GPUs: tokens do not depend on the size of the batch.", "baton.engine.vllm.arguments"
    )
    block_size: int | None = by_device(
        "Tokens in one KV block; all workers must use the same size. auto: 16, or what the attention backend or vLLM needs.",
        "baton.engine.runner",
        ge=1,
        le=1024,
    )
    kv_memory_mib: float | None = option(
        None, "Size of the KV pool, MiB; by default a share of the free memory.", "baton.engine.build", gt=0
    )
    kv_memory_fraction: float | None = by_device(
        "Share of the free memory that the KV pool takes if kv_memory_mib is not set; on cuda, of what the weights, the largest step and"
        " the captured graphs leave. auto: 0.95 on cuda, 0.25 on a CPU.",
        "baton.engine.build",
        gt=0,
        le=0.95,
    )
    max_num_seqs: int | None = by_device(
        "Maximum number of sequences in one step. auto: 256 on cuda, 64 on a CPU; vLLM decides for itself on cuda.",
        "baton.engine.core.scheduler",
        ge=1,
        le=4096,
    )
    max_num_batched_tokens: int | None = by_device(
        "Maximum number of tokens computed in one step. auto: on cuda, 8192 from 64 GiB of GPU memory on, else 2048; 512 on a CPU; vLLM"
        " decides for itself on cuda.",
        "baton.engine.core.scheduler",
        ge=1,
        le=1_048_576,
    )
    prefix_caching: bool = option(True, "Keep the blocks of finished requests, and reuse them for equal prefixes.", "baton.engine.build")
    reuse_output: bool = option(
        False,
        "KV of generated tokens also serves later prompts that contain them. Faster, but it has other last bits than that of a"
        " prompt: what follows such a prompt may depend on what was cached, and differ after a retry.",
        "baton.engine.build",
    )
    reserve_growth: float = option(
        0.5, "Share of a sequence's remaining output that admission reserves room for.", "baton.engine.core.scheduler", ge=0, le=1
    )
    threads: int | None = option(
        None, "Compute threads of a worker; by default those of the CPU quota, or torch's choice.", "baton.engine.build", ge=1, le=1024
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device that runs the model and holds its KV. auto: cuda where a GPU can be used, else cpu.", "baton.engine.runner"
    )
    attention_backend: Literal["auto", "flashinfer", "flash_attn", "triton", "torch"] = option(
        "auto",
        "Attention kernels on a cuda device. auto: the best backend that is installed and supports the model's KV layout. A"
        " named backend must meet both conditions.",
        "baton.engine.build",
    )
    weight_dtype: Literal["auto", "float", "int8", "int4"] = option(
        "auto",
        "Type of the matrices. auto: as the checkpoint has them, if it is quantised and kernels compute it so, else as model.dtype (float)."
        " int8, int4: they are quantised at load, activations to int8 at each step."
        " With int4, the matrix that makes logits is int8.",
        "baton.engine.runner",
    )
    kv_dtype: Literal["auto", "int8", "int5"] = option(
        "auto",
        "Type of the KV pool. auto: as model.dtype. int8: each token's key and value of a head are rounded to 255 levels, with a scale; the"
        " same memory holds up to twice (bfloat16) or four times (float32) as many tokens. int5: they are turned, so that none"
        " stands out, and rounded to 32 levels; three or six times as many tokens. All workers must use the same type.",
        "baton.engine.build",
    )
    equal_arithmetic: bool = option(
        False,
        "Let workers continue each other's streams and read each other's KV although their GPUs, attention kernels or CPUs differ, so that"
        " last bits do, too. All workers must have the same value.",
        "baton.engine.runner",
    )
    compiled: bool = option(
        True, "Compiled kernels (but attention's on cuda: see attention_backend). false: plain torch for everything.", "baton.engine.choice"
    )
    products: Literal["auto", "baton", "onednn", "torch"] = option(
        "auto",
        "What multiplies matrices on a CPU if compiled. auto: what was fastest when this cluster's first worker tried. Only"
        " with baton is a continued stream sure to have the same bits.",
        "baton.engine.choice",
    )
    max_queue: int = option(
        256, "Maximum number of sequences waiting in one worker; it refuses more.", "baton.engine.core.engine", ge=1, le=65536
    )
    batching: Literal["continuous", "dynamic", "static"] = option(
        "continuous",
        "When a sequence may join a batch. continuous: at any step. dynamic: when the previous batch has ended, together with"
        " all others that are waiting. static: as dynamic, but the batch first fills to max_num_seqs. The last two are for"
        " comparison, in clusters without prefill workers.",
        "baton.engine.core.scheduler",
    )
    batch_wait_s: float = option(0.5, "Longest wait for a static batch to fill, seconds.", "baton.engine.core.scheduler", ge=0, le=60)
    speculation: Literal["none", "prompt_lookup", "lookahead", "draft", "heads"] = option(
        "none",
        "What guesses the next tokens, so that one step yields several; the output stays the same. prompt_lookup: what followed the"
        " same tokens earlier in the prompt or output. lookahead: what the model itself said after wrong guesses. draft: what a smaller"
        " model says (draft_model); all workers must have it. heads: what a head on the model's hidden states says (draft_model, or"
        " DeepSeek's own in model.path); likewise.",
        "baton.engine.speculation",
    )
    draft_model: str | None = option(
        None,
        "Folder of the model that drafts, with the same tokenizer, or of the head. By default the one beside model.path with -draft or"
        " -head after its name.",
        "baton.engine.speculation",
        min_length=1,
    )
    draft_dtype: Literal["auto", "int8", "int4"] = option(
        "auto", "Type of the draft's matrices, as weight_dtype is of the model's.", "baton.engine.speculation"
    )
    predictions: bool = option(
        True,
        "Let requests bring a prediction of their output, which is used as a guess whatever the method. Only where several tokens in a step"
        " have the same bits as one, so that the output stays the same.",
        "baton.engine.speculation",
    )
    speculation_tokens: int = option(
        8, "Maximum number of guesses for a sequence in one step; fewer where they were wrong.", "baton.engine.speculation", ge=1, le=64
    )
    speculation_branches: int = option(
        1,
        "Guesses of a sequence in one step that begin with different tokens: the method's first choice, its second, and so on. They share"
        " speculation_tokens, and one is verified where what was measured says that it pays. 1: the first choice alone.",
        "baton.engine.speculation",
        ge=1,
        le=4,
    )
    speculation_batch_tokens: int | None = by_device(
        "Guesses fill a step up to so many tokens; one that has them without guesses gets none. auto: 256 on a CPU, 64 on a GPU.",
        "baton.engine.core.scheduler",
        ge=1,
        le=1_048_576,
    )

    @property
    def kv_memory_bytes(self) -> int | None:
        return None if self.kv_memory_mib is None else int(self.kv_memory_mib * MIB)

    @property
    def kv_stored(self) -> str:
        """See `KvLayout.stored`."""
        return "" if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def staging_bytes(self) -> int | None:
        return None if self.staging_mib is None else self.staging_mib * MIB

    @property
    def limits(self) -> Limits:
        """What is left open is as in `Limits`. Raises ValueError, with the name of the limit, if no sequence could ever run."""
        given = {limit.name: getattr(self, limit.name) for limit in fields(Limits)}
        return Limits(**{name: value for name, value in given.items() if value is not None})

    @field_validator(
        "block_size", "kv_memory_fraction", "max_num_seqs", "max_num_batched_tokens", "speculation_batch_tokens", mode="before"
    )
    @classmethod
    def _left_open(cls, value: object) -> object:
        return None if value == "auto" else value


@dataclass(frozen=True, slots=True)
class Options:
    """What `baton.engine.build` makes an engine from. `engine.device` is not auto any more."""

    model: ModelOptions
    engine: EngineOptions
    direct: bool = False  # peers only read and write the memory of the device itself
    share: float = 1.0  # of a GPU's memory, which other processes share
    describes: bool = False  # the events of the prefix cache tell what blocks hold
    long_contexts: int = 0  # sequences that may run at once although they are longer than the pool

    @classmethod
    def of(cls, path: Path, *, direct: bool = False, **keys: Any) -> Self:
        """Options by their names, whichever section they are in; the device is the CPU if none is named. Raises ValueError for one that is
        unknown or has an impossible value."""
        keys = {"device": "cpu", **keys}
        model = {name: keys.pop(name) for name in list(keys) if name in ModelOptions.model_fields}
        return cls(ModelOptions(path=str(path), **model), EngineOptions(**keys), direct)

    def but(self, **keys: Any) -> Self:
        """These options with others by their names, checked like those of `of`."""
        model = {name: keys.pop(name) for name in list(keys) if name in ModelOptions.model_fields}
        whole = type(self.model)(**dict(self.model) | model), type(self.engine)(**dict(self.engine) | keys)
        return replace(self, model=whole[0], engine=whole[1])

    @property
    def path(self) -> Path:
        return Path(self.model.path)

    @property
    def block_size(self) -> int:
        """The block size of options that are settled (`baton.engine.defaults`)."""
        assert self.engine.block_size is not None, "settle the options first"
        return self.engine.block_size
