# SPDX-License-Identifier: Apache-2.0
"""`ContextParallelIndexer.decode` as one opaque operator, so that `torch.compile` neither looks into it nor breaks at it."""

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from lightning_indexer.cache import IndexCache
from lightning_indexer.spec import IndexerSpec
from lightning_indexer.table import SparseTable

if TYPE_CHECKING:
    from lightning_indexer.indexer import ContextParallelIndexer

_handles = itertools.count()
_indexers: "weakref.WeakValueDictionary[int, ContextParallelIndexer]" = weakref.WeakValueDictionary()


def register(indexer: "ContextParallelIndexer") -> int:
    """A number that the operator finds the indexer by."""
    handle = next(_handles)
    _indexers[handle] = indexer
    return handle


@torch.library.custom_op("lightning_indexer::decode", mutates_args=("out", "block_table_out", "context_lens_out"))
def decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    attention_table: torch.Tensor | None,
    block_table_out: torch.Tensor | None,
    context_lens_out: torch.Tensor | None,
    scale: torch.Tensor | None,
    format: str,
    handle: int,
    query_len: int,
    order: str,
    page_size: int,
    page_stride: int,
    micro_batch: int,
) -> None:
    """Ids, and the sparse table if there is one, of the indexer that `handle` stands for."""
    indexer = _indexers[handle]
    table = None
    if attention_table is not None and block_table_out is not None and context_lens_out is not None:
        table = SparseTable(attention_table, block_table_out, context_lens_out, page_size, page_stride)
    cache = IndexCache.wrap(pages, indexer.spec, format, scale)
    indexer.decode(
        q, cache, block_table, seq_lens, query_len=query_len, order=order, sparse_table=table, out=out, micro_batch=micro_batch
    )


@decode.register_fake
def _(*arguments: Any) -> None:
    """Writes, and returns nothing."""


def traced_decode(
    handle: int,
    spec: IndexerSpec,
    owned: int,
    q: torch.Tensor,
    cache: IndexCache | torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_len: int,
    order: str,
    table: SparseTable | None,
    out: torch.Tensor | None,
    micro_batch: int,
) -> torch.Tensor:
    """What a trace of `decode` records."""
    if not isinstance(cache, IndexCache):
        cache = IndexCache.wrap(cache, spec)
    if out is None:
        out = torch.empty(owned, q.shape[0], spec.topk, dtype=torch.int32, device=q.device)
    parts = (None, None, None) if table is None else (table.block_table, table.block_table_out, table.context_lens_out)
    size, stride = (1, 1) if table is None else (table.page_size, table.page_stride)
    stored = cache.scale, cache.format.name
    torch.ops.lightning_indexer.decode(
        q, cache.data, block_table, seq_lens, out, *parts, *stored, handle, query_len, order, size, stride, micro_batch
    )
    return out
