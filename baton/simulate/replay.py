"""Replays a recording: deciding code gets what it got, in the same order, and each answer is compared with the recorded one.

    replay          a section → what was compared, and the first difference
    replay_router   admission, members, prefix index, policy, … of `router.taped`
    replay_engine   scheduler and blocks of `baton.worker.taped`

A difference means that this code decides otherwise than the one that was recorded: another version, or state that the recording lacks.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from baton.recorder.recording import BadRecording, RecordedCall, RecordedStretch, Section
from baton.recorder.tape import Raised
from baton.recorder.values import Unreadable, ValueWriter


@dataclass(frozen=True, slots=True)
class Difference:
    """The first answer that differs. Values are JSON as in the file."""

    line: int  # of the file
    method: str
    args: Any
    recorded: Any
    replayed: Any


@dataclass(slots=True)
class ReplayOutcome:
    process: str
    compared: Counter[str] = field(default_factory=Counter)  # by method
    difference: Difference | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # what of the section was not replayed, and why

    def to_json(self) -> dict[str, Any]:
        difference = None if self.difference is None else asdict(self.difference)
        return {"process": self.process, "compared": dict(self.compared), "difference": difference, "left_out": self.left_out}


class Depends(Exception):
    """What follows depends on what no recording has."""


class Replayed(Protocol):
    """The objects of a stretch, as they were."""

    def answer(self, call: RecordedCall) -> Any:
        """What the call gives now: a value, or `Raised`. Raises Depends."""

    def recorded(self, call: RecordedCall) -> Any:
        """What it gave."""


Start = Callable[[RecordedStretch], Replayed]


def replay(section: Section, starts: dict[str, Start]) -> ReplayOutcome:
    """`starts`: tape → what makes its objects. Raises BadRecording."""
    outcome = ReplayOutcome(section.head["process"], left_out=dict(section.head["not_recorded"]))
    for name in ("off", "refused"):
        if why := section.head[name]:
            outcome.left_out["everything" if name == "off" else "the engine"] = why
    for stretch in section.stretches:
        if stretch.tape not in starts:
            raise BadRecording(f"line {stretch.line}: no tape is named {stretch.tape!r}")
        try:
            _replay(stretch, starts[stretch.tape], outcome)
        except Depends as why:
            outcome.left_out[f"{stretch.tape}, from line {stretch.line} on"] = str(why)
        except Unreadable as error:
            raise BadRecording(f"line {stretch.line} or after: {error}") from None
        if outcome.difference is not None:
            break
    return outcome


def _replay(stretch: RecordedStretch, start: Start, outcome: ReplayOutcome) -> None:
    replayed = start(stretch)
    for call in stretch.calls:
        now, then = written(replayed.answer(call)), written(replayed.recorded(call))
        outcome.compared[call.method] += 1
        if now != then:
            outcome.difference = Difference(call.line, call.method, call.args, then, now)
            return


def written(value: Any) -> Any:
    """One form for equal values, which tells 1 from 1.0."""
    if isinstance(value, Raised):
        return {"raised": [value.kind, value.text]}
    return json.loads(json.dumps(ValueWriter().write(value)))


def attempt(method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    try:
        return method(*args, **named)
    except Exception as error:
        return Raised(type(error).__name__, str(error))


def told(result: Any, read: Callable[[Any], Any]) -> Any:
    if isinstance(result, dict) and "raised" in result:
        return Raised(*result["raised"])
    return read(result)


def summary(outcomes: list[ReplayOutcome]) -> Iterator[str]:
    """The outcomes as text for a person."""
    for one in outcomes:
        total = one.compared.total()
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(one.compared.items()))
        yield f"{one.process}: {total} decisions compared{f' ({kinds})' if kinds else ''}"
        for what, why in one.left_out.items():
            yield f"  not replayed: {what}: {why}"
        if (found := one.difference) is not None:
            yield f"  first difference, line {found.line}: {found.method}"
            for name in ("args", "recorded", "replayed"):
                yield f"    {name:<9} {json.dumps(getattr(found, name))}"
