# SPDX-License-Identifier: Apache-2.0
"""Recorded decode calls run again: as cases to compare, and against the clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lightning_indexer as li
from lightning_indexer import recording
from lightning_indexer.cache import BYTE_FORMATS, FORMATS
from lightning_indexer.ranks import VirtualRank
from lightning_indexer.text import table
from lightning_indexer.verify.case import Case
from lightning_indexer.verify.compare import on_ranks

CACHE_FORMATS = tuple(name for name, format in FORMATS.items() if torch.bfloat16 in format.query_dtypes)
WARMUP = 1

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Time:
    """Milliseconds of one call on a number of ranks: the slowest rank's median."""

    case: str
    world: int
    alone_ms: float  # each rank scores its own heads over the whole context
    shared_ms: float | None  # each rank scores all heads over its share, and they exchange; None for one rank


def cases(path: Path, format: str | None = None) -> list[Case]:
    """The calls of a recording; `chosen` is what the engine's ranks selected.

    Args:
        path: the file.
        format: one of `CACHE_FORMATS` to store the keys in; None leaves them as they were recorded.

    Raises:
        ValueError: not a recording, or a damaged one.
        ImportError: safetensors is not installed.
    """
    spec, calls = recording.read(path)
    return [_case(spec, number, call, format) for number, call in enumerate(calls)]


def _case(spec: li.IndexerSpec, number: int, call: recording.Call, format: str | None) -> Case:
    cache = call.cache(spec)
    coded = call.format in BYTE_FORMATS
    longest = int(call.seq_lens.max()) if len(call.seq_lens) else 0
    case = Case(
        name=f"call {number}, {call.layer}, {len(call.seq_lens)} x {longest:,}, Q {call.query_len}",
        spec=spec,
        q=call.q,
        pages=cache.dequantize().bfloat16() if coded else call.pages,  # exact: every coded key is one of e4m3
        block_table=call.block_table,
        seq_lens=call.seq_lens,
        query_len=call.query_len,
        chosen=call.ids,
        cache=cache if coded else None,
    )
    if format is None or format == call.format:
        return case
    return replace(case, q=case.q.bfloat16(), cache=None).stored_as(format)


def time_calls(
    timed: list[Case],
    worlds: list[int],
    repeats: int,
    progress: Progress,
    device: torch.device,
    transport: str = "auto",
) -> list[Time]:
    """Times of every case on every number of ranks, made by `verify.compare.on_ranks`.

    Ranks that share a machine slow each other down: these times compare formats, lengths and versions, not numbers of GPUs.
    """
    times = []
    for world in worlds:
        progress(f"timing {len(timed)} calls on {world} ranks", 0, 1)
        ranks = on_ranks(world, partial(_time_rank, repeats), timed, device, transport)
        for number, case in enumerate(timed):
            alone, shared = (max(rank[number][mode] for rank in ranks) for mode in (0, 1))
            times.append(Time(case.name, world, alone, shared if world > 1 else None))
    return times


def _time_rank(
    repeats: int, timed: list[Case], ranks: VirtualRank | None, device: torch.device, transport: str
) -> list[tuple[float, float]]:
    """This rank's medians, alone and shared, in milliseconds."""
    rows, longest = max(len(case.q) for case in timed), max(int(case.seq_lens.max()) for case in timed)
    limits: dict[str, Any] = {"max_rows": rows, "max_seq_len": max(1, longest), "device": device, "transport": transport}
    found = []
    for mode in ("replicated", "sharded"):
        indexer = li.ContextParallelIndexer(timed[0].spec, ranks, dispatch=mode, **limits)
        if device.type != "cpu":  # ranks share the GPU
            for format in sorted({case.keys.format.name for case in timed}):
                indexer.warmup(format, query_lens=sorted({case.query_len for case in timed}))
        found.append([_median(indexer, case, repeats, device) for case in timed])
    return list(zip(*found, strict=True))


def _median(indexer: li.ContextParallelIndexer, case: Case, repeats: int, device: torch.device) -> float:
    heads = indexer.owned_heads
    q = case.q[:, heads.start : heads.stop].contiguous()
    out = torch.empty(len(heads), len(q), case.spec.topk, dtype=torch.int32, device=device)
    times = []
    for _ in range(WARMUP + repeats):
        begin = time.perf_counter()
        indexer.decode(q, case.keys, case.block_table, case.seq_lens, query_len=case.query_len, out=out)
        if device.type != "cpu":
            torch.cuda.current_stream(device).synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    indexer.raise_if_failed()
    return statistics.median(times[WARMUP:])


def time_table(times: list[Time]) -> str:
    """One line per case and number of ranks."""
    rows = [["case", "ranks", "alone ms", "shared ms"]]
    for row in times:
        shared = "-" if row.shared_ms is None else f"{row.shared_ms:.3f}"
        rows.append([row.case, str(row.world), f"{row.alone_ms:.3f}", shared])
    return table(rows)
