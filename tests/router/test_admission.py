"""Admission against a model, and its bounds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.admission import Admission, Admitted, Queued, Refused

MAX_INFLIGHT, MAX_QUEUE = 3, 2
names = st.sampled_from("abcdefgh")


class AdmissionMachine(RuleBasedStateMachine):
    """The model is one list: the first three are served, and behind them the others stand by priority and arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(MAX_INFLIGHT, MAX_QUEUE)
        self.order: list[str] = []
        self.priority: dict[str, int] = {}

    @rule(name=names, priority=st.integers(-1, 1))
    def enter(self, name: str, priority: int) -> None:
        answer = self.admission.enter(name, priority)
        if name not in self.order and len(self.order) == MAX_INFLIGHT + MAX_QUEUE:
            assert answer == Refused(MAX_INFLIGHT, MAX_QUEUE)
            return
        if name not in self.order:
            self.priority[name] = priority
            place = len(self.order)
            while place > MAX_INFLIGHT and self.priority[self.order[place - 1]] > priority:
                place -= 1
            self.order.insert(place, name)
        place = self.order.index(name)
        assert answer == (Admitted() if place < MAX_INFLIGHT else Queued(place - MAX_INFLIGHT))

    @rule(name=names)
    def leave(self, name: str) -> None:
        before = self.order[:MAX_INFLIGHT]
        if name in self.order:
            self.order.remove(name)
        assert self.admission.leave(name) == [other for other in self.order[:MAX_INFLIGHT] if other not in before]

    @invariant()
    def conserves(self) -> None:
        self.admission.check()
        assert self.admission.inflight == min(len(self.order), MAX_INFLIGHT)
        assert self.admission.queued == max(0, len(self.order) - MAX_INFLIGHT)


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_no_queue() -> None:
    admission = Admission(1, 0)
    assert admission.enter("a") == Admitted() and admission.enter("b") == Refused(1, 0)
    assert admission.leave("b") == [] and admission.leave("a") == [] and admission.leave("a") == []
    assert admission.enter("b") == Admitted()


def test_one_that_tires_of_waiting_frees_its_place() -> None:
    admission = Admission(1, 2)
    for name in "abc":
        admission.enter(name)
    assert admission.leave("b") == []
    assert admission.enter("d") == Queued(1)
    assert admission.leave("a") == ["c"]


@pytest.mark.parametrize("bounds", [(0, 1), (1, -1)])
def test_impossible_bounds(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        Admission(*bounds)


def test_the_check_sees_what_it_is_for() -> None:
    """Negative control."""
    lost, doubled, crowded = (Admission(1, 1) for _ in range(3))
    lost._waiting["a"] = None
    doubled._inside.add("a")
    doubled._waiting["a"] = None
    crowded._inside.update("ab")
    for broken in (lost, doubled, crowded):
        with pytest.raises(RuntimeError):
            broken.check()
