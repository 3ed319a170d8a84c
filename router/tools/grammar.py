"""The grammar of an answer with calls, as llguidance's Lark, from the description by which the calls are read: what it allows, the reader
finds, with the arguments that the tools' schemas demand.

    auto       text, and where the family's mark comes, a call
    required   calls alone

Control tokens are named by their id, because no text of a grammar matches them. Whatever form an answer has begins where thinking ends.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from baton.engine.core.grammar import Grammar
from baton.engine.grammars.keywords import COMPACT, read_schema
from router.tools.arguments import kinds_of, property_of
from router.tools.families import ModelFamily, Named, Objects, Style, Tagged
from router.tools.thinking import Thinking

TEXT = r"/(.|\n)*/"
_RAW = {"type", "description", "title", "default", "examples", "enum"}  # what text between tags can follow
_SPACED = {**COMPACT, "item_separator": ", ", "key_separator": ": "}  # as chat templates and models write JSON
_EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def lark(
    family: ModelFamily,
    tools: Mapping[str, Any],
    special: Mapping[str, int],
    *,
    required: bool,
    parallel: bool = True,
    thinking: Thinking | None = None,
    opened: bool = False,
) -> str | None:
    """`tools`: name → JSON Schema of the arguments; of a named call, that one. `special`: control token → id. `thinking` may come first;
    `opened`: the prompt has begun it.

    None: this family's form cannot be demanded. A bare call looks like any text until it ends, so it can only be required.
    """
    style = family.styles[0]
    written = _Written(special)
    mark = _mark(style)
    calls = _calls(style, tools, written, parallel) if tools else None
    if calls is None or not (mark or required):
        return None
    if required:
        body = written.lit(mark) + calls
    elif mark in special:
        body = f"(TEXT {written.lit(mark)}{calls})? TEXT"
    else:
        written.rules.append(f"head[lazy]: TEXT {json.dumps(mark)}")
        body = f"(head {calls} TEXT | TEXT)"
    start = f"{_thought(thinking, opened, written)}{body}"
    return "\n".join(["%llguidance {}", f"start: {start}", *written.rules, f"TEXT: {TEXT}", ""])


def after_thinking(form: Grammar, thinking: Thinking, opened: bool, special: Mapping[str, int]) -> Grammar | None:
    """The same form, where thinking has ended, or begins nowhere. None: a grammar of the client's own has no place in another one. Raises
    GrammarRefused."""
    written = _Written(special)
    match form.kind:
        case "json_schema" | "json":
            reading = read_schema(form.text or '{"type": "object"}', form.strict)
            body = written.rule(f"%json {json.dumps({**reading.schema, 'x-guidance': {**COMPACT, 'coerce_one_of': not form.strict}})}")
        case "choice":
            body = written.rule(" | ".join(map(json.dumps, json.loads(form.text))))
        case "regex":
            slashes = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], form.text)
            body = written.rule("/" + slashes.replace("\n", "\\n") + "/")
        case _:
            return None
    start = f"{_thought(thinking, opened, written)}{body}"
    return Grammar("lark", "\n".join(["%llguidance {}", f"start: {start}", *written.rules, f"TEXT: {TEXT}", ""]))


class _Written:
    """Rules, and how texts stand in them."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special = special
        self._cut = re.compile("|".join(f"({re.escape(name)})" for name in sorted(special, key=len, reverse=True)) or r"(?!)")

    def lit(self, text: str) -> str:
        """A text in a rule, with a space after each part."""
        return "".join(self._parts(text))

    def _parts(self, text: str) -> Iterator[str]:
        at = 0
        for found in self._cut.finditer(text):
            if found.start() > at:
                yield f"{json.dumps(text[at : found.start()])} "
            yield f"<[{self._special[found[0]]}]> "
            at = found.end()
        if at < len(text):
            yield f"{json.dumps(text[at:])} "

    def rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return f"{name} "

    def until(self, end: str) -> str:
        """Text up to `end`, and that."""
        if end in self._special:
            return f"TEXT {self.lit(end)}"
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: TEXT {json.dumps(end)}")
        return f"{name} "

    def json(self, schema: Any) -> str:
        return self.rule(f"%json {json.dumps({**(schema or _EMPTY), 'x-guidance': _SPACED})}")


