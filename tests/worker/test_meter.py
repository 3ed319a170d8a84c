"""Leases, handoffs and digests are counted by outcome."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from handoff_pair import PROMPT, Pair, greedy, leased, pair
from host_pool import on_host
from spans import Box

from baton.cluster import semconv
from baton.cluster.errors import BatonError
from baton.cluster.metrics import Book
from baton.cluster.otel import OtelTracer
from baton.engine.core.block_key import root_key
from baton.engine.core.contract import EngineLoad
from baton.engine.core.counts import Counts
from baton.engine.core.sequence import Sequence
from baton.worker.meter import Meter
from kvtransfer.transport import Route


def told(book: Book, name: str) -> dict[tuple[str, ...], float]:
    """One metric of a worker: label values other than worker and role → value, or the number of observations of a histogram."""
    (family,) = (family for family in book.families() if family.name == name)
    return {
        tuple(value for label, value in series.labels.items() if label not in ("worker", "role")): number
        for series in family.series
        if (number := series.buckets[-1] if series.buckets else series.value)
    }


def events(p: Pair) -> dict[str, int]:
    return {event: count for event, count in p.prefill.port.exporter.events.items() if count}


async def test_successful_handoffs_are_counted() -> None:
    async with pair() as p:
        for request in "ab":  # the second request finds four of five blocks in the cache
            await p.start(await p.hand_over(request), request).task
        await p.settled()
        assert told(p.book, "baton_handoffs_total") == {("tcp", "ok"): 2}
        assert told(p.book, "baton_handoff_read_duration_seconds") == {("tcp",): 2} == told(p.book, "baton_handoff_read_bytes")
        assert told(p.book, "baton_handoff_verify_duration_seconds") == {(): 2}
        assert told(p.book, "baton_digests_checked_total") == {(): 6} and told(p.book, "baton_handoff_reused_blocks_total") == {(): 4}
        assert not told(p.book, "baton_digests_failed_total") and not told(p.book, "baton_handoff_recomputed_tokens_total")
        assert events(p) == {"granted": 2, "renewed": 2, "released": 2}


async def test_of_links_that_were_probed_the_slowest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as p:
        importer = p.decode.port.importer
        assert importer.probed() == {}
        await p.start(await p.hand_over()).task
        assert importer.probed() == {}, "between hosts nothing is probed"
        fast, slow = Route("cuda_ipc", rate=4e10), Route("cuda_ipc", rate=3e9)
        monkeypatch.setattr(importer.transport, "route", {"prefill-0:7": fast, "prefill-1:8": slow}.get)
        assert importer.probed() == {"cuda_ipc": 4e10}
        importer._handshakes["prefill-1", 8] = importer._handshakes["prefill-0", 7]
        assert importer.probed() == {"cuda_ipc": 3e9}


async def test_a_corrupted_block_is_counted() -> None:
    async with pair() as p:
        first = await p.hand_over()
        on_host(p.engines[0].runner.pool).block((await p.blocks_of(first.handle))[1])[3] ^= 0x10
        await p.start(first).task
        await p.settled()
        assert told(p.book, "baton_handoffs_total") == {("tcp", "DIGEST_MISMATCH"): 1}
        assert told(p.book, "baton_digests_checked_total") == {(): 5} and told(p.book, "baton_digests_failed_total") == {(): 1}
        assert told(p.book, "baton_handoff_recomputed_tokens_total") == {(): len(PROMPT)}


async def test_an_expired_lease_is_counted() -> None:
    async with pair() as p:
        first = await p.hand_over()
        p.clock.now += 1000
        await p.settled()
        assert events(p) == {"granted": 1, "expired": 1}
        await p.start(first).task
        assert events(p) == {"granted": 1, "expired": 1, "late": 2}, (
            "late twice: when it asks for the blocks and when it releases the lease"
        )
        assert told(p.book, "baton_handoffs_total") == {("tcp", "LEASE_EXPIRED"): 1}


@pytest.mark.parametrize("change", [{"incarnation": 6}, {"request_id": "another"}, {"end": 3}])
async def test_a_forged_handle_is_counted_as_fenced(change: dict[str, Any]) -> None:
    async with pair() as p:
        handle = leased(await p.hand_over())
        forged = replace(handle, **change)
        for ask in (p.prefill.port.exporter.renew, p.prefill.port.exporter.release):
            with pytest.raises(BatonError):
                ask(forged, handle.request_id)
        assert events(p) == {"granted": 1, "fenced": 2}
        assert p.prefill.port.exporter.release(handle, handle.request_id)
        await p.settled()


async def test_a_refused_handle_is_counted_without_a_transport() -> None:
    async with pair() as p:
        first = await p.hand_over()
        await p.start(first, handle=replace(leased(first), mac=bytes(16))).task
        assert told(p.book, "baton_handoffs_total") == {("none", "LEASE_REFUSED"): 1}
        assert not told(p.book, "baton_handoff_read_bytes")
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize(("cut", "error"), [(False, ""), (True, semconv.TRANSFER)])
async def test_both_workers_record_spans(cut: bool, error: str) -> None:
    """If the caller traces: the work, the lease until its release, and the transfer. A failed transfer is not a failed call."""
    box = Box()
    tracer = OtelTracer(box)
    async with pair(tracer=tracer) as p:
        root = tracer.begin("root")
        root_id = int(root.traceparent.split("-")[2], 16)
        first = await p.prefill.prefill(sequence(PROMPT, hold=True), "r", traceparent=root.traceparent)
        if cut:
            p.clock.now += 1000
        continued = sequence([*PROMPT, first.sampled.token])
        await p.decode.serve(p.decode.open(continued, "r", first.handle, lambda event: None, traceparent=root.traceparent), 20.0)
        await p.settled()
    tracer.close()
    spans = {span.name: span for span in box.spans}
    assert set(spans) == {semconv.PREFILL_WORK, semconv.LEASE, semconv.DECODE_WORK, semconv.TRANSFER}
    assert {name for name, span in spans.items() if span.error} == ({error} if error else set())
    assert spans[semconv.LEASE].parent_id == spans[semconv.PREFILL_WORK].span_id
    assert spans[semconv.TRANSFER].parent_id == spans[semconv.DECODE_WORK].span_id
    assert spans[semconv.PREFILL_WORK].parent_id == spans[semconv.DECODE_WORK].parent_id == root_id
    assert spans[semconv.PREFILL_WORK].attributes[semconv.CACHED_TOKENS] == 0
    if not cut:
        assert spans[semconv.TRANSFER].attributes["baton.blocks"] == 5
        assert spans[semconv.LEASE].end_ns >= spans[semconv.TRANSFER].start_ns


def sequence(tokens: list[int], hold: bool = False) -> Sequence:
    return Sequence(f"r#{hold}", list(tokens), len(PROMPT), greedy(), root_key("toy"), hold)


async def test_a_cancelled_call_ends_its_span() -> None:
    box = Box()
    tracer = OtelTracer(box)
    async with pair(tracer=tracer) as p:
        p.runners[1].step_delay_s = 0.01
        opened = p.decode.open(sequence(PROMPT), "r", None, lambda event: None, traceparent=tracer.begin("root").traceparent)
        working = p.decode.serve(opened, 20.0)
        call = asyncio.create_task(working)
        while not p.engines[1].sequences:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await p.settled()
    tracer.close()
    assert [(span.name, span.error) for span in box.spans] == [(semconv.DECODE_WORK, "CANCELLED")]


def test_engine_facts_are_read_when_the_metrics_are_read() -> None:
    book = Book("decode", "decode-0", "tale")
    membership, tracer = SimpleNamespace(reachable=False, reconnects=3), SimpleNamespace(exported=1, dropped=2)
    meter = Meter(book, membership, tracer)  # type: ignore[arg-type]
    facts = EngineLoad(1, 2, 3, 30, 10, 70, 5, 6, Counts(1, 100, 20, 300, 40, 7))
    for drafted, accepted in ((20, 18), (2, 0)):
        facts.counts.note_guesses("prompt_lookup", drafted, accepted)
    facts.counts.note_guesses("mine", 1, 1)
    meter.tell(lambda: facts, 100, 16)
    meter.batch(0.25, 48, 2)
    meter.batch(0.25, 2, 2)
    assert told(book, "baton_kv_blocks") == {("used",): 70, ("cached",): 10, ("free",): 20}
    assert told(book, "baton_kv_usage_ratio") == {(): 0.7} and told(book, "baton_kv_cache_info") == {("16", "100"): 1}
    assert told(book, "baton_engine_step_tokens") == {(): 2} == told(book, "baton_engine_step_duration_seconds")
    for name, value in {
        "baton_engine_sequences_running": 1,
        "baton_engine_sequences_waiting": 2,
        "baton_engine_computed_tokens_total": 100,
        "baton_engine_recomputed_tokens_total": 20,
        "baton_engine_prefix_queried_tokens_total": 300,
        "baton_engine_prefix_hit_tokens_total": 40,
        "baton_engine_preemptions_total": 7,
        "baton_registry_reconnects_total": 3,
        "baton_spans_exported_total": 1,
        "baton_spans_dropped_total": 2,
    }.items():
        assert told(book, name) == {(): value}, name
    guessed, right = told(book, "baton_engine_drafted_tokens_total"), told(book, "baton_engine_accepted_tokens_total")
    assert guessed["prompt_lookup", "2"] == 2 and guessed["prompt_lookup", "16"] == 1 and guessed["prompt_lookup", "other"] == 4
    assert right["prompt_lookup", "2"] == 1 and right["prompt_lookup", "other"] == 2 and right["other", "1"] == 1
    assert not told(book, "baton_registry_reachable")
    facts = replace(facts, running=9)
    assert told(book, "baton_engine_sequences_running") == {(): 9}
