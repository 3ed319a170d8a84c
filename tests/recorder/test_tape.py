"""The ring: what is noted, and how much of it stays."""

import tracemalloc
from typing import Any

import pytest

from baton.recorder.tape import UNENDED, Raised, Tape


class Till:
    """A deciding object: what it answers depends on what came before."""

    def __init__(self) -> None:
        self.sum = 0
        self.heard: list[int] = []

    def pay(self, amount: int, note: bytes = b"") -> int:
        if amount < 0:
            raise ValueError("a debt")
        self.sum += amount
        self.tell()
        return self.sum

    def twice(self, amount: int) -> int:
        self.pay(amount)
        return self.pay(amount)

    def tell(self) -> None:
        self.listen(self.sum)

    def listen(self, amount: int) -> None:
        self.heard.append(amount)


class Watched:
    def __init__(self, span_s: float = 100.0, most_bytes: int = 1 << 20, state_bytes: int = 100) -> None:
        self.now, self.till = 0.0, Till()
        self.tape = Tape("till", span_s, most_bytes, lambda: self.now, lambda: (self.till.sum, state_bytes))

    def follow(self, *methods: str, **how: Any) -> Till:
        self.tape.follow("till", self.till, methods, **how)
        return self.till

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        return [(self.tape.methods[call[0]], *call[1:]) for stretch in self.tape.stretches() for call in stretch.calls]


def test_calls_and_answers_are_noted_after_the_state_before_them() -> None:
    watched = Watched()
    watched.till.pay(5)
    till = watched.follow("pay")
    assert till.pay(2, note=b"x") == 7
    with pytest.raises(ValueError, match="a debt"):
        till.pay(-1)
    assert [stretch.state for stretch in watched.tape.stretches()] == [5]
    assert watched.calls == [("till.pay", (2,), {"note": b"x"}, 7), ("till.pay", (-1,), {}, Raised("ValueError", "a debt"))]


def test_what_follows_from_a_noted_call_is_not_noted_but_what_listeners_do_is() -> None:
    watched = Watched()
    till = watched.follow("pay", "twice", "listen")
    till.twice(1)
    assert [call[0] for call in watched.calls] == ["till.twice"]
    watched.tape.opened(till, "tell")
    till.twice(1)
    assert [call[0] for call in watched.calls] == ["till.twice", "till.twice", "till.listen", "till.listen"]


def test_a_call_that_has_not_ended_is_no_answer() -> None:
    watched = Watched()
    seen: list[Any] = []
    watched.till.listen = lambda amount: seen.append(watched.calls[-1][3])  # type: ignore[method-assign]
    watched.follow("pay").pay(1)
    assert seen == [UNENDED] and watched.calls[-1][3] == 1


def test_arguments_may_be_kept_otherwise_and_answers_told_otherwise() -> None:
    watched = Watched()
    till = watched.follow("pay", kept={"pay": lambda amount, note=b"": ((amount,), len(note))}, told={"pay": lambda answer: answer > 3})
    assert till.pay(4, b"a" * 1000) == 4
    assert watched.calls == [("till.pay", (4,), None, True)] and watched.tape.bytes > 1000


def test_the_ring_holds_the_last_seconds() -> None:
    watched = Watched(span_s=50.0)
    till = watched.follow("pay")
    for second in range(300):
        watched.now = float(second)
        till.pay(1)
    kept = [answer for *_, answer in watched.calls]
    assert kept[-1] == 300 and 50 <= len(kept) <= 65 and kept == list(range(kept[0], 301))
    assert [stretch.state for stretch in watched.tape.stretches()] == list(range(kept[0] - 1, 300, 13))


@pytest.mark.parametrize("size", [0, 3000])
def test_the_ring_stays_within_its_bytes(size: int) -> None:
    most = 2 << 20
    watched = Watched(span_s=1e9, most_bytes=most)
    till = watched.follow("pay", kept={"pay": lambda amount, note=b"": ((amount, note), len(note))})
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20_000):
            till.pay(number + (1 << 40), bytes([number % 251]) * size)
            till.heard.clear()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert watched.tape.bytes <= most + 4000 and held <= most and watched.calls, f"{held} bytes are held"
    assert watched.tape.bytes > most / 2


def test_a_state_that_is_too_large_is_told_and_nothing_is_kept() -> None:
    watched = Watched(most_bytes=1 << 20, state_bytes=1 << 19)
    assert watched.follow("pay").pay(1) == 1
    assert "the state of till takes 0.5 MiB" in watched.tape.refused and not watched.tape.stretches()
