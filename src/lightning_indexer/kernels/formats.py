# SPDX-License-Identifier: Apache-2.0
"""Keys of a page as the matrix unit takes them, from every cache format. The only kernels that know how keys are stored.

Keys of 8 and 4 bits are widened in registers, to the 16-bit dtype of the products (TYPE): nothing is widened in
memory, and every product is exact. (The 8-bit matrix instruction of Hopper would save the widening, but it sums in far fewer
bits than float32: over 128 dims of unit keys and queries its scores were off by up to 0.03 on an H200, 2026-11-30.)

A dot product may sum its dims in any order, and a block's maximum take its tokens in any order, so both are put in the one
order in which no key has to move between threads. A row of a 16-bit operand lies with four threads, and each holds four
elements of every 16 dims. Here each of the four loads 16 neighbouring dims (16 bytes of fp8; 8 of NVFP4, one group with its
scale) and passes them on, four to each product; `key_dim` says which dim that puts in which place, and queries are loaded
alike. `key_token` does the same for the tokens: a warp loads 8 rows at a time, and takes 16 to the product.
"""

import triton
import triton.language as tl

WARPS = tl.constexpr(4)  # that `key_token` is made for; with others keys move through shared memory

# A word of four e4m3 bytes to four bf16, or fp16. Exact: also subnormals, NaN stays NaN.
TO_BF16 = tl.constexpr("""{
    .reg .b16 a, b, p, q; .reg .b32 c, d; .reg .f32 e, f, g, h;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 c, a;
    cvt.rn.f16x2.e4m3x2 d, b;
    mov.b32 {p, q}, c; cvt.f32.f16 e, p; cvt.f32.f16 f, q;
    mov.b32 {p, q}, d; cvt.f32.f16 g, p; cvt.f32.f16 h, q;
    cvt.rn.bf16x2.f32 $0, f, e;
    cvt.rn.bf16x2.f32 $1, h, g;
}""")
TO_FP16 = tl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")
# The eight magnitudes of e2m1 times a scale (fp16, twice, in $2), as e4m3: all that a group can hold. The products are exact
# in fp16, so they are rounded once.
MAGNITUDES = tl.constexpr("""{
    .reg .b16 a, b, c, d; .reg .b32 x, y, z, w;
    mov.b32 x, 0x38000000; mov.b32 y, 0x3E003C00; mov.b32 z, 0x42004000; mov.b32 w, 0x46004400;
    mul.rn.f16x2 x, $2, x; mul.rn.f16x2 y, $2, y; mul.rn.f16x2 z, $2, z; mul.rn.f16x2 w, $2, w;
    cvt.rn.satfinite.e4m3x2.f16x2 a, x; cvt.rn.satfinite.e4m3x2.f16x2 b, y;
    cvt.rn.satfinite.e4m3x2.f16x2 c, z; cvt.rn.satfinite.e4m3x2.f16x2 d, w;
    mov.b32 $0, {a, b}; mov.b32 $1, {c, d};
}""")
# Two of a token's eight scales in $2, those that selector $3 says, as fp16: each twice.
SCALES = tl.constexpr("""{
    .reg .b16 s, r, a, b; .reg .b32 x, y, f;
    mov.b64 {x, y}, $2; prmt.b32 f, x, y, $3; mov.b32 {s, r}, f; cvt.rn.f16x2.e4m3x2 f, s;
    mov.b32 {a, b}, f; mov.b32 $0, {a, a}; mov.b32 $1, {b, b};
}""")
# Eight e2m1 codes in $2 to two words of e4m3, by the magnitudes $3, $4: a byte permute takes four codes at once as its
# selector, and another brings their signs to the tops of the bytes.
CHOSEN = tl.constexpr("""{
    .reg .b32 m, n, e, v, s;
    and.b32 m, $2, 0x77777777; shr.u32 n, m, 16; shl.b32 e, $2, 4;
    prmt.b32 v, $3, $4, m; prmt.b32 s, e, $2, 0x5140; lop3.b32 $0, v, s, 0x80808080, 0x78;
    prmt.b32 v, $3, $4, n; prmt.b32 s, e, $2, 0x7362; lop3.b32 $1, v, s, 0x80808080, 0x78;
}""")


