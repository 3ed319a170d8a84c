"""`benchmarks/gpu.py` from end to end, with toy shapes on the CPU: every section runs, and it reports a missing device."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.model.checkpoint import expected_tensors

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
    assert list(found["sections"]) == [
        "ceilings",
        "g1",
        "load",
        "profile",
        *(f"g{i}" for i in (2, 3, 4, 5, 6, 7, 8, 13, 9, 10, 11, 14, 12)),
    ]
    assert all(ratio < 1.5 for cell in found["sections"]["g1"].values() for ratio in cell["error over transformers'"])
    assert all(cell["same"] for cell in found["sections"]["g7"].values())
    assert all(cell["as plain torch"] == 1 for cell in found["sections"]["g9"].values())
    pair = found["sections"]["g12"]
    assert pair["way"] == "tcp" and all(cell["same tokens"] and cell["same logprobs"] for cell in pair["prompts"].values())
    assert all(cell["handoff"]["digests_checked"] == cell["handoff"]["blocks"] > 0 for cell in pair["prompts"].values())
    assert {who: gaps["prompts"] > 0 for who, gaps in pair["beside prompts"].items()} == {"two processes": True, "one": True}
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


@pytest.mark.system
def test_what_a_worker_does_is_measured_and_then_predicted(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu_predict.py"), str(tmp_path / "found.json")]
    for step in (("--cpu-smoke",), ("--predict", "--draws", "2")):
        done = subprocess.run([*script, *step], capture_output=True, text=True, env=ENVIRONMENT, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [*found["parts"]] == ["whole", "checkpoint", "start", "warm", "profile", "chat", "shared prefixes"] and not found["left out"]
    assert all("failed" not in part for part in found["parts"].values())
    assert found["cases"]["shared prefixes"]["measured"]["hit rate"] > 0.3
    for cell in found["cases"].values():
        assert cell["measured"]["TTFT P50 (ms)"] > 0 and not cell["failures"] and len(cell["each"]) > cell["counted"] > 0
        assert all(low <= value <= high for told in cell["predicted"].values() for value, low, high in told.values())
        assert "nothing was measured" in cell["doubts"]["sheet"][-1] and not cell["doubts"]["fit"]
    judged = {by: "TTFT P50 (ms)" in each["errors"] for by, each in found["judged"].items()}
    sound = not all(cell["void"] for cell in found["cases"].values())
    assert judged == dict.fromkeys(("sheet", "fit"), sound), "a machine too busy to send on time says nothing"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_the_benchmark_reports_a_missing_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu

    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path)])
    assert gpu.main() == 2 and "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gib", "small", "batches", "decodes"),
    [(139, False, 8, 32), (78, False, 6, 32), (44, False, 5, 32), (24, True, 3, 32), (16, True, 3, 16)],
)
def test_what_is_measured_follows_the_memory_found(gib: int, small: bool, batches: int, decodes: int) -> None:
    """Free memory of an H200, an H100, an L40S, an A10 and a T4, and the KV of everything that is kept."""
    import gpu
    from shapes import QWEN3_06B

    sizes, left_out = gpu.fitting(gpu.H200, gib * 2**30)
    assert (sizes.model is QWEN3_06B, len(sizes.batches), sizes.interference[0]) == (small, batches, decodes), left_out
    kinds = ("batches", "prefills", "contexts", "handoffs")
    assert len(left_out) == small + sum(len(getattr(gpu.H200, kind)) - len(getattr(sizes, kind)) for kind in kinds)
    shapes = expected_tensors(gpu.config_of(sizes.model)).values()
    weights = 2 * sum(int(math.prod(shape)) for shape in shapes)
    for batch, context in (*sizes.batches, *((1, n) for n in (*sizes.contexts, *sizes.prefills)), *((2, n) for n in sizes.handoffs)):
        assert weights + batch * context * gpu.token_bytes(sizes.model, 2) + gpu.RESERVE <= gib * 2**30


def test_two_processes_get_a_model_that_the_device_holds_twice() -> None:
    import gpu_pair
    from shapes import LLAMA_8B, QWEN3_06B

    for gib, raw in ((139, LLAMA_8B), (78, LLAMA_8B), (24, QWEN3_06B)):
        assert gpu_pair.fitting(gpu_pair.DEVICE, gib * 2**30, 64 * 2**30) is raw
    assert gpu_pair.fitting(gpu_pair.DEVICE, 139 * 2**30, 20 * 2**30) is QWEN3_06B, "the disk holds no larger one"
    with pytest.raises(MemoryError, match=r"14\.0 GiB of device memory"):
        gpu_pair.fitting(gpu_pair.DEVICE, 14 * 2**30, 64 * 2**30)


def test_tokens_that_differ_and_kv_that_went_another_way_are_said() -> None:
    from gpu_pair import Answer, wrong

    moved = {"transport": "cuda_ipc", "blocks": 3, "digests_checked": 3, "failure": ""}
    none = {"transport": "", "blocks": 0, "digests_checked": 0, "failure": ""}

    def answer(handoff: dict[str, object], *tokens: int) -> Answer:
        return Answer(tokens, (), handoff, 0.0, ())

    assert not wrong([answer(moved, 1, 2)], [answer(none, 1, 2)], "cuda_ipc")
    assert wrong([answer(moved, 1, 2)], [answer(none, 1, 3)], "cuda_ipc") == ["tokens differ from number 1 on"]
    for other in ({"transport": "tcp"}, {"digests_checked": 2}, {"failure": "lost"}, {"blocks": 0, "digests_checked": 0}):
        [said] = wrong([answer({**moved, **other}, 1, 2)], [answer(none, 1, 2)], "cuda_ipc")
        assert said.startswith("KV was not handed over by cuda_ipc")
    assert wrong([answer(moved, 1)], [answer(moved, 1)], "cuda_ipc") == ["the one process handed KV over"]


def test_too_little_memory_is_said() -> None:
    import gpu

    with pytest.raises(MemoryError, match=r"8\.0 GiB of device memory hold neither model"):
        gpu.fitting(gpu.H200, 8 * 2**30)


def test_a_section_that_fails_stops_no_other_and_what_was_found_is_kept(tmp_path: Path) -> None:
    """`load` fails: the big model's sections say why, the rest runs, and the file has all of it."""
    arguments = ["gpu.py", str(tmp_path), "--cpu-smoke", "--only", "g2,g9"]
    env = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "TRITON_INTERPRET": "1"}
    code = f"import sys; sys.argv = {arguments!r}; import gpu; gpu.big_runner = None; sys.exit(gpu.main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert list(found) == ["ceilings", "load", "g2", "g9"] and "as plain torch" in found["g9"]["greedy"]
    assert "NoneType" in found["load"]["failed"] and "`load` failed" in found["g2"]["failed"]


def test_a_part_of_the_section_on_tiers_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu
    import gpu_tiers

    def fails(*_: object) -> dict[str, int]:
        raise TimeoutError("nobody told saved")

    report, kept = gpu.Report(), list[set[str]]()
    report.write = lambda: kept.append(set(report.sections["g13"]))
    monkeypatch.setattr(gpu_tiers, "round_trip", fails)
    monkeypatch.setattr(gpu_tiers, "beside", lambda *_: {"p50": 1})
    monkeypatch.setattr(gpu_tiers, "returning", lambda *_: {"loaded": 2})
    runner: Any = SimpleNamespace(layout=SimpleNamespace(block_size=16), pool=SimpleNamespace(num_blocks=40))
    machine: Any = SimpleNamespace(sizes=gpu.WALK, cuda=False)
    found = gpu_tiers.measure(machine, report, runner)
    assert found["beside decodes"] == {"p50": 1} and found["returning prompt"] == {"loaded": 2}
    assert "round trip: " in found["failed"] and "nobody told saved" in found["failed"], "so that the run has not succeeded"
    assert kept == [{"failed"}, {"failed", "beside decodes"}, {"failed", "beside decodes", "returning prompt"}], "as each part ends"
