"""Block keys: which tokens, after which tokens, under which model, tenant and adapter, a block's KV belongs to, and which of the tokens are
output.

A key is BLAKE2b-128 over (parent key, token ids of the block), rooted in (model fingerprint, salt, adapter). Equal keys mean equal
prefixes, so a cryptographic hash is used: a collision would hand one tenant another's KV. Output is computed by other kernels than a
prompt, so its KV has other last bits than that of the same tokens in a prompt; a block with output has another key, and a stream does not
depend on what happens to be cached. Standard library only: the router computes the same keys as the workers without loading torch.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

MAX_EVENT_KEYS = 1024  # of one event of the prefix cache: a reader applies an event in one piece
KEY_BYTES = 16
# Where a worker keeps the KV of a key. The engine computes in the first; the others are for colder copies.
MEDIA = DEVICE, HOST, DISK, REMOTE = "device", "host", "disk", "remote"


@lru_cache(maxsize=1024)  # a request asks several times
def root_key(model_fingerprint: str, salt: str = "", adapter: str = "") -> bytes:
    """The parent of every first block. Fields are length-prefixed, so no two triples share an encoding."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"baton.block.root")
    for field in (model_fingerprint, salt, adapter):
        data = field.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int], output_from: int | None = None) -> bytes:
    """The key of one full block. Token ids are hashed as little-endian uint32. `output_from`: the first token that is output, if one is."""
    return _key(parent, _packed(token_ids), output_from)


def extend_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, output_from: int | None = None) -> None:
    """`keys` are those of the first full blocks of `token_ids`; append the keys of its other full blocks. `output_from`: the position from
    which on tokens are output, None if none is or if output need not be told from a prompt."""
    first, end = len(keys) * block_size, len(token_ids) // block_size * block_size
    if first >= end:
        return
    parent, packed = keys[-1] if keys else root, _packed(token_ids[first:end])
    for start in range(first, end, block_size):
        output = None if output_from is None or output_from >= start + block_size else max(0, output_from - start)
        parent = _key(parent, packed[4 * (start - first) : 4 * (start - first + block_size)], output)
        keys.append(parent)


def _packed(token_ids: Sequence[int]) -> bytes:
    ids = array("I", token_ids)
    if ids.itemsize != 4:  # pragma: no cover - C unsigned int is four bytes wherever CPython runs
        raise RuntimeError("array('I') is not 32 bits wide here")
    return ids.tobytes()


def _key(parent: bytes, packed: bytes, output_from: int | None) -> bytes:
    if output_from is None:
        return blake2b(parent + packed, digest_size=KEY_BYTES).digest()
    return blake2b(parent + packed + output_from.to_bytes(4, "little"), digest_size=KEY_BYTES, person=b"baton.block.out").digest()
