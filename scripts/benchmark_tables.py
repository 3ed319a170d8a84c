"""The tables of docs/benchmarks.md and docs/benchmarks/, and those of predictions in docs/gpus.md: `python scripts/benchmark_tables.py`
writes them from benchmarks/results/*.json, `--check` only compares. The aims of docs/benchmarks.md are in scripts/benchmark_aims.py."""

import re
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmark_aims import other_aims, peers_aims
from benchmark_handoff import handoff, handoff_kv
from benchmark_observability import explaining, observability, observability_live, recorder
from benchmark_overload import overload
from benchmark_planner import flips, forecast, planner, planner_loads, planner_real
from benchmark_predictions import gpu_predicted, gpu_predictions, predicted, predictions
from benchmark_results import RESULTS, load, markdown, measured, middle, number, source, spread
from benchmark_tiers import tiers

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [DOCS / "benchmarks.md", DOCS / "gpus.md", *sorted((DOCS / "benchmarks").glob("*.md"))]
BLOCK = re.compile(
    r"(?P<begin><!-- table: (?P<name>[\w-]+), written by scripts/benchmark_tables\.py -->)\n.*?(?P<end><!-- end of table -->)", re.DOTALL
)
CELLS = ("prefill 512", "prefill 2048", "decode b1", "decode b8", "decode b32", "mixed")
ARMS = {
    ("baton", "float32"): "float32",
    ("baton", "bfloat16"): "bfloat16",
    ("baton", "int8"): "int8, the rest bfloat16",
    ("baton f32-act", "int8"): "int8, the rest float32",
    ("baton", "int4"): "int4, the rest bfloat16",
    ("baton f32-act", "int4"): "int4, the rest float32",
}


def peers(results: str) -> str:
    models = load(results)["models"]
    return "\n\n".join(_peers(results, name, f"{model['parameters'] / 1e6:.0f} M") for name, model in models.items())


def _peers(results: str, model: str, size: str) -> str:
    rows = {(row["engine"], row["precision"]): row["cells"] for row in load(results)["rows"] if row["model"] == model}
    cells = [cell for cell in CELLS if any(cell in found for found in rows.values())]

    def shown(cell: dict[str, Any]) -> str:
        repeats = f" ± {cell['spread'] / cell['tokens_per_s']:.0%}" if len(cell["values"]) > 1 else ""
        return f"{number(cell['tokens_per_s'])}{repeats} ({cell['to_best_peer']:.2f})"

    table = [[name, *(shown(rows[arm][cell]) for cell in cells)] for arm, name in ARMS.items()]
    return markdown([f"{size}: tokens/s (÷ best peer)", *(cell.replace("decode b", "batch ") for cell in cells)], table)


def silence() -> str:
    return markdown(["input", "longest gap, ms"], [[name, number(max(gaps))] for name, gaps in load("silence")["gaps_ms"].items()])


def kv_network() -> str:
    table = []
    for wire, rows in load("kv_network")["wires"].items():
        for streams, group in groupby(rows, key=lambda row: row["streams"]):
            each = list(group)
            shares = [f"{one['share']:.0%} ± {one['spread']:.0%}" for one in each]
            table.append([wire, str(streams), *shares, f"{each[0]['iperf3_gbit_s']:.2f}"])
    heads = ["64 KiB blocks, reads of 4 MiB", "of 64 MiB", "2 MiB blocks, reads of 4 MiB", "of 64 MiB"]
    return markdown(["wire", "streams", *heads, "iperf3, Gbit/s"], table)


def serving() -> str:
    keys = ("ttft_ms", "prefill_compute", "transfer", "read", "verify")
    table = [
        [
            number(row["prompt"]),
            f"{row['mib']:.1f}",
            *(number(row[key]) for key in keys),
            f"{row['verify'] / (row['ttft_ms'] + row['transfer']):.1%}",
        ]
        for row in load("serving")["handoff"]
    ]
    heads = ["prompt", "KV, MiB", "TTFT", "prefill computed", "transfer stage", "read", "verify", "verify ÷ (TTFT + transfer)"]
    return markdown(heads, table)


def live() -> str:
    rows = {(row["carrier"], row["arm"], row["prompt"]): row for row in load("live")["rows"]}
    table = []
    for prompt in sorted({prompt for _, _, prompt in rows}):
        early, share = (rows["nixl", "live", prompt][key][0] for key in ("early_share", "digest_share"))
        stages = [middle(rows[carrier, arm, prompt]["transfer_ms"]) for carrier in ("nixl", "tcp") for arm in ("whole", "live")]
        table.append([number(prompt), *stages, f"{early:.0%}", f"{share:.2%}"])
    return markdown(["prompt", "NIXL: whole", "NIXL: live", "TCP: whole", "TCP: live", "moved early", "checks ÷ request"], table)


