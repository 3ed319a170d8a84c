"""What workers and routers publish in the registry, and how it is encoded.

Records and pools are JSON objects, read and written by pydantic from the types of the dataclasses. A reader skips unknown fields (from a
newer writer), uses the default of a missing field that has one (from an older writer), and refuses a value of the wrong type. A block event
consists mostly of keys, and there are many events, so the keys are packed as bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from baton.engine.core.block_key import DEVICE, KEY_BYTES, MAX_EVENT_KEYS, MEDIA

EVENT_KINDS = ("stored", "removed")
WorkerState = Literal["ready", "draining"]
RoleName = Literal["prefill", "decode"]
ROLES: tuple[RoleName, ...] = ("prefill", "decode")

Count = Annotated[int, Field(ge=0)]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is at one moment."""

    running: Count = 0  # sequences
    waiting: Count = 0  # sequences
    free_blocks: Count = 0  # free and evictable
    credit_tokens: int = 0  # decode tokens it can still promise to hold; negative if it has promised more than fits
    cached_blocks: Count = 0
    leases: Count = 0
    waiting_tokens: Count = 0  # uncached prompt tokens not computed yet


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """What a GPU of a worker does, all processes on it together. None, and a memory of 0: it is not told."""

    gpu: str  # its number, or of a slice the UUID
    name: str = ""
    memory_used: Count = 0  # bytes
    memory_total: Count = 0
    busy: float | None = None  # share of the last moments in which some kernel ran
    watts: float | None = None
    ecc_corrected: Count | None = None  # errors of its memory since the driver was loaded
    ecc_uncorrected: Count | None = None


@dataclass(frozen=True, slots=True)
class TierRecord:
    """A place for KV that has left a worker's pool."""

    medium: str  # one of MEDIA
    state: str  # on, watching, failed, probing, resting, closed
    why: str = ""  # it is not on
    blocks: Count = 0
    capacity: Count = 0
    reads: Count = 0  # blocks that it was asked for, since the start
    hits: Count = 0  # part of them: it brought
    saved_s: float = 0.0  # of computing, in the last ten minutes
    spent_s: float = 0.0  # what it cost in these; if that is more, it does not pay
    cost: float = 0.0  # of loading a token, as a share of computing it, lately; 0: not known


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker that has joined. It expires unless refreshed."""

    name: str
    pool: RoleName  # the role that it was started in
    address: str  # gRPC host:port
    incarnation: Count  # grows whenever the worker's process restarts
    state: WorkerState
    pid: Count
    host: str
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size: Count  # tokens
    max_model_len: Count  # tokens
    kv_blocks: Count
    transport: str
    load: Load = field(default_factory=Load)
    metrics: str = ""  # host:port of its /metrics; empty: it has none
    roles: tuple[RoleName, ...] = ()  # what it serves at this moment; empty: that of its `pool`, unless it is `unproven`
    max_num_seqs: Count = 0  # sequences in one step of its engine; 0: unknown
    eos_token_ids: tuple[Count, ...] = ()  # tokens with which its engine ends an output; empty: unknown, or there are none
    gpus: tuple[GpuRecord, ...] = ()  # those that it uses; empty: none, or nobody can ask them
    speculation: tuple[str, ...] = ()  # methods of guessing that its engine has, the one in force first (`Offer`); empty: none
    speculation_tokens: Count = 0  # guesses in one step, at most
    forks: bool = False  # whether a decode call may begin others; an older worker would not answer them
    tiers: tuple[TierRecord, ...] = ()  # the nearest first
    matrices: str = ""  # what became of a quantised checkpoint's; empty: its model is not quantised
    brings: bool = False  # whether it takes hints, and lends what is in its tiers; an older worker would not answer
    lends: bool = True  # whether peers can borrow blocks that it caches; true also if unknown, for the worker itself can refuse
    proving: tuple[RoleName, ...] = ()  # roles whose work it accepts and has not proved yet (`router.proof`)
    unproved: str = ""  # why the last proof failed, if it did

    @property
    def unproven(self) -> bool:
        """Whether it has started and serves nothing yet, because it has not proved itself."""
        return bool(self.proving) and not self.roles

    @property
    def serving(self) -> tuple[RoleName, ...]:
        return () if self.unproven else self.roles or (self.pool,)

    def serves(self, role: RoleName) -> bool:
        return role in self.serving

    def to_json(self) -> bytes:
        return _RECORD.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes | str, name: str | None = None) -> "WorkerRecord":
        """Raises ValueError for data that is not a record, or not the record of `name`."""
        record = _checked(lambda: _RECORD.validate_json(data, strict=True), "record")
        if name not in (None, record.name):
            raise ValueError(f"record: of {record.name!r}, not of {name!r}")
        return record

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> "WorkerRecord":
        """Raises ValueError for values that do not form a record."""
        return _checked(lambda: _RECORD.validate_python(fields), "record")


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """A router that takes requests. It expires unless refreshed."""

    name: str
    incarnation: Count
    pid: Count
    host: str
    endpoints: dict[str, str]  # "grpc", "http", "admin", "page", "metrics", "health" → host:port
    model_name: str
    inflight: Count = 0  # requests that it is serving
    queued: Count = 0  # requests that wait there for admission
    places: Count = 0  # that its requests have taken, at least one each; a router that does not tell them counts each as one

    def to_json(self) -> bytes:
        return _ROUTER.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes | str, name: str | None = None) -> "RouterRecord":
        """Raises ValueError for data that is not a record, or not the record of `name`."""
        record = _checked(lambda: _ROUTER.validate_json(data, strict=True), "router")
        if name not in (None, record.name):
            raise ValueError(f"router: of {record.name!r}, not of {name!r}")
        return record


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A worker that is starting, and what it is doing. It expires unless refreshed."""

    name: str
    pool: RoleName
    incarnation: Count
    pid: Count
    host: str
    step: str  # "compiling kernels"
    done: Count = 0
    total: Count = 0  # 0: unknown
    unit: str = ""  # of both
    cpu_s: Annotated[float, Field(ge=0)] = 0.0  # processor time of the process and its children so far

    def __str__(self) -> str:
        return f"{self.step}: {self.done} of {self.total} {self.unit}".rstrip() if self.total else self.step

    def to_json(self) -> bytes:
        return _START.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes | str, name: str | None = None) -> "StartRecord":
        """Raises ValueError for data that is not a record, or not the record of `name`."""
        record = _checked(lambda: _START.validate_json(data, strict=True), "start")
        if name not in (None, record.name):
            raise ValueError(f"start: of {record.name!r}, not of {name!r}")
        return record


