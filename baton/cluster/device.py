"""What `engine.device` means on this host, known without loading torch: `auto` is cuda where a process can use a GPU, else cpu.

A GPU that is there and cannot be used is never passed over in silence: the start is refused, or a note says why the CPU computes.
"""

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from baton.cluster.gpus import ABSENT, VISIBLE, Device, HostGpus, find, unusable, visible

Asked = Literal["auto", "cpu", "cuda"]
ROCM = "rocm"  # calls its devices cuda, too, and NVML does not know them
NOT_BUILT = {"": "torch is not installed here", "cpu": "this torch is built for CPUs alone"}
CPU = "set engine.device to cpu"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    device: Literal["cpu", "cuda"]
    devices: tuple[Device, ...] | None = ()  # what processes may be given; None: they see to it themselves
    note: str = ""  # for the person who starts something


def choose(asked: Asked, env: Mapping[str, str] = os.environ, nvml: Any = None) -> DeviceChoice:
    """Chooses for this host. Raises ValueError, with what is wrong and what to do, if that is not possible."""
    if asked == "cpu":
        return DeviceChoice("cpu")
    host = find(nvml)
    return decide(asked, host, torch_build(), env, 0 if host.gpus else driver_count())


def decide(asked: Asked, host: HostGpus, built: str, env: Mapping[str, str], unseen: int = 0) -> DeviceChoice:
    """`built`: as `torch_build` tells; `unseen`: devices that CUDA has although NVML cannot be asked. Raises ValueError."""

    def cpu(why: str, quiet: bool = False) -> DeviceChoice:
        if asked == "cuda":
            raise ValueError(f"engine.device cuda: {why}; {CPU}")
        return DeviceChoice("cpu", note="" if quiet else f"engine.device auto is cpu: {why}")

    if asked == "cpu":
        return DeviceChoice("cpu")
    if built == ROCM:
        if asked == "cuda":
            return DeviceChoice("cuda", None)
        return DeviceChoice("cpu", note="engine.device auto is cpu: with ROCm, ask for cuda")
    if built in NOT_BUILT:
        return cpu(NOT_BUILT[built], quiet=not host.gpus)
    if not host.gpus and unseen:
        names = env[VISIBLE].split(",") if VISIBLE in env else [str(index) for index in range(unseen)]
        unknown = tuple(Device(name.strip(), index, "", 0, 0) for index, name in enumerate(names[:unseen]))
        return DeviceChoice("cuda", unknown, f"nothing is known of the GPUs, so nothing about them is checked: {host.reason}")
    if not host.gpus:
        return cpu(host.reason, quiet=host.reason in ABSENT)
    if why := too_old(host, built):
        raise ValueError(f"engine.device {asked}: {why}; or {CPU}")
    if devices := visible(host, env):
        return DeviceChoice("cuda", devices)
    if VISIBLE in env:
        return cpu(f"{VISIBLE}={env[VISIBLE]} hides every GPU")
    broken = "; ".join(f"{gpu}: {unusable(gpu)}" for gpu in host.gpus)
    raise ValueError(f"engine.device {asked}: no GPU can be used: {broken}; or {CPU}")


def too_old(host: HostGpus, built: str) -> str:
    """Why the driver cannot run torch; empty if it can. Within a major version of CUDA, an older driver runs what is newer."""
    major = int(built.partition(".")[0])
    if host.cuda is None or host.cuda[0] >= major:
        return ""
    newest = f"CUDA {host.cuda[0]}.{host.cuda[1]}"
    return (
        f"the NVIDIA driver {host.driver} is too old: it runs {newest} at most, and torch is built for CUDA {built}: install a newer"
        f" driver, or a torch that is built for CUDA {host.cuda[0]}"
    )


def torch_build(find: Callable[[str], Any] = find_spec) -> str:
    """The CUDA that torch is built for ("13.0"), `rocm`, "cpu", or "" without torch. Torch takes seconds to load, so its file is read."""
    spec = find("torch")
    if spec is None or not spec.origin:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return "cpu"
    told = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *'([^']*)'", text, re.MULTILINE))
    return told.get("cuda") or (ROCM if told.get("hip") else "cpu")


def driver_count(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """Devices that CUDA itself tells, within CUDA_VISIBLE_DEVICES. A container may have CUDA without NVML."""
    count = ctypes.c_int()
    with suppress(OSError, AttributeError):
        driver = load("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0
