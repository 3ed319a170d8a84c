"""Our handoff as a KV connector of vLLM (0.32), loaded by module path; vLLM itself is not changed. It runs in vLLM's child processes.

Both sides are thin. What is copied when is `ledger`'s decision, and it goes beside the forward (`layers`). A request that loads is in no
step until its KV has come; since that lies verified in shared memory, the copy cannot fail, and takes milliseconds. Saves belong to their
step, so vLLM holds no block for readers. An error in here ends vLLM's engine, and with it the worker: its sequences go on elsewhere.
"""

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventPublisher, EventPublisherFactory, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from baton.engine.core.blocks import CacheChange
from baton.engine.core.grammar import Grammar
from baton.engine.core.kvcache import DTYPE_BYTES
from baton.engine.vllm.block_events import BlockEvents
from baton.engine.vllm.forms import forms_of
from baton.engine.vllm.layers import CudaLane, HostLane, Layers
from baton.engine.vllm.ledger import KEY, PUBLISHER, JobLedger, Order, Pairs, StepNews
from baton.engine.vllm.link import Leash, RankReport

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)
MAPPED_FOR_ALL = 3  # flags of cudaHostRegister: every context, and kernels


@dataclass
class Copies(KVConnectorMetadata):
    number: int = 0
    loads: dict[str, Pairs] = field(default_factory=dict)
    saves: Pairs = field(default_factory=list)


@dataclass
class Landed(KVConnectorWorkerMetadata):
    number: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Landed) and other.number == self.number
        return self


@dataclass(frozen=True, slots=True)
class _Step:
    began: float
    tokens: int
    sequences: int
    preempted: list[str]


