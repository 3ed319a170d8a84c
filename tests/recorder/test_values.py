"""Values of deciding code come back as they were, and a file makes no object of another class."""

import itertools
import json
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from baton.recorder.frozen import Chain, Freezer
from baton.recorder.values import Unreadable, ValueReader, ValueWriter, classes


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Fact:
    number: int
    share: float
    colour: Colour = Colour.RED


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


class Node:
    """Mutable, and part of a circle."""

    def __init__(self) -> None:
        self.other: Any = None
        self.values: list[Any] = []


KNOWN = classes([__name__])


def back(value: Any, **how: Any) -> Any:
    text = json.dumps(ValueWriter(**how).write(Freezer().take(value)), allow_nan=False)
    return ValueReader(KNOWN).read(json.loads(text))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, "text", 0.1 + 0.2, 1.0, math.inf, -math.inf, 5e-324, b"\x00\xff", (), (1, (2.0, "a"))),
        *([1, [2]], {1, 2}, frozenset({"a"}), {("a", 1): [0.5], "b": None}, Counter("abca"), deque([1, 2], 7)),
        *(OrderedDict([(2, None), (1, None)]), Fact(1, 0.5), Nothing(), Colour.RED, {"a": Fact(2, math.inf)}),
        [(1.0, True, None), (2.0, False, ("w", 3))],
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = back(value)
    assert found == value and type(found) is type(value)
    assert repr(found) == repr(value), "1 and 1.0 are equal"


def test_what_is_one_object_stays_one_object() -> None:
    one, other = Node(), Node()
    one.other, other.other, one.values = other, one, [other, other]
    found = back([one, other])
    assert found[0].other is found[1] and found[1].other is found[0] and found[0].values == [found[1]] * 2


def test_a_count_goes_on_and_a_chain_is_written_once() -> None:
    numbers = itertools.count(5)
    next(numbers)
    assert next(back(numbers)) == 6 and next(numbers) == 6
    chain = Chain((b"a" * 16, b"b" * 16))
    text = json.dumps(ValueWriter(rename=lambda key: key[::-1]).write([chain, chain]))
    assert text.count((b"a" * 16).hex()) == 1 and ValueReader(KNOWN).read(json.loads(text)) == [list(chain.keys)] * 2


def test_a_copy_does_not_change_with_its_object() -> None:
    node = Node()
    node.values = [{"a": 1}, {"b": 2}]
    frozen = Freezer().take(node)
    node.values[0]["a"] = 3
    node.values.append({})
    assert ValueReader(KNOWN).read(json.loads(json.dumps(ValueWriter().write(frozen)))).values == [{"a": 1}, {"b": 2}]


def test_a_file_makes_no_object_of_another_class() -> None:
    for name in ("os:system", "pathlib:Path", "builtins:eval", "baton.cluster.config:Config"):
        with pytest.raises(Unreadable, match="is no class of deciding code"):
            ValueReader(KNOWN).read({"c": name, "v": {}})


@pytest.mark.parametrize("value", [{"q": 1}, {"e": "x"}, {"r": 9}, {"b": "zz"}, {"t": 3}, {"?": 1}, {"c": [], "v": {}}, {}])
def test_what_nobody_wrote_is_refused(value: Any) -> None:
    with pytest.raises(Unreadable):
        ValueReader(KNOWN).read(value)


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(TypeError, match="iterator"):
        Freezer().take(iter(()))
    with pytest.raises(TypeError, match="Node"):
        ValueWriter().write(Node())
