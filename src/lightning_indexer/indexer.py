# SPDX-License-Identifier: Apache-2.0
"""The context-parallel indexer: each rank scores all heads over its 1/P of the blocks, then merges the heads it owns.

    q (owned heads) -> gather queries -> score shard -> select shard top-K keys -> exchange keys -> merge owned heads -> ids

Exactness. A score does not depend on the shard it was computed in, the key order is total, and forced blocks are forced by
their logical id when keys are made. For each head the union of the shards' first K keys therefore contains the first K
of all blocks, and the merged ids are those of `lightning_indexer.decode` on the whole context, order included.
"""

import dataclasses
import platform
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_indexer import calibration, custom_op
from lightning_indexer.agreement import MAX_ERROR_CHARACTERS, Message, require_agreement
from lightning_indexer.arguments import (
    INT32,
    check_chunks,
    check_ids_out,
    check_lengths,
    check_order,
    check_plan,
    check_rows,
    check_sparse_table,
    check_table,
)
from lightning_indexer.cache import FORMATS, IndexCache, as_cache, is_packed
from lightning_indexer.checks import check_choice, check_int, check_tensor, require
from lightning_indexer.collective import CollectiveTransport
from lightning_indexer.dots import arithmetic
from lightning_indexer.ops import backend_of, check_device, make_plan
from lightning_indexer.policy import decode_programs, device_facts
from lightning_indexer.precompile import one_page
from lightning_indexer.ranks import ProcessRanks, Ranks, UnmappedError, gpu_name, ranks_of
from lightning_indexer.rows import Chunks, visible_blocks
from lightning_indexer.spec import IndexerSpec, Shard, check_spec
from lightning_indexer.table import SparseTable
from lightning_indexer.workspace import SHARE_FIELDS, PrefillScratch, StepPlan, Workspace, unscored_blocks

Checked = TypeVar("Checked")

MAX_QUERY_LEN = 16  # query rows per request that the scratch of a GPU is made for
PEER_TIMEOUT = timedelta(seconds=60)
SETUP_TIMEOUT = timedelta(minutes=5)


@dataclasses.dataclass(frozen=True)
class _Step:
    """Checked arguments of one step, of decode or prefill."""

    cache: IndexCache
    seq_lens: torch.Tensor
    longest: int
    out: torch.Tensor


class _MicroBatch:
    """What a step in flight needs for itself: scratch and plan on a GPU, and the memory of its exchange.

    The plan lists up to `listed` pages of each request, which are 0 by block.
    """

    def __init__(self, spec: IndexerSpec, max_rows: int, listed: int, prefills: bool, device: torch.device) -> None:
        self.collective: CollectiveTransport | None = None
        self.peer: Any = None  # PeerTransport; its module needs Triton
        self.workspace: Workspace | None = None
        self.scratch: PrefillScratch | None = None
        self.lengths: torch.Tensor | None = None
        if backend_of(device).on_gpu:
            columns = MAX_QUERY_LEN * spec.num_heads
            size = {"max_requests": max_rows, "max_columns": columns}
            self.workspace = Workspace(spec, **size, device=device, prefill=prefills)
            self.shares = torch.empty(self.workspace.programs, SHARE_FIELDS, dtype=torch.int32, device=device)
            self.before = torch.empty(max_rows + 1, dtype=torch.int32, device=device)
            self.lengths = torch.empty(max_rows, dtype=torch.int32, device=device)
            self.owned = torch.empty(2 * max_rows * listed, dtype=torch.int32, device=device)
            self.held = torch.empty(max_rows, dtype=torch.int32, device=device)
            if prefills:  # apart from the plan, which the layers of a mixed step still need
                self.scratch = PrefillScratch(self.workspace, torch.empty_like(self.owned), torch.empty_like(self.held))


