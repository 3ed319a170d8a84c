"""The reference of the `baton` command: `python scripts/cli_table.py` writes docs/cli.md from the commands' own help, `--check` only
compares."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from made_page import settle

from baton.cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
BEGIN, END = "<!-- commands: written by scripts/cli_table.py -->", "<!-- end of commands -->"

WIDTH = 110  # of prose in Markdown


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it, those of a group after one another."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def section(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join([name, *(_argument(each) for each in arguments)])
    rows = [f"| {_names(each)} | {_cell(each.help or '')} |" for each in command.params if not getattr(each, "hidden", False)]
    table = ["", "| argument or option | means |", "| -- | -- |", *rows] if rows else []
    return "\n".join([f"## {name}", "", f"`{usage}`", "", _prose(command.help or ""), *table])


def page(text: str) -> str:
    """The page with current commands. Raises ValueError if it has no place for them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no {BEGIN} … {END}")
    told = "\n\n".join(section(*each) for each in commands(typer.main.get_command(app), "baton"))
    return f"{before}{BEGIN}\n\n{told}\n\n{END}{after}"


def _argument(parameter: Any) -> str:
    name = parameter.name.upper() + ("…" if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _prose(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    settle(PAGE, page, "the commands")


if __name__ == "__main__":
    main()
