"""Arguments that are not written as JSON: Python's literals, and tags around text. Both become one JSON object."""

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from router.tools.source import NotACall, value_of

_WORDS = {"true": True, "false": False, "null": None}
_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
MAX_DEPTH = 64  # of nested schemas that are searched for the type of an argument


def from_python(text: str) -> tuple[str, str]:
    """Name and arguments of `name(key=value, …)`. Raises NotACall."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NotACall
        pairs = [(keyword.arg, _literal(keyword.value)) for keyword in call.keywords]
        written = _object(pairs)
        return _dotted(call.func), written
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACall from None


def _object(pairs: Sequence[tuple[str | None, Any]]) -> str:
    if len({name for name, _ in pairs} - {None}) < len(pairs):  # `**more`, or a name twice
        raise NotACall
    return json.dumps(dict(pairs), ensure_ascii=False, allow_nan=False)


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
    raise NotACall


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)) if value is not True:
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
                raise NotACall
            return dict(zip(names, map(_literal, values), strict=True))
    raise NotACall


def from_tags(given: Sequence[tuple[str, str, bool | None]], schema: Any) -> str:
    """`given`: name, text, and whether the text is JSON; None: as the tool's `schema` has it. Raises NotACall."""
    if len({name for name, _, _ in given}) < len(given):
        raise NotACall
    told = []
    for name, text, is_json in given:
        if is_json:
            value_of(text)
            written = text.strip()
        else:
            written = json.dumps(text, ensure_ascii=False) if is_json is False else _typed(text, property_of(schema, name))
        told.append(f"{json.dumps(name, ensure_ascii=False)}: {written}")
    return "{" + ", ".join(told) + "}"


def _typed(text: str, schema: Any) -> str:
    """The JSON of an argument that was written as text. One that fits none of the types that its schema allows stays text."""
    kinds = kinds_of(schema)
    as_text = json.dumps(text, ensure_ascii=False)
    if kinds == {"string"}:
        return as_text
    written = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        value = value_of(written)
    except NotACall:
        return as_text
    fits = any(_fits(value, kind) for kind in kinds) if kinds else not isinstance(value, str)
    return written if fits else as_text


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return math.isfinite(value) and value.is_integer()
    return isinstance(value, _KINDS.get(kind, ()))


def property_of(schema: Any, name: str) -> Any:
    """The schema of an argument. References are followed within `schema`."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return _followed(found, schema)


def _followed(found: Any, root: Any) -> Any:
    for _ in range(MAX_DEPTH):
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
    return found


def kinds_of(schema: Any, depth: int = 0) -> set[str]:
    """The names of the types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    found: set[str] = set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list):
        found |= {next((name for name in _KINDS if _fits(value, name)), "string") for value in values}
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            found |= kinds_of(option, depth + 1)
    return found
