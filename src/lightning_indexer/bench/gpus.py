# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on several GPUs, a process each: every way to take a step, what the exchange adds, and the links.

    none, replicated        each rank its own heads over the whole context: the step without context parallelism
    collective, sharded     torch.distributed, which is NCCL or RCCL here
    peer, sharded           within the kernels
    peer, auto              as the device chooses from the lengths, by thresholds that the indexer's own warm-up measured

All ranks begin a case together and replay the same graphs by the protocol of `bench.timing`; a time is that of the slowest
rank. A caller has its own heads' queries, so their gather is in the time of what is shared.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import lightning_indexer as li
from lightning_indexer.bench.cases import DecodeCase, RankCase
from lightning_indexer.bench.exchange import (
    LAYERS,
    ExchangeCalls,
    ExchangeInputs,
    ExchangeRow,
    capture_layers,
    exchange_pool,
    exchange_row,
)
from lightning_indexer.bench.gate import WrongSelectionError, verify_call, verify_replays
from lightning_indexer.bench.inputs import UNWRITTEN, Step, draw_pool, layer_pages, prepare
from lightning_indexer.bench.roofs import Roofs, measure_roofs
from lightning_indexer.bench.run import POOL_BYTES, QUERY_FORMATS, SEED, Facts, query_dtype
from lightning_indexer.bench.timing import Protocol, Rotation, Timing, elapsed_us, plan_rotation, time_step
from lightning_indexer.collective import all_gather_into
from lightning_indexer.ranks import ProcessRanks
from lightning_indexer.terminal import Progress
from lightning_indexer.verify.ranks import run_ranks

MODES = (("none", "replicated"), ("collective", "sharded"), ("peer", "sharded"), ("peer", "auto"))
LINK_BYTES = (512, 8192, 32_768, 131_072, 524_288)  # of a rank's part
TIMEOUT = 600.0  # seconds that a rank waits for another, which may have kernels to compile


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    world: int
    heads: int
    cases: Sequence[RankCase]
    rows: Sequence[int]  # of the steps that are exchanged
    format: str
    queries: str | None
    protocol: Protocol
    commit: str | None


@dataclass(frozen=True)
class ModeRow:
    """A case taken in one way."""

    case: RankCase
    format: str
    queries: str
    transport: str
    dispatch: str
    chosen: str  # "sharded" or "replicated"
    timing: Timing
    layers: int
    index_bytes: int  # that a rank must read, as it was chosen
    roof_us: float

    def as_json(self) -> dict[str, Any]:
        """A row of the result file."""
        fields = self.case.fields() | {"transport": self.transport, "dispatch": self.dispatch}
        return {
            "op": "cp",
            "format": self.format,
            "queries": self.queries,
            "heads": self.case.heads,
            **fields,
            "chosen": self.chosen,
            "us": round(self.timing.us, 3),
            "us_min": round(self.timing.us_min, 3),
            "us_max": round(self.timing.us_max, 3),
            "bytes": self.index_bytes,
            "flops": self.case.flops(li.IndexerSpec()) // (self.case.world if self.chosen == "sharded" else 1),
            "pct_roof": round(100 * self.roof_us / self.timing.us, 2),
            "layers": self.layers,
        }


@dataclass(frozen=True)
class LinkRow:
    """A collective of the group by itself."""

    world: int
    collective: str
    payload: int  # bytes of a rank's part
    us: float

    def as_json(self) -> dict[str, Any]:
        """A row of the result file."""
        told = {"op": "link", "world": self.world, "collective": self.collective, "payload": self.payload}
        return told | {"us": round(self.us, 3)}


@dataclass(frozen=True)
class GpusResult:
    """A run on several GPUs, as its ranks agree on it."""

    facts: Facts
    roofs: Roofs  # of the GPU that reads most slowly
    thresholds: list[tuple[int, int]]  # of "auto"
    rows: list[ModeRow]
    exchanged: list[ExchangeRow]
    links: list[LinkRow]

    def as_json(self) -> dict[str, Any]:
        """As `bench.run.Result`, with the thresholds of "auto" in pages by rows."""
        measured: list[ModeRow | ExchangeRow | LinkRow] = [*self.rows, *self.exchanged, *self.links]
        rows = [row.as_json() for row in measured]
        return self.facts.as_json(self.roofs) | {
            "thresholds": self.thresholds,
            "rows": rows,
            "failures": [],
        }


