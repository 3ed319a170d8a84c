"""AWQ checkpoints (AutoAWQ's `gemm`, auto-round): numbers packed along rows, in an order of their own.

qweight [in, out / 8] int32; qzeros [groups, out / 8] int32; scales [groups, out]
"""

from dataclasses import dataclass, field

from torch import Tensor

from baton.engine.facts.fields import Fields
from baton.engine.model.quantised.matrix import Quantised, shifts_of, unpacked
from baton.engine.model.quantised.scheme import FLOATS, INT32, ByPart, Part, Parts, Shape, whole_groups, whole_words

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # four bits of a word, counted from the lowest, that hold the first of its rows, the second, …


def read_awq(f: Fields) -> ByPart:
    """Raises CheckpointError for a variant that is not read here."""
    if f.get("bits") != 4:
        raise f.error("bits", f"{f.get('bits')!r} is not supported; supported: 4")
    version = f.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise f.error("version", f"{version!r} is not supported; supported: gemm")
    return ByPart("qweight", Awq(f, -1 if f.get("group_size") == -1 else f.size("group_size"), f.flag("zero_point", True)))


@dataclass(frozen=True, slots=True)
class Awq:
    f: Fields = field(hash=False)
    group: int  # -1: a row is one group
    has_zeros: bool

    def parts(self, shape: Shape) -> dict[str, Part]:
        outs, width = shape
        whole_words(self.f, "bits", (outs, 0), 8)
        groups = whole_groups(self.f, shape, self._group(width))
        return {
            "qweight": Part(INT32, ((width, outs // 8),)),
            "qzeros": Part(INT32, ((groups, outs // 8),), optional=not self.has_zeros),
            "scales": Part(FLOATS, ((groups, outs),)),
        }

    def read(self, parts: Parts, shape: Shape) -> Quantised:
        scales = parts.finite("scales").t().contiguous()
        shifts = shifts_of(_rows(parts.get("qzeros")), scales, 4) if parts.has("qzeros") else None
        return Quantised(4, self._group(shape[1]), _rows(parts.get("qweight")), scales, shifts)

    def _group(self, width: int) -> int:
        return width if self.group == -1 else self.group


def _rows(words: Tensor) -> Tensor:
    """uint8 `[out, n]` of `[n, out / 8]`."""
    return unpacked(words, 4).view(len(words), -1, 8)[:, :, PLACES].flatten(1).t().contiguous()
