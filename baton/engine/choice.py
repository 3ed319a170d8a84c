"""Which implementation computes the operations of a layer, chosen once when a model is loaded."""

import logging
from importlib.util import find_spec

import torch

from baton.engine.ops import Ops

log = logging.getLogger(__name__)


def choose_ops(device: torch.device, dtype: torch.dtype, compiled: bool) -> Ops:
    """The fastest available implementation; plain torch throughout if `compiled` is off.

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
    return CompiledOps()
