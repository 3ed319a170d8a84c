"""Who may use the doors of a cluster's operator: the router's admin port, the live page, and /metrics of every process.

on loopback            everybody on this host
with mutual TLS        everybody with a certificate of the cluster's authority
with API keys          who has a key with `admin=yes`, or the cluster's own token; the page takes the key of any tenant
none of these          nobody: the process does not start, unless `security.open_admin` says that the network is trusted

Health on its own port (`telemetry.health_port`) is open by design: it tells nothing but whether the process works.
"""

import hmac
import logging

from baton.cluster.address import is_loopback
from baton.cluster.config import Config, ConfigError
from baton.cluster.errors import BatonError, Reason
from baton.cluster.keys import ApiKeys

log = logging.getLogger(__name__)


def check_doors(config: Config) -> None:
    """Raises ConfigError if everybody on the network could use the operator's doors."""
    security, host = config.security, config.cluster.host
    if security.tls_ca or is_loopback(host):
        return
    if security.open_admin:
        log.warning("the admin port, the live page and /metrics are open to everybody who reaches %s (security.open_admin)", host)
    elif not security.api_keys:
        raise ConfigError(
            f"cluster.host: on {host} the admin port, the live page and /metrics would be open to the network; set security.tls_cert,"
            " tls_key and tls_ca (mutual TLS; `baton certs` makes them), or security.api_keys, or security.open_admin on a trusted network"
        )


def token(config: Config) -> str | None:
    """What a cluster's own supervisor, and commands on its host, show at the operator's doors; None without a cluster key."""
    key = config.cluster.key
    return hmac.digest(key.encode(), b"baton operator", "sha256").hex() if key else None


def metadata(config: Config) -> tuple[tuple[str, str], ...]:
    """What shows the token in a call to an admin port."""
    return (("authorization", f"Bearer {token(config)}"),)


class Guard:
    """Checks who may use one of these doors of a process; the page has its own rule."""

    def __init__(self, config: Config, keys: ApiKeys | None = None) -> None:
        """`keys`: those of a router, which reads them again itself. Without them the guard loads the file, and reads it again when it
        changes. Raises ConfigError for a file that cannot be used."""
        security = config.security
        self._needed = bool(security.api_keys and not (security.tls_ca or security.open_admin or is_loopback(config.cluster.host)))
        self._token = token(config)
        self._own = keys is None and self._needed
        self._keys = ApiKeys.load(security.api_keys) if self._own else keys or ApiKeys()

    def check(self, authorization: str | None) -> None:
        """Raises UNAUTHENTICATED."""
        if not self._needed:
            return
        if self._own:
            self._refresh()
        if not (self._shows_token(authorization) or self._keys.is_admin(authorization)):
            raise BatonError(Reason.UNAUTHENTICATED, "this door needs an API key with admin=yes: Authorization: Bearer KEY")

    def _shows_token(self, authorization: str | None) -> bool:
        expected = f"Bearer {self._token}".encode()
        return self._token is not None and hmac.compare_digest((authorization or "").encode(errors="replace"), expected)

    def _refresh(self) -> None:
        try:
            self._keys.refresh()
        except ConfigError as error:
            log.error("keeping the previous API keys: %s", error)
