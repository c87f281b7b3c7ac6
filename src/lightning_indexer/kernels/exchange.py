# SPDX-License-Identifier: Apache-2.0
"""The `peer` exchange: ranks of one host write queries and keys straight into each other's boxes.

A writer stores words into a box (`kernels.box`), each whole by itself; the reader polls until none of those that it needs is
EMPTY, takes them, and puts EMPTY back. No fence, no barrier, no generation is needed between the two.

    keys     [2, P, h, max_rows, K]        from each rank, for the owner's h heads
    queries  [2, P, max_rows, h, D / 4]    from each rank, its own heads, 4 elements of 16 bits a word; with 8 of 8 bits half

The leading 2 is the parity of the number of exchanged steps, which is counted on the device. A rank writes into a half again
two exchanges later. By then it has taken the keys of the exchange between, which their sender sent after it had emptied its
half; so a word is never overwritten before it is read, whatever the ranks' speeds, and nothing waits for a barrier. Steps
that are not exchanged do not count.

Queries of rows past the requests stay where they are. All others travel in one of two ways, on all ranks alike. Where every
rank has a GPU to itself, and one step in flight, up to 128 rows of up to 16 columns a request are sent from `score_kernel`,
whose programs wait for what they score and read it in the box; `exchange_kernel` empties the places. Else a launch of its
own, `gather_kernel`, brings them to `[T, H, D]` first.

Of a prefill `prefill_kernel` leaves the keys of many rows; `send_rows_kernel` sends them, `merge_rows_kernel` merges several
at a time. It counts as an exchanged step like another.

Who waits for whom. A program waits for other ranks only when this rank has done all that they wait for in the same step, or
can still do it beside the waiting programs. `exchange_kernel` sends the heads of others from programs that do not wait, and
the programs that wait are few (`waiters`); `merge_rows_kernel` waits when all is sent. In `score_kernel` the first programs to
come onto the GPU send, and none waits before it has sent. Where ranks share a GPU, no kernel behind one that waits is let onto
it before the waiting is over, for it would hold the memory that the awaited work of another rank may need. A wait ends after
`polls` looks: the program notes the missing rank and goes on without it, and no later wait waits.
"""

import triton
import triton.language as tl

from lightning_indexer.kernels.box import CHUNK, EMPTY, box_of, own_words, query_place, send_words, take_words
from lightning_indexer.kernels.common import first_owned_head, owner_of_head, top_of, write_ids
from lightning_indexer.kernels.decode import row_runs, seen_tokens
from lightning_indexer.kernels.key import join_keys, top_keys


@triton.jit
def key_slot(parity, source, head, row, world, owned, max_rows, topk):
    """First word of the keys of a row for the owner's head number `head`, from a rank."""
    return ((((parity * world + source) * owned + head).to(tl.int64)) * max_rows + row) * topk


