"""What workers tell each other through the registry, and how it is written down.

Records and pools are JSON objects. A reader skips fields it does not know (a newer writer), takes the default, if there is one, of a field
that is missing (an older writer), and refuses a wrong type. Block events are many and mostly keys, so their keys are packed as bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Self, get_args, get_origin

from baton.engine.block_key import KEY_BYTES

EVENT_KINDS = ("stored", "removed", "cleared")
SIGNED = ".credit_tokens"  # the one number that may be negative


WorkerState = Literal["ready", "draining"]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is at one moment."""

    running: int = 0  # sequences
    waiting: int = 0  # sequences
    free_blocks: int = 0  # free and evictable
    credit_tokens: int = 0  # decode tokens it can still promise to hold; below zero when it has promised more than fits
    cached_blocks: int = 0
    leases: int = 0
    waiting_tokens: int = 0  # uncached prompt tokens not computed yet


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker that has joined. It expires unless refreshed."""

    name: str
    role: Literal["prefill", "decode"]
    address: str  # gRPC host:port
    incarnation: int  # grows whenever the worker's process restarts
    state: WorkerState
    pid: int
    host: str
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size: int  # tokens
    max_model_len: int  # tokens
    kv_blocks: int
    transport: str
    load: Load = field(default_factory=Load)
    metrics: str = ""  # host:port of its /metrics; empty: it offers none
    max_num_seqs: int = 0  # sequences in one step of its engine; 0: it does not say

    def to_json(self) -> bytes:
        return _encode(self)

    @classmethod
    def from_json(cls, data: bytes | str, name: str | None = None) -> Self:
        """Raises ValueError for anything that is no record, or not the record of `name`."""
        record = cls(**_decode(cls, _parse(data), "record"))
        if name not in (None, record.name):
            raise ValueError(f"record: of {record.name!r}, not of {name!r}")
        return record


@dataclass(frozen=True, slots=True)
class Pools:
    """How many workers each pool should have."""

    prefill: int
    decode: int

    def to_json(self) -> bytes:
        return _encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Raises ValueError for anything that is no pair of sizes."""
        return cls(**_decode(cls, _parse(data), "pools"))


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks became shareable on a worker (`stored`), were dropped (`removed`), or are all gone (`cleared`, no keys)."""

    worker: str
    incarnation: int
    sequence: int  # counts the events of one incarnation from 1 without gaps
    kind: Literal["stored", "removed", "cleared"]
    keys: tuple[bytes, ...] = ()  # KEY_BYTES each

    def to_fields(self) -> dict[bytes, bytes]:
        """Five flat byte strings, as a Redis stream entry holds them."""
        return {
            b"w": self.worker.encode(),
            b"i": str(self.incarnation).encode(),
            b"s": str(self.sequence).encode(),
            b"k": self.kind.encode(),
            b"b": b"".join(self.keys),
        }

    @classmethod
    def from_fields(cls, entry: Mapping[bytes, bytes]) -> Self:
        """Raises ValueError for anything that is no event."""
        try:
            worker, kind, packed = entry[b"w"].decode(), entry[b"k"].decode(), entry[b"b"]
            incarnation, sequence = int(entry[b"i"]), int(entry[b"s"])
        except KeyError as missing:
            raise ValueError(f"event: no field {missing}") from None
        if kind not in EVENT_KINDS or not worker or incarnation < 0 or sequence < 1 or len(packed) % KEY_BYTES:
            raise ValueError(f"event: cannot be {kind!r} {sequence} of {worker!r} with {len(packed)} bytes of keys")
        keys = tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
        return cls(worker, incarnation, sequence, kind, keys)  # type: ignore[arg-type]  # one of EVENT_KINDS


def _encode(record: Any) -> bytes:
    return json.dumps(asdict(record), separators=(",", ":")).encode()


def _parse(data: bytes | str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8 too
        raise ValueError(f"no JSON: {error}") from None


def _decode(cls: type, data: Any, where: str) -> dict[str, Any]:
    """The constructor arguments of the dataclass `cls` in the parsed object `data`."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be an object, not {type(data).__name__}")
    for f in fields(cls):
        if f.name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{where}: no field {f.name!r}")
    return {f.name: _value(f.type, data[f.name], f"{where}.{f.name}") for f in fields(cls) if f.name in data}


def _value(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**_decode(kind, value, where))
    if get_origin(kind) is Literal:
        if isinstance(value, str) and value in get_args(kind):
            return value
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool) and (value >= 0 or where.endswith(SIGNED)):
            return value
    elif isinstance(value, kind):
        return value
    raise ValueError(f"{where}: cannot be {value!r:.80}")
