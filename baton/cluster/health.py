"""Health on a port of its own, for what watches processes from outside. It is plain HTTP: a kubelet's probe carries no client certificate.

/livez    the process works. Restarting it is the right cure if not. Never depends on another process.
/readyz   it takes requests. Not while it starts or drains.
"""

from collections.abc import Callable

from baton.cluster.config import Config, SecurityConfig
from baton.cluster.page_server import TEXT, Headers, Page, PageServer


class HealthServer(PageServer):
    def __init__(self, config: Config, ready: Callable[[], bool], stalled_s: Callable[[], float] = lambda: 0.0) -> None:
        """`stalled_s`: for how long the process has made no progress although it has work. An event loop that hangs answers nothing."""
        super().__init__(config, SecurityConfig())
        self._ready = ready
        self._stalled_s = stalled_s
        self._hang_s = config.launcher.hang_s

    async def answer(self, path: bytes, headers: Headers) -> Page:
        match path:
            case b"/livez":
                stalled_s = self._stalled_s()
                return (200, TEXT, b"ok\n") if stalled_s < self._hang_s else (503, TEXT, b"no progress for %.0f s\n" % stalled_s)
            case b"/readyz":
                return (200, TEXT, b"ok\n") if self._ready() else (503, TEXT, b"not ready\n")
        return 404, TEXT, b"there are /livez and /readyz\n"
