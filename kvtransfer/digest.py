"""Digests of blocks prove to the reader that it received what the writer sealed. They detect accidents. They do not protect against a peer
that lies; the cluster key does."""

from collections.abc import Sequence

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.kvcache import DIGEST_BYTES, Pool

INLINE_BYTES = 4 << 20  # digested in well under a millisecond; more would block the event loop for too long


def at_once(pool: Pool, blocks: int) -> bool:
    """Whether so many blocks are digested so quickly that the event loop may do it. A device always makes its caller wait."""
    return not pool.waits and blocks * pool.layout.block_bytes <= INLINE_BYTES


def mismatches(pool: Pool, block_ids: Sequence[int], expected: bytes) -> list[int]:
    """Returns the indices into `block_ids` of the blocks whose digests differ from `expected`.

    Raises BatonError(DIGEST_MISMATCH) if `expected` does not hold one digest for each block, because then no block can be checked.
    """
    if len(expected) != len(block_ids) * DIGEST_BYTES:
        raise BatonError(Reason.DIGEST_MISMATCH, f"{len(expected)} bytes of digests for {len(block_ids)} blocks")
    actual = pool.digests(block_ids)
    places = range(0, len(expected), DIGEST_BYTES)
    return [i for i, at in enumerate(places) if actual[at : at + DIGEST_BYTES] != expected[at : at + DIGEST_BYTES]]
