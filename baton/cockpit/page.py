"""The cockpit's page: the files of `static/` and of the live page that it shares, and what they ask for.

    GET  /            the page
    GET  /state       experiments, knobs, calculators' fields, the cluster, the runs that are kept
    GET  /runs/N      one run with its points, from the one with the number `since` on
    POST /start       {"experiment", "where", "settings"}: begins a run; 409 while another goes on, 503 without a cluster
    POST /stop        ends the run that goes on
    POST /forget      {"id"}
    GET  /size        the calculators

It is the operator's, on loopback alone: the rule there is that of all doors of an operator (`baton.cluster.guard`). The cockpit sends its
load under the API key that it was started with, so with one, whoever asks it must show the same key.
"""

import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from baton.clock import loop_time
from baton.cluster.errors import BatonError, Reason, invalid
from baton.cockpit import calculators
from baton.cockpit.bench import Bench
from baton.cockpit.experiments import catalogue
from router.http.errors import HttpError, to_http, to_json
from router.http.page import STATIC as LIVE
from router.http.strangers import HEADERS, answer, refusal, refuse_strangers

OWN = Path(__file__).parent / "static"
FILES = {"/": OWN / "cockpit.html", **{f"/{path.name}": path for path in sorted(OWN.glob("*.[cj]s*"))}}
FILES |= {f"/{name}": LIVE / name for name in ("page.css", "show.js")}
MAX_BODY = 16 << 10  # bytes
FACTS_EVERY_S = 5.0  # how long what is known of the cluster is told to all visitors


class Cockpit:
    """An ASGI application."""

    def __init__(self, bench: Bench, key: str | None = None) -> None:
        """`key`: the API key under which experiments run; None: the cluster needs none."""
        self._bench, self._key = bench, key
        self._facts: dict[str, Any] = {}
        self._facts_at = -FACTS_EVERY_S
        routes = [Route(path, self._file) for path in FILES]
        asked = {"/state": self._state, "/runs/{number:int}": self._run, "/size": self._size}
        told = {"/start": self._start, "/stop": self._stop, "/forget": self._forget}
        routes += [Route(path, make) for path, make in asked.items()]
        routes += [Route(path, make, methods=["POST"]) for path, make in told.items()]
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            refuse_strangers(headers, only_loopback=True)
            if scope["path"] not in FILES:
                self._check(headers.get("authorization"))
            scope["app"] = self  # starlette's router looks for it before it refuses
            await self._router(scope, receive, send)
        except BatonError as error:
            await refusal(_refused(error))(scope, receive, send)
        except HttpError as error:
            await refusal(error)(scope, receive, send)
        except HTTPException as error:
            await refusal(HttpError(error.status_code, error.detail, headers=error.headers))(scope, receive, send)

    def _check(self, authorization: str | None) -> None:
        """Raises UNAUTHENTICATED."""
        shown = (authorization or "").encode(errors="replace")
        if self._key is not None and not hmac.compare_digest(shown, f"Bearer {self._key}".encode()):
            raise BatonError(Reason.UNAUTHENTICATED, "the cockpit asks for the API key that it was started with")

    async def _file(self, request: Request) -> Response:
        return FileResponse(FILES[request.url.path], headers=HEADERS)

    async def _state(self, request: Request) -> Response:
        bench = self._bench
        current = bench.current
        return _json(
            {
                **catalogue(bench.own.room().workers),
                "calculators": calculators.form(),
                "cluster": await self._cluster(),
                "profile": str(bench.profile) if bench.profile else "",
                "running": current.id if current else None,
                "runs": [run.told() for run in bench.runs.values()],
            }
        )

    async def _cluster(self) -> dict[str, Any]:
        """What is known of the cluster, or why nothing is."""
        if loop_time() - self._facts_at >= FACTS_EVERY_S:
            self._facts_at = loop_time()
            try:
                self._facts = asdict(await self._bench.cluster.facts()) | {"gone": ""}
            except BatonError as error:
                self._facts = {"gone": error.message}
        return self._facts

    async def _run(self, request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdecimal() and len(since) < 10):
            raise invalid("since", "must be a whole number, 0 or more")
        run = self._bench.runs.get(request.path_params["number"])
        if run is None:
            raise HttpError(404, "no run with this number is kept")
        return _json(run.told(int(since)))

    async def _start(self, request: Request) -> Response:
        asked = await _body(request)
        try:
            return _json((await self._bench.start(asked)).told(), 202)
        except BatonError as error:
            if error.reason is Reason.NO_WORKER:
                self._facts_at = -FACTS_EVERY_S  # what is known of the cluster is out of date
            raise

    async def _stop(self, request: Request) -> Response:
        self._bench.stop()
        return _json({})

    async def _forget(self, request: Request) -> Response:
        number = (await _body(request)).get("id")
        if isinstance(number, bool) or not isinstance(number, int):
            raise invalid("id", "must be a whole number")
        self._bench.forget(number)
        return _json({})

    async def _size(self, request: Request) -> Response:
        return _json(calculators.size(dict(request.query_params)))


async def _body(request: Request) -> Mapping[str, Any]:
    """Raises BatonError(INVALID_FIELD), and HttpError for one that is too long."""
    read = b""
    async for piece in request.stream():
        read += piece
        if len(read) > MAX_BODY:
            raise HttpError(413, f"the body has more than {MAX_BODY} bytes")
    try:
        given = json.loads(read)
    except (ValueError, RecursionError):
        raise invalid("body", "is not JSON") from None
    if not isinstance(given, dict):
        raise invalid("body", "must be an object")
    return given


def _refused(error: BatonError) -> HttpError:
    """The refusal of the live page, but a second experiment is a conflict."""
    if error.reason is Reason.SATURATED:
        return HttpError(409, error.message, code="experiment_runs")
    return to_http(error)


def _json(value: Any, status: int = 200) -> Response:
    return answer(to_json(value), status)
