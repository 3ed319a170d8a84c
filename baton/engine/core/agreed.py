"""What the workers of a cluster must decide alike, because KV and streams go from one to another, although each measures for itself and may
find something else: a busy machine, another host, other threads. An engine may decide it while a module is loaded, far from who knows the
cluster, so who is asked is a matter of the context."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Agree = Callable[[str, str], str]


def alone(topic: str, mine: str) -> str:
    """There is no cluster, or it cannot be asked."""
    return mine


_asking: ContextVar[Agree] = ContextVar("agreed", default=alone)


def agreed(topic: str, mine: str = "") -> str:
    """Returns what holds for all: `mine` if nothing did before. Without `mine`, only asks; empty: nothing holds. Called in the thread that
    builds the engine."""
    return _asking.get()(topic, mine)


@contextmanager
def agreeing(agree: Agree) -> Iterator[None]:
    before = _asking.set(agree)
    try:
        yield
    finally:
        _asking.reset(before)
