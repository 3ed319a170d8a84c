"""What a chat holds besides roles, contents and names: tools, calls and their results, thinking, and the chat template's variables.

Field names in refusals are those of the OpenAI API.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from baton.cluster.errors import Violation, invalid

NAMES = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CALL_IDS = re.compile(r"[A-Za-z0-9_.:/|=+-]{1,128}")
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10  # of all definitions together, and of the template's variables
_OURS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that an earlier answer made. `arguments`: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Aside:
    """What a message has besides role, content and name."""

    calls: tuple[PastCall, ...] = ()
    call_id: str = ""  # of the call whose result a message of the role `tool` is
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    parameters: Any = None  # JSON Schema; None: it takes no arguments
    strict: bool = False

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in the form that chat templates expect."""
        parameters = self.parameters if self.parameters else {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class Setting:
    asides: tuple[Aside, ...] = ()  # one for each message, or none at all
    tools: tuple[Tool, ...] = ()
    choice: str = "auto"  # none, auto, required, or the name of the tool that must be called, after `named:`
    parallel: bool = True  # more than one call in an answer
    variables: Mapping[str, Any] = field(default_factory=lambda: _NONE)  # of the chat template
    effort: str | None = None  # how much to think
    thinks: bool = False  # thinking is asked for, however much
    generation_prompt: bool = True
    continue_final: bool = False  # the answer goes on with the last message
    splits_reasoning: bool = False  # what the model thinks is told apart from its answer
    max_thinking: int | None = None  # tokens

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model is told of."""
        return () if self.choice == "none" else self.tools


PLAIN = Setting()


def aside_of(setting: Setting, i: int) -> Aside:
    return setting.asides[i] if setting.asides else Aside()


def parsed(arguments: str) -> dict[str, Any] | None:
    """The object that `arguments` are; None if they are none. Empty arguments are an empty object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def size_of(setting: Setting) -> int:
    """Characters that the calls and the thinking of earlier answers have."""
    return sum(len(aside.reasoning) + sum(len(call.arguments) for call in aside.calls) for aside in setting.asides)


def data_of(setting: Setting) -> Iterator[str]:
    """The texts of earlier answers that are not contents."""
    for aside in setting.asides:
        yield aside.reasoning
        for call in aside.calls:
            yield from _words(parsed(call.arguments))


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
EFFORTS: tuple[str, ...] = get_args(Effort)
_SWITCHES = ("enable_thinking", "thinking")


def with_effort(setting: Setting, known: Collection[str], thinks: bool) -> Setting:
    """Tells the chat template how much to think. A template that knows no efforts can only switch thinking on and off.

    `known`: the variables that the template reads. Raises INVALID_FIELD for what would have no effect.
    """
    for name in setting.variables:
        if name not in known:
            raise invalid(f"chat_template_kwargs.{name}", "is nothing that this model's chat template reads")
    effort = setting.effort
    if effort is None and not setting.thinks:
        return setting
    told: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in known}
    if effort is None:
        if not (told or thinks):
            raise invalid("thinking", "has no effect: this model does not think")
    elif "reasoning_effort" in known:
        told = (told if effort == "none" else {}) | {"reasoning_effort": effort}
    elif not told and (thinks or effort != "none"):
        what = "always thinks: its chat template has no switch" if thinks else "does not think"
        raise invalid("reasoning_effort", f"has no effect: this model {what}")
    return replace(setting, variables={**told, **setting.variables})


