"""What is probed next, and what carries KV: every case of the decision."""

import pytest

from kvtransfer.choose import ENOUGH, WAYS, Probe, choose, next_way

IPC, VRAM, HOST, TCP = WAYS


def good(way: str, rate: float) -> Probe:
    return Probe(way, rate)


def bad(way: str, why: str = "it fails") -> Probe:
    return Probe(way, why=why)


@pytest.mark.parametrize(
    ("offered", "probes", "expected"),
    [
        (WAYS, [], IPC),
        ((TCP, VRAM), [], VRAM),
        (WAYS, [good(IPC, 40e9)], None),
        (WAYS, [good(IPC, ENOUGH[IPC])], None),
        (WAYS, [good(IPC, 1e9)], VRAM),
        (WAYS, [bad(IPC)], VRAM),
        (WAYS, [bad(IPC), good(VRAM, 20e9)], None),
        (WAYS, [bad(IPC), bad(VRAM), good(HOST, 4e9)], None),
        (WAYS, [bad(IPC), bad(VRAM), good(HOST, 1e9)], TCP),
        (WAYS, [bad(IPC), bad(VRAM), bad(HOST)], TCP),
        (WAYS, [bad(IPC), bad(VRAM), bad(HOST), good(TCP, 1e3)], None),
        (WAYS, [bad(way) for way in WAYS], None),
        ((), [], None),
    ],
)
def test_ways_are_tried_in_order_until_one_is_as_fast_as_it_should_be(
    offered: list[str], probes: list[Probe], expected: str | None
) -> None:
    assert next_way(offered, probes) == expected


@pytest.mark.parametrize(
    ("probes", "way"),
    [
        ([good(IPC, 40e9)], IPC),
        ([good(IPC, 1e9), good(VRAM, 2e9)], IPC),  # not much faster
        ([good(IPC, 1e9), good(VRAM, 2.1e9)], VRAM),
        ([good(IPC, 1e9), good(VRAM, 1.5e9), good(HOST, 2.5e9)], VRAM),  # of the rest, the first that is not much slower
        ([good(IPC, 1e9), bad(VRAM), good(HOST, 0.1e9), good(TCP, 3e9)], TCP),
        ([bad(IPC), bad(VRAM), bad(HOST), good(TCP, 1e3)], TCP),
        ([bad(IPC), good(HOST, 1e9), good(TCP, 0.9e9)], HOST),
        ([bad(way) for way in WAYS], ""),
        ([], ""),
    ],
)
def test_the_first_way_that_is_not_much_slower_than_another_carries_kv(probes: list[Probe], way: str) -> None:
    choice = choose(probes, {})
    assert choice.way == way and choice.rate == next((probe.rate for probe in probes if probe.way == way), 0.0)
    assert way not in choice.passed_over
    assert set(choice.passed_over) == {p.way for p in probes if p.why or (way and WAYS.index(p.way) < WAYS.index(way))}


def test_whoever_is_passed_over_has_a_reason() -> None:
    choice = choose([bad(IPC, "it lies"), good(VRAM, 0.5e9), good(TCP, 2e9)], {HOST: "the peer has none"})
    assert choice.passed_over == {
        IPC: "it lies",
        VRAM: "0.5 GB/s, where tcp reaches 2 GB/s",
        HOST: "the peer has none",
    }


def test_a_way_with_other_bytes_is_out_however_fast_it_is() -> None:
    """Negative control: by its rate alone it would win."""
    assert choose([Probe(IPC, 900e9, "it delivers other bytes than the peer has"), good(TCP, 1e9)], {}).way == TCP
    assert choose([Probe(IPC, 900e9), good(TCP, 1e9)], {}).way == IPC