def measure_gpus(plan: Plan) -> GpusResult:
    """Start a rank on each of the first `plan.world` GPUs and measure.

    Raises:
        ProcessRaisedException: of torch: a rank failed; with its traceback.
    """
    return run_ranks(plan.world, partial(_measure, plan), timeout=TIMEOUT, start_method="spawn", gpus=True)[0]


def _measure(plan: Plan, rank: int) -> GpusResult:
    """What rank 0 returns counts; all of them have the same."""
    assert dist.group.WORLD is not None
    ranks, device = ProcessRanks(dist.group.WORLD), torch.device("cuda", rank)
    progress: Callable[[str, int, int], None] = Progress() if rank == 0 else lambda label, done, total: None
    spec = li.IndexerSpec(num_heads=plan.heads)
    facts = Facts.read(device, plan.commit)
    progress("roofs", 0, 1)
    roofs = min(_told(ranks, measure_roofs(plan.protocol, device)), key=lambda roofs: roofs.read_tbps)
    most_rows = max(max(len(case.seq_lens) * case.query_len for case in plan.cases), *plan.rows)
    longest = max(max(case.seq_lens) for case in plan.cases)
    indexers = []
    for done, (transport, dispatch) in enumerate(MODES):
        progress("indexers", done, len(MODES))
        named = "auto" if transport == "none" else transport
        arguments = {"max_rows": most_rows, "max_seq_len": longest, "device": device, "transport": named, "timeout": TIMEOUT}
        indexer = li.ContextParallelIndexer(spec, dispatch=dispatch, **arguments)  # type: ignore[arg-type]
        indexer.warmup(plan.format, query_lens=sorted({case.query_len for case in plan.cases} | {1}))
        indexers.append(indexer)
    result = GpusResult(
        facts,
        roofs,
        indexers[-1].thresholds,
        _rows(plan, ranks, indexers, facts, roofs, progress),
        _exchanges(plan, ranks, indexers[1:3], progress),
        _links(plan, ranks, progress),
    )
    ranks.gather({"done": rank}, None)  # nobody takes its memory away while another may still read it
    if isinstance(progress, Progress):
        progress.close()
    return result


def _rows(
    plan: Plan,
    ranks: ProcessRanks,
    indexers: list[li.ContextParallelIndexer],
    facts: Facts,
    roofs: Roofs,
    progress: Callable[[str, int, int], None],
) -> list[ModeRow]:
    device = indexers[0].device
    spec = li.IndexerSpec(num_heads=plan.heads)
    one = li.IndexCache.empty(1, spec, plan.format)
    token_bytes, dtype = one.token_bytes, query_dtype(one.format, plan.queries)
    generator = torch.Generator(device).manual_seed(SEED)  # GPUs of one type draw alike; `_same_everywhere` sees to it
    most = POOL_BYTES // (spec.block_size * token_bytes)
    # By the bytes of a rank's shard: also then more than the L2 is read before a key is read again.
    rotations = [
        plan_rotation(layer_pages(case, spec), case.index_bytes(spec, token_bytes), facts.l2_bytes, most)
        for case in plan.cases
    ]
    pool = draw_pool(max(rotation.views * rotation.pages for rotation in rotations), spec, plan.format, device, generator)
    rows = []
    for done, (case, rotation) in enumerate(zip(plan.cases, rotations, strict=True)):
        progress(f"cp {case.name}", done, len(plan.cases))
        whole = DecodeCase(case.groups, case.query_len, case.heads)
        step = prepare(whole, pool, rotation, generator, dtype)
        _same_everywhere(ranks, step)
        verified = {view: verify_call(step, view) for view in (0, rotation.views - 1)}
        for (transport, dispatch), indexer in zip(MODES, indexers, strict=True):
            timing, shared = _time(indexer, step, verified, rotation, plan.protocol, ranks)
            told = max(_told(ranks, timing), key=lambda timing: timing.us)
            moved = (case if shared else whole).index_bytes(spec, token_bytes)
            chosen = "sharded" if shared else "replicated"
            names = plan.format, QUERY_FORMATS[dtype], transport, dispatch, chosen
            rows.append(ModeRow(case, *names, told, rotation.layers, moved, roofs.us("cp", moved, 0)))
    return rows


