# SPDX-License-Identifier: Apache-2.0
"""What all sparse layers of an engine share: one context-parallel indexer, its scratch, a plan per step. Needs no vLLM."""

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import lightning_indexer as li
from lightning_indexer import calibration
from lightning_indexer.cache import IndexCache
from lightning_indexer.ops import backend_of
from lightning_indexer.ranks import Ranks
from lightning_indexer.traffic import exchange_bytes
from lightning_indexer.vllm.capture import Recorder
from lightning_indexer.vllm.ops import PAGE_SIZE
from lightning_indexer.vllm.options import Options
from lightning_indexer.workspace import StepPlan, Workspace


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine's steps."""

    rows: int  # decode rows of a step
    tokens: int  # of a request
    query_len: int  # rows per request: 1 + draft tokens
    micro_batches: int  # steps in flight at once
    prefill_rows: int | None = None  # that the ranks share at once


@dataclass(frozen=True)
class Kind:
    """What layers must agree on to share an `EngineIndexer`, beside the ranks."""

    spec: li.IndexerSpec
    limits: Limits
    device: torch.device
    format: str  # of the index cache
    query_dtype: torch.dtype
    order: str
    context_parallel: bool
    tables: bool  # decode calls may ask for a sparse table
    options: Options


@dataclass(frozen=True)
class _Made:
    """A plan, the step's metadata that it was made from, and the layer that made it."""

    step: Any
    layer: str
    plan: StepPlan


