# SPDX-License-Identifier: Apache-2.0
"""Decode: score the blocks of all requests, spread evenly over the GPU, then select, one program per row and head.

Work is counted in pages. The pages of all requests, one request behind the other, are cut into as many equal runs as
programs work (a *share* each; `shares_of`), so lengths that differ by any factor keep all busy to the end. A program of
`score_kernel` walks its share: for each request in it (a *segment*) it streams pages, scores them for all query columns of the
request, and keeps the KEEP best keys per column in registers, which it leaves in scratch at the segment's end. A program of
`select_kernel` merges what the segments of its row's request left. The key order is total, so neither the cut nor the
order of arrival can change a result.

Packed keys leave no instructions to spare: there the best are taken from RECENT pages at once. Until then each warp keeps the
maxima of its own tokens, so that no page waits for a barrier of the selection.

Nothing waits for anything within a launch, but a rank's programs for queries that other ranks send (`kernels.exchange`). On
GPUs with programmatic dependent launch the second kernel is on the GPU while the first still runs. A step plan
(`plan_kernel`) saves both from finding shares and requests in every layer, and lets them find their place before they wait:
`plan_kernel` never lets the next kernel in early, so plan, lengths and table are complete whenever one that uses them runs.

Where pages are sharded, a rank's part of a request is no arithmetic progression of blocks, but a list (`kernels.owned`): pages
are then counted along the lists, and with LISTED the kernels take a segment's pages and blocks from them.

Grid `(programs, column tiles)`, then `(T, H)`. Bytes: each visible page once per column tile; scratch is a few hundred KB and
stays in the L2.
"""

import triton
import triton.language as tl

from lightning_indexer.kernels.box import CHUNK, await_words, box_of, own_words, query_place, send_words
from lightning_indexer.kernels.common import (
    block_count,
    causal_length,
    keep_key,
    largest_first,
    masked,
    nan_max,
    no_keys,
    owned_block,
    owned_blocks,
    owner_of_head,
    per_unit,
    top_of,
    write_ids,
)
from lightning_indexer.kernels.formats import WARPS, key_token, load_columns, load_page, page_dots, page_place
from lightning_indexer.kernels.key import join_keys, pack_keys, top_keys
from lightning_indexer.workspace import SHARE_FIELDS

