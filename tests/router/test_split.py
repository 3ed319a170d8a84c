"""A split that does not happen is told: each planted misconfiguration raises the alarm with its reason, and nothing else does."""

from typing import Any

import pytest

from baton.cluster.config_router import SloConfig
from baton.cluster.handoff import Handoff
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from router.journal import Journal
from router.request import Request, Stopwatch, Trace
from router.split import LAST, LEAST, WORTH, Split, Wanted, path_of

NIXL, TCP = Handoff(transport="nixl", blocks=20), Handoff(transport="tcp", blocks=20)
LOST = Handoff(failure="TRANSFER_FAILED", recomputed_tokens=300)
TO_SPLIT = Wanted(split=True)


def trace(handoff: Handoff | None = None, bypass: str = "") -> Trace:
    made = Trace(Stopwatch(lambda: 0.0), bypasses=[bypass] if bypass else [])
    made.handoff = handoff or Handoff()
    return made


def alarm(wanted: Wanted, *traces: Trace, computed: int = 300, times: int = LEAST) -> str:
    split = Split(wanted)
    for one in traces * times:
        path = path_of(one)
        assert path is not None
        split.note(one, path, computed)
    return split.alarm


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        (trace(bypass="no prefill worker"), ["no prefill worker", "prefill.replicas"]),  # an empty pool, or wrong roles
        (trace(bypass="same worker"), ["same worker", "both roles"]),
        (trace(bypass="short"), ["short", "router.bypass_tokens"]),
        (trace(bypass="cached"), ["cached", "router.bypass_tokens"]),
        (trace(LOST), ["TRANSFER_FAILED", "kv.port"]),
    ],
)
def test_prompts_that_are_not_handed_over_raise_the_alarm(planted: Trace, says: list[str]) -> None:
    told = alarm(TO_SPLIT, planted)
    assert all(word in told for word in says) and f"{LEAST} of the last {LEAST}" in told
    assert alarm(TO_SPLIT, planted, times=LEAST - 1) == "", "too few to judge"
    assert alarm(TO_SPLIT, planted, trace(NIXL), trace(NIXL)) == "", "most are handed over"
    assert alarm(TO_SPLIT, planted, computed=WORTH - 1) == "", "not worth a handoff"
    assert alarm(Wanted(split=False), planted) == "", "colocated on purpose"


def test_another_transport_than_was_asked_for_raises_the_alarm() -> None:
    assert "tcp carries the KV, and nixl was asked for" in alarm(Wanted(True, "nixl"), trace(TCP))
    for wanted, used in (("nixl", NIXL), ("nixl", Handoff(transport="nixl_vram")), ("tcp", TCP), ("", TCP)):
        assert alarm(Wanted(True, wanted), trace(used)) == ""


def test_tcp_where_rdma_was_asked_for_raises_the_alarm() -> None:
    """Whatever the transport is called: NIXL may use UCX's TCP. A copy in memory needs no adapter, and of VRAM the lane is not known."""
    by_ucx = Handoff(transport="nixl", blocks=20, lane="tcp")
    for wanted, used, says in (
        (Wanted(True, "", rdma=True), TCP, "tcp carries the KV, and RDMA was asked for"),
        (Wanted(True, "nixl", rdma=True), TCP, "tcp carries the KV, and RDMA was asked for"),
        (Wanted(True, "nixl", rdma=True), by_ucx, "nixl over tcp carries the KV, and RDMA was asked for"),
    ):
        told = alarm(wanted, trace(used))
        assert says in told and "kv.rdma" in told and "baton doctor" in told
        assert alarm(wanted, trace(used), trace(Handoff(transport="nixl", lane="rdma"))) == "", "not most of them"
    for lane in ("memory", "rdma", ""):
        assert alarm(Wanted(True, rdma=True), trace(Handoff(transport="nixl_vram" if not lane else "nixl", lane=lane))) == ""
    assert alarm(Wanted(True), trace(by_ucx)) == "", "nobody asked"


def test_prompts_that_must_be_computed_whole_do_not_count() -> None:
    assert alarm(TO_SPLIT, trace(bypass="prompt_logprobs")) == ""


def test_the_alarm_ends_when_prompts_are_handed_over_again() -> None:
    split = Split(TO_SPLIT)
    for one in [trace(bypass="short")] * LAST + [trace(NIXL)] * (LAST // 2):
        path = path_of(one)
        assert path is not None
        split.note(one, path, 300)
    assert split.alarm == ""


def test_the_journal_counts_paths_and_tells_of_the_alarm_once(caplog: pytest.LogCaptureFixture) -> None:
    book = Book("router", model="toy")
    journal = Journal(book, Tracer(), "toy", SloConfig(), keep=1, wall_clock=lambda: 0.0, split=Split(TO_SPLIT))

    def end(**shaped: Any) -> None:
        with journal.open("text_completion", clock=lambda: 0.0) as entry:
            entry.trace.bypasses = [shaped["bypass"]] if "bypass" in shaped else []
            entry.trace.handoff = shaped.get("handoff", Handoff())
            entry.request = Request("r", [1] * 300, 300, SamplingParams(max_tokens=1), "", 1.0, entry.trace)
            entry.finish = "length"
        journal.sample(0, 0, None)

    for _ in range(2 * LEAST):
        end(bypass="short")
    shown = {(family.name, *series.labels.values()): series.value for family in book.families() for series in family.series}
    assert shown["baton_router_paths_total", "bypass", "short"] == 2 * LEAST and any(
        name[0] == "baton_router_split_alarm" and value == 1 for name, value in shown.items()
    )
    for _ in range(2 * LEAST + 1):
        end(handoff=NIXL)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "short" in told[0] and told[1].startswith("no longer: ") and "short" in told[1]