def _mark(style: Style) -> str:
    """The mark with which the calls begin; empty for bare ones."""
    match style:
        case Named() | Tagged() if style.section[0]:
            return style.section[0]
        case Named():
            return style.begin
        case Tagged():
            return style.begin.partition("\n")[0]
        case Objects():
            return style.begin
    return ""


def _calls(style: Style, tools: Mapping[str, Any], written: _Written, parallel: bool) -> str | None:
    """One call or more, after the mark."""
    bodies = [_call(style, name, schema, written) for name, schema in tools.items()]
    if any(body is None for body in bodies):
        return None
    call = written.rule(" | ".join(str(body) for body in bodies))

    def more(body: str) -> str:
        return f"({body})* " if parallel else ""

    match style:
        case Objects(listed=True):
            return f'" [" {call}{more(written.lit(", ") + call)}"]" '
        case Objects(begin=""):
            return call + more(written.lit(_between(style)) + call)
        case Objects():
            inner = f"{written.lit(chr(10))}{call}{written.lit(chr(10) + style.end)}"
            return inner + more(written.lit(chr(10) + style.begin) + inner)
        case Named(section=("", "")):
            return call + more(written.lit(style.begin) + call)
        case Named():
            begin = written.lit(style.begin)
            return begin + call + more(begin + call) + written.lit(style.section[1])
        case Tagged(section=("", "")):
            mark, _, rest = style.begin.partition("\n")
            return written.lit(f"\n{rest}") + call + more(written.lit(f"\n{mark}\n{rest}") + call)
        case Tagged():
            begin = written.lit(style.begin)
            return written.lit("\n") + begin + call + more(begin + call) + written.lit(style.section[1])
    return None


def _between(style: Objects) -> str:
    return "; " if style.separators[0] == ";" else "\n"


def _call(style: Style, name: str, schema: Any, written: _Written) -> str | None:
    match style:
        case Objects():
            head = f'{{"name": {json.dumps(name)}, "{style.arguments}": '
            return f"{written.lit(head)}{written.json(schema)}{written.lit('}')}"
        case Named():
            return f"{written.lit(name + style.between)}{written.json(schema)}{written.lit(style.end)}"
        case Tagged():
            return _tagged(style, name, schema, written)
    return None


def _tagged(style: Tagged, name: str, schema: Any, written: _Written) -> str | None:
    """A tag for each property of the schema, in its order."""
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    needed = schema.get("required", []) if isinstance(schema, Mapping) else []
    body = written.lit(f"{name}{style.after_name}\n")
    for key in properties:
        value = _value(style, property_of(schema, key), schema, written)
        if value is None or not isinstance(key, str) or "<" in key or '"' in key or ">" in key:
            return None
        tag = written.rule(f"{written.lit(style.parameter + key)}{value}{written.lit(chr(10))}")
        body += tag if key in needed else f"{tag.strip()}? "
    return body + written.lit(f"{style.end}\n" if style.section[0] else style.end)


def _value(style: Tagged, schema: Any, root: Any, written: _Written) -> str | None:
    """A value with its tags. None: between these tags, its schema cannot be demanded."""
    kinds = kinds_of(schema)
    whole = {**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}} if isinstance(schema, Mapping) else {}
    break_ = "\n" if style.newlines else ""
    if kinds == {"string"} and not set(schema) - _RAW:
        begin, end = written.lit(style.after_parameter + break_), f"{break_}{style.parameter_end}"
        if isinstance(words := schema.get("enum"), list):
            return begin + "(" + " | ".join(json.dumps(str(word)) for word in words) + ") " + written.lit(end)
        return begin + written.until(end)
    if style.after_json:
        return written.lit(style.after_json) + written.json(whole) + written.lit(style.parameter_end)
    if kinds and "string" not in kinds:
        return written.lit(style.after_parameter + break_) + written.json(whole) + written.lit(break_ + style.parameter_end)
    return None


def _thought(thinking: Thinking | None, opened: bool, written: _Written) -> str:
    if thinking is None:
        return ""
    inner = written.until(thinking.end) + written.rule(r"/[ \t\r\n]*/")
    return inner if opened else f"({written.lit(thinking.begin)}{inner})? "
