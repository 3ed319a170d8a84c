"""A model's chat template: Jinja, in the sandbox and environment that `transformers` provides.

What callers write is data. It is never compiled as a template, and `outline` separates what the template wrote from what they wrote.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.cluster.errors import BatonError, Reason, invalid
from router.conversation import PLAIN, Setting, aside_of, parsed

MAX_RENDERED = 8 << 20  # characters; a template may repeat its input
HOLE = "\ue000"  # private use: marks the place of a content in an outline
_END = "\ue001"
# The quote tells how often a template has written the content as JSON: it is then escaped as often.
_STAND_IN = re.compile(rf"{HOLE}([0-9]+)(\\*)\"{_END}")

Message = tuple[str, str]  # role, content


@dataclass(frozen=True, slots=True)
class Outline:
    """What the template writes around the contents. White space at the ends of a content belongs to the outline."""

    shape: str  # with a HOLE in place of each content
    contents: tuple[str, ...]  # in the order of the holes

    @property
    def text(self) -> str:
        return fill(self.shape, iter(self.contents))


def fill(shape: str, contents: Iterator[str]) -> str:
    """`shape` with each hole replaced by the next of `contents`."""
    first, *rest = shape.split(HOLE)
    return first + "".join(next(contents) + part for part in rest)


class ChatTemplate:
    def __init__(self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        """`tokens`: bos_token and the like, which templates insert. Raises ValueError for a template that does not compile."""
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        if HOLE in source or _END in source:
            raise ValueError("the chat template uses characters that are set aside for its contents")
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: line {error.lineno}: {error.message}") from None
        self._tokens = dict(tokens)
        self.source = source
        self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))

    def render(self, messages: Sequence[Message], names: Sequence[str] = (), setting: Setting = PLAIN) -> str:
        """Renders the conversation up to where the assistant begins to write. `names`: of the participants, one per message; "" for none.

        Raises INVALID_FIELD (`chat`) if the template refuses the conversation or writes too much, INTERNAL if it fails.
        """
        return self._render(messages, names, setting, lambda text: text)

    def outline(self, messages: Sequence[Message], names: Sequence[str] = (), setting: Setting = PLAIN) -> Outline:
        """Renders the conversation without the contents and names, the texts in the arguments of calls, and the thinking: the template gets
        stand-ins that it cannot tell from text.

        A stand-in keeps the white space at both ends of its content, so a template that trims or strips it does the same as to the content.
        A content of nothing but white space is not replaced. Raises TakenApart if the template does not leave the stand-ins whole.
        """
        cores: list[str] = []

        def hide(text: str) -> str:
            if not (core := text.strip()):
                return text
            cores.append(core)
            return text.replace(core, f'{HOLE}{len(cores) - 1}"{_END}', 1)

        try:
            text = self._render(messages, names, setting, hide)
        except BatonError:
            raise TakenApart from None
        parts = _STAND_IN.split(text)  # text, number, backslashes, text, number, …, text
        if any(HOLE in part or _END in part for part in parts[::3]):
            raise TakenApart
        contents = (_escaped(cores[int(number)], len(slashes)) for number, slashes in zip(parts[1::3], parts[2::3], strict=True))
        return Outline(HOLE.join(parts[::3]), tuple(contents))

    def silhouette(self, messages: Sequence[Message], names: Sequence[str] = (), setting: Setting = PLAIN) -> str:
        """Renders the conversation with a HOLE for each character of the contents and names that is not white space. A template that cuts
        or reverses them writes as much text as with the real ones. Raises what `render` raises."""
        return self._render(messages, names, setting, _blank)

    def _render(self, messages: Sequence[Message], names: Sequence[str], setting: Setting, told: Callable[[str], str]) -> str:
        """`told`: how the template is told a text that somebody wrote."""
        given = _given(messages, names, setting, told)
        tools = [tool.definition for tool in setting.offered] or None
        more = {"continue_final_message": True} if setting.continue_final and "continue_final_message" in self.variables else {}
        ours = {"messages": given, "tools": tools, "documents": None, "add_generation_prompt": setting.generation_prompt}
        pieces, size = [], 0
        try:
            for piece in self._template.generate({**setting.variables, **more, **self._tokens, **ours}):
                size += len(piece)
                if size > MAX_RENDERED:
                    raise _Refusal(f"the chat template writes more than {MAX_RENDERED} characters for it")
                pieces.append(piece)
        except _Refusal as refusal:
            raise invalid("chat", str(refusal)[:200]) from None
        except Exception as error:  # whatever the template does, it is not the caller's fault
            raise BatonError(Reason.INTERNAL, f"the chat template failed: {type(error).__name__}") from error
        text = "".join(pieces)
        return _without_end(text, given[-1]["content"]) if setting.continue_final else text


class TakenApart(Exception):
    """A template changes the contents in such a way that no outline shows what it wrote itself."""


def _blank(text: str) -> str:
    return "".join(char if char.isspace() else HOLE for char in text)


class _Arguments(dict[str, Any]):
    """The arguments of a call: an object, and where a template joins them to text, the JSON of it. Templates expect either."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: object) -> str:
        return str(self) + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + str(self)


def _given(messages: Sequence[Message], names: Sequence[str], setting: Setting, told: Callable[[str], str]) -> list[dict[str, Any]]:
    """The conversation as templates expect it."""
    given: list[dict[str, Any]] = [{"role": role, "content": told(content)} for role, content in messages]
    for message, name in zip(given, names, strict=False):
        if name:
            message["name"] = told(name)
    for i, message in enumerate(given if setting.asides else ()):
        aside = aside_of(setting, i)
        if aside.reasoning:
            message["reasoning_content"] = message["reasoning"] = told(aside.reasoning)
        if aside.call_id:
            message["tool_call_id"] = aside.call_id
            message.setdefault("name", _name_of(aside.call_id, setting))
        if aside.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _told(parsed(call.arguments), told)}}
                for call in aside.calls
            ]
    return given


def _name_of(call_id: str, setting: Setting) -> str:
    return next((call.name for aside in setting.asides for call in aside.calls if call.id == call_id), "")


def _told(value: Any, told: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return told(value)
    if isinstance(value, dict):
        return _Arguments({name: _told(one, told) for name, one in value.items()})
    return [_told(one, told) for one in value] if isinstance(value, list) else value


def _escaped(content: str, slashes: int) -> str:
    """`slashes`: how many there are before a quote that has been escaped as often as the content."""
    while slashes:
        content, slashes = _to_json(content)[1:-1], (slashes - 1) // 2
    return content


def _without_end(text: str, last: str) -> str:
    """Cuts off what a template writes after the last message, so that the answer goes on with it. Raises INVALID_FIELD."""
    kept = last.strip()
    at = text.rfind(kept)
    if at < 0 or not kept:
        raise invalid("continue_final_message", "the chat template does not show the last message as it is, or it is empty")
    end = at + len(kept)
    tail = last[len(last.rstrip()) - len(last) :] if last != last.rstrip() else ""
    return text[: end + len(tail)] if text.startswith(tail, end) else text[:end]


class _Refusal(TemplateError):
    """The template's own `raise_exception`."""


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as models saw it in training: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only passed through."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
