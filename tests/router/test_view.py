"""The router's view of the cluster: members join, leave, restart or do not fit, and the count of the router's own work never drifts."""

from dataclasses import replace
from typing import Any

import pytest
from fake_workers import MODEL, answers, unusable
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.cluster.records import BlockEvent, Load, RoleName, WorkerRecord
from baton.moves import IllegalMove
from router.members import HEALTHS, PRESENCES, Health, Joined, Left, Member, Presence, Reincarnated
from router.served import Refused, Served
from router.view import ClusterView

TOKENS = "tokenizer"
KEY = b"k" * 16


def worker(name: str, **fields: Any) -> WorkerRecord:
    pool: RoleName = "prefill" if name.startswith("p") else "decode"
    return replace(
        WorkerRecord(name, pool, f"{name}:1", 1, "ready", 1, "host", MODEL, "model", TOKENS, 16, 1024, 100, "tcp", Load()), **fields
    )


def names(records: list[WorkerRecord]) -> list[str]:
    return [record.name for record in records]


def view_of(*records: WorkerRecord, now: float = 0.0, absent_s: float = 3.0) -> ClusterView:
    view = ClusterView({MODEL: TOKENS}, absent_s)
    view.update(records, now)
    return view


P0, D0, D1 = worker("p0"), worker("d0"), worker("d1")


def test_members_join_and_leave() -> None:
    view = ClusterView({MODEL: TOKENS})
    assert view.models[MODEL].served is None and view.update([], 0.0) == []
    assert view.update([P0, D0], 1.0) == [Joined(P0), Joined(D0)]
    assert view.update([P0, D0], 2.0) == []
    assert (
        names(view.prefill_workers()) == ["p0"] and names(view.decode_workers()) == ["d0"] and names(view.members.records()) == ["d0", "p0"]
    )
    assert view.models[MODEL].served == Served("model", 16, 1024) and view.members.record("d0") == D0 and view.members.find("d9") is None
    with pytest.raises(KeyError):
        view.members.record("d9")


def test_workers_that_rejoin_a_registry_that_lost_its_data_stay_members() -> None:
    view = view_of(P0, D0)
    assert view.update([], 1.0) == [] and names(view.decode_workers()) == ["d0"]
    assert view.update([D0], 2.9) == []
    assert view.needing_snapshot() == ["d0", "p0"]
    view.members.note_silence("p0", 1)
    assert view.update([D0], 3.9) == []
    assert view.update([D0], 4.0) == [Left(P0)] and view.members.find("p0") is None and view.needing_snapshot() == ["d0"]
    assert view.update([D0], 100.0) == []


def test_an_outage_of_the_registry_does_not_count_as_absence() -> None:
    """It was away for longer than a record lives, so its first answer is empty."""
    view = view_of(P0, D0)
    assert view.update([], 60.0) == [] and view.update([], 62.9) == []
    assert view.update([P0, D0], 63.0) == [] and view.update([], 63.1) == [], "the absence is counted from the start again"
    view.members.note_silence("d0", 1)
    assert view.update([], 66.0) == []
    assert view.update([], 66.2) == [Left(D0)]


def test_the_registry_alone_removes_no_worker() -> None:
    view = view_of(P0, D0)
    view.members.note_silence("d0", 1)
    view.members.note_answer("d0", 1, "ready", Load(), 1)
    for now in (1.0, 10.0, 100.0):
        assert view.update([P0], now) == [] and names(view.decode_workers()) == ["d0"]
    view.members.note_silence("d0", 2)  # reported for another process
    assert view.update([P0], 101.0) == []
    view.members.note_silence("d0", 1)
    assert view.update([P0], 102.0) == [Left(D0)]


def test_a_failure_before_the_absence_does_not_confirm_it() -> None:
    view = view_of(P0, D0)
    view.members.note_silence("d0", 1)
    assert view.update([P0], 1.0) == [] and view.update([P0], 9.0) == [] and unusable(view) == [D0]
    view.members.note_silence("d0", 1)
    assert view.update([P0], 9.1) == [Left(D0)]


def test_a_worker_that_drained_and_left_is_removed_immediately() -> None:
    view = view_of(P0, D0)
    draining = worker("d0", state="draining")
    view.update([P0, draining], 1.0)
    assert view.update([P0], 2.0) == [], "it still answers, and its streams finish"
    view.members.note_silence("d0", 1)
    assert view.update([P0], 2.3) == [Left(draining)]


