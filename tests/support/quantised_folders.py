"""Makes quantised checkpoints of a plain one, each as its format is documented, in numpy; and says what every number is worth, by the
definition and in float64. Nothing of what reads them is used here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the row that each four bits of a word hold, from the lowest on
LINEAR = {"targets": ["Linear"], "input_activations": None, "output_activations": None}


def rounded(w: Array, bits: int, group: int, symmetric: bool) -> tuple[Array, Array, Array, Array]:
    """Numbers `[out, in]` from 0 on, zero points and float16 scales `[out, groups]`, and what they are worth."""
    top, of = 2**bits - 1, np.arange(w.shape[1]) // group
    numbers, worth = np.empty(w.shape, np.int64), np.empty(w.shape, np.float64)
    zeros, scales = (np.empty((len(w), of[-1] + 1), kind) for kind in (np.int64, np.float16))
    for g in range(of[-1] + 1):
        part = w[:, of == g]
        least, most = np.minimum(part.min(1), -1e-4), np.maximum(part.max(1), 1e-4)
        if symmetric:
            scales[:, g], zeros[:, g] = np.abs(part).max(1) * 2 / top, (top + 1) // 2
        else:
            scales[:, g] = (most - least) / top
            zeros[:, g] = np.clip(np.round(-least / scales[:, g].astype(np.float64)), 1, top)
        step = scales[:, g : g + 1].astype(np.float64)
        numbers[:, of == g] = np.clip(np.round(part / step) + zeros[:, g : g + 1], 0, top)
        worth[:, of == g] = (numbers[:, of == g] - zeros[:, g : g + 1]) * step
    return numbers, zeros, scales, worth


def packed(numbers: Array, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """`[rows, n]` of unsigned numbers as int32 `[rows, n · bits / 32]`, the first in the lowest bits, or those of `order` from there on."""
    each = 32 // bits
    whole = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % each))).astype(np.uint32).reshape(len(numbers), -1, each)
    words = np.zeros(whole.shape[:2], np.uint32)
    for i, place in enumerate(order or range(each)):
        words |= whole[..., place] << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32))


def floats(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


Made = tuple[Tensors, Array]  # what stands for a matrix, by the part's name, and what it is worth


def gptq(w: Array, bits: int = 4, group: int = 32, symmetric: bool = True, plain: bool = False, ordered: bool = False) -> Made:
    """`plain`: zero points are not stored minus 1; `ordered`: columns were quantised in another order."""
    order = np.random.default_rng(0).permutation(w.shape[1]) if ordered else np.arange(w.shape[1])
    numbers, zeros, scales, worth = rounded(w[:, order], bits, group, symmetric)
    back = np.argsort(order)
    parts = {
        "qweight": packed(numbers[:, back], bits).t().contiguous(),
        "qzeros": packed(zeros.T - (0 if plain else 1), bits),
        "scales": floats(scales.T),
        "g_idx": torch.from_numpy((back // group).astype(np.int32)),
    }
    return parts, worth[:, back]


def awq(w: Array, group: int = 32, symmetric: bool = False) -> Made:
    numbers, zeros, scales, worth = rounded(w, 4, group, symmetric)
    if symmetric:
        zeros[:] = 8
    parts = {"qweight": packed(numbers.T, 4, AWQ_ORDER), "qzeros": packed(zeros.T, 4, AWQ_ORDER), "scales": floats(scales.T)}
    return parts, worth


def pack_quantized(w: Array, bits: int = 4, group: int = 32, symmetric: bool = True) -> Made:
    numbers, zeros, scales, worth = rounded(w, bits, group, symmetric)
    parts = {"weight_packed": packed(numbers, bits), "weight_scale": floats(scales), "weight_shape": torch.tensor(w.shape)}
    return parts if symmetric else parts | {"weight_zero_point": packed(zeros.T, bits).t().contiguous()}, worth


def int_quantized(w: Array, group: int = 0, symmetric: bool = True) -> Made:
    numbers, zeros, scales, worth = rounded(w, 8, group or w.shape[1], symmetric)
    parts = {"weight": floats((numbers - 128).astype(np.int8)), "weight_scale": floats(scales)}
    return parts if symmetric else parts | {"weight_zero_point": floats((zeros - 128).astype(np.int8))}, worth


def float8(octets: Array) -> Array:
    """What E4M3 numbers are worth: a sign, four bits of exponent, three of mantissa."""
    sign, exponent, mantissa = 1.0 - 2.0 * (octets >> 7), (octets >> 3 & 15).astype(int), (octets & 7) / 8
    return sign * np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))


def blocks(w: Array, rows: int, columns: int, name: str) -> Made:
    """float8 with a scale for each block."""
    scales, worth = np.empty((-(-w.shape[0] // rows), -(-w.shape[1] // columns)), np.float32), np.empty(w.shape)
    whole = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    for i, j in np.ndindex(*scales.shape):
        at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(w[at]).max() / 448
        whole[at] = torch.from_numpy(w[at] / scales[i, j]).to(torch.float32).to(torch.float8_e4m3fn)
        worth[at] = float8(whole[at].view(torch.uint8).numpy()) * np.float64(scales[i, j])
    return {"weight": whole, name: floats(scales)}, worth


def float_quantized(w: Array) -> Made:
    return blocks(w, 1, w.shape[1], "weight_scale")


def one_scale(w: Array) -> Made:
    parts, worth = blocks(w, len(w), w.shape[1], "weight_scale")
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale"].view(1), "input_scale": torch.ones(1)}, worth


def compressed(format_: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    usual = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = LINEAR | {"weights": usual | weights} | more
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def grouped(bits: int = 4, size: int = 32, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "strategy": "group", "group_size": size, **more}


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
# Name → what makes a matrix so, and what config.json says of it
VARIANTS: dict[str, tuple[Callable[[Array], Made], dict[str, Any]]] = {
    "gptq": (gptq, GPTQ),
    "gptq-asymmetric": (lambda w: gptq(w, symmetric=False), GPTQ | {"sym": False}),
    "gptq-v2": (lambda w: gptq(w, symmetric=False, plain=True), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}),
    "gptq-g64": (lambda w: gptq(w, group=64), GPTQ | {"group_size": 64}),
    "gptq-last-group-half": (lambda w: gptq(w, group=128, symmetric=False), GPTQ | {"group_size": 128}),
    "gptq-row": (lambda w: gptq(w, group=w.shape[1]), GPTQ | {"group_size": -1}),
    "gptq-ordered": (lambda w: gptq(w, symmetric=False, ordered=True), GPTQ | {"desc_act": True}),
    "gptq-8": (lambda w: gptq(w, bits=8), GPTQ | {"bits": 8}),
    "awq": (awq, AWQ),
    "awq-symmetric": (lambda w: awq(w, 64, symmetric=True), AWQ | {"group_size": 64, "zero_point": False}),
    "w4a16": (pack_quantized, compressed("pack-quantized", grouped())),
    "w4a16-asymmetric": (lambda w: pack_quantized(w, 4, 64, False), compressed("pack-quantized", grouped(4, 64, symmetric=False))),
    "w8a16": (lambda w: pack_quantized(w, 8, w.shape[1]), compressed("pack-quantized", {})),
    "w8a16-groups": (lambda w: pack_quantized(w, 8), compressed("pack-quantized", grouped(8))),
    "w8a8": (int_quantized, compressed("int-quantized", {}, input_activations=TOKENS)),
    "w8a8-asymmetric": (lambda w: int_quantized(w, symmetric=False), compressed("int-quantized", {"symmetric": False})),
    "fp8": (float_quantized, compressed("float-quantized", {"type": "float"}, input_activations=TOKENS | {"type": "float"})),
    "fp8-one-scale": (one_scale, compressed("float-quantized", {"type": "float", "strategy": "tensor"})),
    "fp8-blocks": (
        lambda w: blocks(w, 16, 48, "weight_scale"),
        compressed("float-quantized", {"type": "float", "strategy": "block", "block_structure": [16, 48]}),
    ),
    "fp8-auto": (one_scale, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-transformers": (
        lambda w: blocks(w, 128, 128, "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
}


def write(plain: Path, folder: Path, variant: str) -> dict[str, Array]:
    """A copy of the model in `plain` with the projections of its layers quantised. Returns what they are worth."""
    make, told = VARIANTS[variant]
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    tensors, worth = dict[str, torch.Tensor](), {}
    for name, w in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = torch.from_numpy(w)
            continue
        parts, worth[name] = make(w.astype(np.float64))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": told}
    (folder / "config.json").write_text(json.dumps(config))
    return worth


def write_dequantised(plain: Path, folder: Path, worth: dict[str, Array]) -> None:
    """The same model with its matrices as float32."""
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    whole = load_file(plain / "model.safetensors")
    tensors = {name: floats(worth[name].astype(np.float32) if name in worth else w) for name, w in whole.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
