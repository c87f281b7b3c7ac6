# SPDX-License-Identifier: Apache-2.0
"""`ContextParallelIndexer` with the `peer` transport: virtual ranks on streams of one GPU, and processes that share it."""

import math
import os
import tempfile
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import NAN, OUT_OF_CACHE, Inputs, chosen, lengths, owned_heads, planted_pages, unit_queries
from torch.multiprocessing.spawn import start_processes

import lightning_indexer as li
from lightning_indexer import peer
from lightning_indexer.ranks import run_virtual

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SPEC = li.IndexerSpec()
BLOCK, DIM, TOPK = SPEC.block_size, SPEC.head_dim, SPEC.topk
POOL = 1_024
LONGEST = 131_072
ROWS = 128
SKEWED = [131_072, 1, 5_000, 0, 128, 77_777, 300, 129]
SHORT = [300, 1, 0, 4_000, 128, 129, 7, 2_000]


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    return torch.randn(POOL, BLOCK, DIM, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)


def inputs_of(
    pool: torch.Tensor, tokens: list[int], query_len: int = 1, padding: int = 0, spec: li.IndexerSpec = SPEC
) -> Inputs:
    generator = torch.Generator().manual_seed(len(tokens) + query_len)
    block_table = torch.randint(len(pool), (len(tokens), LONGEST // BLOCK), generator=generator).to(torch.int32)
    for request, length in enumerate(tokens):
        block_table[request, math.ceil(length / BLOCK) :] = OUT_OF_CACHE
    q = torch.randn(len(tokens) * query_len + padding, spec.num_heads, DIM, generator=generator).bfloat16()
    q[len(tokens) * query_len :] = NAN
    return Inputs(spec, q.to(DEVICE), pool, block_table.to(DEVICE), lengths(*tokens).to(DEVICE), query_len)


def dense(inputs: Inputs, **more: Any) -> torch.Tensor:
    return li.decode(*inputs.arguments, **inputs.rules, **more)


class Virtual:
    """P ranks of this process, each with its stream."""

    def __init__(self, world: int, spec: li.IndexerSpec = SPEC, warm: dict[str, Any] | None = None, **changes: Any) -> None:
        self.spec, self.world = spec, world
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        self.indexers: list[Any] = [None] * world
        arguments = {"max_rows": ROWS, "max_seq_len": LONGEST, "device": DEVICE, "transport": "peer", "timeout": 10.0}
        arguments |= {"dispatch": "sharded"}

        def make(ranks: Any) -> None:
            torch.cuda.set_device(0)
            with torch.cuda.stream(self.streams[ranks.rank]):
                indexer = li.ContextParallelIndexer(spec, ranks, **{**arguments, **changes})
                indexer.warmup(**(warm or {}))
            self.indexers[ranks.rank] = indexer

        run_virtual(world, make)
        torch.cuda._sleep(1)  # loaded before anybody waits, as all that may run beside a rank that does
        torch.cuda.synchronize()

    def own(self, rank: int) -> slice:
        """The heads of a rank; a slice, for a list of them is copied to the GPU, which no graph captures."""
        heads = owned_heads(rank, self.world, self.spec.num_heads)
        return slice(heads[0], heads[-1] + 1)

    def decode(self, inputs: Inputs, *, every_head: bool = False, **more: Any) -> list[torch.Tensor]:
        """Queue a step on every rank; ids by rank."""
        rows, topk = inputs.q.shape[0], self.spec.topk
        # Before the first rank begins: memory from the driver may have the later ones wait for it.
        ids = [
            torch.empty(inputs.q[0, self.own(rank)].shape[0], rows, topk, dtype=torch.int32, device=DEVICE)
            for rank in range(self.world)
        ]
        own = [inputs.q if every_head else inputs.q[:, self.own(rank)] for rank in range(self.world)]
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for rank in range(self.world):
            with torch.cuda.stream(self.streams[rank]):
                step = (own[rank], self.cache(rank, inputs), *inputs.arguments[2:])
                self.indexers[rank].decode(*step, query_len=inputs.query_len, out=ids[rank], **more)
        return ids

    def cache(self, rank: int, inputs: Inputs) -> torch.Tensor | li.IndexCache:
        """The index keys that a rank has of a step."""
        return inputs.pages

    def replay(self, graphs: list[torch.cuda.CUDAGraph], generator: torch.Generator) -> None:
        """A graph on each rank, queued in any order; one rank is late. Then wait for all."""
        late = int(torch.randint(self.world, (1,), generator=generator))
        for rank in torch.randperm(self.world, generator=generator).tolist():
            with torch.cuda.stream(self.streams[rank]):
                if rank == late:
                    torch.cuda._sleep(int(torch.randint(200_000, (1,), generator=generator)))
                graphs[rank].replay()
        self.finish()

    def finish(self) -> None:
        torch.cuda.synchronize()
        for indexer in self.indexers:
            indexer.raise_if_failed()

    def check(self, inputs: Inputs, *, every_head: bool = False) -> None:
        """A step gives the dense answer on every rank."""
        ids = self.decode(inputs, every_head=every_head)
        self.finish()
        want = dense(inputs)
        for rank in range(self.world):
            assert torch.equal(ids[rank], want[self.own(rank)]), f"rank {rank} of {self.world}"


@pytest.mark.parametrize("dispatch", ["sharded", "auto"])
@pytest.mark.parametrize("world", [2, 4, 8, 16])
def test_virtual_ranks(pool, world, dispatch):
    """A05, A14, A21: skewed and short batches, Q 1 and 4, heads gathered or not, padding, both orders, one after the other."""
    ranks = Virtual(
        world, warm={"query_lens": (1, 4)}, dispatch=dispatch, **({"threshold": 200} if dispatch == "auto" else {})
    )
    before = ranks.indexers[0].steps()
    for _ in range(3):
        ranks.check(inputs_of(pool, SKEWED))
        ranks.check(inputs_of(pool, SHORT, query_len=4, padding=3))
        ranks.check(inputs_of(pool, SKEWED, query_len=4), every_head=True)
        ranks.check(inputs_of(pool, SHORT), every_head=True)
        ranks.check(inputs_of(pool, [0, 0]))
    counted = [indexer.steps() for indexer in ranks.indexers]
    assert counted == [counted[0]] * world
    shared = 6 if dispatch == "auto" else 15
    assert counted[0]["sharded"] - before["sharded"] == shared
    assert counted[0]["replicated"] - before["replicated"] == 15 - shared


@pytest.mark.parametrize("dispatch", ["sharded", "auto"])
@pytest.mark.parametrize("world", [2, 4])
def test_queries_that_the_scorer_sends(pool, monkeypatch, world, dispatch):
    """As where every rank has a GPU to itself; steps so short that whoever waits in a scorer leaves room for the others'."""
    monkeypatch.setattr(peer, "gpu_name", lambda device: threading.current_thread().name)
    more = {"threshold": 30} if dispatch == "auto" else {}
    ranks = Virtual(world, warm={"query_lens": (1, 4)}, dispatch=dispatch, **more)
    assert all(indexer._batches[0].peer.sole for indexer in ranks.indexers)
    for _ in range(4):
        ranks.check(inputs_of(pool, [4_000], query_len=4, padding=2))
        ranks.check(inputs_of(pool, [300, 1, 0, 129]))
        ranks.check(inputs_of(pool, [4_000, 300]), every_head=True)
        ranks.check(inputs_of(pool, [0, 0]))


def test_calibrated(pool):
    """Thresholds that the ranks agree on; steps on both sides of them."""
    ranks = Virtual(4, dispatch="auto")
    first = ranks.indexers[0].thresholds
    assert [rows for rows, _ in first] == [1, 4, 16, 64]
    assert all(indexer.thresholds == first for indexer in ranks.indexers)
    print("thresholds", first)
    for tokens in (SKEWED, SHORT, [131_072] * 8):
        ranks.check(inputs_of(pool, tokens))


def test_by_block_with_a_table(pool):
    """Ascending ids, unscored where all blocks are taken, and the sparse table of the owned heads."""
    world = 4
    ranks = Virtual(world, warm={"order": "block", "page_size": 16})
    for tokens in (SKEWED, SHORT):
        inputs = inputs_of(pool, tokens)
        attention = inputs.block_table.clone()
        tables = [li.SparseTable.empty(SPEC, 1, len(tokens), 16, attention) for _ in range(world)]
        ids: list[Any] = [None] * world
        torch.cuda.synchronize()
        for rank in range(world):
            with torch.cuda.stream(ranks.streams[rank]):
                q = inputs.q[:, ranks.own(rank)]
                ids[rank] = ranks.indexers[rank].decode(q, *inputs.arguments[1:], order="block", sparse_table=tables[rank])
        ranks.finish()
        whole = li.SparseTable.empty(SPEC, 4, len(tokens), 16, attention)
        want = dense(inputs, order="block", sparse_table=whole)
        for rank in range(world):
            assert torch.equal(ids[rank], want[ranks.own(rank)])
            assert torch.equal(tables[rank].block_table_out, whole.block_table_out[ranks.own(rank)])
            assert torch.equal(tables[rank].context_lens_out, whole.context_lens_out[ranks.own(rank)])


def test_a05_all_winners_in_one_shard():
    values = torch.zeros(64, 4)
    values[1::4] = 100 + torch.arange(16)[:, None].float()
    pages = planted_pages(values).to(DEVICE)
    arguments = (
        unit_queries(1).to(DEVICE),
        pages,
        torch.arange(64, dtype=torch.int32, device=DEVICE)[None],
        lengths(64 * BLOCK).to(DEVICE),
    )
    ranks = Virtual(4)
    ids = ranks.decode(Inputs(SPEC, *arguments, 1))
    ranks.finish()
    for rank in range(4):
        assert chosen(ids[rank].cpu()) == [[{5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61, 63}]]


def test_back_to_back_layers_with_a_slow_rank(pool):
    """1,000 captured layers, long and short steps in turn, eager steps between; a rank that is late at random."""
    world, layers = 4, 20
    ranks = Virtual(world, dispatch="auto", threshold=100)
    live = {name: inputs_of(pool, tokens) for name, tokens in (("long", SKEWED), ("short", SHORT))}
    want = {name: dense(inputs) for name, inputs in live.items()}
    static = inputs_of(pool, SHORT)
    static = replace(static, block_table=static.block_table.clone(), seq_lens=static.seq_lens.clone(), q=static.q.clone())
    outs = [torch.full((layers, 1, len(SHORT), TOPK), -77, dtype=torch.int32, device=DEVICE) for _ in range(world)]
    graphs = []
    torch.cuda.synchronize()
    for rank in range(world):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            plan = ranks.indexers[rank].plan_step(static.seq_lens)
            for layer in range(layers):
                own = static.q[:, ranks.own(rank)]
                ranks.indexers[rank].decode(own, *static.arguments[1:], out=outs[rank][layer], plan=plan)
        graphs.append(graph)
    generator = torch.Generator().manual_seed(1)
    for turn in range(50):
        name = ("long", "short", "short", "long", "long")[turn % 5]
        for field in ("q", "block_table", "seq_lens"):
            getattr(static, field).copy_(getattr(live[name], field))
        torch.cuda.synchronize()
        ranks.replay(graphs, generator)
        for rank in range(world):
            assert (outs[rank] == want[name][ranks.own(rank)]).all(), (turn, rank)
            outs[rank].fill_(-77)
        if turn % 7 == 0:
            ranks.check(live["long"])
            ranks.check(live["short"])
    assert ranks.indexers[0].steps() == ranks.indexers[3].steps()


def test_a27_micro_batches(pool):
    """Two steps in flight, each with its memory, queued in opposite order on the two ranks."""
    ranks = Virtual(2, micro_batches=2)
    batches = [inputs_of(pool, SKEWED), inputs_of(pool, SHORT)]
    want = [dense(inputs) for inputs in batches]
    second = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        ids: dict[tuple[int, int], torch.Tensor] = {}
        torch.cuda.synchronize()
        for rank in range(2):
            for batch in (0, 1) if rank == 0 else (1, 0):
                with torch.cuda.stream(ranks.streams[rank] if batch == 0 else second[rank]):
                    q = batches[batch].q[:, ranks.own(rank)]
                    rest = batches[batch].arguments[1:]
                    ids[rank, batch] = ranks.indexers[rank].decode(q, *rest, micro_batch=batch)
        ranks.finish()
        for (rank, batch), got in ids.items():
            assert torch.equal(got, want[batch][ranks.own(rank)])


def test_a_missing_rank_is_named(pool):
    ranks = Virtual(4, timeout=0.2)
    inputs = inputs_of(pool, SKEWED)
    for rank in (0, 1, 3):
        with torch.cuda.stream(ranks.streams[rank]):
            ranks.indexers[rank].decode(inputs.q, *inputs.arguments[1:])
    torch.cuda.synchronize()
    for rank in (0, 1, 3):
        with pytest.raises(RuntimeError, match=f"rank {rank} of 4 waited in vain for rank 2"):
            ranks.indexers[rank].decode(inputs.q, *inputs.arguments[1:])


def test_differing_configurations():
    """A rank with other limits: told at construction, on every rank."""

    def make(ranks: Any) -> str:
        torch.cuda.set_device(0)
        changes = {"max_rows": 8 + ranks.rank, "max_seq_len": LONGEST, "device": DEVICE, "transport": "peer"}
        with pytest.raises(ValueError, match="max_rows: expected the same on every rank") as caught:
            li.ContextParallelIndexer(SPEC, ranks, **changes)
        return str(caught.value)

    first, second = run_virtual(2, make)
    assert first == second


def process(rank: int, world: int, folder: str, what: str) -> None:
    """One of several processes, each on a GPU of its own as far as there are some."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    method = f"file://{folder}/group"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    pages = torch.randn(POOL, BLOCK, DIM, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    own = owned_heads(rank, world, SPEC.num_heads)
    arguments = {"max_rows": ROWS, "max_seq_len": LONGEST, "device": DEVICE, "dispatch": "sharded"}
    told = "right"
    if what == "missing":
        indexer = li.ContextParallelIndexer(SPEC, transport="peer", timeout=3.0, **arguments)
        indexer.warmup()
        inputs = inputs_of(pages, SKEWED)
        for _ in range(1 if rank == 1 else 3):
            indexer.decode(inputs.q, *inputs.arguments[1:])
        torch.cuda.synchronize()
        if rank == 1:
            Path(folder, "rank1").write_text("gone")
            os._exit(0)  # as a process that is killed: nothing is closed, nobody is told
        try:
            indexer.raise_if_failed()
            told = "nothing"
        except RuntimeError as error:
            told = str(error)
    else:
        indexer = li.ContextParallelIndexer(SPEC, transport=what, **arguments)
        indexer.warmup(query_lens=(1, 4))
        told = f"{indexer.transport}, "
        for tokens, query_len in ((SKEWED, 1), (SHORT, 4), ([0, 0], 1), (SKEWED, 4)):
            inputs = inputs_of(pages, tokens, query_len)
            want = dense(inputs)[own]
            for q in (inputs.q, inputs.q[:, own]):
                for _ in range(2):
                    ids = indexer.decode(q, *inputs.arguments[1:], query_len=query_len)
                    torch.cuda.synchronize()
                    told += "right " if torch.equal(ids, want) else "wrong "
        indexer.raise_if_failed()
    Path(folder, f"rank{rank}").write_text(told)
    if what != "missing":
        dist.barrier()  # nobody takes its memory away while another may still read it
    dist.destroy_process_group()


def processes(world: int, what: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        start_processes(process, (world, folder, what), nprocs=world, start_method="spawn")
        return [Path(folder, f"rank{rank}").read_text() for rank in range(world)]


@pytest.mark.parametrize(("world", "transport"), [(2, "peer"), (4, "auto"), (2, "collective")])
def test_processes(world, transport):
    """CUDA IPC handles over gloo; and gloo alone."""
    name = "collective" if transport == "collective" else "peer"
    assert processes(world, transport) == [f"{name}, " + "right " * 16] * world


def test_a_process_that_dies_is_named():
    told = processes(4, "missing")
    assert told[1] == "gone"
    assert all("waited in vain for rank 1" in told[rank] for rank in (0, 2, 3))
