"""Compiled kernels are known by what they are made from, and one process at a time compiles them."""

import ast
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from baton.engine.core.progress import Step, told_to
from baton.engine.cpu import kernel_cache
from baton.engine.cpu.apart import APART
from baton.engine.cpu.kernel import KERNELS
from baton.engine.cpu.kernel_cache import GROUPS, MOST_KEYS, OWN, Place, key_of, place_of, root

# Runs each script in a process that has compiled nothing yet, and does not import the libraries again; the last one with a moved cache.
FORKS = """
import os, runpy, sys
import torch
from numba.core import ccallback
from baton.engine.cpu import kernel
kept, moved, *scripts = sys.argv[1:]
for number, script in enumerate(scripts):
    if number == len(scripts) - 1:
        os.rename(kept, moved)
    os.environ["BATON_KERNEL_CACHE"] = moved if os.path.exists(moved) else kept
    child = os.fork()
    if not child:
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, script
"""
DOUBLE = """
import torch
from numba.core import ccallback
from baton.engine.cpu import kernel
hits = []
compile_ = ccallback.CFunc.compile
def counted(self):
    compile_(self)
    hits.append(self.cache_hits)
ccallback.CFunc.compile = counted
@kernel.kernel('n', x=kernel.numbers('n'))
def double(x, n):
    for i in range(n):
        x[i] = x[i] * 2
x = torch.ones(3)
double(x)
assert x.tolist() == [2.0, 2.0, 2.0]
print(*hits)
"""


def test_a_kernel_is_known_by_its_content_not_by_its_path(tmp_path: Path) -> None:
    """Numba alone would compile it again in every checkout, and would not notice a change in the other files that it uses."""
    for name, change in (("one", ""), ("two", ""), ("changed", "# other\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text(DOUBLE + change)

    scripts = [str(tmp_path / folder / "script.py") for folder in ("one", "two", "changed", "one")]
    command = [sys.executable, "-c", FORKS, str(tmp_path / "kept"), str(tmp_path / "moved"), *scripts]
    env = {**os.environ, APART: "1"}  # else all kernels would be compiled for this one
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *hits, moved = done.stdout.split()
    assert hits == ["0", "1", "0"]
    assert moved == "1", "an image copies the folder"


def test_the_key_covers_what_a_kernel_is_compiled_from_and_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, keys = tmp_path / "mine.py", {key_of(OWN)}
    assert key_of(OWN.with_name("panels.py")) in keys, "the files of the folder use each other"
    for content in ("x = 1", "x = 2"):
        mine.write_text(content)
        keys.add(key_of(mine))
    for name, value in (("_sources", lambda: "changed"), ("compiler", lambda: ("0.1", "0.2")), ("FEATURES", {"avx2"})):
        with monkeypatch.context() as changed:
            changed.setattr(kernel_cache, name, value)
            keys.add(key_of(OWN))
    with monkeypatch.context() as changed:
        changed.setattr("numba.config.CPU_NAME", "x86-64-v3")
        keys.add(key_of(OWN))
        asked = "kernels of a family do not depend on the processor that compiles them"
        changed.setattr("llvmlite.binding.get_host_cpu_name", lambda: pytest.fail(asked))
        key_of(OWN)
    assert len(keys) == 7


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("BATON_KERNEL_CACHE", str(tmp_path))
    made = place_of(OWN)
    assert made is not None
    return made


def test_one_process_compiles_and_the_others_wait_for_it(place: Place) -> None:
    steps: list[Step] = []
    told, entered = threading.Event(), threading.Event()

    def listen(step: Step) -> None:
        steps.append(step)
        told.set()

    def other() -> None:
        with told_to(listen), place.alone():
            entered.set()

    with place.alone():
        waiting = threading.Thread(target=other)
        waiting.start()
        assert told.wait(30) and not entered.is_set()
    waiting.join(30)
    assert entered.is_set() and steps == [Step("waiting for another process that compiles kernels")]


def test_nobody_waits_when_everything_is_compiled_nor_for_ever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.alone(), (place.folder / "lock").open() as lock:
        with pytest.raises(BlockingIOError):  # negative control
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        monkeypatch.setattr(kernel_cache, "WITHIN_S", 0.0)
        with place.alone():
            pass
        monkeypatch.undo()
        place.finish()
        with place.alone():
            pass


def test_old_keys_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_KERNEL_CACHE", str(tmp_path))
    for number in range(MOST_KEYS + 2):
        (tmp_path / f"old-{number}").mkdir()
        os.utime(tmp_path / f"old-{number}", (1000 + number, 1000 + number))
    assert place_of(OWN) == place_of(OWN)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([key_of(OWN), *(f"old-{n}" for n in range(3, MOST_KEYS + 2))])


def test_the_place_is_the_users_own_and_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, temporary, nowhere = tmp_path / "home", tmp_path / "tmp", tmp_path / "file"
    nowhere.touch()
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    monkeypatch.delenv("BATON_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert root() == home / "baton" / "kernels"
    (home / "baton").chmod(0o777)
    last = temporary / f"baton-{os.getuid()}" / "kernels"
    assert root() == last, "others could have put code into the first"
    monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere / "cache"))
    assert root() == last
    last.chmod(0o777)
    assert root() is None and place_of(OWN) is None
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "numba"))
    assert root() == tmp_path / "numba"
    monkeypatch.setenv("BATON_KERNEL_CACHE", str(tmp_path / "ours"))
    assert root() == tmp_path / "ours"


LOADED = """
import sys
from baton.engine.cpu import compiled_ops, kernel
print([name for name in sys.modules if name.startswith("baton.engine.cpu.")])
from baton.engine.cpu import experts, groups, kv_int5, kv_int8
print({group: next(numbers) - 1 for group, numbers in kernel._numbers.items()})
"""


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """What a process says that loads the operations of every model, and then all kernels: its modules, and their numbers."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=500, check=True)
    return done.stdout.splitlines()


def test_the_operations_of_every_model_load_no_kernel_that_only_some_need(loaded: list[str]) -> None:
    assert not {f"baton.engine.cpu.{group}" for group in GROUPS} & set(ast.literal_eval(loaded[0]))


HALVES = """
import torch
from baton.engine.cpu import compiled_ops, kernel
print(sum(torch.bfloat16 in codes for each in kernel._halved.values() for codes in each))
kernel.prepare(torch.bfloat16)
from baton.engine.cpu import experts
print(all(torch.bfloat16 in codes for each in kernel._halved.values() for codes in each), len(kernel._halved["experts"]))
"""


def test_kernels_of_bfloat16_are_loaded_with_the_first_model_that_needs_them_and_then_with_those_of_float32() -> None:
    done = subprocess.run([sys.executable, "-c", HALVES], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.split()[:2] == ["0", "True"] and int(done.stdout.split()[2]) > 0


def test_the_number_of_kernels_is_known_before_they_are_compiled(loaded: list[str]) -> None:
    assert ast.literal_eval(loaded[1]) == KERNELS
