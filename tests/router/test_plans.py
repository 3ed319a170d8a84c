"""What is told of planners, from the notes that they leave in the registry."""

import json
from typing import Any

from baton.cluster.plan_notes import read_notes
from router.plans import MOST, NOTES, Plans

EFFECT = {"attainment": 0.9, "prefill_use": 0.5, "decode_use": 0.25, "ttft": 1.0}


def decision(at: float, action: str = "", change: int = 0, **more: Any) -> bytes:
    told = {"kind": "decision", "at": at, "action": action, "why": "because", "change": change, **more}
    return json.dumps(told).encode()


def outcome(at: float, change: int, state: str = "settled") -> bytes:
    told = {"kind": "outcome", "at": at, "change": change, "state": state, "why": "", "seconds": 4.0, "attainment": 0.75, "expected": 0.9}
    return json.dumps(told).encode()


def test_the_newest_decision_is_the_first_and_what_came_stands_beside_it() -> None:
    notes = [decision(1, "decode pool 1 → 2", 1), decision(2), outcome(3, 1), decision(4, "prefill pool 1 → 2", 2)]
    plans = Plans.of("planner-0", notes)
    assert [(plan.at, came.at if came else None) for plan, came in plans.decisions] == [(4, None), (2, None), (1, 3)]


def test_a_number_that_two_planners_used_has_two_outcomes() -> None:
    notes = [decision(1, "a", 1), outcome(2, 1), decision(3, "b", 1), decision(4, "c", 1, dry=True), outcome(5, 1, "undone")]
    told = [(plan.at, came.state if came else "") for plan, came in Plans.of("", notes).decisions]
    assert told == [(4, ""), (3, "undone"), (1, "settled")]


def test_a_decision_that_takes_a_change_back_has_its_outcome_too() -> None:
    notes = [decision(1, "decode pool 1 → 2", 1), decision(2, "decode pool 2 → 1", 1), outcome(3, 1, "undone")]
    assert [came.state for _, came in Plans.of("", notes).decisions if came] == ["undone", "undone"]


def test_so_many_decisions_are_told_and_no_more() -> None:
    notes = [note for change in range(MOST + 5) for note in (decision(change, "a", change), outcome(change, change))]
    told = Plans.of("planner-0", notes).to_json()["decisions"]
    assert len(told) == MOST and told[0]["at"] == MOST + 4 and all(one["outcome"] for one in told)
    assert all(came for _, came in Plans.of("", notes[-NOTES:]).decisions), "those of so many notes are enough"


def test_only_what_is_known_of_a_decision_is_told() -> None:
    alternative = {"sizes": "1P2D", "verdict": "chosen", "effect": EFFECT}
    more = {"now": EFFECT, "expected": None, "alternatives": [alternative], "demand": {"rate": 2.0, "prompt": 64.0, "prefill": 1.0}}
    [told] = Plans.of("", [decision(1, "a", 1, prompt="secret", tenant="shop", **more)]).to_json()["decisions"]
    shown = {name: value for name, value in EFFECT.items() if name != "ttft"}
    assert told["now"] == shown and told["expected"] is None and told["alternatives"] == ({**alternative, "effect": shown},)
    assert told["demand"] == {"rate": 2.0, "prompt": 64.0, "uncached": 0.0, "output": 0.0}
    assert "secret" not in json.dumps(told) and "shop" not in json.dumps(told)


def test_what_is_no_note_is_left_out() -> None:
    wrong = [b"", b"{", b"[]", b'{"kind": "hint"}', decision(1, None), decision(float("nan")), outcome(1, "x")]  # type: ignore[arg-type]
    assert read_notes([*wrong, decision(7)]) == read_notes([decision(7)]) and len(read_notes([decision(7)])) == 1


def test_who_plans_is_the_leader_else_a_dry_run() -> None:
    notes = [decision(1), decision(2, dry=True)]
    leads, dry = (Plans.of(leader, notes).planner for leader in ("planner-0", ""))
    assert leads and (leads.leader, leads.dry_run, leads.at) == ("planner-0", False, 1)
    assert dry and (dry.leader, dry.dry_run, dry.at) == ("", True, 2)
    assert Plans.of("", [decision(1)]).planner is None and Plans.of("", []).to_json() == {"planner": None, "decisions": []}
