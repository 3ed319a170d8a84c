"""A folder on a disk as a store: what is left after a death, and every way in which a disk or a folder can be wrong."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_benches import CAPACITY, KIND, UNIT, content, flip, get, held, key, put, unit

from baton.tiers import disk_files, disk_folder, disk_store
from baton.tiers.disk_files import Files, Rates, measure, prefers_direct
from baton.tiers.disk_folder import HEADER, LOG, Folder, padded, units_name
from baton.tiers.disk_log import PUT, RECORD, Log
from baton.tiers.disk_store import DiskStore
from baton.tiers.slots import SlotEntry
from baton.tiers.store import StoreFailed

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0
ALL = range(40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def opened(folder: Path, capacity: int = CAPACITY, **more: Any) -> DiskStore:
    return DiskStore(folder, KIND, capacity, **more)


def dead(store: DiskStore, to: Path) -> Path:
    """What another process finds if this one ends now: everything that the system was given."""
    return Path(shutil.copytree(store.path, to))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What is left


def test_what_was_put_is_there_after_the_end_and_in_the_order_of_its_use(folder: Path) -> None:
    store = opened(folder)
    put(store, *range(5))
    get(store, 1)
    store.close()
    again = opened(folder)
    assert again.keys() == [key(n) for n in (0, 2, 3, 4, 1)]
    assert put(again, *range(5, CAPACITY + 2)) == [key(0), key(2)] and all(get(again, 1, 3, 4))
    again.close()


KILLED = """
import sys; from pathlib import Path
from store_benches import KIND, put
from baton.tiers.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), KIND, 12, patience_s=1000.0)
for n in range(0, 1000000, 3):
    put(store, n, n + 1, n + 2)
    print(n + 2, flush=True)
