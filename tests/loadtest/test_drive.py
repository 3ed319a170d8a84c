"""The open loop: only the next turn of the same session waits for an answer."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import loadtest.drive as drive_module
from loadtest.arrivals import Constant, Poisson
from loadtest.distribution import percentile
from loadtest.drive import GENERATOR_FULL, GONE_AFTER, NO_SERVER, Answer, Live, Run, drive
from loadtest.slo import Miss, Slo
from loadtest.summary import lost_reason, summarise
from loadtest.window import Window
from loadtest.workload import Item


class Fake:
    """Answers after `service_s`."""

    def __init__(self, service_s: float = 0.0, answer: Callable[[int], Answer] = lambda n: Answer("ok", tokens=[7])) -> None:
        self.service_s = service_s
        self.answer = answer
        self.prompts: list[list[int]] = []
        self.at_once = self.most_at_once = 0

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: Callable[[int], None]) -> Answer:
        self.prompts.append(list(prompt))
        number = len(self.prompts) - 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.service_s:
                await asyncio.sleep(self.service_s)
        finally:
            self.at_once -= 1
        answer = self.answer(number)
        if answer.outcome == "ok":
            on_tokens(output_tokens)
        return answer


def items(number: int, **fields: Any) -> list[Item]:
    return [Item((i,), 1, **fields) for i in range(number)]


async def go(door: Fake, todo: list[Item], rate: float = 100.0, duration_s: float = 0.3, **options: Any) -> Run:
    times = Constant(rate).times(random.Random(0))
    return await drive(todo, times, door, duration_s=duration_s, timeout_s=5.0, **options)


async def test_requests_are_sent_without_waiting_for_answers() -> None:
    """30 are due before the first answer comes; a closed loop would have sent one."""
    door = Fake(service_s=2.0)
    run = await go(door, items(100))
    assert len(run.records) == 30 == door.most_at_once and not run.partial
    assert [record.scheduled for record in run.records] == pytest.approx([i / 100 for i in range(30)])
    assert [record.number for record in run.records] == list(range(30))
    for record in run.records:
        assert record.sent >= record.scheduled and record.token_times[0] - record.sent >= 1.95
        assert record.outcome == "ok" and record.ended >= record.token_times[-1]


async def test_a_turn_waits_for_the_previous_one_and_carries_its_answer() -> None:
    door = Fake(service_s=0.02, answer=lambda n: Answer("ok", tokens=[100 + n]))
    turns = [Item((1, 2), 1, "s"), Item((3,), 1, "s", think_s=0.05), Item((4,), 1, "s")]
    run = await go(door, [*turns, Item((9,), 1)], rate=1000)
    talk = [record for record in run.records if record.session == "s"]
    prompts = [prompt for prompt in door.prompts if prompt[0] == 1]
    assert len(talk) == 3 and prompts[0] == [1, 2]
    first = next(i for i, prompt in enumerate(door.prompts) if prompt == [1, 2])
    assert prompts[1] == [1, 2, 100 + first, 3] and prompts[2][:5] == [*prompts[1], prompts[2][4]] and prompts[2][-1] == 4
    assert talk[1].scheduled >= talk[0].ended + 0.05 - 1e-3 and talk[2].scheduled >= talk[1].ended - 1e-3
    assert [record.prompt_tokens for record in talk] == [2, 4, 6]


async def test_a_session_ends_with_a_failed_turn_or_with_the_run() -> None:
    refusing = Fake(answer=lambda n: Answer("refused", "SATURATED"))
    run = await go(refusing, [Item((1,), 1, "s"), Item((2,), 1, "s")])
    assert [record.reason for record in run.records] == ["SATURATED"] and run.records[0].output_tokens == 0
    late = await go(Fake(service_s=0.2), [Item((i,), 1, "s") for i in range(9)], duration_s=0.5)
    assert 2 <= len(late.records) <= 3, "a turn that would be due after the end is not sent"


async def test_the_times_of_a_trace_are_kept() -> None:
    todo = [Item((1,), 1, at=0.1), Item((2,), 1, at=0.0), Item((3,), 1, at=9.0)]
    run = await drive(todo, iter(()), Fake(), duration_s=0.3, timeout_s=1)
    assert [record.scheduled for record in run.records] == [0.0, 0.1]


async def test_the_plan_ends_when_no_arrivals_are_left() -> None:
    run = await drive(items(10), iter([0.0, 0.01]), Fake(), duration_s=0.3, timeout_s=1)
    assert len(run.records) == 2


async def test_a_lost_server_ends_the_run_and_keeps_its_records() -> None:
    gone = Fake(answer=lambda n: Answer("ok", tokens=[1]) if n < 10 else Answer("failed", NO_SERVER))
    run = await go(gone, items(5000), rate=500, duration_s=20)
    assert "the server is gone" in run.partial
    assert 10 + GONE_AFTER <= len(run.records) < 100 and sum(record.outcome == "ok" for record in run.records) == 10
    now_and_then = Fake(answer=lambda n: Answer("failed", NO_SERVER) if n % 2 else Answer("ok", tokens=[1]))
    assert not (await go(now_and_then, items(200), rate=500)).partial, "occasional failures do not end the run"


async def test_streams_are_bounded_and_excess_requests_are_counted() -> None:
    door = Fake(service_s=0.4)
    run = await go(door, items(100), max_in_flight=5)
    reasons = [record.reason for record in run.records]
    assert door.most_at_once == 5 and reasons.count(GENERATOR_FULL) == 25 and len(reasons) == 30


async def test_the_live_state_follows_the_run() -> None:
    live, seen = Live(), []
    door = Fake(service_s=0.1)
    running = asyncio.ensure_future(go(door, items(100), live=live))
    while not running.done():
        await asyncio.wait({running}, timeout=0.03)
        seen.append((live.in_flight, len(live.records)))
    assert live.planned == live.due == len(live.records) == 30 and live.in_flight == 0
    assert max(flying for flying, _ in seen) > 3 and [ended for _, ended in seen] == sorted(ended for _, ended in seen)


async def test_an_interrupted_run_keeps_its_records_and_leaves_no_stream() -> None:
    door, live = Fake(), Live()
    running = asyncio.ensure_future(go(door, items(4000), rate=200, duration_s=20, live=live))
    while len(live.records) < 5:
        await asyncio.sleep(0.01)
    door.service_s = 30
    while not door.at_once:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert door.at_once == 0 and 5 <= len(live.records) < 3000, "the records of finished requests are kept"


class Raising(Fake):
    """Raises on every third request, after its tokens were sent."""

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: Callable[[int], None]) -> Answer:
        answer = await super().ask(prompt, output_tokens, timeout_s, on_tokens)
        if len(self.prompts) % 3 == 0:
            raise RuntimeError("the stream has not come to its end")
        return answer


async def test_a_door_that_raises_loses_no_request() -> None:
    run = await go(Raising(), items(100))
    failed = [record for record in run.records if record.outcome == "failed"]
    assert len(run.records) == run.due == 30 and len(failed) == 10
    assert {record.reason for record in failed} == {"RuntimeError: the stream has not come to its end"}
    told = summarise(run.records, Window(run.duration_s), Slo(ttft_s=60.0), due=run.due, max_lag_s=60.0)
    assert told.void is None and told.requests == 30 and told.attainment == pytest.approx(2 / 3)
    assert told.misses[Miss("failed", "RuntimeError: the stream has not come to its end")] == 10


async def test_every_turn_that_becomes_due_is_counted() -> None:
    turns = [Item((i,), 1, f"s{i // 3}") for i in range(30)]
    run = await go(Fake(), turns, rate=1000)
    assert run.due == len(run.records) == 30
    refused = await go(Fake(answer=lambda n: Answer("refused", "SATURATED")), turns, rate=1000)
    assert refused.due == len(refused.records) == 10, "the turns after a refusal never become due"


async def test_a_fault_of_the_generator_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the count: no record is made, and the run is not mistaken for a good one."""
    monkeypatch.setattr(drive_module, "Record", lambda **_: 1 / 0)
    run = await go(Fake(), items(100))
    assert run.partial == "the generator failed: ZeroDivisionError: division by zero"
    assert run.due == 30 and lost_reason(run.records, run.due) == "30 requests became due and 0 have a record"


