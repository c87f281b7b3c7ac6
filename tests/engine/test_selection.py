# SPDX-License-Identifier: Apache-2.0
"""The ids that vLLM's layers get from our class: those of the contract, and those of vLLM's own classes."""

from functools import cache
from types import SimpleNamespace

import engines
import pytest
import torch
from engines import BATCHES, HEADS, Batch, base
from support import owned_heads

from lightning_indexer import reference
from lightning_indexer.verify.ranks import run_ranks
from lightning_indexer.vllm.indexer import LightningIndexerImpl

SENTINEL = -77


def config_for(batch: Batch, world: int, **changes):
    return engines.config_of(world, drafts=batch.drafts, **changes)


@cache
def inputs_of(name: str):
    return BATCHES[name].inputs()


@cache
def wanted(name: str) -> torch.Tensor:
    batch = BATCHES[name]
    return batch.want(inputs_of(name), engines.spec_of(config_for(batch, 1)))


def forward(config, layer, batch: Batch, inputs, heads: list[int]):
    """Decode and prefill ids of one layer, and the metadata."""
    engines.bind(layer, inputs.pages)
    step = batch.metadata(config, inputs)
    q = inputs.q[:, heads].to(layer.index_cache.dtype)
    return *engines.run(config, layer, step, q), step


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_batch_selects_the_contract_into_disjoint_slices_of_the_buffer(world):
    def work(rank: int):
        found = {}
        heads = owned_heads(rank, world, HEADS)
        drafts = {batch.drafts for batch in BATCHES.values()}
        for count in sorted(drafts):
            config = engines.config_of(world, cp=True, drafts=count)
            with engines.engine(config, rank):
                buffer = engines.buffer_of(config)
                layer = engines.layer_of(config, buffer=buffer)
                assert type(layer.impl) is LightningIndexerImpl
                for name, batch in BATCHES.items():
                    if batch.drafts == count:
                        buffer.fill_(SENTINEL)
                        decoded, prefilled, step = forward(config, layer, batch, inputs_of(name), heads)
                        parts = [part for part in (decoded, prefilled) if part is not None]
                        assert all(part.untyped_storage().data_ptr() == buffer.data_ptr() for part in parts)
                        assert (decoded is not None, prefilled is not None) == (step.num_decodes > 0, step.num_prefills > 0)
                        counts = [part.shape[1] for part in parts]
                        assert counts == [n for n in (step.num_decode_tokens, step.num_prefill_tokens) if n]
                        found[name] = (torch.cat(parts, dim=1), buffer.clone())
        return found

    for rank, found in enumerate(run_ranks(world, work)):
        for name, (ids, buffer) in found.items():
            want = wanted(name)[owned_heads(rank, world, HEADS)]
            assert torch.equal(ids, want), f"{name} on rank {rank}"
            assert torch.equal(buffer[: want.shape[1]].transpose(0, 1), want), f"{name} on rank {rank}"
            assert (buffer[want.shape[1] :] == SENTINEL).all(), f"{name} on rank {rank}"


def sets(ids: torch.Tensor) -> torch.Tensor:
    """Ids in one order, for comparison with a class whose order differs."""
    return ids.sort(dim=-1).values


# Few rows: a row and head take vLLM's Triton kernels a second and a half through the interpreter.
SMALL = {
    "decode": Batch((128 * 19 - 5, 700), (1, 1)),
    "drafts": Batch((128 * 18 + 1,), (2,), drafts=1),
    "mixed": Batch((128 * 18 - 5, 128 * 17 + 40), (1, 2)),
}


def test_ids_are_those_of_vllms_own_indexer_in_its_order():
    world = 2

    def work(rank: int):
        found = {}
        heads = owned_heads(rank, world, HEADS)
        for name, batch in SMALL.items():
            inputs = batch.inputs()
            for cp in (False, True):
                config = config_for(batch, world, cp=cp)
                with engines.engine(config, rank):
                    layer = engines.layer_of(config, buffer=engines.buffer_of(config))
                    assert type(layer.impl) is (LightningIndexerImpl if cp else base.MiniMaxM3IndexerTritonImpl)
                    decoded, prefilled, _ = forward(config, layer, batch, inputs, heads)
                    found[name, cp] = torch.cat([part for part in (decoded, prefilled) if part is not None], dim=1).clone()
        return found

    for found in run_ranks(world, work, timeout=250):
        for name in SMALL:
            assert torch.equal(found[name, True], found[name, False]), name


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ids_are_those_of_vllms_rocm_context_parallel_class(world):
    from vllm.models.minimax_m3.amd import indexer_context_parallel as rocm

    names = ("decode", "drafts", "decode-short")

    def work(rank: int):
        heads, found = owned_heads(rank, world, HEADS), {}
        config = engines.config_of(world, drafts=2)
        with engines.engine(config, rank):
            theirs = rocm.IndexerCPDecode(
                total_heads=HEADS,
                rank=rank,
                world_size=world,
                max_tokens=16,
                max_seq_len=config.model_config.max_model_len,
                topk=16,
                init_blocks=0,
                local_blocks=1,
                group=rocm.get_tp_group(),
                device=torch.device("cpu"),
            )
            theirs._checked = True  # its check asks for a GPU
            for name in names:
                inputs = inputs_of(name)
                step = BATCHES[name].metadata(config, inputs).decode
                out = torch.full((len(heads), len(inputs.q), 16), SENTINEL, dtype=torch.int32)
                q = inputs.q[:, heads].contiguous()
                rest = (step.block_table, step.seq_lens, step.decode_query_len, out)
                found[name] = theirs(q, inputs.pages, *rest, scale=128**-0.5)
        return found

    for rank, found in enumerate(run_ranks(world, work)):
        for name in names:
            assert torch.equal(sets(found[name]), sets(wanted(name)[owned_heads(rank, world, HEADS)])), f"{name}, rank {rank}"


