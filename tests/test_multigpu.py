# SPDX-License-Identifier: Apache-2.0
"""`ContextParallelIndexer` on several GPUs, a process each: both transports against the dense kernel, bit for bit."""

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import NAN, OUT_OF_CACHE, lengths, owned_heads
from torch.multiprocessing.spawn import start_processes

import lightning_indexer as li
from lightning_indexer.verify.ranks import run_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def on_gpus(*worlds: int) -> Any:
    marks = {world: pytest.mark.skipif(world > GPUS, reason=f"{world} GPUs wanted, {GPUS} here") for world in worlds}
    return pytest.mark.parametrize("world", [pytest.param(world, marks=marks[world], id=f"P{world}") for world in worlds])


pytestmark = pytest.mark.multigpu

SPEC = li.IndexerSpec()
BLOCK, DIM, HEADS, TOPK = SPEC.block_size, SPEC.head_dim, SPEC.num_heads, SPEC.topk
POOL = 4_096
LONGEST = 131_072
ROWS = 128
LONG = [32_768, 81_920, 47_001, 65_537, 40_000, 77_777, 33_333, 55_555, 71_001, 36_864, 60_123, 81_919]  # 32K to 82K
SHORT = [300, 1, 0, 4_000, 128, 129, 7, 2_000, 5_000, 1_000, 640, 2_047]
THRESHOLD = 1_000  # pages: LONG is shared, SHORT is not
LAYERS = 57
SETUPS = {
    "collective": {"transport": "collective"},
    "peer": {"transport": "peer", "dispatch": "sharded"},
    "auto": {"transport": "auto", "dispatch": "auto", "threshold": THRESHOLD},
}


