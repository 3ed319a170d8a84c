"""What became of each request. When a request ends, the journal counts it, judges it by the objectives, keeps a record for a while, and
completes its trace.

    with journal.open("chat", request_id, traceparent) as entry:      # the request ends with the block, however the block is left
        entry.request = ...                                           # when the request is known to be well-formed
        entry.finish = "stop"                                         # when the output is complete

The code that serves a request writes facts into `entry.trace` and knows nothing about metrics. A record keeps times, counts and names, but
nothing of the prompt or the output.
"""

import asyncio
import logging
import math
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from baton.clock import clock_of_loop
from baton.cluster import semconv
from baton.cluster.config_router import SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metric_table import Number
from baton.cluster.metrics import Book
from baton.cluster.telemetry import NO_SPAN, Tracer, Value
from baton.stages import e2e, tpot, ttft
from router.counters import Counters
from router.curves import Curves, Point
from router.degradation import Degradation, Rules
from router.predictions import Predictions
from router.request import NEAR_DEADLINE_S, FinishReason, Lap, Request, Stopwatch, Trace, name_the_stage
from router.request_log import RequestLog
from router.slo import Attainment, Objectives, RequestTimes, missed_because
from router.split import Split, path_of
from router.validate import MAX_REQUEST_ID

log = logging.getLogger(__name__)
LATE = frozenset({Reason.SATURATED.name, Reason.DEADLINE.name})
REFUSALS = frozenset({Reason.RATE_LIMITED, Reason.SATURATED, Reason.NO_WORKER, Reason.DRAINING})


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all requests that have ended since the start."""

    outcomes: dict[str, Number]
    prompt_tokens: Number
    output_tokens: Number
    cached_tokens: Number
    met: int  # requests that completed and met every objective that is set
    handoffs: int
    handoff_bytes: int
    drafted_tokens: int
    accepted_tokens: int
    drafted_at: dict[str, int]  # by place in the guess of a step, from "1"
    accepted_at: dict[str, int]


@dataclass(frozen=True, slots=True)
class Record:
    """A request that has ended."""

    request_id: str  # empty when the request was refused before it had one
    at: float  # arrival, seconds since the epoch
    outcome: str  # ok, invalid, refused, failed, cancelled
    reason: str  # why the output ended, or the reason from the error table
    prompt_tokens: int
    output_tokens: int
    times: RequestTimes
    trace: Trace
    trace_id: str  # empty when the request was not traced
    slo_missed: str | None  # the stage to blame; None: all objectives met, or not judged
    tenant: str = ""  # empty when no API keys are configured
    choice: int = 0  # which of several answers to a prompt
    choices: int = 1

    def to_json(self) -> dict[str, Any]:
        """Times are in seconds; those of laps and failures count from the arrival."""
        trace, start, laps = self.trace, self.trace.watch.start, self.trace.watch.laps
        return {
            "request_id": self.request_id,
            "at": self.at,
            "outcome": self.outcome,
            "reason": self.reason,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": trace.cached_tokens,
            "fetched_tokens": trace.fetched_tokens,
            "cache": None if trace.uncached is None else trace.uncached.to_json(),
            "retries": trace.retries,
            "stages": self.times.stages,
            "laps": [_lap(lap, start) for lap in laps],
            "failures": [{"at": failure.at - start, "worker": failure.worker, "reason": failure.reason} for failure in trace.failures],
            "put_aside": sorted(trace.put_aside),
            "retry_refused": trace.retry_refused,
            "bypasses": trace.bypasses,
            "handoff": asdict(trace.handoff),
            "connect": trace.handoff.connect_ms / 1000,
            "read": trace.handoff.read_ms / 1000,
            "verify": trace.handoff.verify_ms / 1000,
            "drafted_tokens": trace.guesses.drafted,
            "accepted_tokens": trace.guesses.accepted,
            "guesses": list(trace.guesses.steps),
            "trace_id": self.trace_id,
            "slo_missed": self.slo_missed,
            "tenant": self.tenant,
            "choice": self.choice,
            "choices": self.choices,
            **{name: getattr(self.times, f"{name}_s") for name in ("ttft", "tpot", "e2e", "prefill_wait", "prefill_compute")},
        }


@dataclass(slots=True)
class Drawn:
    """How much of a request the curves show already."""

    prompt: bool = False
    first: bool = False
    tokens: int = 0
    gaps: int = 0


class JournalEntry:
    """A request that is being served."""

    def __init__(self, journal: "Journal", trace: Trace, operation: str, request_id: str, at: float, tenant: str) -> None:
        """`request_id` is the client's own; `at` is in seconds since the epoch."""
        self.trace = trace
        self.operation = operation
        self.request_id = request_id
        self.at = at
        self.tenant = tenant
        self.request: Request | None = None
        self.finish: FinishReason | None = None
        self.deadline = math.inf  # on the stopwatch's clock
        self.drawn = Drawn()
        self._journal = journal

    def __enter__(self) -> Self:
        self._journal.open_entries[self] = None
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        del self._journal.open_entries[self]
        if self.finish is None:
            self.trace.watch.stop()
            if isinstance(error, BatonError) and error.reason is Reason.DEADLINE:
                name_the_stage(error, self.trace)
        self._journal.close(self, *_outcome(self, error))


