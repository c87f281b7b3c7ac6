# SPDX-License-Identifier: Apache-2.0
"""The operators in torch, for any device. Arguments have been checked; lengths are read on the host.

Everything works on tiles of pages: keys of a tile are gathered and widened to float32, multiplied with all query rows of
one request at once, and reduced to block scores. Memory beside the inputs is bounded by the tile sizes below, whatever
the context, batch or chunk: no tensor of rows x tokens is ever made.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightning_indexer.cache import CacheFormat, IndexCache, saturated
from lightning_indexer.dots import fixed_dots
from lightning_indexer.key import MAX_BLOCKS, key_blocks, pack_keys, top_keys
from lightning_indexer.norm_rope import NormRope
from lightning_indexer.rows import Chunks, decode_lengths, prefill_lengths, visible_blocks
from lightning_indexer.spec import IndexerSpec, Shard
from lightning_indexer.table import SparseTable
from lightning_indexer.workspace import PrefillScratch, StepPlan, Workspace

TILE_TOKENS = 8192  # of keys widened at once: 4 MiB in float32 at D = 128; 131,072 tokens took 24 ms with 32 to 64 pages
TILE_PRODUCTS = 1 << 21  # of dot products held at once, 8 MiB
on_gpu = False
TILE_SCORES = 1 << 21  # of block scores held at once by prefill, 8 MiB, and as many keys


@dataclass(frozen=True)
class Rows:
    """Query rows that share one request: `q` `[rows, H, D]`, their causal `lengths` `[rows]`, the request's page ids."""

    q: torch.Tensor
    lengths: torch.Tensor
    pages: torch.Tensor  # [max_blocks] int32
    where: slice  # their place among all T rows


