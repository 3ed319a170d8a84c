"""A campaign for people and programs to read: a page with pictures, a file of numbers, a table on the console.

draw            report.html, *.png and results.json in a folder
console_table   verdict and table
compare_runs    two campaigns side by side
"""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Group, RenderableType
from rich.text import Text

from baton.terminal import Fitting
from loadtest.campaign import Campaign
from loadtest.compare import ATTAINMENT
from loadtest.estimate import Estimate, mean_and_interval
from loadtest.latency import MAX_STAGE_GAP, stage_sum_gap
from loadtest.results import Point, ProbeResult, Results, by_variant
from loadtest.slo import LAG_SHARE, LEAST_LAG_S
from loadtest.summary import Summary
from loadtest.verdict import Verdict, judged, over_variants, verdict_of
from loadtest.words import miss_text, percent, with_interval

PAGE, NUMBERS, OVERVIEW = "report.html", "results.json", "variants.png"
NONE = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """A number of a run; over several seeds, its mean, or what `pooled` says of all their requests together."""

    name: str
    of: Callable[[Summary], float | None]
    larger_is_better: bool = False
    share: bool = False
    pooled: Callable[[Point], float] | None = None

    def over(self, point: Point) -> Estimate:
        if self.pooled is None:
            return point.estimate(self.of)
        return mean_and_interval([self.pooled(point)] if point.requests else [])

    def text(self, value: float | None) -> str:
        if value is None:
            return NONE
        return percent(value) if self.share else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


MISS = "commonest miss"
COLUMNS = (
    Column("goodput (/s)", lambda s: s.goodput, larger_is_better=True),
    Column("attainment", lambda s: s.attainment, larger_is_better=True, share=True, pooled=lambda point: point.attainment),
    Column("TTFT P50 (ms)", lambda s: s.ttft_ms.p50),
    Column("TTFT P90 (ms)", lambda s: s.ttft_ms.p90),
    Column("TTFT P99 (ms)", lambda s: s.ttft_ms.p99),
    Column("TPOT P50 (ms)", lambda s: s.tpot_ms.p50),
    Column("TPOT P90 (ms)", lambda s: s.tpot_ms.p90),
    Column("ITL P99 (ms)", lambda s: s.itl_ms.p99),
    Column("E2E P90 (ms)", lambda s: s.e2e_ms.p90),
    Column("output tokens/s", lambda s: s.output_tokens / s.window.length, larger_is_better=True),
    Column("cached", lambda s: s.cached_share, larger_is_better=True, share=True),
)
ON_CONSOLE = ("goodput (/s)", "attainment", "TTFT P50 (ms)", "TTFT P90 (ms)", "TTFT P99 (ms)", "TPOT P90 (ms)", "output tokens/s")


@dataclass(frozen=True, slots=True)
class Section:
    """The results of one variant; its name is "" if nothing is varied."""

    variant: str
    results: Results
    verdict: Verdict


def sections(campaign: Campaign) -> list[Section]:
    whole = {variant: Results.of(part) for variant, part in by_variant(campaign).items()}
    return [Section(variant, results, verdict_of(results, len(whole))) for variant, results in whole.items()]


def by_name(parts: Sequence[Section]) -> dict[str, Results]:
    return {part.variant: part.results for part in parts}


def draw(campaign: Campaign, folder: Path) -> Path:
    """Writes everything and returns the page. Raises OSError, and ValueError for a run shorter than warm-up and cool-down."""
    from loadtest import pictures  # and so matplotlib: its import takes longer than a comparison of two campaigns, which draws nothing

    folder.mkdir(parents=True, exist_ok=True)
    parts = sections(campaign)
    drawn: list[dict[str, Any]] = []
    for number, part in enumerate(parts, start=1):
        shown, missing = [], []
        for picture, made in pictures.paint(part.results):
            if isinstance(made, str):
                missing.append((picture.title, made))
                continue
            name = f"{picture.name}.png" if len(parts) == 1 else f"{picture.name}-{number}.png"
            content = pictures.png(made.figure)
            (folder / name).write_bytes(content)
            shown.append({"name": name, "title": picture.title, "caption": made.caption, "data": base64.b64encode(content).decode()})
        drawn.append({"part": part, "shown": shown, "missing": missing})
    overview = ""
    if len(parts) > 1:
        content = pictures.png(pictures.best_of_each_variant(by_name(parts)))
        (folder / OVERVIEW).write_bytes(content)
        overview = base64.b64encode(content).decode()
    (folder / NUMBERS).write_text(json.dumps(as_json(campaign, parts), indent=2, allow_nan=False) + "\n")
    page = folder / PAGE
    page.write_text(_page(campaign, drawn, overview, over_variants(by_name(parts))))
    return page


