# SPDX-License-Identifier: Apache-2.0
"""Prefill: scores and selection of ragged chunks, without a buffer of scores.

A tile is COLUMNS query columns (rows x heads) of one request. It streams the request's pages, scores each for all its columns
at once, and keeps the KEEP best keys per column in registers. Where there are too few tiles to fill the GPU, the context of
each is split: every split leaves its candidates in scratch, and a second launch merges them, a few columns per program.

A score is the product that decode computes, with the operands in each other's place: the sum over the head dim of an output
element is the same chain, so the bits are decode's.

Grid `(tiles, splits, head tiles)`, the last rows first, as they see most. Bytes: each visible page once per tile and split.
"""

import triton
import triton.language as tl

from lightning_indexer.kernels.common import block_count, keep_key, nan_max, no_keys, per_unit, write_ids
from lightning_indexer.kernels.formats import key_dim, key_token, load_page, load_queries, page_dots, page_place
from lightning_indexer.kernels.key import join_keys, pack_keys, top_keys

REQUESTS = tl.constexpr(128)  # chunk bounds looked at at once


@triton.jit
def tile_request(tile, cu_seqlens_ptr, bound_stride, requests, rows_per_tile):
    """The request of a row tile, the tiles before that request, and all tiles."""
    request_found = tile * 0
    before = tile * 0
    total = tile * 0
    if requests == 1:  # by far the most common chunk
        chunk = tl.load(cu_seqlens_ptr + bound_stride).to(tl.int32)
        total = (chunk + rows_per_tile - 1) // rows_per_tile
    for first in range(0, tl.where(requests == 1, 0, requests), REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        inside = request < requests
        start = tl.load(cu_seqlens_ptr + request * bound_stride, mask=inside, other=0).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + (request + 1) * bound_stride, mask=inside, other=0).to(tl.int32)
        upto = total + tl.cumsum((end - start + rows_per_tile - 1) // rows_per_tile, 0)
        passed = inside & (upto <= tile)
        request_found += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, upto, 0)))
        total = tl.max(upto)
    return request_found, before, total


