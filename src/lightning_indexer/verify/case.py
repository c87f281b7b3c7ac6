# SPDX-License-Identifier: Apache-2.0
"""One verification case: index queries and a paged index-K cache, as an engine holds them in a decode step."""

from dataclasses import dataclass, replace

import torch

from lightning_indexer.cache import IndexCache
from lightning_indexer.spec import IndexerSpec


@dataclass(frozen=True)
class Case:
    """Decode rows over a paged cache, with the model's own choice where there is one.

    Row `r * query_len + t` is query token `t` of request `r`, whose length `seq_lens[r]` counts it.
    """

    name: str
    spec: IndexerSpec
    q: torch.Tensor  # [T, H, D]
    pages: torch.Tensor  # [num_pages, B, D]
    block_table: torch.Tensor  # [R, max_blocks] int32
    seq_lens: torch.Tensor  # [R] int32
    query_len: int = 1
    chosen: torch.Tensor | None = None  # [H, T, K] int32, the model's own blocks, -1 padded, any order
    attention_heads: int = 0  # the first so many heads are attention heads: softmax(q.k / sqrt(D)) is their true attention
    cache: IndexCache | None = None  # the keys of `pages` in another format, which is then what is scored
    changed: bool = False  # what is scored is not what the model scored

    @property
    def keys(self) -> IndexCache:
        """What is scored."""
        return IndexCache.wrap(self.pages, self.spec) if self.cache is None else self.cache

    def stored_as(self, format: str) -> "Case":
        """The same with its keys written to a cache of another format."""
        cache = IndexCache.empty(len(self.pages), self.spec, format)
        cache.write(self.pages.flatten(0, 1), torch.arange(self.pages[..., 0].numel()))
        return replace(self, name=f"{self.name}, {format}", cache=cache, changed=True)

    def to(self, device: torch.device) -> "Case":
        """The same on a device, but for the model's choice."""
        names = ("q", "pages", "block_table", "seq_lens")
        moved = {name: getattr(self, name).to(device) for name in names}
        if self.cache is not None:
            data = self.cache.data.to(device)
            moved["cache"] = IndexCache.wrap(data, self.spec, format=self.cache.format.name)
        return replace(self, **moved)
