"""What the benchmarks of vLLM run on GPUs, without one: the engines' own defaults, in the memory that there is; and each step by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm_gpu
from shapes import LLAMA_8B, QWEN3_06B, weight_bytes
from vllm_stacks import CPU_KV_MIB, Settings, baton_settings, vllm_flags

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
ON_GPU, ON_CPU = Settings(Path("m"), 2048, device="cuda"), Settings(Path("m"), 2048)


@pytest.mark.parametrize(
    ("devices", "engines", "share"), [("", 1, None), ("", 2, "0.44"), ("0", 4, "0.22"), ("0,1", 2, None), ("0,1", 4, "0.44")]
)
def test_on_a_gpu_engines_have_their_own_defaults_and_share_its_memory(
    devices: str, engines: int, share: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    flags = vllm_flags(ON_GPU, engines)
    assert flags.pop("gpu-memory-utilization", None) == share
    assert flags == {"dtype": "bfloat16", "max-model-len": "2048"}, "no eager mode, no bounds of a laptop"
    ours = baton_settings(ON_GPU, "vllm", engines)
    assert json.loads(ours.pop("engine.vllm")) == ({"gpu_memory_utilization": float(share)} if share else {})
    assert ours == {"model.max_model_len": 2048, "model.dtype": "bfloat16", "engine.device": "cuda"}


def test_on_a_cpu_both_have_the_same_bounds() -> None:
    flags, ours = vllm_flags(ON_CPU, 2), baton_settings(ON_CPU, "vllm", 2)
    assert flags["kv-cache-memory-bytes"] == str(CPU_KV_MIB << 20) and ours["engine.kv_memory_mib"] == CPU_KV_MIB
    assert flags["max-num-batched-tokens"] == str(ours["engine.max_num_batched_tokens"]) and flags["dtype"] == "float32"
    assert "enforce-eager" in flags and json.loads(ours["engine.vllm"]) == {"enforce_eager": True}


@pytest.mark.parametrize(
    ("gib", "gpus", "kept"), [(139, 1, ["0.6b", "8b"]), (78, 1, ["0.6b", "8b"]), (40, 1, ["0.6b"]), (24, 2, ["0.6b", "8b"]), (12, 1, [])]
)
def test_shapes_follow_the_memory_found(gib: int, gpus: int, kept: list[str]) -> None:
    names, out = vllm_gpu.fitting(["0.6b", "8b"], gib * GIB, gpus)
    assert names == kept and set(out) == {"0.6b", "8b"} - set(kept) and all("GiB" in why for why in out.values())


def test_the_shapes_have_the_sizes_that_they_are_called_by() -> None:
    assert weight_bytes(LLAMA_8B) == 2 * 8_030_261_248 and weight_bytes(QWEN3_06B) == 2 * 596_049_920


def test_steps_stop_no_other_and_their_ends_are_written_after_each(tmp_path: Path) -> None:
    report: dict[str, Any] = {}
    code = {"fails": "raise SystemExit(3)", "works": "print('so')", "hangs": "import time; time.sleep(600)", "late": "pass"}
    made = {name: vllm_gpu.Step(("-c", text), {}) for name, text in code.items()}
    assert not vllm_gpu.run_all(made, tmp_path, 5.0, report)
    ends = {name: each["ended"] for name, each in json.loads((tmp_path / "vllm-gpu.json").read_text())["steps"].items()}
    assert ends.pop("hangs").startswith("not done after") and ends == {"fails": 3, "works": 0, "late": "left out: no time"}
    assert (tmp_path / "works.log").read_text() == "so\n"


def test_every_benchmark_step_is_walked_through(tmp_path: Path) -> None:
    """The steps that are tests run by themselves elsewhere."""
    names = ["speed-0.6b", "speed-8b", "divergence", "routing", "faults"]
    command = [sys.executable, str(ROOT / "benchmarks" / "vllm_gpu.py"), "--cpu-smoke", "--out", str(tmp_path), "--only", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "vllm-gpu.json").read_text())
    assert set(report["steps"]) == set(names) and all((tmp_path / f"{name}.log").read_text().startswith("usage: ") for name in names)
    index = json.loads((tmp_path / "models" / "8b" / "model.safetensors.index.json").read_text())
    assert (tmp_path / "models" / "8b" / index["weight_map"]["model.embed_tokens.weight"]).is_file()
