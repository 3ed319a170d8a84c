"""What this processor can do, and for what the kernels are compiled."""

import ctypes
import platform

import llvmlite
import numba
from llvmlite import binding
from numba import config

FAMILIES = {"x86-64-v3": {"avx2", "fma"}, "x86-64-v4": {"avx2", "fma", "avx512f", "avx512bw", "avx512vl"}}
AMX = {"amx-tile", "amx-bf16", "amx-int8"}
ARCH_PRCTL, REQUEST_PERMISSION, TILES = 158, 0x1023, 18  # of Linux on x86-64


def features() -> set[str]:
    """What the processor can do that Numba compiles for. Where the processor has AMX, it counts only if Linux lets this process use it."""
    here = {name for name, there in binding.get_host_cpu_features().items() if there}
    found = here
    if config.CPU_NAME not in (None, "host"):
        given = (config.CPU_FEATURES or "").split(",")
        found = FAMILIES.get(config.CPU_NAME, set()) | {name.removeprefix("+") for name in given if name.startswith("+")}
    usable = found >= AMX and (_may_use_tiles() or not here >= AMX)  # or compiled for another processor
    return found if usable else found - AMX


def compiler() -> tuple[str, str]:
    """The versions of Numba and llvmlite."""
    return numba.__version__, llvmlite.__version__


def host() -> tuple[str, list[str], list[str]]:
    """This processor: its name and features, and the features that the kernels are compiled for."""
    return binding.get_host_cpu_name(), sorted(name for name, there in binding.get_host_cpu_features().items() if there), sorted(FEATURES)


def target() -> str:
    """The processor for which kernels are compiled: with another, LLVM may add in another order."""
    return str(binding.get_host_cpu_name() if config.CPU_NAME in (None, "host") else config.CPU_NAME)


def _may_use_tiles() -> bool:
    """Asks for the permission, for all threads of this process (since Linux 5.16, which then has 8 KiB more to save for each thread)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILES) == 0)


FEATURES = features()
