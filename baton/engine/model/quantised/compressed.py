"""compressed-tensors checkpoints (llm-compressor, auto-round). What a tensor means stands in `config_groups`, not in its name.

pack-quantized    weight_packed [out, in / 8] int32, the first column in the lowest bits, the least number as 0
                  weight_scale [out, groups], weight_zero_point [out / 8, groups] int32 (packed along rows), weight_shape [2]
int-quantized     weight [out, in] int8, weight_scale, weight_zero_point int8
float-quantized   weight [out, in] float8, weight_scale
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.facts.fields import Fields
from baton.engine.model.quantised.float8 import Float8, block_of
from baton.engine.model.quantised.matrix import Quantised, shifts_of, unpacked
from baton.engine.model.quantised.scheme import FLOATS, INT8, INT32, INT64, Format, Part, Parts, Shape, whole_groups

KNOWN = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype", "zp_dtype",
    "observer", "observer_kwargs",
}  # fmt: skip
INT_FORMATS, FLOAT_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized"), ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Compressed:
    """A `Scheme`."""

    groups: tuple[tuple[tuple[str, ...], Format], ...]  # targets, and how they are stored
    ignored: tuple[str, ...]
    empty_biases: bool = False

    def format_of(self, module: str, has: Callable[[str], bool]) -> Format | None:
        if any(_names(target, module) for target in self.ignored):
            return None
        named = [format_ for targets, format_ in self.groups if any(_names(target, module) for target in targets)]
        if named or module.endswith("embed_tokens"):  # which is not of that class
            return named[0] if named else None
        return next((format_ for targets, format_ in self.groups if "Linear" in targets), None)


def _names(target: str, module: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def read_compressed(f: Fields) -> Compressed:
    """Raises CheckpointError for a variant that is not read here."""
    if f.has("kv_cache_scheme"):
        raise f.error("kv_cache_scheme", "a quantised KV cache is not supported")
    if f.get("transform_config"):
        raise f.error("transform_config", "is not supported")
    f.inner("sparsity_config").only("format", "dense")
    groups = f.inner("config_groups")
    if not groups.raw:
        raise f.error("config_groups", "is missing")
    found = [_group(groups.inner(name), f.get("format")) for name in groups.raw]
    return Compressed(tuple(found), _targets(f, "ignore", f.get("ignore", [])))


def _targets(f: Fields, name: str, given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(target, str) for target in given):
        raise f.error(name, f"must be a list of modules, got {given!r}")
    for target in given:
        try:
            re.compile(target[3:] if target.startswith("re:") else "")
        except re.error as error:
            raise f.error(name, f"{target!r} is no regular expression: {error}") from None
    return tuple(given)


def _group(f: Fields, whole: object) -> tuple[tuple[str, ...], Format]:
    """`whole`: the format that the folder names, for groups that name none."""
    targets = _targets(f, "targets", f.get("targets"))
    for target in targets:
        if not target.startswith("re:") and "." not in target and target not in ("Linear", "lm_head"):
            raise f.error("targets", f"{target!r} is not supported: only matrices of class Linear are quantised here")
    if f.has("output_activations"):
        raise f.error("output_activations", "rounded outputs are not supported")
    w, name = f.inner("weights"), f.get("format", whole)
    if unknown := sorted(key for key in w.raw if key not in KNOWN and w.has(key)):
        raise w.error(unknown[0], "is not known here")
    w.only("dynamic", False)
    w.only("actorder", "weight", "static")
    kind = w.get("type", "int")
    if kind not in ("int", "float"):
        raise w.error("type", f"{kind!r} is not supported; supported: int, float")
    if name not in (INT_FORMATS if kind == "int" else FLOAT_FORMATS):
        raise f.error("format", f"{name!r} is not supported for {kind} weights")
    _check_activations(f.inner("input_activations"), kind)
    return targets, _int_format(w, name == "pack-quantized") if kind == "int" else _float_format(w)


def _check_activations(f: Fields, kind: str) -> None:
    """What is computed with int8 weights is what the format means. With float8, activations are not rounded at all."""
    if not f.raw:
        return
    f.only("type", kind)
    if f.get("num_bits", 8) != 8:
        raise f.error("num_bits", f"activations of {f.get('num_bits')!r} bits are not supported")
    if kind == "int":
        f.only("symmetric", True)
        if f.get("dynamic") is not True or f.get("strategy", "token") != "token":
            raise f.error("dynamic", "activations in int8 are rounded token by token, in steps found then; others are not supported")


def _strategy(w: Fields, *supported: str) -> str:
    size = w.get("group_size")
    strategy = w.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in supported:
        raise w.error("strategy", f"{strategy!r} is not supported; supported: {', '.join(supported)}")
    return str(strategy)


def _float_format(w: Fields) -> Format:
    if w.get("num_bits", 8) != 8:
        raise w.error("num_bits", f"{w.get('num_bits')!r} is not supported for float weights; supported: 8")
    w.only("symmetric", True)
    strategy = _strategy(w, "tensor", "channel", "block")
    block = block_of(w, "block_structure") if strategy == "block" else (int(strategy == "channel"), 0)
    return Float8(w, block, "weight_scale")


def _int_format(w: Fields, packed: bool) -> Format:
    bits = w.size("num_bits", 8)
    if bits not in ((4, 8) if packed else (8,)):
        raise w.error("num_bits", f"{bits} is not supported here; supported: 4 (packed) and 8")
    strategy = _strategy(w, "tensor", "channel", "group")
    group = w.size("group_size") if strategy == "group" else 0
    return Ints(w, bits, packed, strategy, group, w.flag("symmetric", True))


@dataclass(frozen=True, slots=True)
class Ints:
    f: Fields = field(hash=False)
    bits: int
    packed: bool
    strategy: str
    group: int  # 0: a row is one group
    symmetric: bool

    def parts(self, shape: Shape) -> dict[str, Part]:
        (outs, width), per_word = shape, 32 // self.bits
        groups = whole_groups(self.f, shape, self.group or width)
        scales: tuple[Shape, ...] = ((1,), (), (1, 1)) if self.strategy == "tensor" else ((outs, groups),)
        if self.strategy == "channel":
            scales += ((outs,),)
        zeros, per_row = Part(INT8, scales), Part(INT32, ((-(-outs // per_word), groups),))
        found = {"weight": Part(INT8, (shape,)), "weight_scale": Part(FLOATS, scales)}
        if self.packed:
            del found["weight"]
            found |= {"weight_packed": Part(INT32, ((outs, -(-width // per_word)),)), "weight_shape": Part(INT64 | INT32, ((2,),))}
            zeros = per_row if self.strategy != "tensor" else zeros
        return found if self.symmetric else found | {"weight_zero_point": zeros}

    def read(self, parts: Parts, shape: Shape) -> Quantised:
        outs, width = shape
        scales = self._spread(parts.finite("weight_scale"), outs)
        if self.packed:
            if (told := tuple(parts.get("weight_shape").tolist())) != shape:
                raise parts.error("weight_shape", f"says {list(told)}, config.json implies {list(shape)}")
            numbers = unpacked(parts.get("weight_packed"), self.bits)[:, :width]
        else:
            numbers = _unsigned(parts.get("weight"))
        return Quantised(self.bits, self.group or width, numbers, scales, self._shifts(parts, scales))

    def _shifts(self, parts: Parts, scales: Tensor) -> Tensor | None:
        if self.symmetric:
            return None
        zeros = parts.get("weight_zero_point")
        if zeros.dtype == torch.int32:
            return shifts_of(unpacked(zeros.t(), self.bits).t()[: len(scales)], scales, self.bits)
        return shifts_of(self._spread(zeros.to(torch.int16) + (1 << (self.bits - 1)), len(scales)), scales, self.bits)

    def _spread(self, numbers: Tensor, outs: int) -> Tensor:
        """`[out, groups]`."""
        return numbers.reshape(1, 1).expand(outs, 1) if self.strategy == "tensor" else numbers.view(outs, -1)


def _unsigned(numbers: Tensor) -> Tensor:
    """uint8 of int8: the least becomes 0."""
    return numbers.view(torch.uint8).bitwise_xor(128)
