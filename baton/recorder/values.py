"""Values of deciding code as JSON, and back. A reader makes objects only of the classes that it is given, and runs no code of theirs.

JSON                         value
null, true, 1, 1.5, "a"      itself; a float has a point or an exponent, so it comes back with the same bits
[..]                         list
{"f": "inf"}                 a float that JSON lacks
{"b": "hex"}                 bytes
{"t": [..]}, {"s": [..]}     tuple, set ("z": frozenset)
{"d": [[k, v], ..]}          dict ("o": OrderedDict, "n": Counter)
{"q": [..], "m": most}       deque
{"k": 7}                     itertools.count
{"e": "module:Class.NAME"}   member of an enumeration
{"c": "module:Class", "v": {..}, "#": 3}   an object, and its number
{"r": 3}                     the object of that number
{"h": 3, "v": ["hex", ..]}   a list of block keys, and its number; without "v" the list of that number
"""

import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from itertools import count
from types import MappingProxyType
from typing import Any

from baton.recorder.frozen import Chain, Count, Frozen, Pairs, attributes

KEY_BYTES_HERE = 16  # what is as long as a block key is one


class Unreadable(ValueError):
    """A value that no version of this code wrote."""


def classes(modules: Iterable[str]) -> dict[str, type]:
    """Those that these modules define, by the name in a file."""
    return {
        f"{name}:{kind.__qualname__}": kind
        for name in modules
        for kind in vars(sys.modules[name]).values()
        if isinstance(kind, type) and kind.__module__ == name
    }


class ValueWriter:
    def __init__(
        self,
        rename: Callable[[bytes], bytes] = bytes,
        special: Mapping[type, Callable[[Any], Any]] | None = None,
        shared: frozenset[type] = frozenset(),
    ) -> None:
        """`rename`: what stands for a block key. `special`: class → what is written instead of its objects. `shared`: classes whose
        objects are written once; whoever writes keeps them alive."""
        self._rename = rename
        self._special = special or {}
        self._shared = shared
        self._numbers: dict[int, int] = {}

    def write(self, value: Any) -> Any:
        """Raises TypeError for what has no form here."""
        kind = type(value)
        if kind in self._special:
            return self.write(self._special[kind](value))
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"f": str(value)}
        if kind is bytes:
            return {"b": (self._rename(value) if len(value) == KEY_BYTES_HERE else value).hex()}
        if kind is list:
            return [self.write(each) for each in value]
        if kind is deque:
            return {"q": [self.write(each) for each in value], "m": value.maxlen}
        if isinstance(value, dict | MappingProxyType):
            return {_sign(kind): [[self.write(key), self.write(each)] for key, each in value.items()]}
        if kind in (set, frozenset):
            return {"s" if kind is set else "z": [self.write(each) for each in sorted(value)]}
        if isinstance(value, Enum):
            return {"e": f"{_name(kind)}.{value.name}"}
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"t": [self.write(each) for each in value]}
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if isinstance(value, Count):
            return {"k": value.next}
        if isinstance(value, Pairs):
            pairs = zip(map(self.write, value.keys), map(self.write, value.values), strict=True)
            return {_sign(value.kind): [[key, each] for key, each in pairs]}
        if isinstance(value, Frozen):
            return self._numbered(value, value.kind, value.fields)
        if isinstance(value, Chain):
            return self._chain(value)
        if type(value) in self._shared:
            return self._numbered(value, type(value), attributes(value))
        if hasattr(value, "_fields"):
            return {"c": _name(type(value)), "v": {name: self.write(each) for name, each in value._asdict().items()}}
        if not is_dataclass(value):
            raise TypeError(f"{type(value).__name__} has no form in a recording")
        return {"c": _name(type(value)), "v": {name: self.write(each) for name, each in attributes(value).items()}}

    def _chain(self, value: Chain) -> Any:
        if (number := self._numbers.get(id(value))) is not None:
            return {"h": number}
        number = self._numbers[id(value)] = len(self._numbers)
        return {"h": number, "v": [self._rename(key).hex() for key in value.keys]}

    def _numbered(self, value: Any, kind: type, fields: dict[str, Any]) -> Any:
        if (number := self._numbers.get(id(value))) is not None:
            return {"r": number}
        number = self._numbers[id(value)] = len(self._numbers)
        return {"c": _name(kind), "#": number, "v": {name: self.write(each) for name, each in fields.items()}}


class ValueReader:
    def __init__(self, known: Mapping[str, type], defaults: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None) -> None:
        """`defaults`: class → attributes that are no part of a recorded state."""
        self._known = known
        self._defaults = defaults or {}
        self._objects: dict[int, Any] = {}

    def read(self, value: Any) -> Any:
        """Raises Unreadable."""
        if isinstance(value, list):
            return [self.read(each) for each in value]
        if not isinstance(value, dict):
            return value
        try:
            return self._tagged(value)
        except Unreadable:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unreadable(f"a value cannot be read ({type(error).__name__}: {error})") from None

    def _tagged(self, value: dict[str, Any]) -> Any:
        if "c" in value:
            return self._object(value)
        sign = next(iter(value), "")
        inner: Any = value.get(sign)
        match sign:
            case "f":
                return float(inner)
            case "b":
                return bytes.fromhex(inner)
            case "t":
                return tuple(map(self.read, inner))
            case "s" | "z":
                return (set if sign == "s" else frozenset)(map(self.read, inner))
            case "d" | "o" | "n":
                kind = {"d": dict, "o": OrderedDict, "n": Counter}[sign]
                made = kind()
                made.update({self.read(key): self.read(each) for key, each in inner})
                return made
            case "q":
                return deque(map(self.read, inner), value["m"])
            case "k":
                return count(inner)
            case "e":
                name, _, member = inner.rpartition(".")
                return self._known[name][member]  # type: ignore[index]
            case "r":
                return self._objects[inner]
            case "h":
                if "v" in value:
                    self._objects[inner] = [bytes.fromhex(each) for each in value["v"]]
                return self._objects[inner]
        raise Unreadable(f"no value begins with {sign!r}")

    def _object(self, value: dict[str, Any]) -> Any:
        name = value["c"]
        if name not in self._known:
            raise Unreadable(f"{name} is no class of deciding code")
        kind = self._known[name]
        if issubclass(kind, tuple):
            return kind(**{field: self.read(each) for field, each in value["v"].items()})
        made = kind.__new__(kind)
        if "#" in value:
            self._objects[value["#"]] = made
        for field, each in value["v"].items():
            object.__setattr__(made, field, self.read(each))
        for field, each in self._defaults.get(kind.__qualname__, dict)().items():
            object.__setattr__(made, field, each)
        return made


def _sign(kind: type) -> str:
    return "o" if kind is OrderedDict else "n" if kind is Counter else "d"


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
