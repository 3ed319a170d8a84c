"""What goes into the image, with and without vLLM. Nothing is built here."""

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from kube import ROOT
from resolver import resolve

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def requirements(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy" / "requirements.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_vllm_is_asked_for_only_where_the_engine_is_vllm() -> None:
    plain = requirements("cpu", "").stdout.splitlines()
    assert plain and not any("vllm" in line for line in plain)
    assert requirements("cpu", "", "baton").stdout.splitlines() == plain == requirements("cpu", "", "vllm").stdout.splitlines()
    with_it, without = (set(requirements("cuda", "", engine).stdout.splitlines()) for engine in ("vllm", "baton"))
    assert with_it - without == {"vllm>=0.32,<0.33"} and not without - with_it


def test_the_image_has_what_the_configuration_may_ask_for() -> None:
    """`telemetry.otlp_endpoint` is a value of the chart, and the extra `otel` is what it needs."""
    names = {re.split(r"[^\w-]", line)[0] for line in requirements("cpu", "").stdout.splitlines()}
    assert {"torch", "grpcio", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc", "huggingface-hub", "boto3"} <= names


@pytest.mark.timeout(1800)
def test_the_image_for_gpus_gets_a_compiler_of_torchs_own_cuda() -> None:
    """All that is installed for it, together: another CUDA's nvcc would make kernels that the driver of torch's does not run."""
    tools = f"cuda-toolkit[{runpy.run_path(str(ROOT / 'deploy' / 'flashinfer_kernels.py'))['TOOLS']}]"
    done = resolve(*requirements("cuda", "").stdout.splitlines(), tools, "--constraint", str(ROOT / "constraints.txt"))
    assert done.returncode == 0, done.stderr[-3000:]
    versions = dict(re.findall(r"\b([a-z][\w-]*?)-(\d[\w.]*)", done.stdout.partition("Would install ")[2]))
    assert len({versions[name].rsplit(".", 1)[0] for name in ("nvidia-cuda-nvcc", "nvidia-cuda-runtime")}) == 1
    assert versions["flashinfer-python"] == "0.6.13"


def stubbed(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_kernels_are_written_where_a_copy_of_the_package_finds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are compiled in a stage of their own: the last one gets them, and neither nvcc nor the package again."""
    found, root = tmp_path / "site-packages" / "aot", tmp_path / "root"

    def spec(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, jit_library_path=tmp_path / f"{name}.so", aot_path=found / name / f"{name}.so")

    def build(specs: list[SimpleNamespace], skip_prebuilt: bool) -> None:
        for each in specs:
            each.jit_library_path.write_text(each.name)

    kernels = {"gen_batch_decode_module": lambda *_: spec("decode"), "gen_batch_prefill_module": lambda kind, *_: spec(kind)}
    stubbed(monkeypatch, "flashinfer")
    stubbed(monkeypatch, "flashinfer.jit", build_jit_specs=build, env=SimpleNamespace(FLASHINFER_AOT_DIR=found))
    stubbed(monkeypatch, "flashinfer.jit.attention", **kernels)
    for name in ("CUDA_HOME", "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_WORKSPACE_BASE", "PATH"):
        monkeypatch.setenv(name, "/usr/bin")
    where = importlib.util.spec_from_file_location("flashinfer_kernels", ROOT / "deploy" / "flashinfer_kernels.py")
    assert where and where.loader
    ours = importlib.util.module_from_spec(where)
    where.loader.exec_module(ours)
    monkeypatch.setattr(ours, "toolkit", lambda folder: folder)
    ours.compile("8.0 9.0a", "bfloat16:128", root)
    below = root / found.relative_to("/")
    assert all((below / name / f"{name}.so").read_text() == name for name in ("decode", "fa2", "fa3"))
    assert not found.exists()


@pytest.mark.parametrize("arguments", [("cpu", "", "sglang"), ("cpu", "vllm"), ("rocm", "")])
def test_an_unknown_engine_extra_or_variant_is_refused(arguments: tuple[str, ...]) -> None:
    done = requirements(*arguments)
    assert done.returncode and "ENGINE one of baton, vllm" in done.stderr and not done.stdout


def test_the_cpu_build_comes_without_torchs_family_and_without_extras() -> None:
    kept = runpy.run_path(str(ROOT / "deploy" / "vllm_cpu.py"))["kept"]
    asked = [
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "torchaudio",
        "torch-like>=1",
        'six>=1; python_version > "3.11"',
        "mcp<3,>=2",
    ]
    assert kept([*asked, 'pandas; extra == "bench"', "openai[x]>=2"]) == [*asked[2:], "openai[x]>=2"]


def test_the_build_sees_every_file_that_it_copies() -> None:
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for name in re.findall(r"deploy/\w+\S*", line)
    }
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!deploy/")}
    assert copied == seen and all((ROOT / name).is_file() for name in seen)


def test_no_step_copies_the_dependencies() -> None:
    """For GPUs they are 7 GB: the last stage begins with them."""
    stages = DOCKERFILE.split("\nFROM ")[1:]
    assert stages[-1].startswith("dependencies\n")
    assert not re.search(r"^COPY --from=\S+ /opt/python", DOCKERFILE, re.MULTILINE)


def test_what_is_left_to_vllm_is_something_that_the_constraints_name() -> None:
    left = re.search(r"sed -i -E '/\^\((.*?)\)==/d' constraints\.txt", DOCKERFILE)
    assert left
    constrained = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(left[1].split("|")) <= constrained
