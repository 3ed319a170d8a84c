"""Ctrl-C while an answer streams.

Python raises KeyboardInterrupt wherever the main thread happens to be. Inside gRPC that can leave a lock held, so that cancelling the
call waits forever. So the first Ctrl-C only cancels the call, from another thread, and KeyboardInterrupt is raised when the stream has
ended. The second one is raised immediately.

The thread has ended before the interpreter does: frozen at the interpreter's exit, it could hold the lock that the call's finaliser takes.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import grpc

from baton.client import GenerateError

JOIN_S = 5.0


@contextmanager
def interruptible(stream: Any) -> Iterator[None]:
    """`stream`: has `cancel`. Call it in the main thread. Raises KeyboardInterrupt at the end if Ctrl-C cancelled the stream."""
    pressed = False
    canceller = threading.Thread(target=stream.cancel, daemon=True)

    def cancel(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        canceller.start()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    except (GenerateError, grpc.RpcError):
        if not pressed:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        canceller.join(JOIN_S)
        raise KeyboardInterrupt
