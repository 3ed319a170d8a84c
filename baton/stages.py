"""The stages of a request, and every formula on its times that both the router and the load test need.

The router applies them to its own clock, the load test to the client's. All arguments of a call and its result have the same unit.
Standard library only, because processes that never load numpy or gRPC import this file.
"""

from collections.abc import Mapping
from typing import Literal, get_args

Stage = Literal["queue", "prefill", "transfer", "decode"]
STAGES: tuple[Stage, ...] = get_args(Stage)  # consecutive: they add up to the request's time at the router
PREFILL_PARTS = ("prefill_wait", "prefill_compute")
TRANSFER_PARTS = ("connect", "read", "verify")
# All times that an answer reports, in the order of a request's life.
TOLD = ("queue", "prefill", *PREFILL_PARTS, "transfer", *TRANSFER_PARTS, "decode")
TTFT_PARTS = ("queue", *PREFILL_PARTS, "prefill")


def ttft(due: float, first: float) -> float:
    """Time to first token: from the moment the request was due (at the router: arrived) to its first token."""
    return first - due


def e2e(due: float, last: float) -> float:
    """End-to-end latency: from the moment the request was due to its last token (at the router: to the end of its answer)."""
    return last - due


def itl(earlier: float, later: float) -> float:
    """Inter-token latency: the gap between two successive tokens."""
    return later - earlier


def tpot(first: float, last: float, tokens: int) -> float | None:
    """Time per output token after the first: (E2E - TTFT) / (tokens - 1). None for fewer than two tokens.

    Source: vLLM `bench serve`. TTFT 200 ms, E2E 2200 ms, 50 tokens: 2000 / 49 = 40.8 ms.
    """
    return (last - first) / (tokens - 1) if tokens > 1 else None


def ttft_parts(spent: Mapping[str, float]) -> dict[str, float]:
    """What the server contributed to the TTFT, by the names in TTFT_PARTS. `spent`: time by the names in TOLD; absent ones are 0.

    `prefill` is what the other two parts leave of the prefill stage. After a handoff, that is the call to the prefill worker. After a
    bypass, it is the whole stage, because the decode worker does not distinguish waiting from computing.
    """
    parts = {name: spent.get(name, 0.0) for name in TTFT_PARTS}
    parts["prefill"] = max(0.0, parts["prefill"] - sum(parts[name] for name in PREFILL_PARTS))
    return parts


def largest(parts: Mapping[str, float]) -> str:
    """The part to blame."""
    return max(parts, key=lambda part: parts[part])


def slow_tokens_because(transfer: float, holds_without_handoff: bool) -> Stage:
    """The stage to blame for slow tokens. The KV moves between tokens 0 and 1: the transfer is to blame if only that gap was too long."""
    return "transfer" if transfer and holds_without_handoff else "decode"
