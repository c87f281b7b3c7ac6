# SPDX-License-Identifier: Apache-2.0
"""Names, signatures and import behaviour that users rely on."""

import dataclasses
import inspect
import re
import subprocess
import sys
from importlib import resources

import pytest

import lightning_indexer as li

REQUIRED = inspect.Parameter.empty
SIGNATURES = {
    li.IndexerSpec: {
        "num_heads": 4,
        "head_dim": 128,
        "block_size": 128,
        "topk": 16,
        "init_blocks": 0,
        "local_blocks": 1,
        "tie_break": "lower",
    },
    li.IndexerSpec.minimax_m3: {},
    li.IndexerSpec.from_config: {"config": REQUIRED},
    li.Shard: {"rank": 0, "world": 1, "by": "block"},
    li.IndexCache.empty: {"num_pages": REQUIRED, "spec": REQUIRED, "format": "bf16", "device": "cpu"},
    li.IndexCache.wrap: {"tensor": REQUIRED, "spec": REQUIRED, "format": None, "scale": None},
    li.IndexCache.write: {"self": REQUIRED, "keys": REQUIRED, "slot_mapping": REQUIRED},
    li.IndexCache.dequantize: {"self": REQUIRED},
    li.score_blocks: {
        "q": REQUIRED,
        "cache": REQUIRED,
        "block_table": REQUIRED,
        "seq_lens": REQUIRED,
        "spec": REQUIRED,
        "query_len": 1,
        "max_seq_len": None,
        "shard": None,
        "out": None,
    },
    li.select_keys: {
        "scores": REQUIRED,
        "seq_lens": REQUIRED,
        "spec": REQUIRED,
        "query_len": 1,
        "shard": None,
        "out": None,
    },
    li.merge_keys: {
        "keys": REQUIRED,
        "seq_lens": REQUIRED,
        "spec": REQUIRED,
        "query_len": 1,
        "order": "score",
        "sparse_table": None,
        "out": None,
    },
    li.decode: {
        "q": REQUIRED,
        "cache": REQUIRED,
        "block_table": REQUIRED,
        "seq_lens": REQUIRED,
        "spec": REQUIRED,
        "query_len": 1,
        "max_seq_len": None,
        "order": "score",
        "sparse_table": None,
        "out": None,
    },
    li.prefill: {
        "q": REQUIRED,
        "cache": REQUIRED,
        "block_table": REQUIRED,
        "cu_seqlens_q": REQUIRED,
        "seq_lens": REQUIRED,
        "spec": REQUIRED,
        "max_query_len": None,
        "max_seq_len": None,
        "order": "score",
        "out": None,
    },
    li.SparseTable: {
        "block_table": REQUIRED,
        "block_table_out": REQUIRED,
        "context_lens_out": REQUIRED,
        "page_size": 16,
        "page_stride": 8,
    },
    li.ContextParallelIndexer: {
        "spec": REQUIRED,
        "group": None,
        "max_rows": REQUIRED,
        "max_seq_len": REQUIRED,
        "device": REQUIRED,
        "transport": "auto",
        "dispatch": "auto",
    },
    li.ContextParallelIndexer.warmup: {"self": REQUIRED, "cache_format": "bf16"},
    li.ContextParallelIndexer.decode: {
        "self": REQUIRED,
        "q": REQUIRED,
        "cache": REQUIRED,
        "block_table": REQUIRED,
        "seq_lens": REQUIRED,
        "query_len": 1,
        "order": "score",
        "sparse_table": None,
        "out": None,
    },
}
KEYWORD_ONLY = [li.score_blocks, li.select_keys, li.merge_keys, li.decode, li.prefill, li.ContextParallelIndexer.decode]


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__qualname__)
def test_signature(call):
    """The documented parameters come first, in this order; more may follow if they have defaults."""
    parameters = inspect.signature(call).parameters
    documented = SIGNATURES[call]
    assert {name: parameters[name].default for name in list(parameters)[: len(documented)]} == documented
    assert list(parameters)[: len(documented)] == list(documented)
    for parameter in list(parameters.values())[len(documented) :]:
        assert parameter.default is not REQUIRED


@pytest.mark.parametrize("call", KEYWORD_ONLY, ids=lambda call: call.__qualname__)
def test_options_are_keyword_only(call):
    for name, parameter in inspect.signature(call).parameters.items():
        tensors = ("self", "q", "cache", "block_table", "seq_lens", "scores", "keys", "cu_seqlens_q")
        optional = (call, name) == (li.select_keys, "block_table")
        assert (parameter.kind is parameter.KEYWORD_ONLY) == (name not in tensors or optional), name


def test_exported_names():
    assert sorted(li.__all__) == [
        "ContextParallelIndexer",
        "IndexCache",
        "IndexerSpec",
        "NormRope",
        "PageMove",
        "Shard",
        "SparseTable",
        "StepPlan",
        "Workspace",
        "decode",
        "merge_keys",
        "page_moves",
        "plan_step",
        "prefill",
        "score_blocks",
        "select_keys",
        "warmup",
    ]
    assert all(hasattr(li, name) for name in li.__all__)


@pytest.mark.parametrize("name", sorted(li.__all__))
def test_everything_public_is_documented(name):
    exported = getattr(li, name)
    assert inspect.getdoc(exported)
    for member, value in vars(exported).items() if inspect.isclass(exported) else ():
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, (classmethod, property))):
            assert member in ("num_pages", "device") or inspect.getdoc(getattr(exported, member)), f"{name}.{member}"


def test_specs_are_values():
    assert li.IndexerSpec() == li.IndexerSpec(topk=16)
    assert len({li.IndexerSpec(), li.IndexerSpec(topk=16), li.Shard(), li.Shard(0, 1)}) == 2
    spec = li.IndexerSpec()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.topk = 3


def test_import_is_light():
    """No optional package is imported, no GPU is touched, no thread setting is changed."""
    program = """
import sys, torch
threads = torch.get_num_threads()
before = set(sys.modules)
import lightning_indexer
heavy = ("triton", "transformers", "vllm", "sglang", "scipy", "pandas", "click", "huggingface_hub", "gguf")
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & set(heavy)), torch.cuda.is_initialized(), threads == torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] False True"
    assert done.stderr == ""


def test_package_is_typed():
    assert resources.files("lightning_indexer").joinpath("py.typed").is_file()


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z.+-].*)?", li.__version__)
