"""`baton trace`: the last requests as a list, or what happened to one of them as a waterfall, from the routers' memory."""

from datetime import datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from baton.access.access import Access
from baton.cli.admin import read_records
from baton.cli.options import ListOptions
from baton.cli.view import (
    BAR_WIDTH,
    STAGE_COLOURS,
    bar,
    carried,
    colour,
    guesses,
    kind,
    legend,
    moment,
    seconds,
    size,
    strip,
    transfer_parts,
    uncached,
)
from baton.launch.state import StateError
from baton.terminal import Fitting
from baton.v1 import worker_pb2, worker_pb2_grpc

_GOOD, _BAD = "green", "red"
LIST_BAR_WIDTH = 24


def fetch(admin: Access, request_id: str) -> dict[str, Any]:
    """The record of a request, or of the last one if the id is empty. Raises StateError if the router does not have it, and RpcError."""
    with admin.channel() as channel:
        stub = worker_pb2_grpc.AdminStub(channel)
        records = read_records(stub.Trace(worker_pb2.TraceRequest(request_id=request_id), timeout=5))
    if not records:
        what = f"no finished request {request_id!r}" if request_id else "no finished request"
        raise StateError(f"the router remembers {what}; it keeps the last telemetry.recent_requests")
    return records[0]


def fetch_list(admin: Access, wanted: ListOptions) -> tuple[list[dict[str, Any]], int]:
    """The records of requests that have ended, in the wanted order, and how many match. Raises RpcError."""
    asked = worker_pb2.TraceRequest(
        last=wanted.limit, sort=wanted.sort, failed=wanted.failed, slower_than=wanted.slower_than, outcome=wanted.outcome,
        worker=wanted.worker, tenant=wanted.tenant,
    )  # fmt: skip
    with admin.channel() as channel:
        answer = worker_pb2_grpc.AdminStub(channel).Trace(asked, timeout=5)
    return read_records(answer), answer.matched


def draw_list(records: list[dict[str, Any]], matched: int, now: datetime) -> Group:
    """A line for each request. All bars have one scale, so that a slow request is seen."""
    has = {name: any(record[name] for record in records) for name in ("tenant", "retries")}
    numbers = ("total", "TTFT", *STAGE_COLOURS, "tokens")
    titles = (
        "request",
        "at",
        *(["tenant"] if has["tenant"] else []),
        "ended",
        "stages",
        *numbers,
        *(["retries"] if has["retries"] else []),
    )
    table = Fitting(titles, left=("request", "at", "tenant", "ended", "stages"))
    longest = max((record["e2e"] for record in records), default=0.0) or 1e-9
    for record in records:
        spent = [seconds(record["stages"].get(stage) or None) for stage in STAGE_COLOURS]
        style = _GOOD if record["outcome"] == "ok" else _BAD
        table.add_row(
            record["request_id"] or "(no id)",
            moment(record["at"], now),
            *([record["tenant"]] if has["tenant"] else []),
            Text(_ended(record), style=style),
            strip(record, longest, LIST_BAR_WIDTH),
            seconds(record["e2e"]),
            seconds(record["ttft"]),
            *spent,
            f"{record['prompt_tokens']} → {record['output_tokens']}",
            *([str(record["retries"] or "")] if has["retries"] else []),
        )
    if not records:
        return Group(Text("no request that has ended matches"))
    return Group(table, Text.assemble(legend(), f"  bars up to {seconds(longest)} · {len(records)} of {matched}"))


def _ended(record: dict[str, Any]) -> str:
    return str(record["reason"]) if record["outcome"] == "ok" else f"{record['outcome']}: {record['reason']}"


