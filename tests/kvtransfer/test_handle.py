"""A handle is accepted as it was made, by the key that made it, for the request it was made for; and in no other case."""

from dataclasses import fields, replace

import pytest

from baton.cluster.errors import BatonError, Reason
from kvtransfer.handle import KvHandle, mac_key

KEY = mac_key("the key of this cluster")
HANDLE = KvHandle("prefill-0", "127.0.0.1:1", 7, 3, "req", (4, 5), b"\x01" * 32, 20, b"\x02" * 16, 10_000).sealed(KEY)
OTHER = {str: "x", int: 99, bytes: b"\x03" * 16, tuple: (4, 6)}


def test_own_handle_is_accepted() -> None:
    HANDLE.verify(KEY, "req")


@pytest.mark.parametrize("name", [f.name for f in fields(KvHandle)])
def test_any_altered_field_is_refused(name: str) -> None:
    altered = replace(HANDLE, **{name: OTHER[type(getattr(HANDLE, name))]})
    with pytest.raises(BatonError) as caught:
        altered.verify(KEY, altered.request_id)
    assert caught.value.reason is Reason.LEASE_REFUSED


def test_other_request_and_other_key_are_refused() -> None:
    with pytest.raises(BatonError, match="another request"):
        HANDLE.verify(KEY, "req2")
    with pytest.raises(BatonError, match="not made with the key"):
        HANDLE.verify(mac_key("another cluster"), "req")


def test_bytes_do_not_wander_between_fields() -> None:
    """Negative control of the length prefixes: the same bytes, cut elsewhere, are another handle."""
    left = replace(HANDLE, worker="ab", address="c").sealed(KEY)
    right = replace(HANDLE, worker="a", address="bc").sealed(KEY)
    assert left.mac != right.mac
