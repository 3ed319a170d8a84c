"""The messages of Anthropic's API, made of blocks → a conversation, and where in the body each part of it stood.

A model for each kind of block and of message; a kind that may not stand in a place is refused by its name there. A message with results of
tools becomes several.
"""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from router.conversation import Aside, PastCall
from router.http.body import Body, Boolean, Neutral, Rule, Whatever, neutral, sized
from router.http.conversing import kind_of_content
from router.http.errors import bad_value
from router.http.json_body import MAX_NODES
from router.validate import RequestLimits

_LIMITS = RequestLimits()
_STRING = Rule("must be a string")


def type_of(value: Any) -> str:
    return f"the type {json.dumps(value)[:80]}" if isinstance(value, str) else "this type"


class TextBlock(Body):
    type: Annotated[Any, neutral("text")]
    text: Annotated[str, _STRING]
    citations: Annotated[Any, neutral([])] = None
    cache_control: Whatever = None


class Other(Body):
    """Any kind of block that may not stand here."""

    type: Annotated[Any, Neutral(lambda kind: f"blocks of {type_of(kind)} are not supported here")]


def _by_type(**models: type[Body]) -> Discriminator:
    """`models`: type of a block → its model, whose name is the tag."""

    def tag(block: Any) -> str | None:
        if not isinstance(block, dict):
            return None
        kind = block.get("type")
        return models.get(kind, Other).__name__ if isinstance(kind, str) else Other.__name__

    return Discriminator(tag)


_OTHER = Annotated[Other, Tag("Other")]
_TEXT = Annotated[TextBlock, Tag("TextBlock")]
_BLOCKS = Rule(sized(MAX_NODES, "blocks", "must be a string or a list of blocks"))
_ONLY_TEXT = Annotated[_TEXT | _OTHER, _by_type(text=TextBlock)]
Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[_ONLY_TEXT], Field(fail_fast=True), Tag("parts")], Discriminator(kind_of_content), _BLOCKS
]


class ToolUse(Body):
    type: Annotated[Any, neutral("tool_use")]
    id: Annotated[str, _STRING]
    name: Annotated[str, _STRING]
    input: Annotated[dict[str, Any], Rule("must be an object")]
    caller: Annotated[Any, neutral({"type": "direct"})] = None
    toolset_name: Annotated[Any, neutral()] = None
    cache_control: Whatever = None


class ToolResult(Body):
    type: Annotated[Any, neutral("tool_result")]
    tool_use_id: Annotated[str, _STRING]
    content: Annotated[Texts | None, _BLOCKS] = None
    is_error: Boolean = None
    toolset_name: Annotated[Any, neutral()] = None
    cache_control: Whatever = None


class Thought(Body):
    type: Annotated[Any, neutral("thinking")]
    thinking: Annotated[str, _STRING]
    signature: Whatever = None
    cache_control: Whatever = None


_OF_A_USER = Annotated[_TEXT | Annotated[ToolResult, Tag("ToolResult")] | _OTHER, _by_type(text=TextBlock, tool_result=ToolResult)]
_OF_AN_ASSISTANT = Annotated[
    _TEXT | Annotated[ToolUse, Tag("ToolUse")] | Annotated[Thought, Tag("Thought")] | _OTHER,
    _by_type(text=TextBlock, tool_use=ToolUse, thinking=Thought),
]
_ROLE = Rule('must be "user", "assistant" or "system"')


class UserTurn(Body):
    role: Annotated[Literal["user"], _ROLE]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[_OF_A_USER], Field(min_length=1, fail_fast=True), Tag("parts")],
        Discriminator(kind_of_content),
        _BLOCKS,
    ]


class AssistantTurn(Body):
    """Its content may be empty: an answer may be, and is sent back as it was."""

    role: Annotated[Literal["assistant"], _ROLE]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[_OF_AN_ASSISTANT], Field(fail_fast=True), Tag("parts")],
        Discriminator(kind_of_content),
        _BLOCKS,
    ]


class SystemTurn(Body):
    role: Annotated[Literal["system"], _ROLE]
    content: Texts


def _role(turn: Any) -> str | None:
    if not isinstance(turn, dict):
        return None
    role = turn.get("role")
    return "AssistantTurn" if role == "assistant" else "SystemTurn" if role == "system" else "UserTurn"  # which refuses other roles


