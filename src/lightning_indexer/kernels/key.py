# SPDX-License-Identifier: Apache-2.0
"""Device twin of `lightning_indexer.key`: the same bits, from the same layout constants."""

import triton
import triton.language as tl

from lightning_indexer import key as layout

BLOCK_BITS = tl.constexpr(layout.BLOCK_BITS)
SCORE_BITS = tl.constexpr(layout.SCORE_BITS)
BLOCK_MASK = tl.constexpr(layout.MAX_BLOCKS - 1)
SCORED = tl.constexpr(layout.SCORED)
LOCAL = tl.constexpr(layout.LOCAL)
INIT = tl.constexpr(layout.INIT)


@triton.jit
def score_image(score):
    """Order-preserving image of float32 scores: int64 in [0, 2^32), NaN 0, -0.0 as +0.0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return tl.where(score == score, ordered, 0)


@triton.jit
def pack_keys(score, block, visible, init_blocks, local_blocks, HIGHER: tl.constexpr):
    """Keys of scored blocks, 0 for blocks at or past `visible`. All arguments broadcast; int32 blocks."""
    kind = tl.where(block >= visible - local_blocks, LOCAL, SCORED)
    kind = tl.where(block < init_blocks, INIT, kind)
    image = tl.where(kind == SCORED, score_image(score), 0)
    field = block if HIGHER else BLOCK_MASK - block
    key = (kind.to(tl.int64) << (SCORE_BITS + BLOCK_BITS)) | (image << BLOCK_BITS) | field.to(tl.int64)
    return tl.where(block < visible, key, 0)


@triton.jit
def key_blocks(key, HIGHER: tl.constexpr):
    """Block ids of keys, -1 for empty slots. int32."""
    field = (key & BLOCK_MASK).to(tl.int32)
    block = field if HIGHER else BLOCK_MASK - field
    return tl.where(key == 0, -1, block)


@triton.jit
def top_keys(keys, KEEP: tl.constexpr):
    """The KEEP largest keys of the last dim, descending. KEEP is a power of two and at most its size."""
    return tl.topk(keys, KEEP)


@triton.jit
def join_keys(a, b, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """`[ROWS, WIDTH]` and `[ROWS, WIDTH]` side by side, `[ROWS, 2 * WIDTH]`, in some order."""
    return tl.reshape(tl.join(a, b), (ROWS, 2 * WIDTH))
