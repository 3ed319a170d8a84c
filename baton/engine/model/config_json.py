"""Reads config.json of a Hugging Face folder into a `ModelConfig`: what the architecture's name says, and what the fields say.

A field that asks for a computation that this engine does not do exactly is refused; the error names the file and the field. Nothing is
approximated or ignored.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from baton.engine.facts.fields import Fields
from baton.engine.facts.model_facts import context_length, end_tokens
from baton.engine.model.checkpoint import ExpertConfig, LatentConfig, LayerAttention, ModelConfig, Rope
from baton.engine.model.quantised.config import read_scheme
from baton.engine.model.rope import flat_fields, read_rope, score_growth


@dataclass(frozen=True, slots=True)
class ArchitectureFacts:
    """What an architecture's name says by itself. The defaults are those that transformers uses if the file lacks the field."""

    norm_eps: float = 1e-6
    theta: float = 10000.0
    local_theta: float | None = None  # layers with a window have their own rotary embedding
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    multi_head: bool = False  # num_key_value_heads may be left out: as many as query heads
    tied: bool = False
    attention_bias: bool = False  # reads that field
    qkv_bias: bool = False  # always has those biases
    mlp_bias: bool = False  # reads that field
    qk_norm: bool = False
    # Layers with a window: none; all; when use_sliding_window says so, all ("switched") or those from max_window_layers on ("upper"); all
    # but every nth.
    windows: str | int = "none"
    window: int | None = None
    window_pattern: bool = False  # reads sliding_window_pattern, which says n
    packed: bool = False
    gemma: bool = False  # norms of 1 + weight, also after attention and MLP; scaled embedding; tanh GELU; query_pre_attn_scalar
    score_softcap: float | None = None
    logit_softcap: float | None = None
    experts: str = ""  # mixtral | qwen3 | deepseek2 | deepseek3
    latent: bool = False


