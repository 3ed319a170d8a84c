"""The two designs of a prefix index that are measured beside each other say the same."""

import random

import pytest
from fake_workers import MODEL
from loop_turns import FORMER, PRESENT, indexed, members, random_keys

from baton.cluster.records import BlockEvent
from router.policy import Choice, choose_decode


@pytest.mark.parametrize("seed", range(5))
def test_both_indexes_say_who_holds_how_much_of_a_prompt(seed: int) -> None:
    rng, prompt = random.Random(seed), random_keys(12)
    views = [indexed(design, members(8)) for design in (FORMER, PRESENT)]
    for name in (f"d{number}" for number in range(8)):
        held = prompt[: rng.randrange(13)]
        for view in views:
            view.models[MODEL].index.snapshot(name, 1, 0, set(held))
        for number in range(1, 6):
            kind, keys = rng.choice(("stored", "removed")), tuple(rng.sample(prompt, 3))
            for view in views:
                view.models[MODEL].index.apply(BlockEvent(name, 1, number, kind, keys))  # type: ignore[arg-type]
    former, present = (view.models[MODEL].index.overlap(prompt, 0.0) for view in views)
    assert former == present and len(present) > 1
    assert views[0].models[MODEL].index.entries == views[1].models[MODEL].index.entries
    chosen = [choose_decode(view.models[MODEL], prompt, 13 * 16, 0.0) for view in views]
    assert chosen[0] == chosen[1] and isinstance(chosen[0], Choice)
