"""Who may ask a page for people: no other page through a visitor's browser. Requests from another origin are refused and, on loopback,
requests under another host name as well (DNS rebinding)."""

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import Response

from baton.cluster.address import is_loopback
from router.http.errors import HttpError, to_json

# Of every answer of a page.
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def refuse_strangers(headers: Headers, only_loopback: bool) -> None:
    """`only_loopback`: whether the page listens there alone. Raises HttpError."""
    host = headers.get("host", "")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise HttpError(403, "this page answers only requests from itself", code="foreign_origin")
    if only_loopback and not is_loopback(_name(host)):
        raise HttpError(403, "open this page at the address that it listens on", code="foreign_host")


def answer(text: bytes, status: int = 200) -> Response:
    return Response(text, status, HEADERS, "application/json")


def refusal(error: HttpError) -> Response:
    headers: Mapping[str, str] = {**HEADERS, **error.headers}
    return Response(to_json(error.body), error.status, headers, "application/json")


def _name(host: str) -> str:
    """The name in `name:port`, or the address in `[address]:port`."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
