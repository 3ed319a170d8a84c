"""The tables of docs/benchmarks: how figures are told, and that nothing is told that was not measured. That the pages are current is
tested in tests/cluster/test_metrics.py."""

from pathlib import Path
from typing import Any

import benchmark_aims
import benchmark_planner
import benchmark_tables
import pytest
from benchmark_aims import Aim
from benchmark_results import RESULTS, WIDTH, load, markdown, number, source, spread, wrapped
from benchmark_tables import AIMS, PAGES, TABLES, misplaced, page

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("value", "told"), [(0.0, "0"), (0.0123, "0.012"), (1.005, "1.00"), (12.34, "12.3"), (7, "7"), (1234.5, "1,234"), (1024, "1,024")]
)
def test_a_number_has_three_digits(value: float, told: str) -> None:
    assert number(value) == told


def test_a_spread_is_the_median_and_the_ends() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00 … 3.00)" and spread([0.5, 0.25], "{:.0%}") == "38% (25% … 50%)"


def test_a_table_needs_no_other_formatting() -> None:
    assert markdown(["", "share"], [["one", "5%"], ["", "10%"]]) == "|  | share |\n| -- | -- |\n| one | 5 % |\n|  | 10 % |"


def test_prose_is_wrapped_and_makes_no_list() -> None:
    lines = wrapped("word " * 60 + "commit 8797737.").splitlines()
    assert len(lines) > 2 and all(len(line) <= WIDTH for line in lines)
    assert wrapped("x" * WIDTH + " 12.").splitlines()[1] == r"12\."


@pytest.mark.parametrize(
    ("values", "most", "verdict"),
    [
        ([1.0, 2.0], False, "reached"),
        ([0.9, 2.0], False, "**missed** by 1 of 2"),
        ([0.8, 0.9], False, "**missed**"),
        ([1.0, 0.5], True, "reached"),
        ([1.1], True, "**missed**"),
    ],
)
def test_a_verdict_follows_from_the_figures(values: list[float], most: bool, verdict: str) -> None:
    assert Aim("page", "what", 1.0, values, most=most).verdict == verdict


def test_an_aim_tells_both_ends_of_what_was_measured() -> None:
    aim = Aim("page", "what", 0.9, [0.95, 0.72, 1.0], "{:.0%}")
    assert (aim.text, aim.measured) == ("≥ 90%", "72% … 100%") and Aim("page", "what", 2, [1.5, 1.501]).measured == "1.50"


def test_the_former_index_is_told_of_once_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"places": [{"place": "probes", "size": "9 workers", "after_ms": 1.5}]}
    monkeypatch.setattr(benchmark_tables, "load", lambda name: found)
    turns = "| place | size | longest turn, ms |\n| -- | -- | -- |\n| probes | 9 workers | 1.50 |"
    assert benchmark_tables.loop_turns() == turns
    found |= {"index": dict.fromkeys(benchmark_tables.INDEX, 2), "index_former": dict.fromkeys(benchmark_tables.INDEX, 400)}
    found |= {"index_present_over_former": {key: [0.006, 0.005, 0.004] for key in benchmark_tables.INDEX}}
    before, after = benchmark_tables.loop_turns().split("\n\n")
    assert before == turns and after.splitlines()[2] == "| a million keys, MiB | 400 | 2 | 0.005 (0.004 … 0.006) |"


def test_the_planner_on_a_real_cluster_is_told_of_once_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"attainment": 0.9, "refused": 1, "lost": 0, "wrong": 0}
    still = counts | {"worker_hours": 0.5, "rate": 1000.0, "changes": {"undone": 0}, "starts_s": []}
    moved = still | {"rate": 1250.0, "changes": {"grow": 3, "flip": 1, "undone": 1}, "starts_s": [3.0, 2.0, 4.0]}
    rows = [still | {"arm": "static 2+2"}, still | {"arm": "static 2+3", "rate": 1100.0}, moved | {"arm": "planner"}]
    found = {"static": ["static 2+3", "static 2+2"], "rows": rows}
    monkeypatch.setattr(benchmark_planner, "load", lambda name: found)
    best, second, planner = benchmark_planner.planner_real().splitlines()[2:]
    assert best.startswith("| static 2P3D (the best) | 90.0 % | 1 | 0 | 0 | 0.500 | 1,100 | 1.00 |")
    assert second.startswith("| static 2P2D | ") and "| 0.91 |" in second
    assert planner.endswith("| 1.14 | flips 1, growths 3, undone 1 | 3.00 (2.00 … 4.00) |")
    aims = {aim.what: aim for aim in benchmark_aims.planner_real_aims(found)}
    assert [aim.verdict for aim in aims.values()] == ["**missed**", "reached"]
    rows[-1] = moved | {"arm": "planner", "rate": 1400.0, "wrong": 1}
    assert [aim.verdict for aim in benchmark_aims.planner_real_aims(found)] == ["reached", "**missed** by 1 of 6"]


def test_a_changed_figure_makes_a_page_stale() -> None:
    """Negative control of `--check`."""
    text = (DOCS / "benchmarks" / "batching.md").read_text()
    assert page(text) == text != (changed := text.replace("1,439", "1,440")) and page(changed) == text


def test_a_table_that_is_nowhere_or_twice_is_named() -> None:
    texts = [path.read_text() for path in PAGES]
    assert not misplaced(texts) and set(misplaced([])) == {*TABLES, *AIMS}
    twice = next(text for text in texts if "table: batching" in text)
    assert misplaced([*texts, twice]) == ["batching"]


def test_every_file_of_results_is_told_of() -> None:
    told = "\n".join(path.read_text() for path in DOCS.rglob("*.md"))
    families = {name for name in ("nemesis", "vllm") if f"{name}-*.json" in told}
    for path in RESULTS.glob("*.json"):
        assert path.name in told or path.stem.split("-")[0] in families, f"no page names {path.name}: it holds nothing of today"


@pytest.mark.parametrize("results", sorted({results for results, _ in TABLES.values() if (RESULTS / f"{results}.json").is_file()}))
def test_a_source_names_machine_versions_and_commit(results: str) -> None:
    told = " ".join(source(results).split())
    assert load(results)["machine"].split(",")[0] in told and "torch 2." in told and "commit " in told
