"""One tier: its states, its bounds, and what it says of itself, with a clock that the test moves."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from tiered import UNIT, WITHIN_S, PlainStore

from baton.engine.core.colder import SAVED
from baton.engine.core.ghosts import Ghosts
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.tiers import tier as tier_module
from baton.tiers.store import StoreFailed, Wanted
from baton.tiers.tier import HANG_S, MOVES, RETRY_S, Bounds, LoadPiece, Save, Tier, TierState
from baton.tiers.ways import Landing, Through
from baton.tiers.worth import REST_S, WINDOW_S

POOL = KvPool(KvLayout("toy", "int64", 4, 1, 1, 8), 8)


class Bench:
    """A tier over a store that the test controls, and what it reports."""

    def __init__(self, capacity: int = 100, bounds: Bounds | None = None) -> None:
        self.now = 0.0
        self.store = PlainStore(capacity)
        self.held: set[bytes] = set()
        self.done = 0
        self.tier = Tier(self.store, bounds or Bounds(), POOL, self._moved, lambda: self.now)
        self.tier.start()

    def _moved(self, stored: bool, keys: list[bytes]) -> None:
        self.held = self.held | set(keys) if stored else self.held - set(keys)

    def save(self, *keys: bytes) -> None:
        self.tier.save(Save([(key, memoryview(bytearray(os.urandom(UNIT)))) for key in keys], self._saved))

    def _saved(self) -> None:
        self.done += 1

    def load(self, *keys: bytes, compute_s: float = 1.0) -> list[int]:
        """Which of the keys came."""
        came, over = list[int](), threading.Event()

        def take(units: Sequence[int], _: Landing) -> list[bool]:
            came.extend(units)
            return [True] * len(units)

        self.tier.load(LoadPiece(keys, self.now, compute_s, take, over.set))
        assert over.wait(WITHIN_S)
        return came


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "LOOK_S", 0.005)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.gate.set()
    made.tier.close()
    assert made.store.closed


def key(number: int) -> bytes:
    return bytes([number]) * 16


def test_what_is_saved_is_told_and_comes_back(bench: Bench) -> None:
    bench.save(key(1), key(2))
    until(lambda: bench.done == 1)
    assert bench.held == {key(1), key(2)} and bench.load(key(2), key(3), key(1)) == [0, 2]
    told = bench.tier.told(bench.now)
    assert (told.state, told.units, told.tally.reads, told.tally.hits, told.tally.written) == ("on", 2, 3, 2, 2)
    assert told.tally.saved_s == pytest.approx(2 / 3)


def test_a_load_that_came_too_late_saved_nothing(bench: Bench) -> None:
    bench.save(key(1))
    until(lambda: bench.done == 1)
    bench.store.gate.clear()
    over = threading.Event()
    bench.tier.load(LoadPiece([key(1)], bench.now, 1.0, lambda units, carrier: [True] * len(units), over.set))
    bench.now += 2.0
    bench.store.gate.set()
    assert over.wait(WITHIN_S)
    tally = bench.tier.told(bench.now).tally
    assert tally.hits == 1 and tally.saved_s == 0.0


def test_a_tier_that_does_not_pay_rests_and_is_tried_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.save(key(1))
    until(lambda: bench.done == 1)
    for _ in range(20):  # its reads bring nothing, and each takes a while
        bench.now += WINDOW_S / 10
        bench.tier.worth.read(8, 0, UNIT, 1.0, 0.0, bench.now)
    until(lambda: bench.tier.state is TierState.RESTING)
    assert bench.held == set() and "it saved 0.0 s and cost" in caplog.text
    bench.save(key(2))
    until(lambda: bench.done == 2)
    assert bench.load(key(1)) == [] and key(2) not in bench.store.units, "a tier that rests does nothing"
    bench.now += REST_S
    until(lambda: bench.tier.on)
    until(lambda: bench.held == {key(1)})
    assert bench.load(key(1)) == [0]


def test_a_tier_that_only_watches_says_so_and_does_not_rest(bench: Bench) -> None:
    """It spends nothing any more, and would not see who comes back. Negative control: once it is open, it rests."""
    bench.tier.ghosts = ghosts = Ghosts(1, 1)
    ghosts.left([key(1), key(2)], 0.0)
    for _ in range(20):
        bench.now += WINDOW_S / 10
        bench.tier.worth.read(8, 0, UNIT, 1.0, 0.0, bench.now)
    time.sleep(0.05)
    told = bench.tier.told(bench.now)
    assert (told.state, told.why) == ("watching", "none of 2 blocks that left the pool has come back") and bench.tier.on
    ghosts.asked([key(1)], [])
    until(lambda: bench.tier.state is TierState.RESTING)


def test_a_tier_that_pays_or_is_not_used_stays_on(bench: Bench) -> None:
    """Negative control."""
    for _ in range(20):
        bench.now += WINDOW_S / 10
        bench.tier.worth.read(8, 8, UNIT, 1.0, 2.0, bench.now)
    time.sleep(0.05)
    assert bench.tier.on
    bench.now += 10 * WINDOW_S
    time.sleep(0.05)
    assert bench.tier.on


def test_a_store_that_fails_is_tried_ever_more_rarely(bench: Bench) -> None:
    bench.store.broken = True
    bench.save(key(1))
    until(lambda: bench.tier.state is TierState.FAILED)
    waited = []
    for _ in range(4):
        waited.append(bench.tier._retry_at - bench.now)
        bench.now = bench.tier._retry_at
        until(lambda: bench.tier._retry_at > bench.now and bench.tier.state is TierState.FAILED)
    assert waited == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S]
    bench.store.broken = False
    bench.now = bench.tier._retry_at
    until(lambda: bench.tier.on and bench.tier.told(bench.now).why == "")


def test_a_reader_that_hangs_turns_its_tier_off_and_no_probe_turns_it_on_meanwhile(bench: Bench) -> None:
    bench.save(key(1))
    until(lambda: bench.done == 1)
    bench.store.hung.add("get")
    over = threading.Event()
    bench.tier.load(LoadPiece([key(1)], bench.now, 1.0, lambda units, carrier: [True] * len(units), over.set))
    until(lambda: bench.tier._asking)
    bench.tier.watch(bench.now + HANG_S / 2)
    assert bench.tier.on
    bench.now += 2 * HANG_S
    bench.tier.watch(bench.now)
    assert bench.tier.state is TierState.FAILED
    bench.now = bench.tier._retry_at + 1
    time.sleep(0.05)
    assert bench.tier.state is TierState.FAILED, "its writer could be asked, but a reader still waits"
    bench.store.hung.clear()
    until(lambda: bench.tier.on)
    assert over.is_set()


def test_more_than_waits_is_not_written_and_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.tier._most = 2
    bench.store.gate.clear()
    for number in range(6):
        bench.save(key(number))
    until(lambda: bench.done >= 3)
    bench.store.gate.set()
    until(lambda: bench.done == 6)
    tally = bench.tier.told(bench.now).tally
    assert tally.dropped + tally.written == 6 and tally.dropped in (3, 4)
    assert {key(4), key(5)} <= bench.held, "the newest are kept"


def test_none_of_the_blocks_that_an_engine_saves_at_a_time_is_left_out_however_large_they_are(bench: Bench) -> None:
    """They wait where they are. Copies of that size are what the test before this one is about."""
    bench.tier._most = 1
    bench.store.gate.clear()
    for start in range(0, SAVED, 16):
        bench.tier.save(Save([(key(i), i % POOL.num_blocks) for i in range(start, start + 16)], bench._saved))
    bench.store.gate.set()
    until(lambda: bench.done == SAVED // 16)
    assert bench.held == {key(i) for i in range(SAVED)} and bench.tier.told(bench.now).tally.dropped == 0


def test_what_is_written_keeps_to_its_rate() -> None:
    bench = Bench(bounds=Bounds(save_bytes_per_s=UNIT))
    bench.save(key(1), key(2))
    until(lambda: bench.done == 1)
    bench.save(key(3))
    time.sleep(0.05)
    assert bench.done == 1, "two units take two seconds"
    bench.now += 2.0
    until(lambda: bench.done == 2)
    bench.tier.close()


def test_what_others_put_there_is_learned_in_its_time() -> None:
    news: list[tuple[list[bytes], list[bytes]]] = [([key(7)], [])]
    bench = Bench(bounds=Bounds(refresh=lambda: news[0]))
    time.sleep(0.05)
    assert bench.held == set()
    bench.now += tier_module.REFRESH_S
    until(lambda: bench.held == {key(7)})
    news[0] = [], [key(7)]
    bench.now += tier_module.REFRESH_S
    until(lambda: bench.held == set())
    bench.tier.close()


def test_a_dropped_unit_stays_dropped_though_it_still_waited_to_be_written(bench: Bench) -> None:
    bench.store.gate.clear()
    bench.save(key(1))
    until(lambda: bench.tier._writing is not None)
    bench.save(key(2), key(3))
    bench.tier.drop([key(1), key(2)])
    bench.store.gate.set()
    until(lambda: bench.done == 2)
    until(lambda: bench.held == {key(3)})
    until(lambda: set(bench.store.units) == {key(3)})


@pytest.mark.parametrize("again", [True, False])
def test_what_a_reader_did_not_find_is_not_gone_if_it_has_been_written_meanwhile(
    bench: Bench, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the second writing it is gone, and that is told."""
    asked, go_on, get = threading.Event(), threading.Event(), bench.store.get

    def slow(wanted: Sequence[Wanted]) -> list[bool]:
        found = get(wanted)
        asked.set()
        assert go_on.wait(WITHIN_S)
        return found

    bench.save(key(1))
    until(lambda: bench.done == 1)
    monkeypatch.setattr(bench.store, "get", slow)
    bench.store.drop([key(1)])  # it was lost
    over = threading.Event()
    bench.tier.load(LoadPiece([key(1)], bench.now, 1.0, lambda units, carrier: [True] * len(units), over.set))
    assert asked.wait(WITHIN_S)
    if again:
        bench.save(key(1))
        until(lambda: bench.done == 2)
    go_on.set()
    assert over.wait(WITHIN_S)
    assert set(bench.store.units) == bench.held == ({key(1)} if again else set())


