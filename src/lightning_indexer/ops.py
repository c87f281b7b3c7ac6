# SPDX-License-Identifier: Apache-2.0
"""The public operators: check everything, then hand over to the backend."""

from typing import Any

import torch

from lightning_indexer import torch_backend
from lightning_indexer.arguments import (
    INT32,
    check_chunks,
    check_decode,
    check_ids_out,
    check_lengths,
    check_order,
    check_plan,
    check_query,
    check_rows,
    check_shard,
    check_sparse_table,
    check_table,
    check_workspace,
)
from lightning_indexer.cache import FORMATS, IndexCache, is_packed
from lightning_indexer.checks import check_choice, check_int, check_tensor, require
from lightning_indexer.policy import decode_programs, device_facts
from lightning_indexer.rows import visible_blocks
from lightning_indexer.spec import IndexerSpec, Shard, check_spec
from lightning_indexer.table import SparseTable
from lightning_indexer.workspace import SHARE_FIELDS, StepPlan, Workspace, unscored_blocks


def backend_of(device: torch.device) -> Any:
    """The module whose functions run on a device: Triton kernels on CUDA and HIP devices, torch elsewhere.

    Raises:
        ValueError: a GPU, and no Triton.
    """
    if device.type != "cuda":
        return torch_backend
    try:
        from lightning_indexer import triton_backend
    except ModuleNotFoundError as error:
        require(error.name != "triton", "device", f"Triton, for tensors on {device} (pip install triton)", "none installed")
        raise
    return triton_backend


def check_device(device: torch.device | str) -> torch.device:
    """The device as tensors report it, with its index.

    Raises:
        ValueError: there is no such device, or none of our backends runs on it.
    """
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        require(False, "device", "an available device", f"{device!r} ({str(error).splitlines()[0]})")
        raise
    if backend_of(found) is not torch_backend:
        device_facts(found)
    return found


