"""A role is a service that a worker mounts. Every worker has both roles and serves those that are mounted.

    event →     mount     drain      idle      try
    off         on                             proving
    on                    draining
    draining    on                   off       proving
    proving     on        draining

`drain`: nothing new is accepted; `idle`: all accepted work has ended; `try`: work is accepted, and no record says that it is served, so
that only who proves the role sends any. So begins a worker that has just started, too. One that is told to stop drains all its roles.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from baton.cluster.errors import BatonError, Reason, invalid
from baton.cluster.records import ROLES, RoleName
from baton.engine.core.engine import Output
from baton.moves import Moves


class Mount(Enum):
    OFF = "off"
    ON = "on"
    DRAINING = "draining"
    PROVING = "proving"


MOVES = Moves(
    {
        (Mount.OFF, "mount"): Mount.ON,
        (Mount.ON, "drain"): Mount.DRAINING,
        (Mount.DRAINING, "mount"): Mount.ON,
        (Mount.DRAINING, "idle"): Mount.OFF,
        (Mount.OFF, "try"): Mount.PROVING,
        (Mount.DRAINING, "try"): Mount.PROVING,
        (Mount.PROVING, "mount"): Mount.ON,
        (Mount.PROVING, "drain"): Mount.DRAINING,
    }
)


class Role(Protocol):
    """A service on an engine. It does not know whether it is mounted: `admit` checks that."""

    admit: Callable[[], None]  # raises BatonError when nothing new is accepted

    @property
    def idle(self) -> bool:
        """Whether all accepted work has ended."""
        ...

    def on_step(self, outputs: list[Output]) -> None:
        """Receives what an engine step produced, for this role's sequences and for others."""
        ...


class Mounts:
    """Which roles a worker serves. `stopping`: the whole worker drains."""

    def __init__(self, worker: str, serves: RoleName, proven: bool = True) -> None:
        self.stopping = False
        self._worker = worker
        self._states = {name: (Mount.ON if proven else Mount.PROVING) if name == serves else Mount.OFF for name in ROLES}

    @property
    def serving(self) -> tuple[RoleName, ...]:
        return tuple(name for name in ROLES if self._states[name] is Mount.ON)

    @property
    def proving(self) -> tuple[RoleName, ...]:
        return tuple(name for name in ROLES if self._states[name] is Mount.PROVING)

    @property
    def draining(self) -> tuple[RoleName, ...]:
        return tuple(name for name in ROLES if self._states[name] is Mount.DRAINING)

    def admit(self, name: RoleName) -> None:
        """Raises BatonError(DRAINING, WRONG_ROLE) unless the role accepts work."""
        if self.stopping:
            raise BatonError(Reason.DRAINING, f"{self._worker} is draining")
        if self._states[name] not in (Mount.ON, Mount.PROVING):
            raise BatonError(Reason.WRONG_ROLE, f"{self._worker} does not serve {name} now")

    def wish(self, wanted: Sequence[str], prove: bool = False) -> None:
        """Mount these roles and drain the others. `prove`: only try those that are not mounted, and drain none. Raises
        BatonError(INVALID_FIELD, DRAINING) and then changes nothing."""
        if self.stopping:
            raise BatonError(Reason.DRAINING, f"{self._worker} is draining")
        if not wanted or not set(wanted) <= set(ROLES):
            raise invalid("roles", f"must be one or both of {', '.join(ROLES)}, not {', '.join(wanted) or 'nothing'}")
        for name, state in self._states.items():
            if name in wanted and prove:
                if state in (Mount.OFF, Mount.DRAINING):
                    self._move(name, "try")
            elif name in wanted and state is not Mount.ON:
                self._move(name, "mount")
            elif name not in wanted and state in (Mount.ON, Mount.PROVING) and not prove:
                self._move(name, "drain")

    def ended(self, name: RoleName) -> None:
        """A draining role has no work left."""
        self._move(name, "idle")

    def _move(self, name: RoleName, event: str) -> None:
        self._states[name] = MOVES.after(self._states[name], event, name)
