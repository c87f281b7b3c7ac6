# SPDX-License-Identifier: Apache-2.0
"""What the exchange costs: the same steps with and without it, on contexts so short that nearly all of it is latency.

"Local" is every rank's scores and shard selection; what exchange and merge add to that contains what the ranks lose by going
on in step. `measure_exchange` has virtual ranks on one GPU, which also take turns on it: every rank replays a graph of its own
on a stream of its own, all begun together; a time is that of the slowest rank over the layers of the graph.
`bench.gpus` measures the same calls on ranks with a GPU each.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import lightning_indexer as li
from lightning_indexer.bench.gate import WrongSelectionError
from lightning_indexer.bench.inputs import UNWRITTEN, draw_pool
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
    transport: str
    local_us: float
    keys_us: float  # with keys exchanged and merged; all heads' queries were given
    queries_us: float  # with queries exchanged as well
    payload_bytes: int  # that a rank receives of keys
    gpus: int = 1  # that the ranks have

    def as_json(self) -> dict[str, float | int | str]:
        """A row of the result file; `us` is what exchange and merge add."""
        told: dict[str, float | int | str] = {
            "op": "exchange",
            "world": self.world,
            "rows": self.rows,
            "transport": self.transport,
            "dispatch": "sharded",
            "us": round(self.keys_us - self.local_us, 3),
            "us_queries": round(self.queries_us - self.keys_us, 3),
            "us_local": round(self.local_us, 3),
            "bytes": self.payload_bytes,
        }
        return told if self.gpus == 1 else told | {"gpus": self.gpus}


@dataclass(frozen=True)
class ExchangeInputs:
    """A step of `rows` requests, the same on every rank, and its unsharded selection."""

    cache: li.IndexCache
    q: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    want: torch.Tensor  # [H, T, K]

    @classmethod
    def draw(cls, cache: li.IndexCache, rows: int, generator: torch.Generator) -> "ExchangeInputs":
        """Requests of `CONTEXT` tokens; `cache` holds at least so many."""
        spec, device = cache.spec, cache.device
        q = torch.randn(rows, spec.num_heads, spec.head_dim, generator=generator, device=device)
        q = q.to(cache.format.query_dtypes[0])
        table = torch.randperm(cache.num_pages, generator=generator, device=device).to(torch.int32)
        table = table[: rows * (CONTEXT // spec.block_size)].view(rows, -1)
        seq_lens = torch.full((rows,), CONTEXT, dtype=torch.int32, device=device)
        return cls(cache, q, table, seq_lens, li.decode(q, cache, table, seq_lens, spec=spec))


class ExchangeCalls:
    """What one rank does in a layer, without the exchange, with it, and with the exchange of queries, too."""

    def __init__(self, indexer: li.ContextParallelIndexer, inputs: ExchangeInputs) -> None:
        self.indexer, self.inputs = indexer, inputs
        self.own = slice(indexer.owned_heads.start, indexer.owned_heads.stop)
        format = inputs.cache.format.name
        self.plan = indexer.plan_step(inputs.seq_lens, max_seq_len=CONTEXT, cache_format=format)
        self.out = torch.empty_like(inputs.want[self.own])
        self.keys = torch.empty(*inputs.want.shape, dtype=torch.int64, device=indexer.device)
        spec, rows = indexer.spec, len(inputs.seq_lens)
        self.workspace = li.Workspace(spec, max_requests=rows, max_columns=spec.num_heads, device=indexer.device)

    def local(self) -> None:
        """Scores of the shard, and its candidates for all heads."""
        step, indexer = self.inputs, self.indexer
        arguments = step.q, step.cache, step.table, step.seq_lens, indexer.spec, 1, CONTEXT, indexer.shard, "score"
        backend_of(indexer.device).decode_keys(*arguments, self.keys, self.plan, self.workspace)

    def exchanged(self) -> None:
        """A layer of a caller that has all heads' queries."""
        self._decode(self.inputs.q)

    def gathered(self) -> None:
        """A layer of a caller that has its own heads' queries."""
        self._decode(self.inputs.q[:, self.own])

    def _decode(self, q: torch.Tensor) -> None:
        self.indexer.decode(q, self.inputs.cache, self.inputs.table, self.inputs.seq_lens, out=self.out, plan=self.plan)

    def verify(self) -> None:
        """Require that the last layer selected rightly, and forget what it did.

        Raises:
            WrongSelectionError: it did not.
        """
        self.indexer.raise_if_failed()
        if not torch.equal(self.out, self.inputs.want[self.own]):
            rank, rows = self.indexer.rank, len(self.inputs.seq_lens)
            raise WrongSelectionError(f"rank {rank} of {self.indexer.world}, {rows} rows: not the unsharded selection")
        self.out.fill_(UNWRITTEN)


def exchange_row(calls: ExchangeCalls, times: Sequence[float], gpus: int) -> ExchangeRow:
    """A row of the times of `local`, `exchanged` and `gathered` on the slowest rank."""
    indexer, rows = calls.indexer, len(calls.inputs.seq_lens)
    received = exchange_bytes(indexer.spec, indexer.world, 0) * rows
    local, keys, queries = times
    return ExchangeRow(indexer.world, rows, str(indexer.transport), local, keys, queries, received, gpus)


def exchange_pool(
    spec: li.IndexerSpec, format: str, rows: int, device: torch.device, generator: torch.Generator
) -> li.IndexCache:
    """Pages for steps of up to `rows` requests."""
    return draw_pool(rows * (CONTEXT // spec.block_size), spec, format, device, generator)


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
    generator = torch.Generator(device).manual_seed(0)
    cache = exchange_pool(spec, "bf16", max(batches), device, generator)
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
        inputs = ExchangeInputs.draw(cache, batch, generator)
        ranks = [ExchangeCalls(indexer, inputs) for indexer in indexers]
        ranks[0].local()  # its kernels are loaded before anybody waits
        times = [_time_ranks([calls.local for calls in ranks], streams, protocol)]
        for name in ("exchanged", "gathered"):
            times.append(_time_ranks([getattr(calls, name) for calls in ranks], streams, protocol))
            for calls in ranks:
                calls.verify()
        rows.append(exchange_row(ranks[0], times, 1))
    return rows


def capture_layers(call: Callable[[], None], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A graph of `LAYERS` calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(LAYERS):
            call()
    return graph


def _time_ranks(calls: list[Callable[[], None]], streams: list[torch.cuda.Stream], protocol: Protocol) -> float:
    """Time per layer of the slowest rank, the median of the replays."""
    torch.cuda.synchronize()
    graphs = [capture_layers(call, stream) for call, stream in zip(calls, streams, strict=True)]
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
