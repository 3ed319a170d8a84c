"""What was measured: runs of one or more arms at several rates and seeds, with all raw records. One folder holds a whole campaign.

    campaign.json     arms, SLO, window, the machine and the versions, and one entry for each run
    records/*.jsonl   the requests of each run

Everything that a report shows is computed from these files, so a report can be redrawn, even differently, years later.
"""

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from loadtest import record as raw
from loadtest.record import Record
from loadtest.slo import Slo
from loadtest.summary import Summary, summarise
from loadtest.window import Window

FILE = "campaign.json"
VERSION = 2
PACKAGES = ("torch", "nixl-cu13", "grpcio", "ray", "redis", "numpy")


class CampaignError(ValueError):
    """The folder does not hold a campaign; the text says which file is wrong and why."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to use the same hardware. Arms differ only in the configuration keys of `topology`."""

    name: str
    topology: Mapping[str, str]
    explained: str = ""

    def joined(self, other: "Arm") -> "Arm":
        """Joins the same arm at two values of a varied key: `a | b` where they differ."""
        before = {key: other.topology.get(key, value) for key, value in self.topology.items()}
        both = {key: value if before[key] == value else f"{before[key]} | {value}" for key, value in self.topology.items()}
        return Arm(self.name, both, self.explained if self.explained == other.explained else f"{other.explained} | {self.explained}")


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of one arm at one rate with one seed."""

    arm: str
    rate: float  # requests/s offered
    seed: int
    records: tuple[Record, ...]
    due: int  # requests that became due; each must have a record
    duration_s: float
    why: str = "sweep"  # or "bisection"
    variant: str = ""  # the point of a varied parameter, such as "input=800"
    partial: str = ""  # why it ended early


@dataclass(frozen=True, slots=True)
class Campaign:
    title: str
    slo: Slo
    warm_up_s: float
    cool_down_s: float
    arms: tuple[Arm, ...]
    probes: tuple[Probe, ...]  # in the order in which they ran
    workload: Mapping[str, Any]  # as requested
    config: Mapping[str, Any] = field(default_factory=dict)  # of the clusters, without the arms' topology
    machine: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)  # trace lines left out under --lenient, by reason
    partial: str = ""  # why the campaign ended early
    proposed: Mapping[str, Any] = field(default_factory=dict)  # objectives and rates that nobody gave, and what they come from

    def window(self, probe: Probe) -> Window:
        return Window(probe.duration_s, self.warm_up_s, self.cool_down_s)

    def summary(self, probe: Probe) -> Summary:
        return summarise(probe.records, self.window(probe), self.slo, due=probe.due)

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        (folder / "records").mkdir(parents=True, exist_ok=True)
        entries = []
        for number, probe in enumerate(self.probes):
            name = f"records/{number:04d}.jsonl"
            raw.write(folder / name, probe.records)
            entries.append({**{k: getattr(probe, k) for k in _PROBE_FIELDS}, "records": name})
        content = {
            "version": VERSION,
            "title": self.title,
            "slo": asdict(self.slo),
            "warm_up_s": self.warm_up_s,
            "cool_down_s": self.cool_down_s,
            "arms": [asdict(arm) for arm in self.arms],
            "probes": entries,
            "workload": dict(self.workload),
            "config": dict(self.config),
            "machine": dict(self.machine),
            "skipped": dict(self.skipped),
            "partial": self.partial,
            "proposed": dict(self.proposed),
        }
        (folder / FILE).write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Campaign":
        """Raises CampaignError, RecordError."""
        file = folder / FILE
        try:
            content = json.loads(file.read_text())
            if content["version"] != VERSION:
                raise CampaignError(f"{file}: version {content['version']!r} is not {VERSION}")
            campaign = cls(
                title=content["title"],
                slo=Slo(**content["slo"]),
                warm_up_s=content["warm_up_s"],
                cool_down_s=content["cool_down_s"],
                arms=tuple(Arm(**arm) for arm in content["arms"]),
                probes=tuple(_probes(folder, content["probes"])),
                workload=content["workload"],
                config=content["config"],
                machine=content["machine"],
                skipped=content["skipped"],
                partial=content["partial"],
                proposed=content.get("proposed", {}),  # campaigns from before there were any
            )
            if strangers := {probe.arm for probe in campaign.probes} - {arm.name for arm in campaign.arms}:
                raise CampaignError(f"{file}: has runs of arms that it does not name: {', '.join(sorted(strangers))}")
            return campaign
        except OSError as error:
            raise CampaignError(f"{file}: {error.strerror or error}") from None
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise CampaignError(f"{file}: is not a campaign: {type(error).__name__} {error}") from None


SAME = ("slo", "warm_up_s", "cool_down_s", "config")
OWN = ("load_before", "when")  # entries of `machine` that may differ between the parts of a campaign


def merge(campaigns: Sequence[Campaign]) -> Campaign:
    """Joins parts of one campaign that were measured separately (other seeds, rates or arms, or longer runs).

    Raises CampaignError for campaigns that do not belong together, or that repeat a run.
    """
    first, *others = campaigns
    arms = {arm.name: arm for arm in first.arms}
    for other in others:
        different = [name for name in SAME if getattr(other, name) != getattr(first, name)]
        different += ["workload"] if _offered(other.workload) != _offered(first.workload) else []
        different += ["machine"] if _lasting(other.machine) != _lasting(first.machine) else []
        different += [f"arm {arm.name}" for arm in other.arms if arms.setdefault(arm.name, arm) != arm]
        if different:
            raise CampaignError(f"these are not parts of one campaign: they differ in {', '.join(different)}")
    ran = Counter(run for campaign in campaigns for run in {(each.variant, each.arm, each.rate, each.seed) for each in campaign.probes})
    if twice := sorted(run for run, parts in ran.items() if parts > 1):
        _, arm, rate, seed = twice[0]
        raise CampaignError(f"two parts have runs of {arm} at {rate:g} requests/s with seed {seed}: they would count twice")
    return replace(
        first,
        arms=tuple(arms.values()),
        probes=tuple(probe for campaign in campaigns for probe in campaign.probes),
        skipped={reason: count for campaign in campaigns for reason, count in campaign.skipped.items()},
        partial="; ".join(filter(None, dict.fromkeys(campaign.partial for campaign in campaigns))),
    )


def _offered(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out the length of the runs, which each run states itself: a longer run offers the same requests, and more of them."""
    return {name: value for name, value in workload.items() if name != "duration_s"}


def _lasting(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in machine.items() if name not in OWN}


_PROBE_FIELDS = ("arm", "rate", "seed", "due", "duration_s", "why", "variant", "partial")


def _probes(folder: Path, entries: list[dict[str, Any]]) -> Iterator[Probe]:
    for entry in entries:
        reading = raw.read(folder / entry["records"])
        records = tuple(reading)
        said = {name: entry[name] for name in _PROBE_FIELDS}
        if reading.partial:
            said["partial"] = said["partial"] or "its records end in the middle of a line"
        yield Probe(records=records, **said)


def this_machine() -> dict[str, Any]:
    """What a reader needs to know to judge the numbers."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "processor": next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