def conversation() -> str:
    table = []
    for setting, group in groupby(load("conversation")["rows"], key=lambda row: row["fetch_tokens"]):
        turns = list(group)
        later = [" … ".join(sorted({f"{pick([row[key] for row in turns[1:]]):.0f}" for pick in (min, max)}, key=float)) for key in PARTS]
        times = " / ".join(f"{turns[turn - 1]['ttft_ms'][0]:.0f}" for turn in (2, 5, 8))
        table.append([str(setting), f"{sum(row['computed'] for row in turns):.0f}", *later, times])
    return markdown(["`router.fetch_tokens`", "computed in 8 turns", *PARTS, "TTFT of turn 2 / 5 / 8, ms"], table)


PARTS = ("cached", "fetched", "computed")


def doors() -> str:
    found = load("doors")["doors"]
    rows = {
        "router's CPU a request, ms": [spread(one["request_ms"]) for one in found.values()],
        "router's CPU a streamed token, µs": [spread(one["token_us"]) for one in found.values()],
        "so one core serves, tokens/s": [number(1e6 / median(one["token_us"])) for one in found.values()],
        "streamed in this run, tokens/s": [number(median(one["tokens_per_s"])) for one in found.values()],
        "alone, to the first token, P50, ms": [spread(one["alone_p50_ms"]) for one in found.values()],
        "alone, to the first token, P99, ms": [spread(one["alone_p99_ms"]) for one in found.values()],
    }
    return markdown(["", *found], [[name, *cells] for name, cells in rows.items()])


def big_prompts() -> str:
    found = load("big_prompts")
    loads = {f"none, and {count} processes that compute": one for count, one in found.get("burners", {}).items()}
    loads |= {f"{count} at once": one for count, one in found["clients"].items()}
    loads |= {f"{rate} a second": one for rate, one in found["rates"].items()}
    table = []
    for name, one in loads.items():
        served = (one["requests"], one["requests/s"], *one["queue ms"].values()) if "requests" in one else ()
        gaps = (one["gap ms"]["P99"], one["gap ms"]["longest"])
        table.append([name, *map(number, served), *([] if served else [""] * 4), *map(number, gaps)])
    heads = ["load", "requests", "requests/s", "router's own time, P50, ms", "P99, ms", "gaps of a stream beside, P99, ms", "longest, ms"]
    return markdown(heads, table)


def big_turns() -> str:
    cells = ("first_cpu_ms", "later_cpu_ms", "first_queue_ms", "later_queue_ms")
    table = [[mib, *(spread(one[cell]) for cell in cells)] for mib, one in load("big_prompts")["turns"].items()]
    heads = [
        "`router.known_texts_mib`",
        "router's CPU, first turn, ms",
        "later turns, ms",
        "router's own time, first turn, ms",
        "later turns, ms",
    ]
    return markdown(heads, table)


def grpc_servers() -> str:
    found = load("grpc_servers")["servers"]
    table = [[f"`{name}`", spread(one["request_ms"]), spread(one["message_us"])] for name, one in found.items()]
    return markdown(["server", "a request, ms", "a message, µs"], table)


def stalled_readers() -> str:
    found = load("stalled_readers")
    turns = {name: one for name, one in found.items() if isinstance(one, dict) and "longest_turn_ms" in one}
    table = [[name, number(one["longest_turn_ms"]), _kib(one.get("most_bytes_waiting_for_one"))] for name, one in turns.items()]
    return markdown(["readers", "longest turn, ms", "most that waited for one, KiB"], table)


def _kib(size: float | None) -> str:
    return "" if size is None else number(size / 1024)


def routers() -> str:
    found = load("routers")["routers"]
    table = []
    for count, runs in found.items():
        cells = []
        for key in ("hit_rate", "ttft_p50_ms", "ttft_p99_ms"):
            if count == "1":
                cells.append(spread([run[key] for run in runs]))
            else:
                cells.append(spread([run[key] / base[key] for run, base in zip(runs, found["1"], strict=True)], "{:.2f}"))
        table.append([count if count == "1" else f"{count}, ÷ one", *cells])
    return markdown(["routers", "prefix hit rate", "TTFT P50, ms", "TTFT P99, ms"], table)


