# SPDX-License-Identifier: Apache-2.0
"""An index cache that the ranks hold once, as vLLM sizes, allocates, binds, fills and zeroes it for its attention layers."""

import sys
import types
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
from engines import BATCHES, HEADS, Batch
from support import Inputs, owned_heads
from torch import nn
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.models.minimax_m3.common.sparse_attention import MiniMaxM3SparseBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, record_kv_cache_layout, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import utils as worker

from lightning_indexer.verify.ranks import run_ranks
from lightning_indexer.vllm import indexer, sharded
from lightning_indexer.vllm.worker import WorkerExtension

LAYERS = 2
BY_PAGE = {"cp": True, "options": {"shard_by": "page"}}


def vllms_model() -> Any:
    """The module of vLLM's model, which takes an enumeration for its pictures from torchvision."""
    if "torchvision" not in sys.modules:
        package, transforms = types.ModuleType("torchvision"), types.ModuleType("torchvision.transforms")
        transforms.InterpolationMode = SimpleNamespace(BICUBIC="bicubic")
        sys.modules |= {"torchvision": package, "torchvision.transforms": transforms}
    from vllm.models.minimax_m3.nvidia import model

    return model


MODEL = vllms_model()


class Attention(MODEL.MiniMaxM3SparseAttention):
    """vLLM's sparse layer without weights, its forward and its cache: is handed `[q | k | v | index_q | index_k]`."""

    def __init__(self, config: Any, number: int, buffer: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.layer_name = f"model.layers.{number}.self_attn.attn"
        self.indexer = engines.layer_of(config, number, buffer=buffer)
        self.attn_backend = MiniMaxM3SparseBackend
        self.hidden_size = self.q_size = self.head_dim = 128
        self.num_heads = self.num_kv_heads = 1
        self.num_idx_heads = self.indexer.num_index_heads
        self.index_q_size = 128 * self.num_idx_heads
        self.kv_cache_dtype, self.kv_cache_torch_dtype, self.use_nvfp4_kv = "auto", torch.bfloat16, False
        self.q_norm = self.k_norm = self.index_q_norm = self.index_k_norm = SimpleNamespace(weight=None, variance_epsilon=0)
        self.rotary_emb = SimpleNamespace(cos_sin_cache=None, rotary_dim=64)
        self.impl = SimpleNamespace(forward=lambda layer, query, kv_cache, output, **keywords: output)
        self._q_scale_float = 1.0
        self.qkv_proj = self.o_proj = lambda hidden_states: (hidden_states, None)
        self.kv_cache = torch.tensor([])
        config.compilation_config.static_forward_context[self.layer_name] = self


def insert(qkv: torch.Tensor, *rest: Any, **keywords: Any) -> None:
    """What vLLM's fused kernel does with keys, values and index queries, without norms and rotation."""
    slots, index_slots, kv_cache, index_cache, block_size, _, index_q = rest[11:18]
    assert int(index_slots.max()) < len(index_cache) * block_size  # the kernel does not look
    for places, cache, row in ((slots, kv_cache[:, 0], qkv[:, 128:384]), (index_slots, index_cache, qkv[:, -128:])):
        own = places >= 0
        cache[places[own] // block_size, places[own] % block_size] = row[own].to(cache.dtype)
    index_q.copy_(qkv[:, 384:-128])


class Engine:
    """A rank's sparse layers and their caches, of the blocks that vLLM finds room for in `memory` bytes."""

    def __init__(self, config: Any, memory: int) -> None:
        self.config, self.world = config, config.parallel_config.tensor_parallel_size
        self.buffer = engines.buffer_of(config)
        self.layers = [Attention(config, number, self.buffer) for number in range(LAYERS)]
        self.registered = config.compilation_config.static_forward_context
        self.plan = self.sized(memory)
        layout = config.cache_config.get_resolved_kv_cache_layout()
        self.views = worker.allocate_kv_cache(self.plan, torch.device("cpu"), layout, [128])
        worker.bind_kv_cache(self.views, self.registered, [])

    def specs(self) -> dict[str, Any]:
        """Of all layers, as the model runner asks for them."""
        found = {}
        for name, layer in self.registered.items():
            found[name] = worker.customize_attention_spec(layer.get_attn_backend(), layer.get_kv_cache_spec(self.config))
        return found

    def sized(self, memory: int) -> KVCacheConfig:
        """vLLM's own plan, as its engine core makes it for all ranks."""
        specs = [self.specs()] * self.world
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(self.config))]
        layout = resolve_kv_cache_layout(self.config, [layouts] * self.world, specs[0].values())
        record_kv_cache_layout(self.config.cache_config, layout.name)
        groups = get_global_kv_cache_groups(self.config, specs)
        return get_kv_cache_configs(self.config, specs, [memory] * self.world, groups)[0]

    def forward(self, rows: list[torch.Tensor], slots: torch.Tensor, step: Any = None) -> list[torch.Tensor]:
        """One pass; of each layer the ids in the shared buffer."""
        metadata = None if step is None else {layer.indexer.index_cache.prefix: step for layer in self.layers}
        mapping = dict.fromkeys(self.registered, slots)
        found = []
        with set_forward_context(metadata, self.config, num_tokens=len(slots), slot_mapping=mapping):
            for layer, qkv in zip(self.layers, rows, strict=True):
                layer(None, qkv)
                found.append(self.buffer[: len(slots)].transpose(0, 1).clone())
            assert all(mapping[name] is slots for name in self.registered)  # may be another pass's, too
            passed = get_forward_context().slot_mapping
        made = {id(passed[layer.indexer.index_cache.prefix]) for layer in self.layers}
        assert len(made) == 1  # once for all layers
        return found


