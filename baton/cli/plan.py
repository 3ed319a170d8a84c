"""`baton plan`: which GPUs, in which pools, hold an SLO for the least money."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console

from baton.engine.facts.fields import CheckpointError
from baton.plan import advice, values
from baton.plan.hardware import DEVICES, MEASURED, Efficiency
from baton.plan.pools import Question
from baton.plan.search import Configuration, Found, Search, Stock, order, spread
from baton.plan.shape import KNOWN, shape_of
from baton.terminal import Fitting
from loadtest.cli import failing, plan_of
from loadtest.options import LoadOptions, MeasureOptions, Target, takes

if TYPE_CHECKING:
    from baton.predict.offered import Offered
    from baton.predict.verify import PlanVerdict

BEST = 5
SYNTHETIC_S, TRACE_S = 60.0, 1200.0  # of requests that are looked at
out, err = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160), Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Arguments and options of `plan`, beside the load test's."""

    model: Annotated[str, typer.Argument(help=f"Folder with config.json, or one of {', '.join(KNOWN)}.")]
    gpus: Annotated[list[str], typer.Option(help=f"GPUs that there are, as h100=16; several. Of {', '.join(DEVICES)}.")]
    price: Annotated[
        list[str] | None, typer.Option(help="Price of a GPU for an hour, as h100=2.5; of each kind, or of none: then each counts 1.")
    ] = None
    per_node: Annotated[int, typer.Option(min=1, max=64, help="GPUs of a node.")] = 8
    link_gbps: Annotated[float, typer.Option(min=0.001, help="Gbit/s between a prefill and a decode worker.")] = 200
    weight_bits: Annotated[str, typer.Option(help="Bits of a weight that are allowed: 16, 8, or 16,8.")] = "16"
    kv_bits: Annotated[str, typer.Option(help="Bits of a number of KV that are allowed: any of 16,8,4.")] = "16"
    attainment: Annotated[float, typer.Option(min=0.5, max=0.999, help="Share of the requests that must meet the objectives.")] = 0.9
    efficiency: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Share of the stated compute and bandwidth that is reached.")
    ] = None
    verify: Annotated[int, typer.Option(min=0, max=BEST, help="So many of the best are simulated, too.")] = 2
    draws: Annotated[int, typer.Option(min=0, help="Further simulations with other numbers, for the intervals.")] = 3
    values: Annotated[
        Path | None, typer.Option(help="File for values of Baton's chart: the cheapest configuration that Baton can install.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A configuration in the answer."""

    made: Configuration
    costs: tuple[float | None, float | None]  # at the ends of the sheet's error
    lacking: tuple[str, ...]
    verdict: "PlanVerdict | None" = None

    @property
    def holds(self) -> bool:
        return self.verdict is None or self.verdict.holds


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    asked: Question
    lines: Sequence[PlanLine]
    decided: Sequence[advice.Advice]
    lost: Sequence[tuple[str, str]]
    notes: Sequence[str]


@takes(PlanOptions, Target, LoadOptions)
def plan(given: PlanOptions, target: Target, load: LoadOptions) -> None:
    """Say which of the GPUs that there are, in which pools, hold the objectives for the least money: by formulae, and the best of them
    simulated. Nothing of it is measured."""
    with failing("baton plan"):
        stocks = stocks_of(given.gpus, given.price or (), given.per_node)
        bits = _bits("weight_bits", given.weight_bits), [values.KV_BITS[int(each)] for each in _bits("kv_bits", given.kv_bits)]
        seen = _offered(target, load)
        asked = _question(given, seen)
        search = Search(asked, stocks, *bits)
        found = search.found()
        if not found.held:
            raise RuntimeError(nothing(asked, stocks, search, found))
        lines = _lines(found, search, stocks, given, seen)
        answer = PlanAnswer(
            asked, lines, advice.decisions(asked, stocks, found, bits),
            advice.losers(found, search, asked, [line.made for line in lines]), seen.notes,
        )  # fmt: skip
        if given.values is not None:
            _write(given.values, lines, asked, load.max_tokens)
        if given.as_json:
            print(json.dumps(_as_json(answer), indent=2))
        else:
            _print(answer)


def stocks_of(gpus: Sequence[str], prices: Sequence[str], per_node: int) -> list[Stock]:
    """Raises ValueError, which names the field."""
    counts, costs = _named("gpus", gpus), _named("price", prices)
    for name, count in counts.items():
        if count != int(count):
            raise ValueError(f"gpus: {name}={count:g} is not a whole number")
    if beyond := [name for name in costs if name not in counts]:
        raise ValueError(f"price: {beyond[0]} is given, and gpus has none of it")
    if costs and (free := [name for name in counts if name not in costs]):
        raise ValueError(f"price: {free[0]} has none; give one for every kind of GPU, or for none")
    return [Stock(DEVICES[name], int(count), costs.get(name, 1.0), per_node) for name, count in counts.items()]


def _named(field: str, texts: Sequence[str]) -> dict[str, float]:
    """Numbers by name, from "h100=16,l40s=8"."""
    found: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, _, number = part.partition("=")
        name = name.strip().lower()
        if name not in DEVICES:
            raise ValueError(f"{field}: {name!r} is not in the sheet: {', '.join(DEVICES)}")
        if name in found:
            raise ValueError(f"{field}: {name} is given twice")
        try:
            found[name] = float(number)
        except ValueError:
            raise ValueError(f"{field}: {part!r} is not like {name}=2") from None
        if not 0 < found[name] < 1e6:
            raise ValueError(f"{field}: {part} must be above 0 and below a million")
    return found


def _bits(field: str, text: str) -> list[float]:
    known = (16, 8) if field == "weight_bits" else tuple(values.KV_BITS)
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or set(found) - set(known):
        raise ValueError(f"{field}: {text!r} is none or several of {', '.join(map(str, known))}")
    return [float(each) for each in dict.fromkeys(found)]


def _offered(target: Target, load: LoadOptions) -> "Offered":
    """Raises ValueError."""
    from baton.predict.offered import offered

    if not 0 < target.rate < float("inf"):
        raise ValueError(f"rate: {target.rate:g} is not a finite number above 0")
    length = load.duration if load.duration is not None else TRACE_S if load.arrivals == "trace" else SYNTHETIC_S
    measured = MeasureOptions(seeds="1", warm_up=0.0, cool_down=0.0, timeout=600.0)
    return offered(plan_of(target.slo, measured, None, replace(load, duration=length)), target.rate)


def _question(given: PlanOptions, seen: "Offered") -> Question:
    """Raises ValueError."""
    try:
        shape = shape_of(given.model)
    except (CheckpointError, KeyError) as error:
        raise ValueError(f"model: {error.args[0]}") from None
    limits, efficiency = seen.slo.limits, given.efficiency
    reached = MEASURED if efficiency is None else Efficiency(efficiency, efficiency, "given")
    return Question(shape, seen.traffic, limits["ttft"], limits["tpot"], reached, given.link_gbps / 8 * 1e9, given.attainment)


def nothing(asked: Question, stocks: Sequence[Stock], search: Search, found: Found) -> str:
    """Why no configuration holds, and what would."""
    bits = sorted({speed.kind.weight_bits for speed in search.speeds}), sorted({speed.kind.kv_bits for speed in search.speeds})
    terms = advice.terms(search, asked) or [f"{one.what}: {one.why}" for one in found.rejected]
    more = advice.needed(asked, stocks, bits[0] or [16.0], bits[1] or [16.0])
    if more is not None:
        terms.append(f"with more GPUs of these kinds, {more} would hold it: {_gpus(more)}")
    elif not terms:
        terms.append("each objective alone can be held, both together cannot, with any number of these GPUs")
    return "no configuration holds the objectives. " + ". ".join(terms)


def _gpus(one: Configuration) -> str:
    names = dict.fromkeys(pool.kind.device for pool in one.pools)
    return " + ".join(f"{one.gpus_of(device)} x {device.name}" for device in names)


def _lines(found: Found, search: Search, stocks: Sequence[Stock], given: PlanOptions, seen: "Offered") -> list[PlanLine]:
    """The best ones, those first that hold in the simulator. Simulated are the cheapest, the cheapest that Baton can install, others."""
    shape, lines = search.asked.shape, []
    able = [one for one in found.held if not values.lacking(one, shape, given.per_node)]
    best = advice.best_of(found, BEST, able)
    turns = sorted(best, key=lambda one: (one is not best[0], one not in able[:1], *order(one)))
    for number, one in enumerate(turns):
        verdict = None
        if number < given.verify:
            from baton.predict.verify import verify

            err.print(f"simulating {one} …", markup=False, soft_wrap=True)
            verdict = verify(one, search, seen.offer, seen.slo, given.draws)
        made = verdict.made if verdict else one
        low, high = spread(search.asked, stocks, made)
        costs = None if low is None else min(low.cost, made.cost), None if high is None else max(high.cost, made.cost)
        lines.append(PlanLine(made, costs, values.lacking(made, shape, given.per_node), verdict))
    return sorted(lines, key=lambda line: (not line.holds, *order(line.made)))


def _warning(lines: Sequence[PlanLine]) -> str:
    """What `baton simulate` says first of the same."""
    doubts = dict.fromkeys(doubt for line in lines if line.verdict for doubt in line.verdict.told.doubts)
    if not doubts:
        return "Nothing was measured or simulated: all figures are estimates from a sheet of devices."
    return f"Outside of what was validated: {'; '.join(doubts)}."


def _print(answer: PlanAnswer) -> None:
    asked, lines = answer.asked, answer.lines
    traffic = asked.traffic
    out.print(_warning(lines), style="bold", markup=False, soft_wrap=True)
    out.print(
        f"{asked.shape.name}: {traffic.rate:.3g} requests/s, prompts of {traffic.prompt:.0f} tokens (P90"
        f" {traffic.percentile('prompt', 90)}), answers of {traffic.output:.0f}, arrivals {traffic.cv2:.2g} times as uneven as independent"
        f" ones; ttft {1000 * asked.ttft_s:g} ms and tpot {1000 * asked.tpot_s:g} ms for {asked.attainment:.1%}",
        markup=False,
    )
    for note in answer.notes:
        out.print(note, style="yellow", markup=False)
    table = Fitting(
        ("configuration", "GPUs", "an hour", "90 %", "estimated", "simulated", "Baton installs it"),
        left=("configuration", "GPUs", "simulated", "Baton installs it"),
        prose=("configuration", "Baton installs it"),
    )
    for line in lines:
        table.add_row(*_cells(line))
    out.print(table)
    _section("the cheapest", [(str(line.made), advice.because(line.made, asked)) for line in lines])
    _section("the decisions", [(f"{each.question}: {each.answer}", each.why) for each in answer.decided])
    _section("why not the others", answer.lost)


def _cells(line: PlanLine) -> tuple[str, ...]:
    made, verdict = line.made, line.verdict
    low, high = (f"{cost:.4g}" if cost is not None else "more than there are" for cost in line.costs)
    return (
        f"{made}{'' if verdict is None or not verdict.added else ' (simulated too few)'}",
        _gpus(made), f"{made.cost:.4g}", f"{low} … {high}", f"{made.attainment:.1%}", _simulated(verdict),
        "no: " + "; ".join(line.lacking) if line.lacking else values.engine_of(made),
    )  # fmt: skip


def _simulated(verdict: "PlanVerdict | None") -> str:
    if verdict is None:
        return "not simulated"
    told = verdict.told.figures["attainment"]
    return f"{told.value:.1%} ({told.low:.0%} … {told.high:.0%})" + ("" if verdict.holds else ", does not hold")


def _section(title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        table = Fitting((title, "because"), left=(title, "because"), prose=(title, "because"))
        for row in rows:
            table.add_row(*row)
        out.print()
        out.print(table)


def _as_json(answer: PlanAnswer) -> Mapping[str, Any]:
    asked, lines = answer.asked, answer.lines
    traffic = asked.traffic
    return {
        "warning": _warning(lines),
        "notes": list(answer.notes),
        "asked": {
            "model": asked.shape.name, "rate": traffic.rate, "prompt": traffic.prompt, "output": traffic.output, "cv2": traffic.cv2,
            "cached": traffic.cached, "ttft_s": asked.ttft_s, "tpot_s": asked.tpot_s, "attainment": asked.attainment,
        },
        "configurations": [_line_as_json(line, asked) for line in lines],
        "decisions": [{"question": each.question, "answer": each.answer, "why": each.why} for each in answer.decided],
        "others": [{"what": what, "why": why} for what, why in answer.lost],
    }  # fmt: skip


def _line_as_json(line: PlanLine, asked: Question) -> Mapping[str, Any]:
    made, verdict = line.made, line.verdict
    pools = {
        name: {
            "workers": pool.workers, "gpu": pool.kind.device.name, "tensor": pool.kind.tensor, "stages": pool.kind.stages,
            "weight_bits": pool.kind.weight_bits, "kv_bits": pool.kind.kv_bits,
        }
        for name, pool in (("prefill", made.prefill), ("decode", made.decode)) if pool is not None
    }  # fmt: skip
    simulated = verdict and {name: [each.value, each.low, each.high] for name, each in verdict.told.figures.items()}
    return {
        "pools": pools, "cost": made.cost, "cost_90": list(line.costs), "estimated_attainment": made.attainment,
        "simulated": simulated, "holds": line.holds, "lacking": list(line.lacking),
        "engine": None if line.lacking else values.engine_of(made), "uses": advice.because(made, asked),
    }  # fmt: skip


def _write(path: Path, lines: Sequence[PlanLine], asked: Question, max_model_len: int) -> None:
    """Raises RuntimeError if Baton can install none of them."""
    fit = next((line for line in lines if not line.lacking and line.holds), None)
    if fit is None:
        why = "; ".join(dict.fromkeys(what for line in lines for what in line.lacking)) or "none holds the objectives in the simulator"
        raise RuntimeError(f"values: Baton can install none of these today: {why}")
    simulated = f"simulated {_simulated(fit.verdict)}" if fit.verdict else "not simulated"
    head = (
        f"# {asked.shape.name}: {fit.made}; {_gpus(fit.made)}, {fit.made.cost:g} an hour.\n"
        f"# Planned, not measured: estimated {fit.made.attainment:.1%} within ttft {asked.ttft_s:g} s and tpot {asked.tpot_s:g} s at"
        f" {asked.traffic.rate:.3g} requests/s; {simulated}.\n"
        "# The claim must hold the checkpoint in the folder that model.path names.\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(values.values_of(fit.made, asked, max_model_len), sort_keys=False, width=110))
    err.print(f"values {path}", markup=False, soft_wrap=True)
