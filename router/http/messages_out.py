"""Events of the service → answers of Anthropic's API: a message made of blocks, whole or as the events that build it.

    message_start                                              what is known before the first token
    content_block_start, content_block_delta …, content_block_stop   for each block: thinking, text, a call
    message_delta, message_stop                                why it ended, and the usage

Both are made from the same events, so the message that a stream builds is the one that is sent whole.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from router.events import Accepted, Finished, Part
from router.http import api as api_
from router.http.api import Json
from router.http.errors import HttpError, to_json, to_param
from router.http.explained import Explained
from router.http.openai_in import Asked, Caller
from router.http.openai_out import check_size
from router.http.pieces import members
from router.request import Scores
from router.tokenizer import Tokenizer
from router.tools.delta import Arguments, CallBegin, Content, Delta, Reasoning

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_IN_JSON = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', re.DOTALL)  # a string, or what gives a text its structure


def api(read: Callable[[bytes, Caller], Asked], writer: Callable[[Asked, str], api_.Writer]) -> api_.Api:
    return api_.Api(read, writer, _event, b"", refusal, key_header="x-api-key", id_headers=(b"x-request-id", b"request-id"))


def refusal(error: HttpError) -> Json:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"error_code": error.code} | ({"param": error.param} if error.param else {})
    return {"type": "error", "error": {"type": kind, "message": error.message, "details": details}, "request_id": error.request_id}


def _event(value: Json, id_: str) -> bytes:
    return f"event: {value['type']}\ndata: ".encode() + to_json(value) + (b"\nid: " + id_.encode() if id_ else b"") + b"\n\n"


@dataclass(slots=True)
class Block:
    """A block of a whole answer. `pieces`: of its text, or of the arguments of its call."""

    head: Json
    pieces: list[str] = field(default_factory=list)

    def written(self, cut: bool) -> Iterator[bytes]:
        """`cut`: the answer ended inside this block."""
        told = "".join(self.pieces)
        if self.head["type"] == "tool_use":
            told = closed(told) if cut else told
            yield from members({name: value for name, value in self.head.items() if name != "input"}, input=[told.encode()])
        else:
            yield to_json(self.head | {self.head["type"]: told})


class MessageWriter:
    def __init__(self, asked: Asked, tokenizer: Tokenizer, request_id: str, model: str) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._head: Json = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._explained = Explained(asked.asks) if asked.explains else None
        self._begun = False
        self._open: Json | None = None  # the block that goes on
        self._blocks = 0  # that have begun
        self._prompt_tokens = 0
        self._stops: tuple[str, ...] = ()
        self._kept: list[Block] = []  # of a whole answer, like what follows
        self._end: Json = {}
        self._size = 0  # characters

    def take(self, index: int, event: Part) -> None:
        """Notes an event of an answer that is sent as a whole. Raises HttpError for one that is too long."""
        for value in self.chunks(index, event):
            match value["type"]:
                case "content_block_start":
                    self._kept.append(Block(value["content_block"]))
                case "content_block_delta":
                    (text,) = (text for name, text in value["delta"].items() if name != "type")
                    self._kept[-1].pieces.append(text)
                    self._size += len(text)
                case "message_delta":
                    self._end = value["delta"] | {"usage": value["usage"]}
        check_size(self._size)

    def whole(self) -> Iterator[bytes]:
        """The answer in JSON, in parts."""
        yield from members(self._head | self._end, content=self._content())

    def _content(self) -> Iterator[bytes]:
        cut = self._end["stop_reason"] == "max_tokens"
        yield b"["
        for i, block in enumerate(self._kept, 1):
            yield from block.written(cut and i == len(self._kept))
            if i < len(self._kept):
                yield b","
        yield b"]"

    def chunks(self, index: int, event: Part) -> Iterator[Json]:
        """The events that an event of the service adds to the stream."""
        if isinstance(event, Accepted):
            self._prompt_tokens, self._stops = event.prompt_tokens, event.stops
            if event.relaxed:
                self._head["relaxed"] = [self._in_their_words(one) for one in event.relaxed]
            if event.degraded:
                self._head["degraded"] = list(event.degraded)
            return
        if isinstance(event, Scores):
            return  # this API does not ask for them
        if not self._begun:
            self._begun = True
            start: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(0, 0)}
            yield {"type": "message_start", "message": self._head | start}
        for delta in event.deltas or ((Content(event.text),) if event.text else ()):
            yield from self._add(delta)
        if isinstance(event, Finished):
            yield from self._close()
            usage = self._usage(event.request.trace.cached_tokens, event.request.output_len)
            if self._explained:
                self._explained.take(0, event)
                usage["input_tokens_details"] = self._explained.members()
            usage["output_tokens_details"] = {"thinking_tokens": event.reasoning_tokens}
            yield {"type": "message_delta", "delta": self._why(event), "usage": usage}
            yield {"type": "message_stop"}

    def end(self) -> Iterator[Json]:
        return iter(())

    def _add(self, delta: Delta) -> Iterator[Json]:
        match delta:
            case Content(text):
                yield from self._in({"type": "text", "text": ""})
                yield self._delta("text_delta", text=text)
            case Reasoning(text):
                yield from self._in({"type": "thinking", "thinking": "", "signature": ""})
                if self._asked.shows_thinking:
                    yield self._delta("thinking_delta", thinking=text)
            case CallBegin(_, name, id_):
                yield from self._close()
                yield from self._in({"type": "tool_use", "id": id_, "name": name, "input": {}})
            case Arguments(_, text):
                yield self._delta("input_json_delta", partial_json=text)

    def _in(self, block: Json) -> Iterator[Json]:
        """Begins a block, unless one of its type goes on."""
        if self._open is not None and self._open["type"] == block["type"]:
            return
        yield from self._close()
        self._open = block
        self._blocks += 1
        yield {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _delta(self, kind: str, **text: str) -> Json:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": {"type": kind, **text}}

    def _close(self) -> Iterator[Json]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._blocks - 1}

    def _usage(self, cached: int, output: int) -> Json:
        """There, `input_tokens` are those that were not read from a cache."""
        told = {"input_tokens": self._prompt_tokens - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return told | {"output_tokens": output}

    def _why(self, event: Finished) -> Json:
        """An answer that is half a document was cut, whatever cut it, and one that ends in calls waits for their results."""
        if event.incomplete or event.reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if event.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        stop = event.stop or self._control_token(event)
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}

    def _control_token(self, event: Finished) -> str | None:
        """The stop string that has ended the answer by the id of the control token that it spells."""
        request = event.request
        name = self._tokenizer.name(request.tokens[-1]) if request.output_len else ""
        return name if name in self._stops else None

    def _in_their_words(self, relaxed: str) -> str:
        path, space, sentence = relaxed.partition(" ")
        return to_param(path, self._asked.names) + space + sentence


def closed(arguments: str) -> str:
    """The beginning of a JSON object as an object: up to its last value that is whole."""
    open_, end, ends = "", 0, ""
    for found in _IN_JSON.finditer(arguments):
        mark = found[0]
        if mark in "{[":
            open_ += "}" if mark == "{" else "]"
        elif mark in "}]":
            open_ = open_[:-1]
        elif mark != ",":
            continue
        end, ends = found.start() if mark == "," else found.end(), open_
    text = arguments + open_[::-1]
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return arguments[:end] + ends[::-1] or "{}"
    return text
