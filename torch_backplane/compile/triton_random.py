"""Random numbers in kernels that Inductor writes in Triton, equal to those of eager PyTorch on bp.

The functions are those of `kernel_functions.RANDOM`. The lower 32 bits of the counter are the number of the element,
and the upper bits identify the call.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from torch_backplane.kernels.templates.random import NARROW_RANGE as _NARROW_RANGE

NARROW_RANGE = tl.constexpr(_NARROW_RANGE)
TO_ONE = tl.constexpr(2.0**-24)


@triton.jit
def words(seed, counter, ELEMENTS: tl.constexpr):
    """Returns the four words of Philox4x32-10 for the block of an element. ELEMENTS: elements of a block."""
    block = counter.to(tl.uint32) // ELEMENTS
    call = (counter >> 32).to(tl.uint32)
    zero = call * 0
    return tl.philox(seed, block, zero, call, zero)


@triton.jit
def unit(word):
    """Returns a multiple of 2^-24 in [0, 1)."""
    return (word >> 8).to(tl.float32) * TO_ONE


@triton.jit
def uniform(seed, counter):
    """Returns float32 numbers in [0, 1)."""
    word0, word1, word2, word3 = words(seed, counter, 4)
    low = tl.where((counter & 1) != 0, word1, word0)
    high = tl.where((counter & 1) != 0, word3, word2)
    return unit(tl.where((counter & 2) != 0, high, low))


@triton.jit
def normal(seed, counter):
    """Returns standard normal float32 numbers, by the method of Box and Muller."""
    word0, word1, word2, word3 = words(seed, counter, 4)
    above_zero = (tl.where((counter & 2) != 0, word2, word0).to(tl.float32) + 1.0) * (2.0**-32)
    radius = tl.sqrt(-2.0 * tl.log(above_zero))
    angle = 6.283185307179586 * unit(tl.where((counter & 2) != 0, word3, word1))
    return radius * tl.where((counter & 1) != 0, tl.sin(angle), tl.cos(angle))


@triton.jit
def integer(seed, counter, low, high):
    """Returns int64 numbers in [low, high)."""
    width = high.to(tl.uint64) - low.to(tl.uint64)
    wide0, wide1, wide2, wide3 = words(seed, counter, 2)
    upper = tl.where((counter & 1) != 0, wide2, wide0).to(tl.uint64)
    lower = tl.where((counter & 1) != 0, wide3, wide1).to(tl.uint64)
    wide = (upper << 32) | lower
    word0, word1, word2, word3 = words(seed, counter, 4)
    even = tl.where((counter & 2) != 0, word2, word0)
    odd = tl.where((counter & 2) != 0, word3, word1)
    narrow = tl.where((counter & 1) != 0, odd, even).to(tl.uint64)
    divisor = tl.where(width == 0, width + 1, width)
    # Narrow ranges use one word: up to NARROW_RANGE, or powers of 2 up to 2^32, which divide 2^32.
    divides = (width <= 4294967296) & ((width & (width - 1)) == 0)
    is_narrow = (width != 0) & ((width <= NARROW_RANGE) | divides)
    draw = tl.where(is_narrow, narrow, wide)
    return (low.to(tl.uint64) + tl.where(width == 0, draw, draw % divisor)).to(tl.int64)
