"""The parent's side: one driver process with its deadlines, its memory and its end."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class DriverError(RuntimeError):
    """The driver reported an error, died, or missed its deadline. In the last two cases the process is gone."""


class Driver:
    """A process in its own session, so that whatever it starts ends with it. Its output goes to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.perf_counter()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._unread = b""

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
            while b"\n" not in self._unread:
                if not self._selector.select(deadline - time.monotonic()):
                    raise DriverError(f"no answer in {timeout_s:.0f} s")
                piece = os.read(self._stdout.fileno(), 1 << 20)
                if not piece:
                    raise DriverError(f"died: {self._last_words()}")
                self._unread += piece
        except (OSError, DriverError) as error:
            self.end()
            raise error if isinstance(error, DriverError) else DriverError(f"died: {self._last_words()}") from None
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DriverError(answer["error"])
        return answer

    def sleep(self) -> None:
        """Stops the process until it is `awake`: the spinning threads of an idle engine would take a core from the others."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[Self]:
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.sleep()

    def peak_rss(self) -> int:
        """Bytes of all processes of the session, each at its own peak."""
        return sum(_peak(pid) for pid in _session(self._process.pid))

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        self._stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.end()

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                self._process.poll()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without any output"


def _session(leader: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process ended meanwhile
        if int(fields[3]) == leader:
            found.append(int(stat.parent.name))
    return found


def _peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
