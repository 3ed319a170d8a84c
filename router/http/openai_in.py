"""Request bodies of the OpenAI API → `router.validate.Ask`, one for each choice.

Every parameter that is known stands in a table, with what it must be. A name that is in no table is refused. A few are there so that
clients which always send them are served: those that cannot change the answer are accepted whatever they hold, and those that would are
accepted where they ask for nothing. So no parameter is ignored that would have made a difference.

Bounds of values are those of `router.validate`; here is only what JSON lets one say and an Ask does not. The first thing that is wrong is
told, and nothing after it is looked at.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from baton.engine.sampling import NUMBERS
from router.http.errors import HttpError, bad_value
from router.validate import Ask, AskSampling

MAX_CHOICES = 128  # of one HTTP request: prompts times n
COMPLETION_MAX_TOKENS = 16  # the default of the legacy API
_CONTEXT = 1 << 31  # as many tokens as the context still holds: the default of a chat
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Caller:
    """What the headers say."""

    request_id: str
    tenant: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    asks: tuple[Ask, ...]  # n for the first prompt, then n for the next
    n: int = 1
    chat: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)  # field of an Ask → parameter

    def names_of(self, choice: int) -> Mapping[str, str]:
        """`names`, where a batch of prompts says which one."""
        if len(self.asks) == self.n:
            return self.names
        return {ours: f"prompt[{choice // self.n}]" if theirs == "prompt" else theirs for ours, theirs in self.names.items()}


@dataclass(frozen=True, slots=True)
class Parameter:
    fits: Callable[[Any], bool]
    must: str  # "must be …"
    schema: Mapping[str, Any]
    supported: bool = True  # False: only what fits asks for nothing


def _type(name: str, *types: type) -> Parameter:
    """By exact type: true is no number."""
    return Parameter(lambda value: type(value) in types, f"must be {'an' if name[0] in 'aio' else 'a'} {name}", {"type": name})


def _list(name: str, type_: type, schema: str) -> Parameter:
    return Parameter(
        lambda value: type(value) is list and all(type(item) is type_ for item in value),
        f"must be a list of {name}",
        {"type": "array", "items": {"type": schema}},
    )


def _neutral(*values: Any) -> Parameter:
    """What would change the answer and is not supported; `values`, and null, ask for nothing."""
    written = " or ".join(json.dumps(value) for value in values or (None,))
    return Parameter(
        lambda value: any(type(value) is type(known) and value == known for known in values),
        f"is not supported here (only {written} is accepted)",
        {"enum": list(values or (None,))},
        supported=False,
    )


_INTEGER = _type("integer", int)
_NUMBER = _type("number", int, float)
_BOOLEAN = _type("boolean", bool)
_STRING = _type("string", str)
_OBJECT = _type("object", dict)
_WHATEVER = Parameter(lambda value: True, "", {})  # cannot change the answer
_IDS = _list("token ids", int, "integer")
_SEED = Parameter(
    lambda value: type(value) is int and -(1 << 63) <= value < 1 << 64,
    "must be an integer of 64 bits",
    {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1},
)
_CHOICES = Parameter(
    lambda value: type(value) is int and 1 <= value <= MAX_CHOICES,
    f"must be an integer from 1 to {MAX_CHOICES}",
    {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
)
_STOP = Parameter(
    lambda value: type(value) is str or (type(value) is list and all(type(item) is str for item in value)),
    "must be a string or a list of strings",
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
)
_BIAS = Parameter(
    lambda value: type(value) is dict and all(map(_is_id, value)) and all(type(bias) in (int, float) for bias in value.values()),
    "must be an object of token ids and numbers",
    {"type": "object", "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}, "additionalProperties": {"type": "number"}},
)
_SOME_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT = Parameter(
    lambda value: _is_prompt(value) or (type(value) is list and 1 <= len(value) <= MAX_CHOICES and all(map(_is_prompt, value))),
    f"must be a string, a list of token ids, or a list of up to {MAX_CHOICES} of these",
    {
        "anyOf": [
            {"type": "string"},
            _SOME_IDS,
            {"type": "array", "items": {"anyOf": [{"type": "string"}, _SOME_IDS]}, "minItems": 1, "maxItems": MAX_CHOICES},
        ]
    },
)
_CONTENT = Parameter(
    lambda value: type(value) is str or (type(value) is list and len(value) > 0),
    "must be a string or a list of parts",
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
                    "required": ["type", "text"],
                    "additionalProperties": False,
                },
            },
        ]
    },
)
_MESSAGES = Parameter(
    lambda value: type(value) is list and len(value) > 0,
    "must be a list of messages",
    {"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1},
)

SAMPLING: Mapping[str, Parameter] = {  # by the names of AskSampling
    **{name: _INTEGER if number.integer else _NUMBER for name, number in NUMBERS.items()},
    "seed": _SEED,
    "logit_bias": _BIAS,
    "stop": _STOP,
    "stop_token_ids": _IDS,
    "max_tokens": _INTEGER,
    "min_tokens": _INTEGER,
    "ignore_eos": _BOOLEAN,
}
_COMMON: Mapping[str, Parameter] = {
    "model": _STRING,
    **SAMPLING,
    "n": _CHOICES,
    "stream": _BOOLEAN,
    "stream_options": _OBJECT,
    "cache_salt": _STRING,
    "priority": _INTEGER,
    "user": _WHATEVER,
    "metadata": _WHATEVER,
    "store": _WHATEVER,
    "safety_identifier": _WHATEVER,
    "prompt_cache_key": _WHATEVER,
    "prompt_cache_retention": _WHATEVER,
    "service_tier": _neutral("auto", "default"),
    "skip_special_tokens": _neutral(True),
    "include_stop_str_in_output": _neutral(False),
    "prompt_logprobs": _neutral(),
    "structured_outputs": _neutral(),
}
CHAT: Mapping[str, Parameter] = {
    **_COMMON,
    "messages": _MESSAGES,
    "max_completion_tokens": _INTEGER,
    "logprobs": _BOOLEAN,
    "top_logprobs": _INTEGER,
    "parallel_tool_calls": _WHATEVER,
    "tools": _neutral([]),
    "tool_choice": _neutral("none", "auto"),
    "functions": _neutral([]),
    "function_call": _neutral("none", "auto"),
    "response_format": _neutral({"type": "text"}),
    "modalities": _neutral(["text"]),
    "audio": _neutral(),
    "prediction": _neutral(),
    "reasoning_effort": _neutral("none"),
    "verbosity": _neutral("medium"),
    "web_search_options": _neutral(),
    "add_generation_prompt": _neutral(True),
    "continue_final_message": _neutral(False),
    "chat_template": _neutral(),
    "chat_template_kwargs": _neutral({}),
}
COMPLETION: Mapping[str, Parameter] = {
    **_COMMON,
    "prompt": _PROMPT,
    "logprobs": _INTEGER,
    "best_of": _CHOICES,
    "echo": _neutral(False),
    "suffix": _neutral(""),
    "response_format": _neutral({"type": "text"}),
    "add_special_tokens": _neutral(True),
}
TOKENIZE: Mapping[str, Parameter] = {
    "model": _STRING,
    "prompt": _STRING,
    "messages": _MESSAGES,
    "add_special_tokens": _neutral(True),
    "add_generation_prompt": _neutral(True),
    "return_token_strs": _neutral(False),
}
DETOKENIZE: Mapping[str, Parameter] = {"model": _STRING, "tokens": _IDS}
STREAM_OPTIONS: Mapping[str, Parameter] = {
    "include_usage": _BOOLEAN,
    "continuous_usage_stats": _BOOLEAN,
    "include_obfuscation": _WHATEVER,
}
MESSAGE: Mapping[str, Parameter] = {
    "role": _STRING,
    "content": _CONTENT,
    "name": _neutral(),
    "tool_calls": _neutral([]),
    "function_call": _neutral(),
    "refusal": _neutral(),
    "audio": _neutral(),
    "annotations": _neutral([]),
}
PART: Mapping[str, Parameter] = {"type": _neutral("text"), "text": _STRING}


def read(body: bytes, known: Mapping[str, Parameter], required: Iterable[str] = ()) -> dict[str, Any]:
    """A JSON object whose members are `known`; those that are null are absent. Raises HttpError."""
    try:
        tree = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON in UTF-8: {error}"[:200], code="invalid_json") from None
    if type(tree) is not dict:
        raise HttpError(400, "the body must be a JSON object", code="invalid_json")
    return _members(tree, known, required)


def chat(body: bytes, caller: Caller) -> Asked:
    """Of POST /v1/chat/completions. Raises HttpError."""
    given = read(body, CHAT, ("messages",))
    limit = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    if limit != "max_tokens" and given.get("max_tokens", given[limit]) != given[limit]:
        raise bad_value("max_tokens", "is the old name of max_completion_tokens; the two differ")
    wanted = given.get("logprobs", False)
    if "top_logprobs" in given and not wanted:
        raise bad_value("top_logprobs", "needs logprobs to be true")
    ask = Ask(
        model=given.get("model", ""),
        messages=messages(given["messages"]),
        cache_salt=given.get("cache_salt", ""),
        priority=given.get("priority", 0),
        sampling=_sampling(
            given,
            max_tokens=given.get(limit),
            default_max_tokens=_CONTEXT,
            logprobs=given.get("top_logprobs", 0) if wanted else None,
        ),
        tenant=caller.tenant,
        traceparent=caller.traceparent,
    )
    names = {"chat": "messages", "chat.messages": "messages", "logprobs": "top_logprobs", "max_tokens": limit}
    return _asked(given, [ask], caller, chat=True, names=names)


def completion(body: bytes, caller: Caller) -> Asked:
    """Of POST /v1/completions. Raises HttpError."""
    given = read(body, COMPLETION, ("prompt",))
    if given.get("best_of", given.get("n", 1)) != given.get("n", 1):
        raise bad_value("best_of", "is not supported here (only the value of n is accepted)", "unsupported_parameter")
    sampling = _sampling(
        given, max_tokens=given.get("max_tokens"), default_max_tokens=COMPLETION_MAX_TOKENS, logprobs=given.get("logprobs")
    )
    prompt = given["prompt"]
    asks = [
        Ask(
            model=given.get("model", ""),
            text=one if type(one) is str else None,
            token_ids=None if type(one) is str else tuple(one),
            cache_salt=given.get("cache_salt", ""),
            priority=given.get("priority", 0),
            sampling=sampling,
            tenant=caller.tenant,
            traceparent=caller.traceparent,
        )
        for one in ([prompt] if _is_prompt(prompt) else prompt)
    ]
    return _asked(given, asks, caller, chat=False, names={"text": "prompt", "token_ids": "prompt", "token_ids.ids": "prompt"})


def tokenize(body: bytes) -> tuple[Ask, Mapping[str, str]]:
    """Of POST /tokenize: what is asked, and how its fields are called there. Raises HttpError."""
    given = read(body, TOKENIZE)
    if ("prompt" in given) == ("messages" in given):
        raise bad_value("prompt", "exactly one of prompt and messages must be given")
    asked = messages(given["messages"]) if "messages" in given else None
    names = {"text": "prompt", "chat": "messages", "chat.messages": "messages"}
    return Ask(model=given.get("model", ""), text=given.get("prompt"), messages=asked), names


def detokenize(body: bytes) -> tuple[Ask, Mapping[str, str]]:
    """Of POST /detokenize, likewise."""
    given = read(body, DETOKENIZE, ("tokens",))
    return Ask(model=given.get("model", ""), token_ids=tuple(given["tokens"])), {"token_ids.ids": "tokens"}


def messages(given: list[Any]) -> tuple[tuple[str, str], ...]:
    """(role, content) of each message; the text parts of a content are its lines. Raises HttpError."""
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(given))


def _message(where: str, message: Any) -> tuple[str, str]:
    if type(message) is not dict:
        raise bad_value(where, "must be an object")
    given = _members(message, MESSAGE, ("role", "content"), f"{where}.")
    role, content = given["role"], given["content"]
    if type(content) is list:
        content = "\n".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    return "system" if role == "developer" else role, content


def _part(where: str, part: Any) -> str:
    if type(part) is not dict:
        raise bad_value(where, "must be an object")
    if part.get("type") != "text":  # before the other members, which depend on it
        raise bad_value(f"{where}.type", PART["type"].must, "unsupported_parameter")
    text: str = _members(part, PART, ("type", "text"), f"{where}.")["text"]
    return text


def _sampling(given: Mapping[str, Any], **more: Any) -> AskSampling:
    fields = {name: given[name] for name in SAMPLING if name in given} | more
    if "seed" in fields:
        fields["seed"] %= 1 << 64
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(id_): bias for id_, bias in fields["logit_bias"].items()}
    stop = fields.get("stop", ())
    fields["stop"] = (stop,) if type(stop) is str else tuple(stop)
    fields["stop_token_ids"] = tuple(fields.get("stop_token_ids", ()))
    return AskSampling(**fields)


def _asked(given: Mapping[str, Any], prompts: list[Ask], caller: Caller, *, chat: bool, names: Mapping[str, str]) -> Asked:
    n, stream = given.get("n", 1), given.get("stream", False)
    if n * len(prompts) > MAX_CHOICES:
        raise bad_value("n", f"{len(prompts)} prompts with {n} choices each are more than {MAX_CHOICES} choices")
    if "stream_options" in given and not stream:
        raise bad_value("stream_options", "needs stream to be true")
    options = _members(given.get("stream_options", {}), STREAM_OPTIONS, (), "stream_options.")
    return Asked(
        asks=tuple(_choices(prompts, n, caller.request_id)),
        n=n,
        chat=chat,
        stream=stream,
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        names=names,
    )


def _choices(prompts: list[Ask], n: int, request_id: str) -> Iterator[Ask]:
    """Each choice is a request of its own; of a given seed each gets its own too, the first the given one."""
    alone = n * len(prompts) == 1
    for i, ask in enumerate(prompts):
        for j in range(n):
            seed = None if ask.sampling.seed is None else (ask.sampling.seed + j) % (1 << 64)
            sampling = ask.sampling if seed == ask.sampling.seed else replace(ask.sampling, seed=seed)
            yield replace(ask, request_id=request_id if alone else f"{request_id}-{i * n + j}", sampling=sampling)


def _members(tree: dict[str, Any], known: Mapping[str, Parameter], required: Iterable[str], prefix: str = "") -> dict[str, Any]:
    given = {}
    for name, value in tree.items():
        parameter = known.get(name)
        if parameter is None:
            raise bad_value(f"{prefix}{name[:80]}", "is not known here", "unknown_parameter")
        if value is None:
            continue
        if not parameter.fits(value):
            raise bad_value(prefix + name, parameter.must, "invalid_value" if parameter.supported else "unsupported_parameter")
        given[name] = value
    for name in required:
        if name not in given:
            raise bad_value(prefix + name, "must be given", "missing_required_parameter")
    return given


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a member of an object is given twice")
    return made


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _is_prompt(value: Any) -> bool:
    return type(value) is str or (type(value) is list and len(value) > 0 and all(type(id_) is int for id_ in value))


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key
