"""A listener on loopback whose connections end at a router of a release, so that every command reaches a cluster that it has no route to.

1 `reach` finds the release's routers with the caller's own rights → 2 `Forward` opens the first connection at once, so that a missing right
is an error of the command and not a broken connection → 3 it joins each connection that it accepts to one that it opens: to the next ready
router, or to another if that fails.
"""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable

from baton.cluster.errors import BatonError, Reason, invalid
from baton.launch.kubernetes_api import Api, connect
from baton.launch.pods import ReleaseName, is_ready, name_of, port_of, selector_of

MOST = 128  # connections at once; the next ones wait to be accepted
PIECE = 1 << 16
CLOSE_S = 2.0
LOOPBACK = "127.0.0.1"


class Routers:
    """Opens connections to one door of a release's routers, in turn."""

    def __init__(self, api: Api, release: ReleaseName, door: str) -> None:
        self._api = api
        self._release = release
        self._door = door
        self._selector = selector_of(api.release(release)["router"])
        self._turn = itertools.count()

    def open(self) -> socket.socket:
        """Raises BatonError: NO_WORKER if no router is ready, else why the last one could not be reached."""
        pods = [pod for pod in self._api.pods(self._release.namespace, self._selector) if is_ready(pod)]
        failure = BatonError(Reason.NO_WORKER, f"no router of {self._release} is ready: kubectl -n {self._release.namespace} get pods")
        first = next(self._turn)
        for pod in [pods[(first + i) % len(pods)] for i in range(len(pods))]:
            port = port_of(pod, self._door)
            if port is None:
                raise invalid("kubernetes", f"{name_of(pod)} has no port {self._door!r}")
            try:
                return self._api.forward(self._release.namespace, name_of(pod), port)
            except BatonError as error:
                failure = error
        raise failure


class Forward:
    """Listens until `close`, which must be called before the interpreter ends: a thread that is frozen there, in a library's code, can
    abort the process. The threads are daemons all the same, so that one that hangs does not keep the process."""

    def __init__(self, open_one: Callable[[], socket.socket], close_all: Callable[[], None] = lambda: None) -> None:
        """Every connection calls `open_one`; raises what it raises. `close_all`: waits for what `open_one` has started."""
        self._open = open_one
        self._close_all = close_all
        self._serving: dict[socket.socket, threading.Thread] = {}
        self._spare: socket.socket | None = open_one()
        self._places = threading.BoundedSemaphore(MOST)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, name=f"forward {self.address}", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Ends all connections, and waits for that for a moment."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._accepting.join(CLOSE_S)
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()
        deadline = time.monotonic() + CLOSE_S
        for near, thread in list(self._serving.items()):
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
            thread.join(max(0.0, deadline - time.monotonic()))
        self._close_all()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far, self._spare = self._spare, None
            thread = threading.Thread(target=self._serve, args=(near, far), name="forwarded", daemon=True)
            self._serving[near] = thread
            thread.start()

    def _serve(self, near: socket.socket, far: socket.socket | None) -> None:
        try:
            with contextlib.closing(near), contextlib.closing(far or self._open()) as far:
                back = threading.Thread(target=_copy_back, args=(far, near), name="forwarded back", daemon=True)
                back.start()
                _copy(near, far)
                with contextlib.suppress(OSError):
                    far.shutdown(socket.SHUT_WR)
                back.join()
        except BatonError:
            pass  # the client sees a connection that was closed, and tries again
        finally:
            self._serving.pop(near, None)
            self._places.release()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copies until either has ended."""
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE):
            target.sendall(data)


def _copy_back(far: socket.socket, near: socket.socket) -> None:
    """Reads `far` to its end, also when `near` has gone: the thread behind it would die of a broken pipe, with a traceback."""
    _copy(far, near)
    with contextlib.suppress(OSError):
        near.shutdown(socket.SHUT_RDWR)  # wakes the other direction
    with contextlib.suppress(OSError):
        while far.recv(PIECE):
            pass


def reach(release: ReleaseName, context: str | None, door: str) -> Forward:
    """`door`: grpc, admin or http. Raises ConfigError, BatonError."""
    api = connect(context)
    return Forward(Routers(api, release, door).open, api.close)
