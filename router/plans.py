"""What planners have decided lately, and what came of it. Decides and does nothing else."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from baton.cluster.plan_notes import OutcomeRecord, PlanRecord, read_notes
from baton.cluster.records import PlannerRecord

MOST = 20  # decisions that are told
NOTES = 2 * MOST  # that are read for them: what came of a change is a note, too


@dataclass(frozen=True, slots=True)
class Plans:
    leader: str  # empty: nobody leads
    decisions: tuple[tuple[PlanRecord, OutcomeRecord | None], ...]  # newest first; None: nothing was changed, or it is not known yet

    @classmethod
    def of(cls, leader: str, notes: Iterable[bytes]) -> Self:
        """`notes`: oldest first."""
        plans: list[PlanRecord] = []
        came: dict[int, OutcomeRecord] = {}  # place of a decision → what came of it
        open_places: dict[int, list[int]] = {}  # number of a change → the decisions that began it and took it back
        for note in read_notes(notes):
            if isinstance(note, OutcomeRecord):
                came |= dict.fromkeys(open_places.pop(note.change, ()), note)
                continue
            if note.action and not note.dry:
                open_places.setdefault(note.change, []).append(len(plans))
            plans.append(note)
        newest = range(len(plans) - 1, -1, -1)
        return cls(leader, tuple((plans[place], came.get(place)) for place in newest[:MOST]))

    @property
    def planner(self) -> PlannerRecord | None:
        """None: nobody leads, and no dry run has decided anything."""
        last = next((plan for plan, _ in self.decisions if plan.dry is not bool(self.leader)), None)
        if last is None:
            return PlannerRecord(self.leader, False) if self.leader else None
        return PlannerRecord(self.leader, last.dry, last.at, last.action, last.why)

    def to_json(self) -> dict[str, Any]:
        planner = self.planner
        return {
            "planner": None if planner is None else {"leader": planner.leader, "dry_run": planner.dry_run},
            "decisions": [{**asdict(plan), "outcome": None if came is None else asdict(came)} for plan, came in self.decisions],
        }
