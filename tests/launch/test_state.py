"""The state file that a running cluster leaves for other commands: complete or absent, readable only by its owner, and ignored once the
cluster is dead."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from baton.launch import state
from baton.launch.state import ClusterState, StateError, alive, born


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def mine(name: str = "baton") -> ClusterState:
    endpoints = {"grpc": "127.0.0.1:1", "admin": "127.0.0.1:2"}
    return ClusterState(name, os.getpid(), endpoints, "redis://:secret@127.0.0.1:3/0", "/logs", born(os.getpid()))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_written_state_can_be_read() -> None:
    state.write(mine())
    assert state.read("baton") == state.need("baton") == mine()
    state.write(replace(mine(), log_dir="/other"))
    assert state.need("baton").log_dir == "/other"


def test_clusters_are_distinguished_by_name() -> None:
    state.write(mine("a"))
    state.write(replace(mine("a.b"), log_dir="/other"))
    assert state.need("a").log_dir == "/logs" and state.need("a.b").log_dir == "/other"
    state.remove("a")
    assert state.read("a") is None and state.read("a.b") is not None
    state.remove("a")  # doing it again has no effect


def test_only_the_owner_can_read_the_state(folder: Path) -> None:
    before = os.umask(0)
    try:
        state.write(mine())
    finally:
        os.umask(before)
    assert mode(folder) == 0o700 and mode(folder / "baton.json") == 0o600
    assert [path.name for path in folder.iterdir()] == ["baton.json"]


def test_a_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state.write(mine())
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(StateError, match="another user; set BATON_STATE_DIR"):
        state.read("baton")


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"name": "baton"}', '{"unknown": 1}'])
def test_a_damaged_file_counts_as_no_cluster(folder: Path, content: str) -> None:
    state.write(mine())
    (folder / "baton.json").write_text(content)
    assert state.read("baton") is None


def test_without_a_cluster_the_error_points_to_baton_up() -> None:
    with pytest.raises(StateError, match=r"no cluster 'other'.*`baton up`"):
        state.need("other")


def test_a_dead_supervisor_counts_as_no_cluster() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state.write(replace(mine(), pid=child.pid, born=born(child.pid)))
    assert state.read("baton") is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(child.pid), "a zombie counts as alive"
    assert state.read("baton") is None
    child.wait()
    assert not alive(child.pid) and state.read("baton") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc can distinguish processes with the same number")
def test_a_reused_process_id_counts_as_no_cluster(folder: Path) -> None:
    """Otherwise `baton down` would end an unrelated process."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = born(os.getpid())
        assert started is not None and born(child.pid) != started
        state.write(replace(mine(), pid=child.pid))
        assert alive(child.pid) and state.read("baton") is None
        old = asdict(mine())
        del old["born"]
        (folder / "baton.json").write_text(json.dumps(old))
        assert state.read("baton") is None
    finally:
        child.kill()
        child.wait()


def test_a_process_of_another_user_is_alive() -> None:
    assert alive(1) and alive(os.getpid())


def test_the_error_names_the_running_clusters() -> None:
    state.write(mine("a.b"))
    state.write(replace(mine("dead"), born=1))
    assert state.running() == ["a.b"]
    with pytest.raises(StateError, match=r"no cluster 'other' is running here; running: a\.b"):
        state.need("other")


def test_an_unreadable_state_file_is_an_error(folder: Path) -> None:
    state.write(mine())
    (folder / "baton.json").unlink()
    (folder / "baton.json").mkdir()  # any system error will do
    with pytest.raises(StateError, match=r"baton\.json cannot be read .*, so it is unknown whether cluster 'baton' is running"):
        state.need("baton")


def test_an_unusable_state_folder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file")
    with pytest.raises(StateError, match=f"{folder} cannot be used .*BATON_STATE_DIR"):
        state.state_dir()
    folder.unlink()
    folder.mkdir()
    (folder / "baton.new").mkdir()
    with pytest.raises(StateError, match=r"baton\.json cannot be written .*make room"):
        state.write(mine())


def test_a_full_temporary_folder_is_still_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tempfile` would choose another folder, and files written earlier would not be found."""
    monkeypatch.delenv("BATON_STATE_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert state.state_dir() == tmp_path / f"baton-{os.getuid()}"
