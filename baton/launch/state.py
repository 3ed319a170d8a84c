"""Where a running cluster leaves word of itself for the other commands: one small file per cluster, readable by its owner only."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster that `baton up` runs."""

    name: str
    pid: int  # of the supervisor
    endpoints: dict[str, str]  # "grpc", "http", "admin", "page"
    redis_url: str  # with its password
    log_dir: str
    born: int | None = None  # when that process started: its number may be another's by now
    tls: dict[str, str] = field(default_factory=dict)  # "cert", "key", "ca": files that a client of this cluster needs, if any


class StateError(RuntimeError):
    """There is no cluster where one is needed, or one where there must be none, or nobody can tell."""


def state_dir() -> Path:
    """BATON_STATE_DIR, or a folder of this user's in the system's place for temporary files. Raises StateError when it cannot be used.

    Not `tempfile.gettempdir`: that looks elsewhere when the place is full, and commands would no longer find what others wrote there.
    """
    given = os.environ.get("BATON_STATE_DIR")
    path = Path(given) if given else Path(os.environ.get("TMPDIR") or "/tmp") / f"baton-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:
        raise StateError(f"{path} cannot be used ({error.strerror}); make room, or set BATON_STATE_DIR") from None
    if owner != os.getuid():
        raise StateError(f"{path} belongs to somebody else; set BATON_STATE_DIR")
    return path


def write(state: ClusterState) -> None:
    """Raises StateError when there is no room for it."""
    path = _file(state.name)
    temporary = path.with_suffix(".new")
    try:
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(asdict(state)))
        temporary.replace(path)  # readers see the whole or nothing
    except OSError as error:
        raise StateError(f"{path} cannot be written ({error.strerror}); make room, or set BATON_STATE_DIR") from None


def read(name: str) -> ClusterState | None:
    """The cluster of that name, if its supervisor is alive. Raises StateError when its file is there but cannot be read."""
    path = _file(name)
    try:
        state = ClusterState(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror}): whether cluster {name!r} is running is not known") from None
    return state if alive(state.pid) and born(state.pid) == state.born else None


def running() -> list[str]:
    """The names of the clusters of this user that run here."""
    return sorted(path.stem for path in state_dir().glob("*.json") if read(path.stem) is not None)


def need(name: str) -> ClusterState:
    """Raises StateError when no such cluster runs; it names those that do."""
    state = read(name)
    if state is None:
        others = running()
        way = f"running: {', '.join(others)} (choose one with --name)" if others else "start one with `baton up`, or name its address"
        raise StateError(f"no cluster {name!r} is running here; {way}")
    return state


def remove(name: str) -> None:
    _file(name).unlink(missing_ok=True)


def _file(name: str) -> Path:
    return state_dir() / f"{name}.json"


def alive(pid: int) -> bool:
    """Whether the process runs. One that ended and was not yet fetched by its parent does not."""
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
    """When the process started, in clock ticks since the system did; None where the system does not say."""
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def _stat(pid: int) -> list[str]:
    """Fields 3 (the state) and up of /proc/PID/stat; none without such a process or without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
