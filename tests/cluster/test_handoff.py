"""Each fact of a handoff is declared once; everything tested here follows from the declaration."""

from dataclasses import asdict

import pytest

from baton.cluster.handoff import COUNTED, NAMES, SHOWN, Handoff
from baton.cluster.messages import plain
from baton.cluster.metric_table import BY_NAME
from baton.cluster.metrics import Book
from baton.v1 import generation_pb2, worker_pb2
from decode_worker.meter import HandoffMeter


def full(offset: int = 0) -> Handoff:
    """A handoff in which every fact has a different value."""
    kinds = {name: type(value) for name, value in asdict(Handoff()).items()}
    return Handoff(**{name: kind(at + offset + 1) for at, (name, kind) in enumerate(kinds.items())})


def test_every_fact_crosses_the_wire() -> None:
    assert Handoff(**plain(worker_pb2.HandoffFacts(**asdict(full())))) == full()
    assert Handoff(**plain(worker_pb2.HandoffFacts())) == Handoff()


def test_a_client_sees_a_subset_of_the_facts_under_the_same_names() -> None:
    public = [field.name for field in generation_pb2.Handoff.DESCRIPTOR.fields]
    assert set(public) < set(NAMES)


def test_facts_cannot_be_positional_arguments() -> None:
    with pytest.raises(TypeError):
        Handoff("nixl", 3)  # type: ignore[call-arg]


def test_handoff_attempts_add_up() -> None:
    total, one, two = full() + full(100), asdict(full()), asdict(full(100))
    for name, value in asdict(total).items():
        assert value == (two[name] if isinstance(value, str) else one[name] + two[name]), name
    assert full() + Handoff() == full() == Handoff() + full(), "adding an empty attempt changes nothing"


def test_every_counted_fact_reaches_its_metric() -> None:
    book = Book("decode", "decode-0")
    HandoffMeter(book).ended("ok", full())
    told = {family.name: family.series[0].value for family in book.families() if family.kind == "counter"}
    assert len(COUNTED) >= 4
    for name, fact in COUNTED.items():
        assert told[fact.counter] == getattr(full(), name) and BY_NAME[fact.counter].help == fact.help


def test_span_attributes_are_in_base_units() -> None:
    told = full().attributes()
    assert set(told) == {shown.span for shown in SHOWN.values() if shown.span}
    assert told["baton.digests_checked"] == full().digests_checked and told["baton.read_seconds"] == pytest.approx(full().read_ms / 1000)
