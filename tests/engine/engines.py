# SPDX-License-Identifier: Apache-2.0
"""Parts of a vLLM engine on CPU ranks: its configuration, its tensor-parallel group, its indexer layers and metadata."""

import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import interpreter
import torch
import vllm
import vllm.models
from support import Inputs, random_inputs
from vllm.config import AttentionConfig, KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, get_tp_group, init_distributed_environment
from vllm.forward_context import set_forward_context
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import lightning_indexer as li
from lightning_indexer import reference
from lightning_indexer.vllm.options import SECTION

HEADS = 4
PACKAGE = "vllm.models.minimax_m3"
GEOMETRY = {"sparse_num_index_heads": HEADS, "sparse_index_dim": 128, "sparse_topk_blocks": 16, "sparse_block_size": 128}


def skip_multimodal() -> None:
    """Leave out the `__init__` of the model's package: it loads the vision tower, which needs torchvision."""
    if PACKAGE not in sys.modules:
        folder = os.path.join(os.path.dirname(vllm.__file__), "models", "minimax_m3")
        package = types.ModuleType(PACKAGE)
        package.__path__ = [folder]
        package.__spec__ = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
        package.__spec__.submodule_search_locations = [folder]
        sys.modules[PACKAGE] = vllm.models.minimax_m3 = package


skip_multimodal()
interpreter.install()
load_general_plugins()  # as each process of an engine does; finds ours by its entry point

from vllm.models.minimax_m3.common import indexer as base  # noqa: E402 (after the plugin, as in an engine)


def config_of(world: int = 1, *, cp: bool = False, options: dict | None = None, drafts: int = 0, **changes: Any) -> VllmConfig:
    """A configuration as `vllm serve` makes it, of a MiniMax-M3 without layers.

    Args:
        world: tensor_parallel_size.
        cp: `minimax_m3_indexer_cp`.
        options: our section of `additional_config`.
        drafts: speculative tokens.
        changes: `topk`, `heads`, `kv_dtype`, `max_model_len`, `max_num_seqs`, `dcp`, `eager`, `sleep`, `sparse` (its entries),
            `connector` (its name), `page` (tokens of a block).
    """
    attention = AttentionConfig(minimax_m3_indexer_cp=cp, indexer_kv_dtype=changes.get("kv_dtype", "auto"))
    section = {} if options is None else {SECTION: options}
    config = VllmConfig(attention_config=attention, additional_config=section)
    config.parallel_config.tensor_parallel_size = world
    config.parallel_config.decode_context_parallel_size = changes.get("dcp", 1)
    config.cache_config.block_size = changes.get("page", 128)
    if "connector" in changes:
        config.kv_transfer_config = KVTransferConfig(kv_connector=changes["connector"], kv_role="kv_both")
    config.scheduler_config.max_num_seqs = changes.get("max_num_seqs", 8)
    config.scheduler_config.max_num_batched_tokens = changes.get("max_num_batched_tokens", 64)
    sparse = {**GEOMETRY, **changes.get("sparse", {})}
    sparse["sparse_topk_blocks"] = changes.get("topk", 16)
    sparse["sparse_num_index_heads"] = changes.get("heads", HEADS)
    hf_config = SimpleNamespace(text_config=SimpleNamespace(sparse_attention_config=sparse))
    model = SimpleNamespace(
        hf_config=hf_config,
        hf_text_config=hf_config.text_config,
        max_model_len=changes.get("max_model_len", 128 * 48),
        dtype=torch.bfloat16,
        is_moe=False,
        enforce_eager=changes.get("eager", True),
        enable_sleep_mode=changes.get("sleep", False),
        original_max_model_len=None,
        supports_kv_cache_grouping=False,
    )
    object.__setattr__(config, "model_config", model)
    if drafts:
        speculative = SimpleNamespace(
            num_speculative_tokens=drafts,
            parallel_drafting=False,
            use_eagle=lambda: False,
            use_eagle_block_drop=lambda: False,
        )
        object.__setattr__(config, "speculative_config", speculative)
    return config


@contextmanager
def engine(config: VllmConfig, rank: int) -> Iterator[None]:
    """vLLM's groups over the process group that is there, with this configuration the current one."""
    world = config.parallel_config.tensor_parallel_size
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, "env://", rank, backend="gloo")
        ensure_model_parallel_initialized(world, 1)
        assert (get_tp_group().rank_in_group, get_tp_group().world_size) == (rank, world)
        yield


