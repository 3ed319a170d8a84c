"""`benchmarks/gpu.py` from end to end, with toy shapes on the CPU: every section runs, and it reports a missing device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.timeout(1800)  # half a minute on two quiet cores
def test_every_section_of_the_benchmark_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SCRIPT, str(tmp_path), "--cpu-smoke", "--profile"], capture_output=True, text=True, env=ENVIRONMENT, timeout=1790
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["sections"]) == ["ceilings", "g1", "load", "profile", *(f"g{i}" for i in (2, 3, 4, 5, 6, 7, 8, 9, 11))]
    assert all(ratio < 1.5 for cell in found["sections"]["g1"].values() for ratio in cell["error over transformers'"])
    assert all(cell["same"] for cell in found["sections"]["g7"].values())
    assert all(cell["as plain torch"] == 1 for cell in found["sections"]["g9"].values())
    assert found["costs"] and all(cost["seconds"] > 0 for cost in found["costs"])
    assert (tmp_path / "decode.txt").read_text()


def test_the_benchmark_of_links_compares_every_byte(tmp_path: Path) -> None:
    """Between host pools; cuda_ipc needs a device."""
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu_link.py"), str(tmp_path / "link.json")]
    run = [*script, "--kinds", "nixl", "--gib", "0.1", "--repeats", "1"]
    done = subprocess.run(run, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    cell = json.loads((tmp_path / "link.json").read_text())["nixl"]["512"]
    assert cell["wrong"] == 0 and cell["seconds"] > 0 and cell["copy GB/s"] > cell["with digests GB/s"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_the_benchmark_reports_a_missing_device(tmp_path: Path) -> None:
    done = subprocess.run([*SCRIPT, str(tmp_path)], capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
