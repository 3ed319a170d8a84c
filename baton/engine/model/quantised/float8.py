"""FP8 checkpoints: float8 weights, and a scale for each block of them (DeepSeek-V3, Qwen3, `transformers`) or for all (AutoFP8).

weight [out, in] float8, weight_scale_inv (`transformers`) or weight_scale (AutoFP8): what a number is multiplied with
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from baton.engine.facts.fields import Fields
from baton.engine.model.quantised.matrix import Quantised
from baton.engine.model.quantised.scheme import FLOAT8, FLOATS, Format, Part, Parts, Scheme, Shape

SCALES = ("weight_scale_inv", "weight_scale")
LARGEST = 448.0  # float8


@dataclass(frozen=True, slots=True)
class _ByScale:
    """A `Scheme`: quantised matrices are known by their scales, which have one of two names."""

    f: Fields
    block: Shape
    empty_biases = False

    def format_of(self, module: str, has: Callable[[str], bool]) -> Format | None:
        return next((Float8(self.f, self.block, scale) for scale in SCALES if has(scale)), None)


def read_float8(f: Fields) -> Scheme:
    """Raises CheckpointError for a variant that is not read here."""
    f.only("fmt", "e4m3")
    f.only("scale_fmt", "float", "ue8m0")  # how scales were chosen: they are stored as numbers
    f.only("activation_scheme", "dynamic", "static")
    return _ByScale(f, block_of(f, "weight_block_size") if f.has("weight_block_size") else (0, 0))


def block_of(f: Fields, name: str) -> Shape:
    block = f.get(name)
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise f.error(name, f"must be two positive integers, got {block!r}")
    return block[0], block[1]


@dataclass(frozen=True, slots=True)
class Float8:
    """Activations are not rounded."""

    f: Fields = field(hash=False)
    block: Shape  # rows and columns that share a scale; 0: all
    scale: str

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = (-(-size // block) if block else 1 for size, block in zip(shape, self.block, strict=True))
        shapes: tuple[Shape, ...] = ((rows, columns),)
        if not self.block[1]:
            shapes += ((rows,),) if self.block[0] else ((1,), ())
        return {
            "weight": Part(FLOAT8, (shape,)),
            self.scale: Part(FLOATS, shapes),
            **{name: Part(FLOATS, ((1,), ()), optional=True) for name in ("input_scale", "activation_scale")},
        }

    def read(self, parts: Parts, shape: Shape) -> Quantised:
        scales = parts.finite(self.scale).float()
        if scales.dim() < 2:
            scales = scales.reshape(-1, 1)
        scales = scales.repeat_interleave(self.block[0] or shape[0], dim=0)[: shape[0]]  # [out, groups]
        numbers = parts.get("weight").contiguous().view(torch.uint8)
        if (numbers & 127 == 127).any() or not (scales * LARGEST).isfinite().all():
            raise parts.error("weight", "has numbers that are not finite")
        return Quantised(8, self.block[1] or shape[1], numbers, scales, float8=True)
