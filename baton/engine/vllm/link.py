"""The socket between our process and vLLM's children: a leash, the way of the staging memory to the ranks, and the news of the scheduler.

An abstract Unix socket (Linux): nothing lies in a file system, so nothing is left behind. Whoever connects must have our user id and know
the token. Messages are JSON, one a line. When our process ends, for whatever reason, its end of the socket closes, and every child clears
the folder that holds vLLM's temporary files and kills itself: both would outlive our process.
"""

import hmac
import json
import mmap
import os
import secrets
import shutil
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

LINE = 16 << 20  # bytes; a longer message is not ours
BUFFER = 4 << 20  # vLLM's scheduler waits if so much was not read by us
SHARED_MEMORY = Path("/dev/shm")
_PEER = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank says of its KV tensors: a logical [blocks, heads, block_size, width] for each layer."""

    pipeline: int
    tensor: int
    layers: int
    blocks: int
    heads: int
    block_size: int
    width: int
    dtype: str
    packing: str


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a rank's part lies in a staged block, and the staging memory's shape `[blocks, layers, heads, block_size, width]`."""

    shape: tuple[int, int, int, int, int]
    first_layer: int
    first_head: int


class LinkError(RuntimeError):
    """vLLM's children did not come, or said something that we do not understand."""


def place(reports: list[RankReport]) -> tuple[RankReport, list[Slot]]:
    """The whole that the ranks' parts make, as one report, and the slot of each; `blocks` of the shapes is 0. Pure.

    Raises LinkError if the parts do not fit together.
    """
    whole = reports[0]
    same = ("blocks", "heads", "block_size", "width", "dtype", "packing")
    for report in reports:
        for name in same:
            if getattr(report, name) != getattr(whole, name):
                raise LinkError(f"{name} is {getattr(whole, name)} in one rank and {getattr(report, name)} in another")
    if len({(report.pipeline, report.tensor) for report in reports}) != len(reports):
        raise LinkError("two ranks say that they are the same")
    stages = {report.pipeline: report.layers for report in reports}
    if any(report.layers != stages[report.pipeline] for report in reports):
        raise LinkError("the ranks of one pipeline stage have different layers")
    heads = whole.heads * (1 + max(report.tensor for report in reports))
    layers = sum(stages.values())
    shape = (0, layers, heads, whole.block_size, whole.width)
    slots = [
        Slot(shape, sum(count for stage, count in stages.items() if stage < report.pipeline), report.tensor * whole.heads)
        for report in reports
    ]
    return RankReport(0, 0, layers, whole.blocks, heads, whole.block_size, whole.width, whole.dtype, whole.packing), slots


def clear(folder: Path) -> None:
    """Removes `folder` and the shared memory of ranks on a CPU, which vLLM names after the file there by which they find each other.

    Several processes do so at the same time.
    """
    with suppress(OSError):
        for file in folder.glob("vllm_dist_*"):
            for memory in SHARED_MEMORY.glob(f"{file.name}-*"):
                memory.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