def test_a_silent_worker_stays_while_the_registry_lists_it() -> None:
    view = view_of(P0, D0)
    view.members.note_silence("d0", 1)
    assert view.update([P0, D0], 100.0) == [] and unusable(view) == [D0]


def test_if_the_registry_alone_could_remove_workers_an_empty_answer_would_remove_all() -> None:
    """Negative control: only the registry counts, from the last time that it listed the members."""
    view = view_of(P0, D0, absent_s=0.0)
    for member in view.members._members.values():
        member.presence = Presence.GIVEN_UP
    assert view.update([], 0.1) == [Left(D0), Left(P0)]


@pytest.mark.parametrize("presence", Presence)
@pytest.mark.parametrize("event", ["listed", "missed", "silent", "answered", "leave"])
def test_a_member_leaves_only_when_it_is_given_up(presence: Presence, event: str) -> None:
    member = Member(D0, presence)
    if target := PRESENCES.get((presence, event)):
        member.note_presence(event)
        assert member.presence is target and (target is Presence.LEFT) is (event == "leave")
    else:
        with pytest.raises(IllegalMove, match=f"^member d0 is {presence.value}: '{event}' is not possible$"):
            member.note_presence(event)
        assert member.presence is presence and (presence is Presence.LEFT or event == "leave")


@pytest.mark.parametrize("health", Health)
@pytest.mark.parametrize("event", ["fail", "answer", "hang", "progress"])
def test_whether_it_hangs_and_whether_it_is_reachable_are_told_apart(health: Health, event: str) -> None:
    member = Member(D0, health=health)
    hung, reachable = member.hung, member.reachable
    if (health, event) in HEALTHS:
        member.note_health(event)
        assert member.hung is {"hang": True, "progress": False}.get(event, hung)
        assert member.reachable is {"fail": False, "answer": reachable or not hung}.get(event, reachable)
    else:
        with pytest.raises(IllegalMove, match=f"^member d0 is {health.value}: '{event}' is not possible$"):
            member.note_health(event)
        assert member.health is health and hung is (event == "hang"), "it hangs already, or it does not"


def test_a_hanging_worker_is_avoided() -> None:
    view = view_of(P0, D0, D1)
    assert view.members.mark_hung("d0", 1, True) and not view.members.mark_hung("d0", 1, True) and not view.members.mark_hung("d1", 9, True)
    assert names(view.decode_workers()) == ["d1"] and view.members.hung("d0") and not view.members.hung("d1")
    view.members.mark_hung("d1", 1, True)
    assert names(view.decode_workers()) == ["d0", "d1"], "a hanging worker is better than refusing every request"
    view.members.mark_hung("p0", 1, True)
    assert view.prefill_workers() == [], "the decode workers can compute prompts instead"
    for name in ("p0", "d0"):
        assert view.members.mark_hung(name, 1, False)
    assert names(view.prefill_workers() + view.decode_workers()) == ["p0", "d0"]


def test_a_worker_that_is_put_aside_is_used_before_one_that_hangs_and_after_all_others() -> None:
    view = view_of(P0, D0, D1)
    view.members.mark_ejected("d0", 1, "slow")
    view.members.mark_ejected("d1", 9, "another process")
    assert names(view.decode_workers()) == ["d1"] and (
        view.members.ejected("d0"),
        view.members.ejected("d1"),
        view.members.ejected("d9"),
    ) == ("slow", "", "")
    assert view.models[MODEL].pool("decode") == (("d0", 1), ("d1", 1)), "those aside are a part of the pool"
    view.members.mark_hung("d1", 1, True)
    assert names(view.decode_workers()) == ["d0"] and (view.state("d0"), view.state("d1")) == ("ejected", "hung")
    view.members.mark_down("d0", 1)
    assert (
        names(view.decode_workers()) == ["d1"] and view.models[MODEL].pool("decode") == (("d1", 1),) and view.state("d0") == "unreachable"
    )
    view.members.mark_ejected("p0", 1, "slow")
    assert view.prefill_workers() == [], "the decode workers can compute prompts instead"
    view.update([replace(P0, incarnation=2), D0, D1], 1.0)
    assert names(view.prefill_workers()) == ["p0"], "another process"


