"""No false verdict: an arm is judged by runs that count, or said not to be judged, and the verdict never contradicts the table below it."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from campaigns import campaign, counted, late
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from loadtest.campaign import Arm, Campaign, Probe
from loadtest.compare import ATTAINMENT
from loadtest.pictures import best_of_each_variant, paint
from loadtest.report import as_json, console_table, draw, sections
from loadtest.results import Results, best, by_variant
from loadtest.verdict import Verdict, over_variants, verdict

NAMES = ("a", "b", "c")
SPOILED: dict[str, Callable[[Probe], Probe]] = {
    "sound": lambda run: run,
    "late": late,
    "early": lambda run: replace(run, partial="the server is gone"),
    "lost": lambda run: replace(run, due=run.due + 1),
}


@st.composite
def campaigns(draw: st.DrawFn) -> Campaign:
    """Any of three arms, one to four seeds, one to three rates; every run sound, void, ended early or missing. Often all of one kind."""
    seeds = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True))
    rates = draw(st.lists(st.sampled_from((1.0, 2.0, 4.0)), min_size=1, max_size=3, unique=True))
    usual = {name: draw(st.sampled_from(("sound", "sound", "late", "early", "lost", "missing"))) for name in NAMES}
    probes = []
    for seed in seeds:
        for name in NAMES:
            for rate in rates:
                kind = draw(st.sampled_from((usual[name], usual[name], *SPOILED, "missing")))
                met, missed = draw(st.sampled_from(((10, 0), (9, 1), (8, 2), (5, 5), (0, 10), (12, 0), (1, 0), (0, 1))))
                if kind != "missing":
                    why = draw(st.sampled_from(("sweep", "sweep", "bisection")))
                    probes.append(SPOILED[kind](counted(name, rate, seed, met, missed, why=why)))
    return campaign(probes, arms=tuple(Arm(name, {}) for name in NAMES))


@settings(max_examples=150)
@given(campaigns())
def test_the_verdict_never_contradicts_the_table(whole: Campaign) -> None:
    results, said = Results.of(whole), verdict(whole)
    named = {arm for arm in NAMES for part in (said.winner, said.leader) if part == arm}
    named |= {name for one in said.comparisons for name in (one.ahead, one.behind)}
    named |= {name for one in said.crossovers for name in (one.below, one.above)}
    text = " ".join(said.sentences)
    for arm in NAMES:
        found, points = said.bests[arm], results.points(arm)
        if not points:
            assert found.unjudged and arm not in named, "an arm without sound runs neither wins nor loses"
        if found.unjudged:
            assert f"{arm} was not judged: {found.unjudged}." in said.sentences and not found.goodputs and found.rate is None
            assert said.winner is None and said.status == "no verdict"
        elif found.rate is None:
            lowest = min(run.probe.rate for run in results.runs if run.probe.arm == arm)
            assert points[0].rate == lowest and points[0].attainment < ATTAINMENT, "a `never` is shown at the lowest rate"
        else:
            assert set(found.goodputs) <= {run.probe.seed for run in results.sound(arm)}
        if f"{arm} never holds" in text:
            assert points and points[0].attainment < ATTAINMENT
    if said.winner is not None:
        check_winner(results, said)
    assert (said.status == "no verdict") == bool(said.advice) and (said.status == "winner") == (said.winner is not None)
    assert not re.search(r"\bnan\b|\binf\b", text)


def check_winner(results: Results, said: Verdict) -> None:
    """Every other arm was judged on at least two seeds of the winner, and no rate that it holds in the table shows as much goodput."""
    assert said.winner is not None
    top = said.bests[said.winner]
    mean = top.goodput.mean
    assert mean is not None and {one.behind for one in said.comparisons} == set(NAMES) - {said.winner}
    for one in said.comparisons:
        other = said.bests[one.behind]
        assert one.beyond_spread and len(top.goodputs.keys() & other.goodputs.keys()) > 1 and (one.low is None or one.low > 1)
        for point in results.points(one.behind):
            assert point.attainment < ATTAINMENT or fmean(run.goodput for run in point.runs) < mean


@settings(max_examples=12)
@given(campaigns())
def test_every_output_names_the_arms_that_were_not_judged(whole: Campaign) -> None:
    parts = sections(whole)
    told = json.loads(json.dumps(as_json(whole, parts), allow_nan=False))
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(console_table(whole))
    shown = console.export_text()
    for part in parts:
        for arm, found in part.verdict.bests.items():
            assert told["verdict"][part.variant]["bests"][arm]["status"] == ("not judged" if found.unjudged else "judged")
            assert (f"{arm} was not judged" in shown) == bool(found.unjudged)
    for picture, made in paint(parts[0].results):
        if picture.name == "goodput" and not isinstance(made, str):
            labels = texts_of(made.figure)
            missing = {arm for arm, found in parts[0].verdict.bests.items() if found.unjudged}
            assert {label for label in labels if "not judged" in label} == {f"{arm}: not judged" for arm in missing}


def texts_of(figure: Figure) -> list[str]:
    """The labels of its first legend."""
    legend = figure.axes[0].get_legend()
    return [text.get_text().strip() for text in legend.get_texts()] if legend else []


def pilots_void(rates: tuple[int, ...] = (1, 2, 4)) -> Campaign:
    """Two equal arms. The runs of the seed that chooses are void for b."""
    runs = []
    for seed in (1, 2, 3, 4):
        for arm in "ab":
            for rate in rates:
                run = counted(arm, rate, seed, 10 * rate + (seed % 2 if arm == "a" else 0), 0 if rate < 4 else 20)
                runs.append(late(run) if arm == "b" and seed == 1 else run)
    return campaign(runs)


def test_another_sound_seed_chooses_when_the_pilot_is_void() -> None:
    whole = pilots_void()
    found = best(Results.of(whole), "b")
    assert (found.rate, found.chosen_by, set(found.goodputs)) == (2, 2, {3, 4}) and not found.unjudged
    said = verdict(whole)
    assert said.winner is None and said.status == "no difference" and "never holds" not in " ".join(said.sentences)


def test_an_arm_whose_runs_are_all_void_is_not_judged_and_nobody_wins() -> None:
    runs = [counted("a", 2, seed, 20, 0) for seed in (1, 2, 3)] + [late(counted("b", 2, seed, 20, 0)) for seed in (1, 2, 3)]
    said = verdict(campaign(runs))
    assert (said.winner, said.leader, said.status, said.comparisons) == (None, "a", "no verdict", ())
    assert said.sentences[0] == "No verdict." and "b was not judged: none of its 3 runs counts (3 void)." in said.sentences
    assert any("the generator was late" in sentence and "90 ms" in sentence and "ttft=900ms" in sentence for sentence in said.advice)


@pytest.mark.parametrize("judge", [late, lambda run: replace(run, partial="gone"), None])
def test_an_arm_whose_judges_are_void_is_not_judged(judge: Any) -> None:
    """Seed 1 chooses 2/s; no other seed has a sound run there, though at 4/s, where it fails."""
    runs = [counted("a", rate, seed, 10 * rate, 0) for rate in (2, 4) for seed in (1, 2)]
    runs += [counted("b", 2, 1, 20, 0), counted("b", 4, 1, 10, 30), counted("b", 4, 2, 10, 30)]
    runs += [judge(counted("b", 2, 2, 20, 0))] if judge else []
    found = verdict(campaign(runs)).bests["b"]
    assert found.unjudged == "no sound run of another seed at 2 requests/s, the rate that seed 1 chose"


def test_never_is_said_of_the_lowest_rate_only_if_it_was_seen_to_fail() -> None:
    runs = [counted("a", rate, seed, 10 * rate, 0) for rate in (1, 2) for seed in (1, 2)]
    runs += [late(counted("b", 1, seed, 10, 0)) for seed in (1, 2)] + [counted("b", 2, seed, 10, 10) for seed in (1, 2)]
    said = verdict(campaign(runs))
    assert said.winner is None and said.bests["b"].unjudged == "no sound run below 2 requests/s, where it does not hold"


def test_an_unlucky_pilot_does_not_make_an_arm_one_that_never_holds() -> None:
    runs = [counted(arm, rate, seed, 10 * rate, 0) for arm in "ab" for rate in (1, 2) for seed in (2, 3, 4)]
    runs += [counted("a", 1, 1, 10, 0), counted("a", 2, 1, 20, 0), counted("b", 1, 1, 8, 2), counted("b", 2, 1, 20, 0)]
    said = verdict(campaign([*runs[-4:], *runs[:-4]]))
    assert said.bests["b"].rate == 1 and "never holds" not in " ".join(said.sentences)
    assert said.winner is None and said.status == "no verdict", "the other seeds hold 2/s, so a is not shown to be ahead"
    assert any(sentence.startswith("But the runs of b at 2 requests/s hold") for sentence in said.sentences)


def test_seeds_that_only_one_arm_has_do_not_make_it_win() -> None:
    """a's mean is larger, from seeds with many requests on which b is void; where both were judged, b is ahead."""
    pairs = {1: (40, None), 2: (40, None), 3: (10, 14), 4: (10, 14), 5: (10, 14)}
    runs = [counted(arm, 4, seed, met, 0) for seed, both in pairs.items() for arm, met in zip("ab", both, strict=True) if met]
    said = verdict(campaign(runs))
    assert said.leader == said.winner == "b" or said.winner is None


