"""Matrices as a GGUF file has them: rows of blocks, which `baton.models.gguf` puts into the folder as they are.

`module.TYPE [out, bytes of a row]` uint8. A block begins with its scale d (float16) and, in some types, a second number m (float16).

    q4_0  32 numbers   d, 16 bytes                    (q - 8) · d; the first 16 numbers in the low halves, the others in the high ones
    q4_1  32           d, m, 16 bytes                 q · d + m
    q5_0  32           d, 4 bytes, 16 bytes           (q - 16) · d; a number's fifth bit is in the four bytes
    q5_1  32           d, m, 4 bytes, 16 bytes        q · d + m
    q8_0  32           d, 32 int8                     q · d
    q4_k  256          d, m, 12 bytes, 128 bytes      q · d · s - m · t for each 32: s and t have six bits, in the 12 bytes
    q5_k  256          d, m, 12, 32 bytes, 128 bytes  the same, with a number's fifth bit in the 32 bytes
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.facts.fields import Fields
from baton.engine.model.quantised.matrix import Quantised
from baton.engine.model.quantised.scheme import UINT8, Format, Part, Parts, Shape

GROUP = 32
SIZES = {"q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q4_k": (256, 144), "q5_k": (256, 176)}


@dataclass(frozen=True, slots=True)
class Gguf:
    """A `Scheme`: each matrix says by the name of its part how it is stored."""

    f: Fields
    empty_biases: bool = False

    def format_of(self, module: str, has: Callable[[str], bool]) -> Format | None:
        return next((Blocks(self.f, kind) for kind in SIZES if has(kind)), None)


def read_gguf(f: Fields) -> Gguf:
    return Gguf(f)


@dataclass(frozen=True, slots=True)
class Blocks:
    f: Fields = field(hash=False)
    kind: str

    def parts(self, shape: Shape) -> dict[str, Part]:
        numbers, size = SIZES[self.kind]
        if shape[1] % numbers:
            raise self.f.error("quant_method", f"{shape[1]} columns of a matrix are not whole blocks of {numbers} numbers ({self.kind})")
        return {self.kind: Part(UINT8, ((shape[0], shape[1] // numbers * size),))}

    def read(self, parts: Parts, shape: Shape) -> Quantised:
        _, size = SIZES[self.kind]
        blocks = parts.get(self.kind).reshape(shape[0], -1, size)
        found = READERS[self.kind](blocks)
        for factors in (found.scales, found.shifts):
            if factors is not None and not factors.isfinite().all():
                raise parts.error(self.kind, "has scales that are not finite")
        return found


def _halves(blocks: Tensor, at: int) -> Tensor:
    """float16 `[out, blocks]` at a byte of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(octets: Tensor) -> Tensor:
    """`[..., n]` → `[..., 2 n]`: all low halves, then all high ones."""
    return torch.cat((octets & 15, octets >> 4), dim=-1)


def _bits(octets: Tensor) -> Tensor:
    """`[..., n]` → `[..., 8 n]`, from the lowest of each."""
    return (octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _four(blocks: Tensor) -> Quantised:
    return Quantised(4, GROUP, _nibbles(blocks[..., 2:]).flatten(1), _halves(blocks, 0))


def _four_and_least(blocks: Tensor) -> Quantised:
    return Quantised(4, GROUP, _nibbles(blocks[..., 4:]).flatten(1), _halves(blocks, 0), _halves(blocks, 2).float())


def _five(blocks: Tensor) -> Quantised:
    numbers = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return Quantised(8, GROUP, numbers.add(128 - 16).flatten(1), _halves(blocks, 0))


def _five_and_least(blocks: Tensor) -> Quantised:
    numbers = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return Quantised(8, GROUP, numbers.flatten(1), _halves(blocks, 0), _halves(blocks, 2).float())


def _eight(blocks: Tensor) -> Quantised:
    return Quantised(8, GROUP, blocks[..., 2:].bitwise_xor(128).flatten(1), _halves(blocks, 0))


def _six_bits(octets: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes → eight scales and eight shifts of six bits: the first four of each whole, of the others two bits lie with these."""
    low, high, rest = octets[..., :4], octets[..., 4:8], octets[..., 8:]
    scales = torch.cat((low & 63, rest & 15 | low >> 6 << 4), dim=-1)
    return scales, torch.cat((high & 63, rest >> 4 | high >> 6 << 4), dim=-1)


def _factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, least = _six_bits(blocks[..., 4:16])
    d, m = _halves(blocks, 0).float()[..., None], _halves(blocks, 2).float()[..., None]
    return (d * scales.float()).flatten(1), (-m * least.float()).flatten(1)


def _pairs_of_groups(octets: Tensor) -> Tensor:
    """128 bytes → eight groups of 32 numbers: each 32 bytes hold two."""
    return _nibbles(octets.unflatten(-1, (4, 32))).flatten(-2)


def _four_of_256(blocks: Tensor) -> Quantised:
    return Quantised(4, GROUP, _pairs_of_groups(blocks[..., 16:]).flatten(1), *_factors(blocks))


def _five_of_256(blocks: Tensor) -> Quantised:
    fifth = _bits(blocks[..., 16:48]).unflatten(-1, (32, 8)).transpose(-1, -2).flatten(-2)  # bit g of byte i: of number i of group g
    return Quantised(8, GROUP, (_pairs_of_groups(blocks[..., 48:]) | fifth << 4).flatten(1), *_factors(blocks))


READERS: dict[str, Callable[[Tensor], Quantised]] = {
    "q4_0": _four, "q4_1": _four_and_least, "q5_0": _five, "q5_1": _five_and_least, "q8_0": _eight, "q4_k": _four_of_256,
    "q5_k": _five_of_256,
}  # fmt: skip
