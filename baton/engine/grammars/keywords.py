"""What of a JSON Schema is enforced: every keyword has a place in a table here, or is refused with its path. No library.

The library enforces what `ENFORCED` names wherever it stands, ignores unknown names silently, and refuses the rest without saying where.
So a schema is walked before: it is checked to be one, its size is bounded, and what would be ignored is refused, or, if the request is not
strict, taken out of the schema and named in the answer.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.engine.core.grammar import GrammarRefused
from baton.engine.grammars.repetition import written_out

MAX_BYTES = 1 << 16
MAX_DEPTH = 60  # of JSON; the library refuses from 62 nested objects on
MAX_NODES = 10_000  # values of any kind
MAX_NAMES = 1_000  # in all `properties`, `patternProperties` and `required` together: each costs 0.15 ms to compile
MAX_WRITTEN_OUT = 10_000  # atoms of all patterns together: 8 ms for the first mask
MAX_LITERAL = 10_000  # characters that are given word for word, one behind the other: each mask costs what is left of them, 4 ms at worst
LONG_NAME = 1_000  # characters of a property's name, from which on it counts, too

DRAFTS = frozenset(
    f"{scheme}://json-schema.org/{draft}/schema{end}"
    for scheme in ("http", "https")
    for draft in ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
    for end in ("", "#")
)
TYPES = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))
# Exactly, in the official suite. Of the others the shape is enforced: not that a date is in the calendar, nor how labels are encoded.
EXACT_FORMATS = frozenset(("uuid", "uri", "duration", "ipv4", "ipv6", "email"))
SHAPED_FORMATS = frozenset(("date", "time", "date-time", "hostname"))
FORMATS = EXACT_FORMATS | SHAPED_FORMATS
# Keywords that say nothing about which documents are valid.
ANNOTATIONS = frozenset(
    ("title", "description", "default", "example", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "id",
     "$anchor", "contentEncoding", "contentMediaType", "contentSchema")
)  # fmt: skip

# How the library writes a document. No white space: a small model may write it for ever.
COMPACT: Any = {
    "whitespace_flexible": False, "whitespace_pattern": None, "item_separator": ",", "key_separator": ":", "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"u',
}  # fmt: skip

_Node = dict[str, Any]


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _count(value: Any) -> str | None:
    return None if type(value) is int and value >= 0 else "must be an integer of at least 0"


def _number(value: Any) -> str | None:
    return None if type(value) in (int, float) else "must be a number"


def _limit(value: Any) -> str | None:
    return None if type(value) is bool else _number(value)  # draft 4 has booleans


def _positive(value: Any) -> str | None:
    return None if type(value) in (int, float) and value > 0 else "must be a number greater than 0"


def _names(value: Any) -> str | None:
    return None if isinstance(value, list) and all(isinstance(each, str) for each in value) else "must be a list of strings"


def _type(value: Any) -> str | None:
    given = value if isinstance(value, list) and value else [value]
    right = all(isinstance(each, str) and each in TYPES for each in given)
    return None if right else f"must be one of {', '.join(sorted(TYPES))}, or a list of these"


def _values(value: Any) -> str | None:
    return None if isinstance(value, list) and value else "must be a list of at least one value"


def _ref(value: Any) -> str | None:
    return None if isinstance(value, str) and value.startswith("#") else "must begin with '#': nothing outside this schema is read"


def _schema(value: Any) -> str | None:
    return None if isinstance(value, dict | bool) else "must be a schema: an object or a boolean"


def _schemas(value: Any) -> str | None:
    return None if isinstance(value, list) and value else "must be a list of at least one schema"


def _schema_or_list(value: Any) -> str | None:
    return None if isinstance(value, dict | bool | list) else "must be a schema or a list of schemas"


def _map(value: Any) -> str | None:
    return None if isinstance(value, dict) else "must be an object of schemas"


def _anything(value: Any) -> str | None:
    return None


# keyword → what its value must be
ENFORCED: Mapping[str, Callable[[Any], str | None]] = {
    "type": _type, "enum": _values, "const": _anything, "$ref": _ref,
    "properties": _map, "patternProperties": _map, "additionalProperties": _schema, "required": _names,
    "minProperties": _count, "maxProperties": _count,
    "items": _schema_or_list, "prefixItems": _schemas, "additionalItems": _schema, "minItems": _count, "maxItems": _count,
    "minLength": _count, "maxLength": _count, "pattern": _text, "format": _text,
    "minimum": _number, "maximum": _number, "exclusiveMinimum": _limit, "exclusiveMaximum": _limit, "multipleOf": _positive,
    "allOf": _schemas, "anyOf": _schemas, "oneOf": _schemas, "$defs": _map, "definitions": _map,
}  # fmt: skip
_INNER = frozenset(name for name, check in ENFORCED.items() if check in (_schema, _schemas, _schema_or_list, _map))


@dataclass(slots=True)
class SchemaReading:
    """A schema that the library enforces completely, and what a request that is not strict asked for and does not get."""

    schema: _Node
    dropped: list[str] = field(default_factory=list)  # sentences, each with a path
    one_of: list[str] = field(default_factory=list)  # paths
    patterns: list[tuple[str, str]] = field(default_factory=list)  # path, regular expression


def read_schema(text: str, strict: bool = True) -> SchemaReading:
    """Raises GrammarRefused with the path of what is wrong."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise GrammarRefused(f"a schema may have {MAX_BYTES} bytes", "$")
    try:
        tree = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise GrammarRefused(f"is nested deeper than {MAX_DEPTH} levels", "$") from None
    except ValueError as error:
        raise GrammarRefused(f"is not JSON: {error}", "$") from None
    if why := _schema(tree):
        raise GrammarRefused(why, "$")
    _bound(tree)
    reading = SchemaReading(tree if isinstance(tree, dict) else {} if tree else {"enum": []})
    if tree is False:
        raise GrammarRefused("no document is valid under false", "$")
    walker = _Walker(reading, strict)
    walker.node(reading.schema, "$")
    return reading


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _bound(tree: Any) -> None:
    """Level by level, so that no depth is reached that is not allowed."""
    level, nodes, depth = [tree], 0, 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if depth > MAX_DEPTH:
            raise GrammarRefused(f"is nested deeper than {MAX_DEPTH} levels", "$")
        if nodes > MAX_NODES:
            raise GrammarRefused(f"has more than {MAX_NODES} values", "$")
        level = [child for each in level for child in _children(each)]


