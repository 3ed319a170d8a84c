"""The router's log names every request that failed or was refused, and says how many it left out."""

import logging

import pytest

from baton.cluster.config_router import SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from router.journal import Journal
from router.request import Failure, Request
from router.request_log import LINES, RequestLog

PROMPT = "the secret of the fox"


class House:
    def __init__(self) -> None:
        self.now = 100.0
        self.journal = Journal(Book("router", model="toy"), Tracer(), "toy", SloConfig(), keep=10, wall_clock=lambda: self.now)

    def end(self, error: BaseException | None, name: str = "r1", stage: str = "", dispatched: bool = True, tenant: str = "acme") -> None:
        entry = self.journal.open("chat", name, tenant=tenant, clock=lambda: self.now)
        try:
            with entry:
                trace = entry.trace
                if dispatched:
                    entry.request = Request(name, [1, 2, 3, 4], 3, SamplingParams(max_tokens=9), "", 1e9, trace)
                    trace.watch.enter("prefill", "p0")
                    trace.failures.append(Failure(self.now, "p0", "WORKER_LOST"))
                    trace.retries = 1
                    trace.watch.enter("decode", "d0")
                trace.step = stage
                self.now += 1.5
                if error is not None:
                    raise error
                entry.trace.watch.stop()
                entry.finish = "stop"
        except BaseException as raised:
            assert raised is error


def test_a_failed_and_a_refused_request_is_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    with caplog.at_level(logging.INFO):
        house.end(BatonError(Reason.RETRIES_SPENT, PROMPT))
        house.end(BatonError(Reason.SATURATED, PROMPT), name="r2", stage="admission", dispatched=False, tenant="")
        house.end(ValueError(PROMPT), name="r3")
        house.end(BatonError(Reason.NO_WORKER, PROMPT), name="", dispatched=False)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "request 'r1' failed: RETRIES_SPENT in decode at d0 after 1.500 s and 1 retry (tenant acme)"),
        ("INFO", "request 'r2' refused: SATURATED in admission after 1.500 s"),
        ("WARNING", "request 'r3' failed: INTERNAL in decode at d0 after 1.500 s and 1 retry (tenant acme)"),
        ("INFO", "request without an id refused: NO_WORKER in queue after 1.500 s (tenant acme)"),
    ]


@pytest.mark.parametrize("error", [None, BatonError(Reason.CANCELLED, ""), BatonError(Reason.INVALID_FIELD, PROMPT), GeneratorExit()])
def test_other_requests_are_not_logged(error: BaseException | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        House().end(error)
    assert not caplog.records


def test_an_id_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        House().end(BatonError(Reason.RETRIES_SPENT, ""), name="r\n12:00:00 I router: all is well\x1b[2J\u2028")
    (record,) = caplog.records
    assert record.getMessage().isascii() and record.getMessage().isprintable()


def test_the_rate_is_bounded_and_what_is_left_out_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(logging.getLogger("x"))
    with caplog.at_level(logging.INFO):
        for number in range(LINES + 30):
            log.line(5.0, logging.INFO, "refused SATURATED" if number % 3 else "failed DEADLINE", f"line {number}")
        log.tell(5.9)
        assert [record.getMessage() for record in caplog.records] == [f"line {number}" for number in range(LINES)]
        caplog.clear()
        log.tell(6.0)
        log.tell(9.0)
        log.line(9.0, logging.INFO, "", "another")
    assert [record.getMessage() for record in caplog.records] == [
        "30 more lines about requests were left out: 20 refused SATURATED, 10 failed DEADLINE",
        "another",
    ]


def test_the_journal_tells_what_was_left_out_although_no_request_comes(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    with caplog.at_level(logging.INFO):
        for _ in range(LINES + 5):
            house.end(BatonError(Reason.SATURATED, ""), dispatched=False)
            house.now -= 1.5
        house.now += 3.0
        house.journal.sample(0, 0, None)
    assert [record.getMessage() for record in caplog.records][LINES:] == ["5 more lines about requests were left out: 5 refused SATURATED"]
