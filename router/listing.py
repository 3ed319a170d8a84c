"""Which of the requests that have ended a list shows, and in which order. Decides and does nothing else.

Every router lists what it remembers itself. A record comes with its place, a number: the lists of all routers, sorted by it, are one list.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from baton.cluster.errors import invalid
from baton.stages import STAGES
from router.journal import Record

MOST_LISTED = 2048  # records that one list reaches, skipped ones included
OUTCOMES = ("ok", "invalid", "refused", "failed", "cancelled")
MOST_NAME = 128  # characters of a name that is asked for
_Value = Callable[[Record], float | None]


def _stage(name: str) -> _Value:
    return lambda record: record.times.stages[name] or None  # None: it skipped the stage


VALUES: Mapping[str, _Value] = MappingProxyType(
    {
        "age": lambda record: record.at,
        "total": lambda record: record.times.e2e_s,
        "ttft": lambda record: record.times.ttft_s,
        "tokens": lambda record: record.output_tokens,
        **{stage: _stage(stage) for stage in STAGES},
    }
)


@dataclass(frozen=True, slots=True)
class Query:
    """Raises BatonError(INVALID_FIELD) that names the field."""

    sort: str = "age"
    ascending: bool = False  # otherwise the newest, the slowest, the longest first
    failed: bool = False  # only those that did not complete
    slower_than: float = 0.0  # seconds in total
    outcome: str = ""  # only those that ended so; empty: any
    worker: str = ""  # only those that were at this worker, or failed there
    tenant: str = ""
    skip: int = 0
    limit: int = 1

    def __post_init__(self) -> None:
        if self.sort not in VALUES:
            raise invalid("sort", f"must be one of {', '.join(VALUES)}")
        if not (math.isfinite(self.slower_than) and self.slower_than >= 0):
            raise invalid("slower_than", "must be a number of seconds, 0 or more")
        if self.outcome not in ("", *OUTCOMES):
            raise invalid("outcome", f"must be one of {', '.join(OUTCOMES)}")
        for name in ("worker", "tenant"):
            if len(getattr(self, name)) > MOST_NAME:
                raise invalid(name, f"must have at most {MOST_NAME} characters")
        if self.skip < 0 or not 1 <= self.limit <= MOST_LISTED:
            raise invalid("limit", f"must be from 1 to {MOST_LISTED}, and `skip` 0 or more")
        if self.skip + self.limit > MOST_LISTED:
            raise invalid(
                "skip", f"a list reaches {MOST_LISTED} requests; narrow it with `failed`, `slower_than`, `outcome`, `worker` or `tenant`"
            )

    def takes(self, record: Record) -> bool:
        """Whether it belongs to the list."""
        if record.times.e2e_s < self.slower_than or (self.failed and record.outcome == "ok"):
            return False
        if self.outcome not in ("", record.outcome) or self.tenant not in ("", record.tenant):
            return False
        return not self.worker or self.worker in record.trace.workers


@dataclass(frozen=True, slots=True)
class Listed:
    place: float  # lower is earlier in the list
    record: Record


def choose(records: Sequence[Record], query: Query) -> tuple[list[Listed], int]:
    """The beginning of the list, up to its last record, and how many records match. `records`: newest first; equals stay in that order.

    A record without the value that is sorted by comes last.
    """
    value, sign = VALUES[query.sort], 1.0 if query.ascending else -1.0
    found: list[Listed] = []
    for record in records:
        if not query.takes(record):
            continue
        number = value(record)
        found.append(Listed(math.inf if number is None else sign * number, record))
    found.sort(key=lambda listed: listed.place)
    return found[: query.skip + query.limit], len(found)
