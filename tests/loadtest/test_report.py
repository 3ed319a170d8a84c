"""Verdict, pictures and report of campaigns that are small simulations with a known answer."""

import base64
import io
import json
import random
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaigns import campaign, counted, late, probe, simulate
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from rich.console import Console, RenderableType

from loadtest.campaign import Arm, Campaign, Probe
from loadtest.pictures import PICTURES, best_of_each_variant, paint
from loadtest.report import as_json, compare_runs, console_table, draw, explained, failures, sections
from loadtest.results import ProbeResult, Results, best, by_variant
from loadtest.slo import Slo
from loadtest.summary import Summary
from loadtest.verdict import crossovers, over_variants, varied_crossovers, verdict, verdict_of, versus


@pytest.fixture(scope="module")
def crossing() -> Campaign:
    return campaign([probe(arm, rate, seed) for seed in (0, 1) for arm in ("mixed", "split") for rate in (2, 6, 10, 13)])


@pytest.fixture(scope="module")
def page(crossing: Campaign, tmp_path_factory: pytest.TempPathFactory) -> Path:
    void = replace(late(probe("split", 3, 5)), why="bisection")
    return draw(replace(crossing, probes=(*crossing.probes, void), partial="stopped by hand"), tmp_path_factory.mktemp("report"))


# Verdict


def test_the_verdict_says_where_and_why_the_simulated_arms_cross(crossing: Campaign) -> None:
    said = verdict(crossing)
    assert said.leader == "split"
    [found] = said.crossovers
    assert (found.below, found.above) == ("mixed", "split") and 2 < found.rate < 10
    assert any("mixed missed the SLO" in sentence and "TPOT too long, from decode" in sentence for sentence in said.sentences)


def test_best_factor_and_crossover_match_a_hand_calculation() -> None:
    """Over 10 s: at 1/s, a is 0.1/s ahead; at 2/s, b is 0.1/s ahead; so they cross halfway. a attains 90 % up to 2/s, b at every rate.

    Seed 0 chooses, seeds 1 and 2 judge."""
    runs = []
    for seed in (0, 1, 2):
        runs += [counted("a", 1, seed, 10, 0), counted("a", 2, seed, 18, 2), counted("a", 4, seed, 30, 10), counted("a", 6, seed, 20, 40)]
        runs += [counted("b", 1, seed, 9, 1), counted("b", 2, seed, 19, 1), counted("b", 4, seed, 38, 2), counted("b", 6, seed, 57, 3)]
    said = verdict(campaign(runs))
    assert said.winner == said.leader == "b"
    assert said.bests["a"].goodput.mean == pytest.approx(1.8) and said.bests["a"].rate == 2 and said.bests["a"].ended
    assert said.bests["b"].goodput.mean == pytest.approx(5.7) and said.bests["b"].rate == 6 and not said.bests["b"].ended
    [comparison] = said.comparisons
    assert comparison.factor == comparison.low == comparison.high == pytest.approx(5.7 / 1.8)
    [found] = said.crossovers
    assert (found.below, found.above) == ("a", "b") and found.rate == pytest.approx(1.5)
    assert "b still held" not in " ".join(said.sentences) and "It still held at the highest rate tried" in said.sentences[1]
    assert any("at 6 requests/s a missed the SLO on 67 %" in sentence and "refused: SATURATED" in sentence for sentence in said.sentences)


