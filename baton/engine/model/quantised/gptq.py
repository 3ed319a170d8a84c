"""GPTQ checkpoints (AutoGPTQ, GPTQModel, auto-round): numbers packed along columns, zero points along rows, groups of columns.

qweight [in / 8, out] int32   the first column in the lowest four bits
qzeros  [groups, out / 8]     what is stored is the zero point minus 1, but in `gptq_v2` the zero point itself
scales  [groups, out]
g_idx   [in]                  the group of each column, if columns were quantised in the order of their activations (desc_act)
"""

from dataclasses import dataclass, field

import torch

from baton.engine.facts.fields import Fields
from baton.engine.model.quantised.matrix import MatrixWorth, Quantised, shifts_of, unpacked
from baton.engine.model.quantised.scheme import FLOATS, INT32, ByPart, Part, Parts, Shape, whole_words


def read_gptq(f: Fields) -> ByPart:
    """Raises CheckpointError for a variant that is not read here."""
    if f.get("bits") not in (4, 8):
        raise f.error("bits", f"{f.get('bits')!r} is not supported; supported: 4, 8")
    f.only("checkpoint_format", "gptq", "gptq_v2")
    f.only("is_marlin_format", False)
    f.only("pack_dtype", "int32")
    for name in ("dynamic", "extra_config"):
        # What says that a matrix is not quantised is not needed: the file shows it.
        if any(not key.startswith("-:") and told != {"bits": 16} for key, told in f.inner(name).raw.items()):
            raise f.error(name, "matrices that are quantised in different ways are not supported")
    group = f.get("group_size")
    if group != -1:
        group = f.size("group_size")
    return ByPart("qweight", Gptq(f, f.size("bits"), group, f.get("checkpoint_format") == "gptq_v2", f.flag("desc_act")), empty_biases=True)


@dataclass(frozen=True, slots=True)
class Gptq:
    f: Fields = field(hash=False)
    bits: int
    group: int  # -1: a row is one group
    plain_zeros: bool
    ordered: bool  # columns were quantised in another order

    def parts(self, shape: Shape) -> dict[str, Part]:
        (outs, width), per_word = shape, 32 // self.bits
        whole_words(self.f, "bits", shape, per_word)
        groups = -(-width // self._group(width))
        return {
            "qweight": Part(INT32, ((width // per_word, outs),)),
            "qzeros": Part(INT32, ((groups, outs // per_word),)),
            "scales": Part(FLOATS, ((groups, outs),)),
            "g_idx": Part(INT32, ((width,),), optional=not self.ordered),
        }

    def read(self, parts: Parts, shape: Shape) -> Quantised | MatrixWorth:
        group, most = self._group(shape[1]), (1 << self.bits) - 1
        numbers = unpacked(parts.get("qweight").t(), self.bits)
        scales = parts.finite("scales").t().contiguous()
        zeros = unpacked(parts.get("qzeros"), self.bits).t().to(torch.int16) + (0 if self.plain_zeros else 1)
        if zeros.max() > most:
            raise parts.error("qzeros", f"has a zero point of {most + 1}, which tools read differently; save the model as gptq_v2")
        found = Quantised(self.bits, group, numbers, scales, shifts_of(zeros, scales, self.bits))
        if not parts.has("g_idx"):
            return found
        of_column = parts.get("g_idx").long()
        if torch.equal(of_column, torch.arange(shape[1]) // group):
            return found
        if of_column.min() < 0 or of_column.max() >= scales.shape[1]:
            raise parts.error("g_idx", f"names group {int(of_column.max())} or less than 0; there are {scales.shape[1]}")
        return MatrixWorth((numbers.float() - zeros.float()[:, of_column]).mul_(scales.float()[:, of_column]))

    def _group(self, width: int) -> int:
        return width if self.group == -1 else self.group
