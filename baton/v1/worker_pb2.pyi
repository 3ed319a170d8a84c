from baton.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DownRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DownResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdminLogsRequest(_message.Message):
    __slots__ = ("name", "lines", "follow")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    lines: int
    follow: bool
    def __init__(self, name: _Optional[str] = ..., lines: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("to", "lines", "follow")
    TO_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    lines: int
    follow: bool
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ..., lines: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class LogsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...

class AdminRecordRequest(_message.Message):
    __slots__ = ("name", "secret")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    name: str
    secret: bytes
    def __init__(self, name: _Optional[str] = ..., secret: _Optional[bytes] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("to", "secret")
    TO_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    secret: bytes
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ..., secret: _Optional[bytes] = ...) -> None: ...

class RecordResponse(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: bytes
    def __init__(self, lines: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("challenge", "proof")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    proof: bytes
    def __init__(self, challenge: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("challenge", "env")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    env: _containers.ScalarMap[str, str]
    def __init__(self, challenge: _Optional[bytes] = ..., env: _Optional[_Mapping[str, str]] = ...) -> None: ...

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
    __slots__ = ("request_id", "token_ids", "prompt_tokens", "sampling", "cache_salt", "traceparent", "tracestate", "thinking", "beam", "speculation", "prediction")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: _generation_pb2.SamplingParams
    cache_salt: str
    traceparent: str
    tracestate: str
    thinking: ThinkingBudget
    beam: _generation_pb2.Beam
    speculation: _generation_pb2.Speculation
    prediction: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., thinking: _Optional[_Union[ThinkingBudget, _Mapping]] = ..., beam: _Optional[_Union[_generation_pb2.Beam, _Mapping]] = ..., speculation: _Optional[_Union[_generation_pb2.Speculation, _Mapping]] = ..., prediction: _Optional[_Iterable[int]] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("max_tokens", "marks", "opened")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    marks: _containers.RepeatedCompositeFieldContainer[ThinkingMarks]
    opened: bool
    def __init__(self, max_tokens: _Optional[int] = ..., marks: _Optional[_Iterable[_Union[ThinkingMarks, _Mapping]]] = ..., opened: _Optional[bool] = ...) -> None: ...

class ThinkingMarks(_message.Message):
    __slots__ = ("begin", "ends", "closing")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    begin: str
    ends: _containers.RepeatedScalarFieldContainer[str]
    closing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, begin: _Optional[str] = ..., ends: _Optional[_Iterable[str]] = ..., closing: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillCommands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[PrefillCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[PrefillCommand, _Mapping]]] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("call_id", "start", "cancel")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    start: PrefillStart
    cancel: CallCancel
    def __init__(self, call_id: _Optional[int] = ..., start: _Optional[_Union[PrefillStart, _Mapping]] = ..., cancel: _Optional[_Union[CallCancel, _Mapping]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("job", "timeout_ms", "to", "source", "asker", "uncached_tokens")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ASKER_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    job: Job
    timeout_ms: int
    to: Addressee
    source: KvSource
    asker: str
    uncached_tokens: int
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., to: _Optional[_Union[Addressee, _Mapping]] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ..., asker: _Optional[str] = ..., uncached_tokens: _Optional[int] = ...) -> None: ...

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

class PrefillEvents(_message.Message):
    __slots__ = ("events", "others_tokens")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PrefillEvent]
    others_tokens: int
    def __init__(self, events: _Optional[_Iterable[_Union[PrefillEvent, _Mapping]]] = ..., others_tokens: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("call_id", "opened", "done", "error")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    opened: PrefillOpened
    done: PrefillDone
    error: CallError
    def __init__(self, call_id: _Optional[int] = ..., opened: _Optional[_Union[PrefillOpened, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ..., error: _Optional[_Union[CallError, _Mapping]] = ...) -> None: ...

class PrefillOpened(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    def __init__(self, handle: _Optional[bytes] = ...) -> None: ...

class PrefillDone(_message.Message):
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
    __slots__ = ("id", "logprob", "top", "guessed", "rejected")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    GUESSED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TopLogprob]
    guessed: bool
    rejected: int
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_generation_pb2.TopLogprob, _Mapping]]] = ..., guessed: _Optional[bool] = ..., rejected: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("handle", "request_id", "first", "wait_ms", "direct")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    request_id: str
    first: int
    wait_ms: int
    direct: bool
    def __init__(self, handle: _Optional[bytes] = ..., request_id: _Optional[str] = ..., first: _Optional[int] = ..., wait_ms: _Optional[int] = ..., direct: _Optional[bool] = ...) -> None: ...

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
    __slots__ = ("model_fingerprint", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "layout_version", "parts", "value_dim", "packing", "stored", "draft")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    layout_version: int
    parts: int
    value_dim: int
    packing: str
    stored: str
    draft: DraftKv
    def __init__(self, model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., layout_version: _Optional[int] = ..., parts: _Optional[int] = ..., value_dim: _Optional[int] = ..., packing: _Optional[str] = ..., stored: _Optional[str] = ..., draft: _Optional[_Union[DraftKv, _Mapping]] = ...) -> None: ...

class DraftKv(_message.Message):
    __slots__ = ("fingerprint", "dtype", "num_layers", "num_kv_heads", "head_dim", "parts", "value_dim")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    parts: int
    value_dim: int
    def __init__(self, fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., parts: _Optional[int] = ..., value_dim: _Optional[int] = ...) -> None: ...

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

class DecodeCommands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DecodeCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DecodeCommand, _Mapping]]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("call_id", "start", "cancel", "first")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    start: DecodeStart
    cancel: CallCancel
    first: DecodeFirst
    def __init__(self, call_id: _Optional[int] = ..., start: _Optional[_Union[DecodeStart, _Mapping]] = ..., cancel: _Optional[_Union[CallCancel, _Mapping]] = ..., first: _Optional[_Union[DecodeFirst, _Mapping]] = ...) -> None: ...

class DecodeStart(_message.Message):
    __slots__ = ("job", "handle", "timeout_ms", "to", "live", "forks", "tells_search")
    JOB_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    TELLS_SEARCH_FIELD_NUMBER: _ClassVar[int]
    job: Job
    handle: bytes
    timeout_ms: int
    to: Addressee
    live: bool
    forks: _containers.RepeatedCompositeFieldContainer[DecodeFork]
    tells_search: bool
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., handle: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., to: _Optional[_Union[Addressee, _Mapping]] = ..., live: _Optional[bool] = ..., forks: _Optional[_Iterable[_Union[DecodeFork, _Mapping]]] = ..., tells_search: _Optional[bool] = ...) -> None: ...

