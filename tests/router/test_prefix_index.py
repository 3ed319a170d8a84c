"""The prefix index compared with the caches themselves. The registry between them drops, repeats and reorders events."""

from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.cluster.records import BlockEvent
from baton.engine.core.block_key import DEVICE, DISK, HOST
from router.prefix_index import MAX_EXPIRED, MAX_PREDICTED, SWEEPS, Filling, PrefixIndex

KEYS = [bytes([i]) * 16 for i in range(6)]
WORKERS = ("w0", "w1", "w2")
FAR = 1e9


def event(worker: str, sequence: int, kind: Literal["stored", "removed"], *keys: bytes, incarnation: int = 1) -> BlockEvent:
    return BlockEvent(worker, incarnation, sequence, kind, keys)


class Worker:
    """A cache that reports its changes. `states[n]` is what it held after event n."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.events: list[BlockEvent] = []
        self.states: list[frozenset[bytes]] = [frozenset()]

    def change(self, kind: Literal["stored", "removed"], keys: frozenset[bytes]) -> None:
        held = {"stored": self.states[-1] | keys, "removed": self.states[-1] - keys}[kind]
        self.events.append(BlockEvent(self.name, self.incarnation, len(self.states), kind, tuple(sorted(keys))))
        self.states.append(held)


class IndexMachine(RuleBasedStateMachine):
    """What the index considers reported by a worker is always what the worker held at some moment, and that moment never moves back."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_ahead=4)
        self.now = 0.0
        self.workers = {name: Worker(name, 1) for name in WORKERS}
        self.past: list[Worker] = []  # earlier incarnations
        self.moment = dict.fromkeys(WORKERS, 0)
        self.predicted: dict[tuple[str, bytes], float] = {}
        for name in WORKERS:
            self.index.join(name, 1)

    def exact(self, name: str) -> bool:
        return name not in self.index.needing_snapshot()

    def progress(self, name: str, moment: int) -> None:
        assert moment >= self.moment[name]
        self.moment[name] = moment
        for key in self.workers[name].states[moment]:
            self.predicted.pop((name, key), None)

    @rule(
        name=st.sampled_from(WORKERS),
        kind=st.sampled_from(["stored", "stored", "removed"]),
        keys=st.frozensets(st.sampled_from(KEYS)),
    )
    def cache_changes(self, name: str, kind: Literal["stored", "removed"], keys: frozenset[bytes]) -> None:
        self.workers[name].change(kind, keys)

    @rule(name=st.sampled_from(WORKERS), data=st.data())
    def event_arrives(self, name: str, data: st.DataObject) -> None:
        """Delivers any event at any time and any number of times, but mostly the next one."""
        worker = self.workers[name]
        if not worker.events:
            return
        upcoming = min(self.moment[name], len(worker.events) - 1)
        at = data.draw(st.just(upcoming) | st.integers(0, len(worker.events) - 1))
        before, told = self.moment[name], worker.events[at]
        answer = self.index.apply(told)
        if told.sequence <= before:
            assert answer == "duplicate"
        elif answer == "ok":
            self.catch_up(name, told)
        elif answer == "gap":
            assert told.sequence > before + 1 and not self.exact(name)

    def catch_up(self, name: str, told: BlockEvent) -> None:
        """After the event, those that waited for it were applied too. Advances the model by all of them."""
        held = self.index._workers[name]
        assert held.last >= told.sequence == self.moment[name] + 1
        for sequence in range(self.moment[name] + 1, held.last + 1):
            for key in self.workers[name].events[sequence - 1].keys:
                if self.workers[name].events[sequence - 1].kind == "stored":
                    self.predicted.pop((name, key), None)
        self.progress(name, held.last)

    @rule(name=st.sampled_from(WORKERS), age=st.integers(0, 3))
    def snapshot_arrives(self, name: str, age: int) -> None:
        """Delivers a snapshot taken `age` events ago."""
        worker = self.workers[name]
        sequence = max(0, len(worker.events) - age)
        needed = not self.exact(name)
        answer = self.index.snapshot(name, worker.incarnation, sequence, worker.states[sequence])
        if answer == "duplicate":
            assert sequence < self.moment[name] or not needed
            return
        held = self.index._workers[name]
        assert sequence <= held.last
        for told in worker.events[sequence : held.last]:
            if told.kind == "stored":
                for key in told.keys:
                    self.predicted.pop((name, key), None)
        for key in worker.states[sequence]:
            self.predicted.pop((name, key), None)
        self.progress(name, held.last)

    @rule(most=st.integers(1, 20))
    def old_entries_are_swept(self, most: int) -> None:
        self.index.sweep(most)

    @rule(name=st.sampled_from(WORKERS), cut=st.integers(0, 6))
    def filling_is_given_up(self, name: str, cut: int) -> None:
        worker = self.workers[name]
        filling = self.index.fill(name, worker.incarnation, len(worker.events))
        if isinstance(filling, Filling):
            filling.add(KEYS[cut:])
            filling.drop()

    @rule(name=st.sampled_from(WORKERS))
    def newest_snapshot_settles_it(self, name: str) -> None:
        self.snapshot_arrives(name, 0)
        assert self.exact(name) and self.moment[name] == len(self.workers[name].events)

    @rule(name=st.sampled_from(WORKERS), how=st.sampled_from(["join", "event", "snapshot"]))
    def restarts(self, name: str, how: str) -> None:
        old = self.workers[name]
        self.past.append(old)
        new = self.workers[name] = Worker(name, old.incarnation + 1)
        self.moment[name] = 0
        self.predicted = {pair: until for pair, until in self.predicted.items() if pair[0] != name}
        if how == "join":
            self.index.join(name, new.incarnation)
        elif how == "event":
            new.change("stored", frozenset(KEYS[:2]))
            assert self.index.apply(new.events[0]) == "ok"
            self.progress(name, 1)
        else:
            assert self.index.snapshot(name, new.incarnation, 0, ()) == "ok"

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def ghost_speaks(self, data: st.DataObject) -> None:
        ghost = data.draw(st.sampled_from(self.past))
        ghost.change("stored", frozenset(KEYS))
        assert self.index.apply(ghost.events[-1]) == "stale"
        assert self.index.snapshot(ghost.name, ghost.incarnation, 99, KEYS) == "stale"

    @rule(name=st.sampled_from(WORKERS), length=st.integers(1, 6), ttl=st.sampled_from([1.0, 5.0]))
    def request_is_sent(self, name: str, length: int, ttl: float) -> None:
        self.index.predict(name, KEYS[:length], self.now + ttl)
        for key in set(KEYS[:length]) - self.workers[name].states[self.moment[name]]:
            self.predicted[name, key] = max(self.now + ttl, self.predicted.get((name, key), 0.0))

    @rule(step=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, step: float) -> None:
        self.now += step

    @invariant()
    def overlaps_are_those_of_the_caches(self) -> None:
        expected = {}
        for name, worker in self.workers.items():
            count = 0
            for key in KEYS:
                if key not in worker.states[self.moment[name]] and self.predicted.get((name, key), self.now) <= self.now:
                    break
                count += 1
            if count:
                expected[name] = count
        assert self.index.overlap(KEYS, self.now) == expected
        assert self.index.refused == 0
        assert self.index.entries == sum(held.size for held in self.index._workers.values())


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def joined(*names: str, max_entries: int = 100, max_ahead: int = 4) -> PrefixIndex:
    index = PrefixIndex(max_entries, max_ahead)
    for name in names:
        index.join(name, 1)
    return index