def rows_of(q: torch.Tensor, keys: torch.Tensor, layer: int) -> torch.Tensor:
    """What a layer is handed: keys and values of its number, and index keys of its own."""
    main = torch.full((len(q), 384), layer + 1.0, dtype=q.dtype)
    return torch.cat((main, q.flatten(1), keys.roll(layer, dims=-1)), dim=1)


def served(engine: Engine, batch: Batch, inputs: Inputs, places: torch.Tensor, heads: list[int]) -> list[torch.Tensor]:
    """Write a batch's requests into the pages `places`, then take its step; the ids of each layer."""
    pages, size = inputs.pages.flatten(0, 1), engine.config.cache_config.block_size
    spots = (places[:, None] * size + torch.arange(size)).flatten()
    idle = torch.zeros(len(pages), len(heads), 128, dtype=pages.dtype)
    engine.forward([rows_of(idle, pages, layer) for layer in range(LAYERS)], spots)
    table = inputs.block_table.clone()
    own, slots = torch.zeros_like(inputs.q[:, 0]), torch.full((len(inputs.q),), -1)
    row = 0
    for request, (tokens, count) in enumerate(zip(batch.tokens, batch.queries, strict=True)):
        taken = inputs.block_table[request, : -(-tokens // size)].long()
        table[request, : len(taken)] = places[taken].int()
        position = torch.arange(tokens - count, tokens)
        at = taken[position // size]
        own[row : row + count] = inputs.pages[at, position % size]
        slots[row : row + count] = places[at] * size + position % size
        row += count
    there = Inputs(inputs.spec, inputs.q, inputs.pages, table, inputs.seq_lens, inputs.query_len)
    backend = engine.registered[engine.layers[0].indexer.index_cache.prefix].get_attn_backend()
    step = batch.metadata(engine.config, there, backend)
    return engine.forward([rows_of(inputs.q[:, heads], own, layer) for layer in range(LAYERS)], slots, step)


def main_is_untouched(engine: Engine, places: list[torch.Tensor]) -> bool:
    """Whether keys and values of the main caches lie where they were written, and nothing else there."""
    written = torch.zeros(engine.plan.num_blocks, dtype=torch.bool)
    written[torch.cat(places)] = True
    found = [layer.kv_cache.flatten(1).unique(dim=1) for layer in engine.layers]
    return all(torch.equal(values, written[:, None] * (layer + 1.0)) for layer, values in enumerate(found))


# vLLM's arithmetic.


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_more_blocks_fit_by_the_factor_that_the_specs_predict(world, kv_dtype):
    """Main pages of one head per rank, 65,536 B, beside index pages of 128 rows of 128 elements, whole or 1/P."""
    memory = 64 << 20

    def work(rank: int):
        counts = []
        for changes in ({"cp": True}, BY_PAGE):
            config = engines.config_of(world, kv_dtype=kv_dtype, **changes)
            with engines.engine(config, rank):
                engine = Engine(config, memory)
                counts.append(engine.plan.num_blocks)
        held = [layer.indexer.index_cache.kv_cache.shape for layer in engine.layers]
        outside = [
            layer.indexer.index_cache.kv_cache.untyped_storage().data_ptr()
            != engine.layers[0].kv_cache.untyped_storage().data_ptr()
            for layer in engine.layers
        ]
        return counts, held, any(outside)

    index = 128 * 128 * (2 if kv_dtype == "bf16" else 1)
    whole, share = 65536 + index, 65536 + index / world
    for (replicated, by_page), held, outside in run_ranks(world, work):
        assert replicated == memory // (LAYERS * whole)
        assert by_page / replicated == pytest.approx(whole / share, rel=0.01)
        assert by_page <= memory / (LAYERS * share)
        assert held == [(-(-by_page // world), 128, 128)] * LAYERS
        assert not outside


@pytest.mark.parametrize("world", [2, 4, 8, 12])
def test_pages_of_any_number_of_blocks_lie_inside_the_bytes_of_their_layer(world):
    """Two layers in a row, and canaries: every byte of every whole page belongs to its layer alone."""

    def work(rank: int):
        config = engines.config_of(world, heads=4, **BY_PAGE)
        with engines.engine(config, rank):
            layer = engines.layer_of(config)
            cache = config.compilation_config.static_forward_context[layer.index_cache.prefix]
            spec = worker.customize_attention_spec(cache.get_attn_backend(), cache.get_kv_cache_spec(config))
        shared = []
        for blocks in (1, 2, 3, 31, 256, 257, 300, 511):
            elements = blocks * spec.page_size_bytes // 2
            raw = torch.zeros(3 * elements, dtype=torch.bfloat16)
            shape = (blocks, 1, 128, spec.head_size)
            view = raw.as_strided(shape, (spec.page_size_bytes // 2, 1, spec.head_size, 1), elements)
            cache.bind_kv_cache(view)
            pages = layer.index_cache.kv_cache
            assert pages.shape == (-(-blocks // world), 128, 128)
            pages.fill_(1)
            shared.append(raw.any().item())
            assert not raw[:elements].any()
            assert not raw[2 * elements :].any()
            assert int(raw.count_nonzero()) == shared[-1] * pages.numel()
        return shared

    for shared in run_ranks(world, work):
        assert shared[4:] == [True] * 4  # from 256 blocks on in vLLM's memory


# The ids, and what is written where.


@pytest.mark.parametrize(("kv_dtype", "blocks"), [("bf16", 97), ("bf16", 129), ("fp8", 51), ("fp8", 128)])
def test_layers_select_as_with_a_cache_on_every_rank_whatever_pages_they_get(kv_dtype, blocks, monkeypatch):
    """One engine after another, one batch after another: pages are used again, with what the last request left in them.

    51 and 97 blocks are too few for the last page of a rank to lie in vLLM's memory.
    """
    world = 2
    monkeypatch.setattr(MODEL.ops, "fused_minimax_m3_qknorm_rope_kv_insert", insert)
    page = 65536 + 128 * 128 * (2 if kv_dtype == "bf16" else 1)
    names = {0: ("decode", "mixed", "decode-padded", "prefill", "decode-short"), 2: ("drafts", "drafts-padded")}

    def work(rank: int):
        heads, found = owned_heads(rank, world, HEADS), {}
        for label, changes in (("whole", {"cp": True}), ("by page", BY_PAGE)):
            for drafts in names:
                config = engines.config_of(world, drafts=drafts, kv_dtype=kv_dtype, **changes)
                config.cache_config.num_gpu_blocks_override = blocks
                with engines.engine(config, rank):
                    engine = Engine(config, blocks * LAYERS * page)
                    assert engine.plan.num_blocks == blocks
                    used = []
                    for number, name in enumerate(names[drafts]):
                        inputs = BATCHES[name].inputs()
                        free = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(number)) + 1
                        used.append(free[: len(inputs.pages)])
                        found[label, name] = served(engine, BATCHES[name], inputs, used[-1], heads)
                    assert main_is_untouched(engine, used)
        return found

    results = run_ranks(world, work)
    for rank, found in enumerate(results):
        for name in (*names[0], *names[2]):
            for layer in range(LAYERS):
                assert torch.equal(found["by page", name][layer], found["whole", name][layer]), (name, layer, rank)
            batch, inputs = BATCHES[name], BATCHES[name].inputs()
            if kv_dtype == "bf16":
                want = batch.want(inputs, engines.spec_of(engines.config_of(1)))
                assert torch.equal(found["by page", name][0], want[owned_heads(rank, world, HEADS)]), (name, rank)


def test_a_rank_may_hold_everything_or_nothing_of_a_request(monkeypatch):
    world, batch = 2, BATCHES["decode-short"]
    monkeypatch.setattr(MODEL.ops, "fused_minimax_m3_qknorm_rope_kv_insert", insert)

    def work(rank: int):
        config = engines.config_of(world, **BY_PAGE)
        with engines.engine(config, rank):
            engine = Engine(config, 64 << 20)
            inputs = batch.inputs()
            places = 2 * torch.arange(1, len(inputs.pages) + 1)  # pages of rank 0 alone
            ids = served(engine, batch, inputs, places, owned_heads(rank, world, HEADS))
            return ids[0], [bool(layer.indexer.index_cache.kv_cache.any()) for layer in engine.layers]

    want = batch.want(batch.inputs(), engines.spec_of(engines.config_of(1)))
    for rank, (ids, written) in enumerate(run_ranks(world, work)):
        assert torch.equal(ids, want[owned_heads(rank, world, HEADS)])
        assert written == [rank == 0] * LAYERS


def test_a_context_that_serves_a_second_pass_takes_the_slots_that_it_then_has(monkeypatch):
    """A warm-up and then a capture, in the same context, over the same memory."""
    monkeypatch.setattr(MODEL.ops, "fused_minimax_m3_qknorm_rope_kv_insert", insert)

    def work(rank: int):
        config = engines.config_of(2, **BY_PAGE)
        with engines.engine(config, rank):
            engine = Engine(config, 64 << 20)
            slots, found = torch.tensor([128 * 5, 128 * 6 + 1, -1]), []
            row = torch.ones(3, 384 + 256 + 128, dtype=torch.bfloat16)
            mapping = dict.fromkeys(engine.registered, slots)
            with set_forward_context(None, config, num_tokens=3, slot_mapping=mapping):
                for _ in range(2):
                    for layer in engine.layers:
                        layer(None, row)
                        pages = layer.indexer.index_cache.kv_cache
                        found.append(pages.any(dim=2).nonzero().tolist())
                        pages.zero_()
                    slots.copy_(torch.tensor([-1, 128 * 8 + 2, 128 * 9 + 3]))
        return found

    assert run_ranks(2, work) == [[[[3, 1]]] * 2 + [[[4, 2]]] * 2, [[[2, 0]]] * 2 + [[[4, 3]]] * 2]


def test_vllm_neither_zeroes_nor_keeps_what_its_block_ids_do_not_number():
    """Caches of two precisions have new blocks zeroed; at the end of an engine, and between two caches, layers let go."""

    def work(rank: int):
        counts = []
        for changes in ({"cp": True}, BY_PAGE):
            config = engines.config_of(2, **changes)
            with engines.engine(config, rank):
                engine = Engine(config, 64 << 20)
                groups = [
                    worker.AttentionGroup(layer.get_attn_backend(), [name], layer.get_kv_cache_spec(config), 0)
                    for name, layer in engine.registered.items()
                ]
                zeroer = worker.KVBlockZeroer(torch.device("cpu"), groups, [128], engine.registered, engine.plan.num_blocks)
                counts.append(zeroer._meta[-1])
        # As both runners do it: from the registered layers, and from the model once these are forgotten.
        worker.clear_layer_kv_caches(module for layer in engine.layers for module in layer.modules())
        return counts, [layer.indexer.index_cache.kv_cache.numel() for layer in engine.layers]

    assert run_ranks(2, work) == [([2 * LAYERS, LAYERS], [0] * LAYERS)] * 2


def test_slots_of_layers_slices_and_of_fewer_tokens_than_rows():
    """Micro-batches have a slice for each layer, and padded passes more rows than slots, which the kernels look at."""

    def work(rank: int):
        config = engines.config_of(2, **BY_PAGE)
        with engines.engine(config, rank):
            engine = Engine(config, 64 << 20)
            slots = torch.tensor([128 * 4, -1, 128 * 7 + 5, 99])
            own = sharded.OwnSlots(dict.fromkeys(engine.registered, slots[:3]), engine.registered, "first", 6)
            found = [own[layer.indexer.index_cache.prefix] for layer in engine.layers]
            assert len({each.data_ptr() for each in found}) == 1
            return found[0].tolist(), found[0].as_strided((6,), (1,)).tolist()

    expected = [[128 * 2, -1, -1], [-1, -1, 128 * 3 + 5]]
    assert run_ranks(2, work) == [(each, [*each, -1, -1, -1]) for each in expected]


def test_a_profiling_run_selects_nothing_and_writes_nothing():
    def work(rank: int):
        config = engines.config_of(2, **BY_PAGE)
        with engines.engine(config, rank):
            layer = Attention(config, 0, engines.buffer_of(config))
            with set_forward_context(None, config, num_tokens=3):
                return layer(None, torch.ones(3, 128)).abs().sum().item()

    assert run_ranks(2, work) == [0.0] * 2


# What is told and what is refused.


def test_the_log_and_the_counters_tell_it():
    def work(rank: int):
        told = []
        indexer.logger.setLevel("INFO")
        indexer.logger.addHandler(handler := indexer.logging.Handler())
        handler.emit = lambda record: told.append(record.getMessage())
        config = engines.config_of(4, **BY_PAGE)
        with engines.engine(config, rank):
            kept = engines.layer_of(config)
            (counters,) = WorkerExtension().lightning_indexer_statistics()
        return told, counters["shard_by"], counters["dispatch"], kept is not None

    (told, *facts), *_ = run_ranks(4, work)
    assert facts == ["page", "sharded", True]
    assert "index cache bf16 sharded by page, 64 B a token on a rank, queries bfloat16" in told[0]


PAGE = {"shard_by": "page"}
REFUSALS = [
    pytest.param(1, BY_PAGE, "tensor_parallel_size: expected more than 1", id="TP1"),
    pytest.param(2, {"options": PAGE}, 'minimax_m3_indexer_cp: expected true with shard_by "page", got none', id="flag"),
    pytest.param(
        2,
        {**BY_PAGE, "dcp": 2},
        "decode_context_parallel_size: expected 1: each rank holds pages, not tokens, got 2",
        id="DCP",
    ),
    pytest.param(
        2, {"cp": True, "options": {**PAGE, "dispatch": "replicated"}}, 'dispatch: expected "sharded" or "auto"', id="dispatch"
    ),
    pytest.param(
        2, {"cp": True, "options": {**PAGE, "capture": "x"}}, 'capture: expected none with shard_by "page"', id="capture"
    ),
    pytest.param(
        2,
        {**BY_PAGE, "connector": "NixlConnector"},
        'kv_transfer_config: expected none with shard_by "page": it would take the blocks of one rank for those of all,'
        " got NixlConnector",
        id="connector",
    ),
    pytest.param(2, {**BY_PAGE, "page": 256}, "block_size: expected 128 with shard_by", id="block size"),
    pytest.param(2, {"cp": True, "options": {"shard_by": "token"}}, "shard_by: expected 'block' or 'page'", id="rule"),
]


@pytest.mark.parametrize(("world", "changes", "reason"), REFUSALS)
def test_what_cannot_hold_the_cache_once_is_refused_at_start_with_the_reason(world, changes, reason):
    def work(rank: int) -> str:
        config = engines.config_of(world, **changes)
        with engines.engine(config, rank), pytest.raises(ValueError, match="expected") as raised:
            Engine(config, 64 << 20)
        return str(raised.value)

    for told in run_ranks(world, work):
        assert reason in told


def test_a_connector_is_taken_where_every_rank_holds_the_cache():
    def work(rank: int):
        config = engines.config_of(2, cp=True, connector="NixlConnector")
        with engines.engine(config, rank):
            return engines.layer_of(config).impl.engine.by_page

    assert run_ranks(2, work) == [False] * 2


def test_layouts_that_put_other_layers_between_the_blocks_are_refused(monkeypatch):
    def work(rank: int):
        config = engines.config_of(2, **BY_PAGE)
        with engines.engine(config, rank):
            layer = engines.layer_of(config)
            cache = config.compilation_config.static_forward_context[layer.index_cache.prefix]
            spec = cache.get_kv_cache_spec(config)
            apart = spec.page_size_bytes + 65536
            raw = torch.zeros(300 * apart // 2, dtype=torch.bfloat16)
            view = raw.as_strided((300, 1, 128, 64), (apart // 2, 1, 64, 1))
            with pytest.raises(ValueError, match="kv_cache_layout") as raised:
                cache.bind_kv_cache(view)
        return str(raised.value), [layout.name for layout in cache.get_attn_backend().supported_kv_cache_layouts()]

    for told, layouts in run_ranks(2, work):
        assert told.startswith("kv_cache_layout: expected one with the blocks of a layer in a row (LBNHC or LBHNC)")
        assert layouts == ["LBNHC", "LBHNC"]


@pytest.mark.parametrize(("known", "got"), [(False, "no model of vLLM"), (True, "another")])
def test_a_model_that_may_write_elsewhere_is_refused(monkeypatch, known, got):
    module = types.ModuleType("model")
    module.MiniMaxM3SparseAttention = type("Other", (), {"forward": lambda self, hidden_states: None})
    for name in sharded.MODELS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    if known:
        monkeypatch.setitem(sys.modules, sharded.MODELS[0], module)

    def work(rank: int) -> str:
        config = engines.config_of(2, **BY_PAGE)
        with engines.engine(config, rank), pytest.raises(ValueError, match="cannot serve") as raised:
            engines.layer_of(config)
        return str(raised.value)

    for told in run_ranks(2, work):
        assert "model: expected MiniMaxM3SparseAttention.forward(positions, hidden_states) of vLLM" in told
        assert f"got {got}" in told


def test_a_model_is_changed_once_and_only_when_it_is_asked_for():
    def work(rank: int):
        before = MODEL.MiniMaxM3SparseAttention.forward
        for changes in ({"cp": True}, BY_PAGE, BY_PAGE):
            config = engines.config_of(2, **changes)
            with engines.engine(config, rank):
                engines.layer_of(config)
            after = MODEL.MiniMaxM3SparseAttention.forward
            assert changes is BY_PAGE or after is before
        return after.__wrapped__ is before

    assert run_ranks(2, work) == [True] * 2
