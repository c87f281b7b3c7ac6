# SPDX-License-Identifier: Apache-2.0
"""How the plugin gets into vLLM, what it costs until then, what it refuses, and what layers share."""

import dataclasses
import gc
import logging
import os
import subprocess
import sys
import types
from types import SimpleNamespace

import engines
import pytest
import torch
from engines import BATCHES, HEADS, base
from support import owned_heads
from vllm.config import CUDAGraphMode, set_current_vllm_config

import lightning_indexer as li
import lightning_indexer_vllm as plugin
from lightning_indexer.verify.ranks import run_ranks
from lightning_indexer.vllm import engine, indexer, interface
from lightning_indexer.vllm.indexer import LightningIndexerImpl
from lightning_indexer.vllm.options import Options
from lightning_indexer.vllm.worker import WorkerExtension


def on_one_rank(work):
    return run_ranks(1, work)[0]


def refusal(rank: int, config, **layer) -> str:
    with engines.engine(config, rank), pytest.raises(ValueError, match="lightning-indexer") as raised:
        engines.layer_of(config, **layer)
    return str(raised.value)


# Getting in.

PROBE = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
ours = [name for name in sys.modules if name.startswith("lightning_indexer")]
models = [name for name in sys.modules if name.startswith("vllm.models.")]
waiting = [finder for finder in sys.meta_path if type(finder).__module__.startswith("lightning_indexer")]
print(sorted(ours), models, len(waiting))
"""


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, "['lightning_indexer_vllm'] [] 1"),
        ("lightning_indexer", "['lightning_indexer_vllm'] [] 1"),
        ("another", "[] [] 0"),
    ],
)
def test_vllms_loader_finds_the_plugin_which_then_only_waits(named, found):
    environment = {**os.environ, **({} if named is None else {"VLLM_PLUGINS": named})}
    ran = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == found


def test_the_model_module_has_our_choice_once_however_often_it_is_registered():
    chosen = base.select_indexer_impl_cls
    assert chosen.lightning_indexer
    plugin.register()
    plugin.register()
    assert base.select_indexer_impl_cls is chosen
    assert sum(type(finder) is plugin._Finder for finder in sys.meta_path) == 1
    assert type(base.__spec__.loader).__name__ == "SourceFileLoader"


def test_without_an_option_vllm_chooses_as_ever():
    def work(rank: int):
        config = engines.config_of(1)
        with engines.engine(config, rank):
            return type(engines.layer_of(config).impl) is base.MiniMaxM3IndexerTritonImpl

    assert on_one_rank(work)


def test_on_rocm_vllms_aiter_class_is_left_out_only_where_ours_is_asked_for():
    module = types.ModuleType(plugin.MSA)
    module.select_msa_indexer_impl_cls = lambda **keywords: keywords
    plugin.install_msa(module)
    plugin.install_msa(module)

    def work(rank: int):
        found = []
        for cp in (False, True):
            with engines.engine(engines.config_of(1, cp=cp), rank):
                found.append(module.select_msa_indexer_impl_cls(topk_blocks=16))
        return found

    assert on_one_rank(work) == [{"topk_blocks": 16}, None]


def test_a_vllm_that_chooses_otherwise_is_told_at_once(caplog):
    module = types.ModuleType(plugin.COMMON)
    with caplog.at_level(logging.WARNING, logger="vllm.lightning_indexer"):
        plugin.install_common(module)
    told = f"lightning-indexer cannot be selected: {plugin.COMMON} of this vLLM has no select_indexer_impl_cls"
    assert [record.getMessage() for record in caplog.records] == [told]
    assert not hasattr(module, "select_indexer_impl_cls")


def test_the_aiter_module_of_this_vllm_has_the_function_that_is_replaced():
    from vllm.models.minimax_m3.amd import indexer_msa

    assert indexer_msa.select_msa_indexer_impl_cls.lightning_indexer


def test_vllms_command_line_takes_both_options():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    attention, additional = '{"minimax_m3_indexer_cp": true}', '{"lightning_indexer": {"order": "block"}}'
    given = parser.parse_args(["--attention-config", attention, "--additional-config", additional])
    assert given.attention_config.minimax_m3_indexer_cp is True
    assert Options.read(given.additional_config) == Options(order="block")


# What is relied on.


def test_this_vllm_is_the_one_that_was_written_for():
    assert interface.mismatches(base) == []


def test_another_version_is_told_and_only_when_ours_is_asked_for(monkeypatch):
    monkeypatch.setattr(interface.importlib.metadata, "version", lambda name: "0.34.1")

    def work(rank: int):
        with engines.engine(config := engines.config_of(1), rank):
            stock = type(engines.layer_of(config).impl)
        return stock is base.MiniMaxM3IndexerTritonImpl, refusal(rank, engines.config_of(1, options={"kernels": True}))

    stock, told = on_one_rank(work)
    assert stock
    assert f"lightning-indexer {li.__version__} cannot serve this engine: vllm: expected version 0.33.*, got 0.34.1" in told
    assert "uninstall lightning-indexer" in told


def test_a_vllm_that_chooses_by_more_is_left_alone_unless_ours_is_asked_for():
    module = types.ModuleType(plugin.COMMON)
    module.select_indexer_impl_cls = lambda *, topk_blocks, head_dim: (topk_blocks, head_dim)
    plugin.install_common(module)

    def work(rank: int):
        with engines.engine(engines.config_of(1), rank):
            stock = module.select_indexer_impl_cls(topk_blocks=16, head_dim=128)
        asking = engines.config_of(1, options={"kernels": True})
        with engines.engine(asking, rank), pytest.raises(ValueError, match="expected parameters") as raised:
            module.select_indexer_impl_cls(topk_blocks=16, head_dim=128)
        return stock, str(raised.value)

    stock, told = on_one_rank(work)
    assert stock == (16, 128)
    assert "select_indexer_impl_cls: expected parameters (topk_blocks, indexer_kv_dtype), got (topk_blocks, head_dim)" in told


@pytest.mark.parametrize("config", [SimpleNamespace(), SimpleNamespace(attention_config=SimpleNamespace())])
def test_a_vllm_without_the_option_chooses_as_ever(monkeypatch, config):
    module = types.ModuleType(plugin.COMMON)
    module.select_indexer_impl_cls = lambda **keywords: keywords
    plugin.install_common(module)
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    assert module.select_indexer_impl_cls(topk_blocks=16) == {"topk_blocks": 16}


def test_arguments_that_the_choice_does_not_take_are_told():
    def work(rank: int) -> str:
        config = engines.config_of(1, options={"kernels": True})
        with engines.engine(config, rank), pytest.raises(TypeError, match="positional") as raised:
            base.select_indexer_impl_cls("fp8", topk_blocks=16)
        return str(raised.value)

    assert "choose()" in on_one_rank(work)


@pytest.mark.parametrize("version", ["0.33", "0.33.0", "0.33.2+cpu"])
def test_releases_of_the_same_series_are_taken(version):
    assert interface.mismatches(base, version) == []


def test_a_changed_module_is_told():
    changed = SimpleNamespace(**vars(base))
    changed.select_indexer_impl_cls = lambda *, topk_blocks, head_dim: None
    del changed.get_forward_context
    changed.MiniMaxM3IndexerImpl = type("Other", (), {"__init__": base.MiniMaxM3IndexerImpl.__init__})

    @dataclasses.dataclass
    class Shorter:
        seq_lens: torch.Tensor

    changed.MiniMaxM3IndexerDecodeMetadata = Shorter
    assert interface.mismatches(changed, "0.33.0") == [
        "select_indexer_impl_cls: expected parameters (topk_blocks, indexer_kv_dtype), got (topk_blocks, head_dim)",
        "get_forward_context: expected parameters (), got none",
        "MiniMaxM3IndexerDecodeMetadata: expected fields (block_table, decode_query_len, seq_lens), got (seq_lens)",
        "MiniMaxM3IndexerImpl.indexer_backend_cls: expected one, got none",
    ]


# Refusals.

CP = {"cp": True}
REFUSALS = [
    pytest.param(1, CP, "tensor_parallel_size: expected more than 1 (or ", id="TP1"),
    pytest.param(2, {**CP, "dcp": 2}, "decode_context_parallel_size: expected 1: ", id="DCP"),
    pytest.param(3, CP, "world: expected a divisor or a multiple of num_heads (4), got 3", id="heads"),
    pytest.param(
        2, {**CP, "sparse": {"sparse_score_type": "mean"}}, "sparse_score_type: expected 'max', got 'mean'", id="score"
    ),
    pytest.param(2, {**CP, "sleep": True}, 'enable_sleep_mode: expected false, or transport "collective"', id="sleep"),
    pytest.param(2, {**CP, "topk": 100}, "topk: expected an int from 1 to 64, got 100", id="topk"),
    pytest.param(2, {**CP, "sparse": {"sparse_index_dim": 96}}, "head_dim: expected one of (64, 128), got 96", id="dim"),
    pytest.param(2, {**CP, "options": {"capture": "calls", "eager": 1}}, "lightning_indexer: expected some of", id="unknown"),
    pytest.param(2, {**CP, "options": {"transport": "ring"}}, "transport: expected 'auto' or", id="transport"),
    pytest.param(2, {**CP, "options": {"transport": "peer"}}, 'transport: expected "collective" or "auto"', id="peer-on-cpu"),
]


@pytest.mark.parametrize(("world", "changes", "reason"), REFUSALS)
def test_what_cannot_be_served_is_refused_at_start_with_the_reason(world, changes, reason):
    def work(rank: int) -> str:
        config = engines.config_of(world, **changes)
        with engines.engine(config, rank):
            try:
                engines.layer_of(config)
            except ValueError as error:
                return str(error)
        return "no error"

    for told in run_ranks(world, work):
        assert reason in told
        assert "\n" not in told


def choose_with(monkeypatch, rank: int, config, **platform) -> str:
    """The refusal on another platform: what vLLM reports of this one is changed."""
    names = {"is_cuda": False, "is_rocm": False, "is_cpu": False, **platform}
    fake = SimpleNamespace(device_type=names.pop("device_type", "cuda"), **{name: lambda v=v: v for name, v in names.items()})
    monkeypatch.setattr(base, "current_platform", fake)
    with engines.engine(config, rank), pytest.raises(ValueError, match="cannot serve") as raised:
        indexer.choose(topk_blocks=16, indexer_kv_dtype="bf16")
    return str(raised.value)


def test_a_platform_without_kernels_is_refused(monkeypatch):
    told = on_one_rank(
        lambda rank: choose_with(monkeypatch, rank, engines.config_of(1, options={"kernels": True}), device_type="tpu")
    )
    assert "platform: expected cuda or rocm or cpu, got tpu" in told


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(indexer, "_device", lambda: torch.device("cuda", 0))
    told = on_one_rank(
        lambda rank: choose_with(monkeypatch, rank, engines.config_of(1, options={"kernels": True}), is_cuda=True)
    )
    assert "device: expected an available device" in told


def test_a_cache_that_the_device_cannot_score_is_refused(monkeypatch):
    def unscorable(q, cache):
        raise ValueError(f"cache: expected format bf16, got {cache.format.name}")

    monkeypatch.setattr(indexer, "backend_of", lambda device: SimpleNamespace(check_operands=unscorable))
    told = run_ranks(2, lambda rank: refusal(rank, engines.config_of(2, cp=True, kv_dtype="fp8")))
    assert all("cache: expected format bf16, got fp8" in text for text in told)


@pytest.mark.parametrize("label", ["mxfp4", "nvfp4"])
def test_a_dtype_that_vllm_cannot_fill_is_refused(label):
    config = engines.config_of(1, options={"kernels": True})
    told = on_one_rank(lambda rank: refusal(rank, config, indexer_kv_dtype=label))
    assert f"indexer_kv_dtype: expected bf16 or fp8 or fp8_e4m3, got {label!r}" in told


def test_a_fused_decode_that_selects_for_itself_is_refused():
    config = engines.config_of(1, options={"kernels": True})
    config.kernel_config.monokernel = True
    told = on_one_rank(lambda rank: refusal(rank, config))
    assert "kernel_config.monokernel: expected one that takes its blocks from the indexer" in told


def test_capture_is_refused_where_whole_steps_are_replayed():
    config = engines.config_of(1, options={"kernels": True, "capture": "x"}, eager=False)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    told = on_one_rank(lambda rank: refusal(rank, config))
    assert "cudagraph_mode: expected a decode that is not replayed as a whole" in told


def test_all_reasons_are_told_at_once():
    config = engines.config_of(1, cp=True, dcp=2, topk=100)
    told = on_one_rank(lambda rank: refusal(rank, config))
    assert all(name in told for name in ("tensor_parallel_size:", "decode_context_parallel_size:", "topk:"))


# A rank that does not come.


@pytest.mark.parametrize("name", ["decode", "mixed", "prefill"])
def test_a_missed_rank_ends_every_kind_of_step_where_its_metadata_is_made(name):
    """As in a replayed graph, in which no layer runs in Python: the report is all there is."""
    from lightning_indexer.peer import PeerTransport
    from lightning_indexer.ranks import VirtualRank

    batch = BATCHES[name]

    def work(rank: int):
        config = engines.config_of(1, options={"kernels": True})
        with engines.engine(config, rank):
            layer = engines.layer_of(config)
            transport = PeerTransport.__new__(PeerTransport)  # without the memory of a GPU
            transport.ranks, transport.report = VirtualRank(1, 4, None), torch.zeros(1, dtype=torch.int32)
            layer.impl.engine.indexer._batches[0].peer = transport
            backend = layer.index_cache.get_attn_backend()
            before, want = (batch.metadata(config, batch.inputs(), *given) for given in ((backend,), ()))
            same = (before.num_decodes, before.num_prefills) == (want.num_decodes, want.num_prefills)
            transport.report.fill_(1 + 2)
            with pytest.raises(RuntimeError, match="selections since then are void") as raised:
                batch.metadata(config, batch.inputs(), backend)
            return same, type(before) is base.MiniMaxM3IndexerMetadata, str(raised.value)

    same, vllms, told = on_one_rank(work)
    assert same
    assert vllms
    assert told.startswith("rank 1 of 4 waited in vain for rank 2 inside a step")


# What layers share, and what is told of it.


def test_all_layers_share_one_indexer_which_ends_with_them():
    def work(rank: int):
        config = engines.config_of(2, cp=True, options={"tie_break": "higher"})
        with engines.engine(config, rank):
            layers = [engines.layer_of(config, number) for number in range(3)]
            shared = {id(layer.impl.engine) for layer in layers}
            with set_current_vllm_config(second := engines.config_of(2, cp=True)):
                other = engines.layer_of(second, 9)
            apart = id(other.impl.engine) not in shared
            made = layers[0].impl.engine.indexer
            facts = made.world, made.rank, made.spec.tie_break, made.max_rows, made.max_seq_len
            del layers, made, other
            gc.collect()
            return len(shared), apart, facts, len(engine.live_indexers())

    for rank, found in enumerate(run_ranks(2, work)):
        assert found == (1, True, (2, rank, "higher", 8, 128 * 48), 0)


def test_an_engines_default_dtype_and_device_do_not_matter_and_stay():
    def work(rank: int):
        config = engines.config_of(2, cp=True)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with engines.engine(config, rank), torch.device("meta"):
                buffer = torch.full((8, 2, 16), -77, dtype=torch.int32, device="cpu")
                layer = engines.layer_of(config, buffer=buffer)
                kept = torch.get_default_dtype(), torch.zeros(1).device.type
                same = layer.impl.engine.indexer.device.type
        finally:
            torch.set_default_dtype(torch.float32)
        return kept, same

    assert run_ranks(2, work) == [((torch.bfloat16, "meta"), "cpu")] * 2


def test_the_log_says_what_runs(caplog):
    def work(rank: int):
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logger = logging.getLogger("vllm.lightning_indexer")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        config = engines.config_of(4, cp=True, kv_dtype="fp8")
        with engines.engine(config, rank):
            kept = [engines.layer_of(config, number) for number in range(2)]
        return messages, len(kept)

    told = [messages for messages, _ in run_ranks(4, work)]
    # (P - 1) * h * (K * 8 + D * 1) = 3 * 1 * (128 + 128)
    assert told[0] == [
        f"lightning-indexer {li.__version__}: 4 heads over 4 ranks, transport collective, dispatch sharded; a rank that shares"
        " reads 32 B of index keys a token of context, layer and step (alone 128 B) and receives 768 B a row;"
        " index cache fp8, queries float8_e4m3fn, top 16, ids by score"
    ]
    assert told[1:] == [[], [], []]


def test_a_worker_tells_its_counters():
    def work(rank: int):
        config = engines.config_of(2, cp=True)
        with engines.engine(config, rank):
            kept = engines.layer_of(config)
            told = WorkerExtension().lightning_indexer_statistics()
        return told, type(kept.impl) is LightningIndexerImpl

    for rank, (told, ours) in enumerate(run_ranks(2, work)):
        assert ours
        assert told == [
            {
                "rank": rank,
                "ranks": 2,
                "transport": "collective",
                "dispatch": "sharded",
                "shard_by": "block",
                "thresholds": [],
                "format": "bf16",
                "steps": {"sharded": 0, "replicated": 0},
            }
        ]


def test_the_plan_is_made_once_a_pass_and_anew_for_the_next():
    def work(rank: int):
        config = engines.config_of(2, cp=True)
        made = []
        with engines.engine(config, rank):
            layers = [engines.layer_of(config, number) for number in range(3)]
            shared = layers[0].impl.engine
            plan_step = shared.indexer.plan_step
            shared.indexer.plan_step = lambda *a, **k: made.append(len(made)) or plan_step(*a, **k)
            batch, inputs = BATCHES["decode"], BATCHES["decode"].inputs()
            step = batch.metadata(config, inputs)
            other = batch.metadata(config, inputs)
            q = inputs.q[:, owned_heads(rank, 2, HEADS)]
            for layer in layers:
                engines.bind(layer, inputs.pages)
            counts = []
            for metadata in (step, step, other):
                for layer in layers:
                    engines.run(config, layer, metadata, q)
                counts.append(len(made))
        return counts

    assert run_ranks(2, work) == [[1, 2, 3]] * 2
