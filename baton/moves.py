"""A life as a table: which event leads from which state to which."""

from typing import TypeVar

S = TypeVar("S")


class IllegalMove(RuntimeError):
    """An event that the state does not allow: a bug. Nothing was changed."""


class Moves(dict[tuple[S, str], S]):
    """(state, event) → state. States are members of an Enum, or strings."""

    def after(self, state: S, event: str, who: str) -> S:
        """Raises IllegalMove, which names `who`, for a pair that is not in the table."""
        target = self.get((state, event))
        if target is None:
            raise IllegalMove(f"{who} is {getattr(state, 'value', state)}: {event!r} is not possible")
        return target
