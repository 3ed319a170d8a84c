"""Which implementation computes the operations of a layer, chosen once when a model is loaded, and which runner loads it."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from baton.engine.defaults import DeviceFacts, settle
from baton.engine.model.ops import Ops
from baton.engine.options import Options
from baton.engine.runner import ModelRunner, ignore_progress

log = logging.getLogger(__name__)
Made = TypeVar("Made", bound=ModelRunner)


def choose_ops(device: torch.device, dtype: torch.dtype, compiled: bool, products: str = "auto") -> Ops:
    """The fastest available implementation; plain torch throughout if `compiled` is off. `products`: see `CompiledOps`.

    Compiling takes seconds, once for all processes of a machine. On a CPU where it fails, matrices are still packed for oneDNN. For
    float16, a CPU has plain torch alone.
    """
    if compiled and device.type == "cuda" and find_spec("triton"):
        from baton.engine.gpu.triton_ops import TritonOps

        return TritonOps()
    if not compiled or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return Ops()
    try:
        from baton.engine.cpu.compiled_ops import CompiledOps
        from baton.engine.cpu.kernel import prepare

        prepare(dtype)
    except Exception as error:  # whatever a compiler may raise: plain torch is slower, not wrong
        log.warning("engine.compiled: the kernels cannot be compiled, using plain torch: %s: %s", type(error).__name__, error)
        return Ops(packs=True)
    return CompiledOps(products)


def load(kind: type[Made], options: Options, progress: Callable[[int, int], None] = ignore_progress) -> Made:
    """A runner with the operations that `choose_ops` finds. What is raised: see `ModelRunner.load`."""
    engine = options.engine
    return kind.load(options, lambda device, dtype: choose_ops(device, dtype, engine.compiled, engine.products), progress)


def load_runner(kind: type[Made], path: Path, progress: Callable[[int, int], None] = ignore_progress, **keys: Any) -> Made:
    """`load` with options by their names; what is left open is as on a CPU."""
    return load(kind, settle(Options.of(path, **keys), DeviceFacts("cpu")).options, progress)
