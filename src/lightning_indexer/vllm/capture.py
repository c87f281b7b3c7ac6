# SPDX-License-Identifier: Apache-2.0
"""Recording decode calls of an engine that runs; see `lightning_indexer.recording` for the file."""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_indexer.cache import IndexCache
from lightning_indexer.recording import Call, referenced, stored_pages, write
from lightning_indexer.spec import IndexerSpec
from lightning_indexer.vllm.ops import all_gather
from lightning_indexer.vllm.options import Options

logger = logging.getLogger("vllm.lightning_indexer")


class Recorder:
    """Keeps the first decode calls with long enough requests, until there are enough or the file would be too large.

    All ranks record together, since each has its own heads' queries and ids; the first one writes. The file is written anew
    when the number of calls has doubled, and at the end: a server that is stopped before has most of it.
    """

    def __init__(self, spec: IndexerSpec, order: str, group: dist.ProcessGroup, options: Options) -> None:
        assert options.capture is not None
        self.spec, self.order, self.group = spec, order, group
        self.path = Path(options.capture)
        self.most_calls = options.capture_calls
        self.most_bytes = options.capture_megabytes * 1_000_000
        unchosen = spec.topk * spec.block_size + 1  # from there on something is not selected
        self.least_tokens = unchosen if options.capture_tokens is None else options.capture_tokens
        self.calls: list[Call] = []
        self.finished = False

    def record(self, layer: str, q: torch.Tensor, cache: IndexCache, decode: Any, ids: torch.Tensor) -> None:
        """Add a call, if it is one to keep. Waits for the device.

        Args:
            layer: name of the layer.
            q: `[T, h, D]`, this rank's heads.
            cache: the layer's index cache.
            decode: the step's decode metadata.
            ids: `[h, T, K]`, what this rank chose.
        """
        if self.finished:
            return
        seq_lens = decode.seq_lens.to("cpu", copy=True)  # the engine's own memory, which the next step overwrites
        if not len(seq_lens) or int(seq_lens.max()) < self.least_tokens:
            return
        pages, table = referenced(decode.block_table.cpu(), seq_lens, self.spec.block_size)
        heads = self._of_all_ranks(q.permute(1, 0, 2)).permute(1, 0, 2)
        chosen = self._of_all_ranks(ids)
        stored = stored_pages(cache, pages)
        call = Call(layer, decode.decode_query_len, cache.format.name, self.order, heads, seq_lens, table, stored, chosen)
        fits = sum(kept.nbytes for kept in self.calls) + call.nbytes <= self.most_bytes
        if fits:
            self.calls.append(call)
        count = len(self.calls)
        self.finished = not fits or count == self.most_calls
        if dist.get_rank(self.group) == 0 and self.calls and (self.finished or count & (count - 1) == 0):
            write(self.path, self.spec, self.calls)
            size = sum(kept.nbytes for kept in self.calls) / 1e6
            logger.info("lightning-indexer: %d decode calls (%.1f MB) in %s", count, size, self.path)
        if self.finished:
            self.calls = []

    def _of_all_ranks(self, mine: torch.Tensor) -> torch.Tensor:
        """This rank's `[h, ...]` to `[H, ...]` on the CPU; of replicas the first."""
        gathered = all_gather(mine.contiguous(), self.group)
        return gathered[:: self.spec.replicas(len(gathered))].flatten(0, 1).cpu()