def test_media_are_kept_apart() -> None:
    index = joined("a", "b")
    index.apply(event("a", 1, "stored", *KEYS[:4]))
    index.apply(BlockEvent("a", 1, 2, "stored", tuple(KEYS[:3]), HOST))
    index.apply(event("a", 3, "removed", *KEYS[1:4]))
    index.apply(BlockEvent("b", 1, 1, "stored", (KEYS[0],), HOST))
    assert index.overlap(KEYS, 0.0) == {"a": 1}
    assert index.overlap(KEYS, 0.0, HOST) == {"a": 3, "b": 1}
    assert index.overlap(KEYS, 0.0, DISK) == {} and index.entries == 5
    index.apply(BlockEvent("a", 1, 4, "removed", (KEYS[0],), HOST))
    assert index.overlap(KEYS, 0.0) == {"a": 1} and index.overlap(KEYS, 0.0, HOST) == {"b": 1}
    index.forget("a")
    assert index.overlap(KEYS, 0.0) == {} and index.entries == 1


def test_a_run_may_go_on_in_another_medium_of_the_same_worker_and_of_no_other() -> None:
    index = joined("a", "b", "c")
    index.apply(event("a", 1, "stored", *KEYS[:2]))
    index.apply(event("b", 1, "stored", *KEYS[2:4]))
    assert index.reach(KEYS) == {}, "nobody has more than a device: nothing is walked"
    index.apply(BlockEvent("a", 1, 2, "stored", (KEYS[2],), HOST))
    index.apply(BlockEvent("a", 1, 3, "stored", (KEYS[3], KEYS[5]), DISK))
    index.apply(BlockEvent("c", 1, 1, "stored", (KEYS[0],), DISK))
    assert index.reach(KEYS) == {"a": 4, "c": 1} and index.overlap(KEYS, 0.0) == {"a": 2}
    index.apply(event("a", 4, "stored", KEYS[4]))
    assert index.reach(KEYS) == {"a": 6, "c": 1}
    index.predict("c", KEYS[:3], FAR)
    assert index.reach(KEYS) == {"a": 6, "c": 3}
    index.apply(BlockEvent("a", 1, 5, "removed", (KEYS[2],), HOST))
    assert index.reach(KEYS) == {"a": 2, "c": 3}
    index.forget("a")
    assert index.reach(KEYS) == {"c": 3}
    index.join("a", 2)  # with bits that others had
    assert index.reach(KEYS) == {"c": 3}


