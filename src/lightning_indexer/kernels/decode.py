# SPDX-License-Identifier: Apache-2.0
"""Decode: score the blocks of all requests, spread evenly over the GPU, then select, one program per row and head.

Work is counted in pages. The pages of all requests, one request behind the other, are cut into as many equal runs as there
are programs (a *share* each), so lengths that differ by any factor keep every program busy to the end. A program of
`score_kernel` walks its share: for each request in it (a *segment*) it streams pages, scores them for all query columns of the
request, and keeps the KEEP best keys per column in registers, which it leaves in scratch at the segment's end. A program of
`select_kernel` merges what the segments of its row's request left. The key order is total, so neither the cut nor the
order of arrival can change a result.

Nothing waits for anything within a launch. On GPUs with programmatic dependent launch the second kernel is on the GPU while
the first still runs. A step plan (`plan_kernel`) saves both from finding shares and requests in every layer.

Where pages are sharded, a rank's part of a request is no arithmetic progression of blocks, but a list (`kernels.owned`): pages
are then counted along the lists, and with LISTED the kernels take a segment's pages and blocks from them.

Grid `(programs, column tiles)`, then `(T, H)`. Bytes: each visible page once per column tile; scratch is a few hundred KB and
stays in the L2.
"""

import triton
import triton.language as tl

from lightning_indexer.kernels.common import (
    block_count,
    causal_length,
    keep_key,
    masked,
    nan_max,
    no_keys,
    owned_blocks,
    per_unit,
    top_of,
    write_ids,
)
from lightning_indexer.kernels.formats import key_dim, key_token, load_page, load_queries, page_dots
from lightning_indexer.kernels.key import pack_keys
from lightning_indexer.workspace import SHARE_FIELDS

LENGTHS = tl.constexpr(128)  # lengths looked at at once
SHARE = tl.constexpr(SHARE_FIELDS)


@triton.jit
def visible_blocks(length, longest, BLOCK: tl.constexpr):
    """Blocks that the last row of a request sees; its length counts as at most `longest`."""
    return block_count(tl.minimum(tl.maximum(length, 0), longest), BLOCK)


@triton.jit
def request_pages(length, longest, free, rank, world, BLOCK: tl.constexpr):
    """Pages of a request that this rank works on; one where it sees at most `free` blocks, which need no scores."""
    visible = visible_blocks(length, longest, BLOCK)
    owned = owned_blocks(visible, rank, world)
    return tl.where(visible <= free, tl.minimum(owned, 1), owned)


@triton.jit
def share_start(program, total, programs):
    """First page of a program's share."""
    return (program.to(tl.int64) * total // programs).to(tl.int32)


@triton.jit
def owner_of(page, total, programs):
    """The program whose share holds a page; every share holds at least one."""
    return (((page.to(tl.int64) + 1) * programs - 1) // total).to(tl.int32)


@triton.jit
def request_of(page, seq_lens_ptr, length_stride, requests, longest, free, rank, world, BLOCK: tl.constexpr):
    """The request that a page belongs to, and the number of pages before that request."""
    request_found = 0
    before = 0
    total = 0
    for first in range(0, requests, LENGTHS):
        request = first + tl.arange(0, LENGTHS)
        inside = request < requests
        length = tl.load(seq_lens_ptr + request * length_stride, mask=inside, other=0)
        upto = total + tl.cumsum(tl.where(inside, request_pages(length, longest, free, rank, world, BLOCK), 0), 0)
        passed = inside & (upto <= page)
        request_found += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, upto, 0)))
        total = tl.max(upto)
    return request_found, before


@triton.jit
def pages_before(request, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK: tl.constexpr):
    """Pages of all requests before one."""
    before = 0
    for first in range(0, request, LENGTHS):
        other = first + tl.arange(0, LENGTHS)
        length = tl.load(seq_lens_ptr + other * length_stride, mask=other < request, other=0)
        before += tl.sum(tl.where(other < request, request_pages(length, longest, free, rank, world, BLOCK), 0))
    return before


