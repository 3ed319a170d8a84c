"""Whole blocks on the device: they are collected into one contiguous piece, put back, and digested, at the speed of the memory.

A block is `block_bytes` contiguous bytes of the pool, a multiple of 8; kernels see it as 64-bit words.

**The digest of a block** is 16 bytes that a device computes while it reads the block once, in any order and in any number of pieces, and
that a side without a device can compute too (`digest_on_host`). It detects accidents, like the host's XXH3-128, but it is a different
digest: two sides that compare must use the same one. With w_i the 64-bit words of the block, i = 0, 1, …, G the odd constant nearest to
2^64 / φ, and mix the finaliser of SplitMix64 (Steele, Lea, Flood 2014), all modulo 2^64:

    m_i = mix(w_i + (i + 1) · G)        A = Σ m_i        B = Σ (2 i + 1) · m_i        digest = A, B, little-endian

Why that is enough. For each i, w → m_i is a bijection whose every output bit depends on every input bit, so

- one altered word (a flipped bit or byte, 8 zeroed bytes) always changes A: m_i differs, the other terms do not;
- two altered words leave A unchanged only if their differences cancel, δ_j = -δ_i, a chance of 2^-64; B then changes by 2 (i - j) δ_i,
  which is 0 only if δ_i is a multiple of 2^63 / 2^v, 2^v the power of two in i - j: in a block of 2 MiB, only if its 46 low bits are 0 too;
- the place is added to the word before it is mixed, so words that change places, and a block that is shifted by a word, meet other
  functions: each term changes as if drawn anew, and both sums stay the same with a chance of about 2^-128;
- the same holds for a zeroed stretch: mix(0 + (i + 1) · G) is a different number at each place, so zeros of another length or at another
  place are detected.

Sums of integers do not depend on their order, so the device's scheduling has no influence.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
WORDS = 2048  # one program's share of a block

_GOLDEN = tl.constexpr(GOLDEN)


@triton.jit
def _gather_kernel(pool, blocks, out, words, out_row, WORDS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    block = tl.load(blocks + i)
    x = tl.load(pool + block * words + word, mask=word < words)
    tl.store(out + i * out_row + word, x, mask=word < words)


@triton.jit
def _scatter_kernel(pool, blocks, source, words, source_row, WORDS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    block = tl.load(blocks + i)
    x = tl.load(source + i * source_row + word, mask=word < words)
    tl.store(pool + block * words + word, x, mask=word < words)


@triton.jit
def _move_kernel(source, sources, target, targets, words, WORDS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    x = tl.load(source + tl.load(sources + i) * words + word, mask=word < words)
    tl.store(target + tl.load(targets + i) * words + word, x, mask=word < words)


@triton.jit
def mix64(x):
    """The finaliser of SplitMix64; x uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _digest_kernel(pool, blocks, sums, words, WORDS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    word = piece * WORDS + tl.arange(0, WORDS)
    inside = word < words
    w = tl.load(pool + tl.load(blocks + i) * words + word, mask=inside, other=0).to(tl.uint64, bitcast=True)
    place = word.to(tl.uint64)
    mixed = tl.where(inside, mix64(w + (place + 1) * _GOLDEN), 0)
    row = sums + (i * tl.num_programs(1) + piece) * 2
    tl.store(row, tl.sum(mixed, 0).to(tl.int64, bitcast=True))
    tl.store(row + 1, tl.sum((2 * place + 1) * mixed, 0).to(tl.int64, bitcast=True))


def gather(pool: Tensor, blocks: Tensor, out: Tensor) -> None:
    """pool `[N, words]` int64, blocks `[n]` int64 → out `[n, words]`, whose rows may be part of longer ones."""
    n, words = out.shape
    if n:
        _gather_kernel[(n, triton.cdiv(words, WORDS))](pool, blocks, out, words, out.stride(0), WORDS=WORDS)


def scatter(pool: Tensor, blocks: Tensor, source: Tensor) -> None:
    """source `[n, words]` int64, whose rows may be part of longer ones, into the blocks `[n]` of pool `[N, words]`; each block occurs only
    once."""
    n, words = source.shape
    if n:
        _scatter_kernel[(n, triton.cdiv(words, WORDS))](pool, blocks, source, words, source.stride(0), WORDS=WORDS)


def move(source: Tensor, sources: Tensor, target: Tensor, targets: Tensor) -> None:
    """Blocks `sources` `[n]` of source `[N, words]` int64 → blocks `targets` `[n]` of target `[M, words]`, which occur only once."""
    words = source.shape[1]
    if len(sources):
        _move_kernel[(len(sources), triton.cdiv(words, WORDS))](source, sources, target, targets, words, WORDS=WORDS)


def digest(pool: Tensor, blocks: Tensor) -> Tensor:
    """Digests `[n, 2]` int64 of the blocks `[n]` of pool `[N, words]` int64; their bytes are those of `digest_on_host`."""
    words, pieces = pool.shape[1], triton.cdiv(pool.shape[1], WORDS)
    sums = torch.empty(len(blocks), pieces, 2, dtype=torch.int64, device=pool.device)
    if len(blocks):
        _digest_kernel[(len(blocks), pieces)](pool, blocks, sums, words, WORDS=WORDS)
    return sums.sum(dim=1)  # wraps


def digest_on_host(blocks: npt.NDArray[np.uint8]) -> bytes:
    """DIGEST_BYTES for each of `[n, block_bytes]` uint8."""
    words = np.ascontiguousarray(blocks).view("<u8")
    place = np.arange(words.shape[1], dtype=np.uint64)
    mixed = words + (place + np.uint64(1)) * np.uint64(GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    weighted = (np.uint64(2) * place + np.uint64(1)) * mixed
    return np.stack((mixed.sum(axis=1), weighted.sum(axis=1)), axis=1).astype("<u8").tobytes()


def words_of(pool: Tensor) -> Tensor:
    """A contiguous pool `[N, *block_shape]` of any dtype as `[N, words]` int64, without a copy.

    Raises ValueError if a block is not a whole number of 8-byte words.
    """
    block_bytes = pool[0].numel() * pool.element_size()
    if block_bytes % 8:
        raise ValueError(f"a block of {block_bytes} bytes is not a whole number of 8-byte words")
    return pool.view(torch.uint8).view(len(pool), block_bytes).view(torch.int64)