def _children(value: Any) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class _Walker:
    def __init__(self, reading: SchemaReading, strict: bool) -> None:
        self._reading = reading
        self._strict = strict
        self._names = 0
        self._written_out = 0
        self._literal = 0

    def node(self, node: Any, path: str) -> None:
        if why := _schema(node):
            raise GrammarRefused(why, path)
        if isinstance(node, bool):
            return
        for name in list(node):
            here = joined(path, name)
            if name not in ENFORCED:
                self._other(node, name, here)
            elif why := ENFORCED[name](node[name]):
                raise GrammarRefused(why, here)
            else:
                self._measure(name, node[name], here)
                if name in _INNER:
                    self._inner(name, node[name], here)
        self._combined(node, path)

    def _other(self, node: _Node, name: str, path: str) -> None:
        """A keyword that the library does not enforce. What says nothing is taken out, so that the library cannot read it otherwise."""
        if name == "$schema" and (not isinstance(node[name], str) or node[name] not in DRAFTS):
            raise GrammarRefused("is not a known draft of JSON Schema (4, 6, 7, 2019-09, 2020-12)", path)
        if name == "x-guidance" or (name.startswith("x-") or (name == "uniqueItems" and node[name] is False)):
            del node[name]
        elif name not in ANNOTATIONS:
            self._drop(node, name, path, "cannot be enforced")

    def _drop(self, node: _Node, name: str, path: str, why: str) -> None:
        if self._strict:
            raise GrammarRefused(why, path)
        del node[name]
        self._reading.dropped.append(f"{path}: {why}")

    def _measure(self, name: str, value: Any, path: str) -> None:
        if name in ("properties", "patternProperties", "required"):
            self._names += len(value)
            if self._names > MAX_NAMES:
                raise GrammarRefused(f"there are more than {MAX_NAMES} names of properties", path)
        self._literal += _literal(name, value)
        if self._literal > MAX_LITERAL:
            raise GrammarRefused(f"texts that are given word for word have more than {MAX_LITERAL} characters", path)
        if name == "oneOf":
            self._reading.one_of.append(path)
        for pattern in [value] if name == "pattern" else value if name == "patternProperties" else ():
            here = path if name == "pattern" else joined(path, pattern)
            self._reading.patterns.append((here, pattern))
            self._written_out += written_out(pattern)
            if self._written_out > MAX_WRITTEN_OUT:
                raise GrammarRefused(f"patterns with their repetitions written out have more than {MAX_WRITTEN_OUT} characters", here)

    def _inner(self, keyword: str, value: Any, path: str) -> None:
        if ENFORCED[keyword] is _map:
            for name, child in value.items():
                self.node(child, joined(path, name))
        elif isinstance(value, list):
            for i, child in enumerate(value):
                self.node(child, f"{path}[{i}]")
        else:
            self.node(value, path)

    def _combined(self, node: _Node, path: str) -> None:
        """Keywords that are enforced in some company only."""
        if "format" in node and node["format"] not in FORMATS:
            self._drop(node, "format", joined(path, "format"), f"is not one of {', '.join(sorted(FORMATS))}")
        named = set(node.get("properties", ())) | set(node.get("patternProperties", ()))
        optional = named - set(node.get("required", ()))
        for name in ("minProperties", "maxProperties"):
            if name in node and optional:
                self._drop(node, name, joined(path, name), "is enforced only where every property is required")
        # A name that is free may come twice, and then counts once.
        if node.get("minProperties", 0) > len(set(node.get("required", ()))):
            self._drop(node, "minProperties", joined(path, "minProperties"), "is enforced only for properties that are required")


def _literal(keyword: str, value: Any) -> int:
    """Characters that an output has to have there. The library makes one word of a row of them: constants, and the names between."""
    if keyword in ("properties", "required"):
        fixed = (
            {name for name, child in value.items() if isinstance(child, dict) and child.keys() & {"const", "enum"}}
            if keyword == "properties"
            else ()
        )
        return sum(len(name) for name in value if name in fixed or len(name) > LONG_NAME)
    values = [value] if keyword == "const" else value if keyword == "enum" else ()
    return max((len(json.dumps(each, ensure_ascii=False)) for each in values), default=0)


def joined(path: str, name: str) -> str:
    """JSONPath (RFC 9535) of a member."""
    plain = name.replace("$", "a").replace("-", "_").isidentifier()
    return f"{path}.{name}" if plain else f"{path}[{json.dumps(name[:80])}]"
