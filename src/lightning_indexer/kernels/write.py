# SPDX-License-Identifier: Apache-2.0
"""Write index keys into the cache, in its format: quantise and scatter, and before that norm and rotary embedding.

One launch. Programs `(row tiles, 1 + H)`: column 0 writes the keys, the others norm and rotate a head of the queries.
"""

import math

import triton
import triton.language as tl

from lightning_indexer import cache
from lightning_indexer.kernels.common import nan_max
from lightning_indexer.kernels.formats import e4m3_code, float_of

GROUP = tl.constexpr(cache.GROUP)
MIDDLES = tl.constexpr(tuple(middle for middle, _ in cache.E2M1_MIDDLES))
FULL_TURN = tl.constexpr(2 * math.pi)
ONE_TURN = tl.constexpr(1 / (2 * math.pi))


@triton.jit
def normed(
    x, weight_ptr, frequency_ptr, positions, eps, ROWS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr
):  # fmt: skip
    """Rows `[ROWS, D]` float32, normed and rotated.

    y = x / sqrt(mean(x^2) + eps) * (1 + weight); dims d < ROTARY / 2 and d + ROTARY / 2 turn by position * frequency[d].
    """
    weight = 1.0 + tl.load(weight_ptr + tl.arange(0, DIM)).to(tl.float32)
    y = x * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 1) / DIM + eps))[:, None] * weight[None, :]
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        parts = tl.arange(0, DIM // ROTARY)[None, :, None]  # only the first one turns
        frequency = tl.load(frequency_ptr + tl.arange(0, HALF))
        angle = positions.to(tl.float32)[:, None, None] * frequency[None, None, :]
        # Whole turns off first: sines of large arguments are several times slower.
        turns = tl.floor(angle.to(tl.float64) * ONE_TURN + 0.5)
        angle = (angle.to(tl.float64) - turns * FULL_TURN).to(tl.float32)
        cos, sin = tl.cos(angle), tl.sin(angle)
        low, high = tl.split(y.reshape(ROWS, DIM // ROTARY, 2, HALF).permute(0, 1, 3, 2))
        turned_low = tl.where(parts == 0, low * cos - high * sin, low)
        turned_high = tl.where(parts == 0, high * cos + low * sin, high)
        y = tl.join(turned_low, turned_high).permute(0, 1, 3, 2).reshape(ROWS, DIM)
    return y


@triton.jit
def fp8_code(values, FNUZ: tl.constexpr, NATIVE: tl.constexpr):
    """float32 to 8-bit floats as bytes: to nearest even, saturating."""
    if NATIVE and (not FNUZ):
        code = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = e4m3_code(values, FNUZ).to(tl.uint8)
    return code


@triton.jit
def e2m1_code(magnitudes, scales):
    """Codes 0 to 7 of the e2m1 nearest to float32 `magnitudes / scales`, ties to the even one; 0 for NaN, or a scale of 0.

    As after a division rounded to float32, but by comparing with multiples of the scale: the middle between two e2m1 has three
    bits and an e4m3 scale four, so the products are exact, and a quotient is rounded to a middle only if it is one. Where the
    scale is 0 no magnitude is infinite.
    """
    scales = tl.where(scales == 0, float("inf"), scales)
    third = magnitudes >= MIDDLES[3] * scales
    second = magnitudes >= tl.where(third, MIDDLES[5] * scales, MIDDLES[1] * scales)
    middle = tl.where(
        third,
        tl.where(second, MIDDLES[6] * scales, MIDDLES[4] * scales),
        tl.where(second, MIDDLES[2] * scales, MIDDLES[0] * scales),
    )
    # A tie with the next even code is that, one with the next odd code is not.
    return tl.where(third, 4, 0) + tl.where(second, 2, 0) + (magnitudes > middle).to(tl.int32)


@triton.jit
def store_nvfp4(keys, place, inside, ROWS: tl.constexpr, DIM: tl.constexpr, NATIVE: tl.constexpr):
    """Keys `[ROWS, D]` float32 to the bytes at `place` `[ROWS]`: D/2 of pairs, then D/16 of scales."""
    groups = keys.reshape(ROWS, DIM // GROUP, GROUP)
    largest = tl.reduce(tl.abs(groups), 2, nan_max)
    scales = fp8_code(tl.div_rn(largest, 6.0), False, NATIVE)  # [ROWS, D / 16]
    sign = (groups.to(tl.int32, bitcast=True) >> 28) & 8
    codes = e2m1_code(tl.abs(groups), float_of(scales, False)[:, :, None]) | sign
    even, odd = tl.split(codes.reshape(ROWS, DIM // 2, 2))
    pairs = (even | (odd << 4)).to(tl.uint8)
    tl.store(place[:, None] + tl.arange(0, DIM // 2)[None, :], pairs, mask=inside[:, None])
    tl.store(place[:, None] + (DIM // 2 + tl.arange(0, DIM // GROUP))[None, :], scales, mask=inside[:, None])


@triton.jit(
    do_not_specialize=[
        "rows",
        "tokens",
        "key_stride",
        "slot_stride",
        "position_stride",
        "page_stride",
        "scales_stride",
        "q_row_stride",
        "q_head_stride",
        "out_row_stride",
        "out_head_stride",
        "eps",
    ],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "scales_ptr"],
)
def write_kernel(
    keys_ptr,  # [n, D]
    slots_ptr,  # [n] i64, any stride
    slot_stride,
    pages_ptr,  # [pages, B, row], bytes unless of 16- or 32-bit floats
    scales_ptr,  # [pages, B] f32
    q_ptr,  # [n, H, D]
    out_ptr,  # [n, H, D]
    positions_ptr,  # [n] i32 or i64, any stride
    position_stride,
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    frequency_ptr,  # [ROTARY / 2] f32
    rows,  # n
    tokens,  # pages * B
    key_stride,  # strides in units of so many elements, which says whether 16-byte accesses are aligned; but that of scales
    page_stride,
    scales_stride,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    eps,
    KEY_UNIT: tl.constexpr,
    PAGE_UNIT: tl.constexpr,
    Q_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,  # elements of a stored token
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,  # see kernels.formats
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,  # finite value of the format
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    OUT_FNUZ: tl.constexpr,  # queries of 8 bits are e4m3fnuz
    NATIVE: tl.constexpr,  # the GPU converts e4m3fn
    PDL: tl.constexpr,
):
    """See the module."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    wide = row.to(tl.int64)
    dims = tl.arange(0, DIM)
    head = (tl.program_id(1) - 1).to(tl.int64)
    if NORM:
        positions = tl.load(positions_ptr + wide * position_stride, mask=inside, other=0)
        if head >= 0:
            place = (q_ptr + wide * (q_row_stride * Q_UNIT) + head * (q_head_stride * Q_UNIT))[:, None]
            x = tl.load(place + dims[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
            y = normed(x, q_weight_ptr, frequency_ptr, positions, eps, ROWS, DIM, ROTARY)
            if out_ptr.dtype.element_ty == tl.uint8:
                y = fp8_code(y, OUT_FNUZ, NATIVE)
            out = (out_ptr + wide * (out_row_stride * OUT_UNIT) + head * (out_head_stride * OUT_UNIT))[:, None]
            tl.store(out + dims[None, :], y.to(out_ptr.dtype.element_ty), mask=inside[:, None])
            return
    slot = tl.load(slots_ptr + wide * slot_stride, mask=inside, other=-1)
    inside = (slot >= 0) & (slot < tokens)
    page = slot // BLOCK
    offset = slot % BLOCK
    place = (keys_ptr + wide * (key_stride * KEY_UNIT))[:, None]
    keys = tl.load(place + dims[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    if NORM:
        keys = normed(keys, k_weight_ptr, frequency_ptr, positions, eps, ROWS, DIM, ROTARY)
    start = pages_ptr + page * (page_stride.to(tl.int64) * PAGE_UNIT) + offset * ROW
    if FORMAT == "plain":
        tl.store(start[:, None] + dims[None, :], keys.to(pages_ptr.dtype.element_ty), mask=inside[:, None])
    elif FORMAT == "nvfp4":
        store_nvfp4(keys, start, inside, ROWS, DIM, NATIVE)
    else:
        if SCALED:
            factor = tl.div_rn(tl.reduce(tl.abs(keys), 1, nan_max), LARGEST)
            factor = tl.where((factor > 0) & (factor < float("inf")), factor, 1.0)
            tl.store(scales_ptr + page * scales_stride + offset, factor, mask=inside)
            keys = tl.div_rn(keys, factor[:, None])
        code = fp8_code(keys, FORMAT == "fp8_fnuz", NATIVE)
        tl.store(start[:, None] + dims[None, :], code, mask=inside[:, None])
