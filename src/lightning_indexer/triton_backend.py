# SPDX-License-Identifier: Apache-2.0
"""The operators as Triton kernels, for NVIDIA and AMD GPUs. Arguments have been checked; nothing here waits for the GPU."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from lightning_indexer.cache import CacheFormat, Fp8Format, IndexCache, is_packed
from lightning_indexer.checks import require
from lightning_indexer.kernels import decode as decode_kernels
from lightning_indexer.kernels import owned as owned_kernels
from lightning_indexer.kernels import prefill as prefill_kernels
from lightning_indexer.kernels import select as select_kernels
from lightning_indexer.kernels import write as write_kernels
from lightning_indexer.norm_rope import NormRope
from lightning_indexer.policy import (
    FEW_ROWS,
    converts_e4m3,
    decode_policy,
    decode_programs,
    device_facts,
    few_programs,
    many_pages,
    prefill_policy,
    write_policy,
)
from lightning_indexer.rows import Chunks, visible_blocks
from lightning_indexer.spec import IndexerSpec, Shard
from lightning_indexer.table import SparseTable
from lightning_indexer.workspace import (
    PREFILL_KEYS,
    DecodeTiling,
    PrefillScratch,
    StepPlan,
    Workspace,
    keys_kept,
    power_of_two,
    unscored_blocks,
)

on_gpu = True  # scratch, step plans and the peer transport are for this backend
# What the kernels call a cache format. Exact float32 products take no matrix unit, and many more registers than there are.
KERNEL_FORMATS = {"bf16": "plain", "fp16": "plain", "fp8": "fp8", "fp8_fnuz": "fp8_fnuz", "nvfp4": "nvfp4"}
ALIGNED = 16  # bytes
WIDE_BYTES = 2  # of an element as the matrix unit takes it, which is what prefill holds of packed keys
MATRIX_COLUMNS = 16  # the least of a matrix product
# That one program sorts at once, by their number. H200, 2026-11-30: 512 of 1 x 65,536 in 8.6 us so, 10.4 by their runs; a sort
# of 1,024 was no faster than by their runs. 2026-12-01: 160 of 32 x 65,536 as 256 take 0.3 us less than as 512.
CANDIDATES = (128, 256, 512, 1024)
TILE_KEYS = 4096  # keys that a prefill tile holds in registers
# Columns of a prefill tile that are merged at once, and of a program if each has few candidates. H200, 2026-11-30, 2,048
# tokens: 8 at once took 8 us longer after 131,072; 16 a program 2.3 us less with four heads and no prefix.
MERGE_COLUMNS = (4, 16)
MERGE_LANES = 128  # candidates of each that are sorted at once; no less than twice the largest K
PAIRED_DIM = 128  # of keys whose NVFP4 rows are aligned to 8 bytes
LIST_PROGRAMS = 4  # per multiprocessor, at least if the requests are long enough: all of them at once


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with its first tensor's GPU as the current one: Triton launches on that."""

    @functools.wraps(function)
    def run(first: torch.Tensor, *arguments: Any) -> Any:
        if first.device.type != "cuda" or first.device.index == torch.cuda.current_device():
            return function(first, *arguments)
        with torch.cuda.device(first.device):
            return function(first, *arguments)

    return run


def check_aligned(argument: str, tensor: torch.Tensor, dims: int) -> None:
    """Require what the kernels' 16-byte loads need of a query or cache tensor: of its address and its first `dims` strides."""
    strides = [stride for stride, size in zip(tensor.stride()[:dims], tensor.shape, strict=False) if size > 1]
    fits = tensor.data_ptr() % ALIGNED == 0 and all(stride * tensor.element_size() % ALIGNED == 0 for stride in strides)
    require(fits, argument, "address and strides that are multiples of 16 bytes", f"strides {tuple(tensor.stride())}")


def query_dtypes(format: CacheFormat, device: torch.device) -> tuple[torch.dtype, ...]:
    """Query dtypes that a format can be scored with on a GPU."""
    facts = device_facts(device)
    narrow = facts.vendor == "amd" or converts_e4m3(facts)
    return tuple(dtype for dtype in format.query_dtypes if narrow or dtype.itemsize > 1)


