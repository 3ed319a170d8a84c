"""How many fields a serialised `GenerateRequest` may hold, counted before it is parsed.

Parsing holds the GIL from its beginning to its end, and its cost follows the fields rather than the bytes: 4 MiB of empty stop strings take
30 ms, 4 MiB of text less than one. A packed list of numbers is one field. The count stops one field beyond the bound.
"""

from collections.abc import Mapping
from typing import Any

from baton.cluster.errors import invalid
from baton.v1 import generation_pb2 as pb
from router.validate import Limits

UNCOUNTED_BYTES = 64 << 10  # parsing a message of so many bytes takes 0.5 ms at most
_LIMITS = Limits()
# A message of a chat and an entry of a map are three fields each: the submessage and its two members.
MAX_FIELDS = 3 * (_LIMITS.max_messages + _LIMITS.max_logit_bias) + _LIMITS.max_stop_token_ids + _LIMITS.max_stop + 64
_Nested = Mapping[int, Any]  # field number of each submessage → those that it holds


def check_fields(data: bytes) -> None:
    """Raises INVALID_FIELD."""
    if len(data) > UNCOUNTED_BYTES and _count(data, 0, len(data), _NESTED, MAX_FIELDS) > MAX_FIELDS:
        raise invalid(
            "request", f"must hold at most {MAX_FIELDS} fields, those of its parts included; a list of ids counts as one if packed"
        )


def _count(data: bytes, at: int, end: int, nested: _Nested, most: int) -> int:
    """Fields from `at` to `end`, or more than `most`. What is no message is counted up to the first error: so far the parser goes, too."""
    found = 0
    while at < end and found <= most:
        found += 1
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            _, at = _varint(data, at)
        elif wire == 1:
            at += 8
        elif wire == 5:
            at += 4
        elif wire == 2:
            size, at = _varint(data, at)
            inner = nested.get(tag >> 3)
            if inner is not None:
                found += _count(data, at, min(at + size, end), inner, most - found)
            at += size
        elif wire > 5:
            break
        # 3 and 4 open and close a group, which no message of ours has: what is inside counts like the rest.
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends; behind the end of `data` for one that does not end."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, len(data)


def _nested(message: Any) -> _Nested:
    return {field.number: _nested(field.message_type) for field in message.fields if field.message_type is not None}


_NESTED = _nested(pb.GenerateRequest.DESCRIPTOR)