class Journal:
    def __init__(
        self,
        book: Book,
        tracer: Tracer,
        model: str,
        slo: SloConfig,
        keep: int,
        wall_clock: Callable[[], float] = time.time,
        degradation: Degradation | None = None,
        split: Split | None = None,
    ) -> None:
        """`keep`: number of records kept."""
        self.degradation, self.split = degradation or Degradation(Rules()), split or Split()
        self._alarms = ("", "")  # of the split and of the predictions, as they were told last
        self._predictions = Predictions()
        # For `totals`; the counters have the rest.
        self._demand = 0  # requests that were served, or would have been with room and time for them
        self._goodput = self._handoffs = self._handoff_bytes = self._drafted = self._accepted = 0
        self._drafted_at, self._accepted_at = Counter[str](), Counter[str]()
        self.open_entries: dict[JournalEntry, None] = {}  # an ordered set
        self.curves = Curves()
        self._tracer = tracer
        self._model = model
        self._wall_clock = wall_clock
        self._log = RequestLog(log)
        self._objectives = Objectives(slo.ttft_s, slo.tpot_s, slo.e2e_s)
        self._attainment = Attainment(slo.window)
        self._records: deque[Record] = deque(maxlen=keep)
        self._counters = Counters(book)
        book.read("baton_router_degradation_level", lambda: self.degradation.level)
        book.read("baton_router_split_alarm", lambda: bool(self.split.alarm))
        book.read("baton_router_prediction_bias_ratio", lambda: self._predictions.biases(self._wall_clock()))
        if self._objectives.limits:
            self._met = book.counter("baton_router_slo_met_total")
            self._missed = book.counters("baton_router_slo_missed_total")
            book.read("baton_router_slo_attainment_ratio", lambda: {} if (ratio := self._attainment.ratio) is None else ratio)
            book.read("baton_router_slo_objective_seconds", lambda: dict(self._objectives.limits))

    def open(
        self,
        operation: str,
        request_id: str = "",
        traceparent: str = "",
        tenant: str = "",
        clock: Callable[[], float] | None = None,
        tracestate: str = "",
    ) -> JournalEntry:
        """`operation`: a name from OpenTelemetry's GenAI conventions. `clock`: None: that of the running loop."""
        trace = Trace(Stopwatch(clock or clock_of_loop()), self._tracer.begin(f"{operation} {self._model}", traceparent, tracestate))
        now = self._wall_clock()
        self.curves.arrive(now)
        return JournalEntry(self, trace, operation, request_id[:MAX_REQUEST_ID], now, tenant)

    @contextmanager
    def shared(self, entry: JournalEntry, traceparent: str, tracestate: str, others: Sequence[Request]) -> Iterator[list[JournalEntry]]:
        """The entries of all choices of a request, of which `entry` is the first's."""
        with ExitStack() as stack:
            entries = [entry]
            for request in others:
                trace = request.trace
                trace.span = self._tracer.begin(f"{entry.operation} {self._model}", traceparent, tracestate)
                entries.append(stack.enter_context(JournalEntry(self, trace, entry.operation, request.id, entry.at, entry.tenant)))
                entries[-1].request, entries[-1].deadline = request, entry.deadline
            yield entries

    def follow(self, entry: JournalEntry) -> None:
        """Adds to the curves and to the histogram of gaps what came since the last call. So tokens are drawn when they come, and the ends
        of many long outputs at once leave little to count."""
        request, trace, drawn = entry.request, entry.trace, entry.drawn
        if request is None:
            return
        now = self._wall_clock()
        promised = trace.promised_tokens if request.choice == 0 else None  # the other choices have the same prompt
        if promised is not None and not drawn.prompt:
            drawn.prompt = True
            self.curves.prompt(now, request.prompt_len, max(0, request.prompt_len - promised))
        if trace.first_at and not drawn.first:
            drawn.first = True
            self.curves.first(now, ttft(trace.watch.start, trace.first_at), max(0, (promised or 0) - trace.cached_tokens))
        gaps = trace.gaps[drawn.gaps :]
        self.curves.tokens(now, max(0, request.made - drawn.tokens), gaps)
        self._counters.follow(gaps)
        drawn.tokens, drawn.gaps = request.made, len(trace.gaps)

    def sample(self, running: int, queued: int, kv: float | None) -> None:
        """`kv`: used share of the decode workers' pools, if there are any."""
        self._log.tell(now := self._wall_clock())
        self.curves.sample(now, running, queued, kv)
        self._judge_level(now)
        self._tell_alarms(now)

    def drawn_since(self, number: int) -> list[Point]:
        return self.curves.since(number, self._wall_clock())

    @property
    def totals(self) -> Totals:
        return Totals(
            outcomes=self._counters.outcomes,
            prompt_tokens=self._counters.prompt_tokens.value,
            output_tokens=self._counters.output_tokens.value,
            cached_tokens=self._counters.cached_tokens.value,
            met=self._goodput,
            handoffs=self._handoffs,
            handoff_bytes=self._handoff_bytes,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            drafted_at=dict(self._drafted_at),
            accepted_at=dict(self._accepted_at),
        )

    def _judge_level(self, now: float) -> None:
        change = self.degradation.judge(now, self._demand - self.degradation.declined, self._goodput)
        if change:
            share = self.degradation.share
            seen = "no request ended lately" if share is None else f"{share:.0%} of the last requests met their objectives"
            log.warning("%s: level %d of overload, %s", "serving less" if change > 0 else "serving more", self.degradation.level, seen)

    def _tell_alarms(self, now: float) -> None:
        before, self._alarms = self._alarms, (self.split.judge(), self._predictions.judge(now))
        for old, new in zip(before, self._alarms, strict=True):
            if bool(old) != bool(new):
                log.warning("%s", new or f"no longer: {old}")

    @property
    def alarm(self) -> str:
        """What goes on although it must not, over many requests; empty: nothing."""
        return "; ".join(filter(None, (self.split.alarm, self._alarms[1])))

    @property
    def objectives(self) -> dict[str, float]:
        """Seconds."""
        return self._objectives.limits

    @property
    def attainment(self) -> float | None:
        """Share of the last requests that met every objective. None: no objective is set, or no request has ended yet."""
        return self._attainment.ratio

    @property
    def kept(self) -> int:
        """How many records there are."""
        return len(self._records)

    def last(self, count: int = 1) -> list[Record]:
        """The records of the requests that ended last, newest first."""
        return [record for record, _ in zip(reversed(self._records), range(count), strict=False)]

    def find(self, request_id: str) -> Record | None:
        """The newest record with this id."""
        return next((record for record in reversed(self._records) if record.request_id == request_id), None)

    def close(self, entry: JournalEntry, outcome: str, reason: str) -> None:
        """`outcome` and `reason`: see `Record`."""
        request, trace = entry.request, entry.trace
        times = measure(trace)
        missed = self._judge(outcome, times)
        self.follow(entry)
        completed = outcome == "ok"
        tpot_s, tokens = (times.tpot_s, request.output_len) if completed and request else (None, 0)
        self.curves.end(self._wall_clock(), outcome, completed and missed is None, tpot_s, tokens, missed)
        self._counters.count(request, trace, outcome, reason, times)
        if completed and request:
            self._note_path(request)
        self._predictions.note(trace.predictions, self._wall_clock())
        self._counters.count_predictions(trace.predictions)
        self._add_up(trace, outcome, reason, missed)
        trace.gaps = array("d")  # they are in the histogram now
        record = _record(entry, outcome, reason, times, missed)
        self._records.append(record)
        self._log.ended(self._wall_clock(), outcome, reason, record.request_id, record.tenant, trace)
        if record.trace_id:
            self._end_span(entry, record)

    def _judge(self, outcome: str, times: RequestTimes) -> str | None:
        """Invalid requests, and those that the client gave up, are not judged."""
        if not self._objectives.limits or outcome in ("invalid", "cancelled"):
            return None
        missed = missed_because(self._objectives, times) if outcome == "ok" else "error"
        self._attainment.note(missed is None)
        if missed is None:
            self._met.inc()
        else:
            self._missed[missed].inc()
        return missed

    def _note_path(self, request: Request) -> None:
        """Which path the prompt of a request that has ended well took; all its choices have one."""
        if request.choice == 0 and (path := path_of(request.trace)) is not None:
            self._counters.count_path(path)
            self.split.note(request.trace, path, request.prompt_len - request.trace.cached_tokens)

    def _add_up(self, trace: Trace, outcome: str, reason: str, missed: str | None) -> None:
        """`missed`: see `Record.slo_missed`."""
        self._goodput += outcome == "ok" and missed is None
        self._demand += outcome == "ok" or reason in LATE
        self._handoffs += bool(trace.handoff.transport)
        self._handoff_bytes += trace.handoff.bytes
        self._drafted += trace.guesses.drafted
        self._accepted += trace.guesses.accepted
        if trace.guesses.drafted:
            drafted, right = trace.guesses.places
            self._drafted_at.update(drafted)
            self._accepted_at.update(right)

    def _end_span(self, entry: JournalEntry, record: Record) -> None:
        span, queue = entry.trace.span, entry.trace.watch.laps[0]
        span.past_child(semconv.QUEUE, queue.end - queue.start)
        span.set(self._attributes(entry, record))
        span.end("" if record.outcome == "ok" else record.reason)
        entry.trace.span = NO_SPAN  # the record outlives the span

    def _attributes(self, entry: JournalEntry, record: Record) -> dict[str, Value]:
        trace, request = entry.trace, entry.request
        told: dict[str, Value] = {
            semconv.OPERATION_NAME: entry.operation,
            semconv.PROVIDER_NAME: semconv.PROVIDER,
            semconv.REQUEST_MODEL: self._model,
            semconv.RESPONSE_MODEL: self._model,
            semconv.USAGE_INPUT_TOKENS: record.prompt_tokens,
            semconv.USAGE_OUTPUT_TOKENS: record.output_tokens,
            semconv.USAGE_CACHED_TOKENS: trace.cached_tokens,
            semconv.RETRIES: trace.retries,
        }
        if request is not None:
            params = request.params
            told |= {
                semconv.RESPONSE_ID: request.id,
                semconv.REQUEST_MAX_TOKENS: params.max_tokens,
                semconv.REQUEST_TEMPERATURE: params.temperature,
                semconv.REQUEST_TOP_P: params.top_p,
                semconv.REQUEST_TOP_K: params.top_k,
            }
        if record.times.ttft_s is not None:
            told[semconv.RESPONSE_TIME_TO_FIRST_TOKEN] = record.times.ttft_s
        if record.outcome == "ok":
            told[semconv.RESPONSE_FINISH_REASONS] = [record.reason]
        return told


