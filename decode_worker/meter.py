"""Counts what became of the handles that came with requests."""

from baton.cluster.metrics import Book
from kvtransfer.importer import Report


class HandoffMeter:
    def __init__(self, book: Book) -> None:
        self._handoffs = book.counters("baton_handoffs_total")
        self._read_s = book.histograms("baton_handoff_read_duration_seconds")
        self._read_bytes = book.histograms("baton_handoff_read_bytes")
        self._verify_s = book.histogram("baton_handoff_verify_duration_seconds")
        self._reused = book.counter("baton_handoff_reused_blocks_total")
        self._recomputed = book.counter("baton_handoff_recomputed_tokens_total")
        self._checked = book.counter("baton_digests_checked_total")
        self._wrong = book.counter("baton_digests_failed_total")

    def ended(self, outcome: str, report: Report, blocks_reused: int = 0) -> None:
        """`outcome`: ok, or the reason why the KV was not used. `report`: of what was done until then."""
        transport = report.transport or "none"
        self._handoffs[transport, outcome].inc()
        self._reused.inc(blocks_reused)
        self._checked.inc(report.digests_checked)
        self._wrong.inc(report.digests_failed)
        if report.blocks:
            self._read_s[transport].observe(report.read_ms / 1000)
            self._read_bytes[transport].observe(report.bytes)
            self._verify_s.observe(report.verify_ms / 1000)

    def recomputed(self, tokens: int) -> None:
        self._recomputed.inc(tokens)
