"""Admission compared with a model, its bounds, and its behavior under overload."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router import admission as rules
from router.admission import (
    FLOODED,
    IDLE,
    INTERVAL_S,
    SHARE,
    Admission,
    Admitted,
    Due,
    Elsewhere,
    NotAdmitted,
    Overload,
    Queued,
    _Waiter,
    enough,
    share,
)
from router.pace import Pace

MAX_INFLIGHT, MAX_QUEUE = 3, 2
names = st.sampled_from("abcdefgh")


class AdmissionMachine(RuleBasedStateMachine):
    """The model is one list: the first three requests are served, and the others wait behind them by priority and then by arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(MAX_INFLIGHT, MAX_QUEUE)
        self.order: list[str] = []
        self.priority: dict[str, int] = {}

    @rule(name=names, priority=st.integers(-1, 1))
    def enter(self, name: str, priority: int) -> None:
        answer = self.admission.enter(name, priority)
        if name not in self.order and len(self.order) == MAX_INFLIGHT + MAX_QUEUE:
            assert answer == NotAdmitted(MAX_INFLIGHT, MAX_QUEUE)
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


def test_routers_share_the_places_and_the_queue() -> None:
    """What is free, and an equal part in any case: a router that had everything gives back what another one needs."""
    assert share(10, 0, 1) == 10 and share(10, 7, 2) == 5 and share(10, 2, 2) == 8 and share(10, 10, 3) == 4 and share(0, 0, 2) == 0
    admission = Admission(max_inflight=8, max_queue=4)
    admission.elsewhere = Elsewhere(routers=2, inflight=1, queued=0)
    admission.resize(6)
    assert (admission.places, admission.room) == (5, 4)
    admission.elsewhere = Elsewhere(routers=2, inflight=6, queued=4)
    admission.resize(6)
    assert (admission.places, admission.room) == (3, 2)
    answers = [admission.enter(str(i)) for i in range(6)]
    assert [type(answer) for answer in answers] == [Admitted] * 3 + [Queued] * 2 + [NotAdmitted]
    admission.elsewhere = Elsewhere()
    assert admission.resize(6) == ["3", "4"], "the other router is gone"
    admission.check()


def test_without_a_queue_requests_beyond_the_places_are_refused() -> None:
    admission = Admission(1, 0)
    assert admission.enter("a") == Admitted() and admission.enter("b") == NotAdmitted(1, 0)
    assert admission.leave("b") == [] and admission.leave("a") == [] and admission.leave("a") == []
    assert admission.enter("b") == Admitted()


def test_a_request_that_stops_waiting_frees_its_place() -> None:
    admission = Admission(1, 2)
    for name in "abc":
        admission.enter(name)
    assert admission.leave("b") == []
    assert admission.enter("d") == Queued(1)
    assert admission.leave("a") == ["c"]


@pytest.mark.parametrize("bounds", [(0, 1), (1, -1)])
def test_impossible_bounds_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        Admission(*bounds)


def test_the_check_detects_broken_states() -> None:
    """Negative control."""
    lost, doubled, crowded, miscounted, forgotten = (Admission(1, 1) for _ in range(5))
    lost._waiting["a"] = _Waiter(0, 0.0, Due(), 1, 1)
    doubled._inside["a"] = doubled.inflight = 1
    doubled._waiting["a"] = _Waiter(0, 0.0, Due(), 1, 1)
    crowded._inside |= {"a": 1, "b": 1}
    crowded.inflight = 2
    miscounted.enter("a")
    miscounted.inflight = 0
    for name in "ab":
        forgotten.enter(name)
    forgotten._inside.clear()
    forgotten.inflight = 0
    for broken in (lost, doubled, crowded, miscounted, forgotten):
        with pytest.raises(RuntimeError):
            broken.check()


# Places


def test_the_number_of_places_can_change() -> None:
    admission = Admission(4, 10)
    assert admission.resize(1) == [] and admission.enter("a") == Admitted()
    assert [admission.enter(name) for name in "bcdef"] == [Queued(ahead) for ahead in range(5)]
    assert admission.resize(3) == ["b", "c"] and admission.resize(2) == [] and admission.leave("a") == []
    assert admission.resize(None) == ["d", "e"], "only max_inflight limits it"
    assert admission.resize(0) == [] and admission.places == 1
    admission.check()


