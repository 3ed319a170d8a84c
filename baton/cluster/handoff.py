"""What a handoff of KV did. Each fact is declared here, once, with every place where it is shown.

The reader of the KV fills in the facts, the decode worker sends them, and the router adds them up over the attempts of a request. Metrics,
span attributes and messages are derived from the declaration: a new fact needs one line here and a field of the same name in
`baton.v1.HandoffFacts` (and in `baton.v1.Handoff`, if clients are to see it).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Self, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shown:
    span: str = ""  # attribute of the transfer's span; empty: none
    scale: float = 1  # the attribute is the value times this
    counter: str = ""  # metric of workers that adds up the values; empty: none
    unit: str = ""
    help: str = ""


def _fact(default: T, **shown: str | float) -> T:
    value: T = field(default=default, metadata={"shown": Shown(**shown)})  # type: ignore[arg-type]
    return value


@dataclass(slots=True, kw_only=True)
class Handoff:
    """The facts of one read, of one call to a decode worker, or of all attempts of a request."""

    transport: str = _fact("", span="baton.transport")  # what carried the bytes; empty: no KV moved
    blocks: int = _fact(0, span="baton.blocks")  # moved
    bytes: int = _fact(0, span="baton.bytes")  # moved
    blocks_early: int = _fact(0)  # of those, moved before the first token was known, while the prompt was still being computed
    blocks_reused: int = _fact(
        0,
        span="baton.blocks_reused",
        counter="baton_handoff_reused_blocks_total",
        unit="blocks",
        help="Blocks of a handle that this worker already had.",
    )
    digests_checked: int = _fact(
        0,
        span="baton.digests_checked",
        counter="baton_digests_checked_total",
        unit="blocks",
        help="Blocks whose digest was compared after a read.",
    )
    digests_failed: int = _fact(
        0, counter="baton_digests_failed_total", unit="blocks", help="Blocks whose digest differed from that of the leased block."
    )
    recomputed_tokens: int = _fact(
        0,
        counter="baton_handoff_recomputed_tokens_total",
        unit="tokens",
        help="Prompt tokens that this worker computed although it had received a handle.",
    )
    connect_ms: float = _fact(0.0, span="baton.connect_seconds", scale=1e-3)  # once for each pair of processes
    read_ms: float = _fact(0.0, span="baton.read_seconds", scale=1e-3)
    verify_ms: float = _fact(0.0, span="baton.verify_seconds", scale=1e-3)  # digests, and the check that the lease was alive
    failure: str = ""  # why the KV was not used: a reason of the error table
    lane: str = _fact("", span="baton.lane")  # see `kvtransfer.transport.Route`

    def note_moved(self, blocks: int, num_bytes: int, live: bool) -> None:
        self.blocks += blocks
        self.bytes += num_bytes
        self.blocks_early += blocks if live else 0

    def __add__(self, later: Self) -> "Handoff":
        """Both together: numbers are added; of two texts the later one is kept, unless it is empty."""
        total: dict[str, Any] = {}
        for name in NAMES:
            old, new = getattr(self, name), getattr(later, name)
            total[name] = new or old if isinstance(new, str) else old + new
        return Handoff(**total)

    def attributes(self) -> dict[str, str | int | float]:
        """The attributes of the transfer's span."""
        found: dict[str, str | int | float] = {}
        for name, shown in SHOWN.items():
            value = getattr(self, name)
            if shown.span:
                found[shown.span] = value if shown.scale == 1 else value * shown.scale
        return found


def _shown() -> Iterator[tuple[str, Shown]]:
    for one in fields(Handoff):
        yield one.name, one.metadata.get("shown", Shown())


SHOWN: Mapping[str, Shown] = MappingProxyType(dict(_shown()))
NAMES = tuple(SHOWN)
COUNTED: Mapping[str, Shown] = MappingProxyType({name: shown for name, shown in SHOWN.items() if shown.counter})