@torch.no_grad()
def score_blocks(
    q: torch.Tensor,
    cache: IndexCache | torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    spec: IndexerSpec,
    query_len: int = 1,
    max_seq_len: int | None = None,
    shard: Shard | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Block scores of decode rows, for one shard of the context.

        score[h, row, b] = max over positions p of block b with p < c of dot(q[row, h], k[p])    float32
        row = r*Q + t,  c = max(0, seq_lens[r] - Q + t + 1),  b < ceil(c / B)

    The bits of a score depend on its query, its keys and `c` alone: not on batch, bounds, shard or thread count. A block
    with a NaN product among its visible tokens scores NaN.

    Args:
        q: `[T, H, D]` in the cache's query dtype, `T >= R*Q`, last dim contiguous. Rows past `R*Q` are padding.
        cache: an `IndexCache`, or a plain `[pages, B, D]` tensor.
        block_table: `[R, max_blocks]` int32, page of each logical block. Columns at or past `ceil(c / B)` are not
            read; page ids outside the cache are clamped into it.
        seq_lens: `[R]` int32, tokens of each request with this step's Q rows.
        spec: geometry and rules.
        query_len: Q, rows per request.
        max_seq_len: bound for `seq_lens`; None takes all that the table can hold.
        shard: whose blocks to score; None is the whole context. `by="page"`: `cache` holds the rank's own pages, and the
            table tells pages of the whole group.
        out: `[H, T, L]` float32, `L = ceil(ceil(max_seq_len / B) / world)`; slot `l` is block `l * world + rank`. By page
            `L = ceil(max_seq_len / B)`, slot `l` is block `l`, and only owned ones are written.

    Returns:
        `out`, of which only slots of visible blocks were written; a new tensor holds -inf elsewhere.

    Raises:
        ValueError: an argument's shape, dtype, device or stride, or a length above the bound.
    """
    cache, longest = check_decode(q, cache, block_table, seq_lens, spec, query_len, max_seq_len)
    shard = check_shard(shard)
    shape = (q.shape[1], q.shape[0], shard.width(visible_blocks(longest, spec.block_size)))
    if out is None:
        out = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    check_tensor("out", out, shape, (torch.float32,), q.device)
    plan = None
    if shard.by == "page":
        plan = make_plan(seq_lens, spec, longest, "score", shard, None, is_packed(cache.format), None, block_table)
    backend_of(q.device).score_blocks(q, cache, block_table, seq_lens, spec, query_len, longest, shard, out, plan)
    return out


@torch.no_grad()
def select_keys(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    spec: IndexerSpec,
    query_len: int = 1,
    shard: Shard | None = None,
    out: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first K candidates of a shard, as packed keys (`lightning_indexer.key`) in descending order.

    Args:
        scores: `[H, T, L]` float32 of the shard, as `score_blocks` lays them out; slots of blocks that a row cannot see
            are not looked at.
        seq_lens: `[R]` int32.
        spec: geometry and rules; forced blocks are forced here, by their logical id.
        query_len: Q, rows per request.
        shard: whose blocks these are; None is the whole context.
        out: `[H, T, K]` int64.
        block_table: `[R, max_blocks]` int32; needed by page only, to tell which blocks are owned.

    Returns:
        `[H, T, K]` int64, 0 where a row has fewer than K blocks in the shard.

    Raises:
        ValueError: an argument's shape, dtype, device or stride, or a length with more blocks than `scores` has.
    """
    check_tensor("scores", scores, ("H", "T", "L"), (torch.float32,))
    shard = check_shard(shard)
    check_rows("scores", scores.shape[1], seq_lens, spec, query_len, scores.device)
    heads, rows, width = scores.shape
    # The most of which the shard owns no more than `width`.
    blocks = width if shard.by == "page" else width * shard.world + shard.rank
    longest = min(blocks * spec.block_size, torch.iinfo(torch.int32).max)
    check_lengths(seq_lens, longest, f"scores ({width} slots)")
    if out is None:
        out = torch.empty(heads, rows, spec.topk, dtype=torch.int64, device=scores.device)
    check_tensor("out", out, (heads, rows, spec.topk), (torch.int64,), scores.device)
    table = block_table if shard.by == "page" else None
    if shard.by == "page":
        require(table is not None, "block_table", 'a table, for a shard by="page"', "None")
        assert table is not None
        check_table(table, seq_lens, spec, None)
    backend_of(scores.device).select_keys(scores, seq_lens, spec, query_len, shard, out, table)
    return out


@torch.no_grad()
def merge_keys(
    keys: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    spec: IndexerSpec,
    query_len: int = 1,
    order: str = "score",
    sparse_table: SparseTable | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The selection from the candidates of all shards.

    Args:
        keys: `[P, H, T, K]` int64, each rank's `select_keys`, in any order of ranks. A plain `select_keys` result of
            the whole context is `keys[None]`.
        seq_lens: `[R]` int32.
        spec: geometry and rules, the ones that the keys were made with.
        query_len: Q, rows per request.
        order: "score" (the total order) or "block" (ascending ids).
        sparse_table: filled for the selection as well.
        out: `[H, T, K]` int32.

    Returns:
        `[H, T, K]` int32 logical block ids, left-packed, -1 padded; all -1 for rows that see nothing.

    Raises:
        ValueError: an argument's shape, dtype, device or stride.
    """
    check_tensor("keys", keys, ("P", "H", "T", check_spec(spec).topk), (torch.int64,))
    require(keys.shape[0] > 0, "keys", "at least one rank", "none")
    _, heads, rows, _ = keys.shape
    check_rows("keys", rows, seq_lens, spec, query_len, keys.device)
    check_order(order)
    check_sparse_table(sparse_table, spec, seq_lens, heads, rows, keys.device)
    out = check_ids_out(out, heads, rows, spec, keys.device)
    backend_of(keys.device).merge_keys(keys, seq_lens, spec, query_len, order, sparse_table, out)
    return out


@torch.no_grad()
def decode(
    q: torch.Tensor,
    cache: IndexCache | torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    spec: IndexerSpec,
    query_len: int = 1,
    max_seq_len: int | None = None,
    order: str = "score",
    sparse_table: SparseTable | None = None,
    out: torch.Tensor | None = None,
    plan: StepPlan | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """The K blocks that each decode row attends to, per head: `merge_keys` of `select_keys` of `score_blocks`.

        ids[h, row] = first min(K, n) blocks of: init, local, score descending, tie rule;  n = ceil(c / B)

    Args:
        q, cache, block_table, seq_lens, spec, query_len, max_seq_len: as in `score_blocks`.
        order, sparse_table: as in `merge_keys`.
        out: `[H, T, K]` int32; any strides with a contiguous last dim, so a token-major buffer may be passed
            transposed.
        plan: on a GPU, `plan_step` of the same lengths, shared by all layers of a step, and made when the table was already
            written.
        workspace: on a GPU, scratch to use instead of new memory.

    Returns:
        `[H, T, K]` int32 logical block ids, left-packed, -1 padded. Rows past `R*Q` and rows with `c = 0` are all -1.

    Raises:
        ValueError: an argument's shape, dtype, device or stride, or a length above the bound.
    """
    cache, longest = check_decode(q, cache, block_table, seq_lens, spec, query_len, max_seq_len)
    check_order(order)
    rows, heads, _ = q.shape
    check_sparse_table(sparse_table, spec, seq_lens, heads, rows, q.device)
    if plan is not None:
        check_plan(plan, spec, Shard(), seq_lens.shape[0], order, longest)
    if workspace is not None:
        check_workspace(workspace).check(spec, seq_lens.shape[0], query_len * heads, q.device)
    out = check_ids_out(out, heads, rows, spec, q.device)
    backend_of(q.device).decode(
        q, cache, block_table, seq_lens, spec, query_len, longest, order, sparse_table, out, plan, workspace
    )
    return out


@torch.no_grad()
def plan_step(
    seq_lens: torch.Tensor,
    *,
    spec: IndexerSpec,
    max_seq_len: int,
    order: str = "score",
    shard: Shard | None = None,
    cache_format: str = "bf16",
    block_table: torch.Tensor | None = None,
    out: StepPlan | None = None,
) -> StepPlan:
    """What `decode` derives from the lengths, for all layers of a step: an even split of the pages over the GPU.

    Optional: `decode` without a plan computes the same in every call. A plan is good for the lengths it was made from; those
    and the block tables of the `decode` calls, which read them early, must be written before this call and not change until
    the last of them. A shard by page
    has the plan list its pages of each request: 8 bytes for each block of the bound.

    Args:
        seq_lens: `[R]` int32.
        spec: geometry.
        max_seq_len: the bound for the lengths, the one of the `decode` calls: what they are given, or else B times the
            columns of their table.
        order: the order of the `decode` calls.
        shard: whose blocks; None is the whole context.
        cache_format: format of the caches of the `decode` calls. Another one's plan is as right, but not as fast.
        block_table: `[R, max_blocks]` int32, the one of the `decode` calls; needed by page only.
        out: an earlier plan on the same device, made anew in place, so that a captured graph finds it.

    Returns:
        `out` or a new plan; on the CPU an empty one.

    Raises:
        ValueError: an argument's shape, dtype or device, or a shard by page and no table.
    """
    check_tensor("seq_lens", seq_lens, ("R",), INT32, unit_stride=False)
    check_order(order)
    check_int("max_seq_len", max_seq_len, 0)
    check_choice("cache_format", cache_format, tuple(FORMATS))
    spec, shard, packed = check_spec(spec), check_shard(shard), is_packed(FORMATS[cache_format])
    if block_table is not None:
        check_table(block_table, seq_lens, spec, max_seq_len)
    return make_plan(seq_lens, spec, max_seq_len, order, shard, None, packed, out, block_table)


def make_plan(
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    max_seq_len: int,
    order: str,
    shard: Shard,
    threshold: int | None,
    packed: bool,
    out: StepPlan | None,
    block_table: torch.Tensor | None = None,
) -> StepPlan:
    """`plan_step` of checked arguments, for a step that the ranks share only past `threshold` pages."""
    device, requests = seq_lens.device, seq_lens.shape[0]
    longest = min(max_seq_len, torch.iinfo(torch.int32).max)
    require(shard.by == "block" or block_table is not None, "block_table", 'a table, for a shard by="page"', "None")
    facts = shard, spec.block_size, unscored_blocks(spec, order), longest, threshold
    if backend_of(device) is torch_backend:
        return StepPlan(None, None, *facts)
    if out is None:
        pages = requests * visible_blocks(longest, spec.block_size)
        programs = decode_programs(device_facts(device), packed, pages)
        shares = torch.empty(programs, SHARE_FIELDS, dtype=torch.int32, device=device)
        owned = held = None
        if shard.by == "page":
            owned = torch.empty(2, requests, visible_blocks(longest, spec.block_size), dtype=torch.int32, device=device)
            held = torch.empty(requests, dtype=torch.int32, device=device)
        out = StepPlan(shares, torch.empty(requests + 1, dtype=torch.int32, device=device), *facts, owned, held)
    check_plan(out, spec, shard, requests, order, longest, threshold)
    backend_of(device).plan_step(seq_lens, spec, longest, shard, out, block_table)
    return out


@torch.no_grad()
def prefill(
    q: torch.Tensor,
    cache: IndexCache | torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    spec: IndexerSpec,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    order: str = "score",
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """The selection of `decode` for ragged chunks of new tokens behind cached prefixes.

    Row i of request r, `q[cu_seqlens_q[r] + i]`, sees `c = seq_lens[r] - (cu_seqlens_q[r+1] - cu_seqlens_q[r]) + i + 1`
    tokens. Each row equals a decode row of that length, bit for bit.

    Args:
        q: `[T, H, D]`, `T >= cu_seqlens_q[R]`.
        cache, block_table, spec, max_seq_len, order: as in `decode`.
        cu_seqlens_q: `[R+1]` int32 or int64, first row of each request, then the number of rows; starts at 0.
        seq_lens: `[R]` int32, cached prefix plus chunk of each request.
        max_query_len: bound for the chunks; None takes T.
        out: `[H, T, K]` int32.
        workspace: on a GPU, scratch to use instead of new memory, at most 48 MiB.

    Returns:
        `[H, T, K]` int32 logical block ids, left-packed, -1 padded; -1 for rows outside every chunk.

    Raises:
        ValueError: an argument's shape, dtype, device or stride; on the CPU also `cu_seqlens_q` not ascending from 0 to
            at most T, a chunk longer than its request, or a length above its bound.
    """
    cache = check_query(q, cache, spec)
    rows, heads, _ = q.shape
    check_tensor("seq_lens", seq_lens, ("R",), INT32, q.device, unit_stride=False)
    longest = check_table(block_table, seq_lens, spec, max_seq_len)
    bounds = (torch.int32, torch.int64)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (seq_lens.shape[0] + 1,), bounds, q.device, unit_stride=False)
    if max_query_len is not None:
        check_int("max_query_len", max_query_len, 0)
    if q.device.type == "cpu":
        check_chunks(cu_seqlens_q.tolist(), seq_lens.tolist(), rows, rows if max_query_len is None else max_query_len)
    check_order(order)
    if workspace is not None:
        check_workspace(workspace).check_device(q.device)
    out = check_ids_out(out, heads, rows, spec, q.device)
    backend_of(q.device).prefill(q, cache, block_table, cu_seqlens_q, seq_lens, spec, longest, order, out, workspace)
    return out
