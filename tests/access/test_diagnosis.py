"""Errors of gRPC's in the words of the person who typed the command: each text is one that gRPC wrote."""

import pytest

from baton.access.diagnosis import explain

LOST = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (
            "UNAVAILABLE",
            f"{LOST}UNIMPLEMENTED: ipv4:127.0.0.1:8000: Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type"
            " 80) (Trying to connect an http1.x server (HTTP status 404))",
            "127.0.0.1:8000 speaks HTTP, not gRPC",
        ),
        ("UNIMPLEMENTED", "Method not found!", "another gRPC port than the one that this command needs"),
        (
            "UNAVAILABLE",
            f"{LOST}UNKNOWN: ipv4:127.0.0.1:8471: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:100000f7:SSL"
            " routines:OPENSSL_internal:WRONG_VERSION_NUMBER: Invalid certificate verification context: OK",
            "127.0.0.1:8471 does not use TLS",
        ),
        (
            "UNAVAILABLE",
            f"{LOST}UNKNOWN: ipv6:%5B::1%5D:443: Failed to connect to remote host: Connection refused",
            "nothing listens at [::1]:443",
        ),
        ("UNAUTHENTICATED", "no API key", "no API key (set BATON_API_KEY"),
        ("INVALID_FIELD", "max_tokens: must be at least 1", "max_tokens: must be at least 1"),
    ],
)
def test_the_wrong_door_is_named(code: str, text: str, said: str) -> None:
    told = explain(code, text)
    assert told.startswith(f"{code}: ") and said in told and "\n" not in told
    assert (told == f"{code}: {text}") == (code == "INVALID_FIELD")
