# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 class as an engine with such a cache uses it: constructs, registers, inserts, runs."""

import gc
from types import SimpleNamespace

import engines
import pytest
import torch
from engines import BATCHES, HEADS, base
from support import owned_heads

import lightning_indexer as li
from lightning_indexer.verify.ranks import run_ranks
from lightning_indexer.vllm import indexer, nvfp4
from lightning_indexer.vllm.engine import live_indexers

SENTINEL = -77


def layer_of(config, number: int = 0, **changes):
    """An implementation in the place of vLLM's, and its cache of as many pages as the inputs have."""
    arguments = engines.layer_arguments(config, number, **{"indexer_kv_dtype": "nvfp4", **changes})
    return nvfp4.NvFp4IndexerImpl(**arguments)


def fill(layer, config, keys: torch.Tensor) -> None:
    """Bind a cache of the registered kind, and insert `[pages, 128, 128]` by slot."""
    form = layer.index_cache.get_kv_cache_spec(config)
    assert (form.block_size, form.num_kv_heads, form.head_size, form.dtype) == (128, 1, 72, torch.uint8)
    layer.index_cache.bind_kv_cache(torch.zeros(len(keys), 1, 128, 72, dtype=torch.uint8))
    slots = torch.arange(len(keys) * 128)
    slots[::7] = -1
    layer.index_cache.insert(keys.flatten(0, 1), slots)
    layer.index_cache.insert(keys.flatten(0, 1)[::7], torch.arange(len(keys) * 128)[::7])


