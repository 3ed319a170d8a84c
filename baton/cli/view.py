"""What a terminal shows: the stages of a request, the state of a cluster. Returns rich renderables; prints nothing."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from baton.client import Result, Token
from baton.terminal import Fitting

STAGE_COLOURS = {"queue": "grey62", "prefill": "deep_sky_blue1", "transfer": "orange1", "decode": "green3"}
BYPASS_COLOUR = "medium_purple1"
MARKS = {"queue": "░", "prefill": "▓", "bypass": "▚", "transfer": "▒", "decode": "█"}  # told apart without colours, too
BAR_WIDTH = 48
GUESSES_WIDTH = 96
RIGHT, WRONG = "█", "░"
CONNECTED_MS = 0.1  # below that, the connection was there


def trace(result: Result) -> Group:
    """The four stages of one request on one timeline, each with what it did."""
    stages = result.stages_ms
    total = sum(stages[name] for name in STAGE_COLOURS) or 1.0
    table = Table(box=None, padding=(0, 1), show_header=False)
    start = 0.0
    for name, colour in STAGE_COLOURS.items():
        length = stages[name]
        line = bar(start / total, (start + length) / total, colour)
        table.add_row(name, line, Text(f"{length:8.1f} ms", justify="right"), Text(_detail(name, result), style="dim"))
        start += length
    usage = result.usage
    footer = Text(
        f"{total:.1f} ms · prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached) · output {usage.completion_tokens}"
        f" · {result.finish_reason}"
        + (f" · {usage.accepted_tokens} of {usage.drafted_tokens} guesses right" if usage.drafted_tokens else "")
        + (f" · {result.workers['retries']} retries" if result.workers["retries"] else ""),
        style="bold",
    )
    return Group(table, footer)


def strip(record: dict[str, Any], longest: float, width: int) -> Text:
    """The laps of a request on one line. `longest`: the time that the whole `width` stands for."""
    line = Text()
    for lap in record["laps"]:
        start, end = (round(min(1.0, lap[edge] / longest) * width) for edge in ("start", "end"))
        line.append(MARKS[kind(lap)] * (end - start), style=colour(kind(lap)))
    if not line:
        line.append(MARKS[kind(record["laps"][-1])], style=colour(kind(record["laps"][-1])))
    return line


def kind(lap: dict[str, Any]) -> str:
    """The stage of a lap, or `bypass`."""
    return "bypass" if lap["bypass"] else str(lap["stage"])


def colour(kind: str) -> str:
    return STAGE_COLOURS.get(kind, BYPASS_COLOUR)


def legend() -> Text:
    return Text("  ").join(Text.assemble((mark, colour(kind)), f" {kind}") for kind, mark in MARKS.items())


def uncached(report: dict[str, Any]) -> Text:
    """Why tokens of a prompt were computed. `report`: a `CacheReport`."""
    causes = ", ".join(f"{one['tokens']} {one['cause']}" for one in report["uncached"])
    line = f"computed: {causes or 'nothing'} · promised {report['promised_tokens']}, reachable {report['reachable_tokens']}"
    line += f" at {report['holder']}" if report["holder"] else ""
    line += f" · changed at token {report['changed_at']}" if report["changed_at"] is not None else ""
    return Text(line + (f", in message {report['changed_message']}" if report["changed_message"] is not None else ""), style="dim")


def guesses(steps: list[int], accepted: int, drafted: int) -> Text:
    """Steps of several tokens: accepted guesses and those that were not right, and all in numbers. `steps`: two numbers for each step."""
    line, room = Text(), GUESSES_WIDTH
    for right, wrong in zip(steps[::2], steps[1::2], strict=False):
        if (room := room - right - wrong - 1) < 0:
            line.append("… ")
            break
        line.append(RIGHT * right, style="green")
        line.append(f"{WRONG * wrong} ", style="red")
    return line.append(f"{accepted} of {drafted} guesses right")


def guessed(token: Token) -> str:
    """The style of a token's text: as a guess that was right, in the place of one that was not, or as any other."""
    return "green" if token.guessed else "red underline" if token.rejected else ""


def seconds(value: float | None) -> str:
    """A time in a readable unit; empty for None."""
    if value is None:
        return ""
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def moment(at: float, now: datetime) -> str:
    """The local time of day, with the date if that is not today's. `at`: seconds since the epoch."""
    when = datetime.fromtimestamp(at)
    return when.strftime("%H:%M:%S" if when.date() == now.date() else "%Y-%m-%d %H:%M:%S")


def bar(start: float, end: float, colour: str) -> Text:
    """A bar from `start` to `end`, both as shares of the line. Anything that took time is visible."""
    left = round(start * BAR_WIDTH)
    width = max(1, round(end * BAR_WIDTH) - left) if end > start else 0
    line = Text(" " * min(left, BAR_WIDTH - 1)) + Text("█" * width, style=colour)
    line.pad_right(max(0, BAR_WIDTH - len(line.plain)))
    return line


def _detail(stage: str, result: Result) -> str:
    stages, workers, handoff = result.stages_ms, result.workers, result.handoff
    match stage:
        case "queue":
            return "router: validate, tokenize, admit, choose"
        case "prefill":
            if not workers["prefill"]:
                return f"{workers['decode']} itself (bypass)"
            return f"{workers['prefill']}: waited {stages['prefill_wait']:.1f}, computed {stages['prefill_compute']:.1f}"
        case "transfer":
            if handoff["failure"]:
                return f"not used ({handoff['failure']}); {handoff['recomputed_tokens']} tokens recomputed"
            if not handoff["transport"]:
                return "no KV moved"
            return (
                f"{carried(handoff)}: {handoff['blocks']} blocks, {size(handoff['bytes'])}, {handoff['blocks_reused']} already there;"
                f" {transfer_parts(stages['connect'], stages['read'])}"
                f", verified {handoff['digests_checked']} digests + lease {stages['verify']:.1f}"
            )
        case _:
            made = max(1, result.usage.completion_tokens - 1)
            return f"{workers['decode'] or 'no worker'}: {stages['decode'] / made:.2f} ms a token"


