"""Compiled kernels of the CPU path (Numba): the operations of `engine.ops`, attention of decodes, which reads blocks in place, and the
softmax between the two products that are the attention of longer spans.

Importing this module compiles them, which takes seconds, or loads what an earlier process compiled. It fails where Numba is missing or
finds nothing to compile for; `baton.engine.ops.choose` then stays with plain torch.

A kernel is a C function of one pointer, to its arguments as int64: addresses, sizes, and floats by their bits. So a call costs one
`struct.pack` and one foreign call. Where there is enough to do, all of torch's own OpenMP threads make it at once, each for its share
(`GOMP_parallel`): the threads of another pool would take the cores from the matrices in between.

bfloat16 is uint16 to Numba: widened by a shift, rounded to nearest even on the way back. All sums are float32.

The letters in shapes are those of `baton.engine.attention` and `baton.engine.ops`.
"""

import ctypes
import logging
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, overload
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from baton.engine.attention import KEY_STEPS, Decodes, Kernels, KvLayer, PagedKv
from baton.engine.checkpoint import LayerAttention
from baton.engine.linear import product
from baton.engine.ops import Ops
from baton.engine.sizes import rounded_up

log = logging.getLogger(__name__)

# Sums may be reordered, products fused into sums; NaN and infinity keep their meaning: they are how broken weights and KV are found.
SUMS = {"reassoc", "contract", "nsz"}
KERNEL = types.void(types.CPointer(types.int64))
EVERYTHING = 1 << 62  # keys that a query without a window sees
AHEAD = 32  # keys between the one that is asked for and the one that is used: blocks lie anywhere, so no processor guesses the next
LINE = 64  # bytes of a cache line
KEYS = 8  # that are summed at a time
LEAST_QUERIES, LEAST_KEYS = 16, 64  # whose scores are computed together, where there are so many
QUERIES = 256  # of a longer span at a time, fewer where SCORE_BYTES does not hold the scores of a group of heads
SCORE_BYTES = 8 << 20
SHARED_FROM = 1 << 16  # numbers to compute; for fewer, waking the other threads costs more than they save

STEPS, SMALLEST = np.float32(127), np.finfo(np.float32).tiny
LOG2_E = np.float32(math.log2(math.e))
LN_2_HIGH = np.float32(0.693359375)  # few digits, so that n times it is exact
LN_2_LOW = np.float32(math.log(2) - 0.693359375)
ROUND = np.float32(1.5 * 2**23)  # a float32 of this size has no digits behind the point
LEAST, MOST = np.float32(-87.0), np.float32(88.0)  # e to these is still a normal float32
T2, T3, T4, T5, T6, T7 = (np.float32(1 / math.factorial(k)) for k in range(2, 8))
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
BFLOAT16 = np.uint16(0)  # stands for its type
GELU = np.float32(2 * math.sqrt(2 / math.pi))
GELU_CUBE = np.float32(0.044715)

_thread = types.ExternalFunction("omp_get_thread_num", types.intc())
_threads = types.ExternalFunction("omp_get_num_threads", types.intc())


# --- memory and numbers ----------------------------------------------------------------------------------------------------------------


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An int64 as the address that it is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Asks for the cache line of `array[index]`; an index outside the array does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), "llvm.prefetch.p0"
        )
        wanted = builder.gep(context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]])
        builder.call(prefetch, [builder.bitcast(wanted, byte), flag(0), flag(3), flag(1)])  # to read, into every cache, data
        return context.get_dummy_value()

    return types.void(array, index), generate


@njit
def _int64s(address, size):
    return carray(_pointer(address), size, np.int64)


def _numbers(address, size, kind):
    """The memory at an address as an array of numbers of `kind`'s type."""


@overload(_numbers)
def _numbers_of(address, size, kind):
    if kind == types.uint16:
        return lambda address, size, kind: carray(_pointer(address), size, np.uint16)
    return lambda address, size, kind: carray(_pointer(address), size, np.float32)