@pytest.mark.parametrize("query", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize(("name", "world"), [("decode", 2), ("mixed", 2), ("drafts-padded", 2), ("decode", 8), ("mixed", 1)])
def test_nvfp4_pages_select_what_they_hold(name, world, query):
    batch = BATCHES[name]
    inputs = batch.inputs()
    keys = inputs.pages.nan_to_num()

    def work(rank: int):
        config = engines.config_of(world, drafts=batch.drafts)
        config.attention_config.minimax_m3_indexer_cp = world > 1
        with engines.engine(config, rank):
            buffer = engines.buffer_of(config)
            layer = layer_of(config, buffer=buffer)
            fill(layer, config, keys)
            q = inputs.q[:, owned_heads(rank, world, HEADS)].to(query)
            step = batch.metadata(config, inputs)
            with engines.set_forward_context({layer.index_cache.prefix: step}, config, num_tokens=len(q)):
                decoded, prefilled = layer(q.flatten(1))
            parts = [part for part in (decoded, prefilled) if part is not None]
            ids = torch.cat(parts, dim=1)
            assert torch.equal(buffer[: ids.shape[1]].transpose(0, 1), ids)
            assert (buffer[ids.shape[1] :] == SENTINEL).all()
            return ids, layer.engine.indexer.dispatch

    cache = li.IndexCache.empty(len(keys), li.IndexerSpec(), "nvfp4")
    cache.write(keys.flatten(0, 1), torch.arange(len(keys) * 128))
    inputs.q.copy_(inputs.q.to(query).bfloat16())
    want = batch.want(inputs, engines.spec_of(engines.config_of(1)), cache.dequantize())
    for rank, (ids, dispatch) in enumerate(run_ranks(world, work)):
        assert torch.equal(ids, want[owned_heads(rank, world, HEADS)])
        assert dispatch == ("sharded" if world > 1 else "replicated")


def test_a_profiling_run_selects_nothing():
    def work(rank: int):
        config = engines.config_of(1)
        with engines.engine(config, rank), engines.set_forward_context(None, config, num_tokens=2):
            return layer_of(config)(torch.zeros(2, HEADS * 128))

    assert run_ranks(1, work) == [(None, None)]


@pytest.mark.parametrize("label", ["bf16", "fp8", "auto"])
def test_another_dtype_is_refused(label):
    def work(rank: int) -> str:
        config = engines.config_of(1)
        with engines.engine(config, rank), pytest.raises(ValueError, match="indexer_kv_dtype") as raised:
            layer_of(config, indexer_kv_dtype=label)
        return str(raised.value)

    assert run_ranks(1, work) == [f"indexer_kv_dtype: expected 'nvfp4', got {label!r}"]


REASONS = [
    ({}, None),
    ({"topk_blocks": 65}, "topk: expected an int from 1 to 64, got 65"),
    ({"sparse_block_size": 100}, "block_size: expected one of (64, 128, 256), got 100"),
    ({"index_head_dim": 96}, "head_dim: expected one of (64, 128), got 96"),
    ({"num_index_heads": 0}, "num_heads: expected an int >= 1, got 0"),
    ({"score_type": "mean"}, "score_type: expected 'max', got 'mean'"),
]
GEOMETRY = {"topk_blocks": 16, "sparse_block_size": 128, "num_index_heads": 4, "index_head_dim": 128, "score_type": "max"}


@pytest.mark.parametrize(("change", "reason"), REASONS)
def test_the_reason_says_what_is_needed_and_what_came(change, reason):
    assert nvfp4.nvfp4_indexer_unsupported_reason(**{**GEOMETRY, **change}) == reason


def test_a_device_that_cannot_score_nvfp4_is_a_reason_and_refused(monkeypatch):
    def unscorable(q, cache):
        raise ValueError(f"cache: expected format bf16, got {cache.format.name}")

    monkeypatch.setattr(indexer, "backend_of", lambda device: SimpleNamespace(check_operands=unscorable))
    assert nvfp4.nvfp4_indexer_unsupported_reason(**GEOMETRY) == "cache: expected format bf16, got nvfp4"

    def work(rank: int) -> str:
        config = engines.config_of(1)
        with (
            engines.engine(config, rank),
            pytest.raises(ValueError, match="cannot serve an NVFP4 index cache: cache") as raised,
        ):
            layer_of(config)
        return str(raised.value)

    assert "got nvfp4" in run_ranks(1, work)[0]


def test_decode_cp_is_set_up_once_for_all_layers_and_says_whether_it_is_on(caplog):
    def work(rank: int):
        config = engines.config_of(4)
        config.attention_config.minimax_m3_indexer_cp = True
        config.model_config.hf_text_config.sparse_attention_config["sparse_local_block"] = 1
        with engines.engine(config, rank):
            on = nvfp4.init_nvfp4_indexer_decode_cp(config.model_config.max_model_len)
            layers = [layer_of(config, number) for number in range(2)]
            made = live_indexers()
            facts = on, len(made), all(layer.engine is made[0] for layer in layers), made[0].indexer.dispatch
            del layers, made
            gc.collect()
            return *facts, len(live_indexers())

    assert run_ranks(4, work) == [(True, 1, True, "sharded", 0)] * 4


@pytest.mark.parametrize(
    ("world", "flag", "changes", "reason"),
    [
        (2, False, {}, "attention_config: expected minimax_m3_indexer_cp, got none"),
        (1, True, {}, "tensor_parallel_size: expected more than 1"),
        (2, True, {"sleep": True}, "enable_sleep_mode: expected false"),
    ],
)
def test_decode_cp_that_is_off_says_why_once(world, flag, changes, reason):
    def work(rank: int):
        told = []
        nvfp4.logger.setLevel("INFO")
        nvfp4.logger.addHandler(handler := nvfp4.logging.Handler())
        handler.emit = lambda record: told.append(record.getMessage())
        config = engines.config_of(world, **changes)
        config.attention_config.minimax_m3_indexer_cp = flag
        with engines.engine(config, rank):
            on = nvfp4.init_nvfp4_indexer_decode_cp(config.model_config.max_model_len)
            layers = [layer_of(config, number) for number in range(2)]
            return on, [text for text in told if "no context-parallel decode" in text], layers[0].engine.indexer.dispatch

    for on, told, dispatch in run_ranks(world, work):
        assert not on
        assert dispatch == "replicated"
        assert len(told) == 1
        assert reason in told[0]


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(
    ("monokernel", "changes", "reason"),
    [
        (False, {"dcp": 2}, "decode_context_parallel_size: expected 1"),
        (True, {}, "kernel_config.monokernel: expected one that takes its blocks from the indexer"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_whatever_the_flag(flag, monokernel, changes, reason):
    def work(rank: int) -> list[str]:
        config = engines.config_of(2, **changes)
        config.attention_config.minimax_m3_indexer_cp = flag
        config.kernel_config.monokernel = monokernel
        told = []
        with engines.engine(config, rank):
            for make in (layer_of, lambda config: nvfp4.init_nvfp4_indexer_decode_cp(config.model_config.max_model_len)):
                with pytest.raises(ValueError, match="cannot serve this engine") as raised:
                    make(config)
                told.append(str(raised.value))
        return told

    for told in run_ranks(2, work):
        assert all(reason in text for text in told)


def test_a_cache_that_is_held_once_is_refused():
    def work(rank: int) -> str:
        config = engines.config_of(2, cp=True, options={"shard_by": "page"})
        with engines.engine(config, rank), pytest.raises(ValueError, match="cannot serve this engine") as raised:
            layer_of(config)
        return str(raised.value)

    for told in run_ranks(2, work):
        assert "shard_by: expected 'block' with an NVFP4 index cache, got 'page'" in told


def test_decode_cp_for_another_length_is_refused():
    def work(rank: int) -> str:
        with engines.engine(engines.config_of(1), rank), pytest.raises(ValueError, match="max_model_len") as raised:
            nvfp4.init_nvfp4_indexer_decode_cp(1000)
        return str(raised.value)

    assert run_ranks(1, work) == [f"max_model_len: expected the engine's ({128 * 48}), got 1000"]


def test_vllm_itself_refuses_the_dtype():
    """What makes a class of our own necessary; if this fails, a plugin may do with less."""

    def work(rank: int) -> str:
        config = engines.config_of(1, options={"kernels": True})
        with engines.engine(config, rank), pytest.raises(NotImplementedError) as raised:
            base.MiniMaxM3IndexerCache(128, "layer", None, "nvfp4")
        return str(raised.value)

    assert "nvfp4" in run_ranks(1, work)[0]
