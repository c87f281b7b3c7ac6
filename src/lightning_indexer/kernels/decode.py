# SPDX-License-Identifier: Apache-2.0
"""Decode in one launch: score the blocks of all requests and select, spread evenly over the GPU.

Work is counted in pages. The pages of all requests, one request behind the other, are cut into as many equal runs as there
are programs (a *share* each), so lengths that differ by any factor keep every program busy to the end. A program walks its
share: for each request in it (a *segment*) it streams pages, scores them for all query columns of the request, and keeps the
KEEP best keys per column in registers.

Selection. A segment that is a whole request is sorted and written at once. Of a request cut into several segments each
program leaves its candidates in scratch and counts itself in; the last to arrive merges. If there are more candidates than
one merge takes, programs arrive in groups first, and the groups' survivors are merged the same way. No program ever waits
for another, so any grid is free of deadlock. The key order is total, so arrival order cannot change a result.

Steps, grid `(programs, column tiles)`: share -> segments -> (arrive, merge) -> write. Counters return to zero by themselves.
Bytes: each visible page once per column tile; scratch is a few hundred KB, L2-resident.
"""

import triton
import triton.language as tl

from lightning_indexer.kernels.common import (
    keep_key,
    load_keys,
    merge_candidates,
    nan_max,
    no_keys,
    page_scores,
    write_ids,
)
from lightning_indexer.kernels.key import pack_keys, top_keys

LENGTHS = tl.constexpr(128)  # lengths looked at at once


@triton.jit
def owned_blocks(length, longest, rank, world, BLOCK: tl.constexpr):
    """Blocks of a request that this rank owns, from its length, which counts as at most `longest`."""
    visible = (tl.minimum(tl.maximum(length, 0), longest) + BLOCK - 1) // BLOCK
    return (visible - rank + world - 1) // world


@triton.jit
def all_pages(seq_lens_ptr, requests, longest, rank, world, BLOCK: tl.constexpr):
    """Pages of all requests."""
    total = 0
    for first in range(0, requests, LENGTHS):
        request = first + tl.arange(0, LENGTHS)
        length = tl.load(seq_lens_ptr + request, mask=request < requests, other=0)
        total += tl.sum(tl.where(request < requests, owned_blocks(length, longest, rank, world, BLOCK), 0))
    return total


@triton.jit
def share_start(program, total, programs):
    """First page of a program's share."""
    return (program.to(tl.int64) * total // programs).to(tl.int32)


@triton.jit
def owner_of(page, total, programs):
    """The program whose share holds a page; every share holds at least one."""
    return (((page.to(tl.int64) + 1) * programs - 1) // total).to(tl.int32)


@triton.jit
def request_of(page, seq_lens_ptr, requests, longest, rank, world, BLOCK: tl.constexpr):
    """The request that a page belongs to, and the number of pages before that request."""
    request_found = 0
    before = 0
    total = 0
    for first in range(0, requests, LENGTHS):
        request = first + tl.arange(0, LENGTHS)
        inside = request < requests
        length = tl.load(seq_lens_ptr + request, mask=inside, other=0)
        upto = total + tl.cumsum(tl.where(inside, owned_blocks(length, longest, rank, world, BLOCK), 0), 0)
        passed = inside & (upto <= page)
        request_found += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, upto, 0)))
        total = tl.max(upto)
    return request_found, before


@triton.jit(
    do_not_specialize=["requests", "longest", "rank", "world", "programs"],
    do_not_specialize_on_alignment=["plan_ptr", "seq_lens_ptr"],
)
def plan_kernel(
    plan_ptr,  # [programs + 1, 4] i32: first page, end, request, pages before the request; the last row: all pages
    seq_lens_ptr,  # [R] i32
    requests,
    longest,
    rank,
    world,
    programs,
    BLOCK: tl.constexpr,
):
    """What depends on lengths only: each program's share and the request that it begins in. Grid `(programs + 1,)`."""
    program = tl.program_id(0)
    total = all_pages(seq_lens_ptr, requests, longest, rank, world, BLOCK)
    used = tl.minimum(programs, total)
    start = total
    end = total
    request = 0
    before = 0
    if program < used:
        start = share_start(program, total, used)
        end = share_start(program + 1, total, used)
        request, before = request_of(start, seq_lens_ptr, requests, longest, rank, world, BLOCK)
    row = plan_ptr + program * 4
    tl.store(row, start)
    tl.store(row + 1, end)
    tl.store(row + 2, request)
    tl.store(row + 3, before)


