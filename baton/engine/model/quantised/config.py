"""Reads what config.json says about the quantisation of a folder's matrices."""

from collections.abc import Callable

from baton.engine.facts.fields import Fields
from baton.engine.model.quantised.awq import read_awq
from baton.engine.model.quantised.compressed import read_compressed
from baton.engine.model.quantised.float8 import read_float8
from baton.engine.model.quantised.gguf import read_gguf
from baton.engine.model.quantised.gptq import read_gptq
from baton.engine.model.quantised.scheme import Scheme

READERS: dict[str, Callable[[Fields], Scheme]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "fp8": read_float8,
    "gguf": read_gguf,
    "gptq": read_gptq,
}


def read_scheme(f: Fields) -> Scheme | None:
    """None: all matrices are stored plainly. Raises CheckpointError."""
    for field in ("quantization_config", "compression_config"):
        if f.get(field):
            given = f.inner(field)
            method = given.get("quant_method", "compressed-tensors" if field == "compression_config" else None)
            if method not in READERS:
                raise given.error("quant_method", f"{method!r} is not supported; supported: {', '.join(READERS)}")
            return READERS[method](given)
    return None
