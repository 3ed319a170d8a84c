"""How each worker behaves, as the calls of this router show it: notes how they end, puts bad workers aside (`router.outliers`), takes them
back, and says whether a request may be sent again (`router.retry_budget`)."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.records import RoleName, WorkerRecord
from router.outliers import Ejected, EjectionTerms, Identity, Outliers, Stride
from router.predictions import CheckedPrediction, CostLine
from router.request import Request
from router.retry_budget import RetryBudget
from router.served import ServedModel
from router.workers import FirstToken

log = logging.getLogger(__name__)
GONE = frozenset({Reason.WORKER_LOST, Reason.WRONG_WORKER, Reason.DRAINING})  # the registry will report it a moment later
LEAST_PROMPT = 32  # tokens that were computed, for a prompt to show a pace


class Sent(NamedTuple):
    """A prompt on its way to its prefill worker."""

    cost: float  # tokens
    uncached: int
    first_s: float | None  # until its first token, as is expected


class Conduct:
    def __init__(self, model: ServedModel, config: RouterConfig, clock: Callable[[], float]) -> None:
        self.budget = RetryBudget(config.retry_budget)
        self.ejections: Counter[str] = Counter()  # by cause
        self.retries_refused = 0
        self._on = config.outlier_share > 0
        self.outliers = Outliers(EjectionTerms(config.outlier_share, config.outlier_s, config.outlier_pace))
        self._model, self._members = model, model.members
        self._lines: dict[Identity, CostLine] = {}  # of prefill workers, and of some that have left
        self._clock = clock
        self._members.listen(self._look)

    @property
    def aside(self) -> frozenset[str]:
        """The names of the workers that are put aside."""
        return frozenset(name for name, _ in self.outliers.aside)

    def send(self, worker: WorkerRecord, cost: float, uncached: int) -> Sent:
        """A prompt goes to a prefill worker that was chosen for its `cost` in tokens. `uncached`: those that it is to compute."""
        line = self._lines.get(_identity(worker))
        return Sent(cost, uncached, line.expects(cost) if line else None)

    def prefilled(self, worker: WorkerRecord, request: Request, first: FirstToken, took_s: float, sent: Sent) -> None:
        """A prefill ended well. `took_s`: from the call to its token. It shows a pace if most of the prompt was computed, and nothing
        was fetched: a few tokens after a long cached prefix cost much more each."""
        self._succeeded(worker, "prefill")
        computed, fetched = len(request.tokens) - first.cached_tokens, first.fetched_tokens
        if computed >= LEAST_PROMPT and 2 * computed >= len(request.tokens) and not fetched:
            if computed <= sent.uncached:  # else a promise of cached tokens was wrong, and that is judged as such
                self._note_first(worker, request, took_s, sent)
            token_s = max(0.0, took_s - first.wait_ms / 1000) / computed
            self._members.note_prefill(*_identity(worker), token_s)
            self._note_pace(worker, "prefill", token_s, self._members.prefills)

    def _note_first(self, worker: WorkerRecord, request: Request, took_s: float, sent: Sent) -> None:
        if sent.first_s is not None:
            request.trace.predictions.append(CheckedPrediction("first token", sent.first_s, took_s))
        identity = _identity(worker)
        if identity not in self._lines:
            kept = {known: line for known, line in self._lines.items() if self._members.answers(known) is not None}
            self._lines = {**kept, identity: CostLine()}
        self._lines[identity].note(sent.cost, took_s, self._clock())

    def decoded(self, worker: WorkerRecord) -> None:
        """A decode call ended well, or its reader has left it."""
        self._succeeded(worker, "decode")

    def streamed(self, worker: WorkerRecord, stride: Stride) -> None:
        """A decode call has ended, well or not. The view still counts it."""
        if (token_s := stride.token_s) is not None:
            self._note_pace(worker, "decode", token_s, self._members.decodes)

    def handed_over(self, holder: WorkerRecord | None, reader: WorkerRecord, handoff: Handoff) -> None:
        """`reader` has read KV of `holder`, or has tried."""
        wrong = handoff.failure == Reason.DIGEST_MISMATCH.name
        if holder is None or not self._on or not (wrong or (handoff.transport and not handoff.failure)):
            return
        if self._knows(holder) and self._knows(reader):
            ends = _identity(holder), _identity(reader)
            self._put_aside(self.outliers.note_read(*ends, not wrong, self._model.pool, self._clock()))

    def failed(self, worker: WorkerRecord, role: RoleName, error: BatonError) -> None:
        """A call failed. INTERNAL is the worker's fault; a loss counts once, however many calls it ended. What is full, drains or serves
        something else is not at fault, and of a handoff nobody knows which end failed, unless a digest tells (`handed_over`)."""
        news = error.reason in GONE and self._members.mark_down(worker.name, worker.incarnation)
        if error.reason.value.retry_elsewhere:
            self.budget.note_failure(worker.name, self._clock())
        if error.reason is Reason.INTERNAL or (news and error.reason is Reason.WORKER_LOST):
            self._note_call(worker, role, False)

    def may_retry(self, request: Request, error: BatonError) -> bool:
        """Whether the budget of all requests allows it."""
        allowed = self.budget.allows(begun=request.output_len > 0, lost=error.reason in GONE)
        self.retries_refused += not allowed
        request.trace.retry_refused = not allowed
        return allowed

    def _succeeded(self, worker: WorkerRecord, role: RoleName) -> None:
        self.budget.note_success()
        self._note_call(worker, role, True)

    def _note_call(self, worker: WorkerRecord, role: RoleName, ok: bool) -> None:
        if self._on and self._knows(worker):
            self._put_aside(self.outliers.note_call(_identity(worker), role, ok, self._model.pool, self._clock()))

    def _note_pace(self, worker: WorkerRecord, role: RoleName, token_s: float, company: Callable[[str], int]) -> None:
        if self._on and self._knows(worker):
            there = company(worker.name)
            self._put_aside(self.outliers.note_pace(_identity(worker), role, token_s, there, self._model.pool, self._clock()))

    def _knows(self, worker: WorkerRecord) -> bool:
        """Whether what it does counts. It may have left while it was called."""
        identity = _identity(worker)
        if self._members.answers(identity) is None:
            return False
        if identity not in self.outliers:
            self.outliers.join(identity, [*map(_identity, self._members.records())], self._clock())
        return True

    def _put_aside(self, ejected: Ejected | None) -> None:
        if ejected is not None:
            log.warning("%s is put aside for %.0f s: %s", ejected.worker[0], ejected.term_s, ejected.why)
            self.ejections[ejected.cause] += 1
            self._members.mark_ejected(*ejected.worker, f"put aside for {ejected.term_s:.0f} s: {ejected.why}")

    def _look(self) -> None:
        """The view has changed: a probe may have been answered."""
        if self.outliers.aside:
            for name, incarnation in self.outliers.take_back(self._members.answers, self._clock()):
                log.info("%s gets requests again", name)
                self._members.mark_ejected(name, incarnation, "")


def _identity(worker: WorkerRecord) -> Identity:
    return worker.name, worker.incarnation