INDEX = {
    "mib_of_a_million_keys": "a million keys, MiB",
    "events_a_second": "events a second",
    "ms_of_a_choice_256_workers_4096_keys": "a choice among 256 workers that hold 4,096 keys, ms",
}


def loop_turns() -> str:
    found = load("loop_turns")
    rows = [[one["place"], one["size"], number(one["after_ms"])] for one in found["places"]]
    turns = markdown(["place", "size", "longest turn, ms"], rows)
    if "index_former" not in found:
        return turns
    ratios = found["index_present_over_former"]
    costs = [
        [name, number(found["index_former"][key]), number(found["index"][key]), spread(ratios[key], "{:.3g}")]
        for key, name in INDEX.items()
    ]
    heads = ["prefix index", "a set of keys for each worker (before)", "one table", "one table ÷ before"]
    return f"{turns}\n\n{markdown(heads, costs)}"


def products() -> str:
    heads = (1, 2, 8, 32, 512)
    found = {(row["kind"], row["rows"]): row for row in load("products")["rows"] if row["threads"] == 2}
    table = []
    for kind in ("float32", "bfloat16", "int8", "int4"):
        for arm in ("Baton", "oneDNN"):
            cells = [_rates(found[kind, rows].get(arm), rows) for rows in heads]
            if any(cells):
                table.append([f"{kind}: {arm}", *cells])
    return markdown(["", *(f"{rows} rows" if rows > 1 else "1 row" for rows in heads)], table)


def _rates(one: dict[str, float] | None, rows: int) -> str:
    if not one:
        return ""
    return f"{one['gb_s']:.1f} GB/s" if rows < 8 else f"{one['gflop_s']:.0f} GFLOP/s"


def quality() -> str:
    table = [[row["arm"], f"{row['perplexity']:.3f}", f"{row['kl']:.5f}", f"{row['same_choice']:.1%}"] for row in load("quality")["rows"]]
    return markdown(["weights", "perplexity", "KL from float32", "same greedy choice as float32"], table)


def kv_types() -> str:
    """A decode step by what KV is stored as, beside bfloat16."""
    rows = load("kv_types")["rows"]
    table = [[str(row["batch"]), row["kv"], number(median(row["ms"])), spread(row["ratio"]), number(row["token_bytes"])] for row in rows]
    return markdown(["batch", "KV", "processor time of a step, ms", "of bfloat16", "bytes a token"], table)


def continuation() -> str:
    """The disturbed streams of each kind, over all number types, greedy and seeded."""
    rows = load("continuation")["rows"]
    table = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        sums = {key: sum(row[key] for row in mine) for key in ("streams_differ", "streams", "logits_differ", "logits")}
        table.append([kind.replace("_", " "), *(number(each) for each in sums.values())])
    return markdown(["disturbed how", "other tokens", "of streams", "other logits", "of vectors"], table)


def step_profile() -> str:
    found = load("step_profile")
    table = []
    for arm in found["ms"]["batch 1"]:
        cells = []
        for batch in ("batch 1", "batch 8"):
            parts = found["ms"][batch][arm]
            cells += [spread(found["wholes_ms"][batch][arm], "{:.2f}"), f"{parts['sampling'] + parts['rest']:.2f}"]
        table.append([arm, *cells])
    python = "outside the kernels"
    return markdown(["ms a step", "1 sequence", python, "8 sequences", python], table)


