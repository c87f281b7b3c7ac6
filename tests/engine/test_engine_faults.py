# SPDX-License-Identifier: Apache-2.0
"""Faults that engines had around their indexers, as small inputs with the right answers; vLLM's own layers around ours."""

from types import SimpleNamespace

import engines
import pytest
import torch
from engines import HEADS, base
from support import chosen, lengths, owned_heads, planted_pages, table, unit_queries

from lightning_indexer.cache import IndexCache
from lightning_indexer.verify.ranks import run_ranks
from lightning_indexer.vllm import indexer
from lightning_indexer.vllm.nvfp4 import NvFp4IndexerImpl

SENTINEL = -77


def step_of(seq_lens: torch.Tensor, block_table: torch.Tensor, *, query_len: int = 1, **counts):
    """Metadata of decode rows, and of prefill rows where `counts` has some."""
    rows = len(seq_lens) * query_len
    decode = base.MiniMaxM3IndexerDecodeMetadata(seq_lens, block_table, int(seq_lens.max()), query_len, query_len)
    facts = {
        "seq_lens": seq_lens,
        "max_seq_len": int(seq_lens.max()),
        "slot_mapping": None,
        "num_actual_tokens": rows,
        "num_decodes": len(seq_lens),
        "num_decode_tokens": rows,
        "num_prefills": 0,
        "num_prefill_tokens": 0,
        "decode": decode,
    }
    return base.MiniMaxM3IndexerMetadata(**{**facts, **counts})


def context(world: int, **changes):
    """Context-parallel ranks, or one rank with our kernels."""
    return engines.config_of(world, **({"cp": True} if world > 1 else {"options": {"kernels": True}}), **changes)


def own_sets(ids: torch.Tensor, rows: int) -> list[list[set[int]]]:
    return chosen(ids[:, :rows].contiguous())


# A13: as many tokens as heads, in either order of the shared buffer.


@pytest.mark.parametrize(("world", "head_major"), [(1, False), (2, False), (4, False), (8, False), (1, True), (2, True)])
def test_a13_as_many_tokens_as_heads(world, head_major, monkeypatch):
    rows, blocks = 4, 64
    values = torch.zeros(rows * blocks, HEADS)
    for row in range(rows):
        for head in range(HEADS):
            values[row * blocks + 10 * head + row, head] = 100
    pages = planted_pages(values)
    block_table = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    if head_major:
        platform = SimpleNamespace(is_rocm=lambda: True, is_cuda=lambda: False, is_cpu=lambda: True, device_type="cpu")

    def work(rank: int):
        config = context(world, topk=2, max_model_len=128 * blocks)
        heads = owned_heads(rank, world, HEADS)
        with engines.engine(config, rank):
            buffer = engines.buffer_of(config, head_major)
            layer = engines.layer_of(config, buffer=buffer)
            engines.bind(layer, pages)
            if head_major:
                monkeypatch.setattr(base, "current_platform", platform)
            engines.run(config, layer, step_of(lengths(*[128 * blocks] * rows), block_table), unit_queries(rows)[:, heads])
            return buffer[:, :rows] if head_major else buffer[:rows].transpose(0, 1)

    for rank, ids in enumerate(run_ranks(world, work)):
        heads = owned_heads(rank, world, HEADS)
        assert own_sets(ids, rows) == [[{10 * head + row, 63} for head in heads] for row in range(rows)]


# A18: nothing that a replay needs may be held by Python objects that are gone.


