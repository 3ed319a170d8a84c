"""The experiments, their knobs, their load and their figures: all that decides, without a cluster."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from baton.cluster.errors import BatonError
from baton.cockpit import calculators, experiments
from baton.cockpit.experiments import EXPERIMENTS, STEPS, catalogue, find
from baton.cockpit.knobs import KNOBS, MOST_REQUESTS, Menu, Settings, Slider
from baton.cockpit.load import breaking, figures, load_of, rate_at
from baton.cockpit.meter import Looked, Meter, WorkerUsage, looked
from loadtest.record import Record

EVERY = sorted(EXPERIMENTS)


def refused(experiment: str, where: Any, **given: Any) -> str:
    """The field that is named."""
    with pytest.raises(BatonError) as caught:
        find(experiment).settings(where, given)
    return caught.value.violations[0].field


def test_there_are_seven_and_each_is_told_in_two_sentences() -> None:
    assert EVERY == ["breaking", "caching", "continuous", "size", "speculation", "static", "workers"]
    for one in EXPERIMENTS.values():
        assert one.says.count(". ") + 1 == 2 and one.says.endswith("."), f"{one.name}: two sentences"
        assert one.look and one.title and bool(one.real) != bool(one.instead), "what cannot be done says why"
        assert bool(one.own) == bool(one.instead), "and is done on a cluster of its own"
    assert {field.name for field in fields(Settings)} == {*KNOBS}, "each setting has a knob"
    assert [one["name"] for one in catalogue()["experiments"]] == [*EXPERIMENTS]


@pytest.mark.parametrize("name", EVERY)
def test_the_defaults_of_each_experiment_are_within_its_bounds(name: str) -> None:
    one = find(name)
    for where, taken in (("real", one.real), ("own", one.own), ("simulated", one.simulated)):
        if not taken:
            continue
        given = {key: catalogue()["experiments"][[*EXPERIMENTS].index(name)]["defaults"][where][key] for key in taken}
        assert one.settings(where, given) == one.settings(where, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if isinstance(knob, Slider)])
def test_a_slider_beyond_its_bounds_is_refused_by_name(name: str) -> None:
    knob = KNOBS[name]
    assert isinstance(knob, Slider)
    experiment = next(one for one in EXPERIMENTS.values() if name in one.simulated)
    others = [(where, one.name) for one in EXPERIMENTS.values() for where in ("real", "own") if name in one.knobs(where)]
    for wrong in (knob.least - knob.step, knob.most + knob.step, math.nan, math.inf, "4", True, None):
        assert refused(experiment.name, "simulated", **{name: wrong}) == name
    if knob.real_most is not None:
        over = {refused(one, where, **{name: knob.real_most + knob.step}) for where, one in others}
        assert over == {name}, "real clusters have a bound of their own"
    if float(knob.step).is_integer() and float(knob.least).is_integer():
        assert refused(experiment.name, "simulated", **{name: knob.least + 0.5}) == name, "no half of a token, worker or second"


def test_what_an_experiment_does_not_have_is_refused() -> None:
    assert refused("continuous", "real", model="llama-3.1-8b") == "model"
    assert refused("caching", "simulated", caching="maybe") == "caching" and refused("caching", "simulated", caching=1) == "caching"
    assert refused("static", "real") == "where" and refused("size", "real") == "where" and refused("caching", "own") == "where"
    assert refused("size", "own", model="llama-3.1-8b") == "model" and refused("size", "own", checkpoint="llama-3.1-8b") == "checkpoint"
    assert refused("size", "simulated", checkpoint="tale") == "checkpoint"
    for wrong in ("other", None, 3):
        with pytest.raises(BatonError) as caught:
            find(wrong)
        assert caught.value.violations[0].field == "experiment"


def test_a_run_as_a_whole_is_bounded() -> None:
    assert refused("continuous", "real", rate=20, duration_s=60) == refused("static", "own", rate=20, duration_s=60) == "rate"
    assert refused("continuous", "simulated", rate=100, duration_s=30, output=1024) == "output"
    assert refused("workers", "simulated", rate=100, duration_s=30, prompt=8192, output=1) == "prompt"
    assert find("continuous").settings("real", {"rate": 20, "duration_s": 30}).rate * 30 == MOST_REQUESTS["real"]


def test_the_same_settings_are_the_same_requests() -> None:
    one = find("caching")
    settings = one.settings("simulated", {"rate": 8.0, "duration_s": 10})
    load = load_of(one, settings, seed=3)
    assert load == load_of(one, settings, seed=3) != load_of(one, settings, seed=4)
    assert len(load.items) == len(load.times) and all(0 <= at < 10 for at in load.times) and 50 < len(load.times) < 120
    shared = int(settings.prompt * settings.shared)
    assert len({item.tokens[:shared] for item in load.items}) == 1 and len({item.tokens for item in load.items}) == len(load.items)
    assert len({item.tokens[:16] for item in load_of(one, settings, 3, shares=False).items}) == len(load.items), "nothing shared"


def test_lengths_spread_around_what_is_set() -> None:
    one = find("static")
    items = load_of(one, one.settings("simulated", {"rate": 20.0, "duration_s": 30, "output": 100, "spread": 0.9})).items
    outputs = [item.output_tokens for item in items]
    assert min(outputs) < 20 and max(outputs) > 180 and sum(outputs) / len(outputs) == pytest.approx(100, rel=0.1)
    even = load_of(one, one.settings("simulated", {"spread": 0, "output": 64})).items
    assert {item.output_tokens for item in even} == {64}


def test_the_rate_of_the_breaking_point_rises_in_steps() -> None:
    one = find("breaking")
    settings = one.settings("simulated", {"rate": 40.0, "duration_s": 50, "prompt": 16})
    times = load_of(one, settings).times
    counts = [sum(10 * step <= at < 10 * (step + 1) for at in times) for step in range(STEPS)]
    assert counts == sorted(counts) and counts[-1] == pytest.approx(400, rel=0.2) and counts[0] == pytest.approx(80, rel=0.4)
    assert [rate_at(one, settings, at) for at in (0, 9.9, 10, 49, 60)] == [8, 8, 16, 40, 40]
    assert rate_at(find("static"), settings, 3) == 40


def record(due: float, ttft: float = 0.1, outcome: Any = "ok", tokens: int = 11, gap: float = 0.01) -> Record:
    times = tuple(due + ttft + gap * n for n in range(tokens)) if outcome == "ok" else ()
    ended = times[-1] if times else due + ttft
    reason = "" if outcome == "ok" else "SATURATED"
    return Record(0, "", due, due, times, ended, outcome, reason, 100, len(times), tokens, 40, {}, "", "d0", 0, "", 0, 0, 0)


def test_figures_of_a_run_are_those_of_its_records() -> None:
    one = find("continuous")
    settings = one.settings("real", {"duration_s": 10})
    records = [record(float(second)) for second in range(9)] + [record(9.0, outcome="refused")]
    told = figures(one, settings, load_of(one, settings), records, 10)
    assert told["requests"] == 10 and told["completed"] == 9 and told["outcomes"] == {"ok": 9, "refused: SATURATED": 1}
    assert told["ttft_p50"] == pytest.approx(0.1) and told["tpot_p95"] == pytest.approx(0.01) and told["cached"] == pytest.approx(0.4)
    assert told["goodput"] == pytest.approx(0.9) and told["attainment"] == pytest.approx(0.9) and "breaks" not in told
    assert told["tokens_per_s"] == pytest.approx(99 / 9.1, rel=0.01)
    empty = figures(one, settings, load_of(one, settings), [], 0)
    assert empty["requests"] == 0 and empty["ttft_p50"] is None and empty["attainment"] is None and empty["cached"] is None


def test_the_breaking_point_is_the_first_step_that_misses_its_objectives() -> None:
    one = find("breaking")
    settings = one.settings("simulated", {"rate": 10.0, "duration_s": 50, "ttft_ms": 1000})
    load = load_of(one, settings)

    def broke(slow_from: float) -> dict[str, Any]:
        return breaking(settings, load, [record(second / 2, 5.0 if second / 2 >= slow_from else 0.1) for second in range(100)])

    assert broke(30.0) == {"held": 6.0, "broke": 8.0} and broke(0.0) == {"held": None, "broke": 2.0}
    assert broke(100.0) == {"held": 10.0, "broke": None}
    assert figures(one, settings, load, [record(1.0)], 50)["breaks"] == {"held": 2.0, "broke": None}


def test_a_point_holds_what_came_in_its_second_and_the_next_one_begins_anew() -> None:
    meter = Meter()
    meter.tokens, meter.in_flight, meter.firsts, meter.gaps = 30, 2, [0.1, 0.3], [0.02]
    told = meter.point(1.0, 4.0, Looked(3, 0.5, 0.25))
    assert (told["tokens"], told["in_flight"], told["queued"], told["kv"], told["batch"]) == (30, 2, 3, 0.5, 0.25)
    assert told["ttft_p50"] == pytest.approx(0.2) and told["tpot_p50"] == pytest.approx(0.02) and told["rate"] == 4.0
    after = meter.point(2.0, 4.0, Looked())
    assert after["tokens"] == 0 and after["ttft_p50"] is None and after["queued"] is None and after["in_flight"] == 2


def test_use_is_that_of_the_workers_that_decode() -> None:
    workers = [WorkerUsage(False, 1, 4, 0, 100, 8), WorkerUsage(True, 2, 1, 75, 100, 8), WorkerUsage(True, 4, 0, 75, 100, 8)]
    assert looked(2, workers) == Looked(7, 0.25, 6 / 16)
    assert looked(0, []) == Looked(0, None, None) and looked(0, [WorkerUsage(True, 9, 0, 1, 1, 4)]).batch == 1.0


def test_the_calculators_say_what_baton_size_says() -> None:
    told = calculators.size({"model": "llama-3.1-70b", "devices": "4", "batch": "16"})
    rows = {one["name"]: one for one in told["figures"]}
    assert rows["weights"]["shown"] == "141 GB" and rows["weights"]["formula"] == "parameters x 16 bits"
    assert rows["KV of a prompt"]["value"] == pytest.approx(1.34e9, rel=0.01)
    assert "a bound" in told["from"] and all(one["name"] in {field["name"] for field in calculators.form()} for one in calculators.form())


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompt": "0"}, "prompt"), ({"prompt": "many"}, "prompt"), ({"prompt": "nan"}, "prompt"), ({"model": "gpt"}, "model"),
        ({"cached": "4096"}, "cached"), ({"colour": "red"}, "colour"), ({"model": "llama-3.1-70b", "device": "a10"}, "model"),
    ],
)  # fmt: skip
def test_calculators_refuse_by_name(given: dict[str, str], field: str) -> None:
    with pytest.raises(BatonError) as caught:
        calculators.size(given)
    assert caught.value.violations[0].field == field


def test_the_knobs_are_told_as_they_are() -> None:
    told = catalogue()["knobs"]
    for name, knob in KNOBS.items():
        if isinstance(knob, Menu):
            assert told[name]["options"] == dict(knob.options)
        else:
            assert (told[name]["least"], told[name]["most"], told[name]["step"]) == (knob.least, knob.most, knob.step)
    assert replace(Settings(), rate=5.0).rate == 5.0 and experiments.find("static").settings("simulated", {}).prefill == 0