@triton.jit
def tile_splits(blocks, splits, MIN_BLOCKS: tl.constexpr):
    """In how many parts the context of a tile is cut: short ones are not worth `splits`."""
    return tl.minimum(tl.maximum(blocks // MIN_BLOCKS, 1), splits)


@triton.jit
def chunk_of(request, cu_seqlens_ptr, bound_stride, seq_lens_ptr, length_stride, longest):
    """First row of a request's chunk, its rows, and the tokens before it."""
    start = tl.load(cu_seqlens_ptr + request * bound_stride).to(tl.int32)
    chunk = tl.load(cu_seqlens_ptr + (request + 1) * bound_stride).to(tl.int32) - start
    return start, chunk, tl.minimum(tl.load(seq_lens_ptr + request * length_stride), longest) - chunk


@triton.jit
def tile_blocks(context, first_row, rows_per_tile, chunk, BLOCK: tl.constexpr):
    """Blocks that the last row of a tile sees."""
    return block_count(tl.maximum(context + tl.minimum(first_row + rows_per_tile, chunk), 0), BLOCK)


@triton.jit
def keep_page(
    best, queries, upper, lengths, visible, block, page, pages_ptr, page_stride, num_pages, scales_ptr, scales_stride,
    init_blocks, local_blocks,
    BLOCK: tl.constexpr, DIM: tl.constexpr, HIGHER: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Score one block for all columns and keep its keys. Not MASKED if all rows see all of it."""
    place = page_place(pages_ptr, page, page_stride, num_pages)
    parts = load_page(place, BLOCK, DIM, FORMAT)
    dots, _, _, _ = page_dots(*parts, place, queries, upper, BLOCK, DIM, FORMAT, NATIVE, True, False)  # [columns, B]
    tokens = key_token(BLOCK, FORMAT)
    if SCALED:
        inside = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
        dots *= tl.load(scales_ptr + inside * scales_stride + tokens)[None, :]
    if MASKED:
        dots = tl.where((block * BLOCK + tokens)[None, :] < lengths[:, None], dots, float("-inf"))
    scores = tl.reduce(dots, 1, nan_max)
    return keep_key(best, pack_keys(scores, block, visible, init_blocks, local_blocks, HIGHER))


@triton.jit(
    do_not_specialize=[
        "bound_stride",
        "length_stride",
        "requests",
        "rows",
        "longest",
        "heads",
        "heads_per_tile",
        "topk",
        "init_blocks",
        "local_blocks",
        "num_pages",
        "q_row_stride",
        "q_head_stride",
        "page_stride",
        "scales_stride",
        "block_table_stride",
        "out_head_stride",
        "out_row_stride",
    ],
    do_not_specialize_on_alignment=["scales_ptr", "block_table_ptr", "cu_seqlens_ptr", "seq_lens_ptr", "out_ptr"],
)
def prefill_kernel(
    q_ptr,  # [T, H, D]
    pages_ptr,  # [pages, B, row], bytes unless of 16-bit floats
    scales_ptr,  # [pages, B] f32, a factor for each key
    block_table_ptr,  # [R, max_blocks] i32
    cu_seqlens_ptr,  # [R + 1] i32 or i64, any stride
    bound_stride,
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    out_ptr,  # [H, T, K] i32
    keys_ptr,  # [head tiles, tiles, splits, COLUMNS, KEEP] i64 scratch
    requests,
    rows,
    longest,  # tokens; a length past it counts as it
    heads,
    heads_per_tile,
    topk,
    init_blocks,
    local_blocks,
    num_pages,
    q_row_stride,  # these three in units of 16 bytes, so that the compiler knows that 16-byte loads are aligned
    q_head_stride,
    page_stride,
    scales_stride,
    block_table_stride,
    out_head_stride,
    out_row_stride,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,  # of context per split
    TYPE: tl.constexpr,  # of the products
    FORMAT: tl.constexpr,  # see kernels.formats
    SCALED: tl.constexpr,  # keys have factors
    NATIVE: tl.constexpr,  # the GPU converts e4m3
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """See the module. Column `i` of a tile is row `i // heads_per_tile`, head `i % heads_per_tile` of the head tile."""
    if PDL:
        # Everything read here may come from the kernel before; the next kernel may already take its place on the GPU.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles = tl.num_programs(0)
    tile = tiles - 1 - tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    head_tile = tl.program_id(2)
    q_row_stride *= per_unit(q_ptr)
    q_head_stride *= per_unit(q_ptr)
    page_stride = page_stride.to(tl.int64) * per_unit(pages_ptr)
    rows_per_tile = COLUMNS // heads_per_tile
    request, before, used = tile_request(tile, cu_seqlens_ptr, bound_stride, requests, rows_per_tile)

    column = tl.arange(0, COLUMNS)
    head = head_tile * heads_per_tile + column % heads_per_tile
    lane = tl.arange(0, KEEP)
    dims = key_dim(DIM, FORMAT)
    in_tile = (column < rows_per_tile * heads_per_tile) & (head < heads)
    if tile >= used:
        # Rows behind the last chunk.
        first_row = tl.load(cu_seqlens_ptr + requests * bound_stride).to(tl.int32) + (tile - used) * rows_per_tile
        row = first_row + column // heads_per_tile
        wanted = in_tile & (row < rows)
        if split == 0:
            place = out_ptr + head[:, None].to(tl.int64) * out_head_stride + row[:, None].to(tl.int64) * out_row_stride
            nothing = tl.full((COLUMNS, KEEP), -1, tl.int32)
            tl.store(place + lane[None, :], nothing, mask=wanted[:, None] & (lane < topk)[None, :])
        return

    start, chunk, context = chunk_of(request, cu_seqlens_ptr, bound_stride, seq_lens_ptr, length_stride, longest)
    first_row = (tile - before) * rows_per_tile  # of the chunk
    chunk_row = first_row + column // heads_per_tile
    row = start + chunk_row
    wanted = in_tile & (chunk_row < chunk) & (row < rows)
    lengths = tl.maximum(context + chunk_row + 1, 0)
    visible = tl.where(wanted, block_count(lengths, BLOCK), 0)
    blocks = tile_blocks(context, first_row, rows_per_tile, chunk, BLOCK)
    parts = tile_splits(blocks, splits, MIN_BLOCKS)
    if split >= parts:
        return
    first = (split.to(tl.int64) * blocks // parts).to(tl.int32)
    last = ((split + 1).to(tl.int64) * blocks // parts).to(tl.int32)
    whole = tl.minimum(tl.maximum(tl.maximum(context + first_row + 1, 0) // BLOCK, first), last)  # seen by all rows whole
    places = q_ptr + row[:, None].to(tl.int64) * q_row_stride + head[:, None].to(tl.int64) * q_head_stride + dims[None, :]
    coded: tl.constexpr = q_ptr.dtype.element_ty == tl.uint8
    queries = load_queries(places, wanted[:, None], TYPE, coded, False)  # [COLUMNS, dims]
    upper = queries
    if (FORMAT != "plain") and (DIM == 128):
        upper = load_queries(places + 64, wanted[:, None], TYPE, coded, False)
    table_row = block_table_ptr + request.to(tl.int64) * block_table_stride
    best = no_keys(COLUMNS, KEEP)
    # One page id ahead, so that its load is never waited for.
    next_page = tl.load(table_row + first, mask=first < last, other=0)
    for block in tl.range(first, whole, num_stages=STAGES):
        page = next_page
        next_page = tl.load(table_row + tl.minimum(block + 1, last - 1))
        best = keep_page(
            best, queries, upper, lengths, visible, block, page, pages_ptr, page_stride, num_pages, scales_ptr, scales_stride,
            init_blocks, local_blocks, BLOCK, DIM, HIGHER, FORMAT, SCALED, NATIVE, False,
        )  # fmt: skip
    for block in tl.range(whole, last, num_stages=1):
        page = tl.load(table_row + block)
        best = keep_page(
            best, queries, upper, lengths, visible, block, page, pages_ptr, page_stride, num_pages, scales_ptr, scales_stride,
            init_blocks, local_blocks, BLOCK, DIM, HIGHER, FORMAT, SCALED, NATIVE, True,
        )  # fmt: skip
    best = tl.maximum(best, 0)
    if parts == 1:
        write_ids(
            top_keys(best, KEEP), head, row, row, lengths, wanted,
            out_ptr, out_head_stride, out_row_stride, topk, out_ptr, 0, 0, out_ptr, 0, 0, out_ptr, 0, 0, 0,
            BLOCK, KEEP, HIGHER, BY_BLOCK, 0,
        )  # fmt: skip
    else:
        slot = ((head_tile * tiles + tile) * splits + split).to(tl.int64) * (COLUMNS * KEEP)
        tl.store(keys_ptr + slot + column[:, None] * KEEP + lane[None, :], best)


@triton.jit
def split_keys(keys_ptr, column, first, count, COLUMNS: tl.constexpr, KEEP: tl.constexpr, LANES: tl.constexpr):
    """Candidates `first` to `first + LANES` of `count` for some columns of a tile, 0 past them."""
    candidate = first + tl.arange(0, LANES)
    offset = (candidate // KEEP * (COLUMNS * KEEP) + candidate % KEEP)[None, :] + column[:, None] * KEEP
    return tl.load(keys_ptr + offset, mask=(candidate < count)[None, :], other=0, cache_modifier=".cg")


@triton.jit(
    do_not_specialize=[
        "bound_stride",
        "length_stride",
        "requests",
        "rows",
        "longest",
        "heads",
        "heads_per_tile",
        "topk",
        "splits",
        "out_head_stride",
        "out_row_stride",
    ],
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "seq_lens_ptr", "out_ptr"],
)
def merge_splits_kernel(
    cu_seqlens_ptr,  # [R + 1] i32 or i64, any stride
    bound_stride,
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    out_ptr,  # [H, T, K] i32
    keys_ptr,  # [head tiles, tiles, splits, COLUMNS, KEEP] i64, of prefill_kernel
    requests,
    rows,
    longest,
    heads,
    heads_per_tile,
    topk,
    splits,
    out_head_stride,
    out_row_stride,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
    FEW: tl.constexpr,  # columns of one program
    LANES: tl.constexpr,  # candidates of a column merged at once
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids of the tiles whose context was split. Grid `(tiles, COLUMNS / FEW, head tiles)`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    head_tile = tl.program_id(2)
    rows_per_tile = COLUMNS // heads_per_tile
    request, before, used = tile_request(tile, cu_seqlens_ptr, bound_stride, requests, rows_per_tile)
    if tile >= used:
        return
    start, chunk, context = chunk_of(request, cu_seqlens_ptr, bound_stride, seq_lens_ptr, length_stride, longest)
    first_row = (tile - before) * rows_per_tile
    parts = tile_splits(tile_blocks(context, first_row, rows_per_tile, chunk, BLOCK), splits, MIN_BLOCKS)
    if parts == 1:
        return
    column = tl.program_id(1) * FEW + tl.arange(0, FEW)
    keys_ptr += ((head_tile * tl.num_programs(0) + tile) * splits).to(tl.int64) * (COLUMNS * KEEP)
    count = parts * KEEP
    if count <= LANES // 2:
        best = top_keys(split_keys(keys_ptr, column, 0, count, COLUMNS, KEEP, LANES // 2), KEEP)
    else:
        best = top_keys(split_keys(keys_ptr, column, 0, count, COLUMNS, KEEP, LANES), KEEP)
        for first in range(LANES, count, LANES):
            found = top_keys(split_keys(keys_ptr, column, first, count, COLUMNS, KEEP, LANES), KEEP)
            best = top_keys(join_keys(best, found, FEW, KEEP), KEEP)
    head = head_tile * heads_per_tile + column % heads_per_tile
    chunk_row = first_row + column // heads_per_tile
    row = start + chunk_row
    wanted = (column < rows_per_tile * heads_per_tile) & (head < heads) & (chunk_row < chunk) & (row < rows)
    write_ids(
        best, head, row, row, row, wanted,
        out_ptr, out_head_stride, out_row_stride, topk, out_ptr, 0, 0, out_ptr, 0, 0, out_ptr, 0, 0, 0,
        BLOCK, KEEP, HIGHER, BY_BLOCK, 0,
    )  # fmt: skip
