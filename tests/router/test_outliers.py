"""Who is put aside, for what, for how long, and who is not. A pool is a string of names, the first letter is the role."""

import random
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.metric_table import EJECTIONS
from baton.cluster.records import RoleName
from baton.moves import IllegalMove
from router.outliers import LONGEST, ROW, WINDOW_S, Cause, Ejected, EjectionTerms, Identity, Outliers, State, Stride, _Worker

BASE_S = 30.0


class Pool:
    """Workers whose probes are answered whenever `look` is called, unless `mute` holds them."""

    def __init__(self, names: str, terms: EjectionTerms | None = None) -> None:
        self.names = names.split()
        self.outliers = Outliers(terms or EjectionTerms(base_s=BASE_S))
        self.now = 0.0
        self.answered = dict.fromkeys(self.names, 0)
        self.mute: set[str] = set()
        self.ejected: list[Ejected] = []
        for name in self.names:
            self.outliers.join((name, 1), [(name, 1) for name in self.names], 0.0)

    def of(self, role: RoleName) -> list[Identity]:
        return [(name, 1) for name in self.names if name[0] in (role[0], "b")]

    def _note(self, ejected: Ejected | None) -> None:
        self.ejected += [ejected] if ejected else []

    def call(self, name: str, ok: bool, role: RoleName = "decode") -> None:
        self.now += 0.1
        self._note(self.outliers.note_call((name, 1), role, ok, self.of, self.now))

    def read(self, holder: str, reader: str, ok: bool) -> None:
        self.now += 0.1
        self._note(self.outliers.note_read((holder, 1), (reader, 1), ok, self.of, self.now))

    def pace(self, name: str, token_s: float, company: int = 1, role: RoleName = "decode", after_s: float = 1.0) -> None:
        self.now += after_s
        self._note(self.outliers.note_pace((name, 1), role, token_s, company, self.of, self.now))

    def look(self, after_s: float = 0.0) -> list[str]:
        """A round of probes."""
        self.now += after_s
        for name in self.names:
            self.answered[name] += name not in self.mute
        return [name for name, _ in self.outliers.take_back(lambda worker: self.answered.get(worker[0]), self.now)]

    @property
    def aside(self) -> list[str]:
        return sorted(name for name, _ in self.outliers.aside)


def fails_one_in_three(pool: Pool, bad: str, rounds: int = 40) -> None:
    for number in range(rounds):
        for name in pool.names:
            pool.call(name, name != bad or number % 3 > 0)


# Errors


@pytest.mark.parametrize("names", ["d0 d1", "d0 d1 d2", "d0 d1 d2 d3 d4"])
def test_a_worker_that_fails_one_call_in_three_is_put_aside(names: str) -> None:
    pool = Pool(names)
    fails_one_in_three(pool, "d1")
    assert pool.aside == ["d1"] and [(one.worker, one.cause) for one in pool.ejected] == [(("d1", 1), "errors")]
    found = re.fullmatch(r"(\d+) of (\d+) calls failed; of its peers' 0 of \d+", pool.ejected[0].why)
    assert found is not None and int(found[2]) <= 3 * int(found[1]) <= int(found[2]) + 2 <= 34


def test_a_worker_that_only_fails_is_put_aside_after_a_few_calls() -> None:
    pool = Pool("d0 d1")
    for _ in range(50):
        fails_one_in_three(pool, "nobody", 1)
    for _ in range(ROW):
        pool.call("d0", True)
        pool.call("d1", False)
        pool.call("d0", True)  # the same request again
    assert pool.aside == ["d1"] and pool.ejected[0].why == "the last 5 calls failed; of its peers' 0 of 8"


@pytest.mark.parametrize("share", [0.1, 0.35, 1.0])
def test_requests_that_fail_everywhere_are_no_workers_fault(share: float) -> None:
    pool, draw = Pool("d0 d1 d2"), random.Random(1)
    for _ in range(2000):
        for name in pool.names:
            pool.call(name, draw.random() >= share)
    assert pool.aside == []


def test_if_all_begin_to_fail_at_once_none_is_put_aside() -> None:
    """What they did before would tell them apart, by who failed first."""
    pool = Pool("d0 d1 d2")
    fails_one_in_three(pool, "nobody")
    for _ in range(50):
        for name in pool.names:
            pool.call(name, False)
    assert pool.aside == []


def test_without_knowledge_of_its_peers_nobody_is_judged() -> None:
    pool = Pool("d0 d1")
    for _ in range(50):
        pool.call("d1", False)
    assert pool.aside == []


def test_roles_are_judged_apart() -> None:
    """Of a worker that serves both, calls of one role say nothing about those of another worker's other role."""
    pool = Pool("b0 b1 d2")
    for _ in range(30):
        pool.call("b0", False, "prefill")
        pool.call("d2", True, "decode")
    assert pool.aside == [], "no other worker has shown how prefills end"
    for _ in range(10):
        pool.call("b1", True, "prefill")
    pool.call("b0", False, "prefill")
    assert pool.aside == ["b0"]


