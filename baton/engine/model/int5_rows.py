"""Rows of `baton.engine.core.int5_rows` in plain torch: what a kernel stores must have the same bytes."""

import torch
from torch import Tensor

from baton.engine.core.int5_rows import GROUP, LEVELS, NIBBLE_BYTES, groups_of

TINY = torch.finfo(torch.float32).tiny


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[n, D]` → `[n, row_bytes(D)]` uint8, and the scales of the rows, `[n]` bfloat16. The number of the greatest magnitude gets the least
    level, whatever its sign. The scale of a row with a number that is not finite is none."""
    n, dim = x.shape
    groups = groups_of(dim)
    x = x.float()
    least, most = x.amin(dim=1), x.amax(dim=1)
    scale = (torch.where(most >= -least, most, least) / -LEVELS + 0.0).bfloat16()  # without the sign of a zero
    scale = torch.where(least.isfinite() & most.isfinite(), scale, torch.nan)
    step = scale.float()
    inverse = torch.where(step.abs() < TINY, 0.0, step.reciprocal())
    level = (x * inverse[:, None]).nan_to_num_(-LEVELS, LEVELS, -LEVELS).clamp_(-LEVELS, LEVELS - 1).round_()
    bits = torch.zeros(n, groups * GROUP, dtype=torch.uint8, device=x.device)
    bits[:, :dim] = level.to(torch.int8).view(torch.uint8) & 31
    bits = bits.view(n, groups, GROUP)
    nibbles = bits[..., :NIBBLE_BYTES] & 15 | bits[..., NIBBLE_BYTES:] << 4
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    high = (bits >> 4 << places.repeat(GROUP // 8)).view(n, groups, -1, 8).sum(dim=-1, dtype=torch.uint8)
    return torch.cat((nibbles, high), dim=2).view(n, -1), scale


def unpack(rows: Tensor, dim: int) -> Tensor:
    """`[*, row_bytes(dim)]` uint8 → levels `[*, dim]` float32."""
    groups = rows.unflatten(-1, (groups_of(dim), -1))
    nibbles, high = groups.split((NIBBLE_BYTES, groups.shape[-1] - NIBBLE_BYTES), dim=-1)
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    fifth = (high[..., None] >> places & 1).flatten(-2)  # [*, groups, 32]
    levels: Tensor = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).float() - LEVELS * fifth.float()
    return levels.flatten(-2)[..., :dim]
