# SPDX-License-Identifier: Apache-2.0
"""Seeded random input of any geometry, with uneven lengths and exact ties."""

import torch

from lightning_indexer.spec import IndexerSpec
from lightning_indexer.verify.case import Case
from lightning_indexer.verify.paging import OUT_OF_CACHE, page_keys


def draw(spec: IndexerSpec, *, batch: int, context: int, query_len: int, seed: int) -> list[Case]:
    """One case of `batch` requests: one of `context` tokens, the others of anything below, with three or more one empty.

    Every eighth block repeats the keys of the block before it, so that exact ties occur. Two rows of padding follow.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = (context * torch.rand(batch, generator=generator) ** 2).long() + 1
    lengths[0] = context
    if batch > 2:
        lengths[-1] = 0
    block = spec.block_size
    blocks = -(-lengths // block)
    first = blocks.cumsum(0) - blocks
    keys = torch.randn(int(blocks.sum()), block, spec.head_dim, generator=generator).bfloat16()
    for request, length in enumerate(lengths.tolist()):
        own = keys[first[request] : first[request] + blocks[request]]
        own[7::8] = own[6::8][: len(own[7::8])].clone()
        own.view(-1, spec.head_dim)[length:] = torch.nan  # nothing was written here
    pages, page_of_block = page_keys(keys.flatten(0, 1), block, generator)
    table = torch.full((batch, int(blocks.max()) + 1), OUT_OF_CACHE, dtype=torch.int32)
    for request, count in enumerate(blocks.tolist()):
        table[request, :count] = page_of_block[first[request] : first[request] + count]
    q = torch.randn(batch * query_len + 2, spec.num_heads, spec.head_dim, generator=generator).bfloat16()
    q[batch * query_len :] = torch.nan  # padding rows
    name = f"random, {batch} x {context:,}, Q {query_len}"
    return [Case(name, spec, q, pages, table, lengths.to(torch.int32), query_len)]
