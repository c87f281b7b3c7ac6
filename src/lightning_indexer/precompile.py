# SPDX-License-Identifier: Apache-2.0
"""Compile and load everything that later calls need, so that a graph capture finds it ready."""

import itertools
from collections.abc import Iterable

import torch

from lightning_indexer.arguments import check_order
from lightning_indexer.cache import FORMATS, IndexCache
from lightning_indexer.checks import check_choice, check_int
from lightning_indexer.ops import backend_of, decode, plan_step, prefill
from lightning_indexer.spec import IndexerSpec, check_spec
from lightning_indexer.table import SparseTable

BLOCKS = 64  # a bound that prefill splits the context of


def warmup(
    spec: IndexerSpec,
    *,
    device: torch.device | str,
    heads: int | None = None,
    query_lens: Iterable[int] = (1,),
    cache_format: str = "bf16",
    scaled: bool = False,
    order: str = "score",
    page_size: int | None = None,
) -> None:
    """Run `decode`, with and without a step plan, `prefill` and `IndexCache.write` once on almost nothing.

    Kernels depend on these arguments and on `spec`, not on batch, table width, lengths or bounds: after this call no shape
    compiles anything. Keys to write are bf16 here, and aligned to 16 bytes; `NormRope` has a kernel of its own for each set of
    dtypes, which its first call loads.

    Args:
        spec: geometry and rules.
        device: where calls will run. On the CPU there is nothing to compile.
        heads: heads of the queries to come; None takes `spec.num_heads`.
        query_lens: every query length Q to come.
        cache_format: format of the caches to come; with queries of every dtype that it is scored with.
        scaled: the caches to come have a scale per token.
        order: order to come.
        page_size: of the sparse tables to come; None if there will be none.

    Raises:
        ValueError: an argument out of range, or a device without a backend.
    """
    check_order(order)
    check_choice("cache_format", cache_format, tuple(FORMATS))
    heads = check_spec(spec).num_heads if heads is None else heads
    check_int("heads", heads, 1)
    cache = one_page(spec, cache_format, device, scaled)
    for rows in backend_of(cache.device).write_sizes(cache.device):
        keys = torch.zeros(rows, spec.head_dim, dtype=torch.bfloat16, device=device)
        cache.write(keys, torch.full((rows,), -1, dtype=torch.int64, device=device))
    block_table = torch.zeros(1, BLOCKS, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    plan = plan_step(one, spec=spec, max_seq_len=BLOCKS * spec.block_size, order=order, cache_format=cache_format)
    if page_size is not None:
        check_int("page_size", page_size, 1, spec.block_size)
    for dtype in backend_of(cache.device).query_dtypes(cache.format, cache.device):
        for query_len in query_lens:
            check_int("query_len", query_len, 1)
            q = torch.zeros(query_len, heads, spec.head_dim, device=device).to(dtype)
            tables: list[SparseTable | None] = [None]
            if page_size is not None:
                tables.append(SparseTable.empty(spec, heads, query_len, page_size, block_table))
            for table, planned in itertools.product(tables, (None, plan)):
                decode(
                    q, cache, block_table, one, spec=spec, query_len=query_len, order=order, sparse_table=table, plan=planned
                )
        bounds = torch.tensor([0, 1], dtype=torch.int32, device=device)
        q = torch.zeros(1, heads, spec.head_dim, device=device).to(dtype)
        prefill(q, cache, block_table, bounds, one, spec=spec, order=order)


def one_page(spec: IndexerSpec, format: str, device: torch.device | str, scaled: bool) -> IndexCache:
    """A cache of one page of zeros."""
    cache = IndexCache.empty(1, spec, format, device)
    cache.data.view(torch.uint8).zero_()
    scale = torch.ones(1, spec.block_size, device=device) if scaled else None
    return IndexCache.wrap(cache.data, spec, format, scale)
