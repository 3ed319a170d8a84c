"""SIGUSR2 asks a process to write down what it has decided lately.

A thread waits for the signal, so a process whose event loop or engine hangs answers, too, unless something keeps the interpreter's lock. A
thread that a library started earlier may get the signal all the same: then Python's handler acts.
"""

import signal
import threading
from collections.abc import Callable

SIGNAL = getattr(signal, "SIGUSR2", None)  # not everywhere
WAITS = hasattr(signal, "sigwait")


def hold_back() -> None:
    """The signal waits, for this thread and those that it starts. It would end the process."""
    if SIGNAL is not None and WAITS:
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def listen(act: Callable[[], object]) -> None:
    """Calls `act` in a thread, each time that the signal comes. For the main thread."""
    if SIGNAL is None or not WAITS:
        return
    number = SIGNAL
    signal.signal(number, lambda *_: threading.Thread(target=act, daemon=True).start())

    def wait() -> None:
        while True:
            signal.sigwait({number})
            act()

    threading.Thread(target=wait, name="witness", daemon=True).start()