def as_json(campaign: Campaign, parts: Sequence[Section]) -> dict[str, Any]:
    """One entry for each run, from `Summary.as_json`. The numbers of a single run are also at the top level."""
    runs = [_entry(run) for part in parts for run in part.results.runs]
    whole = {
        "title": campaign.title,
        "slo": str(campaign.slo),
        "arms": {arm.name: dict(arm.topology) for arm in campaign.arms},
        "verdict": {part.variant: part.verdict.as_json() for part in parts},
        "varied": over_variants(by_name(parts)),
        "partial": campaign.partial,
        "proposed": dict(campaign.proposed),
        "runs": runs,
    }
    return {**runs[0], **whole} if len(runs) == 1 else whole


def _entry(run: ProbeResult) -> dict[str, Any]:
    probe = run.probe
    said = {
        "arm": probe.arm,
        "rate": probe.rate,
        "seed": probe.seed,
        "variant": probe.variant,
        "why": probe.why,
        "ended_early": probe.partial,
    }
    return said | run.summary.as_json()


# Tables


def header(columns: Sequence[Column]) -> list[str]:
    return ["arm", "rate (/s)", "runs", *(column.name for column in columns), MISS]


def row(point: Point, columns: Sequence[Column]) -> list[str]:
    common = point.misses.most_common(1)
    miss = f"{miss_text(common[0][0])} ({percent(common[0][1] / point.requests)})" if common else ""
    cells = [_cell(column, column.over(point)) for column in columns]
    flawed = [run for run in point.runs if run.flaw]
    runs = f"void, seed {flawed[0].probe.seed}" if flawed else str(len(point.runs))
    return [point.arm, f"{point.rate:.4g}", runs, *cells, miss]


def _cell(column: Column, value: Estimate) -> str:
    spread = f" ± {value.half_width:.2g}" if value.half_width is not None and column.name == COLUMNS[0].name else ""
    return column.text(value.mean) + spread


def console_table(campaign: Campaign) -> RenderableType:
    """Verdict, then a row for each arm and rate, and a dim one for each run that does not count."""
    said: list[RenderableType] = []
    columns = [column for column in COLUMNS if column.name in ON_CONSOLE]
    parts = sections(campaign)
    said += [Text(sentence, style="bold") for sentence in over_variants(by_name(parts))]
    for part in parts:
        if part.variant:
            said.append(Text(part.variant, style="bold underline"))
        said += [Text(sentence, style="bold" if i == 0 else "") for i, sentence in enumerate(part.verdict.sentences)]
        table = Fitting(header(columns), left=("arm", MISS), prose=(MISS,))
        for arm in part.results.arms:
            for point in part.results.points(arm):
                table.add_row(*row(point, columns))
            for point in part.results.void(arm):
                table.add_row(*(Text(cell, style="dim") for cell in row(point, columns)))
        said.append(table)
        said += [Text(f"left out: {_named(run)}: {run.flaw}", style="red") for run in part.results.runs if run.flaw]
    if campaign.partial:
        said.append(Text(f"the campaign ended early: {campaign.partial}", style="red"))
    return Group(*said)


def compare_runs(a: Campaign, b: Campaign) -> RenderableType:
    """Each number of `a`, of `b`, and b / a, at each arm and rate that both ran. Two campaigns of one point each are always paired."""
    mine, theirs = _points(a), _points(b)
    pairs = [(key, key) for key in mine if key in theirs]
    if not pairs and len(mine) == len(theirs) == 1:
        pairs = [(next(iter(mine)), next(iter(theirs)))]
    said: list[RenderableType] = [Text(f"A: {a.title}"), Text(f"B: {b.title}")]
    said += [Text(f"not the same {what}: A {one}, B {other}", style="yellow") for what, one, other in _differences(a, b)]
    for one, other in pairs:
        title = _key_text(one) if one == other else f"{_key_text(one)} against {_key_text(other)}"
        said.append(Text(title, style="italic"))
        table = Fitting(("", "A", "B", "B / A"), left=("",))
        for column in COLUMNS:
            x, y = column.over(mine[one]).mean, column.over(theirs[other]).mean
            ratio = y / x if x and y is not None else None
            style = "" if ratio is None or abs(ratio - 1) < 0.02 else "green" if (ratio > 1) == column.larger_is_better else "red"
            table.add_row(column.name, column.text(x), column.text(y), Text(NONE if ratio is None else f"{ratio:.3f}", style=style))
        said.append(table)
    alone = [
        f"only in {name}: {_key_text(key)}" for name, some in (("A", mine), ("B", theirs)) for key in some if not _paired(name, key, pairs)
    ]
    return Group(*said, *(Text(line) for line in alone))


