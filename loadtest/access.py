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
    """PEM files. Without `ca` the system's authorities are trusted. `cert` and `key` are for a server that requires client certificates."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls-cert and tls-key go together: give both or neither")
        for file in (self.ca, self.cert, self.key):
            if file is not None and not file.is_file():
                raise ValueError(f"{file}: no such file")

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
class Access:
    protocol: Protocol = "grpc"
    api_key: str | None = None
    tls: Tls | None = None

    def door(self, address: str, salt: str = "") -> "GrpcDoor | HttpDoor":
        """Only requests of doors with the same `salt` share cached prefixes."""
        if self.protocol == "http":
            return HttpDoor(address, salt, self.api_key, self.tls.context() if self.tls else None)
        read: Callable[[Path | None], bytes | None] = lambda file: file.read_bytes() if file else None  # noqa: E731
        pem = (read(self.tls.ca), read(self.tls.key), read(self.tls.cert)) if self.tls else None
        return GrpcDoor(address, salt, self.api_key, pem)
