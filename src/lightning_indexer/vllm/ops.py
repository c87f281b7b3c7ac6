# SPDX-License-Identifier: Apache-2.0
"""The operators that vLLM's MiniMax-M3 modules document, under their names and with their arguments; needs no vLLM.

    index_topk                minimax_m3_index_score, minimax_m3_index_topk, minimax_m3_index_decode
    indexer_context_parallel  indexer_context_scores, IndexerCPDecode
    indexer_cp_exchange       all_gather, local_topk_keys, merge_topk_keys

An engine that imports them from vLLM's AMD modules can import them from here, on any device that `lightning_indexer` runs on.
What is selected is the contract of docs/semantics.md; where it is stricter than theirs, it holds. `tie_break="higher"`, which
every operator that selects takes in addition, makes equal scores go to the higher block id, as their keys do. Packed keys are
those of `lightning_indexer.key`: the operators here belong together, keys of other libraries are not understood.

H index heads, T query rows, R requests, Q query rows per request. Blocks are pages of 128 tokens.

The forms that `lightning_indexer` itself offers do more with less: `prefill` never holds a score tensor, and
`ContextParallelIndexer` exchanges within the selecting kernel.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

import lightning_indexer as li
from lightning_indexer.arguments import INT32, check_rows
from lightning_indexer.cache import FORMATS, IndexCache
from lightning_indexer.checks import check_int, check_tensor, require
from lightning_indexer.collective import all_gather_into
from lightning_indexer.rows import decode_lengths, visible_blocks

BLOCK_SIZE = 128
PAGE_SIZE = 16  # tokens of an attention page in a sparse table
BLOCK_PAGES = BLOCK_SIZE // PAGE_SIZE
SCORE_STRIDE = 16  # a row of prefill scores takes a multiple of so many
GROUP_COLUMNS = 64  # query columns (rows x heads) that share one pass over the pages of a request
GROUP_SCORES = 1 << 26  # scores of such groups that are held at once beside the output: 256 MiB
LOG2_E = 1 / math.log(2)
QUERY_DTYPES = tuple({dtype: None for format in FORMATS.values() for dtype in format.query_dtypes})


@torch.no_grad()
def minimax_m3_index_score(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Block scores of ragged prefill chunks, unscaled.

        score[h, row, b] = max over positions p of block b with p < c of dot(q[row, h], k[p])    float32
        row = cu_seqlens_q[r] + i,  c = prefix_lens[r] + i + 1,  b < ceil(c / 128)

    Args:
        idx_q: `[T, H, D]`.
        index_kv_cache: `[pages, 128, D]`.
        block_table: `[R, max_blocks]` int32.
        cu_seqlens_q: `[R+1]` int32, first row of each request, then the number of rows.
        seq_lens: `[R]` int32, prefix and chunk; not looked at, `prefix_lens` and `cu_seqlens_q` say the same.
        prefix_lens: `[R]` int32, tokens before the chunk.
        max_query_len: bound for the chunks.
        max_seq_len: bound for the lengths, in tokens.
        num_kv_heads: H.

    Returns:
        `[H, T, ceil(max_seq_len / 128)]` float32; rows lie a multiple of 16 apart. -inf where a row sees no block.

    Raises:
        ValueError: an argument's shape, dtype or device.
    """
    spec, cache = _geometry(idx_q, index_kv_cache, num_kv_heads)
    rows, heads, _ = idx_q.shape
    check_int("max_query_len", max_query_len, 0)
    check_int("max_seq_len", max_seq_len, 0)
    requests = _check_chunks(cu_seqlens_q, prefix_lens, idx_q.device)
    check_tensor("seq_lens", seq_lens, (requests,), INT32, idx_q.device, unit_stride=False)
    check_tensor("block_table", block_table, (requests, "max_blocks"), INT32, idx_q.device)
    blocks = visible_blocks(max_seq_len, BLOCK_SIZE)
    require(block_table.shape[1] >= blocks, "block_table", f"at least {blocks} columns", block_table.shape[1])
    padded = -(-blocks // SCORE_STRIDE) * SCORE_STRIDE
    # One row more than there are, for scores that are nobody's.
    scores = torch.full((heads, rows + 1, padded), -torch.inf, dtype=torch.float32, device=idx_q.device)[..., :blocks]
    if not rows or not requests or not blocks:
        return scores[:, :rows]
    # A score depends on query, keys and causal length alone, so chunks are scored as decode requests of `size` rows, counted
    # from the end of the chunk. What lies before its start, in its first group, sees some of the prefix and is nobody's.
    size = max(1, min(max_query_len, GROUP_COLUMNS // heads))
    first, last = cu_seqlens_q[:-1].long(), cu_seqlens_q[1:].long()
    ends = torch.cumsum((last - first + size - 1) // size, dim=0)  # groups up to the end of each request
    most = rows // size + requests  # groups that there can be, without a look at the lengths
    step = max(1, GROUP_SCORES // (heads * size * blocks))
    offsets = torch.arange(-size, 0, device=idx_q.device)
    for begin in range(0, most, step):
        group = torch.arange(begin, min(begin + step, most), device=idx_q.device)
        request = torch.bucketize(group, ends, right=True)
        real = request < requests
        request = request.clamp(max=requests - 1)
        end = last[request] - (ends[request] - 1 - group) * size  # one past the group's last row
        length = torch.where(real, prefix_lens[request] + end - first[request], 0).to(torch.int32)
        row = end[:, None] + offsets
        owned = real[:, None] & (row >= first[request][:, None])
        target = torch.where(owned, row, rows).flatten()
        found = li.score_blocks(
            idx_q[target.clamp(max=rows - 1)],
            cache,
            block_table[request],
            length,
            spec=spec,
            query_len=size,
            max_seq_len=max_seq_len,
        )
        scores.index_copy_(1, target, found)
    return scores[:, :rows]


@torch.no_grad()
def minimax_m3_index_topk(
    score: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
    *,
    tie_break: str = "lower",
) -> torch.Tensor:
    """The selection of prefill rows from their scores.

    Args:
        score: `[H, T, N]` float32 of `minimax_m3_index_score`; slots of blocks that a row cannot see are not looked at.
        cu_seqlens_q: `[R+1]` int32.
        prefix_lens: `[R]` int32.
        max_query_len: bound for the chunks.
        topk, init_blocks, local_blocks, tie_break: as in `IndexerSpec`.
        out: `[H, >= T, topk]` int32; its first T rows are written.

    Returns:
        `[H, T, topk]` int32 block ids in the total order, -1 padded; all -1 for rows outside every chunk.

    Raises:
        ValueError: an argument's shape, dtype, device or range; on the CPU a row that sees more blocks than `score` has.
    """
    check_tensor("score", score, ("H", "T", "N"), (torch.float32,))
    heads, rows, _ = score.shape
    spec = li.IndexerSpec(topk=topk, init_blocks=init_blocks, local_blocks=local_blocks, tie_break=tie_break)
    check_int("max_query_len", max_query_len, 0)
    requests = _check_chunks(cu_seqlens_q, prefix_lens, score.device)
    row = torch.arange(rows, device=score.device)
    if requests:
        owner = torch.bucketize(row, cu_seqlens_q[1:].long(), right=True)  # requests without rows are passed over
        request = owner.clamp(max=requests - 1)
        length = torch.where(owner < requests, prefix_lens[request] + row - cu_seqlens_q[request] + 1, 0).to(torch.int32)
    else:
        length = torch.zeros(rows, dtype=torch.int32, device=score.device)
    ids = _first_rows(out, heads, rows, topk, score.device)
    keys = li.select_keys(score, length, spec=spec)  # a row is a request of its own
    return li.merge_keys(keys[None], length, spec=spec, out=ids)


@torch.no_grad()
def minimax_m3_index_decode(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: torch.Tensor | None = None,
    *,
    attention_block_table: torch.Tensor | None = None,
    sparse_block_table_out: torch.Tensor | None = None,
    sparse_context_lens_out: torch.Tensor | None = None,
    block_page_stride: int | None = None,
    completion_counter: torch.Tensor | None = None,
    tie_break: str = "lower",
) -> torch.Tensor:
    """The selection of decode rows: `lightning_indexer.decode`. Any number of blocks.

    Args:
        idx_q: `[R*Q, H, D]`.
        index_kv_cache: `[pages, 128, D]`.
        block_table: `[R, max_blocks]` int32.
        seq_lens: `[R]` int32.
        max_seq_len: bound for the lengths, in tokens; beside it what the table can hold.
        topk, init_blocks, local_blocks, tie_break: as in `IndexerSpec`.
        num_kv_heads: H.
        decode_query_len: Q.
        max_decode_query_len: bound for Q.
        out: `[H, >= R*Q, topk]` int32; its first rows are written.
        attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride: all four or none, for one
            head: `[R, >= ceil(max_seq_len / 128)]`, `[R*Q, topk*8]` and `[R*Q]` int32, and 8 or 16; as in `SparseTable`.
        completion_counter: `[H, >= R*Q]` int32, contiguous, all zero. It is not needed here and stays as it is.

    Returns:
        `[H, R*Q, topk]` int32 block ids in the total order, -1 padded.

    Raises:
        ValueError: an argument's shape, dtype, device, stride or range.
    """
    spec, cache = _geometry(idx_q, index_kv_cache, num_kv_heads, topk, init_blocks, local_blocks, tie_break)
    rows, heads, _ = idx_q.shape
    check_int("max_decode_query_len", max_decode_query_len, 1)
    check_int("decode_query_len", decode_query_len, 1, max_decode_query_len)
    check_int("max_seq_len", max_seq_len, 0)
    _check_exact_rows("idx_q", rows, seq_lens, spec, decode_query_len, idx_q.device)
    check_tensor("block_table", block_table, (len(seq_lens), "max_blocks"), INT32, idx_q.device)
    fused = (attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride)
    table = sparse_table(*fused, heads=heads, device=idx_q.device, blocks=visible_blocks(max_seq_len, BLOCK_SIZE))
    if completion_counter is not None:
        check_tensor("completion_counter", completion_counter, (heads, "rows"), INT32, idx_q.device)
        count, contiguous = completion_counter.shape[1], completion_counter.is_contiguous()
        require(count >= rows and contiguous, "completion_counter", f"at least {rows} contiguous rows", f"{count} rows")
    return li.decode(
        idx_q,
        cache,
        block_table,
        seq_lens,
        spec=spec,
        query_len=decode_query_len,
        max_seq_len=min(max_seq_len, block_table.shape[1] * BLOCK_SIZE),
        sparse_table=table,
        out=_first_rows(out, heads, rows, topk, idx_q.device),
    )


@torch.no_grad()
def indexer_context_scores(
    idx_q: torch.Tensor,
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    rank: int,
    world_size: int,
    max_query_len: int,
    sm_scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode scores of all heads over one rank's blocks, scaled: `score_blocks` times `sm_scale * log2(e)`.

    Args:
        idx_q: `[R*Q, H, D]`, all heads.
        index_cache: `[pages, 128, D]`.
        block_table: `[R, >= ceil(max_seq_len / 128)]` int32; page ids outside the cache are clamped into it.
        seq_lens: `[R]` int32.
        max_seq_len: bound for the lengths, in tokens; any larger one gives the same scores.
        rank, world_size: blocks `local * world_size + rank` are scored.
        max_query_len: Q.
        sm_scale: a number above 0.
        out: `[H, >= R*Q, >= L]` float32, `L = ceil(ceil(max_seq_len / 128) / world_size)`.

    Returns:
        `[H, R*Q, L]` float32; slots of blocks that a row cannot see are left as they were.

    Raises:
        ValueError: an argument's shape, dtype, device, stride or range.
    """
    spec, cache = _geometry(idx_q, index_cache, "H")
    rows, heads, _ = idx_q.shape
    shard = li.Shard(rank, world_size)
    _check_scale("sm_scale", sm_scale)
    check_int("max_seq_len", max_seq_len, 0)
    _check_exact_rows("idx_q", rows, seq_lens, spec, max_query_len, idx_q.device)
    width = shard.width(visible_blocks(max_seq_len, BLOCK_SIZE))
    if out is None:
        out = torch.full((heads, rows, width), -torch.inf, dtype=torch.float32, device=idx_q.device)
    check_tensor("out", out, (heads, "rows", "slots"), (torch.float32,), idx_q.device)
    fits = out.shape[1] >= rows and out.shape[2] >= width
    require(fits, "out", f"at least {rows} rows of {width} slots", f"shape {list(out.shape)}")
    scores = out[:, :rows, :width]
    rules: dict[str, Any] = {"spec": spec, "query_len": max_query_len, "max_seq_len": max_seq_len, "shard": shard}
    li.score_blocks(idx_q, cache, block_table, seq_lens, **rules, out=scores)
    lengths = decode_lengths(seq_lens, max_query_len, rows)
    seen = shard.blocks(width, idx_q.device) < visible_blocks(lengths, BLOCK_SIZE)[:, None]
    return torch.where(seen, scores * (sm_scale * LOG2_E), scores, out=scores)


class IndexerCPDecode:
    """Context-parallel selection for the heads that a rank owns; one instance serves every layer. A `ContextParallelIndexer`.

    Args:
        total_heads: H, index heads of all ranks together.
        rank, world_size: this rank's place in `group`, and its size.
        max_tokens: most query rows of a call.
        max_seq_len: longest request, in tokens.
        topk, init_blocks, local_blocks, tie_break: as in `IndexerSpec`.
        group: a torch.distributed process group, or an object that has one as `device_group`, like vLLM's.
        device: where queries and cache lie.
        head_dim: D.

    Attributes:
        local_heads, head_offset: the owned heads are `head_offset .. head_offset + local_heads - 1`.
        replicas: ranks that own the same head.

    Raises:
        ValueError: on every rank: an argument is wrong, or the ranks are configured differently.
    """

    def __init__(
        self,
        *,
        total_heads: int,
        rank: int,
        world_size: int,
        max_tokens: int,
        max_seq_len: int,
        topk: int,
        init_blocks: int,
        local_blocks: int,
        group: Any,
        device: torch.device | str,
        head_dim: int = 128,
        tie_break: str = "lower",
    ) -> None:
        spec = li.IndexerSpec(total_heads, head_dim, BLOCK_SIZE, topk, init_blocks, local_blocks, tie_break)
        members = process_group(group)
        place = f"rank {dist.get_rank(members)} of {dist.get_world_size(members)}, as in group"
        fits = (rank, world_size) == (dist.get_rank(members), dist.get_world_size(members))
        require(fits, "rank, world_size", place, f"rank {rank} of {world_size}")
        limits: dict[str, Any] = {"max_rows": max_tokens, "max_seq_len": max_seq_len, "device": device}
        self.indexer = li.ContextParallelIndexer(spec, members, **limits)
        self.local_heads = len(self.indexer.owned_heads)
        self.head_offset = self.indexer.owned_heads.start
        self.replicas = spec.replicas(world_size)

    @torch.no_grad()
    def __call__(
        self,
        local_q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_len: int,
        out: torch.Tensor,
        *,
        scale: float,
        attention_block_table: torch.Tensor | None = None,
        sparse_block_table_out: torch.Tensor | None = None,
        sparse_context_lens_out: torch.Tensor | None = None,
        block_page_stride: int | None = None,
    ) -> torch.Tensor:
        """Ids of the owned heads, in the total order, into `out`.

        Args:
            local_q: `[n, local_heads, D]`, `n >= R*Q`.
            kv_cache: `[pages, 128, D]`.
            block_table: `[R, max_blocks]` int32.
            seq_lens: `[R]` int32, the same on all ranks.
            query_len: Q.
            out: `[local_heads, n, topk]` int32.
            scale: a number above 0; the selection does not depend on it.
            attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride: all four or none, as in
                `minimax_m3_index_decode`.

        Returns:
            `out`.

        Raises:
            ValueError, RuntimeError: as `ContextParallelIndexer.decode`.
        """
        _check_scale("scale", scale)
        fused = (attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride)
        table = sparse_table(*fused, heads=self.local_heads, device=local_q.device)
        cache = wrap_cache(kv_cache, self.indexer.spec, local_q)
        step = (local_q, cache, block_table, seq_lens)
        return self.indexer.decode(*step, query_len=query_len, sparse_table=table, out=out)


@torch.no_grad()
def all_gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Every rank's `x`, by rank: `[world, *x.shape]`. One collective of the group.

    Where ranks share a host `IndexerCPDecode` does without it: keys and queries then go from kernel to kernel.

    Args:
        x: a contiguous tensor of the same shape and dtype on every rank: int64 keys, or queries.
        group: a torch.distributed process group, or an object that has one as `device_group`, like vLLM's.

    Raises:
        ValueError: not contiguous.
    """
    require(isinstance(x, torch.Tensor), "x", "a torch.Tensor", type(x).__name__)
    require(x.is_contiguous(), "x", "a contiguous tensor", f"strides {list(x.stride())}")
    members = process_group(group)
    gathered = torch.empty(dist.get_world_size(members), *x.shape, dtype=x.dtype, device=x.device)
    # As bytes: gloo does not know every dtype.
    all_gather_into(gathered.flatten().view(torch.uint8), x.flatten().view(torch.uint8), group=members)
    return gathered


@torch.no_grad()
def local_topk_keys(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    topk: int,
    rank: int,
    world: int,
    query_len: int,
    global_blocks: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor,
    tie_break: str = "lower",
) -> torch.Tensor:
    """The first `topk` candidates of a shard as packed keys, forced blocks first: `lightning_indexer.select_keys`.

    Args:
        scores: `[H, T, >= L]` float32 of `indexer_context_scores`, `L = ceil(global_blocks / world)`.
        seq_lens: `[R]` int32.
        topk, init_blocks, local_blocks, tie_break: as in `IndexerSpec`.
        rank, world: whose blocks these are.
        query_len: Q.
        global_blocks: bound for the blocks of a request.
        out: `[H, T, topk]` int64.

    Returns:
        `out`; 0 where a row has fewer blocks in the shard.

    Raises:
        ValueError: an argument's shape, dtype, device, stride or range.
    """
    spec = li.IndexerSpec(topk=topk, init_blocks=init_blocks, local_blocks=local_blocks, tie_break=tie_break)
    shard = li.Shard(rank, world)
    check_int("global_blocks", global_blocks, 0)
    check_tensor("scores", scores, ("H", "T", "L"), (torch.float32,))
    width = shard.width(global_blocks)
    require(scores.shape[2] >= width, "scores", f"at least {width} slots", f"{scores.shape[2]} slots")
    return li.select_keys(scores[..., :width], seq_lens, spec=spec, query_len=query_len, shard=shard, out=out)


@torch.no_grad()
def merge_topk_keys(
    keys: torch.Tensor,
    topk_idx: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_len: int,
    init_blocks: int,
    local_blocks: int,
    attention_block_table: torch.Tensor | None = None,
    sparse_block_table_out: torch.Tensor | None = None,
    sparse_context_lens_out: torch.Tensor | None = None,
    block_page_stride: int | None = None,
    tie_break: str = "lower",
) -> torch.Tensor:
    """The selection from all shards' keys, into `topk_idx`: `lightning_indexer.merge_keys`.

    Args:
        keys: `[world, H, T, topk]` int64 of `local_topk_keys`, by any order of ranks.
        topk_idx: `[H, T, topk]` int32.
        seq_lens: `[R]` int32.
        query_len: Q.
        init_blocks, local_blocks, tie_break: those that the keys were made with.
        attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride: all four or none, as in
            `minimax_m3_index_decode`.

    Returns:
        `topk_idx`.

    Raises:
        ValueError: an argument's shape, dtype, device, stride or range.
    """
    check_tensor("topk_idx", topk_idx, ("H", "T", "topk"), INT32)
    heads, _, topk = topk_idx.shape
    spec = li.IndexerSpec(topk=topk, init_blocks=init_blocks, local_blocks=local_blocks, tie_break=tie_break)
    fused = (attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride)
    table = sparse_table(*fused, heads=heads, device=topk_idx.device)
    return li.merge_keys(keys, seq_lens, spec=spec, query_len=query_len, sparse_table=table, out=topk_idx)


def sparse_table(
    pages: torch.Tensor | None,
    table_out: torch.Tensor | None,
    lengths_out: torch.Tensor | None,
    page_stride: int | None,
    *,
    heads: int,
    device: torch.device,
    blocks: int = 0,
) -> li.SparseTable | None:
    """The table of `[T, K*8]` that vLLM describes by four arguments, all given or none; for one head.

    It must cover `blocks` blocks; what else depends on the step is checked by the operator that fills it.
    """
    given = [value is not None for value in (pages, table_out, lengths_out, page_stride)]
    if not any(given):
        return None
    names = "attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride"
    if pages is None or table_out is None or lengths_out is None or page_stride is None:
        raise ValueError(f"{names}: expected all of them or none, got {sum(given)} of 4")
    require(heads == 1, "sparse_block_table_out", "one index head", f"{heads} heads")
    strides = (BLOCK_PAGES, 2 * BLOCK_PAGES)
    require(page_stride in strides, "block_page_stride", f"{strides[0]} or {strides[1]}", repr(page_stride))
    check_tensor("attention_block_table", pages, ("R", "max_blocks"), INT32, device)
    require(pages.shape[1] >= blocks, "attention_block_table", f"at least {blocks} columns", pages.shape[1])
    check_tensor("sparse_block_table_out", table_out, ("T", "pages"), INT32, device)
    check_tensor("sparse_context_lens_out", lengths_out, ("T",), INT32, device)
    return li.SparseTable(pages, table_out, lengths_out, page_size=PAGE_SIZE, page_stride=page_stride)


def process_group(group: Any) -> dist.ProcessGroup:
    """The process group that `group` is, or has as `device_group`."""
    found: dist.ProcessGroup = getattr(group, "device_group", group)
    return found


def wrap_cache(tensor: torch.Tensor, spec: li.IndexerSpec, q: torch.Tensor) -> IndexCache:
    """An engine's index-K tensor. Bytes are fp8 in the queries' encoding, e4m3fn for others, or NVFP4, as their rows tell."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
        return IndexCache.wrap(tensor, spec)
    if tensor.shape[-1] != spec.head_dim:
        return IndexCache.wrap(tensor, spec, format="nvfp4")
    return IndexCache.wrap(tensor, spec, format="fp8_fnuz" if q.dtype == torch.float8_e4m3fnuz else "fp8")


def _geometry(
    q: torch.Tensor,
    cache: torch.Tensor,
    heads: int | str,
    topk: int = 1,
    init_blocks: int = 0,
    local_blocks: int = 0,
    tie_break: str = "lower",
) -> tuple[li.IndexerSpec, IndexCache]:
    """Spec and cache of operators that are told no geometry but by their tensors."""
    check_tensor("idx_q", q, ("T", heads, "D"), QUERY_DTYPES)
    spec = li.IndexerSpec(q.shape[1], q.shape[2], BLOCK_SIZE, topk, init_blocks, local_blocks, tie_break)
    return spec, wrap_cache(cache, spec, q)


def _check_chunks(cu_seqlens_q: torch.Tensor, prefix_lens: torch.Tensor, device: torch.device) -> int:
    """The number of requests."""
    check_tensor("prefix_lens", prefix_lens, ("R",), INT32, device, unit_stride=False)
    requests = len(prefix_lens)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (requests + 1,), INT32, device, unit_stride=False)
    return requests


def _check_exact_rows(
    argument: str, rows: int, seq_lens: torch.Tensor, spec: li.IndexerSpec, query_len: int, device: torch.device
) -> None:
    check_rows(argument, rows, seq_lens, spec, query_len, device)
    wanted = len(seq_lens) * query_len
    require(rows == wanted, argument, f"{wanted} rows for {len(seq_lens)} requests of {query_len}", f"{rows} rows")


def _check_scale(argument: str, scale: Any) -> None:
    fits = isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0
    require(fits, argument, "a finite number above 0", repr(scale))


def _first_rows(out: torch.Tensor | None, heads: int, rows: int, topk: int, device: torch.device) -> torch.Tensor | None:
    """The first rows of a buffer that may have more."""
    if out is None:
        return None
    check_tensor("out", out, (heads, "rows", topk), INT32, device)
    require(out.shape[1] >= rows, "out", f"at least {rows} rows", f"{out.shape[1]} rows")
    return out[:, :rows]
