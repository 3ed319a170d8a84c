"""Health on a port of its own, for what watches processes from outside. It is plain HTTP: a kubelet's probe carries no client certificate.

/livez      the process works. Restarting it is the right cure if not. Never depends on another process.
/startupz   it has started. Never depends on another process either: whoever waits for it too long restarts it.
/readyz     it takes requests. Not while it starts or drains, nor in a router that does not know the cluster yet.
"""

from collections.abc import Callable

from baton.cluster.config import Config, SecurityConfig
from baton.cluster.lifecycle import Stage
from baton.cluster.page_server import TEXT, Headers, Page, PageServer

OK = (200, TEXT, b"ok\n")


class HealthServer(PageServer):
    def __init__(
        self,
        config: Config,
        stage: Callable[[], Stage],
        *,
        stalled_s: Callable[[], float] = lambda: 0.0,
        waits_for: Callable[[], str] = lambda: "",
    ) -> None:
        """`stalled_s`: for how long the process has made no progress although it has work. An event loop that hangs answers nothing.
        `waits_for`: what keeps a process that has started from taking requests, or empty."""
        super().__init__(config, SecurityConfig())
        self._stage = stage
        self._stalled_s = stalled_s
        self._waits_for = waits_for
        self._hang_s = config.launcher.hang_s

    async def answer(self, path: bytes, headers: Headers) -> Page:
        stage = self._stage()
        match path:
            case b"/livez":
                stalled_s = self._stalled_s()
                return OK if stalled_s < self._hang_s else _not(f"no progress for {stalled_s:.0f} s")
            case b"/startupz":
                return _not(stage.value) if stage is Stage.STARTING else OK
            case b"/readyz":
                why = self._waits_for() if stage is Stage.READY else stage.value
                return _not(why) if why else OK
        return 404, TEXT, b"there are /livez, /startupz and /readyz\n"


def _not(why: str) -> Page:
    return 503, TEXT, f"{why}\n".encode()
