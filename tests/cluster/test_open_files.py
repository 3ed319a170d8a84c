"""The limit of open files."""

import resource

import pytest

from baton.cluster.open_files import files_for


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "left"), [(4096, 4096, 2048, 4096), (300, 4096, 2048, 2304), (300, 600, 344, 600), (100, 100, 1, 100)]
)
def test_files_are_left_for_other_uses(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, allowed: int, left: int) -> None:
    limit = [(soft, hard)]
    monkeypatch.setattr("baton.cluster.open_files.resource.getrlimit", lambda kind: limit[-1])
    monkeypatch.setattr("baton.cluster.open_files.resource.setrlimit", lambda kind, value: limit.append(value))
    assert files_for(2048) == allowed and limit[-1] == (left, hard)


def test_a_limit_that_cannot_be_raised_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, value: tuple[int, int]) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr("baton.cluster.open_files.resource.getrlimit", lambda kind: (300, resource.RLIM_INFINITY))
    monkeypatch.setattr("baton.cluster.open_files.resource.setrlimit", refuse)
    assert files_for(2048) == 44
