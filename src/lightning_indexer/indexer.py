# SPDX-License-Identifier: Apache-2.0
"""The context-parallel indexer: each rank scores all heads over its 1/P of the blocks, then merges the heads it owns.

    q (owned heads) -> gather queries -> score shard -> select shard top-K keys -> exchange keys -> merge owned heads -> ids

Exactness. A score does not depend on the shard it was computed in, the key order is total, and forced blocks are forced by
their logical id when keys are made. For each head the union of the shards' first K keys therefore contains the first K
of all blocks, and the merged ids are those of `lightning_indexer.decode` on the whole context, order included.
"""

import dataclasses
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_indexer.agreement import MAX_ERROR_CHARACTERS, Message, gather_messages, require_agreement
from lightning_indexer.arguments import (
    check_ids_out,
    check_lengths,
    check_order,
    check_rows,
    check_sparse_table,
    check_table,
)
from lightning_indexer.cache import FORMATS, IndexCache, as_cache
from lightning_indexer.checks import check_choice, check_int, check_tensor, require
from lightning_indexer.collective import CollectiveTransport
from lightning_indexer.dots import arithmetic
from lightning_indexer.ops import backend_of, check_device
from lightning_indexer.spec import IndexerSpec, Shard, check_spec
from lightning_indexer.table import SparseTable

Checked = TypeVar("Checked")


@dataclasses.dataclass(frozen=True)
class _Step:
    """Checked arguments of one decode step."""

    cache: IndexCache
    seq_lens: torch.Tensor
    longest: int
    out: torch.Tensor


