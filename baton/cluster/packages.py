"""Whose code a process runs: our packages, never a file of the folder in which it was started.

`python -m` puts the working directory first on the search path, and so does an empty entry of PYTHONPATH. Many folders hold a router.py
or a models.py; a process that looked there first would run a stranger's program. Every process of ours therefore calls `enter` before it
imports anything else, starts others with `command`, and refuses to run when one of our names still belongs to somebody else, as it does
when PYTHONPATH says so.

Standard library only: this is imported before the search path can be trusted.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

HOME = Path(__file__).resolve().parents[2]
NAMES = ("baton", "router", "prefill_worker", "decode_worker", "kvtransfer", "loadtest")  # what an installation adds to the top level
INTERRUPTED = 128 + signal.SIGINT


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module of ours with this interpreter."""
    return (sys.executable, "-P", "-m", module, *arguments)


def enter() -> None:
    """Called first in every process of ours. Ends the process, with a message, when one of our packages is somebody else's.

    Until the program installs handlers of its own, Ctrl-C ends it without a traceback: imports alone take a second.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    if not sys.flags.safe_path:
        given = os.environ.get("PYTHONPATH", "")
        sys.path[:] = without_working_directory(sys.path, given, os.getcwd())
        inherited = [str(HOME)] if sys.path[:1] == [str(HOME)] else []  # a checkout that is not installed, started in its own folder
        entries = [*inherited, *(entry for entry in given.split(os.pathsep) if entry)]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entries))
    os.environ["PYTHONSAFEPATH"] = "1"  # for whatever this process starts
    if stranger := find_stranger():
        sys.exit(f"baton: {stranger}")


def without_working_directory(path: Sequence[str], pythonpath: str, cwd: str) -> list[str]:
    """`path` (a sys.path) without the entries that only mean "where I happen to be". What PYTHONPATH names stays; so does our own home."""
    entries = pythonpath.split(os.pathsep) if pythonpath else []
    named = {os.path.abspath(entry) for entry in entries if entry}
    doubtful = 1 + len(entries)  # the interpreter puts the working directory first, then PYTHONPATH
    kept = {*named, str(HOME)} - {""}
    return [entry for at, entry in enumerate(path) if at >= doubtful or entry not in ("", cwd) or os.path.abspath(entry or cwd) in kept]


def find_stranger() -> str | None:
    """What is wrong when one of our names does not lead to the package that lies beside this one; None when all do."""
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return f"the package {name} is missing: it should lie in {HOME}; install Baton again"
        found = Path(spec.origin or next(iter(spec.submodule_search_locations or ()), "?")).resolve()
        if found != HOME / name / "__init__.py":
            return f"{name} would be {found}, which is not Baton's ({HOME / name}); take its folder off PYTHONPATH, or rename the file"
    return None


def _leave(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)
