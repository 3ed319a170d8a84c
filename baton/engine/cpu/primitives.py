"""What the compiled kernels (Numba) are made of: access to memory, numbers of both types, e^x, and a thread's share of the work.

bfloat16 is uint16 to Numba. It is widened by a shift, and rounded to nearest even on the way back. All sums are float32.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from baton.engine.core.pages import LINE
from baton.engine.cpu.features import FEATURES

# Sums may be reordered and products fused into sums. NaN and infinity keep their meaning: they show broken weights and KV.
SUMS = {"reassoc", "contract", "nsz"}
ROUND = np.float32(1.5 * 2**23)  # a float32 of this size has no fractional digits
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
BFLOAT16 = np.uint16(0)  # stands for its type

LOG2_E = np.float32(math.log2(math.e))
LN_2_HIGH = np.float32(0.693359375)  # few digits, so that n times it is exact
LN_2_LOW = np.float32(math.log(2) - 0.693359375)
LEAST, MOST = np.float32(-87.0), np.float32(88.0)  # e to these is still a normal float32
T2, T3, T4, T5, T6, T7 = (np.float32(1 / math.factorial(k)) for k in range(2, 8))

wait = types.ExternalFunction("GOMP_barrier", types.void())  # until all threads of the team are here
_thread = types.ExternalFunction("omp_get_thread_num", types.intc())
_threads = types.ExternalFunction("omp_get_num_threads", types.intc())


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An int64 as the address that it is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


def fetch(builder: Any, place: Any, write: bool = False) -> None:
    """Brings a cache line into the second cache. If it is to be written: into the first one, and takes it away from other cores.

    A first cache can wait for only a few lines at a time: decode attention that fetched into it read 20 GB/s, not 32 (Zen 4, 2 threads).
    """
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.bitcast(place, byte), flag(int(write)), flag(3 if write else 2), flag(1)])


@intrinsic
def prefetch(context: Any, array: Any, index: Any) -> Any:
    """Prefetches the cache line of `array[index]`. An index outside the array does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        fetch(builder, builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def call(context: Any, function: Any, argument: Any) -> Any:
    """A C function of one pointer to int64s, by its address and that of the int64s."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(64).as_pointer()
        called = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [pointer]).as_pointer())
        builder.call(called, [builder.inttoptr(arguments[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit
def view_float32(address, size):
    return carray(_pointer(address), size, np.float32)


@njit
def view_uint16(address, size):
    return carray(_pointer(address), size, np.uint16)


@njit
def view_int64(address, size):
    return carray(_pointer(address), size, np.int64)


@njit
def view_int32(address, size):
    return carray(_pointer(address), size, np.int32)


@njit
def view_int8(address, size):
    return carray(_pointer(address), size, np.int8)


@njit
def view_uint8(address, size):
    return carray(_pointer(address), size, np.uint8)


def view_like(array, address, size):
    """A view of the type of `array`."""


@overload(view_like)
def _view_like(array, address, size):
    if array.dtype == types.float32:
        return lambda array, address, size: view_float32(address, size)
    return lambda array, address, size: view_uint16(address, size)


@njit
def real(bits):
    """The float64 with these bits, as float32."""
    return np.float32(np.int64(bits).view(np.float64))


def wide(x):
    """A number of either type as float32."""


@overload(wide)
def _wide_of(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def put(array, index, value):
    """`array[index] = value`, rounded to the array's type."""


@overload(put)
def _put_into(array, index, value):
    def put_float32(array, index, value):
        array[index] = value

    def put_bfloat16(array, index, value):
        bits = np.float32(value).view(np.uint32)
        rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        array[index] = np.uint16(rounded) if value == value else np.uint16(0x7FC0)

    return put_float32 if array.dtype == types.float32 else put_bfloat16


def room_for(x, size):
    """Where `given` may put so many of x's numbers."""


@overload(room_for)
def _room_for(x, size):
    return (lambda x, size: np.empty(size, np.float32)) if _widens(x) else lambda x, size: x[:0]


def given(x, room):
    """x as products want it: as it is or, where no instruction multiplies bfloat16, as float32 in `room`."""


@overload(given)
def _given(x, room):
    def as_float32(x, room):
        for i in range(len(x)):
            room[i] = wide(x[i])
        return room

    return as_float32 if _widens(x) else lambda x, room: x


def _widens(x: Any) -> bool:
    return x.dtype == types.uint16 and "avx512bf16" not in FEATURES


@njit(fastmath={"contract"})
def exp(x):
    """e^x of a float32 to about one unit in the last place, NaN for NaN: 2^n · e^r with |r| ≤ ln 2 / 2, e^r by its Taylor series.

    Must not be reordered: adding ROUND rounds to an integer, which is then in the lowest bits of the float.
    """
    x = LEAST if x < LEAST else x
    x = MOST if x > MOST else x
    shifted = x * LOG2_E + ROUND
    n = shifted - ROUND
    r = x - n * LN_2_HIGH - n * LN_2_LOW
    power = np.uint32((np.float32(shifted).view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)).view(np.float32)
    return ((((((T7 * r + T6) * r + T5) * r + T4) * r + T3) * r + T2) * r * r + r + ONE) * power


@njit
def magnitude(x):
    """The bits of a float32 without its sign: they have the order of the numbers, and NaN is the greatest."""
    return np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7FFFFFFF))


@njit
def from_line(array):
    """The array from its first whole cache line on: up to LINE bytes less."""
    return array[-array.ctypes.data % LINE // array.itemsize :]


@njit
def in_parts(rows, tile, most):
    """How many of the rows are taken at the same time: whole tiles, about as many each time, and up to `most` or one tile."""
    times = max(1, -(-rows // max(tile, most // tile * tile)))
    return max(1, -(-rows // (times * tile))) * tile


@njit
def team():
    """This thread's number, and how many threads there are."""
    return _thread(), _threads()


@njit
def share(count):
    """This thread's part of `count` rows: the first, and the one after the last."""
    me, threads = _thread(), _threads()
    return count * me // threads, count * (me + 1) // threads


@njit
def part_of(rows, tile, many, panels):
    """This thread's share of a product: the first row, the one after the last, and the same of panels. From `many` rows for each thread on,
    it has whole tiles of rows and all panels: no other thread then needs to prepare its rows."""
    threads = _threads()
    if rows < threads * many:
        first, last = share(panels)
        return 0, rows, first, last
    first, last = share(-(-rows // tile))
    return first * tile, min(last * tile, rows), 0, panels


STEPS, SMALLEST = np.float32(127), np.finfo(np.float32).tiny


@njit(error_model="numpy", fastmath=False)
def round_row(values, added, rounded):
    """Rounds to int8, with `added` added, which may make it unsigned. Returns the step. Whatever calls it gets the same numbers: fast
    arithmetic would be inherited, and would divide by the step, or fuse the product with the sum."""
    greatest = np.uint32(0)
    for i in range(len(values)):
        greatest = max(greatest, magnitude(wide(values[i])))
    step = np.uint32(greatest).view(np.float32) / STEPS
    step = step if step > SMALLEST or step != step else SMALLEST
    inverse = ONE / step  # one division, instead of one for every number
    for i in range(len(values)):
        nearest = np.float32(wide(values[i]) * inverse + ROUND)
        rounded[i] = np.uint8(nearest.view(np.uint32) + np.uint32(added))
    return step
