"""Makes the transport that the configuration asks for, as far as this platform allows."""

import logging
import sys
from dataclasses import dataclass
from typing import cast

from baton.cluster.errors import BatonError
from baton.engine.core.kvcache import KvPool, Pool
from kvtransfer.auto_transport import AutoTransport
from kvtransfer.cuda_ipc_transport import CudaIpcTransport, DeviceMemory
from kvtransfer.tcp_transport import TcpTransport
from kvtransfer.tcp_wire import Tls
from kvtransfer.transport import Transport
from kvtransfer.ucx import Ucx

log = logging.getLogger(__name__)


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
    """`kind` is "nixl", "tcp", "auto" (both: NIXL where it is fast and safe), or "cuda_ipc" for a pool on a device. `peer` is the name by
    which peers know us. TCP binds `host`; peers connect to `advertise` (default: `host`). With TLS, NIXL only copies between processes of
    one host.

    Raises ImportError or BatonError(TRANSFER_FAILED) if `kind` is "nixl" and NIXL is not available, BatonError(TRANSFER_FAILED) if it is
    "cuda_ipc" and the driver does not share the pool.
    """
    if not isinstance(pool, KvPool):
        return CudaIpcTransport(cast(DeviceMemory, pool))
    tcp = tcp or Tcp()
    if kind == "tcp":
        return TcpTransport(pool, host, key, port=tcp.port, advertise=advertise, tls=tcp.tls)
    try:
        # NIXL and UCX are loaded here and only here: a TCP worker starts without them.
        from kvtransfer.nixl_transport import NixlTransport

        nixl = NixlTransport(peer, pool, advertise or host, ucx=ucx, in_memory_only=tcp.tls is not None)
    except (ImportError, BatonError) as error:
        if kind == "nixl":
            raise
        if sys.platform == "linux":
            log.warning("NIXL cannot be used, KV goes over TCP: %s", error)
        nixl = None
    if kind == "nixl" and nixl is not None:
        return nixl
    return AutoTransport(nixl, TcpTransport(pool, host, key, port=tcp.port, advertise=advertise, tls=tcp.tls))