def test_old_failures_are_forgotten() -> None:
    pool = Pool("d0 d1")
    for _ in range(ROW - 1):
        pool.call("d0", True)
        pool.call("d1", False)
    pool.now += WINDOW_S + 1
    for _ in range(9):
        pool.call("d0", True)
    pool.call("d1", False)
    assert pool.aside == []


# Digests


def reads(pool: Pool, bad: str, rounds: int = 12) -> None:
    holders, readers = ([name for name in pool.names if name[0] == role] for role in "pd")
    for _ in range(rounds):
        for holder in holders:
            for reader in readers:
                pool.read(holder, reader, bad not in (holder, reader))


@pytest.mark.parametrize("bad", ["p1", "d1"])
def test_of_a_damaged_read_the_end_that_differs_from_its_peers_is_put_aside(bad: str) -> None:
    pool = Pool("p0 p1 d0 d1")
    reads(pool, bad)
    assert pool.aside == [bad] and pool.ejected[0].cause == "digests"


def test_if_nothing_tells_the_ends_apart_it_is_the_holder() -> None:
    """Each decode worker reads from one prefill worker only."""
    pool = Pool("p0 p1 d0 d1")
    for _ in range(3):
        pool.read("p0", "d0", True)
        pool.read("p1", "d1", False)
    assert pool.aside == ["p1"]
    pool.read("p0", "d0", True)
    pool.read("p0", "d1", False)
    assert pool.aside == ["p1"], "what d1 read from p1 is not held against it"


@pytest.mark.parametrize(("names", "bad"), [("p0 p1 d0", "d0"), ("p0 d0 d1", "p0"), ("p0 d0", "p0")])
def test_an_only_worker_is_never_put_aside_and_its_damage_is_not_blamed_on_others(names: str, bad: str) -> None:
    pool = Pool(names)
    reads(pool, bad)
    assert pool.aside == []


# Pace


@pytest.mark.parametrize("names", ["d0 d1", "d0 d1 d2", "d0 d1 d2 d3 d4"])
@pytest.mark.parametrize("company", [1, 8])
def test_a_worker_that_is_ten_times_slower_is_put_aside(names: str, company: int) -> None:
    pool = Pool(names)
    for _ in range(6):
        for name in pool.names:
            pool.pace(name, 0.2 if name == "d1" else 0.02, company)
    assert pool.aside == ["d1"]
    assert (pool.ejected[0].cause, pool.ejected[0].why) == ("pace", "it takes 200 ms a token, its peers 20 ms")


def test_with_a_single_peer_it_takes_twice_the_factor() -> None:
    for names, aside in (("d0 d1", []), ("d0 d1 d2", ["d1"])):
        pool = Pool(names)
        for _ in range(6):
            for name in pool.names:
                pool.pace(name, 0.12 if name == "d1" else 0.02)
        assert pool.aside == aside


@pytest.mark.parametrize(
    ("own", "theirs"),
    [((0.2, 32), (0.02, 1)), ((0.02, 1), (0.02, 32)), ((0.004, 1), (0.0002, 1)), ((0.07, 1), (0.02, 1))],
    ids=["it is busy", "they are busy", "all are fast", "not that much"],
)
def test_a_worker_that_is_not_slow_in_every_way_stays(own: tuple[float, int], theirs: tuple[float, int]) -> None:
    pool = Pool("d0 d1 d2")
    for _ in range(10):
        for name in pool.names:
            pool.pace(name, *(own if name == "d1" else theirs))
    assert pool.aside == []


def test_calls_that_end_together_show_one_pace() -> None:
    """A worker that was stopped for a moment: all its streams were slow."""
    pool = Pool("d0 d1 d2")
    for _ in range(6):
        for name in pool.names:
            pool.pace(name, 0.02)
    for _ in range(50):
        pool.pace("d1", 1.0, after_s=0.001)
    assert pool.aside == []


def test_a_stride_is_the_waits_between_batches_without_the_longest() -> None:
    stride, now = Stride(), 5.0  # the first batch: nobody knows since when the worker has worked on it
    for wait in (0.0, 0.1, 0.1, 3.0, 0.2, 0.2):
        now += wait
        stride.come(2, now)
        now += 0.01
        stride.leave(now)
    assert stride.token_s == pytest.approx(0.6 / 8)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.3]), max_size=6), max_size=5))
