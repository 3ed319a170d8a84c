"""Makes the transport that the configuration asks for, as far as this platform allows."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from baton.cluster.errors import BatonError
from baton.engine.core.kvcache import KvPool, Pool
from kvtransfer.auto_transport import AutoTransport
from kvtransfer.cuda_ipc_transport import CudaIpcTransport
from kvtransfer.device_transport import DeviceKvPool, DeviceTransport
from kvtransfer.tcp_transport import TcpTransport
from kvtransfer.tcp_wire import Tls
from kvtransfer.transport import Registered, Transport, transfer_failed
from kvtransfer.ucx import Ucx, rdma_ports

log = logging.getLogger(__name__)
WANTED = {"auto": ("cuda_ipc", "nixl_vram", "nixl", "tcp"), "nixl": ("nixl_vram", "nixl"), "tcp": ("tcp",), "cuda_ipc": ("cuda_ipc",)}


@dataclass(frozen=True, slots=True)
class Tcp:
    """Settings of the TCP transport; port 0: any free one."""

    port: int = 0
    tls: Tls | None = None


def make_transport(
    kind: str,
    *,
    peer: str,
    pool: Pool,
    host: str,
    key: bytes,
    advertise: str | None = None,
    tcp: Tcp | None = None,
    ucx: Ucx | None = None,
) -> Transport:
    """`kind` is "nixl", "tcp" or "auto" (all that is fast and safe); for a pool on a device "cuda_ipc", too. `peer` is the name by which
    peers know us. TCP binds `host`; peers connect to `advertise` (default: `host`). With TLS, NIXL only copies between processes of one
    host.

    Raises ImportError or BatonError(TRANSFER_FAILED) if `kind` is "nixl" and NIXL is not available, BatonError(TRANSFER_FAILED) if it is
    "cuda_ipc" and the driver does not share the pool.
    """
    tcp = tcp or Tcp()
    sockets = partial(TcpTransport, host=host, cluster_key=key, port=tcp.port, advertise=advertise, tls=tcp.tls)
    settings = _Nixl(peer, advertise or host, ucx, tcp.tls is not None)
    if not isinstance(pool, KvPool):
        return _between_devices(kind, cast(DeviceKvPool, pool), sockets, settings)
    if kind == "tcp":
        return sockets(pool)
    try:
        nixl = settings.open(pool)
    except (ImportError, BatonError) as error:
        if kind == "nixl":
            raise
        if sys.platform == "linux":
            log.warning("NIXL cannot be used, KV goes over TCP: %s", error)
        nixl = None
    if kind == "nixl" and nixl is not None:
        return nixl
    return AutoTransport(nixl, sockets(pool))


@dataclass(frozen=True, slots=True)
class _Nixl:
    name: str
    host: str
    ucx: Ucx | None
    in_memory_only: bool

    def open(self, pool: Registered, name: str = "") -> Transport:
        # NIXL and UCX are loaded here and only here: a TCP worker starts without them.
        from kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(name or self.name, pool, self.host, ucx=self.ucx, in_memory_only=self.in_memory_only)


def _between_devices(kind: str, pool: DeviceKvPool, sockets: Callable[[KvPool], Transport], nixl: _Nixl) -> Transport:
    opened: dict[str, Transport] = {}
    lacking: dict[str, str] = {}
    make: dict[str, Callable[[], Transport]] = {
        "cuda_ipc": lambda: CudaIpcTransport(pool),
        "nixl_vram": lambda: nixl.open(pool, f"{nixl.name}/vram"),
        "nixl": lambda: nixl.open(pool.staged),
        "tcp": lambda: sockets(pool.staged),
    }
    for way in WANTED[kind]:
        if way == "nixl" and kind == "auto" and "nixl_vram" in opened and rdma_ports():
            lacking[way] = "an adapter would pin the host's copy of the whole pool"
            continue
        try:
            opened[way] = make[way]()
        except (ImportError, BatonError) as error:
            lacking[way] = str(error)
            log.warning("KV cannot go by %s here: %s", way, error)
        except OSError:  # the port is not free
            for transport in opened.values():
                transport.close()
            raise
    if not opened:
        raise transfer_failed("; ".join(lacking.values()))
    return DeviceTransport(kind, pool, opened, lacking)
