"""Log lines: what a machine and a person read, and what neither may read."""

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.config import Config, TelemetryConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.logs import WITHHELD, JsonFormatter, Text
from baton.cluster.packages import command
from baton.launch.plan import templates
from baton.launch.ports import Ports

PROMPT = "the secret of the fox"


def logged(act: Callable[[logging.Logger], None], kind: type[logging.Formatter] = JsonFormatter) -> str:
    stream = io.StringIO()
    handler, log = logging.StreamHandler(stream), logging.Logger("room.file")
    handler.setFormatter(kind("decode-0"))
    log.addHandler(handler)
    act(log)
    return stream.getvalue()


def caught(error: BaseException, cause: BaseException | None = None) -> Callable[[logging.Logger], None]:
    def act(log: logging.Logger) -> None:
        try:
            raise error from cause
        except BaseException:
            log.exception("a call failed")

    return act


def test_a_record_is_one_json_line_with_these_fields() -> None:
    text = logged(lambda log: log.warning("%s\nand a second line, “é”, \ud800", "first"))
    assert text.count("\n") == 1 and text.isascii()
    told = json.loads(text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told.pop("ts"))
    message = "first\nand a second line, “é”, \ud800"
    assert told == {"level": "warning", "process": "decode-0", "logger": "room.file", "message": message}


def test_an_exception_is_one_field_of_the_same_line() -> None:
    text = logged(caught(OSError("no such device")))
    assert text.count("\n") == 1
    exception = json.loads(text)["exception"]
    assert exception.startswith("Traceback (most recent call last):\n") and exception.endswith("OSError: no such device")
    assert "test_logs.py" in exception


@pytest.mark.parametrize("kind", [JsonFormatter, Text])
@pytest.mark.parametrize(
    "error",
    [KeyError(PROMPT), ValueError(f"invalid literal: {PROMPT!r}"), Exception(PROMPT), UnicodeDecodeError("utf-8", b"x", 0, 1, PROMPT)],
)
def test_an_exception_that_may_quote_a_prompt_is_logged_without_its_message(kind: type[logging.Formatter], error: Exception) -> None:
    for wrapped in (
        caught(error),
        caught(RuntimeError("the engine failed"), error),
        caught(ExceptionGroup("several", [error, OSError("no such device")])),
    ):
        text = logged(wrapped, kind)
        assert PROMPT not in text and WITHHELD in text and type(error).__name__ in text


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), BatonError(Reason.INTERNAL, "the engine hangs"), OSError("disk full")])
def test_a_message_that_an_operator_needs_is_kept(error: Exception) -> None:
    """Negative control."""
    assert str(error) in logged(caught(error)) and WITHHELD not in logged(caught(error))


def test_text_is_for_people() -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d W decode-0 room\.file: 50 % full\n", logged(lambda log: log.warning("50 % full"), Text))


def start(env: dict[str, str], stderr: Any) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    code = (
        "import logging; from baton.cluster.config_layers import load; from baton.cluster.logs import setup_logging\n"
        "setup_logging(load().config.telemetry, 'router'); logging.getLogger('x').info('hello'); import warnings; warnings.warn('careful')"
    )
    return subprocess.Popen([sys.executable, "-c", code], env={**clean, **env}, stderr=stderr)


@pytest.mark.parametrize(("configured", "is_json"), [(None, True), ("auto", True), ("json", True), ("text", False)])
def test_a_process_without_a_terminal_writes_json_unless_configured(configured: str | None, is_json: bool) -> None:
    process = start({"BATON_TELEMETRY_LOG_FORMAT": configured} if configured else {}, subprocess.PIPE)
    lines = process.communicate(timeout=60)[1].decode().splitlines()
    assert process.returncode == 0 and len(lines) >= 2
    if is_json:
        assert [json.loads(line)["logger"] for line in lines] == ["x", "py.warnings"]
    else:
        assert lines[0].endswith("I router x: hello")


def test_on_a_terminal_it_writes_text() -> None:
    ours, theirs = pty.openpty()
    process = start({}, theirs)
    os.close(theirs)
    text = os.read(ours, 4096).decode()
    process.wait(60)
    os.close(ours)
    assert "I router x: hello" in text and "{" not in text


def test_processes_of_a_launcher_write_text_unless_configured() -> None:
    def variable(telemetry: TelemetryConfig) -> set[str | None]:
        with Ports("127.0.0.1") as ports:
            made = templates(Config(telemetry=telemetry), ports)
        return {template.env.get("BATON_TELEMETRY_LOG_FORMAT") for template, _ in made}

    assert variable(TelemetryConfig()) == {"text"} and variable(TelemetryConfig(log_format="json")) == {"json"}


def test_a_real_process_started_by_hand_writes_json(tmp_path: Path) -> None:
    env = {**os.environ, "BATON_MODEL_PATH": str(tmp_path), "BATON_REDIS_URL": "redis://127.0.0.1:1/0"}
    done = subprocess.run(command("router"), env=env, capture_output=True, text=True, timeout=120)
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2 and records and {record["process"] for record in records} == {"router"}
    assert any(record["level"] == "error" for record in records)
