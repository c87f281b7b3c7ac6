# SPDX-License-Identifier: Apache-2.0
"""Decode calls of a running engine in one safetensors file: what was asked, the index keys behind it, and what was chosen.

    metadata      recording = "1", spec = the `IndexerSpec` as JSON, calls = a JSON list of {layer, query_len, cache, order}
    <i>.q             [T, H, D], all heads, in the dtype that was scored
    <i>.seq_lens      [R] int32
    <i>.block_table   [R, columns] int32, pages of this file; 0 past a request's blocks
    <i>.pages         [pages, B, row], the pages that the requests refer to, as stored; 8-bit formats as bytes
    <i>.ids           [H, T, K] int32, the ids that the ranks chose

A recording holds no tokens and no text.
"""

import dataclasses
import errno
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_indexer.cache import BYTE_FORMATS, FORMATS, IndexCache
from lightning_indexer.checks import check_choice, check_int, check_tensor, require
from lightning_indexer.spec import IndexerSpec

VERSION = "1"
QUERY_DTYPES = tuple({dtype: None for format in FORMATS.values() for dtype in format.query_dtypes})
INSTALL = "safetensors is needed for recordings: pip install 'lightning-indexer[replay]'"


@dataclass(frozen=True)
class Call:
    """One decode call of one layer, on the CPU."""

    layer: str
    query_len: int
    format: str
    order: str
    q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    pages: torch.Tensor
    ids: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors, by their names in the file."""
        names = ("q", "seq_lens", "block_table", "pages", "ids")
        return {name: getattr(self, name) for name in names}

    def cache(self, spec: IndexerSpec) -> IndexCache:
        """Its pages as a cache."""
        return IndexCache.wrap(self.pages, spec, self.format)

    def check(self, spec: IndexerSpec) -> None:
        """Raise ValueError unless the tensors fit each other and the geometry, whatever they hold."""
        check_choice("cache", self.format, tuple(FORMATS))
        check_int("query_len", self.query_len, 1)
        check_choice("order", self.order, ("score", "block"))
        cache = self.cache(spec)
        check_tensor("seq_lens", self.seq_lens, ("R",), (torch.int32,))
        requests = len(self.seq_lens)
        require(requests > 0, "seq_lens", "at least one request", "none")
        rows = requests * self.query_len
        check_tensor("q", self.q, (rows, spec.num_heads, spec.head_dim), cache.format.query_dtypes)
        check_tensor("ids", self.ids, (spec.num_heads, rows, spec.topk), (torch.int32,))
        check_tensor("block_table", self.block_table, (requests, "columns"), (torch.int32,))
        columns, longest = self.block_table.shape[1], int(self.seq_lens.max())
        most = columns * spec.block_size
        require(longest <= most, "seq_lens", f"at most {most} tokens, what block_table holds", longest)
        inside = bool(((self.block_table >= 0) & (self.block_table < cache.num_pages)).all())
        require(inside, "block_table", f"pages below {cache.num_pages}", "others")
        inside = bool(((self.ids >= -1) & (self.ids < columns)).all())
        require(inside, "ids", f"blocks below {columns}, or -1", "others")


def referenced(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that requests refer to, each once, and their table in places of that list.

    Args:
        block_table: `[R, max_blocks]` int32 on the CPU; what lies past a request's blocks may be anything.
        seq_lens: `[R]` int32 on the CPU.

    Returns:
        `[pages]` int64, and `[R, columns]` int32, as wide as the longest request; 0 past a request's blocks.
    """
    blocks = (seq_lens.clamp(min=0) + block_size - 1) // block_size
    columns = int(blocks.max()) if len(blocks) else 0
    used = torch.arange(columns) < blocks[:, None]
    pages, places = torch.unique(block_table[:, :columns][used].long(), return_inverse=True)
    table = torch.zeros(len(blocks), columns, dtype=torch.int32)
    table[used] = places.to(torch.int32)
    return pages, table


def check_path(path: Path) -> None:
    """Try whether `write` can make a file of that name, without touching one that is there.

    Raises:
        ImportError, OSError: as `write`.
    """
    _safetensors()
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write(path: Path, spec: IndexerSpec, calls: list[Call]) -> None:
    """Write a recording; an earlier one of that name is there, whole, until the new one is.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be written.
    """
    library = _safetensors()
    about = [{"layer": call.layer, "query_len": call.query_len, "cache": call.format, "order": call.order} for call in calls]
    metadata = {"recording": VERSION, "spec": json.dumps(dataclasses.asdict(spec)), "calls": json.dumps(about)}
    tensors = {f"{number}.{name}": tensor for number, call in enumerate(calls) for name, tensor in call.tensors.items()}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        library.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata=metadata)
        unfinished.replace(path)
    except library.SafetensorError as error:  # of the disk
        raise OSError(str(error)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> tuple[IndexerSpec, list[Call]]:
    """Geometry and calls of a recording.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: not a recording, or one that is damaged; in one line.
    """
    library = _safetensors()
    try:
        with library.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            require(metadata.get("recording") == VERSION, "recording", repr(VERSION), repr(metadata.get("recording")))
            spec = IndexerSpec(**json.loads(metadata["spec"]))
            calls = [_call(file, number, about) for number, about in enumerate(json.loads(metadata["calls"]))]
        require(len(calls) > 0, "calls", "at least one", "none")
        for number, call in enumerate(calls):
            try:
                call.check(spec)
            except ValueError as error:
                raise ValueError(f"call {number}: {error}") from error
    except (ValueError, KeyError, TypeError, OSError, library.SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a recording of decode calls that can be read: {reason}") from error
    return spec, calls


def _call(file: Any, number: int, about: dict[str, Any]) -> Call:
    names = ("q", "seq_lens", "block_table", "pages", "ids")
    tensors = {name: file.get_tensor(f"{number}.{name}") for name in names}
    return Call(about["layer"], about["query_len"], about["cache"], about["order"], **tensors)


def stored_pages(cache: IndexCache, pages: torch.Tensor) -> torch.Tensor:
    """Some pages of a cache on the CPU, as a recording holds them: 8-bit formats as bytes, which any device can index."""
    require(cache.scale is None, "cache", "one without scales per token", "one with")
    data = cache.data.view(torch.uint8) if cache.format.name in BYTE_FORMATS else cache.data
    return data.index_select(0, pages.clamp(0, cache.num_pages - 1).to(data.device)).cpu()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(INSTALL) from error
    return safetensors