def test_answers_of_a_process_are_counted() -> None:
    view = view_of(D0)
    answers(view, "d0")
    answers(view, "d0")
    assert (view.members.answers(("d0", 1)), view.members.answers(("d0", 2)), view.members.answers(("d9", 1))) == (2, None, None)


def test_only_the_first_failure_of_a_process_is_news() -> None:
    view = view_of(D0)
    assert view.members.mark_down("d0", 1) and not view.members.mark_down("d0", 1) and not view.members.mark_down("d0", 2)
    answers(view, "d0")
    assert view.members.mark_down("d0", 1)


def test_a_worker_lost_while_hanging_returns_when_it_makes_progress() -> None:
    view = view_of(D0, D1)
    view.members.mark_hung("d0", 1, True)
    view.members.mark_down("d0", 1)
    view.members.note_answer("d0", 1, "ready", Load(), 1)  # its event loop still answers
    assert names(unusable(view)) == ["d0"]
    view.members.mark_hung("d0", 1, False)
    view.members.note_answer("d0", 1, "ready", Load(), 1)
    assert unusable(view) == []


def test_a_probe_reports_only_work_that_started_before_it_was_sent() -> None:
    view = view_of(P0, D0)
    view.members.start_decode("early", "d0", 100)
    epoch = view.members.next_epoch()  # the probe is sent
    view.members.start_decode("late", "d0", 10)
    assert view.members.unreported_decode_tokens("d0") == 110
    view.members.note_answer("d0", 1, "ready", Load(credit_tokens=5), epoch)
    assert view.members.unreported_decode_tokens("d0") == 10 and view.members.record("d0").load.credit_tokens == 5
    later = view.members.next_epoch()
    view.members.note_answer("d0", 1, "ready", Load(credit_tokens=5), later)  # the same load: it may have been measured before a long step
    assert view.members.unreported_decode_tokens("d0") == 10
    view.update([P0, D0], 1.0)  # the registry does not have the new load yet
    assert view.members.record("d0").load.credit_tokens == 5
    view.members.note_answer("d0", 1, "draining", Load(credit_tokens=5), later)
    assert view.decode_workers() == []


def test_what_the_registry_still_shows_does_not_replace_the_answer_to_a_probe() -> None:
    """A record is written about once a second, so it may show a load, a role or a readiness that is over."""
    view = view_of(P0, D0)
    busy = worker("d0", load=Load(credit_tokens=5), roles=("prefill",))
    view.members.note_answer("d0", 1, "ready", Load(credit_tokens=1600), 1, ("decode",))
    view.update([P0, busy], 1.0)
    assert view.members.record("d0").load.credit_tokens == 1600 and view.members.record("d0").roles == ("decode",)
    view.members.note_answer("d0", 1, "draining", Load(credit_tokens=1600), 2, ("decode",))
    view.update([P0, busy], 2.0)
    assert view.members.record("d0").state == "draining"
    view.members.note_silence("d0", 1)  # then the registry is all there is
    view.update([P0, busy], 3.0)
    assert (
        view.members.record("d0").load.credit_tokens == 5
        and view.members.record("d0").roles == ("prefill",)
        and view.members.record("d0").state == "draining"
    )


def test_a_new_process_replaces_the_old_one_of_the_same_name() -> None:
    view = view_of(D0)
    view.apply(BlockEvent("d0", 1, 1, "stored", (KEY,)))
    assert view.models[MODEL].index.overlap([KEY], 0.0) == {"d0": 1}
    view.members.mark_down("d0", 1)
    view.members.start_decode("r", "d0", 100)
    new = worker("d0", incarnation=2)
    assert view.update([new], 1.0) == [Reincarnated(D0, new)]
    assert names(view.decode_workers()) == ["d0"] and view.models[MODEL].index.overlap([KEY], 0.0) == {}
    assert view.members.unreported_decode_tokens("d0") == 0  # the work of the old process is lost
    view.members.end_decode("r")
    assert view.update([D0], 2.0) == [] and view.members.record("d0") == new  # the old process still writes its record


