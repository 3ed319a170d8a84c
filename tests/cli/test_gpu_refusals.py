"""What `baton up`, and a worker that is started by hand, say of GPUs that cannot be used as asked: one sentence, by name, and an exit
status, before anything starts. NVML is replaced at its own boundary; the rest is what runs."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml, FakeSlice, alike
from typer.testing import CliRunner

from baton.cli import up
from baton.cli.main import app
from baton.cli.up import SHIPPED
from baton.cluster import device
from baton.cluster.config import Config
from baton.cluster.lifecycle import CANNOT
from baton.launch import preflight

FAILED, INVALID = 1, 2  # exit statuses
CUDA = ("--engine.device", "cuda")
A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
SLICED = FakeNvml([FakeGpu("GPU-1", A100, mig=True, slices=[FakeSlice("MIG-a"), FakeSlice("MIG-b")])])


@dataclass(frozen=True)
class Case:
    nvml: FakeNvml
    flags: tuple[str, ...]
    said: str  # in this order, with anything between its parts (…)
    env: dict[str, str] = field(default_factory=dict)
    torch: str = "13.0"
    missing: str = ""  # package
    status: int = FAILED


CASES = {
    "no device": Case(FakeNvml(), CUDA, "engine.device cuda: the NVIDIA driver finds no GPU here; set engine.device to cpu"),
    "no driver": Case(FakeNvml(fails=12), CUDA, "engine.device cuda: there is no NVIDIA driver here…; set engine.device to cpu"),
    "driver not loaded": Case(FakeNvml(fails=9), CUDA, "engine.device cuda: …is installed but not loaded: …; set engine.device to cpu"),
    "driver updated while it ran": Case(FakeNvml(fails=18), CUDA, "engine.device cuda: …: restart the machine…"),
    "driver too old": Case(
        FakeNvml(alike(2).gpus, cuda=12080),
        (),
        "engine.device auto: the NVIDIA driver 580.95.05 is too old: it runs CUDA 12.8…: install a newer driver…; or set engine.device…",
    ),
    "torch for CPUs": Case(alike(2), CUDA, "engine.device cuda: this torch is built for CPUs alone; …", torch="cpu"),
    "a GPU that is lost": Case(
        FakeNvml([FakeGpu("GPU-1", fails=15)]), (), "no GPU can be used: GPU 0: the GPU does not answer any more: reset it…"
    ),
    "fewer than asked": Case(
        alike(1),
        (),
        "engine.device cuda: 2 workers need 2 GPUs (prefill: 1 x 1, decode: 1 x 1), and 1 can be used here…: 1 too few…--prefill.gpus 0.5…",
    ),
    "fewer than ranks": Case(
        alike(3),
        ("--engine.kind", "vllm", "--engine.vllm", "{tensor_parallel_size: 2}"),
        "2 workers need 4 GPUs (prefill: 1 x 2, decode: 1 x 2)…: 1 too few…",
    ),
    "fewer than asked, under Ray": Case(alike(1), ("--launcher.kind", "ray"), "2 workers need 2 GPUs…: 1 too few…"),
    "a full GPU": Case(
        FakeNvml([FakeGpu("GPU-1"), FakeGpu("GPU-2", used=80 * GIB)]),
        (),
        "2 workers need 2 GPUs…; GPU 1 (NVIDIA H100 80GB HBM3) is full: 0.0 of 80.0 GiB are free: 1 too few…",
    ),
    "MIG mode without slices": Case(
        FakeNvml([FakeGpu("GPU-1", mig=True)]), (), "no GPU can be used: GPU 0 (NVIDIA H100 80GB HBM3): it is in MIG mode without slices: …"
    ),
    "fewer slices": Case(
        SLICED,
        ("--decode.replicas", "2"),
        "3 workers need 3 GPUs…, and 2 can be used here (a slice of GPU 0 …, a slice of GPU 0 …): 1 too few…",
    ),
    "several slices for one": Case(
        SLICED,
        ("--prefill.replicas", "0", "--decode.gpus", "2"),
        "1 worker needs 2 GPUs…: a process can use one slice of a GPU in MIG mode, not several…",
    ),
    "unlike GPUs in a pool": Case(
        FakeNvml([FakeGpu("GPU-1", A100), FakeGpu("GPU-2", H100), FakeGpu("GPU-3", "NVIDIA L4")]),
        ("--decode.replicas", "2"),
        "3 workers need 3 GPUs…: there are not enough of one kind for each pool…",
    ),
    "unlike GPUs under Ray": Case(
        FakeNvml([FakeGpu("GPU-1", A100), FakeGpu("GPU-2", H100)]),
        ("--launcher.kind", "ray"),
        "launcher.kind ray cannot tell unlike GPUs apart: …",
    ),
    "unlike GPUs by number": Case(
        FakeNvml([FakeGpu("GPU-1", A100), FakeGpu("GPU-2", H100)]),
        (),
        "CUDA_VISIBLE_DEVICES=0: this host has unlike GPUs…by UUID…",
        {"CUDA_VISIBLE_DEVICES": "0"},
    ),
    "hidden": Case(alike(2), CUDA, "engine.device cuda: CUDA_VISIBLE_DEVICES= hides every GPU; …", {"CUDA_VISIBLE_DEVICES": ""}),
    "a number of nothing": Case(
        alike(2), (), "CUDA_VISIBLE_DEVICES=0,7: there is no device 7 here; there are: GPU 0 …", {"CUDA_VISIBLE_DEVICES": "0,7"}
    ),
    "a name of nothing": Case(
        alike(2), (), "CUDA_VISIBLE_DEVICES=GPU-9: there is no device GPU-9 here; …", {"CUDA_VISIBLE_DEVICES": "GPU-9"}
    ),
    "a name of several": Case(
        alike(2), (), "CUDA_VISIBLE_DEVICES=GPU-: the names of several devices begin with GPU-", {"CUDA_VISIBLE_DEVICES": "GPU-"}
    ),
    "no vLLM": Case(
        alike(2), ("--engine.kind", "vllm"), "engine.kind vllm: the package vllm is not installed here: pip install…", missing="vllm"
    ),
    "no FlashInfer": Case(
        alike(2),
        ("--engine.attention-backend", "flashinfer"),
        "engine.attention_backend flashinfer: the package flashinfer is not installed here: pip install…",
        missing="flashinfer",
    ),
    "no flash-attn": Case(
        alike(2),
        ("--engine.attention-backend", "flash_attn"),
        "engine.attention_backend flash_attn: the package flash_attn is not installed here: …",
        missing="flash_attn",
    ),
    "no NIXL": Case(
        alike(2),
        ("--kv.transport", "nixl"),
        "kv.transport nixl: the package nixl_cu13 is not installed here: pip install…",
        missing="nixl_cu13",
    ),
    "GPUs for a CPU": Case(
        alike(2), ("--engine.device", "cpu", "--decode.gpus", "1"), "decode.gpus 1: engine.device is cpu, which uses none", status=INVALID
    ),
    "no GPU for a worker": Case(
        alike(2), (*CUDA, "--decode.gpus", "0"), "decode.gpus 0: with engine.device cuda each worker needs a GPU…", status=INVALID
    ),
    "one GPU and a half": Case(
        alike(2),
        ("--decode.gpus", "1.5"),
        "gpus must be a whole number, or less than 1…decode.gpus from flag --decode.gpus…",
        status=INVALID,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_says_what_is_wrong_and_nothing_starts(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case, began = CASES[name], []
    monkeypatch.setitem(sys.modules, "pynvml", case.nvml)
    monkeypatch.setattr(device, "torch_build", lambda: case.torch)
    monkeypatch.setattr(device, "driver_count", lambda: 0)
    monkeypatch.setattr(preflight, "_installed", lambda module: module != case.missing)
    monkeypatch.setattr(up, "_run", lambda *given: began.append(given))
    env = {"BATON_STATE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_ORDER": None, **case.env}
    done = CliRunner(env=env).invoke(app, ["up", *case.flags])
    assert done.exit_code == case.status and not began and done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    rest = done.stderr
    for part in filter(None, case.said.split("…")):
        assert part in rest, done.stderr
        rest = rest.partition(part)[2]


def test_with_gpus_that_suffice_the_start_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Negative control: what is refused above is refused for its reason."""
    began: list[Config] = []
    monkeypatch.setitem(sys.modules, "pynvml", alike(2))
    monkeypatch.setattr(device, "torch_build", lambda: "13.0")
    monkeypatch.setattr(up, "_run", lambda settled, *_: began.append(settled.config))
    env = {"BATON_STATE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": None}
    doors = [part for door in ("port", "admin-port", "http-port", "page-port") for part in (f"--router.{door}", "0")]
    done = CliRunner(env=env).invoke(app, ["up", *doors])
    assert done.exit_code == 0 and [config.engine.device for config in began] == ["cuda"], done.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_is_started_by_hand_ends_with_the_sentence(role: str) -> None:
    """With exit status 2, with which no launcher tries again; whatever torch and GPUs this machine has."""
    given = {"CUDA_VISIBLE_DEVICES": "", "BATON_CLUSTER_KEY": "ab" * 32, "BATON_MODEL_PATH": str(SHIPPED)}
    command = [sys.executable, "-m", f"{role}_worker", *CUDA, "--redis.url", "redis://127.0.0.1:1/0", "--telemetry.log-format", "text"]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=120)
    assert done.returncode == CANNOT and "Traceback" not in done.stderr
    assert re.search(r"engine\.device cuda: .*; set engine\.device to cpu$", done.stderr.strip()), done.stderr