class EngineIndexer:
    """Selects blocks for every layer of one kind on this rank. Making it is a collective of the group.

    Args:
        kind: geometry, bounds and options.
        group: the tensor-parallel ranks; a recording needs a process group.

    Raises:
        ValueError: on every rank: something does not fit, or the ranks are configured differently.
    """

    def __init__(self, kind: Kind, group: dist.ProcessGroup | Ranks) -> None:
        self.kind = kind
        limits, options = kind.limits, kind.options
        with _plain_defaults():
            self.indexer = li.ContextParallelIndexer(
                kind.spec,
                group,
                max_rows=limits.rows,
                max_seq_len=limits.tokens,
                device=kind.device,
                transport=options.transport,
                dispatch=options.dispatch if kind.context_parallel else "replicated",
                shard_by=options.shard_by,
                timeout=options.timeout,
                threshold=options.threshold,
                micro_batches=limits.micro_batches,
                max_prefill_rows=limits.prefill_rows,
            )
            # Taken now, so that the engine's measurement of free memory counts it.
            self._workspaces: list[Workspace | None] = [None] * limits.micro_batches
            self.by_page = self.indexer.shard.by == "page"
            if backend_of(kind.device).on_gpu and not self.by_page:
                size: dict[str, Any] = {"max_requests": 1, "max_columns": 1, "device": kind.device}
                self._workspaces = [Workspace(kind.spec, **size, prefill=True) for _ in self._workspaces]
            self._plans: dict[tuple[int, ...], StepPlan] = {}
            self._made: dict[int, _Made] = {}
            self._warm_up()
            self._steps_before = self._steps()
            self.recorder = None
            if options.capture is not None:
                assert isinstance(group, dist.ProcessGroup), "other ranks hold no tensors together"
                self.recorder = Recorder(kind.spec, kind.order, group, options)

    def _warm_up(self) -> None:
        kind, owned = self.kind, len(self.indexer.owned_heads)
        query_lens = range(1, kind.limits.query_len + 1)
        page_size = PAGE_SIZE if kind.tables and owned == 1 else None
        self.indexer.warmup(kind.format, query_lens=query_lens, order=kind.order, page_size=page_size, prefill=self.by_page)
        if self.by_page:
            return
        cache = IndexCache.empty(1, kind.spec, kind.format, kind.device)
        cache.data.view(torch.uint8).zero_()
        one = torch.ones(1, dtype=torch.int32, device=kind.device)
        pages = torch.zeros(1, 64, dtype=torch.int32, device=kind.device)
        bounds = torch.tensor([0, 1], dtype=torch.int32, device=kind.device)

        q = torch.zeros(1, owned, kind.spec.head_dim, device=kind.device).to(kind.query_dtype)
        li.prefill(q, cache, pages, bounds, one, spec=kind.spec, order=kind.order, workspace=self._workspaces[0])

    def select(
        self,
        layer: str,
        step: Any,
        q: torch.Tensor,
        cache: IndexCache,
        out: torch.Tensor | None,
        table: li.SparseTable | None = None,
        micro_batch: int = 0,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The blocks of one layer's rows: decode rows first, then prefill rows, each in one call.

        Args:
            layer: the layer's name.
            step: vLLM's indexer metadata of the step (`interface.FIELDS`).
            q: `[>= tokens, h, D]`, this rank's heads.
            cache: the layer's index cache.
            out: `[h, >= tokens, K]` int32 with a contiguous last dim; None makes new memory.
            table: filled for the decode rows.
            micro_batch: which of the steps in flight this is.

        Returns:
            ids of the decode rows and of the prefill rows, `[h, rows, K]`, parts of `out` if there is one; None without rows.
        """
        kind, first, last = self.kind, step.num_decode_tokens, step.num_actual_tokens
        decoded = prefilled = None
        if step.num_decodes > 0:
            decoded = self.indexer.decode(
                q[:first],
                cache,
                step.decode.block_table,
                step.decode.seq_lens,
                query_len=step.decode.decode_query_len,
                order=kind.order,
                sparse_table=table,
                out=None if out is None else out[:, :first],
                plan=self._plan(layer, step, micro_batch),
                micro_batch=micro_batch,
            )
            if self.recorder is not None:
                self.recorder.record(layer, q[:first], cache, step.decode, decoded)
        if step.num_prefills > 0:
            chunk = step.prefill
            rows = q[first:last], cache, chunk.block_table, chunk.cu_seqlens_q, chunk.seq_lens
            there = None if out is None else out[:, first:last]
            if self.by_page:
                prefilled = self.indexer.prefill(*rows, order=kind.order, out=there, micro_batch=micro_batch)
            else:
                prefilled = li.prefill(
                    *rows,
                    spec=kind.spec,
                    max_query_len=chunk.max_query_len,
                    max_seq_len=min(chunk.max_seq_len, chunk.block_table.shape[1] * kind.spec.block_size),
                    order=kind.order,
                    out=there,
                    workspace=self._workspaces[micro_batch],
                )
        return decoded, prefilled

    def _plan(self, layer: str, step: Any, micro_batch: int) -> StepPlan | None:
        """The step's plan, made by the first layer that meets its metadata, in memory that a captured graph finds again.

        The same metadata may serve several passes: a warm-up and then a capture, or the draft tokens of a speculative step,
        whose lengths are counted up in place. Each begins with the same layer, which makes the plan anew.

        By page a plan lists the step's pages, so one memory serves batches of all sizes.
        """
        decode = step.decode
        made = self._made.get(micro_batch)
        if made is not None and made.step is decode and made.layer != layer:
            return made.plan
        requests, columns = decode.block_table.shape
        size = (micro_batch, requests, columns, decode.decode_query_len)
        plan = self.indexer.plan_step(
            decode.seq_lens,
            query_len=decode.decode_query_len,
            order=self.kind.order,
            max_seq_len=columns * self.kind.spec.block_size,
            cache_format=self.kind.format,
            block_table=decode.block_table if self.by_page else None,
            out=None if self.by_page else self._plans.get(size),
            micro_batch=micro_batch if self.by_page else None,
        )
        if not self.by_page:
            self._plans[size] = plan
        self._made[micro_batch] = _Made(decode, layer, plan)
        return plan

    def describe(self) -> str:
        """What runs, in one line."""
        kind, indexer = self.kind, self.indexer
        spec, world = kind.spec, indexer.world
        cache = IndexCache.empty(1, spec, kind.format, "meta")
        if indexer.dispatch == "replicated":
            ranks = f"{len(indexer.owned_heads)} of {spec.num_heads} heads on a rank, each over the whole context"
        else:
            share = f"{cache.token_bytes / world:g} B of index keys a token of context, layer and step"
            received = exchange_bytes(spec, world, torch.empty(0, dtype=kind.query_dtype).element_size())
            ranks = (
                f"{spec.num_heads} heads over {world} ranks, transport {indexer.transport}, dispatch {indexer.dispatch}"
                f"{told_thresholds(indexer.thresholds)}; a rank that shares reads {share} (alone {cache.token_bytes} B) and"
                f" receives {received:,} B a row"
            )
        held = f" sharded by page, {cache.token_bytes / world:g} B a token on a rank" if self.by_page else ""
        form = f"index cache {kind.format}{held}, queries {str(kind.query_dtype).removeprefix('torch.')}"
        return f"lightning-indexer {li.__version__}: {ranks}; {form}, top {spec.topk}, ids by {kind.order}"

    def statistics(self) -> dict[str, Any]:
        """What runs, and how many layer calls since the warm-up shared their work; waits for the GPU."""
        indexer = self.indexer
        return {
            "rank": indexer.rank,
            "ranks": indexer.world,
            "transport": indexer.transport,
            "dispatch": indexer.dispatch,
            "shard_by": indexer.shard.by,
            "thresholds": indexer.thresholds,
            "format": self.kind.format,
            "steps": {name: count - self._steps_before[name] for name, count in self._steps().items()},
        }

    def _steps(self) -> dict[str, int]:
        """Layer calls so far, of all micro-batches, by whether they shared their work."""
        counted = [self.indexer.steps(number) for number in range(self.kind.limits.micro_batches)]
        return {name: sum(steps[name] for steps in counted) for name in ("sharded", "replicated")}


_shared: "weakref.WeakValueDictionary[Hashable, EngineIndexer]" = weakref.WeakValueDictionary()


def shared_indexer(kind: Kind, group: dist.ProcessGroup) -> tuple[EngineIndexer, bool]:
    """The indexer of all layers of a kind, which lives as long as one of them does; and whether it has just been made."""
    found = _shared.get((kind, group))
    if found is not None:
        return found, False
    found = _shared[kind, group] = EngineIndexer(kind, group)
    return found, True


def live_indexers() -> list[EngineIndexer]:
    """The indexers of this process."""
    return list(_shared.values())


@contextmanager
def _plain_defaults() -> Iterator[None]:
    """torch's own default device and dtype: engines build their models under others."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def told_thresholds(thresholds: list[tuple[int, int]]) -> str:
    """From how many pages of context on a step is shared, by its rows; nothing where there is no choice."""
    words = {calibration.ALWAYS: "always", calibration.NEVER: "never"}
    told = ", ".join(f"{words.get(pages, f'above {pages:,} pages')} up to {rows} rows" for rows, pages in thresholds)
    return f" (shared {told})" if told else ""
