"""docs/rooms.md: `python scripts/rooms_page.py` lists the files of each room with what their first lines say, `--check` only compares.

The rooms and their words are those of the table in docs/architecture.md.
"""

import ast
import re
import textwrap
from pathlib import Path

from made_page import settle

ROOT = Path(__file__).resolve().parent.parent
PAGE, TABLE = ROOT / "docs" / "rooms.md", ROOT / "docs" / "architecture.md"
WIDTH = 110
HEAD = """# The rooms, file by file

Each room of [the table](architecture.md#rooms), with the first sentence of each of its files: a map to open
beside the code. The file itself says the rest. Whom a room may import is in the table.
<!-- written by scripts/rooms_page.py -->
"""


def page(_: str = "") -> str:
    told = rooms()
    own = {ROOT / name for names, _ in told for name in names} | {ROOT / "baton" / "v1"}
    return "\n".join([HEAD, *(section(names, what, own) for names, what in told)])


def rooms() -> list[tuple[list[str], str]]:
    """The folders of each room, and what it is for. Rooms without code of ours in Python are left out."""
    rows = re.findall(r"^\| (`[^|]+/`) \| ([^|]+) \|", TABLE.read_text(), re.MULTILINE)
    named = [(re.findall(r"`([^`]+)`", cell), what.strip()) for cell, what in rows]
    return [(names, what) for names, what in named if not {"proto/", "deploy/", "tests/"} & {*names}]


def section(names: list[str], what: str, own: set[Path]) -> str:
    lines = [f"## {', '.join(f'`{name}`' for name in names)}", "", *_wrapped(f"{what[0].upper()}{what[1:]}."), ""]
    for room in (ROOT / name for name in names):
        told = (f"- `{file.relative_to(room)}` {first_sentence(file)}" for file in files(room, own))
        lines += [line for one in told for line in _wrapped(one, "  ")]
    return "\n".join(lines) + "\n"


def files(room: Path, own: set[Path]) -> list[Path]:
    """Those of the room and of its folders, but for the folders that stand for themselves (`own`)."""
    inner = {folder for folder in own if room in folder.parents}
    return [file for file in sorted(room.rglob("*.py")) if not inner & set(file.parents) and file.name != "__init__.py"]


def first_sentence(file: Path) -> str:
    told = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.])\s", told)[0]
    return sentence[:-1] + "." if sentence.endswith(":") else sentence


def _wrapped(words: str, more: str = "") -> list[str]:
    return textwrap.wrap(words, WIDTH, subsequent_indent=more, break_on_hyphens=False, break_long_words=False)


def main() -> None:
    settle(PAGE, page, "the files of the rooms")


if __name__ == "__main__":
    main()
