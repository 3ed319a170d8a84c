"""The prompts that wait here or are computed, by the router that asked for each. A router knows its own at every moment; what it cannot
know is what others have sent here. Both count a prompt alike: none counts twice, and nothing that is cached counts as work.

A router asks about that when it probes; between two probes, in which many prompts may come and go, it is told (`follow`): two routers that
choose in the dark send two prompts to one idle worker while another one rests.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Tokens, and seconds between two pieces of news. In the simulation of several routers (tests/simulate/test_cluster.py, five loads) three
# have 1.02 times the TTFT of one at P99, 1.09 times with 128 tokens and 1.05 times with 20 ms; half as many seconds gain nothing.
MUCH, NEWS_S = 64, 0.01


@dataclass(slots=True, eq=False)
class PromptFollower:
    asker: str
    tell: Callable[[int], None]
    told: int | None = None


class Prompts:
    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()  # of the asker's prompts
        self._followers: list[PromptFollower] = []

    @contextmanager
    def present(self, asker: str, uncached_tokens: int) -> Iterator[None]:
        self._change(asker, uncached_tokens)
        try:
            yield
        finally:
            self._change(asker, -uncached_tokens)

    def besides(self, asker: str) -> int:
        """Uncached tokens of the prompts of all others."""
        return self._tokens.total() - self._tokens[asker]

    def follow(self, asker: str, tell: Callable[[int], None]) -> Callable[[], None]:
        """Calls `tell` with `besides` now, and whenever it differs by MUCH from what was told before. Returns what ends that."""
        follower = PromptFollower(asker, tell)
        self._followers.append(follower)
        self._tell(follower)
        return lambda: self._followers.remove(follower)

    def _change(self, asker: str, tokens: int) -> None:
        self._tokens[asker] += tokens
        if not self._tokens[asker]:
            del self._tokens[asker]
        for follower in self._followers:
            if follower.asker != asker:
                self._tell(follower)

    def _tell(self, follower: PromptFollower) -> None:
        now = self.besides(follower.asker)
        if follower.told is None or abs(now - follower.told) >= MUCH:
            follower.told = now
            follower.tell(now)


class PacedNews:
    """Calls `tell` with the newest number that it was given, at most every NEWS_S seconds, within a running loop."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._newest = 0
        self._next = 0.0  # when something may be told again
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, number: int) -> None:
        self._newest = number
        if self._timer is None:
            if (now := self._loop.time()) >= self._next:
                self._send()
            else:
                self._timer = self._loop.call_at(max(now, self._next), self._send)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        self._timer, self._next = None, self._loop.time() + NEWS_S
        self._tell(self._newest)
