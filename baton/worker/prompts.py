"""The prompts that wait here or are computed, by the router that asked for each. A router knows its own at every moment; what it cannot
know is what others have sent here. Both count a prompt alike: none counts twice, and nothing that is cached counts as work."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Prompts:
    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()  # of the asker's prompts

    @contextmanager
    def present(self, asker: str, uncached_tokens: int) -> Iterator[None]:
        self._tokens[asker] += uncached_tokens
        try:
            yield
        finally:
            self._tokens[asker] -= uncached_tokens
            if not self._tokens[asker]:
                del self._tokens[asker]

    def besides(self, asker: str) -> int:
        """Uncached tokens of the prompts of all others."""
        return self._tokens.total() - self._tokens[asker]