class Server:
    """Serves one request at a time: it answers `service_s` after the previous answer or after the request, whichever is later."""

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s
        self.free = self.late = 0.0

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: Callable[[int], None]) -> Answer:
        loop = asyncio.get_running_loop()
        due = self.free = max(self.free, loop.time()) + self.service_s
        await asyncio.sleep(due - loop.time())
        self.late = max(self.late, loop.time() - due)
        on_tokens(1)
        return Answer("ok", tokens=[7])


async def test_measured_waiting_times_match_those_of_a_known_queue() -> None:
    """M/D/1: Poisson arrivals, one server, constant service. Pollaczek and Khinchine: mean wait = load · service / (2 (1 - load)).

    Lindley's recursion computes the expected values for exactly these arrivals; the formula gives the mean over all of them.
    """
    service, load, duration = 0.01, 0.6, 6.0
    moments = []
    for moment in Poisson(load / service).times(random.Random(5)):
        if moment >= duration:
            break
        moments.append(moment)
    waits, free = [], 0.0
    for moment in moments:
        waits.append(max(0.0, free - moment))
        free = max(free, moment) + service
    theory = load * service / (2 * (1 - load))
    assert sum(waits) / len(waits) == pytest.approx(theory, rel=0.5), "the arrivals are Poisson"
    server = Server(service)
    run = await drive(items(len(moments)), iter(moments), server, duration_s=duration, timeout_s=10)
    told = summarise(run.records, Window(duration), Slo(ttft_s=1.0))
    assert told.requests == told.completed == len(moments) and told.attainment == 1.0
    assert told.lag_ms.max is not None
    slack = 1000 * server.late + told.lag_ms.max + 1  # the delay that a busy machine added, as seen by the server and by the generator
    for percent, measured in ((50, told.ttft_ms.p50), (90, told.ttft_ms.p90), (99, told.ttft_ms.p99)):
        expected = percentile([1000 * (wait + service) for wait in waits], percent)
        assert measured is not None and expected is not None and expected - 0.5 <= measured <= expected + slack


async def test_a_thousand_streams_do_not_disturb_the_schedule() -> None:
    """Tests behaviour, not speed: all requests were in flight together, and none was sent before it was due."""
    door = Fake(service_s=4.0)
    run = await go(door, items(2000), rate=1000, duration_s=1.2)
    assert door.most_at_once >= 1000 and len(run.records) == 1200
    assert all(record.sent >= record.scheduled - 1e-6 for record in run.records)