@triton.jit
def key_dim(DIM: tl.constexpr, FORMAT: tl.constexpr):
    """The head dim of each place of a product: all of them, or of packed formats the first 64; the others follow alike."""
    if FORMAT == "plain":
        dim = tl.arange(0, DIM)
    else:  # 16-dim step, half, thread, element of a pair -> thread, step, half, element
        place = tl.arange(0, 64)
        dim = place % 8 // 2 * 16 + place // 16 * 4 + place % 16 // 8 * 2 + place % 2
    return dim


@triton.jit
def key_token(BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """The token of a page that each row `[BLOCK]` of its keys is."""
    row = tl.arange(0, BLOCK)
    if FORMAT == "plain":
        token = row
    else:  # warp, upper or lower 8 rows, row -> upper or lower, warp, row
        rows: tl.constexpr = 16 * WARPS
        token = row // rows * rows + row % 16 // 8 * (8 * WARPS) + row % rows // 16 * 8 + row % 8
    return token


@triton.jit
def load_queries(places, inside, TYPE: tl.constexpr, BYTES: tl.constexpr, SENT: tl.constexpr):
    """Queries as TYPE, 0 where not inside.

    BYTES: of e4m3fnuz, which not every Triton has as a type. SENT: by another GPU during this launch.
    """
    modifier: tl.constexpr = ".cg" if SENT else ""
    if BYTES:
        queries = float_of(tl.load(places, mask=inside, other=0, cache_modifier=modifier), True).to(TYPE)
    else:
        queries = tl.load(places, mask=inside, other=0.0, cache_modifier=modifier).to(TYPE)
    return queries


@triton.jit
def load_columns(places, inside, DIM: tl.constexpr, TYPE: tl.constexpr, FORMAT: tl.constexpr, SENT: tl.constexpr):
    """Queries that begin at `places` `[columns]`, as `page_dots` takes them: `[dims, columns]`, and the upper dims."""
    places = places[None, :] + key_dim(DIM, FORMAT)[:, None]
    coded: tl.constexpr = places.dtype.element_ty == tl.uint8
    queries = load_queries(places, inside, TYPE, coded, SENT)
    upper = queries
    if (FORMAT != "plain") and (DIM == 128):
        upper = load_queries(places + 64, inside, TYPE, coded, SENT)
    return queries, upper


@triton.jit
def page_place(pages_ptr, page, page_stride, num_pages):
    """Where a page is stored; a page id outside the cache is clamped into it."""
    return pages_ptr + tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64) * page_stride


