"""Named places where a fault can be injected. They are off, and cost nothing, unless one of two variables is set.

    BATON_FAILPOINTS="prefill.reply=exit@2,decode.step=sleep:1.5"

`NAME=ACTION[:ARGUMENT][@NTH]` acts only the NTH time that the place is passed, or every time without `@NTH`. Actions: `exit` (the process
dies as if by SIGKILL), `sleep:SECONDS`, `raise`, `flip` (the code at that place corrupts a byte of its own data).

BATON_FAILPOINTS_FOLDER names a folder that the processes of a cluster share. While it holds a file NAME with such a rule, without `NAME=`,
the point is set in all of them, running ones, too, which count from where they first meet the file. It acts once: the process whose turn it
is renames the file to NAME.reached, so a restarted process does not die again. One more action, `hold`, lasts until that file is gone.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from baton.cluster.errors import BatonError, Reason

REACHED = ".reached"  # ending of the file of a point that has acted
HELD_S = 0.005  # between two looks of a process that is held


@dataclass(slots=True)
class _Point:
    action: str
    argument: float
    nth: int | None
    passed: int = 0

    def is_due(self) -> bool:
        """Counts a pass of the place."""
        self.passed += 1
        return self.nth in (None, self.passed)


def parse(text: str) -> dict[str, _Point]:
    """Raises ValueError for text that does not have the form above."""
    points = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, rule = item.partition("=")
        rule, _, nth = rule.partition("@")
        action, _, argument = rule.partition(":")
        if not name or action not in {"exit", "sleep", "raise", "flip", "hold"}:
            raise ValueError(f"BATON_FAILPOINTS: cannot read {item!r}")
        points[name] = _Point(action, float(argument or 0), int(nth) if nth else None)
    return points


_folder = os.environ.get("BATON_FAILPOINTS_FOLDER")
_points = parse(os.environ.get("BATON_FAILPOINTS", ""))
_met: dict[tuple[str, int], _Point] = {}  # name and time of a file → its rule, of this process


def failpoint(name: str) -> bool:
    """Performs the action that is set for `name`. Returns True only for `flip`: the caller then corrupts its own data."""
    point = _points.get(name)
    if point is not None:
        return point.is_due() and _act(name, point)
    if _folder is None:
        return False
    file = Path(_folder, name)
    try:
        key = name, file.stat().st_mtime_ns
        if key not in _met:
            _met[key] = parse(f"{name}={file.read_text()}")[name]
        if not _met[key].is_due():
            return False
        file.rename(f"{file}{REACHED}")
    except FileNotFoundError:  # not set, or another process was faster
        return False
    return _act(name, _met[key])


def _act(name: str, point: _Point) -> bool:
    match point.action:
        case "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(point.argument)
        case "hold":
            while _folder is not None and Path(_folder, f"{name}{REACHED}").exists():
                time.sleep(HELD_S)
        case "raise":
            raise BatonError(Reason.INTERNAL, f"failpoint {name}")
    return point.action == "flip"