class ContextParallelIndexer:
    """Decode-time block selection over the ranks of a group. One instance serves every layer.

    Every rank holds the whole index-K cache, owns some index heads (`IndexerSpec.owned_heads`) and gets their ids. All
    ranks must call `decode` alike: same rows, requests, lengths and query length. Page numbers may differ between ranks.

    Args:
        spec: geometry and rules; `spec.num_heads` counts the heads of the whole group.
        group: the ranks; None is the default process group, or this process alone if there is none.
        max_rows: most rows T of a step.
        max_seq_len: longest request, in tokens.
        device: where queries, cache and tables lie; "cpu", or a device that the group's backend serves.
        transport: "collective" (torch.distributed) or "auto", which takes it.
        dispatch: "sharded" scores 1/P of the blocks and exchanges keys; "replicated" scores the owned heads over all
            blocks and exchanges nothing; "auto" takes "sharded". The choice is fixed for the instance.
        timeout: seconds to wait for a missing rank at construction and in each step; None takes the group's own.

    Raises:
        ValueError: on every rank: a rank's arguments are wrong, or the ranks are configured differently (names the
            field, ranks and values).
        RuntimeError: on every rank that arrived: a rank did not within the time-out (names it).
    """

    def __init__(
        self,
        spec: IndexerSpec,
        group: dist.ProcessGroup | None = None,
        *,
        max_rows: int,
        max_seq_len: int,
        device: torch.device | str,
        transport: str = "auto",
        dispatch: str = "auto",
        timeout: float | None = None,
    ) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        require(self.rank >= 0, "group", "a group that this process is in", "one that it is not in")
        self._timeout = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else None

        def check() -> Message:
            check_spec(spec).owned_heads(self.rank, self.world)
            number = timeout is None or (isinstance(timeout, (int, float)) and timeout > 0)
            require(number, "timeout", "a number of seconds > 0 or None", repr(timeout))
            self.device = check_device(device)
            check_int("max_rows", max_rows, 1)
            check_int("max_seq_len", max_seq_len, 1)
            check_choice("transport", transport, ("auto", "collective"))
            check_choice("dispatch", dispatch, ("auto", "sharded", "replicated"))
            return {
                **dataclasses.asdict(spec),
                "max_rows": max_rows,
                "max_seq_len": max_seq_len,
                "device": self.device.type,
                "transport": transport,
                "dispatch": dispatch,
                "arithmetic": arithmetic(self.device),
            }

        self._agree("ContextParallelIndexer", check, lambda configuration: configuration)
        self.spec = spec
        self.max_rows = max_rows
        self.max_seq_len = max_seq_len
        self.owned_heads = spec.owned_heads(self.rank, self.world)
        self.shard = Shard(self.rank, self.world)
        self.dispatch = "replicated" if dispatch == "replicated" or self.world == 1 else "sharded"
        self._transport = None if group is None else CollectiveTransport(spec, group)

    def warmup(self, cache_format: str = "bf16") -> None:
        """Run one small step on every rank, so that the first real one finds connections and code ready. A collective.

        Args:
            cache_format: format of the caches to come.

        Raises:
            ValueError, RuntimeError: as `decode`.
        """
        check_choice("cache_format", cache_format, tuple(FORMATS))
        cache = IndexCache.empty(1, self.spec, cache_format, self.device)
        cache.data.zero_()
        q = torch.zeros(1, len(self.owned_heads), self.spec.head_dim, dtype=cache.format.query_dtypes[0], device=self.device)
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        self.decode(q, cache, torch.zeros(1, 1, dtype=torch.int32, device=self.device), one)

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
    ) -> torch.Tensor:
        """The K blocks of each row for the heads that this rank owns: the ids of `lightning_indexer.decode`, bit for bit.

        Args:
            q: `[T, h, D]`, the owned heads, gathered here; or `[T, H, D]`, all heads, which skips the gather. Alike on
                all ranks. `T >= R*Q`; rows past `R*Q` are padding and get -1.
            cache: this rank's replica, an `IndexCache` or a `[pages, B, D]` tensor.
            block_table: `[R, max_blocks]` int32, this rank's pages.
            seq_lens: `[R]` int32, the same on all ranks; at most `max_seq_len` and what the table can hold.
            query_len: Q, rows per request.
            order: "score" (the total order) or "block" (ascending ids).
            sparse_table: filled for the owned heads as well.
            out: `[h, T, K]` int32, last dim contiguous.

        Returns:
            `[h, T, K]` int32 logical block ids, left-packed, -1 padded.

        Raises:
            ValueError: on CPU ranks all of them, before anything but this news is exchanged: wrong arguments on any
                rank, or calls that differ. On other devices, and with "replicated", which exchanges nothing, the rank at
                fault alone; the group's watchdog ends the others.
            RuntimeError: a rank did not arrive within the time-out, or died.
        """

        def check() -> _Step:
            return self._check(q, cache, block_table, seq_lens, query_len, order, sparse_table, out)

        spec, owned, backend = self.spec, self.owned_heads, backend_of(self.device)
        if self.dispatch == "replicated" or self._transport is None:
            step = check()
            mine = q if q.shape[1] == len(owned) else q[:, owned.start : owned.stop]
            arguments = (mine, step.cache, block_table, seq_lens, spec, query_len, step.longest)
            backend.decode(*arguments, order, sparse_table, step.out, None, None)
        else:
            step = self._agree("decode", check, lambda step: self._outline(q, step, query_len)) if self._talks else check()
            heads = q if q.shape[1] == spec.num_heads else self._transport.gather_queries(q)
            arguments = (heads, step.cache, block_table, seq_lens, spec, query_len, step.longest)
            keys = self._transport.exchange_keys(backend.decode_keys(*arguments, self.shard))
            if self.device.type != "cpu":
                seq_lens = seq_lens.clamp(max=step.longest)  # as the scorer took them
            backend.merge_keys(keys, seq_lens, spec, query_len, order, sparse_table, step.out)
        return step.out

    @property
    def _talks(self) -> bool:
        """Whether a step begins with a round of messages: on the CPU, where a host round costs little beside the step."""
        return self.device.type == "cpu"

    def _agree(self, subject: str, check: Callable[[], Checked], outline: Callable[[Checked], Message]) -> Checked:
        """Check this rank's arguments, then tell the others what they are, or that they are wrong."""
        if self.world == 1 or self.group is None:
            return check()
        try:
            checked = check()
            message = {"error": None, "call": subject, **outline(checked)}
        except Exception as error:
            gather_messages({"error": str(error)[:MAX_ERROR_CHARACTERS]}, self.group, self._timeout)
            raise
        require_agreement(subject, gather_messages(message, self.group, self._timeout))
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
        return _Step(checked, seq_lens, longest, check_ids_out(out, owned, rows, spec, self.device))

    def _outline(self, q: torch.Tensor, step: _Step, query_len: int) -> dict[str, Any]:
        """What must be the same on every rank for a step to be one step."""
        return {
            "rows of q": q.shape[0],
            "heads of q": "owned" if q.shape[1] == len(self.owned_heads) else "all",
            "dtype of q": str(q.dtype).removeprefix("torch."),
            "query_len": query_len,
            "requests": step.seq_lens.shape[0],
            "checksum of seq_lens": zlib.crc32(bytes(step.seq_lens.contiguous().view(torch.uint8).tolist())),
            "cache format": step.cache.format.name,
        }
