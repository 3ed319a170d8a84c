"""Settings of the C library's allocator."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_memory() -> None:
    """Makes glibc keep freed memory, for the whole process. Fresh pages for every large tensor cost up to a third of a step on a CPU."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
