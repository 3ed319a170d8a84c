"""TLS of the KV that moves over TCP: the certificates of the process, on both ends."""

from baton.cluster.config import SecurityConfig
from baton.cluster.tls import certificates
from kvtransfer.tcp_wire import Tls


def kv_tls(security: SecurityConfig) -> Tls | None:
    """None without TLS. Raises ConfigError for files that cannot be used."""
    files = certificates(security)
    if files is None:
        return None
    return Tls(lambda: files.current().server, lambda: files.current().client(), security.server_name)
