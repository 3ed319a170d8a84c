"""Where a running cluster leaves word of itself for the other commands: one small file per cluster, readable by its owner only."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
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


class StateError(RuntimeError):
    """There is no cluster where one is needed, or one where there must be none."""


def state_dir() -> Path:
    """BATON_STATE_DIR, or a folder of this user's in the system's place for temporary files."""
    given = os.environ.get("BATON_STATE_DIR")
    path = Path(given) if given else Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise StateError(f"{path} belongs to somebody else; set BATON_STATE_DIR")
    return path


def write(state: ClusterState) -> None:
    path = _file(state.name)
    temporary = path.with_suffix(".new")
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(asdict(state)))
    temporary.replace(path)  # readers see the whole or nothing


def read(name: str) -> ClusterState | None:
    """The cluster of that name, if its supervisor is alive."""
    try:
        state = ClusterState(**json.loads(_file(name).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return state if alive(state.pid) and born(state.pid) == state.born else None


def need(name: str) -> ClusterState:
    """Raises StateError when no such cluster runs."""
    state = read(name)
    if state is None:
        raise StateError(f"no cluster {name!r} is running here; start one with `baton up`, or name its address")
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
