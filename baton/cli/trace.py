"""`baton trace`: what happened to one request, as a waterfall in the terminal, from the router's memory of the last requests."""

from datetime import datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from baton.access.access import Access
from baton.cli.admin import read_records
from baton.cli.view import BAR_WIDTH, STAGE_COLOURS, bar, size, transfer_parts
from baton.launch.state import StateError
from baton.v1 import worker_pb2, worker_pb2_grpc

_GOOD, _BAD = "green", "red"


def fetch(admin: Access, request_id: str) -> dict[str, Any]:
    """The record of a request, or of the last one if the id is empty. Raises StateError if the router does not have it, and RpcError."""
    with admin.channel() as channel:
        stub = worker_pb2_grpc.AdminStub(channel)
        records = read_records(stub.Trace(worker_pb2.TraceRequest(request_id=request_id), timeout=5))
    if not records:
        what = f"no finished request {request_id!r}" if request_id else "no finished request"
        raise StateError(f"the router remembers {what}; it keeps the last telemetry.recent_requests")
    return records[0]


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
        line = bar(row["start"] / total, row["end"] / total, STAGE_COLOURS[stage])
        detail = _detail(row, record) if row is final[stage] else row["worker"]
        table.add_row(stage, line, Text(f"{length * 1000:8.1f} ms", justify="right"), Text(detail, style="dim"))
    return Group(_head(record), table, _foot(record))


def _head(record: dict[str, Any]) -> Text:
    when = datetime.fromtimestamp(record["at"]).strftime("%Y-%m-%d %H:%M:%S")
    head = Text(f"{record['request_id'] or '(no id)'}  {when}  ", style="bold")
    head.append(f"{record['outcome']} ({record['reason']})", style=_GOOD if record["outcome"] == "ok" else _BAD)
    if record["trace_id"]:
        head.append(f"  trace {record['trace_id']}", style="dim")
    return head


def _detail(lap: dict[str, Any], record: dict[str, Any]) -> str:
    worker, handoff = lap["worker"], record["handoff"]
    match lap["stage"]:
        case "queue":
            return "router: validate, tokenize, admit, choose"
        case "prefill" if record["bypasses"] and not record["prefill_compute"]:
            return f"{worker or 'the decode worker'} itself ({record['bypasses'][-1]})"
        case "prefill":
            return f"{worker}: waited {record['prefill_wait'] * 1000:.1f}, computed {record['prefill_compute'] * 1000:.1f}"
        case "transfer" if handoff["failure"]:
            return f"{worker}: not used ({handoff['failure']}); {handoff['recomputed_tokens']} tokens recomputed"
        case "transfer" if handoff["transport"]:
            return (
                f"{worker}: {handoff['transport']}, {handoff['blocks']} blocks, {size(handoff['bytes'])},"
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
    if record["retries"]:
        parts.append(f"{record['retries']} {'retry' if record['retries'] == 1 else 'retries'}")
    if record["slo_missed"]:
        parts.append(f"missed its objectives because of: {record['slo_missed']}")
    return Text(" · ".join(parts), style="bold")