def test_a_save_that_is_given_up_while_it_is_copied_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has its block back then, and others fill it."""
    way = bench.tier._way
    assert isinstance(way, Through)
    copying, go_on, out = threading.Event(), threading.Event(), way._carrier.out

    def slow(blocks: Sequence[int]) -> Sequence[memoryview]:
        copying.set()
        assert go_on.wait(WITHIN_S)
        return out(blocks)

    monkeypatch.setattr(way._carrier, "out", slow)
    POOL.block(3)[:] = b"1" * UNIT
    bench.tier.save(Save([(key(1), 3)], bench._saved))
    assert copying.wait(WITHIN_S)
    bench.tier._fail(StoreFailed("a reader's call failed"))
    assert bench.done == 1, "at once, though the copy is not done"
    POOL.block(3)[:] = b"2" * UNIT
    bench.now += RETRY_S
    go_on.set()
    until(lambda: bench.tier.on)
    bench.save(key(2))
    until(lambda: bench.done == 2)
    assert set(bench.store.units) == bench.held == {key(2)}


def test_a_closed_tier_has_given_everything_back(bench: Bench) -> None:
    bench.store.gate.clear()
    for number in range(3):
        bench.save(key(number))
    closing = threading.Thread(target=bench.tier.close)
    closing.start()
    bench.store.gate.set()
    closing.join(WITHIN_S)
    assert bench.done == 3 and bench.tier.state is TierState.CLOSED
    bench.tier.state = TierState.ON  # the fixture closes it


def test_every_state_can_be_left_but_the_last() -> None:
    assert {state for state, _ in MOVES} == set(TierState) - {TierState.CLOSED}