def measure(trace: Trace) -> RequestTimes:
    """The times of a request whose watch has been stopped."""
    watch, gaps = trace.watch, trace.gaps
    return RequestTimes(
        stages={str(stage): seconds for stage, seconds in watch.seconds.items()},
        e2e_s=e2e(watch.start, watch.laps[-1].end),
        ttft_s=ttft(watch.start, trace.first_at) if trace.first_at else None,
        tpot_s=tpot(trace.first_at, trace.last_at, len(gaps) + 1),
        tpot_rest_s=tpot(trace.first_at + gaps[0], trace.last_at, len(gaps)) if gaps else None,
        prefill_wait_s=trace.prefill_wait_ms / 1000,
        prefill_compute_s=trace.prefill_compute_ms / 1000,
    )


def _record(entry: JournalEntry, outcome: str, reason: str, times: RequestTimes, missed: str | None) -> Record:
    request, trace = entry.request, entry.trace
    return Record(
        request_id=request.id if request else entry.request_id,
        at=entry.at,
        outcome=outcome,
        reason=reason,
        prompt_tokens=request.prompt_len if request else 0,
        output_tokens=request.output_len if request else 0,
        times=times,
        trace=trace,
        trace_id=trace.span.traceparent[3:35],
        slo_missed=missed,
        tenant=entry.tenant,
        choice=request.choice if request else 0,
        choices=request.family.size if request and request.family else 1,
    )


def _lap(lap: Lap, start: float) -> dict[str, Any]:
    return {"stage": lap.stage, "worker": lap.worker, "start": lap.start - start, "end": lap.end - start, "bypass": lap.bypass}


def _outcome(entry: JournalEntry, error: BaseException | None) -> tuple[str, str]:
    if entry.finish is not None:  # even if the client left after the last event
        return "ok", entry.finish
    if isinstance(error, BatonError):
        reason = error.reason
        begun = entry.request is not None and entry.request.made > 0
        if reason in REFUSALS and not begun:
            return "refused", reason.name
        if reason is Reason.CANCELLED:
            return "cancelled", reason.name
        return ("invalid" if 400 <= reason.value.http < 429 else "failed"), reason.name
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        if entry.trace.watch.laps[-1].end > entry.deadline - NEAR_DEADLINE_S:  # the client's side ended the call before ours did
            return "failed", Reason.DEADLINE.name
        return "cancelled", Reason.CANCELLED.name
    return "failed", Reason.INTERNAL.name
