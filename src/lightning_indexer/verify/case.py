# SPDX-License-Identifier: Apache-2.0
"""One verification case: index queries and a paged index-K cache, as an engine holds them in a decode step."""

from dataclasses import dataclass

import torch

from lightning_indexer.spec import IndexerSpec


@dataclass(frozen=True)
class Case:
    """Decode rows over a paged cache, with the model's own choice where there is one.

    Row `r * query_len + t` is query token `t` of request `r`, whose length `seq_lens[r]` counts it.
    """

    name: str
    spec: IndexerSpec
    q: torch.Tensor  # [T, H, D]
    pages: torch.Tensor  # [num_pages, B, D]
    block_table: torch.Tensor  # [R, max_blocks] int32
    seq_lens: torch.Tensor  # [R] int32
    query_len: int = 1
    chosen: torch.Tensor | None = None  # [H, T, K] int32, the model's own blocks, -1 padded, any order
    attention_heads: int = 0  # the first so many heads are attention heads: softmax(q.k / sqrt(D)) is their true attention
