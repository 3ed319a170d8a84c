"""The `id:` of every event of a stream, for clients that ask for ids. With it, any router continues the stream: the client sends the same
body again, and the id of the last event that it received in the header `Last-Event-ID`, as the standard of server-sent events has it.

    EVENTS.DIGEST.SEED.MAX_TOKENS.RECEIPT

An id has the same size for every event, about 150 bytes. It could not hold the output so far: the sum over a stream would grow with the
square of its length. A client that has the token ids (`return_token_ids`) sends them in the body (`output_so_far`), and its stream goes on
immediately. For any other client the tokens that it has are computed again, with the same seed, and not sent. The digest shows that they
are the same, or else the request is refused, because text would be missing or repeated.
"""

import re
from array import array
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from baton.cluster.errors import BatonError, Reason
from router.events import Accepted, Part, TextPiece
from router.http.errors import bad_value
from router.http.openai_in import ONE_CHOICE, Asked

HEADER = "last-event-id"
ASKING_HEADER = "x-event-ids"  # for clients that cannot change the body
NO_IDS = "the streams of this API have no ids of events"
MAX_CHARACTERS = 512
DIGEST_BYTES = 9  # a multiple of three: no padding
_ID = re.compile(r"([0-9]{1,9})\.([A-Za-z0-9_-]{12})\.([0-9]{1,20})\.([0-9]{1,10})\.([A-Za-z0-9_-]+)")


@dataclass(frozen=True, slots=True)
class EventId:
    events: int  # of the stream, up to this one
    digest: str  # of all token ids up to this event
    seed: int
    max_tokens: int
    receipt: bytes

    @classmethod
    def parse(cls, text: str) -> "EventId":
        """Raises HttpError for a text that is not the id of an event, or is too long to be one."""
        if len(text) > MAX_CHARACTERS:
            raise bad_value(HEADER, f"must have at most {MAX_CHARACTERS} characters")
        if (found := _ID.fullmatch(text)) is None:
            raise bad_value(HEADER, "is not the id of an event of a stream")
        events, digest, seed, max_tokens, receipt = found.groups()
        padded = receipt + "=" * (-len(receipt) % 4)
        try:
            return cls(int(events), digest, int(seed), int(max_tokens), urlsafe_b64decode(padded))
        except ValueError:
            raise bad_value(HEADER, "is not the id of an event of a stream") from None


def resume(asked: Asked, last: EventId, request_id: str) -> Asked:
    """What the client asks for, from after its last event on. `request_id`: the one that it chose itself, or empty. Raises HttpError."""
    if not asked.resumable:
        raise bad_value(HEADER, NO_IDS)
    if not asked.is_one:
        raise bad_value(HEADER, "only a stream of one choice can be resumed")
    (ask,) = asked.asks
    if ask.output_so_far and len(ask.output_so_far) + asked.chat > last.events:  # the first event of a chat holds no token
        raise bad_value("output_so_far", f"has {len(ask.output_so_far)} ids, which are more than the events that were received")
    sampling = replace(ask.sampling, seed=last.seed, max_tokens=last.max_tokens)
    return replace(asked, asks=(replace(ask, request_id=request_id, resume=last.receipt, sampling=sampling),))


class Numbering:
    """Numbers the events of a stream of one choice, and says which of them the client has already."""

    def __init__(self, asked: Asked, last: EventId | None) -> None:
        (ask,) = asked.asks
        self._last = last
        self._known = ask.output_so_far
        self._ids = blake2b(digest_size=DIGEST_BYTES)
        self._tail = ""
        self._events = len(ask.output_so_far) + (asked.chat and bool(ask.resume and ask.output_so_far))

    def take(self, event: Part) -> None:
        """Notes an event of the service. The events that it becomes are numbered afterwards. Raises HttpError if the output that the client
        has is not the one that was streamed before its last event."""
        if isinstance(event, Accepted):
            self._note(self._known)  # not earlier: now the ids are known to be few, and in the vocabulary
            if self._last is not None and self._events == self._last.events and self._digest != self._last.digest:
                raise bad_value("output_so_far", "holds other ids than those that were streamed up to the last event")
            receipt = urlsafe_b64encode(event.receipt).decode().rstrip("=")
            self._tail = f"{event.params.seed}.{event.params.max_tokens}.{receipt}"
        elif isinstance(event, TextPiece):
            self._note((event.token.id,))

    def next(self) -> str | None:
        """The id of the next event; None if the client has the event. Raises BatonError if the stream is not the one that it has."""
        self._events += 1
        digest, last = self._digest, self._last
        if last is None or self._events > last.events:
            return f"{self._events}.{digest}.{self._tail}"
        if self._events == last.events and digest != last.digest:
            raise _another()
        return None

    def end(self) -> None:
        """Called after the last event. Raises BatonError if the client has more events than there are."""
        if self._last is not None and self._events < self._last.events:
            raise _another()

    @property
    def _digest(self) -> str:
        return urlsafe_b64encode(self._ids.digest()).decode()

    def _note(self, token_ids: Sequence[int]) -> None:
        self._ids.update(array("I", token_ids).tobytes())


def _another() -> BatonError:
    return BatonError(Reason.RETRIES_SPENT, "the answer cannot be continued: computed again, its tokens are not those that were streamed")


def last_event(header: str | None) -> EventId | None:
    """Raises HttpError."""
    return None if header is None else EventId.parse(header)


def asks_for_ids(asked: Asked, headers: Mapping[str, str]) -> bool:
    """Raises HttpError."""
    given = headers.get(ASKING_HEADER, "false")
    if given not in ("true", "false"):
        raise bad_value(ASKING_HEADER, "must be true or false")
    if given == "true" and not asked.resumable:
        raise bad_value(ASKING_HEADER, NO_IDS)
    if given == "true" and not asked.is_one:
        raise bad_value(ASKING_HEADER, ONE_CHOICE)
    return asked.event_ids or given == "true"
