"""Tensors go to disk as they are made: a model may be larger than memory."""

import json
import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD = 2 << 30  # bytes that are held until they are written


class Shards:
    """The safetensors files of a folder, and the index if there are several."""

    def __init__(self, folder: Path, shard: int = SHARD) -> None:
        self._folder, self._limit = folder, shard
        self._held: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self.bytes = 0
        self._free = shard

    def add(self, name: str, tensor: Tensor) -> None:
        """Keeps a reference until it is written."""
        self._held[name] = tensor.contiguous()
        self.bytes += tensor.nbytes
        self._free -= tensor.nbytes
        if self._free <= 0:
            self._write()

    def close(self) -> None:
        """Names the files; whoever reads them needs how many there are."""
        self._write()
        count = len(self._files)
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] if count > 1 else ["model.safetensors"]
        for i, name in enumerate(names):
            os.rename(self._part(i), self._folder / name)
        if count > 1:
            where = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": where}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        if not self._held:
            return
        part = self._part(len(self._files))
        save_file(self._held, part, metadata={"format": "pt"})
        part.chmod(0o644)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        self._files.append(list(self._held))
        self._held, self._free = {}, self._limit

    def _part(self, index: int) -> Path:
        return self._folder / f"{index}.part"