def prefill_profile(results: str) -> str:
    rows = load(results)["rows"]
    found = {(row["arm"], row["case"]): row for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    table = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = []
        for case in cases:
            row = found[arm, case]
            cells.append(number(median(row["wholes_ms"])))
            if case != cases[-1]:
                cells += [f"{number(row['ms'][part])} ({number(row['gflop_s'][part])})" for part in ("matrices", "attention")]
        table.append([arm, *cells])
    heads = [head for case in cases for head in ([case] if case == cases[-1] else [case, "matrices", "attention"])]
    return markdown(["ms a step (GFLOP/s)", *heads], table)


def families() -> str:
    found = load("families")
    rows = found["rows"]
    table = []
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = {row["precision"]: row for row in rows if row["family"] == family}
        rates = [found["tokens"] / min(row["seconds"]["compiled"]) for row in mine.values()]
        cells = [f"{number(rate)} ({row['compiled_over_plain']:.2f})" for rate, row in zip(rates, mine.values(), strict=True)]
        table.append([family, *cells])
    return markdown(["tokens/s (time ÷ plain torch's)", *dict.fromkeys(row["precision"] for row in rows)], table)


def batching() -> str:
    rows = load("batching")["rows"]
    table = [[row["batching"], spread(row["tokens_s"]), f"{row['continuous_over_this']:.2f}"] for row in rows]
    return markdown(["batching", "tokens/s", "continuous ÷ this"], table)


def whole() -> str:
    found = load("whole")
    table = [[arm, spread(shares, "{:.0%}")] for arm, shares in found["shares"].items()]
    return markdown(["cluster", f"share of the bare engine's {median(found['bare_tokens_s']):.0f} tokens/s"], table)


def scale() -> str:
    run = load("scale")
    heads = ["processor, s", "requests", "tokens", "µs a request", "µs a token", "peak of memory at each quarter, MiB"]
    figures = [number(run[key]) for key in ("processor_s", "requests", "tokens", "us_a_request", "us_a_token")]
    return markdown(heads, [[*figures, ", ".join(map(number, run["peak_mib"]))]])


# table → the file of benchmarks/results that it is made of, and what makes it
def speculation() -> str:
    """Each method beside none: by the clock, and in brackets by processor time."""
    rows = [row for row in load("speculation")["rows"] if row["tokens_s"] and "peer" not in row]
    batches = sorted({row["batch"] for row in rows})
    table = []
    for (model, text, heat, method), each in groupby(rows_by(rows), key=cell_of):
        found = {row["batch"]: row for row in each}
        shown = [_speed(found.get(batch), method) for batch in batches]
        table.append([model, text, number(heat), method, *shown])
    return markdown(["model", "text", "T", "method", *(f"batch {batch}" for batch in batches)], table)


def rows_by(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (*cell_of(row)[:3], row["method"] != "none", row["method"]))


def cell_of(row: dict[str, Any]) -> tuple[str, str, float, str]:
    return row["model"], row["text"], row["temperature"], row["method"]


def _speed(row: dict[str, Any] | None, method: str) -> str:
    if row is None:
        return ""
    if method == "none":
        return f"{number(median(row['tokens_s']))} tokens/s, {number(median(row['itl_ms']))} ms"
    sign = "" if _guessed(row) else " °"
    return f"{median(row['to_none']):.2f}x ({median(row['to_none_cpu']):.2f}x), {number(median(row['itl_ms']))} ms{sign}"


def _guessed(row: dict[str, Any]) -> bool:
    """Whether guesses made a difference: what a peer does is not known."""
    return "peer" in row or mean(row["step_tokens"]) >= 1.02


def acceptance() -> str:
    """How many of the guesses at each place became output; over all batches."""
    places, table = range(1, 9), []
    rows = [row for row in load("speculation")["rows"] if "peer" not in row]
    for (model, text, heat, method), each in groupby(rows_by(rows), key=cell_of):
        counted = {place: [0, 0] for place in places}
        for place, drafted, accepted in (one for row in each for found in row["acceptance"].values() for one in found):
            if place in counted:
                counted[place][0] += drafted
                counted[place][1] += accepted
        if counted[1][0]:
            shares = [f"{right / drafted:.0%}" if drafted else "" for drafted, right in counted.values()]
            table.append([model, text, number(heat), method, number(counted[1][0]), *shares])
    return markdown(["model", "text", "T", "method", "steps", *map(str, places)], table)


def speculation_peers() -> str:
    """What guesses bring each engine, beside itself without, at temperature 0."""
    found, table = [row for row in load("speculation")["rows"] if row["tokens_s"] and row["temperature"] == 0], []
    for key in sorted({(row["model"], row["text"], row["batch"]) for row in found if "peer" in row}):
        rows = [row for row in found if (row["model"], row["text"], row["batch"]) == key]
        for engine in sorted({row.get("peer", "baton") for row in rows}, key=lambda name: (name != "baton", name)):
            own = [row for row in rows if row.get("peer", "baton") == engine]
            plain = [row for row in own if row["method"] in ("none", engine)]
            best = max((row for row in own if row not in plain and _guessed(row)), key=lambda row: median(row["to_none"]), default=None)
            shown = ["none guesses", "", ""]
            if best is not None:
                shown = [best["method"].removeprefix(f"{engine} "), number(median(best["tokens_s"])), f"{median(best['to_none']):.2f}x"]
            table.append([*map(str, key), engine, *(number(median(row["tokens_s"])) for row in plain), *shown])
    if not table:
        return "No peer was installed when this was measured."
    return markdown(["model", "text", "batch", "engine", "tokens/s without guesses", "best method", "tokens/s with it", "factor"], table)


def stores() -> str:
    """MB/s written / read, medians; seconds of the processor for a GB at 1 MiB."""
    table = []
    for store, sizes in load("stores")["stores"].items():
        found = {size: {name: number(median(values)) for name, values in each.items()} for size, each in sizes.items()}
        speeds = [f"{each['write_mb_s']} / {each['read_mb_s']}" for each in found.values()]
        table.append([store, *speeds, f"{found['1 MiB']['write_cpu_s_gb']} / {found['1 MiB']['read_cpu_s_gb']}"])
    return markdown(["MB/s written / read", *load("stores")["stores"]["memory"], "processor, s for a GB, 1 MiB"], table)


def reopened() -> str:
    runs = load("stores")["reopened"]
    return markdown(["", "seconds", "of the processor"], [["usable", *(spread([run[key] for run in runs]) for key in runs[0])]])


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "peers-zen4": ("peers-cpu-zen4", lambda: peers("peers-cpu-zen4")),
    "peers-amx": ("peers-cpu-amx", lambda: peers("peers-cpu-amx")),
    "overload": ("overload", lambda: overload("overload", "toy")),
    "overload-tale": ("overload-tale", lambda: overload("overload-tale", "tale")),
    "observability-live": ("observability", observability_live),
    "explaining": ("explaining", explaining),
    "big_turns": ("big_prompts", big_turns),
    "planner-shift": ("planner", lambda: planner("shift")),
    "planner-swing": ("planner", lambda: planner("swing")),
    "planner-day": ("planner", lambda: planner("day")),
    "planner-real": ("planner_real", planner_real),
    "planner-loads": ("planner_loads", planner_loads),
    "prefill_profile": ("prefill_profile", lambda: prefill_profile("prefill_profile")),
    "prefill_profile-amx": ("prefill_profile-amx", lambda: prefill_profile("prefill_profile-amx")),
}
TABLES |= {
    make.__name__: (make.__name__, make)
    for make in (
        silence,
        kv_types,
        handoff,
        handoff_kv,
        kv_network,
        serving,
        live,
        conversation,
        tiers,
        doors,
        big_prompts,
        grpc_servers,
        stalled_readers,
        routers,
        loop_turns,
    )
}
TABLES |= {
    make.__name__: (make.__name__, make)
    for make in (
        observability,
        recorder,
        flips,
        forecast,
        products,
        quality,
        continuation,
        step_profile,
        families,
        batching,
        whole,
        scale,
    )
}
TABLES |= {make.__name__: ("speculation", make) for make in (speculation, acceptance, speculation_peers)}
TABLES |= {make.__name__: ("stores", make) for make in (stores, reopened)}
TABLES |= {make.__name__: ("simulate", make) for make in (predictions, predicted)}
GPU = "gpu_predict-h200"
TABLES |= {"gpu-predictions": (GPU, lambda: gpu_predictions(GPU)), "gpu-predicted": (GPU, lambda: gpu_predicted(GPU))}
AWAITED = {GPU}  # results that a machine which is not always there will bring
# Those of docs/benchmarks.md, which are made of many files.
AIMS: dict[str, Callable[[], str]] = {"peers-aims": peers_aims, "aims": other_aims}


