# SPDX-License-Identifier: Apache-2.0
"""A worker of a vLLM engine on a GPU, reduced to its index caches: vLLM's configuration, groups, layers, metadata and graphs.

Needs the Python of vLLM and none of its compiled operators, so what those bring is missing: attention, and its block tables.
"""

import importlib.machinery
import math
import os
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm
import vllm.models
from vllm.config import AttentionConfig, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, get_tp_group, get_world_group, init_distributed_environment
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, get_kv_cache_spec, init_attn_backend
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

import lightning_indexer_vllm
from lightning_indexer.vllm.options import SECTION

PACKAGE = "vllm.models.minimax_m3"
FOLDER = os.path.join(os.path.dirname(vllm.__file__), "models", "minimax_m3")
HEADS, DIM, TOPK, BLOCK = 4, 128, 16, 128
GEOMETRY = {
    "sparse_num_index_heads": HEADS,
    "sparse_index_dim": DIM,
    "sparse_topk_blocks": TOPK,
    "sparse_block_size": BLOCK,
}

# Without the `__init__` of the model's package, which loads the vision tower.
package = types.ModuleType(PACKAGE)
package.__path__ = [FOLDER]
package.__spec__ = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
package.__spec__.submodule_search_locations = [FOLDER]
sys.modules[PACKAGE] = vllm.models.minimax_m3 = package
lightning_indexer_vllm.register()

from vllm.models.minimax_m3.common import indexer as base  # noqa: E402 (after the plugin, as in an engine)


def config_of(world: int, drafts: int, options: dict[str, Any], *, requests: int, tokens: int, longest: int) -> VllmConfig:
    """A configuration as `vllm serve` makes it, of a MiniMax-M3 without weights.

    Args:
        world: tensor_parallel_size.
        drafts: speculative tokens.
        options: our section of `additional_config`.
        requests, tokens: of a step, at most.
        longest: tokens of a request, at most.
    """
    config = VllmConfig(
        attention_config=AttentionConfig(minimax_m3_indexer_cp=world > 1), additional_config={SECTION: options}
    )
    config.parallel_config.tensor_parallel_size = world
    config.cache_config.block_size = BLOCK
    config.scheduler_config.max_num_seqs = requests
    config.scheduler_config.max_num_batched_tokens = tokens
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    sizes = [count * (1 + drafts) for count in (1, 2, 4, requests)]
    config.compilation_config.cudagraph_capture_sizes = sizes
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    text = SimpleNamespace(sparse_attention_config=GEOMETRY)
    model = SimpleNamespace(
        hf_config=SimpleNamespace(text_config=text),
        hf_text_config=text,
        max_model_len=longest,
        dtype=torch.bfloat16,
        is_moe=False,
        enforce_eager=False,
        enable_sleep_mode=False,
        sleep_mode_offload_cudagraph=False,
    )
    object.__setattr__(config, "model_config", model)
    if drafts:
        speculative = SimpleNamespace(
            num_speculative_tokens=drafts,
            parallel_drafting=False,
            uses_dynamic_speculative_decoding=lambda: False,
        )
        object.__setattr__(config, "speculative_config", speculative)
    return config