def owned(world: int, heads: int = HEADS) -> int:
    return max(1, heads // world)


def buffer_of(config: VllmConfig, head_major: bool = False) -> torch.Tensor:
    """The ids of all layers as the model holds them: token-major, or as on ROCm head-major."""
    sparse = config.model_config.hf_text_config.sparse_attention_config
    tokens, heads = config.scheduler_config.max_num_batched_tokens, owned(config.parallel_config.tensor_parallel_size)
    shape = (heads, tokens) if head_major else (tokens, heads)
    return torch.full((*shape, sparse["sparse_topk_blocks"]), -77, dtype=torch.int32)


def layer_arguments(config: VllmConfig, number: int = 0, *, buffer: torch.Tensor | None = None, **changes: Any) -> Any:
    """What the model constructs a layer's indexer from."""
    sparse = config.model_config.hf_text_config.sparse_attention_config
    heads = owned(config.parallel_config.tensor_parallel_size, sparse["sparse_num_index_heads"])
    arguments: dict[str, Any] = {
        "num_kv_heads": heads,
        "scale": 128**-0.5,
        "topk_blocks": sparse["sparse_topk_blocks"],
        "sparse_block_size": sparse["sparse_block_size"],
        "num_index_heads": heads,
        "index_head_dim": sparse["sparse_index_dim"],
        "prefix": f"model.layers.{number}.self_attn.attn",
        "init_blocks": 0,
        "local_blocks": 1,
        "indexer_kv_dtype": config.attention_config.resolve_indexer_kv_dtype("bf16"),
        "topk_indices_buffer": buffer,
    }
    return {**arguments, **changes}


def layer_of(config: VllmConfig, number: int = 0, **changes: Any) -> Any:
    """vLLM's own indexer module of one layer, whose implementation vLLM chooses."""
    return base.MiniMaxM3Indexer(**layer_arguments(config, number, **changes))


def bind(layer: Any, pages: torch.Tensor) -> None:
    """Give the layer its index cache, as the worker does: `[pages, 1, 128, 128]`."""
    layer.index_cache.bind_kv_cache(pages[:, None].to(layer.index_cache.dtype))


def run(config: VllmConfig, layer: Any, step: Any, q: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """One forward of one layer with a step's metadata; `q` `[tokens, h, 128]`."""
    metadata = {layer.index_cache.prefix: step} if step is not None else None
    with set_forward_context(metadata, config, num_tokens=len(q)):
        decoded, prefilled = layer(q.flatten(1))
    return decoded, prefilled


def spec_of(config: VllmConfig, **rules: Any) -> li.IndexerSpec:
    sparse = config.model_config.hf_text_config.sparse_attention_config
    return li.IndexerSpec(num_heads=sparse["sparse_num_index_heads"], topk=sparse["sparse_topk_blocks"], **rules)


@dataclass(frozen=True)
class Batch:
    """A scheduled batch: requests of `tokens` tokens, of which the last `queries` are this step's; decode requests first.

    `rows` is what the query rows are padded to; requests are padded along, with no queries and no tokens.
    """

    tokens: tuple[int, ...]
    queries: tuple[int, ...]
    rows: int = 0
    drafts: int = 0  # speculative tokens of the engine

    @property
    def real_rows(self) -> int:
        return sum(self.queries)

    def inputs(self, *, heads: int = HEADS, seed: int = 0, values: str = "normal") -> Inputs:
        """Queries of all heads, pages, and the table of the real requests; row by row as the batch has them."""
        rows = max(self.rows, self.real_rows)
        return random_inputs(li.IndexerSpec(), list(self.tokens), heads=heads, rows=rows, seed=seed, values=values)

    def want(self, inputs: Inputs, spec: li.IndexerSpec, pages: Any = None) -> torch.Tensor:
        """The selection of every head: each row as a decode call of its own, by the reference. `[H, rows, K]`."""
        keys = inputs.pages.nan_to_num() if pages is None else pages
        ids = torch.full((inputs.q.shape[1], len(inputs.q), spec.topk), -1, dtype=torch.int32)
        row = 0
        for request, (tokens, count) in enumerate(zip(self.tokens, self.queries, strict=True)):
            table = inputs.block_table[request : request + 1]
            for i in range(count):
                length = torch.tensor([tokens - count + i + 1], dtype=torch.int32)
                rules = {"topk": spec.topk, "init_blocks": spec.init_blocks, "local_blocks": spec.local_blocks}
                step = inputs.q[row : row + 1].float(), keys, table, length
                ids[:, row] = reference.decode(*step, block_size=128, **rules, tie_break=spec.tie_break)[:, 0]
                row += 1
        return ids

    def metadata(self, config: VllmConfig, inputs: Inputs, backend: Any = base.MiniMaxM3IndexerBackend) -> Any:
        """What the metadata builder of a backend, vLLM's own or a layer's, makes of it."""
        counts = list(self.queries)
        missing = max(0, self.rows - self.real_rows) // max(1, counts[0])
        starts = torch.tensor([0, *counts, *[0] * missing], dtype=torch.int32).cumsum(0).to(torch.int32)
        seq_lens = torch.tensor([*self.tokens, *[0] * missing], dtype=torch.int32)
        columns = -(-config.model_config.max_model_len // 128)
        table = torch.full((len(seq_lens), columns), -1, dtype=torch.int32)
        table[: len(counts), : inputs.block_table.shape[1]] = inputs.block_table
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            num_reqs=len(seq_lens),
            num_actual_tokens=max(self.rows, self.real_rows),
            max_query_len=max(counts),
            max_seq_len=max(self.tokens),
            block_table_tensor=table,
            slot_mapping=torch.zeros(max(self.rows, self.real_rows), dtype=torch.int64),
            seq_lens_cpu_upper_bound=seq_lens,
        )
        spec = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
        builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
        return builder.build(0, common)


BATCHES = {
    "decode": Batch((128 * 20 - 5, 700, 128 * 17 + 1), (1, 1, 1)),
    "decode-padded": Batch((128 * 20 - 5, 700), (1, 1), rows=4),
    "decode-short": Batch((3, 128), (1, 1)),
    "drafts": Batch((128 * 20 - 5, 700), (3, 3), drafts=2),
    "drafts-padded": Batch((128 * 19 + 1, 130), (3, 3), rows=12, drafts=2),
    "drafts-one-each": Batch((128 * 18, 700), (1, 1), drafts=2),
    "mixed": Batch((128 * 20 - 5, 700, 128 * 18 + 40, 5), (1, 1, 3, 5)),
    "mixed-drafts": Batch((128 * 20 - 5, 700, 128 * 18 + 40), (2, 2, 7), drafts=1),
    "prefill": Batch((128 * 17 + 3, 9), (6, 9)),
}
