"""The profile: its file, its models, and the fit."""

import random
from pathlib import Path

import pytest

from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.shape import KNOWN
from baton.plan.sheet import profile_of
from baton.profile.file import Profile, ProfileError
from baton.profile.fit import fit
from baton.profile.models import Fitted, Work, pairs_of, step_seconds, works_of_prompt

TRUE = {"step": 1e-3, "tokens": 4e-5, "pairs": 2e-8}
NAMES = tuple(TRUE)


def measured(noise: float, seed: int = 1) -> list[tuple[dict[str, float], float]]:
    rng, rows = random.Random(seed), []
    for new in (16, 64, 128, 256, 512):
        for cached in (0, 256, 1024):
            counts = {"step": 1.0, "tokens": float(new), "pairs": pairs_of(new, cached)}
            rows.append((counts, sum(TRUE[name] * counts[name] for name in NAMES) * rng.gauss(1, noise)))
    return rows


def test_a_fit_finds_the_numbers_that_made_the_times() -> None:
    exact = fit(measured(0.0), NAMES, "made")
    assert exact.values == pytest.approx(TRUE, rel=1e-6) and exact.error == pytest.approx(0, abs=1e-6) and exact.rows == 15
    noisy = fit(measured(0.05), NAMES, "made")
    assert noisy.values == pytest.approx(TRUE, rel=0.3) and 0.02 < noisy.error < 0.1
    for name in NAMES:
        drawn = sorted(draw[name] for draw in noisy.draws)
        assert drawn[0] < drawn[-1], "the draws say how sure the number is"
    assert fit(measured(0.05), NAMES, "made") == noisy, "repeatable"


def test_no_number_is_negative_where_plain_least_squares_would_have_it_so() -> None:
    rows = [({"a": 1.0, "b": float(n)}, 1.0 + n - 0.2 * (n == 1)) for n in range(1, 9)] + [({"a": 1.0, "b": 0.0, "c": 1.0}, 0.5)]
    found = fit(rows, ("a", "b", "c"), "made")
    assert found.values["c"] == 0 and min(found.values.values()) >= 0


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="2 measurements cannot tell 3 numbers"):
        fit(measured(0)[:2], NAMES, "made")
    with pytest.raises(ValueError, match="not above 0"):
        fit([({"step": 1.0}, 0.0)], ("step",), "made")


def test_a_step_is_a_sum_on_a_core_and_the_slower_of_two_where_memory_works_beside() -> None:
    numbers = {"step": 1.0, "read": 5.0, "tokens": 0.1, "pairs": 0.0, "decodes": 0.5, "context": 0.01, "mixed": 0.25}
    alone, both = Work(10, pairs_of(10, 0)), Work(10, 55.0, 4, 100)
    assert step_seconds(numbers, "sum", alone) == pytest.approx(1 + 5 + 1) and step_seconds(numbers, "roof", alone) == pytest.approx(1 + 5)
    assert step_seconds(numbers, "sum", both) == pytest.approx(1 + 5 + 1 + 2 + 1 + 0.25) and both.mixed and not alone.mixed


def test_the_steps_of_a_prompt_compute_each_token_once_and_every_pair() -> None:
    works = works_of_prompt(1000, 100, 256)
    assert [work.tokens for work in works] == [256, 256, 256, 132]
    assert sum(work.pairs for work in works) == pairs_of(900, 100)


