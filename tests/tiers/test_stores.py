"""What every store of KV must do (`baton.tiers.store`), whatever its medium."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from store_benches import BENCHES, CAPACITY, UNIT, Bench, content, get, held, key, put, unit

from baton.engine.core.block_key import DEVICE, MEDIA
from baton.tiers.store import StoreFailed, Wanted

ALL = range(2 * CAPACITY)


@pytest.fixture(params=BENCHES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with BENCHES[request.param]() as made:
        yield made
        made.store.close()


def test_what_is_put_comes_back_and_nothing_else(bench: Bench) -> None:
    store = bench.store
    assert store.medium in MEDIA and store.medium != DEVICE and store.unit_bytes == UNIT and store.capacity == CAPACITY
    assert store.keys() == [] and get(store, 0) == [False]
    assert put(store, 1, 2, 3) == [] and store.keys() == [key(1), key(2), key(3)]
    assert get(store, 3, 7, 1) == [True, False, True]
    assert held(store, ALL) == [1, 2, 3]


def test_a_get_reads_into_the_rows_of_an_array(bench: Bench) -> None:
    """As a pool's blocks are; and into memory that is aligned to nothing."""
    rows, odd = np.zeros((2, UNIT), np.uint8), bytearray(2 * UNIT + 1)
    put(bench.store, *range(4))
    into = [memoryview(rows[0]), memoryview(rows[1]), memoryview(odd)[1 : UNIT + 1], memoryview(odd)[UNIT + 1 :]]
    assert bench.store.get([Wanted(key(n), view) for n, view in enumerate(into)]) == [True] * 4
    assert rows.tobytes() == content(0) + content(1) and odd == b"\0" + content(2) + content(3)


def test_a_put_copies_the_rows_of_an_array(bench: Bench) -> None:
    rows = np.frombuffer(content(0) + content(1), np.uint8).reshape(2, UNIT).copy()
    bench.store.put([unit(n)._replace(data=memoryview(rows[n])) for n in (0, 1)])
    rows[:] = 0
    assert get(bench.store, 0, 1) == [True, True]


def test_the_longest_unused_goes_first(bench: Bench) -> None:
    store = bench.store
    for n in range(CAPACITY):
        put(store, n)
    assert get(store, 0, 2) == [True, True]
    lost = put(store, CAPACITY)
    assert lost[0] == key(1) and not set(lost) & {key(0), key(2), key(CAPACITY)}
    if bench.exact:
        assert lost == [key(1)] and store.keys() == [key(n) for n in (*range(3, CAPACITY), 0, 2, CAPACITY)]


def test_a_key_that_is_held_stays_as_it_is(bench: Bench) -> None:
    put(bench.store, 1)
    other = bytes(UNIT)
    assert bench.store.put([unit(2)._replace(key=key(1))]) == []
    assert bench.store.put([unit(3)._replace(data=memoryview(other)), unit(3)]) == [], "the first of one key counts"
    assert get(bench.store, 1, 3) == [True, False]


def test_of_more_units_than_there_is_room_for_some_are_returned(bench: Bench) -> None:
    put(bench.store, 100)
    lost = put(bench.store, *range(CAPACITY + 3))
    stayed = held(bench.store, range(101))
    assert len(stayed) == CAPACITY and {*lost, *map(key, stayed)} == {key(n) for n in (*range(CAPACITY + 3), 100)}
    assert all(get(bench.store, *stayed))


def test_a_flipped_bit_is_found_and_the_unit_is_gone(bench: Bench) -> None:
    put(bench.store, 1, 2, 3)
    bench.damage(key(2))
    assert get(bench.store, 1, 2, 3) == [True, False, True]
    assert held(bench.store, ALL) == [1, 3]
    assert put(bench.store, 2) == [] and get(bench.store, 2) == [True]


def test_without_a_flipped_bit_nothing_is_dropped(bench: Bench) -> None:
    """Negative control of the one above: its `damage` is what was found."""
    put(bench.store, 1, 2, 3)
    bench.damage(key(2))
    bench.damage(key(2))
    assert get(bench.store, 1, 2, 3) == [True] * 3


def test_a_unit_whose_digest_is_wrong_never_comes_back(bench: Bench) -> None:
    """Its bytes changed between the digest and the copy."""
    bench.store.put([unit(1)._replace(digest=bytes(16)), unit(2)])
    assert get(bench.store, 1, 2) == [False, True] and held(bench.store, ALL) == [2]


def test_a_dropped_unit_is_gone_and_its_room_is_used(bench: Bench) -> None:
    put(bench.store, *range(CAPACITY))
    bench.store.drop([key(3), key(77), key(3)])
    assert get(bench.store, 3) == [False] and 3 not in held(bench.store, ALL)
    assert put(bench.store, 20) == []
    assert get(bench.store, *range(CAPACITY)) == [n != 3 for n in range(CAPACITY)]


def test_a_closed_store_refuses(bench: Bench) -> None:
    put(bench.store, 1)
    bench.store.close()
    for call in (lambda: put(bench.store, 2), lambda: get(bench.store, 1)):
        with pytest.raises(StoreFailed, match="closed"):
            call()
    bench.store.drop([key(1)])
    bench.store.close()


@pytest.mark.parametrize("seed", range(3))
def test_whoever_follows_the_answers_knows_what_is_held(bench: Bench, seed: int) -> None:
    rng, known = random.Random(seed), set[int]()
    for _ in range(60):
        numbers = rng.sample(ALL, rng.randint(1, 6))
        match rng.choice(["put", "put", "get", "drop", "damage"]):
            case "put":
                lost = put(bench.store, *numbers)
                known = {n for n in {*known, *numbers} if key(n) not in lost}
            case "get":
                assert get(bench.store, *numbers) == [n in known for n in numbers]
            case "drop":
                bench.store.drop(list(map(key, numbers)))
                known -= set(numbers)
            case _ if known:
                bench.damage(key(bad := rng.choice(sorted(known))))
                assert get(bench.store, bad) == [False]
                known.discard(bad)
        assert set(held(bench.store, ALL)) == known and len(known) <= CAPACITY


def test_threads_never_get_what_they_did_not_ask_for(bench: Bench) -> None:
    """Slots are written again while they are read; at the end everything that is listed can be read."""

    def work(seed: int) -> int:
        rng, good = random.Random(seed), 0
        for _ in range(40):
            numbers = rng.sample(ALL, 4)
            match rng.choice(["put", "put", "get", "get", "drop"]):
                case "put":
                    put(bench.store, *numbers)
                case "get":
                    good += sum(get(bench.store, *numbers))
                case _:
                    bench.store.drop([key(numbers[0])])
        return good

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0
    left = held(bench.store, ALL)
    assert len(left) <= CAPACITY and all(get(bench.store, *left))
    put(bench.store, *range(100, 100 + CAPACITY))
    assert len(bench.store.keys()) == CAPACITY, "no room is lost"