class DecodeFork(_message.Message):
    __slots__ = ("call_id", "seed", "request_id", "traceparent", "tracestate")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    seed: int
    request_id: str
    traceparent: str
    tracestate: str
    def __init__(self, call_id: _Optional[int] = ..., seed: _Optional[int] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class DecodeFirst(_message.Message):
    __slots__ = ("token_id",)
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    def __init__(self, token_id: _Optional[int] = ...) -> None: ...

class DecodeEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("call_id", "adopted", "token", "finished", "error", "prompt_logprobs", "hypothesis", "searched")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESIS_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    adopted: Adopted
    token: GeneratedToken
    finished: DecodeFinished
    error: CallError
    prompt_logprobs: _generation_pb2.PromptLogprobs
    hypothesis: GeneratedHypothesis
    searched: int
    def __init__(self, call_id: _Optional[int] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., token: _Optional[_Union[GeneratedToken, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ..., error: _Optional[_Union[CallError, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_generation_pb2.PromptLogprobs, _Mapping]] = ..., hypothesis: _Optional[_Union[GeneratedHypothesis, _Mapping]] = ..., searched: _Optional[int] = ...) -> None: ...

class GeneratedHypothesis(_message.Message):
    __slots__ = ("token_ids", "score", "stopped")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    score: float
    stopped: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., score: _Optional[float] = ..., stopped: _Optional[bool] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("handoff", "cached_tokens")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffFacts
    cached_tokens: int
    def __init__(self, handoff: _Optional[_Union[HandoffFacts, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class HandoffFacts(_message.Message):
    __slots__ = ("transport", "blocks", "bytes", "blocks_reused", "digests_checked", "digests_failed", "recomputed_tokens", "read_ms", "verify_ms", "failure", "blocks_early", "connect_ms", "lane")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REUSED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EARLY_FIELD_NUMBER: _ClassVar[int]
    CONNECT_MS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    transport: str
    blocks: int
    bytes: int
    blocks_reused: int
    digests_checked: int
    digests_failed: int
    recomputed_tokens: int
    read_ms: float
    verify_ms: float
    failure: str
    blocks_early: int
    connect_ms: float
    lane: str
    def __init__(self, transport: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., blocks_reused: _Optional[int] = ..., digests_checked: _Optional[int] = ..., digests_failed: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., read_ms: _Optional[float] = ..., verify_ms: _Optional[float] = ..., failure: _Optional[str] = ..., blocks_early: _Optional[int] = ..., connect_ms: _Optional[float] = ..., lane: _Optional[str] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("reason", "handoff", "cached_tokens", "preemptions")
    REASON_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    reason: _generation_pb2.FinishReason
    handoff: HandoffFacts
    cached_tokens: int
    preemptions: int
    def __init__(self, reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., handoff: _Optional[_Union[HandoffFacts, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class CallCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CallError(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: bytes
    def __init__(self, status: _Optional[bytes] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("to", "asker")
    TO_FIELD_NUMBER: _ClassVar[int]
    ASKER_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    asker: str
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ..., asker: _Optional[str] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("to", "keys", "within_ms")
    TO_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    keys: bytes
    within_ms: int
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ..., keys: _Optional[bytes] = ..., within_ms: _Optional[int] = ...) -> None: ...

class HintResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("state", "load", "stalled_ms", "roles", "others_tokens")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STALLED_MS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    state: str
    load: WorkerLoad
    stalled_ms: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    others_tokens: int
    def __init__(self, state: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., stalled_ms: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., others_tokens: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("to",)
    TO_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("incarnation", "sequence", "keys", "medium")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    sequence: int
    keys: bytes
    medium: str
    def __init__(self, incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., keys: _Optional[bytes] = ..., medium: _Optional[str] = ...) -> None: ...

class SetRolesRequest(_message.Message):
    __slots__ = ("to", "roles", "prove", "why")
    TO_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    PROVE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    roles: _containers.RepeatedScalarFieldContainer[str]
    prove: bool
    why: str
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ..., roles: _Optional[_Iterable[str]] = ..., prove: _Optional[bool] = ..., why: _Optional[str] = ...) -> None: ...

class SetRolesResponse(_message.Message):
    __slots__ = ("serving", "draining")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    serving: _containers.RepeatedScalarFieldContainer[str]
    draining: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, serving: _Optional[_Iterable[str]] = ..., draining: _Optional[_Iterable[str]] = ...) -> None: ...

class AdminSetRolesRequest(_message.Message):
    __slots__ = ("worker", "roles", "force", "prove")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    PROVE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    force: bool
    prove: bool
    def __init__(self, worker: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., force: _Optional[bool] = ..., prove: _Optional[bool] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("to",)
    TO_FIELD_NUMBER: _ClassVar[int]
    to: Addressee
    def __init__(self, to: _Optional[_Union[Addressee, _Mapping]] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("record", "residue")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    RESIDUE_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    residue: Residue
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ..., residue: _Optional[_Union[Residue, _Mapping]] = ...) -> None: ...

class WorkerRecord(_message.Message):
    __slots__ = ("name", "pool", "address", "incarnation", "state", "pid", "host", "model_name", "model_fingerprint", "tokenizer_fingerprint", "block_size", "max_model_len", "kv_blocks", "transport", "load", "metrics", "max_num_seqs", "roles", "eos_token_ids", "lends", "gpus", "speculation", "speculation_tokens", "forks", "tiers", "brings", "matrices", "proving", "unproved")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LENDS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BRINGS_FIELD_NUMBER: _ClassVar[int]
    MATRICES_FIELD_NUMBER: _ClassVar[int]
    PROVING_FIELD_NUMBER: _ClassVar[int]
    UNPROVED_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    address: str
    incarnation: int
    state: str
    pid: int
    host: str
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size: int
    max_model_len: int
    kv_blocks: int
    transport: str
    load: WorkerLoad
    metrics: str
    max_num_seqs: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    lends: bool
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    speculation: _containers.RepeatedScalarFieldContainer[str]
    speculation_tokens: int
    forks: bool
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    brings: bool
    matrices: str
    proving: _containers.RepeatedScalarFieldContainer[str]
    unproved: str
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., transport: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., metrics: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., lends: _Optional[bool] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., speculation: _Optional[_Iterable[str]] = ..., speculation_tokens: _Optional[int] = ..., forks: _Optional[bool] = ..., tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., brings: _Optional[bool] = ..., matrices: _Optional[str] = ..., proving: _Optional[_Iterable[str]] = ..., unproved: _Optional[str] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("medium", "state", "why", "blocks", "capacity", "reads", "hits", "saved_s", "spent_s", "cost")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    SPENT_S_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    medium: str
    state: str
    why: str
    blocks: int
    capacity: int
    reads: int
    hits: int
    saved_s: float
    spent_s: float
    cost: float
    def __init__(self, medium: _Optional[str] = ..., state: _Optional[str] = ..., why: _Optional[str] = ..., blocks: _Optional[int] = ..., capacity: _Optional[int] = ..., reads: _Optional[int] = ..., hits: _Optional[int] = ..., saved_s: _Optional[float] = ..., spent_s: _Optional[float] = ..., cost: _Optional[float] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("gpu", "name", "memory_used", "memory_total", "busy", "watts", "ecc_corrected", "ecc_uncorrected")
    GPU_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    WATTS_FIELD_NUMBER: _ClassVar[int]
    ECC_CORRECTED_FIELD_NUMBER: _ClassVar[int]
    ECC_UNCORRECTED_FIELD_NUMBER: _ClassVar[int]
    gpu: str
    name: str
    memory_used: int
    memory_total: int
    busy: float
    watts: float
    ecc_corrected: int
    ecc_uncorrected: int
    def __init__(self, gpu: _Optional[str] = ..., name: _Optional[str] = ..., memory_used: _Optional[int] = ..., memory_total: _Optional[int] = ..., busy: _Optional[float] = ..., watts: _Optional[float] = ..., ecc_corrected: _Optional[int] = ..., ecc_uncorrected: _Optional[int] = ...) -> None: ...

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

class Residue(_message.Message):
    __slots__ = ("idle", "leases", "quarantined_blocks", "blocks_in_use")
    IDLE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    idle: bool
    leases: int
    quarantined_blocks: int
    blocks_in_use: int
    def __init__(self, idle: _Optional[bool] = ..., leases: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., blocks_in_use: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("endpoints", "model", "router", "workers", "routers", "starts", "planner")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.ScalarMap[str, str]
    model: str
    router: RouterStatus
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    routers: _containers.RepeatedCompositeFieldContainer[RouterInfo]
    starts: _containers.RepeatedCompositeFieldContainer[Start]
    planner: PlannerStatus
    def __init__(self, endpoints: _Optional[_Mapping[str, str]] = ..., model: _Optional[str] = ..., router: _Optional[_Union[RouterStatus, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., routers: _Optional[_Iterable[_Union[RouterInfo, _Mapping]]] = ..., starts: _Optional[_Iterable[_Union[Start, _Mapping]]] = ..., planner: _Optional[_Union[PlannerStatus, _Mapping]] = ...) -> None: ...

class PlannerStatus(_message.Message):
    __slots__ = ("leader", "dry_run", "at", "action", "why")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    leader: str
    dry_run: bool
    at: float
    action: str
    why: str
    def __init__(self, leader: _Optional[str] = ..., dry_run: _Optional[bool] = ..., at: _Optional[float] = ..., action: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("name", "pool", "incarnation", "pid", "host", "step", "done", "total", "unit", "cpu_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    incarnation: int
    pid: int
    host: str
    step: str
    done: int
    total: int
    unit: str
    cpu_s: float
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., step: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ..., cpu_s: _Optional[float] = ...) -> None: ...

class RouterInfo(_message.Message):
    __slots__ = ("name", "incarnation", "pid", "host", "endpoints", "model_name", "inflight", "queued", "places")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    pid: int
    host: str
    endpoints: _containers.ScalarMap[str, str]
    model_name: str
    inflight: int
    queued: int
    places: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., endpoints: _Optional[_Mapping[str, str]] = ..., model_name: _Optional[str] = ..., inflight: _Optional[int] = ..., queued: _Optional[int] = ..., places: _Optional[int] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("pid", "inflight", "queued", "registry", "alarm")
    PID_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    ALARM_FIELD_NUMBER: _ClassVar[int]
    pid: int
    inflight: int
    queued: int
    registry: str
    alarm: str
    def __init__(self, pid: _Optional[int] = ..., inflight: _Optional[int] = ..., queued: _Optional[int] = ..., registry: _Optional[str] = ..., alarm: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("record", "residue", "error")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    RESIDUE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    residue: Residue
    error: str
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ..., residue: _Optional[_Union[Residue, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("alone",)
    ALONE_FIELD_NUMBER: _ClassVar[int]
    alone: bool
    def __init__(self, alone: _Optional[bool] = ...) -> None: ...

class LiveResponse(_message.Message):
    __slots__ = ("clock", "model", "router", "workers", "requests", "recent", "errors", "totals", "slo", "routers", "unlisted")
    class UnlistedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    UNLISTED_FIELD_NUMBER: _ClassVar[int]
    clock: float
    model: str
    router: LiveRouter
    workers: _containers.RepeatedCompositeFieldContainer[LiveWorker]
    requests: _containers.RepeatedCompositeFieldContainer[LiveJob]
    recent: _containers.RepeatedCompositeFieldContainer[TraceRecord]
    errors: _containers.RepeatedCompositeFieldContainer[LiveError]
    totals: LiveTotals
    slo: LiveSlo
    routers: _containers.RepeatedCompositeFieldContainer[RouterInfo]
    unlisted: _containers.ScalarMap[str, int]
    def __init__(self, clock: _Optional[float] = ..., model: _Optional[str] = ..., router: _Optional[_Union[LiveRouter, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[LiveWorker, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[LiveJob, _Mapping]]] = ..., recent: _Optional[_Iterable[_Union[TraceRecord, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[LiveError, _Mapping]]] = ..., totals: _Optional[_Union[LiveTotals, _Mapping]] = ..., slo: _Optional[_Union[LiveSlo, _Mapping]] = ..., routers: _Optional[_Iterable[_Union[RouterInfo, _Mapping]]] = ..., unlisted: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LiveRouter(_message.Message):
    __slots__ = ("inflight", "queued", "registry", "requests", "degraded", "alarm")
    class RequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    ALARM_FIELD_NUMBER: _ClassVar[int]
    inflight: int
    queued: int
    registry: str
    requests: _containers.ScalarMap[str, int]
    degraded: int
    alarm: str
    def __init__(self, inflight: _Optional[int] = ..., queued: _Optional[int] = ..., registry: _Optional[str] = ..., requests: _Optional[_Mapping[str, int]] = ..., degraded: _Optional[int] = ..., alarm: _Optional[str] = ...) -> None: ...

class LiveWorker(_message.Message):
    __slots__ = ("name", "pool", "state", "incarnation", "kv_blocks", "transport", "running", "waiting", "free_blocks", "credit_tokens", "cached_blocks", "leases", "waiting_tokens", "blocks_in_use", "requests", "silent", "restarting", "gpus", "speculation", "tiers")
    class RequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    RESTARTING_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    state: str
    incarnation: int
    kv_blocks: int
    transport: str
    running: int
    waiting: int
    free_blocks: int
    credit_tokens: int
    cached_blocks: int
    leases: int
    waiting_tokens: int
    blocks_in_use: int
    requests: _containers.ScalarMap[str, int]
    silent: float
    restarting: bool
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    speculation: str
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., state: _Optional[str] = ..., incarnation: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., transport: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., credit_tokens: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., leases: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., blocks_in_use: _Optional[int] = ..., requests: _Optional[_Mapping[str, int]] = ..., silent: _Optional[float] = ..., restarting: _Optional[bool] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., speculation: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ...) -> None: ...

class LiveJob(_message.Message):
    __slots__ = ("request_id", "stage", "worker", "prefill_worker", "decode_worker", "prompt_tokens", "output_tokens", "cached_tokens", "retries", "age", "bypass")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    stage: str
    worker: str
    prefill_worker: str
    decode_worker: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    retries: int
    age: float
    bypass: bool
    def __init__(self, request_id: _Optional[str] = ..., stage: _Optional[str] = ..., worker: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., retries: _Optional[int] = ..., age: _Optional[float] = ..., bypass: _Optional[bool] = ...) -> None: ...

class LiveError(_message.Message):
    __slots__ = ("request_id", "at", "outcome", "reason", "worker", "count", "requests")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    at: float
    outcome: str
    reason: str
    worker: str
    count: int
    requests: int
    def __init__(self, request_id: _Optional[str] = ..., at: _Optional[float] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., worker: _Optional[str] = ..., count: _Optional[int] = ..., requests: _Optional[int] = ...) -> None: ...

class LiveTotals(_message.Message):
    __slots__ = ("outcomes", "prompt_tokens", "output_tokens", "cached_tokens", "met", "handoffs", "handoff_bytes", "drafted_tokens", "accepted_tokens", "drafted_at", "accepted_at")
    class OutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DraftedAtEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AcceptedAtEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_AT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.ScalarMap[str, int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    met: int
    handoffs: int
    handoff_bytes: int
    drafted_tokens: int
    accepted_tokens: int
    drafted_at: _containers.ScalarMap[str, int]
    accepted_at: _containers.ScalarMap[str, int]
    def __init__(self, outcomes: _Optional[_Mapping[str, int]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., met: _Optional[int] = ..., handoffs: _Optional[int] = ..., handoff_bytes: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., drafted_at: _Optional[_Mapping[str, int]] = ..., accepted_at: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LiveSlo(_message.Message):
    __slots__ = ("objectives", "attainment")
    class ObjectivesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    objectives: _containers.ScalarMap[str, float]
    attainment: float
    def __init__(self, objectives: _Optional[_Mapping[str, float]] = ..., attainment: _Optional[float] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("request_id", "last", "alone", "sort", "ascending", "failed", "slower_than", "skip", "outcome", "worker", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    ASCENDING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SLOWER_THAN_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    last: int
    alone: bool
    sort: str
    ascending: bool
    failed: bool
    slower_than: float
    skip: int
    outcome: str
    worker: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., last: _Optional[int] = ..., alone: _Optional[bool] = ..., sort: _Optional[str] = ..., ascending: _Optional[bool] = ..., failed: _Optional[bool] = ..., slower_than: _Optional[float] = ..., skip: _Optional[int] = ..., outcome: _Optional[str] = ..., worker: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("records", "places", "matched")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[TraceRecord]
    places: _containers.RepeatedScalarFieldContainer[float]
    matched: int
    def __init__(self, records: _Optional[_Iterable[_Union[TraceRecord, _Mapping]]] = ..., places: _Optional[_Iterable[float]] = ..., matched: _Optional[int] = ...) -> None: ...

class CurvesRequest(_message.Message):
    __slots__ = ("since", "alone")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    since: int
    alone: bool
    def __init__(self, since: _Optional[int] = ..., alone: _Optional[bool] = ...) -> None: ...

class CurvesResponse(_message.Message):
    __slots__ = ("points",)
    POINTS_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[CurvePoint]
    def __init__(self, points: _Optional[_Iterable[_Union[CurvePoint, _Mapping]]] = ...) -> None: ...

class CurvePoint(_message.Message):
    __slots__ = ("number", "running", "queued", "kv", "output_tokens", "outcomes", "ttft", "itl", "met", "tpot", "arrived", "prompt_tokens", "uncached_tokens", "completed_tokens", "missed", "prompts")
    class OutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TtftEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class ItlEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class TpotEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class MissedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    running: float
    queued: float
    kv: float
    output_tokens: int
    outcomes: _containers.ScalarMap[str, int]
    ttft: _containers.ScalarMap[int, int]
    itl: _containers.ScalarMap[int, int]
    met: int
    tpot: _containers.ScalarMap[int, int]
    arrived: int
    prompt_tokens: int
    uncached_tokens: int
    completed_tokens: int
    missed: _containers.ScalarMap[str, int]
    prompts: int
    def __init__(self, number: _Optional[int] = ..., running: _Optional[float] = ..., queued: _Optional[float] = ..., kv: _Optional[float] = ..., output_tokens: _Optional[int] = ..., outcomes: _Optional[_Mapping[str, int]] = ..., ttft: _Optional[_Mapping[int, int]] = ..., itl: _Optional[_Mapping[int, int]] = ..., met: _Optional[int] = ..., tpot: _Optional[_Mapping[int, int]] = ..., arrived: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., completed_tokens: _Optional[int] = ..., missed: _Optional[_Mapping[str, int]] = ..., prompts: _Optional[int] = ...) -> None: ...

class TraceRecord(_message.Message):
    __slots__ = ("request_id", "at", "outcome", "reason", "prompt_tokens", "output_tokens", "cached_tokens", "retries", "laps", "failures", "bypasses", "handoff", "read", "verify", "trace_id", "slo_missed", "ttft", "tpot", "e2e", "prefill_wait", "prefill_compute", "stages", "fetched_tokens", "connect", "tenant", "put_aside", "retry_refused", "drafted_tokens", "accepted_tokens", "guesses", "choice", "choices", "cache")
    class StagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    LAPS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    BYPASSES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SLO_MISSED_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    E2E_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WAIT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PUT_ASIDE_FIELD_NUMBER: _ClassVar[int]
    RETRY_REFUSED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    at: float
    outcome: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    retries: int
    laps: _containers.RepeatedCompositeFieldContainer[TraceLap]
    failures: _containers.RepeatedCompositeFieldContainer[TraceFailure]
    bypasses: _containers.RepeatedScalarFieldContainer[str]
    handoff: HandoffFacts
    read: float
    verify: float
    trace_id: str
    slo_missed: str
    ttft: float
    tpot: float
    e2e: float
    prefill_wait: float
    prefill_compute: float
    stages: _containers.ScalarMap[str, float]
    fetched_tokens: int
    connect: float
    tenant: str
    put_aside: _containers.RepeatedScalarFieldContainer[str]
    retry_refused: bool
    drafted_tokens: int
    accepted_tokens: int
    guesses: _containers.RepeatedScalarFieldContainer[int]
    choice: int
    choices: int
    cache: _generation_pb2.CacheReport
    def __init__(self, request_id: _Optional[str] = ..., at: _Optional[float] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., retries: _Optional[int] = ..., laps: _Optional[_Iterable[_Union[TraceLap, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[TraceFailure, _Mapping]]] = ..., bypasses: _Optional[_Iterable[str]] = ..., handoff: _Optional[_Union[HandoffFacts, _Mapping]] = ..., read: _Optional[float] = ..., verify: _Optional[float] = ..., trace_id: _Optional[str] = ..., slo_missed: _Optional[str] = ..., ttft: _Optional[float] = ..., tpot: _Optional[float] = ..., e2e: _Optional[float] = ..., prefill_wait: _Optional[float] = ..., prefill_compute: _Optional[float] = ..., stages: _Optional[_Mapping[str, float]] = ..., fetched_tokens: _Optional[int] = ..., connect: _Optional[float] = ..., tenant: _Optional[str] = ..., put_aside: _Optional[_Iterable[str]] = ..., retry_refused: _Optional[bool] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., guesses: _Optional[_Iterable[int]] = ..., choice: _Optional[int] = ..., choices: _Optional[int] = ..., cache: _Optional[_Union[_generation_pb2.CacheReport, _Mapping]] = ...) -> None: ...

class TraceLap(_message.Message):
    __slots__ = ("stage", "worker", "start", "end", "bypass")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    worker: str
    start: float
    end: float
    bypass: bool
    def __init__(self, stage: _Optional[str] = ..., worker: _Optional[str] = ..., start: _Optional[float] = ..., end: _Optional[float] = ..., bypass: _Optional[bool] = ...) -> None: ...

class TraceFailure(_message.Message):
    __slots__ = ("at", "worker", "reason")
    AT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    at: float
    worker: str
    reason: str
    def __init__(self, at: _Optional[float] = ..., worker: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
