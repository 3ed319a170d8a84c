"""Host memory that stands for a device's blocks, for transports that know nothing of devices.

A holder's blocks cross the bus when peers may read them (`expose`), a reader's when their bytes have arrived (`take_in`): in the threads
that digest and read, each way on a stream of its own. So the engine's thread never copies and its steps never wait; what is copied is at
rest, because blocks are published after the step that wrote them has been read, and reserved blocks take part in no step. Digests are
those of the device's memory on both sides, so that they cover both ways over the bus, too.
"""

import threading
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.kvcache import KvPool
from baton.engine.gpu.device import Stream
from baton.engine.gpu.staging import Staging
from baton.engine.gpu.triton_blocks import digest_on_host

STAGED_BLOCKS, STAGED_BYTES = 64, 64 << 20  # that cross the bus at a time, at most


class StagedPool(KvPool):
    """`host` and the blocks of `tensor` on a device, `[num_blocks, *block_shape]`."""

    read_bytes = 64 << 20
    waits = True

    def __init__(self, host: KvPool, tensor: Tensor) -> None:
        super().__init__(host.layout, host.num_blocks, host.memory)
        self._tensor = tensor

    def expose(self, blocks: Sequence[int]) -> None:
        self._out.bring(blocks, self.array)

    def take_in(self, blocks: Sequence[int]) -> None:
        self._in.take(blocks, self.array)

    def digests(self, blocks: Sequence[int]) -> bytes:
        """Those of `baton.engine.gpu.triton_blocks`, of what the device holds."""
        if self._tensor.device.type != "cuda":
            return digest_on_host(self._words[list(blocks)].view(torch.uint8).numpy())
        return self._out.digests(blocks)

    def flip(self, block: int) -> None:
        super().flip(block)
        self._words[block, 0] ^= 1

    def warm_up(self) -> None:
        """Compiles the kernels. No record refers to block 0 yet."""
        self.expose([0])
        self.take_in([0])
        self.digests([0])

    @cached_property
    def _words(self) -> Tensor:
        return self._tensor.view(len(self._tensor), -1).view(torch.int64)

    @cached_property
    def _out(self) -> "BusLane":
        return BusLane(self._tensor)

    @cached_property
    def _in(self) -> "BusLane":
        return BusLane(self._tensor)


class BusLane:
    """One way over the bus: a stream, and a buffer on each side of it, which one thread uses at a time."""

    def __init__(self, tensor: Tensor) -> None:
        self._stream = Stream(tensor.device)
        self._slots = max(1, min(STAGED_BLOCKS, STAGED_BYTES // (tensor[0].numel() * tensor.element_size())))
        self._staging = Staging(tensor, self._slots)
        self._free = threading.Lock()

    def bring(self, blocks: Sequence[int], host: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]") -> None:
        """Copies blocks of the device to `host` `[num_blocks, block_bytes]`. Returns when they are there."""
        for part in self._parts(blocks):
            with self._free, self._stream.on():
                self._staging.begin_out(part)
                self._staging.wait()
                host[part] = self._staging.host[: len(part)].numpy()

    def take(self, blocks: Sequence[int], host: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]") -> None:
        """Copies blocks of `host` to the device. Returns when they are there."""
        for part in self._parts(blocks):
            with self._free, self._stream.on():
                self._staging.host[: len(part)].numpy()[:] = host[part]
                self._staging.begin_in(part)
                self._staging.wait()

    def digests(self, blocks: Sequence[int]) -> bytes:
        with self._stream.on():
            return self._staging.digests(blocks)

    def _parts(self, blocks: Sequence[int]) -> "list[np.ndarray[tuple[int], np.dtype[np.int64]]]":
        return [np.array(blocks[i : i + self._slots], dtype=np.int64) for i in range(0, len(blocks), self._slots)]
