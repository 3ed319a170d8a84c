"""The documents: every link within the repository leads to a file, and to a heading if it names one; prose has lines of 110 columns; the
picture of the rooms is drawn."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms_picture import BOXES, HIGH, WIDE, imports, lines, reduced

ROOT = Path(__file__).resolve().parent.parent
NAMES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
PAGES = [ROOT / name for name in NAMES if (ROOT / name).is_file()]
FENCE = re.compile(r"^( *)(```+|~~~+).*?^ *\2 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#{1,6} +(.+?)[ #]*$", FENCE.sub("", text), re.MULTILINE)
    told = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in told]
    seen: Counter[str] = Counter()
    found = set()
    for slug in slugs:
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(page: Path, text: str) -> Iterator[str]:
    """The links of a page's text that lead nowhere. Those to other sites are not followed."""
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if path and not file.exists():
            yield f"{target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(text if file == page else file.read_text()):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not list(broken(page, page.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "[a](no.md)",
        "[a](architecture.md#no-such)",
        "[a](#no-such)",
        "[a\nb](../no/where)",
        "# one\n```\n# two\n```\n[a](#two)",
        "# one\n[a](#one-1)",
        '[a](no.md "title")',
    ],
)
def test_a_broken_link_is_detected(text: str) -> None:
    """Negative control."""
    assert len(list(broken(ROOT / "docs" / "page.md", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[a](https://example.org/no)",
        "[a](architecture.md#rooms)",
        "`[a](no.md)`",
        "```\n[a](no.md)\n```",
        "# What's `x`, now?\n[a](#whats-x-now)",
        "# one\n# one\n[a](#one-1)",
    ],
)
def test_other_links_are_allowed(text: str) -> None:
    assert not list(broken(ROOT / "docs" / "page.md", text))


COLUMNS = 110
# Written by programs that others read the output of, too: `python -m baton.models.train`, `baton generate`.
MADE = ("baton/models/",)


def long_lines(text: str) -> list[str]:
    """The lines of prose that are longer than COLUMNS and have a space to break at. Code and rows of tables are exempt."""
    lines = FENCE.sub("", text).splitlines()
    shown = [CODE.sub(lambda code: "`" * len(code[0]), re.sub(r"\]\([^)]*\)", lambda link: "_" * len(link[0]), line)) for line in lines]
    return [
        line
        for line, plain in zip(lines, shown, strict=True)
        if len(line) > COLUMNS
        and not line.lstrip().startswith("|")
        and " " in re.sub(r"^[\s>]*([-*+]|\d+\.)?\s*", "", plain[: COLUMNS + 1])
    ]


def test_prose_is_no_wider_than_a_screen() -> None:
    pages = [page for page in PAGES if not str(page.relative_to(ROOT)).startswith(MADE)]
    wide = {str(page.relative_to(ROOT)): found for page in pages if (found := long_lines(page.read_text()))}
    assert len(pages) > 30 and not wide


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        ("x " * 55, False),
        ("x " * 56, True),
        ("- " + "x " * 56, True),
        ("y" * 120, False),
        ("- " + "y" * 120, False),
        ("`" + "x " * 60 + "`", False),
        ("a `" + "x " * 60 + "`", True),
        ("[a](" + "y" * 120 + ")", False),
        ("| " + "x " * 60 + "|", False),
        ("```\n" + "x " * 60 + "\n```", False),
        ("```\nx\n```\n" + "x " * 60, True),
    ],
)
def test_a_long_line_is_detected(text: str, wide: bool) -> None:
    """Negative controls, and what is exempt."""
    assert bool(long_lines(text)) == wide


def test_the_picture_of_the_rooms_shows_no_arrow_that_follows_from_others() -> None:
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": ["b"], "b": ["c"], "c": []}
    shown = reduced(imports())
    assert shown["router"] == ["baton.engine.grammars", "baton.recorder"] and "baton.worker" in shown["decode_worker"]


def test_an_import_more_changes_the_picture() -> None:
    """Negative control of `scripts/rooms_picture.py --check`."""
    shown = reduced(imports())
    assert list(lines(shown)) != list(lines(shown | {"baton": ["baton.cluster"]}))


def test_no_two_rooms_of_the_picture_overlap() -> None:
    boxes = list(BOXES.values())
    for i, one in enumerate(boxes):
        assert not [other for other in boxes[:i] if abs(one.x - other.x) < WIDE and abs(one.y - other.y) < HIGH]
