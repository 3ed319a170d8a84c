"""How many fields a serialised `GenerateRequest` may hold, counted before it is parsed.

Parsing holds the GIL from its beginning to its end, and its cost follows the fields rather than the bytes: 4 MiB of empty stop strings take
30 ms, 4 MiB of text less than one. A packed list of numbers is one field. The count stops one field beyond the bound.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from baton.cluster.errors import invalid
from baton.v1 import generation_pb2 as pb
from router.validate import Limits

UNCOUNTED_BYTES = 64 << 10  # parsing a message of so many bytes takes 0.5 ms at most
_LIMITS = Limits()
# A message of a chat and an entry of a map are three fields each: the submessage and its two members.
MAX_FIELDS = 3 * (_LIMITS.max_messages + _LIMITS.max_logit_bias) + _LIMITS.max_stop_token_ids + _LIMITS.max_stop + 64
_Fields = Mapping[int, tuple[str, Any]]  # field number → dotted path, and the fields of a submessage (None: it is not one)


def check_fields(data: bytes) -> None:
    """Raises INVALID_FIELD, which names the field that there is most of."""
    if len(data) <= UNCOUNTED_BYTES:
        return
    seen: Counter[str] = Counter()
    if _count(data, 0, len(data), _FIELDS, MAX_FIELDS, seen) > MAX_FIELDS:
        most = max(seen, key=lambda path: (seen[path], -len(path)))
        description = (
            f"the request must hold at most {MAX_FIELDS} fields, those of its parts included; a list of ids counts as one if packed"
        )
        raise invalid(most, description)


def _count(data: bytes, at: int, end: int, fields: _Fields, most: int, seen: Counter[str]) -> int:
    """Fields from `at` to `end`, or more than `most`; by path in `seen`. What is no message is counted up to the first error: so far the
    parser goes, too."""
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


def _fields(message: Any, parent: str = "") -> _Fields:
    """The entries of a map count as its own path."""
    found = {}
    for field in message.fields:
        path = parent.removesuffix(".") if message.GetOptions().map_entry else f"{parent}{field.name}"
        found[field.number] = path, None if field.message_type is None else _fields(field.message_type, f"{path}.")
    return found


_UNKNOWN: tuple[str, Any] = ("request", None)
_FIELDS = _fields(pb.GenerateRequest.DESCRIPTOR)
