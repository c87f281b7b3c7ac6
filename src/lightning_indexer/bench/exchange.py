# SPDX-License-Identifier: Apache-2.0
"""What the `peer` exchange costs: virtual ranks on one GPU, the same steps with and without it.

Every rank replays a graph of its own on a stream of its own, all begun together; a time is that of the slowest rank over the
layers of the graph. Contexts are short, so that nearly all of it is latency. "Local" is every rank's scores and shard
selection; what exchange and merge add to that contains what the ranks lose by going on in step, and by sharing one GPU.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import lightning_indexer as li
from lightning_indexer.bench.gate import WrongSelectionError
from lightning_indexer.bench.inputs import UNWRITTEN
from lightning_indexer.bench.timing import Protocol
from lightning_indexer.ops import backend_of
from lightning_indexer.ranks import VirtualRank, run_virtual
from lightning_indexer.traffic import exchange_bytes

CONTEXT = 2048  # tokens of a request
LAYERS = 20


@dataclass(frozen=True)
class ExchangeRow:
    """Times per layer of a step of `rows` requests on `world` ranks."""

    world: int
    rows: int
    local_us: float
    keys_us: float  # with keys exchanged and merged; all heads' queries were given
    queries_us: float  # with queries exchanged as well
    payload_bytes: int  # that a rank receives of keys

    def as_json(self) -> dict[str, float | int | str]:
        """A row of the result file; `us` is what exchange and merge add."""
        return {
            "op": "exchange",
            "world": self.world,
            "rows": self.rows,
            "transport": "peer",
            "dispatch": "sharded",
            "us": round(self.keys_us - self.local_us, 3),
            "us_queries": round(self.queries_us - self.keys_us, 3),
            "us_local": round(self.local_us, 3),
            "bytes": self.payload_bytes,
        }


def measure_exchange(
    world: int,
    heads: int,
    batches: Sequence[int],
    device: torch.device,
    protocol: Protocol,
    progress: Callable[[str, int, int], None],
) -> list[ExchangeRow]:
    """Rows of a table, one per batch, each verified against the unsharded selection once it was timed."""
    spec = li.IndexerSpec(num_heads=heads)
    blocks = CONTEXT // spec.block_size
    generator = torch.Generator(device).manual_seed(0)
    cache = li.IndexCache.empty(max(batches) * blocks, spec, device=device)
    cache.data.normal_(generator=generator)
    streams = [torch.cuda.Stream(device) for _ in range(world)]  # type: ignore[no-untyped-call]

    def make(ranks: VirtualRank) -> li.ContextParallelIndexer:
        torch.cuda.set_device(device)
        with torch.cuda.stream(streams[ranks.rank]):
            arguments = {"max_rows": max(batches), "max_seq_len": CONTEXT, "device": device, "transport": "peer"}
            indexer = li.ContextParallelIndexer(spec, ranks, dispatch="sharded", **arguments)  # type: ignore[arg-type]
            indexer.warmup()
        return indexer

    indexers = run_virtual(world, make)
    rows = []
    for done, batch in enumerate(batches):
        progress(f"exchange among {world}", done, len(batches))
        rows.append(_measure(indexers, streams, cache, batch, protocol, generator))
    return rows


def _measure(
    indexers: list[li.ContextParallelIndexer],
    streams: list[torch.cuda.Stream],
    cache: li.IndexCache,
    batch: int,
    protocol: Protocol,
    generator: torch.Generator,
) -> ExchangeRow:
    spec, device, world = cache.spec, cache.device, len(indexers)
    q = torch.randn(batch, spec.num_heads, spec.head_dim, generator=generator, device=device).bfloat16()
    table = torch.randperm(cache.num_pages, generator=generator, device=device).to(torch.int32)
    table = table[: batch * (CONTEXT // spec.block_size)].view(batch, -1)
    seq_lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device=device)
    want = li.decode(q, cache, table, seq_lens, spec=spec)
    plans = [indexer.plan_step(seq_lens) for indexer in indexers]
    outs = [torch.empty_like(want[indexer.owned_heads.start : indexer.owned_heads.stop]) for indexer in indexers]
    keys = [torch.empty(*want.shape, dtype=torch.int64, device=device) for _ in indexers]
    workspaces = [li.Workspace(spec, max_requests=batch, max_columns=spec.num_heads, device=device) for _ in indexers]
    backend = backend_of(device)

    def local(rank: int) -> None:
        step = (q, cache, table, seq_lens, spec, 1, CONTEXT, indexers[rank].shard, "score", keys[rank])
        backend.decode_keys(*step, plans[rank], workspaces[rank])

    def exchanged(rank: int) -> None:
        indexers[rank].decode(q, cache, table, seq_lens, out=outs[rank], plan=plans[rank])

    def gathered(rank: int) -> None:
        owned = indexers[rank].owned_heads
        own = q[:, owned.start : owned.stop]
        indexers[rank].decode(own, cache, table, seq_lens, out=outs[rank], plan=plans[rank])

    local(0)  # its kernels are loaded before anybody waits
    times = []
    for call in (local, exchanged, gathered):
        for out in outs:
            out.fill_(UNWRITTEN)
        times.append(_time_ranks(call, streams, protocol))
        for indexer, out in zip(indexers, outs, strict=True):
            indexer.raise_if_failed()
            if call is not local and not torch.equal(out, want[indexer.owned_heads.start : indexer.owned_heads.stop]):
                raise WrongSelectionError(f"rank {indexer.rank} of {world}, {batch} rows: not the unsharded selection")
    return ExchangeRow(world, batch, times[0], times[1], times[2], exchange_bytes(spec, world, 0) * batch)


def _time_ranks(call: Callable[[int], None], streams: list[torch.cuda.Stream], protocol: Protocol) -> float:
    """Time per layer of the slowest rank, the median of the replays."""
    torch.cuda.synchronize()
    graphs = []
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(LAYERS):
                call(rank)
        graphs.append(graph)
    times: list[float] = []
    for _ in range(protocol.warmup + protocol.replays):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ends = [torch.cuda.Event(enable_timing=True) for _ in streams]  # type: ignore[no-untyped-call]
        begin.record(streams[0])
        for graph, stream, end in zip(graphs, streams, ends, strict=True):
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                graph.replay()
            end.record(stream)
        torch.cuda.synchronize()
        times.append(max(begin.elapsed_time(end) for end in ends))
    return 1000 / LAYERS * statistics.median(times[protocol.warmup :])
