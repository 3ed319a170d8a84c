"""`baton top`: what it displays, the rates between two snapshots, and that it survives the loss of the router."""

import os
import pty
import termios
from itertools import groupby
from typing import Any

import grpc
import pytest
from ended_request import lap, record
from rich.console import Console, RenderableType

from baton.cli import top
from baton.cli.view import MARKS

WORKER = {
    "name": "decode-0", "pool": "decode", "state": "ready", "incarnation": 1, "kv_blocks": 100, "transport": "nixl", "running": 2,
    "waiting": 1, "free_blocks": 50, "credit_tokens": 1, "cached_blocks": 7, "leases": 3, "waiting_tokens": 0, "blocks_in_use": 50,
    "requests": {"decode": 11, "bypass": 2}, "silent": 0.0, "restarting": False,
}  # fmt: skip
REQUEST = {
    "request_id": "req-9", "stage": "decode", "worker": "decode-0", "prefill_worker": "prefill-0", "decode_worker": "decode-0",
    "prompt_tokens": 199, "output_tokens": 5, "cached_tokens": 0, "retries": 0, "age": 1.25, "bypass": False,
}  # fmt: skip
TOTALS = {
    "outcomes": {"ok": 1},
    "prompt_tokens": 200,
    "output_tokens": 100,
    "cached_tokens": 50,
    "met": 1,
    "handoffs": 1,
    "handoff_bytes": 0,
}


def snapshot(clock: float = 0.0, totals: dict[str, Any] | None = None, **change: Any) -> dict[str, Any]:
    whole = {
        "clock": clock,
        "model": "tale",
        "router": {"inflight": 1, "queued": 0, "registry": "reachable"},
        "workers": [WORKER],
        "unlisted": {},
        "requests": [REQUEST],
        "recent": [record(request_id="req-1")],
        "errors": [],
        "totals": {**TOTALS, **(totals or {})},
        "slo": {"objectives": {}, "attainment": None},
        "routers": [{"name": "router-0"}],
    }
    return {**whole, **change}


def text(shown: RenderableType) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_the_display_shows_workers_and_requests() -> None:
    told = text(top.draw(snapshot(), {}))
    for part in (
        "tale",
        "1 in flight",
        "cached 25 %",
        "decode-0",
        "ready",
        "50 %",
        "11 decode 2 bypass",
        "req-9",
        "prefill-0",
        "req-1",
        "199 → 21",
    ):
        assert part in told
    assert "tokens/s" not in told, "a single snapshot has no rate"


def test_the_display_shows_failures() -> None:
    error = {
        "request_id": "req-3",
        "at": 0.0,
        "outcome": "failed",
        "reason": "RETRIES_SPENT",
        "worker": "decode-1",
        "count": 8,
        "requests": 1,
    }
    gone = {**WORKER, "state": "gone", "silent": 12.4, "restarting": True}
    router = {"inflight": 0, "queued": 0, "registry": "away"}
    failed = record(outcome="failed", reason="RETRIES_SPENT", ttft=None)
    told = text(top.draw(snapshot(workers=[gone], errors=[error], router=router, recent=[failed]), {}))
    for part in ("lost 12 s, restarting", "registry away", "RETRIES_SPENT (8), last", "decode-1 req-3", "failed: RETRIES_SPENT"):
        assert part in told


@pytest.mark.parametrize("width", [40, 80, 160])
def test_nothing_is_truncated_at_any_width(width: int) -> None:
    """Anything that does not fit beside the rest is shown below it."""
    now = snapshot(requests=[{**REQUEST, "request_id": "req-0123456789abcdef"}])
    console = Console(width=width)
    with console.capture() as capture:
        console.print(top.draw(now, {}))
    told = capture.get()
    assert "…" not in told and max(map(len, told.splitlines())) <= width
    for part in ("decode-0", "ready", "50 %", "req-0123456789abcdef", "1.2 s", "199 → 21", "req-1"):
        assert part in " ".join(told.split()), (part, told)


