"""Memory as a processor reads it: in lines and pages."""

import ctypes
import mmap
import sys
import threading
from contextlib import suppress
from typing import TypeVar

LINE = 64  # bytes of a cache line
HUGE_PAGE = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14
Memory = TypeVar("Memory", bound=mmap.mmap)


def in_huge_pages(memory: Memory) -> Memory:
    """The same memory, in huge pages where the system has them: a processor then looks up fewer addresses."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Backing:
    """Has the system find pages for memory before somebody touches it, from the front on. A system clears each page that it gives, and a
    virtual machine may have to ask its host for it: that took 5 ms for 2 MiB on a cloud's machine, a third of a small model's prompt."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        """`address`: of its first byte."""
        self._memory, self._address = memory, address  # kept, since the thread writes there
        self._backed = 0 if sys.platform == "linux" and len(memory) > HUGE_PAGE else len(memory)
        self._thread: threading.Thread | None = None

    def reach(self, end: int) -> None:
        """Bytes up to `end` will be used soon. Returns at once. One caller at a time."""
        if end <= self._backed or self._backed == len(self._memory) or (self._thread is not None and self._thread.is_alive()):
            return
        begin, self._backed = self._backed, min(len(self._memory), -(-end // HUGE_PAGE) * HUGE_PAGE)
        self._thread = threading.Thread(target=self._back, args=(begin, self._backed), name="backing", daemon=True)
        self._thread.start()

    def _back(self, begin: int, end: int) -> None:
        """An old kernel refuses, and memory that is not there is told when somebody writes to it: nothing is lost."""
        madvise = ctypes.CDLL(None).madvise  # it does not keep the interpreter's lock, as `mmap.madvise` does
        for at in range(begin, end, HUGE_PAGE):
            if madvise(ctypes.c_void_p(self._address + at), ctypes.c_size_t(min(HUGE_PAGE, end - at)), MADV_POPULATE_WRITE):
                return
