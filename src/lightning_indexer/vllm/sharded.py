# SPDX-License-Identifier: Apache-2.0
"""An index cache that the tensor-parallel ranks hold once, in vLLM's memory and by vLLM's block ids. Imports vLLM.

Rank `r` of P holds page `p`, if `p % P == r`, as its own page `p // P` (`Shard(by="page")`). To vLLM a page of such a layer
takes 1/P of the bytes, so that its own arithmetic gives the blocks back. Where it sees the `n` small pages of a layer, one
behind the other, the rank has `ceil(n / P)` whole ones. A block id is then no index into that memory, and what takes it for
one must not get there: keys are written by slots of the rank's own pages (`OwnSlots`), vLLM's zeroing of new blocks passes
over the layer (`ShardedIndexCache`), and what copies or moves blocks is refused at start (`options.Setting.unsharded`).
"""

import dataclasses
import functools
import inspect
import sys
from typing import Any

import torch
from vllm.models.minimax_m3.common import indexer as base

from lightning_indexer.checks import require
from lightning_indexer.spec import Shard

# Bytes of a page beside its share: where P does not divide n, a rank's last page has only a part of its bytes. From 256 blocks
# of 32 KiB on these make up for the rest, whatever P; and layers begin at a cache line.
SPARE = 128

MODELS = ("vllm.models.minimax_m3.nvidia.model", "vllm.models.minimax_m3.amd.model")
ATTENTION = "MiniMaxM3SparseAttention"
MARK = "lightning_indexer"  # attribute of a forward that is ours