Record = WorkerRecord | RouterRecord | StartRecord
Kind = Literal["worker", "router", "start"]
_KINDS: dict[type[Record], Kind] = {WorkerRecord: "worker", RouterRecord: "router", StartRecord: "start"}


def kind_of(record: Record) -> Kind:
    return _KINDS[type(record)]


@dataclass(frozen=True, slots=True)
class Pools:
    """How many workers each pool should have, or that the whole cluster should end."""

    prefill: Count
    decode: Count
    stop: bool = False

    def to_json(self) -> bytes:
        return _POOLS.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> "Pools":
        """Raises ValueError for data that is not a pair of sizes."""
        return _checked(lambda: _POOLS.validate_json(data, strict=True), "pools")


@dataclass(frozen=True, slots=True)
class PlannerRecord:
    """The planner that leads, and what it decided last; times and words as in `plan_notes.PlanRecord`."""

    leader: str  # empty: in a dry run nobody leads
    dry_run: bool
    at: float = 0.0  # 0: there is no decision yet
    action: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks became shareable on a worker (`stored`) or were dropped (`removed`)."""

    worker: str
    incarnation: int
    sequence: int  # counts the events of one incarnation from 1 without gaps
    kind: Literal["stored", "removed"]
    keys: tuple[bytes, ...] = ()  # KEY_BYTES each, MAX_EVENT_KEYS at most
    medium: str = DEVICE  # one of MEDIA

    def to_fields(self) -> dict[bytes, bytes]:
        """Flat byte strings, as a Redis stream entry holds them."""
        return {
            b"w": self.worker.encode(),
            b"i": str(self.incarnation).encode(),
            b"s": str(self.sequence).encode(),
            b"k": self.kind.encode(),
            b"b": b"".join(self.keys),
            b"m": self.medium.encode(),
        }

    @classmethod
    def from_fields(cls, entry: Mapping[bytes, bytes]) -> Self:
        """Raises ValueError for an entry that is not an event."""
        try:
            worker, kind, packed = entry[b"w"].decode(), entry[b"k"].decode(), entry[b"b"]
            incarnation, sequence, medium = int(entry[b"i"]), int(entry[b"s"]), entry[b"m"].decode()
        except KeyError as missing:
            raise ValueError(f"event: no field {missing}") from None
        whole = len(packed) % KEY_BYTES == 0 and len(packed) <= MAX_EVENT_KEYS * KEY_BYTES
        if kind not in EVENT_KINDS or medium not in MEDIA or not worker or incarnation < 0 or sequence < 1 or not whole:
            raise ValueError(f"event: cannot be {kind!r} {sequence} of {worker!r} on {medium!r} with {len(packed)} bytes of keys")
        keys = tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
        return cls(worker, incarnation, sequence, kind, keys, medium)  # type: ignore[arg-type]  # one of EVENT_KINDS


_RECORD = TypeAdapter(WorkerRecord)
_ROUTER = TypeAdapter(RouterRecord)
_START = TypeAdapter(StartRecord)
_POOLS = TypeAdapter(Pools)


def _checked(read: Callable[[], T], what: str) -> T:
    """Returns what `read` returns. Raises a one-line ValueError that names the first wrong field and shows the beginning of its value."""
    try:
        return read()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([what, *map(str, first["loc"])])
        raise ValueError(f"{where}: {first['msg']}, not {first['input']!r:.80}") from None