@pytest.mark.parametrize("name", ["decode", "drafts", "mixed"])
@pytest.mark.parametrize("label", ["fp8", "fp8_e4m3"])
def test_fp8_caches_select_what_their_stored_keys_and_queries_score(name, label):
    batch, inputs = BATCHES[name], inputs_of(name)
    world = 2

    def work(rank: int):
        config = config_for(batch, world, cp=True, kv_dtype=label)
        with engines.engine(config, rank):
            layer = engines.layer_of(config)
            decoded, prefilled, _ = forward(config, layer, batch, inputs, owned_heads(rank, world, HEADS))
            assert layer.index_cache.dtype == torch.float8_e4m3fn
            return torch.cat([part for part in (decoded, prefilled) if part is not None], dim=1)

    fp8 = batch.inputs()
    fp8.q.copy_(fp8.q.to(torch.float8_e4m3fn).bfloat16())
    want = batch.want(fp8, engines.spec_of(config_for(batch, 1)), fp8.pages.nan_to_num().to(torch.float8_e4m3fn).float())
    for rank, ids in enumerate(run_ranks(world, work)):
        assert torch.equal(ids, want[owned_heads(rank, world, HEADS)])


@pytest.mark.parametrize("name", ["decode", "mixed", "drafts-padded"])
@pytest.mark.parametrize("world", [1, 2])
def test_without_context_parallelism_our_kernels_select_the_same(name, world):
    batch, inputs = BATCHES[name], inputs_of(name)

    def work(rank: int):
        config = config_for(batch, world, options={"kernels": True})
        with engines.engine(config, rank):
            layer = engines.layer_of(config, buffer=engines.buffer_of(config))
            assert layer.impl.engine.indexer.dispatch == "replicated"
            decoded, prefilled, _ = forward(config, layer, batch, inputs, owned_heads(rank, world, HEADS))
            return torch.cat([part for part in (decoded, prefilled) if part is not None], dim=1)

    for rank, ids in enumerate(run_ranks(world, work)):
        assert torch.equal(ids, wanted(name)[owned_heads(rank, world, HEADS)])


def test_a_profiling_run_selects_nothing_and_reads_no_cache():
    def work(rank: int):
        config = engines.config_of(2, cp=True)
        with engines.engine(config, rank):
            layer = engines.layer_of(config, buffer=(buffer := engines.buffer_of(config)))
            result = engines.run(config, layer, None, torch.zeros(3, 2, 128, dtype=torch.bfloat16))
            return result, bool((buffer == SENTINEL).all())

    assert run_ranks(2, work) == [((None, None), True)] * 2


@pytest.mark.parametrize("world", [4, 8])
def test_on_rocm_decode_fills_the_sparse_table_of_the_one_head(world, monkeypatch):
    """vLLM's module admits the four arguments there only, and holds the buffer head-major."""
    batch, inputs = BATCHES["decode-padded"], inputs_of("decode-padded")
    rows = batch.rows
    platform = SimpleNamespace(is_rocm=lambda: True, is_cuda=lambda: False, is_cpu=lambda: True, device_type="cpu")

    def work(rank: int):
        config = config_for(batch, world, cp=True)
        with engines.engine(config, rank):
            buffer = engines.buffer_of(config, head_major=True)
            layer = engines.layer_of(config, buffer=buffer)
            engines.bind(layer, inputs.pages)
            step = batch.metadata(config, inputs)
            pages = torch.arange(step.decode.block_table.numel(), dtype=torch.int32).view_as(step.decode.block_table)
            out = torch.full((rows, 16 * 8), SENTINEL, dtype=torch.int32)
            held = torch.full((rows,), SENTINEL, dtype=torch.int32)
            monkeypatch.setattr(base, "current_platform", platform)
            q = inputs.q[:, owned_heads(rank, world, HEADS)].flatten(1)
            with engines.set_forward_context({layer.index_cache.prefix: step}, config, num_tokens=rows):
                layer(
                    q,
                    attention_block_table=pages,
                    sparse_block_table_out=out,
                    sparse_context_lens_out=held,
                    block_page_stride=8,
                )
            return buffer[:, :rows], pages, out, held

    for rank, (ids, pages, out, held) in enumerate(run_ranks(world, work)):
        want = wanted("decode-padded")[owned_heads(rank, world, HEADS)]
        assert torch.equal(ids, want)
        lengths = [*batch.tokens, 0, 0]
        for row, length in enumerate(lengths):
            chosen = want[0, row].tolist()
            table, tokens = reference.sparse_row(
                chosen, length, pages[row].tolist(), block_size=128, page_size=16, page_stride=8
            )
            assert out[row].tolist() == table + [0] * (16 * 8 - len(table))
            assert int(held[row]) == tokens
