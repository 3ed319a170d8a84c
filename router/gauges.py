"""Metrics that are read from the router's state at each scrape instead of being counted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.clock import loop_time
from baton.cluster.metric_table import EJECTIONS, Number
from baton.cluster.metrics import Book, Key
from baton.cluster.records import WorkerRecord
from baton.cluster.telemetry import Tracer
from router.admission import Admission
from router.conduct import Conduct
from router.known_texts import KnownTexts
from router.view import ClusterView
from router.watch import Watch


@dataclass(frozen=True, slots=True)
class Readers:
    """`stalled`: by door, how many were cut because they read nothing for `router.stall_s`."""

    unread_bytes: Callable[[], int]
    stalled: Mapping[str, Callable[[], int]]


def tell(book: Book, view: ClusterView, admission: Admission, watch: Watch, tracer: Tracer, readers: Readers, conduct: Conduct) -> None:
    def of_workers(number: Callable[[WorkerRecord], Number]) -> Callable[[], dict[Key, Number]]:
        return lambda: {(record.name, record.pool): number(record) for record in view.members.records()}

    def usable() -> dict[Key, Number]:
        sent_to = {record.name for record in (*view.prefill_workers(), *view.decode_workers())}
        return {(record.name, record.pool): int(record.name in sent_to) for record in view.members.records()}

    book.read("baton_router_requests_in_flight", lambda: admission.requests)
    book.read("baton_router_requests_queued", lambda: admission.queued)
    book.read("baton_router_unread_bytes", lambda: readers.unread_bytes())
    book.read("baton_router_stalled_total", lambda: {(door,): count() for door, count in readers.stalled.items()})
    book.read("baton_router_prefix_index_entries", lambda: sum(model.index.entries for model in view.models.values()))
    book.read("baton_router_prefix_index_refused_total", lambda: sum(model.index.refused for model in view.models.values()))
    book.read("baton_router_worker_usable", usable)
    book.read("baton_router_worker_ejected", of_workers(lambda record: int(bool(view.members.ejected(record.name)))))
    book.read("baton_router_worker_unproven", of_workers(lambda record: int(record.unproven)))
    book.read("baton_router_ejections_total", lambda: {(cause,): conduct.ejections[cause] for cause in EJECTIONS})
    book.read("baton_router_retry_budget_ratio", lambda: conduct.budget.left)
    book.read("baton_router_retries_refused_total", lambda: conduct.retries_refused)
    book.read(
        "baton_router_worker_credit_tokens",
        of_workers(lambda record: record.load.credit_tokens - view.members.unreported_decode_tokens(record.name)),
    )
    book.read("baton_router_worker_waiting_tokens", of_workers(lambda record: view.members.prefill_tokens(record.name, loop_time())))
    book.read("baton_router_worker_trust_ratio", of_workers(lambda record: view.trust_in(record.name, loop_time())))
    book.read("baton_kv_usage_ratio", lambda: {} if (share := kv_usage(view)) is None else share)
    book.read("baton_kv_cache_info", lambda: _kv_cache(view))
    book.read("baton_registry_reachable", lambda: int(watch.registry_reachable))
    book.read("baton_registry_reconnects_total", lambda: watch.reconnects)
    book.read("baton_spans_exported_total", lambda: tracer.exported)
    book.read("baton_spans_dropped_total", lambda: tracer.dropped)


def tell_texts(book: Book, texts: KnownTexts) -> None:
    book.read("baton_router_known_text_tokens_total", lambda: texts.hits)


def kv_usage(view: ClusterView) -> float | None:
    """Used share of the pools of all decode workers; None without any."""
    workers = view.decode_workers()
    blocks = sum(worker.kv_blocks for worker in workers)
    return 1 - sum(worker.load.free_blocks for worker in workers) / blocks if blocks else None


def _kv_cache(view: ClusterView) -> dict[Key, Number]:
    """Block size and number of blocks of each model."""
    blocks = {model: sum(worker.kv_blocks for worker in model.decode_workers()) for model in view.models.values()}
    return {(str(model.served.block_size), str(count)): 1 for model, count in blocks.items() if model.served}
