"""Answers as streams of server-sent events. The status is sent with the first token, so a failure before it gets its own status. After
that, the refusal is the last event of the stream, in place of the API's own last event: a stream that is cut never looks complete."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.api import Api, Json, Writer
from router.http.errors import HttpError
from router.http.event_id import Numbering
from router.http.stream import while_connected
from router.service import Event, Part, parts

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """The status is sent with the first event; an earlier error of `chunks` is raised to the caller."""

    def __init__(
        self, api: Api, chunks: AsyncGenerator[bytes, None], within_s: float, refusal: Callable[[BaseException], HttpError]
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._api = api
        self._chunks = chunks
        self._within_s = within_s
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, last = False, self._api.done
        try:
            async with while_connected(receive, self._within_s), aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not started:  # a resumed stream of which the client had everything but the end
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        except (Exception, asyncio.CancelledError) as error:
            if not started:
                raise
            last = self._api.event(self._api.refusal(self._refusal(error)), "")
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def chunks(
    api: Api, events: AsyncGenerator[tuple[int, Event], None], writer: Writer, numbering: Numbering | None
) -> AsyncGenerator[bytes, None]:
    """`numbering`: None for a stream whose events have no ids."""

    def written(values: Iterable[Json]) -> bytes:
        if numbering is None:
            return b"".join(api.event(value, "") for value in values)
        return b"".join(api.event(value, id_) for value in values if (id_ := numbering.next()) is not None)

    def of(part: Part, index: int) -> bytes:
        if numbering is not None:
            numbering.take(part)
        return written(writer.chunks(index, part))

    async with aclosing(events):
        async for index, event in events:
            if data := b"".join(of(part, index) for part in parts(event)):
                yield data
    if data := written(writer.end()):
        yield data
    if numbering is not None:
        numbering.end()
