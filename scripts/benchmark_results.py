"""The files of benchmarks/results as text for tables: figures with their spread, and where they come from."""

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
WIDTH = 110  # of prose in Markdown
# What a run was given, where its file says so.
GIVEN = ("seed", "repeats", "rounds", "conversations", "rate", "seconds", "urgent", "load_average")


@cache
def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def measured(name: str) -> bool:
    return (RESULTS / f"{name}.json").is_file()


def source(name: str, root: str = "../..") -> str:
    """The line below a table: file, machine, versions, commit, and what the run was given. `root`: of the repository, from the page."""
    found = load(name)
    given = [f"{key.replace('_', ' ')} {found[key]:.3g}" for key in GIVEN if key in found]
    peers = {
        peer.split(" ")[0]: version for peer, version in found.get("versions", {}).items() if peer != "torch" and version != "this tree"
    }
    versions = [f"{peer} {version}" for peer, version in peers.items()]
    told = ", ".join([found["machine"], *given, *versions])
    return wrapped(f"From [{name}.json]({root}/benchmarks/results/{name}.json): {told}.")


def wrapped(text: str) -> str:
    """Prose in lines of WIDTH. A number and a full stop would make a list at the beginning of a line."""
    lines = textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return re.sub(r"^(\d+)\.(?=\s|$)", r"\1\\.", lines, flags=re.MULTILINE)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as mdformat writes it without padding. Percent signs stand apart, as in the text."""
    lines = [heads, ["--"] * len(heads), *rows]
    text = "\n".join("|" + "|".join(f" {cell} " for cell in cells) + "|" for cells in lines)
    return re.sub(r"(\d)%", r"\1 %", text)


def number(value: float) -> str:
    """Three significant digits, or the whole part if it is longer."""
    if isinstance(value, int) or value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def spread(values: Sequence[float], form: str = "") -> str:
    """Median (least … most)."""
    told = [form.format(each) if form else number(each) for each in (median(values), min(values), max(values))]
    return f"{told[0]} ({told[1]} … {told[2]})"


def middle(values: Sequence[float]) -> str:
    """A median that is stored with the ends of its range."""
    return f"{number(values[0])} ({number(values[1])} … {number(values[2])})"
