"""A request that has ended, as `router.journal.Record.to_json` writes it."""

from typing import Any

HANDOFF = {
    "transport": "nixl", "blocks": 13, "bytes": 26624, "blocks_reused": 2, "digests_checked": 13, "blocks_early": 0,
    "recomputed_tokens": 0, "failure": "",
}  # fmt: skip
NO_HANDOFF = {**dict.fromkeys(HANDOFF, 0), "transport": "", "failure": ""}


def lap(stage: str, start: float, end: float, worker: str = "", bypass: bool = False) -> dict[str, Any]:
    return {"stage": stage, "worker": worker, "start": start, "end": end, "bypass": bypass}


def record(**change: Any) -> dict[str, Any]:
    whole = {
        "request_id": "req-1",
        "at": 1.8e9,
        "outcome": "ok",
        "reason": "length",
        "prompt_tokens": 199,
        "output_tokens": 21,
        "cached_tokens": 32,
        "cache": None,
        "retries": 0,
        "laps": [lap("queue", 0, 0.1), lap("prefill", 0.1, 0.4, "p0"), lap("transfer", 0.4, 0.5, "d0"), lap("decode", 0.5, 1.0, "d0")],
        "failures": [],
        "put_aside": [],
        "choice": 0,
        "choices": 1,
        "retry_refused": False,
        "bypasses": [],
        "handoff": HANDOFF,
        "connect": 0.0,
        "read": 0.02,
        "verify": 0.003,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "guesses": [],
        "trace_id": "",
        "tenant": "",
        "stages": {"queue": 0.1, "prefill": 0.3, "transfer": 0.1, "decode": 0.5},
        "slo_missed": None,
        "ttft": 0.4,
        "tpot": 0.03,
        "e2e": 1.0,
        "prefill_wait": 0.05,
        "prefill_compute": 0.2,
    }
    return {**whole, **change}
