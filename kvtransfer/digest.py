"""Digests of blocks: the reader's proof that what landed is what the writer sealed. XXH3-128: finds accidents at memory speed; a peer
that lies is kept out by the cluster key, not by this."""

from collections.abc import Sequence

from xxhash import xxh3_128_digest

from baton.cluster.errors import BatonError, Reason
from baton.engine.kvcache import KvPool

DIGEST_BYTES = 16
INLINE_BYTES = 4 << 20  # digested in well under a millisecond; more than that is no work for an event loop


def block_digests(pool: KvPool, block_ids: Sequence[int]) -> bytes:
    """DIGEST_BYTES a block, in the order of `block_ids`."""
    return b"".join(xxh3_128_digest(pool.block(block)) for block in block_ids)


def mismatches(pool: KvPool, block_ids: Sequence[int], expected: bytes) -> list[int]:
    """Indices into `block_ids` of the blocks whose bytes are not those that gave `expected`.

    Raises BatonError(DIGEST_MISMATCH) if `expected` is not one digest a block: then nothing can be said of any.
    """
    if len(expected) != len(block_ids) * DIGEST_BYTES:
        raise BatonError(Reason.DIGEST_MISMATCH, f"{len(expected)} bytes of digests for {len(block_ids)} blocks")
    actual = block_digests(pool, block_ids)
    places = range(0, len(expected), DIGEST_BYTES)
    return [i for i, at in enumerate(places) if actual[at : at + DIGEST_BYTES] != expected[at : at + DIGEST_BYTES]]
