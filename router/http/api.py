"""What differs between the APIs of the HTTP door: how a body is read, what an answer, an event and a refusal look like.

Everything else (keys, sizes, deadlines, ids, the streams of the service, readers that stall) is the same for all and lies in
`router.http.app`.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from router.events import Part
from router.http.errors import HttpError
from router.http.openai_in import Asked, Caller

Json = dict[str, Any]


class Writer(Protocol):
    """One answer: either `take` of every event and then `whole`, or `chunks` of every event and then `end`."""

    def take(self, index: int, event: Part) -> None:
        """Notes an event of choice `index`. Raises HttpError for an answer that is too long."""

    def whole(self) -> Iterator[bytes]:
        """The answer in JSON, in parts."""

    def chunks(self, index: int, event: Part) -> Iterator[Json] | Iterator[bytes]:
        """What an event of choice `index` adds to the stream. bytes: parts of events that are written already."""

    def end(self) -> Iterator[Json] | Iterator[bytes]:
        """What the stream has after all choices have finished."""


@dataclass(frozen=True, slots=True)
class Api:
    read: Callable[[bytes, Caller], Asked]  # raises HttpError
    writer: Callable[[Asked, str], Writer]  # of a request with this id
    event: Callable[[Json, str], bytes]  # what the writer made, as an event of the stream with an id, or with none
    done: bytes  # the last event of a stream that did not fail
    refusal: Callable[[HttpError], Json]  # its body, or the last event of a stream that failed
    broken: Callable[[Any, HttpError], bytes] | None = None  # that end of a stream, of this writer, if it is more than the refusal
    prepare: Callable[[Any], Awaitable[Asked]] | None = None  # fetches what a request refers to; raises HttpError
    settle: Callable[[Any], Awaitable[None]] | None = None  # told of the writer once all choices have finished, before the answer ends
    key_header: str = ""  # where its clients may send their API key, besides `Authorization`
    id_headers: tuple[bytes, ...] = (b"x-request-id",)  # of every answer
