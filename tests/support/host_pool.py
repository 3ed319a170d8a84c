"""The pool of an engine as transports see it: host memory, whose bytes tests may look at."""

from collections.abc import Sequence

from baton.engine.core.kvcache import KvPool, Pool


def on_host(pool: Pool) -> KvPool:
    memory = getattr(pool, "staged", pool)  # a device's
    assert isinstance(memory, KvPool)
    return memory


def carry(source: Pool, theirs: Sequence[int], target: Pool, ours: Sequence[int]) -> None:
    """Copies blocks as a transport does: `theirs[i]` to `ours[i]`."""
    source.expose(theirs)
    on_host(target).array[list(ours)] = on_host(source).array[list(theirs)]
    target.take_in(ours)