def test_a_lower_incarnation_may_join_when_the_higher_one_has_left() -> None:
    """Its host's clock was set back."""
    view = view_of(worker("d0", incarnation=9))
    assert view.update([D0], 2.0) == []
    view.members.note_silence("d0", 9)
    assert view.update([D0], 5.0) == [Left(worker("d0", incarnation=9))]
    assert view.update([D0], 5.1) == [Joined(D0)]


def test_a_worker_is_down_until_it_answers() -> None:
    view = view_of(D0, D1)
    view.members.mark_down("d0", 2)  # reported for another process
    view.members.mark_down("d9", 1)
    assert unusable(view) == []
    view.members.mark_down("d0", 1)
    view.update([D0, D1], 1.0)  # a heartbeat proves nothing
    assert names(unusable(view)) == ["d0"] and names(view.decode_workers()) == ["d1"]
    answers(view, "d0", 2)
    assert names(unusable(view)) == ["d0"]
    answers(view, "d0", 1)
    assert names(view.decode_workers()) == ["d0", "d1"]


def test_draining_workers_get_no_new_requests() -> None:
    view = view_of(P0, D0, D1)
    view.update([P0, worker("d0", state="draining"), D1], 1.0)
    assert names(view.decode_workers()) == ["d1"] and names(view.members.records()) == ["d0", "d1", "p0"]


@pytest.mark.parametrize("field", ["tokenizer_fingerprint", "model_fingerprint", "block_size", "max_model_len"])
@pytest.mark.parametrize("name", ["p9", "d9"])
def test_a_worker_that_does_not_fit_is_refused(field: str, name: str) -> None:
    other = worker(name, **{field: "other" if field.endswith("print") else 8})
    view = view_of(P0, D0)
    assert view.update([P0, D0, other], 1.0) == [Joined(other), Refused(name, field)]
    assert view.update([P0, D0, other], 2.0) == []  # reported only once
    assert (view.misfit(name) or "").startswith(f"{field} {getattr(other, field)} does not fit") and view.misfit("d0") is None
    assert name not in names(view.prefill_workers() + view.decode_workers()) and name in names(view.members.records())
    assert view.models[MODEL].served == Served("model", 16, 1024)


def test_a_worker_with_a_longer_context_fits() -> None:
    view = view_of(D0, worker("d1", max_model_len=4096))
    assert names(view.decode_workers()) == ["d0", "d1"] and view.models[MODEL].served == Served("model", 16, 1024)


def test_the_served_model_changes_when_no_worker_serves_it_anymore() -> None:
    new = worker("d1", model_fingerprint="new", block_size=32)
    view = view_of(P0, D0, new)
    assert names(view.decode_workers()) == ["d0"]
    draining = worker("d0", state="draining")
    assert view.update([P0, draining, new], 1.0) == [Refused("d0", "model_fingerprint"), Refused("p0", "model_fingerprint")]
    assert view.models[MODEL].served == Served("new", 32, 1024) and names(view.decode_workers()) == ["d1"]


def test_the_served_model_stays_while_there_is_no_decode_worker() -> None:
    view = view_of(P0, D0)
    view.update([P0], 9.0)
    view.members.note_silence("d0", 1)
    view.update([P0], 12.0)
    assert view.decode_workers() == [] and view.models[MODEL].served == Served("model", 16, 1024)
    strange = worker("d0", tokenizer_fingerprint="other", model_fingerprint="other")
    view.update([P0, strange], 10.0)
    assert view.models[MODEL].served == Served("model", 16, 1024)


def test_prefill_workers_alone_do_not_determine_the_served_model() -> None:
    view = view_of(worker("p0", model_fingerprint="other"))
    assert view.models[MODEL].served is None
    assert view.update([worker("p0", model_fingerprint="other"), D0], 1.0) == [Joined(D0), Refused("p0", "model_fingerprint")]


