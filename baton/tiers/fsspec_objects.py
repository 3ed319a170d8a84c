"""Objects at any URL that fsspec knows."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import fsspec

from baton.tiers.objects import Listed

TIMES = "LastModified", "mtime", "created", "updated", "last_modified"  # each file system has its own


class FsspecObjects:
    """See `Objects`."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        """Raises ValueError for a URL or an option that fsspec does not know."""
        more: dict[str, Any] = {"auto_mkdir": True} if urlsplit(url).scheme in ("file", "local") else {}
        try:
            self._files, root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **more, **options)
        except (ValueError, ImportError, TypeError) as error:
            raise ValueError(f"{urlsplit(url).scheme}: {error}") from None
        self._root = root.rstrip("/")

    def write(self, name: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{name}", data)

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def list(self) -> Iterator[Listed]:
        for path, info in self._files.find(self._root, detail=True).items():
            yield Listed(path.removeprefix(f"{self._root}/"), _time(info))

    def delete(self, name: str) -> None:
        try:
            self._files.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return


def _time(info: Mapping[str, Any]) -> float:
    found = next((info[field] for field in TIMES if info.get(field)), 0.0)
    return found.timestamp() if isinstance(found, datetime) else float(found) if isinstance(found, int | float) else 0.0
