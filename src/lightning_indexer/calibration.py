# SPDX-License-Identifier: Apache-2.0
"""From how many pages on a shared step is faster, measured on the ranks at hand.

For a few sizes of step, every rank replays graphs of layers that are shared, and of layers that each rank does alone, on few
pages and on many, all ranks at the same time. The two lines through the two points each cross at the threshold; of the ranks'
thresholds the largest counts, so that all choose alike.
"""

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightning_indexer.cache import IndexCache
from lightning_indexer.ops import make_plan

if TYPE_CHECKING:
    from lightning_indexer.indexer import ContextParallelIndexer

ROWS = (1, 4, 16, 64, 256)  # sizes of step, up to the indexer's limit
MANY_PAGES = 2048  # 64 MiB of bf16
POOL_PAGES = 4 * MANY_PAGES  # that layers take in turn, so that few of them are still in the L2
LAYERS = 8
WARMUP, REPLAYS = 2, 5
NEVER = 2**31 - 1
ALWAYS = -1

_CAPTURING = threading.Lock()


@dataclass(frozen=True)
class Line:
    """Time of a layer at two numbers of pages."""

    few: float
    many: float


def crossing(shared: Line, alone: Line, few: int, many: int) -> int:
    """Pages up to which a rank alone is no slower: where the lines through `few` and `many` pages cross."""
    if shared.few <= alone.few:
        return ALWAYS
    gain = ((alone.many - alone.few) - (shared.many - shared.few)) / (many - few)
    if gain <= 0:
        return NEVER
    return min(NEVER, few + int((shared.few - alone.few) / gain))


def calibrate(indexer: "ContextParallelIndexer", cache_format: str) -> list[tuple[int, int]]:
    """Thresholds in pages by rows of the step, the same on every rank. A collective; the kernels must have been loaded."""
    assert indexer.ranks is not None
    spec, device = indexer.spec, indexer.device
    free, _ = torch.cuda.mem_get_info(device)
    cache = IndexCache.empty(1, spec, cache_format, device)
    pages = max(2, min(POOL_PAGES, free // 4 // cache.page_bytes))
    pages = min(message["pages"] for message in indexer.ranks.gather({"pages": pages}, indexer.timeout))
    cache = IndexCache.empty(pages, spec, cache_format, device)
    cache.data.normal_()
    most = indexer.max_seq_len // spec.block_size
    jobs: list[Callable[[], None]] = []
    sizes = [rows for rows in ROWS if rows <= indexer.max_rows]
    bounds = []
    for rows in sizes:
        longer = max(2, min(most, MANY_PAGES // rows))
        bounds.append((rows, longer * rows))
        for blocks in (1, longer):
            for threshold in (ALWAYS, NEVER):
                jobs.append(_capture(indexer, cache, rows, blocks, threshold))
    times: list[float] = []
    for replay in jobs:
        torch.cuda.synchronize(device)
        indexer.ranks.gather({"ready": len(times)}, indexer.timeout)
        times.append(_time(replay))
    found = []
    for number, (few, many) in enumerate(bounds):
        shared_few, alone_few, shared_many, alone_many = times[4 * number : 4 * number + 4]
        found.append(crossing(Line(shared_few, shared_many), Line(alone_few, alone_many), few, many))
    told = indexer.ranks.gather({"thresholds": found}, indexer.timeout)
    return [(rows, max(message["thresholds"][number] for message in told)) for number, rows in enumerate(sizes)]


def _capture(
    indexer: "ContextParallelIndexer", cache: IndexCache, rows: int, blocks: int, threshold: int
) -> Callable[[], None]:
    """A graph of layers of one step, each on other pages."""
    spec, device = indexer.spec, indexer.device
    q = torch.randn(rows, len(indexer.owned_heads), spec.head_dim, device=device).to(cache.format.query_dtypes[0])
    seq_lens = torch.full((rows,), blocks * spec.block_size, dtype=torch.int32, device=device)
    tables = torch.randint(cache.num_pages, (LAYERS, rows, blocks), dtype=torch.int32, device=device)
    out = torch.empty(len(indexer.owned_heads), rows, spec.topk, dtype=torch.int32, device=device)
    bound = min(indexer.max_seq_len, blocks * spec.block_size)
    plan = make_plan(seq_lens, spec, bound, "score", indexer.shard, threshold, None)
    graph = torch.cuda.CUDAGraph()
    with _CAPTURING:  # virtual ranks are threads of this process
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device), capture_error_mode="thread_local"):
            for table in tables:
                indexer.run_plan(q, cache, table, seq_lens, out, plan)
    held = (graph, q, seq_lens, tables, out, plan)  # a graph does not keep what it reads
    return lambda: held[0].replay()


def _time(replay: Callable[[], None]) -> float:
    """Microseconds of a layer, the median of a few replays. Waits for this rank's stream only."""
    stream = torch.cuda.current_stream()
    times: list[float] = []
    for _ in range(WARMUP + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        replay()
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1000 / LAYERS * statistics.median(times[WARMUP:])
