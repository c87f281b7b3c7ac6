# SPDX-License-Identifier: Apache-2.0
"""The `collective` transport: query gather and key exchange through torch.distributed (gloo, NCCL, RCCL)."""

import torch
import torch.distributed as dist

from lightning_indexer.spec import IndexerSpec

# all_gather_into_tensor is called all_gather_single since torch 2.13; the old name warns there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveTransport:
    """Moves queries and keys between the ranks of a group.

    Every call is a collective of the same size on every rank, whatever the lengths are: also for empty batches, and for
    ranks that own no block.
    """

    name = "collective"

    def __init__(self, spec: IndexerSpec, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world = dist.get_world_size(group)
        self.heads = [spec.owned_heads(rank, self.world) for rank in range(self.world)]
        self.replicas = spec.replicas(self.world)

    def gather_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Owned queries `[T, h, D]` of every rank to `[T, H, D]`; of replicas the first is taken."""
        sent = q.contiguous().view(torch.uint8)  # bytes: gloo does not know every dtype
        received = torch.empty((self.world, *sent.shape), dtype=torch.uint8, device=q.device)
        _all_gather(received.flatten(), sent.flatten(), group=self.group)
        owners = received[:: self.replicas].view(q.dtype)  # [P / replicas, T, h, D]
        return owners.permute(1, 0, 2, 3).flatten(1, 2)

    def exchange_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Candidates of this rank's shard for all heads, `[H, T, K]`, to all ranks' candidates for its own, `[P, h, T, K]`."""
        sent = torch.stack([keys[heads.start : heads.stop] for heads in self.heads])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received