def test_the_sentence_and_the_table_have_one_definition_of_attainment() -> None:
    """9 of 10 and 1 of 2: 83 % of all requests; the mean of the runs is 70 %."""
    whole = campaign([counted("a", 2, 1, 9, 1), counted("a", 2, 2, 1, 1)])
    said = verdict(whole)
    assert any("a reaches 83 % at best" in sentence for sentence in said.sentences)
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(console_table(whole))
    [row] = [line for line in console.export_text().splitlines() if re.match(r"a +2 ", line)]
    assert "83 %" in row and "70 %" not in row


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([counted("a", 2, 1, 10, 10), counted("a", 2, 2, 10, 10)], "--rate 1."),
        ([counted("mixed", 2, 1, 10, 10), counted("split", 2, 1, 10, 10)], "--rates 0.25,0.5,1."),
        ([counted("a", 2, 1, 0, 0)], "--duration 17"),
        ([counted("a", 2, 1, 4, 0), counted("b", 2, 1, 4, 0)], "--duration 17"),
        ([counted("a", 2, 1, 20, 0), counted("b", 2, 1, 20, 0)], "--seeds 1,2,3,4,5,6"),
        ([late(counted("a", 2, 1, 20, 0))], "close what else runs"),
        ([replace(counted("a", 2, 1, 20, 0), partial="gone")], "1 of 1 runs ended early"),
    ],
)
def test_without_a_verdict_the_report_says_what_to_do(runs: list[Probe], says: str) -> None:
    said = verdict(campaign(runs))
    assert said.status == "no verdict" and said.winner is None
    assert any(says in sentence for sentence in said.advice), said.advice
    assert said.sentences[-len(said.advice) :] == said.advice


