"""Text for terminals of any width."""

import codecs
import io
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 2  # columns between two cells
PROSE_WIDTH = 20  # columns that a cell of words has at least
# What a terminal that cannot show these shows in their place, each as wide as the original.
PLAIN = dict(zip("·…→←●█✓✗≈─━═│┃║\u2013\u2014\xa0\xd7", "-~><*#+x~---|||-- x", strict=True))


def write_anything(*streams: TextIO) -> None:
    """Text that a stream's encoding lacks is written in plain letters from now on instead of raising UnicodeEncodeError."""
    codecs.register_error("plain", _plainly)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    if known := PLAIN.get(character):
        return known
    if "\u2500" <= character <= "\u257f":  # corners and crossings of boxes
        return "+"
    if "\u2580" <= character <= "\u28ff":  # blocks, shapes, Braille: bars, dots and spinners
        return "#" if character <= "\u259f" else "*"
    bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return bare or character.encode("ascii", "backslashreplace").decode()


class Fitting:
    """A table where the terminal is wide enough for it; or the table with broken titles; or a short paragraph for each row.
    Nothing is cut off.

    The first cell of a row names it. Cells are text; an empty one is left out of a paragraph. Cells under the titles in `prose` may be
    broken between words, others never are.
    """

    def __init__(self, titles: Sequence[str], left: Sequence[str] = (), prose: Sequence[str] = ()) -> None:
        self._titles = tuple(titles)
        self._left = frozenset(left or titles)
        self._prose = frozenset(prose)
        self._rows: list[tuple[Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append(tuple(cell if isinstance(cell, Text) else Text(cell) for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for titles in (self._titles, [title.replace(" ", "\n") for title in self._titles]):
            widths = [self._width(i, title) for i, title in enumerate(titles)]
            if sum(widths) + GAP * len(widths) <= options.max_width:
                yield self._table(titles, widths)
                return
        for name, *cells in self._rows:
            facts = [
                Text.assemble((f"{title}\xa0", "dim"), cell) for title, cell in zip(self._titles[1:], cells, strict=True) if cell.plain
            ]
            yield Text.assemble((name.plain, "bold"), "  ", Text(" · ").join(facts))

    def _width(self, column: int, title: str) -> int:
        longest = max((row[column].cell_len for row in self._rows), default=0)
        if self._titles[column] in self._prose:
            longest = min(longest, PROSE_WIDTH)
        return max(longest, *map(cell_len, title.splitlines()), 0)

    def _table(self, titles: Sequence[str], widths: Sequence[int]) -> Table:
        table = Table(box=None, padding=(0, GAP, 0, 0))
        for name, title, width in zip(self._titles, titles, widths, strict=True):
            table.add_column(title, justify="left" if name in self._left else "right", no_wrap=name not in self._prose, min_width=width)
        for row in self._rows:
            table.add_row(*row)
        return table
