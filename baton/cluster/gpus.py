"""The GPUs of this host as the driver's own library (NVML) tells them: without torch, and in milliseconds.

`find` never raises: without the package, the driver or a device, `HostGpus.reason` says which of them is missing. What follows from what
was found is decided elsewhere: `baton.launch.placing` says which worker gets which device.

NVML does not know CUDA_VISIBLE_DEVICES, which is CUDA's own: `visible` applies it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

ANSWER_S = 60.0  # without persistence mode, a driver takes seconds for each GPU that it wakes
NONE_FOUND = "the NVIDIA driver finds no GPU here"
NO_DRIVER = "there is no NVIDIA driver here (libnvidia-ml.so.1)"
NO_PACKAGE = "nvidia-ml-py is not installed here: pip install nvidia-ml-py"
ABSENT = (NONE_FOUND, NO_DRIVER, NO_PACKAGE)  # reasons of a host that has no GPU: nothing is wrong with it
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

Link = Literal["NVLink", "P2P"]
# What a person can do about an error of NVML. The names of the codes are those of its header, nvml.h.
REMEDIES = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": NO_DRIVER,
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is installed but not loaded: load the kernel module nvidia, or restart the machine",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the NVIDIA driver was updated while it ran: restart the machine, or reload its module",
    "NVML_ERROR_NO_PERMISSION": "this user may not open the NVIDIA driver's devices (/dev/nvidia*)",
    "NVML_ERROR_GPU_IS_LOST": "the GPU does not answer any more: reset it (nvidia-smi --gpu-reset) or restart the machine",
    "NVML_ERROR_RESET_REQUIRED": "the GPU must be reset: nvidia-smi --gpu-reset",
}


class NoNvml(Exception):
    """NVML cannot be asked; the text says why."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a GPU in MIG mode. Memory in bytes."""

    uuid: str  # "MIG-…"
    name: str
    memory_total: int
    memory_used: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes; 0 where the GPU does not tell it, because it has none of its own."""

    index: int  # NVML's: in the order of PCI addresses
    uuid: str  # "GPU-…"
    name: str = ""
    memory_total: int = 0
    memory_used: int = 0
    capability: tuple[int, int] | None = None  # compute capability
    mig: bool = False  # a process can then use one of the slices and nothing else
    slices: tuple[Slice, ...] = ()
    peers: Mapping[int, Link] = field(default_factory=dict)  # index → how the two read each other's memory
    fault: str = ""  # why it cannot be used; all else may then be missing

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})" if self.name else f"GPU {self.index}"


@dataclass(frozen=True, slots=True)
class HostGpus:
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""  # "580.159.04"
    cuda: tuple[int, int] | None = None  # the newest CUDA that the driver can run
    reason: str = ""  # why there are no GPUs


@dataclass(frozen=True, slots=True)
class Device:
    """What a process can be given: a GPU, or a slice of one."""

    token: str  # as CUDA_VISIBLE_DEVICES names it: a UUID
    gpu: int
    kind: str  # devices of one kind compute the same bits
    memory_total: int  # bytes
    memory_used: int
    peers: Mapping[int, Link] = field(default_factory=dict)  # of a GPU
    part: bool = False  # a slice: a process can use only one

    def __str__(self) -> str:
        return f"{'a slice of ' if self.part else ''}GPU {self.gpu} ({self.kind})"


def find(nvml: Any = None, within_s: float = ANSWER_S) -> HostGpus:
    """`nvml`: a module like `pynvml`, if not that one. A driver that hangs counts as none after `within_s`."""
    found: list[HostGpus] = []

    def ask() -> None:
        try:
            with session(nvml) as library:
                found.append(_host(library))
        except NoNvml as error:
            found.append(HostGpus(reason=str(error)))
        except Exception as error:  # of another version of the package, say: whoever asks goes on without GPUs
            found.append(HostGpus(reason=f"NVML cannot be asked: {type(error).__name__}: {error}"))

    asking = threading.Thread(target=ask, name="nvml", daemon=True)  # nobody can interrupt a driver that hangs
    asking.start()
    asking.join(within_s)
    return found[0] if found else HostGpus(reason=f"the NVIDIA driver does not answer within {within_s:g} s: restart the machine")


@contextmanager
def session(nvml: Any = None) -> Iterator[Any]:
    """The library, ready to be asked. Raises NoNvml, also for an error of NVML that the block does not catch."""
    nvml = nvml or _package()
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise NoNvml(explain(nvml, error)) from None


def _package() -> Any:
    try:
        import pynvml  # of nvidia-ml-py
    except ImportError:
        raise NoNvml(NO_PACKAGE) from None
    return pynvml


def explain(nvml: Any, error: Any) -> str:
    """What is wrong, for a person."""
    for name, remedy in REMEDIES.items():
        if getattr(nvml, name, None) == getattr(error, "value", None):
            return remedy
    return f"the NVIDIA driver says: {error}"


def known(nvml: Any, ask: Callable[..., Any], *arguments: object) -> Any:
    """The answer; None if the device or the driver cannot tell it."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def _host(nvml: Any) -> HostGpus:
    cuda = known(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    return HostGpus(
        gpus,
        known(nvml, nvml.nvmlSystemGetDriverVersion) or "",
        cuda and (cuda // 1000, cuda % 1000 // 10),
        "" if gpus else NONE_FOUND,
    )


def _gpu(nvml: Any, index: int) -> Gpu:
    uuid = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        total, used = _memory(nvml, handle)
        return Gpu(
            index,
            uuid,
            nvml.nvmlDeviceGetName(handle),
            total,
            used,
            known(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle),
            (known(nvml, nvml.nvmlDeviceGetMigMode, handle) or (0, 0))[0] == nvml.NVML_DEVICE_MIG_ENABLE,
            tuple(_slices(nvml, handle)),
            _peers(nvml, index, handle),
        )
    except nvml.NVMLError as error:
        return Gpu(index, uuid, fault=explain(nvml, error))


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    told = known(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return (told.total, told.used) if told else (0, 0)


def _slices(nvml: Any, handle: Any) -> Iterator[Slice]:
    for number in range(known(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = known(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if part is not None:
            yield Slice(nvml.nvmlDeviceGetUUID(part), nvml.nvmlDeviceGetName(part), *_memory(nvml, part))


def _peers(nvml: Any, index: int, handle: Any) -> dict[int, Link]:
    peers: dict[int, Link] = {}
    for other in range(nvml.nvmlDeviceGetCount()):
        if other == index or (peer := known(nvml, nvml.nvmlDeviceGetHandleByIndex, other)) is None:
            continue
        links: tuple[tuple[Link, int], ...] = (("NVLink", nvml.NVML_P2P_CAPS_INDEX_NVLINK), ("P2P", 0))  # 0: to read
        for link, caps in links:
            if known(nvml, nvml.nvmlDeviceGetP2PStatus, handle, peer, caps) == nvml.NVML_P2P_STATUS_OK:
                peers[other] = link
                break
    return peers


def devices(gpus: Sequence[Gpu]) -> Iterator[Device]:
    """What processes can be given, in NVML's order. A GPU in MIG mode counts as its slices."""
    for gpu in gpus:
        if gpu.fault:
            continue
        for part in gpu.slices if gpu.mig else ():
            yield Device(part.uuid, gpu.index, part.name, part.memory_total, part.memory_used, part=True)
        if not gpu.mig:
            yield Device(gpu.uuid, gpu.index, gpu.name, gpu.memory_total, gpu.memory_used, gpu.peers)


def visible(host: HostGpus, env: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices that processes with this environment may use, in its order. Raises ValueError for an environment that names what is not
    there: CUDA would use what comes before that name, or nothing, and not say so."""
    every = tuple(devices(host.gpus))
    if (text := env.get(VISIBLE)) is None:
        return every
    chosen: list[Device] = []
    for name in (part.strip() for part in text.split(",")):
        if name in ("", "-1", "NoDevFiles"):  # CUDA reads no further
            break
        for device in _named(name, host, every, env):
            if device in chosen:
                raise ValueError(f"{VISIBLE}={text} names {device} twice")
            chosen.append(device)
    return tuple(chosen)


def _named(name: str, host: HostGpus, every: Sequence[Device], env: Mapping[str, str]) -> list[Device]:
    said = f"{VISIBLE}={env[VISIBLE]}"
    gpus = [gpu for gpu in host.gpus if name == str(gpu.index) or gpu.uuid.startswith(name)]
    found = [device for device in every if device.token.startswith(name) or device.gpu in {gpu.index for gpu in gpus}]
    if not name.isdigit() and (len(gpus) > 1 or sum(device.token.startswith(name) for device in found) > 1):
        raise ValueError(f"{said}: the names of several devices begin with {name}")
    if found and name.isdigit() and env.get(ORDER) != "PCI_BUS_ID" and len({gpu.name for gpu in host.gpus}) > 1:
        raise ValueError(
            f"{said}: this host has unlike GPUs, and CUDA numbers the fastest first: name them by UUID (nvidia-smi -L), or set"
            f" {ORDER}=PCI_BUS_ID, with which the numbers are those of nvidia-smi"
        )
    if not found and gpus:
        raise ValueError(f"{said}: {gpus[0]}: {unusable(gpus[0])}")
    if not found:
        there = ", ".join(f"{device} {device.token}" for device in every)
        raise ValueError(f"{said}: there is no device {name} here; there are: {there or 'none'}")
    return found


def unusable(gpu: Gpu) -> str:
    """Why no process can be given this GPU; empty if one can."""
    if gpu.mig and not gpu.slices:
        return gpu.fault or "it is in MIG mode without slices: make some (nvidia-smi mig -cgi …), or turn the mode off (nvidia-smi -mig 0)"
    return gpu.fault