class ShardedIndexCache(base.MiniMaxM3IndexerCache):  # type: ignore[misc] # vLLM has no types here
    """A layer's index keys as vLLM registers, sizes and binds them.

    Args:
        replica: vLLM's own cache of the layer, whose name is free again.
        shard: the rank's, by page.
        backend_cls: vLLM's description of it.
    """

    def __init__(self, replica: Any, shard: Shard, backend_cls: type) -> None:
        facts = replica.head_dim, replica.prefix, replica.cache_config, replica.indexer_kv_dtype
        super().__init__(*facts, backend_cls)
        self.shard = shard
        self.block_size = 0  # until vLLM has told
        self.page_bytes = 0
        # The rank's pages, once there are some. Not a tensor: vLLM zeroes new blocks of layers that have one, by block id.
        self.kv_cache: list[torch.Tensor] = []

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """A page of 1/P of the bytes.

        Raises:
            ValueError: the engine's blocks are not the indexer's.
        """
        whole = super().get_kv_cache_spec(vllm_config)
        kernel = self.backend_cls.get_supported_kernel_block_sizes()
        expected = f'{kernel[0]} with shard_by "page", where a block is a page'
        require(whole.block_size in kernel, "block_size", expected, whole.block_size)
        self.block_size = whole.block_size
        share = -(-whole.page_size_bytes // self.shard.world)
        self.page_bytes = -(-share // SPARE) * SPARE + SPARE
        # The head size is nobody's any more, but vLLM's views of a page must fit into its bytes.
        return dataclasses.replace(
            whole, head_size=max(1, self.head_dim // self.shard.world), page_size_padded=self.page_bytes
        )

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """View `[n, 1, B, D / P]` as whole pages; so few blocks that the last page has no room get memory of their own.

        Raises:
            ValueError: other layers' blocks lie between.
        """
        blocks, apart = kv_cache.shape[0], kv_cache.stride(0)
        layout = 'one with the blocks of a layer in a row (LBNHC or LBHNC) with shard_by "page"'
        got = f"blocks {apart * kv_cache.element_size()} bytes apart, of {self.page_bytes}"
        require(apart * kv_cache.element_size() == self.page_bytes, "kv_cache_layout", layout, got)
        shape = (-(-blocks // self.shard.world), self.block_size, self.head_dim)
        page = self.block_size * self.head_dim
        if shape[0] * page > blocks * apart:  # vLLM measures its graphs in such a cache; a served one is larger
            self.kv_cache = [kv_cache.new_zeros(shape)]
        else:
            self.kv_cache = [kv_cache.as_strided(shape, (page, self.head_dim, 1))]


class OwnPages:
    """What a layer's code reads of its index cache: its name, its dtype, and the rank's pages `[ceil(n / P), B, D]`."""

    def __init__(self, cache: ShardedIndexCache) -> None:
        self._cache = cache
        self.prefix = cache.prefix
        self.dtype = cache.dtype

    @property
    def kv_cache(self) -> torch.Tensor:
        """None of them until vLLM has bound some, as in vLLM's own class."""
        return self._cache.kv_cache[0] if self._cache.kv_cache else torch.tensor([])


class OwnSlots(dict[str, torch.Tensor]):
    """A pass's slots by layer: those of sharded index caches number the rank's own pages, -1 for pages of other ranks.

    Args:
        whole: vLLM's.
        layers: vLLM's registered layers by name.
        first: the layer that the pass begins with.
        rows: tokens of the pass, padding included.
    """

    def __init__(self, whole: dict[str, torch.Tensor], layers: dict[str, Any], first: str, rows: int) -> None:
        super().__init__(whole)
        self.whole, self.first = whole, first
        made: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, slot_mapping in whole.items():
            layer = layers.get(name)
            if isinstance(layer, ShardedIndexCache):
                # Layers share it, or have slices of one that are alike.
                same = slot_mapping.data_ptr(), slot_mapping.shape, slot_mapping.stride()
                if same not in made:
                    made[same] = _padded(layer.shard.local_slots(slot_mapping, layer.block_size), rows)
                self[name] = made[same]


def _padded(slots: torch.Tensor, rows: int) -> torch.Tensor:
    """The slots, in memory that goes on with -1: vLLM's own does, and its kernels look at the slots of all rows."""
    if len(slots) >= rows:
        return slots
    longer = slots.new_full((rows,), -1)
    longer[: len(slots)] = slots
    return longer[: len(slots)]


def write_own_pages() -> list[str]:
    """Have vLLM's attention write each rank's own pages; why this cannot be done, empty if it is.

    The kernels that insert keys take their slots from the pass's context, where `OwnSlots` are put before the first layer. In
    a captured graph they are computed from vLLM's slots, once per replay.
    """
    loaded = [sys.modules[name] for name in MODELS if name in sys.modules]
    classes: list[Any] = [getattr(module, ATTENTION, None) for module in loaded]
    known = all(_takes_slots_from_the_context(attention) for attention in classes)
    if not (classes and known):
        expected = f"{ATTENTION}.forward(positions, hidden_states) of vLLM, which takes slots from the forward context"
        return [f'model: expected {expected}, with shard_by "page", got {"another" if classes else "no model of vLLM"}']
    for attention in classes:
        if not hasattr(attention.forward, MARK):
            attention.forward = _with_own_slots(attention.forward)
    return []


def _takes_slots_from_the_context(attention: Any) -> bool:
    forward = getattr(attention, "forward", None)
    if forward is None:
        return False
    code = inspect.unwrap(forward).__code__
    named = {"get_forward_context", "slot_mapping", "index_cache", "prefix"} <= {*code.co_names}
    return named and tuple(inspect.signature(forward).parameters) == ("self", "positions", "hidden_states")


def _with_own_slots(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> Any:
        use_own_slots(base.get_forward_context(), self.layer_name, hidden_states.shape[0])
        return original(self, positions, hidden_states)

    setattr(forward, MARK, True)
    return forward


def use_own_slots(context: Any, layer: str, rows: int) -> None:
    """Put `OwnSlots` into the context of a pass of `rows` tokens, if `layer` is its first.

    vLLM's mapping, which other passes may share, stays. A context may serve several passes, a warm-up and then a capture, say:
    the first layer of each makes them anew.
    """
    slots = context.slot_mapping
    if isinstance(slots, OwnSlots):
        if slots.first != layer:
            return
        slots = slots.whole
    if isinstance(slots, dict):  # not for a memory-profiling run of micro-batches
        context.slot_mapping = OwnSlots(slots, context.no_compile_layers, layer, rows)
