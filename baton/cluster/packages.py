"""Makes a process run our packages, and never a file from the folder in which it was started.

`python -m` puts the working directory first on the search path, and so does an empty entry of PYTHONPATH. Many folders contain a router.py
or a models.py, and a process that looked there first would run a stranger's program. Each of our processes therefore calls `enter` before
it imports anything else, starts others with `command`, and refuses to run if one of our package names still leads to other code, for
example through PYTHONPATH.

Standard library only: this is imported before the search path can be trusted.
"""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

HOME = Path(__file__).resolve().parents[2]
NAMES = ("baton", "router", "prefill_worker", "decode_worker", "kvtransfer", "loadtest")  # the top-level packages of an installation
INTERRUPTED = 128 + signal.SIGINT
DISTRIBUTION, UNINSTALLED = "baton-llm", "0+uninstalled"


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs one of our modules with this interpreter."""
    return (sys.executable, "-P", "-m", module, *arguments)


def version() -> str:
    """Ours; UNINSTALLED in a checkout that is not installed."""
    from importlib import metadata  # it takes 25 ms

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return UNINSTALLED


def enter() -> None:
    """Must be called first in each of our processes. Ends the process, with a message, if one of our package names leads to other code.

    Until the program installs its own handlers, Ctrl-C ends it without a traceback: imports alone take a second.
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


@contextmanager
def importing() -> Iterator[None]:
    """Surrounds the imports at a start. What they make stays: to look for garbage in it would take a tenth of the start, and would delay
    answers later. An installation for applications lacks what a cluster needs: this ends the process and names the package.
    """
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in NAMES:
            raise
        sys.exit(f"baton: {error.name} is not installed. Without extras, there is only the client: pip install 'baton-llm[serve]'")
    finally:
        gc.freeze()
        gc.enable()


def without_working_directory(path: Sequence[str], pythonpath: str, cwd: str) -> list[str]:
    """`path` (a sys.path) without the entries that only stand for the working directory. Folders named by PYTHONPATH and our home stay."""
    entries = pythonpath.split(os.pathsep) if pythonpath else []
    named = {os.path.abspath(entry) for entry in entries if entry}
    doubtful = 1 + len(entries)  # the interpreter puts the working directory first, then PYTHONPATH
    kept = {*named, str(HOME)} - {""}
    return [entry for at, entry in enumerate(path) if at >= doubtful or entry not in ("", cwd) or os.path.abspath(entry or cwd) in kept]


def find_stranger() -> str | None:
    """Says what is wrong if one of our names does not lead to the package next to this one; None if all do."""
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return f"the package {name} is missing: it should be in {HOME}; install Baton again"
        found = Path(spec.origin or next(iter(spec.submodule_search_locations or ()), "?")).resolve()
        if found != HOME / name / "__init__.py":
            return f"{name} leads to {found}, which is not Baton's ({HOME / name}); remove its folder from PYTHONPATH, or rename the file"
    return None


def _leave(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)
