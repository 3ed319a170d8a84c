"""A pool that a device seems to compute in: NumPy copies, the digest is the host's, and page-locking is written down."""

from collections.abc import Callable, Sequence

import numpy as np
from xxhash import xxh3_128_digest

from baton.engine.core.kvcache import DIGEST_BYTES, Bytes, KvLayout, KvPool


class StandInDma:
    """See `Dma`. What is `locked` is where it begins → how long it is."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.locked: dict[int, int] = {}
        self.refuses = False
        self.asked = 0  # calls of `lock`
        self.pieces: list[int] = []  # slots of each copy
        self.before: Callable[[], None] = lambda: None  # is called before the bytes of an `into` are read
        self.skips: set[str] = set()  # ways that copy nothing
        self.fails = False

    def lock(self, memory: Bytes) -> Callable[[], None]:
        self.asked += 1
        if self.refuses:
            raise RuntimeError("the driver refuses")
        self.locked[memory.ctypes.data] = memory.nbytes

        def unlock() -> None:
            del self.locked[memory.ctypes.data]

        return unlock

    def channel(self, count: int, stride: int) -> "StandInChannel":
        return StandInChannel(self, count, stride)


class StandInChannel:
    """See `Channel`."""

    def __init__(self, dma: StandInDma, count: int, stride: int) -> None:
        self._dma, self._count, self._stride = dma, count, stride

    def out(self, blocks: Sequence[int], memory: Sequence[Bytes]) -> list[bytes]:
        pool, digests = self._dma.pool, self._digests(blocks)
        for block, slot in zip(blocks, self._slots(memory), strict=True):
            if "out" not in self._dma.skips:
                slot[: pool.layout.block_bytes] = pool.array[block]
        return digests

    def into(self, blocks: Sequence[int], memory: Sequence[Bytes]) -> list[bytes]:
        pool = self._dma.pool
        self._dma.before()
        for block, slot in zip(blocks, self._slots(memory), strict=True):
            if "into" not in self._dma.skips:
                pool.array[block] = slot[: pool.layout.block_bytes]
        return self._digests(blocks)

    def _slots(self, memory: Sequence[Bytes]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
        if self._dma.fails:
            raise RuntimeError("the device has failed")
        self._dma.pieces += map(len, memory)
        slots = [slot for piece in memory for slot in piece]
        assert len(slots) <= self._count and all(len(slot) == self._stride for slot in slots)
        return slots

    def _digests(self, blocks: Sequence[int]) -> list[bytes]:
        return [xxh3_128_digest(self._dma.pool.block(block)) for block in blocks]


class StandInPool(KvPool):
    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.array[:] = np.random.default_rng(1).integers(0, 256, self.array.shape, dtype=np.uint8)
        self.dma: StandInDma = StandInDma(self)

    @property
    def unit_bytes(self) -> int:
        return self.layout.block_bytes + DIGEST_BYTES