@triton.jit
def load_page(place, BLOCK: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """One page as it is stored. Three tensors, as `page_dots` takes them."""
    token = tl.arange(0, BLOCK)
    if FORMAT == "plain":
        first = tl.load(place + token[:, None] * DIM + tl.arange(0, DIM)[None, :])
        second = first
        scales = first
    elif FORMAT == "nvfp4":
        first = load_codes(place, 0, BLOCK, DIM)
        second = load_codes(place, 4, BLOCK, DIM) if DIM == 128 else first
        scales = load_scales(place, BLOCK, DIM)
    else:
        place = place.to(tl.pointer_type(tl.int32), bitcast=True)
        first = tl.load(place + token[:, None] * (DIM // 4) + tl.arange(0, DIM // 4)[None, :])
        second = first
        scales = first
    return first, second, scales


@triton.jit
def load_codes(place, GROUP: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Codes of four groups of an NVFP4 page, 16 in 8 bytes `[B, 4]`."""
    token = tl.arange(0, BLOCK)
    group = GROUP + tl.arange(0, 4)
    if DIM == 128:
        codes = tl.load(place.to(tl.pointer_type(tl.int64), bitcast=True) + token[:, None] * 9 + group[None, :])
    else:  # rows are aligned to 4 bytes only
        word = place.to(tl.pointer_type(tl.int32), bitcast=True) + token[:, None] * 9 + group[None, :] * 2
        codes = (tl.load(word).to(tl.int64) & 0xFFFFFFFF) | (tl.load(word + 1).to(tl.int64) << 32)
    return codes


@triton.jit
def load_scales(place, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """All scales of each token of an NVFP4 page in 8 bytes, for each of its four threads `[B, 4]`."""
    word: tl.constexpr = tl.int64 if DIM == 128 else tl.int32
    place = place.to(tl.pointer_type(word), bitcast=True)
    return tl.load(for_all_groups(place + tl.arange(0, BLOCK) * 9 + 8, BLOCK)).to(tl.int64)


@triton.jit
def for_all_groups(places, BLOCK: tl.constexpr):
    """Addresses of tokens, for each of their four threads `[B, 4]`.

    Said to be neighbours, which they are not, so that the compiler lays them out as it does the codes: in another layout they
    would pass through shared memory. It does not read several at once, as rows are aligned to one of these words.
    """
    return tl.max_contiguous(tl.broadcast_to(places[:, None], (BLOCK, 4)), (1, 4))


@triton.jit
def page_dots(
    first, second, scales, next_place, queries, upper, BLOCK: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE: tl.constexpr, TURNED: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """Dot products of a page loaded by `load_page`, tokens as in `key_token`: `[B, columns]` float32.

    With them the page itself, or with CARRY the one at `next_place`, of which each part is loaded as soon as the same part
    of this page has been read.

    queries `[dims, columns]` of the dims of `key_dim`, and with packed formats `upper` of the dims 64 further on. TURNED:
    queries `[columns, dims]`, products `[columns, B]`; a sum over the dims has the same bits. NATIVE: the GPU converts e4m3.
    """
    if FORMAT == "plain":
        if TURNED:
            dots = tl.dot(queries, tl.trans(first), out_dtype=tl.float32, input_precision="ieee")
        else:
            dots = tl.dot(first, queries, out_dtype=tl.float32, input_precision="ieee")
    else:
        TYPE: tl.constexpr = queries.dtype
        FNUZ: tl.constexpr = FORMAT == "fp8_fnuz"
        if FORMAT == "nvfp4":
            low_scale, high_scale = group_scales(scales, NATIVE)
            low = e4m3_words(first, low_scale, NATIVE)
            if CARRY:
                first = load_codes(next_place, 0, BLOCK, DIM)
                scales = load_scales(next_place, BLOCK, DIM)
            if DIM == 128:
                high = e4m3_words(second, high_scale, NATIVE)
        elif DIM == 128:
            low, high = tl.split(first.reshape(BLOCK, 2, 4, 4).permute(0, 2, 3, 1))
        else:
            low = first.reshape(BLOCK, 4, 4)
        # Half by half, so that only half of the keys is held wide at once.
        keys = keys_of(low, BLOCK, TYPE, FNUZ, NATIVE)
        if TURNED:
            dots = tl.dot(queries, tl.trans(keys), out_dtype=tl.float32)
        else:
            dots = tl.dot(keys, queries, out_dtype=tl.float32)
        if DIM == 128:
            if CARRY:
                second = load_codes(next_place, 4, BLOCK, DIM)
            keys = keys_of(high, BLOCK, TYPE, FNUZ, NATIVE)
            if TURNED:
                dots = tl.dot(upper, tl.trans(keys), dots, out_dtype=tl.float32)
            else:
                dots = tl.dot(keys, upper, dots, out_dtype=tl.float32)
    return dots, first, second, scales


@triton.jit
def keys_of(words, BLOCK: tl.constexpr, TYPE: tl.constexpr, FNUZ: tl.constexpr, NATIVE: tl.constexpr):
    """Words of e4m3 `[token, thread, 16-dim step]` as an operand `[B, 64]` of TYPE."""
    keys = widened(words, TYPE, FNUZ, NATIVE)  # [token, thread, step, pair, half]
    keys = keys.permute(0, 2, 4, 1, 3).reshape(BLOCK // (16 * WARPS), 2, WARPS, 8, 64)
    return keys.permute(0, 2, 1, 3, 4).reshape(BLOCK, 64)


@triton.jit
def widened(words, TYPE: tl.constexpr, FNUZ: tl.constexpr, NATIVE: tl.constexpr):
    """The four 8-bit floats of each word `[..]` as TYPE, bf16 or fp16: `[.., 2, 2]`, the lower of each pair and pairs last."""
    if NATIVE:
        if TYPE == tl.bfloat16:
            low, high = tl.inline_asm_elementwise(
                TO_BF16, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        else:
            low, high = tl.inline_asm_elementwise(
                TO_FP16, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        low = tl.join(half_of(low, TYPE), half_of(low >> 16, TYPE))
        high = tl.join(half_of(high, TYPE), half_of(high >> 16, TYPE))
    else:
        low = tl.join(float_of(words & 255, FNUZ).to(TYPE), float_of((words >> 8) & 255, FNUZ).to(TYPE))
        high = tl.join(float_of((words >> 16) & 255, FNUZ).to(TYPE), float_of((words >> 24) & 255, FNUZ).to(TYPE))
    return tl.join(low, high)


@triton.jit
def half_of(word, TYPE: tl.constexpr):
    """The lower 16 bits as a float."""
    return (word & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)


@triton.jit
def float_of(code, FNUZ: tl.constexpr):
    """e4m3 codes 0 to 255 as float32: e4m3fn, or e4m3fnuz (exponent bias 8, one NaN at 128, no -0)."""
    BIAS: tl.constexpr = 119 if FNUZ else 120  # of float32 less that of e4m3
    code = code.to(tl.int32)
    low = code & 127
    normal = ((low << 20) + (BIAS << 23)).to(tl.float32, bitcast=True)
    value = tl.where(low < 8, low.to(tl.float32) * (0.0009765625 if FNUZ else 0.001953125), normal)
    value = signed(value, code << 24)
    nan = (code == 128) if FNUZ else (low == 127)
    return tl.where(nan, float("nan"), value)


@triton.jit
def signed(value, bits):
    """A float32 that is not negative with the sign of an int32: not every Triton makes -0 of 0."""
    return (value.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def group_scales(scales, NATIVE: tl.constexpr):
    """The scales of each token's groups `i` and `i + 4`, of eight in 8 bytes `[B, 4]`: two of what `e4m3_words` takes."""
    group = tl.arange(0, 4)[None, :]
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            SCALES, "=r,=r,l,r", [scales, group * 0x11 + 0x40], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        low = float_of((scales >> (group * 8)) & 255, False)
        high = float_of((scales >> (group * 8 + 32)) & 255, False)
    return low, high


@triton.jit
def e4m3_words(codes, scales, NATIVE: tl.constexpr):
    """NVFP4 to e4m3: groups of 16 codes in 8 bytes `[B, 4]`, with the scale of each, to words `[B, 4, 4]`."""
    low = codes.to(tl.int32)
    high = (codes >> 32).to(tl.int32)
    if NATIVE:
        m0, m1 = tl.inline_asm_elementwise(MAGNITUDES, "=r,=r,r", [scales], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
        w0, w1 = tl.inline_asm_elementwise(
            CHOSEN, "=&r,=&r,r,r,r", [low, m0, m1], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        w2, w3 = tl.inline_asm_elementwise(
            CHOSEN, "=&r,=&r,r,r,r", [high, m0, m1], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        w0 = e4m3_word(low, scales)
        w1 = e4m3_word(low >> 16, scales)
        w2 = e4m3_word(high, scales)
        w3 = e4m3_word(high >> 16, scales)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    return words.permute(0, 1, 3, 2).reshape(codes.shape[0], 4, 4)


@triton.jit
def e4m3_word(codes, scale):
    """Four e2m1 codes, times a scale, to a word of e4m3."""
    word = e4m3_of(codes & 15, scale)
    for element in tl.static_range(1, 4):
        word |= e4m3_of((codes >> (4 * element)) & 15, scale) << (8 * element)
    return word


@triton.jit
def e4m3_of(code, scale):
    """`e4m3(e2m1 * scale)` as a code: to nearest even, saturating. The product is exact in float32."""
    low = code & 7
    value = tl.where(
        low < 2, low.to(tl.float32) * 0.5, (((low >> 1) + 126 << 23) | ((low & 1) << 22)).to(tl.float32, bitcast=True)
    )
    return e4m3_code(signed(value, code << 28) * scale, False)


@triton.jit
def e4m3_code(value, FNUZ: tl.constexpr):
    """float32 to the nearest e4m3 code 0 to 255, ties to even; larger values become the largest, NaN stays."""
    BIAS: tl.constexpr = 119 if FNUZ else 120  # of float32 less that of e4m3
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Below the lowest normal value codes count units: those of the last place of a float32 around `unit`.
    unit: tl.constexpr = 8192.0 if FNUZ else 16384.0
    subnormal = ((magnitude.to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True)) & 15
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (BIAS << 3)
    code = tl.where(magnitude < ((BIAS + 1) << 23), subnormal, tl.minimum(normal, 127 if FNUZ else 126))
    if FNUZ:  # has one NaN, and no -0
        code = tl.where((bits < 0) & (code > 0), code | 128, code)
        code = tl.where(magnitude > 0x7F800000, 128, code)
    else:
        code = tl.where(magnitude > 0x7F800000, 127, code) | tl.where(bits < 0, 128, 0)
    return code