def _time(
    indexer: li.ContextParallelIndexer,
    step: Step,
    verified: dict[int, torch.Tensor],
    rotation: Rotation,
    protocol: Protocol,
    ranks: ProcessRanks,
) -> tuple[Timing, bool]:
    """This rank's time of the step's layers, whose first and last select rightly; and whether their work was shared."""
    own = slice(indexer.owned_heads.start, indexer.owned_heads.stop)
    q = step.q[:, own].contiguous()
    ids = torch.full_like(step.ids[:, own], UNWRITTEN)
    format = step.caches[0].format.name
    lengths, query_len = step.seq_lens, step.query_len
    planned = partial(
        indexer.plan_step,
        lengths,
        query_len=query_len,
        max_seq_len=step.block_table.shape[1] * step.spec.block_size,
        cache_format=format,
    )
    shares = planned()

    def call(view: int) -> None:
        cache, out = step.caches[view], ids[view]
        indexer.decode(q, cache, step.block_table, lengths, query_len=query_len, out=out, plan=shares)

    def plan() -> None:
        planned(out=shares)

    before = indexer.steps()["sharded"]
    call(0)
    shared = indexer.transport == "collective" or indexer.steps()["sharded"] > before
    ids.fill_(UNWRITTEN)
    ranks.gather({"ready": True}, None)
    timing = time_step(call, plan, rotation, protocol)
    indexer.raise_if_failed()
    for view, found in verified.items():
        verify_replays(replace(step, ids=ids), view, found[own])
    return timing, shared


def _exchanges(
    plan: Plan,
    ranks: ProcessRanks,
    indexers: list[li.ContextParallelIndexer],
    progress: Callable[[str, int, int], None],
) -> list[ExchangeRow]:
    """What each transport adds to the local selection."""
    device, spec = indexers[0].device, indexers[0].spec
    generator = torch.Generator(device).manual_seed(SEED)
    cache = exchange_pool(spec, plan.format, max(plan.rows), device, generator)
    found = []
    for done, rows in enumerate(plan.rows):
        progress(f"exchange among {plan.world}", done, len(plan.rows))
        inputs = ExchangeInputs.draw(cache, rows, generator)
        for indexer in indexers:
            calls = ExchangeCalls(indexer, inputs)
            times = []
            for call in (calls.local, calls.exchanged, calls.gathered):
                times.append(_slowest(ranks, call, plan.protocol))
                if call != calls.local:
                    calls.verify()
            found.append(exchange_row(calls, times, plan.world))
    return found


def _links(plan: Plan, ranks: ProcessRanks, progress: Callable[[str, int, int], None]) -> list[LinkRow]:
    """Collectives of the group alone: what `collective` cannot be faster than."""
    found = []
    for done, payload in enumerate(LINK_BYTES):
        progress("collectives", done, len(LINK_BYTES))
        device = torch.device("cuda", ranks.rank)
        part = torch.full((payload,), ranks.rank, dtype=torch.uint8, device=device)
        whole = torch.empty(payload * plan.world, dtype=torch.uint8, device=device)
        split = torch.arange(plan.world, dtype=torch.uint8, device=device).repeat_interleave(payload)
        calls = {
            "all-gather": partial(all_gather_into, whole, part),
            "all-to-all": partial(dist.all_to_all_single, whole, split),
        }
        expected = {"all-gather": split, "all-to-all": torch.full_like(split, ranks.rank)}
        for name, call in calls.items():
            whole.fill_(255)
            us = _slowest(ranks, call, plan.protocol)
            if not torch.equal(whole, expected[name]):
                raise RuntimeError(f"{name} of {payload} bytes: rank {ranks.rank} received something else than was sent")
            found.append(LinkRow(plan.world, name, payload, us))
    return found


def _slowest(ranks: ProcessRanks, call: Callable[[], Any], protocol: Protocol) -> float:
    """Time per call in a graph, the median of the replays on the slowest rank."""
    call()
    torch.cuda.synchronize()
    graph = capture_layers(call)
    ranks.gather({"captured": True}, None)
    times = elapsed_us(itertools.repeat(graph.replay), protocol)
    return float(max(_told(ranks, statistics.median(times)))) / LAYERS


def _told(ranks: ProcessRanks, mine: Any) -> list[Any]:
    """What every rank has, by rank."""
    told: list[Any] = [None] * ranks.world
    dist.all_gather_object(told, mine)
    return told


def _same_everywhere(ranks: ProcessRanks, step: Step) -> None:
    """Require that all ranks drew the same step."""
    first = step.caches[0].load_pages(torch.zeros(1, dtype=torch.int64, device=step.q.device))
    drawn = [float(tensor.double().sum()) for tensor in (step.block_table, step.q, first)]
    if any(other != drawn for other in _told(ranks, drawn)):
        raise WrongSelectionError("the ranks drew different inputs: their GPUs are not of one type")
