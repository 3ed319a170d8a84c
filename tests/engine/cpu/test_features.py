"""AMX is used where Linux lets a process use it, and nowhere else."""

import platform
import subprocess
import sys

import pytest

from baton.engine.cpu.features import AMX, features

TILED = {"avx512f": True, **dict.fromkeys(AMX, True)}


@pytest.mark.parametrize(("allowed", "left"), [(True, {"avx512f", *AMX}), (False, {"avx512f"})])
def test_amx_needs_the_permission_of_linux(allowed: bool, left: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: TILED)
    monkeypatch.setattr("numba.config.CPU_NAME", None)
    monkeypatch.setattr("baton.engine.cpu.features._may_use_tiles", lambda: allowed)
    assert features() == left


def test_half_of_amx_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {**TILED, "amx-int8": False})
    monkeypatch.setattr("numba.config.CPU_NAME", None)
    monkeypatch.setattr("baton.engine.cpu.features._may_use_tiles", lambda: pytest.fail("nothing is asked for"))
    assert features() == {"avx512f"}


@pytest.mark.parametrize(("here", "allowed", "amx"), [(True, True, True), (True, False, False), (False, False, True)])
def test_kernels_for_amx_are_compiled_on_processors_without_it(
    here: bool, allowed: bool, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an image is built."""
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: TILED if here else {"avx512f": True})
    monkeypatch.setattr("numba.config.CPU_NAME", "x86-64-v4")
    monkeypatch.setattr("numba.config.CPU_FEATURES", ",".join(f"+{name}" for name in sorted(AMX)))
    monkeypatch.setattr("baton.engine.cpu.features._may_use_tiles", lambda: allowed)
    assert (features() >= AMX) == amx


REFUSED = """
import ctypes, sys
class Refusing(ctypes.CDLL):
    def __getattr__(self, name):
        return (lambda *given: -1) if name == "syscall" else super().__getattr__(name)
usual, ctypes.CDLL = ctypes.CDLL, Refusing
from baton.engine.cpu import features, kernel_cache as kept
refused = kept.key_of(kept.OWN)
features.FEATURES |= features.AMX
print(features.AMX <= features.features(), refused != kept.key_of(kept.OWN))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_a_refusal_leaves_kernels_of_their_own() -> None:
    """Kernels that were compiled with AMX are not loaded by a process that may not use it."""
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True"]
