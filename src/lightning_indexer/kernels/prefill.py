# SPDX-License-Identifier: Apache-2.0
"""Prefill: scores and selection of ragged chunks, without a buffer of scores.

A tile is COLUMNS query columns (rows x heads) of one request. It streams the request's pages, scores each for all its columns
at once, and keeps the KEEP best keys per column in registers. Where there are too few tiles to fill the GPU, the context of
each is split: every split leaves its candidates in scratch, and a second launch merges them, a few columns per program.

Where ranks share the blocks, a tile streams those of one rank and leaves its first K keys instead of ids. By page it takes the
blocks from the lists of `kernels.owned`.

A score is the product that decode computes, with the operands in each other's place: the sum over the head dim of an output
element is the same chain, so the bits are decode's.

Grid `(tiles, splits, head tiles)`, the last rows first, as they see most. Bytes: each visible page once per tile and split.
"""

import triton
import triton.language as tl

from lightning_indexer.kernels.common import (
    block_count,
    keep_key,
    nan_max,
    no_keys,
    owned_block,
    owned_blocks,
    per_unit,
    write_ids,
)
from lightning_indexer.kernels.formats import key_dim, key_token, load_page, load_queries, page_dots, page_place
from lightning_indexer.kernels.key import join_keys, pack_keys, top_keys

REQUESTS = tl.constexpr(128)  # chunk bounds looked at at once
ENTRIES = tl.constexpr(128)  # of a list of blocks looked at at once


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
def tile_splits(pages, splits):
    """In how many parts the context of a tile is cut."""
    return tl.minimum(tl.maximum(pages, 1), splits)


