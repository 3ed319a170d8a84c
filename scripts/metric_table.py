"""The tables of docs/observability.md: `python scripts/metric_table.py` writes them from `metric_table`, `--check` only compares."""

from pathlib import Path

from made_page import settle

from baton.cluster.metric_table import ALL, OPEN, REASONS, TABLE, Metric

PAGE = Path(__file__).resolve().parent.parent / "docs" / "observability.md"
BEGIN, END = "<!-- metrics: written by scripts/metric_table.py -->", "<!-- end of metrics -->"


def tables() -> str:
    ours = ["| metric | type | unit | on | labels | what |", "| -- | -- | -- | -- | -- | -- |"]
    theirs = ["| name | is | where |", "| -- | -- | -- |"]
    for metric in TABLE:
        where = "all" if metric.roles == ALL else ", ".join(metric.roles)
        ours.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {where} | {_labels(metric)} | {metric.help} |")
        for alias in metric.aliases:
            only = "".join(f'{{{label}="{value}"}}' for label, value in alias.only.items())
            theirs.append(f"| `{alias.name}` | `{metric.name}{only}` | {where} |")
    return "\n".join([*ours, "", *theirs])


def page(text: str) -> str:
    """The page with current tables. Raises ValueError if it has no place for them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _labels(metric: Metric) -> str:
    return "<br>".join(f"`{label}`" + _values(values) for label, values in metric.labels.items())


def _values(values: tuple[str, ...]) -> str:
    if values is OPEN:
        return ""
    told = [value for value in values if value not in REASONS]
    return ": " + ", ".join(told + ["reasons of the error table"] * (len(told) < len(values)))


def main() -> None:
    settle(PAGE, page, "cluster/metric_table.py")


if __name__ == "__main__":
    main()
