"""The processors and the memory that a process may use, under control groups of both versions."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.engine import machine
from baton.engine.machine import available_memory, quota_cores, usable_cores

MIB = 1 << 20
Groups = Callable[[str, dict[str, str]], None]


def test_available_memory_respects_an_address_space_limit() -> None:
    """The limit is the one that `ulimit -v` sets; address space that the process already uses is not available."""
    code = "import resource; from baton.engine.machine import available_memory as a; whole = a(); space = 4 << 30;"
    code += "resource.setrlimit(resource.RLIMIT_AS, (space, space)); left = a(); print(left); assert left < min(whole, space)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and 0 < int(done.stdout) < 4 << 30, done.stderr


def test_available_memory_is_plausible() -> None:
    assert 32 * MIB < available_memory() < 1 << 50


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Makes a tree of control groups: the process's membership, and files by their path in the tree."""
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)

    def make(membership: str, files: dict[str, str]) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


V1 = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/pod/worker\n", {"pod/worker/cpu.max": "max 100000", "pod/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
        (V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "400000", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "50000"}, 8),  # the group's folder is mounted as the root's
        (V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_a_cpu_quota_limits_the_cores(groups: Groups, membership: str, files: dict[str, str], cores: int | None) -> None:
    groups(membership, files)
    assert quota_cores() == cores and usable_cores() == (cores or 16)


def test_a_quota_above_the_cores_changes_nothing(groups: Groups) -> None:
    groups("0::/\n", {"cpu.max": "6400000 100000"})
    assert usable_cores() == 16


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/\n", {"memory.max": str(64 * MIB), "memory.current": str(44 * MIB), "memory.stat": f"anon 1\ninactive_file {4 * MIB}"}),
        ("0::/a/b\n", {"a/memory.max": str(64 * MIB), "a/memory.current": str(40 * MIB), "a/b/memory.max": "max"}),
        (
            V1,
            {
                "memory/docker/abc/memory.limit_in_bytes": str(64 * MIB),
                "memory/docker/abc/memory.usage_in_bytes": str(50 * MIB),
                "memory/docker/abc/memory.stat": f"total_inactive_file {10 * MIB}",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "0",
            },
        ),
        (V1, {"memory/memory.limit_in_bytes": str(24 * MIB), "memory/memory.usage_in_bytes": "0"}),
    ],
)
def test_a_memory_limit_counts_without_files_that_can_be_dropped(groups: Groups, membership: str, files: dict[str, str]) -> None:
    groups(membership, files)
    assert available_memory() == 24 * MIB


def test_a_group_that_is_full_leaves_nothing(groups: Groups) -> None:
    groups("0::/\n", {"memory.max": str(64 * MIB), "memory.current": str(65 * MIB)})
    assert available_memory() == 0


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A group of this machine whose memory limit can be set, of either version."""
    roots = [root for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if (root / "cgroup.procs").exists()]
    folder = roots[0] / f"baton-test-{os.getpid()}" if roots else None
    try:
        if folder is None:
            raise OSError("there are no control groups")
        folder.mkdir()
        limit = next(folder / name for name in ("memory.limit_in_bytes", "memory.max") if (folder / name).exists())
        limit.write_text(str(1 << 30))
    except (OSError, StopIteration) as error:
        if folder is not None:
            with suppress(OSError):
                folder.rmdir()
        pytest.skip(f"this user cannot make a control group with a memory limit: {error!r}")
    yield folder
    folder.rmdir()


def test_a_process_in_a_real_group_sees_its_limit(real_group: Path) -> None:
    code = "import os, pathlib, sys; pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()));"
    code += "from baton.engine.machine import available_memory as a; print(a())"
    done = subprocess.run([sys.executable, "-c", code, str(real_group)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and (1 << 30) - 256 * MIB < int(done.stdout) <= 1 << 30, done.stderr
