"""Takes blocks of a device's pool to host memory and back, for colder tiers.

**Streams.** Each carrier has a stream, and memory on both sides of the bus, of its own. No step waits for it, and it waits for no step,
which is right because of what it is given:

- Blocks that leave are sealed and owned by who saves them. A block is sealed after the step that filled it has been read, and who owns a
  block keeps it from being given away. So nothing writes to it while it is copied. `out` returns when the copies have ended, and only then
  may a block be released: one that was released before may hold another sequence's KV by the time it is copied.
- Blocks that are filled were allocated for that. What may still be read or written by a step in flight is parked, and is not allocated
  (`baton.engine.gpu.overlap`). `into` returns when the copies have ended, and only then may a block be sealed, and read by a step, or, if
  its load has ended meanwhile, be released.

**A unit** is a block and, behind it, its digest (`baton.engine.gpu.triton_blocks`). The device takes it from the pool before the block
leaves, and compares it with what the pool has when the block is back. So it covers both ways over the bus, and all between: a copy that
nobody waited for is a block that does not come back.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.kvcache import DIGEST_BYTES, WORD
from baton.engine.gpu.device import OwnStream, upload
from baton.engine.gpu.triton_blocks import digest, gather, scatter


class DeviceCarrier(OwnStream):
    """See `baton.engine.core.kvcache.Carrier`."""

    def __init__(self, words: Tensor, count: int) -> None:
        """`words`: the pool, `[blocks, words]` int64."""
        super().__init__(words.device)
        self._pool, self._width, device = words, words.shape[1], words.device
        shape, cuda = (count, self._width + DIGEST_BYTES // WORD), device.type == "cuda"
        self._near = torch.empty(shape, dtype=torch.int64, device=device)
        self._far = torch.zeros(shape, dtype=torch.int64, pin_memory=cuda)
        self._whole = torch.zeros(count, dtype=torch.bool, pin_memory=cuda)
        self.units = [memoryview(unit) for unit in self._far.view(torch.uint8).numpy()]

    def out(self, blocks: Sequence[int]) -> Sequence[memoryview]:
        near, far = self._near[: len(blocks)], self._far[: len(blocks)]

        def work() -> None:
            ids = upload(np.array(blocks, dtype=np.int64), self._pool.device)
            near[:, self._width :] = digest(self._pool, ids)
            gather(self._pool, ids, near[:, : self._width])
            far.copy_(near, non_blocking=True)

        self._begin(work)
        self._wait()
        return self.units[: len(blocks)]

    def into(self, blocks: Sequence[int], places: Sequence[int]) -> list[bool]:
        whole, last = self._whole[: len(blocks)], max(places, default=-1) + 1

        def work() -> None:
            ids = upload(np.array(blocks, dtype=np.int64), self._pool.device)
            self._near[:last].copy_(self._far[:last], non_blocking=True)
            near = self._near[:last]
            if last > len(places):
                near = near[upload(np.array(places, dtype=np.int64), self._pool.device)]
            scatter(self._pool, ids, near[:, : self._width])
            whole.copy_((digest(self._pool, ids) == near[:, self._width :]).all(dim=1), non_blocking=True)

        self._begin(work)
        self._wait()
        return whole.tolist()