def test_predictions_are_of_the_device_alone() -> None:
    index = joined("a")
    index.predict("a", KEYS[:3], FAR)
    index.apply(BlockEvent("a", 1, 1, "stored", tuple(KEYS[:2]), HOST))
    assert index.overlap(KEYS, 0.0) == {"a": 3} and index.overlap(KEYS, 0.0, HOST) == {"a": 2}
    index.retract("a", KEYS[:3])
    assert index.overlap(KEYS, 0.0) == {} and index.overlap(KEYS, 0.0, HOST) == {"a": 2}


def test_a_snapshot_replaces_what_was_known_of_every_medium() -> None:
    index = joined("a")
    index.apply(event("a", 1, "stored", KEYS[0]))
    index.apply(BlockEvent("a", 1, 2, "stored", tuple(KEYS[:3]), HOST))
    index.apply(BlockEvent("a", 1, 3, "stored", tuple(KEYS[:3]), DISK))
    filling = index.fill("a", 1, 9)
    assert isinstance(filling, Filling)
    filling.add(KEYS[:2])
    filling.add(KEYS[:4], HOST)
    assert index.overlap(KEYS, 0.0) == {"a": 1}, "what was known stays in use until the snapshot is complete"
    assert index.reach(KEYS) == {"a": 3}
    assert filling.end() == "ok"
    assert [index.overlap(KEYS, 0.0, medium) for medium in (DEVICE, HOST, DISK)] == [{"a": 2}, {"a": 4}, {}]
    assert index.reach(KEYS) == {"a": 4}
    assert index.entries == 6
    dropped = index.fill("a", 1, 10)
    assert isinstance(dropped, Filling)
    dropped.add(KEYS, DISK)
    dropped.drop()
    assert index.overlap(KEYS, 0.0, DISK) == {} and index.entries == 6
    index.sweep(100_000)
    assert sum(map(len, index._tables)) == 4, "what belongs to nobody is gone"


