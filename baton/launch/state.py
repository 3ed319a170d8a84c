"""How other commands find a running cluster: one small file per cluster, readable only by its owner."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster that `baton up` runs."""

    name: str
    pid: int  # of the supervisor
    endpoints: dict[str, str]  # of the first router: "grpc", "http", "admin", "page"
    redis_url: str  # with its password
    log_dir: str
    born: int | None = None  # when that process started, because its pid may have been reused
    tls: dict[str, str] = field(default_factory=dict)  # what a client needs: files "cert", "key" and "ca", and "server_name"
    token: str = field(default="", repr=False)  # opens the admin port where it needs a key
    routers: list[dict[str, str]] = field(default_factory=list)  # the endpoints of each router


class StateError(RuntimeError):
    """A cluster is missing where one is needed, or exists where there must be none, or it is unknown whether there is one."""


def state_dir() -> Path:
    """BATON_STATE_DIR, or this user's folder in the system's directory for temporary files. Raises StateError if it cannot be used.

    `tempfile.gettempdir` is not used: it looks elsewhere when that directory is full, and commands would no longer find what others wrote.
    """
    given = os.environ.get("BATON_STATE_DIR")
    path = Path(given) if given else Path(os.environ.get("TMPDIR") or "/tmp") / f"baton-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:
        raise StateError(f"{path} cannot be used ({error.strerror}); make room, or set BATON_STATE_DIR") from None
    if owner != os.getuid():
        raise StateError(f"{path} belongs to another user; set BATON_STATE_DIR")
    return path


def write(state: ClusterState) -> None:
    """Raises StateError if there is no room for it."""
    path = _file(state.name)
    temporary = path.with_suffix(".new")
    try:
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(asdict(state)))
        temporary.replace(path)  # readers see all of it or nothing
    except OSError as error:
        raise StateError(f"{path} cannot be written ({error.strerror}); make room, or set BATON_STATE_DIR") from None


def read(name: str) -> ClusterState | None:
    """The cluster of that name, if its supervisor is alive. Raises StateError if its file exists but cannot be read."""
    path = _file(name)
    try:
        state = ClusterState(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror}), so it is unknown whether cluster {name!r} is running") from None
    return state if alive(state.pid) and born(state.pid) == state.born else None


def running() -> list[str]:
    """The names of this user's clusters that are running here."""
    return sorted(path.stem for path in state_dir().glob("*.json") if read(path.stem) is not None)


def need(name: str) -> ClusterState:
    """Raises StateError if no such cluster is running; the error names those that are."""
    state = read(name)
    if state is None:
        others = running()
        where = f"{state_dir()} ({'BATON_STATE_DIR' if os.environ.get('BATON_STATE_DIR') else 'TMPDIR'}) knows none"
        choose = f"running: {', '.join(others)} (choose one with --name)"
        way = choose if others else f"{where}; start one with `baton up`, or name its address"
        raise StateError(f"no cluster {name!r} is running here; {way}")
    return state


def remove(name: str) -> None:
    _file(name).unlink(missing_ok=True)


def _file(name: str) -> Path:
    return state_dir() / f"{name}.json"


def alive(pid: int) -> bool:
    """Whether the process is running. A zombie, which has ended but has not been reaped by its parent, is not."""
    if _stat(pid)[:1] == ["Z"]:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def born(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if the system does not say."""
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def _stat(pid: int) -> list[str]:
    """Fields 3 (the state) and up of /proc/PID/stat; none without such a process or without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
