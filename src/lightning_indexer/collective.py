# SPDX-License-Identifier: Apache-2.0
"""The `collective` transport: query gather and key exchange through torch.distributed (gloo, NCCL, RCCL)."""

import math

import torch
import torch.distributed as dist

from lightning_indexer.spec import IndexerSpec

# all_gather_into_tensor is called all_gather_single since torch 2.13; the old name warns there.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
MOST_ITEM_BYTES = 4  # of an element of queries


class CollectiveTransport:
    """Moves queries and keys between the ranks of a group.

    Every call is a collective of the same size on every rank, whatever the lengths are: also for empty batches, and for
    ranks that own no block.
    """

    name = "collective"

    def __init__(self, spec: IndexerSpec, group: dist.ProcessGroup, max_rows: int, device: torch.device) -> None:
        self._spec = spec
        self.group = group
        self.world = dist.get_world_size(group)
        self.heads = [spec.owned_heads(rank, self.world) for rank in range(self.world)]
        self.replicas = spec.replicas(self.world)
        owned, heads, words = len(self.heads[0]), spec.num_heads, spec.head_dim * MOST_ITEM_BYTES

        def memory(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(math.prod(shape), dtype=dtype, device=device)

        # Made once: a captured graph finds them where they were.
        self._sent_queries = memory(max_rows, owned, words, dtype=torch.uint8)
        self._queries = memory(self.world, max_rows, owned, words, dtype=torch.uint8)
        self._gathered = memory(max_rows, heads, words, dtype=torch.uint8)
        self._candidates = memory(heads, max_rows, spec.topk, dtype=torch.int64)
        self._sent_keys = memory(self.world, owned, max_rows, spec.topk, dtype=torch.int64)
        self._keys = memory(self.world, owned, max_rows, spec.topk, dtype=torch.int64)
        self._one_each = torch.ones(max_rows, dtype=torch.int32, device=device)

    def gather_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Owned queries `[T, h, D]` of every rank to `[T, H, D]`; of replicas the first is taken."""
        rows, owned, dim = q.shape
        sent = _shaped(self._sent_queries, q.dtype, rows, owned, dim)
        sent.copy_(q)
        received = _shaped(self._queries, q.dtype, self.world, rows, owned, dim)
        # As bytes: gloo does not know every dtype.
        all_gather_into(received.flatten().view(torch.uint8), sent.flatten().view(torch.uint8), group=self.group)
        owners = received[:: self.replicas]  # [P / replicas, T, h, D]
        gathered = _shaped(self._gathered, q.dtype, rows, len(owners), owned, dim)
        gathered.copy_(owners.permute(1, 0, 2, 3))
        return gathered.flatten(1, 2)

    def candidates(self, rows: int) -> torch.Tensor:
        """Memory for this rank's candidates of a step, `[H, T, K]` int64."""
        return _shaped(self._candidates, torch.int64, self._spec.num_heads, rows, self._spec.topk)

    def one_each(self, rows: int) -> torch.Tensor:
        """Rows as requests of one token, `[T]` int32: whose keys are all empty selects nothing, whatever its length."""
        return self._one_each[:rows]

    def exchange_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Candidates of this rank's shard for all heads, `[H, T, K]`, to all ranks' candidates for its own, `[P, h, T, K]`."""
        shape = (self.world, len(self.heads[0]), *keys.shape[1:])
        sent, received = (_shaped(memory, torch.int64, *shape) for memory in (self._sent_keys, self._keys))
        for place, heads in zip(sent, self.heads, strict=True):
            place.copy_(keys[heads.start : heads.stop])
        dist.all_to_all_single(received, sent, group=self.group)
        return received


def _shaped(memory: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The beginning of a flat memory as a contiguous tensor."""
    return memory.view(dtype)[: math.prod(shape)].view(shape)