def test_only_leading_blocks_count() -> None:
    index = joined("a", "b", "c")
    index.apply(event("a", 1, "stored", KEYS[0], KEYS[1], KEYS[3]))
    index.apply(event("b", 1, "stored", KEYS[1], KEYS[2]))
    assert index.overlap(KEYS, 0.0) == {"a": 2}
    assert index.overlap([], 0.0) == {}


def test_after_a_lost_event_the_index_is_only_a_hint_until_the_snapshot() -> None:
    index = joined("a")
    assert index.needing_snapshot() == ["a"]  # it may hold anything
    assert index.apply(event("a", 1, "stored", KEYS[0])) == "ok" and index.needing_snapshot() == []
    assert index.apply(event("a", 3, "stored", KEYS[2])) == "gap"
    assert index.needing_snapshot() == ["a"] and index.overlap(KEYS, 0.0) == {"a": 1}  # still a hint
    assert index.snapshot("a", 1, 2, KEYS[:2]) == "ok"  # event 3, which has already arrived, is applied on top
    assert index.overlap(KEYS, 0.0) == {"a": 3} and index.needing_snapshot() == []


def test_a_late_event_closes_the_gap() -> None:
    index = joined("a")
    index.apply(event("a", 2, "removed", KEYS[0]))
    assert index.apply(event("a", 1, "stored", KEYS[0], KEYS[1])) == "ok"
    assert index.overlap(KEYS[1:], 0.0) == {"a": 1} and index.overlap(KEYS, 0.0) == {} and index.needing_snapshot() == []


def test_too_many_early_events_are_dropped_and_need_a_snapshot() -> None:
    index = joined("a", max_ahead=2)
    for sequence in range(2, 9):
        index.apply(event("a", sequence, "stored", KEYS[0]))
    assert sorted(index._workers["a"].ahead) == [7, 8]
    assert index.apply(event("a", 1, "stored", KEYS[0])) == "ok" and index.needing_snapshot() == ["a"]  # later events are known to exist
    assert index.snapshot("a", 1, 5, KEYS[:1]) == "gap" and index.needing_snapshot() == ["a"]
    assert index.snapshot("a", 1, 6, KEYS[:1]) == "ok" and index.needing_snapshot() == []


def test_reports_of_unknown_or_forgotten_workers_are_ignored() -> None:
    index = joined("a")
    index.forget("a")
    assert index.apply(event("a", 1, "stored", KEYS[0])) == "stale"
    assert index.snapshot("b", 1, 1, KEYS) == "stale"
    index.predict("b", KEYS, FAR)
    assert index.overlap(KEYS, 0.0) == {} and index.entries == 0 and index.needing_snapshot() == []


def test_a_restarted_worker_holds_nothing_from_before() -> None:
    index = joined("a")
    index.apply(event("a", 1, "stored", *KEYS))
    index.predict("a", KEYS, FAR)
    index.join("a", 1)
    assert index.overlap(KEYS, 0.0) == {"a": 6}  # the same process
    index.join("a", 2)
    assert index.overlap(KEYS, 0.0) == {} and index.needing_snapshot() == ["a"]


def test_a_prediction_expires_or_is_confirmed() -> None:
    index = joined("a", "b")
    for name in ("a", "b"):
        index.predict(name, KEYS[:3], 2.0)
    index.apply(event("a", 1, "stored", *KEYS[:3]))
    assert index.overlap(KEYS, 1.9) == {"a": 3, "b": 3} and index.entries == 6
    assert index.overlap(KEYS, 2.0) == {"a": 3} and index.entries == 3
    index.apply(event("a", 2, "removed", KEYS[2]))
    index.predict("b", KEYS[:1], 5.0)
    index.predict("b", KEYS[:1], 4.0)  # an earlier expiry does not shorten the prediction
    assert index.overlap(KEYS, 4.5) == {"a": 2, "b": 1}