@triton.jit(
    do_not_specialize=[
        "requests",
        "rows",
        "longest",
        "query_len",
        "heads",
        "topk",
        "init_blocks",
        "local_blocks",
        "rank",
        "world",
        "num_pages",
        "page_stride",
        "q_row_stride",
        "q_head_stride",
        "block_table_stride",
        "out_head_stride",
        "out_row_stride",
        "attention_table_stride",
        "table_head_stride",
        "table_row_stride",
        "context_head_stride",
        "context_row_stride",
        "attention_page_stride",
    ],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_lens_ptr",
        "plan_ptr",
        "out_ptr",
        "attention_table_ptr",
        "table_ptr",
        "context_ptr",
    ],
)
def decode_kernel(
    q_ptr,  # [T, H, D]
    pages_ptr,  # [pages, B, D]
    block_table_ptr,  # [R, max_blocks] i32
    seq_lens_ptr,  # [R] i32
    plan_ptr,  # [programs + 1, 4] i32, of plan_kernel
    out_ptr,  # OUTPUT "ids": [H, T, K] i32; "keys": [H, T, K] i64; "scores": [H, T, L] f32
    keys_ptr,  # [tiles, 4 * programs, COLUMNS, KEEP] i64 scratch: two slots per program, then two per group's first program
    arrived_ptr,  # [tiles, R + 2 * programs] i32 scratch, zero
    attention_table_ptr,  # [R, max_blocks] i32
    table_ptr,  # [H, T, K * PARTS] i32
    context_ptr,  # [H, T] i32
    requests,
    rows,
    longest,  # tokens; a length past it counts as it
    query_len,
    heads,
    topk,
    init_blocks,
    local_blocks,
    rank,
    world,
    num_pages,
    q_row_stride,  # these three in units of 8 elements, so that the compiler knows that 16-byte loads are aligned
    q_head_stride,
    page_stride,
    block_table_stride,
    out_head_stride,
    out_row_stride,
    attention_table_stride,
    table_head_stride,
    table_row_stride,
    context_head_stride,
    context_row_stride,
    attention_page_stride,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # query columns of a request in one tile: rows x heads, up to a power of two
    KEEP: tl.constexpr,  # K up to a power of two
    LANES: tl.constexpr,  # candidates merged at once
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OUTPUT: tl.constexpr,
    PLANNED: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """See the module. Column `i` of a request is query row `i // H`, head `i % H`."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tile = tl.program_id(1)
    q_row_stride *= 8
    q_head_stride *= 8
    page_stride = page_stride.to(tl.int64) * 8
    if PDL:
        # Everything read here may come from the kernel before; the next kernel may already take its place on the GPU.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if PLANNED:
        total = tl.load(plan_ptr + programs * 4)
        used = tl.minimum(programs, total)
        page = tl.load(plan_ptr + program * 4)
        end = tl.load(plan_ptr + program * 4 + 1)
        request = tl.load(plan_ptr + program * 4 + 2)
        before = tl.load(plan_ptr + program * 4 + 3)
    else:
        total = all_pages(seq_lens_ptr, requests, longest, rank, world, BLOCK)
        used = tl.minimum(programs, total)
        page = total
        end = total
        request = 0
        before = 0
        if program < used:
            page = share_start(program, total, used)
            end = share_start(program + 1, total, used)
            if requests > 1:
                request, before = request_of(page, seq_lens_ptr, requests, longest, rank, world, BLOCK)

    SPREAD: tl.constexpr = 1 if COLUMNS >= 16 else 16 // COLUMNS  # a matrix product is at least 16 wide: repeat columns
    wide = tile * COLUMNS + tl.arange(0, COLUMNS * SPREAD) // SPREAD
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    wanted = column < query_len * heads
    token = column // heads
    head = column % heads
    dims = tl.arange(0, DIM)
    lane = tl.arange(0, KEEP)
    local = tl.arange(0, COLUMNS)
    keys_ptr += tile * 4 * programs * COLUMNS * KEEP
    arrived_ptr += tile * (requests + 2 * programs)
    width = tl.minimum(KEEP, (total + used - 1) // tl.maximum(used, 1))  # most candidates that a segment can have

    while page < end:
        length = tl.minimum(tl.load(seq_lens_ptr + request), longest)
        pages = owned_blocks(length, longest, rank, world, BLOCK)
        if pages > 0:
            first = page - before
            last = tl.minimum(end - before, pages)
            table_row = block_table_ptr + request.to(tl.int64) * block_table_stride
            q_row = (request * query_len + wide // heads).to(tl.int64)
            queries = tl.load(
                q_ptr + q_row[None, :] * q_row_stride + (wide % heads)[None, :] * q_head_stride + dims[:, None],
                mask=(wide < query_len * heads)[None, :],
                other=0.0,
            )  # [D, COLUMNS * SPREAD]
            wide_lengths = length - query_len + wide // heads + 1
            lengths = tl.maximum(length - query_len + token + 1, 0)
            visible = tl.where(wanted, (lengths + BLOCK - 1) // BLOCK, 0)
            best = no_keys(COLUMNS, KEEP)
            # One page id ahead, so that its load is never waited for.
            next_page = tl.load(table_row + first * world + rank)
            for index in tl.range(first, last, num_stages=STAGES):
                block = index * world + rank
                this_page = next_page
                next_page = tl.load(table_row + tl.minimum(index + 1, last - 1) * world + rank)
                keys = load_keys(pages_ptr, this_page, page_stride, num_pages, BLOCK, DIM)
                scores = page_scores(keys, queries, block, wide_lengths, BLOCK)
                if SPREAD > 1:
                    scores = tl.reduce(tl.reshape(scores, (COLUMNS, SPREAD)), 1, nan_max)
                if OUTPUT == "scores":
                    row = (request * query_len + token).to(tl.int64)
                    place = out_ptr + head.to(tl.int64) * out_head_stride + row * out_row_stride + index
                    tl.store(place, scores, mask=block < visible)
                else:
                    best = keep_key(best, pack_keys(scores, block, visible, init_blocks, local_blocks, HIGHER))

            if OUTPUT != "scores":
                best = tl.maximum(best, 0)
                owner = owner_of(before, total, used)
                parts = owner_of(before + pages - 1, total, used) - owner + 1
                odd = (share_start(owner, total, used) != before).to(tl.int32)  # the owner's share began in another request
                complete = parts == 1
                if complete:
                    best = top_keys(best, KEEP)
                else:
                    slot = 2 * program + tl.where(program == owner, odd, 0)
                    tl.store(keys_ptr + slot * (COLUMNS * KEEP) + local[:, None] * KEEP + lane[None, :], best)
                    in_group = LANES // width
                    groups = (parts + in_group - 1) // in_group
                    group = (program - owner) // in_group
                    leader = owner + group * in_group
                    members = tl.minimum(in_group, parts - group * in_group)
                    leader_odd = tl.where(group == 0, odd, 0)
                    grouped = groups > 1
                    running = True
                    while running:
                        counter = arrived_ptr + tl.where(grouped, requests + 2 * leader + leader_odd, request)
                        expected = tl.where(grouped, members, tl.where(groups > 1, groups, parts))
                        tl.debug_barrier()  # all of the program's candidates before its arrival
                        running = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
                        if running:
                            tl.debug_barrier()
                            tl.store(counter, 0)
                            of_groups = (groups > 1) & (grouped == 0)
                            best = merge_candidates(
                                keys_ptr,
                                tl.where(of_groups, 2 * programs, 0),
                                tl.where(grouped, leader, owner),
                                tl.where(of_groups, in_group, 1),
                                tl.where(grouped, leader_odd, odd),
                                expected * tl.where(of_groups, KEEP, width),
                                tl.where(of_groups, KEEP, width),
                                COLUMNS,
                                KEEP,
                                LANES,
                            )
                            if grouped:
                                slot = 2 * (programs + leader) + leader_odd
                                tl.store(keys_ptr + slot * (COLUMNS * KEEP) + local[:, None] * KEEP + lane[None, :], best)
                                grouped = False
                            else:
                                complete = True
                                running = False
                if complete:
                    row = request * query_len + token
                    if OUTPUT == "keys":
                        place = out_ptr + head[:, None] * out_head_stride + row[:, None] * out_row_stride + lane[None, :]
                        tl.store(place, best, mask=wanted[:, None] & (lane < topk)[None, :])
                    else:
                        write_ids(
                            best,
                            head,
                            row,
                            request + tl.zeros_like(row),
                            lengths,
                            wanted,
                            out_ptr,
                            out_head_stride,
                            out_row_stride,
                            topk,
                            attention_table_ptr,
                            attention_table_stride,
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
        before += pages
        page = before
        request += 1

    if OUTPUT != "scores":
        # Rows of which this rank sees no page: padding, and requests without a visible or an owned block.
        for row in range(program, rows, programs):
            owned = 0
            if row < requests * query_len:
                owned = owned_blocks(tl.load(seq_lens_ptr + row // query_len), longest, rank, world, BLOCK)
            if (owned == 0) & (tile == 0):
                for some in range(0, heads):
                    kept = lane < topk
                    place = out_ptr + some * out_head_stride + row * out_row_stride + lane
                    if OUTPUT == "keys":
                        tl.store(place, tl.zeros((KEEP,), tl.int64), mask=kept)
                    else:
                        tl.store(place, tl.full((KEEP,), -1, tl.int32), mask=kept)
                        if PARTS > 0:
                            tl.store(context_ptr + some * context_head_stride + row * context_row_stride, 0)
                            for part in tl.static_range(PARTS):
                                place = table_ptr + some * table_head_stride + row * table_row_stride + lane * PARTS + part
                                tl.store(place, tl.zeros((KEEP,), tl.int32), mask=kept)
