"""The pictures of a report. Each is one function, Results -> Drawn, or the reason why there is nothing to draw.

Arms differ in colour (Okabe and Ito's palette, which colour-blind readers can tell apart), marker, line and hatch, so that nothing
depends on colour alone.
"""

import io
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

from baton.stages import STAGES
from loadtest.compare import ATTAINMENT
from loadtest.estimate import Estimate
from loadtest.latency import itl, ttft, ttft_parts
from loadtest.record import Record
from loadtest.results import Point, Results, best
from loadtest.slo import Miss
from loadtest.summary import Summary
from loadtest.verdict import all_crossovers, numeric, varied_crossovers
from loadtest.words import miss_text, percent

DPI = 110
WIDTH = 9.0  # inches
STRETCH_S = 15.0  # of the timeline
CURVE_POINTS = 1500  # of a CDF; more cannot be seen
STACKED = ("queue", "prefill", "prefill_wait", "prefill_compute", "transfer", "decode", "client")  # in the order of a request's life
LARGEST_MISSES = 7  # that get a colour of their own
GREY = "#666666"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "ooo", "++")
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.framealpha": 0.85,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,  # names come from outside; a $ in one must stay a $
}


@dataclass(frozen=True, slots=True)
class Drawn:
    figure: Figure
    caption: str  # one sentence


@dataclass(frozen=True, slots=True)
class Picture:
    name: str  # of its file
    title: str
    draw: Callable[[Results], Drawn | str]


@dataclass(frozen=True, slots=True)
class Look:
    colour: str
    marker: str
    line: str
    hatch: str


def paint(results: Results) -> Iterator[tuple[Picture, Drawn | str]]:
    """Each picture, or why it is left out."""
    for picture in PICTURES:
        with mpl.rc_context(STYLE):
            made = picture.draw(results) if any(not run.flaw for run in results.runs) else "no run counts"
        yield picture, made


def png(figure: Figure) -> bytes:
    """The same bytes for the same figure."""
    file = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


# The pictures


def goodput_against_rate(results: Results) -> Drawn | str:
    figure = Figure(figsize=(WIDTH, 5.6))
    axes = figure.subplots()
    ends = np.array([0.0, max(run.probe.rate for run in results.runs) * 1.04])
    axes.plot(ends, ends, color=GREY, linewidth=1, label="goodput = offered")
    axes.plot(ends, ATTAINMENT * ends, color=GREY, linewidth=1, linestyle=":", label=f"{percent(ATTAINMENT)} attainment")
    for arm, look in _looks(results.arms).items():
        _curve(axes, [(point.rate, point.goodput) for point in results.sweep(arm)], look, arm)
        between = [point for point in results.points(arm) if point not in results.sweep(arm)]
        means = [fmean(run.goodput for run in point.runs) for point in between]
        axes.plot([point.rate for point in between], means, look.marker, color=look.colour, fillstyle="none")
        void = [run for point in results.void(arm) for run in point.runs]
        grey: dict[str, Any] = {"color": GREY, "alpha": 0.5, "markersize": 5}
        axes.plot([run.probe.rate for run in void], [run.goodput for run in void], look.marker, **grey)
        top = best(results, arm)
        if top.unjudged:
            axes.plot([], [], look.marker, **grey, label=f"{_short(arm)}: not judged")
        elif top.rate is not None and top.goodput.mean is not None:
            label = f"{_short(arm)}: {top.goodput.mean:.3g}/s"
            axes.plot(top.rate, top.goodput.mean, "*", color=look.colour, markersize=17, markeredgecolor="black", label=label, zorder=5)
    crossed = all_crossovers(results)
    for i, found in enumerate(crossed):
        axes.axvline(found.rate, color="black", linewidth=1, linestyle=(0, (1, 3)), label="crossover" if i == 0 else None)
    said = [f"{_short(found.above)} overtakes {_short(found.below)} at {found.rate:.3g}/s" for found in crossed]
    said[3:] = [f"and {len(said) - 3} more"] if len(said) > 3 else []
    axes.set(xlabel="offered rate (requests/s)", ylabel="goodput (requests/s that meet the SLO)", title="\n".join(said) or "no crossover")
    axes.set(xlim=(0, ends[1]), ylim=(0, ends[1]))
    _legend(axes, loc="upper left")  # no curve rises above the offered rate
    seeds = max(len(point.runs) for arm in results.arms for point in results.points(arm))
    spread = f"Mean of {seeds} seeds with 95 % interval" if seeds > 1 else "One seed, so no spread is known"
    hollow = "; hollow: rates that only some seeds ran" if any(run.probe.why != "sweep" for run in results.runs) else ""
    hollow += "; grey: runs that do not count" if any(run.flaw for run in results.runs) else ""
    return Drawn(figure, f"{spread}; a star marks each arm at its highest rate that holds {percent(ATTAINMENT)} attainment{hollow}.")


