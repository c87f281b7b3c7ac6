# SPDX-License-Identifier: Apache-2.0
"""Selection as separate steps: scores to candidates, candidates of several ranks to ids. One program per row and head."""

import triton
import triton.language as tl

from lightning_indexer.kernels.common import block_count, causal_length, owned_blocks, page_owner, write_ids
from lightning_indexer.kernels.key import join_keys, pack_keys, top_keys


@triton.jit
def row_length(seq_lens_ptr, length_stride, row, requests, query_len):
    """Causal length of a decode row, 0 for padding."""
    length = 0
    if row < requests * query_len:
        length = causal_length(tl.load(seq_lens_ptr + (row // query_len) * length_stride), row % query_len, query_len)
    return length


@triton.jit(
    do_not_specialize=[
        "length_stride",
        "requests",
        "query_len",
        "width",
        "topk",
        "init_blocks",
        "local_blocks",
        "rank",
        "world",
        "block_table_stride",
        "scores_head_stride",
        "scores_row_stride",
        "out_head_stride",
        "out_row_stride",
    ],
    do_not_specialize_on_alignment=["scores_ptr", "seq_lens_ptr", "block_table_ptr", "out_ptr"],
)
def select_kernel(
    scores_ptr,  # [H, T, L] f32
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    block_table_ptr,  # [R, max_blocks] i32; BY_PAGE only
    block_table_stride,
    out_ptr,  # [H, T, K] i64
    requests,
    query_len,
    width,
    topk,
    init_blocks,
    local_blocks,
    rank,
    world,
    scores_head_stride,
    scores_row_stride,
    out_head_stride,
    out_row_stride,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    LANES: tl.constexpr,
    HIGHER: tl.constexpr,
    BY_PAGE: tl.constexpr,  # slots are blocks, and owned where their page is
):
    """First K candidates of a row. Grid `(T, H)`."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    visible = block_count(row_length(seq_lens_ptr, length_stride, row, requests, query_len), BLOCK)
    if BY_PAGE:
        owned = tl.minimum(visible, width)
        table = block_table_ptr + (row // query_len).to(tl.int64) * block_table_stride
    else:
        owned = tl.minimum(owned_blocks(visible, rank, world), width)
    source = scores_ptr + head.to(tl.int64) * scores_head_stride + row.to(tl.int64) * scores_row_stride
    best = tl.zeros((1, KEEP), tl.int64)
    for first in range(0, owned, LANES):
        slot = first + tl.arange(0, LANES)
        own = slot < owned
        block = slot * world + rank
        if BY_PAGE:
            own &= page_owner(tl.load(table + slot, mask=own, other=0), world) == rank
            block = slot
        score = tl.load(source + slot, mask=own, other=0.0)
        key = pack_keys(score, block, visible, init_blocks, local_blocks, HIGHER)
        found = top_keys(tl.where(own, key, 0)[None, :], KEEP)
        best = top_keys(join_keys(best, found, 1, KEEP), KEEP)
    lane = tl.arange(0, KEEP)
    place = out_ptr + head.to(tl.int64) * out_head_stride + row.to(tl.int64) * out_row_stride + lane
    tl.store(place[None, :], best, mask=(lane < topk)[None, :])


@triton.jit(
    do_not_specialize=[
        "length_stride",
        "requests",
        "query_len",
        "candidates",
        "topk",
        "keys_rank_stride",
        "keys_head_stride",
        "keys_row_stride",
        "out_head_stride",
        "out_row_stride",
        "attention_table_stride",
        "attention_columns",
        "table_head_stride",
        "table_row_stride",
        "context_head_stride",
        "context_row_stride",
        "attention_page_stride",
    ],
    do_not_specialize_on_alignment=[
        "keys_ptr",
        "seq_lens_ptr",
        "out_ptr",
        "attention_table_ptr",
        "table_ptr",
        "context_ptr",
    ],
)
def merge_kernel(
    keys_ptr,  # [P, H, T, K] i64
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    out_ptr,  # [H, T, K] i32
    attention_table_ptr,  # [R, max_blocks] i32
    table_ptr,  # [H, T, K * PARTS] i32
    context_ptr,  # [H, T] i32
    requests,
    query_len,
    candidates,  # P * K
    topk,
    keys_rank_stride,
    keys_head_stride,
    keys_row_stride,
    out_head_stride,
    out_row_stride,
    attention_table_stride,
    attention_columns,
    table_head_stride,
    table_row_stride,
    context_head_stride,
    context_row_stride,
    attention_page_stride,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    LANES: tl.constexpr,
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Ids of a row from all ranks' candidates. Grid `(T, H)`."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = row_length(seq_lens_ptr, length_stride, row, requests, query_len)
    source = keys_ptr + head.to(tl.int64) * keys_head_stride + row.to(tl.int64) * keys_row_stride
    best = tl.zeros((1, KEEP), tl.int64)
    for first in range(0, tl.where(length > 0, candidates, 0), LANES):
        lane = first + tl.arange(0, LANES)
        place = source + (lane // topk).to(tl.int64) * keys_rank_stride + lane % topk
        found = top_keys(tl.load(place, mask=lane < candidates, other=0)[None, :], KEEP)
        best = top_keys(join_keys(best, found, 1, KEEP), KEEP)
    one = tl.zeros((1,), tl.int32)
    write_ids(
        best,
        head + one,
        row + one,
        tl.minimum(row // query_len, tl.maximum(requests - 1, 0)) + one,
        length + one,
        one == 0,
        out_ptr,
        out_head_stride,
        out_row_stride,
        topk,
        attention_table_ptr,
        attention_table_stride,
        attention_columns,
        table_ptr,
        table_head_stride,
        table_row_stride,
        context_ptr,
        context_head_stride,
        context_row_stride,
        attention_page_stride,
        BLOCK,
        KEEP,
        HIGHER,
        BY_BLOCK,
        PARTS,
    )
