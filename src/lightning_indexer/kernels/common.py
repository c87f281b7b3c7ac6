# SPDX-License-Identifier: Apache-2.0
"""Device pieces that several kernels share: lengths and owners, the K best so far, and how a selection is written."""

import triton
import triton.language as tl

from lightning_indexer.kernels.key import join_keys, key_blocks, top_keys


@triton.jit
def nan_max(a, b):
    """Maximum that keeps NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def causal_length(length, token, query_len):
    """Tokens that query token `token` of a request of `length` tokens sees; all broadcast."""
    return tl.maximum(length - query_len + token + 1, 0)


@triton.jit
def owned_blocks(visible, rank, world):
    """How many of the first `visible` blocks a rank owns."""
    return (visible - rank + world - 1) // world


@triton.jit
def owned_block(blocks_row, index, rank, world, LISTED: tl.constexpr):
    """A rank's block number `index`: of a list, if pages are sharded."""
    if LISTED:
        block = tl.load(blocks_row + index)
    else:
        block = index * world + rank
    return block


@triton.jit
def page_owner(page, world):
    """The rank that holds a page where pages are sharded, ids below 0 included: `Shard.holds`."""
    return (page % world + world) % world


@triton.jit
def first_owned_head(rank, owned, replicas):
    """First of the `owned` heads of a rank, where `replicas` neighbouring ranks own the same: `IndexerSpec.owned_heads`."""
    return rank // replicas * owned


@triton.jit
def owner_of_head(head, owned, replicas):
    """The first of the `replicas` neighbouring ranks that own a head: the other way round."""
    return head // owned * replicas


@triton.jit
def per_unit(pointer):
    """Elements in 16 bytes."""
    return 128 // pointer.dtype.element_ty.primitive_bitwidth


@triton.jit
def masked(dots, positions, lengths):
    """Dots `[B, columns]` of what each column sees, -inf elsewhere."""
    return tl.where(positions[:, None] < lengths[None, :], dots, float("-inf"))


@triton.jit
def no_keys(ROWS: tl.constexpr, KEEP: tl.constexpr):
    """`[ROWS, KEEP]` places for `keep_key`, all free: below every key and all different, the first the least."""
    free = (tl.arange(0, KEEP) - KEEP).to(tl.int64)
    return free[None, :] + tl.zeros((ROWS, KEEP), tl.int64)


@triton.jit
def keep_key(best, key):
    """Put `key` `[rows]` in the place of the least of `best` `[rows, keep]` where it is larger. Unordered."""
    least = tl.min(best, 1)
    return tl.where(best == least[:, None], tl.maximum(best, key[:, None]), best)


