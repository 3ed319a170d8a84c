from baton.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Addressee(_message.Message):
    __slots__ = ("worker", "incarnation", "model_fingerprint")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: int
    model_fingerprint: str
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("request_id", "token_ids", "prompt_tokens", "sampling", "cache_salt", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: _generation_pb2.SamplingParams
    cache_salt: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("job", "to", "source")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    job: Job
    to: Addressee
    source: KvSource
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., to: _Optional[_Union[Addressee, _Mapping]] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("worker", "incarnation", "address", "blocks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: int
    address: str
    blocks: int
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("opened", "done")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    opened: PrefillOpened
    done: PrefillResponse
    def __init__(self, opened: _Optional[_Union[PrefillOpened, _Mapping]] = ..., done: _Optional[_Union[PrefillResponse, _Mapping]] = ...) -> None: ...

class PrefillOpened(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    def __init__(self, handle: _Optional[bytes] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("token", "handle", "finish", "cached_tokens", "wait_ms", "compute_ms", "fetched_tokens")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token: GeneratedToken
    handle: bytes
    finish: _generation_pb2.FinishReason
    cached_tokens: int
    wait_ms: float
    compute_ms: float
    fetched_tokens: int
    def __init__(self, token: _Optional[_Union[GeneratedToken, _Mapping]] = ..., handle: _Optional[bytes] = ..., finish: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., cached_tokens: _Optional[int] = ..., wait_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., fetched_tokens: _Optional[int] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ("id", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TopLogprob]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_generation_pb2.TopLogprob, _Mapping]]] = ...) -> None: ...

class KvHandle(_message.Message):
    __slots__ = ("worker", "address", "incarnation", "lease_id", "request_id", "start", "end", "layout_fingerprint", "ttl_ms", "mac")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    worker: str
    address: str
    incarnation: int
    lease_id: int
    request_id: str
    start: int
    end: int
    layout_fingerprint: bytes
    ttl_ms: int
    mac: bytes
    def __init__(self, worker: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., lease_id: _Optional[int] = ..., request_id: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., layout_fingerprint: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class PieceRequest(_message.Message):
    __slots__ = ("handle", "request_id", "first", "wait_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    request_id: str
    first: int
    wait_ms: int
    def __init__(self, handle: _Optional[bytes] = ..., request_id: _Optional[str] = ..., first: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class KvPiece(_message.Message):
    __slots__ = ("lease_id", "request_id", "first", "block_ids", "digests", "complete", "ttl_ms", "mac")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    request_id: str
    first: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    digests: bytes
    complete: bool
    ttl_ms: int
    mac: bytes
    def __init__(self, lease_id: _Optional[int] = ..., request_id: _Optional[str] = ..., first: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ..., complete: _Optional[bool] = ..., ttl_ms: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class LendRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "request_id", "start", "keys", "mac")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: int
    request_id: str
    start: int
    keys: bytes
    mac: bytes
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., request_id: _Optional[str] = ..., start: _Optional[int] = ..., keys: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class LendResponse(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    def __init__(self, handle: _Optional[bytes] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "contract", "transport")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: int
    contract: KvContract
    transport: str
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., contract: _Optional[_Union[KvContract, _Mapping]] = ..., transport: _Optional[str] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("worker", "incarnation", "contract", "transport_address")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: int
    contract: KvContract
    transport_address: bytes
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., contract: _Optional[_Union[KvContract, _Mapping]] = ..., transport_address: _Optional[bytes] = ...) -> None: ...

class KvContract(_message.Message):
    __slots__ = ("model_fingerprint", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "layout_version", "tensor_parallel", "parts", "value_dim")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    layout_version: int
    tensor_parallel: int
    parts: int
    value_dim: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., layout_version: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., parts: _Optional[int] = ..., value_dim: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("handle", "request_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    request_id: str
    def __init__(self, handle: _Optional[bytes] = ..., request_id: _Optional[str] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("ttl_ms",)
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    def __init__(self, ttl_ms: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("handle", "request_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    request_id: str
    def __init__(self, handle: _Optional[bytes] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("was_held",)
    WAS_HELD_FIELD_NUMBER: _ClassVar[int]
    was_held: bool
    def __init__(self, was_held: _Optional[bool] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("call_id", "start", "cancel", "first")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    start: DecodeStart
    cancel: DecodeCancel
    first: DecodeFirst
    def __init__(self, call_id: _Optional[int] = ..., start: _Optional[_Union[DecodeStart, _Mapping]] = ..., cancel: _Optional[_Union[DecodeCancel, _Mapping]] = ..., first: _Optional[_Union[DecodeFirst, _Mapping]] = ...) -> None: ...

class DecodeStart(_message.Message):
    __slots__ = ("job", "handle", "timeout_ms", "to", "live")
    JOB_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    job: Job
    handle: bytes
    timeout_ms: int
    to: Addressee
    live: bool
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., handle: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., to: _Optional[_Union[Addressee, _Mapping]] = ..., live: _Optional[bool] = ...) -> None: ...

class DecodeFirst(_message.Message):
    __slots__ = ("token_id",)
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    def __init__(self, token_id: _Optional[int] = ...) -> None: ...

class DecodeCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("call_id", "adopted", "token", "finished", "error")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    adopted: Adopted
    token: GeneratedToken
    finished: DecodeFinished
    error: CallError
    def __init__(self, call_id: _Optional[int] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., token: _Optional[_Union[GeneratedToken, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ..., error: _Optional[_Union[CallError, _Mapping]] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("handoff", "read_ms", "verify_ms", "cached_tokens")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    READ_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handoff: _generation_pb2.Handoff
    read_ms: float
    verify_ms: float
    cached_tokens: int
    def __init__(self, handoff: _Optional[_Union[_generation_pb2.Handoff, _Mapping]] = ..., read_ms: _Optional[float] = ..., verify_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("reason", "handoff", "cached_tokens", "preemptions")
    REASON_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    reason: _generation_pb2.FinishReason
    handoff: _generation_pb2.Handoff
    cached_tokens: int
    preemptions: int
    def __init__(self, reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., handoff: _Optional[_Union[_generation_pb2.Handoff, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class CallError(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("to",)
    TO_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("state", "load", "stalled_ms")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STALLED_MS_FIELD_NUMBER: _ClassVar[int]
    state: str
    load: WorkerLoad
    stalled_ms: int
    def __init__(self, state: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., stalled_ms: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "free_blocks", "credit_tokens", "cached_blocks", "leases", "waiting_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_blocks: int
    credit_tokens: int
    cached_blocks: int
    leases: int
    waiting_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., credit_tokens: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., leases: _Optional[int] = ..., waiting_tokens: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("to",)
    TO_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("incarnation", "sequence", "keys")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    sequence: int
    keys: bytes
    def __init__(self, incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("to",)
    TO_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("record_json", "idle", "leases", "quarantined_blocks", "blocks_in_use")
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    record_json: str
    idle: bool
    leases: int
    quarantined_blocks: int
    blocks_in_use: int
    def __init__(self, record_json: _Optional[str] = ..., idle: _Optional[bool] = ..., leases: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., blocks_in_use: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("status_json",)
    STATUS_JSON_FIELD_NUMBER: _ClassVar[int]
    status_json: str
    def __init__(self, status_json: _Optional[str] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LiveResponse(_message.Message):
    __slots__ = ("live_json",)
    LIVE_JSON_FIELD_NUMBER: _ClassVar[int]
    live_json: str
    def __init__(self, live_json: _Optional[str] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("request_id", "last")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    last: int
    def __init__(self, request_id: _Optional[str] = ..., last: _Optional[int] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("records_json",)
    RECORDS_JSON_FIELD_NUMBER: _ClassVar[int]
    records_json: str
    def __init__(self, records_json: _Optional[str] = ...) -> None: ...
