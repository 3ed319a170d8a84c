"""Events of the service → answers of the OpenAI API: whole, or in chunks.

    OpenAiWriter                one HTTP request: its id, its choices, its usage
    ChatShape, CompletionShape  what a choice looks like in each of the two APIs

Every token makes a chunk, even one that completes no text (half a character, the beginning of a stop string), so a client that counts
chunks counts tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.engine.core.sampling import FIELDS
from router.events import Accepted, Finished, Part, TextPiece
from router.found import Found
from router.http import api as api_
from router.http.errors import bad_value, to_json
from router.http.explained import Explained
from router.http.forms import written
from router.http.openai_in import Asked, Caller
from router.http.pieces import list_of, list_of_ids, members
from router.http.prompt_out import PromptOut, finite, token_text
from router.request import Scores, Token
from router.tokenizer import Tokenizer
from router.tools.delta import Arguments, CallBegin, Delta, Reasoning

MAX_WHOLE_BYTES = 64 << 20  # of an answer that is not streamed
ID_BYTES = 8  # of a token's id in a list
REASONING = ("reasoning", "reasoning_content")  # the two names that clients read
_Json = dict[str, Any]


@dataclass(slots=True)
class ChoiceSoFar:
    """What is known about one choice."""

    begun: bool = False
    texts: list[str] = field(default_factory=list)  # kept only for a whole answer, like `ids` and `columns`
    ids: list[int] = field(default_factory=list)
    columns: dict[str, list[bytes]] = field(default_factory=dict)  # member of `logprobs` → one entry for each token, in JSON
    length: int = 0  # characters so far
    finish: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    discarded_tokens: int = 0  # of choices that are not among the best
    cached_tokens: int = 0
    sampling: _Json = field(default_factory=dict)  # what is in force, if the answer is to name it
    reasoning: list[str] = field(default_factory=list)  # kept like `texts`
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # id, name, pieces of the arguments; likewise
    reasoning_tokens: int = 0
    predicted: tuple[int, int] = (0, 0)  # tokens of the prediction that it has, and that it does not have
    score: _Json = field(default_factory=dict)  # of an answer of a beam search

    def keep(self, deltas: Sequence[Delta]) -> int:
        """Returns the characters kept."""
        size = 0
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    self.reasoning.append(text)
                    size += len(text)
                case CallBegin(_, name, id_):
                    self.calls.append((id_, name, []))
                case Arguments(index, text):
                    self.calls[index][2].append(text)
                    size += len(text)
        return size


class Shape(Protocol):
    prefix: str
    name: str
    chunk_name: str

    def whole(self, choice: ChoiceSoFar) -> _Json:
        """The text of a choice."""

    def begin(self) -> _Json | None:
        """The first chunk of a choice, before any text."""

    def part(self, text: str, deltas: Sequence[Delta] = ()) -> _Json:
        """A piece of text in a chunk. `deltas`: all that there is, if calls and thinking are told apart."""

    def last(self) -> _Json:
        """The chunk that says why the choice ended."""

    def logprobs(self, tokens: list[tuple[Token, int]]) -> _Json:
        """Log-probabilities of `tokens`, each with the character at which its text begins: lists with an entry for each token."""


class ChatShape:
    prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, reasoning: Sequence[str] = REASONING) -> None:
        """`reasoning`: the names under which the thinking is told."""
        self._tokenizer = tokenizer
        self._reasoning = reasoning

    def whole(self, choice: ChoiceSoFar) -> _Json:
        text = "".join(choice.texts)
        message: _Json = {"role": "assistant", "content": text, "refusal": None}
        if choice.reasoning:
            message |= dict.fromkeys(self._reasoning, "".join(choice.reasoning))
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call(id_, name, "".join(pieces)) for id_, name, pieces in choice.calls]
        return {"message": message}

    def begin(self) -> _Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, text: str, deltas: Sequence[Delta] = ()) -> _Json:
        thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        calls = _calls_in(deltas)
        delta: _Json = {"content": text} if text or not (thought or calls) else {}
        if thought:
            delta |= dict.fromkeys(self._reasoning, thought)
        return {"delta": delta | {"tool_calls": calls} if calls else delta}

    def last(self) -> _Json:
        return {"delta": {}}

    def logprobs(self, tokens: list[tuple[Token, int]]) -> _Json:
        content = []
        for token, _ in tokens:
            top = [self._entry(id_, logprob) for id_, logprob in token.top]
            content.append(self._entry(token.id, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, id_: int, logprob: float | None) -> _Json:
        piece = self._tokenizer.piece(id_)
        return {
            "token": token_text(self._tokenizer, id_),
            "logprob": finite(logprob),
            "bytes": None if piece is None else list(piece),
        }


class CompletionShape:
    prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(self, choice: ChoiceSoFar) -> _Json:
        return {"text": "".join(choice.texts)}

    def begin(self) -> _Json | None:
        return None

    def part(self, text: str, deltas: Sequence[Delta] = ()) -> _Json:
        return {"text": text}

    def last(self) -> _Json:
        return {"text": ""}

    def logprobs(self, tokens: list[tuple[Token, int]]) -> _Json:
        """The chosen token is always among the top ones."""
        text: Callable[[int], str] = lambda id_: token_text(self._tokenizer, id_)  # noqa: E731
        return {
            "tokens": [text(token.id) for token, _ in tokens],
            "token_logprobs": [finite(token.logprob) for token, _ in tokens],
            "top_logprobs": [
                {text(id_): finite(logprob) for id_, logprob in (*token.top, (token.id, token.logprob))} for token, _ in tokens
            ],
            "text_offset": [offset for _, offset in tokens],
        }


def _call(id_: str, name: str, arguments: str) -> _Json:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _calls_in(deltas: Sequence[Delta]) -> list[_Json]:
    """An entry for each call that `deltas` begin or go on with."""
    entries: dict[int, _Json] = {}
    for delta in deltas:
        if isinstance(delta, CallBegin):
            entries[delta.index] = {"index": delta.index, **_call(delta.id, delta.name, "")}
        elif isinstance(delta, Arguments):
            entry = entries.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += delta.text
    return list(entries.values())


def api(read: Callable[[bytes, Caller], Asked], writer: Callable[[Asked, str], api_.Writer]) -> api_.Api:
    return api_.Api(read, writer, _event, b"data: [DONE]\n\n", lambda refusal: refusal.body)


def _event(value: _Json, id_: str) -> bytes:
    return b"data: " + to_json(value) + (b"\nid: " + id_.encode() if id_ else b"") + b"\n\n"


class OpenAiWriter:
    def __init__(
        self,
        asked: Asked,
        tokenizer: Tokenizer,
        request_id: str,
        model: str,
        clock: Callable[[], float] = time.time,
        reasoning: Sequence[str] = REASONING,
    ) -> None:
        """`reasoning`: the names under which the thinking is told."""
        self._asked = asked
        self._shape: Shape = ChatShape(tokenizer, reasoning) if asked.chat else CompletionShape(tokenizer)
        self._logprobs = asked.asks[0].sampling.logprobs is not None
        # The client of a resumed stream has the first chunk.
        self._choices = [ChoiceSoFar(begun=bool(ask.resume and ask.output_so_far)) for ask in asked.asks for _ in range(asked.n)]
        self._head = {"id": f"{self._shape.prefix}-{request_id}", "object": self._shape.name, "created": int(clock()), "model": model}
        self._tokenizer = tokenizer
        self._prompts = [PromptOut() for _ in asked.asks]
        self._size = 0  # bytes of a whole answer so far, about
        self._chunk_head = self._head | {"object": self._shape.chunk_name}
        self._explained = Explained(asked.asks) if asked.explains else None

    def take(self, index: int, event: Part) -> None:
        """Notes an event of a choice whose answer is sent as a whole. Log-probabilities are written now: at the end, those of all tokens
        together would delay others. Raises HttpError for an answer that is too long."""
        choice = self._choices[index]
        if isinstance(event, Scores):
            told = 1 if self._asked.chat else self._asked.n  # times
            self._size += told * self._scored(index).take(event, self._asked, self._tokenizer)
        elif isinstance(event, Found):
            choice.texts.append(event.text)
            choice.ids += event.token_ids
            self._size += len(event.text) + ID_BYTES * len(event.token_ids) + choice.keep(event.deltas)
        elif isinstance(event, TextPiece):
            choice.texts.append(event.text)
            choice.ids.append(event.token.id)
            self._size += len(event.text) + ID_BYTES + choice.keep(event.deltas)
            if self._logprobs:
                self._write_logprobs(choice, event.token)
        elif isinstance(event, Finished):
            choice.texts.append(event.text)
            choice.keep(event.deltas)
        self._note(index, event)
        if self._asked.beams and isinstance(event, Finished):  # told once for all answers of a prompt
            for other in self._choices[index : index + self._asked.n]:
                other.cached_tokens = event.request.trace.cached_tokens
        check_size(self._size)

    def _write_logprobs(self, choice: ChoiceSoFar, token: Token) -> None:
        for name, entries in self._shape.logprobs([(token, choice.length)]).items():
            if isinstance(entries, list):
                choice.columns.setdefault(name, []).append(entry := to_json(entries[0]))
                self._size += len(entry)

    def whole(self) -> Iterator[bytes]:
        """The answer in JSON, in parts."""
        more = {}
        if self._asked.chat and self._asked.prompt_logprobs is not None:
            more["prompt_logprobs"] = list_of(self._prompts[0].entries)
        yield from members(self._head, choices=self._whole_choices(), usage=[to_json(self.usage())], **more)

    def _whole_choices(self) -> Iterator[bytes]:
        yield b"["
        for i, choice in enumerate(self._choices):
            lists = {"logprobs": self._whole_logprobs(i) if self._logprobs else [b"null"]}
            if self._asked.token_ids:
                lists["token_ids"] = list_of_ids(choice.ids)
            if not self._asked.chat and self._asked.prompt_logprobs is not None:
                lists["prompt_logprobs"] = list_of(self._scored(i).entries)
            if i:
                yield b","
            head = self._shape.whole(choice) | {"index": i, "finish_reason": choice.finish} | choice.score | choice.sampling | self._told(i)
            yield from members(head, **lists)
        yield b"]"

    def _told(self, index: int) -> _Json:
        """What else is told of a whole choice."""
        return {}

    def _whole_logprobs(self, index: int) -> Iterator[bytes]:
        empty, choice = self._shape.logprobs([]), self._choices[index]
        prompt = self._scored(index).columns
        lists = {
            name: list_of(prompt.get(name, []) + choice.columns.get(name, [])) for name, value in empty.items() if isinstance(value, list)
        }
        yield from members({name: value for name, value in empty.items() if name not in lists}, **lists)

    def chunks(self, index: int, event: Part) -> Iterator[_Json]:
        """The chunks that an event of a choice adds to the stream."""
        choice = self._choices[index]
        if isinstance(event, Scores):
            return  # told in whole answers only
        if not isinstance(event, Accepted) and not choice.begun:
            choice.begun = True
            if (first := self._shape.begin()) is not None:
                yield self._chunk(index, first | self._sampling(choice))
        if isinstance(event, TextPiece):
            logprobs = self._shape.logprobs([(event.token, choice.length)]) if self._logprobs else None
            self._note(index, event)
            yield self._chunk(
                index, self._shape.part(event.text, event.deltas) | self._ids([event.token.id]) | self._sampling(choice), logprobs
            )
            return
        self._note(index, event)
        if isinstance(event, Finished):
            if event.text or event.deltas:
                yield self._chunk(index, self._shape.part(event.text, event.deltas))
            yield self._chunk(index, self._shape.last() | self._sampling(choice), finish=choice.finish)

    def end(self) -> Iterator[_Json]:
        """Call it after all choices have finished."""
        if self._asked.include_usage:
            yield self._chunk_head | {"choices": [], "usage": self.usage()}

    def usage(self) -> _Json:
        """A prompt counts once, however many choices it has; its cached tokens are those that every choice found cached. All tokens that
        were generated count."""
        n = self._asked.n
        prompts = [self._choices[i : i + n] for i in range(0, len(self._choices), n)]
        prompt_tokens = sum(max(choice.prompt_tokens for choice in choices) for choices in prompts)
        completion_tokens = sum(choice.completion_tokens + choice.discarded_tokens for choice in self._choices)
        cached = sum(min(choice.cached_tokens for choice in choices) for choices in prompts)
        thought = sum(choice.reasoning_tokens for choice in self._choices)
        told = {"reasoning_tokens": thought}
        if self._asked.asks[0].predicted_text is not None:
            told["accepted_prediction_tokens"] = sum(choice.predicted[0] for choice in self._choices)
            told["rejected_prediction_tokens"] = sum(choice.predicted[1] for choice in self._choices)
        details = {"completion_tokens_details": told} if self._asked.chat else {}
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached} | (self._explained.members() if self._explained else {}),
            **details,
        }

    def _scored(self, index: int) -> PromptOut:
        """What is told of the prompt of a choice."""
        return self._prompts[index // self._asked.n]

    def _note(self, index: int, event: Part) -> None:
        choice = self._choices[index]
        if self._explained and isinstance(event, Finished):
            self._explained.take(index // self._asked.n, event)
        match event:
            case Accepted():
                choice.prompt_tokens = event.prompt_tokens
                number, n = divmod(index, self._asked.n)
                if n == 0:
                    self._prompts[number] = PromptOut.of(self._asked, self._asked.asks[number], self._tokenizer)
                prompt = self._prompts[number]
                choice.texts += [prompt.text] if prompt.text else []
                self._size += len(prompt.text)
                choice.completion_tokens, choice.length = event.output_tokens, event.shown + len(prompt.text)
                if self._asked.sampling:
                    choice.sampling = {"sampling": in_force(event)}
                if event.relaxed:
                    choice.sampling = choice.sampling | {"relaxed": list(event.relaxed)}
                if event.degraded:
                    choice.sampling = choice.sampling | {"degraded": list(event.degraded)}
            case TextPiece():
                choice.completion_tokens += 1
                choice.length += len(event.text)
            case Found():
                choice.completion_tokens = len(event.token_ids)
                choice.finish, choice.score, choice.reasoning_tokens = event.reason, {"score": event.score}, event.reasoning_tokens
            case Finished() if not self._asked.beams:
                called = event.calls and event.reason == "stop"
                # Clients read "stop" as a complete document.
                choice.finish = "tool_calls" if called else "length" if event.incomplete else event.reason
                choice.reasoning_tokens, choice.discarded_tokens = event.reasoning_tokens, event.discarded_tokens
                choice.predicted = event.predicted
                if "sampling" in choice.sampling:  # of the best choices it is known only now which they are
                    choice.sampling["sampling"]["seed"] = event.request.params.seed
                choice.cached_tokens = event.request.trace.cached_tokens

    def _sampling(self, choice: ChoiceSoFar) -> _Json:
        """What the first chunk of a choice says."""
        told, choice.sampling = choice.sampling, {}
        return told

    def _ids(self, ids: list[int]) -> _Json:
        return {"token_ids": ids} if self._asked.token_ids else {}

    def _chunk(self, index: int, part: _Json, logprobs: _Json | None = None, finish: str | None = None) -> _Json:
        chunk = self._chunk_head | {"choices": [part | {"index": index, "logprobs": logprobs, "finish_reason": finish}]}
        if self._asked.continuous_usage:
            return chunk | {"usage": self.usage()}
        return chunk | {"usage": None} if self._asked.include_usage else chunk


def check_size(size: int) -> None:
    """Raises HttpError for an answer of `size` bytes that is not streamed."""
    if size > MAX_WHOLE_BYTES:
        raise bad_value("stream", f"must be true for an answer of more than {MAX_WHOLE_BYTES >> 20} MiB")


def in_force(event: Accepted) -> _Json:
    """Every parameter of a choice, with all defaults filled in. As in a request, except that `logprobs` is a number or null."""
    told = {name: getattr(event.params, name) for name in FIELDS}
    form = told.pop("structured")
    told |= {"structured_outputs": written(form)} if form is not None else {}
    told["logit_bias"] = {str(id_): bias for id_, bias in event.params.logit_bias.items()}
    told["stop_token_ids"] = sorted(event.params.stop_token_ids)
    if (thinking := event.params.thinking) is not None:
        told["max_thinking_tokens"] = thinking.max_tokens
    return told | {"stop": list(event.stops)}