def test_a_request_takes_a_place_for_each_of_its_sequences() -> None:
    admission = Admission(8, 10)
    assert admission.enter("four", weight=4) == Admitted() and admission.enter("three", weight=3) == Admitted()
    assert admission.inflight == 7
    assert admission.enter("two", weight=2) == Queued(0) and admission.enter("one") == Queued(1), "nobody passes one that waits for two"
    assert admission.enter("urgent", priority=-1) == Admitted(), "who goes first is not held up by those behind"
    admission.check()
    assert admission.leave("three") == ["two", "one"] and admission.inflight == 8
    assert admission.leave("four") == [] and admission.leave("two") == [] and admission.inflight == 2
    admission.check()


def test_a_request_of_more_sequences_than_places_gets_them_all() -> None:
    admission = Admission(8, 10)
    admission.enter("a")
    assert admission.enter("wide", weight=128) == Queued(0) and admission.enter("b") == Queued(1)
    assert admission.leave("a") == ["wide"] and admission.inflight == 8
    admission.check()
    assert admission.resize(4) == [] and admission.leave("wide") == ["b"], "what it gives back is what it took"
    assert admission.inflight == 1
    admission.check()


def test_the_wait_behind_many_sequences_is_longer() -> None:
    """Two places, each held for a second: a place is freed each half second."""
    for weight, wait_s in ((1, 1.0), (2, 1.5), (50, 1.5)):
        admission = measured()
        admission.enter("ahead", 0, 0.0, Due(deadline=300.0), weight)
        room_s = 1.0 + wait_s  # a request also holds its place for a second
        assert isinstance(admission.enter("late", 0, 0.0, Due(deadline=room_s - 0.01)), NotAdmitted), weight
        assert admission.enter("in time", 0, 0.0, Due(deadline=room_s + 0.01)) == Queued(1), weight


# Overload


def measured(places: int = 2, held_s: float = 1.0, overload: Overload = "codel", max_queue: int = 100) -> Admission:
    """All places are taken. A request holds its place for `held_s`, a tenth of it before the first token, and outputs 10 tokens."""
    admission = Admission(places, max_queue, overload)
    admission.pace.note(held_s, held_s / 10, 10)
    for number in range(places):
        admission.enter(f"inside {number}")
    return admission


def test_a_request_that_could_not_be_served_in_time_is_refused() -> None:
    admission = measured()
    refused = admission.enter("a", 0, 0.0, Due(deadline=1.4))
    assert isinstance(refused, NotAdmitted) and refused.retry_after == pytest.approx(0.1 + 0.5)
    assert replace(refused, retry_after=None) == NotAdmitted(2, 0, late=True)
    assert admission.enter("b", 0, 0.0, Due(deadline=1.6)) == Queued(0)  # gets a place in half a second and holds it for a second
    assert isinstance(admission.enter("c", 0, 0.0, Due(deadline=1.9)), NotAdmitted)
    assert admission.enter("d", -1, 0.0, Due(deadline=1.9)) == Queued(0), "with a better priority, no request is ahead"
    admission.check()


def test_a_short_output_needs_less_time() -> None:
    admission = measured()
    assert isinstance(admission.enter("long", 0, 0.0, Due(deadline=0.8, max_tokens=100)), NotAdmitted)
    assert admission.enter("short", 0, 0.0, Due(deadline=0.8, max_tokens=1)) == Queued(0)


def test_objectives_count_from_the_arrival_and_are_ignored_if_they_cannot_be_met() -> None:
    admission = measured()
    assert isinstance(admission.enter("a", 0, 10.0, Due(first=10.5)), NotAdmitted)
    assert isinstance(admission.enter("b", 0, 10.0, Due(end=11.4)), NotAdmitted)
    assert admission.enter("c", 0, 10.0, Due(first=10.7, end=11.6)) == Queued(0)
    assert admission.enter("d", 0, 10.0, Due(first=10.05, end=10.9)) == Queued(1), "it could not meet these even without waiting"


def test_with_a_free_place_no_request_is_judged() -> None:
    """Otherwise a wrong estimate would never be corrected."""
    admission = measured(held_s=1e6)
    admission.leave("inside 0")
    assert admission.enter("a", 0, 0.0, Due(deadline=0.1)) == Admitted()


