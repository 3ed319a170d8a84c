"""The latencies of one record: the formulae of `baton.stages` on the client's clock. Pure functions; seconds.

A number that does not exist (the TPOT of one token) is None: never NaN, and never a 0 that looks like a very good result.
"""

import itertools

from baton import stages
from loadtest.record import Record

MAX_STAGE_GAP = 0.02  # share of the request's time that the stages may leave unexplained


def ttft(record: Record) -> float | None:
    """Time to first token, s, from the moment the request was DUE. None without a token.

    Counting from `sent` would leave out the generator's own lateness, and with it the worst queues, because a generator is late exactly
    when the system is overloaded: coordinated omission (Gil Tene, "How NOT to Measure Latency"; wrk2). vLLM's `bench serve` counts from
    `sent`.
    """
    return stages.ttft(record.scheduled, record.token_times[0]) if record.token_times else None


def itl(record: Record) -> tuple[float, ...]:
    """Inter-token latencies, s: every gap between successive tokens, one fewer than there are tokens. Source: vLLM `bench serve`."""
    return tuple(stages.itl(earlier, later) for earlier, later in itertools.pairwise(record.token_times))


def tpot(record: Record) -> float | None:
    """Time per output token after the first, s. None for fewer than two."""
    return stages.tpot(record.token_times[0], record.token_times[-1], record.output_tokens) if record.token_times else None


def e2e(record: Record) -> float | None:
    """End-to-end latency, s, from due to the last token ("e2el" in vLLM's keys). None without a token."""
    return stages.e2e(record.scheduled, record.token_times[-1]) if record.token_times else None


def lag(record: Record) -> float:
    """How late the generator sent the request, s. Part of the TTFT."""
    return record.sent - record.scheduled


def server_time(record: Record) -> float | None:
    """The request's time at the router, s: the sum of its consecutive stages. None if the server did not report them."""
    if not record.stages_ms:
        return None
    return sum(record.stages_ms.get(stage, 0.0) for stage in stages.STAGES) / 1000


def stage_sum_gap(record: Record) -> float | None:
    """|sum of the server's stages - E2E from `sent`| as a share of the latter. None if either is missing.

    It is the time that the stages do not explain: the network, the client, or a wrong stage.
    """
    told = server_time(record)
    seen = record.token_times[-1] - record.sent if record.token_times else 0.0
    return abs(told - seen) / seen if told is not None and seen > 0 else None


def ttft_parts(record: Record) -> dict[str, float] | None:
    """Where the TTFT went, s: `stages.ttft_parts`, and `client` for the rest: the generator's lag, the network, the client itself.

    None without a token or without stages.
    """
    first = ttft(record)
    if first is None or not record.stages_ms:
        return None
    parts = stages.ttft_parts({name: ms / 1000 for name, ms in record.stages_ms.items()})
    # After a retry, the stages hold more than the time before the first token.
    parts["client"] = max(0.0, first - sum(parts.values()))
    return parts
