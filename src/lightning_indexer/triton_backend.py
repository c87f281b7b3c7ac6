# SPDX-License-Identifier: Apache-2.0
"""The operators as Triton kernels, for NVIDIA and AMD GPUs. Arguments have been checked; nothing here waits for the GPU."""

from typing import Any

import torch

from lightning_indexer.cache import IndexCache
from lightning_indexer.checks import require
from lightning_indexer.kernels import decode as decode_kernels
from lightning_indexer.kernels import prefill as prefill_kernels
from lightning_indexer.kernels import select as select_kernels
from lightning_indexer.policy import decode_policy, device_facts, prefill_policy
from lightning_indexer.spec import IndexerSpec, Shard
from lightning_indexer.table import SparseTable
from lightning_indexer.workspace import DecodeTiling, StepPlan, Workspace, power_of_two

ALIGNED = 8  # elements: 16 bytes of a 16-bit dtype
MAX_MERGE_LANES = 128
PREFILL_KEYS = 4096  # keys that a prefill tile holds in registers
PREFILL_SCRATCH = 48 << 20  # bytes, at any size
MIN_SPLIT_BLOCKS = 8  # blocks of context that are worth a split
MERGE_TILE = 2048  # candidates of all columns that one program sorts at once; more spill


def check_aligned(argument: str, tensor: torch.Tensor) -> None:
    """Require what the kernels' 16-byte loads need of a query or cache tensor."""
    strides = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    fits = tensor.data_ptr() % 16 == 0 and all(stride % ALIGNED == 0 for stride in strides)
    require(fits, argument, "address and strides that are multiples of 16 bytes", f"strides {tuple(tensor.stride())}")


def plan_step(seq_lens: torch.Tensor, spec: IndexerSpec, longest: int, shard: Shard, shares: torch.Tensor) -> None:
    """Every program's share of a step into `shares`."""
    programs = shares.shape[0] - 1
    decode_kernels.plan_kernel[(programs + 1,)](
        shares, seq_lens, len(seq_lens), longest, shard.rank, shard.world, programs, BLOCK=spec.block_size
    )


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
) -> None:
    """Decode scores of a shard into `out` `[H, T, L]`, visible slots only."""
    launch = _Launch(q, cache, block_table, seq_lens, spec, query_len, longest, shard, None, None)
    launch.run(out, "scores", "score", None)


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
    """Ids of decode rows over the whole context into `out` `[H, T, K]`, in one launch."""
    launch = _Launch(q, cache, block_table, seq_lens, spec, query_len, longest, Shard(), plan, workspace)
    launch.run(out, "ids", order, sparse_table)


def decode_keys(
    q: torch.Tensor,
    cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    query_len: int,
    longest: int,
    shard: Shard,
) -> torch.Tensor:
    """Decode candidates of a shard, `[H, T, K]` int64, in one launch."""
    keys = torch.empty(q.shape[1], q.shape[0], spec.topk, dtype=torch.int64, device=q.device)
    launch = _Launch(q, cache, block_table, seq_lens, spec, query_len, longest, shard, None, None)
    launch.run(keys, "keys", "score", None)
    return keys


def select_keys(
    scores: torch.Tensor, seq_lens: torch.Tensor, spec: IndexerSpec, query_len: int, shard: Shard, out: torch.Tensor
) -> None:
    """First K candidates of each row of `scores` `[H, T, L]` into `out` `[H, T, K]`."""
    heads, rows, width = scores.shape
    keep = max(2, power_of_two(spec.topk))
    if rows:
        select_kernels.select_kernel[(rows, heads)](
            scores,
            seq_lens,
            out,
            len(seq_lens),
            query_len,
            width,
            spec.topk,
            spec.init_blocks,
            spec.local_blocks,
            shard.rank,
            shard.world,
            *scores.stride()[:2],
            *out.stride()[:2],
            BLOCK=spec.block_size,
            KEEP=keep,
            LANES=max(256, keep),
            HIGHER=spec.tie_break == "higher",
        )


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
    world, heads, rows, topk = keys.shape
    keep = max(2, power_of_two(topk))
    if rows:
        select_kernels.merge_kernel[(rows, heads)](
            keys,
            seq_lens,
            out,
            *_table_pointers(sparse_table, out),
            len(seq_lens),
            query_len,
            world * topk,
            topk,
            *keys.stride()[:3],
            *out.stride()[:2],
            *_table_strides(sparse_table),
            BLOCK=spec.block_size,
            KEEP=keep,
            LANES=max(keep, min(256, power_of_two(world * topk))),
            HIGHER=spec.tie_break == "higher",
            BY_BLOCK=order == "block",
            PARTS=_parts(sparse_table, spec),
        )


