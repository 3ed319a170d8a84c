"""What a folder holds, in the file `.baton-fetch.json`: it is written last and at once, so a folder that has it is complete.

While files are fetched, `.baton-fetch.partial.json` says the same of those that are ready, so that they need not be read again after an
interruption.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from baton.models.fetch.selection import OWN
from baton.models.fetch.store import RemoteFile, Wanted

COMPLETE, PARTIAL = f"{OWN}.json", f"{OWN}.partial.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    size: int
    sha256: str
    tag: str
    verified: str  # the checksum that agreed with the store's; empty: there was none


@dataclass(frozen=True, slots=True)
class Manifest:
    wanted: Wanted
    commit: str = ""
    files: dict[str, ManifestEntry] = field(default_factory=dict)

    def holds(self, file: RemoteFile) -> bool:
        entry = self.files.get(file.name)
        return entry is not None and (entry.size, entry.tag) == (file.size, file.tag)

    def with_file(self, name: str, entry: ManifestEntry) -> "Manifest":
        return replace(self, files={**self.files, name: entry})

    def without(self, names: Iterable[str]) -> "Manifest":
        left_out = set(names)
        return replace(self, files={name: entry for name, entry in self.files.items() if name not in left_out})

    def unverified(self) -> list[str]:
        return [name for name, entry in self.files.items() if not entry.verified]


def read(folder: Path, name: str = COMPLETE) -> Manifest | None:
    """None if there is none that can be read."""
    try:
        found = json.loads((folder / name).read_text())
        if found.pop("version") != VERSION:
            return None
        wanted = Wanted(found["source"], found["endpoint"], tuple(found["include"]))
        return Manifest(wanted, found["commit"], {file: ManifestEntry(**entry) for file, entry in found["files"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(folder: Path, manifest: Manifest, name: str = COMPLETE) -> None:
    """Writes the file whole or not at all. It outlives a loss of power."""
    content = {"version": VERSION, **asdict(manifest.wanted), "commit": manifest.commit}
    content["files"] = {file: asdict(entry) for file, entry in sorted(manifest.files.items())}
    draft = folder / f"{name}.draft"
    with draft.open("w") as stream:
        stream.write(json.dumps(content, indent=1) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, folder / name)
    sync(folder)


def sync(folder: Path) -> None:
    """Makes the names in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are missing, or have another size."""

    def size(name: str) -> int:
        try:
            return (folder / name).stat().st_size
        except OSError:
            return -1

    return [name for name, entry in manifest.files.items() if size(name) != entry.size]


def altered(folder: Path, manifest: Manifest) -> list[str]:
    """Files whose bytes are not those that were fetched; reads all of them."""

    def sha256(name: str) -> str:
        with (folder / name).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    sizes = set(wrong_sizes(folder, manifest))
    return [name for name, entry in manifest.files.items() if name in sizes or sha256(name) != entry.sha256]
