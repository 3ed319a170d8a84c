"""The live page: three files of `static/`, the data they ask for, and the API for the playground.

    /                 the page
    /live             `router.live.Live.look`
    /live/ID          the record of a request that has ended
    /v1/...           the HTTP door

Another page must not reach this one through a visitor's browser. So requests from another origin are refused and, on loopback, requests
under another host name as well (DNS rebinding).
"""

from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from baton.cluster.address import is_loopback
from baton.cluster.errors import BatonError
from baton.cluster.keys import ApiKeys
from router.http.app import HttpDoor
from router.http.errors import HttpError, to_http, to_json
from router.live import Live

STATIC = Path(__file__).parent / "static"
FILES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Page:
    """An ASGI application."""

    def __init__(self, live: Live, door: HttpDoor, keys: ApiKeys, host: str) -> None:
        """`host`: the address it listens on."""
        self._live = live
        self._door = door
        self._keys = keys
        self._only_loopback = is_loopback(host)
        files = [Route(path, self._file) for path in FILES]
        self._router = Router([*files, Route("/live", self._look), Route("/live/{request_id:path}", self._find)], redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._refuse_strangers(Headers(scope=scope))
            if scope["path"].startswith("/v1/"):
                await self._door(scope, receive, send)
                return
            scope["app"] = self  # starlette's router looks for it before it refuses
            await self._router(scope, receive, send)
        except BatonError as error:
            await _refusal(to_http(error))(scope, receive, send)
        except HttpError as error:
            await _refusal(error)(scope, receive, send)
        except HTTPException as error:
            await _refusal(HttpError(error.status_code, error.detail, headers=error.headers))(scope, receive, send)

    def _refuse_strangers(self, headers: Headers) -> None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise HttpError(403, "this page answers only requests from itself", code="foreign_origin")
        if self._only_loopback and not is_loopback(_name(host)):
            raise HttpError(403, "open this page at the address that it listens on", code="foreign_host")

    async def _file(self, request: Request) -> Response:
        return FileResponse(STATIC / FILES[request.url.path], headers=HEADERS)

    async def _look(self, request: Request) -> Response:
        self._keys.tenant(request.headers.get("authorization"))
        return Response(to_json(await self._live.look()), headers=HEADERS, media_type="application/json")

    async def _find(self, request: Request) -> Response:
        self._keys.tenant(request.headers.get("authorization"))
        found = await self._live.find(request.path_params["request_id"])
        if found is None:
            raise HttpError(404, "no request with this id has ended, or its record is no longer kept")
        return Response(to_json(found), headers=HEADERS, media_type="application/json")


def _name(host: str) -> str:
    """The name in `name:port`, or the address in `[address]:port`."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _refusal(error: HttpError) -> Response:
    headers: Mapping[str, str] = {**HEADERS, **error.headers}
    return Response(to_json(error.body), error.status, headers, "application/json")
