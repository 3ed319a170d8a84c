"""What planners have noted in the registry of their decisions, as its readers take it. `baton.planner.records` writes it.

A reader skips fields that it does not know, and takes the default of one that is missing. Times of day are seconds since the epoch.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

Number = Annotated[float, Field(allow_inf_nan=False)]  # JSON has no other


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """Shares: of the requests that meet all objectives, and of the time for which the workers of each role are busy."""

    attainment: Number
    prefill_use: Number
    decode_use: Number


@dataclass(frozen=True, slots=True)
class DemandRecord:
    """The load that is decided for: requests per second, and tokens of a request."""

    rate: Number = 0.0
    prompt: Number = 0.0
    uncached: Number = 0.0
    output: Number = 0.0


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """Requests per second, the candidate that says so, and the mean error of each candidate so far."""

    rate: Number = 0.0
    by: str = ""
    errors: dict[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlternativeRecord:
    sizes: str  # as in 1P2D: a prefill worker and two decode workers
    verdict: str
    effect: EffectRecord


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A decision. `now`, `expected`: with the workers that serve, and with those that serve afterwards."""

    kind: Literal["decision"]
    at: Number
    action: str  # empty: nothing was changed
    why: str
    dry: bool = False
    change: int = 0  # its number; 0: none
    serving: str = ""
    after: str = ""
    demand: DemandRecord = DemandRecord()
    forecast: ForecastRecord = field(default_factory=ForecastRecord)
    now: EffectRecord | None = None
    expected: EffectRecord | None = None
    alternatives: tuple[AlternativeRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class OutcomeRecord:
    """What came of a change: the share of requests that met all objectives afterwards (None: nothing was asked), and what was expected."""

    kind: Literal["outcome"]
    at: Number
    change: int
    state: str
    why: str
    seconds: Number  # that it took
    attainment: Number | None = None
    expected: Number | None = None


Note = PlanRecord | OutcomeRecord
_NOTE: TypeAdapter[Note] = TypeAdapter(Annotated[Note, Field(discriminator="kind")])


def read_notes(notes: Iterable[bytes]) -> list[Note]:
    """What is no note is left out."""
    found: list[Note] = []
    for note in notes:
        with suppress(ValidationError):
            found.append(_NOTE.validate_json(note))
    return found
