"""A model folder becomes one in fewer bits: whole or not at all."""

import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.facts.fields import Fields
from baton.engine.facts.fingerprint import check_sums
from baton.engine.model.checkpoint import Checkpoint, ModelConfig, expected_tensors
from baton.engine.model.config_json import read_config
from baton.models.folder import write_json
from baton.models.quantise.inputs import InputSums
from baton.models.quantise.methods import METHODS, Method, group_of
from baton.models.quantise.rounding import nearest
from baton.models.quantise.shards import Shards
from baton.models.quantise.sites import Site, Tensors, check, scale_columns, sites
from baton.models.quantise.walk import Walk

# What is copied: the tokenizer, the template, and how to sample. The card of the original would say what is no longer so.
COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "generation_config.json",
    "LICENSE*", "NOTICE*",
)  # fmt: skip
REPORT_S = 5.0
Say = Callable[[str], None]


@dataclass(slots=True)
class Done:
    """What came of it. Errors are sums over all matrices, beside the mean square of their outputs."""

    method: str
    group: int  # columns with one scale; 0: a row
    layers: int = 0
    tokens: int = 0  # of calibration
    seconds: float = 0.0
    peak_mib: int = 0  # of this process
    bytes_before: int = 0
    bytes_after: int = 0
    signal: float = field(default=0.0, repr=False)
    wrong: float = field(default=0.0, repr=False)
    wrong_nearest: float = field(default=0.0, repr=False)

    @property
    def error(self) -> float:
        return self.wrong / self.signal

    @property
    def error_nearest(self) -> float:
        """The `error` if each weight had been rounded to the nearest."""
        return self.wrong_nearest / self.signal


def quantise(model: Path, out: Path, name: str, texts: list[list[int]], group: int | None, say: Say) -> Done:
    """`out` gets the model; it may be there if it is empty. Raises ValueError, which names what is wrong, before anything is written;
    OSError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: is there already and not an empty folder")
    config = read_config(model)
    check(config)
    check_sums(model)
    checkpoint, method = Checkpoint(model, config), METHODS[name]
    work = Work(checkpoint, config, method, group_of(method, _matrices(config), group), texts)
    draft = out.absolute().with_name(f".{out.name}.{os.getpid()}.part")
    began, work.done.method = time.monotonic(), name
    try:
        draft.mkdir(parents=True)
        work.write(draft, say)
        _write_rest(model, draft, method.config(work.done.group))
        Checkpoint(draft, read_config(draft))  # its names, shapes and types are those that config.json implies
        os.rename(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    done = work.done
    done.seconds, done.peak_mib = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return done


def _matrices(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of one layer's matrices; all layers are alike."""
    shapes = expected_tensors(config)
    return {name: shapes[f"model.layers.0.{name}.weight"] for site in sites(config) for name in site.names}


def _write_rest(model: Path, folder: Path, told: dict[str, object]) -> None:
    for pattern in COPIED:
        for file in model.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    write_json(folder / "config.json", {**Fields.read(model / "config.json").raw, "quantization_config": told})


class Work:
    """Layer by layer: what the layer's matrices meet, their rounding, and the text's way past it, rounded as it is."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, method: Method, group: int, texts: list[list[int]]) -> None:
        self._checkpoint, self._config, self._method = checkpoint, config, method
        self._names = list(expected_tensors(config))
        self._walk = Walk(checkpoint, config, texts)
        self.done = Done("", group, config.layers, sum(map(len, texts)))

    @torch.inference_mode()
    def write(self, folder: Path, say: Say) -> None:
        shards, said = Shards(folder), time.monotonic()
        for name in self._names:
            if not name.startswith("model.layers."):
                shards.add(name, tensor := self._finite(name))
                self.done.bytes_before += tensor.nbytes
        for index in range(self._config.layers):
            self._layer(index, shards)
            if time.monotonic() - said > REPORT_S or index == self._config.layers - 1:
                said = time.monotonic()
                say(f"layer {index + 1} of {self._config.layers}; error so far {self.done.error:.3g} of the outputs")
        shards.close()
        self.done.bytes_after = shards.bytes

    def _finite(self, name: str) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        if not tensor.isfinite().all():
            raise ValueError(f"{name}: has numbers that are not finite")
        return tensor

    def _layer(self, index: int, shards: Shards) -> None:
        prefix = f"model.layers.{index}."
        given = {name.removeprefix(prefix): self._finite(name) for name in self._names if name.startswith(prefix)}
        tensors = {name: tensor.to(torch.float32, copy=True) for name, tensor in given.items()}
        met = dict(zip(sites(self._config), self._walk.inputs(index, tensors), strict=True))
        columns, rows = self._scaled(met, tensors)
        for site, inputs in met.items():
            for module in site.names:
                name = f"{module}.weight"
                original, rounded = given.pop(name).float(), self._method.round(tensors[name], inputs, self.done.group)
                tensors[name] = rounded.worth()
                self._count(original, tensors[name] * rows.get(module, 1.0), inputs, columns.get(site))
                for part, tensor in self._method.write(rounded).items():
                    shards.add(f"{prefix}{module}.{part}", tensor)
                self.done.bytes_before += self._checkpoint.tensor(prefix + name).nbytes
        for name, tensor in given.items():
            same = torch.equal(tensors[name], tensor.float())
            shards.add(prefix + name, tensor if same else tensors[name])
            self.done.bytes_before += tensor.nbytes
        self._walk.move(index, tensors)

    def _scaled(self, met: dict[Site, InputSums], tensors: Tensors) -> tuple[dict[Site, Tensor], dict[str, Tensor]]:
        """Scales columns as the method wants them. Returns the factors, and what rows `[out, 1]` of other matrices were divided by."""
        columns, rows = dict[Site, Tensor](), dict[str, Tensor]()
        for site, inputs in met.items():
            s = self._method.factor(site, tensors, inputs, self.done.group)
            if s is not None:
                columns[site] = s
                if (divided := scale_columns(site, s, tensors, self._config)) is not None:
                    rows[site.made_by or ""] = divided
        return columns, rows

    def _count(self, w: Tensor, v: Tensor, inputs: InputSums, s: Tensor | None) -> None:
        """w is the original, v what stands for it, with columns times s."""
        method, group = self._method, self.done.group or w.shape[1]
        self.done.signal += inputs.error(w)
        self.done.wrong += method.error(w, v, inputs, s)
        self.done.wrong_nearest += method.error(w, nearest(w, method.bits, group, method.symmetric).worth(), inputs)