class _Launch:
    """One launch of the decode kernel, whatever it returns."""

    def __init__(
        self,
        q: torch.Tensor,
        cache: IndexCache,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        spec: IndexerSpec,
        query_len: int,
        longest: int,
        shard: Shard,
        plan: StepPlan | None,
        workspace: Workspace | None,
    ) -> None:
        check_aligned("q", q)
        check_aligned("cache", cache.data)
        self.q, self.cache, self.block_table, self.seq_lens = q, cache, block_table, seq_lens
        self.spec, self.query_len, self.longest, self.shard = spec, query_len, longest, shard
        self.plan = plan
        self.tiling = DecodeTiling.of(spec, query_len, q.shape[1])
        self.workspace = workspace

    def run(self, out: torch.Tensor, output: str, order: str, sparse_table: SparseTable | None) -> None:
        rows, heads, dim = self.q.shape
        spec, tiling, requests = self.spec, self.tiling, len(self.seq_lens)
        if not rows:
            return
        workspace = self.workspace
        if workspace is None:
            columns = self.query_len * heads
            workspace = Workspace(spec, max_requests=max(1, requests), max_columns=columns, device=self.q.device)
        policy = decode_policy(device_facts(self.q.device), self.cache.page_bytes)
        shares = None if self.plan is None else self.plan.shares
        decode_kernels.decode_kernel[(workspace.programs, tiling.tiles)](
            self.q,
            self.cache.data,
            self.block_table,
            self.seq_lens,
            self.seq_lens if shares is None else shares,
            out,
            workspace.keys,
            workspace.arrived,
            *_table_pointers(sparse_table, self.seq_lens),
            requests,
            rows,
            self.longest,
            self.query_len,
            heads,
            spec.topk,
            spec.init_blocks,
            spec.local_blocks,
            self.shard.rank,
            self.shard.world,
            self.cache.num_pages,
            self.q.stride(0) // ALIGNED,
            self.q.stride(1) // ALIGNED,
            self.cache.data.stride(0) // ALIGNED,
            self.block_table.stride(0),
            *out.stride()[:2],
            *_table_strides(sparse_table),
            BLOCK=spec.block_size,
            DIM=dim,
            COLUMNS=tiling.columns,
            KEEP=tiling.keep,
            LANES=max(2 * tiling.keep, min(MAX_MERGE_LANES, MERGE_TILE // tiling.columns)),
            HIGHER=spec.tie_break == "higher",
            BY_BLOCK=order == "block",
            PARTS=_parts(sparse_table, spec),
            OUTPUT=output,
            PLANNED=shares is not None,
            PDL=policy.pdl,
            STAGES=policy.num_stages,
            **policy.options(),
        )


def _parts(table: SparseTable | None, spec: IndexerSpec) -> int:
    return 0 if table is None else spec.block_size // table.page_size


def _table_pointers(table: SparseTable | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if table is None:
        return unused, unused, unused
    return table.block_table, table.block_table_out, table.context_lens_out


def _table_strides(table: SparseTable | None) -> tuple[Any, ...]:
    """Strides of the table's three tensors as the kernels take them, then the page stride; one head has no head stride."""
    if table is None:
        return 0, 0, 0, 0, 0, 0
    out, lens = table.block_table_out, table.context_lens_out
    out_strides = out.stride()[:2] if out.dim() == 3 else (0, out.stride(0))
    lens_strides = lens.stride() if lens.dim() == 2 else (0, lens.stride(0))
    return table.block_table.stride(0), *out_strides, *lens_strides, table.page_stride


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
) -> None:
    """Ids of ragged chunks into `out` `[H, T, K]`, in one launch; rows outside every chunk get -1."""
    check_aligned("q", q)
    check_aligned("cache", cache.data)
    rows, heads, dim = q.shape
    if not rows:
        return
    requests = len(seq_lens)
    policy = prefill_policy(device_facts(q.device), cache.page_bytes)
    keep = max(2, power_of_two(spec.topk))
    columns = max(16, min(policy.columns, PREFILL_KEYS // keep))
    heads_per_tile = min(heads, columns)
    head_tiles = -(-heads // heads_per_tile)
    tiles = -(-rows // (columns // heads_per_tile)) + requests + 1
    busy = max(1, -(-rows // (columns // heads_per_tile)) * head_tiles)  # tiles with work, but for ragged ends
    blocks = -(-longest // spec.block_size)
    fitting = PREFILL_SCRATCH // (tiles * head_tiles * columns * keep * 8)
    splits = max(1, min(-(-policy.programs // busy), blocks // MIN_SPLIT_BLOCKS, fitting))
    size = tiles * head_tiles if splits > 1 else 0
    keys = torch.empty(size * splits * columns * keep, dtype=torch.int64, device=q.device)
    arrived = torch.zeros(size, dtype=torch.int32, device=q.device)
    prefill_kernels.prefill_kernel[(tiles, splits, head_tiles)](
        q,
        cache.data,
        block_table,
        cu_seqlens_q,
        seq_lens,
        out,
        keys if size else out,
        arrived if size else out,
        requests,
        rows,
        longest,
        heads,
        heads_per_tile,
        spec.topk,
        spec.init_blocks,
        spec.local_blocks,
        cache.num_pages,
        q.stride(0) // ALIGNED,
        q.stride(1) // ALIGNED,
        cache.data.stride(0) // ALIGNED,
        block_table.stride(0),
        *out.stride()[:2],
        BLOCK=spec.block_size,
        DIM=dim,
        COLUMNS=columns,
        KEEP=keep,
        LANES=max(keep, 64),
        HIGHER=spec.tie_break == "higher",
        BY_BLOCK=order == "block",
        SPLIT=splits > 1,
        STAGES=policy.num_stages,
        **policy.options(),
    )