def check_operands(q: torch.Tensor, cache: IndexCache) -> None:
    """Require formats that this GPU can score, and alignment."""
    facts = device_facts(q.device)
    formats = " or ".join(KERNEL_FORMATS)
    require(cache.format.name in KERNEL_FORMATS, "cache", f"format {formats} on a GPU", cache.format.name)
    if facts.vendor == "nvidia":
        require(cache.format.name != "fp8_fnuz", "cache", "format fp8 (e4m3fn) on an NVIDIA GPU", "fp8_fnuz")
        capability = "{}.{}".format(*facts.capability)
        plain = q.element_size() > 1 or converts_e4m3(facts)
        require(
            plain, "q", f"bfloat16 on compute capability {capability}, which has no fp8", str(q.dtype).removeprefix("torch.")
        )
    check_aligned("cache", cache.data, 1)
    check_aligned("q", q, 2)


def as_loaded(q: torch.Tensor) -> torch.Tensor:
    """Queries as the kernels load them: those of e4m3fnuz as bytes."""
    return q.view(torch.uint8) if q.dtype == torch.float8_e4m3fnuz else q


def units(tensor: torch.Tensor, dim: int) -> int:
    """A stride in units of 16 bytes."""
    return tensor.stride(dim) * tensor.element_size() // ALIGNED


def stored(cache: IndexCache) -> tuple[str, torch.Tensor]:
    """What the kernels call a cache's format, and its pages: bytes, unless of 16- or 32-bit floats."""
    format = "plain" if cache.format.name == "fp32" else KERNEL_FORMATS[cache.format.name]  # fp32 is written, not scored
    return format, cache.data if format == "plain" else cache.data.view(torch.uint8)


@dataclass(frozen=True)
class Pages:
    """A cache as the kernels take it."""

    data: torch.Tensor  # bytes, unless of 16-bit floats
    scale: torch.Tensor
    scale_stride: int
    constants: dict[str, Any]  # TYPE, FORMAT, SCALED

    @classmethod
    def of(cls, cache: IndexCache, q: torch.Tensor) -> "Pages":
        """The cache, for products with `q`: of bf16, or fp16, which holds e4m3 as well."""
        format, data = stored(cache)
        products = triton.language.bfloat16 if q.dtype == torch.bfloat16 else triton.language.float16
        constants = {"TYPE": products, "FORMAT": format, "SCALED": cache.scale is not None}
        if cache.scale is None:
            return cls(data, data, 0, constants)
        return cls(data, cache.scale, cache.scale.stride(0), constants)


@on_its_device
def plan_step(
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    longest: int,
    shard: Shard,
    plan: StepPlan,
    block_table: torch.Tensor | None,
) -> None:
    """Every program's share of a step, the pages before each request, and by page the lists of `block_table`, into `plan`."""
    assert plan.shares is not None
    programs = len(plan.shares)
    policy = decode_policy(device_facts(seq_lens.device), 0)
    lengths, free, work = seq_lens, plan.free, shard
    if plan.held is not None:
        assert block_table is not None
        assert plan.owned is not None
        list_pages(block_table, seq_lens, spec, longest, shard, free, plan.owned, plan.held)
        lengths, free, work = plan.held, 0, Shard()
    decode_kernels.plan_kernel[(programs + len(seq_lens) + 1,)](
        plan.shares,
        plan.before,
        lengths,
        lengths.stride(0),
        seq_lens,
        seq_lens.stride(0),
        len(seq_lens),
        longest,
        free,
        plan.threshold or 0,
        work.rank,
        work.world,
        programs,
        few_programs(programs),
        many_pages(programs),
        BLOCK=spec.block_size,
        AUTO=plan.threshold is not None,
        LISTED=plan.held is not None,
        PDL=policy.pdl,
        **policy.plan_options(plan.held is not None),
    )


