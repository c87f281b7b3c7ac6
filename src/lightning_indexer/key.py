# SPDX-License-Identifier: Apache-2.0
"""The candidate key: one int64 per (score, block), whose integer order is the total order of the selection.

    bits 60..61  class   3 forced init block, 2 forced local block, 1 scored block, 0 empty slot (the whole key is 0)
    bits 28..59  score   order-preserving image of the fp32 score; 0 for NaN and for forced blocks
    bits  0..27  block   2^28 - 1 - block where the lower id wins a tie, block where the higher id wins

A larger key comes earlier: init blocks, then local blocks, then scores descending, then the tie rule. Forced blocks do
not look at their score, so no score, +inf included, can displace one. NaN has the image 0 and -inf 0x007FFFFF: NaN
ranks below every number. -0.0 has the image of +0.0.

Sharded selection is exact because of this order: it is total and each key says all there is to compare, so the first K of a
union of candidates are the first K of the union of every shard's first K.
"""

import torch

BLOCK_BITS = 28
SCORE_BITS = 32
MAX_BLOCKS = 1 << BLOCK_BITS
SCORED, LOCAL, INIT = 1, 2, 3


def score_image(scores: torch.Tensor) -> torch.Tensor:
    """Order-preserving image of fp32 scores: int64 in `[0, 2^32)`, NaN 0, -0.0 as +0.0. Same shape."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() + (1 << (SCORE_BITS - 1))
    return torch.where(scores.isnan(), 0, ordered)


def pack_keys(
    scores: torch.Tensor,
    blocks: torch.Tensor,
    visible: torch.Tensor,
    *,
    init_blocks: int,
    local_blocks: int,
    tie_break: str,
) -> torch.Tensor:
    """Keys of scored blocks; 0 for blocks that a row cannot see.

    Args:
        scores: `[..., L]` fp32.
        blocks: `[L]` or `[..., L]` int64 logical block ids, below 2^28.
        visible: `[..., 1]` integer, blocks that the row can see: block `b` is visible if `b < visible`.
        init_blocks, local_blocks: blocks `b < init_blocks` and `b >= visible - local_blocks` are forced.
        tie_break: "lower" or "higher".

    Returns:
        `[..., L]` int64.
    """
    local = blocks >= visible - local_blocks
    init = blocks < init_blocks
    kind = torch.where(init, INIT, torch.where(local, LOCAL, SCORED))
    image = torch.where(init | local, 0, score_image(scores))
    field = MAX_BLOCKS - 1 - blocks if tie_break == "lower" else blocks
    key = (kind << (SCORE_BITS + BLOCK_BITS)) | (image << BLOCK_BITS) | field
    return torch.where(blocks < visible, key, 0)


def key_blocks(keys: torch.Tensor, tie_break: str) -> torch.Tensor:
    """Logical block ids of keys, -1 for empty slots. int64, same shape."""
    field = keys & (MAX_BLOCKS - 1)
    return torch.where(keys == 0, -1, MAX_BLOCKS - 1 - field if tie_break == "lower" else field)


def top_keys(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest keys of the last dim, descending, filled up with empty slots. `[..., count]` int64.

    Keys of different blocks differ, so the result does not depend on the order of the candidates.
    """
    kept = keys.topk(min(count, keys.shape[-1]), dim=-1, sorted=True).values
    return torch.nn.functional.pad(kept, (0, count - kept.shape[-1]))
