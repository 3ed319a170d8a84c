"""A model's chat template: Jinja, in the sandbox and environment that `transformers` provides.

What callers write is data. It is never compiled as a template, and `outline` separates what the template wrote from what they wrote.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.cluster.errors import BatonError, Reason, invalid

MAX_RENDERED = 8 << 20  # characters; a template may repeat its input
HOLE = "\ue000"  # private use: marks the place of a content in an outline
_END = "\ue001"
_STAND_IN = re.compile(f"{HOLE}([0-9]+){_END}")

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

    def render(self, messages: Sequence[Message], names: Sequence[str] = ()) -> str:
        """Renders the conversation up to where the assistant begins to write. `names`: of the participants, one per message; "" for none.

        Raises INVALID_FIELD (`chat`) if the template refuses the conversation or writes too much, INTERNAL if it fails.
        """
        given = [{"role": role, "content": content} for role, content in messages]
        for message, name in zip(given, names, strict=False):
            if name:
                message["name"] = name
        pieces, size = [], 0
        try:
            for piece in self._template.generate(messages=given, tools=None, documents=None, add_generation_prompt=True, **self._tokens):
                size += len(piece)
                if size > MAX_RENDERED:
                    raise _Refusal(f"the chat template writes more than {MAX_RENDERED} characters for it")
                pieces.append(piece)
        except _Refusal as refusal:
            raise invalid("chat", str(refusal)[:200]) from None
        except Exception as error:  # whatever the template does, it is not the caller's fault
            raise BatonError(Reason.INTERNAL, f"the chat template failed: {type(error).__name__}") from error
        return "".join(pieces)

    def outline(self, messages: Sequence[Message], names: Sequence[str] = ()) -> Outline:
        """Renders the conversation without the contents and names: the template gets stand-ins that it cannot tell from text.

        A stand-in keeps the white space at both ends of its content, so a template that trims or strips it does the same as to the content.
        A content of nothing but white space is not replaced. Raises TakenApart if the template does not leave the stand-ins whole.
        """
        cores = [text.strip() for text in (*(content for _, content in messages), *names)]
        hidden = [_hide(i, content, core) for i, ((_, content), core) in enumerate(zip(messages, cores, strict=False))]
        hidden_names = [_hide(i, name, cores[i]) for i, name in enumerate(names, len(messages))]
        try:
            text = self.render([(role, text) for (role, _), text in zip(messages, hidden, strict=True)], hidden_names)
        except BatonError:
            raise TakenApart from None
        parts = _STAND_IN.split(text)  # text, number, text, number, …, text
        if any(HOLE in part or _END in part for part in parts[::2]):
            raise TakenApart
        return Outline(HOLE.join(parts[::2]), tuple(cores[int(number)] for number in parts[1::2]))

    def silhouette(self, messages: Sequence[Message], names: Sequence[str] = ()) -> str:
        """Renders the conversation with a HOLE for each character of the contents and names that is not white space. A template that cuts
        or reverses them writes as much text as with the real ones. Raises what `render` raises."""
        return self.render([(role, _blank(content)) for role, content in messages], [_blank(name) for name in names])


class TakenApart(Exception):
    """A template changes the contents in such a way that no outline shows what it wrote itself."""


def _blank(text: str) -> str:
    return "".join(char if char.isspace() else HOLE for char in text)


def _hide(number: int, text: str, core: str) -> str:
    return text.replace(core, f"{HOLE}{number}{_END}", 1) if core else text


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