class ContextParallelIndexer:
    """Decode-time block selection over the ranks of a group. One instance serves every layer.

    Every rank holds the whole index-K cache, or with `shard_by="page"` the pages that it owns, owns some index heads
    (`IndexerSpec.owned_heads`) and gets their ids. All ranks must call `decode` alike: same rows, requests, lengths and query
    length. Page numbers may differ between ranks that hold the whole cache each.

    Args:
        spec: geometry and rules; `spec.num_heads` counts the heads of the whole group.
        group: the ranks: a process group, or one of `lightning_indexer.ranks.virtual_ranks`. None is the default process
            group, or this process alone if there is none.
        max_rows: most rows T of a step.
        max_seq_len: longest request, in tokens.
        device: where queries, cache and tables lie; "cpu", or a device that the group's backend serves.
        transport: "collective" (torch.distributed: any topology), "peer" (ranks of one host, on GPUs: they write into each
            other's memory from within the selecting kernel) or "auto", "peer" where it works for all ranks.
        dispatch: "sharded" scores 1/P of the blocks and exchanges keys; "replicated" scores the owned heads over all
            blocks and exchanges nothing. "auto" with "peer" chooses for each step on the device, the same on every rank and
            within a captured graph: sharded where all requests together see more pages than `threshold`. "auto" with
            "collective" is "sharded": there the choice is fixed for the instance, and so for every graph.
        timeout: seconds to wait for a missing rank at construction and in each step; None takes the group's own, and a
            minute within kernels.
        shard_by: "block" (every rank holds the whole cache, and scores logical block `b` if `b % P` is its number) or "page"
            (it holds physical page `p` as its page `p // P` if `p % P` is its number, and scores what it holds; see `Shard`).
            By page every step is shared, as no other rank could score its blocks, and on a GPU each micro-batch takes
            `8 * max_rows * ceil(max_seq_len / B)` bytes for the lists of what the rank holds of each request.
        threshold: pages for "auto"; None has `warmup` measure them, and shares every step until then. See `thresholds`.
        micro_batches: steps that may be in flight at once, each on a stream of its own.
        max_prefill_rows: rows of chunks that `prefill` shares among the ranks at once; None, or less, is `max_rows`. Each
            takes `16 * P * h * (K + D / 4) + 2 * H * (4 * K + D)` bytes of a GPU and micro-batch with "peer", `h` the heads
            of a rank. If given, 48 MiB more and by page a second set of lists are taken here, not in each prefill.

    Raises:
        ValueError: on every rank: a rank's arguments are wrong, or the ranks are configured differently (names the
            field, ranks and values).
        RuntimeError: on every rank that arrived: a rank did not within the time-out (names it).
    """

    def __init__(
        self,
        spec: IndexerSpec,
        group: "dist.ProcessGroup | Ranks | None" = None,
        *,
        max_rows: int,
        max_seq_len: int,
        device: torch.device | str,
        transport: str = "auto",
        dispatch: str = "auto",
        shard_by: str = "block",
        timeout: float | None = None,
        threshold: int | None = None,
        micro_batches: int = 1,
        max_prefill_rows: int | None = None,
    ) -> None:
        self.ranks = ranks_of(group)
        self.rank = 0 if self.ranks is None else self.ranks.rank
        self.world = 1 if self.ranks is None else self.ranks.world
        self.timeout = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else None

        def check() -> Message:
            check_spec(spec).owned_heads(self.rank, self.world)
            number = timeout is None or (isinstance(timeout, (int, float)) and timeout > 0)
            require(number, "timeout", "a number of seconds > 0 or None", repr(timeout))
            self.device = check_device(device)
            check_int("max_rows", max_rows, 1)
            check_int("max_seq_len", max_seq_len, 1)
            check_choice("transport", transport, ("auto", "collective", "peer"))
            check_choice("dispatch", dispatch, ("auto", "sharded", "replicated"))
            check_choice("shard_by", shard_by, ("block", "page"))
            check_int("micro_batches", micro_batches, 1)
            if threshold is not None:
                check_int("threshold", threshold, 0)
            if max_prefill_rows is not None:
                check_int("max_prefill_rows", max_prefill_rows, 1)
            process = self.ranks is None or isinstance(self.ranks, ProcessRanks)
            require(transport != "collective" or process, "transport", '"peer" for virtual ranks', repr(transport))
            gpu = backend_of(self.device).on_gpu
            require(process or gpu, "group", "processes, on the CPU", "virtual ranks")
            whole = shard_by == "block" or dispatch != "replicated"
            require(whole, "dispatch", '"sharded" or "auto" where pages are sharded', repr(dispatch))
            require(transport != "peer" or gpu, "transport", '"collective" or "auto" on the CPU', repr(transport))
            return {
                **dataclasses.asdict(spec),
                "max_rows": max_rows,
                "max_seq_len": max_seq_len,
                "device": self.device.type,
                "transport": transport,
                "dispatch": dispatch,
                "shard_by": shard_by,
                "threshold": threshold,
                "micro_batches": micro_batches,
                "max_prefill_rows": max_prefill_rows,
                "arithmetic": arithmetic(self.device),
            }

        self._agree("ContextParallelIndexer", check, lambda configuration: configuration)
        self._handle = custom_op.register(self)
        self.spec = spec
        self.max_rows = max_rows
        self.max_prefill_rows = max(max_rows, max_prefill_rows or 0)
        self.max_seq_len = max_seq_len
        self.owned_heads = spec.owned_heads(self.rank, self.world)
        self.shard = Shard(self.rank, self.world, shard_by)
        listed = visible_blocks(max_seq_len, spec.block_size) if shard_by == "page" else 0
        prefills = max_prefill_rows is not None
        self._batches = [_MicroBatch(spec, max_rows, listed, prefills, self.device) for _ in range(micro_batches)]
        alone = dispatch == "replicated" or self.world == 1
        self.transport = None if alone else self._connect(transport)
        chosen = dispatch if self.transport == "peer" and shard_by == "block" else "sharded"
        self.dispatch = "replicated" if alone else chosen
        saves = dispatch == "sharded" or spec.replicas(self.world) > 1
        self._shares_prefill = not alone and (shard_by == "page" or saves)
        self._calibrates = threshold is None and self.dispatch == "auto"
        given = calibration.ALWAYS if threshold is None else threshold
        # Pages of all requests together up to which "auto" does not share a step, by the most rows that this holds for.
        self.thresholds = [(max_rows, given)] if self.dispatch == "auto" else []

    def _connect(self, transport: str) -> str:
        """Make the transport of every micro-batch; what it is called."""
        assert self.ranks is not None
        if transport == "peer" or (transport == "auto" and self._one_host()):
            try:
                self._connect_peers(self.ranks)
                return "peer"
            except UnmappedError:  # on every rank
                if transport == "peer":
                    raise
        require(isinstance(self.ranks, ProcessRanks), "transport", '"peer" for virtual ranks', "collective")
        for batch in self._batches:
            batch.collective = CollectiveTransport(self.spec, self.ranks.group, self.max_prefill_rows, self.device)  # type: ignore[attr-defined]
        return "collective"

    def _connect_peers(self, ranks: Ranks) -> None:
        from lightning_indexer.peer import PeerTransport

        waits = self.timeout or PEER_TIMEOUT, self.setup_timeout
        for batch in self._batches:
            batch.peer = PeerTransport(self.spec, ranks, self.max_prefill_rows, self.device, *waits, len(self._batches))

    def _one_host(self) -> bool:
        """Whether every rank has a GPU of this host that this process sees and that this rank's GPU reaches."""
        assert self.ranks is not None
        if not backend_of(self.device).on_gpu:
            return False
        mine = {"host": platform.node(), "gpu": gpu_name(self.device)}
        reached = {gpu_name(self.device)}
        for index in range(torch.cuda.device_count()):
            if index != self.device.index and torch.cuda.can_device_access_peer(self.device, index):
                reached.add(gpu_name(torch.device("cuda", index)))
        found = self.ranks.gather(mine, self.setup_timeout)
        all_reached = all(message["host"] == mine["host"] and message["gpu"] in reached for message in found)
        return all(message["reached"] for message in self.ranks.gather({"reached": all_reached}, self.setup_timeout))

    @property
    def setup_timeout(self) -> timedelta | None:
        """How long ranks wait for each other outside of steps: one may have kernels to compile."""
        return None if self.timeout is None else max(self.timeout, SETUP_TIMEOUT)

    def warmup(
        self,
        cache_format: str = "bf16",
        *,
        scaled: bool = False,
        query_lens: Iterable[int] = (1,),
        order: str = "score",
        page_size: int | None = None,
        prefill: bool = False,
    ) -> None:
        """Run small steps on every rank, so that later ones find connections and code ready; measure thresholds. A collective.

        Thresholds are those of the last format: an indexer that serves caches of several wants one `threshold` given.

        Measuring takes up to 256 MiB of bf16 keys for a moment, and less where less than 1 GiB is free.

        Ranks that share a GPU need it for every argument that their steps will have: a kernel that is loaded while another
        rank's waits on the same GPU would wait for that one.

        Args:
            cache_format: format of the caches to come; with queries of every dtype that it is scored with.
            scaled: the caches to come have a scale per token.
            query_lens: every query length Q to come.
            order: order to come.
            page_size: of the sparse tables to come; None if there will be none.
            prefill: chunks are to come, too.

        Raises:
            ValueError, RuntimeError: as `decode`.
        """
        check_choice("cache_format", cache_format, tuple(FORMATS))
        check_order(order)
        if page_size is not None:
            check_int("page_size", page_size, 1, self.spec.block_size)
        spec, owned, device, query_lens = self.spec, len(self.owned_heads), self.device, tuple(query_lens)
        cache = one_page(spec, cache_format, device, scaled)
        one = torch.ones(1, dtype=torch.int32, device=device)
        pages = torch.zeros(1, 1, dtype=torch.int32, device=device)

        dtypes = backend_of(device).query_dtypes(cache.format, device)

        def run(
            query_len: int, order: str, table: SparseTable | None, heads: int, requests: int, dry: bool, padding: int = 0
        ) -> None:
            for dtype in dtypes:
                q = torch.zeros(query_len + padding, heads, spec.head_dim, device=device).to(dtype)
                self._decode(q, cache, pages[:requests], one[:requests], query_len, order, table, None, None, 0, dry)

        def run_prefill(heads: int, dry: bool) -> None:
            for dtype in dtypes:
                q = torch.zeros(1, heads, spec.head_dim, device=device).to(dtype)
                ids = torch.empty(owned, 1, spec.topk, dtype=torch.int32, device=device)
                for kind in (torch.int32, torch.int64):
                    bounds = torch.tensor([0, 1], dtype=kind, device=device)
                    # The bound decides whether the context is split, which takes a kernel more. No more than a page is read.
                    step = q, cache, pages, Chunks(bounds, one, self.max_seq_len)
                    self._prefill(*step, order, ids, 0, dry)

        measures = self._calibrates and device.type == "cuda"
        for dry in (True, False) if self.transport == "peer" else (False,):
            for query_len in query_lens:
                check_int("query_len", query_len, 1)
                tables = [None] if page_size is None else [None, SparseTable.empty(spec, owned, query_len, page_size, pages)]
                for table in tables:
                    for heads in sorted({owned, spec.num_heads}):
                        run(query_len, order, table, heads, 1, dry)
                run(query_len, order, None, owned, 0, dry)
            if prefill:
                for heads in sorted({owned, spec.num_heads}):
                    run_prefill(heads, dry)
            if measures:
                run(1, "score", None, owned, 1, dry)
            if self.transport == "peer":
                most = self._batches[0].peer.most_sent
                if 0 < most < self.max_rows:  # queries of more rows travel another way
                    run(1, order, None, owned, 1, dry, padding=most)
                assert self.ranks is not None
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                self.ranks.gather({"warm": cache_format}, self.setup_timeout)
        if measures:
            self.thresholds = calibration.calibrate(self, cache_format)
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise if a rank was missing in an earlier step, as far as this is known without waiting for the GPU.

        With "peer" a step finds out on the device; `decode` asks here first. After the replay of a graph, ask once the stream
        has been waited for. Other transports raise in `decode` itself.

        Raises:
            RuntimeError: a rank did not arrive within the time-out (names it). Selections since then are void.
        """
        for batch in self._batches:
            if batch.peer is not None:
                batch.peer.raise_if_failed()

    def steps(self, micro_batch: int = 0) -> dict[str, int]:
        """How many steps shared their work with "peer", and how many of `decode` did not. Waits for the GPU."""
        peer = self._batches[micro_batch].peer
        counted = [0, 0] if peer is None else peer.steps.tolist()[:2]
        return dict(zip(("sharded", "replicated"), counted, strict=True))

    @torch.no_grad()
    def plan_step(
        self,
        seq_lens: torch.Tensor,
        *,
        query_len: int = 1,
        order: str = "score",
        max_seq_len: int | None = None,
        cache_format: str = "bf16",
        block_table: torch.Tensor | None = None,
        out: StepPlan | None = None,
        micro_batch: int | None = None,
    ) -> StepPlan:
        """What `decode` derives from the lengths, for all layers of a step: see `lightning_indexer.plan_step`.

        Optional: without it "peer", and any transport on a GPU with `shard_by="page"`, makes the plan in every call, and
        others do without. It holds the choice of "auto", too.

        Args:
            seq_lens: `[R]` int32.
            query_len: of the `decode` calls.
            order: of the `decode` calls.
            max_seq_len: B times the columns of their block table, if that is less than the indexer's `max_seq_len`.
            cache_format: format of their cache.
            block_table: `[R, max_blocks]` int32, theirs, and a bound as `max_seq_len` is one; needed with
                `shard_by="page"` only. Given or not, it must be written before this call and not change before the step's
                last `decode`.
            out: an earlier plan, made anew in place.
            micro_batch: make it in this one's memory, where a graph finds it again, in the place of `out`. It lasts until the
                memory's next plan, which a `decode` without a plan makes.

        Raises:
            ValueError: an argument's shape, dtype or device.
        """
        check_tensor("seq_lens", seq_lens, ("R",), INT32, self.device, unit_stride=False)
        check_int("query_len", query_len, 1)
        check_order(order)
        if max_seq_len is not None:
            check_int("max_seq_len", max_seq_len, 0)
        check_choice("cache_format", cache_format, tuple(FORMATS))
        longest = self.max_seq_len if max_seq_len is None else min(max_seq_len, self.max_seq_len)
        if block_table is not None:
            longest = min(longest, check_table(block_table, seq_lens, self.spec, None))
        threshold = self._threshold(len(seq_lens) * query_len)
        packed = is_packed(FORMATS[cache_format])
        if micro_batch is not None:
            check_int("micro_batch", micro_batch, 0, len(self._batches) - 1)
            require(len(seq_lens) <= self.max_rows, "seq_lens", f"at most max_rows ({self.max_rows}) requests", len(seq_lens))
            if backend_of(self.device).on_gpu:
                out = self._plan_memory(self._batches[micro_batch], len(seq_lens), longest, order, threshold, packed)
        return make_plan(seq_lens, self.spec, longest, order, self._worked_shard, threshold, packed, out, block_table)

    def run_plan(
        self,
        q: torch.Tensor,
        cache: IndexCache,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        plan: StepPlan,
    ) -> None:
        """One step with "peer" as the plan has it, whatever the thresholds; nothing is checked. For measurements."""
        batch = self._batches[0]
        step = (cache, block_table, seq_lens, self.spec, 1, plan.longest, "score", None, out, plan, batch.workspace, False)
        batch.peer.decode(q, *step)

    def _threshold(self, rows: int) -> int | None:
        """Pages up to which a step of `rows` rows is not shared; None if there is no choice."""
        fitting = [pages for most, pages in self.thresholds if rows <= most] or [pages for _, pages in self.thresholds[-1:]]
        return fitting[0] if fitting else None

    @property
    def _worked_shard(self) -> Shard:
        return Shard() if self.dispatch == "replicated" else self.shard

    @torch.no_grad()
    def decode(
        self,
        q: torch.Tensor,
        cache: IndexCache | torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        query_len: int = 1,
        order: str = "score",
        sparse_table: SparseTable | None = None,
        out: torch.Tensor | None = None,
        plan: StepPlan | None = None,
        micro_batch: int = 0,
    ) -> torch.Tensor:
        """The K blocks of each row for the heads that this rank owns: the ids of `lightning_indexer.decode`, bit for bit.

        Args:
            q: `[T, h, D]`, the owned heads, gathered here; or `[T, H, D]`, all heads, which skips the gather. Alike on
                all ranks. `T >= R*Q`; rows past `R*Q` are padding and get -1.
            cache: this rank's replica, or its own pages, an `IndexCache` or a `[pages, B, D]` tensor.
            block_table: `[R, max_blocks]` int32, this rank's pages; with `shard_by="page"` those of the whole group.
            seq_lens: `[R]` int32, the same on all ranks; at most `max_seq_len` and what the table can hold.
            query_len: Q, rows per request; on a GPU at most 16.
            order: "score" (the total order) or "block" (ascending ids).
            sparse_table: filled for the owned heads as well.
            out: `[h, T, K]` int32, last dim contiguous.
            plan: `plan_step` of the same lengths, shared by all layers of a step, and made when the table was already
                written; by page of this very table.
            micro_batch: whose memory to use; steps that may overlap need different ones, the same on every rank.

        Returns:
            `[h, T, K]` int32 logical block ids, left-packed, -1 padded.

        Raises:
            ValueError: on CPU ranks all of them, before anything but this news is exchanged: wrong arguments on any
                rank, or calls that differ. On other devices, and with "replicated", which exchanges nothing, the rank at
                fault alone; the time-out or the group's watchdog ends the others.
            RuntimeError: a rank did not arrive within the time-out, or died; with "peer" in the next call.
        """
        if torch.compiler.is_compiling():  # one operator, which plans for itself
            owned, step = len(self.owned_heads), (q, cache, block_table, seq_lens, query_len, order, sparse_table, out)
            return custom_op.traced_decode(self._handle, self.spec, owned, *step, micro_batch)
        return self._decode(q, cache, block_table, seq_lens, query_len, order, sparse_table, out, plan, micro_batch, False)

    def _decode(
        self,
        q: torch.Tensor,
        cache: IndexCache | torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_len: int,
        order: str,
        sparse_table: SparseTable | None,
        out: torch.Tensor | None,
        plan: StepPlan | None,
        micro_batch: int,
        dry: bool,
    ) -> torch.Tensor:
        """`decode`; a dry step with "peer" loads the kernels and neither sends nor waits."""

        def check() -> _Step:
            check_int("micro_batch", micro_batch, 0, len(self._batches) - 1)
            return self._check(q, cache, block_table, seq_lens, query_len, order, sparse_table, out, plan)

        def outline(step: _Step) -> Message:
            return {**self._outline(q, step), "query_len": query_len}

        self.raise_if_failed()
        spec, owned, backend = self.spec, self.owned_heads, backend_of(self.device)
        talks = self.transport == "collective" and self.device.type == "cpu"
        # A host round costs little beside a step on the CPU, and turns every fault of one rank into an error on all.
        step = self._agree("decode", check, outline) if talks else check()
        batch = self._batches[micro_batch]
        alone = self.transport is None
        if plan is None and (batch.peer is not None or (backend.on_gpu and self._worked_shard.by == "page")):
            plan = self._plan(batch, step, block_table, query_len, order)
        rest = (step.cache, block_table, seq_lens, spec, query_len, step.longest)
        if alone or (batch.peer is not None and not len(seq_lens)):
            mine = q if q.shape[1] == len(owned) else q[:, owned.start : owned.stop]
            backend.decode(mine, *rest, order, sparse_table, step.out, plan if alone else None, batch.workspace)
        elif batch.collective is not None:
            heads = q if q.shape[1] == spec.num_heads else batch.collective.gather_queries(q)
            keys = batch.collective.candidates(q.shape[0])
            backend.decode_keys(heads, *rest, self.shard, order, keys, plan, batch.workspace)
            keys = batch.collective.exchange_keys(keys)
            if batch.lengths is not None:
                # As the scorer took them, in memory that a graph finds again.
                seq_lens = torch.clamp(seq_lens, max=step.longest, out=batch.lengths[: len(seq_lens)])
            backend.merge_keys(keys, seq_lens, spec, query_len, order, sparse_table, step.out)
        elif q.shape[0]:
            batch.peer.decode(q, *rest, order, sparse_table, step.out, plan, batch.workspace, dry)
        return step.out

    @torch.no_grad()
    def prefill(
        self,
        q: torch.Tensor,
        cache: IndexCache | torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        order: str = "score",
        out: torch.Tensor | None = None,
        micro_batch: int = 0,
    ) -> torch.Tensor:
        """The ids of `lightning_indexer.prefill` for the owned heads, with every rank scoring its blocks.

        `max_prefill_rows` rows at a time are scored and exchanged, so memory does not grow with the chunk but for the ids;
        thousands fill a GPU. `warmup` has an argument for it. Nothing waits for the GPU.

        Where each rank holds the whole cache, scoring the own heads takes as many operations as that of all heads over 1/P
        of the blocks, and no exchange. So "auto" shares chunks only if several ranks own the same heads (P > H), short
        ones too, and "replicated" never.

        Args:
            q: `[T, h, D]` or `[T, H, D]`, `T >= cu_seqlens_q[R]`; any T.
            cache, block_table, order: as in `decode`.
            cu_seqlens_q: `[R+1]` int32 or int64, first row of each request, then the number of rows; starts at 0.
            seq_lens: `[R]` int32, cached prefix plus chunk of each request.
            out: `[h, T, K]` int32.
            micro_batch: as in `decode`.

        Returns:
            `[h, T, K]` int32 logical block ids, left-packed, -1 padded; rows outside every chunk are -1.

        Raises:
            ValueError, RuntimeError: as `decode`.
        """
        spec, owned, backend = self.spec, self.owned_heads, backend_of(self.device)

        def check() -> _Step:
            checked = as_cache(cache, spec)
            require(checked.device == self.device, "cache", f"device {self.device}", f"device {checked.device}")
            check_tensor("q", q, ("T", "heads", spec.head_dim), checked.format.query_dtypes, self.device)
            counts = f"{len(owned)} owned or all {spec.num_heads} heads"
            require(q.shape[1] in (len(owned), spec.num_heads), "q", counts, f"{q.shape[1]} heads")
            backend.check_operands(q, checked)
            check_tensor("seq_lens", seq_lens, ("R",), INT32, self.device, unit_stride=False)
            bounds_shape, dtypes = (len(seq_lens) + 1,), (torch.int32, torch.int64)
            check_tensor("cu_seqlens_q", cu_seqlens_q, bounds_shape, dtypes, self.device, unit_stride=False)
            longest = min(check_table(block_table, seq_lens, spec, None), self.max_seq_len)
            check_lengths(seq_lens, self.max_seq_len, "max_seq_len")
            if self.device.type == "cpu":
                check_chunks(cu_seqlens_q.tolist(), seq_lens.tolist(), q.shape[0], longest)
            check_order(order)
            check_int("micro_batch", micro_batch, 0, len(self._batches) - 1)
            return _Step(checked, seq_lens, longest, check_ids_out(out, len(owned), q.shape[0], spec, self.device))

        def outline(step: _Step) -> Message:
            return {**self._outline(q, step), "checksum of cu_seqlens_q": _checksum(cu_seqlens_q)}

        self.raise_if_failed()
        talks = self._shares_prefill and self.device.type == "cpu" and self.transport == "collective"
        step = self._agree("prefill", check, outline) if talks else check()
        chunks = Chunks(cu_seqlens_q, seq_lens, step.longest)
        self._prefill(q, step.cache, block_table, chunks, order, step.out, micro_batch, False)
        return step.out

    def _prefill(
        self,
        q: torch.Tensor,
        cache: IndexCache,
        block_table: torch.Tensor,
        chunks: Chunks,
        order: str,
        ids: torch.Tensor,
        micro_batch: int,
        dry: bool,
    ) -> None:
        """`prefill` of checked arguments; dry as in `_decode`."""
        spec, owned, backend, batch = self.spec, self.owned_heads, backend_of(self.device), self._batches[micro_batch]
        if not self._shares_prefill:
            mine = q if q.shape[1] == len(owned) else q[:, owned.start : owned.stop]
            step = cache, block_table, chunks.bounds, chunks.seq_lens, spec, chunks.longest, order, ids
            backend.prefill(mine, *step, None if batch.scratch is None else batch.scratch.workspace)
            return
        whole = len(q) <= self.max_prefill_rows and chunks.bounds.dtype == torch.int32
        for first in range(0, len(q), self.max_prefill_rows):
            some = slice(first, min(first + self.max_prefill_rows, len(q)))
            part = chunks if whole else chunks.part(first, some.stop - first)
            if batch.peer is not None:
                batch.peer.prefill(q[some], cache, block_table, part, self.shard, batch.scratch, order, ids[:, some], dry)
            else:
                assert batch.collective is not None
                heads = q[some] if q.shape[1] == spec.num_heads else batch.collective.gather_queries(q[some])
                keys = batch.collective.candidates(len(heads))
                backend.prefill_keys(heads, cache, block_table, part, spec, self.shard, keys, batch.scratch)
                keys, seen = batch.collective.exchange_keys(keys), batch.collective.one_each(len(heads))
                backend.merge_keys(keys, seen, spec, 1, order, None, ids[:, some])

    def _plan(self, batch: _MicroBatch, step: _Step, block_table: torch.Tensor, query_len: int, order: str) -> StepPlan:
        """A plan for one call, in memory that a graph finds again."""
        requests, packed = step.seq_lens.shape[0], is_packed(step.cache.format)
        threshold = self._threshold(requests * query_len)
        plan = self._plan_memory(batch, requests, step.longest, order, threshold, packed)
        lengths = step.seq_lens, self.spec, step.longest
        return make_plan(*lengths, order, self._worked_shard, threshold, packed, plan, block_table)

    def _plan_memory(
        self, batch: _MicroBatch, requests: int, longest: int, order: str, threshold: int | None, packed: bool
    ) -> StepPlan:
        """A plan yet to be made, in a micro-batch's memory."""
        shard = self._worked_shard
        blocks = visible_blocks(longest, self.spec.block_size)
        shares = batch.shares[: decode_programs(device_facts(self.device), packed, requests * blocks)]
        owned = held = None
        if shard.by == "page":
            owned = batch.owned[: 2 * requests * blocks].view(2, requests, blocks)
            held = batch.held[:requests]
        facts = shard, self.spec.block_size, unscored_blocks(self.spec, order), longest, threshold
        return StepPlan(shares, batch.before[: requests + 1], *facts, owned, held)

    def _agree(self, subject: str, check: Callable[[], Checked], outline: Callable[[Checked], Message]) -> Checked:
        """Check this rank's arguments, then tell the others what they are, or that they are wrong."""
        if self.world == 1 or self.ranks is None:
            return check()
        try:
            checked = check()
            message = {"error": None, "call": subject, **outline(checked)}
        except Exception as error:
            self.ranks.gather({"error": str(error)[:MAX_ERROR_CHARACTERS]}, self.timeout)
            raise
        require_agreement(subject, self.ranks.gather(message, self.timeout))
        return checked

    def _check(
        self,
        q: torch.Tensor,
        cache: IndexCache | torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_len: int,
        order: str,
        sparse_table: SparseTable | None,
        out: torch.Tensor | None,
        plan: StepPlan | None,
    ) -> _Step:
        spec, owned = self.spec, len(self.owned_heads)
        checked = as_cache(cache, spec)
        require(checked.device == self.device, "cache", f"device {self.device}", f"device {checked.device}")
        check_tensor("q", q, ("T", "heads", spec.head_dim), checked.format.query_dtypes, self.device)
        rows, heads, _ = q.shape
        backend_of(self.device).check_operands(q, checked)
        counts = f"{owned} owned or all {spec.num_heads} heads"
        require(heads in (owned, spec.num_heads), "q", counts, f"{heads} heads")
        require(rows <= self.max_rows, "q", f"at most max_rows ({self.max_rows}) rows", f"{rows} rows")
        check_rows("q", rows, seq_lens, spec, query_len, self.device)
        longest = min(check_table(block_table, seq_lens, spec, None), self.max_seq_len)
        check_lengths(seq_lens, self.max_seq_len, "max_seq_len")
        check_order(order)
        check_sparse_table(sparse_table, spec, seq_lens, owned, rows, self.device)
        if plan is not None:
            threshold = self._threshold(len(seq_lens) * query_len)
            check_plan(plan, spec, self._worked_shard, len(seq_lens), order, longest, threshold)
        if backend_of(self.device).on_gpu:
            require(query_len <= MAX_QUERY_LEN, "query_len", f"at most {MAX_QUERY_LEN} on a GPU", query_len)
        return _Step(checked, seq_lens, longest, check_ids_out(out, owned, rows, spec, self.device))

    def _outline(self, q: torch.Tensor, step: _Step) -> dict[str, Any]:
        """What must be the same on every rank for a step, of decode or prefill, to be one step."""
        return {
            "rows of q": q.shape[0],
            "heads of q": "owned" if q.shape[1] == len(self.owned_heads) else "all",
            "dtype of q": str(q.dtype).removeprefix("torch."),
            "requests": step.seq_lens.shape[0],
            "checksum of seq_lens": _checksum(step.seq_lens),
            "cache format": step.cache.format.name,
        }


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(bytes(tensor.contiguous().view(torch.uint8).tolist()))
