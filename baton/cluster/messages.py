"""Protobuf messages as plain values, field by field and by name.

The other direction needs no code: `Message(**values)` makes a message from a mapping. It accepts nested mappings, ignores None and refuses
a name that the message does not have.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """All fields of `message`. An optional field or a submessage that is not set is None; a map is a dict, a repeated field a list."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        unset = field.has_presence and not message.HasField(field.name)
        value: Any = None if unset else getattr(message, field.name)
        if isinstance(value, Mapping):
            value = {key: _plain(one) for key, one in value.items()}
        elif field.is_repeated:
            value = [_plain(one) for one in value]
        found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    return plain(value) if isinstance(value, Message) else value
