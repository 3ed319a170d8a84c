"""The live page: the files of `static/`, the data they ask for, and the API for the playground.

    /                 the page
    /live             `router.live.Live.look`
    /live/ID          the record of a request that has ended
    /requests         a list of such records: `sort`, `ascending`, `failed`, `slower_than`, `outcome`, `worker`, `tenant`, `skip`,
                      `limit` as in `router.listing.Query`
    /curves           the last quarter of an hour, from the point with the number `since` on
    /plans            `router.live.Live.plans`
    /v1/...           the HTTP door

Another page must not reach this one through a visitor's browser (`strangers`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from baton.clock import loop_time
from baton.cluster.address import is_loopback
from baton.cluster.errors import BatonError
from baton.cluster.keys import ApiKeys
from router.curves import KEPT, STEP_S
from router.http.app import HttpDoor
from router.http.errors import HttpError, bad_value, to_http, to_json
from router.http.strangers import HEADERS, answer, refusal, refuse_strangers
from router.listing import Query
from router.live import Live

STATIC = Path(__file__).parent / "static"
FILES = {"/": "page.html", **{f"/{path.name}": path.name for path in sorted(STATIC.glob("*.[cj]s*"))}}
SHARED_S = 0.25  # for which a look serves other visitors, too
PAGE_ROWS = 100  # of a list, at most


class Shared:
    """Data made once for all visitors of a moment: the state of a thousand workers takes milliseconds."""

    def __init__(self, make: Callable[[], Awaitable[Any]], keys: ApiKeys) -> None:
        self._make, self._keys = make, keys
        self._lock = asyncio.Lock()
        self._made, self._made_at = b"", -SHARED_S

    async def answer(self, request: Request) -> Response:
        self._keys.tenant(request.headers.get("authorization"))
        return answer(await self.text())

    async def text(self) -> bytes:
        async with self._lock:
            if loop_time() - self._made_at >= SHARED_S:
                self._made = to_json(await self._make())
                self._made_at = loop_time()
            return self._made


class Page:
    """An ASGI application."""

    def __init__(self, live: Live, door: HttpDoor, keys: ApiKeys, host: str) -> None:
        """`host`: the address it listens on."""
        self._live = live
        self._door = door
        self._keys = keys
        self._only_loopback = is_loopback(host)
        self._state, plans = Shared(live.look, keys), Shared(live.plans, keys)
        files = [Route(path, self._file) for path in FILES]
        data = {
            "/live": self._state.answer, "/live/{request_id:path}": self._find, "/requests": self._list, "/curves": self._draw,
            "/plans": plans.answer,
        }  # fmt: skip
        self._router = Router([*files, *(Route(path, make) for path, make in data.items())], redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            refuse_strangers(Headers(scope=scope), self._only_loopback)
            if scope["path"].startswith("/v1/"):
                await self._door(scope, receive, send)
                return
            scope["app"] = self  # starlette's router looks for it before it refuses
            await self._router(scope, receive, send)
        except BatonError as error:
            await refusal(to_http(error))(scope, receive, send)
        except HttpError as error:
            await refusal(error)(scope, receive, send)
        except HTTPException as error:
            await refusal(HttpError(error.status_code, error.detail, headers=error.headers))(scope, receive, send)

    async def _file(self, request: Request) -> Response:
        return FileResponse(STATIC / FILES[request.url.path], headers=HEADERS)

    async def _find(self, request: Request) -> Response:
        self._keys.tenant(request.headers.get("authorization"))
        found = await self._live.find(request.path_params["request_id"])
        if found is None:
            raise HttpError(404, "no request with this id has ended, or its record is no longer kept")
        return _json(self._for(request, found))

    async def _list(self, request: Request) -> Response:
        own = self._keys.tenant(request.headers.get("authorization"))
        query = _query(request.query_params)
        if query.tenant not in ("", own) and self._keys and not self._keys.is_admin(request.headers.get("authorization")):
            raise bad_value("tenant", "only a key with admin=yes may ask for the requests of another tenant")
        listed, matched = await self._live.ended(query)
        return _json({"requests": [self._for(request, record) for _, record in listed], "matched": matched, "skip": query.skip})

    async def _draw(self, request: Request) -> Response:
        self._keys.tenant(request.headers.get("authorization"))
        since = _whole(request.query_params, "since", 0)
        return _json({"step": STEP_S, "kept": KEPT, "points": await self._live.draw(since)})

    def _for(self, request: Request, record: dict[str, Any]) -> dict[str, Any]:
        """One tenant is not told the names of others; an admin is."""
        if not self._keys or self._keys.is_admin(request.headers.get("authorization")):
            return record
        own = self._keys.tenant(request.headers.get("authorization"))
        return {**record, "tenant": record["tenant"] if record["tenant"] == own else ""}


def _query(given: Mapping[str, str]) -> Query:
    """Raises HttpError and BatonError for what no list can be."""
    flags = {}
    for name in ("ascending", "failed"):
        if (flag := given.get(name, "false")) not in ("true", "false"):
            raise bad_value(name, "must be true or false")
        flags[name] = flag == "true"
    try:
        slower_than = float(given.get("slower_than", "0"))
    except ValueError:
        raise bad_value("slower_than", "must be a number of seconds") from None
    limit = _whole(given, "limit", PAGE_ROWS)
    if limit > PAGE_ROWS:
        raise bad_value("limit", f"must be at most {PAGE_ROWS}")
    return Query(
        given.get("sort", "age"), flags["ascending"], flags["failed"], slower_than,
        given.get("outcome", ""), given.get("worker", ""), given.get("tenant", ""), _whole(given, "skip", 0), limit,
    )  # fmt: skip


def _whole(given: Mapping[str, str], name: str, default: int) -> int:
    value = given.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 16):
        raise bad_value(name, "must be a whole number, 0 or more")
    return int(value)


def _json(value: Any) -> Response:
    return answer(to_json(value))
