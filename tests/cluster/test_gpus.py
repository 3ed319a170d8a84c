"""What a host's driver tells is found as it is, what is missing is named, and CUDA_VISIBLE_DEVICES means what it means to CUDA."""

import threading
from typing import Any

import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml, FakeSlice, alike

from baton.cluster.gpus import NONE_FOUND, HostGpus, NoNvml, find, session, unusable, visible

SLICES = (FakeSlice("MIG-aaaa"), FakeSlice("MIG-abbb", used=GIB))
SLICED = FakeGpu("GPU-5555", "NVIDIA A100-SXM4-40GB", 40 * GIB, mig=True, slices=SLICES)


def seen(nvml: Any, **env: str) -> list[str]:
    return [device.token for device in visible(find(nvml), env)]


def test_everything_that_a_gpu_tells_is_found() -> None:
    nvml = FakeNvml([FakeGpu("GPU-1", nvlink=[1]), FakeGpu("GPU-2", p2p=[2], nvlink=[0]), SLICED], "580.1", 12080)
    host = find(nvml)
    first, second, sliced = host.gpus
    assert (host.driver, host.cuda, host.reason, nvml.open) == ("580.1", (12, 8), "", 0)
    assert (first.index, first.uuid, first.capability, first.memory_total) == (0, "GPU-1", (9, 0), 80 * GIB)
    assert (first.peers, second.peers, sliced.peers) == ({1: "NVLink"}, {0: "NVLink", 2: "P2P"}, {})
    assert [(part.uuid, part.memory_used) for part in sliced.slices] == [("MIG-aaaa", 0), ("MIG-abbb", GIB)]


@pytest.mark.parametrize(
    ("code", "why"),
    [(12, "no NVIDIA driver here"), (9, "not loaded"), (18, "restart the machine"), (4, "may not open"), (999, "says: error 999")],
)
def test_a_driver_that_cannot_be_asked_is_a_reason(code: int, why: str) -> None:
    assert why in find(FakeNvml(fails=code)).reason
    with pytest.raises(NoNvml, match=why), session(FakeNvml(fails=code)):
        pass


def test_a_host_without_gpus_has_a_reason_and_one_with_gpus_has_none() -> None:
    assert find(FakeNvml()) == HostGpus(driver="580.95.05", cuda=(13, 0), reason=NONE_FOUND)
    assert find(alike(1)).reason == ""


def test_this_host_is_asked_without_an_error() -> None:
    host = find()
    assert bool(host.gpus) is not bool(host.reason)


def test_a_driver_that_hangs_and_a_package_that_is_unlike_are_reasons() -> None:
    hangs = threading.Event()

    class Hangs(FakeNvml):
        def nvmlInit(self) -> None:
            hangs.wait()

    assert "does not answer within 0.01 s" in find(Hangs(), 0.01).reason
    hangs.set()

    class Old(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:
            raise AttributeError("nvmlDeviceGetCount")

    assert find(Old()).reason == "NVML cannot be asked: AttributeError: nvmlDeviceGetCount"


def test_a_gpu_that_fails_does_not_hide_the_others() -> None:
    nvml = FakeNvml([FakeGpu("GPU-1"), FakeGpu("GPU-2", fails=15), FakeGpu("GPU-3", "Orin", no_memory=True)])
    good, lost, shared = find(nvml).gpus
    assert "reset it" in lost.fault and not good.fault and not shared.fault and unusable(lost) == lost.fault
    assert (shared.memory_total, shared.mig) == (0, False)
    assert seen(nvml) == ["GPU-1", "GPU-3"] and good.peers == {}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("0,2", ["GPU-0000", "GPU-2222"]),
        ("2, 0", ["GPU-2222", "GPU-0000"]),
        ("GPU-11", ["GPU-1111"]),
        ("GPU-3333,0", ["GPU-3333", "GPU-0000"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["GPU-1111"]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_means_what_it_means_to_cuda(text: str, tokens: list[str]) -> None:
    assert seen(alike(4), CUDA_VISIBLE_DEVICES=text) == tokens
    assert len(seen(alike(4))) == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("4", r"^CUDA_VISIBLE_DEVICES=4: there is no device 4 here; there are: GPU 0 \(NVIDIA H100 80GB HBM3\) GPU-0000, "),
        ("0,x", "there is no device x here"),
        ("GPU-9", "there is no device GPU-9 here"),
        ("GPU-", "the names of several devices begin with GPU-"),
        ("MIG-aaaa", "there is no device MIG-aaaa here"),
        ("0,GPU-0000", "names GPU 0 .* twice"),
        ("1.5", "there is no device 1.5 here"),
    ],
)
def test_names_of_nothing_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        seen(alike(4), CUDA_VISIBLE_DEVICES=text)


def test_a_gpu_in_mig_mode_counts_as_its_slices() -> None:
    nvml = FakeNvml([FakeGpu("GPU-1"), SLICED])
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert seen(nvml) == ["GPU-1", "MIG-aaaa", "MIG-abbb"]
    assert seen(nvml, CUDA_VISIBLE_DEVICES="1", **order) == seen(nvml, CUDA_VISIBLE_DEVICES="GPU-5") == ["MIG-aaaa", "MIG-abbb"]
    assert seen(nvml, CUDA_VISIBLE_DEVICES="MIG-ab,GPU-1") == ["MIG-abbb", "GPU-1"]
    with pytest.raises(ValueError, match="several devices begin with MIG-a"):
        seen(nvml, CUDA_VISIBLE_DEVICES="MIG-a")
    empty = FakeNvml([FakeGpu("GPU-1", mig=True)])
    assert seen(empty) == [] and "without slices" in unusable(find(empty).gpus[0])
    with pytest.raises(ValueError, match=r"GPU 0 .*without slices"):
        seen(empty, CUDA_VISIBLE_DEVICES="0")


def test_numbers_of_unlike_gpus_need_an_order() -> None:
    """CUDA numbers the fastest first, NVML by address: "0" could mean another GPU to the engine than to us."""
    nvml = FakeNvml([FakeGpu("GPU-1", "NVIDIA L4"), FakeGpu("GPU-2")])
    with pytest.raises(ValueError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        seen(nvml, CUDA_VISIBLE_DEVICES="0")
    assert seen(nvml, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["GPU-1"]
    assert seen(nvml, CUDA_VISIBLE_DEVICES="GPU-2") == ["GPU-2"]
