"""Copies blocks between the device's pool and pinned host memory: so KV leaves a device for a transport, a file or a colder tier, and comes
back.

The requested blocks are collected into one contiguous piece on the device and cross the bus as one copy, whatever their size and order.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from baton.engine.gpu.device import Mark, upload
from baton.engine.gpu.inputs import Ints
from baton.engine.gpu.triton_blocks import digest, gather, scatter, words_of


class Staging:
    """Room for `slots` blocks on both sides. Calls use the current stream; copies of two calls do not overlap."""

    def __init__(self, pool: Tensor, slots: int) -> None:
        """`pool` `[N, *block_shape]`, contiguous; a block is a whole number of 8-byte words, else ValueError."""
        self._pool = words_of(pool)
        self._device = pool.device
        self._near = torch.empty(slots, self._pool.shape[1], dtype=torch.int64, device=pool.device)
        pinned = pool.device.type == "cuda"
        self.host = torch.empty(slots, 8 * self._pool.shape[1], dtype=torch.uint8, pin_memory=pinned)  # [slots, block_bytes]
        self._done = Mark(pool.device)

    def begin_out(self, blocks: Ints) -> None:
        """Copies blocks `[n]` to `host[:n]`, which has them when `wait` has returned."""
        near = self._near[: len(blocks)]
        gather(self._pool, upload(blocks, self._device), near)
        self.host[: len(blocks)].view(torch.int64).copy_(near, non_blocking=True)
        self._done.record()

    def begin_in(self, blocks: Ints) -> None:
        """Copies `host[:n]` to the blocks `[n]`; `host` may be written again when `wait` has returned."""
        near = self._near[: len(blocks)]
        near.copy_(self.host[: len(blocks)].view(torch.int64), non_blocking=True)
        scatter(self._pool, upload(blocks, self._device), near)
        self._done.record()

    def wait(self) -> None:
        self._done.wait()

    def digests(self, blocks: Seq[int]) -> bytes:
        """The device digests of blocks, as `baton.engine.gpu.triton_blocks.digest_on_host` returns them. Waits for the device."""
        sums = digest(self._pool, torch.tensor(blocks, dtype=torch.int64, device=self._device))
        return sums.cpu().numpy().astype("<i8").tobytes()
