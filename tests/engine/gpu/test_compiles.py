"""The interpreter accepts more than the compiler, so every kernel is also compiled for a real device, which need not be present."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
MOST_SHARED = 227 << 10  # bytes that a program may use on compute capability 9.0


@pytest.mark.timeout(1800)  # half a minute on two quiet cores
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / "compile_kernels.py"), "90"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1790)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = json.loads(done.stdout)
    kernels = {
        line.split("(")[0][4:] for path in (HERE.parents[2] / "baton" / "engine" / "gpu").glob("triton_*.py") for line in launched(path)
    }
    assert set(shared) == kernels
    assert max(shared.values()) <= MOST_SHARED


def launched(path: Path) -> list[str]:
    """Definitions of the kernels in a file; functions that kernels call are compiled with them."""
    return [line for line in path.read_text().splitlines() if line.startswith("def _") and "_kernel(" in line]
