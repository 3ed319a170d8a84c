"""OpenAI's responses API, and the answers that it keeps: a later request may go on with one, and GET and DELETE name it."""

import asyncio
from collections.abc import Callable, Iterator
from typing import TypeVar

from pydantic import ValidationError

from router.http.api import Api, Json
from router.http.body import UNSUPPORTED
from router.http.errors import HttpError, bad_value, to_json
from router.http.json_body import check_values, parse
from router.http.openai_in import Asked
from router.http.pieces import PIECE_BYTES
from router.http.responses_in import AskedResponse, after, response
from router.http.responses_out import ResponseWriter
from router.kept import Kept, Unreachable
from router.service import GenerateService
from router.tokenizer import Tokenizer

T = TypeVar("T")
AT_ONCE_BYTES = PIECE_BYTES  # of a record; a longer one is made and read in a thread
PREVIOUS = "previous_response_id"
NOWHERE = "needs answers that are kept, and this cluster keeps none (router.responses_keep_s is 0)"


class Responses:
    def __init__(self, service: GenerateService, tokenizer: Tokenizer, draw_id: Callable[[], str]) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._draw_id = draw_id
        self.api = Api(
            response, self._writer, _event, b"", lambda refusal: refusal.body, ResponseWriter.broken, self._prepare, self._settle
        )

    async def get(self, tenant: str, id_: str) -> bytes:
        """An answer that is kept, in JSON. Raises HttpError."""
        record = await self._find(tenant, id_, "response_id")
        return await asyncio.to_thread(lambda: to_json(parse(record)["response"]))

    async def delete(self, tenant: str, id_: str) -> Json:
        """Raises HttpError."""
        kept = self._kept("response_id")
        try:
            found = await kept.delete(tenant, id_)
        except Unreachable:
            raise _away("response_id") from None
        if not found:
            raise _unknown("response_id")
        return {"id": id_, "object": "response", "deleted": True}

    def _writer(self, asked: Asked, request_id: str) -> ResponseWriter:
        assert isinstance(asked, AskedResponse)
        to_keep = self._service.kept is not None and asked.given.store is not False
        return ResponseWriter(asked, self._tokenizer, self._draw_id().removeprefix("req-"), self._service.model_name, to_keep)

    async def _prepare(self, asked: AskedResponse) -> AskedResponse:
        """The request with the conversation that it continues. Raises HttpError."""
        if asked.given.store:
            self._kept("store")
        id_ = asked.given.previous_response_id
        if id_ is None:
            return asked
        record = await self._find(asked.asks[0].tenant, id_, PREVIOUS)
        try:
            return await _run(asked.size + len(record), lambda: after(asked, list(_items(parse(record))), len(record)))
        except (ValidationError, HttpError, KeyError, TypeError):  # of another version of this software
            raise _unknown(PREVIOUS) from None

    async def _settle(self, writer: ResponseWriter) -> None:
        """Keeps an answer, if it is to be kept and can be; the answer says whether it is."""
        kept = self._service.kept
        if kept is None or not writer.to_keep:
            return
        try:
            record = await _run(writer.asked.size + writer.size, lambda: _checked(b"".join(writer.record())))
        except HttpError:
            writer.stored = False
            return
        writer.stored = await kept.put(writer.asked.asks[0].tenant, writer.id, record)

    async def _find(self, tenant: str, id_: str, param: str) -> bytes:
        kept = self._kept(param)
        try:
            record = await kept.get(tenant, id_)
        except Unreachable:
            raise _away(param) from None
        if record is None:
            raise _unknown(param)
        return record

    def _kept(self, param: str) -> Kept:
        if self._service.kept is None:
            raise bad_value(param, NOWHERE, UNSUPPORTED)
        return self._service.kept


def _items(record: Json) -> Iterator[Json]:
    """A call that was cut off is none."""
    yield from record["before"]
    for item in record["response"]["output"]:
        if item["type"] != "function_call" or item["status"] == "completed":
            yield item


def _checked(record: bytes) -> bytes:
    """Raises HttpError for a record that could not be read later."""
    check_values(record)
    return record


async def _run(size: int, work: Callable[[], T]) -> T:
    return work() if size <= AT_ONCE_BYTES else await asyncio.to_thread(work)


def _event(value: Json, id_: str) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def _unknown(param: str) -> HttpError:
    """The same for an id that never was, one that has expired, and one of another tenant."""
    return HttpError(404, f"{param}: no response with this id is kept", param=param, code="response_not_found")


def _away(param: str) -> HttpError:
    headers = {"retry-after": "1"}
    return HttpError(503, f"{param}: the store of responses does not answer", param=param, code="store_unavailable", headers=headers)