def test_a_spread_that_would_hide_a_difference_is_no_verdict() -> None:
    """Two seeds judge, and b has 0.8 and 1.2 times as much as a: the interval of the factor spans two orders of magnitude."""
    pairs = {1: (40, 32), 2: (40, 48)}
    runs = [counted(arm, 4, seed, met, 0) for seed, both in pairs.items() for arm, met in zip("ab", both, strict=True)]
    said = verdict(campaign(runs))
    assert said.status == "no verdict" and "That spread is too wide: it would hide a difference by a factor of 1.5." in said.sentences
    [told] = said.advice
    seeds = [int(seed) for seed in told.partition("--seeds ")[2].rstrip(".").split(",")]
    assert 4 < len(seeds) < 12 and seeds == list(range(1, len(seeds) + 1))
    many = [counted(arm, 4, seed, 40 if arm == "a" else 32 + 16 * (seed % 2), 0) for seed in seeds for arm in "ab"]
    assert verdict(campaign(many)).status == "no difference"


def test_void_runs_are_shown_in_grey_with_their_numbers(tmp_path: Path) -> None:
    whole = campaign([counted("a", 2, 1, 20, 0), late(counted("a", 4, 2, 39, 1))])
    page = draw(whole, tmp_path).read_text()
    [row] = re.findall(r'<tr class="void">.*?</tr>', page)
    assert "void, seed 2" in row and "<td>3.9</td>" in row and "<td>98 %</td>" in row
    alone = draw(campaign([late(counted("a", 4, 2, 40, 0))]), tmp_path / "alone").read_text()
    assert "Every request of the runs that count succeeded" not in alone and "No run counts, so nothing is said" in alone
    assert '<tr class="void">' in alone


def test_a_varied_parameter_is_drawn_only_where_an_arm_was_judged() -> None:
    runs = [counted("a", 2, 0, 20, 0, variant=f"v={n}") for n in (1, 2)] + [late(counted("b", 2, 0, 20, 0, variant="v=1"))]
    parts = {variant: Results.of(part) for variant, part in by_variant(campaign(runs)).items()}
    figure = best_of_each_variant(parts)
    assert over_variants(parts) == ["No crossover can be seen: at fewer than two values of v were two arms judged."]
    assert texts_of(figure) == ["a", "b (not judged at 2 of 2)"]