@mpl.rc_context(STYLE)
def best_of_each_variant(parts: Mapping[str, Results]) -> Figure:
    """Draws a campaign that varies a parameter: the value at which another arm becomes the better one is a crossover, too."""
    figure = Figure(figsize=(WIDTH, 4.8))
    axes = figure.subplots()
    values = {variant: value for value, variant in numeric(list(parts))}
    places = np.array([values[variant] for variant in parts] if values else range(len(parts)), dtype=float)
    step = float(np.ptp(places)) / max(len(parts) - 1, 1) or 1.0
    if values:
        for i, found in enumerate(varied_crossovers(parts)):
            axes.axvline(found.value, color="black", linewidth=1, linestyle=(0, (1, 3)), label="crossover" if i == 0 else None)
    arms = list(dict.fromkeys(arm for results in parts.values() for arm in results.arms))
    for i, (arm, look) in enumerate(_looks(arms).items()):
        ran = [place for place, results in zip(places, parts.values(), strict=True) if arm in results.arms]
        tops = [best(results, arm) for results in parts.values() if arm in results.arms]
        known = [(place, top.goodput.mean, top.goodput.half_width or 0.0) for place, top in zip(ran, tops, strict=True) if not top.unjudged]
        shift = 0.03 * step * (i - (len(arms) - 1) / 2)
        missing = len(tops) - len(known)
        label = _short(arm) + (f" (not judged at {missing} of {len(tops)})" if missing else "")
        where, means, bars = zip(*known, strict=True) if known else ((), (), ())
        style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": look.line, "capsize": 3, "label": label}
        axes.errorbar(np.array(where) + shift, means, bars, **style)
    axes.set_xticks(places, list(parts))
    axes.set(xlabel="varied parameter", ylabel=f"goodput at the highest rate that holds {percent(ATTAINMENT)} attainment (requests/s)")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def latency_throughput_knee(results: Results) -> Drawn | str:
    limits, figure = results.campaign.slo.limits, Figure(figsize=(WIDTH, 4.8))
    numbers: list[tuple[str, Callable[[Summary], float | None]]] = [
        ("ttft", lambda summary: summary.ttft_ms.p90),
        ("tpot", lambda summary: summary.tpot_ms.p90),
    ]
    for axes, (name, number) in zip(figure.subplots(1, 2), numbers, strict=True):
        for arm, look in _looks(results.arms).items():
            points = [
                (p.rate, x, y) for p in results.sweep(arm) if (x := p.estimate(_tokens_per_s).mean) and (y := p.estimate(number).mean)
            ]
            if points:
                rates, xs, ys = zip(*points, strict=True)
                label = f"{_short(arm)} (up to {rates[-1]:.3g}/s)"
                axes.plot(xs, ys, color=look.colour, marker=look.marker, linestyle=look.line, label=label)
        axes.margins(x=0.08, y=0.12)
        _log(axes, "y", [y for line in axes.lines for y in np.asarray(line.get_ydata(), float)])
        if name in limits:
            axes.axhline(limits[name] * 1000, color="black", linewidth=1, linestyle=":", label="SLO")
        axes.set(xlabel="output tokens/s", ylabel=f"P90 {name.upper()} (ms)")
    if not any(line.get_marker() in MARKERS for axes in figure.axes for line in axes.lines):
        return "no request was answered"
    _legend_below(figure)
    return Drawn(figure, "P90 latency against tokens delivered as the rate grows: past the knee, latency grows and throughput does not.")


