# SPDX-License-Identifier: Apache-2.0
"""From how many pages on a shared step is faster, measured on the ranks at hand.

For a few sizes of step, every rank replays graphs of layers that are shared, and of layers that each rank does alone, on few
pages and on many, all ranks at the same time. The two lines through the two points each cross at the threshold; of the ranks'
thresholds the largest counts, so that all choose alike.
"""

import statistics
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightning_indexer.cache import IndexCache, is_packed
from lightning_indexer.ops import make_plan
from lightning_indexer.workspace import StepPlan

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


@dataclass(frozen=True)
class Layers:
    """Layers of one step, each on other pages, and the plan that shares them or not."""

    q: torch.Tensor
    cache: IndexCache
    tables: torch.Tensor  # [layers, R, blocks]
    seq_lens: torch.Tensor
    out: torch.Tensor
    plan: StepPlan


def calibrate(indexer: "ContextParallelIndexer", cache_format: str) -> list[tuple[int, int]]:
    """Thresholds in pages by rows of the step, the same on every rank. A collective; the kernels must have been loaded."""
    with torch.cuda.device(indexer.device):
        before = torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            found = _calibrate(indexer, cache_format)
        before.wait_stream(stream)
    return found


def _calibrate(indexer: "ContextParallelIndexer", cache_format: str) -> list[tuple[int, int]]:
    ranks, spec, device, timeout = indexer.ranks, indexer.spec, indexer.device, indexer.setup_timeout
    assert ranks is not None
    page_bytes = IndexCache.empty(1, spec, cache_format, device).page_bytes
    free, _ = torch.cuda.mem_get_info()
    told = ranks.gather({"pages": max(2, min(POOL_PAGES, free // 4 // page_bytes))}, timeout)
    cache = IndexCache.empty(min(message["pages"] for message in told), spec, cache_format, device)
    if is_packed(cache.format):
        cache.data.view(torch.uint8).random_(0, 120)  # no NaN
    else:
        cache.data.normal_()
    most = indexer.max_seq_len // spec.block_size
    sizes = [(rows, max(2, min(most, MANY_PAGES // rows))) for rows in ROWS if rows <= indexer.max_rows]
    steps = [
        _layers(indexer, cache, rows, blocks, threshold)
        for rows, many in sizes
        for blocks in (1, many)
        for threshold in (ALWAYS, NEVER)
    ]
    # Virtual ranks are threads of this process: nobody may wait for the GPU, or give it work, while another one captures.
    torch.cuda.synchronize()
    ranks.gather({"made": len(steps)}, timeout)
    with _CAPTURING:
        graphs = [_capture(indexer, step) for step in steps]
    ranks.gather({"captured": len(graphs)}, timeout)
    times: list[float] = []
    for graph in graphs:
        times.append(_time(graph))
        ranks.gather({"timed": len(times)}, timeout)
    found = []
    for number, (rows, many) in enumerate(sizes):
        shared_few, alone_few, shared_many, alone_many = times[4 * number : 4 * number + 4]
        found.append(crossing(Line(shared_few, shared_many), Line(alone_few, alone_many), rows, rows * many))
    told = ranks.gather({"thresholds": found}, timeout)
    return [(rows, max(message["thresholds"][number] for message in told)) for number, (rows, _) in enumerate(sizes)]


def _layers(indexer: "ContextParallelIndexer", cache: IndexCache, rows: int, blocks: int, threshold: int) -> Layers:
    """Layers of a step of `rows` requests of `blocks` blocks."""
    spec, device = indexer.spec, indexer.device
    q = torch.randn(rows, len(indexer.owned_heads), spec.head_dim, device=device).to(cache.format.query_dtypes[0])
    seq_lens = torch.full((rows,), blocks * spec.block_size, dtype=torch.int32, device=device)
    tables = torch.randint(cache.num_pages, (LAYERS, rows, blocks), dtype=torch.int32, device=device)
    out = torch.empty(len(indexer.owned_heads), rows, spec.topk, dtype=torch.int32, device=device)
    bound = min(indexer.max_seq_len, blocks * spec.block_size)
    plan = make_plan(seq_lens, spec, bound, "score", indexer.shard, threshold, is_packed(cache.format), None)
    return Layers(q, cache, tables, seq_lens, out, plan)


def _capture(indexer: "ContextParallelIndexer", step: Layers) -> torch.cuda.CUDAGraph:
    """A graph of the layers, which must outlive it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for table in step.tables:
            indexer.run_plan(step.q, step.cache, table, step.seq_lens, step.out, step.plan)
    return graph


def _time(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a layer, the median of a few replays. Waits for this rank's stream only."""
    times: list[float] = []
    for _ in range(WARMUP + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1000 / LAYERS * statistics.median(times[WARMUP:])
