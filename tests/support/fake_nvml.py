"""A module like `pynvml`, for a host with the GPUs that a test wants. What a real one answers for a GPU is the constructor's argument."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class FakeSlice:
    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    total: int = 20 * GIB
    used: int = 0


@dataclass
class FakeGpu:
    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 80 * GIB
    used: int = GIB // 2
    capability: tuple[int, int] = (9, 0)
    mig: bool = False
    slices: Sequence[FakeSlice] = ()
    nvlink: Sequence[int] = ()  # indices of GPUs
    p2p: Sequence[int] = ()
    fails: int = 0  # the error of every question about it
    no_memory: bool = False  # of its own


@dataclass
class FakeNvml:
    """Only what `baton.cluster.gpus` asks."""

    gpus: Sequence[FakeGpu] = ()
    driver: str = "580.95.05"
    cuda: int = 13000
    fails: int = 0  # the error of nvmlInit
    open: int = 0

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_DEVICE_MIG_ENABLE = 1

    def nvmlInit(self) -> None:
        if self.fails:
            raise NVMLError(self.fails)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].fails:
            raise NVMLError(self.gpus[index].fails)
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, device: Any) -> str:
        return str(device.uuid)

    def nvmlDeviceGetName(self, device: Any) -> str:
        return str(device.name)

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> SimpleNamespace:
        if getattr(device, "no_memory", False):
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=device.total, used=device.used, free=device.total - device.used)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return gpu.capability

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        if not gpu.name.startswith("NVIDIA"):
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return [int(gpu.mig), int(gpu.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7 if gpu.mig else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeSlice:
        if index >= len(gpu.slices):
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return gpu.slices[index]

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, caps: int) -> int:
        reached = one.nvlink if caps == self.NVML_P2P_CAPS_INDEX_NVLINK else [*one.nvlink, *one.p2p]
        return 0 if self.gpus.index(other) in reached else 5


def alike(count: int, **given: Any) -> FakeNvml:
    """A host with `count` GPUs of one kind, each of which reaches the others over NVLink."""
    each = [FakeGpu(f"GPU-{index}{index}{index}{index}", nvlink=[i for i in range(count) if i != index], **given) for index in range(count)]
    return FakeNvml(each)