LENGTHS = tl.constexpr(128)  # lengths looked at at once
RECENT = tl.constexpr(16)  # pages of packed keys whose scores are selected from at once
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
def shares_of(total, programs, few, many):
    """Shares that all pages are cut into: one for each program from `many` pages on, else `few`, and a page each at least."""
    return tl.minimum(tl.where(total >= many, programs, few), total)


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
        "few",
        "many",
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
    few,  # see shares_of
    many,
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
    else:
        total = pages_before(requests, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK)
        used = shares_of(total, programs, few, many)
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
        # The next kernels read this before they have waited for this kernel's end, though only once all programs have left.
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_queries(
    box, rows, heads, wanted, parity, query_words, query_half, owned, replicas, max_rows, failed_ptr, report_ptr, polls,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Wait until the queries of some rows and heads lie in the own box; where each one's words begin there."""
    source = owner_of_head(heads, owned, replicas)
    first = query_place(query_words, query_half, parity, source, rows, heads % owned, owned, max_rows, WORDS)
    if polls >= 0:
        word = tl.arange(0, WORDS)[:, None]
        awaited = wanted[None, :] & (word >= 0)
        await_words(box + first[None, :] + word, awaited, source[None, :] + word * 0, failed_ptr, report_ptr, polls)
    return first


@triton.jit
def distinct(dots, COLUMNS: tl.constexpr):
    """One copy of each column `[B, COLUMNS]` of a product: threads leave out what they have twice."""
    BLOCK: tl.constexpr = dots.shape[0]
    if COLUMNS < dots.shape[1]:
        dots, _ = tl.split(dots.reshape(BLOCK, dots.shape[1] // 2, 2))
        if COLUMNS < dots.shape[1]:
            dots, _ = tl.split(dots.reshape(BLOCK, 2, COLUMNS).permute(0, 2, 1))
    return dots


@triton.jit
def warp_maxima(dots):
    """Maxima `[WARPS, 1, columns]` of dots `[B, columns]`: each warp's of the rows of the product that it has."""
    BLOCK: tl.constexpr = dots.shape[0]
    dots = dots.reshape(BLOCK // (16 * WARPS), WARPS, 2, 8, dots.shape[1])
    dots = tl.reduce(tl.reduce(dots, 0, nan_max), 1, nan_max)  # of a thread
    return tl.reduce(dots, 1, nan_max)[:, None, :]


@triton.jit
def settled(
    best, recent, first, last, more, visible, scores_place, init_blocks, local_blocks, blocks_row, rank, world,
    COLUMNS: tl.constexpr, KEEP: tl.constexpr, HIGHER: tl.constexpr, SCORES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The best keys after pages `first` to `last`, whose maxima are `recent`; or their scores are written.

    Not `more` if there were no pages before them.
    """
    scores = tl.trans(tl.reduce(recent, 0, nan_max))
    HELD: tl.constexpr = scores.shape[0]
    if COLUMNS < HELD:
        scores = tl.reduce(scores.reshape(COLUMNS, HELD // COLUMNS, RECENT), 1, nan_max)
    # Every warp has all scores. This leaves each with columns of its own, which it then sorts alone.
    scores = tl.gather(scores, tl.broadcast_to(tl.arange(0, RECENT)[None, :], (COLUMNS, RECENT)), 1)
    index = first + tl.arange(0, RECENT)[None, :]
    slot = index
    if LISTED:
        block = tl.load(blocks_row + index, mask=index < last, other=0)
        slot = block
    else:
        block = index * world + rank
    if SCORES:
        tl.store(scores_place[:, None] + slot, scores, mask=(index < last) & (block < visible[:, None]))
    else:
        keys = pack_keys(scores, block, visible[:, None], init_blocks, local_blocks, HIGHER)
        keys = tl.where(index < last, keys, 0)
        if RECENT > KEEP:
            keys = top_keys(keys, KEEP)
        for _ in tl.static_range(2):  # K is at most 64
            if keys.shape[1] < KEEP:  # the selector reads the first keys of a short segment
                keys = tl.join(keys, tl.zeros_like(keys)).permute(0, 2, 1).reshape(COLUMNS, 2 * keys.shape[1])
        if more:
            keys = top_keys(join_keys(best, keys, COLUMNS, KEEP), KEEP)
        best = keys
    return best


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
    box,
    parity,
    query_words,
    query_half,
    owned,
    replicas,
    max_rows,
    failed_ptr,
    report_ptr,
    polls,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
    HIGHER: tl.constexpr,
    SCORES: tl.constexpr,
    BOXED: tl.constexpr,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    CARRY: tl.constexpr,
    STAGES: tl.constexpr,
    LISTED: tl.constexpr,
    WAIT: tl.constexpr,  # for the kernel before, once the first segment's place is known
):
    """Candidates or scores of the pages of one program's share, for one column tile."""
    tl.static_assert(not (CARRY and SCALED))  # with CARRY `this_page` is the page that is loaded, not the one that is scored
    # More columns leave no registers for it. Pages of 16 bits wait for memory, and take nearly all that is shared.
    DEFERRED: tl.constexpr = COLUMNS <= 16 and FORMAT != "plain"
    # A matrix product is at least 16 wide: columns are repeated, so that a thread has all of its copies but of four columns.
    WIDE: tl.constexpr = max(COLUMNS, 16)
    HELD: tl.constexpr = max(COLUMNS, 4)
    wide = tl.arange(0, WIDE)
    if WIDE > HELD:
        wide = wide // 2 % HELD
    wide = tile * COLUMNS + wide * COLUMNS // HELD
    held = tile * COLUMNS + tl.arange(0, HELD) * COLUMNS // HELD
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    wanted = column < query_len * heads
    token = column // heads
    head = column % heads
    tokens = key_token(BLOCK, FORMAT)
    slot_places = tl.arange(0, COLUMNS)[:, None] * KEEP + tl.arange(0, KEEP)[None, :]
    # Segments are numbered program + request: along the pages one or the other grows from each segment to the next.
    keys_ptr += (tile * (tl.num_programs(0) + requests) + tl.program_id(0)).to(tl.int64) * (COLUMNS * KEEP)

    # A segment's length is asked for two segments ahead, its first page one ahead, so that neither is waited for. They may be
    # as young as the plan: not from the L1.
    start = page
    first_page = tl.load(
        block_table_ptr + request.to(tl.int64) * block_table_stride + (page - before) * world + rank,
        mask=page < end,
        other=0,
        cache_modifier=".cg",
    )
    follows = (page < end) & (request + 1 < requests)
    next_length = tl.load(seq_lens_ptr + (request + 1) * length_stride, mask=follows, other=0, cache_modifier=".cg")
    if LISTED:
        next_end = tl.load(before_ptr + request + 2, mask=follows, other=0, cache_modifier=".cg")
    if WAIT:  # noqa: SIM102 (one is for the compiler, one for the program)
        if (start >= end) & (tl.program_id(0) == 0):
            tl.extra.cuda.gdc_wait()  # others without work leave; this launch must not end before the one before
    while page < end:
        length = tl.minimum(length, longest)
        if LISTED:
            pages = listed
            next_pages = next_end - before - pages
        else:
            pages = request_pages(length, longest, free, rank, world, BLOCK)
            next_pages = request_pages(next_length, longest, free, rank, world, BLOCK)
        follows = before + pages < end
        next_first = tl.load(
            block_table_ptr + (request + 1).to(tl.int64) * block_table_stride + rank,
            mask=follows & (next_pages > 0),
            other=0,
            cache_modifier=".cg",
        )
        follows &= request + 2 < requests
        after_length = tl.load(seq_lens_ptr + (request + 2) * length_stride, mask=follows, other=0, cache_modifier=".cg")
        if LISTED:
            after_end = tl.load(before_ptr + request + 3, mask=follows, other=0, cache_modifier=".cg")
        if pages > 0:
            first = page - before
            last = tl.minimum(end - before, pages)
            table_row = block_table_ptr + request.to(tl.int64) * block_table_stride
            blocks_row = blocks_ptr + request.to(tl.int64) * block_table_stride
            q_row = (request * query_len + wide // heads).to(tl.int64)
            q_head = (wide % heads).to(tl.int64)
            inside = (wide < query_len * heads)[None, :]
            places = q_ptr + (q_row * q_row_stride + q_head * q_head_stride)
            held_lengths = causal_length(length, held // heads, query_len)
            lengths = causal_length(length, token, query_len)
            whole = causal_length(length, 0, query_len) // BLOCK  # blocks that all columns see whole
            visible = tl.where(wanted, block_count(lengths, BLOCK), 0)
            row = (request * query_len + token).to(tl.int64)
            scores_place = scores_ptr + head.to(tl.int64) * scores_head_stride + row * scores_row_stride
            # One page id ahead, so that its load is never waited for; with CARRY also a page.
            next_page = first_page
            if WAIT:  # noqa: SIM102 (one is for the compiler, one for the program)
                if page == start:
                    tl.extra.cuda.gdc_wait()
            if CARRY:
                one, two, three = load_page(page_place(pages_ptr, next_page, page_stride, num_pages), BLOCK, DIM, FORMAT)
                next_page = tl.load(table_row + tl.minimum(first + 1, last - 1) * world + rank)
            if BOXED > 0:
                sent = await_queries(
                    box, q_row, q_head, wide < query_len * heads, parity, query_words, query_half, owned, replicas, max_rows,
                    failed_ptr, report_ptr, polls, BOXED,
                )  # fmt: skip
                places = (box + sent).to(q_ptr.dtype, bitcast=True)
                queries, upper = load_columns(places, inside, DIM, TYPE, FORMAT, True)
            else:
                queries, upper = load_columns(places, inside, DIM, TYPE, FORMAT, False)
            best = no_keys(COLUMNS, KEEP)
            if visible_blocks(length, longest, BLOCK) <= free:
                last = first
                every = tl.arange(0, KEEP)[None, :] * world + rank
                nothing = tl.zeros((COLUMNS, KEEP), tl.float32)
                best = pack_keys(nothing, every, visible[:, None], init_blocks, local_blocks, HIGHER)
            recent = tl.zeros((WARPS, RECENT, HELD), tl.float32)
            oldest = first
            for index in tl.range(first, last, num_stages=STAGES):
                block = owned_block(blocks_row, index, rank, world, LISTED)  # not needed before the page is scored
                this_page = next_page
                next_page = tl.load(table_row + tl.minimum(index + 1 + CARRY, last - 1) * world + rank)
                place = page_place(pages_ptr, this_page, page_stride, num_pages)
                if not CARRY:
                    one, two, three = load_page(place, BLOCK, DIM, FORMAT)
                dots, one, two, three = page_dots(
                    one, two, three, place, queries, upper, BLOCK, DIM, FORMAT, NATIVE, False, CARRY
                )
                dots = distinct(dots, HELD)
                if SCALED:
                    scored = tl.minimum(tl.maximum(this_page, 0), num_pages - 1).to(tl.int64)
                    dots *= tl.load(scales_ptr + scored * scales_stride + tokens)[:, None]
                if block >= whole:
                    dots = masked(dots, block * BLOCK + tokens, held_lengths)
                if DEFERRED:
                    if index == oldest + RECENT:
                        best = settled(
                            best, recent, oldest, index, oldest > first, visible, scores_place, init_blocks, local_blocks,
                            blocks_row, rank, world, COLUMNS, KEEP, HIGHER, SCORES, LISTED,
                        )  # fmt: skip
                        oldest = index
                    recent = tl.where((tl.arange(0, RECENT) == index - oldest)[None, :, None], warp_maxima(dots), recent)
                else:
                    scores = tl.reduce(dots, 0, nan_max)
                    if COLUMNS <= 16:  # also where HELD is COLUMNS: `best` takes fewer registers than in the product's layout
                        scores = tl.gather(scores, tl.arange(0, COLUMNS) * (HELD // COLUMNS), 0)
                    if SCORES:
                        tl.store(scores_place + (block if LISTED else index), scores, mask=block < visible)
                    else:
                        best = keep_key(best, pack_keys(scores, block, visible, init_blocks, local_blocks, HIGHER))
            if DEFERRED:  # noqa: SIM102 (one is for the compiler, one for the program)
                if oldest < last:
                    best = settled(
                        best, recent, oldest, last, oldest > first, visible, scores_place, init_blocks, local_blocks,
                        blocks_row, rank, world, COLUMNS, KEEP, HIGHER, SCORES, LISTED,
                    )  # fmt: skip
            if not SCORES:
                if last - first > 1:  # the first page's key took the first place
                    best = largest_first(best, KEEP)
                best = tl.maximum(best, 0)
                tl.store(keys_ptr + request.to(tl.int64) * (COLUMNS * KEEP) + slot_places, best)
        before += pages
        page = before
        request += 1
        length = next_length
        next_length = after_length
        first_page = next_first
        if LISTED:
            listed = next_pages
            next_end = after_end


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
        "few",
        "many",
        "q_row_stride",
        "q_head_stride",
        "page_stride",
        "scales_stride",
        "block_table_stride",
        "scores_head_stride",
        "scores_row_stride",
        "query_words",
        "query_half",
        "peer_rank",
        "peers",
        "replicas",
        "max_rows",
        "polls",
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
        "boxes_ptr",
        "failed_ptr",
        "report_ptr",
    ],
)
def score_kernel(
    q_ptr,  # [T, H, D], or [T, h, D] if others' lie in boxes
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
    steps_ptr,  # [3] i32: steps that were exchanged, that were not, and the former as the last exchange found them
    boxes_ptr,  # [P] i64 addresses
    failed_ptr,
    report_ptr,
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
    few,  # see shares_of
    many,
    q_row_stride,  # these three in units of 16 bytes, so that the compiler knows that 16-byte loads are aligned
    q_head_stride,
    page_stride,
    scales_stride,
    block_table_stride,
    scores_head_stride,
    scores_row_stride,
    query_words,  # where the queries begin in a box
    query_half,  # words of a half of them
    peer_rank,  # of those that exchange
    peers,
    replicas,  # ranks that own the same heads
    max_rows,
    polls,  # looks for words that are not there; negative: neither send nor wait
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # query columns of a request in one tile: rows x heads, up to a power of two
    OWN_COLUMNS: tl.constexpr,  # the same of the rank's own heads
    KEEP: tl.constexpr,  # K up to a power of two
    HIGHER: tl.constexpr,
    SCORES: tl.constexpr,  # write scores, and no candidates
    AUTO: tl.constexpr,  # all heads on the rank's blocks, or its own heads on all blocks, as the plan says
    COUNT: tl.constexpr,  # there are steps to count
    BOXED: tl.constexpr,  # words of a head's queries, which a shared step sends and awaits; 0 if all heads' are given
    SENDERS: tl.constexpr,  # programs that send them, if there are as many
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
        # Plan and table are complete, though the kernel before may still run: its place in the work, and hints, cost no time.
        # The next kernel may come and find its own.
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
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
    alone = world == 1 if AUTO else False
    box = box_of(boxes_ptr, peer_rank) if BOXED > 0 else steps_ptr
    if not PLANNED:
        if PDL:
            # The kernel before may have written all that is read here, and by the next one before it waits.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        total = pages_before(requests, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK)
        used = shares_of(total, programs, few, many)
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
    parity = program * 0
    if BOXED > 0:
        if PDL and PLANNED:  # noqa: SIM102 (one is for the compiler, one for the program)
            if alone == 0:
                tl.extra.cuda.gdc_wait()
        # Not from the count itself, which the first program adds to.
        parity = (tl.load(steps_ptr + 2, mask=alone == 0, other=0) + 1) & 1
        senders = tl.minimum(SENDERS, programs)
        if (program < senders) & (tile == 0) & (alone == 0) & (polls >= 0) & (peer_rank % replicas == 0):
            words = requests * query_len * own_heads * BOXED
            q_words = q_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
            per_word: tl.constexpr = 64 // q_ptr.dtype.element_ty.primitive_bitwidth
            sent = query_place(query_words, query_half, parity, peer_rank, 0, 0, own_heads, max_rows, BOXED)
            for first in range(program * CHUNK, words, senders * CHUNK):
                place = first + tl.arange(0, CHUNK)
                inside = place < words
                strides = q_row_stride // per_word, q_head_stride // per_word
                word = own_words(q_words, place, inside, strides[0], strides[1], own_heads, 0, BOXED)
                send_words(word, inside, boxes_ptr, sent + place, peers, -1)

    if AUTO and BOXED == 0:
        q_ptr += tl.where(alone, first_head * q_head_stride, 0)
    if AUTO and OWN_COLUMNS == COLUMNS and BOXED == 0:
        heads = tl.where(alone, own_heads, heads)
    if AUTO:
        end = tl.where(alone & (tile * OWN_COLUMNS >= query_len * own_heads), page, end)  # a tile of others' heads
    # A loop of its own: narrower, and without code for queries that are sent.
    apart = alone if OWN_COLUMNS < COLUMNS or BOXED > 0 else False
    if apart:
        score_share(
            tile, page, end, request, before, length, at_work,
            q_ptr, pages_ptr, scales_ptr, block_table_ptr, blocks_ptr, before_ptr,
            seq_lens_ptr, length_stride, keys_ptr, scores_ptr,
            requests, longest, free, query_len, own_heads, init_blocks, local_blocks, rank, world, num_pages,
            q_row_stride, q_head_stride, page_stride, scales_stride, block_table_stride,
            scores_head_stride, scores_row_stride,
            box, parity, query_words, query_half, own_heads, replicas, max_rows, failed_ptr, report_ptr, polls,
            BLOCK, DIM, OWN_COLUMNS, KEEP, HIGHER, SCORES, 0, TYPE, FORMAT, SCALED, NATIVE, CARRY, STAGES, LISTED,
            PDL and PLANNED,
        )  # fmt: skip
    else:
        score_share(
            tile, page, end, request, before, length, at_work,
            q_ptr, pages_ptr, scales_ptr, block_table_ptr, blocks_ptr, before_ptr,
            seq_lens_ptr, length_stride, keys_ptr, scores_ptr,
            requests, longest, free, query_len, heads, init_blocks, local_blocks, rank, world, num_pages,
            q_row_stride, q_head_stride, page_stride, scales_stride, block_table_stride,
            scores_head_stride, scores_row_stride,
            box, parity, query_words, query_half, own_heads, replicas, max_rows, failed_ptr, report_ptr, polls,
            BLOCK, DIM, COLUMNS, KEEP, HIGHER, SCORES, BOXED, TYPE, FORMAT, SCALED, NATIVE, CARRY, STAGES, LISTED,
            PDL and PLANNED and BOXED == 0,
        )  # fmt: skip
    if COUNT:
        counter = steps_ptr + tl.where(world == 1, 1, 0) if AUTO else steps_ptr
        tl.atomic_add(counter, count, mask=program + tile == 0, sem="relaxed")  # its result is not waited for


@triton.jit
def row_runs(
    row, head, heads, seq_lens_ptr, length_stride, before_ptr, requests, longest, free, query_len, columns, rank, world,
    programs, few, many, BLOCK: tl.constexpr, KEEP: tl.constexpr, PLANNED: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Where the candidates of a row and one of `heads` scored heads lie.

    The row's request, the request's tokens, the first candidate's place, how many segments left some, and how many each.
    """
    request = row // query_len
    if PLANNED:
        before = tl.load(before_ptr + tl.minimum(request, requests), cache_modifier=".cg")
        total = tl.load(before_ptr + requests, cache_modifier=".cg")
    else:
        counted = tl.minimum(request, requests)
        before = pages_before(counted, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK)
        total = pages_before(requests, seq_lens_ptr, length_stride, longest, free, rank, world, BLOCK)
    modifier: tl.constexpr = ".cg" if PLANNED else ""  # without a plan it has just been loaded
    tokens = tl.load(seq_lens_ptr + request * length_stride, mask=request < requests, other=0, cache_modifier=modifier)
    tokens = tl.minimum(tokens, longest)
    if LISTED:
        pages = tl.load(before_ptr + tl.minimum(request + 1, requests), cache_modifier=".cg") - before
    else:
        pages = request_pages(tokens, longest, free, rank, world, BLOCK)
    column = (row % query_len) * heads + head
    used = tl.maximum(shares_of(total, programs, few, many), 1)
    total = tl.maximum(total, 1)
    owner = owner_of(before, total, used)
    segments = owner_of(before + pages - 1, total, used) - owner + 1
    width = tl.minimum(KEEP, (total + used - 1) // used)  # most candidates that a segment can have
    width = tl.where(visible_blocks(tokens, longest, BLOCK) <= free, KEEP, width)
    first = (column // columns) * (programs + requests) + owner + request
    place = first.to(tl.int64) * (columns * KEEP) + (column % columns) * KEEP
    return request, tokens, place, tl.where(pages > 0, segments, 0), width


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
        "few",
        "many",
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
    few,  # see shares_of
    many,
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
    SOME: tl.constexpr,
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
    # Without a plan score_kernel has waited before it let this kernel in; with one lengths and plan are complete.
    request, tokens, place, runs, width = row_runs(
        row, head, heads, seq_lens_ptr, length_stride, before_ptr, requests, longest, free, query_len, columns, rank, world,
        programs, few, many, BLOCK, KEEP, PLANNED, LISTED,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = top_of(keys_ptr + place, runs, width, columns * KEEP, KEEP, FEW, SOME, MANY, MOST)
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