def test_a18_lengths_and_tables_are_read_where_they_lie_at_every_pass():
    """A captured graph knows addresses only: the same tensors, overwritten in place, must be what the next pass reads."""
    blocks = 24
    values = torch.zeros(2 * blocks, HEADS)
    values[7], values[blocks + 9] = 50, 60
    pages = planted_pages(values)
    tables = torch.arange(2 * blocks, dtype=torch.int32).view(2, blocks)

    def work(rank: int):
        config = context(2, topk=2)
        heads = owned_heads(rank, 2, HEADS)
        found = []
        with engines.engine(config, rank):
            buffer = engines.buffer_of(config)
            layers = [engines.layer_of(config, number, buffer=buffer) for number in range(2)]
            for layer in layers:
                engines.bind(layer, pages)
            seq_lens, block_table = lengths(1, 1), torch.zeros(2, blocks, dtype=torch.int32)
            step = step_of(seq_lens, block_table)
            for live, order in (((1, 1), (0, 1)), ((128 * blocks, 300), (0, 1)), ((0, 128 * blocks), (1, 0))):
                seq_lens.copy_(lengths(*live))
                block_table.copy_(tables[list(order)])
                for layer in layers:
                    buffer.fill_(SENTINEL)
                    engines.run(config, layer, step, unit_queries(2)[:, heads])
                    found.append(own_sets(buffer[:2].transpose(0, 1), 2))
        return found

    want = [[[{0}] * 2, [{0}] * 2], [[{7, 23}] * 2, [{1, 2}] * 2], [[set()] * 2, [{7, 23}] * 2]]
    want[1][1] = [{0, 2}] * 2  # all of its blocks 0 and 1 score 0: the lower id
    for found in run_ranks(2, work):
        assert found == [sets for sets in want for _ in range(2)]


# A24: decode rows and prefill rows share a buffer.


@pytest.mark.parametrize("parts", [("both",), ("decode", "prefill"), ("prefill", "decode")])
@pytest.mark.parametrize("world", [1, 2])
def test_a24_decode_does_not_touch_prefill_rows(world, parts):
    values = torch.zeros(11, HEADS)
    values[5] = 9
    pages = planted_pages(values)
    decode_table, chunk_table = table(list(range(8))), table([8, 9, 10, 0, 0, 0, 0, 0])
    chunk = base.MiniMaxM3IndexerPrefillMetadata(
        cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        seq_lens=lengths(259),
        context_lens=lengths(256),
        block_table=chunk_table,
        max_query_len=3,
        max_seq_len=1000,
    )
    counts = {"num_actual_tokens": 4, "num_decode_tokens": 1, "num_prefill_tokens": 3, "prefill": chunk}

    def work(rank: int):
        config = context(world, topk=2)
        heads = owned_heads(rank, world, HEADS)
        with engines.engine(config, rank):
            buffer = engines.buffer_of(config)[:4]
            layer = engines.layer_of(config, buffer=buffer)
            engines.bind(layer, pages)
            for part in parts:
                present = {"num_decodes": int(part != "prefill"), "num_prefills": int(part != "decode")}
                step = step_of(lengths(1000), decode_table, **counts, **present)
                engines.run(config, layer, step, unit_queries(4)[:, heads])
            return buffer.transpose(0, 1)

    for rank, ids in enumerate(run_ranks(world, work)):
        owned = len(owned_heads(rank, world, HEADS))
        assert own_sets(ids, 4) == [[{5, 7}] * owned] + [[{0, 2}] * owned] * 3


# A27: two micro-batches of one step in flight.


@pytest.mark.parametrize(("world", "between"), [(1, True), (2, False), (2, True), (4, True)])
def test_a27_micro_batches_have_memory_of_their_own(world, between, monkeypatch):
    blocks = 40
    values = torch.zeros(2 * blocks, HEADS)
    values[3], values[blocks + 9] = 50, 50
    pages = planted_pages(values)
    tables = torch.arange(2 * blocks, dtype=torch.int32).view(2, 1, blocks)

    def work(rank: int):
        config = context(world, topk=2)
        config.parallel_config.enable_dbo = True
        heads = owned_heads(rank, world, HEADS)
        with engines.engine(config, rank):
            layers = [engines.layer_of(config, number) for number in range(2)]
            batches = layers[0].impl.engine.kind.limits.micro_batches
            for layer in layers:
                engines.bind(layer, pages)

            def index(number: int, layer: int = 0):
                monkeypatch.setattr(indexer, "dbo_current_ubatch_id", lambda: number)
                step = step_of(lengths(128 * blocks), tables[number])
                return engines.run(config, layers[layer], step, unit_queries(1)[:, heads])[0]

            first, second = index(0), index(1)
            if between:
                index(0, layer=1)
            return batches, own_sets(first, 1), own_sets(second, 1)

    for rank, (batches, first, second) in enumerate(run_ranks(world, work)):
        owned = len(owned_heads(rank, world, HEADS))
        assert (batches, first, second) == (2, [[{3, 39}] * owned], [[{9, 39}] * owned])


