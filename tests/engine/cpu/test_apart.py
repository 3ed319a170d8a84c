"""Kernels are compiled by another process, and its progress is told here. (That code has other bits where it was compiled takes a minute to
show: an empty BATON_KERNEL_CACHE, and the log-probabilities of two processes.)"""

import logging
from pathlib import Path

import pytest

from baton.engine.core.progress import Step, told_to
from baton.engine.cpu import apart
from baton.engine.cpu.kernel_cache import OWN, VARIABLE, place_of


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))


def told() -> list[Step]:
    steps: list[Step] = []
    apart.compile_apart.cache_clear()
    with told_to(steps.append):
        apart.compile_apart()
    return steps


def test_the_progress_of_the_process_that_compiles_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "PROGRAM", 'import baton.engine.cpu.kernel_cache\nfor n in (1, 2): print(f\'["compiling", {n}, 2, ""]\')')
    assert told() == [Step("compiling", 1, 2), Step("compiling", 2, 2)]


def test_where_all_kernels_are_there_no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(OWN)
    assert place is not None
    place.finish()
    monkeypatch.setattr(apart, "PROGRAM", 'print(\'["compiling", 1, 1, ""]\')')
    assert told() == []


def test_it_is_done_once_and_not_by_the_process_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "PROGRAM", 'print(\'["compiling", 1, 1, ""]\')')
    assert told() == [Step("compiling", 1, 1)]
    steps: list[Step] = []
    with told_to(steps.append):
        apart.compile_apart()
    assert steps == []
    monkeypatch.setenv(apart.APART, "1")
    assert told() == []


def test_a_process_that_fails_or_hangs_is_noted_and_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(apart, "WITHIN_S", 0.5)
    for program in ("raise SystemExit(3)", "import time; time.sleep(60)"):
        monkeypatch.setattr(apart, "PROGRAM", program)
        with caplog.at_level(logging.WARNING):
            assert told() == []
    assert [record.args for record in caplog.records] == [(3,), (-9,)]
