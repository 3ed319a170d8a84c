"""Ports of this host that are chosen before the process that will listen on them starts.

Between the two, and while a process is restarted, the system could give the port to an outgoing connection. A socket that is bound to the
port without listening prevents this: Linux gives no connection a port that a socket is bound to, yet lets another socket bind it and
listen if both set SO_REUSEADDR, as gRPC, asyncio and Redis do. Elsewhere the second could not bind, so there the port is only probed.
"""

import socket
import sys
from typing import Self


class Ports:
    """Holds ports until the end of the `with` block."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._held: list[socket.socket] = []

    def hold(self, port: int = 0) -> int:
        """`port` if one can listen on it, or any free one for 0. Raises OSError."""
        held = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((self._host, port))
            port = int(held.getsockname()[1])
        except BaseException:
            held.close()
            raise
        if sys.platform == "linux":
            self._held.append(held)
        else:
            held.close()
        return port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            self._held.pop().close()
