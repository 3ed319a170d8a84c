"""The list of protections fits the code, and what judges it is not deceived."""

import ast
import os
from dataclasses import replace
from pathlib import Path

import pytest
from each import for_each
from protections import PROTECTIONS, ROOT, Protection, judge, stale, tried

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
CODE = "def allowed(number):\n    return number < 3\n"
TEST = "from code_of_it import allowed\n\n\ndef test_a_large_number_is_refused():\n    assert not allowed(3)\n"
ENTRY = Protection("numbers are bounded", "code_of_it.py", "number < 3", "True", ("test_it.py::test_a_large_number_is_refused",))
BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}  # pytest's own start, and no more


@for_each(PROTECTIONS, lambda one: one.name)
def test_every_protection_is_in_the_code_once_and_has_tests(one: Protection) -> None:
    assert not stale(ROOT, [one])
    assert one.tests and one.before != one.after
    for test in one.tests:
        file, _, name = test.partition("::")
        functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, FUNCTIONS)}
        assert name.partition("[")[0] in functions, test


def test_each_has_a_name_of_its_own() -> None:
    assert len({one.name for one in PROTECTIONS}) == len(PROTECTIONS) >= 10


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "code_of_it.py").write_text(CODE)
    (tmp_path / "test_it.py").write_text(TEST)
    return tmp_path


@pytest.mark.parametrize("text", ["number < 4", "number"])
def test_a_text_that_is_gone_or_there_twice_is_told(text: str, project: Path) -> None:
    assert not stale(project, [ENTRY])
    [told] = stale(project, [replace(ENTRY, before=text)])
    assert "numbers are bounded" in told and "code_of_it.py" in told


def test_a_protection_that_a_test_notices_is_caught_and_the_code_is_as_before(project: Path) -> None:
    assert tried(project, ENTRY.tests, BARE) == "passed"
    assert judge(project, ENTRY, BARE) == "caught"
    assert (project / "code_of_it.py").read_text() == CODE and tried(project, ENTRY.tests, BARE) == "passed"


def test_an_entry_that_changes_nothing_survives(project: Path) -> None:
    assert judge(project, replace(ENTRY, after="3 > number"), BARE) == "survived"
    (project / "test_it.py").write_text(f"{TEST}\n\ndef test_of_something_else():\n    assert allowed(2)\n")
    both = replace(ENTRY, tests=(*ENTRY.tests, "test_it.py::test_of_something_else"))
    assert judge(project, both, BARE) == "survived", "each of its tests must fail"


@pytest.mark.parametrize("after", ["number <", "nowhere < 3"])
def test_a_mutant_that_is_no_program_is_not_caught(after: str, project: Path) -> None:
    verdict = judge(project, replace(ENTRY, after=after), BARE)
    assert verdict not in ("caught", "survived") and verdict


def test_a_test_that_is_not_there_or_skipped_catches_nothing(project: Path) -> None:
    assert "pytest ended with" in judge(project, replace(ENTRY, tests=("test_it.py::test_of_nothing",)), BARE)
    (project / "test_it.py").write_text(TEST.replace("def test", "import pytest\n\n\n@pytest.mark.skip\ndef test"))
    assert judge(project, ENTRY, BARE) == "skipped"
    assert "PYTEST_CURRENT_TEST" in os.environ, "what this run says of itself is not passed on"
