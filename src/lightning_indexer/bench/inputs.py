# SPDX-License-Identifier: Apache-2.0
"""A case as tensors: layers out of one pool of pages, as an engine holds them, and the calls that are timed.

All layers of a step share one block table and one set of lengths; a layer is a view of the pool. The calls are made here
and nowhere else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import lightning_indexer as li
from lightning_indexer.bench.cases import Case, PrefillCase, RankCase, RankPrefillCase
from lightning_indexer.bench.timing import Rotation
from lightning_indexer.cache import is_packed
from lightning_indexer.ops import backend_of
from lightning_indexer.rows import Chunks, visible_blocks

ENGINE_MAX_SEQ_LEN = 163_840  # the bound that the peer's figures were taken with; longer contexts are their own bound
OUT_OF_CACHE = 2**31 - 1
DISTINCT_PAGES = 4096
CHUNK_QUERY_LEN = 8  # rows of a chunk that the gate scores as one decode request
UNWRITTEN = -7  # no block id, and not the padding either


@dataclass(frozen=True)
class Step:
    """One step over `views` layers.

    `rows`, `block_table`, `seq_lens` and `query_len` describe its rows as decode rows, a prefill chunk's too.
    """

    spec: li.IndexerSpec
    q: torch.Tensor  # [T, H, D], the same in every layer: it stays in the L2, as after the projection that made it
    caches: list[li.IndexCache]
    block_table: torch.Tensor  # [R, max_blocks] int32
    seq_lens: torch.Tensor  # [R] int32
    query_len: int
    ids: torch.Tensor  # [views, H, T, K], what `call(view)` writes: int32 ids, or int64 keys of a rank
    call: Callable[[int], None]
    plan: Callable[[], None] | None = None  # what is computed once for all layers
    merged: Callable[[int], torch.Tensor] | None = None  # ids that what `call(view)` wrote makes with the other ranks' part


def draw_pool(
    pages: int, spec: li.IndexerSpec, format: str, device: torch.device, generator: torch.Generator
) -> li.IndexCache:
    """Pages of normally distributed keys; where they must be rounded to the format, `DISTINCT_PAGES` again and again."""
    pool = li.IndexCache.empty(pages, spec, format=format, device=device)
    if not is_packed(pool.format):
        for some in torch.split(pool.data, 1 << 14):
            some.normal_(generator=generator)
        return pool
    first, *others = torch.split(pool.data.view(torch.uint8), DISTINCT_PAGES)
    keys = torch.randn(len(first) * spec.block_size, spec.head_dim, generator=generator, device=device)
    pool.write(keys, torch.arange(len(keys), device=device))
    for some in others:
        some.copy_(first[: len(some)])
    return pool


def layer_pages(case: Case, spec: li.IndexerSpec) -> int:
    """Pages of one layer."""
    return sum(visible_blocks(length, spec.block_size) for length in case.seq_lens)


def draw_table(case: Case, spec: li.IndexerSpec, pages: int, generator: torch.Generator) -> torch.Tensor:
    """Block table of shuffled pages `[R, max_blocks]` int32 into a view of `pages` pages; unused columns leave the cache.

    Where the view is smaller than the case, page ids repeat at random.
    """
    counts = [visible_blocks(length, spec.block_size) for length in case.seq_lens]
    needed, device = sum(counts), generator.device
    if needed <= pages:
        shuffled = torch.randperm(pages, generator=generator, device=device)[:needed]
    else:
        shuffled = torch.randint(pages, (needed,), generator=generator, device=device)
    width = visible_blocks(max(ENGINE_MAX_SEQ_LEN, *case.seq_lens), spec.block_size)
    table = torch.full((len(counts), width), OUT_OF_CACHE, dtype=torch.int32, device=device)
    for row, own in zip(table, torch.split(shuffled, counts), strict=True):
        row[: len(own)] = own
    return table


def prepare(
    case: Case, pool: li.IndexCache, rotation: Rotation, generator: torch.Generator, queries: torch.dtype | None = None
) -> Step:
    """The case on the pool's device, `rotation.views` layers of it; queries of the given dtype, or the cache's first."""
    spec, device = pool.spec, pool.device
    views = torch.split(pool.data, rotation.pages)[: rotation.views]
    caches = [li.IndexCache.wrap(view, spec, format=pool.format.name) for view in views]
    block_table = draw_table(case, spec, rotation.pages, generator)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
    rows = case.tokens if isinstance(case, PrefillCase) else len(case.seq_lens) * case.query_len
    q = torch.randn(rows, case.heads, spec.head_dim, generator=generator, device=device)
    q = q.to(queries or pool.format.query_dtypes[0])
    bound = block_table.shape[1] * spec.block_size
    if isinstance(case, RankCase):
        return _rank_step(case, spec, q, caches, block_table, seq_lens, bound)
    ids = torch.full((rotation.views, case.heads, rows, spec.topk), UNWRITTEN, dtype=torch.int32, device=device)
    if isinstance(case, PrefillCase):
        return _prefill_step(case, spec, q, caches, block_table, seq_lens, ids)

    columns = case.query_len * case.heads
    shares = li.plan_step(seq_lens, spec=spec, max_seq_len=bound, cache_format=pool.format.name)
    gpu = device.type == "cuda"
    workspace = li.Workspace(spec, max_requests=len(seq_lens), max_columns=columns, device=device) if gpu else None

    def call(view: int) -> None:
        li.decode(
            q,
            caches[view],
            block_table,
            seq_lens,
            spec=spec,
            query_len=case.query_len,
            out=ids[view],
            plan=shares,
            workspace=workspace,
        )

    def plan() -> None:
        li.plan_step(seq_lens, spec=spec, max_seq_len=bound, out=shares)

    return Step(spec, q, caches, block_table, seq_lens, case.query_len, ids, call, plan)


def _dealt_table(block_table: torch.Tensor, world: int) -> torch.Tensor:
    """A table of the whole group in which block `b` lies with rank `b % world`, as its page of `block_table`."""
    ranks = torch.arange(block_table.shape[1], device=block_table.device) % world
    dealt = block_table.long() * world + ranks
    return torch.where(block_table == OUT_OF_CACHE, OUT_OF_CACHE, dealt).to(torch.int32)


def _rank_step(
    case: RankCase,
    spec: li.IndexerSpec,
    q: torch.Tensor,
    caches: list[li.IndexCache],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    bound: int,
) -> Step:
    backend, world, columns = backend_of(q.device), case.world, case.query_len * case.heads
    shards = [li.Shard(rank, world, case.shard_by) for rank in range(world)]
    table = _dealt_table(block_table, world) if case.shard_by == "page" else block_table
    format = caches[0].format.name
    planned = partial(li.plan_step, seq_lens, spec=spec, max_seq_len=bound, cache_format=format, block_table=table)
    shares = planned(shard=shards[0])
    gpu = q.device.type == "cuda"
    workspace = li.Workspace(spec, max_requests=len(seq_lens), max_columns=columns, device=q.device) if gpu else None
    keys = torch.full((len(caches), case.heads, len(q), spec.topk), UNWRITTEN, dtype=torch.int64, device=q.device)

    def rank_keys(view: int, shard: li.Shard, out: torch.Tensor, plan: li.StepPlan) -> torch.Tensor:
        step = (q, caches[view], table, seq_lens, spec, case.query_len, bound)
        backend.decode_keys(*step, shard, "score", out, plan, workspace)
        return out

    def call(view: int) -> None:
        rank_keys(view, shards[0], keys[view], shares)

    def plan() -> None:
        planned(shard=shards[0], out=shares)

    def merged(view: int) -> torch.Tensor:
        others = [rank_keys(view, shard, torch.empty_like(keys[view]), planned(shard=shard)) for shard in shards[1:]]
        return li.merge_keys(torch.stack([keys[view], *others]), seq_lens, spec=spec, query_len=case.query_len)

    return Step(spec, q, caches, block_table, seq_lens, case.query_len, keys, call, plan, merged)


def _prefill_step(
    case: PrefillCase,
    spec: li.IndexerSpec,
    q: torch.Tensor,
    caches: list[li.IndexCache],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    ids: torch.Tensor,
) -> Step:
    bounds = torch.tensor([0, case.tokens], dtype=torch.int32, device=q.device)
    query_len = math.gcd(case.tokens, CHUNK_QUERY_LEN)
    ends = torch.arange(query_len, case.tokens + 1, query_len, dtype=torch.int32, device=q.device)
    rows = block_table.expand(len(ends), -1), case.prefix + ends, query_len
    if isinstance(case, RankPrefillCase):
        chunks = Chunks(bounds, seq_lens, case.seq_lens[0])
        ids, rank_call, merged = _rank_prefill(case, spec, q, caches, block_table, chunks)
        return Step(spec, q, caches, *rows, ids, rank_call, merged=merged)

    def call(view: int) -> None:
        li.prefill(q, caches[view], block_table, bounds, seq_lens, spec=spec, out=ids[view])

    return Step(spec, q, caches, *rows, ids, call)


def _rank_prefill(
    case: RankPrefillCase,
    spec: li.IndexerSpec,
    q: torch.Tensor,
    caches: list[li.IndexCache],
    block_table: torch.Tensor,
    chunks: Chunks,
) -> tuple[torch.Tensor, Callable[[int], None], Callable[[int], torch.Tensor]]:
    """Keys of rank 0 in all views, the call that writes them, and what makes ids of them and of the others'."""
    backend = backend_of(q.device)
    shards = [li.Shard(rank, case.world, case.shard_by) for rank in range(case.world)]
    table = _dealt_table(block_table, case.world) if case.shard_by == "page" else block_table
    keys = torch.full((len(caches), case.heads, len(q), spec.topk), UNWRITTEN, dtype=torch.int64, device=q.device)
    one_each = torch.ones(len(q), dtype=torch.int32, device=q.device)

    def rank_keys(view: int, shard: li.Shard, out: torch.Tensor) -> torch.Tensor:
        backend.prefill_keys(q, caches[view], table, chunks, spec, shard, out)
        return out

    def call(view: int) -> None:
        rank_keys(view, shards[0], keys[view])

    def merged(view: int) -> torch.Tensor:
        others = [rank_keys(view, shard, torch.empty_like(keys[view])) for shard in shards[1:]]
        return li.merge_keys(torch.stack([keys[view], *others]), one_each, spec=spec)

    return keys, call, merged