def test_before_the_first_measurement_every_request_waits() -> None:
    admission = Admission(1, 1)
    admission.enter("a")
    assert admission.enter("b", 0, 0.0, Due(deadline=0.001)) == Queued(0)
    assert admission.enter("c", 0, 0.0, Due(deadline=0.001)) == NotAdmitted(1, 1) and admission.retry_after(0.0) is None


def test_only_hopeless_requests_are_dropped() -> None:
    admission = measured()
    for name, deadline in (("a", 2.0), ("b", 3.0), ("c", 4.0)):
        assert isinstance(admission.enter(name, 0, 0.0, Due(deadline=deadline)), Queued)
    assert admission.drop_hopeless(0.9) == [] and admission.drop_hopeless(1.1) == ["a"]
    assert admission.leave("inside 0", 2.5) == ["b"], "a dropped request no longer has a place"
    admission.check()


def test_a_queue_of_patient_requests_is_served_in_full_and_in_order() -> None:
    admission = measured(max_queue=50)
    names = [f"{number}" for number in range(50)]
    for name in names:
        assert isinstance(admission.enter(name, 0, 0.0, Due(deadline=300.0)), Queued)
    served, now, inside = [], 0.0, ["inside 0", "inside 1"]
    while inside:
        now += 0.5
        assert admission.drop_hopeless(now) == []
        admitted = admission.leave(inside.pop(0), now)
        served += admitted
        inside += admitted
    assert served == names


def test_overload_queue_refuses_no_request_while_the_queue_has_room() -> None:
    admission = measured(overload="queue", max_queue=2)
    assert [admission.enter(name, 0, 0.0, Due(deadline=0.01)) for name in "ab"] == [Queued(0), Queued(1)]
    assert admission.drop_hopeless(1e9) == [] and isinstance(admission.enter("c"), NotAdmitted)


def stand(admission: Admission, now: float = 0.0) -> float:
    """Makes the queue wait. Returns the time, an interval later, from which the queue counts as standing."""
    admission.enter("first", 0, now)
    now += 1.0
    admission.leave("inside 0", now)
    assert not admission.standing(now)
    return now + max(INTERVAL_S, 1.0)


def test_a_standing_queue_is_kept_short() -> None:
    admission = measured(places=1)
    burst = admission.enter("burst", 0, 0.0, Due(deadline=2.5))
    assert burst == Queued(0) and admission.leave("burst") == []
    now = stand(admission)
    assert admission.standing(now)
    assert isinstance(admission.enter("at the edge", 0, now, Due(deadline=now + 2.5)), NotAdmitted)
    assert admission.enter("in good time", 0, now, Due(deadline=now + 1.0 + 1.0 / SHARE + 0.1)) == Queued(0)
    admission.leave("in good time", now)
    admission.leave("first", now)
    assert admission.enter("no wait", 0, now) == Admitted() and not admission.standing(now), "the queue has drained"


@pytest.mark.parametrize("load", [1.01, 1.5, 2.0, 5.0, 10.0])
def test_a_queue_that_is_long_enough_is_seldom_empty(load: float) -> None:
    """By the balance of an M/M/1/K queue, state by state."""
    most = enough(load)
    states = [load**n for n in range(1 + math.ceil(most))]
    assert states[0] / sum(states) <= IDLE < 1 / sum(states[: max(2, math.floor(most))])
    assert enough(1.0) == enough(0.5) == math.inf and enough(1e6) == 1.0


def flooded(times: float = 10.0, patience_s: float = 3.0) -> tuple[Admission, float]:
    """Ten places, one of which is freed each tenth of a second, and a second in which `times` as many come as can be served."""
    admission, now, inside = measured(places=10), 0.0, [f"inside {number}" for number in range(10)]
    for number in range(round(10 * times)):
        now = number / (10 * times)
        admission.enter(f"{number}", 0, now, Due(deadline=now + patience_s))
        if number and number % times == 0:
            inside += admission.leave(inside.pop(0), now)
    return admission, now


