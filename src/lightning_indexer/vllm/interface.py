# SPDX-License-Identifier: Apache-2.0
"""What this package relies on of vLLM's MiniMax-M3 indexer module, which is private to vLLM and may change."""

import dataclasses
import importlib.metadata
import inspect
from typing import Any

from lightning_indexer.vllm.options import refuse

VERSIONS = ("0.33",)  # releases whose module has been tested with
EXPECTED = " or ".join(f"{known}.*" for known in VERSIONS)

LAYER = (
    "num_kv_heads",
    "scale",
    "topk_blocks",
    "sparse_block_size",
    "num_index_heads",
    "index_head_dim",
    "prefix",
    "init_blocks",
    "local_blocks",
    "score_type",
    "cache_config",
    "indexer_kv_dtype",
    "topk_indices_buffer",
)
TABLE = ("attention_block_table", "sparse_block_table_out", "sparse_context_lens_out", "block_page_stride")
PARAMETERS = {
    "select_indexer_impl_cls": ("topk_blocks", "indexer_kv_dtype"),
    "MiniMaxM3IndexerBackend.get_builder_cls": (),
    "MiniMaxM3IndexerCache.__init__": ("self", "head_dim", "prefix", "cache_config", "indexer_kv_dtype", "backend_cls"),
    "MiniMaxM3IndexerCache.bind_kv_cache": ("self", "kv_cache"),
    "MiniMaxM3IndexerCache.get_kv_cache_spec": ("self", "vllm_config"),
    "MiniMaxM3IndexerTritonMetadataBuilder.build": ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    "MiniMaxM3IndexerImpl.__init__": ("self", *LAYER),
    "MiniMaxM3IndexerTritonImpl.forward": ("self", "index_query", *TABLE),
    "MiniMaxM3Indexer.__init__": ("self", *LAYER),
    "MiniMaxM3Indexer.forward": ("self", "index_query", *TABLE),
    "get_current_vllm_config": (),
    "get_forward_context": (),
    "get_tensor_model_parallel_world_size": (),
}
FIELDS = {
    "MiniMaxM3IndexerMetadata": {"num_actual_tokens", "num_decodes", "num_decode_tokens", "num_prefills", "prefill", "decode"},
    "MiniMaxM3IndexerDecodeMetadata": {"seq_lens", "block_table", "decode_query_len"},
    "MiniMaxM3IndexerPrefillMetadata": {"cu_seqlens_q", "seq_lens", "block_table", "max_query_len", "max_seq_len"},
}
ATTRIBUTES = ("current_platform", "MiniMaxM3IndexerImpl.indexer_backend_cls")


def is_known(version: str) -> bool:
    """Whether a release of vLLM is one that this package was written for."""
    return any(version == known or version.startswith(f"{known}.") for known in VERSIONS)


def check(module: Any) -> None:
    """Raise ValueError, with all that differs, unless vLLM's indexer module is one that this package was written for."""
    refuse(mismatches(module))


def mismatches(module: Any, version: str | None = None) -> list[str]:
    """How vLLM's indexer module differs from the one that this package was written for; empty if it does not.

    Args:
        module: `vllm.models.minimax_m3.common.indexer`.
        version: of vLLM; None asks the installation.
    """
    found = []
    version = importlib.metadata.version("vllm") if version is None else version
    if not is_known(version):
        found.append(f"vllm: expected version {EXPECTED}, got {version}")
    for name, wanted in PARAMETERS.items():
        part = _find(module, name)
        got = tuple(inspect.signature(part).parameters) if callable(part) else None
        if got != wanted:
            found.append(f"{name}: expected parameters {_listed(wanted)}, got {_listed(got)}")
    for name, fields in FIELDS.items():
        part = _find(module, name)
        has = {field.name for field in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else set()
        if not fields <= has:
            found.append(f"{name}: expected fields {_listed(sorted(fields))}, got {_listed(sorted(has))}")
    found += [f"{name}: expected one, got none" for name in ATTRIBUTES if _find(module, name) is None]
    return found


def _find(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _listed(names: Any) -> str:
    return "none" if names is None else f"({', '.join(names)})"
