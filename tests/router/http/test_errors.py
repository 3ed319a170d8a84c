"""HTTP and gRPC share one table of errors: every reason has an HTTP status and an error object that clients know."""

import pytest

from baton.cluster.errors import BatonError, Reason, Violation, invalid
from router.http.errors import HttpError, to_http, to_json, to_param


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_becomes_an_error_object(reason: Reason) -> None:
    error = to_http(BatonError(reason, "what happened"))
    assert error.status == reason.value.http
    body = error.body["error"]
    assert body["message"] == "what happened" and body["code"] == body["code"].lower()
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
    assert body["type"] == kinds.get(error.status, "invalid_request_error")
    assert ("retry-after" in error.headers) == (error.status in (429, 503))
    assert int(error.headers.get("retry-after", 1)) >= 1


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (Reason.INVALID_FIELD, 400, "invalid_value"),
        (Reason.CONTEXT_LENGTH, 400, "context_length_exceeded"),
        (Reason.UNAUTHENTICATED, 401, "invalid_api_key"),
        (Reason.MODEL_NOT_FOUND, 404, "model_not_found"),
        (Reason.RATE_LIMITED, 429, "rate_limit_exceeded"),
        (Reason.SATURATED, 429, "overloaded"),
        (Reason.NO_WORKER, 503, "no_worker"),
        (Reason.DEADLINE, 504, "deadline"),
        (Reason.INTERNAL, 500, "internal"),
    ],
)
def test_reasons_have_the_codes_that_clients_check(reason: Reason, status: int, code: str) -> None:
    error = to_http(BatonError(reason, "x"))
    assert (error.status, error.code) == (status, code)


def test_a_violation_is_reported_under_the_name_the_client_used() -> None:
    error = to_http(invalid("sampling.max_tokens", "must be at least 1"), {"max_tokens": "max_completion_tokens"})
    assert (error.param, error.message) == ("max_completion_tokens", "max_completion_tokens: must be at least 1")
    many = BatonError(Reason.INVALID_FIELD, "x", (Violation("sampling.top_p", "is bad"), Violation("text", "is bad too")))
    assert to_http(many).message == "top_p: is bad (and 1 more)"
    assert to_http(BatonError(Reason.MODEL_NOT_FOUND, "x")).param == "model"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.temperature", "temperature"),
        ("sampling.stop[3]", "stop[3]"),
        ("sampling.logit_bias[5]", "logit_bias[5]"),
        ("text", "prompt"),
        ("token_ids.ids[7]", "prompt[7]"),
        ("chat.messages[2].role", "messages[2].role"),
        ("cache_salt", "cache_salt"),
    ],
)
def test_fields_are_translated_to_parameters(field: str, param: str) -> None:
    names = {"text": "prompt", "token_ids.ids": "prompt", "chat.messages": "messages"}
    assert to_param(field, names) == param


def test_the_longest_beginning_of_a_path_that_has_a_name_is_replaced() -> None:
    names = {
        "messages": "m",
        "messages[1]": "m[0]",
        "messages[1].calls": "m[0].content",
        "messages[1].calls[0].name": "m[0].content[2].name",
    }
    for field, param in (
        ("messages[1].calls[0].name", "m[0].content[2].name"),
        ("messages[1].calls[0].id", "m[0].content[0].id"),
        ("messages[1].calls", "m[0].content"),
        ("messages[1].content", "m[0].content"),
        ("messages[11].content", "m[11].content"),
        ("other.messages[1]", "other.messages[1]"),
        ("", ""),
    ):
        assert to_param(field, names) == param


def test_an_error_specific_to_http_is_an_error_object() -> None:
    error = HttpError(415, "send JSON", headers={"a": "b"})
    assert error.body == {
        "error": {"message": "send JSON", "type": "invalid_request_error", "param": None, "code": "unsupported_media_type"}
    }


def test_json_is_one_line_for_every_line_reader() -> None:
    text = to_json({"text": "a\u2028b\x85c\nd\ud800é"})
    assert len(text.decode().splitlines()) == 1 and text.isascii()