@triton.jit
def ranks_at_work(
    seq_lens_ptr, length_stride, requests, longest, free, threshold, rank, world, BLOCK: tl.constexpr, AUTO: tl.constexpr
):
    """Rank and world of the step: with AUTO one rank alone, for its own heads, up to `threshold` pages of work in all."""
    if AUTO:
        short = pages_before(requests, seq_lens_ptr, length_stride, longest, free, 0, 1, BLOCK) <= threshold
        rank = tl.where(short, 0, rank)
        world = tl.where(short, 1, world)
    return rank, world


@triton.jit
def load_share(shares_ptr, program):
    """A program's row of a plan: first page, end, request, pages before that, its tokens, and ranks that share the work.

    Of lists, which all ranks share always, the last is the pages of the request.
    """
    row = shares_ptr + program * SHARE
    page = tl.load(row, cache_modifier=".cg")
    end = tl.load(row + 1, cache_modifier=".cg")
    request = tl.load(row + 2, cache_modifier=".cg")
    before = tl.load(row + 3, cache_modifier=".cg")
    length = tl.load(row + 4, cache_modifier=".cg")
    world = tl.load(row + 5, cache_modifier=".cg")
    return page, end, request, before, length, world


@triton.jit
def prefetch_pages(pages_ptr, page_stride, num_pages, ids_ptr, first, last, world, BYTES: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for the first AHEAD of the pages `first` to `last` to come to the L2. A hint, right whatever is yet written."""
    PART: tl.constexpr = BYTES * AHEAD // 128  # bytes for one lane to ask for
    lane = tl.arange(0, 128)
    index = first + lane * PART // BYTES
    page = tl.load(ids_ptr + index * world, mask=index < last, other=0, cache_modifier=".cg")
    page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
    place = (pages_ptr + page * page_stride).to(tl.int64, bitcast=True) + lane * PART % BYTES
    tl.inline_asm_elementwise(
        f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], {PART}; mov.u32 $0, 0; }}",
        "=r,l,r",
        [place, (index < last).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(
    do_not_specialize=[
        "length_stride",
        "token_stride",
        "requests",
        "longest",
        "free",
        "threshold",
        "rank",
        "world",
        "programs",
    ],
    do_not_specialize_on_alignment=["shares_ptr", "before_ptr", "seq_lens_ptr", "tokens_ptr"],
)
def plan_kernel(
    shares_ptr,  # [programs, SHARE] i32, as `load_share` takes them
    before_ptr,  # [R + 1] i32: pages before each request, and all pages
    seq_lens_ptr,  # [R] i32, any stride; of lists as many tokens as the listed blocks hold
    length_stride,
    tokens_ptr,  # [R] i32, any stride: lengths of the requests
    token_stride,
    requests,
    longest,
    free,
    threshold,
    rank,
    world,
    programs,
    BLOCK: tl.constexpr,
    AUTO: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """What depends on lengths only. Grid `(programs + R + 1,)`."""
    program = tl.program_id(0)
    if LISTED and PDL:
        tl.extra.cuda.gdc_wait()  # for the lists
    rank, world = ranks_at_work(seq_lens_ptr, length_stride, requests, longest, free, threshold, rank, world, BLOCK, AUTO)
    if program >= programs:
        request = program - programs
        tl.store(before_ptr + request, pages_before(request, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK))
        return
    total = pages_before(requests, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK)
    used = tl.minimum(programs, total)
    start = total
    end = total
    request = 0
    before = 0
    if program < used:
        start = share_start(program, total, used)
        end = share_start(program + 1, total, used)
        request, before = request_of(start, seq_lens_ptr, length_stride, requests, longest, free, rank, world, BLOCK)
    row = shares_ptr + program * SHARE
    tl.store(row, start)
    tl.store(row + 1, end)
    tl.store(row + 2, request)
    tl.store(row + 3, before)
    tl.store(row + 4, tl.load(tokens_ptr + request * token_stride, mask=program < used, other=0))
    if LISTED:
        listed = tl.load(seq_lens_ptr + request * length_stride, mask=program < used, other=0)
        tl.store(row + 5, request_pages(listed, longest, free, rank, world, BLOCK))
    else:
        tl.store(row + 5, world)
    if PDL:
        # score_kernel reads its row before it has waited for this kernel's end, though only once all programs have left.
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def score_share(
    tile,
    page,
    end,
    request,
    before,
    length,
    listed,  # pages of the request; LISTED only
    q_ptr,
    pages_ptr,
    scales_ptr,
    block_table_ptr,
    blocks_ptr,
    before_ptr,
    seq_lens_ptr,
    length_stride,
    keys_ptr,
    scores_ptr,
    requests,
    longest,
    free,
    query_len,
    heads,
    init_blocks,
    local_blocks,
    rank,
    world,
    num_pages,
    q_row_stride,
    q_head_stride,
    page_stride,
    scales_stride,
    block_table_stride,
    scores_head_stride,
    scores_row_stride,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
    HIGHER: tl.constexpr,
    SCORES: tl.constexpr,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    CARRY: tl.constexpr,
    STAGES: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Candidates or scores of the pages of one program's share, for one column tile."""
    tl.static_assert(not (CARRY and SCALED))  # with CARRY `this_page` is the page that is loaded, not the one that is scored
    SPREAD: tl.constexpr = 1 if COLUMNS >= 16 else 16 // COLUMNS  # a matrix product is at least 16 wide: repeat columns
    wide = tile * COLUMNS + tl.arange(0, COLUMNS * SPREAD) // SPREAD
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    wanted = column < query_len * heads
    token = column // heads
    head = column % heads
    dims = key_dim(DIM, FORMAT)
    tokens = key_token(BLOCK, FORMAT)
    slot_places = tl.arange(0, COLUMNS)[:, None] * KEEP + tl.arange(0, KEEP)[None, :]
    # Segments are numbered program + request: along the pages one or the other grows from each segment to the next.
    keys_ptr += (tile * (tl.num_programs(0) + requests) + tl.program_id(0)).to(tl.int64) * (COLUMNS * KEEP)

    while page < end:
        length = tl.minimum(length, longest)
        if LISTED:
            pages = listed
        else:
            pages = request_pages(length, longest, free, rank, world, BLOCK)
        if pages > 0:
            first = page - before
            last = tl.minimum(end - before, pages)
            table_row = block_table_ptr + request.to(tl.int64) * block_table_stride
            # One page id ahead, so that its load is never waited for; with CARRY also a page.
            next_page = tl.load(table_row + first * world + rank)
            if CARRY:
                one, two, three = load_page(pages_ptr, next_page, page_stride, num_pages, BLOCK, DIM, FORMAT)
                next_page = tl.load(table_row + tl.minimum(first + 1, last - 1) * world + rank)
            if LISTED:
                blocks_row = blocks_ptr + request.to(tl.int64) * block_table_stride
            q_row = (request * query_len + wide // heads).to(tl.int64)
            q_head = (wide % heads).to(tl.int64)
            places = q_ptr + (q_row * q_row_stride + q_head * q_head_stride)[None, :] + dims[:, None]
            inside = (wide < query_len * heads)[None, :]
            coded: tl.constexpr = q_ptr.dtype.element_ty == tl.uint8
            queries = load_queries(places, inside, TYPE, coded)  # [dims, COLUMNS * SPREAD]
            upper = queries
            if (FORMAT != "plain") and (DIM == 128):
                upper = load_queries(places + 64, inside, TYPE, coded)
            wide_lengths = causal_length(length, wide // heads, query_len)
            lengths = causal_length(length, token, query_len)
            whole = causal_length(length, 0, query_len) // BLOCK  # blocks that all columns see whole
            visible = tl.where(wanted, block_count(lengths, BLOCK), 0)
            best = no_keys(COLUMNS, KEEP)
            if visible_blocks(length, longest, BLOCK) <= free:
                last = first
                every = tl.arange(0, KEEP)[None, :] * world + rank
                nothing = tl.zeros((COLUMNS, KEEP), tl.float32)
                best = pack_keys(nothing, every, visible[:, None], init_blocks, local_blocks, HIGHER)
            for index in tl.range(first, last, num_stages=STAGES):
                if LISTED:
                    block = tl.load(blocks_row + index)  # not needed before the page is scored
                else:
                    block = index * world + rank
                this_page = next_page
                next_page = tl.load(table_row + tl.minimum(index + 1 + CARRY, last - 1) * world + rank)
                if CARRY:
                    dots = page_dots(one, two, three, queries, upper, BLOCK, DIM, FORMAT, NATIVE, False)
                    one, two, three = load_page(pages_ptr, this_page, page_stride, num_pages, BLOCK, DIM, FORMAT)
                else:
                    one, two, three = load_page(pages_ptr, this_page, page_stride, num_pages, BLOCK, DIM, FORMAT)
                    dots = page_dots(one, two, three, queries, upper, BLOCK, DIM, FORMAT, NATIVE, False)
                if SCALED:
                    scored = tl.minimum(tl.maximum(this_page, 0), num_pages - 1).to(tl.int64)
                    dots *= tl.load(scales_ptr + scored * scales_stride + tokens)[:, None]
                if block >= whole:
                    dots = masked(dots, block * BLOCK + tokens, wide_lengths)
                scores = tl.reduce(dots, 0, nan_max)
                if COLUMNS <= 16:  # also where SPREAD is 1: `best` takes fewer registers than in the layout of the product
                    scores = tl.gather(scores, tl.arange(0, COLUMNS) * SPREAD, 0)
                if SCORES:
                    row = (request * query_len + token).to(tl.int64)
                    place = scores_ptr + head.to(tl.int64) * scores_head_stride + row * scores_row_stride
                    place += block if LISTED else index
                    tl.store(place, scores, mask=block < visible)
                else:
                    best = keep_key(best, pack_keys(scores, block, visible, init_blocks, local_blocks, HIGHER))
            if not SCORES:
                tl.store(keys_ptr + request.to(tl.int64) * (COLUMNS * KEEP) + slot_places, tl.maximum(best, 0))
        before += pages
        page = before
        request += 1
        if page < end:
            length = tl.load(seq_lens_ptr + request * length_stride)
            if LISTED:
                listed = tl.load(before_ptr + request + 1) - before


@triton.jit(
    do_not_specialize=[
        "length_stride",
        "requests",
        "longest",
        "free",
        "query_len",
        "heads",
        "first_head",
        "own_heads",
        "count",
        "init_blocks",
        "local_blocks",
        "rank",
        "world",
        "num_pages",
        "q_row_stride",
        "q_head_stride",
        "page_stride",
        "scales_stride",
        "block_table_stride",
        "scores_head_stride",
        "scores_row_stride",
    ],
    do_not_specialize_on_alignment=[
        "scales_ptr",
        "block_table_ptr",
        "blocks_ptr",
        "before_ptr",
        "seq_lens_ptr",
        "shares_ptr",
        "scores_ptr",
        "steps_ptr",
    ],
)
def score_kernel(
    q_ptr,  # [T, H, D]
    pages_ptr,  # [pages, B, row], bytes unless of 16-bit floats
    scales_ptr,  # [pages, B] f32, a factor for each key
    block_table_ptr,  # [R, max_blocks] i32; with LISTED the pages that are listed of each request
    blocks_ptr,  # [R, max_blocks] i32: their blocks, with the same stride; LISTED only
    before_ptr,  # [R + 1] i32, of plan_kernel; LISTED only
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    shares_ptr,  # [programs, SHARE] i32, of plan_kernel
    keys_ptr,  # [tiles, programs + R, COLUMNS, KEEP] i64: candidates of each segment
    scores_ptr,  # [H, T, L] f32
    steps_ptr,  # [2] i32: steps that were exchanged, steps that were not
    requests,
    longest,  # tokens; a length past it counts as it
    free,  # blocks; a request that sees no more is selected whole, unscored
    query_len,
    heads,
    first_head,  # of the rank's own heads
    own_heads,
    count,  # 1 counts the step
    init_blocks,
    local_blocks,
    rank,  # with LISTED 0 of 1: all that is listed
    world,
    num_pages,
    q_row_stride,  # these three in units of 16 bytes, so that the compiler knows that 16-byte loads are aligned
    q_head_stride,
    page_stride,
    scales_stride,
    block_table_stride,
    scores_head_stride,
    scores_row_stride,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # query columns of a request in one tile: rows x heads, up to a power of two
    OWN_COLUMNS: tl.constexpr,  # the same of the rank's own heads
    KEEP: tl.constexpr,  # K up to a power of two
    HIGHER: tl.constexpr,
    SCORES: tl.constexpr,  # write scores, and no candidates
    AUTO: tl.constexpr,  # all heads on the rank's blocks, or its own heads on all blocks, as the plan says
    COUNT: tl.constexpr,  # there are steps to count
    PLANNED: tl.constexpr,
    LISTED: tl.constexpr,  # the pages of a shard by page
    TYPE: tl.constexpr,  # of the products
    FORMAT: tl.constexpr,  # see kernels.formats
    SCALED: tl.constexpr,  # keys have factors
    NATIVE: tl.constexpr,  # the GPU converts e4m3
    CARRY: tl.constexpr,  # load a page while the one before it is scored, in registers
    PAGE_BYTES: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # pages to ask for before the kernel before has ended; 0 without PDL
):
    """Candidates of every segment, or scores. Column `i` of a request is query row `i // H`, head `i % H`."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tile = tl.program_id(1)
    q_row_stride *= per_unit(q_ptr)
    q_head_stride *= per_unit(q_ptr)
    page_stride = page_stride.to(tl.int64) * per_unit(pages_ptr)
    if PLANNED:
        # Plan and table are older than the kernel before, which may still run: its place in the work, and hints, cost no time.
        page, end, request, before, length, at_work = load_share(shares_ptr, program)
        if AUTO:
            rank = tl.where(at_work == 1, 0, rank)
            world = at_work
        if AHEAD > 0:
            longer = visible_blocks(length, longest, BLOCK) > free
            if page < end and longer:
                if LISTED:
                    pages = at_work
                else:
                    pages = request_pages(length, longest, free, rank, world, BLOCK)
                prefetch_pages(
                    pages_ptr,
                    page_stride,
                    num_pages,
                    block_table_ptr + request.to(tl.int64) * block_table_stride + rank,
                    page - before,
                    tl.minimum(end - before, pages),
                    world,
                    PAGE_BYTES,
                    AHEAD,
                )
    if PDL:
        # The kernel before may have written all else that is read here; the next kernel may already take its place on the GPU.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if not PLANNED:
        total = pages_before(requests, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK)
        used = tl.minimum(programs, total)
        page = total
        end = total
        request = program * 0
        before = program * 0
        at_work = world
        if program < used:
            page = share_start(program, total, used)
            end = share_start(program + 1, total, used)
            if requests > 1:
                request, before = request_of(page, seq_lens_ptr, length_stride, requests, longest, free, rank, world, BLOCK)
        length = tl.load(seq_lens_ptr + request * length_stride)
    if COUNT:  # noqa: SIM102 (one is for the compiler, one for the program)
        if program + tile == 0:
            if AUTO:
                steps_ptr += tl.where(world == 1, 1, 0)
            tl.store(steps_ptr, tl.load(steps_ptr) + count)

    alone = world == 1 if AUTO else False
    if alone:
        if tile * OWN_COLUMNS < query_len * own_heads:
            score_share(
                tile, page, end, request, before, length, at_work,
                q_ptr + first_head * q_head_stride, pages_ptr, scales_ptr, block_table_ptr, blocks_ptr, before_ptr,
                seq_lens_ptr, length_stride, keys_ptr, scores_ptr,
                requests, longest, free, query_len, own_heads, init_blocks, local_blocks, rank, world, num_pages,
                q_row_stride, q_head_stride, page_stride, scales_stride, block_table_stride,
                scores_head_stride, scores_row_stride,
                BLOCK, DIM, OWN_COLUMNS, KEEP, HIGHER, SCORES, TYPE, FORMAT, SCALED, NATIVE, CARRY, STAGES, LISTED,
            )  # fmt: skip
    else:
        score_share(
            tile, page, end, request, before, length, at_work,
            q_ptr, pages_ptr, scales_ptr, block_table_ptr, blocks_ptr, before_ptr,
            seq_lens_ptr, length_stride, keys_ptr, scores_ptr,
            requests, longest, free, query_len, heads, init_blocks, local_blocks, rank, world, num_pages,
            q_row_stride, q_head_stride, page_stride, scales_stride, block_table_stride,
            scores_head_stride, scores_row_stride,
            BLOCK, DIM, COLUMNS, KEEP, HIGHER, SCORES, TYPE, FORMAT, SCALED, NATIVE, CARRY, STAGES, LISTED,
        )  # fmt: skip


@triton.jit
def row_place(
    row, seq_lens_ptr, length_stride, before_ptr, requests, longest, free, query_len, rank, world,
    BLOCK: tl.constexpr, PLANNED: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """A row's place among the candidates: its request, the request's tokens and pages, pages before it, all pages."""
    request = row // query_len
    if PLANNED:
        before = tl.load(before_ptr + tl.minimum(request, requests))
        total = tl.load(before_ptr + requests)
    else:
        counted = tl.minimum(request, requests)
        before = pages_before(counted, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK)
        total = pages_before(requests, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK)
    tokens = tl.load(seq_lens_ptr + request * length_stride, mask=request < requests, other=0)
    tokens = tl.minimum(tokens, longest)
    if LISTED:
        pages = tl.load(before_ptr + tl.minimum(request + 1, requests)) - before
    else:
        pages = request_pages(tokens, longest, free, rank, world, BLOCK)
    return request, tokens, pages, before, total


@triton.jit
def row_keys(
    keys_ptr, column, request, tokens, pages, before, total, requests, longest, free, columns, programs,
    BLOCK: tl.constexpr, KEEP: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """First KEEP keys, descending `[1, KEEP]`, of what the segments of a row's request left for its column."""
    best = tl.zeros((1, KEEP), tl.int64)
    if pages > 0:
        used = tl.minimum(programs, total)
        owner = owner_of(before, total, used)
        segments = owner_of(before + pages - 1, total, used) - owner + 1
        width = tl.minimum(KEEP, (total + used - 1) // used)  # most candidates that a segment can have
        width = tl.where(visible_blocks(tokens, longest, BLOCK) <= free, KEEP, width)
        first = (column // columns) * (programs + requests) + owner + request
        source = keys_ptr + first.to(tl.int64) * (columns * KEEP) + (column % columns) * KEEP
        best = top_of(source, segments * width, width, columns * KEEP, KEEP, FEW, MANY, MOST)
    return best


@triton.jit
def seen_tokens(row, request, tokens, requests, query_len):
    """Causal length of a decode row of a request of `tokens` tokens, 0 for padding."""
    return tl.where(request < requests, causal_length(tokens, row % query_len, query_len), 0)


@triton.jit(
    do_not_specialize=[
        "length_stride",
        "requests",
        "longest",
        "free",
        "query_len",
        "heads",
        "columns",
        "topk",
        "rank",
        "world",
        "programs",
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
        "before_ptr",
        "seq_lens_ptr",
        "out_ptr",
        "attention_table_ptr",
        "table_ptr",
        "context_ptr",
    ],
)
def select_kernel(
    keys_ptr,  # [tiles, programs + R, columns, KEEP] i64, of score_kernel
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    before_ptr,  # [R + 1] i32, of plan_kernel
    out_ptr,  # [H, T, K] i32, or i64 keys
    attention_table_ptr,  # [R, max_blocks] i32
    table_ptr,  # [H, T, K * PARTS] i32
    context_ptr,  # [H, T] i32
    requests,
    longest,
    free,
    query_len,
    heads,
    columns,  # of a tile
    topk,
    rank,
    world,
    programs,
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
    FEW: tl.constexpr,  # candidates that are sorted at once, by their number
    MANY: tl.constexpr,
    MOST: tl.constexpr,
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,  # write keys, not ids
    PLANNED: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first K of a row from its request's candidates."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    # Lengths and plan were there before score_kernel began: no need to wait for it yet.
    request, tokens, pages, before, total = row_place(
        row, seq_lens_ptr, length_stride, before_ptr, requests, longest, free, query_len, rank, world, BLOCK, PLANNED, LISTED
    )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = (row % query_len) * heads + head
    best = row_keys(
        keys_ptr, column, request, tokens, pages, before, total, requests, longest, free, columns, programs,
        BLOCK, KEEP, FEW, MANY, MOST,
    )  # fmt: skip
    if KEYS:
        lane = tl.arange(0, KEEP)
        place = out_ptr + head.to(tl.int64) * out_head_stride + row.to(tl.int64) * out_row_stride + lane
        tl.store(place[None, :], best, mask=(lane < topk)[None, :])
    else:
        one = tl.zeros((1,), tl.int32)
        write_ids(
            best,
            head + one,
            row + one,
            tl.minimum(request, tl.maximum(requests - 1, 0)) + one,
            seen_tokens(row, request, tokens, requests, query_len) + one,
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
