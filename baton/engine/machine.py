"""The processors and the memory that this process may use: the machine's, within the limits of its control groups and of `ulimit -v`.

A container's limits are those of control groups, version 1 or 2 (kernel documentation, cgroup-v1/ and cgroup-v2.rst). A limit of a parent
group holds, too. Inside a container the group's own folder may be mounted where the root group's would be; then its path does not exist
there, and only the root counts.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNKNOWN = 1 << 40


def usable_cores() -> int:
    """A quota of 2.5 processors counts as 2: a third compute thread would make the other two wait for it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, quota_cores() or cores)


def quota_cores() -> int | None:
    """The processors that the tightest quota allows, at least 1; None if there is no quota. Libraries that count cores do not see it."""
    return min((max(1, int(quota)) for quota in _cpu_quotas()), default=None)


def available_memory() -> int:
    """Bytes that this process can still allocate."""
    free = UNKNOWN
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    free = min([free, *_memory_left()])
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        pages = _first(Path("/proc/self/statm"), "0").split()[0]
        free = min(free, max(0, space - int(pages) * resource.getpagesize()))
    return free if free < UNKNOWN else 4 << 30  # if the system does not say, assume little


def _cpu_quotas() -> Iterator[float]:
    """Processors, for each group that has a limit."""
    for folder in _folders("cpu"):
        quota, _, period = _first(folder / "cpu.max", "max").partition(" ")
        if quota == "max":
            quota, period = _first(folder / "cpu.cfs_quota_us", "-1"), _first(folder / "cpu.cfs_period_us", "0")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _memory_left() -> Iterator[int]:
    """Bytes, for each group that has a limit. Files that were read once count as used, but the kernel drops them first."""
    for folder in _folders("memory"):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _first(folder / limit, "max"), _first(folder / used, "0")
            if most.isdigit() and now.isdigit():
                stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
                yield max(0, int(most) - max(0, int(now) - int(stat.get(cached, 0))))


def _folders(controller: str) -> Iterator[Path]:
    """The folders of our group and of its parents, under either version."""
    for line in _lines(MEMBERSHIP):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots = [GROUPS, GROUPS / "unified"]
        elif controller in controllers.split(","):
            roots = [GROUPS / controllers, GROUPS / controller]
        else:
            continue
        own = Path(path.lstrip("/"))
        for root in roots:
            yield from {root / group: None for group in (own, *own.parents) if (root / group).is_dir()}


def _first(path: Path, default: str) -> str:
    return next(iter(_lines(path)), default).strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
