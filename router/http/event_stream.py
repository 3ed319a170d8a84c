"""Answers as streams of server-sent events. The status is sent with the first token, so a failure before it gets its own status. After
that, the refusal is the last event of the stream, in place of the API's own last event: a stream that is cut never looks complete."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.events import Event, parts
from router.http.api import Api, Json, Writer
from router.http.errors import HttpError
from router.http.event_id import Numbering
from router.http.pieces import joined, rest
from router.http.stream import while_connected
from router.turn_budget import TurnBudget

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """The status is sent with the first event; an earlier error of `chunks` is raised to the caller."""

    def __init__(
        self,
        api: Api,
        writer: Writer,
        chunks: AsyncGenerator[bytes, None],
        within_s: float,
        refusal: Callable[[BaseException], HttpError],
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._api = api
        self._writer = writer
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
            last = self._broken(self._refusal(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _broken(self, error: HttpError) -> bytes:
        api = self._api
        return api.event(api.refusal(error), "") if api.broken is None else api.broken(self._writer, error)


async def chunks(
    api: Api, events: AsyncGenerator[tuple[int, Event], None], writer: Writer, numbering: Numbering | None, budget: TurnBudget
) -> AsyncGenerator[bytes, None]:
    """`numbering`: None for a stream whose events have no ids."""

    def written(values: Iterable[Json | bytes]) -> Iterator[bytes]:
        for value in values:
            if isinstance(value, bytes):
                yield value
            elif numbering is None:
                yield api.event(value, "")
            elif (id_ := numbering.next()) is not None:
                yield api.event(value, id_)

    def of(event: Event, index: int) -> Iterator[bytes]:
        for part in parts(event):
            if numbering is not None:
                numbering.take(part)
            yield from written(writer.chunks(index, part))

    async with aclosing(events):
        async for index, event in events:
            for data in joined(of(event, index)):
                yield data
                await rest(data, budget)
    if api.settle is not None:
        await api.settle(writer)
    for data in joined(written(writer.end())):
        yield data
        await rest(data, budget)
    if numbering is not None:
        numbering.end()
