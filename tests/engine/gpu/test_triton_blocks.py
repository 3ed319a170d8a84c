"""Blocks are moved bit for bit. The device computes the same digest as the host, and the digest detects every kind of damage."""

import random

import numpy as np
import pytest
import torch

from baton.engine.core.kvcache import DIGEST_BYTES

blocks = pytest.importorskip("baton.engine.gpu.triton_blocks", reason="needs triton", exc_type=ImportError)
from baton.engine.gpu.staging import Staging  # noqa: E402 - only where triton is installed

SHAPE = (2, 2, 3, 16, 14)  # 5,376 bytes in bfloat16: more than one program, and not a multiple of what a program handles


def random_pool(device: torch.device, count: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**15), 2**15, (count, *SHAPE), generator=generator, dtype=torch.int16).view(torch.bfloat16).to(device)


def test_gather_and_scatter_move_the_right_blocks(device: torch.device) -> None:
    pool = random_pool(device)
    words = blocks.words_of(pool)
    wanted = torch.tensor([7, 0, 11, 3], device=device)
    out = torch.empty(4, words.shape[1], dtype=torch.int64, device=device)
    blocks.gather(words, wanted, out)
    assert torch.equal(out, words[wanted])
    expected = words.clone()
    expected[[1, 2, 7, 4]] = out
    blocks.scatter(words, torch.tensor([1, 2, 7, 4], device=device), out)
    assert torch.equal(words, expected)


def test_an_empty_list_of_blocks_is_accepted(device: torch.device) -> None:
    words = blocks.words_of(random_pool(device))
    none = torch.empty(0, dtype=torch.int64, device=device)
    blocks.gather(words, none, words[:0])
    blocks.scatter(words, none, words[:0])
    assert len(blocks.digest(words, none)) == 0


def test_blocks_that_are_not_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="6 bytes"):
        blocks.words_of(torch.zeros(3, 1, 1, 1, 1, 3, dtype=torch.bfloat16))


def test_the_device_and_the_host_compute_the_same_digest(device: torch.device) -> None:
    pool = random_pool(device)
    asked = [5, 5, 0, 11]
    sums = blocks.digest(blocks.words_of(pool), torch.tensor(asked, device=device))
    host = blocks.words_of(pool).cpu().view(torch.uint8).numpy()
    assert sums.cpu().numpy().astype("<i8").tobytes() == blocks.digest_on_host(host[asked])
    assert len(blocks.digest_on_host(host[asked])) == 4 * DIGEST_BYTES


def test_the_digest_follows_its_definition() -> None:
    """Computed here with Python's integers, so that the definition cannot drift with the implementation."""
    words = [0, 1, 2**64 - 1, 0xDEADBEEF]
    a = b = 0
    for i, w in enumerate(words):
        x = (w + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
        a, b = (a + x) % 2**64, (b + (2 * i + 1) * x) % 2**64
    expected = a.to_bytes(8, "little") + b.to_bytes(8, "little")
    assert blocks.digest_on_host(np.array([words], dtype="<u8").view(np.uint8)) == expected


def test_the_digest_detects_every_kind_of_damage() -> None:
    rng, random_bytes = random.Random(2), np.random.default_rng(3)
    size = 4096
    block = random_bytes.integers(0, 256, size, dtype=np.uint8)
    block[1000:2000] = 0
    found = {blocks.digest_on_host(block[None])}
    damaged = []
    for _ in range(200):
        copy = block.copy()
        match rng.randrange(6):
            case 0:  # one bit
                copy[rng.randrange(size)] ^= 1 << rng.randrange(8)
            case 1:  # two words are swapped
                a, b = rng.sample(range(size // 8), 2)
                words = copy.view(np.uint64)
                words[a], words[b] = words[b], words[a]
            case 2:  # a stretch is zeroed
                at = rng.randrange(size - 64)
                copy[at : at + rng.randrange(8, 64)] = 0
            case 3:  # everything is shifted
                copy = np.roll(copy, rng.choice((1, 2, 8, 64, 1024)))
            case 4:  # a stretch of zeros is longer
                copy[1000 - 8 * rng.randrange(1, 9) : 1000] = 0
            case 5:  # a piece of another block
                at = rng.randrange(0, size - 256)
                copy[at : at + 256] = random_bytes.integers(0, 256, 256, dtype=np.uint8)
        if not np.array_equal(copy, block):
            damaged.append(copy)
    digests = [blocks.digest_on_host(copy[None]) for copy in damaged]
    assert not found & set(digests)
    assert len(set(digests)) == len({copy.tobytes() for copy in damaged})


def test_blocks_copied_to_the_host_and_back_are_unchanged(device: torch.device) -> None:
    pool = random_pool(device)
    before = pool.clone()
    staging = Staging(pool, slots=6)
    staging.begin_out(np.array([3, 8, 1]))
    staging.wait()
    assert staging.host[:3].numpy().tobytes() == blocks.words_of(before)[[3, 8, 1]].cpu().numpy().tobytes()
    assert staging.digests([3, 8, 1]) == blocks.digest_on_host(staging.host[:3].numpy())
    pool[[3, 8, 1]] = 0
    staging.begin_in(np.array([3, 8, 1]))
    staging.wait()
    assert torch.equal(pool.view(torch.int16), before.view(torch.int16))
