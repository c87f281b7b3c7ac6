# SPDX-License-Identifier: Apache-2.0
"""The `peer` exchange: ranks of one host write queries and keys straight into each other's boxes.

A *box* is memory of one rank that all ranks of the group can write. Words are 8 bytes, and a word that holds nothing is EMPTY:
the payload is its own flag. A writer stores words, each whole by itself; the reader polls until none of those that it needs is
EMPTY, takes them, and puts EMPTY back. No fence, no barrier, no generation is needed between the two.

    keys     [2, P, h, max_rows, K]        from each rank, for the owner's h heads
    queries  [2, P, max_rows, h, D / 4]    from each rank, its own heads, 4 elements of 16 bits a word; with 8 of 8 bits D / 8

The leading 2 is the parity of the number of exchanged steps, which is counted on the device. A rank writes into a half again
two exchanges later. By then it has taken the keys of the exchange between, which their sender sent after it had emptied its
half; so a word is never overwritten before it is read, whatever the ranks' speeds, and nothing waits for a barrier. Steps
that are not exchanged do not count. Where steps of 16-bit and 8-bit queries take turns, their halves overlap: between the
two lies an exchange of keys, which no rank sends before it has taken all queries of its step and emptied their places.

Who waits for whom. A program waits for other ranks only when this rank has done all that they wait for in the same step, or
can still do it beside the waiting programs: `exchange_kernel` sends the heads of others from programs that do not wait, and
the programs that wait are few (`waiters`). No kernel behind one that waits is let onto the GPU before the waiting is over, for
it would hold the memory that the awaited work of a rank on the same GPU may need. A wait ends after `polls` looks: the
program notes the missing rank and goes on without it, and no later wait waits.
"""

import triton
import triton.language as tl

from lightning_indexer.kernels.common import first_owned_head, owner_of_head, write_ids
from lightning_indexer.kernels.decode import row_keys, row_place, seen_tokens
from lightning_indexer.kernels.key import join_keys, top_keys

EMPTY = tl.constexpr(-1)  # no key: those are not negative. As floats of 16 bits, or as e4m3fn: all NaN
NAN_WORD = tl.constexpr(-2)  # what is sent for a word of queries that is EMPTY: all elements but one are still NaN
CHUNK = tl.constexpr(512)  # words of queries that are moved at once


@triton.jit
def take_words(place, mask, source, failed_ptr, report_ptr, polls):
    """Words of a box once all of them are there, leaving EMPTY in their places; EMPTY for what did not come in `polls` looks.

    There must be at least as many words as threads: a word that two warps look at, each for itself, may be there for one and
    not for the other. source: the rank that each is from. failed_ptr: 1 + a rank that was missed, on the device; report_ptr:
    for the host.
    """
    words = tl.load(place, mask=mask, other=0, volatile=True)
    missing = tl.sum((words == EMPTY).to(tl.int32))
    failed = missing * 0
    while (missing > 0) & (failed == 0) & (polls > 0):
        words = tl.load(place, mask=mask, other=0, volatile=True)
        stopped = tl.load(failed_ptr + tl.zeros_like(source), volatile=True)
        # One sum for both, so that all threads go on alike.
        told = tl.sum((words == EMPTY).to(tl.int32) + tl.where(stopped != 0, 65536, 0))
        missing = told % 65536
        failed = told // 65536
        polls -= 1
    if (missing > 0) & (failed == 0):
        absent = tl.min(tl.where(words == EMPTY, source, 0x7FFFFFFF)) + 1
        tl.store(failed_ptr, absent)
        tl.store(report_ptr, absent, cache_modifier=".wt")
    tl.debug_barrier()  # nobody is still looking
    tl.store(place, tl.full(words.shape, EMPTY, tl.int64), mask=mask, cache_modifier=".wt")
    return words