def check(setting: Setting, messages: Sequence[tuple[str, str]], max_tokens: int | None) -> Iterator[Violation]:
    """What is wrong with a chat. `max_tokens`: of the answer, if it is bounded."""
    yield from _tools(setting)
    yield from _choice(setting)
    yield from _calls(setting, messages)
    yield from _variables(setting)
    if setting.effort is not None and setting.effort not in EFFORTS:
        yield Violation("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    if setting.max_thinking is not None:
        if setting.max_thinking < 0:
            yield Violation("max_thinking_tokens", "must be 0 or more")
        elif max_tokens is not None and setting.max_thinking > max_tokens:
            yield Violation("max_thinking_tokens", f"must not be more than max_tokens ({max_tokens})")
    if setting.continue_final:
        if setting.generation_prompt:
            yield Violation("continue_final_message", "needs add_generation_prompt to be false")
        if messages and messages[-1][0] != "assistant":
            yield Violation("continue_final_message", "needs a last message of the assistant")


def _tools(setting: Setting) -> Iterator[Violation]:
    if len(setting.tools) > MAX_TOOLS:
        yield Violation("tools", f"must be at most {MAX_TOOLS} tools (got {len(setting.tools)})")
        return
    seen: dict[str, int] = {}
    for i, tool in enumerate(setting.tools):
        path = f"tools[{i}].function"
        if NAMES.fullmatch(tool.name) is None:
            yield Violation(f"{path}.name", "must be 1 to 64 letters, digits, dots, underscores and hyphens")
        elif tool.name in seen:
            yield Violation(f"{path}.name", f"is the name of tools[{seen[tool.name]}], too")
        seen.setdefault(tool.name, i)
        if tool.parameters is not None and not isinstance(tool.parameters, Mapping):
            yield Violation(f"{path}.parameters", "must be a JSON Schema: an object")
    yield from _written("tools", [tool.definition for tool in setting.tools])


def _written(path: str, value: Any) -> Iterator[Violation]:
    try:
        size = len(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        yield Violation(path, "is not valid Unicode")
    except (RecursionError, ValueError, TypeError):
        yield Violation(path, "is nested too deeply")
    else:
        if size > MAX_TOOLS_BYTES:
            yield Violation(path, f"must have at most {MAX_TOOLS_BYTES} bytes in JSON (got {size})")


def named(setting: Setting) -> str | None:
    """The tool that must be called."""
    prefix, _, name = setting.choice.partition(":")
    return name if prefix == "named" else None


def _choice(setting: Setting) -> Iterator[Violation]:
    if (name := named(setting)) is not None:
        if name not in {tool.name for tool in setting.tools}:
            yield Violation("tool_choice.function.name", f"names no tool of this request ({name[:64]!r})")
    elif setting.choice not in ("none", "auto", "required"):
        yield Violation("tool_choice", 'must be "none", "auto", "required", or an object that names a tool')
    elif setting.choice == "required" and not setting.tools:
        yield Violation("tool_choice", "needs tools")


def _calls(setting: Setting, messages: Sequence[tuple[str, str]]) -> Iterator[Violation]:
    known: set[str] = set()
    for i, (role, _) in enumerate(messages):
        aside, path = aside_of(setting, i), f"messages[{i}]"
        if aside.calls and role != "assistant":
            yield Violation(f"{path}.tool_calls", "belong to messages of the assistant")
        for j, call in enumerate(aside.calls):
            yield from _call(call, f"{path}.tool_calls[{j}]", known)
            known.add(call.id)
        if role == "tool":
            if not aside.call_id:
                yield Violation(f"{path}.tool_call_id", "must be given")
            elif aside.call_id not in known:
                yield Violation(f"{path}.tool_call_id", f"is the id of no call in an earlier message ({aside.call_id[:64]!r})")
        elif aside.call_id:
            yield Violation(f"{path}.tool_call_id", "belongs to messages of the role tool")
        if aside.reasoning and role != "assistant":
            yield Violation(f"{path}.reasoning", "belongs to messages of the assistant")
        if not _is_unicode(aside.reasoning):
            yield Violation(f"{path}.reasoning", "is not valid Unicode")


def _call(call: PastCall, path: str, known: set[str]) -> Iterator[Violation]:
    if CALL_IDS.fullmatch(call.id) is None:
        yield Violation(f"{path}.id", "must be 1 to 128 letters, digits and ._:/|=+-")
    elif call.id in known:
        yield Violation(f"{path}.id", "is the id of another call, too")
    if NAMES.fullmatch(call.name) is None:
        yield Violation(f"{path}.function.name", "must be 1 to 64 letters, digits, dots, underscores and hyphens")
    if parsed(call.arguments) is None:
        yield Violation(f"{path}.function.arguments", "must be a JSON object, as text")
    elif not _is_unicode(call.arguments) or not _is_unicode(json.dumps(parsed(call.arguments), ensure_ascii=False)):
        yield Violation(f"{path}.function.arguments", "is not valid Unicode")


def _variables(setting: Setting) -> Iterator[Violation]:
    for name in setting.variables:
        if name in _OURS or not name.isidentifier() or name.startswith("_"):
            yield Violation(f"chat_template_kwargs.{name[:80]}", "cannot be set")
    yield from _written("chat_template_kwargs", dict(setting.variables))


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def told_words(setting: Setting) -> Iterator[tuple[str, str]]:
    """The caller's words that a template may look at, so that no stand-in can replace them, each with its field."""
    for tool in setting.offered:
        yield from (("tools", word) for word in _words(tool.definition))
    for i, aside in enumerate(setting.asides):
        for call in aside.calls:
            yield f"messages[{i}].tool_calls", call.id
            yield from ((f"messages[{i}].tool_calls", word) for word in _keys(parsed(call.arguments)))
    yield from (("chat_template_kwargs", word) for word in _words(dict(setting.variables)))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from map(str, value)
        for one in value.values():
            yield from _words(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _words(one)


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from map(str, value)
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _keys(one)
