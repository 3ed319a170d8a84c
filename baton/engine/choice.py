"""Which implementation computes the operations of a layer, chosen once when a model is loaded."""

import logging
from importlib.util import find_spec

import torch

from baton.engine.ops import Ops

log = logging.getLogger(__name__)

BFLOAT16 = {"avx512bf16", "amx-bf16", "bf16"}  # instructions of x86-64 and of Arm


def choose_ops(device: torch.device, dtype: torch.dtype, compiled: bool, products: str = "auto") -> Ops:
    """The fastest available implementation; plain torch throughout if `compiled` is off. `products`: see `CompiledOps`.

    Compiling takes seconds, once for all processes of a machine. On a CPU where it fails, matrices are still packed for oneDNN.
    """
    if compiled and device.type == "cuda" and find_spec("triton"):
        from baton.engine.gpu.triton_ops import TritonOps

        return TritonOps()
    if not compiled or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return Ops()
    try:
        from baton.engine.cpu.compiled_ops import CompiledOps
    except Exception as error:  # whatever a compiler may raise: plain torch is slower, not wrong
        log.warning("engine.compiled: the kernels cannot be compiled, using plain torch: %s: %s", type(error).__name__, error)
        return Ops(packs=True)
    return CompiledOps(products)


def bfloat16_is_slower() -> bool:
    """Whether this CPU has no instruction that multiplies bfloat16, so that a prefill takes twice as long as in float32. A property of the
    processor, not a measurement: a worker that starts again on a busy machine must not come back with another type. False without Numba."""
    try:
        from baton.engine.cpu.features import FEATURES
    except ImportError:
        return False
    return not FEATURES & BFLOAT16
