"""Becomes a command that cannot outlive its parent: python -I -S leash.py PARENT_PID CORES COMMAND...

It is a separate program and not a `preexec_fn`, because Python code between fork and exec can deadlock in a process with threads (gRPC's,
Ray's). It uses only the standard library, without `site`, and takes about 25 ms. The pid stays the same. CORES is a list like 0,2,3, or
empty for any.

The kernel's guarantee (PR_SET_PDEATHSIG) is narrower than its name: SIGKILL is sent when the *thread* that started us ends, the setting is
not inherited by our own children, and it does not exist outside Linux; there, a killed launcher leaves its processes behind.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise ProcessLookupError(f"process {parent}, our parent, is gone")  # it ended before the call above took effect


def default_signals() -> None:
    """Restores the defaults. Signals that are ignored or blocked stay so across exec: Ray blocks SIGINT in its workers, Python ignores
    SIGPIPE."""
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def main(parent: str, cores: str, *command: str) -> str:
    """Returns only if something went wrong, and says what."""
    try:
        die_with(int(parent))
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        default_signals()
        os.execvp(command[0], command)
    except OSError as error:
        return f"cannot start {command[0]}: {error}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
