# SPDX-License-Identifier: Apache-2.0
"""The contract as plain torch, one row at a time: slow, obvious, and independent of every fast path.

Nothing here shares code with the operators: no packed keys, no tiles, no shard arithmetic beyond the ownership rule.
A fast path is right if its selection equals the one made here from that path's own scores, bit for bit.
"""

import math
from typing import Any

import torch


def row_lengths(seq_lens: torch.Tensor, query_len: int, rows: int) -> list[int]:
    """Causal length of each decode row: `max(0, seq_lens[r] - Q + t + 1)` for row `r*Q + t`, 0 for rows past `R*Q`."""
    lengths = []
    for row in range(rows):
        request, token = divmod(row, query_len)
        inside = request < len(seq_lens)
        lengths.append(max(0, int(seq_lens[request]) - query_len + token + 1) if inside else 0)
    return lengths


def scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    query_len: int = 1,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`score[h, row, b] = max over visible positions p of block b of dot(q[row, h], k[p])`; -inf where not visible.

    Args:
        q: `[T, H, D]`.
        keys: `[pages, B, D]`, dequantised.
        block_table: `[R, max_blocks]`.
        seq_lens: `[R]`.
        block_size: B.
        query_len: Q.
        dtype: of the arithmetic and the result.

    Returns:
        `[H, T, max_blocks]`. NaN if any visible product of the block is NaN.
    """
    rows, heads, _ = q.shape
    out = torch.full((heads, rows, block_table.shape[1]), -math.inf, dtype=dtype)
    for row, length in enumerate(row_lengths(seq_lens, query_len, rows)):
        for block in range(math.ceil(length / block_size)):
            page = min(max(int(block_table[row // query_len, block]), 0), len(keys) - 1)
            visible = keys[page, : length - block * block_size].to(dtype)
            for head in range(heads):
                dots = (visible * q[row, head].to(dtype)).sum(dim=-1)
                out[head, row, block] = math.nan if dots.isnan().any() else dots.max()
    return out


def select_row(
    scores: torch.Tensor,
    *,
    topk: int,
    init_blocks: int = 0,
    local_blocks: int = 0,
    tie_break: str = "lower",
) -> list[int]:
    """The first K blocks of the total order, for one row and head that see `len(scores)` blocks."""
    visible = len(scores)
    values = scores.tolist()
    sign = 1 if tie_break == "lower" else -1

    def place(block: int) -> tuple[int, float, int]:
        if block < init_blocks:
            return 0, 0.0, sign * block
        if block >= visible - local_blocks:
            return 1, 0.0, sign * block
        if math.isnan(values[block]):
            return 3, 0.0, sign * block
        return 2, -values[block], sign * block

    return sorted(range(visible), key=place)[:topk]


def select(
    scores: torch.Tensor,
    lengths: list[int],
    *,
    block_size: int,
    topk: int,
    init_blocks: int = 0,
    local_blocks: int = 0,
    tie_break: str = "lower",
    order: str = "score",
) -> torch.Tensor:
    """Ids of every row and head: scores `[H, T, N]` and causal lengths per row to `[H, T, K]` int32, -1 padded."""
    heads, rows, _ = scores.shape
    ids = torch.full((heads, rows, topk), -1, dtype=torch.int32)
    for head in range(heads):
        for row, length in enumerate(lengths):
            chosen = select_row(
                scores[head, row, : math.ceil(length / block_size)],
                topk=topk,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
                tie_break=tie_break,
            )
            chosen = sorted(chosen) if order == "block" else chosen
            ids[head, row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return ids


def merge(shards: list[list[tuple[float, int]]], **rules: Any) -> list[int]:
    """Selection of one row and head from the blocks that each rank scored, as `(score, block)` pairs, in any order.

    Every visible block must be in exactly one shard; `rules` are those of `select_row`.
    """
    by_block = sorted((block, score) for shard in shards for score, block in shard)
    return select_row(torch.tensor([score for _, score in by_block]), **rules)


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    query_len: int = 1,
    **rules: Any,
) -> torch.Tensor:
    """Scores, then selection, of decode rows: ids `[H, T, K]` int32. `rules` are those of `select`."""
    found = scores(q, keys, block_table, seq_lens, block_size=block_size, query_len=query_len)
    lengths = row_lengths(seq_lens, query_len, len(q))
    return select(found, lengths, block_size=block_size, **rules)


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    topk: int,
    **rules: Any,
) -> torch.Tensor:
    """Row i of request r as a decode call of one row with `c = context_len + i + 1`: ids `[H, T, K]` int32."""
    ids = torch.full((q.shape[1], len(q), topk), -1, dtype=torch.int32)
    for request, (first, last) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        context = int(seq_lens[request]) - (last - first)
        for row in range(first, last):
            length = torch.tensor([context + row - first + 1])
            ids[:, row] = decode(
                q[row : row + 1], keys, block_table[request : request + 1], length, block_size=block_size, topk=topk, **rules
            )[:, 0]
    return ids


def sparse_row(
    ids: list[int], length: int, pages: list[int], *, block_size: int, page_size: int, page_stride: int
) -> tuple[list[int], int]:
    """Attention pages and context length of one row; `pages[b]` is the attention page of block `b`."""
    visible = math.ceil(length / block_size)
    table: list[int] = []
    held = 0
    for block in sorted(b for b in ids if 0 <= b < visible):
        table += [pages[block] * page_stride + part for part in range(block_size // page_size)]
        held += min(block_size, length - block * block_size)
    return table, held
