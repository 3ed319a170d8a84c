"""A log that nobody reads stops nobody."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from baton.cluster.log_writer import LogWriter

FILL = """
import os
os.set_blocking(2, False)
try:
    while True: os.write(2, b'x' * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
"""


class Reader:
    """Reads lines while it is awake."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.awake = threading.Event()

    def write(self, data: bytes) -> None:
        assert self.awake.wait(60)
        self.lines.append(data.decode())


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.awake.set()


def logger(handler: logging.Handler) -> logging.Logger:
    log = logging.Logger("x")
    log.addHandler(handler)
    return log


def test_lines_come_in_order(reader: Reader) -> None:
    log = logger(handler := LogWriter(reader.write))
    reader.awake.set()
    for i in range(500):
        log.info("line %d", i)
    handler.flush()
    assert reader.lines == [f"line {i}\n" for i in range(500)]


def test_lines_that_find_no_room_are_dropped_and_counted(reader: Reader) -> None:
    log = logger(handler := LogWriter(reader.write, most_bytes=1000))
    for i in range(100):
        log.info("%099d", i)  # 100 bytes
    assert handler.lost == 90
    reader.awake.set()
    handler.flush()
    assert [int(line) for line in reader.lines[:10]] == list(range(10))
    assert reader.lines[10:] == ["90 log lines were lost: nobody read them in time\n"] and handler.lost == 0
    log.info("again")
    handler.flush()
    assert reader.lines[11:] == ["again\n"]


def test_an_error_of_the_reader_loses_the_line_only() -> None:
    written: list[bytes] = []

    def write(data: bytes) -> None:
        if data == b"bad\n":
            raise BrokenPipeError
        written.append(data)

    log = logger(handler := LogWriter(write))
    for line in ("a", "bad", "b"):
        log.info(line)
    handler.flush()
    assert written == [b"a\n", b"b\n"]


def run(code: str, status: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        assert process.wait(60) == status
    finally:
        process.kill()
        process.communicate()


def test_a_process_whose_log_is_not_read_goes_on_and_ends() -> None:
    run(
        "import logging; from baton.cluster.logs import setup_logging; from baton.cluster.config import TelemetryConfig\n"
        "setup_logging(TelemetryConfig(), 'router')\n"
        "for i in range(5000): logging.getLogger('x').warning('line %d %s', i, 'x' * 60)",
        status=0,
    )


def test_the_last_resort_does_not_wait_for_a_reader() -> None:
    run(FILL + "import time; from baton.cluster.lifecycle import LastResort; LastResort()(0.1); time.sleep(300)", status=1)