# A28: what an engine transfers of a request is what is registered.


def sparse_layers(config, form: str):
    """Three sparse layers, which an engine registers beside two dense ones."""
    registered = config.compilation_config.static_forward_context
    for number in range(2):
        registered[f"model.layers.{number}.self_attn.attn"] = SimpleNamespace(kv_cache=torch.zeros(4))
    layers = []
    for number in range(2, 5):
        if form == "nvfp4":
            common = engines.layer_arguments(config, number, topk_blocks=4)
            layers.append(SimpleNamespace(impl=(impl := NvFp4IndexerImpl(**{**common, "indexer_kv_dtype": "nvfp4"}))))
            layers[-1].index_cache, layers[-1].run = impl.index_cache, impl
        else:
            layer = engines.layer_of(config, number, topk_blocks=4)
            layers.append(SimpleNamespace(impl=layer.impl, index_cache=layer.index_cache, run=layer))
    return layers


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_a28_copying_the_registered_caches_is_enough_for_another_engine(form):
    blocks = 30
    values = torch.zeros(blocks, HEADS)
    for block, score in ((22, 12), (3, 8), (17, 6)):  # exact in every format
        values[block] = score

    def work(rank: int):
        found = []
        heads = owned_heads(rank, 2, HEADS)
        kept = {}
        for number in range(2):
            config = engines.config_of(2, cp=True, kv_dtype="auto" if form == "nvfp4" else form, topk=4)
            with engines.engine(config, rank):
                layers = sparse_layers(config, form)
                caches = {
                    name: cache
                    for name, cache in config.compilation_config.static_forward_context.items()
                    if isinstance(cache, base.MiniMaxM3IndexerCache)
                }
                names = [f"model.layers.{layer}.self_attn.attn.index_cache" for layer in range(2, 5)]
                assert list(caches) == names
                for layer, (name, cache) in enumerate(caches.items()):
                    form_of = cache.get_kv_cache_spec(config)
                    shape = (64, 1, form_of.block_size, form_of.head_size)
                    cache.bind_kv_cache(torch.zeros(shape, dtype=torch.uint8).to(form_of.dtype))
                    if number == 0:  # the engine that the request comes from
                        written = IndexCache.wrap(cache.kv_cache, layers[layer].impl.engine.kind.spec, form)
                        keys = planted_pages(values + layer % 2).flatten(0, 1)
                        written.write(keys, torch.arange(blocks * 128))
                        kept[name] = cache.kv_cache[:blocks].view(torch.uint8).clone()
                    else:
                        cache.kv_cache[63 - torch.arange(blocks)] = kept[name].view(cache.dtype)
                if number == 1:
                    pages = (63 - torch.arange(blocks, dtype=torch.int32))[None]
                    for layer in layers:
                        step = step_of(lengths(128 * blocks), pages)
                        q = unit_queries(1)[:, heads].to(torch.float8_e4m3fn if form == "nvfp4" else layer.index_cache.dtype)
                        metadata = {layer.index_cache.prefix: step}
                        with engines.set_forward_context(metadata, config, num_tokens=1):
                            decoded, _ = layer.run(q.flatten(1))
                        found.append(own_sets(decoded, 1))
        return found

    assert run_ranks(2, work) == [[[[{3, 17, 22, 29}] * 2]] * 3] * 2