class Worker:
    """One rank: sparse layers over given index caches, metadata from vLLM's builder, a FULL graph for each decode batch size.

    Ranks share the GPU.

    Args:
        config: of `config_of`.
        rank: of the process group that is there.
        pages: index keys of each layer, `[layers, pages, 128, 128]`.
    """

    def __init__(self, config: VllmConfig, rank: int, pages: torch.Tensor) -> None:
        self.config, self.device = config, pages.device
        world = config.parallel_config.tensor_parallel_size
        heads = max(1, HEADS // world)
        requests, tokens = config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
        with set_current_vllm_config(config):
            connect(world, rank)
            self.shared = torch.full((tokens, heads, TOPK), -77, dtype=torch.int32, device=self.device)
            self.layers = [layer_of(number, heads, self.shared) for number in range(len(pages))]
            specs = get_kv_cache_spec(config)
            groups = [KVCacheGroupSpec(list(specs), next(iter(specs.values())))]
            self.caches = KVCacheConfig(num_blocks=pages.shape[1], kv_cache_tensors=[], kv_cache_groups=groups)
            self.groups, _, _ = init_attn_backend(self.caches, config, self.device)
        for layer, keys in zip(self.layers, pages, strict=True):
            layer.index_cache.bind_kv_cache(keys[:, None])
        self.buffers = InputBuffers(requests, tokens, self.device)
        columns = math.ceil(config.model_config.max_model_len / BLOCK)
        self.table = torch.zeros(requests, columns, dtype=torch.int32, device=self.device)
        self.slots = torch.full((1, tokens), -1, dtype=torch.int64, device=self.device)
        self.q = torch.zeros(tokens, heads * DIM, dtype=torch.bfloat16, device=self.device)
        self.ids = torch.full((len(pages), tokens, heads, TOPK), -77, dtype=torch.int32, device=self.device)
        self.query_len = 1 + config.num_speculative_tokens
        self.graphs = CudaGraphManager(config, self.device, config.compilation_config.cudagraph_mode, self.query_len)

    def capture(self) -> None:
        """All graphs, the largest first, of dummy batches."""
        longest = self.config.model_config.max_model_len

        def forward_of(graph: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            batch = InputBatch.make_dummy(
                graph.num_reqs, graph.num_tokens, self.buffers, max_query_len=graph.uniform_token_count
            )
            self.table[: graph.num_reqs].zero_()
            starts = torch.from_numpy(batch.query_start_loc_np)
            metadata = self.metadata(starts, graph.num_tokens, self.query_len, longest, for_cudagraph_capture=True)
            return lambda mode: self.forward(metadata, graph.num_tokens, mode)

        with set_current_vllm_config(self.config):
            self.graphs.capture(forward_of)

    @torch.inference_mode()
    def step(self, tokens: list[int], counts: list[int], table: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Run a scheduled batch: from a graph, padded to its size, if one serves it.

        Args:
            tokens: of each request, this step's included.
            counts: this step's.
            table: pages, `[R, columns]`, as many columns as the longest request may have.
            q: queries of the heads of this rank, `[rows, h, 128]`.

        Returns:
            ids `[layers, h, rows, K]` with the rows that were padded, and whether a graph ran.
        """
        rows, longest = sum(counts), max(counts)
        uniform = longest if longest * len(counts) == rows else None
        graph = self.graphs.dispatch(len(counts), rows, uniform, 0)
        replayed = graph.cg_mode == CUDAGraphMode.FULL
        starts = torch.full((graph.num_reqs + 1,), rows, dtype=torch.int32)
        starts[: len(counts) + 1] = torch.tensor([0, *counts]).cumsum(0)
        self.buffers.query_start_loc[: len(starts)].copy_(starts)
        self.buffers.seq_lens.zero_()
        self.buffers.seq_lens[: len(tokens)].copy_(torch.tensor(tokens))
        self.table.zero_()
        self.table[: len(tokens)].copy_(table)
        self.q[:rows].copy_(q.flatten(1))
        self.shared.fill_(-77)
        self.ids.fill_(-77)
        metadata = self.metadata(starts, graph.num_tokens, longest, max(tokens))
        if replayed:
            self.graphs.run_fullgraph(graph)
        else:
            self.forward(metadata, graph.num_tokens, CUDAGraphMode.NONE)
        assert bool((self.ids[:, graph.num_tokens :] == -77).all()), "rows after the last were written"
        return self.ids[:, : graph.num_tokens].transpose(1, 2).clone(), replayed

    def metadata(self, starts: torch.Tensor, rows: int, query_len: int, longest: int, **how: bool) -> dict[str, Any]:
        """What the layers' builder makes of the buffers; `starts` is the host's copy of where requests begin."""
        requests = len(starts) - 1
        return build_attn_metadata(
            attn_groups=self.groups,
            num_reqs=requests,
            num_tokens=rows,
            query_start_loc_gpu=self.buffers.query_start_loc[: requests + 1],
            query_start_loc_cpu=starts,
            max_query_len=query_len,
            seq_lens=self.buffers.seq_lens,
            max_seq_len=longest,
            block_tables=[self.table[:requests]],
            slot_mappings=self.slots[:, :rows],
            kv_cache_config=self.caches,
            **how,
        )

    def forward(self, metadata: dict[str, Any], rows: int, mode: CUDAGraphMode) -> None:
        """One pass of all layers; the copy takes the ids where attention would read them, before the next layer's."""
        with set_forward_context(metadata, self.config, num_tokens=rows, cudagraph_runtime_mode=mode):
            for layer, ids in zip(self.layers, self.ids, strict=True):
                layer(self.q[:rows])
                ids.copy_(self.shared)


def connect(world: int, rank: int) -> None:
    """vLLM's groups, without its communicators: NCCL takes no two ranks on one GPU, and no layer here speaks through them."""
    silent = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    with mock.patch.object(type(current_platform), "get_device_communicator_cls", return_value=silent):
        init_distributed_environment(world, rank, "env://", 0, backend="gloo")
        ensure_model_parallel_initialized(world, 1)
    for group in (get_world_group(), get_tp_group()):
        group.device_communicator = None
    assert (get_tp_group().rank_in_group, get_tp_group().world_size) == (rank, world)


def layer_of(number: int, heads: int, ids: torch.Tensor) -> Any:
    """vLLM's indexer module of one layer, as the model constructs it."""
    return base.MiniMaxM3Indexer(
        num_kv_heads=heads,
        scale=DIM**-0.5,
        topk_blocks=TOPK,
        sparse_block_size=BLOCK,
        num_index_heads=heads,
        index_head_dim=DIM,
        prefix=f"model.layers.{number}.self_attn.attn",
        init_blocks=0,
        local_blocks=1,
        indexer_kv_dtype="bf16",
        topk_indices_buffer=ids,
    )
