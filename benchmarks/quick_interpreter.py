"""Triton's interpreter, without what it does again and again for nothing.

Whenever a kernel is launched, and whenever a function of a kernel calls another one (`tl.sum` and `tl.max` are such functions), the
interpreter of Triton 3.6 to 3.9 looks through all names of `triton.language` for those that it must replace by its own. That takes longer
than most of what a kernel then does. What it puts there is the same each time, so once is enough, and it may stay: in a process that
interprets its kernels, nothing is compiled. It also computes whether each sum and product of int32 overflows, and drops the answer: what
would say it is a `device_assert`, which does nothing unless the option `debug` is on. And it writes the table of NumPy's types down anew
for each operation.
"""

from dataclasses import replace
from functools import wraps
from types import FunctionType
from typing import Any


def quicken() -> None:
    """Call it after TRITON_INTERPRET was set and before the first launch. A second call changes nothing."""
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang
    if hasattr(patch, "__wrapped__"):
        return
    nothing: dict[str, Any] = {}  # to restore after the launch of a function of a module

    @wraps(patch)
    def once(function: FunctionType) -> Any:
        if function.__module__ not in nothing:
            nothing[function.__module__] = type(patch(function))()
        return nothing[function.__module__]

    interpreter._patch_lang = once
    type_of, known = interpreter._get_np_dtype, dict[str, Any]()

    def known_type_of(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in known:
            known[scalar.name] = type_of(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = known_type_of
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
