"""Bounds the number of fields in a serialised `GenerateRequest`. They are counted before the message is parsed.

Parsing holds the GIL from start to end, and its cost depends on the number of fields, not of bytes: 4 MiB of empty stop strings take
30 ms, 4 MiB of text less than 1 ms. A packed list of numbers is one field. The count stops one field beyond the bound.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from baton.cluster.errors import invalid
from baton.v1 import generation_pb2 as pb
from router.validate import RequestLimits

UNCOUNTED_BYTES = 64 << 10  # parsing a message of this size takes 0.5 ms at most
_LIMITS = RequestLimits()
# A chat message is four fields, the submessage and its three members; a map entry three.
MAX_FIELDS = 4 * _LIMITS.max_messages + 3 * _LIMITS.max_logit_bias + _LIMITS.max_stop_token_ids + _LIMITS.max_stop + 64
_Fields = Mapping[int, tuple[str, Any]]  # field number → dotted path, and the fields of a submessage (None: it is not a submessage)


def check_fields(data: bytes) -> None:
    """Raises INVALID_FIELD if there are too many fields. The error names the most frequent one."""
    if len(data) <= UNCOUNTED_BYTES:
        return
    seen: Counter[str] = Counter()
    if _count(data, 0, len(data), _FIELDS, MAX_FIELDS, seen) > MAX_FIELDS:
        most = max(seen, key=lambda path: (seen[path], -len(path)))
        description = f"the request must have at most {MAX_FIELDS} fields, including nested ones; a packed list of ids counts as one"
        raise invalid(most, description)


def _count(data: bytes, at: int, end: int, fields: _Fields, most: int, seen: Counter[str]) -> int:
    """Counts the fields from `at` to `end`, also by path in `seen`, and stops when there are more than `most`. Malformed data is counted up
    to the first error, which is as far as the parser gets, too."""
    found = 0
    while at < end and found <= most:
        found += 1
        tag, at = _varint(data, at)
        wire = tag & 7
        path, inner = fields.get(tag >> 3, _UNKNOWN)
        seen[path] += 1
        if wire == 0:
            _, at = _varint(data, at)
        elif wire == 1:
            at += 8
        elif wire == 5:
            at += 4
        elif wire == 2:
            size, at = _varint(data, at)
            if inner is not None:
                found += _count(data, at, min(at + size, end), inner, most - found, seen)
            at += size
        elif wire > 5:
            break
        # 3 and 4 open and close a group, which our messages do not have: the fields inside count like the rest.
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number at `at` and the position after it, which is the end of `data` if the number is cut off."""
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


def _fields(message: Any, parent: str = "") -> _Fields:
    """The entries of a map are counted under the path of the map."""
    found = {}
    for field in message.fields:
        path = parent.removesuffix(".") if message.GetOptions().map_entry else f"{parent}{field.name}"
        found[field.number] = path, None if field.message_type is None else _fields(field.message_type, f"{path}.")
    return found


_UNKNOWN: tuple[str, Any] = ("request", None)
_FIELDS = _fields(pb.GenerateRequest.DESCRIPTOR)
