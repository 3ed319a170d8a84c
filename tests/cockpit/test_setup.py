"""The cluster of a simulated run: its sizes and times follow from the settings, and what is a formula is said."""

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.errors import BatonError
from baton.cockpit.experiments import find
from baton.cockpit.knobs import Settings
from baton.cockpit.load import load_of
from baton.cockpit.setup import GUESS_COST, Simulation, simulation_of
from baton.profile.file import Profile
from baton.profile.models import Fitted, Work
from baton.simulate.guesses import GuessChances

SHORT: dict[str, Any] = {"rate": 2.0, "duration_s": 5, "prompt": 64, "output": 16}


def made(measured: Path | None = None, **settings: Any) -> Simulation:
    one = Settings(**{**SHORT, **settings})
    return simulation_of(one, load_of(find("size"), one), measured)


def test_guesses_are_said_to_be_assumed_and_are_as_they_were_set() -> None:
    off, on = made(), made(speculation="on", acceptance=0.8, guesses=3)
    assert off.doubts == ("nothing was measured: the profile is from the sheet h100",)
    assert on.doubts[:-1] == off.doubts and on.doubts[-1].startswith("guesses are assumed: 3 a step at most, each right with 0.8")
    assert (on.setting.sizes.speculation, on.setting.sizes.speculation_tokens) == ("draft", 3) and off.setting.sizes.speculation == "none"
    assert on.times.guesses == GuessChances(1.0, 0.0, 0.8, 0.8) and off.times.guesses is None
    plain = on.times.pace(Work(decodes=8))
    assert plain == off.times.pace(Work(decodes=8)), "a step without guesses takes what it took"
    drafts = on.times.pace(Work(decodes=8, guesses=24, drafts=3)) - on.times.pace(Work(decodes=8, guesses=24))
    assert drafts == pytest.approx(3 * GUESS_COST * on.times.pace(Work(decodes=1)))
    assert on.times.pace(Work(decodes=8, guesses=4000)) > 1.5 * plain, "rows count where computing binds"


def test_a_larger_model_is_slower_and_leaves_less_room_and_fewer_bits_take_it_back() -> None:
    small, large, rounded = made(gpus=4), made(gpus=4, model="llama-3.1-70b"), made(gpus=4, model="llama-3.1-70b", weight_bits="4.5")
    steps = [each.times.pace(Work(decodes=1, context=100)) for each in (small, large, rounded)]
    room = [each.setting.sizes.kv_blocks for each in (small, large, rounded)]
    assert steps[1] > 4 * steps[0] and steps[2] < steps[1] / 2 and room[1] < room[2]
    assert made(kv_bits="8").setting.sizes.kv_blocks == pytest.approx(2 * made().setting.sizes.kv_blocks, abs=2)
    eight, sixteen = (made(gpus=n, model="llama-3.1-70b").setting.sizes.kv_blocks for n in (8, 16))
    assert sixteen < 1.3 * eight, "16 GPUs keep each of 8 heads of KV twice"
    with pytest.raises(BatonError) as caught:
        made(model="llama-3.1-70b", device="a10")
    assert caught.value.violations[0].field == "model"


def test_sizes_are_those_that_are_set() -> None:
    sizes = made(prefill=0, decode=3, batch=7, batching="static").setting.sizes
    assert (sizes.prefill, sizes.decode, sizes.max_num_seqs, sizes.limits.batching) == (0, 3, 7, "static")
    assert made().setting.sizes.limits.batching == "continuous"


def test_a_measured_profile_is_used_and_no_doubt_is_left(tmp_path: Path) -> None:
    step = {"step": 2e-3, "read": 0.0, "tokens": 5e-5, "pairs": 1e-8, "decodes": 3e-4, "context": 1e-7, "mixed": 0.0}
    file = tmp_path / "profile.yaml"
    models = {"step": Fitted(step), "handoff": Fitted({"base": 0.004, "byte": 1e-9})}
    Profile("measured", "a processor", "m", {"kv_blocks": 99}, 6144.0, "sum", models).save(file)
    told = made(file, by="profile")
    assert told.doubts == () and told.setting.sizes.kv_blocks == 99 and told.profile.model == "m"
    assert told.times.pace(Work(decodes=2)) == pytest.approx(2e-3 + 2 * 3e-4)
    for measured in (None, file):
        with pytest.raises(BatonError) as caught:
            made(measured, by="profile", prompt=1584, output=1)
        assert caught.value.violations[0].field == ("by" if measured is None else "prompt")
