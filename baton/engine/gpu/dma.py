"""Copies blocks of a device's pool straight to the host's memory and back: no processor touches the bytes.

Streams, and why a copy neither waits for a step nor is in its way, are those of `baton.engine.gpu.carrier`. The device digests a block in
the pool before it leaves, and again, in the pool, when it is back (`baton.engine.gpu.triton_blocks`). Who keeps the first digest and
compares it with the second knows that the block is whole, whatever happened to it: on the bus, in the host's memory, and if somebody wrote
there while it was copied.

**Page-locked memory** is memory that the driver has registered (`cudaHostRegister`). A copy has to lie in one registration, or in none:
one that covers two is refused (CUDA_ERROR_INVALID_VALUE). From and to memory that is not registered the driver copies by way of its own,
before a call returns; that is slow, and as right.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.kvcache import DIGEST_BYTES, WORD, Bytes
from baton.engine.gpu.device import OwnStream, upload
from baton.engine.gpu.triton_blocks import digest, gather, scatter

log = logging.getLogger(__name__)


class DeviceDma:
    """See `baton.engine.core.kvcache.Dma`."""

    def __init__(self, words: Tensor) -> None:
        """`words`: the pool, `[blocks, words]` int64."""
        self._pool = words

    def lock(self, memory: Bytes) -> Callable[[], None]:
        if self._pool.device.type != "cuda":
            return lambda: None
        if why := self._refused("cudaHostRegister", memory.ctypes.data, memory.nbytes, 0):
            raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes: {why}")

        def unlock(kept: Bytes = memory) -> None:  # what is registered stays mapped
            if why := self._refused("cudaHostUnregister", kept.ctypes.data):
                log.warning("cudaHostUnregister: %s", why)

        return unlock

    def _refused(self, name: str, *arguments: int) -> str:
        """Why CUDA refuses a call; empty if it does not."""
        with torch.cuda.device(self._pool.device):
            cudart = torch.cuda.cudart()
            if not int(code := getattr(cudart, name)(*arguments)):
                return ""
            with suppress(RuntimeError):  # CUDA keeps the error for this thread, and its next launch would raise it
                torch.zeros(1, device=self._pool.device)
            return f"{cudart.cudaGetErrorString(code)} ({int(code)})"

    def channel(self, count: int, stride: int) -> "DeviceChannel":
        return DeviceChannel(self._pool, count, stride)


class DeviceChannel(OwnStream):
    """See `baton.engine.core.kvcache.Channel`. Blocks are collected in the device's memory with the stride of slots, so that slots side by
    side are one copy."""

    def __init__(self, words: Tensor, count: int, stride: int) -> None:
        """`words`: the pool, `[blocks, words]` int64."""
        super().__init__(words.device)
        self._pool, self._width = words, words.shape[1]
        with self._stream.on():  # whose memory it is, from the allocator's first use of it on
            self._near = torch.empty(count, stride // WORD, dtype=torch.int64, device=words.device)
        self._digests = torch.zeros(count, DIGEST_BYTES // WORD, dtype=torch.int64, pin_memory=words.device.type == "cuda")

    def out(self, blocks: Sequence[int], memory: Sequence[Bytes]) -> list[bytes]:
        pieces = list(self._pieces(blocks, memory))

        def work() -> None:
            ids = upload(np.array(blocks, dtype=np.int64), self._pool.device)
            self._digest(ids)
            gather(self._pool, ids, self._near[: len(blocks), : self._width])
            for near, far in pieces:
                far.copy_(near, non_blocking=True)

        return self._do(work, len(blocks))

    def into(self, blocks: Sequence[int], memory: Sequence[Bytes]) -> list[bytes]:
        pieces = list(self._pieces(blocks, memory))

        def work() -> None:
            ids = upload(np.array(blocks, dtype=np.int64), self._pool.device)
            for near, far in pieces:
                near.copy_(far, non_blocking=True)
            scatter(self._pool, ids, self._near[: len(blocks), : self._width])
            self._digest(ids)

        return self._do(work, len(blocks))

    def _do(self, work: Callable[[], None], count: int) -> list[bytes]:
        """The digests that it leaves behind."""
        self._digests.zero_()  # those of an earlier call are no answer
        self._begin(work)
        self._wait()
        found = self._digests[:count].numpy().tobytes()
        return [found[i : i + DIGEST_BYTES] for i in range(0, len(found), DIGEST_BYTES)]

    def _digest(self, ids: Tensor) -> None:
        self._digests[: len(ids)].copy_(digest(self._pool, ids), non_blocking=True)

    def _pieces(self, blocks: Sequence[int], memory: Sequence[Bytes]) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of the device's memory, and the host's memory that belongs to them: both `[slots, words]` int64, contiguous."""
        if sum(map(len, memory)) != len(blocks):
            raise ValueError(f"{sum(map(len, memory))} slots for {len(blocks)} blocks")
        first = 0
        for piece in memory:
            far = torch.from_numpy(piece).view(torch.int64)
            yield self._near[first : first + len(piece)], far
            first += len(piece)