def decode_requests(q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> Iterator[Rows]:
    """The rows of each request of a decode step that sees anything."""
    lengths = decode_lengths(seq_lens, query_len, q.shape[0])
    for request, length in enumerate(seq_lens.tolist()):
        if length > 0:
            where = slice(request * query_len, (request + 1) * query_len)
            yield Rows(q[where], lengths[where], block_table[request], where)


def prefill_tiles(
    q: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_size: int
) -> Iterator[Rows]:
    """The rows of each request's chunk, in tiles whose scores fit `TILE_SCORES`."""
    bounds = cu_seqlens_q.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        start, count = bounds[request], bounds[request + 1] - bounds[request]
        blocks = -(-length // block_size)
        step = max(1, min(TILE_SCORES // max(1, blocks * q.shape[1]), TILE_PRODUCTS // (block_size * q.shape[1])))
        for first in range(0, count, step):
            last = min(count, first + step)
            lengths = prefill_lengths(length - count, first, last, q.device)
            where = slice(start + first, start + last)
            yield Rows(q[where], lengths, block_table[request], where)


def score_rows(
    rows: Rows, cache: IndexCache, spec: IndexerSpec, shard: Shard, blocks: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the scores of one request's rows over some blocks of a shard: `out` `[H, rows, blocks]`, visible ones only."""
    count, heads, dim = rows.q.shape
    block = spec.block_size
    shortest = int(rows.lengths.min())
    visible = visible_blocks(rows.lengths, block)
    queries = rows.q.reshape(count * heads, dim).float()
    tile = max(1, min(TILE_TOKENS, TILE_PRODUCTS // queries.shape[0]) // block)
    for first in range(0, len(blocks), tile):
        slots = slice(first, min(first + tile, len(blocks)))
        some = blocks[slots]
        keys = cache.load_pages(shard.local_pages(rows.pages[some]))
        dots = fixed_dots(keys.view(-1, dim), queries).view(len(some), block, count, heads)
        if (int(some[-1]) + 1) * block > shortest:
            positions = (some[:, None] * block + torch.arange(block, device=some.device))[..., None]
            dots = dots.masked_fill((positions >= rows.lengths)[..., None], -torch.inf)
        scores = dots.amax(dim=1).permute(2, 1, 0)  # [H, rows, tile]; amax keeps NaN
        seen = some < visible[:, None]
        out[:, :, slots] = torch.where(seen, scores, out[:, :, slots])


def owned_blocks(rows: Rows, spec: IndexerSpec, shard: Shard) -> torch.Tensor:
    """Blocks of a request that the shard owns and its last row sees, ascending."""
    return shard.owned_blocks(rows.pages[: visible_blocks(int(rows.lengths.max()), spec.block_size)])


def row_keys(scores: torch.Tensor, lengths: torch.Tensor, spec: IndexerSpec, blocks: torch.Tensor) -> torch.Tensor:
    """First K candidates of scored rows, `[H, rows, K]` int64: scores `[H, rows, n]` of blocks `[n]`, lengths `[rows]`."""
    keys = pack_keys(
        scores,
        blocks,
        visible_blocks(lengths, spec.block_size)[:, None],
        init_blocks=spec.init_blocks,
        local_blocks=spec.local_blocks,
        tie_break=spec.tie_break,
    )
    return top_keys(keys, spec.topk)


def candidates(rows: Rows, cache: IndexCache, spec: IndexerSpec, shard: Shard) -> torch.Tensor:
    """Scores and first K candidates of one request's rows over a shard: `[H, rows, K]` int64."""
    blocks = owned_blocks(rows, spec, shard)
    scores = torch.empty(rows.q.shape[1], rows.q.shape[0], len(blocks), dtype=torch.float32, device=rows.q.device)
    score_rows(rows, cache, spec, shard, blocks, scores)
    return row_keys(scores, rows.lengths, spec, blocks)


def query_dtypes(format: CacheFormat, device: torch.device) -> tuple[torch.dtype, ...]:
    """Query dtypes that a format can be scored with."""
    return format.query_dtypes


def check_operands(q: torch.Tensor, cache: IndexCache) -> None:
    """Whatever the formats are made of, torch can multiply it."""


def score_blocks(
    q: torch.Tensor,
    cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    query_len: int,
    longest: int,
    shard: Shard,
    out: torch.Tensor,
    plan: StepPlan | None = None,
) -> None:
    """Decode scores of a shard into `out` `[H, T, L]`, visible slots only."""
    for rows in decode_requests(q, block_table, seq_lens.clamp(max=longest), query_len):
        blocks = owned_blocks(rows, spec, shard)
        if shard.by == "block":
            score_rows(rows, cache, spec, shard, blocks, out[:, rows.where, : len(blocks)])
        else:
            scores = out[:, rows.where][..., blocks]
            score_rows(rows, cache, spec, shard, blocks, scores)
            out[:, rows.where, blocks] = scores


def decode_keys(
    q: torch.Tensor,
    cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    query_len: int,
    longest: int,
    shard: Shard,
    order: str,
    out: torch.Tensor,
    plan: StepPlan | None,
    workspace: Workspace | None,
) -> None:
    """Decode candidates of a shard into `out` `[H, T, K]` int64, without a score tensor for all rows."""
    out.zero_()
    for rows in decode_requests(q, block_table, seq_lens.clamp(max=longest), query_len):
        out[:, rows.where] = candidates(rows, cache, spec, shard)


def decode(
    q: torch.Tensor,
    cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    query_len: int,
    longest: int,
    order: str,
    sparse_table: SparseTable | None,
    out: torch.Tensor,
    plan: StepPlan | None,
    workspace: Workspace | None,
) -> None:
    """Ids of decode rows over the whole context into `out` `[H, T, K]`. Plan and workspace are the GPU's."""
    keys = torch.empty(q.shape[1], q.shape[0], spec.topk, dtype=torch.int64, device=q.device)
    decode_keys(q, cache, block_table, seq_lens, spec, query_len, longest, Shard(), order, keys, None, None)
    merge_keys(keys[None], seq_lens.clamp(max=longest), spec, query_len, order, sparse_table, out)


def select_keys(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    query_len: int,
    shard: Shard,
    out: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> None:
    """First K candidates of each row of `scores` `[H, T, L]` into `out` `[H, T, K]`; by page `block_table` tells the owned."""
    if shard.by == "block":
        lengths = decode_lengths(seq_lens, query_len, scores.shape[1])
        out.copy_(row_keys(scores, lengths, spec, shard.blocks(scores.shape[-1], scores.device)))
        return
    assert block_table is not None
    out.zero_()
    for rows in decode_requests(scores.transpose(0, 1), block_table, seq_lens, query_len):
        blocks = owned_blocks(rows, spec, shard)
        out[:, rows.where] = row_keys(scores[:, rows.where][..., blocks], rows.lengths, spec, blocks)


def merge_keys(
    keys: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    query_len: int,
    order: str,
    sparse_table: SparseTable | None,
    out: torch.Tensor,
) -> None:
    """Ids of the first K of all ranks' candidates, keys `[P, H, T, K]`, into `out` `[H, T, K]`."""
    lengths = decode_lengths(seq_lens, query_len, keys.shape[2])
    ids = first_ids(keys, lengths, spec, order)
    out.copy_(ids)
    if sparse_table is not None:
        sparse_table.fill(ids, lengths, spec, query_len)


def first_ids(keys: torch.Tensor, lengths: torch.Tensor, spec: IndexerSpec, order: str) -> torch.Tensor:
    """Ids `[H, rows, K]` int64 of the first K of candidates `[P, H, rows, K]`; -1 for rows of length 0."""
    world, heads, rows, topk = keys.shape
    merged = top_keys(keys.permute(1, 2, 0, 3).reshape(heads, rows, world * topk), topk)
    ids = torch.where(lengths[:, None] > 0, key_blocks(merged, spec.tie_break), -1)
    if order == "block":
        ids = torch.where(ids < 0, MAX_BLOCKS, ids).sort(dim=-1).values
        ids = torch.where(ids == MAX_BLOCKS, -1, ids)
    return ids


def prefill(
    q: torch.Tensor,
    cache: IndexCache,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    longest: int,
    order: str,
    out: torch.Tensor,
    workspace: Workspace | None,
) -> None:
    """Ids of ragged chunks into `out` `[H, T, K]`; rows outside every chunk get -1."""
    out.fill_(-1)
    for rows in prefill_tiles(q, block_table, cu_seqlens_q, seq_lens.clamp(max=longest), spec.block_size):
        keys = candidates(rows, cache, spec, Shard())
        out[:, rows.where] = first_ids(keys[None], rows.lengths, spec, order).to(out.dtype)


def prefill_keys(
    q: torch.Tensor,
    cache: IndexCache,
    block_table: torch.Tensor,
    chunks: Chunks,
    spec: IndexerSpec,
    shard: Shard,
    out: torch.Tensor,
    scratch: PrefillScratch | None = None,
) -> None:
    """A shard's candidates of ragged chunks into `out` `[H, T, K]` int64; none for rows outside every chunk."""
    out.zero_()
    seen = chunks.seq_lens.clamp(max=chunks.longest)
    for rows in prefill_tiles(q, block_table, chunks.bounds, seen, spec.block_size):
        out[:, rows.where] = candidates(rows, cache, spec, shard)


def write_sizes(device: torch.device) -> tuple[int, ...]:
    """Rows to write, by which all that `write` may run has been run."""
    return (1,)


def write(cache: IndexCache, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store keys by slot."""
    tokens = cache.num_pages * cache.spec.block_size
    inside = (slot_mapping >= 0) & (slot_mapping < tokens)
    cache.store_tokens(keys[inside], slot_mapping[inside])


def norm_rope_write(
    q: torch.Tensor,
    k: torch.Tensor,
    cache: IndexCache,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rules: NormRope,
    out: torch.Tensor,
) -> None:
    """Norm and rotate queries into `out` and keys into the cache."""
    queries = rules.apply(q, rules.query_weight, positions)
    out.copy_(saturated(queries, out.dtype) if out.element_size() == 1 else queries)
    write(cache, rules.apply(k, rules.key_weight, positions), slot_mapping)
