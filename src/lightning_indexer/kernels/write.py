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
QUARTER = tl.constexpr(math.pi / 2)
QUARTERS = tl.constexpr(2 / math.pi)
TO_WHOLE = tl.constexpr(1.5 * 2**52)  # a float64 plus this is a whole number, in its lowest bits
# x + x^3 (S0 + S1 x^2 + S2 x^4) and 1 - x^2 / 2 + x^4 (C0 + C1 x^2 + C2 x^4): sine and cosine of up to an eighth of a turn, to
# 4e-9, or 7e-8 as they are rounded. Fitted for this.
S0, S1, S2 = (tl.constexpr(value) for value in (-0.16666655242443085, 0.008332177996635437, -0.00019517235341481864))
C0, C1, C2 = (tl.constexpr(value) for value in (0.041666656732559204, -0.001388773089274764, 2.4477127226418816e-05))


# Of a group whose largest magnitude is a bf16 $3: the code of its e4m3 scale, as in `store_nvfp4`; 2^-14 / scale; 6 * 2^-14 as
# fp16, twice. The last two are 0 where the scale is 0 or NaN. A sixth of so few bits is right after one step of Newton's.
GROUP_SCALE = tl.constexpr("""{
    .reg .b32 h; .reg .b16 c, s, t; .reg .f32 a, q, r; .reg .pred p;
    min.NaN.f32 a, $3, 0f7149F2CA;
    mul.rn.f32 q, a, 0f3E2AAAAB; fma.rn.f32 r, q, 0fC0C00000, a; fma.rn.f32 q, r, 0f3E2AAAAB, q;
    cvt.rn.satfinite.e4m3x2.f32 c, 0f00000000, q;
    cvt.u32.u16 $0, c;
    cvt.rn.f16x2.e4m3x2 h, c; mov.b32 {s, t}, h; cvt.f32.f16 q, s;
    setp.gt.f32 p, q, 0f00000000;
    rcp.approx.ftz.f32 r, q; mul.rn.f32 r, r, 0f38800000;
    selp.f32 $1, r, 0f00000000, p; selp.b32 $2, 0x0E000E00, 0, p;
}""")
PAIR_CODES = """
    and.b32 a, ${word}, 0x7FFF7FFF;
    shl.b32 b, a, 16; mov.b32 f, b; and.b32 b, a, 0xFFFF0000; mov.b32 g, b;
    mul.rn.f32 f, f, $5; mul.rn.f32 g, g, $5;
    cvt.rn.f16x2.f32 a, g, f; min.f16x2 a, a, $6;
    shr.u32 b, a, 9; and.b32 b, b, 0x00010001; add.u32 a, a, b; add.u32 a, a, 0x00FF00FF;
    shr.u32 a, a, 9; and.b32 a, a, 0x00070007;
    shr.u32 b, ${word}, 12; and.b32 b, b, 0x00080008; or.b32 a, a, b;
    shr.u32 b, a, 12; or.b32 c{pair}, a, b;"""
# The e2m1 codes of eight bf16 in $1 to $4, by what GROUP_SCALE says in $5 and $6. As fp16, whose least normal value is then
# that of e2m1, codes are the upper bits, subnormal or not, rounded to nearest even. That is not one rounding too many: the
# quotient of a bf16 and an e4m3 is in the middle of two e2m1, or off by 1/256 of it and more, which fp16 tells apart.
EIGHT_CODES = tl.constexpr(
    "{ .reg .b32 a, b, c0, c1, c2, c3; .reg .f32 f, g;"
    + "".join(PAIR_CODES.format(word=1 + pair, pair=pair) for pair in range(4))
    + "prmt.b32 a, c0, c1, 0x0040; prmt.b32 b, c2, c3, 0x0040; prmt.b32 $0, a, b, 0x5410; }"
)
MAGNITUDES = tl.constexpr(0x7FFF7FFF)  # of two bf16


@triton.jit
def cos_and_sin(angle):
    """Cosine and sine of float32 angles of less than 2^31 quarters of a turn.

    About 30 instructions; those of tl have 400, most of them for angles that no rotation has.
    """
    wide = angle.to(tl.float64)
    whole = wide * QUARTERS + TO_WHOLE
    quarter = whole.to(tl.int64, bitcast=True).to(tl.int32)
    x = (wide - (whole - TO_WHOLE) * QUARTER).to(tl.float32)
    z = x * x
    sin = x + x * (z * (S0 + z * (S1 + z * S2)))
    cos = 1.0 + z * (z * (C0 + z * (C1 + z * C2)) - 0.5)
    turned = (quarter & 1) != 0
    sin, cos = tl.where(turned, cos, sin), tl.where(turned, sin, cos)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


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
        cos, sin = cos_and_sin(positions.to(tl.float32)[:, None, None] * frequency[None, None, :])
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


