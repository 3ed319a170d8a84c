"""`engine.device` is what this host can do, and a GPU that cannot be used is never passed over in silence."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeGpu, FakeNvml, alike

from baton.cluster.device import ROCM, DeviceChoice, choose, decide, driver_count, too_old, torch_build
from baton.cluster.gpus import HostGpus, find


def decided(asked: Any, nvml: FakeNvml, built: str = "13.0", env: dict[str, str] | None = None, unseen: int = 0) -> DeviceChoice:
    return decide(asked, find(nvml), built, env or {}, unseen)


def test_auto_is_cuda_where_a_gpu_can_be_used() -> None:
    for asked in ("auto", "cuda"):
        choice = decided(asked, alike(2))
        assert choice.device == "cuda" and choice.note == ""
        assert [device.token for device in choice.devices or ()] == ["GPU-0000", "GPU-1111"]
    assert decided("cpu", alike(2)) == DeviceChoice("cpu")


@pytest.mark.parametrize("nvml", [FakeNvml(), FakeNvml(fails=12)], ids=["no device", "no driver"])
def test_auto_is_cpu_without_a_word_where_there_is_no_gpu(nvml: FakeNvml) -> None:
    assert decided("auto", nvml) == DeviceChoice("cpu") == decided("auto", nvml, env={"CUDA_VISIBLE_DEVICES": "3"})
    with pytest.raises(ValueError, match=r"^engine.device cuda: .*(no NVIDIA driver|finds no GPU) here.*; set engine.device to cpu$"):
        decided("cuda", nvml)


@pytest.mark.parametrize(
    ("nvml", "built", "env", "why"),
    [
        (FakeNvml(fails=18), "13.0", {}, "restart the machine"),
        (FakeNvml(fails=9), "13.0", {}, "not loaded"),
        (alike(1), "cpu", {}, "this torch is built for CPUs alone"),
        (alike(1), "", {}, "torch is not installed here"),
        (alike(1), "13.0", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= hides every GPU"),
        (alike(1), "13.0", {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES=-1 hides every GPU"),
    ],
)
def test_auto_says_why_it_is_cpu_and_cuda_is_refused(nvml: FakeNvml, built: str, env: dict[str, str], why: str) -> None:
    choice = decided("auto", nvml, built, env)
    assert choice.device == "cpu" and choice.note.startswith("engine.device auto is cpu: ") and why in choice.note
    with pytest.raises(ValueError, match=f"^engine.device cuda: .*{why}.*; set engine.device to cpu$"):
        decided("cuda", nvml, built, env)


@pytest.mark.parametrize(
    ("nvml", "built", "env", "why"),
    [
        (alike(1), "14.0", {}, r"the NVIDIA driver 580.95.05 is too old: it runs CUDA 13.0 at most, and torch is built for CUDA 14.0"),
        (alike(2), "13.0", {"CUDA_VISIBLE_DEVICES": "0,2"}, "there is no device 2 here"),
        (FakeNvml([FakeGpu("GPU-1", fails=15)]), "13.0", {}, "no GPU can be used: GPU 0: the GPU does not answer any more"),
        (FakeNvml([FakeGpu("GPU-1", mig=True)]), "13.0", {}, "no GPU can be used: GPU 0 .*without slices"),
    ],
)
def test_gpus_that_cannot_be_used_are_refused_and_not_passed_over(nvml: FakeNvml, built: str, env: dict[str, str], why: str) -> None:
    for asked in ("auto", "cuda"):
        with pytest.raises(ValueError, match=why):
            decided(asked, nvml, built, env)
        assert decided("cpu", nvml, built, env) == DeviceChoice("cpu")


def test_an_older_driver_runs_what_is_newer_within_a_major_version() -> None:
    assert (
        not too_old(HostGpus(cuda=(12, 4)), "12.8")
        and not too_old(HostGpus(cuda=None), "13.0")
        and not too_old(HostGpus(cuda=(13, 0)), "12.8")
    )
    assert too_old(HostGpus(cuda=(12, 8)), "13.0")


def test_where_nvml_cannot_be_asked_the_devices_of_cuda_count() -> None:
    """A container may have CUDA without NVML."""
    nothing = FakeNvml(fails=12)
    assert [device.token for device in decided("auto", nothing, unseen=2).devices or ()] == ["0", "1"]
    hidden = decided("cuda", nothing, env={"CUDA_VISIBLE_DEVICES": "3, GPU-7"}, unseen=2)
    assert [device.token for device in hidden.devices or ()] == ["3", "GPU-7"] and "nothing is known of the GPUs" in hidden.note


def test_rocm_sees_to_its_devices_itself() -> None:
    assert decided("cuda", FakeNvml(fails=12), ROCM) == DeviceChoice("cuda", None)
    assert decided("auto", FakeNvml(fails=12), ROCM).device == "cpu"


def test_this_host_is_judged_without_torch() -> None:
    assert choose("cpu", {}, FakeNvml(fails=1)) == DeviceChoice("cpu")
    assert torch_build() != "" and choose("auto", {}, FakeNvml(fails=12)).device in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("text", "built"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0.1'\n", ROCM),
        ("cuda = None\nhip = None\n", "cpu"),
        ("__version__ = '3'\n", "cpu"),
    ],
)
def test_what_torch_is_built_for_is_read_from_its_file(text: str, built: str, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(text)
    assert torch_build(lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py"))) == built
    assert torch_build(lambda name: None) == ""


class Driver:
    def __init__(self, devices: int, fails: bool = False) -> None:
        self._devices, self._fails = devices, fails

    def cuInit(self, flags: int) -> int:
        return int(self._fails)

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._devices
        return 0


def missing(name: str) -> ctypes.CDLL:
    raise OSError(name)


def test_the_driver_itself_counts_its_devices() -> None:
    assert driver_count(lambda name: Driver(2)) == 2
    assert driver_count(lambda name: Driver(2, fails=True)) == driver_count(missing) == 0
