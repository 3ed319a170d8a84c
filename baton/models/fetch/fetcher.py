"""A folder that holds what was asked for: nothing to do, or listed, checked, fetched file by file, and declared complete at the end."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from baton.models.fetch import lock, manifest
from baton.models.fetch.manifest import COMPLETE, PARTIAL, Manifest
from baton.models.fetch.selection import OWN, choose, chosen
from baton.models.fetch.store import Changed, FetchError, Interrupted, Listing, RemoteFile, Store, Wanted
from baton.models.fetch.transfer import Patience, Transfer, missing, part_of, parts

ROUNDS = 3  # listings, if the store changes while files are fetched
REPORT_S = 5.0
POLL_S = 1.0
REMIND_S = 30.0
Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    attempts: int = 5
    pause_s: float = 1.0  # before the second attempt; it doubles
    lock_s: float = 3600.0  # for how long another fetcher is waited for
    unverified: bool = False  # take files that nothing can verify
    verify: bool = False  # read what is there again


def fetch(wanted: Wanted, folder: Path, connect: Callable[[], Store], how: FetchOptions, say: Say) -> Manifest:
    """`connect` is called only if something is to be fetched. Raises FetchError."""
    folder.mkdir(parents=True, exist_ok=True)
    if not how.verify and (ready := _ready(wanted, folder, how)):
        return ready
    with lock.held(folder, how.lock_s, say):
        known = _known(wanted, folder, how, say)
        if ready := _ready(wanted, folder, how, known):
            return ready
        store = connect()
        for _ in range(ROUNDS):
            try:
                return _Round(wanted, folder, store, how, say).run(known)
            except Changed as error:
                say(f"{error}; it is listed again")
                known = manifest.read(folder, PARTIAL) or Manifest(wanted)
                known = Manifest(wanted, "", known.files)  # no commit: the one that was listed is not what the store has
        raise FetchError(f"{wanted.source}: changed {ROUNDS} times while it was fetched")


def wait(wanted: Wanted, folder: Path, within_s: float, say: Say) -> None:
    """Returns when another process has fetched everything. Only reads. Raises FetchError."""
    began = said_at = time.monotonic()
    said = ""
    while why := unready(wanted, folder):
        now = time.monotonic()
        if now - began > within_s:
            raise FetchError(f"{folder}: not complete after {within_s:g} s: {why}")
        if why != said or now - said_at > REMIND_S:
            say(f"waiting for {wanted.source}: {why}")
            said, said_at = why, now
        time.sleep(min(POLL_S, within_s))


def unready(wanted: Wanted, folder: Path) -> str:
    """Why a folder does not hold what is wanted; empty if it does."""
    found = manifest.read(folder)
    if found is None:
        partial = manifest.read(folder, PARTIAL)
        return f"{len(partial.files)} files are ready" if partial else "nothing is there yet"
    if found.wanted != wanted:
        return f"the folder holds {found.wanted.source}"
    wrong = manifest.wrong_sizes(folder, found)
    return f"missing or of another size: {', '.join(wrong)}" if wrong else ""


def _ready(wanted: Wanted, folder: Path, how: FetchOptions, known: Manifest | None = None) -> Manifest | None:
    """The manifest, if nothing is to be done. `known`: what is left of it after a check."""
    found = manifest.read(folder)
    if found is None or unready(wanted, folder) or (known is not None and known.files.keys() != found.files.keys()):
        return None
    return found if how.unverified or not found.unverified() else None


def _known(wanted: Wanted, folder: Path, how: FetchOptions, say: Say) -> Manifest:
    """The files of an earlier fetch that need not be looked at again."""
    for name in (COMPLETE, PARTIAL):
        found = manifest.read(folder, name)
        if found and found.wanted == wanted:
            wrong = manifest.altered(folder, found) if how.verify else manifest.wrong_sizes(folder, found)
            for file in wrong:
                say(f"{file}: altered or missing; it is fetched again")
            return found.without(wrong)
    return Manifest(wanted)


class _Round:
    """One listing, and what it names."""

    def __init__(self, wanted: Wanted, folder: Path, store: Store, how: FetchOptions, say: Say) -> None:
        self._wanted, self._folder, self._store, self._how, self._say = wanted, folder, store, how, say
        self._patience = Patience(how.attempts, how.pause_s, say)

    def run(self, known: Manifest) -> Manifest:
        """Raises Changed, FetchError."""
        listing = self._list(known.commit)
        files = choose(listing.files, self._wanted.include)
        self._check(files)
        made = Manifest(self._wanted, listing.commit, {f.name: known.files[f.name] for f in files if known.holds(f)})
        self._clear(files)
        manifest.write(self._folder, made, PARTIAL)
        (self._folder / COMPLETE).unlink(missing_ok=True)
        todo = [file for file in files if file.name not in made.files]
        self._check_space(todo)
        meter = _Meter(sum(file.size for file in todo), self._say)
        transfer = Transfer(self._store, self._folder, self._patience, self._say, meter.moved)
        for file in todo:
            meter.name = file.name
            entry = transfer.adopt(file)
            if entry:
                meter.moved(file.size)
            else:
                entry = transfer.fetch(file)
                self._patience.renew()
            made = made.with_file(file.name, entry)
            manifest.write(self._folder, made, PARTIAL)
        if not self._insist(lambda: self._store.unchanged(listing)):
            raise Changed(f"{self._wanted.source} changed while it was fetched")
        manifest.write(self._folder, made)
        (self._folder / PARTIAL).unlink()
        return made

    def _list(self, commit: str) -> Listing:
        listing = self._insist(lambda: self._store.list(commit))
        self._patience.renew()
        return listing

    def _insist(self, ask: Callable[[], T]) -> T:
        """Asks until the store answers, or patience is at its end."""
        while True:
            try:
                return ask()
            except Interrupted as error:
                self._patience.spend(self._wanted.source, error)

    def _check(self, files: tuple[RemoteFile, ...]) -> None:
        if not files:
            raise FetchError(f"{self._wanted.source}: none of its files is one of {' '.join(self._wanted.include) or 'a model'}")
        unverified = [file.name for file in files if file.check is None]
        if unverified and not self._how.unverified:
            raise FetchError(
                f"{self._wanted.source}: the store has no checksum that verifies {', '.join(unverified)}; put a SHA256SUMS"
                " beside the files, or take them as they come with --unverified"
            )
        names = {file.name for file in files} | _ours(self._folder)
        for path in sorted(self._folder.iterdir()):
            ours = path.name in names or path.name.startswith(OWN) or not path.is_file()
            if not ours and chosen(path.name, self._wanted.include):
                raise FetchError(
                    f"{path} is there already and is not part of {self._wanted.source}; an engine might read it: use an empty folder"
                )

    def _clear(self, files: tuple[RemoteFile, ...]) -> None:
        """Removes what earlier fetches left that this one does not need. A manifest that names such files goes first."""
        names = {file.name for file in files}
        stale = _ours(self._folder) - names
        if stale:
            (self._folder / COMPLETE).unlink(missing_ok=True)
        for name in stale:
            (self._folder / name).unlink(missing_ok=True)
        wanted = {part_of(self._folder, file) for file in files}
        for part in parts(self._folder):
            if part not in wanted:
                part.unlink()

    def _check_space(self, todo: list[RemoteFile]) -> None:
        need, free = sum(missing(self._folder, file) for file in todo), shutil.disk_usage(self._folder).free
        if need > free:
            raise FetchError(f"{self._folder}: {amount(need)} are needed and {amount(free)} are free")


class _Meter:
    def __init__(self, total: int, say: Say) -> None:
        self._total, self._say = total, say
        self._done = self._before = 0
        self._at = time.monotonic()
        self.name = ""

    def moved(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._at < REPORT_S:
            return
        rate = (self._done - self._before) / (now - self._at)
        self._say(f"{self.name}: {amount(self._done)} of {amount(self._total)}, {amount(max(rate, 0))}/s")
        self._before, self._at = self._done, now


def amount(count: float) -> str:
    """Bytes, for a person."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _ours(folder: Path) -> set[str]:
    """Names of files that an earlier fetch wrote."""
    return {name for kind in (COMPLETE, PARTIAL) if (found := manifest.read(folder, kind)) for name in found.files}
