# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM's sparse layers of MiniMax-M3 hold in place of its own, and the choice of it. Imports vLLM."""

import logging
from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.models.minimax_m3.common import indexer as base
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.ubatch_utils import get_num_ubatches
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

import lightning_indexer as li
from lightning_indexer.cache import IndexCache
from lightning_indexer.ops import backend_of, check_device
from lightning_indexer.vllm.engine import EngineIndexer, Kind, Limits, live_indexers, shared_indexer
from lightning_indexer.vllm.ops import sparse_table
from lightning_indexer.vllm.options import FORMATS, Options, Setting, refuse
from lightning_indexer.vllm.sharded import OwnPages, ShardedIndexCache, write_own_pages

logger = logging.getLogger("vllm.lightning_indexer")  # below vLLM's, for its handlers

PREFILL_ROWS = 8192  # at once over a sharded cache


def choose(*, topk_blocks: int, indexer_kv_dtype: str = "bf16") -> type:
    """Our class, for an engine that asks for it.

    Args:
        topk_blocks, indexer_kv_dtype: of the layer.

    Raises:
        ValueError: it cannot serve this engine; says all that stands against it.
    """
    setting = read_setting(topk_blocks, indexer_kv_dtype)
    options = Options.read(get_current_vllm_config().additional_config)
    refuse(setting.refusals(options))
    refuse(device_refusals(FORMATS[indexer_kv_dtype], None, setting.head_dim, setting.block_size))
    if options.shard_by == "page":
        refuse(write_own_pages())
    return LightningIndexerImpl


def read_setting(topk: int, cache_dtype: str) -> Setting:
    """What of the current vLLM configuration matters here."""
    config = get_current_vllm_config()
    sparse = sparse_config(config)
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    return Setting(
        context_parallel=config.attention_config.minimax_m3_indexer_cp,
        platform=_platform(),
        tensor_parallel=base.get_tensor_model_parallel_world_size(),
        decode_context_parallel=parallel.decode_context_parallel_size,
        cache_dtype=cache_dtype,
        heads=sparse["sparse_num_index_heads"],
        head_dim=sparse["sparse_index_dim"],
        block_size=sparse["sparse_block_size"],
        topk=topk,
        score_type=sparse.get("sparse_score_type", "max"),
        query_len=max_decode_query_len(config),
        fused_decode=config.kernel_config.monokernel,
        full_graphs=_full_graphs(config),
        sleep_mode=config.model_config.enable_sleep_mode,
        kv_connector=None if transfer is None else str(transfer.kv_connector),
        hisparse=config.attention_config.hisparse_config is not None,
    )


def device_refusals(format: str, query_dtype: torch.dtype | None, head_dim: int, block_size: int) -> list[str]:
    """Why this process's device cannot score a format with queries of a dtype (None: the cache's); empty if it can."""
    try:
        device = check_device(_device())
        spec = li.IndexerSpec(head_dim=head_dim, block_size=block_size)
        cache = IndexCache.empty(1, spec, format, device)
        q = torch.empty(1, 1, head_dim, dtype=query_dtype or cache.format.dtype, device=device)
        backend_of(device).check_operands(q, cache)
    except ValueError as error:
        return [str(error)]
    return []


class MetadataBuilder(base.MiniMaxM3IndexerTritonMetadataBuilder):  # type: ignore[misc] # vLLM has no types here
    """vLLM's metadata of a step; before it, whether a rank was missing in an earlier one.

    vLLM builds it on the host before every step, also where the step is a graph's replay, in which Python sees no layer.
    """

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """As vLLM's.

        Raises:
            RuntimeError: a rank did not arrive in an earlier step, as far as this is known without waiting for the GPU.
        """
        for engine in live_indexers():
            engine.indexer.raise_if_failed()
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class Backend(base.MiniMaxM3IndexerBackend):  # type: ignore[misc]
    """vLLM's description of an index cache's layers, with our builder."""

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """Who makes the layers' metadata."""
        return MetadataBuilder


class ShardedBackend(Backend):
    """The same for an index cache that the group holds once."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those in which the blocks of a layer lie one behind the other, as the pages that are made of them must."""
        return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC


