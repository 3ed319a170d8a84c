"""Handles, pieces and wishes are accepted only unaltered, under the key that sealed them, and for their own request and lease."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import pytest

from baton.cluster.errors import BatonError, Reason
from kvtransfer.handle import KvHandle, Piece, Wish, mac_key

KEY = mac_key("the key of this cluster")
HANDLE = KvHandle("prefill-0", "127.0.0.1:1", 7, 3, "req", 0, 20, b"\x02" * 16, 10_000).sealed(KEY)
PIECE = Piece(3, "req", 1, (4, 5), b"\x01" * 32, False, 10_000).sealed(KEY)
WISH = Wish("decode-0", 7, "req", 16, b"\x05" * 32).sealed(KEY)
Sealed = TypeVar("Sealed", KvHandle, Piece, Wish)
OTHER = {str: "x", int: 99, bytes: b"\x03" * 16, tuple: (4, 6), bool: True}


def test_unaltered_handles_pieces_and_wishes_are_accepted() -> None:
    HANDLE.verify(KEY, "req")
    PIECE.verify(KEY, HANDLE)
    assert WISH.is_sealed_with(KEY)


@pytest.mark.parametrize(
    ("sealed", "name"), [(sealed, f.name) for sealed in (HANDLE, PIECE, WISH) for f in fields(sealed)], ids=lambda value: str(value)[:20]
)
def test_any_altered_field_is_refused(sealed: Sealed, name: str) -> None:
    change: dict[str, Any] = {name: OTHER[type(getattr(sealed, name))]}
    altered = replace(sealed, **change)
    assert altered != sealed and not altered.is_sealed_with(KEY)
    if isinstance(altered, KvHandle):
        with pytest.raises(BatonError) as caught:
            altered.verify(KEY, altered.request_id)
        assert caught.value.reason is Reason.LEASE_REFUSED


@pytest.mark.parametrize("change", [{"lease_id": 4}, {"request_id": "req2"}])
def test_a_piece_of_another_lease_or_request_is_refused(change: dict[str, Any]) -> None:
    """Even with a valid MAC: the blocks of another lease hold another prompt."""
    with pytest.raises(BatonError, match="another lease"):
        replace(PIECE, **change).sealed(KEY).verify(KEY, HANDLE)


def test_a_handle_of_another_request_or_key_is_refused() -> None:
    with pytest.raises(BatonError, match="another request"):
        HANDLE.verify(KEY, "req2")
    with pytest.raises(BatonError, match="not made with the key"):
        HANDLE.verify(mac_key("another cluster"), "req")


def test_bytes_moved_between_fields_change_the_mac() -> None:
    """Negative control for the length prefixes: the same bytes, split differently, make a different handle."""
    left = replace(HANDLE, worker="ab", address="c").sealed(KEY)
    right = replace(HANDLE, worker="a", address="bc").sealed(KEY)
    assert left.mac != right.mac
