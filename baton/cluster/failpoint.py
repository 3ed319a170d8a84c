"""Named places where a fault can be injected. They are off, and cost nothing, unless BATON_FAILPOINTS is set.

    BATON_FAILPOINTS="prefill.reply=exit@2,decode.step=sleep:1.5"

`NAME=ACTION[:ARGUMENT][@NTH]` acts only the NTH time that the place is passed, or every time without `@NTH`. Actions: `exit` (the process
dies as if by SIGKILL), `sleep:SECONDS`, `raise`, `flip` (the code at that place corrupts a byte of its own data). BATON_FAILPOINTS_ONCE
names a folder that the processes of a cluster share; each point then acts only once among all of them, so a restarted process does not die
again.
"""

import os
import signal
import time
from dataclasses import dataclass

from baton.cluster.errors import BatonError, Reason


@dataclass(slots=True)
class _Point:
    action: str
    argument: float
    nth: int | None
    passed: int = 0


def parse(text: str) -> dict[str, _Point]:
    """Raises ValueError for text that does not have the form above."""
    points = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, rule = item.partition("=")
        rule, _, nth = rule.partition("@")
        action, _, argument = rule.partition(":")
        if not name or action not in {"exit", "sleep", "raise", "flip"}:
            raise ValueError(f"BATON_FAILPOINTS: cannot read {item!r}")
        points[name] = _Point(action, float(argument or 0), int(nth) if nth else None)
    return points


_once = os.environ.get("BATON_FAILPOINTS_ONCE")
_points = parse(os.environ.get("BATON_FAILPOINTS", ""))


def failpoint(name: str) -> bool:
    """Performs the action that is set for `name`. Returns True only for `flip`: the caller then corrupts its own data."""
    point = _points.get(name)
    if point is None:
        return False
    point.passed += 1
    if (point.nth is not None and point.passed != point.nth) or not _first(name):
        return False
    match point.action:
        case "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(point.argument)
        case "raise":
            raise BatonError(Reason.INTERNAL, f"failpoint {name}")
    return point.action == "flip"


def _first(name: str) -> bool:
    """Whether no process has acted at `name` yet. Always true without BATON_FAILPOINTS_ONCE."""
    if _once is None:
        return True
    try:
        os.close(os.open(os.path.join(_once, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
