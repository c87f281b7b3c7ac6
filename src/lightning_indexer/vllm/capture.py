# SPDX-License-Identifier: Apache-2.0
"""Recording decode calls of an engine that runs; see `lightning_indexer.recording` for the file."""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_indexer.agreement import MAX_ERROR_CHARACTERS, gather_messages, require_agreement
from lightning_indexer.cache import IndexCache
from lightning_indexer.recording import Call, check_path, referenced, stored_pages, write
from lightning_indexer.spec import IndexerSpec
from lightning_indexer.vllm.ops import all_gather
from lightning_indexer.vllm.options import Options

logger = logging.getLogger("vllm.lightning_indexer")


class Recorder:
    """Keeps the first decode calls with long enough requests, until there are enough or the file would be too large.

    All ranks record together, since each has its own heads' queries and ids; the first one writes. The file is written anew
    when the number of calls has doubled, and at the end: a server that is stopped before has most of it.

    Where an engine has several groups, each has a file of its own: the name with the group's first rank in it. A file that
    cannot be written any more ends the recording, and not the engine.

    Raises:
        ValueError: on every rank: the first one cannot write the file.
    """

    def __init__(self, spec: IndexerSpec, order: str, group: dist.ProcessGroup, options: Options) -> None:
        assert options.capture is not None
        self.spec, self.order, self.group = spec, order, group
        self.path = _path_of(group, Path(options.capture))
        self.most_calls = options.capture_calls
        self.most_bytes = options.capture_megabytes * 1_000_000
        unchosen = spec.topk * spec.block_size + 1  # from there on something is not selected
        self.least_tokens = unchosen if options.capture_tokens is None else options.capture_tokens
        self.calls: list[Call] = []
        self.finished = False
        require_agreement("capture", gather_messages({"error": self._obstacle()}, group, None))

    def _obstacle(self) -> str | None:
        """Why this rank cannot do its part; None if it can."""
        try:
            if dist.get_rank(self.group) == 0:
                check_path(self.path)
        except (OSError, ImportError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return f"expected a file that can be written, got {str(self.path)!r} ({reason})"[-MAX_ERROR_CHARACTERS:]
        return None

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
        if self.calls and (self.finished or count & (count - 1) == 0):
            written = not dist.get_rank(self.group) and self._write()
            self.finished |= not gather_messages({"written": written}, self.group, None)[0]["written"]
        if self.finished:
            self.calls = []

    def _write(self) -> bool:
        """Write what there is, and tell so; whether it succeeded."""
        count, size = len(self.calls), sum(kept.nbytes for kept in self.calls) / 1e6
        try:
            write(self.path, self.spec, self.calls)
        except OSError as error:
            logger.error("lightning-indexer: no more decode calls are recorded: %s cannot be written (%s)", self.path, error)
            return False
        logger.info("lightning-indexer: %d decode calls (%.1f MB) in %s", count, size, self.path)
        return True

    def _of_all_ranks(self, mine: torch.Tensor) -> torch.Tensor:
        """This rank's `[h, ...]` to `[H, ...]` on the CPU; of replicas the first."""
        gathered = all_gather(mine.contiguous(), self.group)
        return gathered[:: self.spec.replicas(len(gathered))].flatten(0, 1).cpu()


def _path_of(group: dist.ProcessGroup, path: Path) -> Path:
    """The file of a group: `calls.safetensors`, or `calls.rank4.safetensors` of one of several, by its first rank of all."""
    ranks = dist.get_process_group_ranks(group)
    return path if len(ranks) == dist.get_world_size() else path.with_name(f"{path.stem}.rank{ranks[0]}{path.suffix}")