def list_pages(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    longest: int,
    shard: Shard,
    free: int,
    owned: torch.Tensor,
    held: torch.Tensor,
) -> None:
    """What the shard owns of each request, into `owned` `[2, R, W]` and `held` `[R]`, as `StepPlan` has them."""
    if not len(seq_lens):
        return
    facts = device_facts(seq_lens.device)
    policy = decode_policy(facts, 0)
    width = owned.shape[2]
    programs = min(-(-width // owned_kernels.CHUNK.value), -(-LIST_PROGRAMS * facts.processors // len(seq_lens)))
    owned_kernels.list_kernel[(len(seq_lens), max(1, programs))](
        owned[0],
        owned[1],
        held,
        block_table,
        block_table.stride(0),
        seq_lens,
        seq_lens.stride(0),
        longest,
        free,
        shard.rank,
        width,
        WORLD=shard.world,
        BLOCK=spec.block_size,
        PDL=policy.pdl,
        **policy.list_options(),
    )


@on_its_device
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
    Decode(q, cache, block_table, seq_lens, spec, query_len, longest, 0, shard, plan, None).score(out)


@on_its_device
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
    """Ids of decode rows over the whole context into `out` `[H, T, K]`."""
    free = unscored_blocks(spec, order)
    step = Decode(q, cache, block_table, seq_lens, spec, query_len, longest, free, Shard(), plan, workspace)
    step.score(None)
    step.select(out, order, sparse_table)


@on_its_device
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
    """Decode candidates of a shard, for ids in `order`, into `out` `[H, T, K]` int64."""
    free = unscored_blocks(spec, order)
    step = Decode(q, cache, block_table, seq_lens, spec, query_len, longest, free, shard, plan, workspace)
    step.score(None)
    step.select(out, "score", None)


@on_its_device
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
    heads, rows, width = scores.shape
    keep = keys_kept(spec.topk)
    if block_table is not None:
        width = min(width, block_table.shape[1])
    if rows:
        select_kernels.select_kernel[(rows, heads)](
            scores,
            seq_lens,
            seq_lens.stride(0),
            seq_lens if block_table is None else block_table,
            0 if block_table is None else block_table.stride(0),
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
            BY_PAGE=shard.by == "page",
        )


@on_its_device
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
    keep = keys_kept(topk)
    if rows:
        select_kernels.merge_kernel[(rows, heads)](
            keys,
            seq_lens,
            seq_lens.stride(0),
            out,
            *table_pointers(sparse_table, out),
            len(seq_lens),
            query_len,
            world * topk,
            topk,
            *keys.stride()[:3],
            *out.stride()[:2],
            *table_strides(sparse_table),
            BLOCK=spec.block_size,
            KEEP=keep,
            LANES=max(keep, min(256, power_of_two(world * topk))),
            HIGHER=spec.tie_break == "higher",
            BY_BLOCK=order == "block",
            PARTS=table_parts(sparse_table, spec),
        )


@dataclass(frozen=True)
class Owner:
    """What a rank owns of the heads that it is given, and where it counts its steps."""

    first_head: int
    heads: int
    steps: torch.Tensor  # [3] int32, as `score_kernel` has them
    count: bool  # count this step
    inbox: "Inbox | None" = None  # where the other heads' queries come in; None if all are given


@dataclass(frozen=True)
class Inbox:
    """How queries travel within the launch that scores them; see `kernels.exchange`."""

    addresses: torch.Tensor  # [P] int64, of every rank's box
    failed: torch.Tensor
    report: torch.Tensor
    words: int  # of a head's queries
    first: int  # word of a box
    half: int  # words
    rank: int
    world: int
    replicas: int
    max_rows: int
    polls: int
    senders: int

    def sizes(self) -> tuple[int, ...]:
        """What `score_kernel` takes of it, from `query_words` on."""
        return self.first, self.half, self.rank, self.world, self.replicas, self.max_rows, self.polls


class Decode:
    """The two launches of a decode call."""

    def __init__(
        self,
        q: torch.Tensor,
        cache: IndexCache,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        spec: IndexerSpec,
        query_len: int,
        longest: int,
        free: int,
        shard: Shard,
        plan: StepPlan | None,
        workspace: Workspace | None,
        owner: Owner | None = None,
    ) -> None:
        check_operands(q, cache)
        self.q, self.cache, self.block_table, self.seq_lens = q, cache, block_table, seq_lens
        self.spec, self.query_len, self.longest, self.free, self.shard = spec, query_len, longest, free, shard
        self.requests, self.inbox = len(seq_lens), None if owner is None else owner.inbox
        self.heads = q.shape[1] if self.inbox is None else spec.num_heads
        self.plan = plan if plan is not None and plan.shares is not None else None
        self.listed = shard.by == "page"
        self.blocks = block_table
        if self.listed:
            assert plan is not None
            assert plan.owned is not None
            self.block_table, self.blocks = plan.owned[0], plan.owned[1]
            self.shard = Shard()  # all that is listed
        self.tiling = DecodeTiling.of(spec, query_len, self.heads)
        self.owner = owner
        self.own_tiling = self.tiling if owner is None else DecodeTiling.of(spec, query_len, owner.heads)
        facts, self.pages = device_facts(q.device), Pages.of(cache, q)
        shares = None if self.plan is None else self.plan.shares
        packed = is_packed(cache.format)
        pages = self.requests * visible_blocks(longest, spec.block_size)
        self.programs = decode_programs(facts, packed, pages) if shares is None else len(shares)
        self.page_bytes = self.pages.data[0].numel() * self.pages.data.element_size()
        self.policy = decode_policy(facts, self.page_bytes, self.pages.constants["FORMAT"])
        if workspace is None:
            columns = max(1, query_len * self.heads)
            workspace = Workspace(spec, max_requests=max(1, self.requests), max_columns=columns, device=q.device)
        self.workspace = workspace

    def score(self, scores: torch.Tensor | None) -> None:
        """Candidates into the workspace, or scores."""
        q, spec, tiling = self.q, self.spec, self.tiling
        if not self.requests:
            return
        owner, auto = self.owner, self.plan is not None and self.plan.threshold is not None
        inbox = self.inbox
        decode_kernels.score_kernel[(self.programs, tiling.tiles)](
            as_loaded(q),
            self.pages.data,
            self.pages.scale,
            self.block_table,
            self.blocks,
            self.seq_lens if self.plan is None else self.plan.before,
            self.seq_lens,
            self.seq_lens.stride(0),
            self.seq_lens if self.plan is None else self.plan.shares,
            self.workspace.keys,
            self.workspace.keys if scores is None else scores,
            self.seq_lens if owner is None else owner.steps,
            *((self.seq_lens,) * 3 if inbox is None else (inbox.addresses, inbox.failed, inbox.report)),
            self.requests,
            self.longest,
            self.free,
            self.query_len,
            self.heads,
            0 if owner is None else owner.first_head,
            self.heads if owner is None else owner.heads,
            0 if owner is None else int(owner.count),
            spec.init_blocks,
            spec.local_blocks,
            self.shard.rank,
            self.shard.world,
            self.cache.num_pages,
            few_programs(self.programs),
            many_pages(self.programs),
            units(q, 0),
            units(q, 1),
            units(self.pages.data, 0),
            self.pages.scale_stride,
            self.block_table.stride(0),
            *((0, 0) if scores is None else scores.stride()[:2]),
            *((0,) * 7 if inbox is None else inbox.sizes()),
            BLOCK=spec.block_size,
            DIM=spec.head_dim,
            COLUMNS=tiling.columns,
            OWN_COLUMNS=self.own_tiling.columns if auto else tiling.columns,
            KEEP=tiling.keep,
            HIGHER=spec.tie_break == "higher",
            SCORES=scores is not None,
            AUTO=auto,
            COUNT=owner is not None,
            BOXED=0 if inbox is None else inbox.words,
            SENDERS=0 if inbox is None else inbox.senders,
            PLANNED=self.plan is not None,
            LISTED=self.listed,
            NATIVE=self.policy.native,
            CARRY=self.policy.carry,
            PAGE_BYTES=self.page_bytes,
            PDL=self.policy.pdl,
            STAGES=self.policy.num_stages,
            AHEAD=self.policy.ahead,
            **self.pages.constants,
            **self.policy.options(tiling.columns),
        )

    def select(self, out: torch.Tensor, order: str, sparse_table: SparseTable | None) -> None:
        """Ids, or keys where `out` is int64, from the workspace's candidates."""
        rows, spec, tiling = self.q.shape[0], self.spec, self.tiling
        if not rows:
            return
        decode_kernels.select_kernel[(rows, self.heads)](
            self.workspace.keys,
            self.seq_lens,
            self.seq_lens.stride(0),
            self.seq_lens if self.plan is None else self.plan.before,
            out,
            *table_pointers(sparse_table, self.seq_lens),
            self.requests,
            self.longest,
            self.free,
            self.query_len,
            self.heads,
            tiling.columns,
            spec.topk,
            self.shard.rank,
            self.shard.world,
            self.programs,
            few_programs(self.programs),
            many_pages(self.programs),
            *out.stride()[:2],
            *table_strides(sparse_table),
            BLOCK=spec.block_size,
            KEEP=tiling.keep,
            FEW=CANDIDATES[0],
            SOME=CANDIDATES[1],
            MANY=CANDIDATES[2],
            MOST=CANDIDATES[3],
            HIGHER=spec.tie_break == "higher",
            BY_BLOCK=order == "block",
            PARTS=table_parts(sparse_table, spec),
            KEYS=out.dtype == torch.int64,
            PLANNED=self.plan is not None,
            LISTED=self.listed,
            PDL=self.policy.pdl,
            **self.policy.select_options(),
        )


def table_parts(table: SparseTable | None, spec: IndexerSpec) -> int:
    """Attention pages per block; 0 without a table."""
    return 0 if table is None else spec.block_size // table.page_size


def table_pointers(table: SparseTable | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors that the kernels take of the table."""
    if table is None:
        return unused, unused, unused
    return table.block_table, table.block_table_out, table.context_lens_out


def table_strides(table: SparseTable | None) -> tuple[Any, ...]:
    """What the kernels take of the table's tensors: strides, and the width of the first; one head has no head stride."""
    if table is None:
        return 0, 0, 0, 0, 0, 0, 0
    out, lens = table.block_table_out, table.context_lens_out
    out_strides = out.stride()[:2] if out.dim() == 3 else (0, out.stride(0))
    lens_strides = lens.stride() if lens.dim() == 2 else (0, lens.stride(0))
    pages = table.block_table
    return pages.stride(0), pages.shape[1], *out_strides, *lens_strides, table.page_stride


@on_its_device
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
    chunks = Chunks(cu_seqlens_q, seq_lens, longest)
    _prefill(q, cache, block_table, chunks, spec, order, Shard(), None, out, workspace, None)


@dataclass(frozen=True)
class Counter:
    """Where exchanged steps are counted, and whether this one is."""

    steps: torch.Tensor  # [3] int32, as `score_kernel` has them
    counts: bool


@dataclass(frozen=True)
class Lists:
    """What a shard by page owns of each request, as in `StepPlan`."""

    owned: torch.Tensor
    held: torch.Tensor

    @classmethod
    def of(
        cls, block_table: torch.Tensor, chunks: Chunks, spec: IndexerSpec, shard: Shard, scratch: PrefillScratch | None
    ) -> "Lists":
        """Listed of a prefill's requests, in `scratch` if there is room."""
        requests, blocks, device = len(chunks.seq_lens), visible_blocks(chunks.longest, spec.block_size), block_table.device
        size = 2 * requests * blocks
        if scratch is not None and scratch.owned.numel() >= size and scratch.held.numel() >= requests:
            owned, held = scratch.owned[:size], scratch.held[:requests]
        else:
            owned = torch.empty(size, dtype=torch.int32, device=device)
            held = torch.empty(requests, dtype=torch.int32, device=device)
        owned = owned.view(2, requests, blocks)
        list_pages(block_table, chunks.seq_lens, spec, chunks.longest, shard, 0, owned, held)
        return cls(owned, held)


@on_its_device
def prefill_keys(
    q: torch.Tensor,
    cache: IndexCache,
    block_table: torch.Tensor,
    chunks: Chunks,
    spec: IndexerSpec,
    shard: Shard,
    out: torch.Tensor,
    scratch: PrefillScratch | None = None,
    counter: Counter | None = None,
) -> None:
    """A shard's candidates of ragged chunks into `out` `[H, T, K]` int64; none for rows outside every chunk."""
    lists = Lists.of(block_table, chunks, spec, shard, scratch) if shard.by == "page" else None
    workspace = None if scratch is None else scratch.workspace
    _prefill(q, cache, block_table, chunks, spec, "score", shard, lists, out, workspace, counter)


def _prefill(
    q: torch.Tensor,
    cache: IndexCache,
    block_table: torch.Tensor,
    chunks: Chunks,
    spec: IndexerSpec,
    order: str,
    shard: Shard,
    lists: Lists | None,
    out: torch.Tensor,
    workspace: Workspace | None,
    counter: Counter | None,
) -> None:
    check_operands(q, cache)
    rows, heads, dim = q.shape
    if not rows:
        return
    bounds, seq_lens, longest = chunks.bounds, chunks.seq_lens, chunks.longest
    table, listed, held = block_table, block_table, seq_lens
    if lists is not None:
        (table, listed), held = lists.owned, lists.held
        shard = Shard()  # all that is listed
    requests = len(seq_lens)
    keep = keys_kept(spec.topk)
    pages = Pages.of(cache, q)
    policy = prefill_policy(device_facts(q.device), spec.block_size * dim * WIDE_BYTES, keep)
    columns = max(16, min(policy.columns, TILE_KEYS // keep))
    heads_per_tile = min(heads, columns)
    head_tiles = -(-heads // heads_per_tile)
    tiles = -(-rows // (columns // heads_per_tile)) + requests + 1
    busy = max(1, -(-rows // (columns // heads_per_tile)) * head_tiles)  # tiles with work, but for ragged ends
    blocks = -(-longest // (spec.block_size * shard.world))
    split_keys = tiles * head_tiles * columns * keep
    room = PREFILL_KEYS if workspace is None else workspace.keys.numel()
    splits = max(1, min(policy.programs // busy, blocks, room // split_keys))
    if workspace is None:
        keys = torch.empty(splits * split_keys if splits > 1 else 0, dtype=torch.int64, device=q.device)
    else:
        keys = workspace.keys
    shape = (requests, rows, longest, heads, heads_per_tile, spec.topk, shard.rank, shard.world)
    constants = {
        "BLOCK": spec.block_size,
        "COLUMNS": columns,
        "KEEP": keep,
        "HIGHER": spec.tie_break == "higher",
        "BY_BLOCK": order == "block",
        "KEYS": out.dtype == torch.int64,
        "LISTED": lists is not None,
        "PDL": policy.pdl,
    }
    prefill_kernels.prefill_kernel[(tiles, splits, head_tiles)](
        as_loaded(q),
        pages.data,
        pages.scale,
        table,
        listed,
        held,
        bounds,
        bounds.stride(0),
        seq_lens,
        seq_lens.stride(0),
        seq_lens if counter is None else counter.steps,
        out,
        keys,
        *shape,
        spec.init_blocks,
        spec.local_blocks,
        0 if counter is None else int(counter.counts),
        cache.num_pages,
        units(q, 0),
        units(q, 1),
        units(pages.data, 0),
        pages.scale_stride,
        table.stride(0),
        *out.stride()[:2],
        DIM=dim,
        STAGES=policy.num_stages,
        NATIVE=policy.native,
        COUNT=counter is not None,
        **pages.constants,
        **constants,
        **policy.options(),
    )
    if splits > 1:
        each = MERGE_COLUMNS[0] if splits * keep > MERGE_LANES // 2 else MERGE_COLUMNS[1]
        prefill_kernels.merge_splits_kernel[(tiles, columns // each, head_tiles)](
            listed,
            held,
            bounds,
            bounds.stride(0),
            seq_lens,
            seq_lens.stride(0),
            out,
            keys,
            *shape,
            table.stride(0),
            splits,
            each,
            *out.stride()[:2],
            FEW=MERGE_COLUMNS[0],
            MANY=MERGE_COLUMNS[1],
            LANES=MERGE_LANES,
            **constants,
            **policy.merge_options(),
        )


@on_its_device
def _write(
    keys: torch.Tensor,
    cache: IndexCache,
    slot_mapping: torch.Tensor,
    q: torch.Tensor | None,
    positions: torch.Tensor | None,
    rules: NormRope | None,
    out: torch.Tensor | None,
) -> None:
    rows, dim = keys.shape
    if not rows:
        return
    facts = device_facts(keys.device)
    format, pages = stored(cache)
    policy = write_policy(facts, rows)
    heads = 0 if q is None else q.shape[1]
    queries = keys if q is None else q
    made = keys if out is None else out
    written = made.view(torch.uint8) if made.element_size() == 1 else made
    units = (_unit(keys, 1), _unit(pages, 1), _unit(queries, queries.dim() - 1), _unit(written, written.dim() - 1))
    key_unit, page_unit, q_unit, out_unit = units
    paired = format == "nvfp4" and rules is None and keys.dtype == torch.bfloat16 and dim == PAIRED_DIM
    write_kernels.write_kernel[(-(-rows // policy.rows), 1 + heads)](
        keys,
        slot_mapping,
        slot_mapping.stride(0),
        pages,
        pages if cache.scale is None else cache.scale,
        queries,
        written,
        slot_mapping if positions is None else positions,
        0 if positions is None else positions.stride(0),
        keys if rules is None else rules.query_weight,
        keys if rules is None else rules.key_weight,
        keys if rules is None else rules.frequency,
        rows,
        cache.num_pages * cache.spec.block_size,
        keys.stride(0) // key_unit,
        pages.stride(0) // page_unit,
        0 if cache.scale is None else cache.scale.stride(0),
        queries.stride(0) // q_unit,
        queries.stride(1) // q_unit,
        written.stride(0) // out_unit,
        written.stride(1) // out_unit,
        0.0 if rules is None else rules.eps,
        KEY_UNIT=key_unit,
        PAGE_UNIT=page_unit,
        Q_UNIT=q_unit,
        OUT_UNIT=out_unit,
        BLOCK=cache.spec.block_size,
        DIM=dim,
        ROW=pages.shape[2],
        ROWS=policy.rows,
        FORMAT=format,
        SCALED=cache.scale is not None,
        LARGEST=cache.format.largest if isinstance(cache.format, Fp8Format) else 0.0,
        NORM=rules is not None,
        ROTARY=0 if rules is None else rules.rotary_dim,
        OUT_FNUZ=made.dtype == torch.float8_e4m3fnuz,
        NATIVE=converts_e4m3(facts),
        PAIRED=paired and min(key_unit, page_unit) > 1 and converts_e4m3(facts),
        PDL=policy.pdl,
        **policy.options(),
    )


def _unit(tensor: torch.Tensor, dims: int) -> int:
    """Elements in 16 bytes if address and the first `dims` strides are multiples of that, else 1."""
    elements = ALIGNED // tensor.element_size()
    aligned = tensor.data_ptr() % ALIGNED == 0 and all(stride % elements == 0 for stride in tensor.stride()[:dims])
    return elements if aligned else 1


def write_sizes(device: torch.device) -> tuple[int, ...]:
    """Rows to write, by which every launch shape of the writer has been loaded."""
    return 1, FEW_ROWS * device_facts(device).processors + 1


def write(cache: IndexCache, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store keys by slot."""
    _write(keys, cache, slot_mapping, None, None, None, None)


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
    _write(k, cache, slot_mapping, q, positions, rules, out)
