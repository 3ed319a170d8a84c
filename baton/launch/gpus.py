"""Settles, before a cluster starts on this host, which device computes and which GPUs each pool gets: `engine.device` and `prefill.gpus`,
`decode.gpus` are not auto any more afterwards, for any process of the cluster.

Where Ray may run the processes on other hosts, nothing is known here: `settle_afar` follows what that cluster says of itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cluster.config import Config, ConfigError
from baton.cluster.device import DeviceChoice, choose
from baton.cluster.records import ROLES
from baton.engine.options import ranks
from baton.launch.placing import LEAST_FREE, GpuDemand, Gpus, NoRoom, kinds, spared
from baton.launch.plan import UpError


@dataclass(frozen=True, slots=True)
class SettledConfig:
    config: Config
    gpus: Gpus | None = None  # None: the processes see to it themselves
    note: str = ""  # for the person who starts the cluster


def settle(config: Config, choice: DeviceChoice | None = None) -> SettledConfig:
    """`choice`: what there is, if that was found out already. Raises UpError, ConfigError."""
    if config.launcher.ray_address is not None:
        return SettledConfig(config)
    try:
        choice = choice or choose(config.engine.device)
    except ValueError as error:
        raise UpError(str(error)) from None
    config = concrete(config, choice.device)
    if choice.device == "cpu" or choice.devices is None:
        return SettledConfig(config, None, choice.note)
    devices, full = spared(choice.devices, least_free(config))
    try:
        found = kinds(devices, [GpuDemand(role, getattr(config, role).gpus, getattr(config, role).replicas) for role in ROLES], full)
    except NoRoom as error:
        raise UpError(f"engine.device cuda: {error}") from None
    if config.launcher.kind == "ray":
        devices = tuple(device for device in devices if device.kind in found.values())
        if len({device.kind for device in devices}) > 1:
            raise UpError("launcher.kind ray cannot tell unlike GPUs apart: name those of one kind in CUDA_VISIBLE_DEVICES")
    return SettledConfig(config, Gpus(devices, found), choice.note)


def settle_afar(config: Config, gpus: float) -> Config:
    """`gpus`: how many the Ray cluster has in all. Raises ConfigError."""
    return concrete(config, ("cuda" if gpus else "cpu") if config.engine.device == "auto" else config.engine.device)


def concrete(config: Config, device: str) -> Config:
    """`config` for this device. Raises ConfigError for GPUs that a CPU has no use for, and for none where each worker needs one."""
    pools: dict[str, Any] = {}
    each = ranks(config.engine.vllm) if config.engine.kind == "vllm" else 1
    for role in ROLES:
        pool = getattr(config, role)
        gpus = (float(each) if device == "cuda" else 0.0) if pool.gpus == "auto" else pool.gpus
        if pool.replicas and gpus and device == "cpu":
            raise ConfigError(f"{role}.gpus {gpus:g}: engine.device is cpu, which uses none")
        if pool.replicas and not gpus and device == "cuda":
            raise ConfigError(f"{role}.gpus 0: with engine.device cuda each worker needs a GPU, or a share of one (0.5); leave it at auto")
        pools[role] = pool.model_copy(update={"gpus": gpus})
    return config.model_copy(update={"engine": config.engine.model_copy(update={"device": device}), **pools})


def least_free(config: Config) -> int:
    """Bytes without which no worker can start on a GPU: half of the checkpoint, whose type may be twice as wide as what is loaded."""
    if config.engine.weight_dtype != "auto" or (config.engine.kind == "vllm" and config.engine.vllm):
        return LEAST_FREE
    stored = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    return max(LEAST_FREE, stored // 2)