def test_the_factor_is_computed_seed_by_seed() -> None:
    """The goodput of each arm varies widely between the seeds, but b's is always 1.2 times as large, which is beyond the spread."""
    runs = [counted(arm, 2, seed, met, 0) for seed, n in ((0, 10), (1, 20), (2, 40)) for arm, met in (("a", n), ("b", n * 12 // 10))]
    comparison = versus(Results.of(campaign(runs)), "b", "a")
    assert comparison.factor == pytest.approx(1.2) and comparison.beyond_spread


def test_a_difference_within_the_spread_has_no_winner() -> None:
    runs = [counted("a", 2, 0, 20, 0), counted("b", 2, 0, 22, 0), counted("a", 2, 1, 23, 0), counted("b", 2, 1, 22, 0)]
    said = verdict(campaign(runs))
    assert said.leader == "b" and said.winner is None
    assert any(sentence.startswith("No difference beyond the spread") for sentence in said.sentences)
    assert not any(sentence.startswith("Why") for sentence in said.sentences)


def test_one_seed_has_no_spread() -> None:
    said = verdict(campaign([counted("a", 2, 0, 10, 0), counted("b", 2, 0, 30, 0)]))
    assert said.leader == "b" and said.winner is None and said.comparisons[0].factor == pytest.approx(3)
    assert any("may be chance" in sentence for sentence in said.sentences)


def test_an_arm_that_never_attains_its_slo_loses_without_a_factor() -> None:
    said = verdict(
        campaign([counted(arm, 2, seed, 20 if arm == "b" else 10, 0 if arm == "b" else 10) for seed in (0, 1) for arm in ("a", "b")])
    )
    assert said.winner == "b" and said.comparisons[0].factor is None
    assert any(sentence.startswith("a never holds 90 % attainment") for sentence in said.sentences)


def test_with_a_single_rate_every_seed_judges() -> None:
    found = best(Results.of(campaign([counted("a", 2, 0, 20, 0), counted("a", 2, 1, 18, 2)])), "a")
    assert found.goodputs == {0: 2.0, 1: 1.8} and found.rate == 2 and found.attainment == 0.95 and found.chosen_by is None
    failed = best(Results.of(campaign([counted("a", 2, 0, 20, 0), counted("a", 2, 1, 10, 10)])), "a")
    assert failed.rate is None and failed.goodputs == {0: 0.0, 1: 0.0} and failed.ended


def test_the_first_seed_chooses_the_rate_and_the_others_judge_there() -> None:
    """Seed 7 was lucky at 4/s. The arm is judged at that rate, by the other seeds."""
    runs = [counted("a", 2, 7, 20, 0), counted("a", 4, 7, 40, 0), counted("a", 8, 7, 30, 50)]
    for seed in (1, 2):
        runs += [counted("a", 2, seed, 20, 0), counted("a", 4, seed, 34, 6), counted("a", 8, seed, 30, 50)]
    found = best(Results.of(campaign(runs)), "a")
    assert (found.rate, found.chosen_by, found.goodputs) == (4, 7, {1: 3.4, 2: 3.4}) and found.attainment == pytest.approx(0.85)
    said = verdict(campaign(runs)).sentences
    assert "offered 4, chosen on seed 7, where the other seeds attain 85 %" in said[0]
    alone = best(Results.of(campaign(runs[:3])), "a")
    assert alone.goodputs == {7: 4.0} and alone.chosen_by is None, "a single seed both chooses and judges"


@cache
def known(rate: float, met: int, missed: int) -> tuple[Probe, Summary]:
    """A run, and its summary, which depends on neither arm nor seed: thousands of few kinds are drawn."""
    one = counted("", rate, 0, met, missed)
    return one, campaign([one]).summary(one)


def results_of(runs: Iterable[tuple[str, float, int, int, int]]) -> Results:
    """Of what `counted` makes of an arm, a rate, a seed, and how many requests meet the SLO and how many miss it."""
    found = []
    for arm, rate, seed, met, missed in runs:
        one, told = known(rate, met, missed)
        found.append(ProbeResult(replace(one, arm=arm, seed=seed), told))
    return Results(campaign([run.probe for run in found]), tuple(found))


def test_results_that_are_drawn_are_those_of_their_runs() -> None:
    drawn = [("a", 2.0, 0, 9, 1), ("b", 2.0, 1, 8, 2), ("b", 4.0, 0, 8, 2)]
    assert results_of(drawn) == Results.of(campaign([counted(*each) for each in drawn]))


def test_an_arm_gains_nothing_from_being_tried_at_more_rates() -> None:
    """Two equal arms whose goodput and attainment are noise; b is tried at six rates, a at two. The judges see no difference on average.

    Negative control: the largest goodput of all runs, chosen and reported by the same seed, favours b.
    """
    draw = random.Random(5)
    differences, cursed = [], []
    for _trial in range(60):
        runs = []
        for arm, rates in (("a", (4.0, 4.1)), ("b", (4.0, 4.02, 4.04, 4.06, 4.08, 4.1))):
            for seed in (0, 1, 2):
                runs += [(arm, rate, seed, 40 - (missed := draw.randrange(4)), missed) for rate in rates]
        results = results_of(runs)
        told = {arm: best(results, arm).goodput.mean or 0.0 for arm in ("a", "b")}
        largest = {arm: max(run.summary.goodput or 0.0 for run in results.sound(arm)) for arm in ("a", "b")}
        differences.append(told["b"] - told["a"])
        cursed.append(largest["b"] - largest["a"])
    spread = 3 * statistics.stdev(differences) / len(differences) ** 0.5
    assert abs(statistics.mean(differences)) < spread
    assert statistics.mean(cursed) > 2.5 * statistics.stdev(cursed) / len(cursed) ** 0.5


def test_six_equal_arms_have_a_winner_no_more_often_than_two() -> None:
    """The luckiest of six equal arms is compared with the others. Without the correction it beats one far more often than 1 time in 20."""
    draw = random.Random(3)
    found, uncorrected = 0, 0
    for _trial in range(100):
        results = results_of((arm, 2, seed, 20 + draw.randrange(9), 0) for seed in range(5) for arm in "abcdef")
        said = verdict_of(results)
        assert all(comparison.family == 15 for comparison in said.comparisons)
        found += any(comparison.beyond_spread for comparison in said.comparisons)
        uncorrected += any(versus(results, str(said.leader), arm).beyond_spread for arm in "abcdef" if arm != said.leader)
    assert found <= 4 < uncorrected


def test_the_verdict_says_when_only_few_seeds_judge() -> None:
    def sentences(seeds: int) -> str:
        return " ".join(verdict(campaign([counted(arm, 2, seed, 20, 0) for seed in range(seeds) for arm in "ab"])).sentences)

    assert "Only 2 seeds judge, so an interval is ± 12.7 standard errors wide" in sentences(2)
    assert "seeds judge" not in sentences(1) + sentences(4)


def test_crossovers_over_a_varied_parameter_are_found() -> None:
    """a leads at 100 and b by as much at 300, so they are equal in the middle. Noise between a and c is not a crossover."""
    met = {"input=100": {"a": 24, "b": 16, "c": 24}, "input=300": {"a": 16, "b": 24, "c": 16}, "input=500": {"a": 16, "b": 24, "c": 16}}
    runs = [
        counted(arm, 4, seed, n + (seed % 2 if arm == "c" else 0), 0, variant=variant)
        for variant, arms in met.items()
        for arm, n in arms.items()
        for seed in range(5)
    ]
    parts = {variant: Results.of(part) for variant, part in by_variant(campaign(runs)).items()}
    [one, two] = varied_crossovers(parts)
    assert (one.below, one.above, one.low, one.high) == ("a", "b", 100, 300) and one.value == pytest.approx(200)
    assert (two.below, two.above) == ("c", "b")
    assert over_variants(parts)[0] == ("Crossover: b overtakes a between input 100 and 300, at about 200 by linear interpolation.")
    assert over_variants(parts)[0] in printed(console_table(campaign(runs)))
    same = {f"input={n}": parts["input=300"] for n in (100, 300)}
    assert over_variants(same) == ["No crossover between input 100 and 300: no arm overtakes another beyond the spread."]
    assert over_variants({"trace=a": parts["input=100"], "trace=b": parts["input=300"]}) == [], "names have no order"


def test_a_success_above_a_failed_rate_does_not_count() -> None:
    runs = [counted("a", 2, 0, 20, 0), counted("a", 4, 0, 20, 20), counted("a", 6, 0, 60, 0)]
    assert best(Results.of(campaign(runs)), "a").goodputs == {0: 2.0}


@pytest.mark.parametrize("spoil", [late, lambda run: replace(run, partial="the server is gone")])
def test_void_and_partial_runs_are_left_out(spoil: Any) -> None:
    runs = [counted(arm, 2, seed, 20, 0) for seed in (0, 1, 2) for arm in ("a", "b")]
    spoilt = [spoil(counted("b", 9, seed, 90, 0)) for seed in (0, 1, 2)]
    assert verdict(campaign([*runs, *(counted("b", 9, seed, 90, 0) for seed in (0, 1, 2))])).winner == "b"
    said = verdict(campaign([*runs, *spoilt]))
    assert said.winner is None
    assert said.sentences[-1] == "3 of 9 runs are void or ended early and are left out."


def test_there_is_no_leader_without_an_arm_that_attains_its_slo() -> None:
    assert verdict(campaign([])).sentences[0] == "No verdict: no run counts."
    assert verdict(campaign([late(counted("a", 2, 0, 20, 0))])).leader is None
    refused = verdict(campaign([counted("a", 2, 0, 0, 20)]))
    assert refused.leader is None and "a reaches 0 % at best, at 2 requests/s; commonest miss: refused: SATURATED." in refused.sentences
    lucky = verdict(campaign([counted("a", 2, 0, 0, 20), counted("a", 4, 0, 40, 0)]))
    assert lucky.leader is None and "a reaches 100 % at best, at 4 requests/s." in lucky.sentences


def test_a_single_arm_is_described_and_not_compared() -> None:
    said = verdict(campaign([counted("a", 2, 0, 20, 0), counted("a", 4, 0, 20, 20)]))
    assert said.leader == "a" and said.winner is None and said.comparisons == () and len(said.sentences) == 1


def test_ties_and_noise_are_not_crossovers() -> None:
    """At 1/s the arms tie; at 2/s each leads for half of the seeds. At 4/s b leads for all seeds, at 6/s a does: that is one crossover."""
    met = {1: ((10, 10), (10, 10)), 2: ((22, 20), (19, 20)), 4: ((30, 38), (31, 38)), 6: ((50, 40), (51, 40))}
    runs = [
        counted(arm, rate, seed, n[i], 0) for rate, some in met.items() for seed, n in enumerate(2 * some) for i, arm in enumerate("ab")
    ]
    [found] = crossovers(Results.of(campaign(runs)), "a", "b")
    gap_at_4, gap_at_6 = -0.75, 1.05
    assert (found.below, found.above) == ("b", "a") and found.rate == pytest.approx(4 + 2 * gap_at_4 / (gap_at_4 - gap_at_6))


def test_a_crossover_after_a_tie_lies_where_the_tie_ends() -> None:
    met = {1: (10, 8), 2: (20, 20), 3: (30, 30), 4: (36, 40)}
    runs = [counted(arm, rate, 0, n[i], 0) for rate, n in met.items() for i, arm in enumerate("ab")]
    [found] = crossovers(Results.of(campaign(runs)), "a", "b")
    assert (found.below, found.above, found.rate) == ("a", "b", 3)


def test_a_bisection_run_can_be_the_best_but_is_not_part_of_the_curve() -> None:
    runs = [counted("a", 2, 0, 20, 0), counted("a", 4, 0, 20, 20), counted("a", 3, 0, 30, 0, why="bisection")]
    results = Results.of(campaign(runs))
    assert best(results, "a").rate == 3
    assert [point.rate for point in results.sweep("a")] == [2, 4] and [point.rate for point in results.points("a")] == [2, 3, 4]


def test_variants_are_judged_separately() -> None:
    both = campaign([counted("a", 2, 0, 20, 0, variant="input=8"), counted("a", 2, 0, 20, 0, variant="input=16")])
    with pytest.raises(ValueError, match="by_variant"):
        verdict(both)
    assert {variant: len(part.probes) for variant, part in by_variant(both).items()} == {"input=8": 1, "input=16": 1}
    assert [sum(variant in line for line in printed(console_table(both)).splitlines()) for variant in ("input=8", "input=16")] == [1, 1]


# Pictures


def drawn(whole: Campaign) -> dict[str, Figure | str]:
    return {picture.name: made if isinstance(made, str) else made.figure for picture, made in paint(Results.of(whole))}


def texts(figure: Figure) -> Iterable[Text]:
    return (text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip())


def test_every_picture_is_drawn_with_units_names_and_readable_text(crossing: Campaign) -> None:
    made = drawn(crossing)
    assert list(made) == [picture.name for picture in PICTURES]
    for name, figure in made.items():
        assert isinstance(figure, Figure), f"{name}: {figure}"
        words = " ".join(text.get_text() for text in texts(figure))
        assert min(float(text.get_fontsize()) for text in texts(figure)) >= 9, name
        assert any(unit in words for unit in ("(ms)", "(requests/s)", "tokens/s")), name
        assert ("mixed" in words and "split" in words) or name == "transfer", name


def test_the_first_picture_shows_curves_bests_and_crossover(crossing: Campaign) -> None:
    figure = drawn(crossing)["goodput"]
    assert isinstance(figure, Figure)
    [axes] = figure.axes
    said = verdict(crossing)
    assert axes.get_title() == f"split overtakes mixed at {said.crossovers[0].rate:.3g}/s"
    stars = {line.get_xydata().tolist()[0][1] for line in axes.lines if line.get_marker() == "*"}  # type: ignore[union-attr]
    assert stars == {found.goodput.mean for found in said.bests.values()}
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) > 4
    quiet = drawn(campaign([counted("a", 2, 0, 20, 0)]))["goodput"]
    assert isinstance(quiet, Figure) and quiet.axes[0].get_title() == "no crossover"


def test_the_line_fitted_to_the_transfers_is_the_simulated_one(crossing: Campaign) -> None:
    [caption] = [made.caption for picture, made in paint(Results.of(crossing)) if picture.name == "transfer" and not isinstance(made, str)]
    assert "tcp transfer: 5 ms + bytes / (1 GiB/s)" in caption and "tcp read: 4 ms + bytes / (1.25 GiB/s)" in caption


def test_the_bars_of_misses_add_up_to_all_misses() -> None:
    run = counted("a", 4, 0, 10, 30)
    two_reasons = replace(run, records=(*run.records[:30], *(replace(record, reason="DRAINING") for record in run.records[30:])))
    figure = drawn(campaign([counted("a", 2, 0, 15, 5), two_reasons]))["misses"]
    assert isinstance(figure, Figure)
    bars = [(round(bar.get_x()), bar.get_y(), bar.get_height()) for bar in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert sorted(bar for bar in bars if bar[2]) == [(0, 0, 0.25), (1, 0, 0.5), (1, 0.5, 0.25)]


def top_of_the_ttft_curve(whole: Figure) -> float:
    return max(float(y) for line in whole.axes[0].lines[:1] for y in np.asarray(line.get_ydata(), float))


def test_refused_requests_keep_the_ttft_curve_below_1() -> None:
    figure = drawn(campaign([counted("a", 2, 0, 15, 5)]))["cdf"]
    assert isinstance(figure, Figure) and top_of_the_ttft_curve(figure) == 0.75


REASONS = {
    "everything refused": ([counted("a", 2, 0, 0, 20)], {"knee", "cdf", "timeline", "stages", "transfer", "cached"}),
    "one good run": ([replace(probe("mixed", 2), records=simulate("mixed", 1, 0)[:6], due=6)], {"transfer", "cached", "misses"}),
    "void": ([late(probe("mixed", 2))], {picture.name for picture in PICTURES}),
    "partial": ([probe("mixed", 2, partial="gone")], {picture.name for picture in PICTURES}),
    "nothing": ([], {picture.name for picture in PICTURES}),
}


@pytest.mark.parametrize("case", REASONS)
def test_a_picture_that_cannot_be_drawn_says_why(case: str) -> None:
    probes, missing = REASONS[case]
    made = drawn(campaign(probes))
    assert {name for name, figure in made.items() if isinstance(figure, str)} == missing
    assert all(figure for figure in made.values() if isinstance(figure, str))


def test_single_token_answers_have_no_timeline_and_no_stages() -> None:
    run = probe("split", 4)
    short = tuple(
        replace(r, token_times=r.token_times[:1], ended=r.token_times[0], output_tokens=1, asked_tokens=1, decode_worker="", stages_ms={})
        for r in run.records
    )
    made = drawn(campaign([replace(run, records=short)]))
    assert isinstance(made["timeline"], str) and isinstance(made["stages"], str) and isinstance(made["cdf"], Figure)


# Files


class Page(HTMLParser):
    """The contents of a page; fails if its tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append((self.open[-1] if self.open else "", data.strip()))


def test_the_page_is_one_file_with_the_verdict_first_and_the_same_pictures(page: Path) -> None:
    parsed = Page(page.read_text())
    tags = [tag for tag, _ in parsed.seen]
    assert not {"script", "link", "iframe"} & set(tags)
    images = [attributes["src"] or "" for tag, attributes in parsed.seen if tag == "img"]
    assert len(images) == len(PICTURES)
    for picture, source in zip(PICTURES, images, strict=True):
        content = (page.parent / f"{picture.name}.png").read_bytes()
        assert source == "data:image/png;base64," + base64.b64encode(content).decode()
        assert imread(io.BytesIO(content)).shape[1] == 990
    headings = [words for tag, words in parsed.words if tag == "h2"]
    assert headings == ["Verdict", "Arms", "Definitions", "What was run"]
    assert tags.index("section") < tags.index("table") < tags.index("img")


def test_the_page_lists_void_runs_and_the_differences_between_arms(page: Path) -> None:
    parsed = Page(page.read_text())
    whole = " ".join(words for _, words in parsed.words)
    assert "Left out: split at 3 requests/s, seed 5: the generator was late" in whole
    assert "The campaign ended early: stopped by hand" in whole
    assert "The arms differ in prefill.replicas, decode.replicas, and in nothing else." in whole
    assert sum(tag == "tr" and attributes.get("class") == "bad" for tag, attributes in parsed.seen) == 1


def test_names_are_shown_as_plain_text_everywhere(tmp_path: Path) -> None:
    evil = '$\\frac{$ [red]_& <script>alert("x")</script> {{ 7 * 7 }}'
    run = counted(evil, 2, 0, 18, 2, variant=evil)
    whole = campaign([run, late(run)], title=evil, arms=(Arm(evil, {evil: evil}, evil),), workload={evil: evil}, skipped={evil: 3})
    parsed = Page(draw(whole, tmp_path).read_text())
    assert "script" not in [tag for tag, _ in parsed.seen]
    assert ("title", evil) in parsed.words and ("td", evil) in parsed.words
    assert "[red]_" in printed(console_table(whole)) and "[red]_" in printed(compare_runs(whole, whole))
    hidden = drawn(campaign([counted("_hidden", 2, 0, 20, 0)]))["goodput"]
    assert isinstance(hidden, Figure) and "_hidden" in [text.get_text().strip() for text in texts(hidden)]


VLLM_KEYS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_concurrent_requests", "mean_ttft_ms", "p99_tpot_ms", "median_itl_ms", "p90_e2el_ms",
}  # fmt: skip


def test_the_numbers_of_a_single_run_are_at_the_top_level_as_in_vllm() -> None:
    one = campaign([counted("a", 2, 7, 15, 5)])
    told = json.loads(json.dumps(as_json(one, sections(one)), allow_nan=False))
    assert told.keys() >= VLLM_KEYS | {"arm", "rate", "seed", "variant", "verdict"}
    assert (told["arm"], told["seed"], told["request_goodput"], told["failed"]) == ("a", 7, 1.5, 5)


def test_an_arm_without_a_run_of_a_variant_is_not_judged_there(tmp_path: Path) -> None:
    """Its goodput there is unknown, not zero."""
    both = campaign([counted(arm, 2, 0, 20, 0, variant=variant) for arm, variant in (("a", "v=1"), ("a", "v=2"), ("b", "v=2"))])
    draw(both, tmp_path)
    told = json.loads((tmp_path / "results.json").read_text())["verdict"]["v=1"]
    assert {arm: (found["status"], found["unjudged"]) for arm, found in told["bests"].items()} == {
        "a": ("judged", ""),
        "b": ("not judged", "it never ran"),
    }
    assert told["status"] == "no verdict" and told["leader"] == "a"
    drawn = best_of_each_variant({variant: Results.of(part) for variant, part in by_variant(both).items()})
    assert [len(bars.lines[0].get_xdata()) for bars in drawn.axes[0].containers] == [2, 1]  # type: ignore[attr-defined]


def test_each_variant_has_its_own_pictures(tmp_path: Path) -> None:
    draw(campaign([counted("a", 2, 0, 0, 20, variant=variant) for variant in ("input=8", "../16")]), tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*.png")) == [
        "goodput-1.png", "goodput-2.png", "misses-1.png", "misses-2.png", "variants.png",
    ]  # fmt: skip


def test_the_numbers_of_a_campaign_are_listed_by_run(page: Path, crossing: Campaign) -> None:
    told = json.loads((page.parent / "results.json").read_text())
    assert "duration" not in told and told["verdict"][""]["leader"] == "split"
    assert [(run["arm"], run["rate"], run["seed"]) for run in told["runs"][:-1]] == [(p.arm, p.rate, p.seed) for p in crossing.probes]
    assert told["runs"][-1]["void"] and all(run.keys() >= VLLM_KEYS for run in told["runs"])


# Console


def numbers(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d[\d.]*", text))


def printed(said: RenderableType, width: int = 220) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(said)
    return out.getvalue()


def test_the_console_shows_the_verdict_the_numbers_and_what_is_left_out(crossing: Campaign) -> None:
    shown = printed(console_table(replace(crossing, probes=(*crossing.probes, late(probe("split", 3, 5))), partial="by hand")))
    assert shown.splitlines()[0] == verdict(crossing).sentences[0]
    rows = [line.split() for line in shown.splitlines() if re.match(r"(mixed|split) +\d", line)]
    assert len(rows) == 9 and [row[2:5] for row in rows if "void," in row] == [["void,", "seed", "5"]]
    assert "left out: split at 3 requests/s, seed 5: the generator was late" in shown and "ended early: by hand" in shown


@pytest.mark.parametrize("width", [40, 80, 220])
def test_every_number_is_shown_at_any_terminal_width(crossing: Campaign, width: int) -> None:
    for said in (console_table(crossing), compare_runs(crossing, crossing)):
        lines = printed(said, width).splitlines()
        assert "…" not in "".join(lines) and max(map(len, lines)) <= width
        assert not numbers(printed(said)) - numbers("\n".join(lines))


def test_failures_and_stages_are_reported_by_arm(tmp_path: Path) -> None:
    run = counted("a", 4, 0, 10, 30)
    reasons = replace(run, records=(*run.records[:30], *(replace(record, reason="DRAINING") for record in run.records[30:])))
    whole = campaign([counted("a", 2, 0, 20, 0), reasons, probe("split", 2)])
    results = Results.of(whole)
    assert failures(results) == [("a", "4", "refused: SATURATED", 20, 40), ("a", "4", "refused: DRAINING", 10, 40)]
    [(arm, requests, median, largest, within)] = [row for row in explained(results) if row[0] == "split"]
    assert (arm, requests) == ("split", len(results.records(results.points("split")[0]))) and median <= largest < 0.02 and within == 1.0
    page = draw(whole, tmp_path).read_text()
    assert "refused: DRAINING" in page and "How well the server's stages explain each request" in page
    well = draw(campaign([probe("split", 2)]), tmp_path / "well").read_text()
    assert "Every request of the runs that count succeeded." in well


def test_stages_that_do_not_explain_the_time_are_marked(tmp_path: Path) -> None:
    """Negative control: a server that leaves out its decode stage."""
    run = probe("split", 2)
    lying = replace(run, records=tuple(replace(r, stages_ms={**r.stages_ms, "decode": 0.0}) for r in run.records))
    [(_, _, median, _, within)] = explained(Results.of(campaign([lying])))
    assert median > 0.1 and within == 0.0
    parsed = Page(draw(campaign([lying]), tmp_path).read_text())
    assert sum(tag == "tr" and attributes.get("class") == "bad" for tag, attributes in parsed.seen) == 1


def test_two_campaigns_are_shown_side_by_side() -> None:
    a = campaign([counted("a", 2, 0, 20, 0), counted("a", 4, 0, 20, 20)])
    b = campaign([counted("a", 2, 0, 10, 10), counted("a", 8, 0, 20, 20)], slo=Slo(ttft_s=9.0), workload={"kind": "trace"})
    shown = printed(compare_runs(a, b))
    [goodput] = [line for line in shown.splitlines() if "goodput" in line]
    assert goodput.split()[-3:] == ["2", "1", "0.500"]
    assert "only in A: a at 4 requests/s" in shown and "only in B: a at 8 requests/s" in shown
    assert "not the same SLO" in shown and "not the same workload (kind): A synthetic, B trace" in shown


def test_any_two_single_runs_can_be_compared() -> None:
    shown = printed(compare_runs(campaign([counted("a", 2, 0, 20, 0)]), campaign([counted("b", 3, 0, 30, 0)])))
    assert "a at 2 requests/s against b at 3 requests/s" in shown and "1.500" in shown and "only in" not in shown
