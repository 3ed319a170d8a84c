"""What a planner tells of its decisions, as JSON: one line in the registry for each decision that changes something or whose reason is new,
and one for what came of each change. A reader skips fields that it does not know."""

import json
import re
from dataclasses import asdict
from typing import Any

from baton.planner.capacity import Effect
from baton.planner.forecast import Forecast
from baton.planner.memory import Decision
from baton.planner.planner import Outcome

DIGITS = 4  # significant


def decision_note(decision: Decision, forecast: Forecast, number: int, at: float, who: str, dry: bool) -> dict[str, Any]:
    """`number`: of the change; 0: none. `at`: seconds since the epoch."""
    return {
        "kind": "decision",
        "at": at,
        "who": who,
        "change": number,
        "dry": dry,
        "action": str(decision.action) if decision.action is not None else "",
        "why": decision.why,
        "serving": str(decision.sizes),
        "after": str(decision.after),
        "demand": _rounded(asdict(decision.demand)),
        "forecast": _rounded({"rate": forecast.value, "by": forecast.by, "errors": dict(forecast.errors)}),
        "now": _effect(decision.now),
        "expected": _effect(decision.expected),
        "pressure": _rounded(list(decision.memory.pressure)),
        "alternatives": [{"sizes": str(one.sizes), "verdict": one.verdict, "effect": _effect(one.effect)} for one in decision.alternatives],
    }


def outcome_note(outcome: Outcome, at: float, who: str) -> dict[str, Any]:
    return {"kind": "outcome", "at": at, "who": who, "change": outcome.number, **_rounded(asdict(outcome))}


def encode(note: dict[str, Any]) -> bytes:
    return json.dumps(note, separators=(",", ":")).encode()


def decode(notes: list[bytes]) -> list[dict[str, Any]]:
    """What is no note is left out."""
    found = []
    for each in notes:
        try:
            told = json.loads(each)
        except ValueError:
            continue
        if isinstance(told, dict) and told.get("kind") in ("decision", "outcome"):
            found.append(told)
    return found


def reason_of(decision: Decision) -> str:
    """Its words without the numbers, so that the same reason a moment later is not told again."""
    return re.sub(r"[0-9.]+", "", decision.why)


def _effect(effect: Effect | None) -> dict[str, Any] | None:
    return None if effect is None else _rounded({"attainment": effect.attainment, **asdict(effect)})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value
