"""Log lines about requests: so many in a second, and a count of the rest. Under overload every request is refused, and a line for each
would hide everything else.

They name a request, its tenant, a reason from the error table, a stage and a worker; nothing of a prompt or an output, and no message of
an error, which may quote one.
"""

import logging
from collections import Counter

from router.request import Trace

LINES = 20  # in each period
PERIOD_S = 1.0


class RequestLog:
    def __init__(self, log: logging.Logger, lines: int = LINES) -> None:
        self._log = log
        self._lines = lines
        self._left = lines
        self._until: float | None = None  # the end of the period
        self._more: Counter[str] = Counter()  # lines that were left out since the last one that says so, by what they were about

    def ended(self, now: float, outcome: str, reason: str, request_id: str, tenant: str, trace: Trace) -> None:
        """A request that failed or was refused; nothing for any other. Its watch has been stopped."""
        if outcome not in ("failed", "refused"):
            return
        about = f"{outcome} {reason}"
        if self._full(now):  # under overload most lines are left out: they are not even written
            self._more[about] += 1
            return
        first, last = trace.watch.laps[0], trace.watch.laps[-1]
        stage = trace.step if last.stage == "queue" and trace.step else last.stage
        worker = last.worker or (trace.failures[-1].worker if trace.failures else "")
        facts = [f"request {name(request_id)} {outcome}: {reason} in {stage}"]
        facts += [f"at {worker}"] if worker else []
        facts += [f"after {last.end - first.start:.3f} s"]
        facts += [f"and {trace.retries} {'retry' if trace.retries == 1 else 'retries'}"] if trace.retries else []
        facts += [f"(tenant {tenant})"] if tenant else []
        self.line(now, logging.WARNING if outcome == "failed" else logging.INFO, about, " ".join(facts))

    def line(self, now: float, level: int, about: str, text: str) -> None:
        """`about`: what is counted if the line is left out."""
        if self._full(now):
            self._more[about] += 1
            return
        self._left -= 1
        self._log.log(level, "%s", text)

    def _full(self, now: float) -> bool:
        """Whether this period has had all its lines."""
        self.tell(now)
        if self._until is None:
            self._until, self._left = now + PERIOD_S, self._lines
        return self._left <= 0

    def tell(self, now: float) -> None:
        """Says what was left out in a period that is over. Call it now and then: no further line may come."""
        if self._until is None or now < self._until:
            return
        self._until = None
        if self._more:
            parts = ", ".join(f"{count} {about}" for about, count in self._more.most_common())
            self._log.warning("%d more lines about requests were left out: %s", self._more.total(), parts)
            self._more.clear()


def name(request_id: str) -> str:
    """A client chose it: it may contain anything."""
    return ascii(request_id) if request_id else "without an id"
