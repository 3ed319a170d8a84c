"""TLS of our listeners and channels: the PEM files of a process, which are read again when they change.

A certificate of a cluster names the service (`security.server_name`) and not an address. So one certificate fits every process, wherever it
runs, and no process must know the addresses of others to verify them.

A listener looks at the files at every new connection. Running connections keep the certificates that they began with. Files that cannot be
used leave the previous ones in force; a process logs this once for each attempt.
"""

import logging
import os
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from baton.cluster.config import ConfigError, SecurityConfig

log = logging.getLogger(__name__)
_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """What one reading of the files gave: their contents, and the contexts made of them.

    `client` is made when it is first asked for: without an authority of ours it reads all that the system trusts, which takes 20 ms, and a
    listener looks at the files in its event loop."""

    cert: bytes
    key: bytes
    ca: bytes | None
    server: ssl.SSLContext
    client: Callable[[], ssl.SSLContext]


class Certificates:
    """Thread-safe. Use `certificates`, so that a process has one object for each set of files."""

    def __init__(self, cert: str, key: str, ca: str | None) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._files = (cert, key, ca)
        self._lock = threading.Lock()
        self._stamp = _stamp(self._files)
        self._identity = _read(*self._files)

    def current(self) -> TlsIdentity:
        with self._lock:
            stamp = _stamp(self._files)
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
            return self._identity

    def _reload(self) -> None:
        try:
            self._identity = _read(*self._files)
        except ConfigError as error:
            log.error("keeping the previous certificates: %s", error)
        else:
            log.info("reloaded the certificates: %s", self._files[0])


@cache
def _certificates(cert: str, key: str, ca: str | None) -> Certificates:
    return Certificates(cert, key, ca)


def certificates(security: SecurityConfig) -> Certificates | None:
    """None without TLS. Raises ConfigError for files that cannot be used."""
    if security.tls_cert is None or security.tls_key is None:
        if security.tls_ca is not None:
            raise ConfigError("security.tls_ca needs tls_cert and tls_key: without them, nothing would be encrypted")
        return None
    return _certificates(security.tls_cert, security.tls_key, security.tls_ca)


def server_context(security: SecurityConfig) -> ssl.SSLContext | None:
    """Returns what a listener of asyncio needs; None without TLS. Raises ConfigError for files that cannot be used."""
    files = certificates(security)
    if files is None:
        return None
    # asyncio keeps the context that a listener began with. It calls this for every client, also for one that names no server, and the
    # certificate and the authority of the context that we set here count.
    context = _server_context(security.tls_cert or "", security.tls_key or "", security.tls_ca)

    def use_current(connection: Any, name: str | None, initial: ssl.SSLContext) -> None:
        connection.context = files.current().server

    context.sni_callback = use_current
    return context


def server_credentials(security: SecurityConfig) -> grpc.ServerCredentials | None:
    """Returns what a gRPC server needs; None without TLS. The caller must keep the object as long as the server. Raises ConfigError."""
    files = certificates(security)
    if files is None:
        return None

    def configuration() -> Any:
        now = files.current()
        return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], now.ca)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=security.tls_ca is not None)


def channel_credentials(security: SecurityConfig) -> grpc.ChannelCredentials | None:
    """Returns what a channel to a process of our cluster needs; None without TLS. Raises ConfigError."""
    files = certificates(security)
    if files is None:
        return None
    now = files.current()
    return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)


def name_options(server_name: str | None) -> tuple[tuple[str, Any], ...]:
    """Channel options with which a server must prove this name instead of its address. It must still prove it."""
    return (("grpc.ssl_target_name_override", server_name),) if server_name else ()


def _read(cert: str, key: str, ca: str | None) -> TlsIdentity:
    """Raises ConfigError."""
    client = cache(lambda: _client_context(cert, key, ca))
    try:
        authority = Path(ca).read_bytes() if ca else None
        if ca:
            ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(f"security.tls_ca: {ca} cannot be used: {error}") from None
    try:
        return TlsIdentity(Path(cert).read_bytes(), Path(key).read_bytes(), authority, _server_context(cert, key, ca), client)
    except OSError as error:
        raise ConfigError(f"security.tls_cert: {cert}, with tls_key {key}, cannot be used: {error}") from None


def _client_context(cert: str, key: str, ca: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(cert, key, _no_password)
    return context


def _no_password() -> str:
    """OpenSSL would ask the terminal for the password of an encrypted key, and wait."""
    return ""


def _server_context(cert: str, key: str, ca: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, _no_password)
    if ca:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # A session that is resumed is not verified again, so one that began under a previous authority would outlive it.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _stamp(files: tuple[str | None, ...]) -> _Stamp:
    """Changes whenever a file does; None for one that is missing."""
    return tuple(_stamp_of(file) for file in files if file)


def _stamp_of(file: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
