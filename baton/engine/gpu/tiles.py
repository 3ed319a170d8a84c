"""How many queries and keys one program of an attention kernel holds at a time, by the chip's memory: too many do not start there.

Preferred tiles were measured on an H200 in bfloat16. In float32 no tensor core multiplies exactly, and larger tiles spill registers.
`tests/engine/gpu/compile_kernels.py` prints what every kernel takes on every chip.
"""

from typing import NamedTuple

LEAST = 16  # rows, or keys, that Triton multiplies
BARRIERS = 1024  # bytes, of what a program shares beside its tiles
# Shared memory that one program may have, in KiB: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_KIB = {
    (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227,
    (12, 0): 99, (12, 1): 99,
}  # fmt: skip
OTHER_KIB = 99  # of a chip that is newer than this list


class Tile(NamedTuple):
    rows: int  # queries of a prefill; in a decode, query heads of one key head
    keys: int
    warps: int


class HeadShape(NamedTuple):
    """What one key head has for one token."""

    value: int  # numbers in a value, to the next power of two
    rest: int  # numbers of a key that are not part of the value, likewise; 0: none
    shared: bool  # a key begins with its value (multi-head latent attention)
    bytes: int  # in a number
    rounded: bool = False  # whether numbers are widened after they are read, which takes registers
    packed: bool = False  # and made of levels, which takes more; and shared memory, for numbers that change threads


def most_shared(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that one program may have."""
    return SHARED_KIB.get(capability, OTHER_KIB) << 10


def decode_tile(group: int, head: HeadShape, capability: tuple[int, int]) -> Tile:
    """`group`: query heads of one key head."""
    rows = max(LEAST, min(64, 1 << (group - 1).bit_length()))
    if head.packed:
        return _fitted(Tile(LEAST, 32, 4), head, capability)
    if head.bytes > 2:
        keys = 64 if head.value <= 128 else 32 if head.value <= 256 else 16
        return _fitted(Tile(LEAST, keys, 4 if head.value <= 64 else 8), head, capability)
    if head.rounded and head.value > 256:
        rows = min(rows, 32)  # more would spill registers on Hopper
    return _fitted(Tile(rows, 32, 8) if head.value > 256 else Tile(rows, 64, 4), head, capability)


def prefill_tile(head: HeadShape, capability: tuple[int, int]) -> Tile:
    if head.packed:
        return _fitted(Tile(32, 32, 4), head, capability)
    if head.bytes > 2:
        rows = 64 if head.value <= 64 else 32 if head.value <= 256 else 16
        return _fitted(Tile(rows, 32 if head.value <= 128 else 16, 8), head, capability)
    if head.value <= 128:
        return _fitted(Tile(128, 64, 8), head, capability)
    return _fitted(Tile(64 if head.value <= 256 else 16, 32, 4), head, capability)


def shared_bytes(tile: Tile, head: HeadShape) -> int:
    """The most shared memory that a program with this tile takes: its queries, a piece of keys and values, and their weights. With 64 rows
    and more, the newer chips multiply out of shared memory, and the next piece is there, too."""
    key = head.value + head.rest
    queries = tile.rows * key
    piece = tile.keys * (key if head.shared else key + head.value)
    ahead = piece if tile.rows >= 64 and head.bytes <= 2 else 0
    return (queries + piece + max(tile.rows * tile.keys, ahead)) * head.bytes + BARRIERS


def _fitted(tile: Tile, head: HeadShape, capability: tuple[int, int]) -> Tile:
    """The largest tile up to this one that the chip takes. Fewer rows first: keys that are read twice are still in its cache."""
    while shared_bytes(tile, head) > most_shared(capability) and tile.rows * tile.keys > LEAST * LEAST:
        rows, keys, warps = tile
        tile = Tile(rows // 2, keys, warps) if rows > LEAST else Tile(rows, keys // 2, warps)
    return tile
