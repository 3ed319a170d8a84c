"""The KV pool of a worker: one buffer, `[num_blocks, num_layers, parts, num_kv_heads, block_size, head_dim]`.

A block is one contiguous piece: one transfer descriptor, one digest, one file on disk. A tensor-parallel head shard is contiguous
inside each layer. If another model drafts, its keys and values of the same tokens lie in the same block, behind the model's own: whoever
moves, keeps or drops a block does so with both. The pool is plain host memory here; what a block holds is the layout's to say
(`KvLayout.views`), and the runner takes strided views of it (`baton.engine.model.kv_views`).
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from math import lcm
from typing import Any, NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_128_digest

from baton.engine.core.int5_rows import row_bytes
from baton.engine.core.pages import LINE, Backing, in_huge_pages

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
DIGEST_BYTES = 16
# uint8: bytes that an engine reads as fp8, or as int5
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int8": 1, "uint8": 1}
SCALES = {"int8": "float32", "int5": "bfloat16"}  # the type in which numbers are stored → that of their scales


PROBE_BYTES = 4 << 20  # of one probe of a transport: enough to measure a rate, and soon read
PROBE_BLOCKS = 16  # at most
WORD = 8  # bytes that a device copies and digests at a time
PROBE_PIECES = 5  # in a device's pool: one with known content, and one for each way to land in


class View(NamedTuple):
    """A tensor that every block contains: the type of its numbers, its shape, and at which byte of the block it begins."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class DraftKv:
    """The keys and values of what drafts, in the blocks of the model that it drafts for. The fields mean what they mean in `KvLayout`."""

    fingerprint: str  # of the drafting model and its number type
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    parts: int = 2
    value_dim: int = 0


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What two workers must agree on before one can use the other's bytes."""

    model_fingerprint: str
    dtype: str
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    layout_version: int = 1
    parts: int = 2  # 2: a key and a value; 1: one vector that is both (multi-head latent attention)
    value_dim: int = 0  # how many leading numbers of that one vector are the value; 0: all head_dim of them
    packing: str = ""  # how an engine that is not ours arranges the numbers of a (layer, head) within a block; its version and kernels
    # Type of the numbers in the pool if it is not `dtype`: int8, each token of a head with a float32 scale; int5, see `int5_rows`.
    stored: str = ""
    draft: DraftKv | None = None  # None: nothing that drafts has keys and values

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, self.parts, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def views(self) -> dict[str, View]:
        """`kv`: the numbers, `[L, P, Hkv, bs, D]`, or rows of int5, `[L, P, Hkv, bs, bytes]`; `scales`, if there are any: what they are
        multiplied by, `[L, P, Hkv, bs]`; `draft`, if another model drafts: its numbers, `[L, P, Hkv, bs, D]` with its own sizes."""
        found = {"kv": View(self.stored or self.dtype, self.block_shape, 0)}
        if self.stored == "int5":
            found = {"kv": View("uint8", (*self.block_shape[:-1], row_bytes(self.head_dim)), 0)}
        end = found["kv"].nbytes
        if self.stored:
            found["scales"] = View(SCALES[self.stored], self.block_shape[:-1], _whole_lines(end))
            end = found["scales"].offset + found["scales"].nbytes
        if self.draft is not None:
            d = self.draft
            shape = (d.num_layers, d.parts, d.num_kv_heads, self.block_size, d.head_dim)
            found["draft"] = View(d.dtype, shape, _whole_lines(end))
        return found

    @property
    def block_bytes(self) -> int:
        """A whole number of rows, so that what one head has in one block is a row of one table over the whole pool; the draft's, too. With
        scales, also of 64-bit words."""
        views = self.views
        used = max(view.offset + view.nbytes for view in views.values())
        rows = (view.shape[-2] * view.shape[-1] * DTYPE_BYTES[view.dtype] for name, view in views.items() if name != "scales")
        row = lcm(*rows, WORD if self.stored else 1)
        return -(-used // row) * row

    @property
    def probe_blocks(self) -> int:
        """Blocks that a probe of a transport reads."""
        return min(max(PROBE_BYTES // self.block_bytes, 1), PROBE_BLOCKS)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes over every field that is set: without a draft, those of a worker that knows of none."""
        text = "\n".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)
        return blake2b(text.encode(), digest_size=16).digest()

    def difference(self, other: "KvLayout") -> str | None:
        """The first field that differs, as text that names it, or None. The fingerprint comes last: most other fields change it, too."""
        return _difference(self, other) if self != other else None


def _whole_lines(size: int) -> int:
    return -(-size // LINE) * LINE


def _difference(mine: Any, theirs: Any) -> str:
    """Names the first field that differs, of two unequal objects of one dataclass."""
    differ = [f.name for f in fields(mine) if getattr(mine, f.name) != getattr(theirs, f.name)]
    name = min(differ, key=lambda name: name.endswith("fingerprint"))
    here, there = getattr(mine, name), getattr(theirs, name)
    if isinstance(here, DraftKv) and isinstance(there, DraftKv):
        return f"{name}.{_difference(here, there)}"
    return f"{name}: {here!r} here, {there!r} there"


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a transport registers: `blocks` whole blocks from `address` on."""

    address: int
    blocks: int
    kind: str = "DRAM"  # or VRAM, as NIXL calls the memory of a device
    device: int = 0  # whose memory it is
    spare: int = 0  # address in it at which a transport may write a few bytes; 0: none


class Carrier(Protocol):
    """Takes units out of a pool and puts them back, for one thread. A unit is what a colder tier keeps of a block: all its bytes, and
    perhaps more, by which the pool knows them again. May wait; raises RuntimeError if a device fails."""

    @property
    def units(self) -> Sequence[memoryview]:
        """Memory for units, writable."""
        ...

    def out(self, blocks: Sequence[int]) -> Sequence[memoryview]:
        """The units of these blocks, of which the caller is an owner: at most as many as `units`. They last until the next call, or until
        the caller releases the blocks, whichever is sooner."""
        ...

    def into(self, blocks: Sequence[int], places: Sequence[int]) -> list[bool]:
        """Copies `units[places[i]]` to `blocks[i]`, and returns when that has been done, with which of these now hold what had left."""
        ...


class Channel(Protocol):
    """Copies blocks between a device's pool and the host's memory, for one thread; no processor touches the bytes. `memory`: pieces,
    uint8 `[slots, stride]` each, with a slot for each block, in the order of the blocks. May wait; raises RuntimeError if a device fails,
    and then nothing is copied any more."""

    def out(self, blocks: Sequence[int], memory: Sequence[Bytes]) -> list[bytes]:
        """Copies these blocks, of which the caller is an owner, to memory, and returns when that has been done, with what the device found
        to be their digests before."""
        ...

    def into(self, blocks: Sequence[int], memory: Sequence[Bytes]) -> list[bytes]:
        """Copies memory to these blocks, and returns when that has been done, with the digests of what the blocks now hold."""
        ...


class Dma(Protocol):
    """A device's own access to the host's memory."""

    def lock(self, memory: Bytes) -> Callable[[], None]:
        """Locks whole pages into memory, for the device; returns what unlocks them, to be called when no copy is under way. May wait, for
        milliseconds. Raises RuntimeError if the driver refuses; then channels still copy, by way of the driver's own memory."""
        ...

    def channel(self, count: int, stride: int) -> Channel:
        """Makes one for so many blocks at a time, and slots of `stride` bytes, a whole number of words. Raises RuntimeError if the device
        has no room for it."""
        ...


class Pool(Protocol):
    """The memory that peers read and that fetched KV is copied into: `KvPool` on the host, `baton.engine.gpu.pool.DevicePool` on a GPU."""

    layout: KvLayout
    num_blocks: int
    read_bytes: int  # size of one read of a fetch: its digests are compared while the next one is under way
    waits: bool  # whether `digests` waits for a device
    direct: bool  # whether peers may reach the memory that the engine computes in, so that not everybody needs `expose`

    @property
    def dma(self) -> Dma | None:
        """None: the engine computes in the host's memory."""
        ...

    @property
    def nbytes(self) -> int: ...

    def expose(self, blocks: Sequence[int]) -> None:
        """Lets transports that go through the host read what the engine has written into these blocks. Thread-safe; may wait."""
        ...

    def take_in(self, blocks: Sequence[int]) -> None:
        """Lets the engine, and `digests`, find what such a transport has written into these blocks. Thread-safe; may wait."""
        ...

    def back(self, blocks: int) -> None:
        """The first so many blocks will be used soon, if they are not: their memory may be made ready. Returns at once. For the engine."""
        ...

    def digests(self, blocks: Sequence[int]) -> bytes:
        """DIGEST_BYTES for each block, in order. Which digest, depends on the memory alone: peers have pools of the same kind. Thread-safe;
        may wait."""
        ...

    @property
    def unit_bytes(self) -> int:
        """The size of a unit of a `Carrier`."""
        ...

    def carrier(self, count: int) -> Carrier:
        """One with room for so many units."""
        ...

    def flip(self, block: int) -> None:
        """Alters one bit of a block: what a fault would do."""
        ...


class KvPool:
    """`num_blocks` zeroed blocks of host memory, page-aligned, in huge pages where the system has them (they double read bandwidth).

    `memory`: what to use instead of memory of its own, for a pool that other processes map, too.
    """

    read_bytes = 8 << 20
    waits = False
    direct = False
    dma: Dma | None = None

    def __init__(self, layout: KvLayout, num_blocks: int, memory: mmap.mmap | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        # Private and anonymous: shared mappings get no huge pages by default. Pages are allocated at their first touch.
        memory = memory or mmap.mmap(-1, num_blocks * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = in_huge_pages(memory)
        # uint8 [num_blocks, block_bytes]
        self.array = np.frombuffer(self.memory, dtype=np.uint8).reshape(num_blocks, layout.block_bytes)
        self._backing = Backing(self.memory, self.array.ctypes.data)

    @property
    def region(self) -> Region:
        return Region(self.array.ctypes.data, self.num_blocks)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def block(self, index: int) -> memoryview:
        """Writable bytes of one block."""
        return memoryview(self.array[index])

    def expose(self, blocks: Sequence[int]) -> None:
        """The engine computes in the same memory."""

    def take_in(self, blocks: Sequence[int]) -> None:
        """The engine computes in the same memory."""

    def back(self, blocks: int) -> None:
        self._backing.reach(min(blocks, self.num_blocks) * self.layout.block_bytes)

    def digests(self, blocks: Sequence[int]) -> bytes:
        """XXH3-128: it detects accidents at memory speed."""
        return b"".join(xxh3_128_digest(self.block(block)) for block in blocks)

    @property
    def unit_bytes(self) -> int:
        return self.layout.block_bytes

    def carrier(self, count: int) -> Carrier:
        return HostCarrier(self, count)

    def flip(self, block: int) -> None:
        self.block(block)[0] ^= 1


class HostCarrier:
    """See `Carrier`. Units that leave are the pool's own memory. Who keeps one verifies it before it goes back."""

    def __init__(self, pool: KvPool, count: int) -> None:
        self._pool, size = pool, pool.unit_bytes
        memory = memoryview(mmap.mmap(-1, count * size))  # aligned, as direct I/O wants it
        self.units = [memory[i * size : (i + 1) * size] for i in range(count)]

    def out(self, blocks: Sequence[int]) -> Sequence[memoryview]:
        return [self._pool.block(block) for block in blocks]

    def into(self, blocks: Sequence[int], places: Sequence[int]) -> list[bool]:
        for block, place in zip(blocks, places, strict=True):
            self._pool.array[block] = np.frombuffer(self.units[place], np.uint8)
        return [True] * len(blocks)
