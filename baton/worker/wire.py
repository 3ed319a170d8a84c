"""Between `baton.v1` and the plain objects of engine and kvtransfer: protobuf stops here."""

import itertools

from google.protobuf.message import DecodeError

from baton.cluster.errors import BatonError, Reason
from baton.engine.block_key import root_key
from baton.engine.kvcache import KvLayout
from baton.engine.sampling import FIELDS, Sampled, SamplingParams
from baton.engine.sequence import Finish, Sequence
from baton.v1 import generation_pb2, worker_pb2
from kvtransfer.handle import KvHandle

_numbers = itertools.count(1)
_FINISH = {Finish.STOP: generation_pb2.FINISH_REASON_STOP, Finish.LENGTH: generation_pb2.FINISH_REASON_LENGTH}


def to_sequence(job: worker_pb2.Job, model_fingerprint: str, hold: bool = False) -> Sequence:
    """A sequence with an id of its own: two attempts of one request are two sequences."""
    return Sequence(
        id=f"{job.request_id}#{next(_numbers)}",
        tokens=list(job.token_ids),
        prompt_len=job.prompt_tokens,
        params=to_params(job.sampling),
        root=root_key(model_fingerprint, job.cache_salt),
        hold=hold,
    )


def to_params(sampling: generation_pb2.SamplingParams) -> SamplingParams:
    """Every field by its name; a job says all of them."""
    given = {name: getattr(sampling, name) for name in FIELDS}
    given["logit_bias"] = dict(sampling.logit_bias)
    given["logprobs"] = sampling.logprobs if sampling.HasField("logprobs") else None
    given["stop_token_ids"] = frozenset(sampling.stop_token_ids)
    return SamplingParams(**given)


def to_token(sampled: Sampled) -> worker_pb2.GeneratedToken:
    top = [generation_pb2.TopLogprob(id=token, logprob=logprob) for token, logprob in sampled.top]
    return worker_pb2.GeneratedToken(id=sampled.token, logprob=sampled.logprob, top=top)


def to_finish(finish: Finish | None) -> "generation_pb2.FinishReason":
    return _FINISH[finish] if finish else generation_pb2.FINISH_REASON_UNSPECIFIED


def pack_handle(handle: KvHandle) -> bytes:
    message = worker_pb2.KvHandle(
        worker=handle.worker,
        address=handle.address,
        incarnation=handle.incarnation,
        lease_id=handle.lease_id,
        request_id=handle.request_id,
        block_ids=handle.block_ids,
        digests=handle.digests,
        tokens=handle.tokens,
        layout_fingerprint=handle.layout_fingerprint,
        ttl_ms=handle.ttl_ms,
        mac=handle.mac,
    )
    return message.SerializeToString()


def unpack_handle(data: bytes) -> KvHandle:
    """Raises BatonError(LEASE_REFUSED) for bytes that are no handle."""
    message = worker_pb2.KvHandle()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise BatonError(Reason.LEASE_REFUSED, "the handle cannot be read") from None
    return KvHandle(
        worker=message.worker,
        address=message.address,
        incarnation=message.incarnation,
        lease_id=message.lease_id,
        request_id=message.request_id,
        block_ids=tuple(message.block_ids),
        digests=message.digests,
        tokens=message.tokens,
        layout_fingerprint=message.layout_fingerprint,
        ttl_ms=message.ttl_ms,
        mac=message.mac,
    )


def pack_layout(layout: KvLayout) -> worker_pb2.KvContract:
    return worker_pb2.KvContract(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        layout_version=layout.layout_version,
        tensor_parallel=layout.tensor_parallel,
        parts=layout.parts,
        value_dim=layout.value_dim,
    )


def unpack_layout(contract: worker_pb2.KvContract) -> KvLayout:
    return KvLayout(
        model_fingerprint=contract.model_fingerprint,
        dtype=contract.dtype,
        block_size=contract.block_size,
        num_layers=contract.num_layers,
        num_kv_heads=contract.num_kv_heads,
        head_dim=contract.head_dim,
        layout_version=contract.layout_version,
        tensor_parallel=contract.tensor_parallel,
        parts=contract.parts,
        value_dim=contract.value_dim,
    )