def _wide(x):
    """As float32."""


@overload(_wide)
def _wide_of(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def _put(array, index, value):
    """`array[index] = value`, rounded to the array's type."""


@overload(_put)
def _put_into(array, index, value):
    def put_float32(array, index, value):
        array[index] = value

    def put_bfloat16(array, index, value):
        bits = np.float32(value).view(np.uint32)
        rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        array[index] = np.uint16(rounded) if value == value else np.uint16(0x7FC0)

    return put_float32 if array.dtype == types.float32 else put_bfloat16


@njit
def _real(bits):
    """The float64 with these bits, as float32."""
    return np.float32(np.int64(bits).view(np.float64))


@njit(fastmath={"contract"})
def _exp(x):
    """e^x of a float32 to about one unit in the last place, NaN for NaN: 2^n · e^r with |r| ≤ ln 2 / 2, e^r by its Taylor series.

    Never reordered: adding ROUND rounds to an integer, which is then found in the last digits of the float.
    """
    x = LEAST if x < LEAST else x
    x = MOST if x > MOST else x
    shifted = x * LOG2_E + ROUND
    n = shifted - ROUND
    r = x - n * LN_2_HIGH - n * LN_2_LOW
    power = np.uint32((np.float32(shifted).view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)).view(np.float32)
    return ((((((T7 * r + T6) * r + T5) * r + T4) * r + T3) * r + T2) * r * r + r + ONE) * power


@njit
def _share(count):
    """This thread's part of `count` rows."""
    me, threads = _thread(), _threads()
    return count * me // threads, count * (me + 1) // threads


# --- the operations between matrices ---------------------------------------------------------------------------------------------------


@njit(fastmath=SUMS, error_model="numpy")
def _add_rms_norm(arguments, kind):
    _, x_, y_, weight_, out_, rows, width, eps = arguments
    x, y, out = _numbers(x_, rows * width, kind), _numbers(y_, rows * width, kind), _numbers(out_, rows * width, kind)
    weight = _numbers(weight_, width, kind)
    first, last = _share(rows)
    for start in range(first * width, last * width, width):
        row, normed = x[start : start + width], out[start : start + width]
        if y_:
            added = y[start : start + width]
            for i in range(width):
                _put(row, i, _wide(row[i]) + _wide(added[i]))
        squares = ZERO
        for i in range(width):
            squares += _wide(row[i]) * _wide(row[i])
        scale = ONE / np.float32(math.sqrt(squares / np.float32(width) + _real(eps)))
        for i in range(width):
            _put(normed, i, _wide(row[i]) * scale * _wide(weight[i]))


@njit(fastmath=SUMS, error_model="numpy")
def _gated(arguments, kind):
    """gate · up / (1 + e^(-a · gate)): a = 1 is SiLU; a = 2 √(2/π) (1 + 0.044715 gate²) is GELU's tanh form."""
    _, gate_up_, out_, rows, width, gelu = arguments
    gate_up, out = _numbers(gate_up_, 2 * rows * width, kind), _numbers(out_, rows * width, kind)
    first, last = _share(rows)
    for start in range(first * width, last * width, width):
        gates, ups, row = gate_up[2 * start : 2 * start + width], gate_up[2 * start + width :], out[start : start + width]
        if gelu:
            for i in range(width):
                gate = _wide(gates[i])
                sharp = gate * GELU * (ONE + GELU_CUBE * gate * gate)
                _put(row, i, gate / (ONE + _exp(-sharp)) * _wide(ups[i]))
        else:
            for i in range(width):
                gate = _wide(gates[i])
                _put(row, i, gate / (ONE + _exp(-gate)) * _wide(ups[i]))


@njit(fastmath=SUMS, error_model="numpy")
def _rotate(arguments, kind):
    _, x_, row_stride, head_stride, rotation_, rows, heads, dim = arguments
    x, rotation = _numbers(x_, rows * row_stride, kind), _numbers(rotation_, rows * dim, ZERO)
    first, last = _share(rows)
    for row in range(first, last):
        turns = rotation[row * dim : (row + 1) * dim]
        for head in range(heads):
            pairs = x[row * row_stride + head * head_stride :]
            for i in range(dim // 2):
                real, imaginary, cosine, sine = _wide(pairs[2 * i]), _wide(pairs[2 * i + 1]), turns[2 * i], turns[2 * i + 1]
                _put(pairs, 2 * i, real * cosine - imaginary * sine)
                _put(pairs, 2 * i + 1, real * sine + imaginary * cosine)


# --- matrices of int8 ------------------------------------------------------------------------------------------------------------------


@njit(error_model="numpy")
def _quantize(arguments, kind):
    """The same numbers as `Ops.quantize`, to the last bit."""
    _, x_, out_, steps_, rows, width = arguments
    x, steps, out = _numbers(x_, rows * width, kind), _numbers(steps_, rows, ZERO), carray(_pointer(out_), rows * width, np.uint8)
    first, last = _share(rows)
    for row in range(first, last):
        steps[row] = _round_row(x[row * width : (row + 1) * width], out[row * width : (row + 1) * width])


@njit(error_model="numpy")
def _round_row(values, rounded):
    # As integers, floats without their sign are in the same order, and a NaN is the greatest.
    greatest = np.uint32(0)
    for i in range(len(values)):
        greatest = max(greatest, np.uint32(np.float32(_wide(values[i])).view(np.uint32) & np.uint32(0x7FFFFFFF)))
    step = np.uint32(greatest).view(np.float32) / STEPS
    step = step if step > SMALLEST or step != step else SMALLEST
    for i in range(len(values)):
        nearest = np.float32(_wide(values[i]) / step + ROUND)
        rounded[i] = np.uint8(nearest.view(np.uint32) + np.uint32(128))
    return step


@njit(error_model="numpy")
def _multiply_row(arguments, kind):
    """What `_quantize`, oneDNN and `_dequantize` make of a single row, to the last bit: such a product is short, three calls are not."""
    _, x_, matrix_, steps_, sums_, bias_, out_, width, outs = arguments
    x, rounded = _numbers(x_, width, kind), np.empty(width, np.uint8)
    matrix, sums = carray(_pointer(matrix_), outs * width, np.int8), carray(_pointer(sums_), outs, np.int32)
    steps, bias, out = _numbers(steps_, outs, ZERO), _numbers(bias_, outs, kind), _numbers(out_, outs, kind)
    step = _round_row(x, rounded)
    first, last = _share(outs)
    for i in range(first, last):
        weights = matrix[i * width : (i + 1) * width]
        product = np.int32(0)
        for k in range(width):
            product += np.int32(np.int32(rounded[k]) * np.int32(weights[k]))
        value = np.float32(np.int32(product - np.int32(128) * sums[i])) * steps[i] * step
        if bias_:
            value += _wide(bias[i])
        _put(out, i, value)


@njit(error_model="numpy")
def _dequantize(arguments, kind):
    """The same numbers as `Ops.dequantize`, to the last bit."""
    _, products_, steps_, bias_, out_, rows, width = arguments
    products, steps = _numbers(products_, rows * width, ZERO), _numbers(steps_, rows, ZERO)
    bias, out = _numbers(bias_, width, kind), _numbers(out_, rows * width, kind)
    first, last = _share(rows)
    for row in range(first, last):
        values, scaled, step = products[row * width : (row + 1) * width], out[row * width : (row + 1) * width], steps[row]
        if bias_:
            for i in range(width):
                _put(scaled, i, values[i] * step + _wide(bias[i]))
        else:
            for i in range(width):
                _put(scaled, i, values[i] * step)


# --- attention -------------------------------------------------------------------------------------------------------------------------


@njit(fastmath=SUMS, error_model="numpy")
def _attend(arguments, kind):
    """One query a sequence. Its key and value go to their slot; then it sees the slots up to its own, or the window's, and no other."""
    _, pool_, q_, q_stride, kv_, kv_stride, out_, index_, pool_size, index_size, size, heads = arguments[:12]
    kv_heads, dim, value_dim, parts, block_size, layers, layer, window, softcap, scale = arguments[12:]
    pool, index = _numbers(pool_, pool_size, kind), _int64s(index_, index_size)
    positions, bases, tables = index[:size], index[size : 2 * size], index[2 * size :]
    q, kv = _numbers(q_, size * q_stride, kind), _numbers(kv_, size * kv_stride, kind)
    out = _numbers(out_, size * heads * value_dim, kind)
    group, head_size = heads // kv_heads, block_size * dim
    most = _whole(min(window, positions.max() + 1))
    at = np.empty(most, np.int64)  # where the keys of a sequence begin in the pool, those of head 0
    query = np.empty((group, dim), np.float32)
    scores = np.empty((group, most), np.float32)
    totals, sums = np.empty(group, np.float32), np.empty((group, value_dim), np.float32)
    me, threads = _thread(), _threads()
    found, done, total = -1, 0, (positions.sum() + size) * kv_heads
    for b in range(size):
        length = positions[b] + 1
        count = min(window, length)
        for head in range(kv_heads):
            if done * threads // total == me:
                if found != b:
                    _find_keys(tables[bases[b] :], length - count, count, block_size, (layers, layer, parts * kv_heads), dim, at)
                    found = b
                key, value = head * head_size, ((parts - 1) * kv_heads + head) * head_size
                for part in range(parts):
                    new = (b * kv_stride) + (part * kv_heads + head) * dim
                    slot = at[count - 1] + (part * kv_heads + head) * head_size
                    pool[slot : slot + dim] = kv[new : new + dim]
                for g in range(group):
                    row = q[b * q_stride + (head * group + g) * dim :]
                    for d in range(dim):
                        query[g, d] = _wide(row[d]) * _real(scale)
                _score(pool, at, key, count, query, scores)
                for g in range(group):
                    totals[g] = _weigh(scores[g], count, _real(softcap))
                    scores[g, count : _whole(count)] = ZERO
                _sum_values(pool, at, value, count, scores, sums)
                for g in range(group):
                    row = (b * heads + head * group + g) * value_dim
                    for d in range(value_dim):
                        _put(out, row + d, sums[g, d] / totals[g])
            done += length


@njit
def _whole(count):
    return -(-count // KEYS) * KEYS


@njit
def _find_keys(table, first, count, block_size, where, dim, at):
    """`at[i]` of the key at position `first + i`. The last one stands again up to a whole number of KEYS, there to get no weight."""
    layers, layer, rows = where
    i, block, slot = 0, first // block_size, first % block_size
    while i < count:
        start = (table[block] * layers + layer) * rows * block_size * dim
        for offset in range(slot, min(block_size, slot + count - i)):
            at[i] = start + offset * dim
            i += 1
        block, slot = block + 1, 0
    for j in range(count, _whole(count)):
        at[j] = at[count - 1]


@njit(fastmath=SUMS, error_model="numpy")
def _score(pool, at, head, count, query, scores):
    """q kᵀ: each key is read once, for all queries that share it, four at a time."""
    group, dim = query.shape
    for i in range(0, _whole(count), 4):
        k0, k1, k2, k3 = pool[at[i] + head :], pool[at[i + 1] + head :], pool[at[i + 2] + head :], pool[at[i + 3] + head :]
        if i + AHEAD < _whole(count):
            for ahead in range(i + AHEAD, i + AHEAD + 4):
                for d in range(0, dim, LINE // pool.itemsize):
                    _prefetch(pool, at[ahead] + head + d)
        for g in range(group):
            row, out = query[g], scores[g, i:]
            s0 = s1 = s2 = s3 = ZERO
            for d in range(dim):
                s0 += row[d] * _wide(k0[d])
                s1 += row[d] * _wide(k1[d])
                s2 += row[d] * _wide(k2[d])
                s3 += row[d] * _wide(k3[d])
            out[0], out[1], out[2], out[3] = s0, s1, s2, s3


@njit
def _greatest(values, count):
    """As integers, the digits of negative ones turned round, floats are in the same order; those a processor compares many at a time."""
    greatest = np.int32(-(2**31))
    for i in range(count):
        greatest = max(greatest, _in_order(values[i]))
    return np.int32(_in_order(np.int32(greatest).view(np.float32))).view(np.float32)


@njit
def _in_order(x):
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(fastmath=SUMS, error_model="numpy")
def _weigh(scores, count, softcap):
    """softmax's numerators in place, of scores that are capped first where there is a cap. Answers their sum."""
    if softcap > ZERO:
        for i in range(count):
            # cap · tanh(s / cap), tanh(x) = 1 - 2 / (e^2x + 1)
            scores[i] = softcap - TWO * softcap / (_exp(TWO * scores[i] / softcap) + ONE)
    greatest, total = _greatest(scores, count), ZERO
    for i in range(count):
        scores[i] = _exp(scores[i] - greatest)
        total += scores[i]
    return total


@njit(fastmath=SUMS, error_model="numpy")
def _sum_values(pool, at, head, count, weights, sums):
    """Each value is read once, for all queries that share it, eight at a time: the sums are then read and written an eighth as often."""
    group, dim = sums.shape
    sums[:] = ZERO
    for i in range(0, _whole(count), 8):
        v0, v1, v2, v3 = pool[at[i] + head :], pool[at[i + 1] + head :], pool[at[i + 2] + head :], pool[at[i + 3] + head :]
        v4, v5, v6, v7 = pool[at[i + 4] + head :], pool[at[i + 5] + head :], pool[at[i + 6] + head :], pool[at[i + 7] + head :]
        if i + AHEAD < _whole(count):
            for ahead in range(i + AHEAD, i + AHEAD + 8):
                for d in range(0, dim, LINE // pool.itemsize):
                    _prefetch(pool, at[ahead] + head + d)
        for g in range(group):
            w, out = weights[g, i:], sums[g]
            w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
            for d in range(dim):
                early = (w0 * _wide(v0[d]) + w1 * _wide(v1[d])) + (w2 * _wide(v2[d]) + w3 * _wide(v3[d]))
                late = (w4 * _wide(v4[d]) + w5 * _wide(v5[d])) + (w6 * _wide(v6[d]) + w7 * _wide(v7[d]))
                out[d] += early + late


@njit
def _store(arguments, kind):
    _, kv_, kv_stride, pool_, pool_size, slots_, tokens, rows, dim = arguments
    kv, pool = _numbers(kv_, tokens * kv_stride, kind), _numbers(pool_, pool_size, kind)
    slots = _int64s(slots_, tokens * rows)
    first, last = _share(tokens)
    for token in range(first, last):
        for row in range(rows):
            new, slot = token * kv_stride + row * dim, slots[token * rows + row] * dim
            pool[slot : slot + dim] = kv[new : new + dim]


@njit(error_model="numpy")
def _weigh_span(arguments, kind):
    """Rows of scores, over and over those of `n` queries in order, of which the first sees `seen` keys, the next one more, and so on.
    `weights` may lie where `scores` do."""
    _, scores_, weights_, totals_, rows, keys, n, seen, window, softcap = arguments
    scores, weights, totals = _numbers(scores_, rows * keys, ZERO), _numbers(weights_, rows * keys, kind), _numbers(totals_, rows, ZERO)
    first, last = _share(rows)
    for row in range(first, last):
        end = seen + row % n
        at, begin = row * keys, max(0, end - window)
        precise, rounded = scores[at + begin : at + end], weights[at + begin : at + end]
        totals[row] = _weigh(precise, end - begin, _real(softcap))
        if weights_ != scores_:
            for i in range(end - begin):
                _put(rounded, i, precise[i])
        weights[at : at + begin] = 0
        weights[at + end : at + keys] = 0


# --- the C functions, each for both types of numbers -----------------------------------------------------------------------------------


def _function(kernel: Callable[[Any], None]) -> Any:
    """Compiled, and kept on disk where there is a place for that: beside this file, under the user's cache, or in NUMBA_CACHE_DIR."""
    try:
        FunctionCache(kernel)
    except RuntimeError:
        log.warning("nowhere to keep compiled kernels: every start compiles them; NUMBA_CACHE_DIR can name a folder")
        return cfunc(KERNEL)(kernel)
    return cfunc(KERNEL, cache=True)(kernel)


@_function
def _add_rms_norm_function(pointer):
    arguments = to_fixed_tuple(carray(pointer, 8), 8)
    if arguments[0]:
        _add_rms_norm(arguments, BFLOAT16)
    else:
        _add_rms_norm(arguments, ZERO)


@_function
def _gated_function(pointer):
    arguments = to_fixed_tuple(carray(pointer, 6), 6)
    if arguments[0]:
        _gated(arguments, BFLOAT16)
    else:
        _gated(arguments, ZERO)


@_function
def _rotate_function(pointer):
    arguments = to_fixed_tuple(carray(pointer, 8), 8)
    if arguments[0]:
        _rotate(arguments, BFLOAT16)
    else:
        _rotate(arguments, ZERO)


@_function
def _quantize_function(pointer):
    arguments = to_fixed_tuple(carray(pointer, 6), 6)
    if arguments[0]:
        _quantize(arguments, BFLOAT16)
    else:
        _quantize(arguments, ZERO)


@_function
def _multiply_row_function(pointer):
    arguments = to_fixed_tuple(carray(pointer, 9), 9)
    if arguments[0]:
        _multiply_row(arguments, BFLOAT16)
    else:
        _multiply_row(arguments, ZERO)


@_function
def _dequantize_function(pointer):
    arguments = to_fixed_tuple(carray(pointer, 7), 7)
    if arguments[0]:
        _dequantize(arguments, BFLOAT16)
    else:
        _dequantize(arguments, ZERO)


@_function
def _attend_function(pointer):
    arguments = to_fixed_tuple(carray(pointer, 22), 22)
    if arguments[0]:
        _attend(arguments, BFLOAT16)
    else:
        _attend(arguments, ZERO)


@_function
def _store_function(pointer):
    arguments = to_fixed_tuple(carray(pointer, 9), 9)
    if arguments[0]:
        _store(arguments, BFLOAT16)
    else:
        _store(arguments, ZERO)


@_function
def _weigh_span_function(pointer):
    arguments = to_fixed_tuple(carray(pointer, 10), 10)
    if arguments[0]:
        _weigh_span(arguments, BFLOAT16)
    else:
        _weigh_span(arguments, ZERO)


# --- from Python -----------------------------------------------------------------------------------------------------------------------


class Kernel:
    """A C function from above. `format`: of its arguments behind the first, as `struct` has them: q an int64, d a float64."""

    def __init__(self, function: Any, format: str) -> None:
        self._address: int = function.address
        self._pack = struct.Struct(f"q{format}").pack
        # A short call keeps the GIL: to give it away and wait for it would take longer.
        self._alone = ctypes.PYFUNCTYPE(None, ctypes.c_char_p)(self._address)

    def __call__(self, work: int, dtype: torch.dtype, *arguments: float) -> None:
        """`work`: how many numbers it computes with, about."""
        packed = self._pack(dtype == torch.bfloat16, *arguments)
        threads = torch.get_num_threads() if work >= SHARED_FROM else 1
        if threads == 1:
            self._alone(packed)
        else:
            _together(self._address, packed, threads, 0)


def _team() -> Any:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP that torch has loaded. AttributeError where it is another kind."""
    together = ctypes.CDLL(None).GOMP_parallel
    together.restype, together.argtypes = None, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    return together


_together = _team()
_kernels = {
    "add_rms_norm": Kernel(_add_rms_norm_function, "6qd"),
    "gated": Kernel(_gated_function, "5q"),
    "rotate": Kernel(_rotate_function, "7q"),
    "quantize": Kernel(_quantize_function, "5q"),
    "multiply_row": Kernel(_multiply_row_function, "8q"),
    "dequantize": Kernel(_dequantize_function, "6q"),
    "attend": Kernel(_attend_function, "19q2d"),
    "store": Kernel(_store_function, "8q"),
    "weigh_span": Kernel(_weigh_span_function, "8qd"),
}


def attend_in_place(paged: PagedKv, layer: int, q: Tensor, kv: Tensor, out: Tensor, decodes: Decodes, how: LayerAttention) -> None:
    """An `baton.engine.attention.AttendInPlace`: every key and value is read once, where it lies, for all the queries that share it."""
    _, layers, parts, kv_heads, block_size, dim = paged.pool.shape
    heads, q, kv = q.shape[1], _rows(q), _rows(kv)
    _kernels["attend"](
        decodes.keys * kv_heads * dim,
        q.dtype,
        paged.pool.data_ptr(),
        q.data_ptr(),
        q.stride(0),
        kv.data_ptr(),
        kv.stride(0),
        out.data_ptr(),
        decodes.index.data_ptr(),
        paged.pool.numel(),
        len(decodes.index),
        decodes.size,
        heads,
        kv_heads,
        dim,
        paged.value_dim,
        parts,
        block_size,
        layers,
        layer,
        EVERYTHING if how.window is None else how.window,
        how.softcap or 0.0,
        dim**-0.5 if how.scale is None else how.scale,
    )


def attend_span(q: Tensor, k: Tensor, v: Tensor, keys: int, how: LayerAttention) -> Tensor:
    """An `engine.attention.AttendSpan`: a few queries at a time, so that their scores stay in the caches and little is computed that no
    query sees, in products of few different sizes. Scores are float32; in bfloat16 the weights are rounded as the values are."""
    (n, heads, dim), (kv_heads, size, value_dim) = q.shape, v.shape
    group, window = heads // kv_heads, EVERYTHING if how.window is None else how.window
    scale = dim**-0.5 if how.scale is None else how.scale
    queries, precise = (q.float() * scale).view(n, kv_heads, group, dim), k.float()
    out = q.new_empty(n, kv_heads, group, value_dim)
    for first, last in _parts(n, min(QUERIES, max(1, SCORE_BYTES // (4 * group * size)))):
        count, seen = last - first, keys - n + first + 1  # by the first of them
        end, start = seen + count - 1, max(0, seen - window)
        width = min(size, max(LEAST_KEYS, rounded_up(end - start, KEY_STEPS)))
        start = max(0, end - width)
        near, rows = slice(start, start + width), group * count
        asking = queries[first:last].permute(1, 2, 0, 3).reshape(kv_heads, rows, dim)
        weights, totals = [], q.new_empty(kv_heads, group, count, 1, dtype=torch.float32)
        for head in range(kv_heads):
            scores = product(asking[head], precise[head, near].t())
            weights.append(scores if q.dtype == torch.float32 else torch.empty_like(scores, dtype=q.dtype))
            addresses = scores.data_ptr(), weights[-1].data_ptr(), totals[head].data_ptr()
            _kernels["weigh_span"](8 * rows * width, q.dtype, *addresses, rows, width, count, seen - start, window, how.softcap or 0.0)
        sums = torch.stack([product(mine, v[head, near]) for head, mine in enumerate(weights)]).view(kv_heads, group, count, value_dim)
        torch.div(sums.permute(2, 0, 1, 3), totals.permute(2, 0, 1, 3), out=out[first:last])
    return out.view(n, heads * value_dim)


def _parts(n: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover `range(n)`, each a power of two long. The last ones may overlap: a query computed twice is another size saved."""
    done = 0
    while done < n:
        count = 1 << (max(LEAST_QUERIES, min(n - done, most)) - 1).bit_length()
        while count > min(n, most):
            count //= 2
        done = min(done + count, n)
        yield done - count, done


def _rows(x: Tensor) -> Tensor:
    """x, its rows contiguous."""
    return x if x[0].is_contiguous() else x.contiguous()


def store(kv: Tensor, kv_layer: KvLayer, slots: Tensor) -> None:
    """As `baton.engine.attention.store`."""
    kv, dim = _rows(kv), kv.shape[-1]
    stored, row = kv_layer.slots.data_ptr(), kv.shape[1] * kv.shape[2]
    _kernels["store"](
        kv.numel(), kv.dtype, kv.data_ptr(), kv.stride(0), stored, kv_layer.slots.numel(), slots.data_ptr(), len(kv), row, dim
    )


ATTENTION = Kernels(attend_in_place, attend_span, store)


class CompiledOps(Ops):
    """float32 and bfloat16 on the CPU."""

    attention = ATTENTION

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if not x.is_contiguous() or weight.dtype != x.dtype:
            return super().add_rms_norm(x, y, weight, eps)
        rows, width = x.shape
        out = torch.empty_like(x)
        y = y if y is None else y.contiguous()
        added = 0 if y is None else y.data_ptr()
        _kernels["add_rms_norm"](rows * width, x.dtype, x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), rows, width, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up.contiguous(), gelu=False)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up.contiguous(), gelu=True)

    def _gated(self, gate_up: Tensor, gelu: bool) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        _kernels["gated"](2 * rows * width, gate_up.dtype, gate_up.data_ptr(), out.data_ptr(), rows, width, gelu)
        return out

    def rotate_(self, qk: Tensor, rotation: Tensor) -> None:
        if qk.stride(2) != 1:
            return super().rotate_(qk, rotation)
        rows, heads, dim = qk.shape
        rotation = rotation.contiguous()
        strides, turns = (qk.stride(0), qk.stride(1)), rotation.data_ptr()
        _kernels["rotate"](rows * heads * dim, qk.dtype, qk.data_ptr(), *strides, turns, rows, heads, dim)
        return None

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows, width = x.shape
        out, steps = x.new_empty(rows, width, dtype=torch.uint8), x.new_empty(rows, dtype=torch.float32)
        _kernels["quantize"](rows * width, x.dtype, x.data_ptr(), out.data_ptr(), steps.data_ptr(), rows, width)
        return out, steps

    def row_multiplier(self, matrix: Tensor, steps: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        (outs, width), sums = matrix.shape, matrix.sum(dim=1, dtype=torch.int32)

        def multiply(x: Tensor) -> Tensor:
            x, out = x.contiguous(), x.new_empty(1, outs)
            fixed = matrix.data_ptr(), steps.data_ptr(), sums.data_ptr(), 0 if bias is None else bias.data_ptr()
            _kernels["multiply_row"](outs * width, x.dtype, x.data_ptr(), *fixed, out.data_ptr(), width, outs)
            return out

        return multiply

    def dequantize(self, products: Tensor, steps: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows, width = products.shape
        out = products if dtype == torch.float32 else products.new_empty(rows, width, dtype=dtype)
        added = 0 if bias is None else bias.data_ptr()
        _kernels["dequantize"](rows * width, dtype, products.data_ptr(), steps.data_ptr(), added, out.data_ptr(), rows, width)
        return out
