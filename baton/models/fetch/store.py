"""What a store of models offers: a listing, and the bytes of a file from any position. There are `hub`, `bucket` and `wheel`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.models.fetch.digest import Check


class FetchError(Exception):
    """No further attempt can help. One line, which says what to do."""


class Interrupted(Exception):
    """An attempt ended early; another one may succeed, `after_s` from now at the earliest."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class Changed(Exception):
    """The store has another version of a file than the one that was listed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a folder is to hold. Equal values mean the same files; a revision that is a branch is resolved once, when it is fetched."""

    source: str  # hf://owner/name[@revision], s3://bucket/prefix or pypi://package[@version]
    endpoint: str = ""  # of the store, if it is not the usual one
    include: tuple[str, ...] = ()  # patterns in place of `selection.DEFAULT`


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str  # relative to the model's folder
    size: int  # bytes
    tag: str  # differs if the content does
    check: Check | None  # None: the store says nothing that content could be compared with


@dataclass(frozen=True, slots=True)
class Listing:
    files: tuple[RemoteFile, ...]
    commit: str = ""  # of a hub: what the revision was when it was asked


class ByteStream(NamedTuple):
    start: int  # position of the first byte: 0 if the store cannot continue where it was asked to
    pieces: Iterator[bytes]


class Store(Protocol):
    """Every method raises Interrupted, and FetchError. No call waits longer than the store's stall timeout for the next byte."""

    def list(self, commit: str = "") -> Listing:
        """All files; those of one commit, if the store has commits."""
        ...

    def open(self, file: RemoteFile, start: int) -> AbstractContextManager[ByteStream]:
        """The bytes of a listed file. Raises Changed if it is not the version that was listed."""
        ...

    def unchanged(self, listing: Listing) -> bool:
        """Whether the store still holds what was listed, so that files fetched one after another belong together."""
        ...
