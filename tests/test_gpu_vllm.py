# SPDX-License-Identifier: Apache-2.0
"""Layers of an engine on a GPU: a whole decode step in one graph, replayed with other lengths, tables and queries."""

import math
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import OUT_OF_CACHE, lengths

import lightning_indexer as li

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
