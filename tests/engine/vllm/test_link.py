"""The link with real sockets, shared memory and processes: who is let in, who gets which part, and who dies with whom."""

import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.core.kvcache import KvLayout
from baton.engine.vllm import link
from baton.engine.vllm.link import Leash, LinkError, LinkHost, RankReport, Slot, place

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets and memfd"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]
ROOT = Path(__file__).resolve().parents[3]
SOON = 30.0  # seconds; a busy machine is no failure
BLOCKS = 5


def report(pipeline: int = 0, tensor: int = 0, **change: Any) -> RankReport:
    return replace(RankReport(pipeline, tensor, layers=2, blocks=7, heads=3, block_size=4, width=8, dtype="float32", packing="p"), **change)


def grid(pipelines: int, tensors: int) -> list[RankReport]:
    return [report(pipeline, tensor) for pipeline in range(pipelines) for tensor in range(tensors)]


def part(memory: Any, slot: Slot, its: RankReport) -> np.ndarray:
    """A rank's view of all staged blocks."""
    whole = np.frombuffer(memory, dtype=np.float32).reshape(slot.shape)
    return whole[:, slot.first_layer : slot.first_layer + its.layers, slot.first_head : slot.first_head + its.heads]


def eventually(true: Callable[[], object]) -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


# --- place ---------------------------------------------------------------------------------------------------------------------------


def test_one_rank_has_the_whole_block() -> None:
    whole, slots = place([report()])
    assert whole == report() and slots == [Slot((0, 2, 3, 4, 8), 0, 0)]


