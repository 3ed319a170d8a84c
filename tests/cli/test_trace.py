"""What `baton trace` draws."""

from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from ended_request import NO_HANDOFF, lap, record
from rich.console import Console

from baton.cli.trace import LIST_BAR_WIDTH, draw, draw_list
from baton.cli.view import BAR_WIDTH, MARKS, bar, guessed
from baton.client import Token


def drawn(told: dict[str, Any]) -> list[str]:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(draw(told))
    return capture.get().splitlines()


def bars(lines: list[str]) -> list[tuple[str, int, int]]:
    """(stage, where its bar begins, where it ends), in columns of the timeline."""
    offset = lines[1].index("█")  # the first stage begins where the timeline begins
    return [(line.split()[0], line.index("█") - offset, line.rindex("█") + 1 - offset) for line in lines if "█" in line]


def test_stages_follow_each_other_without_gaps() -> None:
    lines = drawn(record())
    told = bars(lines)
    assert [stage for stage, _, _ in told] == ["queue", "prefill", "transfer", "decode"]
    for (_, _, end), (_, start, _) in pairwise(told):
        assert start == end, "no gap, no overlap"
    assert told[0][1] == 0 and told[-1][2] == BAR_WIDTH
    assert told[-1][2] - told[-1][1] == BAR_WIDTH / 2
    assert lines[0].startswith("req-1") and "ok (length)" in lines[0]
    assert "p0: waited 50.0, computed 200.0" in lines[2]
    assert "d0: nixl, 13 blocks, 26.0 KiB, 2 already there; read 20.0, verified 3.0" in lines[3]
    assert "d0: 30.00 ms a token" in lines[4] and "500.0 ms" in lines[4]
    assert lines[5] == "1000.0 ms · first token after 400.0 ms · prompt 199 tokens (32 cached) · output 21"


def test_accepted_and_rejected_guesses_are_drawn_step_by_step() -> None:
    lines = drawn(record(drafted_tokens=9, accepted_tokens=5, guesses=[3, 1, 0, 3, 2, 0]))
    assert lines[5] == "███░ ░░░ ██ 5 of 9 guesses right"
    many = drawn(record(drafted_tokens=800, accepted_tokens=800, guesses=[8, 0] * 100))[5]
    assert many == "████████ " * 10 + "… 800 of 800 guesses right", "no wider than the screen"
    assert not any("guesses" in line for line in drawn(record()))


def test_text_shows_what_was_guessed_and_what_was_corrected() -> None:
    tokens = [Token(0, 1, "a"), Token(1, 2, "b", guessed=True), Token(2, 3, "c", rejected=2), Token(3, 4, "d", guessed=True, rejected=1)]
    assert [guessed(token) for token in tokens] == ["", "green", "red underline", "green"]


def test_it_is_told_why_tokens_were_computed() -> None:
    causes = [{"cause": "evicted", "tokens": 96}, {"cause": "changed", "tokens": 64}, {"cause": "partial", "tokens": 7}]
    cache = {"promised_tokens": 32, "reachable_tokens": 48, "uncached": causes, "holder": "decode-1"}
    cache |= {"changed_at": 128, "changed_message": 2}
    line = "computed: 96 evicted, 64 changed, 7 partial · promised 32, reachable 48 at decode-1 · changed at token 128, in message 2"
    assert drawn(record(cache=cache))[5] == line and not any(line.startswith("computed") for line in drawn(record()))


