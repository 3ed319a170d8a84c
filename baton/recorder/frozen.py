"""A copy of the state of deciding objects that costs little: it is taken in the event loop, or between two steps of an engine, and becomes
text only if somebody asks for the recording.

Containers of immutable values are copied whole, by the interpreter. What is immutable itself (frozen dataclasses included) is shared.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from itertools import count
from types import FunctionType
from typing import Any

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
# About, of one entry or field. Values are shared with what was copied.
ITEM_BYTES = 100
FLAT_BYTES = 10
PAIR_BYTES = 24
KEY_BYTES = 56  # of a key that may be held by nobody else later


class Frozen:
    """An object as it was. One that is reached in two ways is one `Frozen`."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind = kind
        self.fields = fields


class Count:
    """An `itertools.count`: what it gives next."""

    __slots__ = ("next",)

    def __init__(self, following: int) -> None:
        self.next = following


class Pairs:
    """A dict of immutable values: two tuples take a third of its memory."""

    __slots__ = ("keys", "kind", "values")

    def __init__(self, mapping: dict[Any, Any]) -> None:
        self.kind = type(mapping)
        self.keys = tuple(mapping)
        self.values = tuple(mapping.values())


class Chain:
    """Block keys of a prompt, written once however many calls have them."""

    __slots__ = ("keys",)

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self.keys = keys


class Freezer:
    def __init__(
        self, left_out: Mapping[str, frozenset[str]] | None = None, special: Mapping[type, Callable[[Any], Any]] | None = None
    ) -> None:
        """`left_out`: class → attributes that are no part of its state (listeners, caches). `special`: class → what takes its copy."""
        self._left_out = left_out or {}
        self._special = special or {}
        self._seen: dict[int, Frozen] = {}
        self.bytes = 0  # about

    def take(self, value: Any) -> Any:
        """Raises TypeError for what has no known copy."""
        if immutable(value):
            return value
        kind = type(value)
        if kind in self._special:
            return self._special[kind](value)
        if kind is tuple:
            return tuple(map(self.take, value))
        if kind in (list, set, deque):
            flat = _flat(value)
            self.bytes += (FLAT_BYTES if flat and kind is not set else ITEM_BYTES) * len(value)
            if flat:
                return value.copy()
            return deque(map(self.take, value), value.maxlen) if kind is deque else kind(map(self.take, value))
        if kind in (dict, OrderedDict, Counter):
            if not _flat(value.values()):
                self.bytes += ITEM_BYTES * len(value)
                return kind((key, self.take(each)) for key, each in value.items())
            each = PAIR_BYTES + (KEY_BYTES if isinstance(next(iter(value), None), bytes) else 0)
            self.bytes += each * len(value)
            return Pairs(value)
        if kind is count:
            return Count(int(repr(value)[6:-1]))
        return self._object(value)

    def _object(self, value: Any) -> Frozen:
        found = self._seen.get(id(value))
        if found is None:
            found = self._seen[id(value)] = Frozen(type(value), {})
            without = self._left_out.get(type(value).__qualname__, frozenset())
            found.fields = {name: self.take(each) for name, each in attributes(value).items() if name not in without}
            self.bytes += ITEM_BYTES * len(found.fields)
        return found


def attributes(value: Any) -> dict[str, Any]:
    """Those of a followed object are without what notes its calls (`Tape.follow`). Raises TypeError for a value without attributes."""
    if hasattr(value, "__dict__"):
        return {name: each for name, each in vars(value).items() if type(each) is not FunctionType}
    if not hasattr(type(value), "__slots__"):
        raise TypeError(f"the state of {type(value).__name__} is not known")
    names = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def immutable(value: Any) -> bool:
    kind = type(value)
    if kind in ATOMS:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(immutable, value))
    if is_dataclass(kind):
        return bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    return isinstance(value, Enum) or (isinstance(value, tuple) and all(map(immutable, value)))


def _flat(values: Any) -> bool:
    """Whether a container holds only immutable values; the first one tells, for all are of one type."""
    return all(immutable(each) for each, _ in zip(values, range(1), strict=False))