def test_rates_are_computed_between_two_snapshots() -> None:
    before, now = snapshot(10.0), snapshot(12.0, {"output_tokens": 300, "met": 5, "handoff_bytes": 4096})
    assert top.rates(before, now)["output_tokens"] == 100 and top.rates(before, now)["met"] == 2
    told = text(top.draw(now, top.rates(before, now)))
    assert "completed 2.00/s" in told and "100.0 tokens/s" in told and "KV 2.0 KiB/s" in told
    judged = snapshot(slo={"objectives": {"ttft": 1.0}, "attainment": 0.97})
    assert "goodput" in text(top.draw(judged, top.rates(before, now))) and "SLO 97 %" in text(top.draw(judged, {}))
    assert top.rates(now, now) == {}


def test_no_rate_spans_a_restart_of_the_router() -> None:
    """The totals of the new router start from zero, so no rate is computed across the restart."""
    looks = iter([snapshot(10.0), snapshot(11.0, {"output_tokens": 200}), None, snapshot(1.0, {"output_tokens": 3}), StopIteration()])
    shown: list[str] = []

    class Away(grpc.RpcError):  # type: ignore[misc]
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

    def look() -> dict[str, Any]:
        told = next(looks)
        if told is None:
            raise Away
        if isinstance(told, StopIteration):
            raise KeyboardInterrupt
        return told

    with pytest.raises(KeyboardInterrupt):
        top.watch(look, lambda drawn: shown.append(text(drawn)), lambda: False)
    assert ["tokens/s" in one for one in shown] == [False, True, True, False]
    assert "does not answer: UNAVAILABLE" in shown[2] and "100.0 tokens/s" in shown[2]


def test_without_colours_the_stages_of_a_bar_are_told_apart_and_a_slow_request_is_longer() -> None:
    fast = record(request_id="fast", e2e=0.25, laps=[lap("queue", 0, 0.125), lap("decode", 0.125, 0.25, "d0")])
    slow = record(
        request_id="slow", laps=[lap("queue", 0, 0.5), lap("prefill", 0.5, 0.75, "d0", bypass=True), lap("decode", 0.75, 1, "d0")]
    )
    lines = text(top.draw(snapshot(recent=[fast, slow]), {})).splitlines()
    [quick] = [line.split()[1] for line in lines if line.startswith("fast")]
    [long] = [line.split()[1] for line in lines if line.startswith("slow")]
    assert len(long) == 4 * len(quick) == top.RECENT_BAR_WIDTH
    assert [mark for mark, _ in groupby(long)] == [MARKS["queue"], MARKS["bypass"], MARKS["decode"]] and len({*MARKS.values()}) == len(
        MARKS
    )
    assert any("queue" in line and "bypass" in line and MARKS["transfer"] in line for line in lines), "a legend"


def test_a_large_pool_is_listed_in_part() -> None:
    assert "936 more" in text(top.draw(snapshot(unlisted={"decode": 936}), {}))


@pytest.mark.parametrize(("typed", "leaves"), [(b"q", True), (b"xyzQ", True), (b"xyz", False), (b"", False)])
def test_q_ends_the_wait_and_no_other_key_does(typed: bytes, leaves: bool) -> None:
    master, keyboard = pty.openpty()
    try:
        before = termios.tcgetattr(keyboard)
        with top.pausing(keyboard) as pause:
            os.write(master, typed)
            assert pause(30.0 if leaves else 0.05) is leaves
        assert termios.tcgetattr(keyboard) == before, "the terminal is as it was"
    finally:
        os.close(master)
        os.close(keyboard)


def test_without_a_keyboard_top_goes_on() -> None:
    reader, writer = os.pipe()
    try:
        with top.pausing(reader) as pause:
            os.write(writer, b"q")
            assert pause(0.0) is False
    finally:
        os.close(reader)
        os.close(writer)
