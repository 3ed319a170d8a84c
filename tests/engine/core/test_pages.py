"""Memory gets its pages before it is used, and keeps what is in it."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from baton.engine.core.pages import HUGE_PAGE, Backing, in_huge_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems find pages at the first touch")
SIZE = 8 * HUGE_PAGE


def mapped() -> tuple[mmap.mmap, int]:
    memory = in_huge_pages(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def there(address: int) -> list[bool]:
    """Of each piece of HUGE_PAGE bytes whether its first page is in memory (the top bit of an entry of pagemap; Linux,
    admin-guide/mm/pagemap)."""
    with Path("/proc/self/pagemap").open("rb") as file:
        found = []
        for at in range(address, address + SIZE, HUGE_PAGE):
            file.seek(at // mmap.PAGESIZE * 8)
            found.append(bool(int.from_bytes(file.read(8), sys.byteorder) >> 63))
        return found


def ended(backing: Backing) -> None:
    assert backing._thread is not None
    backing._thread.join(20)
    assert not backing._thread.is_alive()


def test_pages_are_there_before_anybody_touches_them() -> None:
    memory, address = mapped()
    backing = Backing(memory, address)
    assert not any(there(address)), "negative control"
    backing.reach(2 * HUGE_PAGE + 1)
    ended(backing)
    assert all(there(address)[:3]) and not any(there(address)[4:]), "no further than to the end of a page, wherever these begin"
    assert not any(memory[: 3 * HUGE_PAGE])


def test_what_was_written_stays() -> None:
    memory, address = mapped()
    memory[5 : 5 + 3] = b"abc"
    backing = Backing(memory, address)
    backing.reach(SIZE)
    ended(backing)
    assert all(there(address)) and memory[4:9] == b"\0abc\0"


def test_what_is_there_is_not_asked_for_again() -> None:
    memory, address = mapped()
    backing = Backing(memory, address)
    backing.reach(0)
    assert backing._thread is None
    backing.reach(1)
    ended(backing)
    before = backing._thread
    backing.reach(HUGE_PAGE)
    assert backing._thread is before
    backing.reach(HUGE_PAGE + 1)
    assert backing._thread is not before
    ended(backing)


def test_small_memory_is_left_alone() -> None:
    memory = mmap.mmap(-1, HUGE_PAGE)
    backing = Backing(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    backing.reach(HUGE_PAGE)
    assert backing._thread is None
