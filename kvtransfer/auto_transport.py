"""Uses NIXL where it is fast and safe, and plain TCP between all other pairs. It chooses for each peer when it connects.

NIXL reads another process's memory on the same host, or over RDMA. Over UCX's TCP, a reader that dies can kill the process that it reads
from (`kvtransfer.nixl_transport`), and a container may not allow one process to read another's memory. Such pairs use plain sockets.
"""

import logging
import struct
from collections.abc import Sequence

from baton.cluster.errors import BatonError
from kvtransfer.tcp_transport import TcpTransport
from kvtransfer.transport import Route, Transport, transfer_failed

log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")


class AutoTransport:
    """`nixl` is None where NIXL is not available (another platform, no wheel). Every worker offers TCP."""

    name = "auto"

    def __init__(self, nixl: Transport | None, tcp: TcpTransport) -> None:
        self._nixl = nixl
        self._tcp = tcp
        self._chosen: dict[str, Transport] = {}

    def address(self) -> bytes:
        """Returns the length of the NIXL address (0: none), the NIXL address, then the TCP address."""
        nixl = self._nixl.address() if self._nixl else b""
        return _LENGTH.pack(len(nixl)) + nixl + self._tcp.address()

    def connect(self, peer: str, address: bytes) -> None:
        if len(address) < _LENGTH.size:
            raise transfer_failed(f"the address of {peer} cannot be read")
        end = _LENGTH.size + _LENGTH.unpack_from(address)[0]
        nixl, tcp = address[_LENGTH.size : end], address[end:]
        if nixl and self._nixl is not None:
            try:
                self._nixl.connect(peer, nixl)
                self._chosen[peer] = self._nixl
                return
            except BatonError as error:
                log.info("reading from %s over TCP: %s", peer, error.message)
        self._tcp.connect(peer, tcp)
        self._chosen[peer] = self._tcp

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        chosen = self._chosen.get(peer)
        if chosen is None:
            raise transfer_failed(f"{peer} is not connected")
        chosen.read(peer, remote, local, timeout)

    def route(self, peer: str) -> Route | None:
        chosen = self._chosen.get(peer)
        return chosen.route(peer) if chosen else None

    def disconnect(self, peer: str) -> None:
        chosen = self._chosen.pop(peer, None)
        if chosen is not None:
            chosen.disconnect(peer)

    def close(self) -> None:
        for transport in (self._nixl, self._tcp):
            if transport is not None:
                transport.close()

    def backend_detail(self) -> str:
        return "; ".join(transport.backend_detail() for transport in (self._nixl, self._tcp) if transport is not None)
