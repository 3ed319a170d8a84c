"""The buffers between a device and its host: none is used again before what crosses the bus has arrived."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.gpu import staged_pool
from baton.engine.gpu.staged_pool import StagedPool
from baton.engine.gpu.triton_blocks import digest_on_host

LAYOUT = KvLayout("model", "float32", 4, 2, 2, 8)
BLOCKS = 24


class LateStaging:
    """Copies as late as it may: when somebody waits. So a buffer that is used too early has the wrong bytes."""

    def __init__(self, pool: torch.Tensor, slots: int) -> None:
        self._device = pool.view(len(pool), -1).view(torch.uint8)
        self.host = torch.zeros(slots, self._device.shape[1], dtype=torch.uint8)
        self._crosses: Any = None

    def begin_out(self, blocks: np.ndarray[Any, Any]) -> None:
        assert self._crosses is None, "the buffer is in use"
        self._crosses = lambda: self.host[: len(blocks)].copy_(self._device[torch.from_numpy(blocks)])

    def begin_in(self, blocks: np.ndarray[Any, Any]) -> None:
        assert self._crosses is None, "the buffer is in use"
        self._crosses = lambda: self._device.index_copy_(0, torch.from_numpy(blocks), self.host[: len(blocks)])

    def wait(self) -> None:
        crosses, self._crosses = self._crosses, None
        crosses()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> tuple[StagedPool, torch.Tensor]:
    monkeypatch.setattr(staged_pool, "Staging", LateStaging)
    monkeypatch.setattr(staged_pool, "STAGED_BLOCKS", 3)
    tensor = torch.randn(BLOCKS + 1, *LAYOUT.block_shape, generator=torch.Generator().manual_seed(1))
    return StagedPool(KvPool(LAYOUT, BLOCKS), tensor), tensor.view(BLOCKS + 1, -1).view(torch.uint8)


def test_blocks_cross_in_any_number_and_order(pool: tuple[StagedPool, torch.Tensor]) -> None:
    host, device = pool
    asked = [7, 0, 19, 3, 4, 11, 23]
    host.expose(asked)
    assert np.array_equal(host.array[asked], device[asked].numpy())
    assert not host.array[[b for b in range(BLOCKS) if b not in asked]].any()
    host.array[asked] = np.random.default_rng(1).integers(0, 255, (len(asked), LAYOUT.block_bytes), dtype=np.uint8)
    before = device.clone()
    host.take_in(asked[::-1])
    assert np.array_equal(host.array[asked], device[asked].numpy())
    others = [b for b in range(BLOCKS + 1) if b not in asked]
    assert torch.equal(device[others], before[others])
    host.expose([])
    host.take_in([])


def test_threads_share_the_buffers_one_after_the_other(pool: tuple[StagedPool, torch.Tensor]) -> None:
    host, device = pool
    begin = threading.Barrier(4)

    def expose(first: int) -> None:
        begin.wait(10)
        host.expose(list(range(first, BLOCKS, 4)))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(expose, range(4)))
    assert np.array_equal(host.array, device[:BLOCKS].numpy())


def test_digests_are_those_of_the_device_and_a_flipped_bit_is_seen_on_both_sides(pool: tuple[StagedPool, torch.Tensor]) -> None:
    host, device = pool
    found = host.digests([5, 2])
    assert found == digest_on_host(device[[5, 2]].numpy()) and host.waits
    host.expose([5])
    host.flip(5)
    assert host.digests([5, 2]) != found and not np.array_equal(host.array[5], np.zeros(LAYOUT.block_bytes))
    host.array[2] ^= 0xFF  # what the host has is not asked
    assert host.digests([2]) == found[16:]
