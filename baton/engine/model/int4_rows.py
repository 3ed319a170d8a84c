"""Rows of `baton.engine.core.int4_rows` in plain torch: what a kernel stores must have the same bytes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.int4_rows import GROUP, LEVEL_BYTES, LEVELS, groups_of

TINY = torch.finfo(torch.float32).tiny
NONE = 0x7FC0  # the bits of a bfloat16 that is no number


def pack(x: Tensor) -> Tensor:
    """`[n, D]` → `[n, row_bytes(D)]` uint8. A group with a number that is not finite has a scale and a shift that are none."""
    n, dim = x.shape
    groups = groups_of(dim)
    x, missing = x.float(), (0, GROUP * groups - dim)
    least = _by_group(F.pad(x, missing, value=torch.inf)).amin(dim=2, keepdim=True)
    most = _by_group(F.pad(x, missing, value=-torch.inf)).amax(dim=2, keepdim=True)
    finite = least.isfinite() & most.isfinite()
    low = (least + 0.0).bfloat16().float()  # without the sign of a zero
    scale = ((most - low) / LEVELS).bfloat16().float()
    inverse = torch.where(scale < TINY, 0.0, scale.reciprocal())
    level = ((_by_group(F.pad(x, missing)) - low) * inverse).nan_to_num_(0.0, LEVELS, 0.0).clamp_(0, LEVELS).round_()
    level = torch.where(finite, level, 0.0).to(torch.uint8)
    level.view(n, -1)[:, dim:] = 0
    halves = level.view(n, groups, 2, LEVEL_BYTES)
    levels = halves[:, :, 0] | halves[:, :, 1] << 4  # [n, groups, 16]
    factors = torch.where(finite, torch.cat((low, scale), dim=2).bfloat16().view(torch.int16), NONE).view(torch.uint8)  # [n, groups, 4]
    return torch.cat((levels.view(n, -1), factors.view(n, -1)), dim=1)


def unpack(rows: Tensor, dim: int) -> Tensor:
    """`[*, row_bytes(dim)]` uint8 → `[*, dim]` float32."""
    groups = groups_of(dim)
    levels, factors = rows.split((groups * LEVEL_BYTES, rows.shape[-1] - groups * LEVEL_BYTES), dim=-1)
    levels = levels.unflatten(-1, (groups, LEVEL_BYTES))
    level = torch.cat((levels & 15, levels >> 4), dim=-1).float()  # [*, groups, 32]
    low, scale = factors.contiguous().view(torch.bfloat16).float().unflatten(-1, (groups, 2)).split(1, dim=-1)
    numbers: Tensor = (level * scale + low).flatten(-2)[..., :dim]
    return numbers


def _by_group(x: Tensor) -> Tensor:
    return x.view(len(x), -1, GROUP)