@pytest.mark.parametrize(("pipelines", "tensors"), [(1, 2), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("backwards", [False, True])
def test_slots_cover_a_block_without_overlap(pipelines: int, tensors: int, backwards: bool) -> None:
    reports = grid(pipelines, tensors)
    if backwards:
        reports.reverse()
    whole, slots = place(reports)
    assert (whole.layers, whole.heads, whole.blocks) == (2 * pipelines, 3 * tensors, 7)
    marks = np.zeros((1, *slots[0].shape[1:]), dtype=np.float32)
    for its, slot in zip(reports, slots, strict=True):
        assert slot.shape == (0, whole.layers, whole.heads, whole.block_size, whole.width)
        part(marks, replace(slot, shape=marks.shape), its)[:] += 1
    assert (marks == 1).all()


def test_stages_of_a_pipeline_may_have_different_numbers_of_layers() -> None:
    whole, slots = place([report(2, layers=1), report(0, layers=3), report(1, layers=2)])
    assert whole.layers == 6 and [slot.first_layer for slot in slots] == [5, 0, 3]


@pytest.mark.parametrize("reports", [[report(), report()], [report(0, 0), report(0, 1, layers=3)]], ids=["twice", "layers"])
def test_ranks_that_do_not_make_a_block_are_refused(reports: list[RankReport]) -> None:
    with pytest.raises(LinkError):
        place(reports)


@pytest.mark.parametrize(
    ("name", "other"), [("blocks", 8), ("heads", 2), ("block_size", 8), ("width", 16), ("dtype", "bfloat16"), ("packing", "other")]
)
def test_ranks_that_disagree_do_not_fit_together(name: str, other: Any) -> None:
    with pytest.raises(LinkError, match=rf"^{name} is .* in one rank and {other} in another"):
        place([report(), report(tensor=1, **{name: other})])


# --- a host and its ranks ------------------------------------------------------------------------------------------------------------


class Ours:
    """A host with staging memory, and what it has heard."""

    def __init__(self, ranks: int, refuse: str = "", raises: type[Exception] = ValueError) -> None:
        self.news: list[dict[str, Any]] = []
        self.ends = 0
        self.wholes: list[RankReport] = []
        self.memory: mmap.mmap | None = None
        self.refuse, self.raises = refuse, raises
        self.host = LinkHost(ranks, self.news.append, self.end)
        self.host.open(self.allot)

    def end(self) -> None:
        self.ends += 1

    def allot(self, whole: RankReport, fd: int) -> int:
        self.wholes.append(whole)
        self.file = os.fstat(fd)
        if self.refuse:
            raise self.raises(self.refuse)
        size = BLOCKS * whole.layers * whole.heads * whole.block_size * whole.width * 4
        os.ftruncate(fd, size)
        self.memory = mmap.mmap(fd, size)
        return BLOCKS

    def descriptors(self) -> int:
        """Of the staging memory, in this process. A map has one of its own."""
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                found += os.path.samestat(os.fstat(int(name)), self.file)
        return found

    def given(self) -> dict[str, Any]:
        return self.host.given

    def dial(self) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(SOON)
        stream.connect("\0" + self.host.address)
        return stream


@pytest.fixture
def make() -> Iterator[Callable[..., Ours]]:
    made: list[Ours] = []

    def one(ranks: int = 1, refuse: str = "", raises: type[Exception] = ValueError) -> Ours:
        made.append(Ours(ranks, refuse, raises))
        return made[-1]

    yield one
    for ours in made:
        ours.host.close()


@pytest.fixture
def tame(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A leash in this process that would kill it only says so. Named before `make`, so that the hosts close first."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: killed.append(signum))
    before = set(threading.enumerate())
    yield killed
    for thread in set(threading.enumerate()) - before:  # while the kill is not a real one
        if thread.name == "leash":
            thread.join(SOON)
            assert not thread.is_alive()


CHILD = """
import json, sys
from baton.engine.vllm.link import Leash, LinkError, RankReport
import numpy as np

what, given, pipeline, tensor, layers = json.loads(sys.argv[1])
leash = Leash.of(given, 60)
if what == "refuse":
    leash.refuse("two groups")
    sys.exit(3)
if what == "hello":
    leash.hello()
    leash.send({"news": [1, 2]})
else:
    try:
        slot, memory = leash.report(RankReport(pipeline, tensor, layers, 7, 3, 4, 8, "float32", "p"))
    except LinkError as error:
        print(error, flush=True)
        sys.exit(4)
    whole = np.frombuffer(memory, dtype=np.float32).reshape(slot.shape)
    mine = whole[:, slot.first_layer : slot.first_layer + layers, slot.first_head : slot.first_head + 3]
    mine += 1 + pipeline * 10 + tensor
print("ready", flush=True)
sys.stdin.read()
"""
HOST = """
import json, os, sys
from baton.engine.vllm.link import LinkHost

def allot(whole, fd):
    os.ftruncate(fd, 5 * whole.layers * whole.heads * whole.block_size * whole.width * 4)
    return 5

host = LinkHost(1, lambda news: None, lambda: None)
host.open(allot)
print(json.dumps(host.given), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def spawn() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", code, json.dumps(arguments)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_ranks_write_in_their_slots_is_what_the_host_reads(
    make: Callable[..., Ours], spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    ours = make(4)
    children = [spawn(CHILD, "report", ours.given(), pipeline, tensor, 2) for pipeline in range(2) for tensor in range(2)]
    assert [line(child) for child in children] == ["ready"] * 4
    assert [(whole.layers, whole.heads) for whole in ours.wholes] == [(4, 6)]
    staged = np.frombuffer(ours.memory, dtype=np.float32).reshape(BLOCKS, 4, 6, 4, 8)  # type: ignore[arg-type]
    for pipeline in range(2):
        for tensor in range(2):
            assert (staged[:, 2 * pipeline : 2 * pipeline + 2, 3 * tensor : 3 * tensor + 3] == 1 + 10 * pipeline + tensor).all()
    assert ours.host.pids == {child.pid for child in children} and not ours.host.refusal and not ours.ends
    del staged


def test_what_the_host_writes_is_what_a_rank_reads(tame: list[int], make: Callable[..., Ours]) -> None:
    ours = make(1)
    slot, memory = Leash.of(ours.given(), SOON).report(report())
    assert slot.shape == (BLOCKS, 2, 3, 4, 8) and ours.memory is not None
    ours.memory[8:12] = b"here"
    assert memory[8:12] == b"here" and len(memory) == len(ours.memory)


def test_the_host_keeps_its_map_of_the_memory_and_no_descriptor(
    make: Callable[..., Ours], spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    ours = make(2)
    children = [spawn(CHILD, "report", ours.given(), 0, tensor, 2) for tensor in range(2)]
    assert [line(child) for child in children] == ["ready"] * 2 and ours.memory is not None
    eventually(lambda: ours.descriptors() == 1)
    ours.memory[8:12] = b"here"
    assert ours.memory[8:12] == b"here"


@pytest.mark.parametrize("what", ["hello", "report"])
def test_a_child_whose_host_is_killed_kills_itself(what: str, spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    host = spawn(HOST)
    given = json.loads(line(host))
    child = spawn(CHILD, what, given, 0, 0, 2)
    assert line(child) == "ready" and child.poll() is None
    os.kill(host.pid, signal.SIGKILL)
    assert child.wait(SOON) == -signal.SIGKILL


def files(given: dict[str, Any]) -> tuple[Path, Path]:
    """What vLLM makes for two ranks: a file in the folder, and shared memory that bears its name."""
    folder = Path(given["folder"])
    file = folder / f"vllm_dist_{folder.name}"
    memory = link.SHARED_MEMORY / f"{file.name}-tp:0-[0-1]-cpushm_0"
    file.touch()
    memory.touch()
    return folder, memory


@pytest.mark.parametrize("early", [True, False])
def test_a_killed_host_leaves_no_file_and_no_shared_memory(early: bool, spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    """`early`: it is killed before its child has connected."""
    host = spawn(HOST)
    given = json.loads(line(host))
    folder, memory = files(given)
    if early:
        host.kill()
        host.wait()
    child = spawn(CHILD, "hello", given, 0, 0, 2)
    if not early:
        assert line(child) == "ready" and memory.exists()
        host.kill()
    assert child.wait(SOON)
    assert not folder.exists() and not memory.exists()


def test_a_host_that_closes_leaves_no_file_and_what_is_of_another(make: Callable[..., Ours]) -> None:
    ours, other = make(), make()
    (folder, memory), theirs = files(ours.given()), files(other.given())
    ours.host.close()
    assert not folder.exists() and not memory.exists()
    assert all(each.exists() for each in theirs)


def test_a_folder_that_another_process_clears_meanwhile_is_no_error(make: Callable[..., Ours], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make()
    folder, _ = files(ours.given())
    scandir = os.scandir

    def gone(path: Any) -> Any:
        if path == folder:
            monkeypatch.undo()
            shutil.rmtree(folder)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    link.clear(folder)
    assert os.scandir is scandir, "nobody looked"
    assert not folder.exists()


def test_a_child_kills_itself_whatever_becomes_of_the_folder(
    tame: list[int], make: Callable[..., Ours], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = make()
    Leash.of(ours.given(), SOON).hello()
    eventually(lambda: ours.host.pids)

    def fails(folder: Path) -> None:
        raise PermissionError(str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(link, "clear", fails)
        with pytest.raises(PermissionError):
            ours.host.close()
        eventually(lambda: tame == [signal.SIGKILL])


def test_a_leash_holds_longer_than_a_start_may_take(tame: list[int], make: Callable[..., Ours]) -> None:
    ours = make()
    Leash.of(ours.given(), 0.2).hello()
    time.sleep(0.5)
    assert not tame
    ours.host.close()
    eventually(lambda: tame == [signal.SIGKILL])


def test_a_child_of_a_host_that_closes_kills_itself(make: Callable[..., Ours], spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    ours = make()
    child = spawn(CHILD, "hello", ours.given(), 0, 0, 2)
    assert line(child) == "ready"
    eventually(lambda: ours.news)
    ours.host.close()
    assert child.wait(SOON) == -signal.SIGKILL and ours.ends == 0, "an end that the host wanted is no news"


def test_news_arrive_in_order_however_long_they_are(tame: list[int], make: Callable[..., Ours]) -> None:
    ours = make()
    leash = Leash.of(ours.given(), SOON)
    leash.hello()
    sent = [{"number": i, "text": "x" * (i * 50_000)} for i in range(20)]
    for message in sent:
        leash.send(message)
    eventually(lambda: len(ours.news) == len(sent))
    assert ours.news == sent and ours.host.pids == {os.getpid()}


def test_the_end_of_a_child_is_told_once(make: Callable[..., Ours], spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    ours = make()
    child = spawn(CHILD, "hello", ours.given(), 0, 0, 2)
    assert line(child) == "ready"
    assert ours.ends == 0
    child.kill()
    eventually(lambda: ours.ends)
    ours.host.close()
    assert ours.ends == 1


def test_an_end_that_is_expected_is_no_news(make: Callable[..., Ours], spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    ours = make()
    before = link_threads()
    child = spawn(CHILD, "hello", ours.given(), 0, 0, 2)
    assert line(child) == "ready"
    eventually(lambda: ours.news)
    ours.host.closing()
    child.kill()
    eventually(lambda: link_threads() == before)
    assert ours.ends == 0


def link_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "vllm link"}


def test_the_refusal_of_a_rank_is_heard(make: Callable[..., Ours], spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    ours = make(2)
    assert spawn(CHILD, "refuse", ours.given(), 0, 0, 2).wait(SOON) == 3
    eventually(lambda: ours.host.refusal and ours.ends)
    assert ours.host.refusal == "two groups" and not ours.wholes


def test_the_first_refusal_is_the_one_that_counts(make: Callable[..., Ours]) -> None:
    ours = make(2)
    Leash.of(ours.given(), SOON).refuse("first")
    eventually(lambda: ours.ends == 1)
    Leash.of(ours.given(), SOON).refuse("second")
    eventually(lambda: ours.ends == 2)
    assert ours.host.refusal == "first"


def reports(ours: Ours, *sent: RankReport) -> list[str]:
    """What each rank is told when no memory comes."""

    def one(its: RankReport) -> str:
        with pytest.raises(LinkError) as told:
            Leash.of(ours.given(), 1.0).report(its)
        return str(told.value)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, sent))


def test_ranks_that_disagree_get_no_memory(tame: list[int], make: Callable[..., Ours]) -> None:
    ours = make(2)
    told = reports(ours, report(), report(tensor=1, width=16))
    assert all("no staging memory" in text for text in told) and not ours.wholes
    assert ours.host.refusal in ("width is 8 in one rank and 16 in another", "width is 16 in one rank and 8 in another")


def test_whatever_goes_wrong_no_rank_waits(tame: list[int], make: Callable[..., Ours]) -> None:
    """A type of KV that is not known, say: an error of another kind than those that are foreseen."""
    ours = make(1, refuse="uint9", raises=KeyError)
    with pytest.raises(LinkError, match="the worker gave no staging memory"):  # and not that time has passed
        Leash.of(ours.given(), SOON).report(report())
    assert ours.host.refusal == "KeyError: 'uint9'"


def test_a_rank_does_not_wait_for_one_that_refuses(tame: list[int], make: Callable[..., Ours]) -> None:
    ours = make(2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(Leash.of(ours.given(), SOON).report, report())
        eventually(lambda: ours.host.pids)
        Leash.of(ours.given(), SOON).refuse("two groups")
        with pytest.raises(LinkError, match="the worker gave no staging memory"):
            waits.result(SOON)
    assert ours.host.refusal == "two groups"


def test_fp8_kv_has_a_block_of_a_byte_for_each_number() -> None:
    assert KvLayout("model", "uint8", 16, 2, 4, 8, parts=1).block_bytes == 16 * 2 * 4 * 8


def test_a_refusal_to_give_memory_is_kept(tame: list[int], make: Callable[..., Ours]) -> None:
    ours = make(1, refuse="engine.staging_mib: too little")
    reports(ours, report())
    assert ours.host.refusal == "engine.staging_mib: too little"
    assert ours.descriptors() == 0


def test_a_rank_that_is_gone_when_the_memory_comes_leaves_no_descriptor(tame: list[int], make: Callable[..., Ours]) -> None:
    ours = make(2)
    with ours.dial() as gone:
        gone.sendall(json.dumps({"token": ours.host.token, "report": asdict(report())}).encode() + b"\n")
    eventually(lambda: ours.ends)
    [told] = reports(ours, report(tensor=1))
    assert "no staging memory" in told and ours.descriptors() == 1


def test_no_memory_is_given_before_every_rank_has_reported(tame: list[int], make: Callable[..., Ours]) -> None:
    ours = make(2)
    assert reports(ours, report()) == ["no staging memory came: timed out"]
    assert not ours.wholes


# --- strangers -----------------------------------------------------------------------------------------------------------------------


def heard(stream: socket.socket) -> bytes:
    data, fds, _, _ = socket.recv_fds(stream, 1 << 16, 4)
    assert not fds
    return data


@pytest.mark.parametrize("token", [None, "", "wrong", 7])
def test_a_peer_without_the_token_gets_nothing_and_does_not_stop_the_start(
    tame: list[int], make: Callable[..., Ours], token: object
) -> None:
    ours = make(1)
    messages: list[dict[str, Any]] = [{"report": asdict(report(width=99))}, {"refusal": "mine"}, {"news": 1}]
    for message in messages:
        with ours.dial() as stranger:
            stranger.sendall(json.dumps(message | ({} if token is None else {"token": token})).encode() + b"\n")
            assert heard(stranger) == b""
    with ours.dial():
        pass
    with ours.dial() as silent:
        slot, _ = Leash.of(ours.given(), SOON).report(report())
        assert slot.shape[0] == BLOCKS and ours.wholes == [report()]
        assert not ours.host.refusal and not ours.news and not ours.ends
        silent.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\n", b"\xff\n", b"[]\n", '{"token": "\u00e9"}\n'.encode()])
def test_a_peer_with_another_protocol_gets_nothing_and_does_not_stop_the_start(
    tame: list[int], make: Callable[..., Ours], said: bytes
) -> None:
    ours = make(1)
    with ours.dial() as stranger:
        stranger.sendall(said)
        assert heard(stranger) == b""
    slot, _ = Leash.of(ours.given(), SOON).report(report())
    assert slot.shape[0] == BLOCKS and not ours.host.refusal and not ours.ends


def test_another_user_gets_nothing_even_with_the_token(make: Callable[..., Ours], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make(1)
    me = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: me + 1)
        with ours.dial() as stranger:
            stranger.settimeout(SOON)
            assert heard(stranger) == b""
            assert not ours.host.pids
    with ours.dial() as friend:
        friend.sendall(json.dumps({"token": ours.host.token, "refusal": "x"}).encode() + b"\n")
        eventually(lambda: ours.host.refusal == "x")


def test_a_message_without_an_end_is_not_kept_forever(make: Callable[..., Ours], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LINE", 1 << 16)
    ours = make(1)
    with ours.dial() as stranger, pytest.raises(OSError):
        for _ in range(1000):
            stranger.sendall(b"x" * (1 << 16))
    assert not ours.ends


def test_hosts_have_addresses_and_tokens_of_their_own(make: Callable[..., Ours]) -> None:
    one, other = make(), make()
    assert one.host.address != other.host.address and one.host.token != other.host.token


def test_nobody_connects_to_a_host_that_is_closed(make: Callable[..., Ours]) -> None:
    ours = make()
    ours.host.close()
    with pytest.raises(ConnectionRefusedError):
        Leash.of(ours.given(), SOON)
