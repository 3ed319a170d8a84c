"""How many retries all requests of a router may spend together. A request that fails is sent again, so a pool that is sick everywhere would
get several times its load; a budget stops that. The scheme is gRPC's retry throttling (gRFC A6). It only decides: time is an argument.

The budget is `most` tokens and begins full. A worker's failure takes one token, and a call that ends well gives `RATIO` of one back.

    the request                                         is retried
    has streamed nothing yet                            while more than half of the tokens are left
    has streamed something                              while there is a token: the lower half is theirs
    has streamed something, and its worker was lost     always: streams continue exactly when a worker dies (`router.max_retries` bounds it)

The budget is there against a sick pool, not against one crash or one bad step of an engine: failures of one worker within `TOGETHER_S` take
one token, however many requests they are.
"""

RATIO = 0.1
TOGETHER_S = 0.05


class RetryBudget:
    def __init__(self, most: int) -> None:
        """`most`: 0 means no limit."""
        self._most = most
        self._tokens = float(most)
        self._failed: dict[str, float] = {}  # worker → when it was last charged, those of the last TOGETHER_S

    @property
    def left(self) -> float:
        """Share of the tokens."""
        return self._tokens / self._most if self._most else 1.0

    def note_success(self) -> None:
        self._tokens = min(self._most, self._tokens + RATIO)

    def note_failure(self, worker: str, now: float) -> None:
        self._failed = {name: at for name, at in self._failed.items() if now - at < TOGETHER_S}
        if worker not in self._failed:
            self._failed[worker] = now
            self._tokens = max(0.0, self._tokens - 1)

    def allows(self, begun: bool, lost: bool) -> bool:
        """`begun`: the request has streamed something. `lost`: it failed because its worker was lost or leaves."""
        if not self._most or (begun and lost):
            return True
        return self._tokens >= 1 if begun else self._tokens > self._most / 2