Turn = UserTurn | AssistantTurn | SystemTurn
Turns = Annotated[
    list[
        Annotated[
            Annotated[UserTurn, Tag("UserTurn")]
            | Annotated[AssistantTurn, Tag("AssistantTurn")]
            | Annotated[SystemTurn, Tag("SystemTurn")],
            Discriminator(_role),
        ]
    ],
    Field(min_length=1, max_length=_LIMITS.max_messages, fail_fast=True),
    Rule(sized(_LIMITS.max_messages, "messages", "must be a list of messages")),
]


@dataclass(slots=True)
class Conversation:
    messages: list[tuple[str, str]] = field(default_factory=list)  # role, content
    asides: list[Aside] = field(default_factory=list)  # one for each message
    names: dict[str, str] = field(default_factory=dict)  # path in an Ask → path in the body

    @classmethod
    def of(cls, system: str | list[Any] | None, turns: list[Turn]) -> "Conversation":
        """Raises HttpError."""
        made = cls()
        if text := text_of(system):
            made._add("system", text, "system")
            made.names["chat.messages[0].content"] = "system"
        for j, turn in enumerate(turns):
            made._turn(turn, f"messages[{j}]")
        return made

    def _turn(self, turn: Turn, path: str) -> None:
        if isinstance(turn, SystemTurn):
            self._add("system", text_of(turn.content), path)
        elif isinstance(turn.content, str):
            self._add(turn.role, turn.content, path)
        elif isinstance(turn, AssistantTurn):
            self._answer(turn.content, path)
        else:
            self._asking(turn.content, path)

    def _add(self, role: str, content: str, path: str, aside: Aside | None = None) -> int:
        """Messages of the same role that follow each other become one. Returns the index of the message."""
        aside = aside or Aside()
        if self.messages and self.messages[-1][0] == role != "tool":
            before, kept = self.messages[-1][1], self.asides[-1]
            self.messages[-1] = role, "\n".join(filter(None, (before, content)))
            self.asides[-1] = Aside((*kept.calls, *aside.calls), "", "\n".join(filter(None, (kept.reasoning, aside.reasoning))))
            return len(self.messages) - 1
        i = len(self.messages)
        self.messages.append((role, content))
        self.asides.append(aside)
        self.names |= {f"chat.messages[{i}]": path, f"messages[{i}]": path}
        return i

    def _asking(self, blocks: list[Any], path: str) -> None:
        texts: list[str] = []
        for k, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                texts.append(block.text)
                continue
            if texts:
                self._add("user", "\n".join(texts), path)
                texts = []
            i = self._add("tool", _result(block), f"{path}.content[{k}]", Aside(call_id=block.tool_use_id))
            self.names[f"messages[{i}].tool_call_id"] = f"{path}.content[{k}].tool_use_id"
        if texts:
            self._add("user", "\n".join(texts), path)

    def _answer(self, blocks: list[Any], path: str) -> None:
        texts, thoughts, calls = list[str](), list[str](), dict[str, PastCall]()
        for k, block in enumerate(blocks):
            here = f"{path}.content[{k}]"
            match block:
                case TextBlock():
                    texts.append(block.text)
                case Thought():
                    thoughts.append(block.thinking)
                case ToolUse():
                    calls[here] = PastCall(block.id, block.name, dumped(block.input, f"{here}.input"))
        i = self._add("assistant", "\n".join(texts), path, Aside(tuple(calls.values()), reasoning="\n".join(thoughts)))
        self.names[f"messages[{i}].tool_calls"] = self.names[f"messages[{i}].reasoning"] = f"{path}.content"
        for c, here in enumerate(calls, len(self.asides[i].calls) - len(calls)):
            call = f"messages[{i}].tool_calls[{c}]"
            self.names |= {call: here, f"{call}.function": here, f"{call}.function.arguments": f"{here}.input"}


def text_of(content: str | list[Any] | None) -> str:
    """The text of a string, or of blocks of text, which become its lines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _result(block: ToolResult) -> str:
    """Chat templates know no results that are errors, so the text says it."""
    text = text_of(block.content)
    if not block.is_error:
        return text
    return f"Error: {text}" if text else "Error"


def dumped(value: dict[str, Any], path: str) -> str:
    """Raises HttpError for what JSON cannot hold."""
    try:
        return json.dumps(value, allow_nan=False)
    except (RecursionError, ValueError):
        raise bad_value(path, "is nested too deeply, or has a number that JSON does not have") from None
