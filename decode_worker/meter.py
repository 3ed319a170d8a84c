"""Counts what happened to the handles that came with requests."""

from baton.cluster.handoff import COUNTED, Handoff
from baton.cluster.metrics import Book


class HandoffMeter:
    def __init__(self, book: Book) -> None:
        self._handoffs = book.counters("baton_handoffs_total")
        # Exported from the start: a series that appears with its first event has no rate before the second.
        self._handoffs["none", "ok"].inc(0)
        self._read_s = book.histograms("baton_handoff_read_duration_seconds")
        self._read_bytes = book.histograms("baton_handoff_read_bytes")
        self._verify_s = book.histogram("baton_handoff_verify_duration_seconds")
        self._counted = {name: book.counter(fact.counter) for name, fact in COUNTED.items()}

    def ended(self, outcome: str, handoff: Handoff) -> None:
        """`outcome`: ok, or the reason why the KV was not used. `handoff`: what was done until then."""
        transport = handoff.transport or "none"
        self._handoffs[transport, outcome].inc()
        for name, counter in self._counted.items():
            counter.inc(getattr(handoff, name))
        if handoff.blocks:
            self._read_s[transport].observe(handoff.read_ms / 1000)
            self._read_bytes[transport].observe(handoff.bytes)
            self._verify_s.observe(handoff.verify_ms / 1000)

    def recomputed(self, tokens: int) -> None:
        self._counted["recomputed_tokens"].inc(tokens)