def test_work_that_a_report_does_not_show_yet_is_counted() -> None:
    view = view_of(D0)
    view.members.start_decode("early", "d0", 100)
    assert view.members.unreported_decode_tokens("d0") == 100
    view.update([D0], 0.25)
    view.update([D0], 0.3)
    assert view.members.unreported_decode_tokens("d0") == 100  # the same report as before
    view.members.start_decode("late", "d0", 10)
    view.update([worker("d0", load=Load(credit_tokens=5))], 0.5)
    # The record was written between the two updates: it includes what started before the first, but maybe not what started after it.
    assert view.members.unreported_decode_tokens("d0") == 10
    view.update([worker("d0", load=Load(credit_tokens=6))], 0.75)
    assert view.members.unreported_decode_tokens("d0") == 0
    view.members.start_decode("ended", "d0", 7)
    view.members.end_decode("ended")
    assert view.members.unreported_decode_tokens("d0") == 0 and view.members.decodes("d0") == 2


def test_prompts_of_other_routers_are_computed_meanwhile_and_own_prompts_count_exactly() -> None:
    view = view_of(P0, D0)
    members = view.members
    members.start_prefill("mine", "p0", 300)
    members.note_others("p0", 1, 1000, 5.0)
    members.note_others("p0", 2, 7000, 5.0)  # of another process of that name
    assert members.prefill_tokens("p0", 5.0) == 1300 == members.prefill_tokens("p0", 9.0)
    members.note_prefill("p0", 1, 0.002)
    assert members.prefill_tokens("p0", 6.0) == 300 + 500
    members.note_prefill("p0", 1, 0.010)  # the pace is a running mean
    assert members.prefill_tokens("p0", 6.0) == pytest.approx(300 + 1000 - 1 / 0.003)
    members.end_prefill("mine")
    assert members.prefill_tokens("p0", 60.0) == 0
    members.note_others("p0", 1, 40, 60.0)
    assert members.prefill_tokens("p0", 60.0) == 40


def test_a_request_that_moves_to_another_worker_no_longer_counts_at_the_first() -> None:
    view = view_of(D0, D1)
    view.members.start_decode("r", "d0", 100)
    view.members.start_decode("r", "d1", 100)
    assert (view.members.unreported_decode_tokens("d0"), view.members.unreported_decode_tokens("d1")) == (0, 100)


class LedgerMachine(RuleBasedStateMachine):
    """Requests start, end and end twice, and workers restart and leave. The tokens on a worker are always those of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.incarnations = {"d0": 1, "d1": 1}
        self.view = ClusterView({MODEL: TOKENS})
        self.work: dict[str, tuple[str, int, int]] = {}
        self.update()

    def update(self) -> None:
        self.now += 1.0
        self.view.update([worker(name, incarnation=number) for name, number in self.incarnations.items()], self.now)

    @precondition(lambda self: self.incarnations)
    @rule(request=st.sampled_from("abc"), data=st.data(), tokens=st.integers(1, 100))
    def start(self, request: str, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.incarnations)))
        self.view.members.start_decode(request, name, tokens)
        self.work[request] = (name, self.incarnations[name], tokens)

    @rule(request=st.sampled_from("abc"))
    def end(self, request: str) -> None:
        self.view.members.end_decode(request)
        self.work.pop(request, None)

    @precondition(lambda self: self.incarnations)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        self.incarnations[data.draw(st.sampled_from(sorted(self.incarnations)))] += 1
        self.update()

    @rule(name=st.sampled_from(["d0", "d1"]))
    def leave_or_come(self, name: str) -> None:
        gone = self.incarnations.pop(name, None)
        if gone is None:
            self.incarnations[name] = 100 + int(self.now)
        self.now += 5.0
        self.update()
        if gone is not None:
            self.view.members.note_silence(name, gone)
        self.now += 5.0
        self.update()

    @invariant()
    def tokens_are_those_of_the_requests(self) -> None:
        for name, number in self.incarnations.items():
            expected = sum(tokens for place, incarnation, tokens in self.work.values() if (place, incarnation) == (name, number))
            assert self.view.members.unreported_decode_tokens(name) == expected


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_nothing_is_kept_of_workers_that_left() -> None:
    view = view_of(D0)
    for number in range(50):
        name = f"d{number}"
        view.update([worker(name)], number * 10.0)
        for other in view.members.records():
            if other.name != name:
                view.members.note_silence(other.name, 1)
        view.members.start_decode("r", name, 1)
        view.members.end_decode("r")
    view.update([D0], 1000.0)
    view.members.note_silence("d49", 1)
    view.update([D0], 1010.0)
    assert names(view.members.records()) == ["d0"] and not view.members._decodes._tasks and not view.members._decodes._places
