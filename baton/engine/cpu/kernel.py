"""A compiled kernel, from one declaration of its arguments.

    @kernel("rows * width", x=numbers("rows", "width"), weight=numbers("width"), out=numbers("rows", "width"), eps=REAL)
    def scale(x, weight, out, rows, width, eps): ...

The function is written in Numba's Python and runs once on each thread of torch's team. It is compiled where it is defined, so what it calls
must be defined above it. Its parameters may name the declared arguments (arrays are flat views), the sizes that the shapes name,
`x_stride0`, `x_stride1` … if strides are free, and `has_x` if x may be None. The declaration generates everything in between: the Python
call, which checks every tensor's type, shape and strides against it before any native code runs; the packed arguments; and the C functions
that unpack them, one for each type of numbers. So these cannot disagree. That of bfloat16 is compiled when the first model needs it.

A C function has one argument, a pointer to int64s: addresses, sizes, and floats by their bits. A call thus costs one `struct.pack` and
one foreign call. If there is enough to do, all of torch's own OpenMP threads make this call simultaneously, each for its share
(`GOMP_parallel`): the threads of another pool would compete for the cores with the matrix products in between.
"""

import ctypes
import inspect
import itertools
import logging
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from baton.engine.core.progress import Step, tell
from baton.engine.cpu import primitives
from baton.engine.cpu.apart import compile_apart
from baton.engine.cpu.kernel_cache import ALL, HERE, VARIABLE, group_of, part_of, place_of

log = logging.getLogger(__name__)

C_FUNCTION = types.void(types.CPointer(types.int64))
SHARED_FROM = 1 << 16  # numbers to compute; for fewer, waking the other threads costs more than they save
KERNELS = {ALL: 17, "experts": 5, "groups": 10, "int4": 1, "int8": 3, "kv_int5": 3, "kv_int8": 3}  # of float32, that each group has
_numbers = defaultdict[str, "itertools.count[int]"](lambda: itertools.count(1))  # part → of its kernels that this process has made
_prepared: set[torch.dtype] = {torch.float32}  # kernels for numbers of these types are there before they are called
_halved: dict[str, list["_Codes"]] = defaultdict(list)  # group → its kernels that compute with bfloat16, too


body = njit(error_model="numpy")  # what several kernels share, compiled as they are


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor: its type, its shape, and how much of it must be contiguous."""

    dtype: torch.dtype | None  # None: the type of the call's numbers, float32 or bfloat16
    view: str  # how the kernel sees the memory
    dims: tuple[str, ...]  # sizes: a name is bound by the first tensor that has it, an expression of names is compared
    strided: int = 0  # leading dimensions whose strides are free; the others are contiguous
    optional: bool = False
    elements: int = 1  # that the kernel sees for each element of the tensor


def numbers(*dims: str, strided: int = 0, optional: bool = False) -> Array:
    """An array of the call's own type: all numbers of a call are float32, or all are bfloat16."""
    return Array(None, "", dims, strided, optional)


def floats(*dims: str, strided: int = 0) -> Array:
    return Array(torch.float32, "float32", dims, strided)


def complexes(*dims: str) -> Array:
    """The kernel sees real and imaginary parts alternately."""
    return Array(torch.complex64, "float32", dims, elements=2)


def int64s(*dims: str) -> Array:
    return Array(torch.int64, "int64", dims)


def int32s(*dims: str, optional: bool = False) -> Array:
    return Array(torch.int32, "int32", dims, optional=optional)


def bfloat16s(*dims: str, strided: int = 0) -> Array:
    """The kernel sees their bits."""
    return Array(torch.bfloat16, "uint16", dims, strided)


def float16s(*dims: str) -> Array:
    """The kernel sees their bits."""
    return Array(torch.float16, "uint16", dims)


def int8s(*dims: str, strided: int = 0) -> Array:
    return Array(torch.int8, "int8", dims, strided)


def uint8s(*dims: str, strided: int = 0) -> Array:
    return Array(torch.uint8, "uint8", dims, strided)


@dataclass(frozen=True, slots=True)
class Scalar:
    code: str  # as in `struct`


INT, REAL = Scalar("q"), Scalar("d")
Declared = dict[str, Array | Scalar]


class ArgumentError(TypeError):
    """A call that does not fit the kernel's declaration; the text names the kernel and the argument."""