QWEN3 = ArchitectureFacts(head_dim=128, attention_bias=True, qk_norm=True, windows="upper", window=4096)
GEMMA2 = ArchitectureFacts(
    head_dim=256, tied=True, attention_bias=True, windows=2, window=4096, gemma=True, score_softcap=50.0, logit_softcap=30.0
)
FAMILIES = {
    "LlamaForCausalLM": ArchitectureFacts(multi_head=True, attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": ArchitectureFacts(windows="all", window=4096),
    "MixtralForCausalLM": ArchitectureFacts(norm_eps=1e-5, theta=1e6, windows="all", experts="mixtral"),
    "Qwen2ForCausalLM": ArchitectureFacts(qkv_bias=True, windows="upper", window=4096),
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": replace(QWEN3, head_dim=None, windows="switched", experts="qwen3"),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": replace(
        GEMMA2, theta=1e6, local_theta=10000.0, qk_norm=True, windows=6, window_pattern=True, score_softcap=None, logit_softcap=None
    ),
    "Phi3ForCausalLM": ArchitectureFacts(norm_eps=1e-5, multi_head=True, windows="all", packed=True),
    "DeepseekV2ForCausalLM": ArchitectureFacts(attention_bias=True, mlp_bias=True, experts="deepseek2", latent=True),
    "DeepseekV3ForCausalLM": ArchitectureFacts(attention_bias=True, experts="deepseek3", latent=True),
}
SUPPORTED = tuple(FAMILIES)
SLIDING, FULL = "sliding_attention", "full_attention"


def read_config(path: Path) -> ModelConfig:
    """Reads config.json in the folder `path`, and the end tokens from all files that name some. Raises CheckpointError."""
    f = Fields.read(path / "config.json")
    family = FAMILIES[architecture := _architecture(f)]
    _refuse_unsupported(f, family)
    heads, hidden, layers = (f.size(name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    latent = _latent(f, family, heads) if family.latent else None
    kv_heads, head_dim = _kv_shape(f, family, heads, hidden, latent)
    sliding = _sliding_layers(f, family, layers)
    ropes = _ropes(f, family, sliding, latent.rope_dim if latent else head_dim)
    max_positions, attention_bias = context_length(f).value, family.attention_bias and f.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=f.size("intermediate_size"),
        vocab=f.size("vocab_size"),
        max_positions=max_positions,
        norm_eps=f.number("rms_norm_eps", family.norm_eps),
        ropes=ropes,
        attention=_attention(f, family, sliding, max_positions, latent),
        tied=f.flag("tie_word_embeddings", family.tied),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias and f.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        eos_token_ids=frozenset(end_tokens(path)),
        activation="gelu_tanh" if family.gemma else "silu",
        norm_offset=1.0 if family.gemma else 0.0,
        post_norms=family.gemma,
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        logit_softcap=_softcap(f, "final_logit_softcapping", family.logit_softcap) if family.gemma else None,
        packed=family.packed,
        latent=latent,
        experts=_experts(f, family, layers) if family.experts else None,
        draft_layers=_either(f, "num_nextn_predict_layers", "num_mtp_layers", 1, least=0) if family.experts == "deepseek3" else 0,
        scheme=read_scheme(f),
    )


def _architecture(f: Fields) -> str:
    names = f.get("architectures")
    if isinstance(names, list) and len(names) > 1:
        raise f.error("architectures", f"names {len(names)} architectures: {names!r}; a folder holds one model")
    if not isinstance(names, list) or not names or names[0] not in SUPPORTED:
        raise f.error("architectures", f"{names!r} is not supported; supported: {', '.join(SUPPORTED)}")
    return str(names[0])


def _kv_shape(f: Fields, family: ArchitectureFacts, heads: int, hidden: int, latent: LatentConfig | None) -> tuple[int, int]:
    """The number of heads that have KV, and the dimension of each."""
    if latent:
        kv_heads, head_dim = 1, latent.rank + latent.rope_dim
    else:
        kv_heads = f.size("num_key_value_heads", heads if family.multi_head else None)
        head_dim = f.size("head_dim", family.head_dim or hidden // heads)
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if head_dim % 2:
        raise f.error("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    return kv_heads, head_dim


def _refuse_unsupported(f: Fields, family: ArchitectureFacts) -> None:
    if family.gemma:
        f.only("hidden_activation", "gelu_pytorch_tanh")
    else:
        f.only("hidden_act", "silu")
    if f.has("transformers_weights"):
        raise f.error("transformers_weights", "is not supported: weights are read from model.safetensors or the files that its index names")
    if family.windows not in ("switched", "upper"):
        f.only("use_sliding_window", False)
    f.only("use_bidirectional_attention", False)
    f.only("partial_rotary_factor", 1)
    if family.gemma and family.score_softcap is None and f.has("attn_logit_softcapping"):
        raise f.error("attn_logit_softcapping", "is not known to this architecture")


def _sliding_layers(f: Fields, family: ArchitectureFacts, layers: int) -> list[bool]:
    """Which layers have a window."""
    switch, free = f.flag("use_sliding_window") and _window(f, family) is not None, True
    if isinstance(family.windows, int):
        every = f.size("sliding_window_pattern", family.windows) if family.window_pattern else family.windows
        sliding = [(i + 1) % every > 0 for i in range(layers)]
    elif family.windows == "upper" and switch:
        first = f.size("max_window_layers", 28, least=0)
        sliding = [i >= first for i in range(layers)]
    else:
        windowed = switch if family.windows == "switched" else family.windows == "all" and _window(f, family) is not None
        free, sliding = False, [windowed] * layers
    types = f.get("layer_types")
    if types is None:
        return sliding
    if not isinstance(types, list) or len(types) != layers or any(kind not in (SLIDING, FULL) for kind in types):
        raise f.error("layer_types", f"must be {FULL} or {SLIDING} for each of {layers} layers, got {types!r}")
    given = [kind == SLIDING for kind in types]
    if given != sliding and not free:
        raise f.error("layer_types", "a window on some layers only is not supported with this architecture")
    return given


def _window(f: Fields, family: ArchitectureFacts) -> int | None:
    """The number of keys that a query sees in a layer with a window. Null, unlike a missing field, means that there is no window."""
    return None if f.raw.get("sliding_window", family.window) is None else f.size("sliding_window", family.window)


def _softcap(f: Fields, field: str, default: float | None) -> float | None:
    """Null means that there is none."""
    return None if f.raw.get(field, default) is None else f.number(field, default)


def _attention(
    f: Fields, family: ArchitectureFacts, sliding: list[bool], max_positions: int, latent: LatentConfig | None
) -> tuple[LayerAttention, ...]:
    window = _window(f, family)
    if any(sliding) and window is None:
        raise f.error("sliding_window", "must be a positive integer, because some layers have a window")
    if window and window >= max_positions:
        window = None  # no sequence outgrows it
    softcap = scale = None
    if family.gemma:
        scale = f.number("query_pre_attn_scalar", 256) ** -0.5
        softcap = _softcap(f, "attn_logit_softcapping", family.score_softcap)
    if latent:
        scale = (latent.nope_dim + latent.rope_dim) ** -0.5 * score_growth(flat_fields(f)) ** 2
    return tuple(LayerAttention(window if slides else None, softcap, scale) for slides in sliding)


def _ropes(f: Fields, family: ArchitectureFacts, sliding: list[bool], dim: int) -> tuple[Rope, ...]:
    """One per layer."""
    theta = f.number("rope_theta", family.theta)
    if family.local_theta is None:
        return (read_rope(f, flat_fields(f), theta, dim),) * len(sliding)
    if f.has("rope_parameters"):
        both = f.inner("rope_parameters")
        if unknown := sorted(set(both.raw) - {FULL, SLIDING}):
            raise both.error(unknown[0], f"must be one of {FULL}, {SLIDING}")
        far, near = both.inner(FULL), both.inner(SLIDING)
        # As in transformers: the entries of the older field are added to those of the layers without a window.
        far = replace(far, raw=far.raw | f.inner("rope_scaling").raw)
    else:
        far, near = f.inner("rope_scaling"), Fields(f.file, {})
    local_theta = f.number("rope_local_base_freq", family.local_theta)
    whole, local = read_rope(f, far, theta, dim), read_rope(f, near, local_theta, dim)
    return tuple(local if slides else whole for slides in sliding)


def _latent(f: Fields, family: ArchitectureFacts, heads: int) -> LatentConfig:
    if f.size("num_key_value_heads", heads) != heads:
        raise f.error("num_key_value_heads", f"latent attention needs as many as num_attention_heads, {heads}")
    if family.experts == "deepseek2":
        f.only("rope_interleave", True)
    for field in ("kv_lora_rank", "qk_rope_head_dim"):
        if f.size(field) % 2:
            raise f.error(field, f"must be even, got {f.size(field)}")
    return LatentConfig(
        rank=f.size("kv_lora_rank"),
        q_rank=f.size("q_lora_rank") if f.has("q_lora_rank") else None,
        nope_dim=f.size("qk_nope_head_dim"),
        rope_dim=f.size("qk_rope_head_dim"),
        value_dim=f.size("v_head_dim"),
        interleaved=f.flag("rope_interleave", True),
    )


def _either(f: Fields, field: str, other: str, default: int | None = None, least: int = 1) -> int:
    """The value of a field that has two names."""
    return f.size(other if f.has(other) and not f.has(field) else field, default, least)


def _experts(f: Fields, family: ArchitectureFacts, layers: int) -> ExpertConfig:
    if family.experts == "mixtral":
        count, chosen = _either(f, "num_local_experts", "num_experts"), f.size("num_experts_per_tok", 2)
        experts = ExpertConfig(frozenset(range(layers)), count, chosen, f.size("intermediate_size"), normalised=True)
    elif family.experts == "qwen3":
        experts = _qwen3_experts(f, layers)
    else:
        experts = _deepseek_experts(f, layers, sigmoid=family.experts == "deepseek3")
    if experts.count % experts.groups:
        raise f.error("n_group", f"{experts.groups} does not divide {experts.count} experts")
    if experts.open_groups > experts.groups:
        raise f.error("topk_group", f"{experts.open_groups} of {experts.groups} groups cannot be chosen")
    if experts.chosen > experts.count // experts.groups * experts.open_groups:
        raise f.error("num_experts_per_tok", f"{experts.chosen} is more than the experts among which a token may choose")
    return experts


def _qwen3_experts(f: Fields, layers: int) -> ExpertConfig:
    step, plain = f.size("decoder_sparse_step", 1), f.get("mlp_only_layers", [])
    if not isinstance(plain, list) or not all(type(i) is int for i in plain):
        raise f.error("mlp_only_layers", f"must be a list of layers, got {plain!r}")
    return ExpertConfig(
        layers=frozenset(i for i in range(layers) if i not in plain and (i + 1) % step == 0),
        count=_either(f, "num_experts", "num_local_experts"),
        chosen=f.size("num_experts_per_tok", 8),
        intermediate=f.size("moe_intermediate_size"),
        normalised=f.flag("norm_topk_prob"),
    )


def _deepseek_experts(f: Fields, layers: int, sigmoid: bool) -> ExpertConfig:
    f.only("moe_layer_freq", 1)
    if sigmoid:
        f.only("topk_method", "noaux_tc")
        f.only("scoring_func", "sigmoid")
        grouped, groups, open_groups = True, 8, 4
    else:
        f.only("topk_method", "greedy", "group_limited_greedy")
        f.only("scoring_func", "softmax")
        f.only("norm_topk_prob", False)  # implementations disagree about what it does
        grouped, groups, open_groups = f.get("topk_method") == "group_limited_greedy", None, None
    intermediate = f.size("moe_intermediate_size")
    experts = ExpertConfig(
        layers=frozenset(range(f.size("first_k_dense_replace", 3 if sigmoid else 0, least=0), layers)),
        count=f.size("n_routed_experts"),
        chosen=f.size("num_experts_per_tok"),
        intermediate=intermediate,
        sigmoid=sigmoid,
        biased=sigmoid,
        groups=f.size("n_group", groups) if grouped else 1,
        open_groups=f.size("topk_group", open_groups) if grouped else 1,
        normalised=sigmoid and f.flag("norm_topk_prob", True),
        scale=f.number("routed_scaling_factor", 2.5 if sigmoid else 1.0),
        shared=f.size("n_shared_experts", 1 if sigmoid else 2) * intermediate,
    )
    if sigmoid and experts.groups > 1 and experts.count < 2 * experts.groups:
        raise f.error("n_group", f"a group is judged by two experts, {experts.groups} of {experts.count} have fewer")
    return experts
