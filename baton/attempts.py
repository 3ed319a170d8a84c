"""The calls of one request: where the next one goes and when, after the last one was refused or its stream broke. Pure.

A *refusal* comes before the server has accepted the request. Another address may accept it, so every address is tried before any is asked
again, and none before the time that it named itself (RetryInfo). With only one address, a refusal is final.

A *break* comes after that: the router was killed or drains, or the connection is lost. The stream can be resumed with the receipt that came
with the acceptance, even at the same address, and its calls may then be refused like others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

BACKOFF_S = 0.1  # the longest wait before an address is asked for the first time after a failure; it doubles with each of its refusals
LONGEST_BACKOFF_S = 2.0
PATIENCE_S = 60.0  # how long a request without a deadline looks for a server that accepts it
# Baton names a reason in every status. A status without one was made by gRPC or by a proxy, and these codes mean that the server is lost.
LOST = frozenset({"UNKNOWN", "INTERNAL"})


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call ended. `reason`: a name from Baton's error table, or empty."""

    code: str
    reason: str = ""
    retry_after_s: float | None = None

    @property
    def retryable(self) -> bool:
        """Whether the server says that trying again can help, or gRPC dropped the call because the server was ending. (A cancel of this
        side never comes here.)"""
        return self.code == "UNAVAILABLE" or self.retry_after_s is not None or (self.code == "CANCELLED" and not self.reason)

    @property
    def lost(self) -> bool:
        return self.code in LOST and not self.reason


@dataclass(slots=True)
class Attempts:
    """Times are in seconds on one clock."""

    addresses: int
    at: int  # the address that is asked now
    began: float
    deadline: float | None
    max_resumes: int
    insists: bool  # whether a refusal may be tried again elsewhere
    draw: Callable[[], float]  # a random number from 0 to 1
    resumes: int = 0
    _accepted: bool = False  # this call
    _resumable: bool = False
    _refusals: list[int] = field(init=False)  # of each address, since the request was last accepted
    _not_before: list[float] = field(init=False)  # when each address may be asked again

    def __post_init__(self) -> None:
        self._refusals, self._not_before = [0] * self.addresses, [0.0] * self.addresses

    def accept(self, resumable: bool) -> None:
        """Notes that the server has accepted the call. `resumable`: it gave a receipt."""
        self.resumes += self._resumable
        self._accepted, self._resumable = True, resumable

    def wait_s(self, failure: Failure, now: float) -> float | None:
        """How long to wait before the next call, which goes to the address `at`; None: the failure is final."""
        if self._accepted:
            if not self._resumable or self.resumes >= self.max_resumes or not (failure.retryable or failure.lost):
                return None
            self._accepted, self.began = False, now
            self._refusals = [0] * self.addresses
        elif not failure.retryable or not (self.insists or self._resumable):
            return None
        else:
            self._refusals[self.at] += 1
        self._not_before[self.at] = now + (failure.retry_after_s or 0.0)
        self.at = min(range(self.addresses), key=self._order)
        backoff = min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** min(16, self._refusals[self.at]))
        wait = max(self.draw() * backoff, self._not_before[self.at] - now)
        until = self.began + PATIENCE_S if self.deadline is None else self.deadline
        return wait if now + wait < until else None

    def _order(self, address: int) -> tuple[int, float, int]:
        """The least refused first, then the one that may be asked soonest, then the next in turn."""
        return self._refusals[address], self._not_before[address], (address - self.at - 1) % self.addresses
