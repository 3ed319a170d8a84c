"""Answers that are kept: who can read them, for how long, and what happens without the store."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_answers import MemoryAnswers

from baton.cluster.registry import RegistryUnavailable
from router.kept import AGAIN_S, AT_ONCE_BYTES, Kept, Unreachable, seal, unseal

KEY = b"k" * 32
VALUE = b"\x00 an answer \xff"


def kept(store: MemoryAnswers, clock: list[float] | None = None, key: bytes = KEY, most: int = 1 << 20) -> Kept:
    now = clock or [0.0]
    return Kept(store, key, 60, most, lambda: now[0], lambda: 1_000_000 + now[0])


async def test_any_router_of_the_cluster_finds_what_another_has_kept() -> None:
    store = MemoryAnswers()
    assert await kept(store).put("one", "resp_1", VALUE)
    assert await kept(store).get("one", "resp_1") == VALUE
    assert await kept(store).delete("one", "resp_1")
    assert await kept(store).get("one", "resp_1") is None and not await kept(store).delete("one", "resp_1")


async def test_no_other_tenant_no_other_id_and_no_other_cluster_finds_it() -> None:
    store = MemoryAnswers()
    assert await kept(store).put("one", "resp_1", VALUE)
    assert await kept(store).get("other", "resp_1") is None
    assert await kept(store).get("one", "resp_2") is None
    assert await kept(store, key=b"o" * 32).get("one", "resp_1") is None
    assert not await kept(store).delete("other", "resp_1") and store.kept


@pytest.mark.parametrize(("tenant", "id_"), [("other", "resp_1"), ("one", "resp_2"), ("onere", "sp_1"), ("", "oneresp_1")])
def test_a_record_that_was_moved_is_none(tenant: str, id_: str) -> None:
    """Whoever can write to Redis could copy a record to the name of another: the seal names its place."""
    sealed = seal(VALUE, KEY, "one", "resp_1", 100)
    assert unseal(sealed, KEY, "one", "resp_1", 50) == VALUE
    assert unseal(sealed, KEY, tenant, id_, 50) is None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_record_that_was_altered_is_none(data: st.DataObject) -> None:
    sealed = seal(VALUE, KEY, "one", "resp_1", 100)
    at = data.draw(st.integers(0, len(sealed) - 1))
    altered = bytearray(sealed)
    altered[at] ^= data.draw(st.integers(1, 255))
    for wrong in (bytes(altered), sealed[:at], sealed + b"x"):
        assert unseal(wrong, KEY, "one", "resp_1", 50) is None


async def test_a_record_expires_even_if_the_store_forgets_to_drop_it() -> None:
    clock, store = [0.0], MemoryAnswers()
    assert await kept(store, clock).put("one", "resp_1", VALUE)
    clock[0] = 59.0
    assert await kept(store, clock).get("one", "resp_1") == VALUE
    clock[0] = 60.0
    assert await kept(store, clock).get("one", "resp_1") is None


async def test_a_record_is_bounded() -> None:
    store = MemoryAnswers()
    assert not await kept(store, most=100).put("one", "resp_1", b"x" * 100) and not store.kept
    long = b"x" * 4 * AT_ONCE_BYTES
    assert await kept(store).put("one", "resp_1", long) and await kept(store).get("one", "resp_1") == long
    assert await kept(store, most=100).get("one", "resp_1") is None, "a record of a router with another bound"


async def test_a_store_that_is_away_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, store = [0.0], MemoryAnswers(away=True)
    one = kept(store, clock)
    for _ in range(5):
        assert not await one.put("one", "resp_1", VALUE)
        clock[0] += AGAIN_S
    assert store.asked == 5 and len(caplog.records) == 1
    store.away = False
    assert await one.put("one", "resp_1", VALUE)
    store.away = True
    assert not await one.put("one", "resp_1", VALUE) and len(caplog.records) == 2


async def test_a_store_that_is_away_is_not_asked_again_for_a_moment() -> None:
    clock, store = [0.0], MemoryAnswers(away=True)
    one = kept(store, clock)
    assert not await one.put("one", "resp_1", VALUE)
    for call in (one.get, one.delete):
        with pytest.raises(Unreachable):
            await call("one", "resp_1")
    assert not await one.put("one", "resp_1", VALUE) and store.asked == 1
    clock[0], store.away = AGAIN_S, False
    assert await one.put("one", "resp_1", VALUE) and await one.get("one", "resp_1") == VALUE
    store.away = True
    with pytest.raises(Unreachable):
        await one.get("one", "resp_1")
    with pytest.raises(RegistryUnavailable):
        await store.get("x")