def carried(handoff: Mapping[str, Any]) -> str:
    """What carried the KV of a handoff. An older router tells no lane."""
    return f"{handoff['transport']} ({handoff['lane']})" if handoff.get("lane") else str(handoff["transport"])


def transfer_parts(connect_ms: float, read_ms: float) -> str:
    """Only the first handoff between two processes connects them, and it then costs more than the rest."""
    connected = f"connected {connect_ms:.1f}, " if connect_ms >= CONNECTED_MS else ""
    return f"{connected}read {read_ms:.1f}"


def status(cluster: dict[str, Any]) -> Group:
    """The cluster as reported by `baton.v1.Admin/Status`."""
    router = cluster["router"]
    head = Text(f"model {cluster['model']} · router pid {router['pid']}, {router['inflight']} in flight, {router['queued']} queued")
    head.append(f" · registry {router['registry']}", style="green" if router["registry"] == "reachable" else "red")
    methods = {worker["speculation"][0] for worker in cluster["workers"] if worker["speculation"] and "decode" in _serves(worker)}
    if methods:
        head.append(f" · guesses: {', '.join(sorted(methods))}")
    matrices = sorted({told for worker in cluster["workers"] if (told := worker.get("matrices"))})
    if matrices:
        head.append(f" · matrices: {'; '.join(matrices)}")
    table = Fitting(
        ("worker", "serves", "state", "address", "pid", "running", "waiting", "free blocks", "cached", "leases", "transport"),
        left=("worker", "serves", "state", "address", "transport"),
    )
    for worker in cluster["workers"]:
        load = worker["load"]
        style = {"ready": "green", "draining": "yellow", "unproven": "yellow"}.get(worker["state"], "red")
        table.add_row(
            worker["name"], "+".join(_serves(worker)), Text(worker["state"], style=style), worker["address"],
            str(worker["pid"]), str(load["running"]), str(load["waiting"]), f"{load['free_blocks']}/{worker['kv_blocks']}",
            str(load["cached_blocks"]), str(load["leases"]), worker["transport"],
        )  # fmt: skip
    endpoints = Text("  ".join(f"{name} {address}" for name, address in cluster["endpoints"].items()), style="dim")
    routers = _routers(cluster["routers"]) if len(cluster["routers"]) > 1 else endpoints
    reasons = [Text(f"{worker['name']}: {worker['error']}", style="red") for worker in cluster["workers"] if worker.get("error")]
    tiers = [_tier(worker["name"], tier) for worker in cluster["workers"] for tier in worker["tiers"]]
    alarm = [Text(router["alarm"], style="red")] if router["alarm"] else []
    planner = [_planner(told, datetime.now())] if (told := cluster.get("planner")) else []
    return Group(head, *alarm, *planner, routers, table, *tiers, *reasons, *(_start(start) for start in cluster["starts"]))


def _planner(planner: dict[str, Any], now: datetime) -> Text:
    """Who plans, and what was decided last, and why."""
    who = f"planner {planner['leader']} leads" if planner["leader"] else "a planner explains (dry run)"
    if not planner["at"]:
        return Text(f"{who} · no decision yet")
    would = "would do " if planner["dry_run"] and planner["action"] else ""
    return Text(f"{who} · {moment(planner['at'], now)} {would}{planner['action'] or 'no change'}: {planner['why']}")


def _tier(worker: str, tier: dict[str, Any]) -> Text:
    """What of its KV that left the pool a worker still has, and whether that pays."""
    told = f"{worker} {tier['medium']}: {tier['blocks']}/{tier['capacity']} blocks, {tier['hits']} of {tier['reads']} came back"
    if tier["state"] == "watching":
        return Text.assemble(f"{told} · ", (f"only watches: {tier['why']}", "cyan"))
    if tier["state"] != "on":
        return Text.assemble(f"{told} · ", (f"{tier['state']}: {tier['why']}" if tier["why"] else tier["state"], "red"))
    gain = tier["saved_s"] - tier["spent_s"]
    worth = f"saved {tier['saved_s']:.1f} s and cost {tier['spent_s']:.1f} s in ten minutes"
    return Text.assemble(f"{told} · ", (worth, "green" if gain >= 0 else "yellow"))


def _serves(worker: dict[str, Any]) -> list[str]:
    return worker["roles"] or [worker["pool"]]


def _start(start: dict[str, Any]) -> Text:
    step = f"{start['step']}: {start['done']} of {start['total']} {start['unit']}".rstrip() if start["total"] else start["step"]
    return Text.assemble(f"{start['name']}  ", ("starting", "yellow"), f"  {step} (pid {start['pid']} on {start['host']})")


def _routers(routers: list[dict[str, Any]]) -> Fitting:
    doors = ("grpc", "http", "admin", "page")
    table = Fitting(("router", "pid", "in flight", "queued", *doors), left=("router", *doors))
    for router in routers:
        addresses = [router["endpoints"].get(door, "") for door in doors]
        table.add_row(router["name"], str(router["pid"]), str(router["inflight"]), str(router["queued"]), *addresses)
    return table


def size(count: float) -> str:
    """A number of bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