def latency_cdf(results: Results) -> Drawn | str:
    points, limits = _close_look(results), results.campaign.slo.limits
    figure = Figure(figsize=(WIDTH, 4.8))
    first, between = figure.subplots(1, 2)
    for arm, look in _looks(results.arms).items():
        if arm not in points:
            continue
        due = results.records(points[arm])
        _cdf(first, [value * 1000 for record in due if (value := ttft(record)) is not None], len(due), look, arm)
        gaps = [gap * 1000 for record in due for gap in itl(record)]
        _cdf(between, gaps, len(gaps), look, arm)
    if not first.lines:
        return "no request was answered"
    for axes, names in ((first, ("ttft",)), (between, ("itl_p99", "tpot"))):
        _log(axes, "x", [x for line in axes.lines for x in np.asarray(line.get_xdata(), float)])
        for name in names:
            if name in limits:
                line = ":" if name != "tpot" else "-."
                label = f"SLO {name.replace('_', ' ').upper()} {limits[name] * 1000:.4g} ms"
                axes.axvline(limits[name] * 1000, color="black", linewidth=1, linestyle=line, label=label)
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        axes.set_ylim(0, 1.02)
    first.set(xlabel="TTFT (ms)", ylabel="share of all requests")
    between.set(xlabel="ITL (ms)", ylabel="share of all gaps between tokens")
    _legend_below(figure)
    return Drawn(figure, f"Distributions at {_rate(points)}; requests without a first token keep a TTFT curve below 100 %.")


