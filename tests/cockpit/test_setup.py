"""The cluster of a simulated run: its sizes and times follow from the settings, and what is a formula is said."""

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.errors import BatonError
from baton.cockpit.experiments import find
from baton.cockpit.knobs import Settings
from baton.cockpit.load import load_of
from baton.cockpit.setup import GUESS_COST, Guessing, Simulation, simulation_of
from baton.plan.formulae import tokens_per_step
from baton.profile.file import Profile
from baton.profile.models import Fitted, Work
from baton.simulate.engine import StepPace
from baton.simulate.workers import Times

SHORT: dict[str, Any] = {"rate": 2.0, "duration_s": 5, "prompt": 64, "output": 16}


def made(measured: Path | None = None, **settings: Any) -> Simulation:
    one = Settings(**{**SHORT, **settings})
    return simulation_of(one, load_of(find("size"), one), measured)


def test_guesses_take_what_the_formula_says() -> None:
    plain = Times(pace=StepPace(step_s=0.02, prompt_token_s=0.001, sequence_s=0.001))
    pace = Guessing(plain, acceptance=0.5, guesses=3)
    step = (0.02 + 4 * 8 * 0.001 + 3 * GUESS_COST * (0.02 + 8 * 0.001)) / tokens_per_step(0.5, 3)
    assert pace(Work(decodes=8)) == pytest.approx(step)
    assert pace(Work(tokens=10, decodes=8)) == plain.pace(Work(tokens=10, decodes=8)), "a step with a prompt has no guesses"
    assert Guessing(plain, 0.9, 4)(Work(decodes=1)) < plain.pace(Work(decodes=1)) < Guessing(plain, 0.0, 4)(Work(decodes=1))
    gains = [plain.pace(Work(decodes=batch)) / Guessing(plain, 0.7, 4)(Work(decodes=batch)) for batch in (1, 16, 256)]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1 > gains[-1], "it stops paying in large batches"


def test_speculation_is_said_to_be_a_formula_and_changes_the_pace() -> None:
    off, on = made(), made(speculation="on", acceptance=0.8)
    assert off.doubts == ("nothing was measured: the profile is from the sheet h100",)
    assert "guesses are a formula" in on.doubts[-1] and "a = 0.8" in on.doubts[-1]
    assert on.times.pace(Work(decodes=4)) < off.times.pace(Work(decodes=4))


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
