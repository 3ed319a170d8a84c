"""Kernels are compiled by another process, and its progress is told here. (That code has other bits where it was compiled takes a minute to
show: an empty BATON_KERNEL_CACHE, and the log-probabilities of two processes.)"""

import logging
from pathlib import Path

import pytest

from baton.engine.core.progress import Step, told_to
from baton.engine.cpu import apart
from baton.engine.cpu.kernel_cache import ALL, GROUPS, HERE, OWN, VARIABLE, place_of


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))


def told() -> list[Step]:
    steps: list[Step] = []
    apart.compile_apart.cache_clear()
    with told_to(steps.append):
        apart.compile_apart(ALL)
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
        apart.compile_apart(ALL)
    assert steps == []
    with told_to(steps.append):
        apart.compile_apart("int4")
    assert steps == [Step("compiling", 1, 1)], "another group"
    monkeypatch.setenv(apart.APART, "1")
    assert told() == []


def test_a_process_that_fails_or_hangs_is_noted_and_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(apart, "WITHIN_S", 0.5)
    for program in ("raise SystemExit(3)", "import time; time.sleep(60)"):
        monkeypatch.setattr(apart, "PROGRAM", program)
        with caplog.at_level(logging.WARNING):
            assert told() == []
    assert [record.args for record in caplog.records] == [(3,), (-9,)]


@pytest.mark.parametrize("group", GROUPS)
def test_what_only_some_models_need_is_kept_apart(group: str) -> None:
    """A model without experts, int8 or int4 does not wait for their kernels, and where these are missing the others are complete."""
    whole, part = place_of(OWN), place_of(HERE / f"{group}.py")
    assert whole is not None and part is not None and whole.folder == part.folder
    whole.finish()
    assert whole.complete and not part.complete
    part.finish()
    assert part.complete