def test_the_more_are_refused_the_shorter_is_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that is freed is taken all the same: somebody waits, or comes in no time."""
    admission, now = flooded()
    freed, least = now, admission.queued
    for number in range(300):  # three more seconds
        freed = now + (number + 1) / 100
        admission.enter(f"more {number}", 0, freed, Due(deadline=freed + 3.0))
        if number % 10 == 0:
            assert admission.leave(next(iter(admission._inside)), freed), "somebody waits for the place"
        least = min(least, admission.queued)
    room = 3.0 - 1.0
    assert 1 <= least <= admission.queued <= FLOODED * room / 0.1 < SHARE * room / 0.1
    assert admission.standing(freed) and isinstance(admission.enter("late", 0, freed, Due(deadline=freed + 3.0)), NotAdmitted)
    assert isinstance(admission.enter("patient", 0, freed, Due(deadline=freed + 30.0)), Queued), "who has time may wait"
    assert isinstance(admission.enter("wide", -1, freed, Due(deadline=freed + 3.0), weight=10), Queued), "nobody is ahead of it"
    admission.leave("wide", freed)
    calm = freed + 1.1
    assert isinstance(admission.enter("calm", 0, calm, Due(deadline=calm + 3.0)), Queued), "a second later it is no flood any more"
    monkeypatch.setattr(rules, "FLOODED", 1.0)
    assert isinstance(admission.enter("kept", 0, freed, Due(deadline=freed + 3.0)), Queued), "negative control"
    admission.check()


def test_in_a_flood_a_better_priority_displaces_whom_it_overtakes() -> None:
    """Otherwise they would wait until they are hopeless. Without a flood they wait: a place may come."""
    calm = measured(places=10)
    for number in range(6):
        assert calm.enter(f"low {number}", 1, 0.0, Due(deadline=3.0)) == Queued(number)
    assert calm.enter("urgent", 0, 0.0, Due(deadline=3.0)) == Queued(0) and calm.queued == 7
    admission, now = flooded()
    for waiting in list(admission._waiting):
        admission.leave(waiting, now)
    assert isinstance(admission.enter("low", 1, now, Due(deadline=now + 3.0)), NotAdmitted), "a better one has just been refused"
    assert admission.enter("patient", 1, now, Due(deadline=now + 30.0)) == Queued(0), "who has time may wait"
    admission.leave("patient", now)
    later = now + 1.1
    assert admission.enter("later", 1, later, Due(deadline=later + 3.0)) == Queued(0), "that is forgotten after a second"
    admission.leave("later", now)
    admission, now = flooded()
    for waiting in list(admission._waiting):
        admission.leave(waiting, now)
    admission._drowned = 0, -math.inf
    low = [f"low {number}" for number in range(20)]
    taken = [name for name in low if isinstance(admission.enter(name, 1, now, Due(deadline=now + 3.0)), Queued)]
    answers = [admission.enter(f"urgent {number}", 0, now, Due(deadline=now + 3.0)) for number in range(len(taken) + 2)]
    displaced = [name for answer in answers if isinstance(answer, Queued) for name in answer.displaced]
    assert displaced == taken[::-1] and len(taken) > 1, "from the end of the queue"
    assert isinstance(answers[-1], NotAdmitted) and {waiter.priority for waiter in admission._waiting.values()} == {0}
    admission.check()


def test_what_would_be_refused_is_known_before_it_is_asked() -> None:
    for admission in (flooded()[0], measured(max_queue=0), measured(), Admission(1, 0)):
        for number in range(40):
            due = Due(deadline=1.0 + random.Random(number).random() * 4)
            late_by, before = admission.late_by(number % 2, 1.0, due), (admission.inflight, admission.queued, len(admission._refusals))
            assert before == (admission.inflight, admission.queued, len(admission._refusals))
            assert isinstance(admission.enter(f"one {number}", number % 2, 1.0, due), NotAdmitted) == (late_by is not None)


def test_lifo_serves_the_newest_first_while_the_queue_stands() -> None:
    for overload, first, then in (("codel", "old", "new"), ("lifo", "new", "old")):
        admission = measured(places=1, overload=overload)  # type: ignore[arg-type]
        now = stand(admission)
        admission.enter("least urgent", 1, now)
        for name in ("old", "new"):
            admission.enter(name, 0, now)
        assert admission.leave("first", now) == [first] and admission.leave(first, now) == [then]
        assert admission.leave(then, now) == ["least urgent"]


def test_each_refusal_gets_a_later_retry_time_than_the_one_before() -> None:
    """If every client comes back when told to, they are served one after another."""
    admission = measured(places=2, held_s=1.0, max_queue=0)
    told = [answer.retry_after for answer in (admission.enter(f"{n}", 0, 0.0) for n in range(4)) if isinstance(answer, NotAdmitted)]
    assert told == [0.5, 1.0, 1.5, 2.0]
    assert admission.retry_after(1.5) == 0.0, "refusals are forgotten after a second"


@dataclass
class Server:
    """Serves `places` requests at a time for exactly `held_s` each, by when it begins. Clients have a deadline and arrive at random."""

    admission: Admission
    held_s: Callable[[float], float] = lambda now: 0.2
    deadline_s: float = 1.0
    inside: dict[str, float] = field(default_factory=dict)  # request → when it will be done
    held: dict[str, float] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    good: int = 0
    refused: int = 0
    dropped: int = 0  # requests that waited before they were refused

    def run(self, per_s: float, seconds: float, seed: int) -> float:
        """Returns the number of requests per second that finished in time."""
        rng, now, number = random.Random(seed), 0.0, 0
        coming = rng.expovariate(per_s)
        while now < seconds:
            ending = min(self.inside, key=self.inside.__getitem__, default=None)
            if ending is not None and self.inside[ending] <= coming:
                now = self.inside.pop(ending)
                self.good += now <= self.due[ending]
                held_s = self.held.pop(ending)
                self.admission.pace.note(held_s, held_s / 10, 40)
                self.dropped += len(self.admission.drop_hopeless(now))
                self.begin(self.admission.leave(ending, now), now)
                continue
            now, number = coming, number + 1
            coming += rng.expovariate(per_s)
            name, self.due[f"{number}"] = f"{number}", now + self.deadline_s
            answer = self.admission.enter(name, 0, now, Due(deadline=self.due[name]))
            self.refused += isinstance(answer, NotAdmitted)
            if answer == Admitted():
                self.begin([name], now)
        return self.good / seconds

    def begin(self, names: list[str], now: float) -> None:
        self.held |= dict.fromkeys(names, self.held_s(now))
        self.inside |= {name: now + self.held[name] for name in names}


@pytest.mark.parametrize("times", [1, 2, 5, 10])
@pytest.mark.parametrize("overload", ["codel", "lifo"])
def test_goodput_holds_under_overload(overload: Overload, times: int) -> None:
    """8 places at 0.2 s per request serve 40 requests per second."""
    assert Server(Admission(8, 512, overload)).run(40.0 * times, 60.0, seed=times) >= 0.9 * 40 * (0.95 if times == 1 else 1)


@pytest.mark.parametrize("times", [2, 5, 10])
def test_a_flood_is_refused_at_once_though_the_pace_changes(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than one refused request in a hundred has waited, so that P99 of the time to a refusal is that of a request that has not."""

    def waited() -> float:
        server = Server(Admission(16, 512), lambda now: 0.6 if random.Random(int(now / 3)).random() < 0.5 else 0.9, 1.7)
        server.admission.pace.note(0.75, 0.1, 40)
        server.run(21.0 * times, 60.0, seed=times)
        return server.dropped / (server.refused + server.dropped)

    found = waited()
    assert found < 0.01
    monkeypatch.setattr(rules, "FLOODED", 1.0)
    assert waited() > 3 * found, "negative control"


def test_goodput_collapses_when_every_request_waits() -> None:
    """Negative control."""
    assert Server(Admission(8, 512, "queue")).run(80.0, 60.0, seed=2) < 10


# Pace


def test_pace_follows_the_measurements() -> None:
    assert Pace().held_s is None and Pace().needs_s(100) == 0.0
    pace = Pace()
    pace.note(1.0, 0.1, 10)
    assert (pace.held_s, pace.first_s) == (1.0, 0.1) and pace.token_s == pytest.approx(0.1)
    assert pace.needs_s(1 << 31) == 1.0 and pace.needs_s(3) == pytest.approx(0.4)
    for _ in range(100):
        pace.note(2.0, 0.5, 16)
    assert pace.held_s == pytest.approx(2.0, rel=0.01) and pace.first_s == pytest.approx(0.5, rel=0.01)


def test_a_failure_counts_as_at_least_its_duration() -> None:
    pace = Pace()
    pace.note_failure(5.0)
    assert pace.held_s == 5.0
    pace.note_failure(1.0)
    assert pace.held_s == 5.0
    pace.note_failure(21.0)
    assert pace.held_s == 6.0
