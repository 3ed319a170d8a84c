"""The file: refused by name if it is truncated, changed, of another version or no recording; without secrets."""

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.cluster.config import Config
from baton.recorder.recorder import KEPT, SECRET_BYTES, Recorder, digest_of
from baton.recorder.recording import BadRecording, TapeSource, read
from baton.recorder.tape import Tape

KEY = "a-cluster-key-of-some-length"


class Sum:
    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int, key: bytes = b"k" * 16) -> int:
        self.total += amount
        return self.total


def recorder(folder: Path, minutes: float = 5.0, name: str = "router-0") -> Recorder:
    config = Config.model_validate({
        "cluster": {"key": KEY}, "redis": {"url": "redis://user:hidden@localhost:6379"},
        "recorder": {"minutes": minutes, "folder": str(folder)},
    })  # fmt: skip
    made = Recorder(config, name, "router", digest_of(["baton.recorder.tape"]))
    thing = Sum()
    tape = Tape("sums", 60.0, 1 << 20, lambda: 0.0, lambda: (thing.total, 8))
    tape.follow("sum", thing, ["add"])
    made.sources.append(TapeSource(tape, {}))
    made.requests = lambda: [{"request_id": "r1", "prompt_tokens": 5}]
    for amount in (1, 2, 3):
        thing.add(amount)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one.jsonl"
    path.write_bytes(b"".join(recorder(tmp_path).section("asked", bytes(SECRET_BYTES))))
    return path


def test_a_file_has_configuration_requests_and_calls_and_no_secret(file: Path) -> None:
    [section] = read(file)
    assert section.head["process"] == "router-0" and section.head["config"]["router"]["max_inflight"] and section.head["code"]
    assert section.requests == [{"request_id": "r1", "prompt_tokens": 5}]
    [stretch] = section.stretches
    assert stretch.state == 0 and [(call.method, call.result) for call in stretch.calls] == [("sum.add", 1), ("sum.add", 3), ("sum.add", 6)]
    assert KEY not in file.read_text() and "hidden" not in file.read_text()


def test_files_may_be_joined(file: Path) -> None:
    file.write_bytes(file.read_bytes() * 3)
    assert len(list(read(file))) == 3


@pytest.mark.parametrize(("change", "why"), [
    (lambda text: b"", "is empty"),
    (lambda text: text[:-1].rpartition(b"\n")[0] + b"\n", "is truncated: the section of router-0 has no end"),
    (lambda text: text[: len(text) // 2], "is truncated"),
    (lambda text: text.replace(b'"baton_recording":1', b'"baton_recording":2'), "has version 2; this program reads version 1"),
    (lambda text: text.replace(b'null,6]', b'null,7]').replace(b'{},6]', b'{},7]'), "was changed after it was written"),
    (lambda text: b"hello\n", "is not JSON"),
    (lambda text: b"{}\n", "does not begin a recording"),
    (lambda text: b"[1]\n", "is no object"),
    (lambda text: text.replace(b'{"call":[0,', b'{"call":[9,'), "is no part of a recording"),
])  # fmt: skip
def test_another_file_is_refused_by_name(file: Path, change: Callable[[bytes], bytes], why: str) -> None:
    text = file.read_bytes()
    file.write_bytes(change(text))
    assert change(text) != text
    with pytest.raises(BadRecording, match=why):
        list(read(file))


def test_a_dump_is_whole_private_and_bounded_in_number(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    paths = [made.dump("crash") for _ in range(KEPT + 3)]
    left = sorted(tmp_path.iterdir())
    assert left == sorted(path for path in paths[3:] if path) and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in left)
    assert [section.head["why"] for section in read(left[-1])] == ["crash"]


def test_a_dump_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert recorder(blocked).dump("crash") is None and "cannot be written" in caplog.text
    broken = recorder(tmp_path / "folder")
    broken.requests = lambda: [{"no JSON": object()}]
    assert broken.dump("crash") is None and not list((tmp_path / "folder").iterdir())


def test_nothing_is_written_when_nothing_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    off = recorder(tmp_path, minutes=0)
    assert not off.on and off.dump("signal") is None and not list(tmp_path.iterdir()) and "recorder.minutes is 0" in caplog.text
    assert json.loads(next(off.section("asked")))["off"] == "recorder.minutes is 0"


WITNESSED = """
import os, signal, sys, threading
from baton.cluster import witness

came = threading.Event()
witness.hold_back()
witness.listen(came.set)
os.kill(os.getpid(), signal.SIGUSR2)
sys.exit(0 if came.wait(60) else "nobody answered")
"""


def test_a_signal_is_answered_while_the_main_thread_waits() -> None:
    """In a thread of its own: a process whose event loop hangs answers, too."""
    done = subprocess.run([sys.executable, "-c", WITNESSED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
