# SPDX-License-Identifier: Apache-2.0
"""Bytes per token of a rank's caches, and the tokens that fit, with the index cache replicated and sharded."""

from dataclasses import dataclass

from lightning_indexer.cache import IndexCache
from lightning_indexer.plan.model import Model

# Bytes of one head's K or V of one token, per element; NVFP4 has an e4m3 scale per 16.
KV_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}
# Bytes per weight; 4-bit formats hold a scale per 16.
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5 + 1 / 16}
INDEX_FORMATS = ("bf16", "fp8", "nvfp4")


@dataclass(frozen=True)
class CacheBytes:
    """Bytes per token and rank: of attention's K and V, and of index keys that every rank holds."""

    kv: float
    index: float
    ranks: int

    @property
    def total(self) -> float:
        """With a replicated index cache."""
        return self.kv + self.index

    @property
    def share(self) -> float:
        """Of the index keys in the total."""
        return self.index / self.total

    @property
    def sharded(self) -> float:
        """With an index cache of which each rank holds the blocks that it scores: `kv + index / P`."""
        return self.kv + self.index / self.ranks

    @property
    def saved(self) -> float:
        """Share of the total that sharding saves."""
        return 1 - self.sharded / self.total

    @property
    def gained(self) -> float:
        """Tokens that fit with a sharded index cache over those that fit with a replicated one."""
        return self.total / self.sharded


def index_token_bytes(model: Model, index_format: str) -> int:
    """Bytes of a token's index key in one layer."""
    return IndexCache.empty(1, model.spec, index_format).token_bytes


def cache_bytes(model: Model, tp: int, kv_format: str, index_format: str) -> CacheBytes:
    """Bytes per token on one of `tp` ranks, which holds `max(1, KV heads / P)` heads.

    kv = layers * heads * 2 * head dim * bytes; index = sparse layers * bytes of a key
    """
    heads = max(1, model.kv_heads // tp)
    kv = model.layers * heads * 2 * model.head_dim * KV_BYTES[kv_format]
    return CacheBytes(kv, model.sparse_layers * index_token_bytes(model, index_format), tp)
