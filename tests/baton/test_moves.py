"""Lives as tables."""

from enum import Enum

import pytest

from baton.moves import IllegalMove, Moves


class Light(Enum):
    RED = "red"
    GREEN = "green"


def test_a_pair_that_is_not_in_the_table_is_refused_and_named() -> None:
    moves = Moves({(Light.RED, "go"): Light.GREEN})
    assert moves.after(Light.RED, "go", "the light") is Light.GREEN
    with pytest.raises(IllegalMove, match=r"^the light is green: 'go' is not possible$"):
        moves.after(Light.GREEN, "go", "the light")
    with pytest.raises(IllegalMove, match=r"^it is off: 'stop' is not possible$"):
        Moves({("off", "start"): "on"}).after("off", "stop", "it")
