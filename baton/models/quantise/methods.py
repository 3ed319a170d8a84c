"""The methods by their names: what each does to a layer, and how its matrices are written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from baton.models.quantise import formats
from baton.models.quantise.awq import scaling
from baton.models.quantise.gptq import gptq
from baton.models.quantise.inputs import InputSums
from baton.models.quantise.rounding import Rounded, nearest
from baton.models.quantise.sites import Site, Tensors
from baton.models.quantise.smoothquant import by_rows, migration


@dataclass(frozen=True, slots=True)
class Method:
    bits: int
    symmetric: bool
    write: Callable[[Rounded], dict[str, Tensor]]
    config: Callable[[int], dict[str, Any]]
    corrects: bool = False  # columns make up for each other (GPTQ)
    scale: Callable[[list[Tensor], InputSums, tuple[int, int], int, int], Tensor] | None = None  # of columns, before they are rounded

    def factor(self, site: Site, tensors: Tensors, inputs: InputSums, group: int) -> Tensor | None:
        """The factor for the columns of a site's matrices; None: they stay. Only what makes the inputs can take a factor back."""
        if self.scale is None or not (site.norm or (site.made_by and self.bits < 8)):
            return None
        return self.scale([tensors[f"{name}.weight"] for name in site.names], inputs, site.heads, self.bits, group)

    def round(self, w: Tensor, inputs: InputSums, group: int) -> Rounded:
        """`group` 0: a row is one."""
        if self.corrects:
            return gptq(w, inputs, self.bits, group, self.symmetric)
        return nearest(w, self.bits, group or w.shape[1], self.symmetric)

    def error(self, w: Tensor, v: Tensor, inputs: InputSums, s: Tensor | None = None) -> float:
        """The mean square by which outputs with v, whose columns have the factor s, differ from those with w `[out, in]`. With 8 bits,
        inputs are rounded, too, as engines do."""
        if self.bits < 8:
            return inputs.error((v if s is None else v / s) - w)
        x = inputs.sample
        return float((by_rows(x if s is None else x / s) @ v.t() - x @ w.t()).square().sum()) / len(x)


def _migration(weights: list[Tensor], inputs: InputSums, heads: tuple[int, int], bits: int, group: int) -> Tensor:
    return migration(weights, inputs)


METHODS = {
    "gptq": Method(4, True, formats.gptq, formats.gptq_config, corrects=True),
    "awq": Method(4, False, formats.awq, formats.awq_config, scale=scaling),
    "int8": Method(8, True, formats.int8, formats.int8_config),
    "smoothquant": Method(8, True, formats.int8, formats.int8_config, scale=_migration),
}
GROUPS = (128, 64, 32, 16)


def group_of(method: Method, sizes: Mapping[str, tuple[int, ...]], wanted: int | None) -> int:
    """The largest of `GROUPS` that divides every row of these matrices, or `wanted`; 0 for a method with a scale for each row. Raises
    ValueError, which names the matrix that does not fit."""
    if method.bits == 8:
        if wanted is not None:
            raise ValueError("--group: this method has one scale for each row")
        return 0
    for name, (rows, _) in sizes.items():
        if rows % formats.WORD:
            raise ValueError(f"{name}: {rows} rows do not fill words of {formats.WORD} numbers, which this format has")
    fitting = [group for group in ((wanted,) if wanted else GROUPS) if all(width % group == 0 for _, width in sizes.values())]
    if not fitting:
        name, width = min(((name, width) for name, (_, width) in sizes.items()), key=lambda each: each[1] & -each[1])
        raise ValueError(f"--group: {wanted or f'none of {GROUPS}'} divides the {width} columns of {name}")
    return fitting[0]
