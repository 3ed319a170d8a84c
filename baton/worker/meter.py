"""Metrics that every worker has, whatever its role: the steps of its engine, its KV pool, its registry."""

from collections.abc import Callable
from functools import partial

from baton.cluster.gpu_watch import AGE, FACTS, GpuWatch
from baton.cluster.membership import Membership
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from baton.engine.core.contract import EngineLoad
from baton.engine.core.counts import Guessed
from baton.tiers.tier import TierReport
from baton.tiers.tiers import Tiers


class Meter:
    def __init__(self, book: Book, membership: Membership, tracer: Tracer) -> None:
        self._book = book
        self._step_s = book.histogram("baton_engine_step_duration_seconds")
        self._step_tokens = book.histogram("baton_engine_step_tokens")
        self._step_sequences = book.histogram("baton_engine_step_sequences")
        book.read("baton_registry_reachable", lambda: int(membership.reachable))
        book.read("baton_registry_reconnects_total", lambda: membership.reconnects)
        book.read("baton_spans_exported_total", lambda: tracer.exported)
        book.read("baton_spans_dropped_total", lambda: tracer.dropped)

    def batch(self, seconds: float, tokens: int, sequences: int) -> None:
        """Count one step. Called in the engine's thread, the only writer of these three."""
        self._step_s.observe(seconds)
        self._step_tokens.observe(tokens)
        self._step_sequences.observe(sequences)

    def watch(self, gpus: GpuWatch) -> None:
        for fact in FACTS:
            self._book.read(fact.name, partial(gpus.read, fact))
        self._book.read(AGE, gpus.age)

    def tell(self, facts: Callable[[], EngineLoad], num_blocks: int, block_size: int) -> None:
        """`facts` returns the facts of the last look at the engine."""
        read = self._book.read
        read("baton_engine_sequences_running", lambda: facts().running)
        read("baton_engine_sequences_waiting", lambda: facts().waiting)
        read("baton_engine_preemptions_total", lambda: facts().counts.preemptions)
        read("baton_engine_computed_tokens_total", lambda: facts().counts.computed_tokens)
        read("baton_engine_recomputed_tokens_total", lambda: facts().counts.recomputed_tokens)
        read("baton_engine_prefix_queried_tokens_total", lambda: facts().counts.queried_tokens)
        read("baton_engine_prefix_hit_tokens_total", lambda: facts().counts.hit_tokens)
        read("baton_engine_drafted_tokens_total", lambda: _guesses(facts(), lambda each: each.drafted))
        read("baton_engine_accepted_tokens_total", lambda: _guesses(facts(), lambda each: each.accepted))
        read("baton_engine_forks_total", lambda: facts().counts.forks)
        read("baton_kv_blocks", lambda: _blocks(facts()))
        read("baton_kv_usage_ratio", lambda: facts().owned_blocks / num_blocks)
        read("baton_kv_cache_info", lambda: {(str(block_size), str(num_blocks)): 1})

    def tell_tiers(self, tiers: Tiers) -> None:
        """What each says of itself, and what has become of hints and of blocks that left the pool."""
        self._book.read("baton_tier_hints_total", lambda: tiers.hints)
        self._book.read("baton_tier_left_total", lambda: tiers.ghosts.left_blocks)
        self._book.read("baton_tier_returned_total", lambda: tiers.ghosts.returned)

        def read(name: str, number: Callable[[TierReport], int | float]) -> None:
            self._book.read(name, lambda: {tier.medium: number(tier) for tier in tiers.told()})

        read("baton_tier_blocks", lambda tier: tier.units)
        read("baton_tier_on", lambda tier: int(tier.state in ("on", "watching")))
        read("baton_tier_watching", lambda tier: int(tier.state == "watching"))
        read("baton_tier_reads_total", lambda tier: tier.tally.reads)
        read("baton_tier_hits_total", lambda tier: tier.tally.hits)
        read("baton_tier_read_bytes_total", lambda tier: tier.tally.read_bytes)
        read("baton_tier_written_bytes_total", lambda tier: tier.tally.written_bytes)
        read("baton_tier_unwritten_total", lambda tier: tier.tally.dropped)
        read("baton_tier_saved_seconds_total", lambda tier: tier.tally.saved_s)
        read("baton_tier_spent_seconds_total", lambda tier: tier.tally.spent_s)
        read("baton_tier_gain_seconds", lambda tier: tier.saved_s - tier.spent_s)


def _guesses(facts: EngineLoad, number: Callable[[Guessed], int]) -> dict[str | tuple[str, ...], int | float]:
    return {(method, str(place)): number(each) for (method, place), each in facts.counts.guesses.items()}


def _blocks(facts: EngineLoad) -> dict[str | tuple[str, ...], int | float]:
    """The engine's `free_blocks` are all that can be allocated, including the cached ones."""
    return {"used": facts.owned_blocks, "cached": facts.cached_blocks, "free": facts.free_blocks - facts.cached_blocks}
