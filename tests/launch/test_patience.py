"""A start may take any time, as long as something changes."""

from dataclasses import replace
from typing import Any

from baton.cluster.records import StartRecord
from baton.launch.patience import COMPUTES, Patience

START_S = 100.0
FIRST = StartRecord("decode-0", "decode", 7, 1, "host", "compiling kernels", 1, 24)


def test_every_kind_of_progress_extends_the_wait() -> None:
    patience, at, record = Patience(START_S, 0.0), 0.0, FIRST
    changes: list[dict[str, Any]] = [
        {"done": 2},
        {"done": 3},
        {"step": "waiting for another process that compiles kernels", "done": 0},
        {"cpu_s": COMPUTES * START_S},
        {"cpu_s": 2 * COMPUTES * START_S},
        {"incarnation": 8},
    ]
    assert not patience.over(at, 0, [record])
    for change in changes:
        record, at = replace(record, **change), at + START_S - 1
        assert not patience.over(at, 0, [record]), change
    assert not patience.over(at + START_S - 1, 1, []), "a process is ready"
    assert patience.over(at + 2 * START_S, 1, [])


def test_what_only_waits_makes_no_progress() -> None:
    """It looks around now and then, which takes a little processor time."""
    patience, ticks = Patience(START_S, 0.0), 50
    over = [patience.over(at, 0, [replace(FIRST, cpu_s=at * COMPUTES / 2)]) for at in range(1, 1 + 2 * ticks)]
    assert over == [False] * 2 * ticks and patience.over(1 + START_S, 0, [replace(FIRST, cpu_s=1.0)])


def test_one_process_that_works_is_enough() -> None:
    patience = Patience(START_S, 0.0)
    for number in range(1, 20):
        assert not patience.over(number * START_S / 2, 0, [FIRST, replace(FIRST, name="prefill-0", done=number)])
