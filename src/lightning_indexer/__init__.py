# SPDX-License-Identifier: Apache-2.0
"""Lightning Indexer: exact, context-parallel block selection for MiniMax-M3 and its kin."""

from lightning_indexer.cache import IndexCache
from lightning_indexer.indexer import ContextParallelIndexer
from lightning_indexer.norm_rope import NormRope
from lightning_indexer.ops import decode, merge_keys, plan_step, prefill, score_blocks, select_keys
from lightning_indexer.precompile import warmup
from lightning_indexer.spec import IndexerSpec, Shard
from lightning_indexer.table import SparseTable
from lightning_indexer.workspace import StepPlan, Workspace

__version__ = "0.1.0"

__all__ = [
    "ContextParallelIndexer",
    "IndexCache",
    "IndexerSpec",
    "NormRope",
    "Shard",
    "SparseTable",
    "StepPlan",
    "Workspace",
    "decode",
    "merge_keys",
    "plan_step",
    "prefill",
    "score_blocks",
    "select_keys",
    "warmup",
]
