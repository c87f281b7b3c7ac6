# SPDX-License-Identifier: Apache-2.0
"""What can be asked of a running engine's workers."""

from typing import Any

from lightning_indexer.vllm.engine import live_indexers


class WorkerExtension:
    """For vLLM's `--worker-extension-cls`: adds a method to each worker, which `collective_rpc` calls by its name."""

    def lightning_indexer_statistics(self) -> list[dict[str, Any]]:
        """Per indexer of the worker: rank, transport, dispatch, thresholds, and layer calls by whether they were shared."""
        return [indexer.statistics() for indexer in live_indexers()]
