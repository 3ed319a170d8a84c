"""Which files of a store a folder gets. A pattern without a slash means files at the top only: an engine reads no others, and stores
keep copies of the weights in other formats below."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from baton.models.fetch.store import FetchError, RemoteFile

DEFAULT = ("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "tokenizer*", "*.jinja")
# The same weights again, under names that no index lists; pickles.
LEFT_OUT = ("consolidated*.safetensors", "*.bin", "*.pth", "*.pt", "*.gguf")
OWN = ".baton-fetch"  # names that begin with it are ours


def chosen(name: str, include: tuple[str, ...]) -> bool:
    if include:
        return any(_matches(name, pattern) for pattern in include)
    return any(_matches(name, pattern) for pattern in DEFAULT) and not any(_matches(name, pattern) for pattern in LEFT_OUT)


def choose(files: Iterable[RemoteFile], include: tuple[str, ...]) -> tuple[RemoteFile, ...]:
    """Raises FetchError for a name that would leave the folder, or hide in it."""
    found = tuple(file for file in files if chosen(file.name, include))
    for file in found:
        parts = PurePosixPath(file.name).parts
        if not parts or file.name.startswith("/") or {".", ".."} & set(file.name.split("/")) or "\\" in file.name or "\0" in file.name:
            raise FetchError(f"{file.name!r} is no name of a file inside a folder")
        if parts[0].startswith(OWN) or parts[-1].endswith(".part"):
            raise FetchError(f"{file.name!r} is a name that `baton fetch` keeps for itself")
    return found


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and ("/" in pattern or "/" not in name)