def block(name: str, root: str = "../..") -> str:
    """The table and, below it, what it is made of. `root`: of the repository, from the page. Raises KeyError for a name that is not in
    TABLES or AIMS."""
    if name in AIMS:
        return AIMS[name]()
    results, make = TABLES[name]
    if results in AWAITED and not measured(results):
        return "Not measured yet."
    return f"{make()}\n\n{source(results, root)}"


def page(text: str, root: str = "../..") -> str:
    """The page with current tables."""
    return BLOCK.sub(lambda match: f"{match['begin']}\n\n{block(match['name'], root)}\n\n{match['end']}", text)


def misplaced(texts: Iterable[str]) -> list[str]:
    """The tables that are not on exactly one page."""
    found = [match["name"] for text in texts for match in BLOCK.finditer(text)]
    return [name for name in (*TABLES, *AIMS) if found.count(name) != 1]


def main() -> None:
    if wrong := misplaced(path.read_text() for path in PAGES):
        sys.exit(f"not on exactly one page: {', '.join(wrong)}")
    stale = {path: new for path in PAGES if (new := page(text := path.read_text(), ".." if path.parent == DOCS else "../..")) != text}
    if "--check" in sys.argv[1:]:
        if stale:
            names = ", ".join(path.name for path in stale)
            sys.exit(f"{names}: out of date with {RESULTS.name}/*.json; run `python scripts/benchmark_tables.py`")
        return
    for path, text in stale.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