def draw(record: dict[str, Any]) -> Group:
    """One line for each lap and each failure, in the order in which they happened."""
    total = max([record["e2e"], *(lap["end"] for lap in record["laps"])]) or 1e-9
    table = Table(box=None, padding=(0, 1), show_header=False)
    rows = [(lap["start"], True, lap) for lap in record["laps"]] + [(failure["at"], False, failure) for failure in record["failures"]]
    final = {lap["stage"]: lap for lap in record["laps"]}  # the details of a stage cover all attempts, so only its last lap shows them
    for at, is_lap, row in sorted(rows, key=lambda row: row[:2]):
        if not is_lap:
            mark = Text(" " * min(BAR_WIDTH - 1, int(at / total * BAR_WIDTH)) + "✗", style=_BAD)
            table.add_row("", mark, Text(f"{at * 1000:8.1f} ms", justify="right"), Text(f"{row['worker']}: {row['reason']}", style=_BAD))
            continue
        stage, length = row["stage"], row["end"] - row["start"]
        line = bar(row["start"] / total, row["end"] / total, colour(kind(row)))
        detail = _detail(row, record) if row is final[stage] else row["worker"]
        table.add_row(stage, line, Text(f"{length * 1000:8.1f} ms", justify="right"), Text(detail, style="dim"))
    drawn = [guesses(record["guesses"], record["accepted_tokens"], record["drafted_tokens"])] if record["drafted_tokens"] else []
    why = [uncached(record["cache"])] if record["cache"] else []
    return Group(_head(record), table, *drawn, *why, _foot(record))


def _head(record: dict[str, Any]) -> Text:
    when = datetime.fromtimestamp(record["at"]).strftime("%Y-%m-%d %H:%M:%S")
    head = Text(f"{record['request_id'] or '(no id)'}  {when}  ", style="bold")
    head.append(f"{record['outcome']} ({record['reason']})", style=_GOOD if record["outcome"] == "ok" else _BAD)
    if record["tenant"]:
        head.append(f"  tenant {record['tenant']}")
    if record["trace_id"]:
        head.append(f"  trace {record['trace_id']}", style="dim")
    return head


def _detail(lap: dict[str, Any], record: dict[str, Any]) -> str:
    worker, handoff = lap["worker"], record["handoff"]
    match lap["stage"]:
        case "queue":
            return "router: validate, tokenize, admit, choose"
        case "prefill" if lap["bypass"]:
            return f"{worker or 'the decode worker'} itself ({record['bypasses'][-1]})"
        case "prefill":
            return f"{worker}: waited {record['prefill_wait'] * 1000:.1f}, computed {record['prefill_compute'] * 1000:.1f}"
        case "transfer" if handoff["failure"]:
            return f"{worker}: not used ({handoff['failure']}); {handoff['recomputed_tokens']} tokens recomputed"
        case "transfer" if handoff["transport"]:
            return (
                f"{worker}: {carried(handoff)}, {handoff['blocks']} blocks, {size(handoff['bytes'])},"
                f" {handoff['blocks_reused']} already there; {transfer_parts(record['connect'] * 1000, record['read'] * 1000)}"
                f", verified {record['verify'] * 1000:.1f}"
            )
        case "transfer":
            return f"{worker or 'no worker'}: no KV moved"
        case _:
            return f"{worker}: {record['tpot'] * 1000:.2f} ms a token" if record["tpot"] else worker


def _foot(record: dict[str, Any]) -> Text:
    parts = [f"{record['e2e'] * 1000:.1f} ms"]
    if record["ttft"] is not None:
        parts.append(f"first token after {record['ttft'] * 1000:.1f} ms")
    parts.append(f"prompt {record['prompt_tokens']} tokens ({record['cached_tokens']} cached)")
    parts.append(f"output {record['output_tokens']}")
    if record["choices"] > 1:
        parts.append(f"choice {record['choice']} of {record['choices']}, from one prompt")
    if record["retries"]:
        parts.append(f"{record['retries']} {'retry' if record['retries'] == 1 else 'retries'}")
    if record["retry_refused"]:
        parts.append("not tried again: the retry budget was spent")
    if record["put_aside"]:
        parts.append(f"put aside: {', '.join(record['put_aside'])}")
    if record["slo_missed"]:
        parts.append(f"missed its objectives because of: {record['slo_missed']}")
    return Text(" · ".join(parts), style="bold")
