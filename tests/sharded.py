# SPDX-License-Identifier: Apache-2.0
"""Caches that a group holds once, and steps whose pages lie as allocators may give them."""

import dataclasses
import math

import torch
from support import Inputs, random_inputs

import lightning_indexer as li
from lightning_indexer.spec import Shard

SPEC = li.IndexerSpec(num_heads=4, head_dim=64, block_size=64, topk=4)
TOKENS = [64 * 19 - 5, 0, 64 * 6, 30, 64 * 11]
POISON = 0x7F  # bytes of pages that nobody wrote: NaN in every format


def shards(world: int) -> list[Shard]:
    return [Shard(rank, world, "page") for rank in range(world)]


def cache_of(inputs: Inputs, format: str) -> li.IndexCache:
    """The inputs' pages in a format; unwritten tokens stay poison."""
    cache = li.IndexCache.empty(len(inputs.pages), inputs.spec, format)
    cache.data.view(torch.uint8).fill_(POISON)
    written = ~inputs.pages.isnan().any(-1)
    cache.write(inputs.pages[written].float(), torch.arange(written.numel()).view(written.shape)[written])
    return cache


def held(cache: li.IndexCache, shard: Shard) -> li.IndexCache:
    """What a rank holds of a cache, checked page by page."""
    own = cache.held_by(shard)
    mine = range(shard.rank, cache.num_pages, shard.world)
    assert own.num_pages == max(1, len(mine))
    assert shard.pages_held(cache.num_pages) == len(mine)
    for local, page in enumerate(mine):
        assert torch.equal(own.data[local].view(torch.uint8), cache.data[page].view(torch.uint8))
    return own


def renamed(inputs: Inputs, names: torch.Tensor, pages: int) -> Inputs:
    """The same requests in other pages: page `p` becomes page `names[p]` of `pages`."""
    moved = torch.full((pages, *inputs.pages.shape[1:]), math.nan, dtype=inputs.pages.dtype)
    moved[names] = inputs.pages
    inside = (inputs.block_table >= 0) & (inputs.block_table < len(inputs.pages))
    where = names[torch.where(inside, inputs.block_table, 0).long()].to(torch.int32)
    return dataclasses.replace(inputs, pages=moved, block_table=torch.where(inside, where, inputs.block_table))


def allocations(world: int, **more) -> dict[str, Inputs]:
    """The same kind of step with pages as allocators may give them."""
    shuffled = random_inputs(SPEC, TOKENS, heads=4, seed=world, **more)
    count = len(shuffled.pages)
    by_request = torch.cat([row[row < count] for row in shuffled.block_table.clamp(min=-1)])
    by_request = by_request[by_request >= 0].long()
    sequential = torch.empty(count, dtype=torch.int64)
    rest = torch.tensor([page for page in range(count) if page not in set(by_request.tolist())], dtype=torch.int64)
    sequential[torch.cat((by_request, rest))] = torch.arange(count)
    one_rank = torch.arange(count) * world + world - 1
    first, _, third, *others = shuffled.block_table
    shared = torch.stack((first, shuffled.block_table[1], torch.cat((first[:4], third[4:])), *others))
    return {
        "shuffled": shuffled,
        "sequential": renamed(shuffled, sequential, count),
        "all on one rank": renamed(shuffled, one_rank, count * world),
        "a shared prefix": dataclasses.replace(shuffled, block_table=shared),
    }