def kernel(work: str, fast: set[str] | bool = False, **arguments: Array | Scalar) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`work`: an expression of sizes and integers, about how many numbers a call computes with. `fast`: Numba's `fastmath`.

    The call takes the declared arguments in their order. It raises ArgumentError for one that does not fit.
    """

    def compile_(function: Callable[..., None]) -> Callable[..., None]:
        names = _Names(arguments)
        space = {
            "bfloat16": torch.bfloat16,
            "float32": torch.float32,
            "threads_of": torch.get_num_threads,
            "module": sys.modules[__name__],
            "pack": struct.Struct(names.format).pack,
            "codes": _Codes(function, arguments, names, fast),
            "together": _together,
            "refuse": lambda *given: _refuse(function.__name__, arguments, given),
            **{f"{name}_dtype": each.dtype for name, each in arguments.items() if isinstance(each, Array)},
        }
        exec(compile(_python_call(work, arguments, names), f"<call of {function.__name__}>", "exec"), space)
        call: Callable[..., None] = space["call"]
        call.__name__ = call.__qualname__ = function.__name__
        call.__doc__ = function.__doc__
        return call

    return compile_


def named(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a function the name under which its kernel is cached: for one that several kernels are made of."""

    def name_(function: Callable[..., None]) -> Callable[..., None]:
        function.__name__ = name
        return function

    return name_


class _Names:
    """The values of a call in the order in which they are packed: declared arguments, then sizes, then free strides."""

    def __init__(self, arguments: Declared) -> None:
        arrays = {name: each for name, each in arguments.items() if isinstance(each, Array)}
        self.sizes: dict[str, str] = {}  # name → the tensor that binds it
        for name, each in arrays.items():
            if not each.optional:
                for size in each.dims:
                    if size.isidentifier() and size not in arguments:
                        self.sizes.setdefault(size, name)
        self.strides = {f"{name}_stride{i}": (name, i) for name, each in arrays.items() for i in range(each.strided)}
        self.packed = [*arguments, *self.sizes, *self.strides]
        declared = (each.code if isinstance(each, Scalar) else "q" for each in arguments.values())
        self.format = "".join(declared) + "q" * (len(self.sizes) + len(self.strides))


# --- the C functions -----------------------------------------------------------------------------------------------------------------


class _Codes(dict[torch.dtype, tuple[Callable[[bytes], None], int]]):
    """One kernel in native code, by the type of a call's numbers: to call alone, and its address. Made when it is first needed."""

    def __init__(self, function: Callable[..., None], arguments: Declared, names: _Names, fast: set[str] | bool) -> None:
        super().__init__()
        self._made_of = function, arguments, names, fast
        self[torch.float32]  # a declaration that is wrong ends here
        if any(isinstance(each, Array) and each.dtype is None for each in arguments.values()):
            _halved[group_of(Path(function.__code__.co_filename))].append(self)
            if torch.bfloat16 in _prepared:
                self[torch.bfloat16]

    def __missing__(self, kind: torch.dtype) -> tuple[Callable[[bytes], None], int]:
        address = _c_function(*self._made_of, kind is torch.bfloat16).address
        # A short call keeps the GIL: releasing it and waiting for it would take longer.
        self[kind] = made = ctypes.PYFUNCTYPE(None, ctypes.c_char_p)(address), address
        return made


def prepare(kind: torch.dtype) -> None:
    """Kernels for numbers of this type are there before they are called, from now on."""
    _prepared.add(kind)
    if kind is torch.bfloat16:
        for codes in itertools.chain.from_iterable(_halved.values()):
            codes[kind]