def test_tokens_that_are_told_later_with_their_moments_show_the_same_pace(batches: list[list[float]]) -> None:
    """Of one moment: a batch."""
    one_by_one, together, now = Stride(), Stride(), 1.0
    for batch in batches:
        times = [now := now + wait for wait in batch]
        together.come_each(times)
        for moment in dict.fromkeys(times):
            one_by_one.come(times.count(moment), moment)
            one_by_one.leave(moment)
        now += 0.1
    assert vars_of(together) == vars_of(one_by_one) and together.token_s == one_by_one.token_s


def vars_of(stride: Stride) -> dict[str, object]:
    return {name: value for name, value in vars(stride).items() if name != "_away_s"}


@pytest.mark.parametrize("events", [0, 1, 4])
def test_a_short_call_shows_no_pace(events: int) -> None:
    stride = Stride()
    for number in range(events):
        stride.come(1, number)
        stride.leave(number)
    assert stride.token_s is None


def test_a_call_with_a_slow_reader_shows_no_pace() -> None:
    stride, now = Stride(), 0.0
    for _ in range(20):
        stride.come(1, now)
        stride.leave(now + 1.0)
        now += 1.01
    assert stride.token_s is None


# Terms and the way back


def test_a_worker_comes_back_when_its_term_is_over_and_it_has_answered_since() -> None:
    pool = Pool("d0 d1")
    fails_one_in_three(pool, "d1")
    assert pool.outliers.state(("d1", 1)) is State.EJECTED
    assert pool.look(BASE_S / 2) == [] and pool.outliers.state(("d1", 1)) is State.EJECTED
    assert pool.look(BASE_S) == [] and pool.outliers.state(("d1", 1)) is State.DUE
    pool.mute.add("d1")
    assert pool.look(BASE_S) == [] and pool.aside == ["d1"], "it has answered no probe since"
    pool.mute.clear()
    assert pool.look(0.5) == ["d1"] and pool.aside == [] and pool.outliers.state(("d1", 1)) is State.SERVING
    fails_one_in_three(pool, "nobody")
    assert pool.aside == [], "what it did before is forgotten"


def put_aside_and_back(pool: Pool) -> float:
    fails_one_in_three(pool, "d1")
    (term_s,) = (one.term_s for one in pool.ejected)
    pool.ejected.clear()
    pool.look(term_s)
    assert pool.look(0.5) == ["d1"]
    return term_s


def test_each_time_takes_longer_up_to_a_bound_and_good_service_makes_it_shorter() -> None:
    pool = Pool("d0 d1")
    terms = [put_aside_and_back(pool) for _ in range(LONGEST + 2)]
    assert terms == [BASE_S * min(times, LONGEST) for times in range(1, LONGEST + 3)]
    pool.now += 2 * BASE_S * 9
    assert put_aside_and_back(pool) == BASE_S * 4
    pool.now += 2 * BASE_S * 100
    assert put_aside_and_back(pool) == BASE_S


def test_a_worker_that_leaves_is_forgotten() -> None:
    pool = Pool("d0 d1 d2")
    fails_one_in_three(pool, "d1")
    pool.names.remove("d1")
    del pool.answered["d1"]
    assert pool.look(1.0) == [] and pool.aside == [] and ("d1", 1) not in pool.outliers
    pool.outliers.join(("d2", 2), [("d0", 1), ("d2", 2)], pool.now)
    assert ("d2", 1) not in pool.outliers and ("d0", 1) in pool.outliers


def test_an_illegal_move_changes_nothing() -> None:
    for state in State:
        for event in ("eject", "end", "answer"):
            worker = _Worker(state)
            try:
                worker.move(event)
            except IllegalMove as error:
                assert state.value in str(error) and event in str(error) and worker.state is state
    with pytest.raises(IllegalMove):
        _Worker(State.DUE).move("eject")


@given(
    st.integers(1, 9),
    st.sampled_from([0.1, 0.3, 0.5, 0.9]),
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["good", "bad", "read", "damage", "slow", "fast", "look"])), max_size=200),
)
def test_no_more_than_the_share_is_ever_aside(size: int, share: float, events: list[tuple[int, str]]) -> None:
    pool = Pool(" ".join([f"p{i}" for i in range(size)] + [f"d{i}" for i in range(size)]), EjectionTerms(share, BASE_S))
    for number, what in events:
        for turn in range(6):  # enough of the same to be judged
            decoder, prefiller = f"d{number % size}", f"p{(number + turn) % size}"
            match what:
                case "good" | "bad":
                    pool.call(decoder, what == "good")
                case "read" | "damage":
                    pool.read(prefiller, decoder, what == "read")
                case "slow" | "fast":
                    pool.pace(decoder, 1.0 if what == "slow" else 0.01)
        if what == "look":
            pool.look(BASE_S)
        for role in "pd":
            assert sum(name[0] == role for name in pool.aside) <= int(share * size + 1e-9)


def test_the_metric_knows_every_cause() -> None:
    assert get_args(Cause) == EJECTIONS
