"""An open GGUF file: its fields, checked one by one as they are read, and its tensors, dequantised a piece at a time."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

from baton.engine.facts.fields import CheckpointError

# Those whose numbers are tested; `gguf` knows more.
KINDS = (
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
)  # fmt: skip
PIECE = 1 << 22  # numbers that are dequantised at a time
Floats = npt.NDArray[np.float32] | npt.NDArray[np.float16]


class GgufFile:
    """Every refusal is a CheckpointError with the file, and the field or tensor."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            reader = gguf.GGUFReader(file)
            self.fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise CheckpointError(file, "", f"cannot be read: {error.strerror}") from None
        # What the library raises when bytes are missing, or are no GGUF
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
            raise CheckpointError(file, "", f"is no whole GGUF file (truncated or altered?): {error}") from None
        if reader.byte_order != "I":
            raise self.error("GGUF.version", "the bytes are in the other order than this machine's")
        if self.get("split.count", int, 1) != 1:
            raise self.error("split.count", "one of several parts; join them with llama-gguf-split --merge")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        ends = [tensor.data_offset + tensor.n_bytes for tensor in reader.tensors]
        size, end = file.stat().st_size, max(ends, default=reader.data_offset)
        if not end <= size < end + 2 * reader.alignment:
            raise self.error("GGUF.tensor_count", f"{len(ends)} tensors end at byte {end}, the file at {size}")
        for tensor in reader.tensors:
            if tensor.tensor_type not in KINDS:
                known = ", ".join(kind.name for kind in KINDS)
                raise self.error(tensor.name, f"type {tensor.tensor_type.name} is not supported; supported: {known}")

    def error(self, field: str, message: str) -> CheckpointError:
        return CheckpointError(self.file, field, message)

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of type `kind`; without a default it must be there. A number of the file may stand for a float."""
        if name not in self.fields:
            if default is None:
                raise self.error(name, "is missing")
            return default
        value = self.fields[name]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise self.error(name, f"must be {kind.__name__}, got {value!r:.80}")
        return value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, `[out, in]`."""
        return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def kind(self, name: str) -> str:
        """The type of a tensor, as `baton.engine.model.quantised.gguf` calls it."""
        return str(self._tensors[name].tensor_type.name).lower()

    def stored(self, name: str) -> str:
        """The safetensors type that holds a tensor's numbers exactly."""
        kind = self._tensors[name].tensor_type
        return "F16" if kind == Kind.F16 else "F32"

    def blocks(self, name: str, order: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.uint8]:
        """The rows of a tensor of blocks as they are, `[out, bytes]`, those of `order` if that is given."""
        raw = self._tensors[name].data
        return np.ascontiguousarray(raw if order is None else raw[order])

    def pieces(self, name: str, order: npt.NDArray[np.int64] | None = None) -> Iterator[Floats]:
        """The rows of a tensor, those of `order` if that is given, in the type `stored`."""
        tensor, shape = self._tensors[name], self.shapes()[name]
        rows = tensor.data if order is None else tensor.data[order]
        step = max(1, PIECE // math.prod(shape[1:]))
        for at in range(0, shape[0], step):
            part = rows[at : at + step]
            made = part if tensor.tensor_type == Kind.F16 else gguf.quants.dequantize(part, tensor.tensor_type)
            if not np.isfinite(made).all():
                raise self.error(name, "has numbers that are not finite")
            yield np.ascontiguousarray(made)