def test_retracting_a_prediction_keeps_what_was_reported() -> None:
    index = PrefixIndex()
    index.join("a", 1)
    index.snapshot("a", 1, 0, KEYS[:1])
    index.predict("a", KEYS[:3], FAR)
    index.retract("a", KEYS[:3])
    index.retract("nobody", KEYS[:3])
    assert index.overlap(KEYS, 0.0) == {"a": 1} and index.entries == 1


def test_reports_override_predictions() -> None:
    index = joined("a")
    index.predict("a", KEYS[:3], FAR)
    index.apply(event("a", 1, "stored", *KEYS[:3]))
    index.apply(event("a", 2, "removed", KEYS[2]))
    assert index.overlap(KEYS, 0.0) == {"a": 2}


def test_the_size_of_the_index_is_limited() -> None:
    index = joined("a", "b", max_entries=4)
    index.predict("a", KEYS, FAR)
    assert index.entries == 4 and index.refused == 2
    index.apply(event("b", 1, "stored", *KEYS[:3]))
    assert index.overlap(KEYS, 0.0) == {"b": 3} and index.entries == 3  # predictions go first
    index.apply(event("b", 2, "stored", *KEYS))
    assert index.overlap(KEYS, 0.0) == {"b": 4} and index.entries == 4 and index.refused == 4
    index.snapshot("b", 1, 3, KEYS[:2])
    assert index.entries == 2
    index.apply(event("a", 1, "stored", *KEYS))
    assert index.entries == 4 and index.overlap(KEYS, 0.0) == {"a": 2, "b": 2}


def filling_of(index: PrefixIndex, worker: str, incarnation: int, sequence: int) -> Filling:
    filling = index.fill(worker, incarnation, sequence)
    assert isinstance(filling, Filling)
    return filling


def bits(index: PrefixIndex) -> int:
    """All that the tables hold, also what counts for nobody."""
    return sum(mask.bit_count() for table in index._tables for mask in table.values())


def test_a_snapshot_comes_in_parts_and_counts_from_its_end_on() -> None:
    """Predictions that came true are not counted twice, and those that did not are kept."""
    index = joined("a")
    index.apply(event("a", 1, "stored", KEYS[5]))
    index.predict("a", [KEYS[1], KEYS[4]], FAR)
    index.apply(event("a", 4, "removed", KEYS[2]))
    filling = filling_of(index, "a", 1, 3)
    filling.add(KEYS[:1])
    assert index.overlap(KEYS[5:], 0.0) == {"a": 1} and index.overlap(KEYS, 0.0) == {}
    filling.add([*KEYS[1:3], *KEYS[1:3]])
    assert filling.end() == "ok"
    assert index.overlap(KEYS, 0.0) == {"a": 2} and index.entries == 3
    assert index.overlap(KEYS[4:], 0.0) == {"a": 1} and index.overlap(KEYS[5:], 0.0) == {}


def test_a_snapshot_that_became_old_while_it_came_changes_nothing() -> None:
    index = joined("a", "b")
    filling = filling_of(index, "a", 1, 1)
    filling.add(KEYS[:3])
    index.apply(event("a", 1, "stored", KEYS[0]))
    index.apply(event("a", 2, "stored", KEYS[1]))
    assert filling.end() == "duplicate" and index.overlap(KEYS, 0.0) == {"a": 2}
    index.apply(event("b", 2, "stored", KEYS[0]))
    for incarnation in (2, None):
        filling = filling_of(index, "b", index._workers["b"].incarnation, 2)
        filling.add(KEYS)
        index.forget("b") if incarnation is None else index.join("b", incarnation)
        assert filling.end() == "stale" and index.overlap(KEYS, 0.0) == {"a": 2}
    filling = filling_of(index, "a", 2, 5)
    filling.add(KEYS)
    filling.drop()
    assert index.overlap(KEYS, 0.0) == {} and index.entries == 0
    index.sweep(10**6)
    assert bits(index) == 0


