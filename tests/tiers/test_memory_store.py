"""Host memory as a store: what is its own beside the suite of all stores (test_stores.py)."""

import os

import pytest

from baton.tiers.memory_store import MemoryStore


@pytest.mark.parametrize(("unit_bytes", "capacity"), [(0, 1), (4096, 0), (4096, -1)])
def test_no_room_is_refused(unit_bytes: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="no room for a unit"):
        MemoryStore(unit_bytes, capacity)


def test_more_memory_than_the_machine_has_is_refused() -> None:
    pages = os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(ValueError, match="more than this machine has"):
        MemoryStore(os.sysconf("SC_PAGE_SIZE"), pages + 1)


def test_memory_that_nobody_has_touched_costs_nothing() -> None:
    resident = _resident()
    store = MemoryStore(1 << 20, 256)
    assert _resident() - resident < 64 << 20
    store.close()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
