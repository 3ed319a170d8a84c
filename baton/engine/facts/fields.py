"""Fields of a JSON file, checked one by one as they are read."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A model folder that cannot be served. `file` and `field` (a field or a tensor) say where to look."""

    def __init__(self, file: Path, field: str, message: str) -> None:
        super().__init__(f"{file}: {field}: {message}" if field else f"{file}: {message}")
        self.file = file
        self.field = field


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object. Every refusal names the file and the path of the field in it. Null counts as absent."""

    file: Path
    raw: dict[str, Any]
    path: str = ""

    @classmethod
    def read(cls, file: Path) -> "Fields":
        """Raises CheckpointError for a file that is not a JSON object."""
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(file, "", f"cannot be read: {error}") from error
        if not isinstance(raw, dict):
            raise CheckpointError(file, "", "is not a JSON object")
        return cls(file, raw)

    @classmethod
    def read_if_there(cls, file: Path) -> "Fields":
        """A missing file counts as an empty object. Raises CheckpointError for a file that is not a JSON object."""
        return cls.read(file) if file.exists() else cls(file, {})

    def error(self, field: str, message: str) -> CheckpointError:
        return CheckpointError(self.file, self.path + field, message)

    def has(self, field: str) -> bool:
        return self.raw.get(field) is not None

    def get(self, field: str, default: Any = None) -> Any:
        return self.raw[field] if self.has(field) else default

    def size(self, field: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(field, default)
        if type(value) is not int or value < least:
            raise self.error(field, f"must be {'a positive integer' if least else 'an integer, 0 or more'}, got {value!r}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(field, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, got {value!r}")
        return value

    def inner(self, field: str) -> "Fields":
        value = self.get(field, {})
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object, got {value!r}")
        return Fields(self.file, value, f"{self.path}{field}.")

    def only(self, field: str, *supported: object) -> None:
        """Refuses a field that is present with another value."""
        if self.has(field) and self.raw[field] not in supported:
            listed = ", ".join(str(value) for value in supported)
            raise self.error(field, f"{self.raw[field]!r} is not supported; supported: {listed}")
