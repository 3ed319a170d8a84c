"""Refusals in the form that clients of the OpenAI API expect: status, headers, and {"error": {"message", "type", "param", "code"}}."""

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from baton.cluster.errors import DEGRADED, BatonError, Reason

DEGRADED_HEADER = "x-baton-degraded"  # what overload took from the request
RETRY_AFTER_S = 1.0  # sent if a retry can help but the error names no time
_CODES = {
    Reason.INVALID_FIELD: "invalid_value",
    Reason.CONTEXT_LENGTH: "context_length_exceeded",
    Reason.UNAUTHENTICATED: "invalid_api_key",
    Reason.RATE_LIMITED: "rate_limit_exceeded",
    Reason.SATURATED: "overloaded",
}
_NO_NAMES: Mapping[str, str] = {}
_write = json.JSONEncoder(separators=(",", ":")).encode  # made once: `json.dumps` makes an encoder for each call, and a token is a call


class HttpError(Exception):
    """A refusal that only the HTTP door makes, or one of `baton.cluster.errors` after `to_http` has translated it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or HTTPStatus(status).phrase.lower().replace(" ", "_")
        self.headers = dict(headers or {})
        self.request_id = ""  # of the request that is refused, once the door tells its client

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_value(param: str, description: str, code: str = "invalid_value") -> HttpError:
    return HttpError(400, f"{param}: {description}", param=param, code=code)


def to_http(error: BatonError, names: Mapping[str, str] = _NO_NAMES) -> HttpError:
    """`names` maps our fields to the names that the client uses, where they differ."""
    kind = error.reason.value
    param = "model" if error.reason is Reason.MODEL_NOT_FOUND else None
    message = error.message
    if error.violations:
        first = error.violations[0]
        param = to_param(first.field, names)
        more = f" (and {len(error.violations) - 1} more)" if len(error.violations) > 1 else ""
        message = f"{param}: {first.description}{more}"
    if error.reason is Reason.CONTEXT_LENGTH and (context := error.metadata.get("context")):
        message += f"; this model's maximum context length is {context} tokens"  # what clients look for, LiteLLM above all
    headers = {}
    if degraded := error.metadata.get(DEGRADED):
        headers[DEGRADED_HEADER] = degraded
        param = to_param(degraded.partition(":")[0], names)
    if kind.http in (429, 503):
        headers["retry-after"] = str(math.ceil(error.retry_after or RETRY_AFTER_S))
    if kind.http == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpError(kind.http, message, param=param, code=_CODES.get(error.reason, error.reason.name.lower()), headers=headers)


def to_param(field: str, names: Mapping[str, str]) -> str:
    """`sampling.stop[0]` → `stop[0]`, `chat.messages[2].role` → `messages[2].role`: the longest beginning of the path that has a name there
    is replaced by it."""
    field = field.removeprefix("sampling.")
    end = len(field)
    while end > 0:
        if (name := names.get(field[:end])) is not None:
            return name + field[end:]
        end = max(field.rfind(mark, 0, end) for mark in ".[")
    return field


def to_json(value: Any) -> bytes:
    """Writes ASCII, because some readers of event streams end a line at Unicode's line separators."""
    return _write(value).encode()
