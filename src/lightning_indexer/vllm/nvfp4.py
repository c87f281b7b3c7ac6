# SPDX-License-Identifier: Apache-2.0
"""The same indexer over an NVFP4 index cache, for engines that have one. Imports vLLM.

vLLM 0.33 knows no such cache and fills none, so a plugin alone cannot bring one in: its `MiniMaxM3IndexerCache` refuses the
dtype, and its fused insert writes bf16 and fp8. An engine that constructs its layers itself uses `NvFp4IndexerImpl`, which
brings a cache of the layout of docs/cache-formats.md, `[pages, 128, 72]` bytes, and fills it by an insert kernel of its own
or by `NvFp4IndexerCache.insert`.
"""

import functools
import logging
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.models.minimax_m3.common import indexer as base

import lightning_indexer as li
from lightning_indexer.cache import FORMATS, IndexCache
from lightning_indexer.checks import require
from lightning_indexer.vllm.engine import EngineIndexer
from lightning_indexer.vllm.indexer import (
    LightningIndexerImpl,
    device_refusals,
    make_engine,
    read_setting,
    shared_engine,
    sparse_config,
)
from lightning_indexer.vllm.options import Options, refuse

logger = logging.getLogger("vllm.lightning_indexer")

DTYPE = "nvfp4"
QUERY_DTYPE = torch.float8_e4m3fn

_prepared: list[EngineIndexer] = []  # by `init_nvfp4_indexer_decode_cp`, until a layer holds them


def nvfp4_indexer_unsupported_reason(
    *, topk_blocks: int, sparse_block_size: int, num_index_heads: int, index_head_dim: int, score_type: str
) -> str | None:
    """Why this device and geometry cannot be served: what is needed and what came; None when they can.

    Args:
        topk_blocks, sparse_block_size, index_head_dim: K, B and D.
        num_index_heads: index heads of a rank.
        score_type: how a block is scored.
    """
    try:
        li.IndexerSpec(num_index_heads, index_head_dim, sparse_block_size, topk_blocks, 0, 0)
        require(score_type == "max", "score_type", "'max'", repr(score_type))
    except ValueError as error:
        return str(error)
    reasons = device_refusals(DTYPE, QUERY_DTYPE, index_head_dim, sparse_block_size)
    return reasons[0] if reasons else None


def init_nvfp4_indexer_decode_cp(max_model_len: int) -> bool:
    """Set context-parallel decode up, if the engine is configured for it: a collective of the tensor-parallel group.

    Any group size that fits the heads, any query length, any batch; micro-batches have memory of their own. Layers made later
    share what is made here; without this call the first layer makes it.

    Args:
        max_model_len: longest request, in tokens: the engine's own.

    Returns:
        Whether it is on; if not, the log says why.

    Raises:
        ValueError: `max_model_len` is not the engine's, or the engine cannot be served at all.
    """
    config = get_current_vllm_config()
    longest = config.model_config.max_model_len
    require(max_model_len == longest, "max_model_len", f"the engine's ({longest})", max_model_len)
    if not _shares(config):
        return False
    sparse = sparse_config(config)
    geometry = {
        "head_dim": sparse["sparse_index_dim"],
        "block_size": sparse["sparse_block_size"],
        "topk": sparse["sparse_topk_blocks"],
        "init_blocks": sparse.get("sparse_init_block", 0),
        "local_blocks": sparse.get("sparse_local_block", 0),
    }
    _prepared.append(make_engine(geometry, DTYPE, QUERY_DTYPE, True))
    return True


class NvFp4IndexerCache(base.MiniMaxM3IndexerCache):  # type: ignore[misc] # vLLM has no types here
    """A layer's index keys in NVFP4, registered under the layer's name as vLLM's own cache is."""

    def __init__(self, head_dim: int, prefix: str, cache_config: Any, backend_cls: type) -> None:
        super().__init__(head_dim, prefix, cache_config, "bf16", backend_cls)
        self.indexer_kv_dtype = DTYPE
        self.dtype = FORMATS[DTYPE].dtype

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One row of codes and scales per token."""
        return base.MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=FORMATS[DTYPE].row_elements(self.head_dim),
            dtype=self.dtype,
            cache_role=base.SparseCacheRole.INDEXER,
        )

    def insert(self, index_k: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Quantise keys `[n, D]` and store them at slots `[n]` int64; slots below 0 are ignored."""
        spec = li.IndexerSpec(head_dim=self.head_dim, block_size=self.kv_cache.shape[1])
        IndexCache.wrap(self.kv_cache, spec, DTYPE).write(index_k, slot_mapping)


class NvFp4IndexerImpl(LightningIndexerImpl):
    """One layer's indexer over an NVFP4 index cache; queries in e4m3, or bf16.

    Takes the arguments of vLLM's implementations, `indexer_kv_dtype="nvfp4"` among them, and returns and writes what they do.

    Raises:
        ValueError: another dtype, or this device, geometry or engine cannot be served.
    """

    def __init__(self, *, indexer_kv_dtype: str, **layer: Any) -> None:
        require(indexer_kv_dtype == DTYPE, "indexer_kv_dtype", repr(DTYPE), repr(indexer_kv_dtype))
        names = ("topk_blocks", "sparse_block_size", "num_index_heads", "index_head_dim")
        asked = {name: layer[name] for name in names}
        reason = nvfp4_indexer_unsupported_reason(**asked, score_type=layer.get("score_type", "max"))
        if reason is not None:
            raise ValueError(f"lightning-indexer {li.__version__} cannot serve an NVFP4 index cache: {reason}")
        super().__init__(indexer_kv_dtype="bf16", **layer)

    def make_engine(self) -> EngineIndexer:
        """The indexer that this layer shares with its like; our cache takes the place of the one that vLLM made."""
        made, config = self.index_cache, get_current_vllm_config()
        del config.compilation_config.static_forward_context[made.prefix]
        self.indexer_kv_dtype = DTYPE
        self.index_cache = NvFp4IndexerCache(made.head_dim, made.prefix, made.cache_config, made.backend_cls)
        engine = shared_engine(self, DTYPE, QUERY_DTYPE, _shares(config))
        if engine in _prepared:
            _prepared.remove(engine)
        return engine


def _shares(config: Any) -> bool:
    """Whether decode is context-parallel; if not, the log says why, once.

    Raises:
        ValueError: the engine cannot be served, with context parallelism or without.
    """
    options = Options.read(config.additional_config)
    setting = read_setting(sparse_config(config)["sparse_topk_blocks"], "bf16")  # the dtype is ours to judge
    refuse(setting.unserved(options))
    refuse([] if options.shard_by == "block" else ["shard_by: expected 'block' with an NVFP4 index cache, got 'page'"])
    reasons = setting.unshared(options)
    if not setting.context_parallel:
        reasons = ["attention_config: expected minimax_m3_indexer_cp, got none"]
    if reasons:
        _tell_once(f"lightning-indexer: no context-parallel decode ({'; '.join(reasons)})")
    return not reasons


@functools.cache
def _tell_once(message: str) -> None:
    logger.info(message)
