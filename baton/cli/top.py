"""`baton top`: the cluster's current state in the terminal, from the router's `Live`: the live page without a browser."""

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from baton.access.access import Access
from baton.cli.admin import read_live
from baton.cli.view import STAGE_COLOURS, colour, legend, seconds, size, strip
from baton.terminal import Fitting
from baton.v1 import worker_pb2, worker_pb2_grpc

RATE_OVER_S = 10.0
STATE_STYLES = {"ready": "green", "draining": "yellow"}  # the rest is red
RECENT_BAR_WIDTH = 24
Snapshot = dict[str, Any]


def run(admin: Access, console: Console, every_s: float, once: bool) -> None:
    """Runs until `q` or Ctrl-C, or shows the state once (with `once`, or if the output is not a terminal). If the router stops answering,
    says so and keeps asking.

    Raises grpc.RpcError if the router does not answer the first time.
    """
    with admin.channel() as channel:
        stub = worker_pb2_grpc.AdminStub(channel)

        def look() -> Snapshot:
            return read_live(stub.Live(worker_pb2.LiveRequest(), timeout=5))

        first = look()
        if once or not console.is_terminal:
            console.print(draw(first, {}))
            return
        with pausing(sys.stdin.fileno()) as pause, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            watch(look, lambda shown: live.update(shown, refresh=True), lambda: pause(every_s))


@contextmanager
def pausing(keyboard: int) -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits for so many seconds, or until `q` is pressed, and returns whether it was. `keyboard`: a descriptor."""
    if not os.isatty(keyboard):

        def sleep(wait_s: float) -> bool:
            time.sleep(wait_s)
            return False

        yield sleep
        return
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)  # a key arrives without Enter, and Ctrl-C still interrupts

    def pause(wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while select.select([keyboard], [], [], max(0.0, until - time.monotonic()))[0]:
            if os.read(keyboard, 1) in (b"q", b"Q", b""):  # empty: the terminal is gone
                return True
        return False

    try:
        yield pause
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def watch(look: Callable[[], Snapshot], show: Callable[[Group], None], pause: Callable[[], bool]) -> None:
    """Shows the cluster until `pause` returns True."""
    seen: deque[Snapshot] = deque()
    shown = Group()
    while True:
        try:
            now = look()
        except grpc.RpcError as error:
            show(Group(Text(f"the router does not answer: {error.code().name}", style="red"), shown))
        else:
            if seen and now["clock"] < seen[-1]["clock"]:
                seen.clear()  # another router process
            seen.append(now)
            while now["clock"] - seen[0]["clock"] > RATE_OVER_S:
                seen.popleft()
            shown = draw(now, rates(seen[0], now))
            show(shown)
        if pause():
            return


def rates(before: Snapshot, now: Snapshot) -> dict[str, float]:
    """The increase of every total per second. Empty if no time has passed."""
    seconds = now["clock"] - before["clock"]
    totals = ((name, value, before["totals"][name]) for name, value in now["totals"].items() if name != "outcomes")
    return {name: max(0.0, (value - then) / seconds) for name, value, then in totals} if seconds > 0 else {}


def draw(now: Snapshot, rate: dict[str, float]) -> Group:
    """`rate`: the increase of each total per second, or empty while it is unknown."""
    return Group(_head(now, rate), _workers(now), _requests(now), _recent(now), legend(), _errors(now))


def _head(now: Snapshot, rate: dict[str, float]) -> Text:
    router, totals, slo = now["router"], now["totals"], now["slo"]
    head = Text(f"{now['model']}  {router['inflight']} in flight, {router['queued']} queued", style="bold")
    if len(now["routers"]) > 1:
        head.append(f"  {len(now['routers'])} routers")
    if rate:
        goodput = "goodput" if slo["objectives"] else "completed"
        head.append(f"  {goodput} {rate['met']:.2f}/s  {rate['output_tokens']:.1f} tokens/s  KV {size(rate['handoff_bytes'])}/s")
    if slo["attainment"] is not None:
        head.append(f"  SLO {100 * slo['attainment']:.0f} %")
    if totals["prompt_tokens"]:
        head.append(f"  cached {100 * totals['cached_tokens'] / totals['prompt_tokens']:.0f} %")
    if router["registry"] != "reachable":
        head.append("  registry away", style="red")
    return head


def _workers(now: Snapshot) -> Fitting:
    table = Fitting(("worker", "state", "running", "waiting", "KV in use", "cached", "leases", "requests"))
    for worker in now["workers"]:
        here = Text(" ").join(Text(f"{count} {stage}", style=colour(stage)) for stage, count in worker["requests"].items())
        state = Text(_state(worker), style=STATE_STYLES.get(worker["state"], "bold red"))
        used = f"{100 * worker['blocks_in_use'] / worker['kv_blocks']:.0f} %"
        table.add_row(
            worker["name"], state, str(worker["running"]), str(worker["waiting"]), used, str(worker["cached_blocks"]),
            str(worker["leases"]), here,
        )  # fmt: skip
    for pool, count in now["unlisted"].items():
        table.add_row(f"{count} more", "ready", "", "", "", "", "", Text(pool))
    return table


def _state(worker: dict[str, Any]) -> str:
    if worker["state"] not in ("unreachable", "gone"):
        return str(worker["state"])
    return (
        f"{'lost' if worker['state'] == 'gone' else 'no answer'} {worker['silent']:.0f} s{', restarting' if worker['restarting'] else ''}"
    )


def _requests(now: Snapshot) -> Fitting:
    table = Fitting(("request", "stage", "prefill", "decode", "prompt", "output", "age", "retries"))
    for request in now["requests"][:10]:
        stage = Text(request["stage"], style=STAGE_COLOURS[request["stage"]])
        if request["bypass"]:
            stage = Text("bypass", style=colour("bypass"))
        table.add_row(
            request["request_id"], stage, request["prefill_worker"], request["decode_worker"], str(request["prompt_tokens"]),
            str(request["output_tokens"]), f"{request['age']:.1f} s", str(request["retries"] or ""),
        )  # fmt: skip
    return table


def _recent(now: Snapshot) -> Fitting:
    table = Fitting(("last", "stages", "TTFT", "total", "tokens"))
    scale = max((record["e2e"] for record in now["recent"]), default=0.0) or 1e-9
    for record in now["recent"]:
        stages = Text(f"{record['outcome']}: {record['reason']}", style="red")
        if record["outcome"] == "ok":
            stages = strip(record, scale, RECENT_BAR_WIDTH)
        tokens = f"{record['prompt_tokens']} → {record['output_tokens']}"
        table.add_row(record["request_id"], stages, seconds(record["ttft"]), seconds(record["e2e"]), tokens)
    return table


def _errors(now: Snapshot) -> Text:
    """One line for each reason."""
    told = Text()
    for error in now["errors"][:4]:
        last = " ".join(part for part in (error["worker"], error["request_id"]) if part)
        told.append(f"{error['reason']} ({error['count']}), last {datetime.fromtimestamp(error['at']):%H:%M:%S} {last}\n", style="red")
    return told
