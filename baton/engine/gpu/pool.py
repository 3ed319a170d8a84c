"""The pool of a device as transports see it. Some reach the device's memory itself: then KV goes from one GPU to another, and the host has
no part in it. The others go by the host's memory, through which the blocks are `staged`.
"""

import json
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.kvcache import DIGEST_BYTES, PROBE_PIECES, KvLayout, KvPool, Region
from baton.engine.gpu.carrier import DeviceCarrier
from baton.engine.gpu.device import Mark, Stream, upload
from baton.engine.gpu.dma import DeviceDma
from baton.engine.gpu.staged_pool import StagedPool
from baton.engine.gpu.triton_blocks import move, words_of


class DevicePool:
    """The first `num_blocks` blocks of `tensor` `[rows(layout, num_blocks), *]`, contiguous. Behind them are the runner's scratch and the
    blocks with which transports probe each other. Thread-safe.

    Copies and digests have streams of their own, so that the engine's steps never wait for them. What they touch is at rest: blocks are
    leased after the step that wrote them has ended, and reserved blocks take part in no step until their KV has landed.
    """

    read_bytes = StagedPool.read_bytes
    waits = True
    direct = True

    def __init__(self, layout: KvLayout, tensor: Tensor) -> None:
        self.layout = layout
        self.num_blocks = len(tensor) - rows(layout, 0)
        self.probes = range(self.num_blocks + 1, len(tensor))  # PROBE_PIECES pieces of `layout.probe_blocks`
        self.staged = StagedPool(KvPool(layout, len(tensor)), tensor)  # the host's pages are allocated when they are needed
        self._tensor = tensor
        self._words = words_of(tensor)
        self.dma = DeviceDma(self._words)
        self._stream = Stream(tensor.device)

    @property
    def region(self) -> Region:
        """All of `tensor`."""
        at, size, device = self._tensor.data_ptr(), self.layout.block_bytes, self._tensor.device
        return Region(at, len(self._tensor), "VRAM", device.index or 0, at + self.probes[-1] * size)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def expose(self, blocks: Sequence[int]) -> None:
        self.staged.expose(blocks)

    def take_in(self, blocks: Sequence[int]) -> None:
        self.staged.take_in(blocks)

    def back(self, blocks: int) -> None:
        """A device's memory is there from the start."""

    def digests(self, blocks: Sequence[int]) -> bytes:
        """Those of `baton.engine.gpu.triton_blocks`, computed where the bytes are."""
        return self.staged.digests(blocks)

    @property
    def unit_bytes(self) -> int:
        return self.layout.block_bytes + DIGEST_BYTES

    def carrier(self, count: int) -> DeviceCarrier:
        return DeviceCarrier(self._words, count)

    def flip(self, block: int) -> None:
        """Flips a bit of a block on the device, and in what the host has of it."""
        self.staged.block(block)[0] ^= 1
        with self._stream.on():
            self._words[block, 0] ^= 1
            mark = self._mark()
        mark.wait()

    def share(self) -> bytes:
        """What another process on this machine gives to `open`. Raises RuntimeError if the driver refuses."""
        device, handle, size, offset, counter, counter_offset, event, waits = self._tensor.untyped_storage()._share_cuda_()
        names = {"device": device, "size": size, "offset": offset, "counter_offset": counter_offset, "waits": waits}
        parts = {"handle": handle.hex(), "counter": counter.hex(), "event": event.hex(), "blocks": len(self._tensor)}
        return json.dumps(names | parts).encode()

    def open(self, shared: bytes) -> Tensor:
        """A peer's pool, mapped: `[blocks, words]` int64. It is unmapped with the last reference to it. Raises RuntimeError if this device
        cannot reach that memory, ValueError, TypeError or KeyError if `shared` is not what `share` returned."""
        told = json.loads(shared)
        handle, counter, event = (bytes.fromhex(told[name]) for name in ("handle", "counter", "event"))
        places = told["size"], told["offset"], counter, told["counter_offset"], event, told["waits"]
        storage = torch.UntypedStorage._new_shared_cuda(told["device"], handle, *places)
        count = int(told["blocks"])
        tensor = torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage)
        return tensor[: count * self._words.shape[1]].view(count, -1)

    def begin_copy(self, peer: Tensor, remote: Sequence[int], local: Sequence[int]) -> Callable[[], bool]:
        """Begins to copy `remote[i]` of an opened pool to `local[i]` of this one; the answer tells whether it has ended. Raises
        RuntimeError if the device refuses or has failed."""
        with self._stream.on():
            there, here = self._ids(remote), self._ids(local)
            move(peer, there, self._words, here)
            mark = self._mark()

        def ended(kept: tuple[Tensor, ...] = (peer, there, here)) -> bool:  # what the copy reads lives until then
            return mark.passed()

        return ended

    def warm_up(self) -> None:
        """Compiles the kernels. No record refers to block 0 yet, and the scratch, copied to itself, stays what it is."""
        self.staged.warm_up()
        self.begin_copy(self._words, [self.num_blocks], [self.num_blocks])

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        return upload(np.array(blocks, dtype=np.int64), self._tensor.device)

    def _mark(self) -> Mark:
        mark = Mark(self._tensor.device)
        mark.record()
        return mark


def rows(layout: KvLayout, num_blocks: int) -> int:
    """Blocks of a tensor that holds `num_blocks` for sequences."""
    return num_blocks + 1 + PROBE_PIECES * layout.probe_blocks
