"""Events of the service → answers of OpenAI's responses API: whole, or as its stream of typed events.

An answer is a list of items: thoughts, texts and calls, in the order in which the model made them. Both ways are made from the same items,
so the last event of a stream holds what a whole answer is. Text and log-probabilities are written when they come: at the end they only have
to be put together.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.events import Accepted, Finished, Part, TextPiece
from router.http.errors import HttpError, bad_value, to_json
from router.http.explained import Explained
from router.http.openai_out import MAX_WHOLE_BYTES
from router.http.pieces import list_of, members
from router.http.prompt_out import LOWEST_LOGPROB, token_text
from router.http.responses_in import AskedResponse
from router.request import Scores, Token
from router.tokenizer import Tokenizer
from router.tools.delta import Arguments, CallBegin, Content, Delta, Reasoning

TEXTS_AT_ONCE = 1024
EVENT_BYTES = 128  # of an event besides its text, about
PADDED = 32  # characters: an obfuscated delta has a multiple of them
_Json = dict[str, Any]
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}  # in the names of events
_ERRORS = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


@dataclass(slots=True)
class _Item:
    kind: str  # message, reasoning or function_call
    id: str
    index: int  # in the output
    call_id: str = ""
    name: str = ""
    texts: list[bytes] = field(default_factory=list)  # pieces of its text, written in JSON without quotes
    entries: list[bytes] = field(default_factory=list)  # log-probabilities of the tokens of a message, written in JSON
    status: str = "in_progress"
    head: bytes = b""  # how the events of its deltas begin, up to their number

    @property
    def text(self) -> Iterator[bytes]:
        yield b'"'
        for at in range(0, len(self.texts), TEXTS_AT_ONCE):
            yield b"".join(self.texts[at : at + TEXTS_AT_ONCE])
        yield b'"'

    def part(self, bare: bool = False, logprobs: bool = True) -> Iterator[bytes]:
        """The only part of the content. `bare`: as it begins."""
        text = [b'""'] if bare else self.text
        entries = self.entries if logprobs and not bare else []
        if self.kind == "reasoning":
            return members({"type": "reasoning_text"}, text=text)
        return members({"type": "output_text", "annotations": []}, text=text, logprobs=list_of(entries))

    def whole(self, bare: bool = False, logprobs: bool = True) -> Iterator[bytes]:
        """The item in JSON. `bare`: as it begins."""
        head: _Json = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            arguments = [b'""'] if bare else self.text
            return members(head | {"call_id": self.call_id, "name": self.name}, arguments=arguments)
        head["role" if self.kind == "message" else "summary"] = "assistant" if self.kind == "message" else []
        if bare:
            return members(head, content=[b"[]"])
        return members(head, content=_between(b"[", self.part(logprobs=logprobs), b"]"))


class ResponseWriter:
    def __init__(
        self,
        asked: AskedResponse,
        tokenizer: Tokenizer,
        own: str,
        model: str,
        to_keep: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`own`: what makes the ids of this answer its own. `to_keep`: the answer will be kept if it can be."""
        self.asked = asked
        self._tokenizer = tokenizer
        self._clock = clock
        self._own = own
        self.id = f"resp_{own}"
        self.stored = self.to_keep = to_keep  # `stored` is what the answer says: the truth once it has ended
        self._head: _Json = {"id": self.id, "object": "response", "created_at": int(clock()), "model": model, "error": None}
        self._items: list[_Item] = []
        self._waiting: list[tuple[int, bytes]] = []  # bytes and log-probabilities of tokens whose text is still to come
        self._numbers = 0  # events so far
        self._begun = False
        self._status = "in_progress"
        self._completed_at: int | None = None
        self._usage: _Json | None = None
        self._explained = Explained(asked.asks) if asked.explains else None
        self._prompt_tokens = self._output_tokens = 0
        self._size = 0  # bytes of the answer so far, about

    @property
    def size(self) -> int:
        return self._size

    def take(self, index: int, event: Part) -> None:
        for _ in self._events(event):
            pass

    def chunks(self, index: int, event: Part) -> Iterator[bytes]:
        for written in self._events(event):
            yield from written

    def whole(self) -> Iterator[bytes]:
        return self._response()

    def end(self) -> Iterator[bytes]:
        return self._event(f"response.{self._status}", {}, response=self._response())

    def record(self) -> Iterator[bytes]:
        """What is kept of the answer, for `responses_in.after`: the conversation that it followed, and itself without log-probabilities."""
        return members({}, before=[to_json(self.asked.items)], response=self._response(logprobs=False))

    def broken(self, error: HttpError) -> bytes:
        """The end of a stream that failed: for readers of the answer's status, and for those of errors. Both end what the client reads."""
        code = _ERRORS.get(error.status, "server_error")
        self._status, self.stored = "failed", False
        self._head["error"] = {"code": code, "message": error.message}
        failed = self._event("response.failed", {}, response=self._response())
        flat = {"code": error.code, "message": error.message, "param": error.param}
        return b"".join((*failed, *self._event("error", flat | error.body)))

    def _events(self, event: Part) -> Iterator[Iterator[bytes]]:
        """Notes an event of the service. Each item is an event of the stream, written when it is read. Raises HttpError."""
        if isinstance(event, Accepted):
            self._prompt_tokens = event.prompt_tokens
            self._head |= {"temperature": event.params.temperature, "top_p": event.params.top_p}
            if event.relaxed:
                self._head["relaxed"] = [sentence.replace("].function.", "].", 1) for sentence in event.relaxed]
            if event.degraded:
                self._head["degraded"] = [sentence.replace("max_tokens:", "max_output_tokens:", 1) for sentence in event.degraded]
            return
        if isinstance(event, Scores):
            return  # this API does not ask for them
        if not self._begun:
            self._begun = True
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", {}, response=self._response())
        if isinstance(event, TextPiece):
            self._output_tokens += 1
            if self.asked.logprobs:
                self._waiting.append((len(self._tokenizer.piece(event.token.id) or b""), self._entry(event.token)))
        for delta in event.deltas or ((Content(event.text),) if event.text else ()):
            yield from self._delta(delta, bool(event.deltas))
        if isinstance(event, Finished):
            yield from self._finish(event)
        if self._size > MAX_WHOLE_BYTES:
            raise bad_value("max_output_tokens", f"an answer of more than {MAX_WHOLE_BYTES >> 20} MiB is not made by this API")

    def _delta(self, delta: Delta, told_apart: bool) -> Iterator[Iterator[bytes]]:
        """`told_apart`: not all of the output is content."""
        match delta:
            case CallBegin():
                self._waiting.clear()
                yield from self._open("function_call", delta.id, delta.name)
            case Arguments():
                self._waiting.clear()
                yield self._more(delta.text)
            case Reasoning():
                self._waiting.clear()
                if self._kind != "reasoning":
                    yield from self._open("reasoning")
                yield self._more(delta.text)
            case Content():
                if self._kind != "message":
                    yield from self._open("message")
                entries = self._of(len(delta.text.encode()) if told_apart else None)
                yield self._more(delta.text, entries)
                self._items[-1].entries += entries
                self._size += sum(map(len, entries))

    def _of(self, size: int | None) -> list[bytes]:
        """Log-probabilities of the tokens that have made a text of `size` bytes, the last ones: those before were marks. None: of all."""
        taken: list[bytes] = []
        while self._waiting and (size is None or size > 0):
            length, entry = self._waiting.pop()
            taken.append(entry)
            size = None if size is None else size - length
        self._waiting.clear()
        return taken[::-1]

    @property
    def _kind(self) -> str:
        """The kind of the open item; one is open if there is any."""
        return self._items[-1].kind if self._items else ""

    def _open(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Iterator[bytes]]:
        if self._items:
            yield from self._close("completed")
        index = len(self._items)
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self._items.append(item := _Item(kind, f"{prefix}_{self._own}_{index}", index, call_id, name))
        self._size += EVENT_BYTES
        yield self._event("response.output_item.added", {"output_index": index}, item=item.whole(bare=True))
        if kind != "function_call":
            yield self._event("response.content_part.added", self._place(item), part=item.part(bare=True))

    def _more(self, text: str, entries: Sequence[bytes] = ()) -> Iterator[bytes]:
        item, written = self._items[-1], to_json(text)
        item.texts.append(written[1:-1])
        self._size += len(written)
        return self._delta_event(item, self._number(), written, entries)

    def _delta_event(self, item: _Item, number: int, written: bytes, entries: Sequence[bytes]) -> Iterator[bytes]:
        """There is one for nearly every token, so what all of an item have in common is written once."""
        if not item.head:
            name = f"response.{_TEXTS[item.kind]}.delta"
            head = to_json({"type": name} | self._place(item) | {"sequence_number": 0})
            item.head = f"event: {name}\ndata: ".encode() + head[:-2]
        more = [b',"logprobs":', *list_of(entries)] if item.kind == "message" else []
        if self.asked.obfuscated:
            more += (b',"obfuscation":"', b"x" * (-len(written) % PADDED), b'"')
        yield b"".join((item.head, str(number).encode(), b',"delta":', written, *more, b"}\n\n"))

    def _close(self, status: str) -> Iterator[Iterator[bytes]]:
        item = self._items[-1]
        item.status = status
        place, done = self._place(item), f"response.{_TEXTS[item.kind]}.done"
        match item.kind:
            case "message":
                yield self._event(done, place, text=item.text, logprobs=list_of(item.entries))
            case "reasoning":
                yield self._event(done, place, text=item.text)
            case _:
                yield self._event(done, place | {"name": item.name}, arguments=item.text)
        if item.kind != "function_call":
            yield self._event("response.content_part.done", place, part=item.part())
        yield self._event("response.output_item.done", {"output_index": item.index}, item=item.whole())

    def _finish(self, event: Finished) -> Iterator[Iterator[bytes]]:
        # A document that is not complete is not to be read as one, whatever cut it.
        self._status = "incomplete" if event.reason == "length" or event.incomplete else "completed"
        if not self._items:
            yield from self._open("message")
        yield from self._close(self._status)
        self._completed_at = int(self._clock()) if self._status == "completed" else None
        cached = {"cached_tokens": event.request.trace.cached_tokens, "cache_write_tokens": 0}
        if self._explained:
            self._explained.take(0, event)
            cached |= self._explained.members()
        self._usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": cached,
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": event.reasoning_tokens},
            "total_tokens": self._prompt_tokens + self._output_tokens,
        }

    def _response(self, logprobs: bool = True) -> Iterator[bytes]:
        """The output is told once it is whole."""
        cut = self._status == "incomplete"
        head = {
            **self._head,
            "status": self._status,
            "store": self.stored,
            "completed_at": self._completed_at,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": self._usage,
        }
        items = self._items if cut or self._status == "completed" else []
        echo = {name: [value] for name, value in self.asked.echo.items()}
        yield from members(head, **echo, output=_listed(item.whole(logprobs=logprobs) for item in items))

    def _event(self, name: str, value: _Json, **lists: Iterable[bytes]) -> Iterator[bytes]:
        head = {"type": name, "sequence_number": self._number()} | value
        return _between(f"event: {name}\ndata: ".encode(), members(head, **lists), b"\n\n")

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def _place(self, item: _Item) -> _Json:
        place: _Json = {"item_id": item.id, "output_index": item.index}
        return place if item.kind == "function_call" else place | {"content_index": 0}

    def _entry(self, token: Token) -> bytes:
        top = [self._logprob(id_, logprob) for id_, logprob in token.top]
        return to_json(self._logprob(token.id, token.logprob) | {"top_logprobs": top})

    def _logprob(self, id_: int, logprob: float | None) -> _Json:
        told = LOWEST_LOGPROB if logprob is None else max(LOWEST_LOGPROB, logprob)
        return {"token": token_text(self._tokenizer, id_), "logprob": told, "bytes": list(self._tokenizer.piece(id_) or b"")}


def _between(begin: bytes, parts: Iterable[bytes], end: bytes) -> Iterator[bytes]:
    yield begin
    yield from parts
    yield end


def _listed(values: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    yield b"["
    for i, value in enumerate(values):
        if i:
            yield b","
        yield from value
    yield b"]"
