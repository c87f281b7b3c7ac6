# SPDX-License-Identifier: Apache-2.0
"""Memory of the GPU decode that outlives a call: scratch, and the step plan that all layers of a step share."""

from dataclasses import dataclass

import torch

from lightning_indexer.checks import check_int, require
from lightning_indexer.policy import device_facts, most_programs
from lightning_indexer.spec import IndexerSpec, Shard

MAX_COLUMNS = 64  # query columns of a request (rows x heads) that share one pass over its pages
SHARE_FIELDS = 6  # of a program in a step plan
PREFILL_KEYS = 6 << 20  # 48 MiB: the most candidates that a prefill call leaves in scratch


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def keys_kept(topk: int) -> int:
    """Keys that a program keeps per query column: K up to a power of two, at least the two that a sort takes."""
    return max(2, power_of_two(topk))


@dataclass(frozen=True)
class DecodeTiling:
    """How the query columns of a request (`query_len * heads`) are cut, and how many candidates each keeps."""

    columns: int  # per tile, a power of two
    tiles: int
    keep: int  # K up to a power of two

    @classmethod
    def of(cls, spec: IndexerSpec, query_len: int, heads: int) -> "DecodeTiling":
        """Tiles of at most 64 columns, fewer where K is large: candidates of a tile are held in registers."""
        keep = keys_kept(spec.topk)
        widest = MAX_COLUMNS * 128 // max(128, spec.block_size)  # products of a page and a tile are held in registers
        columns = min(power_of_two(query_len * heads), max(16, 1024 // keep), widest)
        return cls(columns, -(-query_len * heads // columns), keep)


class Workspace:
    """Scratch of calls on one GPU: with it and `out` a call allocates nothing.

    Calls that may overlap (other streams, other micro-batches) need one each. A call needs nothing that another left in it.

    Args:
        spec: geometry; K and B matter here.
        max_requests: most requests R of a call.
        max_columns: most query rows times heads of one request, `query_len * H`.
        device: the GPU.
        prefill: have the 48 MiB that any prefill call can use. With less a call splits the context less, and takes longer
            where its rows do not fill the GPU.

    Raises:
        ValueError: sizes below 1, or a device that the kernels do not run on.
    """

    def __init__(
        self, spec: IndexerSpec, *, max_requests: int, max_columns: int, device: torch.device | str, prefill: bool = False
    ) -> None:
        check_int("max_requests", max_requests, 1)
        check_int("max_columns", max_columns, 1)
        self.device = torch.empty(0, device=device).device
        self.programs = most_programs(device_facts(self.device), packed=True)
        size = max(self._keys(spec, max_requests, columns) for columns in range(1, max_columns + 1))
        size = max(size, PREFILL_KEYS if prefill else 0)
        self.keys = torch.empty(size, dtype=torch.int64, device=self.device)

    def _keys(self, spec: IndexerSpec, requests: int, columns: int) -> int:
        """Keys that a decode call leaves: one slot per segment, column tile, column and kept key."""
        tiling = DecodeTiling.of(spec, 1, columns)
        return (self.programs + requests) * tiling.tiles * tiling.columns * tiling.keep

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError unless on a device."""
        require(self.device == device, "workspace", f"one on {device}", f"one on {self.device}")

    def check(self, spec: IndexerSpec, requests: int, columns: int, device: torch.device) -> None:
        """Raise ValueError unless a decode call of this size fits."""
        self.check_device(device)
        needed = self._keys(spec, requests, columns)
        size = f"room for {requests} requests, {columns} columns, topk {spec.topk} ({needed} keys)"
        require(self.keys.numel() >= needed, "workspace", size, f"{self.keys.numel()} keys")


@dataclass(frozen=True)
class PrefillScratch:
    """Memory of a prefill over ranks on a GPU: for the parts of a split context, and by page for lists as in `StepPlan`."""

    workspace: Workspace
    owned: torch.Tensor  # [2 * R * W] int32, or more
    held: torch.Tensor  # [R] int32, or more


def unscored_blocks(spec: IndexerSpec, order: str) -> int:
    """Requests that see at most so many blocks need no scores: all are selected, and ascending ids do not tell the order."""
    return spec.topk if order == "block" else 0


@dataclass(frozen=True)
class StepPlan:
    """What depends on a step's lengths and its pages only: made once per step by `plan_step`, used by `decode` in every layer.

    On the CPU there is nothing to plan, and all tensors are None.

    Args:
        shares: `[programs, 6]` int32 on the GPU: each program's first page, its end, the request it begins in, the pages
            before that request, its tokens, and the ranks that share the step (1: none does), or by page the request's pages.
        before: `[R + 1]` int32: pages before each request, then all pages.
        shard: whose blocks were counted.
        block_size: B.
        free: blocks up to which a request is selected without scores.
        longest: the bound for the lengths, in tokens.
        threshold: pages of all requests up to which the step is not shared among the ranks of the shard: each scores its own
            heads on the whole context. A request without scores counts as one. None shares it whatever the lengths.
        owned: by page `[2, R, W]` int32, `W = ceil(longest / B)`: the shard's own pages of each request, and their blocks,
            ascending; as many as `held` and `before` tell, undefined behind. None by block.
        held: by page `[R]` int32: tokens that the listed blocks hold. None by block.
    """

    shares: torch.Tensor | None
    before: torch.Tensor | None
    shard: Shard
    block_size: int
    free: int
    longest: int
    threshold: int | None = None
    owned: torch.Tensor | None = None
    held: torch.Tensor | None = None

    def check(
        self, spec: IndexerSpec, shard: Shard, requests: int, order: str, longest: int, threshold: int | None = None
    ) -> None:
        """Raise ValueError unless made for this geometry, shard, number of requests, order and bound."""
        require(self.longest == longest, "plan", f"one for max_seq_len {longest}", f"one for {self.longest}")
        require(self.threshold == threshold, "plan", f"one for threshold {threshold}", f"one for {self.threshold}")
        same = self.shard == shard and self.block_size == spec.block_size
        require(same, "plan", f"one for {shard}, block_size {spec.block_size}", f"{self.shard}, {self.block_size}")
        free = unscored_blocks(spec, order)
        require(self.free == free, "plan", f"one for order {order!r} and topk {spec.topk}", "one for another")
        made_for = requests if self.before is None else len(self.before) - 1
        require(made_for == requests, "plan", f"one for {requests} requests", f"one for {made_for}")
