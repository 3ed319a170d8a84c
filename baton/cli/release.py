"""`baton scale --kubernetes`: the third launcher, with the rights of the caller, and the load of each worker from a router."""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from rich.console import Console

from baton.access.access import find
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cli.admin import read_status
from baton.cli.options import ScaleOptions
from baton.cluster.config import ConfigError
from baton.cluster.errors import BatonError
from baton.launch.kubernetes_launcher import KubernetesLauncher
from baton.launch.pods import Load, ReleaseName
from baton.v1 import worker_pb2, worker_pb2_grpc

STATUS_S = 5.0


def resize(release: ReleaseName, sizes: ScaleOptions, place: ClusterOptions, identity: ClientIdentity, err: Console) -> str:
    """The sizes that are in force then. Raises ConfigError, BatonError."""

    def loads() -> Mapping[str, Load]:
        try:
            with find("admin", place, identity).channel() as channel:
                status = worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=STATUS_S)
        except (grpc.RpcError, BatonError, ConfigError, OSError) as error:
            why = error.details() if isinstance(error, grpc.RpcError) else error
            err.print(f"no router tells the load of the workers, so Kubernetes chooses who goes: {why}", markup=False, soft_wrap=True)
            return {}
        return {worker["name"]: load_of(worker) for worker in read_status(status)["workers"]}

    return asyncio.run(_resize(KubernetesLauncher(release, place.context, loads), sizes, err))


async def _resize(launcher: KubernetesLauncher, sizes: ScaleOptions, err: Console) -> str:
    await launcher.start()
    for role, size in (("prefill", sizes.prefill), ("decode", sizes.decode)):
        for ended in await launcher.resize(role, size) if size is not None else ():
            err.print(f"{ended.name} is gone", markup=False)
    return ", ".join(f"{role} {size}" for role, size in (await launcher.sizes()).items() if role != "router")


def load_of(worker: dict[str, Any]) -> Load:
    """What the end of a worker, as `read_status` gives it, would disturb. Last comes its cache, which costs time only."""
    load = worker["load"]
    return (load["running"], load["waiting"], load["leases"], load["cached_blocks"])
