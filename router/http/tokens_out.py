"""Events of the service → what vLLM's POST /inference/v1/generate answers: token ids, and the text if the client asks for it."""

from collections.abc import Iterator, Sequence
from typing import Any

from router.events import Finished, Part
from router.http.openai_in import Asked
from router.http.openai_out import ChatShape, ChoiceSoFar, CompletionShape, OpenAiWriter
from router.http.pieces import list_of_ids, members
from router.http.prompt_out import finite
from router.request import Token
from router.tokenizer import Tokenizer
from router.tools.delta import Delta

_Json = dict[str, Any]


class TokensShape(CompletionShape):
    """A choice without text. Log-probabilities name tokens by their ids."""

    prefix, name, chunk_name = "gen", "", ""

    def whole(self, choice: ChoiceSoFar) -> _Json:
        return {}

    def part(self, text: str, deltas: Sequence[Delta] = ()) -> _Json:
        return {}

    def last(self) -> _Json:
        return {}

    def logprobs(self, tokens: list[tuple[Token, int]]) -> _Json:
        return {"content": [_entry(token) for token, _ in tokens]}


class TextShape(CompletionShape):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.logprobs = ChatShape(tokenizer).logprobs  # type: ignore[method-assign]


def _entry(token: Token) -> _Json:
    """The sampled token first, then the best ones."""
    ranked: list[_Json] = [{"token_id": id_, "logprob": finite(logprob), "rank": rank} for rank, (id_, logprob) in enumerate(token.top, 1)]
    own = next((entry for entry in ranked if entry["token_id"] == token.id), None)
    own = own or {"token_id": token.id, "logprob": finite(token.logprob), "rank": None}
    return own | {"top_logprobs": [own, *(entry for entry in ranked if entry is not own)]}


class GenerateWriter(OpenAiWriter):
    def __init__(self, asked: Asked, tokenizer: Tokenizer, request_id: str, model: str) -> None:
        super().__init__(asked, tokenizer, request_id, model)
        self._shape = TextShape(tokenizer) if asked.text else TokensShape(tokenizer)
        self._named = {"request_id": asked.asks[0].request_id if len(asked.asks) == 1 else request_id}
        self._named["output_mode"] = "text" if asked.text else "tokens"
        self._stops: dict[int, int | str | None] = {}  # choice → the stop string or token that ended it
        self._prompt = asked.prompt

    def whole(self) -> Iterator[bytes]:
        told = self._named | {"model": self._head["model"], "created": self._head["created"], "usage": self.usage()}
        prompt = {} if self._prompt is None else {"prompt_token_ids": list_of_ids(self._prompt)}
        yield from members(told, **prompt, choices=self._whole_choices())

    def take(self, index: int, event: Part) -> None:
        self._note_stop(index, event)
        super().take(index, event)

    def chunks(self, index: int, event: Part) -> Iterator[_Json]:
        self._note_stop(index, event)
        yield from super().chunks(index, event)

    def end(self) -> Iterator[_Json]:
        if self._asked.include_usage:
            yield self._named | {"choices": [], "usage": self.usage()}

    def _note_stop(self, index: int, event: Part) -> None:
        if isinstance(event, Finished):
            last = event.request.tokens[-1]
            stopped = event.reason == "stop" and last in event.request.params.stop_token_ids
            self._stops[index] = event.stop if event.stop is not None else last if stopped else None

    def _told(self, index: int) -> _Json:
        return {"stop_reason": self._stops.get(index)}

    def _chunk(self, index: int, part: _Json, logprobs: _Json | None = None, finish: str | None = None) -> _Json:
        choice: _Json = {"token_ids": []} | part | {"index": index, "logprobs": logprobs, "finish_reason": finish} | self._told(index)
        chunk: _Json = self._named | {"choices": [choice], "usage": self.usage() if self._asked.continuous_usage else None}
        if self._prompt is not None:
            chunk["prompt_token_ids"], self._prompt = list(self._prompt), None
        return chunk
