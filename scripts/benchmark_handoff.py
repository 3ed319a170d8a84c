"""The tables of docs/benchmarks/handoff.md, for scripts/benchmark_tables.py."""

from benchmark_results import load, markdown, number


def _cells(one: dict[str, float]) -> list[str]:
    rate = one["bytes"] / one["read_ms"] / 1e6
    read = f"{number(one['read_ms'])} ± {number(one['read_spread_ms'])}"
    return [read, f"{rate:.1f}", f"{one['read_ms'] / one['copy_ms']:.1f}", f"{one['digest_ms'] / one['read_ms']:.0%}"]


def handoff() -> str:
    nixl, tcp = (load("handoff")["transports"][name] for name in ("nixl", "tcp"))
    table = [
        [f"{a['bytes'] / 2**20:.2g}" if a["bytes"] < 2**20 else f"{a['bytes'] >> 20}", *_cells(a), *_cells(b)]
        for a, b in zip(nixl, tcp, strict=True)
    ]
    after = ["GB/s", "÷ copy", "digest ÷ read"]
    return markdown(["MiB", "NIXL read, ms", *after, "TCP read, ms", *after], table)


def handoff_kv() -> str:
    nixl, tcp = (load("handoff_kv")["types"][name] for name in ("nixl", "tcp"))
    table = []
    for kv, one in nixl.items():
        shares = [one["bytes"] / nixl["bfloat16"]["bytes"], *(row[kv]["read_ms"] / row["bfloat16"]["read_ms"] for row in (nixl, tcp))]
        cells = [_cells(row[kv])[0] for row in (nixl, tcp)]
        table.append([kv, f"{one['bytes'] / 2**20:.0f}", *cells, *(f"{share:.2f}" for share in shares)])
    heads = ["KV", "MiB", "NIXL read, ms", "TCP read, ms", "bytes of bfloat16's", "time of bfloat16's, NIXL", "TCP"]
    return markdown(heads, table)