def _c_function(function: Callable[..., None], arguments: Declared, names: _Names, fast: set[str] | bool, half: bool) -> Any:
    """A function of one pointer that unpacks and calls `function`, for numbers of float32 or bfloat16 (`half`)."""
    asked = list(inspect.signature(function).parameters)

    def given() -> Iterator[str]:
        for name in asked:
            each = arguments.get(name)
            if isinstance(each, Array):
                size = f"{name}_stride0 * ({each.dims[0]})" if each.strided else " * ".join(f"({dim})" for dim in each.dims)
                yield f"view_{each.view or ('uint16' if half else 'float32')}({name}, {each.elements} * {size})"
            elif name.startswith("has_"):
                yield f"{name.removeprefix('has_')} != 0"
            else:
                yield f"real({name})" if each is REAL else name

    known = {*names.packed, *(f"has_{name}" for name, each in arguments.items() if isinstance(each, Array) and each.optional)}
    if unknown := [name for name in asked if name not in known]:
        raise ArgumentError(f"{function.__name__}: {unknown[0]}: neither declared, nor a size or stride of a declared array")
    name, count = part_of(function.__name__, half).replace("-", "_"), len(names.packed)
    source = f"""
def {name}(pointer):
    {", ".join(names.packed)}, = to_fixed_tuple(carray(pointer, {count}), {count})
    body({", ".join(given())})
"""
    views = {view: getattr(primitives, view) for view in vars(primitives) if view.startswith("view_")}
    space = {"body": njit(fastmath=fast, error_model="numpy")(function), "carray": carray, "to_fixed_tuple": to_fixed_tuple} | views
    space |= {"real": primitives.real, "__name__": function.__module__}
    # It gets the file and line of `function`, by which its errors and its compiled code are known.
    code = function.__code__
    exec(compile("\n" * (code.co_firstlineno - 1) + source, code.co_filename, "exec"), space)
    return c_function(space[name], half)


def c_function(function: Callable[[Any], None], half: bool = False) -> Any:
    """Compiles `function`, or loads what some process compiled before. `half`: it computes with bfloat16."""
    file = Path(function.__code__.co_filename)
    group = group_of(file)
    if file.parent == HERE:
        compile_apart(group, half)
    place = place_of(file, half)
    number, of = next(_numbers[part_of(group, half)]), len(_halved[group]) if half else KERNELS[group]
    if place is None:
        if number == 1 and group == ALL:
            log.warning("compiled kernels can be kept nowhere, so every start compiles them; set %s to a writable folder", VARIABLE)
        tell(Step("compiling kernels", number, of))
        return cfunc(C_FUNCTION)(function)
    if not place.complete:
        tell(Step("compiling kernels", number, of))
    with place.alone():
        return cfunc(C_FUNCTION, cache=True)(place.moved(function))


# --- the call from Python ------------------------------------------------------------------------------------------------------------


def _python_call(work: str, arguments: Declared, names: _Names) -> str:
    """Source of the call. It is generated so that each check costs one comparison, without a loop."""
    arrays = {name: each for name, each in arguments.items() if isinstance(each, Array)}
    kind_of = next((name for name, each in arrays.items() if each.dtype is None and not each.optional), None)
    lines, conditions = [], ["(kind is float32 or kind is bfloat16)"]
    for name, each in arrays.items():
        bound = [size if names.sizes.get(size) == name else "_" for size in each.dims]
        if set(bound) != {"_"}:
            lines.append(f"{', '.join(bound)}, = {name}.shape")
        lines += [f"{name}_strides = {name}.stride()"] if each.strided else []
        lines += [f"{name}_stride{i} = {name}_strides[{i}]" for i in range(each.strided)]
        checks = [f"{name}.dtype is {f'{name}_dtype' if each.dtype else 'kind'}"] if name != kind_of else []
        if "_" in bound:
            checks.append(f"{name}.shape == ({', '.join(each.dims)},)")
        checks.append(_in_one_piece(name, each))
        conditions.append(f"({name} is None or ({' and '.join(checks)}))" if each.optional else " and ".join(checks))
    pointers = {
        name: f"0 if {name} is None else {name}.data_ptr()" if each.optional else f"{name}.data_ptr()" for name, each in arrays.items()
    }
    given, joined = ", ".join(arguments), "\n            and ".join(conditions)
    return f"""
def call({given}):
    try:
        kind = {f"{kind_of}.dtype" if kind_of else "float32"}
        {"; ".join(lines)}
        good = (
            {joined}
        )
    except (AttributeError, IndexError, ValueError):
        good = False
    if not good:
        refuse({given})
    packed = pack({", ".join(pointers.get(name, name) for name in names.packed)})
    work = {work}
    alone, address = codes[kind]
    if module._recording is not None:
        module._keep(address, packed, work)
    if work < module.SHARED_FROM or (threads := threads_of()) == 1:
        alone(packed)
    else:
        together(address, packed, threads, 0)
"""


def _in_one_piece(name: str, each: Array) -> str:
    if not each.strided:
        return f"{name}.is_contiguous()"
    inner = each.dims[each.strided :]
    usual = ", ".join(" * ".join(f"({dim})" for dim in inner[i + 1 :]) or "1" for i in range(len(inner)))
    # Torch lets the stride of a dimension of size 1 be anything.
    return f"({name}_strides[{each.strided}:] == ({usual},) or {name}[{', '.join('0' * each.strided)}].is_contiguous())"


