"""How rounded matrices are written, so that others read them.

gptq   qweight [in / 8, out] int32, the first column in the lowest four bits; qzeros [groups, out / 8], the zero point minus 1;
       scales [groups, out]; g_idx [in], the group of each column
awq    qweight [in, out / 8] int32 in an order of its own; qzeros [groups, out / 8] likewise; scales [groups, out]
int8   compressed-tensors, int-quantized: weight [out, in] int8, weight_scale [out, 1]
"""

from typing import Any

import torch
from torch import Tensor

from baton.models.quantise.rounding import Rounded

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours each four bits hold, from the lowest on
WORD = 8  # numbers of four bits


def gptq(w: Rounded) -> dict[str, Tensor]:
    width = w.numbers.shape[1]
    return {
        "qweight": words(w.numbers).t().contiguous(),
        "qzeros": words((w.grid.zeros - 1).to(torch.uint8).t()),
        "scales": w.grid.scales.t().contiguous(),
        "g_idx": (torch.arange(width) // w.group).to(torch.int32),
    }


def awq(w: Rounded) -> dict[str, Tensor]:
    return {
        "qweight": words(w.numbers.t(), AWQ_ORDER),
        "qzeros": words(w.grid.zeros.to(torch.uint8).t(), AWQ_ORDER),
        "scales": w.grid.scales.t().contiguous(),
    }


def int8(w: Rounded) -> dict[str, Tensor]:
    return {"weight": (w.numbers.to(torch.int16) - 128).to(torch.int8), "weight_scale": w.grid.scales}


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(WORD))) -> Tensor:
    """uint8 `[rows, n]` below 16 → int32 `[rows, n / 8]`."""
    eight = numbers.reshape(len(numbers), -1, WORD)[..., list(order)].to(torch.int64)
    packed = (eight << torch.arange(0, 4 * WORD, 4)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def gptq_config(group: int) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "lm_head": False,
    }


def awq_config(group: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }


def int8_config(group: int) -> dict[str, Any]:
    """A row has one scale, whatever `group` says."""
    ints = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = ints | {"strategy": "channel", "dynamic": False, "group_size": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": ints | {"strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