def test_a_failure_is_drawn_where_it_happened() -> None:
    laps = [lap("queue", 0, 0.1), lap("prefill", 0.1, 0.5, "p0"), lap("prefill", 0.5, 1.0, "p1")]
    failures = [{"at": 0.5, "worker": "p0", "reason": "WORKER_LOST"}]
    lines = drawn(record(laps=laps, failures=failures, retries=1, outcome="failed", reason="RETRIES_SPENT", trace_id="ab" * 16, ttft=None))
    assert [line.split()[0] for line in lines[1:5]] == ["queue", "prefill", "✗", "prefill"]
    (failure,) = (line for line in lines if "✗" in line)
    assert "p0: WORKER_LOST" in failure and failure.index("✗") - lines[1].index("█") == BAR_WIDTH // 2
    assert "failed (RETRIES_SPENT)" in lines[0] and "ab" * 16 in lines[0]
    assert "1 retry" in lines[-1] and "first token" not in lines[-1]
    first, second = (line for line in lines if line.split()[0] == "prefill")
    assert "waited" not in first and "p1: waited" in second, "times that cover all attempts are shown once"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bypasses": ["short"], "laps": [lap("prefill", 0.0, 1.0, "d0", bypass=True)]}, "d0 itself (short)"),
        ({"tenant": "shop"}, "tenant shop"),
        ({"handoff": NO_HANDOFF}, "d0: no KV moved"),
        ({"connect": 0.18}, "connected 180.0, read 20.0"),
        (
            {"handoff": {**NO_HANDOFF, "failure": "DIGEST_MISMATCH", "recomputed_tokens": 199}},
            "d0: not used (DIGEST_MISMATCH); 199 tokens recomputed",
        ),
        ({"slo_missed": "prefill_wait"}, "missed its objectives because of: prefill_wait"),
        ({"put_aside": ["d1", "p0"]}, "put aside: d1, p0"),
        ({"choice": 2, "choices": 4}, "choice 2 of 4, from one prompt"),
        ({"retry_refused": True}, "not tried again: the retry budget was spent"),
        ({"tpot": None}, "500.0 ms  d0"),
        ({"request_id": "", "laps": [lap("queue", 0.0, 0.0)], "e2e": 0.0, "ttft": None}, "(no id)"),
    ],
)
def test_other_details_are_shown(change: dict[str, Any], told: str) -> None:
    assert any(told in line for line in drawn(record(**change)))


def test_markup_in_an_id_is_printed_verbatim() -> None:
    assert drawn(record(request_id="[red]x[/]"))[0].startswith("[red]x[/]")


def test_the_bar_of_a_stage_that_took_any_time_is_visible() -> None:
    assert bar(0.5, 0.5, "red").plain.count("█") == 0
    assert bar(0.5, 0.5001, "red").plain.count("█") == 1
    assert all(len(bar(start / 100, 1.0, "red").plain) == BAR_WIDTH for start in range(100))


NOW = datetime.fromtimestamp(1.8e9)


def listed(*records: dict[str, Any], width: int = 160, matched: int = 0) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(draw_list(list(records), matched or len(records), NOW))
    return capture.get().splitlines()


def test_a_list_has_a_line_for_each_request_with_its_times() -> None:
    yesterday = record(request_id="old", at=1.8e9 - 86400.0, outcome="failed", reason="RETRIES_SPENT", ttft=None, retries=3, tenant="shop")
    lines = listed(record(), yesterday, matched=512)
    assert lines[0].split() == [
        "request", "at", "tenant", "ended", "stages", "total", "TTFT", "queue", "prefill", "transfer", "decode", "tokens", "retries",
    ]  # fmt: skip
    first = lines[1].split()
    assert first[:3] == ["req-1", NOW.strftime("%H:%M:%S"), "length"]
    assert "1.00 s 400 ms 100 ms 300 ms 100 ms 500 ms 199 → 21" in " ".join(first)
    assert "old" in lines[2] and (NOW - timedelta(days=1)).strftime("%Y-%m-%d %H:%M:%S") in lines[2]
    assert "shop" in lines[2] and "failed: RETRIES_SPENT" in lines[2] and lines[2].rstrip().endswith("3")
    assert "2 of 512" in lines[3] and all(kind in lines[3] for kind in MARKS)


def test_all_bars_of_a_list_have_one_scale() -> None:
    slow = record(request_id="slow", e2e=8.0, laps=[lap("queue", 0, 8.0)])
    quick, long = (sum(line.count(mark) for mark in MARKS.values()) for line in listed(record(), slow)[1:3])
    assert (quick, long) == (LIST_BAR_WIDTH // 8, LIST_BAR_WIDTH)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_list_fits_any_terminal(width: int) -> None:
    told = listed(record(request_id="req-0123456789abcdef", tenant="shop", retries=2), width=width)
    assert max(map(len, told)) <= width
    for part in ("req-0123456789abcdef", "shop", "length", "1.00 s", "400 ms", "199 → 21"):
        assert part in " ".join(" ".join(told).split()), part


def test_an_empty_list_says_so() -> None:
    assert listed() == ["no request that has ended matches"]
