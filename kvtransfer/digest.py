"""Digests of blocks prove to the reader that it received what the writer sealed. XXH3-128 detects accidents at memory speed. It does not
protect against a peer that lies; the cluster key does."""

from collections.abc import Sequence

from xxhash import xxh3_128_digest

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.kvcache import KvPool

DIGEST_BYTES = 16
INLINE_BYTES = 4 << 20  # digested in well under a millisecond; more would block the event loop for too long


def block_digests(pool: KvPool, block_ids: Sequence[int]) -> bytes:
    """Returns DIGEST_BYTES for each block, in the order of `block_ids`."""
    return b"".join(xxh3_128_digest(pool.block(block)) for block in block_ids)


def mismatches(pool: KvPool, block_ids: Sequence[int], expected: bytes) -> list[int]:
    """Returns the indices into `block_ids` of the blocks whose digests differ from `expected`.

    Raises BatonError(DIGEST_MISMATCH) if `expected` does not hold one digest for each block, because then no block can be checked.
    """
    if len(expected) != len(block_ids) * DIGEST_BYTES:
        raise BatonError(Reason.DIGEST_MISMATCH, f"{len(expected)} bytes of digests for {len(block_ids)} blocks")
    actual = block_digests(pool, block_ids)
    places = range(0, len(expected), DIGEST_BYTES)
    return [i for i, at in enumerate(places) if actual[at : at + DIGEST_BYTES] != expected[at : at + DIGEST_BYTES]]
