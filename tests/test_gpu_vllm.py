# SPDX-License-Identifier: Apache-2.0
"""Layers of an engine on a GPU: a whole decode step in one graph, replayed with other lengths, tables and queries."""

import importlib.util
import math
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import OUT_OF_CACHE, lengths, owned_heads
from torch.multiprocessing.spawn import start_processes

import lightning_indexer as li
from lightning_indexer import reference

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SPEC = li.IndexerSpec()
LAYERS = 3
POOL = 512
LONGEST = 65_536
CAPTURED = [1, 1, 1, 1]  # a dummy batch: one token each
REPLAYED = ([65_536, 300, 0, 40_000], [128, 5_000, 129, 1], [0, 0, 0, 0])


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()


@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_captured_step_is_the_eager_one_whatever_comes(group, query_len, order):
    from lightning_indexer.vllm.engine import EngineIndexer, Kind, Limits
    from lightning_indexer.vllm.options import Options

    device = torch.device(DEVICE, torch.cuda.current_device())
    limits = Limits(rows=64, tokens=LONGEST, query_len=query_len, micro_batches=1)
    engine = EngineIndexer(Kind(SPEC, limits, device, "bf16", torch.bfloat16, order, False, False, Options()), group)
    generator = torch.Generator().manual_seed(0)
    shape = (LAYERS, POOL, 128, 128)
    caches = [li.IndexCache.wrap(pages, SPEC) for pages in torch.randn(shape, generator=generator).bfloat16().to(device)]
    requests = len(CAPTURED)
    q = torch.zeros(requests * query_len, 4, 128, dtype=torch.bfloat16, device=device)
    seq_lens = torch.zeros(requests, dtype=torch.int32, device=device)
    table = torch.zeros(requests, LONGEST // 128, dtype=torch.int32, device=device)
    buffers = [torch.full((64, 4, 16), -77, dtype=torch.int32, device=device) for _ in range(LAYERS)]  # token-major

    def live(tokens: list[int]) -> None:
        pages = torch.randint(POOL, table.shape, generator=generator).to(torch.int32)
        for request, length in enumerate(tokens):
            pages[request, math.ceil(length / 128) :] = OUT_OF_CACHE
        table.copy_(pages)
        seq_lens.copy_(lengths(*tokens))
        q.copy_(torch.randn(q.shape, generator=generator))

    def run() -> None:
        decode = SimpleNamespace(seq_lens=seq_lens, block_table=table, decode_query_len=query_len)
        rows = requests * query_len
        counts = {"num_actual_tokens": rows, "num_decodes": requests, "num_decode_tokens": rows, "num_prefills": 0}
        step = SimpleNamespace(decode=decode, prefill=None, **counts)
        for layer, (cache, buffer) in enumerate(zip(caches, buffers, strict=True)):
            engine.select(f"layer {layer}", step, q, cache, buffer.transpose(0, 1))

    live(CAPTURED)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()  # a graph may have some of its own, for random numbers
        run()
        after = torch.cuda.memory_allocated()
    assert after == before
    for tokens in REPLAYED:
        live(tokens)
        for buffer in buffers:
            buffer.fill_(-77)
        graph.replay()
        for cache, buffer in zip(caches, buffers, strict=True):
            want = li.decode(q, cache, table, seq_lens, spec=SPEC, query_len=query_len, order=order)
            assert torch.equal(buffer[: len(q)].transpose(0, 1), want), tokens
            assert (buffer[len(q) :] == -77).all()


# By draft tokens of the engine: tokens of each request, how many of them are this step's, and whether a graph serves them.
BATCHES = {
    0: (
        ([65_536, 300, 129, 40_000, 1, 5_000, 128, 2_177], [1] * 8, True),
        ([300, 40_000, 2_049], [1] * 3, True),
        ([65_535, 40_001, 2_048, 7, 3, 900], [1] * 6, True),
        ([20_000, 700, 3_000, 5], [1, 1, 3, 5], False),
        ([2_500], [1], True),
        ([9_000, 40], [70, 40], False),
    ),
    2: (
        ([65_536, 300, 129, 40_000, 3, 5_000, 130, 2_178], [3] * 8, True),
        ([300, 40_000, 2_050], [3] * 3, True),
        ([20_000, 700, 3_000], [3, 3, 40], False),
        ([20_000, 40_000, 2_177], [1] * 3, False),
        ([2_500, 65_535], [3] * 2, True),
    ),
}


def whole_numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Small ones, whose products add up to the same in any order."""
    return torch.randint(-8, 9, shape, generator=generator).bfloat16()


def selected(q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, tokens: list[int], counts: list[int]) -> torch.Tensor:
    """Ids of all heads by the reference, request by request."""
    parts = []
    for request, (length, rows) in enumerate(zip(tokens, q.split(counts), strict=True)):
        step = rows, pages, table[request : request + 1], lengths(length)
        rules = {"topk": SPEC.topk, "init_blocks": 0, "local_blocks": 1}
        parts.append(reference.decode(*step, block_size=128, query_len=len(rows), **rules))
    return torch.cat(parts, dim=1)


def serve(rank: int, world: int, folder: str, drafts: int) -> None:
    """One rank of an engine; ranks share the GPU. In a process of its own: vLLM changes torch when imported."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
    from gpu_vllm_engine import Worker, config_of

    from lightning_indexer.vllm.indexer import LightningIndexerImpl

    generator = torch.Generator().manual_seed(0)
    pages = whole_numbers(generator, LAYERS, POOL, 128, 128)
    options = {"order": "score", **({"dispatch": "sharded"} if world > 1 else {"kernels": True})}
    worker = Worker(config_of(world, drafts, options, requests=8, tokens=128, longest=LONGEST), rank, pages.to(DEVICE))
    assert {type(layer.impl) for layer in worker.layers} == {LightningIndexerImpl}
    worker.capture()
    own = owned_heads(rank, world, SPEC.num_heads)
    steps = []
    for tokens, counts, replayed in BATCHES[drafts]:
        table = torch.randint(POOL, (len(tokens), LONGEST // 128), generator=generator).to(torch.int32)
        for request, length in enumerate(tokens):
            table[request, math.ceil(length / 128) :] = OUT_OF_CACHE
        q = whole_numbers(generator, sum(counts), 4, 128)
        found, by_graph = worker.step(tokens, counts, table, q[:, own].to(DEVICE))
        assert by_graph == replayed, tokens
        steps.append((found.cpu(), q, table, tokens, counts))
    dist.barrier()  # nobody takes its memory away while another may still read it
    for found, q, table, tokens, counts in steps:
        for layer, ids in enumerate(found):
            want = selected(q, pages[layer], table, tokens, counts)[own]
            assert torch.equal(ids[:, : len(q)], want), f"layer {layer}, {tokens}"
            assert (ids[:, len(q) :] == -1).all(), f"layer {layer}, {tokens}: padded rows"
    dist.destroy_process_group()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("drafts", BATCHES)
@pytest.mark.parametrize("world", [1, 2])
def test_steps_and_full_graphs_of_vllm_itself(world, drafts):
    """Its layers, metadata builder and graphs of all batch sizes: decode, padded, draft rows, and prefill beside them."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(serve, (world, folder, drafts), nprocs=world, start_method="spawn")
