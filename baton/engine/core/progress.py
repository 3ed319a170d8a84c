"""What an engine is doing while it starts. Some of it happens while a module is imported, so who listens is a matter of the context."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    what: str  # "compiling kernels"
    done: int = 0
    total: int = 0  # 0: unknown
    unit: str = ""  # of both: "MiB"

    def __str__(self) -> str:
        return f"{self.what}: {self.done} of {self.total} {self.unit}".rstrip() if self.total else self.what


Progress = Callable[[Step], None]


def ignore(step: Step) -> None:
    """Nobody listens."""


_listening: ContextVar[Progress] = ContextVar("progress", default=ignore)


def tell(step: Step) -> None:
    """Called in the thread that builds the engine."""
    _listening.get()(step)


@contextmanager
def told_to(progress: Progress) -> Iterator[None]:
    before = _listening.set(progress)
    try:
        yield
    finally:
        _listening.reset(before)
