"""What a store of units needs of an object store. `fsspec_objects` and `bucket_objects` have it."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Listed(NamedTuple):
    name: str
    written: float  # seconds since 1970


class Objects(Protocol):
    """Objects under one prefix, which their names do not contain. Thread-safe; a call may wait, and raises what its library raises."""

    def write(self, name: str, data: bytes) -> None: ...

    def read(self, name: str) -> bytes | None:
        """None: there is none."""
        ...

    def list(self) -> Iterable[Listed]: ...

    def delete(self, name: str) -> None:
        """Also what is not there."""
        ...
