"""Memory as a processor reads it: in lines and pages."""

import mmap
from contextlib import suppress
from typing import TypeVar

LINE = 64  # bytes of a cache line
Memory = TypeVar("Memory", bound=mmap.mmap)


def in_huge_pages(memory: Memory) -> Memory:
    """The same memory, in huge pages where the system has them: a processor then looks up fewer addresses."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
