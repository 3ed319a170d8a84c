"""Where large tensors live: settings of the C library's allocator, and weights in huge pages."""

import ctypes
import mmap
import threading
import weakref
from math import prod

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.pages import LINE, in_huge_pages

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
LARGE = 1 << 20  # bytes from which glibc maps memory of its own for an allocation
REGION = 64 << 20  # bytes of address space; only what is used of it becomes memory


class _Region(mmap.mmap):
    """Private zeroed memory, given out from the front and never twice."""

    used = 0


_newest: "weakref.ref[_Region] | None" = None  # the tensors in a region keep it alive
_giving = threading.Lock()


def return_memory() -> None:
    """Makes glibc return freed memory at once if it is large, for the whole process: loading needs much memory for moments. By default,
    glibc learns from these moments to keep such memory, in pieces that nothing else fits into."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 1 << 16)
        libc.mallopt(_M_MMAP_THRESHOLD, LARGE)


def keep_memory() -> None:
    """Makes glibc keep memory that is freed from now on, for the whole process. Fresh pages for every large tensor cost up to a third of a
    step on a CPU."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for weights, which every step reads: close together, and in huge pages."""
    global _newest
    size = prod(shape) * dtype.itemsize
    with _giving:
        region = _newest() if _newest else None
        if region is None or region.used + size > len(region):
            region = in_huge_pages(_Region(-1, max(size, REGION), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            _newest = weakref.ref(region)
        start = region.used
        region.used += size + -size % LINE
    return torch.from_numpy(np.frombuffer(region, np.uint8, size, start)).view(dtype).view(shape)
