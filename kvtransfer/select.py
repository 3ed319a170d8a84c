"""Makes the transport that the configuration asks for, as far as this platform allows."""

import logging
import sys

from baton.cluster.errors import BatonError
from baton.engine.kvcache import KvPool
from kvtransfer.auto_transport import AutoTransport
from kvtransfer.tcp_transport import TcpTransport
from kvtransfer.transport import Transport

log = logging.getLogger(__name__)


def make_transport(
    kind: str, *, peer: str, pool: KvPool, host: str, key: bytes, ucx_tls: str | None = None, ucx_net_devices: str | None = None
) -> Transport:
    """`kind` is "nixl", "tcp" or "auto" (both: NIXL where it is fast and safe). `peer` is the name by which peers know us.

    Raises ImportError or BatonError(TRANSFER_FAILED) if `kind` is "nixl" and NIXL is not available.
    """
    if kind == "tcp":
        return TcpTransport(pool, host, key)
    try:
        # NIXL and UCX are loaded here and only here: a TCP worker starts without them.
        from kvtransfer.nixl_transport import NixlTransport

        nixl = NixlTransport(peer, pool, host, tls=ucx_tls, net_devices=ucx_net_devices)
    except (ImportError, BatonError) as error:
        if kind == "nixl":
            raise
        if sys.platform == "linux":
            log.warning("NIXL cannot be used, KV goes over plain TCP: %s", error)
        return AutoTransport(None, TcpTransport(pool, host, key))
    return nixl if kind == "nixl" else AutoTransport(nixl, TcpTransport(pool, host, key))