class SchedulerSide:
    def __init__(self, leash: Leash, block_size: int) -> None:
        self._leash = leash
        self._ledger = JobLedger(block_size)
        self._steps: dict[int, _Step] = {}  # under way: with a pipeline, several are
        self._jobs: dict[str, str] = {}
        self.manager: KVCacheManager | None = None
        leash.hello()

    def arrived(self, request: "Request") -> None:
        order = Order.unpack((request.kv_transfer_params or {})[KEY])
        self._jobs[request.request_id] = order.job
        self._ledger.arrived(request.request_id, order)

    def matched(self, request: "Request", computed: int) -> int:
        return self._ledger.matched(request.request_id, computed)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", loaded: int) -> None:
        self._ledger.allocated(request.request_id, blocks.get_block_ids()[0], loaded)

    def step(self, output: "SchedulerOutput") -> Copies:
        scheduled = output.num_scheduled_tokens
        computed = {new.req_id: new.num_computed_tokens + scheduled[new.req_id] for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for request_id, before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            computed[request_id] = before + scheduled[request_id]
        plan = self._ledger.step(computed, self._block_ids)
        preempted = [self._jobs[each] for each in output.preempted_req_ids or () if each in self._jobs]
        self._steps[plan.number] = _Step(monotonic(), output.total_num_scheduled_tokens, len(scheduled), preempted)
        return Copies(plan.number, plan.loads, plan.saves)

    def landed(self, output: "KVConnectorOutput") -> None:
        if closed := self._ledger.received(output.finished_recving or ()):
            self._tell(StepNews(closed=closed))
        meta = output.kv_connector_worker_meta
        if isinstance(meta, Landed):
            step = self._steps.pop(meta.number)
            seconds = monotonic() - step.began
            self._tell(self._ledger.landed(meta.number), step.preempted, (seconds, step.tokens, step.sequences))

    def finished(self, request: "Request") -> None:
        self._jobs.pop(request.request_id, None)
        if closed := self._ledger.finished(request.request_id):
            self._tell(StepNews(closed=closed))

    def cache_changed(self, changes: list[CacheChange]) -> None:
        if changes:
            self._leash.send({"cache": [[change.stored, change.key.hex()] for change in changes]})

    def _tell(self, news: StepNews, preempted: Sequence[str] = (), step: tuple[float, int, int] | None = None) -> None:
        assert self.manager is not None
        self._leash.send(
            {
                "started": news.started,
                "staged": news.staged,
                "closed": news.closed,
                "preempted": list(preempted),
                "step": step,
                "free": self.manager.block_pool.get_num_free_blocks(),
            }
        )

    def _block_ids(self, request_id: str) -> Sequence[int]:
        assert self.manager is not None
        ids: tuple[list[int], ...] = self.manager.get_block_ids(request_id)
        return ids[0]


class RankSide:
    def __init__(self, leash: Leash, config: VllmConfig, kv_cache: "KVCacheConfig") -> None:
        self._leash = leash
        self._config = config
        self._kv_cache = kv_cache
        self.number = 0
        leash.on_message = self._compile

    def _compile(self, message: dict[str, Any]) -> None:
        model, number = self._config.model_config, message.pop("number")
        why = forms_of(Path(model.model), model.get_vocab_size()).compile(Grammar(**message))
        self._leash.send({"compiled": number, "why": why})

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        try:
            report = self._report(tensors)
        except ValueError as error:
            self._leash.refuse(str(error))
            raise
        slot, memory = self._leash.report(report)
        first = next(iter(tensors.values()))
        staged = _reachable(memory, first.device)
        inward, outward = (CudaLane(first.device) if first.device.type == "cuda" else HostLane() for _ in range(2))
        layers, heads = slice(slot.first_layer, slot.first_layer + report.layers), slice(slot.first_head, slot.first_head + report.heads)
        part = staged.view(first.dtype).view(slot.shape)[:, layers, heads]
        self.layers = Layers(tensors, part, inward, outward, by_layer=not self._config.parallel_config.use_ubatching)

    def _report(self, tensors: dict[str, torch.Tensor]) -> RankReport:
        """Raises ValueError for a KV cache that is not one block table over separate tensors of one shape."""
        if (groups := len(self._kv_cache.kv_cache_groups)) != 1:
            raise ValueError(f"the model has {groups} groups of KV layers (hybrid attention); a handoff is built for one")
        first = next(iter(tensors.values()))
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
                raise ValueError(f"the KV of layer {name} is not one tensor [blocks, heads, block_size, width]")
            if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
                raise ValueError(f"layer {name} has KV of another shape or type than the first: {tuple(tensor.shape)} {tensor.dtype}")
        if len({tensor.data_ptr() for tensor in tensors.values()}) != len(tensors):
            raise ValueError("several layers share one KV tensor")
        if (dtype := str(first.dtype).removeprefix("torch.")) not in DTYPE_BYTES:
            raise ValueError(f"engine.vllm.kv_cache_dtype: the KV is {dtype}; a handoff carries {', '.join(DTYPE_BYTES)}")
        blocks, heads, block_size, width = first.shape
        parallel = self._config.parallel_config.tensor_parallel_size
        if heads * parallel != (total := self._config.model_config.get_total_num_kv_heads()) and parallel > 1:
            raise ValueError(f"{total} KV heads cannot be divided among {parallel} ranks without copies")
        return RankReport(
            pipeline=get_pp_group().rank_in_group,
            tensor=get_tensor_model_parallel_rank(),
            layers=len(tensors),
            blocks=blocks,
            heads=heads,
            block_size=block_size,
            width=width,
            dtype=dtype,
            packing=packing(first, self._config),
        )


def _reachable(memory: mmap.mmap, device: torch.device) -> torch.Tensor:
    """Staged memory, as bytes, where kernels of the device reach it."""
    staged = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type != "cuda":
        return staged
    error = torch.cuda.cudart().cudaHostRegister(staged.data_ptr(), staged.nbytes, MAPPED_FOR_ALL)
    if int(error) or not staged.is_pinned():
        log.warning("staged memory cannot be pinned (%s): copies wait for the host", error)
        return staged
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    view: torch.Tensor = get_accelerator_view_from_cpu_tensor(staged)
    return view


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        leash = Leash.of(vllm_config.kv_transfer_config.kv_connector_extra_config[KEY])
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(leash, vllm_config.cache_config.block_size)
            Publisher.tell = self._scheduler.cache_changed
        else:
            self._rank = RankSide(leash, vllm_config, kv_cache_config)

    # --- scheduler ---

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        self._scheduler.manager = kv_cache_manager

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        staged = self._scheduler.matched(request, num_computed_tokens)
        return staged, staged > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler.landed(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(self, request: "Request", block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # --- ranks ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._rank.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._rank.layers.expect(self._copies.saves)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, pairs in self._copies.loads.items():
            self._rank.layers.load(request_id, pairs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # no request in this step is loading

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._rank.layers.after(layer_name)

    def wait_for_save(self) -> None:
        self._rank.layers.end()
        self._rank.number = self._copies.number

    @property
    def _copies(self) -> Copies:
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        return copies

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(sent, received); vLLM waits until every rank has named a request."""
        return None, self._rank.layers.loaded() or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata:
        return Landed(self._rank.number)


class Publisher(EventPublisher):
    """Takes vLLM's block events where they are made: in the process of its scheduler. vLLM makes it after the connector."""

    tell: Callable[[list[CacheChange]], None]

    def __init__(self, data_parallel_rank: int = 0, **config: Any) -> None:
        self._events: BlockEvents | None = None

    def publish(self, events: KVEventBatch) -> None:
        type(self).tell(list(self._changes(events.events)))

    def shutdown(self) -> None:
        pass

    def _changes(self, events: Iterable[Any]) -> Iterable[CacheChange]:
        for event in events:
            if isinstance(event, BlockStored):
                self._events = self._events or BlockEvents(event.block_size)
                extra = (event.extra_keys or [None])[0] or ()
                yield from self._events.stored(event.block_hashes, event.parent_block_hash, event.token_ids, extra[-1] if extra else None)
            elif self._events is None:
                continue
            elif isinstance(event, BlockRemoved):
                yield from self._events.removed(event.block_hashes)
            else:
                yield from self._events.cleared()


def packing(tensor: torch.Tensor, config: VllmConfig) -> str:
    """How the numbers of a (layer, head) are arranged, and by what they were computed: workers of which that differs do not take each
    other's KV and streams. On a CPU, attention packs them for its instruction set."""
    if tensor.device.type == "cuda":
        layers = config.compilation_config.static_forward_context.values()
        backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
        invariant = ", batch-invariant" if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else ""
        kernels = f"{torch.cuda.get_device_name(tensor.device)}, {'+'.join(sorted(backends))}{invariant}"
    else:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        kernels = _get_attn_isa(tensor.dtype, tensor.shape[2], tensor.shape[3] // 2)
    runner = "v2" if getattr(config, "use_v2_model_runner", False) else "v1"
    return f"vllm {vllm.__version__} {runner} {tensor.device.type} {kernels}"


EventPublisherFactory.register_publisher(PUBLISHER, Publisher)
