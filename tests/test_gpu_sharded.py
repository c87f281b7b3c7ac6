# SPDX-License-Identifier: Apache-2.0
"""An index cache that a group holds once, on a GPU: virtual ranks that share it, and processes."""

import dataclasses
import math
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import shards
from support import OUT_OF_CACHE, Inputs, lengths, owned_heads
from test_gpu_peer import BLOCK, DEVICE, DIM, LONGEST, POOL, ROWS, SHORT, SKEWED, SPEC, TOPK, Virtual, dense, inputs_of
from torch.multiprocessing.spawn import start_processes

import lightning_indexer as li
from lightning_indexer import triton_backend

pytestmark = pytest.mark.gpu

POISON = 0x7F  # bytes of pages that nobody wrote: NaN in every format
ALLOCATIONS = ("shuffled", "in a row", "all on one rank", "a shared prefix")


def cache_of(format: str, pages: int = POOL) -> li.IndexCache:
    cache = li.IndexCache.empty(pages, SPEC, format, DEVICE)
    keys = torch.randn(pages * BLOCK, DIM, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    cache.write(keys, torch.arange(len(keys), device=DEVICE))
    return cache


@pytest.fixture(scope="module")
def caches() -> dict[str, li.IndexCache]:
    return {format: cache_of(format) for format in ("bf16", "fp8", "nvfp4")}


def allocated(cache: li.IndexCache, how: str, world: int, tokens: list[int], query_len: int = 1, **more: Any) -> Inputs:
    """A step whose pages lie as an allocator may give them; columns past a request's blocks stay outside the cache."""
    made = inputs_of(cache.data, tokens, query_len, **more)
    inside = made.block_table != OUT_OF_CACHE
    pages = made.block_table
    if how == "in a row":
        pages = torch.arange(pages.numel(), device=DEVICE).view(pages.shape) % POOL
    elif how == "all on one rank":
        pages = (pages // world).clamp(max=POOL // world - 1) * world + world - 1
    elif how == "a shared prefix":
        pages = torch.where(torch.arange(pages.shape[1], device=DEVICE) < 17, pages[:1], pages)
    return dataclasses.replace(made, pages=cache, block_table=torch.where(inside, pages, OUT_OF_CACHE).to(torch.int32))


class Sharded(Virtual):
    """Ranks that hold what is theirs of caches, and nothing else."""

    def __init__(self, world: int, caches: list[li.IndexCache], **changes: Any) -> None:
        super().__init__(world, shard_by="page", **changes)
        self.held = {id(cache): [cache.held_by(indexer.shard) for indexer in self.indexers] for cache in caches}
        torch.cuda.synchronize()

    def cache(self, rank: int, inputs: Inputs) -> li.IndexCache:
        return self.held[id(inputs.pages)][rank]


# Lists and operators.


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("requests", [1, 5, 256])
def test_lists(world, requests):
    """Every owned block once, ascending, at up to 20,000 blocks; a plan made anew, as a captured graph makes it."""
    generator = torch.Generator().manual_seed(requests)
    for longest in (BLOCK * 20_000 - 3, BLOCK * 1025):
        width = -(-longest // BLOCK)
        seq_lens = torch.randint(longest + 1, (requests,), generator=generator).to(torch.int32)
        seq_lens[0] = longest
        seq_lens[requests // 2] = 5 if requests > 1 else longest
        tables = [torch.randint(1 << 20, (requests, width), generator=generator).to(torch.int32) for _ in range(2)]
        tables[1][0] = world - 1
        for shard in shards(world)[:: max(1, world - 1)]:
            plans: dict[str, li.StepPlan] = {}
            for order, table in (("score", tables[0]), ("score", tables[1]), ("block", tables[0])):
                plan = li.plan_step(
                    seq_lens.to(DEVICE),
                    spec=SPEC,
                    max_seq_len=longest,
                    order=order,
                    shard=shard,
                    block_table=table.to(DEVICE),
                    out=plans.get(order),
                )
                plans[order] = plan
                counts, found = plan.before.cpu().diff().tolist(), plan.owned.cpu()
                for request, length in enumerate(seq_lens.tolist()):
                    pages = table[request, : math.ceil(length / BLOCK)].long()
                    if order == "block" and len(pages) <= TOPK:
                        assert counts[request] == (len(pages) > 0 and request % world == shard.rank)
                        continue
                    mine = shard.owned_blocks(pages)
                    assert counts[request] == len(mine)
                    assert torch.equal(found[1, request, : len(mine)].long(), mine)
                    assert torch.equal(found[0, request, : len(mine)].long(), shard.local_pages(pages[mine]))


@pytest.mark.parametrize("how", ALLOCATIONS)
@pytest.mark.parametrize(
    ("world", "format", "query_len"),
    [(2, "bf16", 4), (3, "bf16", 1), (4, "fp8", 4), (4, "nvfp4", 1), (8, "bf16", 1), (8, "nvfp4", 16)],
)
def test_operators_on_shards(caches, world, format, query_len, how):
    """Scores bit for bit those of the whole cache; the candidates select alike, both orders."""
    whole = caches[format]
    inputs = allocated(whole, how, world, SKEWED, query_len, padding=2)
    rest = (inputs.block_table, inputs.seq_lens)
    scored = li.score_blocks(inputs.q, whole, *rest, **inputs.rules)
    seen = torch.zeros_like(scored, dtype=torch.int32)
    keys: dict[str, list[torch.Tensor]] = {"apart": [], "score": [], "block": []}
    for shard in shards(world):
        own = whole.held_by(shard)
        scores = torch.full_like(scored, -77.0)
        li.score_blocks(inputs.q, own, *rest, **inputs.rules, shard=shard, out=scores)
        written = scores != -77
        assert torch.equal(scores[written], scored[written])
        seen += written.int()
        by_page = {"shard": shard, "block_table": inputs.block_table}
        keys["apart"].append(li.select_keys(scores, inputs.seq_lens, **inputs.rules, **by_page))
        for order in ("score", "block"):
            plan = li.plan_step(inputs.seq_lens, spec=SPEC, max_seq_len=LONGEST, order=order, cache_format=format, **by_page)
            out = torch.full((4, len(inputs.q), TOPK), -77, dtype=torch.int64, device=DEVICE)
            step = (inputs.q, own, *rest, SPEC, query_len, LONGEST)
            triton_backend.decode_keys(*step, shard, order, out, plan, None)
            keys[order].append(out)
        assert torch.equal(keys["score"][-1], keys["apart"][-1])
    assert torch.equal(seen == 1, scored > -torch.inf)
    for order in ("score", "block"):
        ids = li.merge_keys(torch.stack(keys[order]), inputs.seq_lens, **inputs.rules, order=order)
        assert torch.equal(ids, dense(inputs, order=order))


# Virtual ranks.


@pytest.mark.parametrize(("world", "format"), [(2, "bf16"), (4, "bf16"), (8, "bf16"), (4, "fp8"), (4, "nvfp4")])
def test_virtual_ranks(caches, world, format):
    """Every allocation, skewed and short batches, Q 1 and 4, heads gathered or not, padding; never replicated."""
    warm = {"cache_format": format, "query_lens": (1, 4)}
    ranks = Sharded(world, [caches[format]], warm=warm, dispatch="auto")
    for how in ALLOCATIONS:
        step = caches[format], how, world
        ranks.check(allocated(*step, SKEWED))
        ranks.check(allocated(*step, SHORT, 4, padding=3))
        ranks.check(allocated(*step, SKEWED, 4), every_head=True)
        ranks.check(allocated(*step, SHORT), every_head=True)
        ranks.check(allocated(*step, [0, 0]))
    assert all(indexer.dispatch == "sharded" for indexer in ranks.indexers)
    assert all(indexer.steps()["replicated"] == 0 for indexer in ranks.indexers)


def test_by_block_with_a_table(caches):
    """Ascending ids, unscored where all blocks are taken, and the sparse table of the owned heads."""
    world, cache = 4, caches["bf16"]
    ranks = Sharded(world, [cache], warm={"order": "block", "page_size": 16})
    for tokens in (SKEWED, SHORT):
        inputs = allocated(cache, "shuffled", world, tokens)
        attention = inputs.block_table.clone()
        tables = [li.SparseTable.empty(SPEC, 1, len(tokens), 16, attention) for _ in range(world)]
        ids: list[Any] = [None] * world
        torch.cuda.synchronize()
        for rank in range(world):
            with torch.cuda.stream(ranks.streams[rank]):
                step = inputs.q[:, ranks.own(rank)], ranks.cache(rank, inputs), inputs.block_table, inputs.seq_lens
                ids[rank] = ranks.indexers[rank].decode(*step, order="block", sparse_table=tables[rank])
        ranks.finish()
        whole = li.SparseTable.empty(SPEC, 4, len(tokens), 16, attention)
        want = dense(inputs, order="block", sparse_table=whole)
        for rank in range(world):
            assert torch.equal(ids[rank], want[ranks.own(rank)])
            assert torch.equal(tables[rank].block_table_out, whole.block_table_out[ranks.own(rank)])
            assert torch.equal(tables[rank].context_lens_out, whole.context_lens_out[ranks.own(rank)])


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "in each call"])
@pytest.mark.parametrize("world", [2, 4])
def test_graphs(caches, world, planned):
    """Captured layers of one step, replayed with other tables and lengths; a rank that is late at random."""
    layers, cache = 6, caches["bf16"]
    ranks = Sharded(world, [cache])
    steps = [allocated(cache, how, world, tokens) for how in ALLOCATIONS for tokens in (SKEWED, SHORT, [0] * 8)]
    want = [dense(inputs) for inputs in steps]
    static = dataclasses.replace(
        steps[1], q=steps[1].q.clone(), block_table=steps[1].block_table.clone(), seq_lens=steps[1].seq_lens.clone()
    )
    heads = 4 // world
    outs = [torch.full((layers, heads, len(SHORT), TOPK), -77, dtype=torch.int32, device=DEVICE) for _ in range(world)]
    graphs = []
    torch.cuda.synchronize()
    for rank in range(world):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            plan = ranks.indexers[rank].plan_step(static.seq_lens, block_table=static.block_table) if planned else None
            for layer in range(layers):
                own = static.q[:, ranks.own(rank)]
                rest = ranks.cache(rank, static), static.block_table, static.seq_lens
                ranks.indexers[rank].decode(own, *rest, out=outs[rank][layer], plan=plan)
        graphs.append(graph)
    generator = torch.Generator().manual_seed(1)
    for turn in range(24):
        number = int(torch.randint(len(steps), (1,), generator=generator))
        for field in ("q", "block_table", "seq_lens"):
            getattr(static, field).copy_(getattr(steps[number], field))
        torch.cuda.synchronize()
        ranks.replay(graphs, generator)
        for rank in range(world):
            assert (outs[rank] == want[number][ranks.own(rank)]).all(), (turn, number, rank)
            outs[rank].fill_(-77)
        if turn % 7 == 0:
            ranks.check(steps[number])


def test_micro_batches(caches):
    """Two steps in flight with tables of their own, queued in opposite order on the two ranks."""
    cache = caches["bf16"]
    ranks = Sharded(2, [cache], micro_batches=2)
    batches = [allocated(cache, "shuffled", 2, SKEWED), allocated(cache, "all on one rank", 2, SHORT)]
    want = [dense(inputs) for inputs in batches]
    second = [torch.cuda.Stream() for _ in range(2)]
    outs = [[torch.empty(2, len(SHORT), TOPK, dtype=torch.int32, device=DEVICE) for _ in range(2)] for _ in range(2)]
    for _ in range(20):
        torch.cuda.synchronize()
        for rank in range(2):
            for batch in (0, 1) if rank == 0 else (1, 0):
                with torch.cuda.stream(ranks.streams[rank] if batch == 0 else second[rank]):
                    inputs = batches[batch]
                    step = inputs.q[:, ranks.own(rank)], ranks.cache(rank, inputs), inputs.block_table, inputs.seq_lens
                    ranks.indexers[rank].decode(*step, micro_batch=batch, out=outs[rank][batch])
        ranks.finish()
        for rank in range(2):
            for batch in range(2):
                assert torch.equal(outs[rank][batch], want[batch][ranks.own(rank)])
                outs[rank][batch].fill_(-77)


# Writers.


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
def test_pages_used_again(format):
    """Each rank writes its pages alone, in a graph; a freed page's stale bytes are not seen by its next holder."""
    world, pages, tokens = 4, 64, [1_500, 700]
    whole = li.IndexCache.empty(pages, SPEC, format, DEVICE)
    whole.data.view(torch.uint8).fill_(POISON)
    ranks = Sharded(world, [whole], warm={"cache_format": format})
    generator = torch.Generator().manual_seed(3)
    slots = torch.full((sum(tokens) + 7,), -1, dtype=torch.int64, device=DEVICE)
    keys = torch.zeros(len(slots), DIM, dtype=torch.bfloat16, device=DEVICE)

    def write(rank: int) -> None:
        own = ranks.held[id(whole)][rank]
        own.write(keys, ranks.indexers[rank].shard.local_slots(slots, BLOCK))

    graphs = []
    for rank in range(world):
        write(rank)  # nothing; its code is loaded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            write(rank)
        graphs.append(graph)
    for _ in range(6):
        order = torch.randperm(pages, generator=generator)
        table = torch.full((2, LONGEST // BLOCK), OUT_OF_CACHE, dtype=torch.int32)
        table[0, :12], table[1, :6] = order[:12], order[12:18]
        found = []
        for request, length in enumerate(tokens):
            position = torch.arange(length)
            found.append(table[request, position // BLOCK].long() * BLOCK + position % BLOCK)
        mixed = torch.cat([*found, torch.tensor([-1, -2, *[-77] * 5])])
        slots.copy_(mixed[torch.randperm(len(mixed), generator=generator)])
        keys.copy_(torch.randn(keys.shape, generator=generator))
        whole.write(keys, slots)
        torch.cuda.synchronize()
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        for rank in range(world):
            own = ranks.held[id(whole)][rank].data.view(torch.uint8)
            assert torch.equal(own, whole.data.view(torch.uint8)[rank::world])
        q = torch.randn(2, 4, DIM, generator=generator).bfloat16().to(DEVICE)
        ranks.check(Inputs(SPEC, q, whole, table.to(DEVICE), lengths(*tokens).to(DEVICE), 1))


# Prefill.

CHUNKS, PREFIXES = [700, 0, 33, 1, 2_000], [9_003, 100, 0, 77, 40_000]


def chunks_of(cache: li.IndexCache, how: str, world: int) -> tuple[torch.Tensor, ...]:
    """Queries with rows behind the last chunk, block table, bounds and lengths."""
    inputs = allocated(cache, how, world, [a + b for a, b in zip(CHUNKS, PREFIXES, strict=True)])
    q = torch.randn(sum(CHUNKS) + 3, 4, DIM, generator=torch.Generator().manual_seed(5)).bfloat16().to(DEVICE)
    return q, inputs.block_table, torch.tensor([0, *CHUNKS]).cumsum(0).to(DEVICE), inputs.seq_lens


@pytest.mark.parametrize(
    ("world", "format", "how", "order", "changes"),
    [
        (2, "bf16", "shuffled", "score", {}),
        (2, "bf16", "all on one rank", "block", {"max_prefill_rows": 999}),
        (4, "nvfp4", "a shared prefix", "score", {"max_prefill_rows": 1_500}),
        (8, "fp8", "in a row", "block", {}),
        (8, "bf16", "shuffled", "score", {"shard_by": "block", "dispatch": "auto"}),
    ],
)
def test_prefill_over_ranks(caches, world, format, how, order, changes):
    """Chunks of one step or of several, of own heads and of all; then in a graph, with other chunks."""
    whole = caches[format]
    spec = dataclasses.replace(SPEC, init_blocks=1, local_blocks=2)
    warm = {"cache_format": format, "order": order, "prefill": True}
    ranks = Virtual(world, spec, warm, **{"shard_by": "page", "max_prefill_rows": 4_000, **changes})
    by_page = ranks.indexers[0].shard.by == "page"
    held = [whole.held_by(indexer.shard) if by_page else whole for indexer in ranks.indexers]
    for stream in ranks.streams:
        with torch.cuda.stream(stream):
            torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE)  # scratch: memory from the driver may have ranks wait
    torch.cuda.synchronize()
    q, table, bounds, seq_lens = chunks_of(whole, how, world)

    def run(rank: int, every_head: bool, out: torch.Tensor) -> None:
        given = q if every_head else q[:, ranks.own(rank)]
        ranks.indexers[rank].prefill(given, held[rank], table, bounds, seq_lens, order=order, out=out)

    def check(ids: list[torch.Tensor]) -> None:
        ranks.finish()
        want = li.prefill(q, whole, table, bounds, seq_lens, spec=spec, order=order)
        for rank in range(world):
            assert torch.equal(ids[rank], want[ranks.own(rank)]), f"rank {rank} of {world}"

    ids = [torch.full((4, len(q), TOPK), -7, dtype=torch.int32, device=DEVICE)[ranks.own(rank)] for rank in range(world)]
    for every_head in (False, True):
        torch.cuda.synchronize()
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                run(rank, every_head, ids[rank])
        check(ids)
    graphs = []
    for rank, stream in enumerate(ranks.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run(rank, False, ids[rank])
        graphs.append(graph)
    generator = torch.Generator().manual_seed(world)
    for chunks in (CHUNKS, [0, 5, 2_000, 700, 29], [sum(CHUNKS) + 3, 0, 0, 0, 0]):
        bounds.copy_(torch.tensor([0, *chunks]).cumsum(0))
        seq_lens.copy_(torch.tensor([a + b for a, b in zip(chunks, (7, 0, 129, 33_000, 300), strict=True)]))
        table.copy_(torch.randint(POOL, table.shape, generator=generator))
        torch.cuda.synchronize()
        ranks.replay(graphs, generator)
        check(ids)


def test_prefill_of_own_heads(caches):
    """ "auto" over whole caches, a rank for each head: nothing is exchanged, so one rank alone finishes."""
    whole = caches["bf16"]
    ranks = Virtual(4, dispatch="auto", threshold=200)
    q, *rest = chunks_of(whole, "shuffled", 1)
    ids = ranks.indexers[1].prefill(q[:, 1:2], whole, *rest)
    torch.cuda.synchronize()
    assert torch.equal(ids, li.prefill(q, whole, *rest, spec=SPEC)[1:2])


# Processes.


def process(rank: int, world: int, folder: str, transport: str, by: str) -> None:
    """One of several processes, each on a GPU of its own as far as there are some: decode steps, then chunks."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    method = f"file://{folder}/group"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    whole = cache_of("bf16")
    arguments = {"max_rows": ROWS, "max_seq_len": LONGEST, "device": DEVICE, "dispatch": "sharded", "shard_by": by}
    indexer = li.ContextParallelIndexer(SPEC, transport=transport, **arguments)
    held = whole.held_by(indexer.shard)
    indexer.warmup(query_lens=(1, 4), prefill=True)
    own = owned_heads(rank, world, SPEC.num_heads)
    told = f"{indexer.transport}, "
    for tokens, query_len in ((SKEWED, 1), (SHORT, 4), ([0, 0], 1), (SKEWED, 4)):
        inputs = allocated(whole, "shuffled", world, tokens, query_len)
        want = dense(inputs)[own]
        for q in (inputs.q, inputs.q[:, own]):
            ids = indexer.decode(q, held, inputs.block_table, inputs.seq_lens, query_len=query_len)
            torch.cuda.synchronize()
            told += "right " if torch.equal(ids, want) else "wrong "
    q, *rest = chunks_of(whole, "shuffled", world)
    want = li.prefill(q, whole, *rest, spec=SPEC)[own]
    for given in (q, q[:, own]):
        ids = indexer.prefill(given, held, *rest)
        torch.cuda.synchronize()
        told += "right " if torch.equal(ids, want) else "wrong "
    indexer.raise_if_failed()
    Path(folder, f"rank{rank}").write_text(told)
    dist.barrier()  # nobody takes its memory away while another may still read it
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world", "transport", "by"),
    [(2, "peer", "page"), (4, "peer", "page"), (2, "collective", "page"), (2, "peer", "block")],
)
def test_processes(world, transport, by):
    """Decode and prefill over a cache that the processes hold once, or each."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(process, (world, folder, transport, by), nprocs=world, start_method="spawn")
        told = [Path(folder, f"rank{rank}").read_text() for rank in range(world)]
    assert told == [f"{transport}, " + "right " * 10] * world


def test_prefill_alone(caches):
    """Without a group: the prefill kernel."""
    q, *rest = chunks_of(caches["bf16"], "shuffled", 1)
    indexer = li.ContextParallelIndexer(SPEC, max_rows=ROWS, max_seq_len=LONGEST, device=DEVICE, shard_by="page")
    assert torch.equal(indexer.prefill(q, caches["bf16"], *rest), li.prefill(q, caches["bf16"], *rest, spec=SPEC))
