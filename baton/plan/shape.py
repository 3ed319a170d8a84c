"""The sizes of a model, from config.json or by name, and what follows from them."""

from dataclasses import dataclass
from pathlib import Path

from baton.engine.facts.fields import Fields
from baton.plan.formulae import attention_flop, experts_read, kv_bytes_per_token, prefill_flop


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: numbers of a token's vector, of a head's parts, and of the query's vector if it has one."""

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    number: int
    per_token: int
    intermediate: int
    shared: int = 0  # computed for every token, of the same size
    dense_layers: int = 0  # the first ones, which have none


@dataclass(frozen=True, slots=True)
class Shape:
    """Names as in config.json. Biases are not counted."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    latent: Latent | None = None
    experts: ExpertsShape | None = None

    @property
    def attention_parameters(self) -> int:
        """The attention parameters of one layer."""
        h, n, at = self.hidden, self.heads, self.latent
        if at is None:
            return 2 * h * self.head_dim * (n + self.kv_heads)
        query = n * (at.nope + at.rope)
        q = h * at.query_rank + at.query_rank * query if at.query_rank else h * query
        return q + h * (at.rank + at.rope) + at.rank * n * (at.nope + at.value) + n * at.value * h

    def feed_forward_parameters(self, routed: float | None = None) -> float:
        """The parameters of all layers, if `routed` experts of each layer count; None: all."""
        one = 3 * self.hidden
        if self.experts is None:
            return self.layers * one * self.intermediate
        e = self.experts
        sparse = self.layers - e.dense_layers
        each = one * e.intermediate * ((e.number if routed is None else routed) + e.shared) + self.hidden * e.number
        return e.dense_layers * one * self.intermediate + sparse * each

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> float:
        norms = self.hidden * (2 * self.layers + 1)
        tables = self.head_parameters * (1 if self.tied else 2)
        return self.layers * self.attention_parameters + self.feed_forward_parameters() + tables + norms

    @property
    def active_parameters(self) -> float:
        """Those that one token is multiplied with, but the head's."""
        return self.layers * self.attention_parameters + self.feed_forward_parameters(self.experts.per_token if self.experts else None)

    def read_parameters(self, tokens: int) -> float:
        """Those that a step with so many tokens reads, the head's included."""
        e = self.experts
        routed = experts_read(e.number, e.per_token, tokens) if e else None
        return self.layers * self.attention_parameters + self.feed_forward_parameters(routed) + self.head_parameters

    def kv_bytes(self, number_bytes: float = 2) -> float:
        """The KV bytes of one token."""
        if self.latent:
            return kv_bytes_per_token(self.layers, 1, self.latent.rank + self.latent.rope, number_bytes, parts=1)
        return kv_bytes_per_token(self.layers, self.kv_heads, self.head_dim, number_bytes)

    def kv_copies(self, devices: int) -> float:
        """How many times `devices` with tensor parallelism keep each number of KV: they share heads, of which latent attention has one."""
        return devices / min(devices, 1 if self.latent else self.kv_heads)

    def attention_flop(self, tokens: int, cached: int = 0) -> float:
        if self.latent:  # keys and values are the stored vectors, as our kernels compute it
            wide = self.latent.rank + self.latent.rope
            return attention_flop(tokens, cached, self.layers, self.heads, wide, self.latent.rank)
        return attention_flop(tokens, cached, self.layers, self.heads, self.head_dim)

    def prefill_flop(self, tokens: int, cached: int = 0) -> float:
        return prefill_flop(tokens, self.active_parameters, self.head_parameters, self.attention_flop(tokens, cached))


# As their makers' config.json files say.
KNOWN = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", 576, 30, 9, 3, 64, 1536, 49152, tied=True),
        Shape("qwen3-0.6b", 1024, 28, 16, 8, 128, 3072, 151936, tied=True),
        Shape("qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936),
        Shape("llama-3.1-8b", 4096, 32, 32, 8, 128, 14336, 128256),
        Shape("llama-3.1-70b", 8192, 80, 64, 8, 128, 28672, 128256),
        Shape("qwen3-30b-a3b", 2048, 48, 32, 4, 128, 6144, 151936, experts=ExpertsShape(128, 8, 768)),
        Shape("mixtral-8x7b", 4096, 32, 32, 8, 128, 14336, 32000, experts=ExpertsShape(8, 2, 14336)),
        Shape(
            "deepseek-v3", 7168, 61, 128, 128, 192, 18432, 129280,
            latent=Latent(512, 64, 128, 128, query_rank=1536), experts=ExpertsShape(256, 8, 2048, shared=1, dense_layers=3),
        ),
    )
}  # fmt: skip


def shape_of(model: str) -> Shape:
    """The shape of a known name, or of a folder. Raises CheckpointError, or KeyError with what is known."""
    path = Path(model)
    if not path.is_dir():
        if model.lower() in KNOWN:
            return KNOWN[model.lower()]
        raise KeyError(f"{model} is no folder, and none of the models known by name: {', '.join(KNOWN)}")
    f = Fields.read(path / "config.json")
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    latent, experts = _latent(f), _experts(f)
    return Shape(
        name=path.resolve().name,
        hidden=hidden,
        layers=f.size("num_hidden_layers"),
        heads=heads,
        kv_heads=f.size("num_key_value_heads", heads),
        head_dim=f.size("head_dim", max(1, hidden // heads)),
        intermediate=f.size("intermediate_size"),
        vocab=f.size("vocab_size"),
        tied=f.flag("tie_word_embeddings", str(f.get("model_type", "")).startswith("gemma")),
        latent=latent,
        experts=experts,
    )


def _latent(f: Fields) -> Latent | None:
    if not f.has("kv_lora_rank"):
        return None
    query = f.size("q_lora_rank") if f.has("q_lora_rank") else 0
    return Latent(f.size("kv_lora_rank"), f.size("qk_rope_head_dim"), f.size("qk_nope_head_dim"), f.size("v_head_dim"), query)


def _experts(f: Fields) -> ExpertsShape | None:
    """Mixtral's, Qwen's and DeepSeek's names."""
    field = next((name for name in ("num_local_experts", "num_experts", "n_routed_experts") if f.has(name)), None)
    if field is None:
        return None
    size = f.size("moe_intermediate_size", f.size("intermediate_size"))
    shared = f.size("n_shared_experts", 0, least=0)
    return ExpertsShape(f.size(field), f.size("num_experts_per_tok"), size, shared, f.size("first_k_dense_replace", 0, least=0))
