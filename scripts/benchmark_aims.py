"""The aims of docs/benchmarks.md beside what was measured, from benchmarks/results/*.json. The verdicts are computed here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmark_results import load, markdown, measured

# The column of docs/benchmarks.md → the file of benchmarks/results.
PROCESSORS = {"AMD EPYC, family 25 (Zen 4)": "peers-cpu-zen4", "Intel Xeon with AMX": "peers-cpu-amx"}


@dataclass(frozen=True, slots=True)
class Aim:
    """`values` are figures that should all be at least `limit` (at most, if `most`); `page` is of docs/benchmarks/."""

    page: str
    what: str
    limit: float
    values: Sequence[float]
    form: str = "{:.2f}"
    most: bool = False

    @property
    def text(self) -> str:
        return f"{'≤' if self.most else '≥'} {self.form.format(self.limit)}"

    @property
    def measured(self) -> str:
        ends = dict.fromkeys(self.form.format(each) for each in (min(self.values), max(self.values)))
        return " … ".join(ends)

    @property
    def verdict(self) -> str:
        met = sum((each <= self.limit) if self.most else (each >= self.limit) for each in self.values)
        if met == len(self.values):
            return "reached"
        return f"**missed** by {len(self.values) - met} of {len(self.values)}" if met else "**missed**"


def peers_aims() -> str:
    """An aim a line, a processor a column."""
    columns = [list(_of_peers(results)) for results in PROCESSORS.values()]
    rows = [[aims[0].what, aims[0].text, *(f"{each.measured}: {each.verdict}" for each in aims)] for aims in zip(*columns, strict=True)]
    return markdown(["figure", "aim", *PROCESSORS], rows)


def _of_peers(results: str) -> Iterator[Aim]:
    rows = [row for row in load(results)["rows"] if row["engine"].startswith("baton")]

    def ratios(*names: str) -> list[float]:
        return [cell["to_best_peer"] for name, cell in _cells(rows) if name in names]

    def shares(*names: str) -> list[float]:
        return [cell["share_of_ceiling"] for name, cell in _cells(rows) if name in names]

    prefills = ("prefill 512", "prefill 2048")
    yield Aim("peers", "decode, batch 1 ÷ best peer", 1.0, ratios("decode b1"))
    yield Aim("peers", "batch 8 and 32 ÷ best peer", 1.1, ratios("decode b8", "decode b32"))
    yield Aim("peers", "mixed ÷ best peer", 1.15, ratios("mixed"))
    yield Aim("peers", "prefill ÷ best peer", 1.0, ratios(*prefills))
    yield Aim("peers", "any cell ÷ best peer", 0.95, ratios("decode b1", "decode b8", "decode b32", "mixed", *prefills), "{:.3f}")
    yield Aim("peers", "batch 1, share of what two threads read", 0.8, shares("decode b1"), "{:.0%}")
    yield Aim("peers", "prefill, share of the rate of products", 0.95, shares(*prefills), "{:.0%}")
    starts = [row["start_s"]["median"] for row in rows if row["model"] == "small"]
    yield Aim("peers", "start to first token, 29 M", 2.0, starts, "{:.1f} s", most=True)
    peaks = [row["peak_rss_mib"] / (1.3 * row["weights_and_kv_mib"] + 350) for row in rows]
    yield Aim("peers", "peak memory ÷ (1.3 (weights + KV) + 350 MiB)", 1.0, peaks, "{:.0%}", most=True)


def _cells(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for row in rows:
        yield from row["cells"].items()


def other_aims() -> str:
    aims = [*_overload_aims(), *_plan_aims(), *_transfer_aims(), *_router_aims(), *_engine_aims()]
    rows = [[f"[{aim.page}](benchmarks/{aim.page}.md)", aim.what, aim.text, aim.measured, aim.verdict] for aim in aims]
    return markdown(["experiment", "figure", "aim", "measured", ""], rows)


def _overload_aims() -> Iterator[Aim]:
    for results, model in (("overload", "toy"), ("overload-tale", "tale")):
        found = load(results)[model]
        for arm, how in (("codel", ""), ("degrade", ", with `router.degrade`")):
            if arm not in found["arms"]:
                continue
            runs = [found["arms"][arm][times] for times in ("2", "5", "10")]
            good = [median(run["goodput"] for run in each) / found["peak"] for each in runs]
            yield Aim("overload", f"goodput at 2x, 5x and 10x ÷ peak, `{model}`{how}", 0.9, good, "{:.0%}")
            refusals = [median(run["refusal_p99_ms"] for run in each) for each in runs]
            yield Aim("overload", f"refusals at P99, `{model}`{how}", 50, refusals, "{:.0f} ms", most=True)
    gaps = [max(each) for each in load("silence")["gaps_ms"].values()]
    yield Aim("silence", "longest silence that one input causes", 20, gaps, "{:.1f} ms", most=True)


def _plan_aims() -> Iterator[Aim]:
    """The aims of the simulator and the planner."""
    found = load("simulate")
    judged = found["judged"]
    errors = judged["errors"]["all but TTFT P99"]
    yield Aim("simulate", "relative error of all but TTFT P99, median", 0.05, [errors["median"]], "{:.1%}", most=True)
    yield Aim("simulate", "relative error of all but TTFT P99, P90", 0.1, [errors["p90"]], "{:.1%}", most=True)
    tails = [case["figures"]["TTFT P99 (ms)"] for case in found["cases"] if not case["void"]]
    off = [abs(tail["predicted"] / tail["measured"] - 1) for tail in tails]
    yield Aim("simulate", "relative error of TTFT P99, each case", 0.15, off, "{:.0%}", most=True)
    yield Aim("simulate", "what 90 % intervals cover, off from 90 % by", 0.05, [abs(judged["covered"] - 0.9)], "{:.0%}", most=True)
    run = load("scale")
    yield Aim("scale", "an hour on 1,000 workers, by the clock", 600, [run["wall_s"]], "{:.0f} s", most=True)
    yield Aim("scale", "the same, of the processor", 600, [run["processor_s"]], "{:.0f} s", most=True)
    memory = run["peak_mib"][-1] / run["peak_mib"][1]
    yield Aim("scale", "peak of memory, whole hour ÷ first half", 1.01, [memory], most=True)
    days = load("planner")["workloads"].values()
    rows = [({row["arm"]: row for row in one["rows"]}, one["static"][0]) for one in days]
    yield Aim(
        "planner", "met per worker-hour ÷ best static split", 1.25, [row["planner"]["rate"] / row[best]["rate"] for row, best in rows]
    )
    yield Aim("planner", "met per worker-hour ÷ oracle", 0.9, [row["planner"]["rate"] / row["oracle"]["rate"] for row, _ in rows])
    flips = load("flips")
    yield Aim("planner", "a flip, to the first token in the new role", 2.0, flips["first_token_s"], "{:.2f} s", most=True)
    yield Aim("planner", "requests lost or wrong while workers flip", 0, [flips["lost"], flips["wrong"]], "{:.0f}", most=True)
    yield Aim("planner", "requests lost in the simulator", 0, [row["planner"]["failed"] for row, _ in rows], "{:.0f}", most=True)
    if measured("planner_real"):
        yield from planner_real_aims(load("planner_real"))


def planner_real_aims(found: Mapping[str, Any]) -> Iterator[Aim]:
    """The aims of the planner on a real cluster."""
    arms = {row["arm"]: row for row in found["rows"]}
    ratio = arms["planner"]["rate"] / arms[found["static"][0]]["rate"]
    yield Aim("planner", "met per worker-hour ÷ best static split, real cluster", 1.25, [ratio])
    lost = [row[key] for row in arms.values() for key in ("lost", "wrong")]
    yield Aim("planner", "requests lost or wrong on the real cluster", 0, lost, "{:.0f}", most=True)


def _transfer_aims() -> Iterator[Aim]:
    for name, reads in load("handoff")["transports"].items():
        shares = [one["digest_ms"] / one["read_ms"] for one in reads]
        yield Aim("handoff", f"digests ÷ read alone, {name.upper()}", 0.03, shares, "{:.0%}", most=True)
    for wire, rows in load("kv_network")["wires"].items():
        yield Aim("kv_network", f"KV over TCP ÷ iperf3, {wire}", 0.9, [row["share"] for row in rows], "{:.0%}")
    checks = [row["verify"] / (row["ttft_ms"] + row["transfer"]) for row in load("serving")["handoff"]]
    yield Aim("serving", "digests and lease check ÷ (TTFT + transfer)", 0.01, checks, "{:.1%}", most=True)
    live = [row for row in load("live")["rows"] if row["arm"] == "live"]
    for carrier in ("nixl", "tcp"):
        left = [row["transfer_ms"][0] for row in live if row["carrier"] == carrier and row["prompt"] == 2000]
        yield Aim("live", f"left after the first token, 2,000 tokens, {carrier.upper()}", 5, left, "{:.1f} ms", most=True)
    yield Aim("live", "digests and lease check ÷ request", 0.03, [row["digest_share"][0] for row in live], "{:.2%}", most=True)


def _router_aims() -> Iterator[Aim]:
    doors = load("doors")["doors"]
    for name, one in doors.items():
        yield Aim("doors", f"a streamed token, {name}", 20, [median(one["token_us"])], "{:.0f} µs", most=True)
    yield Aim("doors", "a request", 0.4, [median(one["request_ms"]) for one in doors.values()], "{:.1f} ms", most=True)
    turns = [one["longest_turn_ms"] for one in load("stalled_readers").values() if "longest_turn_ms" in one]
    yield Aim("stalled_readers", "longest turn of the router's loop", 20, turns, "{:.1f} ms", most=True)
    found = load("loop_turns")
    turns = [one["after_ms"] for one in found["places"]]
    yield Aim("loop_turns", "longest turn of the router's loop", found["bound_ms"], turns, "{:.1f} ms", most=True)
    index = found["index"]
    yield Aim("loop_turns", "prefix index, a million keys", 200, [index["mib_of_a_million_keys"]], "{:.0f} MiB", most=True)
    yield Aim("loop_turns", "prefix index, events a second", 1e5, [index["events_a_second"]], "{:,.0f}")
    choice = [index["ms_of_a_choice_256_workers_4096_keys"]]
    yield Aim("loop_turns", "a choice among 256 workers, 4,096 keys", 0.5, choice, "{:.2f} ms", most=True)
    for key, what, worse in (("hit_rate", "prefix hit rate", 0.95), ("ttft_p50_ms", "TTFT P50", 1.05), ("ttft_p99_ms", "TTFT P99", 1.05)):
        runs = load("routers")["routers"]
        ratios = [median(a[key] / b[key] for a, b in zip(runs[count], runs["1"], strict=True)) for count in ("2", "3")]
        yield Aim("routers", f"two and three routers ÷ one: {what}", worse, ratios, most=worse > 1)
    big = load("big_prompts")["clients"]
    burst = [big["200"]["queue ms"]["P99"] / big["20"]["queue ms"]["P99"]]
    yield Aim("big_prompts", "router's own time at P99, 200 prompts at once ÷ 20", 3.0, burst, "{:.1f}", most=True)
    beside = [each["gap ms"]["longest"] for each in big.values()]
    yield Aim("big_prompts", "longest gap of a stream beside", 20, beside, "{:.0f} ms", most=True)
    found = load("observability")
    alone, live = found["alone"], found["clusters"]["arms"]["off"]
    more = {key: alone["metrics"][key] - alone["off"][key] for key in ("request_us", "token_us")}
    shares = [more["request_us"] / 1000 / live["request_ms"], more["token_us"] / live["token_us"]]
    yield Aim("observability", "metrics ÷ a request, and a token, of a router", 0.05, shares, "{:.1%}", most=True)
    found = load("explaining")
    for what, name in (("a request on `tale`", "request_ms"), ("the router's processor time for it", "router_ms")):
        shares = [one["more_us"][1] / 1e3 / found["live"][kind][name][0] for kind, one in found["alone"].items()]
        yield Aim("observability", f"why a prompt was not cached ÷ {what}", 0.01, shares, "{:.2%}", most=True)


def _engine_aims() -> Iterator[Aim]:
    single = [row for row in load("products")["rows"] if row["threads"] == 2 and row["rows"] == 1]
    for row in single:
        share = row["Baton"]["gb_s"] / row["roof_gb_s"]
        yield Aim("products", f"one row, share of what two threads read, {row['kind']}", 0.8, [share], "{:.1%}")
    compiled = [row["compiled_over_plain"] for row in load("families")["rows"]]
    yield Aim("families", "prefill, compiled ÷ plain torch", load("families")["bound"], compiled, most=True)
    ours = {arm: parts for arm, parts in load("step_profile")["ms"]["batch 1"].items() if arm.startswith("compiled") and parts["recorded"]}
    outside = [parts["sampling"] + parts["rest"] for parts in ours.values()]
    yield Aim("step_profile", "a step of one sequence outside its kernels", 0.25, outside, "{:.2f} ms", most=True)
    batching = [row["continuous_over_this"] for row in load("batching")["rows"] if row["batching"] != "continuous"]
    yield Aim("batching", "continuous ÷ dynamic and static batching", 2.0, batching)
    shares = [median(each) for each in load("whole")["shares"].values()]
    yield Aim("whole", "whole cluster ÷ bare engine", 0.9, shares, "{:.0%}")
    disturbed = [row for row in load("continuation")["rows"] if row["kind"] not in ("untold", "output_reused")]
    differ = [sum(row[key] for row in disturbed) for key in ("streams_differ", "logits_differ")]
    yield Aim("continuation", "disturbed streams and logits that differ", 0, differ, "{:.0f}", most=True)
