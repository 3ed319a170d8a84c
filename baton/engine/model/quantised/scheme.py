"""What a format tells about a matrix: which tensors stand for it in the file, and what they are worth."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from baton.engine.facts.fields import CheckpointError, Fields
from baton.engine.model.quantised.matrix import MatrixWorth, Quantised

FLOATS = frozenset({"F16", "BF16", "F32"})
INT32, INT64, INT8, UINT8, FLOAT8 = (frozenset({name}) for name in ("I32", "I64", "I8", "U8", "F8_E4M3"))
Shape = tuple[int, ...]


class Part(NamedTuple):
    """A tensor of the file."""

    dtypes: frozenset[str]  # as safetensors calls them
    shapes: tuple[Shape, ...]  # any of these
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one matrix."""

    get: Callable[[str], Tensor]  # by the part's name
    has: Callable[[str], bool]
    error: Callable[[str, str], CheckpointError]  # (part, message)

    def finite(self, name: str) -> Tensor:
        """Raises CheckpointError for a part with a number that is not finite."""
        tensor = self.get(name)
        if not tensor.isfinite().all():
            raise self.error(name, "has numbers that are not finite")
        return tensor


class Format(Protocol):
    """How one matrix is stored."""

    def parts(self, shape: Shape) -> dict[str, Part]:
        """What stands for the weight `[out, in]` of a module, by what follows the module's name. Raises CheckpointError for a shape that
        the format cannot have."""
        ...

    def read(self, parts: Parts, shape: Shape) -> Quantised | MatrixWorth:
        """Raises CheckpointError for parts that make no sense."""
        ...


class Scheme(Protocol):
    """`quantization_config` of one folder."""

    @property
    def empty_biases(self) -> bool:
        """Whether tools write biases of zeros where the model has none."""
        ...

    def format_of(self, module: str, has: Callable[[str], bool]) -> Format | None:
        """None: the matrix is stored plainly. `has`: whether the file has such a part of the module."""
        ...


@dataclass(frozen=True, slots=True)
class ByPart:
    """A scheme whose quantised matrices are known by a part that they have."""

    part: str
    format: Format
    empty_biases: bool = False

    def format_of(self, module: str, has: Callable[[str], bool]) -> Format | None:
        return self.format if has(self.part) else None


def whole_words(f: Fields, field: str, shape: Shape, per_word: int) -> None:
    """Raises CheckpointError unless rows and columns fill words of so many numbers."""
    for what, size in zip(("rows", "columns"), shape, strict=True):
        if size % per_word:
            raise f.error(field, f"{size} {what} of a matrix do not fill words of {per_word} numbers")


def whole_groups(f: Fields, shape: Shape, group: int) -> int:
    """How many groups a row has. Raises CheckpointError for a part of one."""
    if shape[1] % group:
        raise f.error("group_size", f"{group} does not divide the {shape[1]} columns of a matrix")
    return shape[1] // group
