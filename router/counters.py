"""The metrics of requests that have ended. What the router's own state shows is read at each scrape (`router.gauges`)."""

from collections.abc import Iterable, Sequence

from baton.cluster.metric_table import Number
from baton.cluster.metrics import Book
from router.predictions import CheckedPrediction
from router.request import Request, Trace
from router.slo import RequestTimes


class Counters:
    def __init__(self, book: Book) -> None:
        self._requests = book.counters("baton_router_requests_total")
        self.prompt_tokens = book.counter("baton_router_prompt_tokens_total")
        self.output_tokens = book.counter("baton_router_output_tokens_total")
        self.cached_tokens = book.counter("baton_router_cached_tokens_total")
        self._promised_tokens = book.counter("baton_router_promised_tokens_total")
        self._uncached = book.counters("baton_router_uncached_tokens_total")
        self._choices = book.counters("baton_router_choices_total")
        self._bypasses = book.counters("baton_router_bypasses_total")
        self._retries = book.counters("baton_router_retries_total")
        self._resumed = book.counter("baton_router_resumed_total")
        self._ttft = book.histogram("baton_router_time_to_first_token_seconds")
        self._itl = book.histogram("baton_router_inter_token_latency_seconds")
        self._tpot = book.histogram("baton_router_time_per_output_token_seconds")
        self._duration = book.histogram("baton_router_request_duration_seconds")
        self._stages = book.histograms("baton_router_stage_duration_seconds")
        self._prompt_length = book.histogram("baton_router_request_prompt_tokens")
        self._output_length = book.histogram("baton_router_request_output_tokens")
        self._predictions = book.histograms("baton_router_prediction_ratio")
        self._paths = book.counters("baton_router_paths_total")

    @property
    def outcomes(self) -> dict[str, Number]:
        """How many requests ended in each way."""
        outcomes: dict[str, Number] = {}
        for labels, counted in self._requests.items():
            outcomes[labels[0]] = outcomes.get(labels[0], 0) + counted.value
        return outcomes

    def follow(self, gaps: Sequence[float]) -> None:
        """Seconds between successive tokens: before the end, as they come."""
        self._itl.observe_all(gaps)

    def count(self, request: Request | None, trace: Trace, outcome: str, reason: str, times: RequestTimes) -> None:
        """A request has ended. None: it was not well-formed. Of one that was refused nothing but that is counted."""
        self._requests[outcome, reason].inc()
        if request is None or outcome == "refused":
            return
        self._count_prompt(request, trace)
        self.output_tokens.inc(request.made)
        for choice in trace.choices:
            self._choices[choice].inc()
        for why in trace.bypasses[trace.shared_bypasses :]:
            self._bypasses[why].inc()
        for why in trace.retry_reasons:
            self._retries[why].inc()
        self._resumed.inc(request.resumed > 0)
        if times.ttft_s is not None:
            self._ttft.observe(times.ttft_s)
        if outcome == "ok":
            self._time(request, times)

    def count_path(self, path: tuple[str, str]) -> None:
        """See `router.split.path_of`."""
        self._paths[path].inc()

    def count_predictions(self, predictions: Iterable[CheckedPrediction]) -> None:
        for prediction in predictions:
            self._predictions[prediction.of].observe(prediction.ratio)

    def _count_prompt(self, request: Request, trace: Trace) -> None:
        if request.choice == 0:  # the others have the same prompt
            self.prompt_tokens.inc(request.prompt_len)
            self._prompt_length.observe(request.prompt_len)
            self.cached_tokens.inc(trace.cached_tokens)
        if trace.uncached is not None:
            self._promised_tokens.inc(trace.uncached.promised)
            for cause, tokens in trace.uncached.causes:
                self._uncached[cause].inc(tokens)

    def _time(self, request: Request, times: RequestTimes) -> None:
        """Observes the times of a request that has ended well."""
        if times.tpot_s is not None:
            self._tpot.observe(times.tpot_s)
        self._duration.observe(times.e2e_s)
        self._output_length.observe(request.output_len)
        for stage, seconds in times.stages.items():
            if seconds:  # zeros of requests that skipped the stage would hide how long the others took
                self._stages[stage].observe(seconds)
