"""Encryption at rest: nothing readable reaches the store inside, and only what this key sealed for this block key is given back."""

from dataclasses import replace
from pathlib import Path

import pytest
from store_benches import CAPACITY, KIND, SECRET, UNIT, content, get, held, key, put
from xxhash import xxh3_128_digest

from baton.tiers.disk_store import DiskStore
from baton.tiers.memory_store import MemoryStore
from baton.tiers.sealed_store import CIPHERS, SEAL_BYTES, SealedStore, read_secret, seal_name
from baton.tiers.store import Unit, Wanted

OTHER = bytes(32)


def inside() -> MemoryStore:
    return MemoryStore(UNIT + SEAL_BYTES, CAPACITY)


def stored(store: MemoryStore, number: int) -> bytearray:
    data = bytearray(store.unit_bytes)
    assert store.get([Wanted(key(number), memoryview(data))]) == [True]
    return data


def replaced(store: MemoryStore, number: int, data: bytes | bytearray) -> None:
    """By somebody who can write to the medium: its digest is right."""
    store.drop([key(number)])
    store.put([Unit(key(number), xxh3_128_digest(data), memoryview(data))])


def on_disk(folder: Path, secret: bytes) -> SealedStore:
    kind = replace(KIND, unit_bytes=UNIT + SEAL_BYTES, seal=seal_name(secret))
    return SealedStore(DiskStore(folder, kind, CAPACITY), secret)


def test_nothing_readable_is_stored_and_nothing_twice(tmp_path: Path) -> None:
    store = on_disk(tmp_path / "kv", SECRET)
    put(store, 1)
    store.drop([key(1)])
    put(store, 2, 1)
    store.close()
    for path in (tmp_path / "kv").iterdir():
        data = path.read_bytes()
        for number in (1, 2):
            assert content(number)[:16] not in data and xxh3_128_digest(content(number)) not in data and SECRET not in data


def test_the_same_unit_is_never_the_same_twice() -> None:
    memory = inside()
    store = SealedStore(memory, SECRET)
    put(store, 1)
    first = stored(memory, 1)
    store.drop([key(1)])
    put(store, 1)
    assert stored(memory, 1) != first and get(store, 1) == [True]


@pytest.mark.parametrize("cipher", CIPHERS)
def test_every_cipher_is_read_whichever_writes_now(cipher: int) -> None:
    memory = inside()
    writer = SealedStore(memory, SECRET)
    writer.cipher = cipher
    put(writer, 1)
    assert stored(memory, 1)[0] == cipher and get(SealedStore(memory, SECRET), 1) == [True]


def test_the_quicker_cipher_is_chosen() -> None:
    ticks = iter([0.0, 2.0] * 4 + [0.0, 1.0] * 4)
    assert SealedStore(inside(), SECRET, clock=lambda: next(ticks)).cipher == 2


@pytest.mark.parametrize("place", [0, 1, 15, 16, 40, UNIT, -1])
def test_whatever_is_altered_does_not_open(place: int) -> None:
    memory = inside()
    store = SealedStore(memory, SECRET)
    put(store, 1, 2)
    data = stored(memory, 1)
    data[place] ^= 1
    replaced(memory, 1, data)
    assert get(store, 1, 2) == [False, True] and held(store, range(4)) == [2]


def test_truncated_and_exchanged_units_do_not_open() -> None:
    memory = inside()
    store = SealedStore(memory, SECRET)
    put(store, 1, 2, 3)
    one, two, three = (stored(memory, n) for n in (1, 2, 3))
    replaced(memory, 1, two)
    replaced(memory, 2, one)
    replaced(memory, 3, three[: UNIT // 2] + bytes(len(three) - UNIT // 2))
    assert get(store, 1, 2, 3) == [False] * 3 and store.keys() == []


def test_a_unit_that_was_replaced_by_an_older_one_of_its_own_opens() -> None:
    """Negative control of those above: `replaced` alone is not what is found."""
    memory = inside()
    store = SealedStore(memory, SECRET)
    put(store, 1)
    replaced(memory, 1, stored(memory, 1))
    assert get(store, 1) == [True]


def test_a_wrong_key_opens_nothing() -> None:
    memory = inside()
    put(SealedStore(memory, SECRET), 1)
    assert get(SealedStore(memory, OTHER), 1) == [False]


def test_a_wrong_key_is_refused_before_anything_is_lost(tmp_path: Path) -> None:
    store = on_disk(tmp_path / "kv", SECRET)
    put(store, 1)
    store.close()
    with pytest.raises(
        ValueError, match=f"encrypted with the key {seal_name(SECRET)}, and the store encrypted with the key {seal_name(OTHER)}"
    ):
        on_disk(tmp_path / "kv", OTHER)
    with pytest.raises(ValueError, match="not encrypted"):
        DiskStore(tmp_path / "kv", KIND, CAPACITY)
    again = on_disk(tmp_path / "kv", SECRET)
    assert get(again, 1) == [True]
    again.close()


def test_a_key_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET.hex() + "\n")
    assert read_secret(path) == SECRET and seal_name(SECRET) not in SECRET.hex()


@pytest.mark.parametrize(
    "text", [b"", SECRET, SECRET.hex()[:-2].encode(), (SECRET.hex() + "00").encode(), b"x" * 64, (SECRET.hex()[:-1] + " ").encode() * 2]
)
def test_what_is_no_key_is_refused_and_not_printed(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=str(path)) as refused:
        read_secret(path)
    assert "openssl rand -hex 32" in str(refused.value) or "cannot be read" in str(refused.value)
    assert SECRET.hex()[:16] not in str(refused.value)


def test_a_key_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing cannot be read as a key"):
        read_secret(tmp_path / "nothing")
    with pytest.raises(ValueError, match="32 bytes, not 16"):
        SealedStore(inside(), bytes(16))
