"""The form of an answer, as OpenAI (`response_format`) and vLLM (`structured_outputs`, `guided_*`) ask for it → `Grammar`, and back."""

import json
from typing import Any

from baton.engine.core.grammar import Grammar
from router.http.errors import HttpError, bad_value

_Json = dict[str, Any]
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
NAMES = ("response_format", "structured_outputs", *_GUIDED)
_KINDS = {
    "json": "json_schema", "json_object": "json", "regex": "regex", "choice": "choice", "grammar": "ebnf", "structural_tag": "structural",
    "lark": "lark",  # ours
}  # fmt: skip
# vLLM's hints to its own libraries: documents have no white space here, and nothing is fetched or fallen back to.
_HINTS = ("disable_any_whitespace", "disable_fallback", "backend")


def read(body: Any) -> Grammar | None:
    """`body` has the attributes `NAMES`, None for absent. Raises HttpError."""
    asked = {name: value for name in NAMES if (value := getattr(body, name)) is not None}
    forms = {name: form for name, value in asked.items() if (form := _one(name, value)) is not None}
    if len(forms) > 1:
        names = list(forms)
        raise bad_value(names[1], f"cannot be combined with {names[0]}: an answer has one form")
    return next(iter(forms.values()), None)


def called(body: Any) -> dict[str, str]:
    """What `sampling.structured` is called in this request."""
    for name in NAMES:
        if getattr(body, name) not in (None, {"type": "text"}):
            path = "response_format.json_schema.schema" if name == "response_format" else name
            return {each: path for each in ("structured", "structured.text", "structured.kind")}
    return {}


def written(form: Grammar) -> _Json:
    """The form as `structured_outputs` of a request that asks for the same."""
    name = next((theirs for theirs, ours in _KINDS.items() if ours == form.kind), "grammar")
    value = True if name == "json_object" else json.loads(form.text) if name in ("json", "choice") else form.text
    return {name: value, "strict": form.strict}


def _one(name: str, value: Any) -> Grammar | None:
    if name == "response_format":
        return _response_format(value)
    if name in _GUIDED:
        return _of_kind(_GUIDED[name], value, name, strict=True)
    if not isinstance(value, dict):
        raise bad_value(name, "must be an object")
    inside = {key: one for key, one in value.items() if one is not None and key not in _HINTS}
    strict = inside.pop("strict", True)
    if type(strict) is not bool:
        raise bad_value(f"{name}.strict", "must be a boolean")
    if unknown := next((key for key in inside if key not in _KINDS), None):
        raise bad_value(f"{name}.{unknown[:80]}", "is not a known parameter", "unknown_parameter")
    if len(inside) != 1:
        raise bad_value(name, f"must have exactly one of {', '.join(_KINDS)}")
    ((kind, text),) = inside.items()
    return _of_kind(kind, text, f"{name}.{kind}", strict)


def _response_format(value: Any) -> Grammar | None:
    if not isinstance(value, dict) or value.get("type") not in ("text", "json_object", "json_schema"):
        raise bad_value("response_format", "must be an object whose type is text, json_object or json_schema")
    kind, inner = value["type"], value.get("json_schema")
    if unknown := next((key for key in value if key not in ("type", "json_schema")), None):
        raise bad_value(f"response_format.{unknown[:80]}", "is not a known parameter", "unknown_parameter")
    if kind != "json_schema":
        if inner is not None:
            raise bad_value("response_format.json_schema", "needs the type json_schema")
        return None if kind == "text" else Grammar("json", "")
    if not isinstance(inner, dict):
        raise bad_value("response_format.json_schema", "must be an object with name and schema")
    return _of_schema(inner, "response_format.json_schema")


def text_format(value: _Json) -> Grammar | None:
    """`text.format` of the responses API. Raises HttpError."""
    kind, inner = value.get("type"), {key: one for key, one in value.items() if key != "type" and one is not None}
    if kind == "json_schema":
        return _of_schema(inner, "text.format")
    if kind not in ("text", "json_object"):
        raise bad_value("text.format.type", "must be text, json_object or json_schema")
    if unknown := next(iter(inner), None):
        raise bad_value(f"text.format.{unknown[:80]}", "is not a known parameter", "unknown_parameter")
    return None if kind == "text" else Grammar("json", "")


def _of_schema(inner: _Json, name: str) -> Grammar:
    """`inner` lies at `name`."""
    if unknown := next((key for key in inner if key not in ("name", "description", "schema", "strict")), None):
        raise bad_value(f"{name}.{unknown[:80]}", "is not a known parameter", "unknown_parameter")
    if inner.get("schema") is None:
        raise bad_value(f"{name}.schema", "must be given", "missing_required_parameter")
    strict = inner.get("strict") or False
    if type(strict) is not bool:
        raise bad_value(f"{name}.strict", "must be a boolean")
    return _of_kind("json", inner["schema"], f"{name}.schema", strict)


def _of_kind(kind: str, value: Any, name: str, strict: bool) -> Grammar:
    """`kind`: a name of vLLM's."""
    if kind == "json_object":
        if value is not True:
            raise bad_value(name, "must be true")
        return Grammar("json", "", strict)
    if kind in ("regex", "grammar"):
        if not isinstance(value, str):
            raise bad_value(name, "must be a string")
        return Grammar(_KINDS[kind], value, strict)
    if kind == "choice" and not isinstance(value, list):
        raise bad_value(name, "must be a list of strings")
    return Grammar(_KINDS[kind], value if isinstance(value, str) else _dumped(value, name), strict)


def _dumped(value: Any, name: str) -> str:
    try:
        return json.dumps(value)
    except (RecursionError, ValueError):
        raise _too_deep(name) from None


def _too_deep(name: str) -> HttpError:
    return bad_value(name, "is nested too deeply, or has a number that JSON does not have")