@triton.jit
def candidates(source, lane, count, width, stride):
    """Candidates `lane` of `count`, 0 past them: `width` of them lie together, the next ones `stride` further."""
    # Few enough to be in the L2, and written by other multiprocessors: not from this one's L1.
    return tl.load(source + (lane // width) * stride + lane % width, mask=lane < count, other=0, cache_modifier=".cg")


@triton.jit
def largest_first(best, KEEP: tl.constexpr):
    """Keys `best` `[rows, KEEP]` with the largest of each row in the first place, for the one that was there."""
    lane = tl.arange(0, KEEP)[None, :]
    largest = tl.max(best, 1)[:, None]
    first = tl.sum(tl.where(lane == 0, best, 0), 1)[:, None]
    return tl.where(lane == 0, largest, tl.where(best == largest, first, best))


@triton.jit
def pair_heads(source, first, pair, runs, stride, LANES: tl.constexpr):
    """The largest candidate of each of LANES runs, or pairs of runs if `pair` is 2, from number `first` on; 0 past them."""
    run = (first + tl.arange(0, LANES)) * pair
    heads = candidates(source, run, runs, 1, stride)
    if pair == 2:
        heads = tl.maximum(heads, candidates(source, run + 1, runs, 1, stride))
    return heads


@triton.jit
def lanes_of(wanted, first, count, KEEP: tl.constexpr, LANES: tl.constexpr):
    """The wanted of LANES lanes, numbered from `first` on, in places `count` and on of `[KEEP]`, 0 elsewhere; how many."""
    place = count + tl.cumsum(wanted.to(tl.int32), 0) - 1
    there = wanted[:, None] & (place[:, None] == tl.arange(0, KEEP)[None, :])
    return tl.sum(tl.where(there, (first + tl.arange(0, LANES))[:, None], 0), 0), tl.sum(wanted.to(tl.int32))


@triton.jit
def top_of_runs(source, runs, width, stride, KEEP: tl.constexpr, LANES: tl.constexpr):
    """As `top_of`, for many runs of candidates, each with its largest in the first place.

    The KEEP runs with the largest first places hold what is looked for, since no two keys are the same: a key of another run
    has those KEEP before it. If there are more runs than LANES, and their candidates few, two count as one.
    """
    HALF: tl.constexpr = KEEP // 2
    pair = tl.where((runs > LANES) & (width <= HALF), 2, 1)
    pairs = (runs + pair - 1) // pair
    # One load of the first LANES: another one of the same would take as long as a sort.
    heads = pair_heads(source, 0, pair, runs, stride, LANES)
    best = top_keys(heads[None, :], KEEP)
    for first in range(LANES, pairs, LANES):
        found = pair_heads(source, first, pair, runs, stride, LANES)
        best = top_keys(join_keys(best, top_keys(found[None, :], KEEP), 1, KEEP), KEEP)
    least = tl.maximum(tl.min(best), 1)  # 0 is no key
    number = tl.arange(0, KEEP)
    chosen, count = lanes_of(heads >= least, 0, 0, KEEP, LANES)
    for first in range(LANES, pairs, LANES):
        more, some = lanes_of(pair_heads(source, first, pair, runs, stride, LANES) >= least, first, count, KEEP, LANES)
        chosen += more
        count += some
    place = source + (chosen * pair)[:, None] * stride
    there = (number < count)[:, None]
    keys = tl.zeros((1, KEEP * KEEP), tl.int64)
    if pair == 1:
        all_of_one = tl.load(place + number[None, :], mask=there & (number < width)[None, :], other=0, cache_modifier=".cg")
        keys = tl.reshape(all_of_one, (1, KEEP * KEEP))
    else:
        few = tl.arange(0, HALF)[None, :]
        inside = there & (few < width)
        of_one = tl.load(place + few, mask=inside, other=0, cache_modifier=".cg")
        inside &= (chosen * pair + 1 < runs)[:, None]
        of_other = tl.load(place + stride + few, mask=inside, other=0, cache_modifier=".cg")
        keys = tl.reshape(tl.join(of_one, of_other), (1, KEEP * KEEP))
    return top_keys(keys, KEEP)


@triton.jit
def top_of_pairs(source, runs, width, stride, KEEP: tl.constexpr, LANES: tl.constexpr):
    """As `top_of_runs`, for up to 2 * LANES runs of up to KEEP / 4 candidates: two runs count as one."""
    QUARTER: tl.constexpr = max(1, KEEP // 4)
    heads = pair_heads(source, 0, 2, runs, stride, LANES)
    least = tl.maximum(tl.min(top_keys(heads[None, :], KEEP)), 1)  # 0 is no key
    chosen, count = lanes_of(heads >= least, 0, 0, KEEP, LANES)
    few = tl.arange(0, QUARTER)[None, :]
    inside = (tl.arange(0, KEEP) < count)[:, None] & (few < width)
    place = source + (chosen * 2)[:, None] * stride + few
    of_one = tl.load(place, mask=inside, other=0, cache_modifier=".cg")
    of_other = tl.load(place + stride, mask=inside & (chosen * 2 + 1 < runs)[:, None], other=0, cache_modifier=".cg")
    return top_keys(tl.reshape(tl.join(of_one, of_other), (1, 2 * KEEP * QUARTER)), KEEP)


@triton.jit
def top_of(
    source, runs, width, stride, KEEP: tl.constexpr, FEW: tl.constexpr, SOME: tl.constexpr, MANY: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """First KEEP of `runs` runs of `width` candidates (laid out as in `candidates`), descending, `[1, KEEP]`.

    One sort of FEW, SOME or MANY, if they fit. Else a sort of MANY / 4 pairs of runs, or of MANY / 2 runs, and one of what is
    in the best, if that fits; else sorts of MOST, one after the other. With SOME = FEW there are no pairs, either: less to
    compile.
    """
    count = runs * width
    if count <= FEW:
        best = top_keys(candidates(source, tl.arange(0, FEW), count, width, stride)[None, :], KEEP)
    elif (SOME > FEW) and (count <= SOME):
        best = top_keys(candidates(source, tl.arange(0, SOME), count, width, stride)[None, :], KEEP)
    elif count <= MANY:
        best = top_keys(candidates(source, tl.arange(0, MANY), count, width, stride)[None, :], KEEP)
    elif KEEP * KEEP <= MANY // 2:
        if (SOME > FEW) and ((width * 4 <= KEEP) & (runs * 2 <= MANY)):
            best = top_of_pairs(source, runs, width, stride, KEEP, MANY // 4)
        else:
            best = top_of_runs(source, runs, width, stride, KEEP, MANY // 2)
    else:
        best = top_keys(candidates(source, tl.arange(0, MOST), count, width, stride)[None, :], KEEP)
        for first in range(MOST, count, MOST):
            found = candidates(source, first + tl.arange(0, MOST), count, width, stride)
            best = top_keys(join_keys(best, top_keys(found[None, :], KEEP), 1, KEEP), KEEP)
    return best


@triton.jit
def block_count(length, BLOCK: tl.constexpr):
    """Blocks that hold `length >= 0` tokens, for lengths up to 2^31 - 1."""
    return length // BLOCK + (length % BLOCK != 0).to(tl.int32)


@triton.jit
def write_ids(
    best,  # [ROWS, KEEP] keys, descending
    head,  # [ROWS]
    row,  # [ROWS]
    request,  # [ROWS]
    lengths,  # [ROWS] causal
    wanted,  # [ROWS] bool
    ids_ptr,  # [H, T, K] i32
    ids_head_stride,
    ids_row_stride,
    topk,
    attention_table_ptr,  # [R, max_blocks] i32
    attention_table_stride,
    attention_columns,
    table_ptr,  # [H, T, K * PARTS] i32
    table_head_stride,
    table_row_stride,
    context_ptr,  # [H, T] i32
    context_head_stride,
    context_row_stride,
    page_stride,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    HIGHER: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # attention pages per block; 0 without a sparse table
):
    """Write the selection, and the sparse table if there is one."""
    lane = tl.arange(0, KEEP)
    kept = lane[None, :] < topk
    ids = tl.where(kept, key_blocks(best, HIGHER), -1)
    if BY_BLOCK or PARTS > 0:
        last = 0x7FFFFFFF
        ascending = tl.sort(tl.where(ids < 0, last, ids), dim=1)
        ascending = tl.where(ascending == last, -1, ascending)
    head = head.to(tl.int64)
    row = row.to(tl.int64)
    place = ids_ptr + head[:, None] * ids_head_stride + row[:, None] * ids_row_stride + lane[None, :]
    tl.store(place, ascending if BY_BLOCK else ids, mask=wanted[:, None] & kept)
    if PARTS > 0:
        # Keys may come from elsewhere: only blocks that the row sees and the table has.
        chosen = (ascending >= 0) & (ascending < block_count(lengths, BLOCK)[:, None]) & (ascending < attention_columns)
        page = tl.load(
            attention_table_ptr + request[:, None].to(tl.int64) * attention_table_stride + ascending,
            mask=chosen & wanted[:, None],
            other=0,
        )
        held = tl.minimum(tl.maximum(lengths[:, None] - ascending * BLOCK, 0), BLOCK)
        held = tl.sum(tl.where(chosen, held, 0), 1)
        tl.store(context_ptr + head * context_head_stride + row * context_row_stride, held, mask=wanted)
        place = table_ptr + head[:, None] * table_head_stride + row[:, None] * table_row_stride
        for part in tl.static_range(PARTS):
            entry = tl.where(chosen, page * page_stride + part, 0)
            tl.store(place + lane[None, :] * PARTS + part, entry, mask=wanted[:, None] & kept)
