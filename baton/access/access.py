"""A way to one door of a cluster: its address, TLS, the API key, and whether a proxy from the environment is used.

A cluster that was started on this machine has written down its addresses and its TLS files. For any other cluster the flags name them, or
the profile, or, for the files, the configuration of the cluster (--config, BATON_SECURITY_TLS_CA, _CERT, _KEY). What comes first wins:

    address       --address, --name, --kubernetes, the profile, the cluster `baton` on this machine
    everything    flags, BATON_API_KEY, the configuration of the cluster, the profile
    on this machine   flags, BATON_API_KEY, what the cluster wrote down, and for the key the profile. The admin port takes the cluster's
                      own token before any key, because BATON_API_KEY may be that of a tenant

With --kubernetes the way is a port-forward to one of the release's routers, which lasts as long as this process.
"""

import atexit
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import grpc

from baton.access.options import ClientIdentity, ClusterOptions
from baton.access.profile import Profile, read
from baton.client import Client, channel_options, targets_of
from baton.cluster.config import ConfigError, SecurityConfig
from baton.cluster.config_layers import load
from baton.cluster.config_router import RouterConfig
from baton.cluster.rpc import NO_PROXY
from baton.launch import state
from baton.launch.pods import ReleaseName
from baton.launch.port_forward import reach

TLS, PLAIN = "https://", "http://"
DEFAULT_PORTS = {"grpc": RouterConfig().port, "admin": RouterConfig().admin_port, "http": RouterConfig().http_port}
DEFAULT_NAME = "baton"
Endpoint = Literal["grpc", "admin", "http"]


@dataclass(frozen=True, slots=True)
class Access:
    address: str
    identity: ClientIdentity
    options: tuple[tuple[str, Any], ...] = ()
    others: tuple[str, ...] = ()  # where the same cluster can be reached, too

    @property
    def addresses(self) -> list[str]:
        return [self.address, *self.others]

    def client(self) -> Client:
        """Raises OSError for a file that cannot be read."""
        return Client(self.addresses, self._credentials(), self.identity.api_key, self.options, server_name=self.identity.server_name)

    def channel(self) -> grpc.Channel:
        """Every call on it carries the API key. Raises OSError for a file that cannot be read."""
        options, credentials = channel_options(self.address, self.options, self.identity.server_name), self._credentials()
        plain = grpc.insecure_channel(self.address, options) if credentials is None else None
        opened = plain or grpc.secure_channel(self.address, credentials, options)
        return grpc.intercept_channel(opened, _Bearer(self.identity.api_key)) if self.identity.api_key else opened

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if not self.identity.tls:
            return None
        files = (self.identity.ca, self.identity.key, self.identity.cert)
        return grpc.ssl_channel_credentials(*(file.read_bytes() if file else None for file in files))


def find(endpoint: Endpoint, place: ClusterOptions, identity: ClientIdentity, env: Mapping[str, str] = os.environ) -> Access:
    """Raises StateError, ConfigError, and BatonError for a release that cannot be reached."""
    profile = read(env)
    if place.release is not None:
        return _in_kubernetes(endpoint, place.release, place.context, identify(identity, place.config, env, profile))
    address = place.address or (None if place.name else profile.address_of(endpoint))
    if address is None:
        running = state.need(place.name or profile.name or DEFAULT_NAME)
        files: dict[str, Any] = {name: Path(file) if name != "server_name" else file for name, file in running.tls.items()}
        own, last = ClientIdentity(**files), ClientIdentity(api_key=profile.api_key)
        shown = replace(identity, api_key=running.token or identity.api_key) if endpoint == "admin" else identity
        first, *others = _by_reach(running, endpoint)
        return Access(first, _checked(_first(shown, own, last)), (NO_PROXY,), tuple(others))
    found = identify(identity, place.config, env, profile)
    try:
        first, *others = targets_of(address.removeprefix(TLS).removeprefix(PLAIN).rstrip("/"), DEFAULT_PORTS[endpoint])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Access(first, replace(found, tls=True) if address.startswith(TLS) else found, others=tuple(others))


def _in_kubernetes(endpoint: Endpoint, release: ReleaseName, context: str | None, identity: ClientIdentity) -> Access:
    forward = reach(release, context, endpoint)
    atexit.register(forward.close)
    return Access(forward.address, forwarded(identity), (NO_PROXY,))


def forwarded(identity: ClientIdentity) -> ClientIdentity:
    """A certificate names the service, and never the address of the port-forward."""
    return replace(identity, server_name=identity.server_name or SecurityConfig().server_name) if identity.tls else identity


def _by_reach(running: state.ClusterState, endpoint: Endpoint) -> list[str]:
    """The addresses of the cluster's routers, those that accept a connection first."""
    addresses = [endpoints[endpoint] for endpoints in running.routers] or [running.endpoints[endpoint]]
    return sorted(addresses, key=lambda address: not _accepts(address)) if len(addresses) > 1 else addresses


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=0.5).close()
    except OSError:
        return False
    return True


def identify(
    identity: ClientIdentity, config: list[Path] | None = None, env: Mapping[str, str] = os.environ, profile: Profile | None = None
) -> ClientIdentity:
    """Completes what the flags leave open. Raises ConfigError."""
    profile = read(env) if profile is None else profile
    own = ClientIdentity(**{name: getattr(profile, name) for name in ClientIdentity.__slots__})
    return _checked(_first(identity, _of_a_server(config, env), own))


def _of_a_server(config: list[Path] | None, env: Mapping[str, str]) -> ClientIdentity:
    loaded = load(config or [], env)
    security = loaded.config.security
    files: dict[str, Any] = {name: Path(file) for name in ("ca", "cert", "key") if (file := getattr(security, f"tls_{name}"))}
    named = files or loaded.sources["security.server_name"] != "default"
    return ClientIdentity(**files, server_name=security.server_name if named else None)


def _first(*layers: ClientIdentity) -> ClientIdentity:
    """Each value from the first layer that has it."""
    values = {field.name: [getattr(layer, field.name) for layer in layers] for field in fields(ClientIdentity)}
    first: dict[str, Any] = {name: next(filter(None, given), given[-1]) for name, given in values.items()}
    return ClientIdentity(**first)


def _checked(identity: ClientIdentity) -> ClientIdentity:
    """Checks the files, and switches TLS on if one is named. Raises ConfigError."""
    if (identity.cert is None) != (identity.key is None):
        raise ConfigError("cert and key go together: give both or neither")
    for file in (identity.ca, identity.cert, identity.key):
        if file is not None and not file.is_file():
            raise ConfigError(f"{file}: no such file")
    return replace(identity, tls=bool(identity.tls or identity.ca or identity.cert))


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Adds the API key to every call."""

    def __init__(self, key: str) -> None:
        self._key = key

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_key(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_key(details), request)

    def _with_key(self, details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), ("authorization", f"Bearer {self._key}")])
