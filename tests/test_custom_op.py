# SPDX-License-Identifier: Apache-2.0
"""A model that calls the indexer is traced as a whole, and keeps selecting."""

import functools

import pytest
import torch
from support import random_inputs

import lightning_indexer as li

SPEC = li.IndexerSpec(num_heads=2, head_dim=64, block_size=64, topk=3)


@pytest.fixture(autouse=True)
def _poison_new_memory() -> None:
    """Not here: `torch.empty` must be one that can be traced."""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["tensor", "IndexCache"])
def test_traced_whole(backend, wrapped):
    indexer = li.ContextParallelIndexer(SPEC, max_rows=4, max_seq_len=64 * 12, device="cpu")
    inputs = random_inputs(SPEC, [64 * 9 - 3, 70], heads=2)
    cache = li.IndexCache.wrap(inputs.pages, SPEC) if wrapped else inputs.pages

    def select(q: torch.Tensor, pages: object, block_table: torch.Tensor, seq_lens: torch.Tensor, decode) -> torch.Tensor:
        table = li.SparseTable.empty(SPEC, 2, q.shape[0], 16, block_table)
        return decode(q, pages, block_table, seq_lens, order="block", sparse_table=table).sum(-1) + table.context_lens_out

    def model(q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        return select(q, cache, block_table, seq_lens, indexer.decode)

    traced = torch.compile(model, backend=backend, fullgraph=True)
    for tokens in ([64 * 9 - 3, 70], [64 * 5, 1, 64 * 9]):  # other shapes of the same traced model
        step = random_inputs(SPEC, tokens, heads=2)
        table = step.block_table.clamp(max=len(inputs.pages) - 1)
        arguments = (step.q, table, step.seq_lens)
        want = select(step.q, inputs.pages, table, step.seq_lens, functools.partial(li.decode, spec=SPEC))
        assert torch.equal(traced(*arguments), want)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_traced_with_bytes_and_scales(format):
    indexer = li.ContextParallelIndexer(SPEC, max_rows=4, max_seq_len=64 * 12, device="cpu")
    inputs = random_inputs(SPEC, [64 * 9 - 3, 70], heads=2)
    data = li.IndexCache.empty(len(inputs.pages), SPEC, format).data
    scale = torch.zeros(data.shape[:2]) if format == "fp8" else None
    cache = li.IndexCache.wrap(data, SPEC, format, scale)
    keys = inputs.pages.float().nan_to_num().flatten(0, 1)
    cache.write(keys * torch.arange(1, len(keys) + 1)[:, None], torch.arange(len(keys)))

    def model(q: torch.Tensor) -> torch.Tensor:
        return indexer.decode(q, cache, *inputs.arguments[2:])

    want = li.decode(inputs.q, cache, *inputs.arguments[2:], spec=SPEC)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(inputs.q), want)
    if scale is not None:  # which do change the selection
        assert not torch.equal(li.decode(inputs.q, li.IndexCache.wrap(data, SPEC), *inputs.arguments[2:], spec=SPEC), want)


def test_each_indexer_has_a_number_of_its_own():
    first, second = (
        li.ContextParallelIndexer(SPEC, max_rows=4, max_seq_len=length, device="cpu") for length in (64 * 4, 64 * 12)
    )
    inputs = random_inputs(SPEC, [64 * 9], heads=2)

    def model(q: torch.Tensor) -> torch.Tensor:
        return second.decode(q, *inputs.arguments[1:])

    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(inputs.q), second.decode(*inputs.arguments))
    with pytest.raises(ValueError, match="max_seq_len"):
        first.decode(*inputs.arguments)