class _Line:
    """One end of a connection: lines in, lines out."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            if fds:
                socket.send_fds(self.stream, [data], fds)
            else:
                self.stream.sendall(data)

    def receive(self) -> dict[str, Any] | None:
        """None at the end."""
        while b"\n" not in self._rest:
            if len(self._rest) > LINE or not (data := self.stream.recv(1 << 16)):
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message = json.loads(line)
        return message if isinstance(message, dict) else None


class LinkHost:
    """Our end. `on_news` and `on_end` are called in threads of the link."""

    def __init__(self, ranks: int, on_news: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        self.address, self.token = f"baton-vllm-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="baton-vllm-"))
        self.pids: set[int] = set()
        self.refusal = ""
        self._ranks = ranks
        self._on_news, self._on_end = on_news, on_end
        self._lines: list[_Line] = []
        self._reports: list[tuple[RankReport, _Line]] = []
        self._allot: Callable[[RankReport, int], int] | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.address)
        self._listener.listen(64)

    @property
    def given(self) -> dict[str, str]:
        """What a child needs for its `Leash`."""
        return {"address": self.address, "token": self.token, "folder": str(self.folder)}

    def open(self, allot: Callable[[RankReport, int], int]) -> None:
        """`allot(whole, fd)` is called when every rank has reported. It gives the staging memory, a file of 0 bytes, its size, and returns
        the number of blocks. It may raise an error, whose text becomes `refusal`. `fd` is closed afterwards; what was mapped stays."""
        self._allot = allot
        threading.Thread(target=self._accept, name="vllm link", daemon=True).start()

    def tell_ranks(self, message: dict[str, Any]) -> None:
        """Blocks while a rank does not read. Raises OSError if one is gone."""
        for _, line in self._reports:
            line.send(message)

    def closing(self) -> None:
        """Notes that from now on an end of a child is no news."""
        self._closing = True

    def close(self) -> None:
        self._closing = True
        for stream in (self._listener, *(line.stream for line in self._lines)):
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()
        clear(self.folder)

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            pid, uid, _ = _PEER.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid != os.getuid():
                stream.close()
                continue
            threading.Thread(target=self._serve, args=(_Line(stream), pid), name="vllm link", daemon=True).start()

    def _serve(self, line: _Line, pid: int) -> None:
        try:
            if (hello := self._greeted(line)) is None:
                line.stream.close()
                return
            self.pids.add(pid)
            self._lines.append(line)
            if "refusal" in hello:
                self._refused(str(hello["refusal"]))
            elif "report" in hello:
                self._reported(RankReport(**hello["report"]), line)
            while (message := line.receive()) is not None:
                self._on_news(message)
        except Exception as error:  # whatever it is, the ranks wait for an answer
            self._refused(str(error) if isinstance(error, OSError | ValueError | LinkError) else f"{type(error).__name__}: {error}")
        if not self._closing:
            self._on_end()

    def _refused(self, text: str) -> None:
        """Nobody waits for memory that will not come."""
        self.refusal = self.refusal or text
        for each in self._lines:
            with suppress(OSError):
                each.stream.shutdown(socket.SHUT_RDWR)

    def _greeted(self, line: _Line) -> dict[str, Any] | None:
        """The first message of a child of ours. None: a stranger, who changes nothing."""
        try:
            hello = line.receive()
        except (OSError, ValueError):
            return None
        known = hello is not None and hmac.compare_digest(str(hello.get("token")).encode(), self.token.encode())
        return hello if known else None

    def _reported(self, report: RankReport, line: _Line) -> None:
        with self._lock:
            self._reports.append((report, line))
            if len(self._reports) < self._ranks:
                return
            assert self._allot is not None
            whole, slots = place([report for report, _ in self._reports])
            fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
            try:
                blocks = self._allot(whole, fd)
                for (_, its), slot in zip(self._reports, slots, strict=True):
                    its.send({"slot": asdict(slot) | {"shape": (blocks, *slot.shape[1:])}}, [fd])
            finally:
                os.close(fd)  # what was sent is a descriptor of the rank's own


class Leash:
    """A child's end. When the other end closes, the process kills itself."""

    def __init__(self, address: str, token: str, folder: Path, timeout_s: float) -> None:
        self._token, self._folder = token, folder
        self.on_message: Callable[[dict[str, Any]], None] = lambda message: None  # in the thread of the leash
        stream = socket.socket(socket.AF_UNIX)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        stream.settimeout(timeout_s)
        try:
            stream.connect("\0" + address)
        except OSError:
            clear(folder)  # our process ended before this one knew it
            raise
        self._line = _Line(stream)

    @classmethod
    def of(cls, given: dict[str, Any], timeout_s: float = 60.0) -> Self:
        """Reads the connector's part of vLLM's configuration: what `LinkHost.given` says."""
        return cls(given["address"], given["token"], Path(given["folder"]), timeout_s)

    def hello(self) -> None:
        self._line.send({"token": self._token})
        self._watch()

    def refuse(self, text: str) -> None:
        self._line.send({"token": self._token, "refusal": text})

    def report(self, report: RankReport) -> tuple[Slot, mmap.mmap]:
        """Waits for all the other ranks. Raises LinkError."""
        self._line.send({"token": self._token, "report": asdict(report)})
        try:
            data, fds, _, _ = socket.recv_fds(self._line.stream, 1 << 16, 1)
        except OSError as error:
            raise LinkError(f"no staging memory came: {error}") from None
        if not fds:
            raise LinkError("the worker gave no staging memory")
        slot = json.loads(data)["slot"]
        memory = mmap.mmap(fds[0], 0)
        os.close(fds[0])
        self._watch()
        return Slot(tuple(slot["shape"]), slot["first_layer"], slot["first_head"]), memory

    def send(self, message: dict[str, Any]) -> None:
        self._line.send(message)

    def _watch(self) -> None:
        self._line.stream.settimeout(None)
        threading.Thread(target=self._hang_on, name="leash", daemon=True).start()

    def _hang_on(self) -> None:
        with suppress(Exception):  # likewise if it cannot understand our process
            while (message := self._line.receive()) is not None:
                self.on_message(message)
        with suppress(Exception):  # whatever it is, this process must end
            clear(self._folder)
        os.kill(os.getpid(), signal.SIGKILL)
