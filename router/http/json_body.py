"""JSON bodies, read strictly and within a bound: values are counted before they are parsed, for parsing takes time with their number."""

import json
from collections.abc import Iterator
from typing import Any

from router.http.errors import HttpError

# Parsing MAX_VALUES values takes 11 ms, and so does parsing MAX_NODES lists, objects and their members; nothing else runs meanwhile.
MAX_VALUES = 160_000  # enough for a prompt of 128 k ids
MAX_NODES = 1 << 15
SCAN_BYTES = 64 << 10  # other threads may run between two parts


class _Malformed(ValueError):
    pass


def parse(body: bytes) -> dict[str, Any]:
    """The object that `body` holds. Raises HttpError."""
    check_values(body)
    try:
        tree = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise _no_json("it is nested too deeply") from None
    except (_Malformed, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _no_json(str(error)) from None
    except ValueError:  # Python's own limit
        raise _no_json("a number has too many digits") from None
    if type(tree) is not dict:
        raise HttpError(400, "the body must be a JSON object", code="invalid_json")
    return tree


def _no_json(why: str) -> HttpError:
    return HttpError(400, f"the body is not JSON in UTF-8: {why}"[:200], code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _Malformed("a member of an object is given twice")
    return made


def _no_number(name: str) -> Any:
    raise _Malformed(f"{name} is not a JSON number")


def check_values(body: bytes) -> None:
    """Raises HttpError for a body of too many values. Strings are left out only if the count with them is too high."""
    if _within(*_values_and_nodes(body)):
        return
    values = nodes = 0
    for part in _outside_strings(body):
        more_values, more_nodes = _values_and_nodes(part)
        values, nodes = values + more_values, nodes + more_nodes
        if not _within(values, nodes):
            message = f"the body must hold at most {MAX_VALUES} values, and {MAX_NODES} lists, objects and members"
            raise HttpError(400, message, code="invalid_json")


def _values_and_nodes(text: bytes) -> tuple[int, int]:
    return text.count(b","), sum(map(text.count, (b"[", b"{", b":")))


def _within(values: int, nodes: int) -> bool:
    return values <= MAX_VALUES and nodes <= MAX_NODES


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Yields what a JSON text has outside its strings, part by part."""
    inside, carried = False, b""
    for at in range(0, len(body), SCAN_BYTES):
        part = carried + body[at : at + SCAN_BYTES]
        carried = part[-1:] if (len(part) - len(part.rstrip(b"\\"))) % 2 else b""  # the first half of an escape
        pieces = part[: len(part) - len(carried)].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
