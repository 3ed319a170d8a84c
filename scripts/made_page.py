"""What the scripts that make a part of a page have in common."""

import sys
from collections.abc import Callable
from pathlib import Path


def settle(path: Path, page: Callable[[str], str], source: str) -> None:
    """Writes `page` of the file's text. With --check it ends the program instead, if the text is out of date with `source`."""
    text = path.read_text()
    if "--check" not in sys.argv[1:]:
        path.write_text(page(text))
    elif text != page(text):
        sys.exit(f"{path.name} is out of date with {source}; run `python scripts/{Path(sys.argv[0]).name}`")