_Key = tuple[str, str, float]  # variant, arm, rate


def _points(campaign: Campaign) -> dict[_Key, Point]:
    whole = {variant: Results.of(part) for variant, part in by_variant(campaign).items()}
    return {(v, arm, point.rate): point for v, results in whole.items() for arm in results.arms for point in results.points(arm)}


def _key_text(key: _Key) -> str:
    variant, arm, rate = key
    return f"{arm} at {rate:.4g} requests/s" + (f", {variant}" if variant else "")


def _paired(name: str, key: _Key, pairs: Sequence[tuple[_Key, _Key]]) -> bool:
    return any(key == pair[0 if name == "A" else 1] for pair in pairs)


def _differences(a: Campaign, b: Campaign) -> Iterator[tuple[str, str, str]]:
    if a.slo != b.slo:
        yield "SLO", str(a.slo), str(b.slo)
    for what, one, other in (
        ("workload", a.workload, b.workload),
        ("configuration", a.config, b.config),
        ("machine", a.machine, b.machine),
    ):
        mine, theirs = dict(flat(one)), dict(flat(other))
        for key in dict.fromkeys([*mine, *theirs]):
            if mine.get(key) != theirs.get(key) and key not in ("when", "load_before"):
                yield f"{what} ({key})", mine.get(key, NONE), theirs.get(key, NONE)


def _named(run: ProbeResult) -> str:
    variant = f", {run.probe.variant}" if run.probe.variant else ""
    return f"{run.probe.arm} at {run.probe.rate:.4g} requests/s, seed {run.probe.seed}{variant}"


# The page


def flat(told: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key, value as text."""
    for key, value in told.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def failures(results: Results) -> list[tuple[str, str, str, int, int]]:
    """The requests that did not end well: (arm, rate, outcome and reason, requests, of how many), by arm and rate, commonest first."""
    rows = []
    for arm in results.arms:
        for point in results.points(arm):
            counts = sum((Counter(run.summary.failures) for run in point.runs), Counter[str]())
            rows += [(arm, f"{point.rate:.4g}", reason, count, point.requests) for reason, count in counts.most_common()]
    return rows


def explained(results: Results) -> list[tuple[str, int, float, float, float]]:
    """(arm, requests, the median gap, the largest gap, share of requests within MAX_STAGE_GAP) of the arms with reported stages.

    A gap is the difference between the stages' sum and the time that the client saw, as a share of the latter.
    """
    rows = []
    for arm in results.arms:
        records = [record for point in results.points(arm) for record in results.records(point)]
        gaps = [gap for record in records if (gap := stage_sum_gap(record)) is not None]
        if gaps:
            within = sum(gap <= MAX_STAGE_GAP for gap in gaps) / len(gaps)
            rows.append((arm, len(gaps), median(gaps), max(gaps), within))
    return rows


def _page(campaign: Campaign, drawn: Sequence[Mapping[str, Any]], overview: str, varied: Sequence[str]) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    keys = list(dict.fromkeys(key for arm in campaign.arms for key in arm.topology))
    topology = [(key, [arm.topology.get(key, NONE) for arm in campaign.arms]) for key in keys]
    by_run = {id(run.probe): run for entry in drawn for run in entry["part"].results.runs}
    return environment.get_template("report.html.jinja").render(
        campaign=campaign,
        drawn=drawn,
        overview=overview,
        varied=varied,
        failures=failures,
        explained=explained,
        judged=judged,
        percent=percent,
        max_stage_gap=percent(MAX_STAGE_GAP),
        max_stage_gap_share=MAX_STAGE_GAP,
        header=header(COLUMNS),
        row=lambda point: row(point, COLUMNS),
        with_interval=with_interval,
        topology=topology,
        differing=[key for key, values in topology if len(set(values)) > 1],
        runs=[by_run[id(probe)] for probe in campaign.probes],
        seeds=sorted({probe.seed for probe in campaign.probes}),
        config=list(flat(campaign.config)),
        workload=list(flat(campaign.workload)),
        machine=list(flat(campaign.machine)),
        attainment=percent(ATTAINMENT),
        least_lag_ms=LEAST_LAG_S * 1000,
        lag_share=percent(LAG_SHARE),
    )