def test_a_worker_is_forgotten_at_once_and_its_entries_are_swept_in_parts() -> None:
    keys = [bytes([i, j]) * 8 for i in range(256) for j in range(8)]
    index = joined("a", "b", max_entries=10_000)
    index.apply(event("a", 1, "stored", *keys))
    index.apply(event("b", 1, "stored", *keys[::2]))
    index.join("a", 2)
    assert index.overlap(keys[:1], 0.0) == {"b": 1} and index.entries == len(keys) // 2
    assert bits(index) == len(keys) + len(keys) // 2  # nothing has been removed yet
    index.sweep(100)
    assert 0 < len(keys) + len(keys) // 2 - bits(index) <= 100 + len(keys) // 256 + 1
    new = len(index._names)
    index.join("c", 1)
    assert len(index._names) == new + 1  # the bit of the old process of `a` is not free yet
    index.apply(event("c", 1, "stored", *keys))  # what is stored pays for the sweep
    assert bits(index) == index.entries == len(keys) + len(keys) // 2
    index.join("d", 1)
    assert len(index._names) == new + 1 and index.overlap(keys[:1], 0.0) == {"b": 1, "c": 1}


def test_small_events_sweep_a_little_each() -> None:
    """Not a table each: a thousand events come in one turn of the event loop."""
    keys = [bytes([i, j]) * 8 for i in range(256) for j in range(8)]
    index = joined("a", "b", max_entries=10_000)
    index.apply(event("a", 1, "stored", *keys))
    index.forget("a")
    for number in range(1, 41):
        index.apply(event("b", number, "stored", bytes([7, number]) * 8))
    assert len(keys) - 40 * SWEEPS - 10 <= bits(index) - 40 < len(keys) - 40


def test_a_choice_looks_up_each_key_once_however_many_workers_hold_it() -> None:
    """One table for each worker took 18 ms for 256 workers that hold 512 keys."""

    class Counting(dict[bytes, int]):
        looked = 0

        def get(self, key: bytes, default: int = 0) -> int:  # type: ignore[override]
            Counting.looked += 1
            return super().get(key, default)

    names, keys = [f"w{i}" for i in range(64)], [bytes([i]) * 16 for i in range(200)]
    index = joined(*names, max_entries=10**6)
    for i, name in enumerate(names):
        index.apply(event(name, 1, "stored", *keys[: 3 * i]))
    index._tables = [Counting(table) for table in index._tables]
    assert index.overlap(keys, 0.0) == {name: 3 * i for i, name in enumerate(names) if i}
    assert Counting.looked <= len(keys)


def test_many_predictions_expire_in_parts() -> None:
    index = joined("a", max_entries=10**6)
    keys = [i.to_bytes(16, "little") for i in range(3 * MAX_EXPIRED)]
    for start in range(0, len(keys), 1024):
        index.predict("a", keys[start : start + 1024], 1.0)
    for left in (2, 1, 0):
        index.overlap(keys[:1], 1.0)
        assert index.entries == left * MAX_EXPIRED


def test_the_predictions_of_one_worker_are_limited() -> None:
    index = joined("a", max_entries=10**6)
    index.predict("a", (i.to_bytes(16, "little") for i in range(MAX_PREDICTED + 5)), 1.0)
    assert index.entries == MAX_PREDICTED and index.refused == 5


def test_a_snapshot_larger_than_the_index_is_truncated() -> None:
    index = PrefixIndex(max_entries=2)
    index.join("a", 1)
    index.snapshot("a", 1, 2, set(KEYS[:4]))
    assert index.entries == 2 and index.refused == 2