def _refuse(kernel: str, arguments: Declared, given: tuple[Any, ...]) -> None:
    """Raises ArgumentError for the first argument that does not fit."""
    arrays = {name: (each, value) for (name, each), value in zip(arguments.items(), given, strict=True) if isinstance(each, Array)}
    sizes = {name: value for (name, each), value in zip(arguments.items(), given, strict=True) if each is INT}
    kind = None
    for name, (each, tensor) in arrays.items():
        if each.optional and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{kernel}: {name}: must be a tensor, got {type(tensor).__name__}")
        allowed = [each.dtype] if each.dtype else [torch.float32, torch.bfloat16] if kind is None else [kind]
        if tensor.dtype not in allowed:
            raise ArgumentError(f"{kernel}: {name}: must be {' or '.join(str(dtype) for dtype in allowed)}, got {tensor.dtype}")
        kind = kind if each.dtype else tensor.dtype
        if tensor.dim() != len(each.dims):
            raise ArgumentError(f"{kernel}: {name}: must be [{', '.join(each.dims)}], got {list(tensor.shape)}")
        if not each.optional:
            for size, found in zip(each.dims, tensor.shape, strict=True):
                if size.isidentifier():
                    sizes.setdefault(size, found)
    for name, (each, tensor) in arrays.items():
        if tensor is None:
            continue
        wanted = [eval(dim, {}, sizes) for dim in each.dims]
        if list(tensor.shape) != wanted:
            raise ArgumentError(f"{kernel}: {name}: must be [{', '.join(each.dims)}] = {wanted}, got {list(tensor.shape)}")
        if not tensor[(0,) * each.strided].is_contiguous():
            which = f"after its first {each.strided} dimensions, " if each.strided else ""
            raise ArgumentError(f"{kernel}: {name}: must be contiguous, {which}got strides {tensor.stride()}")
    raise ArgumentError(f"{kernel}: {given!r} do not fit the declaration")


# --- many calls in one -----------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a kernel."""

    function: int  # the C function's address
    packed: bytes  # its arguments
    work: int  # about how many numbers it computes with


_recording: tuple[int, list[Call]] | None = None  # whose calls are kept, and where
_one_at_a_time = threading.Lock()


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Keeps the calls that this thread makes meanwhile."""
    global _recording
    calls: list[Call] = []
    with _one_at_a_time:
        _recording = threading.get_ident(), calls
        try:
            yield calls
        finally:
            _recording = None


def _keep(function: int, packed: bytes, work: int) -> None:
    recording = _recording
    if recording is not None and recording[0] == threading.get_ident():
        recording[1].append(Call(function, packed, work))


def _repeat(pointer):  # type: ignore[no-untyped-def]
    """Each thread makes every call, for its share, and waits for the others: the next call reads what this one wrote."""
    count = carray(pointer, 1)[0]
    calls = carray(pointer, 1 + 2 * count)
    for i in range(count):
        primitives.call(calls[1 + 2 * i], calls[2 + 2 * i])
        primitives.wait()


_REPEAT = c_function(_repeat)
_alone = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_REPEAT.address)  # releases the GIL: many calls take a while


class Repeated:
    """Calls in their order, as one call into native code. The tensors of all calls must still be there."""

    def __init__(self, calls: Sequence[Call] = (), before: Sequence["Repeated"] = ()) -> None:
        """`before`: what comes before `calls`."""
        packed = np.frombuffer(b"".join(call.packed for call in calls), np.uint8)
        self._kept: list[Any] = [packed, *before]
        self._table: list[int] = [entry for each in before for entry in each._table]
        self._small: bool = all(each._small for each in before) and all(call.work < SHARED_FROM for call in calls)
        at = packed.ctypes.data
        for call in calls:
            self._table += [call.function, at]
            at += len(call.packed)
        self._given = struct.pack(f"{1 + len(self._table)}q", len(self._table) // 2, *self._table)

    def __call__(self) -> None:
        if self._small or (threads := torch.get_num_threads()) == 1:
            _alone(self._given)
        else:
            _together(_REPEAT.address, self._given, threads, 0)


def _team() -> Any:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP that torch has loaded. Raises AttributeError if it is not GNU's."""
    together = ctypes.CDLL(None).GOMP_parallel
    together.restype, together.argtypes = None, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    return together


_together = _team()
