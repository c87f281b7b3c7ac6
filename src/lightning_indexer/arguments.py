# SPDX-License-Identifier: Apache-2.0
"""What the operators and the context-parallel indexer require of their arguments.

On the CPU the lengths are checked against the bounds. On another device reading them would stall the stream, so lengths
past the bound are taken as the bound.
"""

import itertools

import torch

from lightning_indexer.cache import IndexCache, as_cache
from lightning_indexer.checks import check_choice, check_int, check_tensor, require
from lightning_indexer.rows import visible_blocks
from lightning_indexer.spec import IndexerSpec, Shard, check_spec
from lightning_indexer.table import SparseTable
from lightning_indexer.workspace import StepPlan, Workspace

INT32 = (torch.int32,)


def check_shard(shard: Shard | None) -> Shard:
    require(shard is None or isinstance(shard, Shard), "shard", "a Shard or None", type(shard).__name__)
    return Shard() if shard is None else shard


def check_query(q: torch.Tensor, cache: IndexCache | torch.Tensor, spec: IndexerSpec) -> IndexCache:
    checked = as_cache(cache, check_spec(spec))
    check_tensor("q", q, ("T", "H", spec.head_dim), checked.format.query_dtypes, checked.device)
    require(q.shape[1] > 0, "q", "at least one head", f"shape {list(q.shape)}")
    return checked


def check_rows(
    argument: str, rows: int, seq_lens: torch.Tensor, spec: IndexerSpec, query_len: int, device: torch.device
) -> None:
    check_spec(spec)
    check_int("query_len", query_len, 1)
    check_tensor("seq_lens", seq_lens, ("R",), INT32, device, unit_stride=False)
    needed = seq_lens.shape[0] * query_len
    requests = f"{seq_lens.shape[0]} requests of query_len {query_len}"
    require(rows >= needed, argument, f"at least {needed} rows for {requests}", f"{rows} rows")


def check_lengths(seq_lens: torch.Tensor, longest: int, bound: str) -> None:
    if seq_lens.device.type == "cpu":
        live = int(seq_lens.max()) if seq_lens.shape[0] else 0
        require(live <= longest, "seq_lens", f"at most {longest} tokens, the bound of {bound}", live)


def check_table(block_table: torch.Tensor, seq_lens: torch.Tensor, spec: IndexerSpec, max_seq_len: int | None) -> int:
    """The bound for the lengths, in tokens."""
    check_tensor("block_table", block_table, (seq_lens.shape[0], "max_blocks"), INT32, seq_lens.device)
    columns = block_table.shape[1]
    if max_seq_len is None:
        longest, bound = columns * spec.block_size, f"block_table ({columns} columns)"
    else:
        check_int("max_seq_len", max_seq_len, 0)
        blocks = visible_blocks(max_seq_len, spec.block_size)
        require(columns >= blocks, "block_table", f"at least {blocks} columns for max_seq_len {max_seq_len}", columns)
        longest, bound = max_seq_len, "max_seq_len"
    check_lengths(seq_lens, longest, bound)
    return min(longest, torch.iinfo(torch.int32).max)


def check_decode(
    q: torch.Tensor,
    cache: IndexCache | torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    query_len: int,
    max_seq_len: int | None,
) -> tuple[IndexCache, int]:
    """The cache, and the bound for the lengths in tokens."""
    checked = check_query(q, cache, spec)
    check_rows("q", q.shape[0], seq_lens, spec, query_len, q.device)
    return checked, check_table(block_table, seq_lens, spec, max_seq_len)


def check_chunks(bounds: list[int], seq_lens: list[int], rows: int, longest: int) -> None:
    chunks = [last - first for first, last in itertools.pairwise(bounds)]
    chunk = max(chunks, default=0)
    fits = bounds[0] == 0 and min(chunks, default=0) >= 0 and bounds[-1] <= rows
    require(fits, "cu_seqlens_q", f"values that ascend from 0 to at most {rows}, the rows of q", bounds)
    require(chunk <= longest, "cu_seqlens_q", f"chunks of at most {longest} rows", chunk)
    for request, (chunk, length) in enumerate(zip(chunks, seq_lens, strict=True)):
        require(length >= chunk, "seq_lens", f"at least the {chunk} new tokens of request {request}", length)


def check_sparse_table(
    table: SparseTable | None, spec: IndexerSpec, seq_lens: torch.Tensor, heads: int, rows: int, device: torch.device
) -> None:
    if table is None:
        return
    require(isinstance(table, SparseTable), "sparse_table", "a SparseTable or None", type(table).__name__)
    live = int(seq_lens.max()) if seq_lens.shape[0] and device.type == "cpu" else 0
    table.check(spec, seq_lens.shape[0], heads, rows, visible_blocks(max(live, 0), spec.block_size), device)


def check_ids_out(out: torch.Tensor | None, heads: int, rows: int, spec: IndexerSpec, device: torch.device) -> torch.Tensor:
    shape = (heads, rows, spec.topk)
    if out is None:
        return torch.empty(shape, dtype=torch.int32, device=device)
    check_tensor("out", out, shape, INT32, device)
    return out


def check_order(order: str) -> None:
    check_choice("order", order, ("score", "block"))


def check_plan(
    plan: StepPlan, spec: IndexerSpec, shard: Shard, requests: int, order: str, longest: int, threshold: int | None = None
) -> None:
    require(isinstance(plan, StepPlan), "plan", "a StepPlan or None", type(plan).__name__)
    plan.check(spec, shard, requests, order, longest, threshold)


def check_workspace(workspace: Workspace) -> Workspace:
    require(isinstance(workspace, Workspace), "workspace", "a Workspace or None", type(workspace).__name__)
    return workspace
