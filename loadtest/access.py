"""How the load test connects to a door: the protocol, the API key, and plain TCP or TLS."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loadtest.grpc_door import GrpcDoor
from loadtest.http_door import HttpDoor

Protocol = Literal["grpc", "http"]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. Without `ca` the system's authorities are trusted. `cert` and `key` are for a server that requires client certificates.
    `server_name`: what the server's certificate must name, if not the address."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        """Raises ValueError for a file that is not PEM."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert and self.key:
                context.load_cert_chain(self.cert, self.key)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"TLS: {error}") from None
        return context


@dataclass(frozen=True, slots=True)
class DoorAccess:
    protocol: Protocol = "grpc"
    api_key: str | None = None
    tls: Tls | None = None

    def door(self, address: str, salt: str = "") -> "GrpcDoor | HttpDoor":
        """Only requests of doors with the same `salt` share cached prefixes."""
        name = self.tls.server_name if self.tls else None
        if self.protocol == "http":
            return HttpDoor(address, salt, self.api_key, self.tls.context() if self.tls else None, name)
        read: Callable[[Path | None], bytes | None] = lambda file: file.read_bytes() if file else None  # noqa: E731
        pem = (read(self.tls.ca), read(self.tls.key), read(self.tls.cert)) if self.tls else None
        return GrpcDoor(address, salt, self.api_key, pem, name)
