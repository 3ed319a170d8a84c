"""Units that are encrypted before any other store gets them, so that neither its medium nor who reads or alters it learns what they hold.

A sealed unit is SEAL_BYTES longer:

    cipher, 1 byte | salt, 15 random bytes | encrypted: digest, 16, and the bytes | tag, 16

It is encrypted with a key of its own, made from the key of the store, the unit's block key and the salt: no key encrypts twice, so the
nonce is zero, and a unit under another's block key does not open. What is not sealed: block keys, sizes, and what is used when.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from xxhash import xxh3_128_digest

from baton.engine.core.kvcache import DIGEST_BYTES
from baton.tiers.store import Store, Unit, Wanted

SECRET_BYTES = 32
HEAD, TAG = 16, 16
SEAL_BYTES = HEAD + DIGEST_BYTES + TAG
NONCE = bytes(12)
Cipher = AESGCM | ChaCha20Poly1305
# Which is sooner done depends on the processor; both are always read.
CIPHERS: dict[int, type[Cipher]] = {1: AESGCM, 2: ChaCha20Poly1305}
PROBE_BYTES, PROBES = 256 << 10, 4
BUFFERS = 32  # units, kept for the next calls


def read_secret(path: Path) -> bytes:
    """The key in this file: 64 hexadecimal digits. Raises ValueError, which names the file and not what it holds."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a key: {error}") from None
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(text) != 2 * SECRET_BYTES or len(secret) != SECRET_BYTES:
        raise ValueError(f"{path}: a key is {2 * SECRET_BYTES} hexadecimal digits, as `openssl rand -hex {SECRET_BYTES}` prints them")
    return secret


def seal_name(secret: bytes) -> str:
    """Tells keys apart and tells nothing about them. A store that keeps it refuses another key before it reads a unit."""
    return blake2b(key=secret, digest_size=8, person=b"baton.seal.name").hexdigest()


class SealedStore:
    """See `Store`. `inside` has units that are SEAL_BYTES longer, and was made with `seal_name(secret)`."""

    def __init__(self, inside: Store, secret: bytes, clock: Callable[[], float] = time.perf_counter) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a key has {SECRET_BYTES} bytes, not {len(secret)}")
        self.medium, self.capacity, self.pins = inside.medium, inside.capacity, inside.pins
        self.unit_bytes = inside.unit_bytes - SEAL_BYTES
        self.cipher = min(CIPHERS, key=lambda number: _seconds(number, clock))
        self._inside = inside
        self._secret = secret
        self._buffers: list[bytearray] = []
        self._lock = threading.Lock()

    def keys(self) -> list[bytes]:
        return self._inside.keys()

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inside.holds(keys)

    def put(self, units: Sequence[Unit]) -> list[bytes]:
        with self._memory(len(units) + 1) as (plain, *sealed):
            for unit, into in zip(units, sealed, strict=True):
                self._seal(unit, plain, into)
            made = [Unit(unit.key, xxh3_128_digest(text), memoryview(text)) for unit, text in zip(units, sealed, strict=True)]
            return self._inside.put(made)

    def get(self, wanted: Sequence[Wanted]) -> list[bool]:
        with self._memory(len(wanted) + 1) as (plain, *sealed):
            came = self._inside.get([Wanted(one.key, memoryview(into)) for one, into in zip(wanted, sealed, strict=True)])
            good = [whole and self._opens(one, plain, each) for whole, one, each in zip(came, wanted, sealed, strict=True)]
        self._inside.drop([one.key for one, whole, opened in zip(wanted, came, good, strict=True) if whole and not opened])
        return good

    def drop(self, keys: Sequence[bytes]) -> None:
        self._inside.drop(keys)

    def close(self) -> None:
        self._inside.close()

    def _seal(self, unit: Unit, plain: bytearray, into: bytearray) -> None:
        salt = os.urandom(HEAD - 1)
        content, text = memoryview(plain)[HEAD : HEAD + DIGEST_BYTES + self.unit_bytes], memoryview(into)
        content[:DIGEST_BYTES], content[DIGEST_BYTES:] = unit.digest, unit.data
        text[0], text[1:HEAD] = self.cipher, salt
        self._cipher(self.cipher, unit.key, salt).encrypt_into(NONCE, content, None, text[HEAD:])

    def _opens(self, wanted: Wanted, plain: bytearray, sealed: bytearray) -> bool:
        content, text = memoryview(plain)[HEAD : HEAD + DIGEST_BYTES + self.unit_bytes], memoryview(sealed)
        if text[0] not in CIPHERS:
            return False
        try:
            self._cipher(text[0], wanted.key, bytes(text[1:HEAD])).decrypt_into(NONCE, text[HEAD:], None, content)
        except InvalidTag:
            return False
        wanted.into[:] = content[DIGEST_BYTES:]
        return xxh3_128_digest(wanted.into) == content[:DIGEST_BYTES]

    def _cipher(self, number: int, key: bytes, salt: bytes) -> Cipher:
        return CIPHERS[number](blake2b(key + salt, key=self._secret, digest_size=32, person=b"baton.seal.unit").digest())

    @contextmanager
    def _memory(self, count: int) -> Iterator[list[bytearray]]:
        """Buffers, each of the size of a sealed unit."""
        with self._lock:
            taken, self._buffers = self._buffers[:count], self._buffers[count:]
        taken += [bytearray(self._inside.unit_bytes) for _ in range(count - len(taken))]
        yield taken
        with self._lock:
            self._buffers = (self._buffers + taken)[:BUFFERS]


def _seconds(number: int, clock: Callable[[], float]) -> float:
    """What a cipher takes here, the quickest of PROBES."""
    cipher, data, into = CIPHERS[number](bytes(SECRET_BYTES)), bytes(PROBE_BYTES), bytearray(PROBE_BYTES + TAG)
    took = []
    for _ in range(PROBES):
        began = clock()
        cipher.encrypt_into(NONCE, data, None, into)
        took.append(clock() - began)
    return min(took)