class LightningIndexerImpl(base.MiniMaxM3IndexerTritonImpl):  # type: ignore[misc]
    """One layer's indexer: vLLM's cache, metadata and buffers, our selection."""

    indexer_backend_cls: ClassVar[type] = Backend
    index_cache: Any

    def __init__(self, **layer: Any) -> None:
        super().__init__(**layer)
        self.engine = self.make_engine()
        if self.engine.by_page:
            replica = self.index_cache
            del get_current_vllm_config().compilation_config.static_forward_context[replica.prefix]
            del self.index_cache  # a module, in whose place torch takes nothing else
            # A module, too, so that vLLM finds its memory when it lets go of the model's.
            self.sharded_cache = ShardedIndexCache(replica, self.engine.indexer.shard, ShardedBackend)
            self.index_cache = OwnPages(self.sharded_cache)

    def make_engine(self) -> EngineIndexer:
        """The indexer that this layer shares with its like."""
        config = get_current_vllm_config()
        # vLLM gives queries the dtype of the cache.
        cache = FORMATS[self.indexer_kv_dtype], self.index_cache.dtype
        return shared_engine(self, *cache, config.attention_config.minimax_m3_indexer_cp)

    def forward(
        self,
        index_query: torch.Tensor,
        *,
        attention_block_table: torch.Tensor | None = None,
        sparse_block_table_out: torch.Tensor | None = None,
        sparse_context_lens_out: torch.Tensor | None = None,
        block_page_stride: int | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Ids of decode and of prefill rows, `[h, rows, K]` each, written to the shared buffer where there is one."""
        steps = base.get_forward_context().attn_metadata
        if not isinstance(steps, dict):
            return None, None  # a profiling run: no cache is bound
        step = steps[self.index_cache.prefix]
        q = index_query[: step.num_actual_tokens].view(-1, self.num_index_heads, self.index_head_dim)
        cache = IndexCache.wrap(self.index_cache.kv_cache, self.engine.kind.spec, self.engine.kind.format)
        out = self.topk_indices_buffer
        if out is not None and not base.current_platform.is_rocm():
            out = out.transpose(0, 1)  # token-major there, head-major on ROCm; never told by shape
        fused = (attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride)
        table = sparse_table(*fused, heads=self.num_index_heads, device=q.device)
        return self.engine.select(self.index_cache.prefix, step, q, cache, out, table, dbo_current_ubatch_id())


def shared_engine(layer: Any, format: str, query_dtype: torch.dtype, context_parallel: bool) -> EngineIndexer:
    """The indexer that a layer shares with its like; see `make_engine`."""
    rules = {"topk": layer.topk_blocks, "init_blocks": layer.init_blocks, "local_blocks": layer.local_blocks}
    geometry = {"head_dim": layer.index_head_dim, "block_size": layer.block_size, **rules}
    engine = make_engine(geometry, format, query_dtype, context_parallel)
    owned = len(engine.indexer.owned_heads)
    assert owned == layer.num_index_heads, f"{owned} owned heads, but the layer has {layer.num_index_heads}"
    return engine


def make_engine(geometry: dict[str, int], format: str, query_dtype: torch.dtype, context_parallel: bool) -> EngineIndexer:
    """The shared indexer for index caches of a format, within the current configuration's bounds. New ones say so in the log.

    Args:
        geometry: arguments of `IndexerSpec`, but for heads and tie rule.
        format: our name of the index cache's format.
        query_dtype: of the index queries.
        context_parallel: whether the ranks share the work.
    """
    config = get_current_vllm_config()
    options = Options.read(config.additional_config)
    heads = sparse_config(config)["sparse_num_index_heads"]
    kind = Kind(
        spec=li.IndexerSpec(num_heads=heads, tie_break=options.tie_break, **geometry),
        limits=_limits(config, options),
        device=check_device(_device()),
        format=format,
        query_dtype=query_dtype,
        order=_order(geometry["topk"]) if options.order == "auto" else options.order,
        context_parallel=context_parallel,
        tables=base.current_platform.is_rocm(),
        options=options,
    )
    engine, new = shared_indexer(kind, get_tp_group().device_group)
    if new and engine.indexer.rank == 0:
        logger.info(engine.describe())
    return engine


def _limits(config: Any, options: Options) -> Limits:
    query_len = max_decode_query_len(config)
    captured = config.compilation_config.max_cudagraph_capture_size or 0  # in tokens
    rows = max(config.scheduler_config.max_num_seqs * query_len, captured)
    return Limits(
        rows=rows,
        tokens=config.model_config.max_model_len,
        query_len=query_len,
        micro_batches=get_num_ubatches(config.parallel_config),
        prefill_rows=min(PREFILL_ROWS, config.scheduler_config.max_num_batched_tokens) if options.shard_by == "page" else None,
    )


def sparse_config(config: Any) -> Any:
    """The model's `sparse_attention_config`."""
    model = config.model_config.hf_config
    return getattr(model, "text_config", model).sparse_attention_config


def _full_graphs(config: Any) -> bool:
    mode = config.compilation_config.cudagraph_mode
    eager = config.model_config.enforce_eager or mode is None
    return not eager and CUDAGraphMode(mode).has_full_cudagraphs()


def _platform() -> str:
    platform = base.current_platform
    names = [("cuda", platform.is_cuda()), ("rocm", platform.is_rocm()), ("cpu", platform.is_cpu())]
    return next((name for name, here in names if here), str(platform.device_type))


def _device() -> torch.device:
    return torch.device("cpu") if _platform() == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _order(topk: int) -> str:
    """How the indexer that vLLM would take orders ids: ascending on SM100, by score elsewhere. Attention adds them up so."""
    blackwell = base.current_platform.is_cuda() and base.current_platform.is_device_capability_family(100)
    return "block" if blackwell and topk == 16 else "score"