@triton.jit
def box_of(boxes_ptr, rank):
    """A rank's box."""
    return tl.load(boxes_ptr + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def key_slot(parity, source, head, row, world, owned, max_rows, topk):
    """First word of the keys of a row for the owner's head number `head`, from a rank."""
    return ((((parity * world + source) * owned + head).to(tl.int64)) * max_rows + row) * topk


@triton.jit
def send_keys(
    best, head, row, boxes_ptr, parity, rank, world, owned, replicas, max_rows, topk, KEEP: tl.constexpr
):  # fmt: skip
    """The first K of `best` `[1, KEEP]` to every rank that owns the head."""
    lane = tl.arange(0, KEEP)[None, :]
    slot = key_slot(parity, rank, head % owned, row, world, owned, max_rows, topk)
    for replica in range(replicas):
        box = box_of(boxes_ptr, owner_of_head(head, owned, replicas) + replica)
        tl.store(box + slot + lane, best, mask=lane < topk, cache_modifier=".wt")


@triton.jit
def take_keys(
    box, head, row, failed_ptr, report_ptr, parity, world, owned, max_rows, topk, polls,
    KEEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """First KEEP keys, descending `[1, KEEP]`, of all ranks' for a row and an own head; none if a rank is missing."""
    total = world * topk
    lane = tl.arange(0, LANES)
    place = box + key_slot(parity, lane // topk, head, row, world, owned, max_rows, topk) + lane % topk
    words = take_words(place, lane < total, lane // topk, failed_ptr, report_ptr, polls)
    missing = tl.sum((words == EMPTY).to(tl.int32))
    best = top_keys(words[None, :], KEEP)
    for first in range(LANES, total, LANES):
        lane = first + tl.arange(0, LANES)
        place = box + key_slot(parity, lane // topk, head, row, world, owned, max_rows, topk) + lane % topk
        words = take_words(place, lane < total, lane // topk, failed_ptr, report_ptr, polls)
        missing += tl.sum((words == EMPTY).to(tl.int32))
        best = top_keys(join_keys(best, top_keys(words[None, :], KEEP), 1, KEEP), KEEP)
    return tl.where(missing == 0, best, 0)


@triton.jit(
    do_not_specialize=[
        "rows",
        "q_row_stride",
        "q_head_stride",
        "owned",
        "heads",
        "replicas",
        "rank",
        "world",
        "max_rows",
        "query_words",
        "polls",
    ],
    do_not_specialize_on_alignment=["world_ptr", "steps_ptr"],
)
def gather_kernel(
    q_ptr,  # [T, h, D] of 16 or 8 bits
    out_ptr,  # [T, H, D] contiguous
    boxes_ptr,  # [P] i64 addresses
    world_ptr,  # i32, of the plan: ranks that share the work, 1 if each works alone
    steps_ptr,  # [2] i32: steps that were exchanged, steps that were not
    failed_ptr,
    report_ptr,
    rows,
    q_row_stride,  # in words
    q_head_stride,
    owned,
    heads,
    replicas,
    rank,
    world,
    max_rows,
    query_words,  # where the queries begin in a box
    polls,  # looks for words that are not there; negative: neither send nor wait
    WORDS: tl.constexpr,  # of D elements
    FLIP: tl.constexpr,  # bits of a word that are turned over on its way, so that EMPTY is a word of NaNs
    AUTO: tl.constexpr,
    PDL: tl.constexpr,
):
    """All heads' queries from each rank's own; of the ranks that own the same head the first one's count."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    words: tl.constexpr = WORDS
    if PDL:
        tl.extra.cuda.gdc_wait()
    q_ptr = q_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    out_ptr = out_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    shared = polls >= 0
    if AUTO:
        shared = shared & (tl.load(world_ptr) > 1)
    parity = (tl.load(steps_ptr) + 1) & 1
    total = rows * owned * words
    half = max_rows * owned * words  # words of a rank in a half
    first = rank % replicas == 0

    for begin in range(program * CHUNK, total, programs * CHUNK):
        place = begin + tl.arange(0, CHUNK)
        inside = place < total
        row = place // (owned * words)
        head = place // words % owned
        source = row.to(tl.int64) * q_row_stride + head * q_head_stride + place % words
        word = tl.load(q_ptr + source, mask=inside, other=0) ^ FLIP
        word = tl.where(word == EMPTY, NAN_WORD, word)
        if first | (shared == 0):
            own = row.to(tl.int64) * heads + first_owned_head(rank, owned, replicas) + head
            tl.store(out_ptr + own * words + place % words, word ^ FLIP, mask=inside)
        if first & shared:
            for other in range(world):
                if other != rank:
                    box = box_of(boxes_ptr, other) + query_words + (parity * world + rank).to(tl.int64) * half
                    tl.store(box + place, word, mask=inside, cache_modifier=".wt")
    if shared:
        box = box_of(boxes_ptr, rank) + query_words
        for begin in range(program * CHUNK, total, programs * CHUNK):
            place = begin + tl.arange(0, CHUNK)
            inside = place < total
            row = place // (owned * words)
            head = place // words % owned
            for group in range(world // replicas):
                other = group * replicas
                if other != rank:
                    sent = box + (parity * world + other).to(tl.int64) * half + place
                    word = take_words(sent, inside, other + place * 0, failed_ptr, report_ptr, polls)
                    there = row.to(tl.int64) * heads + first_owned_head(other, owned, replicas) + head
                    tl.store(out_ptr + there * words + place % words, word ^ FLIP, mask=inside)


@triton.jit(
    do_not_specialize=[
        "length_stride",
        "requests",
        "rows",
        "longest",
        "free",
        "query_len",
        "heads",
        "first_head",
        "owned",
        "replicas",
        "columns",
        "own_columns",
        "topk",
        "rank",
        "world",
        "programs",
        "max_rows",
        "waiters",
        "polls",
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
        "world_ptr",
        "before_ptr",
        "seq_lens_ptr",
        "steps_ptr",
        "out_ptr",
        "attention_table_ptr",
        "table_ptr",
        "context_ptr",
    ],
)
def exchange_kernel(
    keys_ptr,  # [tiles, programs + R, columns, KEEP] i64, of score_kernel
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    before_ptr,  # [R + 1] i32, of plan_kernel
    boxes_ptr,  # [P] i64 addresses
    world_ptr,  # i32, of the plan: ranks that share the work, 1 if each works alone
    steps_ptr,  # [2] i32: steps that were exchanged, steps that were not
    failed_ptr,
    report_ptr,
    out_ptr,  # [h, T, K] i32
    attention_table_ptr,  # [R, max_blocks] i32
    table_ptr,  # [h, T, K * PARTS] i32
    context_ptr,  # [h, T] i32
    requests,
    rows,
    longest,
    free,
    query_len,
    heads,
    first_head,
    owned,
    replicas,
    columns,  # of a tile of all heads
    own_columns,  # of a tile of the own heads
    topk,
    rank,
    world,
    programs,
    max_rows,
    waiters,
    polls,  # looks for words that are not there; negative: neither send nor wait
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
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    MOST: tl.constexpr,
    LANES: tl.constexpr,  # keys of all ranks that are merged at once
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    AUTO: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids of the own heads: select of the shard, send to the owners, take from all ranks, merge.

    Grid `(T * (H - h) + waiters,)`: a program for each row and head of another rank, then `waiters` for the own ones.
    """
    program = tl.program_id(0)
    others = rows * (heads - owned)
    # Lengths and plan were there before score_kernel began: no need to wait for it yet.
    if AUTO:
        at_work = tl.load(world_ptr)
        rank_at_work = tl.where(at_work == 1, 0, rank)
    else:
        at_work = world
        rank_at_work = rank
    together = at_work > 1
    item = program
    stop = program + 1
    step = 1
    per_row = heads - owned
    if together & (program >= others):
        item = program - others
        stop = rows * owned
        step = waiters
        per_row = owned
    if at_work == 1:
        stop = rows * owned
        step = tl.num_programs(0)
        per_row = owned
    own = (program >= others) | (at_work == 1)
    begin = item
    row = item // per_row
    request, tokens, pages, before, total = row_place(
        row, seq_lens_ptr, length_stride, before_ptr, requests, longest, free, query_len, rank_at_work, at_work,
        BLOCK, True, LISTED,
    )  # fmt: skip
    own_box = box_of(boxes_ptr, rank)  # and the addresses of the others lie beside it
    if PDL:
        if AUTO:  # noqa: SIM102 (one is for the compiler, one for the program)
            if at_work == 1:
                tl.extra.cuda.gdc_launch_dependents()  # nobody will wait here
        tl.extra.cuda.gdc_wait()
    parity = tl.load(steps_ptr) & 1  # the count may wrap
    one = tl.zeros((1,), tl.int32)

    while item < stop:
        number = item % per_row
        head = tl.where(own, first_head + number, number + tl.where(number >= first_head, owned, 0))
        column = (row % query_len) * tl.where(together, heads, owned) + tl.where(together, head, number)
        best = row_keys(
            keys_ptr, column, request, tokens, pages, before, total, requests, longest, free,
            tl.where(together, columns, own_columns), programs, BLOCK, KEEP, FEW, MANY, MOST,
        )  # fmt: skip
        if together:
            if polls >= 0:
                send_keys(best, head, row, boxes_ptr, parity, rank, world, owned, replicas, max_rows, topk, KEEP)
        else:
            write_ids(
                best, number + one, row + one, tl.minimum(request, requests - 1) + one,
                seen_tokens(row, request, tokens, requests, query_len) + one, one == 0,
                out_ptr, out_head_stride, out_row_stride, topk,
                attention_table_ptr, attention_table_stride, attention_columns,
                table_ptr, table_head_stride, table_row_stride, context_ptr, context_head_stride, context_row_stride,
                attention_page_stride, BLOCK, KEEP, HIGHER, BY_BLOCK, PARTS,
            )  # fmt: skip
        item += step
        row = item // per_row
        if item < stop:
            request, tokens, pages, before, total = row_place(
                row, seq_lens_ptr, length_stride, before_ptr, requests, longest, free, query_len, rank_at_work, at_work,
                BLOCK, True, LISTED,
            )  # fmt: skip

    if together & own:
        for mine in range(begin, stop, step):
            row = mine // owned
            request = row // query_len
            tokens = tl.load(seq_lens_ptr + request * length_stride, mask=request < requests, other=0)
            best = tl.zeros((1, KEEP), tl.int64)
            if polls >= 0:
                best = take_keys(
                    own_box, mine % owned, row, failed_ptr, report_ptr, parity, world, owned, max_rows, topk, polls,
                    KEEP, LANES,
                )  # fmt: skip
            write_ids(
                best, mine % owned + one, row + one, tl.minimum(request, requests - 1) + one,
                seen_tokens(row, request, tl.minimum(tokens, longest), requests, query_len) + one, one == 0,
                out_ptr, out_head_stride, out_row_stride, topk,
                attention_table_ptr, attention_table_stride, attention_columns,
                table_ptr, table_head_stride, table_row_stride, context_ptr, context_head_stride, context_row_stride,
                attention_page_stride, BLOCK, KEEP, HIGHER, BY_BLOCK, PARTS,
            )  # fmt: skip
