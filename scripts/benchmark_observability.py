"""The tables of docs/benchmarks/observability.md, for scripts/benchmark_tables.py."""

from collections.abc import Sequence

from benchmark_results import load, markdown, middle, number


def observability() -> str:
    found = load("observability")["alone"]

    def more(values: Sequence[float]) -> str:
        return f"{values[1]:+.0%} ({values[0]:+.0%} … {values[2]:+.0%})"

    table = [[arm, more(one["more_request_us"]), more(one["more_token_us"])] for arm, one in found.items() if arm != "off"]
    return markdown(["", "a request of one token", "a further token"], table)


def recorder() -> str:
    found, named = load("recorder"), {"tale": "a batch of 8 on `tale`", "idle engine": "a batch of 8, steps that compute nothing"}
    table = []
    for arm in ("tale", "idle engine", "router"):
        us = {name: number(1e6 * value) for name, value in found[arm].items()}
        more = f"{us['more_s']} ({us['low_s']} … {us['high_s']})"
        table.append([named.get(arm, "the router's path of a request"), us["off_s"], us["on_s"], more, us["whole_s"]])
    return markdown(["", "without, µs", "with, µs", "more, of a pair", "more, of all"], table)


def explaining() -> str:
    found, table = load("explaining"), []
    for kind, alone in found["alone"].items():
        low, more, high = alone["more_us"]
        live = found["live"][kind]
        shares = [f"{number(live[name][0])} ms, {more / 1e3 / live[name][0]:.2%}" for name in ("router_ms", "request_ms")]
        told = f"{number(more)} ({number(low)} … {number(high)})"
        table.append([kind, f"{live['prompt'][0]:,.0f}", number(alone["without_us"]), told, *shares])
    heads = [
        "prompt",
        "tokens",
        "the router's path, µs",
        "more to explain it, µs",
        "the router's processor, and of that",
        "a request, and of that",
    ]
    return markdown(heads, table)


def observability_live() -> str:
    table = []
    for arm, one in load("observability")["clusters"]["arms"].items():
        cells = [middle([one[key], *one[f"{key}_range"]]) for key in ("request_ms", "token_us")]
        table.append([{"off": "nothing"}.get(arm, arm), *cells])
    return markdown(["", "CPU a request, ms", "CPU a streamed token, µs"], table)
