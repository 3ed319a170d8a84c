"""Failpoints that a test sets in running processes."""

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.cluster import failpoint as subject
from baton.cluster.errors import BatonError
from baton.cluster.failpoint import REACHED, failpoint, parse

PROCESS = """
from baton.cluster.failpoint import failpoint
while True:
    input()
    print(failpoint("here"), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(subject, "_folder", str(tmp_path))
    monkeypatch.setattr(subject, "_met", {})
    return tmp_path


def test_a_point_acts_once_when_its_turn_comes(folder: Path) -> None:
    assert not failpoint("here")
    (folder / "here").write_text("flip@3")
    assert [failpoint("here") for _ in range(5)] == [False, False, True, False, False]
    assert [file.name for file in folder.iterdir()] == [f"here{REACHED}"]


def test_it_counts_from_where_it_was_set_again(folder: Path) -> None:
    for _ in range(2):
        (folder / "here").write_text("flip@2")
        assert [failpoint("here") for _ in range(3)] == [False, True, False]


def test_other_points_are_not_meant(folder: Path) -> None:
    (folder / "there").write_text("raise")
    assert not failpoint("here")
    with pytest.raises(BatonError, match="there"):
        failpoint("there")


def test_of_several_processes_one_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have met the rule, and both wait for their second pass."""
    monkeypatch.setenv("BATON_FAILPOINTS_FOLDER", str(tmp_path))
    (tmp_path / "here").write_text("flip@2")
    with process() as one, process() as other:
        assert [passes(each) for each in (one, other, other, one, one)] == [False, False, True, False, False]


def test_a_process_is_held_until_its_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_FAILPOINTS_FOLDER", str(tmp_path))
    (tmp_path / "here").write_text("hold@2")
    with process() as held:
        assert not passes(held) and held.stdin and held.stdout
        held.stdin.write("\n")
        held.stdin.flush()
        reached, deadline = tmp_path / f"here{REACHED}", time.monotonic() + 60
        while not reached.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not select.select([held.stdout], [], [], 0.1)[0]
        reached.unlink()
        assert held.stdout.readline() == "False\n"


def passes(process: "subprocess.Popen[str]") -> bool:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline() == "True\n"


@contextmanager
def process() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("text", ["here", "here=burn", "=exit", "here=exit@x", "here=sleep:x"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)