def keys_in(format: str, device: torch.device) -> li.IndexCache:
    """The same keys on every rank."""
    keys = torch.randn(POOL * BLOCK, DIM, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    if format == "bf16":
        return li.IndexCache.wrap(keys.view(POOL, BLOCK, DIM), SPEC)
    cache = li.IndexCache.empty(POOL, SPEC, format, device)
    cache.write(keys, torch.arange(len(keys), device=device))
    return cache


class Batch:
    """A step in memory that a graph finds again; every rank draws the same."""

    def __init__(self, tokens: list[int], query_len: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(len(tokens) * query_len + tokens[0])
        table = torch.randint(POOL, (len(tokens), LONGEST // BLOCK), generator=generator).to(torch.int32)
        for request, length in enumerate(tokens):
            table[request, math.ceil(length / BLOCK) :] = OUT_OF_CACHE
        q = torch.randn(len(tokens) * query_len + 3, HEADS, DIM, generator=generator)
        q[-3:] = NAN  # padding
        self.q, self.table, self.seq_lens = q.to(dtype).to(device), table.to(device), lengths(*tokens).to(device)
        self.query_len = query_len

    def copy_(self, other: "Batch") -> None:
        for mine, theirs in zip((self.q, self.table, self.seq_lens), (other.q, other.table, other.seq_lens), strict=True):
            mine.copy_(theirs)

    def dense(self, cache: li.IndexCache) -> torch.Tensor:
        return li.decode(self.q, cache, self.table, self.seq_lens, spec=SPEC, query_len=self.query_len)


def heads_differ(ids: torch.Tensor) -> float:
    """Share of rows on which no two heads select the same set of blocks; ids `[H, T, K]`."""
    sets = ids.sort(dim=-1).values
    same = torch.zeros(ids.shape[1], dtype=torch.bool, device=ids.device)
    for head in range(HEADS):
        for other in range(head):
            same |= (sets[head] == sets[other]).all(dim=-1)
    return 1 - float(same.float().mean())


@contextmanager
def indexer_of(setup: str, group: Any = None, **changes: Any) -> Iterator[li.ContextParallelIndexer]:
    """An indexer whose memory outlives the other ranks' use of it."""
    device = torch.device("cuda", torch.cuda.current_device())
    arguments = {"max_rows": ROWS, "max_seq_len": LONGEST, "device": device, "dispatch": "sharded"}
    indexer = li.ContextParallelIndexer(SPEC, group, **{**arguments, **SETUPS[setup], **changes})
    assert indexer.transport == ("collective" if setup == "collective" else "peer")
    yield indexer
    torch.cuda.synchronize()
    indexer.raise_if_failed()
    dist.barrier(group=group, device_ids=[device.index])


def select(setup: str, backend: str, rank: int) -> list[str]:
    """What went wrong on this rank: nothing, for every format, Q, with queries gathered or given, eager and in a graph."""
    group = dist.new_group(backend=backend)
    device = torch.device("cuda", rank)
    wrong, own = [], owned_heads(rank, dist.get_world_size(), HEADS)
    own = slice(own[0], own[-1] + 1)
    with indexer_of(setup, group) as indexer:
        for format in ("bf16", "fp8", "nvfp4"):
            cache = keys_in(format, device)
            indexer.warmup(format, query_lens=(1, 4, 8))
            for dtype in cache.format.query_dtypes[:1] if format == "bf16" else cache.format.query_dtypes:
                for query_len in (1, 4, 8):
                    case = f"{format}, {dtype}, Q {query_len}"
                    long, short = (Batch(tokens, query_len, dtype, device) for tokens in (LONG, SHORT))
                    want = {batch: batch.dense(cache)[own] for batch in (long, short)}
                    if heads_differ(long.dense(cache)[:, : len(LONG) * query_len]) < 0.9:
                        wrong.append(f"{case}: heads select alike")
                    live = Batch(SHORT, query_len, dtype, device)
                    ids = torch.full_like(want[long], -77)

                    def step(q: torch.Tensor, live: Batch = live, ids: torch.Tensor = ids, cache: Any = cache) -> None:
                        indexer.decode(q, cache, live.table, live.seq_lens, query_len=live.query_len, out=ids)

                    for q, given in ((live.q[:, own], "own heads"), (live.q, "all heads")):
                        step(q)
                        torch.cuda.synchronize()
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            step(q)
                        for batch, name in ((long, "long"), (short, "short"), (long, "long again")):
                            live.copy_(batch)
                            for run, how in ((partial(step, q), "eager"), (graph.replay, "replayed")):
                                ids.fill_(-77)
                                run()
                                if not torch.equal(ids, want[batch]):
                                    wrong.append(f"{case}, {given}, {name}, {how}")
                        del graph  # before its communicator
    return wrong


@on_gpus(2, 4, 8)
@pytest.mark.parametrize(
    ("setup", "backend"), [("collective", "nccl"), ("peer", "nccl"), ("auto", "cpu:gloo,cuda:nccl")], ids=lambda name: name
)
def test_selections(world, setup, backend):
    """A14, A21: TP 2, 4, 8; Q 1, 4, 8; bf16, fp8, NVFP4; uneven contexts of 32K to 82K tokens, and short ones in turn."""
    assert run_ranks(world, partial(select, setup, backend), start_method="spawn", gpus=True) == [[]] * world


def select_by_page(transport: str, rank: int) -> list[str]:
    """As `select`, each rank with its own pages only; steps of few and of many rows in turn, whose queries travel apart.

    Then the rows of a step as chunks of a prefill.
    """
    device, world = torch.device("cuda", rank), dist.get_world_size()
    wrong, own = [], owned_heads(rank, world, HEADS)
    own = slice(own[0], own[-1] + 1)
    changes = {"max_rows": 2 * ROWS, "shard_by": "page", "transport": transport}
    with indexer_of("peer" if transport == "peer" else "collective", **changes) as indexer:
        for format in ("bf16", "nvfp4"):
            cache = keys_in(format, device)
            held, dtype = cache.held_by(indexer.shard), cache.format.query_dtypes[0]
            indexer.warmup(format, query_lens=(1, 4), prefill=True)
            batches = [Batch(LONG, 1, dtype, device), Batch(LONG * 4, 4, dtype, device), Batch(SHORT, 4, dtype, device)]
            want = [batch.dense(cache)[own] for batch in batches]
            for _ in range(3):
                for number, batch in enumerate(batches):
                    ids = indexer.decode(batch.q[:, own], held, batch.table, batch.seq_lens, query_len=batch.query_len)
                    if not torch.equal(ids, want[number]):
                        wrong.append(f"{format}, batch {number}")
                many = batches[1]
                bounds = torch.arange(len(many.seq_lens) + 1, device=device) * many.query_len
                ids = indexer.prefill(many.q[:, own], held, many.table, bounds, many.seq_lens)
                if not torch.equal(ids, want[1]):
                    wrong.append(f"{format}, prefill")
    return wrong


@on_gpus(2, 4, 8)
@pytest.mark.parametrize("transport", ["collective", "peer"])
def test_a_cache_that_the_group_holds_once(world, transport):
    assert run_ranks(world, partial(select_by_page, transport), start_method="spawn", gpus=True) == [[]] * world


def layers(setup: str, rank: int) -> list[str]:
    """A whole step in one graph, replayed long and short, with a rank that is late at random; then eager ones between."""
    device, world = torch.device("cuda", rank), dist.get_world_size()
    own = owned_heads(rank, world, HEADS)
    own = slice(own[0], own[-1] + 1)
    cache, wrong = keys_in("bf16", device), []
    batches = {name: Batch(tokens, 1, torch.bfloat16, device) for name, tokens in (("long", LONG), ("short", SHORT))}
    want = {name: batch.dense(cache)[own] for name, batch in batches.items()}
    live = Batch(SHORT, 1, torch.bfloat16, device)
    ids = torch.full((LAYERS, *want["long"].shape), -77, dtype=torch.int32, device=device)
    with indexer_of(setup) as indexer:
        indexer.warmup()
        arguments = cache, live.table, live.seq_lens
        indexer.decode(live.q[:, own], *arguments)
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan = indexer.plan_step(live.seq_lens)
            for layer in range(LAYERS):
                indexer.decode(live.q[:, own], *arguments, out=ids[layer], plan=plan)
        generator = torch.Generator().manual_seed(1)  # the same draws on every rank
        for turn in range(20):
            name = ("long", "short", "short", "long", "long")[turn % 5]
            live.copy_(batches[name])
            ids.fill_(-77)
            late, cycles = (int(torch.randint(most, (1,), generator=generator)) for most in (world, 2_000_000))
            if rank == late:
                torch.cuda._sleep(cycles)
            graph.replay()
            if not (ids == want[name]).all():
                wrong.append(f"turn {turn}, {name}")
            if turn % 7 == 0:
                for each in ("long", "short"):
                    live.copy_(batches[each])
                    if not torch.equal(indexer.decode(live.q[:, own], *arguments), want[each]):
                        wrong.append(f"turn {turn}, eager, {each}")
        del graph
    return wrong


@on_gpus(2, 4, 8)
@pytest.mark.parametrize("setup", list(SETUPS))
def test_57_layers_in_a_graph_with_a_late_rank(world, setup):
    assert run_ranks(world, partial(layers, setup), start_method="spawn", gpus=True) == [[]] * world


def die(rank: int, world: int, folder: str, setup: str, every_head: bool) -> None:
    """Rank 1 ends after one step, as a process that is killed; the others go on and write down what they are told."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    batch = Batch(LONG, 1, torch.bfloat16, torch.device("cuda", rank))
    cache = keys_in("bf16", torch.device("cuda", rank))
    arguments = {"max_rows": ROWS, "max_seq_len": LONGEST, "device": "cuda", "timeout": 3.0, "dispatch": "sharded"}
    indexer = li.ContextParallelIndexer(SPEC, transport=setup, **arguments)
    indexer.warmup()
    q = batch.q if every_head else batch.q[:, indexer.owned_heads.start : indexer.owned_heads.stop]
    for _ in range(1 if rank == 1 else 3):
        indexer.decode(q, cache, batch.table, batch.seq_lens)
    if rank == 1:
        torch.cuda.synchronize()
        os._exit(0)
    try:
        torch.cuda.synchronize()
        indexer.raise_if_failed()
    except RuntimeError as error:
        Path(folder, f"rank{rank}").write_text(str(error))
    os._exit(0)


@on_gpus(2, 4, 8)
@pytest.mark.parametrize(("setup", "every_head"), [("peer", True), ("peer", False), ("collective", True)])
def test_a_process_that_dies(world, setup, every_head):
    """In the exchange of keys, or in the scorer that waits for queries. Nobody hangs.

    With "peer" the others name it; with NCCL its watchdog ends them after the group's time-out.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(die, (world, folder, setup, every_head), nprocs=world, join=False, start_method="spawn")
        for process in context.processes:
            process.join(120)
        alive = [process.is_alive() for process in context.processes]
        for process in context.processes:
            process.kill()
        told = [Path(folder, f"rank{rank}") for rank in range(world) if rank != 1]
        assert alive == [False] * world
        for rank, file in zip((rank for rank in range(world) if rank != 1), told, strict=True):
            if setup == "peer":
                assert f"rank {rank} of {world} waited in vain for rank 1" in file.read_text()
            else:
                assert file.exists() or context.processes[rank].exitcode != 0
