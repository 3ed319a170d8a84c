"""The part of a request body that becomes a conversation: messages, tools, and what the chat template is told."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from router.conversation import EFFORTS, MAX_TOOLS, Aside, Effort, PastCall, Setting, Tool
from router.http.body import Body, Boolean, Rule, String, Whatever, neutral, sized
from router.http.errors import bad_value
from router.validate import RequestLimits

_LIMITS = RequestLimits()


def kind_of_content(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


class ContentPart(Body):
    type: Annotated[Any, neutral("text")]
    text: Annotated[str, Rule("must be a string")]
    id: Whatever = None  # of LangChain
    cache_control: Whatever = None  # of Anthropic, which LiteLLM passes on
    annotations: Annotated[Any, neutral([])] = None


_CONTENT = Rule("must be a string or a list of parts")
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True), Tag("parts")],
    Discriminator(kind_of_content),
    _CONTENT,
]


class CalledFunction(Body):
    name: Annotated[str, Rule("must be a string")]
    arguments: Annotated[str, Rule("must be a JSON object, as text")]


class ToolCall(Body):
    id: Annotated[str, Rule("must be a string")]
    type: Annotated[Any, neutral("function")] = None
    function: Annotated[CalledFunction, Rule("must be an object")]
    index: Whatever = None  # of a chunk


class ChatMessage(Body):
    role: Annotated[str, Rule("must be a string"), WithJsonSchema({"enum": ["system", "developer", "user", "assistant", "tool"]})]
    content: Annotated[Content | None, _CONTENT] = None
    name: String = None
    id: Whatever = None
    type: Annotated[Any, neutral("message", "text")] = None  # of the responses API; of lm-eval
    cache_control: Whatever = None
    reasoning: String = None
    reasoning_content: String = None  # the same by another name
    tool_calls: Annotated[Annotated[list[ToolCall], Field(fail_fast=True)] | None, Rule("must be a list of calls")] = None
    tool_call_id: String = None
    function_call: Annotated[Any, neutral()] = None
    refusal: Annotated[Any, neutral()] = None
    audio: Annotated[Any, neutral()] = None
    annotations: Annotated[Any, neutral([])] = None


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=_LIMITS.max_messages, fail_fast=True),
    Rule(sized(_LIMITS.max_messages, "messages", "must be a list of messages")),
]


class Function(Body):
    name: Annotated[str, Rule("must be a string")]
    description: String = None
    parameters: Annotated[dict[str, Any] | None, Rule("must be a JSON Schema: an object")] = None
    strict: Boolean = None


class ToolDefinition(Body):
    type: Annotated[Any, neutral("function")]
    function: Annotated[Function, Rule("must be an object")]
    cache_control: Whatever = None


class Conversing(Body):
    """What becomes a prompt together with the messages."""

    tools: Annotated[
        Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None,
        Rule(sized(MAX_TOOLS, "tools", "must be a list of tools")),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Rule('must be "none", "auto", "required", or an object that names a tool'),
    ] = None
    reasoning_effort: Annotated[Effort | None, Rule(f"must be one of {', '.join(EFFORTS)}")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Rule("must be an object")] = None
    add_generation_prompt: Boolean = None
    continue_final_message: Boolean = None


def conversation(given: list[ChatMessage]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """(role, content) of each message, and their names if any has one. The text parts of a content become its lines."""
    messages = tuple(("system" if one.role == "developer" else one.role, _content(one, i)) for i, one in enumerate(given))
    names = tuple(one.name or "" for one in given)
    return messages, names if any(names) else ()


def setting_of(given: Conversing, messages: list[ChatMessage]) -> Setting:
    """Raises HttpError."""
    asides = tuple(_aside(message, i) for i, message in enumerate(messages))
    continues = bool(given.continue_final_message)
    return Setting(
        asides=asides if any(aside != Aside() for aside in asides) else (),
        tools=tuple(_tool(tool.function) for tool in given.tools or ()),
        choice=_choice(given.tool_choice),
        variables=given.chat_template_kwargs or {},
        effort=given.reasoning_effort,
        generation_prompt=given.add_generation_prompt is not False,
        continue_final=continues,
    )


def _tool(given: Function) -> Tool:
    return Tool(given.name, given.description or "", given.parameters, bool(given.strict))


def _choice(given: str | dict[str, Any] | None) -> str:
    """Raises HttpError."""
    if isinstance(given, dict):
        function = given.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if given.get("type") != "function" or not isinstance(name, str):
            raise bad_value("tool_choice", 'must be an object like {"type": "function", "function": {"name": "..."}}')
        return f"named:{name}"
    if given not in (None, "none", "auto", "required"):
        raise bad_value("tool_choice", 'must be "none", "auto", "required", or an object that names a tool')
    return given or "auto"


def _aside(message: ChatMessage, i: int) -> Aside:
    if None not in (message.reasoning, message.reasoning_content) and message.reasoning != message.reasoning_content:
        raise bad_value(f"messages[{i}].reasoning", "and reasoning_content are two names of one thing; the two differ")
    calls = tuple(PastCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return Aside(calls, message.tool_call_id or "", message.reasoning or message.reasoning_content or "")


def _content(message: ChatMessage, i: int) -> str:
    """An assistant's turn may have none: some clients keep it so when the answer was empty. Raises HttpError."""
    if message.content is None and message.role != "assistant":
        raise bad_value(f"messages[{i}].content", "must be given", "missing_required_parameter")
    return text_of(message.content or "")


def text_of(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
