"""How a command reaches a cluster: its address, TLS, an API key, and whether it uses a proxy from the environment.

A cluster that was started on this machine has written down its address and its TLS files. For any other cluster, the command line names the
address, and the same configuration as for a server (--config, BATON_SECURITY_TLS_CA, _CERT, _KEY) names the files. An address that begins
with https:// uses TLS with the system's authorities. The API key comes from BATON_API_KEY and never from a flag, because other users can
read a command line.
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.client import Client, channel_options
from baton.cluster import config_layers as configuration
from baton.cluster.config import SecurityConfig
from baton.cluster.rpc import NO_PROXY, channel_credentials
from baton.launch import state

TLS = "https://"


@dataclass(frozen=True, slots=True)
class Access:
    address: str
    credentials: grpc.ChannelCredentials | None
    options: tuple[tuple[str, Any], ...] = ()

    def client(self) -> Client:
        return Client(self.address, self.credentials, os.environ.get("BATON_API_KEY"), self.options)

    def channel(self) -> grpc.Channel:
        options = channel_options(self.address, self.options)
        if self.credentials is not None:
            return grpc.secure_channel(self.address, self.credentials, options)
        return grpc.insecure_channel(self.address, options)


def find(endpoint: str, address: str | None, name: str, config: list[Path] | None = None) -> Access:
    """`endpoint`: "grpc" or "admin" of the cluster `name`, unless an address is given. Raises StateError, ConfigError, OSError."""
    if address is None:
        running = state.need(name)
        files = running.tls
        security = SecurityConfig(tls_cert=files.get("cert"), tls_key=files.get("key"), tls_ca=files.get("ca"))
        return Access(_first_open(running, endpoint), _credentials(security), (NO_PROXY,))
    security = configuration.load(config or []).config.security
    if address.startswith(TLS):
        return Access(address.removeprefix(TLS).rstrip("/"), _credentials(security) or grpc.ssl_channel_credentials())
    return Access(address, _credentials(security))


def _first_open(running: state.ClusterState, endpoint: str) -> str:
    """The address of the first router that accepts a connection; the first router's if none does."""
    for endpoints in running.routers:
        host, _, port = endpoints[endpoint].rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=0.5):
            return endpoints[endpoint]
    return running.endpoints[endpoint]


def _credentials(security: SecurityConfig) -> grpc.ChannelCredentials | None:
    return channel_credentials(security) if security.tls_cert or security.tls_ca else None
