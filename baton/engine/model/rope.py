"""Rotary position embedding: how far each pair of a head's elements turns per position, and how config.json specifies it.

Letters in shapes: T tokens, D elements that are rotated.
"""

import math

import torch
from torch import Tensor

from baton.engine.facts.fields import Fields
from baton.engine.model.checkpoint import Rope

# Kinds, and the fields that each has
KINDS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
FIELDS_OF_ALL = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


def frequencies(rope: Rope, dim: int) -> Tensor:
    """Radians per position `[D / 2]`: theta^(-2i/D), stretched as the checkpoint was trained.

    `linear` divides all by `factor`, `longrope` (arXiv 2402.13753) each by its own number. `llama3` (Llama 3.1) and `yarn` (arXiv
    2309.00071) divide those that turn less than `slow` times within the original context, keep those that turn more than `fast` times, and
    blend in between: `llama3` evenly over the number of turns, `yarn` over the pairs.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.stretch) * rope.theta**exponents)
    keep = _keep_by_turns(rope, plain) if rope.kind == "llama3" else _keep_by_pair(rope, dim)
    return (1 - keep) * plain / rope.factor + keep * plain


def _keep_by_turns(rope: Rope, plain: Tensor) -> Tensor:
    turns = rope.original_positions * plain / (2 * math.pi)
    return ((turns - rope.slow) / (rope.fast - rope.slow)).clamp(0, 1)


def _keep_by_pair(rope: Rope, dim: int) -> Tensor:
    def pair(turns: float) -> float:
        """Fractional index of the pair that turns this often within the original context."""
        return dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.fast), pair(rope.slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001  # a step instead of a ramp
    return 1 - ((torch.arange(dim // 2).float() - first) / width).clamp(0, 1)


def rotation(positions: Tensor, frequencies: Tensor, amplitude: float) -> Tensor:
    """amplitude · exp(i · position · frequency), complex64 `[T, 1, D / 2]`, of positions `[T]` and frequencies `[D / 2]`."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return torch.polar(torch.full_like(angles, amplitude), angles)


def pairs(rows: Tensor, dim: int) -> Tensor:
    """Reorders each head's rows (0 … D-1) to (0, D/2, 1, D/2 + 1, …): the two of a rotation become neighbours, a complex number.

    Most Hugging Face files keep them D/2 apart. q·k does not change if both are reordered; the pool holds keys in this order.
    """
    return rows.reshape(-1, 2, dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def flat_fields(f: Fields) -> Fields:
    """The parameters that apply to all layers: `rope_scaling` if the file has it, else `rope_parameters` (transformers 5).

    If a file has both, transformers reads only `rope_scaling`. Whoever follows the advice to "add rope_scaling" to a folder saved by
    transformers 5 makes such a file, and the base in its `rope_parameters` is then silently lost. That is refused unless the base stays the
    same.
    """
    field = "rope_scaling" if f.get("rope_scaling") else "rope_parameters"
    given = f.inner(field)
    if any(isinstance(value, dict) for value in given.raw.values()):
        raise f.error(field, "must be one set of parameters for all layers")
    if field == "rope_scaling" and not given.has("rope_theta"):
        lost = f.inner("rope_parameters")
        if lost.has("rope_theta") and (not f.has("rope_theta") or f.number("rope_theta") != lost.number("rope_theta")):
            raise f.error(
                field,
                f"replaces rope_parameters, so that the rope_theta there, {lost.raw['rope_theta']!r}, would not be used;"
                " write rope_theta into rope_scaling as well",
            )
    return given


def read_rope(f: Fields, given: Fields, theta: float, dim: int) -> Rope:
    """Reads `given`, one set of parameters, and `f`, the whole of config.json; `theta` is the base if `given` has none."""
    kind = given.get("rope_type", given.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its earlier name, in Phi-3's files
    if not isinstance(kind, str) or kind not in KINDS:
        raise given.error("rope_type", f"{kind!r} is not supported; supported: {', '.join(KINDS)}")
    if unknown := sorted(field for field in set(given.raw) - KINDS[kind] - FIELDS_OF_ALL if given.has(field)):
        raise given.error(unknown[0], f"is not known with rope_type {kind}")
    given.only("partial_rotary_factor", 1)
    theta = given.number("rope_theta", theta)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, given.number("factor"))
    original = (f if f.has("original_max_position_embeddings") else given).size("original_max_position_embeddings")
    if kind == "llama3":
        slow, fast = _turns(given, "low_freq_factor", "high_freq_factor")
        return Rope(theta, kind, given.number("factor"), original, slow, fast)
    factor = given.number("factor", f.size("max_position_embeddings") / original)
    if kind == "longrope":
        return _longrope(given, theta, factor, original, dim)
    slow, fast = _turns(given, "beta_slow", "beta_fast", (1.0, 32.0))
    amplitude = given.number("attention_factor", _yarn_amplitude(given, factor))
    return Rope(theta, kind, factor, original, slow, fast, given.flag("truncate", True), amplitude=amplitude)


def _turns(given: Fields, slow_field: str, fast_field: str, defaults: tuple[float, float] | None = None) -> tuple[float, float]:
    slow, fast = (given.number(field, defaults and defaults[i]) for i, field in enumerate((slow_field, fast_field)))
    if slow >= fast:
        raise given.error(slow_field, f"must be less than {fast_field} {fast}, got {slow}")
    return slow, fast


def _longrope(given: Fields, theta: float, factor: float, original: int, dim: int) -> Rope:
    """Uses the short factors, which apply to sequences up to the original length."""
    stretch = given.get("short_factor")
    if not isinstance(stretch, list) or len(stretch) != dim // 2 or not all(type(s) in (int, float) and s > 0 for s in stretch):
        raise given.error("short_factor", f"must be {dim // 2} positive numbers, got {stretch!r}")
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    amplitude = given.number("attention_factor", grown)
    return Rope(theta, "longrope", factor, original, stretch=tuple(float(s) for s in stretch), amplitude=amplitude)


def _yarn_amplitude(given: Fields, factor: float) -> float:
    if given.get("mscale") and given.get("mscale_all_dim"):
        return _growth(factor, given.number("mscale")) / _growth(factor, given.number("mscale_all_dim"))
    return _growth(factor)


def score_growth(given: Fields) -> float:
    """The factor by which DeepSeek scales all elements of q and k, not only those that are rotated."""
    return _growth(given.number("factor"), given.number("mscale_all_dim")) if given.get("mscale_all_dim") else 1.0


def _growth(factor: float, mscale: float = 1.0) -> float:
    """How much elements grow with the stretch of the context (arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