def itl_timeline(results: Results) -> Drawn | str:
    """Each arm's first run at that rate, in the stretch in which the first arm was sent the most prompt tokens."""
    points = {arm: point.runs[0] for arm, point in _close_look(results).items()}
    if not any(len(record.token_times) > 1 for run in points.values() for record in run.probe.records):
        return "no answer has two tokens, so there is no gap between tokens"
    run = next(iter(points.values()))
    start = _busiest(run.probe.records, run.summary.window.start, run.summary.window.end)
    figure = Figure(figsize=(WIDTH, 1.0 + 2.2 * len(points)))
    rows: list[Axes] = list(figure.subplots(len(points), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    looks = _looks(results.arms)
    longest = max(1, *(record.prompt_tokens for run in points.values() for record in run.probe.records))
    for axes, (arm, run) in zip(rows, points.items(), strict=True):
        gaps = [(at, gap * 1000) for r in run.probe.records for at, gap in zip(r.token_times[1:], itl(r), strict=True)]
        seen = [(at, max(gap, 0.01)) for at, gap in gaps if start <= at < start + STRETCH_S]
        axes.plot([at for at, _ in seen], [gap for _, gap in seen], ".", color=looks[arm].colour, markersize=3, alpha=0.6)
        axes.set_title(f"{_short(arm)}, seed {run.probe.seed}", loc="left")
        axes.set_ylabel("ITL (ms)")
        sent = [record for record in run.probe.records if start <= record.sent < start + STRETCH_S]
        prompts = axes.twinx()
        prompts.vlines([r.sent for r in sent], 0, [r.prompt_tokens for r in sent], color=GREY, alpha=0.45, linewidth=2)
        prompts.set(ylim=(0, 2.5 * longest), yticks=(0, longest), ylabel="prompt tokens")  # keeps the bars in the lower part
        prompts.grid(False)
    _log(rows[0], "y", [gap for axes in rows for line in axes.lines for gap in np.asarray(line.get_ydata(), float)])
    rows[-1].set(xlabel="time since the start of the run (s)", xlim=(start, start + STRETCH_S))
    rate = _rate(_close_look(results))
    return Drawn(figure, f"Gaps between tokens (dots) while prompts arrive (grey bars, their height the prompt's tokens), at {rate}.")


def stage_waterfall(results: Results) -> Drawn | str:
    points = _close_look(results)
    told = {
        arm: [r for r in results.records(point) if r.outcome == "ok" and r.stages_ms and r.token_times] for arm, point in points.items()
    }
    told = {arm: records for arm, records in told.items() if records}
    if not told:
        return "the server reported no stages"
    figure = Figure(figsize=(WIDTH, 1.7 + 0.65 * len(told)))
    to_first, whole = figure.subplots(1, 2)
    _stack(to_first, {arm: [parts for r in records if (parts := ttft_parts(r))] for arm, records in told.items()}, "until the first token")
    _stack(
        whole,
        {arm: [{stage: r.stages_ms.get(stage, 0.0) / 1000 for stage in STAGES} for r in records] for arm, records in told.items()},
        "the whole request, at the server",
    )
    whole.set_yticklabels([])
    _legend_below(figure, columns=6)
    return Drawn(figure, f"Mean time in each stage at {_rate(points)}; the whisker is the P90 of the sum.")


def transfer_against_bytes(results: Results) -> Drawn | str:
    """Least squares: time = latency + bytes / bandwidth."""
    moved = [
        record
        for run in results.runs
        if not run.flaw
        for record in results.campaign.window(run.probe).select(run.probe.records)
        if record.transport and record.kv_bytes and "transfer" in record.stages_ms
    ]
    if not moved:
        return "no handoff moved KV"
    stages = [stage for stage in ("transfer", "read") if any(stage in record.stages_ms for record in moved)]
    names = {"transfer": "whole transfer stage", "read": "of this, the read alone"}
    figure = Figure(figsize=(WIDTH, 4.2))
    fits = []
    for axes, stage in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages, strict=True):
        for transport, look in _looks(sorted({record.transport for record in moved})).items():
            some = [record for record in moved if record.transport == transport and stage in record.stages_ms]
            mib, ms = np.array([r.kv_bytes / 2**20 for r in some]), np.array([r.stages_ms[stage] for r in some])
            axes.plot(mib, ms, look.marker, color=look.colour, markersize=3.5, alpha=0.35, label=_short(transport))
            fit = _line(mib, ms)
            if fit:
                latency, slope = fit
                label = f"{latency:.3g} ms + bytes / ({1000 / slope / 1024:.3g} GiB/s)"
                xs = np.array([mib.min(), mib.max()])
                axes.plot(xs, latency + slope * xs, color="black", linestyle=look.line, label=label)
                fits.append(f"{_short(transport)} {stage}: {label}")
        axes.set(xlabel="KV moved (MiB)", ylabel="time (ms)", title=names[stage], ylim=(0, None))
        axes.margins(y=0.25)
        _legend(axes, loc="upper left")
    said = "; ".join(fits) or "no line fits: all have one size, or more bytes take no longer"
    return Drawn(figure, f"Time of {len(moved)} handoffs against the bytes they moved ({said}).")


def cached_share(results: Results) -> Drawn | str:
    if not any(run.summary.cached_share for run in results.runs if not run.flaw):
        return "no prompt token came from a cache"
    figure = Figure(figsize=(WIDTH, 3.8))
    axes = figure.subplots()
    for arm, look in _looks(results.arms).items():
        _curve(axes, [(point.rate, point.estimate(lambda summary: summary.cached_share)) for point in results.sweep(arm)], look, arm)
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.set(xlabel="offered rate (requests/s)", ylabel="cached share of prompt tokens")
    axes.set_ylim(-0.02, 1)
    _legend(axes)
    return Drawn(figure, "Share of the prompt tokens of completed requests that a prefix cache already held.")


def misses_by_reason(results: Results) -> Drawn | str:
    points = {arm: results.points(arm) for arm in results.arms if results.points(arm)}
    common = sum((point.misses for some in points.values() for point in some), Counter[Miss]())
    if not common:
        return "every request met the SLO"
    named = [miss for miss, _ in common.most_common(LARGEST_MISSES)]
    figure = Figure(figsize=(WIDTH, 1.4 + 2.1 * len(points)))
    rows: list[Axes] = list(figure.subplots(len(points), 1, sharey=True, squeeze=False)[:, 0])
    for axes, (arm, some) in zip(rows, points.items(), strict=True):
        base = np.zeros(len(some))
        for miss, look in zip([*named, None], _looks([str(i) for i in range(len(named) + 1)]).values(), strict=True):
            counts = [point.misses[miss] if miss else sum(n for m, n in point.misses.items() if m not in named) for point in some]
            shares = np.array([count / point.requests for count, point in zip(counts, some, strict=True)])
            if miss or any(m not in named for m in common):
                label = miss_text(miss) if miss else "other"
                style: dict[str, Any] = {"color": look.colour, "hatch": look.hatch, "edgecolor": "white", "linewidth": 0.5, "label": label}
                axes.bar(range(len(some)), shares, bottom=base, width=0.7, **style)
            base += shares
        axes.axhline(1 - ATTAINMENT, color="black", linewidth=1, linestyle=":")
        axes.set_xticks(range(len(some)), [f"{point.rate:.3g}" for point in some])
        axes.set_title(_short(arm), loc="left")
        axes.set_ylabel("missed")
        axes.grid(False, axis="x")
    rows[0].yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    rows[0].set_ylim(0, 1)
    rows[-1].set_xlabel("offered rate (requests/s)")
    _legend_below(figure, columns=2)
    return Drawn(figure, f"Requests that do not count, by reason; above the dotted line an arm is below {percent(ATTAINMENT)} attainment.")


PICTURES = (
    Picture("goodput", "Goodput against offered rate", goodput_against_rate),
    Picture("knee", "Latency against throughput", latency_throughput_knee),
    Picture("cdf", "Distributions of TTFT and ITL", latency_cdf),
    Picture("timeline", "Gaps between tokens while prompts arrive", itl_timeline),
    Picture("stages", "Where the time goes", stage_waterfall),
    Picture("transfer", "Transfer time against bytes", transfer_against_bytes),
    Picture("cached", "Cached share of prompts", cached_share),
    Picture("misses", "Requests that missed the SLO", misses_by_reason),
)


# Their parts


def _looks(names: Sequence[str]) -> dict[str, Look]:
    cycles = (itertools.cycle(kind) for kind in (COLOURS, MARKERS, LINES, HATCHES))
    return {name: Look(*look) for name, look in zip(names, zip(*cycles, strict=False), strict=False)}


def _short(name: str) -> str:
    """A legend drops a label that begins with an underscore, and a line break would tear it apart."""
    name = " ".join(name.split())
    name = name if len(name) <= 32 else name[:31] + "…"
    return f" {name}" if name.startswith("_") else name


def _close_look(results: Results) -> dict[str, Point]:
    return {} if results.knee is None else results.at(results.knee)


def _rate(points: Mapping[str, Point]) -> str:
    return f"{next(iter(points.values())).rate:.3g} requests/s"


def _tokens_per_s(summary: Summary) -> float:
    return summary.output_tokens / summary.window.length


def _legend(axes: Axes, loc: Literal["best", "upper left"] = "best") -> None:
    if axes.get_legend_handles_labels()[0]:
        for handle in axes.legend(loc=loc).legend_handles:
            if handle is not None:
                handle.set_alpha(1)


def _legend_below(figure: Figure, columns: int = 3) -> None:
    """One legend for all axes, with each label once."""
    named = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=min(columns, len(named)))


