"""The pool of an engine on a CPU, whose bytes tests may look at."""

from baton.engine.core.kvcache import KvPool, Pool


def on_host(pool: Pool) -> KvPool:
    assert isinstance(pool, KvPool)
    return pool
