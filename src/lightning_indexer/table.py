# SPDX-License-Identifier: Apache-2.0
"""The sparse table: the pages that paged attention reads for a selection, and how many tokens they hold."""

from dataclasses import dataclass

import torch

from lightning_indexer.checks import check_int, check_tensor, require
from lightning_indexer.rows import visible_blocks
from lightning_indexer.spec import IndexerSpec

INT32 = (torch.int32,)


@dataclass(frozen=True)
class SparseTable:
    """Where the attention pages of a selection go.

    For a row with `c` visible tokens, `n = ceil(c / B)` blocks and selected ids `S`, the table row lists the pages of
    the full blocks of `S` in ascending id, then those of the partial last block if it is in `S`, then zeros. Block page
    `p = block_table[r, id]` becomes `p * page_stride + 0 .. B/page_size - 1`. The context length is `B` per full block
    plus the visible tokens of the last one. A row with nothing selected has length 0. Ids that the row cannot see are
    left out.

    Args:
        block_table: `[R, max_blocks]` int32, the attention cache's page of every block.
        block_table_out: `[heads, T, K*B/page_size]` int32, written in place; `[T, ...]` for one head.
        context_lens_out: `[heads, T]` int32, written in place; `[T]` for one head.
        page_size: tokens per attention page, a divisor of B.
        page_stride: attention pages from one block page to the next, at least `B/page_size`.
    """

    block_table: torch.Tensor
    block_table_out: torch.Tensor
    context_lens_out: torch.Tensor
    page_size: int = 16
    page_stride: int = 8

    @classmethod
    def empty(cls, spec: IndexerSpec, heads: int, rows: int, page_size: int, block_table: torch.Tensor) -> "SparseTable":
        """A table with new outputs, for attention pages that lie without gaps."""
        pages = spec.block_size // page_size
        out = torch.empty(heads, rows, spec.topk * pages, dtype=torch.int32, device=block_table.device)
        return cls(block_table, out, torch.empty_like(out[..., 0]), page_size, pages)

    def check(self, spec: IndexerSpec, requests: int, heads: int, rows: int, blocks: int, device: torch.device) -> None:
        """Raise ValueError unless this table fits rows of `requests` requests that may see `blocks` blocks."""
        check_int("sparse_table.page_size", self.page_size, 1, spec.block_size)
        divides = spec.block_size % self.page_size == 0
        require(divides, "sparse_table.page_size", f"a divisor of block_size ({spec.block_size})", self.page_size)
        pages = spec.block_size // self.page_size
        check_int("sparse_table.page_stride", self.page_stride, pages)
        width = spec.topk * pages
        shape: tuple[int, ...] = (heads, rows)
        out = self.block_table_out
        if heads == 1 and isinstance(out, torch.Tensor) and out.dim() == 2:
            shape = (rows,)
        check_tensor("sparse_table.block_table", self.block_table, (requests, "max_blocks"), INT32, device)
        covers = self.block_table.shape[1] >= blocks
        require(covers, "sparse_table.block_table", f"at least {blocks} columns", self.block_table.shape[1])
        check_tensor("sparse_table.block_table_out", out, (*shape, width), INT32, device)
        check_tensor("sparse_table.context_lens_out", self.context_lens_out, shape, INT32, device)

    def fill(self, ids: torch.Tensor, lengths: torch.Tensor, spec: IndexerSpec, query_len: int) -> None:
        """Write the table for `ids` `[heads, T, K]` in any order and causal `lengths` `[T]`."""
        heads, rows, topk = ids.shape
        block = spec.block_size
        visible = visible_blocks(lengths, block)[:, None]
        ids = ids.long()
        last_column = self.block_table.shape[1] - 1
        selected = (ids >= 0) & (ids < visible) & (ids <= last_column)
        unused = torch.iinfo(torch.int64).max
        ids = torch.where(selected, ids, unused).sort(dim=-1).values  # the partial block has the highest visible id
        selected = ids != unused
        request = (torch.arange(rows, device=ids.device) // query_len).clamp(max=max(0, len(self.block_table) - 1))
        if rows and len(self.block_table) and last_column >= 0:
            # Columns at or past n may hold anything: unselected places look at column 0 and are then zeroed.
            pages = self.block_table[request[:, None], torch.where(selected, ids, 0)].long()
        else:
            pages = torch.zeros_like(ids)
        count = block // self.page_size
        attention_pages = pages[..., None] * self.page_stride + torch.arange(count, device=ids.device)
        attention_pages = torch.where(selected[..., None], attention_pages, 0)
        held = (lengths[:, None] - ids.clamp(max=2**32) * block).clamp(min=0, max=block)
        held = torch.where(selected, held, 0)
        self.block_table_out.copy_(attention_pages.reshape(heads, rows, topk * count).view_as(self.block_table_out))
        self.context_lens_out.copy_(held.sum(-1).view_as(self.context_lens_out))