@triton.jit
def send_keys(
    best, head, row, boxes_ptr, parity, rank, world, owned, replicas, max_rows, topk, kept, KEEP: tl.constexpr
):  # fmt: skip
    """The first of `best` `[1, KEEP]` to every rank that owns the head; `kept` of them."""
    lane = tl.arange(0, KEEP)[None, :]
    slot = key_slot(parity, rank, head % owned, row, world, owned, max_rows, topk)
    for replica in range(replicas):
        box = box_of(boxes_ptr, owner_of_head(head, owned, replicas) + replica)
        tl.store(box + slot + lane, best, mask=lane < kept, cache_modifier=".wt")


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
        "query_half",
        "polls",
    ],
    do_not_specialize_on_alignment=["world_ptr", "steps_ptr"],
)
def gather_kernel(
    q_ptr,  # [T, h, D] of 16 or 8 bits
    out_ptr,  # [T, H, D] contiguous
    boxes_ptr,  # [P] i64 addresses
    world_ptr,  # i32, of the plan: ranks that share the work, 1 if each works alone
    steps_ptr,  # [3] i32: as score_kernel has them
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
    query_half,  # words of a half of them
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
    first = rank % replicas == 0

    half = query_place(query_words, query_half, parity, rank, 0, 0, owned, max_rows, WORDS)
    for begin in range(program * CHUNK, total, programs * CHUNK):
        place = begin + tl.arange(0, CHUNK)
        inside = place < total
        word = own_words(q_ptr, place, inside, q_row_stride, q_head_stride, owned, FLIP, WORDS)
        if first | (shared == 0):
            own = (place // (owned * words)).to(tl.int64) * heads + place // words % owned
            own += first_owned_head(rank, owned, replicas)
            tl.store(out_ptr + own * words + place % words, word ^ FLIP, mask=inside)
        if first & shared:
            send_words(word, inside, boxes_ptr, half + place, world, rank)
    if shared:
        for begin in range(program * CHUNK, total, programs * CHUNK):
            place = begin + tl.arange(0, CHUNK)
            inside = place < total
            for group in range(world // replicas):
                other = group * replicas
                if other != rank:
                    sent = query_place(query_words, query_half, parity, other, 0, 0, owned, max_rows, WORDS) + place
                    sent += box_of(boxes_ptr, rank)
                    word = take_words(sent, inside, other + place * 0, failed_ptr, report_ptr, polls)
                    there = (place // (owned * words)).to(tl.int64) * heads + place // words % owned
                    there += first_owned_head(other, owned, replicas)
                    tl.store(out_ptr + there * words + place % words, word ^ FLIP, mask=inside)


@triton.jit
def awaited_count(steps_ptr, PDL: tl.constexpr):
    """The number of exchanged steps, this one included, once all that the kernel before has written is there."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    return tl.load(steps_ptr)


@triton.jit
def item_of(item, own, owned, heads, first_head):
    """Row and head of an item: number `item` of the rank's own heads, row by row, or of the others' heads."""
    per_row = tl.where(own, owned, heads - owned)
    number = item % per_row
    return item // per_row, tl.where(own, first_head + number, number + tl.where(number >= first_head, owned, 0))


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
        "few",
        "many",
        "max_rows",
        "waiters",
        "rehearsals",
        "query_words",
        "query_half",
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
    steps_ptr,  # [3] i32: as score_kernel has them
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
    few,  # see shares_of
    many,
    max_rows,
    waiters,
    rehearsals,  # programs that select before there is anything
    query_words,  # where the queries begin in a box
    query_half,  # words of a half of them
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
    SOME: tl.constexpr,
    MANY: tl.constexpr,
    MOST: tl.constexpr,
    LANES: tl.constexpr,  # keys of all ranks that are merged at once
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    AUTO: tl.constexpr,
    SOLE: tl.constexpr,  # no other rank, and no other step of this one, shares the GPU
    EMPTIED: tl.constexpr,  # words of a head's queries that score_kernel has read in the box; 0 if it has not
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids of the own heads: select of the shard, send to the owners, take from all ranks, merge.

    Grid `(T * (H - h) + waiters,)`: a program for each row and head of another rank, then `waiters` for the own ones.
    """
    program = tl.program_id(0)
    one = tl.zeros((1,), tl.int32)
    # Lengths and plan are complete: no need to wait for score_kernel yet.
    if AUTO:  # noqa: SIM102 (one is for the compiler, one for the program)
        if tl.load(world_ptr, cache_modifier=".cg") == 1:
            # Apart, and to the end: after a jump over what it does not need a program waits for instructions.
            if PDL:
                tl.extra.cuda.gdc_launch_dependents()
            items = rows * owned
            # The first programs take a turn before score_kernel has ended: with whatever is there, and writing nothing. It
            # brings the code.
            early = program < tl.minimum(rehearsals, items)
            for turn in range(tl.where(early, program - tl.num_programs(0), program), items, tl.num_programs(0)):
                item = tl.maximum(turn, 0)
                row = item // owned
                head = item % owned
                request, tokens, place, runs, width = row_runs(
                    row, head, owned, seq_lens_ptr, length_stride, before_ptr, requests, longest, free, query_len, own_columns,
                    0, 1, programs, few, many, BLOCK, KEEP, True, False,
                )  # fmt: skip
                if PDL:  # noqa: SIM102 (one is for the compiler, one for the program)
                    if turn >= 0:
                        tl.extra.cuda.gdc_wait()
                best = top_of(keys_ptr + place, runs, width, own_columns * KEEP, KEEP, FEW, SOME, MANY, MOST)
                write_ids(
                    best, head + one, row + one, tl.minimum(request, requests - 1) + one,
                    seen_tokens(row, request, tokens, requests, query_len) + one, one <= turn,
                    out_ptr, out_head_stride, out_row_stride, topk,
                    attention_table_ptr, attention_table_stride, attention_columns,
                    table_ptr, table_head_stride, table_row_stride, context_ptr, context_head_stride, context_row_stride,
                    attention_page_stride, BLOCK, KEEP, HIGHER, BY_BLOCK, PARTS,
                )  # fmt: skip
            return

    others = rows * (heads - owned)
    own = program >= others
    item = tl.where(own, program - others, program)
    stop = tl.where(own, rows * owned, item + 1)
    begin = item
    row, head = item_of(item, own, owned, heads, first_head)
    _, _, run_place, runs, width = row_runs(
        row, head, heads, seq_lens_ptr, length_stride, before_ptr, requests, longest, free, query_len, columns, rank, world,
        programs, few, many, BLOCK, KEEP, True, LISTED,
    )  # fmt: skip
    own_box = box_of(boxes_ptr, rank)  # and the addresses of the others lie beside it
    if PDL and SOLE:
        tl.extra.cuda.gdc_launch_dependents()  # nobody whom somebody here will wait for needs the place
    # The first programs, one on each multiprocessor, go through a selection of nothing while score_kernel still runs, which
    # brings the code there.
    early = (program < rehearsals).to(tl.int32)
    count = program * 0
    if early == 0:
        count = awaited_count(steps_ptr, PDL)

    while item < stop:
        best = top_of(keys_ptr + run_place, tl.where(early == 0, runs, 0), width, columns * KEEP, KEEP, FEW, FEW, MANY, MOST)
        if polls >= 0:
            kept = tl.where(early == 0, topk, 0)
            send_keys(best, head, row, boxes_ptr, count & 1, rank, world, owned, replicas, max_rows, topk, kept, KEEP)
        if early != 0:
            count = awaited_count(steps_ptr, PDL)
            early = program * 0
        else:
            item += waiters
            if item < stop:
                row, head = item_of(item, own, owned, heads, first_head)
                _, _, run_place, runs, width = row_runs(
                    row, head, heads, seq_lens_ptr, length_stride, before_ptr, requests, longest, free, query_len, columns,
                    rank, world, programs, few, many, BLOCK, KEEP, True, LISTED,
                )  # fmt: skip
    if early != 0:
        count = awaited_count(steps_ptr, PDL)
    parity = count & 1  # the count may wrap

    if EMPTIED > 0:  # noqa: SIM102 (one is for the compiler, one for the program)
        # Also those that nobody here has scored or waited for: what comes after its place was emptied would stay.
        if own & (polls >= 0):
            words = requests * query_len * owned * EMPTIED
            for first in range(begin * CHUNK, words, waiters * CHUNK):
                place = first + tl.arange(0, CHUNK)
                for group in range(world // replicas):
                    source = group * replicas
                    sent = query_place(query_words, query_half, parity, source, 0, 0, owned, max_rows, EMPTIED) + place
                    take_words(own_box + sent, place < words, source + place * 0, failed_ptr, report_ptr, polls)

    if own:
        for mine in range(begin, stop, waiters):
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
    if program == 0:
        tl.store(steps_ptr + 2, count)


@triton.jit(
    do_not_specialize=["rows", "owned", "replicas", "topk", "rank", "world", "max_rows"],
    do_not_specialize_on_alignment=["steps_ptr"],
)
def send_rows_kernel(
    keys_ptr,  # [H, T, K] i64 contiguous, first to last
    boxes_ptr,  # [P] i64 addresses
    steps_ptr,  # [3] i32: as score_kernel has them
    rows,  # to send
    owned,
    replicas,
    topk,
    rank,
    world,
    max_rows,
    PDL: tl.constexpr,
):
    """A rank's keys of many rows to the owners of their heads. Grid `(chunks of a head, H)`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    words = rows * topk
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(keys_ptr + head.to(tl.int64) * words + place, mask=place < words, other=0)
    slot = key_slot(tl.load(steps_ptr) & 1, rank, head % owned, 0, world, owned, max_rows, topk) + place
    for replica in range(replicas):
        box = box_of(boxes_ptr, owner_of_head(head, owned, replicas) + replica)
        tl.store(box + slot, word, mask=place < words, cache_modifier=".wt")


@triton.jit(
    do_not_specialize=[
        "rows",
        "owned",
        "topk",
        "rank",
        "world",
        "max_rows",
        "polls",
        "out_head_stride",
        "out_row_stride",
    ],
    do_not_specialize_on_alignment=["steps_ptr", "out_ptr"],
)
def merge_rows_kernel(
    boxes_ptr,  # [P] i64 addresses
    steps_ptr,  # [3] i32: as score_kernel has them
    failed_ptr,
    report_ptr,
    out_ptr,  # [h, T, K] i32
    rows,
    owned,
    topk,
    rank,
    world,
    max_rows,
    polls,  # looks for words that are not there; negative: do not wait
    out_head_stride,
    out_row_stride,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,  # that are merged at once
    LANES: tl.constexpr,  # keys of all ranks that are merged at once
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids of the own heads from all ranks' keys, for many rows. Grid `(waiters,)`, or less."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    count = tl.load(steps_ptr)
    own_box = box_of(boxes_ptr, rank)
    groups = (rows + ROWS - 1) // ROWS
    for item in range(tl.program_id(0), owned * groups, tl.num_programs(0)):
        head = item // groups
        row = item % groups * ROWS + tl.arange(0, ROWS)
        best = tl.zeros((ROWS, KEEP), tl.int64)
        missing = tl.zeros((ROWS,), tl.int32)
        for first in range(0, tl.where(polls >= 0, world * topk, 0), LANES):
            lane = (first + tl.arange(0, LANES))[None, :]
            source = lane // topk
            place = key_slot(count & 1, source, head, row[:, None], world, owned, max_rows, topk) + lane % topk
            there = (row < rows)[:, None] & (lane < world * topk)
            words = take_words(own_box + place, there, source + row[:, None] * 0, failed_ptr, report_ptr, polls)
            missing += tl.sum((words == EMPTY).to(tl.int32), 1)
            best = top_keys(join_keys(best, top_keys(words, KEEP), ROWS, KEEP), KEEP)
        best = tl.where((missing == 0)[:, None], best, 0)
        write_ids(
            best, head + row * 0, row, row, row, row < rows,
            out_ptr, out_head_stride, out_row_stride, topk, out_ptr, 0, 0, out_ptr, 0, 0, out_ptr, 0, 0, 0,
            1, KEEP, HIGHER, BY_BLOCK, 0,
        )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(steps_ptr + 2, count)