@triton.jit
def split_width(pages, parts, KEEP: tl.constexpr):
    """The most candidates that a split can have for a column. They fill its places from the first on (`no_keys`)."""
    return tl.minimum(KEEP, (pages + parts - 1) // parts)


@triton.jit
def chunk_of(request, cu_seqlens_ptr, bound_stride, seq_lens_ptr, length_stride, requests, longest):
    """First row of a request's chunk, its rows, and the tokens before it; 0 past the requests."""
    there = request < requests
    start = tl.load(cu_seqlens_ptr + request * bound_stride, mask=there, other=0).to(tl.int32)
    chunk = tl.load(cu_seqlens_ptr + (request + 1) * bound_stride, mask=there, other=0).to(tl.int32) - start
    return start, chunk, tl.minimum(tl.load(seq_lens_ptr + request * length_stride, mask=there, other=0), longest) - chunk


@triton.jit
def tile_blocks(context, first_row, rows_per_tile, chunk, BLOCK: tl.constexpr):
    """Blocks that the last row of a tile sees."""
    return block_count(tl.maximum(context + tl.minimum(first_row + rows_per_tile, chunk), 0), BLOCK)


@triton.jit
def tile_pages(
    context, first_row, rows_per_tile, chunk, request, requests, blocks_row, held_ptr, rank, world,
    BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """How many of a rank's blocks, from the first on, the last row of a tile sees, and how many all of its rows see whole."""
    blocks = tile_blocks(context, first_row, rows_per_tile, chunk, BLOCK)
    whole = tl.maximum(context + first_row + 1, 0) // BLOCK
    if LISTED:
        listed = block_count(tl.load(held_ptr + request, mask=request < requests, other=0), BLOCK)
        seen = listed
        seen_whole = listed
        # No more than these can be at or past `whole`, as they ascend.
        first = tl.maximum(listed - (block_count(tl.maximum(context + chunk, 0), BLOCK) - whole), 0)
        for start in range(first, listed, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            block = tl.load(blocks_row + entry, mask=entry < listed, other=0)
            seen -= tl.sum(((entry < listed) & (block >= blocks)).to(tl.int32))
            seen_whole -= tl.sum(((entry < listed) & (block >= whole)).to(tl.int32))
    else:
        seen = owned_blocks(blocks, rank, world)
        seen_whole = owned_blocks(whole, rank, world)
    return seen, seen_whole


@triton.jit
def store_first(best, head, row, wanted, out_ptr, head_stride, row_stride, kept, KEEP: tl.constexpr):
    """The first `kept` of `best` `[ROWS, KEEP]`, as they are."""
    lane = tl.arange(0, KEEP)[None, :]
    place = out_ptr + head[:, None].to(tl.int64) * head_stride + row[:, None].to(tl.int64) * row_stride + lane
    tl.store(place, best, mask=wanted[:, None] & (lane < kept))


@triton.jit
def write_best(
    best, head, row, wanted, out_ptr, out_head_stride, out_row_stride, topk,
    BLOCK: tl.constexpr, KEEP: tl.constexpr, HIGHER: tl.constexpr, BY_BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write ids, or keys, of some rows and heads from their keys `best` `[columns, KEEP]`, descending."""
    if KEYS:
        store_first(best, head, row, wanted, out_ptr, out_head_stride, out_row_stride, topk, KEEP)
    else:
        write_ids(
            best, head, row, row, row, wanted,
            out_ptr, out_head_stride, out_row_stride, topk, out_ptr, 0, 0, out_ptr, 0, 0, out_ptr, 0, 0, 0,
            BLOCK, KEEP, HIGHER, BY_BLOCK, 0,
        )  # fmt: skip


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
        "rank",
        "world",
        "init_blocks",
        "local_blocks",
        "count",
        "num_pages",
        "q_row_stride",
        "q_head_stride",
        "page_stride",
        "scales_stride",
        "block_table_stride",
        "out_head_stride",
        "out_row_stride",
    ],
    do_not_specialize_on_alignment=[
        "scales_ptr",
        "block_table_ptr",
        "blocks_ptr",
        "held_ptr",
        "cu_seqlens_ptr",
        "seq_lens_ptr",
        "steps_ptr",
        "out_ptr",
    ],
)
def prefill_kernel(
    q_ptr,  # [T, H, D]
    pages_ptr,  # [pages, B, row], bytes unless of 16-bit floats
    scales_ptr,  # [pages, B] f32, a factor for each key
    block_table_ptr,  # [R, max_blocks] i32; with LISTED the pages that are listed of each request
    blocks_ptr,  # [R, max_blocks] i32: their blocks, with the same stride; LISTED only
    held_ptr,  # [R] i32: tokens that the listed blocks hold; LISTED only
    cu_seqlens_ptr,  # [R + 1] i32 or i64, any stride
    bound_stride,
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    steps_ptr,  # i32: steps that were exchanged; COUNT only
    out_ptr,  # [H, T, K] i32 ids, or i64 keys
    keys_ptr,  # [head tiles, tiles, COLUMNS, splits * KEEP] i64 scratch
    requests,
    rows,
    longest,  # tokens; a length past it counts as it
    heads,
    heads_per_tile,
    topk,
    rank,
    world,
    init_blocks,
    local_blocks,
    count,  # 1 counts the step
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
    TYPE: tl.constexpr,  # of the products
    FORMAT: tl.constexpr,  # see kernels.formats
    SCALED: tl.constexpr,  # keys have factors
    NATIVE: tl.constexpr,  # the GPU converts e4m3
    KEYS: tl.constexpr,  # write keys, not ids
    LISTED: tl.constexpr,  # the pages of a shard by page
    COUNT: tl.constexpr,  # there are steps to count
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
    if COUNT:  # noqa: SIM102 (one is for the compiler, one for the program)
        if tl.program_id(0) + split + head_tile == 0:
            tl.store(steps_ptr, tl.load(steps_ptr) + count)
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
            nothing = tl.full((COLUMNS, KEEP), 0 if KEYS else -1, out_ptr.dtype.element_ty)
            store_first(nothing, head, row, wanted, out_ptr, out_head_stride, out_row_stride, topk, KEEP)
        return

    start, chunk, context = chunk_of(request, cu_seqlens_ptr, bound_stride, seq_lens_ptr, length_stride, requests, longest)
    first_row = (tile - before) * rows_per_tile  # of the chunk
    chunk_row = first_row + column // heads_per_tile
    row = start + chunk_row
    wanted = in_tile & (chunk_row < chunk) & (row < rows)
    lengths = tl.maximum(context + chunk_row + 1, 0)
    visible = tl.where(wanted, block_count(lengths, BLOCK), 0)
    blocks_row = blocks_ptr + request.to(tl.int64) * block_table_stride
    pages, whole = tile_pages(
        context, first_row, rows_per_tile, chunk, request, requests, blocks_row, held_ptr, rank, world, BLOCK, LISTED
    )
    parts = tile_splits(pages, splits)
    if split >= parts:
        return
    first = (split.to(tl.int64) * pages // parts).to(tl.int32)
    last = ((split + 1).to(tl.int64) * pages // parts).to(tl.int32)
    whole = tl.minimum(tl.maximum(whole, first), last)
    places = q_ptr + row[:, None].to(tl.int64) * q_row_stride + head[:, None].to(tl.int64) * q_head_stride + dims[None, :]
    coded: tl.constexpr = q_ptr.dtype.element_ty == tl.uint8
    queries = load_queries(places, wanted[:, None], TYPE, coded, False)  # [COLUMNS, dims]
    upper = queries
    if (FORMAT != "plain") and (DIM == 128):
        upper = load_queries(places + 64, wanted[:, None], TYPE, coded, False)
    table_row = block_table_ptr + request.to(tl.int64) * block_table_stride
    best = no_keys(COLUMNS, KEEP)
    # One page id ahead, so that its load is never waited for.
    table_row += rank
    next_page = tl.load(table_row + first * world, mask=first < last, other=0)
    for index in tl.range(first, whole, num_stages=STAGES):
        block = owned_block(blocks_row, index, rank, world, LISTED)  # not needed before the page is scored
        page = next_page
        next_page = tl.load(table_row + tl.minimum(index + 1, last - 1) * world)
        best = keep_page(
            best, queries, upper, lengths, visible, block, page, pages_ptr, page_stride, num_pages, scales_ptr, scales_stride,
            init_blocks, local_blocks, BLOCK, DIM, HIGHER, FORMAT, SCALED, NATIVE, False,
        )  # fmt: skip
    for index in tl.range(whole, last, num_stages=1):
        block = owned_block(blocks_row, index, rank, world, LISTED)
        page = tl.load(table_row + index * world)
        best = keep_page(
            best, queries, upper, lengths, visible, block, page, pages_ptr, page_stride, num_pages, scales_ptr, scales_stride,
            init_blocks, local_blocks, BLOCK, DIM, HIGHER, FORMAT, SCALED, NATIVE, True,
        )  # fmt: skip
    best = tl.maximum(best, 0)
    if parts == 1:
        write_best(
            top_keys(best, KEEP), head, row, wanted,
            out_ptr, out_head_stride, out_row_stride, topk, BLOCK, KEEP, HIGHER, BY_BLOCK, KEYS,
        )  # fmt: skip
    else:
        width = split_width(pages, parts, KEEP)
        place = keys_ptr + (head_tile * tiles + tile).to(tl.int64) * (COLUMNS * splits * KEEP) + split * width
        tl.store(place + column[:, None] * (splits * KEEP) + lane[None, :], best, mask=(lane < width)[None, :])


@triton.jit
def split_keys(keys_ptr, column, stride, first, count, LANES: tl.constexpr):
    """Candidates `first` to `first + LANES` of `count` for some columns of a tile, 0 past them."""
    candidate = first + tl.arange(0, LANES)[None, :]
    return tl.load(keys_ptr + column[:, None] * stride + candidate, mask=candidate < count, other=0, cache_modifier=".cg")


@triton.jit
def write_columns(
    best, column, start, chunk, first_row, rows, head_tile, heads, heads_per_tile, rows_per_tile,
    out_ptr, out_head_stride, out_row_stride, topk,
    BLOCK: tl.constexpr, KEEP: tl.constexpr, HIGHER: tl.constexpr, BY_BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """As `write_best`, of some columns of a tile by their numbers in it."""
    head = head_tile * heads_per_tile + column % heads_per_tile
    chunk_row = first_row + column // heads_per_tile
    row = start + chunk_row
    wanted = (column < rows_per_tile * heads_per_tile) & (head < heads) & (chunk_row < chunk) & (row < rows)
    write_best(
        best, head, row, wanted, out_ptr, out_head_stride, out_row_stride, topk, BLOCK, KEEP, HIGHER, BY_BLOCK, KEYS
    )  # fmt: skip


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
        "rank",
        "world",
        "blocks_stride",
        "splits",
        "columns",
        "out_head_stride",
        "out_row_stride",
    ],
    do_not_specialize_on_alignment=["blocks_ptr", "held_ptr", "cu_seqlens_ptr", "seq_lens_ptr", "out_ptr"],
)
def merge_splits_kernel(
    blocks_ptr,  # these two and the stride as prefill_kernel has them
    held_ptr,
    cu_seqlens_ptr,  # [R + 1] i32 or i64, any stride
    bound_stride,
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    out_ptr,  # [H, T, K] i32 ids, or i64 keys
    keys_ptr,  # [head tiles, tiles, COLUMNS, splits * KEEP] i64, of prefill_kernel
    requests,
    rows,
    longest,
    heads,
    heads_per_tile,
    topk,
    rank,
    world,
    blocks_stride,
    splits,
    columns,  # of a program; a multiple of FEW
    out_head_stride,
    out_row_stride,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
    FEW: tl.constexpr,  # columns merged at once
    MANY: tl.constexpr,  # and of a program if each has KEEP candidates or fewer; other programs then have none
    LANES: tl.constexpr,  # candidates of a column merged at once
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids, or keys, of the tiles whose context was split. Grid `(tiles, COLUMNS / columns, head tiles)`."""
    tile = tl.program_id(0)
    head_tile = tl.program_id(2)
    rows_per_tile = COLUMNS // heads_per_tile
    # All this was there before prefill_kernel began: no need to wait for it yet. But none leaves before it has waited, or the
    # next kernel would wait for a launch that has not.
    request, before, used = tile_request(tile, cu_seqlens_ptr, bound_stride, requests, rows_per_tile)
    start, chunk, context = chunk_of(request, cu_seqlens_ptr, bound_stride, seq_lens_ptr, length_stride, requests, longest)
    first_row = (tile - before) * rows_per_tile
    blocks_row = blocks_ptr + request.to(tl.int64) * blocks_stride
    pages, _ = tile_pages(
        context, first_row, rows_per_tile, chunk, request, requests, blocks_row, held_ptr, rank, world, BLOCK, LISTED
    )
    parts = tile_splits(pages, splits)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if (tile >= used) | (parts == 1):
        return
    stride = splits * KEEP
    keys_ptr += (head_tile * tl.num_programs(0) + tile).to(tl.int64) * (COLUMNS * stride)
    count = parts * split_width(pages, parts, KEEP)
    if count <= KEEP:
        first = tl.program_id(1) * MANY
        if first < COLUMNS:
            column = first + tl.arange(0, MANY)
            best = top_keys(split_keys(keys_ptr, column, stride, 0, count, KEEP), KEEP)
            write_columns(
                best, column, start, chunk, first_row, rows, head_tile, heads, heads_per_tile, rows_per_tile,
                out_ptr, out_head_stride, out_row_stride, topk, BLOCK, KEEP, HIGHER, BY_BLOCK, KEYS,
            )  # fmt: skip
    else:
        for group in range(tl.program_id(1) * columns, (tl.program_id(1) + 1) * columns, FEW):
            column = group + tl.arange(0, FEW)
            if count <= LANES // 2:
                best = top_keys(split_keys(keys_ptr, column, stride, 0, count, LANES // 2), KEEP)
            else:
                best = top_keys(split_keys(keys_ptr, column, stride, 0, count, LANES), KEEP)
                for first in range(LANES, count, LANES):
                    found = top_keys(split_keys(keys_ptr, column, stride, first, count, LANES), KEEP)
                    best = top_keys(join_keys(best, found, FEW, KEEP), KEEP)
            write_columns(
                best, column, start, chunk, first_row, rows, head_tile, heads, heads_per_tile, rows_per_tile,
                out_ptr, out_head_stride, out_row_stride, topk, BLOCK, KEEP, HIGHER, BY_BLOCK, KEYS,
            )  # fmt: skip
