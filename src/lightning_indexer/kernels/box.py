# SPDX-License-Identifier: Apache-2.0
"""Boxes: memory of one rank that all ranks of a group can write. `kernels.exchange` tells how they are used.

Words are 8 bytes, and a word that holds nothing is EMPTY: the payload is its own flag.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)  # no key: those are not negative. As floats of 16 bits, or as e4m3fn: all NaN
NAN_WORD = tl.constexpr(-2)  # what is sent for a word of queries that is EMPTY: all elements but one are still NaN
CHUNK = tl.constexpr(512)  # words of queries that are moved at once


@triton.jit
def box_of(boxes_ptr, rank):
    """A rank's box."""
    return tl.load(boxes_ptr + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def await_words(place, mask, source, failed_ptr, report_ptr, polls):
    """Words of a box once all of them are there; EMPTY for what did not come in `polls` looks.

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
    return words


@triton.jit
def take_words(place, mask, source, failed_ptr, report_ptr, polls):
    """As `await_words`, leaving EMPTY in the words' places."""
    words = await_words(place, mask, source, failed_ptr, report_ptr, polls)
    tl.store(place, tl.full(words.shape, EMPTY, tl.int64), mask=mask, cache_modifier=".wt")
    return words


@triton.jit
def query_place(query_words, query_half, parity, source, row, head, owned, max_rows, WORDS: tl.constexpr):
    """First word, in a box, of a rank's queries of a row and own head number `head`."""
    slot = (source.to(tl.int64) * max_rows + row) * owned + head
    return query_words + parity.to(tl.int64) * query_half + slot * WORDS


@triton.jit
def own_words(q_ptr, place, inside, row_stride, head_stride, owned, FLIP: tl.constexpr, WORDS: tl.constexpr):
    """Words `place` of a rank's own queries `[T, h, WORDS]`, of strides in words, as they travel: none is EMPTY."""
    row = place // (owned * WORDS)
    source = row.to(tl.int64) * row_stride + place // WORDS % owned * head_stride + place % WORDS
    word = tl.load(q_ptr + source, mask=inside, other=0) ^ FLIP
    return tl.where(word == EMPTY, NAN_WORD, word)


@triton.jit
def send_words(word, inside, boxes_ptr, place, world, skipped):
    """Words into `place` of the boxes of all ranks but `skipped`."""
    for other in range(world):
        if other != skipped:
            tl.store(box_of(boxes_ptr, other) + place, word, mask=inside, cache_modifier=".wt")
