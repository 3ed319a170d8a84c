"""The pool's memory as the tensors that its layout names."""

import torch
from torch import Tensor

from baton.engine.core.kvcache import KvLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "uint8": torch.uint8}


def views(layout: KvLayout, memory: Tensor) -> dict[str, Tensor]:
    """`memory` `[N, block_bytes]` uint8 → for each of `layout.views` a tensor `[N, *shape]`, without a copy."""
    return {
        name: memory[:, view.offset : view.offset + view.nbytes].view(DTYPES[view.dtype]).view(len(memory), *view.shape)
        for name, view in layout.views.items()
    }