def test_a_file_says_what_the_profile_said(tmp_path: Path) -> None:
    made = fit(measured(0.05), NAMES, "made")
    profile = Profile(
        "measured", "a processor", "tale", {"threads": 1}, 6144.0, "sum", {"step": made}, {"prompt": (16.0, 1024.0)}, "c", "t", 0.5
    )
    profile.save(tmp_path / "p.yaml")
    read = Profile.load_file(tmp_path / "p.yaml")
    assert read.values("step") == pytest.approx(profile.values("step"), rel=1e-5)
    assert len(read.models["step"].draws) == len(made.draws) and read.region == profile.region and read.load == 0.5
    assert read.values("handoff") == {"base": 0.0, "byte": 0.0}, "what is missing takes no time"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("version: 1", "version: 2"), "version: is not 1"),
        (("form: roof", "form: cube"), "form: 'cube' is not sum or roof"),
        (("  step:\n    values", "  stop:\n    values"), "models.stop: is none of"),
        (("      read:", "      red:"), "models.step.red: is none of"),
        (("base: 0.002", "base: -1"), "models.handoff.base: -1.0 is not a finite number"),
        (("model: llama-3.1-8b\n", ""), "model: is missing"),
        (("source: sheet", "colour: red\nsource: sheet"), "colour: is no field"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_field(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    profile_of(KNOWN["llama-3.1-8b"], DEVICES["h100"], MEASURED).save(path)
    Profile.load_file(path)
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(ProfileError, match=words):
        Profile.load_file(path)


def test_draws_differ_as_much_as_the_errors_say() -> None:
    profile = Profile("measured", "", "m", {}, 1.0, "sum", {"step": Fitted({"step": 1.0}, error=0.1), "start": Fitted({"base": 2.0})})
    rng = random.Random(3)
    drawn = [profile.drawn(rng) for _ in range(400)]
    steps = sorted(each.values("step")["step"] for each in drawn)
    assert 0.8 < steps[20] < 0.9 and 1.1 < steps[-20] < 1.25, "90 % within 1.64 standard deviations"
    assert {each.values("start")["base"] for each in drawn} == {2.0}


def test_the_error_of_loads_is_of_all_their_times_together() -> None:
    crowding = Fitted({"prompt": 0.5, "decode": 0.5}, error=0.1)
    models = {"step": Fitted({"step": 1.0}), "path": Fitted({"request": 2.0}), "start": Fitted({"base": 2.0}), "crowding": crowding}
    rng = random.Random(3)
    drawn = [Profile("measured", "", "m", {}, 1.0, "sum", models).drawn(rng) for _ in range(400)]
    steps = sorted(each.values("step")["step"] for each in drawn)
    assert 0.8 < steps[20] < 0.9 and 1.1 < steps[-20] < 1.25
    assert all(each.values("path")["request"] == 2 * each.values("step")["step"] for each in drawn)
    assert {(each.values("start")["base"], each.values("crowding")["prompt"]) for each in drawn} == {(2.0, 0.5)}
    without = Profile("measured", "", "m", {}, 1.0, "sum", {name: each for name, each in models.items() if each is not crowding})
    assert without.drawn(rng).values("step")["step"] == 1.0, "negative control: no load was measured"


def test_what_lies_outside_the_measured_region_is_named() -> None:
    profile = Profile("measured", "", "m", {}, 1.0, "sum", {"step": Fitted({"step": 1.0})}, {"prompt": (16.0, 1024.0)})
    assert profile.outside({"prompt": 512, "colour": 7}) == []
    assert profile.outside({"prompt": 4096}) == ["prompt 4096 (measured: 16 to 1024)"]


def test_a_sheet_says_what_the_formulae_say() -> None:
    """A decode step of one sequence reads the weights: 16 GB at 70 % of 3.35 TB/s."""
    profile = profile_of(KNOWN["llama-3.1-8b"], DEVICES["h100"], MEASURED)
    step = profile.values("step")
    assert step_seconds(step, "roof", Work(decodes=1)) - step["step"] == pytest.approx(15.0e9 / (0.7 * 3350e9), rel=0.01)
    assert step_seconds(step, "roof", works_of_prompt(4096, 0, 8192)[0]) == pytest.approx(0.0973, rel=0.02)
    assert profile.models["step"].error >= 0.2, "assumed is less sure than measured"
    with pytest.raises(ValueError, match="141"):
        profile_of(KNOWN["llama-3.1-70b"], DEVICES["h100"], MEASURED)