@triton.jit
def larger_pair(a, b):
    """The larger of two bf16, and of two others, in words; NaN stays."""
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def largest_of(a, b, c, d):
    """The largest magnitudes of four words of two bf16."""
    return larger_pair(larger_pair(a & MAGNITUDES, b & MAGNITUDES), larger_pair(c & MAGNITUDES, d & MAGNITUDES))


@triton.jit
def quarters(words):
    """The four parts `[R, G]` of words `[R, G, 4]`."""
    even, odd = tl.split(words.reshape(words.shape[0], words.shape[1], 2, 2))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def copy_nvfp4(source, place, wanted, stored, DIM: tl.constexpr):
    """As `store_nvfp4`, of keys that begin at `source` `[ROWS]`, bf16 aligned to 16 bytes: each thread has whole groups.

    14 instructions an element where that takes 34, and nothing goes through shared memory. Reads the keys that are `wanted`,
    and writes those that are `stored`.
    """
    group = tl.arange(0, DIM // GROUP)
    words = source.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + group[None, :] * (GROUP // 2)
    words = words[:, :, None] + tl.arange(0, 4)[None, None, :]
    a, b, c, d = quarters(tl.load(words, mask=wanted[:, None, None], other=0))
    e, f, g, h = quarters(tl.load(words + 4, mask=wanted[:, None, None], other=0))
    largest = larger_pair(largest_of(a, b, c, d), largest_of(e, f, g, h))
    largest = nan_max((largest << 16).to(tl.float32, bitcast=True), (largest & -65536).to(tl.float32, bitcast=True))
    scale, factor, most = tl.inline_asm_elementwise(
        GROUP_SCALE, "=r,=f,=r,f", [largest], dtype=(tl.int32, tl.float32, tl.int32), is_pure=True, pack=1
    )
    low = tl.inline_asm_elementwise(
        EIGHT_CODES, "=r,r,r,r,r,f,r", [a, b, c, d, factor, most], dtype=tl.int32, is_pure=True, pack=1
    )
    high = tl.inline_asm_elementwise(
        EIGHT_CODES, "=r,r,r,r,r,f,r", [e, f, g, h, factor, most], dtype=tl.int32, is_pure=True, pack=1
    )
    codes = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    tl.store(place.to(tl.pointer_type(tl.int64), bitcast=True)[:, None] + group[None, :], codes, mask=stored[:, None])
    tl.store(place[:, None] + (DIM // 2 + group)[None, :], scale.to(tl.uint8), mask=stored[:, None])


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
    PAIRED: tl.constexpr,  # to NVFP4, two at once
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
    stored = (slot >= 0) & (slot < tokens)
    page = slot // BLOCK
    offset = slot % BLOCK
    source = keys_ptr + wide * (key_stride * KEY_UNIT)
    start = pages_ptr + page * (page_stride.to(tl.int64) * PAGE_UNIT) + offset * ROW
    # One key does not wait for its slot. Of many a rank may have to store a part only.
    wanted = inside if ROWS == 1 else stored
    if PAIRED:
        copy_nvfp4(source, start, wanted, stored, DIM)
        return
    keys = tl.load(source[:, None] + dims[None, :], mask=wanted[:, None], other=0.0).to(tl.float32)
    if NORM:
        keys = normed(keys, k_weight_ptr, frequency_ptr, positions, eps, ROWS, DIM, ROTARY)
    if FORMAT == "plain":
        tl.store(start[:, None] + dims[None, :], keys.to(pages_ptr.dtype.element_ty), mask=stored[:, None])
    elif FORMAT == "nvfp4":
        store_nvfp4(keys, start, stored, ROWS, DIM, NATIVE)
    else:
        if SCALED:
            factor = tl.div_rn(tl.reduce(tl.abs(keys), 1, nan_max), LARGEST)
            factor = tl.where((factor > 0) & (factor < float("inf")), factor, 1.0)
            tl.store(scales_ptr + page * scales_stride + offset, factor, mask=stored)
            keys = tl.div_rn(keys, factor[:, None])
        code = fp8_code(keys, FORMAT == "fp8_fnuz", NATIVE)
        tl.store(start[:, None] + dims[None, :], code, mask=stored[:, None])
