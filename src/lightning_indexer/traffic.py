# SPDX-License-Identifier: Apache-2.0
"""Bytes that a decode step must move, per stage."""

import torch

from lightning_indexer.rows import visible_blocks
from lightning_indexer.spec import IndexerSpec, Shard

KEY_BYTES = 8


def index_bytes(seq_lens: torch.Tensor, spec: IndexerSpec, token_bytes: int, shard: Shard) -> int:
    """Index-K bytes that the owner of `shard` reads in one layer of a decode step.

        sum over requests of (tokens in owned blocks) * token_bytes

    The queries of a request share one read. Args: `seq_lens` `[R]`; `token_bytes` per token of one layer.
    """
    lengths = seq_lens.long().clamp(min=0)
    blocks = visible_blocks(lengths, spec.block_size)
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
