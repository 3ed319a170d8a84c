"""What the router believes: members come, go, restart and do not fit; our own work never drifts."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.cluster.records import BlockEvent, Load, WorkerRecord
from router.view import ClusterView, Joined, Left, Refused, Reincarnated, Served

TOKENS = "tokenizer"
KEY = b"k" * 16


def worker(name: str, **fields: Any) -> WorkerRecord:
    role = "prefill" if name.startswith("p") else "decode"
    return replace(
        WorkerRecord(name, role, f"{name}:1", 1, "ready", 1, "host", "small", "model", TOKENS, 16, 1024, 100, "tcp", Load()), **fields
    )


def names(records: list[WorkerRecord]) -> list[str]:
    return [record.name for record in records]


def view_of(*records: WorkerRecord, now: float = 0.0, absent_s: float = 3.0) -> ClusterView:
    view = ClusterView(TOKENS, absent_s)
    view.update(records, now)
    return view


P0, D0, D1 = worker("p0"), worker("d0"), worker("d1")


def test_members_join_and_leave() -> None:
    view = ClusterView(TOKENS)
    assert view.served is None and view.update([], 0.0) == []
    assert view.update([P0, D0], 1.0) == [Joined(P0), Joined(D0)]
    assert view.update([P0, D0], 2.0) == []
    assert names(view.prefill_workers()) == ["p0"] and names(view.decode_workers()) == ["d0"] and names(view.members()) == ["d0", "p0"]
    assert view.served == Served("model", 16, 1024) and view.record("d0") == D0 and view.find("d9") is None
    with pytest.raises(KeyError):
        view.record("d9")


def test_a_registry_that_lost_everything_takes_nobody_away_who_joins_again() -> None:
    view = view_of(P0, D0)
    assert view.update([], 1.0) == [] and names(view.decode_workers()) == ["d0"]
    assert view.update([D0], 2.9) == []
    assert view.index.needing_snapshot() == ["p0", "d0"]
    assert view.update([D0], 3.0) == [Left(P0)] and view.find("p0") is None and view.index.needing_snapshot() == ["d0"]
    assert view.update([D0], 100.0) == []


def test_without_patience_it_would() -> None:
    """Negative control: one empty answer of the registry ends every request."""
    assert view_of(P0, D0, absent_s=0.0).update([], 0.1) == [Left(D0), Left(P0)]


def test_a_new_process_of_the_same_name() -> None:
    view = view_of(D0)
    view.index.apply(BlockEvent("d0", 1, 1, "stored", (KEY,)))
    assert view.index.overlap([KEY], 0.0) == {"d0": 1}
    view.mark_down("d0", 1)
    view.start_decode("r", "d0", 100)
    new = worker("d0", incarnation=2)
    assert view.update([new], 1.0) == [Reincarnated(D0, new)]
    assert names(view.decode_workers()) == ["d0"] and view.index.overlap([KEY], 0.0) == {}
    assert view.unreported_decode_tokens("d0") == 0  # the old process took its work with it
    view.end_decode("r")
    assert view.update([D0], 2.0) == [] and view.record("d0") == new  # a ghost


def test_a_lower_number_gets_in_when_the_higher_one_is_gone() -> None:
    """A host whose clock was set back."""
    view = view_of(worker("d0", incarnation=9))
    assert view.update([D0], 2.0) == []
    assert view.update([D0], 3.0) == [Left(worker("d0", incarnation=9))]
    assert view.update([D0], 3.1) == [Joined(D0)]


def test_down_until_it_answers() -> None:
    view = view_of(D0, D1)
    view.mark_down("d0", 2)  # of another process
    view.mark_down("d9", 1)
    assert view.down_workers() == []
    view.mark_down("d0", 1)
    view.update([D0, D1], 1.0)  # a heartbeat proves nothing
    assert names(view.down_workers()) == ["d0"] and names(view.decode_workers()) == ["d1"]
    view.mark_up("d0", 2)
    assert names(view.down_workers()) == ["d0"]
    view.mark_up("d0", 1)
    assert names(view.decode_workers()) == ["d0", "d1"]


def test_draining_workers_get_nothing_new() -> None:
    view = view_of(P0, D0, D1)
    view.update([P0, worker("d0", state="draining"), D1], 1.0)
    assert names(view.decode_workers()) == ["d1"] and names(view.members()) == ["d0", "d1", "p0"]


@pytest.mark.parametrize("field", ["tokenizer_fingerprint", "model_fingerprint", "block_size", "max_model_len"])
@pytest.mark.parametrize("name", ["p9", "d9"])
def test_who_does_not_fit(field: str, name: str) -> None:
    other = worker(name, **{field: "other" if field.endswith("print") else 8})
    view = view_of(P0, D0)
    assert view.update([P0, D0, other], 1.0) == [Joined(other), Refused(name, field)]
    assert view.update([P0, D0, other], 2.0) == []  # said once
    assert name not in names(view.prefill_workers() + view.decode_workers()) and name in names(view.members())
    assert view.served == Served("model", 16, 1024)


def test_a_worker_that_can_hold_more_fits() -> None:
    view = view_of(D0, worker("d1", max_model_len=4096))
    assert names(view.decode_workers()) == ["d0", "d1"] and view.served == Served("model", 16, 1024)


def test_the_served_model_changes_when_nobody_serves_it_any_more() -> None:
    new = worker("d1", model_fingerprint="new", block_size=32)
    view = view_of(P0, D0, new)
    assert names(view.decode_workers()) == ["d0"]
    draining = worker("d0", state="draining")
    assert view.update([P0, draining, new], 1.0) == [Refused("d0", "model_fingerprint"), Refused("p0", "model_fingerprint")]
    assert view.served == Served("new", 32, 1024) and names(view.decode_workers()) == ["d1"]


def test_the_served_model_stays_while_there_is_no_decode_worker() -> None:
    view = view_of(P0, D0)
    view.update([P0], 9.0)
    assert view.decode_workers() == [] and view.served == Served("model", 16, 1024)
    strange = worker("d0", tokenizer_fingerprint="other", model_fingerprint="other")
    view.update([P0, strange], 10.0)
    assert view.served == Served("model", 16, 1024)


def test_prefill_workers_alone_fix_nothing() -> None:
    view = view_of(worker("p0", model_fingerprint="other"))
    assert view.served is None
    assert view.update([worker("p0", model_fingerprint="other"), D0], 1.0) == [Joined(D0), Refused("p0", "model_fingerprint")]


def test_work_that_a_report_does_not_show_yet() -> None:
    view = view_of(D0)
    view.start_decode("early", "d0", 100)
    assert view.unreported_decode_tokens("d0") == 100
    view.update([D0], 0.25)
    view.update([D0], 0.3)
    assert view.unreported_decode_tokens("d0") == 100  # the same report as before
    view.start_decode("late", "d0", 10)
    view.update([worker("d0", load=Load(credit_tokens=5))], 0.5)
    # Written between the two updates: it shows what started before the first, and perhaps not what started after it.
    assert view.unreported_decode_tokens("d0") == 10
    view.update([worker("d0", load=Load(credit_tokens=6))], 0.75)
    assert view.unreported_decode_tokens("d0") == 0
    view.start_decode("ended", "d0", 7)
    view.end_decode("ended")
    assert view.unreported_decode_tokens("d0") == 0 and view.decode_tokens("d0") == 110


def test_prompts_of_other_routers_count_and_ours_count_once() -> None:
    view = view_of(P0, D0)
    view.start_prefill("mine", "p0", 300)
    view.update([worker("p0", load=Load(waiting_tokens=1000)), D0], 0.25)
    assert view.prefill_tokens("p0") == 1000
    view.end_prefill("mine")
    assert view.prefill_tokens("p0") == 700  # at once, not with the next report
    view.start_prefill("next", "p0", 50)
    assert view.prefill_tokens("p0") == 750
    view.end_prefill("next")
    view.update([worker("p0", load=Load(waiting_tokens=50)), D0], 0.5)  # a report from when `next` was waiting
    assert view.prefill_tokens("p0") == 0


def test_a_request_that_goes_elsewhere_leaves_the_first_place() -> None:
    view = view_of(D0, D1)
    view.start_decode("r", "d0", 100)
    view.start_decode("r", "d1", 100)
    assert (view.decode_tokens("d0"), view.decode_tokens("d1")) == (0, 100)


class LedgerMachine(RuleBasedStateMachine):
    """Whatever starts, ends, ends twice, restarts or leaves: the tokens on a worker are those of the requests on it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.incarnations = {"d0": 1, "d1": 1}
        self.view = ClusterView(TOKENS)
        self.work: dict[str, tuple[str, int, int]] = {}
        self.update()

    def update(self) -> None:
        self.now += 1.0
        self.view.update([worker(name, incarnation=number) for name, number in self.incarnations.items()], self.now)

    @precondition(lambda self: self.incarnations)
    @rule(request=st.sampled_from("abc"), data=st.data(), tokens=st.integers(1, 100))
    def start(self, request: str, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.incarnations)))
        self.view.start_decode(request, name, tokens)
        self.work[request] = (name, self.incarnations[name], tokens)

    @rule(request=st.sampled_from("abc"))
    def end(self, request: str) -> None:
        self.view.end_decode(request)
        self.work.pop(request, None)

    @precondition(lambda self: self.incarnations)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        self.incarnations[data.draw(st.sampled_from(sorted(self.incarnations)))] += 1
        self.update()

    @rule(name=st.sampled_from(["d0", "d1"]))
    def leave_or_come(self, name: str) -> None:
        if self.incarnations.pop(name, None) is None:
            self.incarnations[name] = 100 + int(self.now)
        self.now += 5.0
        self.update()
        self.now += 5.0
        self.update()

    @invariant()
    def tokens_are_those_of_the_requests(self) -> None:
        for name, number in self.incarnations.items():
            expected = sum(tokens for place, incarnation, tokens in self.work.values() if (place, incarnation) == (name, number))
            assert self.view.decode_tokens(name) == expected


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_nothing_stays_of_workers_that_left() -> None:
    view = view_of(D0)
    for number in range(50):
        name = f"d{number}"
        view.update([worker(name)], number * 10.0)
        view.start_decode("r", name, 1)
        view.end_decode("r")
    view.update([D0], 1000.0)
    view.update([D0], 1010.0)
    assert names(view.members()) == ["d0"] and not view._decodes._tasks and not view._decodes._places and not view._decodes._ended