def _log(axes: Axes, which: str, values: Iterable[float]) -> None:
    """Makes the axis logarithmic, with plain numbers. Within one decade it would have too few ticks, so it stays linear, from 0."""
    finite = [value for value in values if np.isfinite(value) and value > 0]
    if not finite or max(finite) < 10 * min(finite):
        (axes.set_ylim if which == "y" else axes.set_xlim)(0, None)
        return
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(finite) < 1000 * min(finite) else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _curve(axes: Axes, points: Sequence[tuple[float, Estimate]], look: Look, arm: str) -> None:
    known = [(rate, value.mean, value.half_width or 0.0) for rate, value in points if value.mean is not None]
    if known:
        rates, means, halves = zip(*known, strict=True)
        style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": look.line, "label": _short(arm)}
        axes.errorbar(rates, means, yerr=halves, capsize=4, markersize=6, **style)


def _cdf(axes: Axes, values: Sequence[float], of: int, look: Look, arm: str) -> None:
    if values:
        ordered = np.sort(values)
        ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), CURVE_POINTS)).astype(int))
        axes.step(ordered[ranks], (ranks + 1) / of, where="post", color=look.colour, linestyle=look.line, label=_short(arm))


def _busiest(records: Sequence[Record], start: float, end: float) -> float:
    """Start of the stretch within [start, end), s, in which most prompt tokens were sent."""
    begins = np.arange(start, max(end - STRETCH_S, start) + 1e-9, 1.0)
    loads = [sum(r.prompt_tokens for r in records if begin <= r.sent < begin + STRETCH_S) for begin in begins]
    return float(begins[int(np.argmax(loads))])


def _stack(axes: Axes, parts: Mapping[str, Sequence[Mapping[str, float]]], title: str) -> None:
    """A bar for each arm: the mean of each part in seconds, drawn in ms, one after the other. Each arm has a request."""
    arms = list(parts)
    left = np.zeros(len(arms))
    for stage, look in _looks(STACKED).items():
        means = np.array([1000 * fmean(each.get(stage, 0.0) for each in parts[arm]) for arm in arms])
        if means.any():
            label = stage.replace("_", " ")
            axes.barh(range(len(arms)), means, left=left, height=0.55, color=look.colour, hatch=look.hatch, edgecolor="white", label=label)
        left += means
    high = np.array([1000 * np.percentile([sum(each.values()) for each in parts[arm]], 90) for arm in arms])
    axes.hlines(range(len(arms)), np.minimum(left, high), np.maximum(left, high), color="black", linewidth=1.2)
    axes.plot(high, range(len(arms)), "|", color="black", markersize=11)
    axes.set_yticks(range(len(arms)), [_short(arm) for arm in arms])
    axes.set(xlabel="time (ms)", title=title, xlim=(0, None))
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.grid(False, axis="y")


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float] | None:
    """(y at 0, slope) of the least squares line. None: fewer than three points, a single x, or a line that does not rise."""
    if len(x) < 3 or np.ptp(x) == 0:
        return None
    slope, at_zero = np.polyfit(x, y, 1)
    return (float(at_zero), float(slope)) if slope > 0 else None