"""


def child(code: str, *args: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    command = [*before, sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("rounds", [5, 12])
def test_after_kill_9_everything_that_a_put_returned_is_there(
    folder: Path, rounds: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also that the folder is free again, although nobody gave it back. A disk may take as long as it likes: a store that could not be
    opened in time would be empty."""
    monkeypatch.setattr(disk_store, "OPENING_S", WITHIN_S)
    process = child(KILLED, folder)
    assert process.stdout is not None and process.stderr is not None
    lines = [process.stdout.readline() for _ in range(rounds)]
    os.kill(process.pid, signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait(WITHIN_S)
    said = process.stderr.read()
    process.stderr.close()
    assert all(lines[:rounds]), f"it died before: {said}"
    last = [int(line) for line in lines if line.endswith("\n")][-1]
    store = opened(folder, patience_s=WITHIN_S)
    assert store._session is not None, caplog.text
    there = [int.from_bytes(each, "little") for each in list(store.keys())]
    good = {n for n, whole in zip(there, get(store, *there), strict=True) if whole}
    assert good >= set(range(max(0, last + 1 - CAPACITY + 6), last + 1)), "two puts may have been under way: one had not said so yet"
    store.close()


def test_a_log_that_is_cut_anywhere_is_a_shorter_log(folder: Path, tmp_path: Path) -> None:
    store = opened(folder)
    put(store, 0, 1, 2)
    store.drop([key(1)])
    put(store, 3)
    store.close()
    shutil.rmtree(folder)
    store = opened(folder)
    for n in range(3):
        put(store, n)
    whole = (folder / LOG).read_bytes()
    for length in range(0, len(whole) + 1, 11):
        copy = dead(store, tmp_path / str(length))
        os.truncate(copy / LOG, length)
        again = opened(copy)
        assert again.keys() == [key(n) for n in range(length // RECORD.size)]
        put(again, 9)
        third = opened(dead(again, tmp_path / f"{length} again"))
        again.close()
        assert held(third, ALL) == [*range(length // RECORD.size), 9] and all(get(third, *held(third, ALL)))
        third.close()
    store.close()


def test_a_flipped_bit_in_the_log_costs_one_unit(folder: Path, tmp_path: Path) -> None:
    store = opened(folder)
    put(store, 0, 1, 2)
    for place in range(RECORD.size, 2 * RECORD.size, 5):
        copy = dead(store, tmp_path / str(place))
        data = bytearray((copy / LOG).read_bytes())
        data[place] ^= 8
        (copy / LOG).write_bytes(data)
        again = opened(copy)
        assert held(again, ALL) == [0, 2] and get(again, 0, 1, 2) == [True, False, True]
        again.close()
    store.close()


def test_a_dropped_unit_stays_dropped(folder: Path, tmp_path: Path) -> None:
    store = opened(folder)
    put(store, 0, 1)
    store.drop([key(0)])
    again = opened(dead(store, tmp_path / "dead"))
    assert again.keys() == [key(1)]
    again.close()
    store.close()


def test_a_damaged_unit_stays_dropped(folder: Path, tmp_path: Path) -> None:
    store = opened(folder)
    put(store, 0, 1)
    flip(folder, 0)
    assert get(store, 0) == [False]
    again = opened(dead(store, tmp_path / "dead"))
    assert again.keys() == [key(1)]
    again.close()
    store.close()


def test_the_log_stays_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.tiers.disk_log.SPARE", 20)
    store = opened(folder)
    for n in range(200):
        put(store, n)
        assert (folder / LOG).stat().st_size <= (2 * CAPACITY + 21) * RECORD.size
    assert all(get(store, *range(200 - CAPACITY, 200)))
    store.close()


def test_a_log_without_rewriting_grows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(Log, "too_long", lambda self, held: False)
    store = opened(folder)
    for n in range(100):
        put(store, n)
    assert (folder / LOG).stat().st_size == 100 * RECORD.size
    store.close()


def test_a_thousand_units_are_found_again_in_a_50th_of_a_second_of_the_processor(folder: Path) -> None:
    """So 100,000 in 2 s."""
    count = 4000
    folder.mkdir()
    slots = [SlotEntry(key(n), bytes(16), n) for n in range(count)]
    opened(folder, count).close()
    journal = Log(folder / LOG)
    journal.append(PUT, slots)
    journal.close()
    with open(folder / units_name(0), "ab") as file:
        file.truncate(count * padded(UNIT))
    began = time.process_time()
    store = opened(folder, count)
    took = time.process_time() - began
    assert len(store.keys()) == count and took <= 0.02 * count / 1000 + 0.1, took
    store.close()


# Units that are not what the log says


def test_units_that_changed_places_are_found(folder: Path) -> None:
    store = opened(folder)
    put(store, 0, 1, 2)
    store.close()
    size, path = padded(UNIT), folder / units_name(0)
    data = path.read_bytes()
    path.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])
    store = opened(folder)
    assert get(store, 0, 1, 2) == [False, False, True] and held(store, ALL) == [2]
    store.close()


def test_a_file_of_another_folder_is_found(folder: Path, tmp_path: Path) -> None:
    for path, start in ((folder, 0), (tmp_path / "other", 10)):
        store = opened(path)
        put(store, start, start + 1)
        store.close()
    shutil.copy(tmp_path / "other" / units_name(0), folder)
    store = opened(folder)
    assert get(store, 0, 1, 10) == [False] * 3
    store.close()


@pytest.mark.parametrize("left", [0, 3 * padded(UNIT) + 100])
def test_a_file_that_was_lost_or_cut_is_found_at_the_opening(folder: Path, left: int) -> None:
    store = opened(folder)
    put(store, *range(6))
    store.close()
    if left:
        os.truncate(folder / units_name(0), left)
    else:
        (folder / units_name(0)).unlink()
    store = opened(folder)
    assert held(store, ALL) == list(range(left // padded(UNIT))) and get(store, *range(6)) == [n < 3 and left > 0 for n in range(6)]
    assert put(store, *range(6)) == [] and all(get(store, *range(6)))
    store.close()


def test_a_file_that_is_cut_while_it_is_open_is_found(folder: Path) -> None:
    store = opened(folder)
    put(store, *range(6))
    os.truncate(folder / units_name(0), 3 * padded(UNIT) + 100)
    assert get(store, *range(6)) == [True] * 3 + [False] * 3
    store.close()


# Refused by name, and nothing altered


def _foreign(folder: Path) -> None:
    (folder / "thesis.tex").write_text("years of work")


def _another_model(folder: Path) -> None:
    DiskStore(folder, replace(KIND, fingerprint=bytes(16)), CAPACITY).close()


def _other_size(folder: Path) -> None:
    DiskStore(folder, replace(KIND, unit_bytes=2 * UNIT), CAPACITY).close()


def _encrypted(folder: Path) -> None:
    DiskStore(folder, replace(KIND, seal="0123456789abcdef"), CAPACITY).close()


def _damaged(folder: Path) -> None:
    opened(folder).close()
    (folder / HEADER).write_text("{")


def _newer(folder: Path) -> None:
    opened(folder).close()
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps({**header, "format": "baton-kv-2"}))


def _no_slots(folder: Path) -> None:
    opened(folder).close()
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps({**header, "slots_per_file": 0}))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_foreign, "not a folder of Baton's KV: it holds 'thesis.tex'"),
        (_another_model, f"another model or layout: fingerprint {bytes(16).hex()} there"),
        (_other_size, "unit_bytes 10000 there, 5000 here"),
        (_encrypted, "encrypted with the key 0123456789abcdef, and the store not encrypted"),
        (_damaged, "damaged, or not Baton's"),
        (_newer, "format 'baton-kv-2'"),
        (_no_slots, "0 a file"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused_and_stays_as_it_is(folder: Path, make: Callable[[Path], None], said: str) -> None:
    folder.mkdir()
    make(folder)
    before = files(folder)
    with pytest.raises(ValueError, match=said) as refused:
        opened(folder)
    assert str(folder) in str(refused.value)
    after = files(folder)
    for each in (before, after):
        each.pop("lock", None)
    assert before == after


def test_a_file_is_no_folder(folder: Path) -> None:
    folder.write_text("mine")
    for path in (folder, folder / "below"):
        with pytest.raises(ValueError, match=f"{folder} is not a folder"):
            opened(path)
    assert folder.read_text() == "mine"


@pytest.mark.parametrize("capacity", [0, -3])
def test_no_room_is_refused(folder: Path, capacity: int) -> None:
    with pytest.raises(ValueError, match="no room for a unit"):
        opened(folder, capacity)


def test_a_tier_larger_than_its_disk_is_refused_before_anything_is_made(folder: Path) -> None:
    disk = os.statvfs(folder.parent)
    with pytest.raises(ValueError, match="more than its disk has free"):
        opened(folder, disk.f_bavail * disk.f_frsize // padded(UNIT) + 1000_000)
    assert not folder.exists()
    store = opened(folder)
    put(store, 1)
    store.close()
    with pytest.raises(ValueError, match="more than its disk has"):
        opened(folder, disk.f_blocks * disk.f_frsize // padded(UNIT) + 1)
    store = opened(folder)
    assert get(store, 1) == [True]
    store.close()


def test_a_second_worker_is_refused_by_name_until_the_first_has_gone(folder: Path) -> None:
    store = opened(folder)
    put(store, 1)
    with pytest.raises(ValueError, match=rf"{folder} is used by process {os.getpid()}: each worker needs a folder of its own"):
        opened(folder)
    assert get(store, 1) == [True]
    store.close()
    again = opened(folder)
    assert get(again, 1) == [True]
    again.close()


# A disk that refuses


def test_a_folder_that_vanishes_fails_at_once_and_comes_back_with_its_units(folder: Path, tmp_path: Path) -> None:
    store = opened(folder)
    put(store, 1, 2)
    folder.rename(tmp_path / "away")
    folder.parent.joinpath("kv").write_text("in its place")
    for call in (lambda: put(store, 3), lambda: get(store, 1), lambda: put(store, 3)):
        with pytest.raises(StoreFailed, match=str(folder)):
            call()
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert put(store, 3) == [] and get(store, 1, 2, 3) == [True] * 3
    store.close()


def test_another_folder_in_its_place_is_not_taken_for_it(folder: Path, tmp_path: Path) -> None:
    other = opened(tmp_path / "other")
    put(other, 7)
    other.close()
    store = opened(folder)
    put(store, 1)
    folder.rename(tmp_path / "away")
    (tmp_path / "other").rename(folder)
    with pytest.raises(StoreFailed, match=rf"{folder}: another folder is in its place"):
        put(store, 2)
    assert get(store, 1, 7) == [False, True] and store.keys() == [key(7)]
    store.close()


def test_a_folder_that_was_deleted_is_made_anew(folder: Path) -> None:
    store = opened(folder)
    put(store, 1, 2)
    shutil.rmtree(folder)
    with pytest.raises(StoreFailed, match=r"kv.*No such file"):
        put(store, 3)
    assert put(store, 3) == [] and get(store, 1, 3) == [False, True] and store.keys() == [key(3)]
    store.close()


def test_without_the_check_units_go_where_nobody_finds_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the files are open, so the system takes what is written into a deleted folder."""
    monkeypatch.setattr(Folder, "check", lambda self: None)
    store = opened(folder)
    put(store, 1)
    shutil.rmtree(folder)
    assert put(store, 2) == [] and not folder.exists()
    store.close()


def test_another_disk_in_its_place_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is no longer mounted leaves an empty folder of the one below."""
    store = opened(folder)
    assert store._device is not None
    store._device += 1
    shutil.rmtree(folder)
    for _ in range(2):
        with pytest.raises(StoreFailed):
            put(store, 1)
    assert not folder.exists()
    with pytest.raises(StoreFailed, match="another disk is in its place"):
        put(store, 1)
    store.close()


IN_A_SMALL_DISK = """
import subprocess, sys; from pathlib import Path
from store_benches import KIND, get, key, put
from baton.tiers import disk_folder; from baton.tiers.disk_store import DiskStore; from baton.tiers.store import StoreFailed
mount = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], check=True)
def refused(call):
    try: call()
    except StoreFailed as error: return str(error)
    raise SystemExit("not refused")
"""
FULL = """
disk_folder.FILE_BYTES = 8 << 13
store = DiskStore(mount / "kv", KIND, 100)
put(store, *range(8))
filler = mount / "filler"
with open(filler, "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)): pass
    except OSError: pass
said = refused(lambda: put(store, 9))
assert str(mount / "kv") in said and "No space left" in said, said
assert all(get(store, *range(8))), "what is held can be read"
assert "No space left" in refused(lambda: put(store, 9))
filler.unlink()
assert put(store, 9) == [] and all(get(store, *range(8), 9))
"""
READ_ONLY = """
subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
store = DiskStore(mount / "kv", KIND, 12)
for call in (lambda: put(store, 1), lambda: get(store, 1)):
    said = refused(call)
    assert str(mount / "kv") in said and "Read-only" in said, said
subprocess.run(["mount", "-o", "remount,rw", mount], check=True)
assert put(store, 1) == [] and get(store, 1) == [True]
"""
UNMOUNTED = """
store = DiskStore(mount / "kv", KIND, 12)
put(store, 1)
subprocess.run(["umount", "--lazy", mount], check=True)
said = refused(lambda: put(store, 2))
assert "another disk is in its place" in refused(lambda: put(store, 2)) and not (mount / "kv").exists()
"""


@pytest.mark.parametrize("what", [FULL, READ_ONLY, UNMOUNTED], ids=["full", "read-only", "unmounted"])
def test_a_real_disk_refuses_and_comes_back(tmp_path: Path, what: str) -> None:
    apart = ("unshare", "--user", "--map-root-user", "--mount")
    if subprocess.run([*apart, "true"], capture_output=True, timeout=WITHIN_S).returncode:
        pytest.skip("this system lets nobody mount a disk of his own")
    process = child(IN_A_SMALL_DISK + what, tmp_path, before=apart)
    _, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, said


@pytest.mark.parametrize("method", ["write", "read"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_whatever_the_system_says_is_said_and_the_next_call_tries_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    store = opened(folder)
    put(store, 1)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, pytest.raises(StoreFailed, match=f"{folder}: {os.strerror(number)}"):
        patch.setattr(Files, method, fail)
        put(store, 2) if method == "write" else get(store, 1)
    broken = method == "read" and number == errno.EIO
    assert get(store, 1, 2) == [not broken, False], "a unit on a bad sector is not asked for again"
    assert put(store, 2) == [] and get(store, 2) == [True]
    store.close()


def test_a_drop_that_cannot_be_written_is_written_when_the_disk_is_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(folder)
    put(store, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", _no_space)
        store.drop([key(1)])
        with pytest.raises(StoreFailed, match="no space"):
            get(store, 2)
    assert get(store, 1) == [False] and store.keys() == [key(2)]
    again = opened(dead(store, tmp_path / "dead"))
    assert again.keys() == [key(2)]
    again.close()
    store.close()


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space")


class Hanging:
    """`Files.read` that does not return before it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.may = threading.Event(), threading.Event()
        real = Files.read

        def read(files: Files, *args: Any) -> list[bool]:
            self.entered.set()
            assert self.may.wait(WITHIN_S)
            return real(files, *args)

        monkeypatch.setattr(Files, "read", read)


def test_a_disk_that_does_not_answer_fails_at_once_for_all_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    store = opened(folder, patience_s=2.0, clock=lambda: now[0])
    put(store, 1, 2)
    hanging = Hanging(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(get, store, 1)
        assert hanging.entered.wait(WITHIN_S)
        assert put(store, 3) == [], "it may still answer in time"
        now[0] = 2.5
        with pytest.raises(StoreFailed, match=rf"{folder}: the disk has not answered for 2.5 s"):
            put(store, 4)
        store.drop([key(2)])  # does not wait, either
        hanging.may.set()
        with pytest.raises(StoreFailed, match=r"a call took 2\.5 s"):
            read.result(WITHIN_S)
    assert put(store, 4) == [] and get(store, 1, 2, 3, 4) == [True, False, True, True]
    store.close()


def test_a_disk_that_hangs_at_the_opening_does_not_hang_its_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may, real = threading.Event(), Folder.__init__

    def hang(self: Folder, *args: Any) -> None:
        assert may.wait(WITHIN_S)
        real(self, *args)

    monkeypatch.setattr(Folder, "__init__", hang)
    monkeypatch.setattr(disk_store, "OPENING_S", 0.05)
    store = opened(folder)
    for call in (lambda: put(store, 1), lambda: get(store, 1)):
        with pytest.raises(StoreFailed, match=f"{folder}: it is being opened"):
            call()
    may.set()
    monkeypatch.setattr(disk_store, "OPENING_S", WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    while store._opening.locked() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert put(store, 1) == [] and get(store, 1) == [True]
    store.close()


def test_a_store_that_is_closed_before_it_is_open_gives_the_folder_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may, real = threading.Event(), Folder.__init__

    def hang(self: Folder, *args: Any) -> None:
        assert may.wait(WITHIN_S)
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "__init__", hang)
        patch.setattr(disk_store, "OPENING_S", 0.05)
        store = opened(folder)
        store.close()
        may.set()
        deadline = time.monotonic() + WITHIN_S
        while store._opening.locked() and time.monotonic() < deadline:
            time.sleep(0.002)
    again = opened(folder)
    assert put(again, 1) == []
    again.close()


def test_a_slow_write_fails_and_nothing_of_it_is_held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, real = [0.0], Files.write
    store = opened(folder, clock=lambda: now[0])

    def slow(files: Files, *args: Any) -> None:
        real(files, *args)
        now[0] += disk_store.PATIENCE_S + 1

    with monkeypatch.context() as patch, pytest.raises(StoreFailed, match=rf"{folder}: the disk is slow: a call took 6.0 s"):
        patch.setattr(Files, "write", slow)
        put(store, 1)
    assert store.keys() == [] and put(store, *range(CAPACITY)) == [], "its room is free again"
    store.close()


def test_a_session_that_failed_is_closed_when_its_last_call_returns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's number that is given back while a call uses it may be another file's by then."""
    store = opened(folder)
    put(store, 1)
    before = set(os.listdir("/proc/self/fd"))
    hanging = Hanging(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(get, store, 1)
        assert hanging.entered.wait(WITHIN_S)
        monkeypatch.setattr(Files, "write", _no_space)
        with pytest.raises(StoreFailed, match="no space"):
            put(store, 2)
        assert before <= set(os.listdir("/proc/self/fd"))
        with pytest.raises(StoreFailed, match=f"used by process {os.getpid()}"):
            put(store, 2)  # the folder is still locked
        hanging.may.set()
        assert read.result(WITHIN_S) == [True]
    monkeypatch.undo()
    assert put(store, 2) == [] and get(store, 1, 2) == [True, True]
    store.close()
    assert len(os.listdir("/proc/self/fd")) < len(before)


def test_a_disk_that_fails_now_and_then_under_many_threads_loses_no_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, rng = Files.write, random.Random(0)

    def write(files: Files, *args: Any) -> None:
        if rng.random() < 0.2:
            _no_space()
        real(files, *args)

    monkeypatch.setattr(Files, "write", write)
    store = opened(folder)

    def work(seed: int) -> int:
        rng, failed = random.Random(seed), 0
        for _ in range(30):
            numbers = rng.sample(ALL, 3)
            try:
                put(store, *numbers) if rng.random() < 0.5 else get(store, *numbers)
            except StoreFailed:
                failed += 1
        return failed

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0
    monkeypatch.undo()
    put(store, *range(100, 100 + CAPACITY))
    entries = store._slots.entries()
    assert len({entry.slot for entry in entries}) == len(entries) == CAPACITY and all(get(store, *range(100, 100 + CAPACITY)))
    store.close()


# The files


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk_folder, "FILE_BYTES", 5 * padded(UNIT))
    yield


@pytest.mark.usefixtures("small_files")
def test_a_store_grows_and_shrinks_with_its_configuration(folder: Path) -> None:
    def sizes() -> list[int]:
        return [path.stat().st_size // padded(UNIT) for path in sorted(folder.glob("units-*"))]

    store = opened(folder, 12)
    put(store, *range(12))
    assert sizes() == [5, 5, 2]
    store.close()
    store = opened(folder, 16)
    put(store, *range(12, 16))
    assert sizes() == [5, 5, 5, 1] and all(get(store, *range(16)))
    store.close()
    store = opened(folder, 7)
    assert sizes() == [5, 2] and held(store, ALL) == list(range(7)) and all(get(store, *range(7)))
    store.close()
    store = opened(folder, 16)
    assert held(store, ALL) == list(range(7)) and put(store, *range(7, 16)) == [] and all(get(store, *range(16)))
    store.close()


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("piece", [1, 2, 3, 100])
@pytest.mark.parametrize("direct", [True, False])
def test_slots_of_any_order_are_read_from_the_files_they_are_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, piece: int, direct: bool
) -> None:
    monkeypatch.setattr(disk_files, "PIECE_BYTES", piece * padded(UNIT))
    monkeypatch.setattr(disk_store, "measure", lambda *_: Rates(float(direct), 0.5))
    store = opened(folder, 23)
    assert store.way == ("direct" if direct else "buffered")
    order = random.Random(1).sample(range(23), 23)
    assert put(store, *order) == [] and all(get(store, *reversed(order))) and all(get(store, *range(23)))
    store.close()


def test_the_way_of_reading_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = measure(tmp_path, 8192)
    assert rates is not None and rates.buffered > 0 and os.listdir(tmp_path) == []
    real = os.open

    def without_direct(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", without_direct)
    rates = measure(tmp_path, 8192)
    assert rates is not None and rates.direct == 0 and not prefers_direct(rates)
    monkeypatch.setattr(os, "pwrite", _no_space)
    assert measure(tmp_path, 8192) is None and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("rates", "direct"), [(Rates(5, 4), True), (Rates(5, 6), True), (Rates(5, 7), False), (Rates(0, 1), False), (None, False)]
)
def test_buffered_must_be_clearly_faster(rates: Rates | None, direct: bool) -> None:
    assert prefers_direct(rates) == direct


def test_a_unit_has_no_other_units_bytes_behind_it(folder: Path) -> None:
    store = opened(folder)
    put(store, 1)
    store.drop([key(1)])
    store.put([unit(2)])
    store.close()
    data = (folder / units_name(0)).read_bytes()
    assert data[:UNIT] == content(2) and not any(data[UNIT : padded(UNIT)])
