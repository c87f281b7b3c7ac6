# SPDX-License-Identifier: Apache-2.0
"""Bytes that a decode step must move, per stage."""

import torch

from lightning_indexer.rows import visible_blocks
from lightning_indexer.spec import IndexerSpec, Shard

KEY_BYTES = 8


def index_bytes(
    seq_lens: torch.Tensor, spec: IndexerSpec, token_bytes: int, shard: Shard, block_table: torch.Tensor | None = None
) -> int:
    """Index-K bytes that the owner of `shard` reads in one layer of a decode step.

        sum over requests of (tokens in owned blocks) * token_bytes

    The queries of a request share one read. Args: `seq_lens` `[R]`; `token_bytes` per token of one layer; `block_table`
    `[R, max_blocks]`, which tells what a shard by page owns.
    """
    lengths = seq_lens.long().clamp(min=0)
    blocks = visible_blocks(lengths, spec.block_size)
    if shard.by == "page":
        assert block_table is not None
        every = torch.arange(block_table.shape[1], device=block_table.device)
        held = (lengths[:, None] - every * spec.block_size).clamp(0, spec.block_size)
        return int(torch.where(shard.holds(block_table), held, 0).sum()) * token_bytes
    tokens = shard.count(blocks) * spec.block_size
    owns_last = (blocks > 0) & ((blocks - 1) % shard.world == shard.rank)
    unfilled = blocks * spec.block_size - lengths
    return int((tokens - torch.where(owns_last, unfilled, 0)).sum()) * token_bytes


def exchange_bytes(spec: IndexerSpec, world: int, query_bytes: int) -> int:
    """Bytes that a rank receives per query row and layer: candidates of its heads and, unless it is 0, queries.

        (P - 1) * h * (K * 8 + D * query_bytes)

    `query_bytes` per element; 0 where the caller passes all heads. It does not grow with the context.
    """
    heads = len(spec.owned_heads(0, world))
    return (world - 1) * heads * (spec.topk * KEY_BYTES + spec.head_dim * query_bytes)
