# SPDX-License-Identifier: Apache-2.0
"""Pages on their way between caches and groups: the selections after a move are those before it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import SPEC, cache_of, shards
from support import NAN, random_inputs

import lightning_indexer as li
from lightning_indexer import torch_backend


def ids_of(parts: list[li.IndexCache], q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """The selection of a group whose ranks hold a part each."""
    keys = []
    for shard, part in zip(shards(len(parts)), parts, strict=True):
        out = torch.empty(q.shape[1], q.shape[0], SPEC.topk, dtype=torch.int64)
        step = (q, part, block_table, seq_lens, SPEC, 1, block_table.shape[1] * 64, shard, "score", out, None, None)
        torch_backend.decode_keys(*step)
        keys.append(out)
    return li.merge_keys(torch.stack(keys), seq_lens, spec=SPEC)


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize(("source_world", "target_world"), [(8, 4), (4, 8), (1, 3), (3, 1), (4, 4), (2, 3)])
def test_from_one_group_to_another(source_world, target_world, format):
    """Prefill on some ranks, decode on others, whose allocator gives the pages other ids."""
    inputs = random_inputs(SPEC, [64 * 13 + 5, 0, 200], heads=4)
    whole = cache_of(inputs, format)
    want = li.decode(inputs.q, whole, inputs.block_table, inputs.seq_lens, spec=SPEC)
    here = [whole.held_by(shard) for shard in shards(source_world)]
    assert torch.equal(ids_of(here, inputs.q, inputs.block_table, inputs.seq_lens), want)

    blocks = (inputs.seq_lens + 63) // 64
    used = torch.arange(inputs.block_table.shape[1]) < blocks[:, None]
    pages = inputs.block_table[used]
    others = torch.randperm(40, generator=torch.Generator().manual_seed(1))[: len(pages)].to(torch.int32)
    block_table = torch.full_like(inputs.block_table, -1)
    block_table[used] = others
    there = [li.IndexCache.empty(shard.pages_held(40), SPEC, format) for shard in shards(target_world)]
    for part in there:
        part.data.view(torch.uint8).fill_(0x7F)
    for move in li.page_moves(pages, others, source_world=source_world, target_world=target_world):
        there[move.target].write_pages(move.target_pages, here[move.source].read_pages(move.source_pages))
    assert torch.equal(ids_of(there, inputs.q, block_table, inputs.seq_lens), want)


def test_offload_and_restore():
    """Scales travel with their keys; what lies between the pages of an interleaved buffer stays."""
    buffer = torch.full((6, 2, 64, 64), 0x11, dtype=torch.uint8)
    scale = torch.full((6, 64), NAN)
    cache = li.IndexCache.wrap(buffer[:, 1], SPEC, "fp8", scale)
    cache.write(torch.randn(6 * 64, 64, generator=torch.Generator().manual_seed(2)), torch.arange(6 * 64))
    keys, scales = buffer.clone(), scale.clone()
    pages = torch.tensor([4, 0, 5])
    saved = cache.read_pages(pages)
    assert saved.shape == (3, cache.page_bytes)
    cache.data.view(torch.uint8)[pages] = 0
    scale[pages] = 0
    cache.write_pages(pages, saved)
    assert torch.equal(buffer, keys)
    assert torch.equal(scale, scales)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=40, unique=True),
    st.integers(1, 9),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_every_page_moves_once(pages, source_world, target_world, random):
    others = random.sample(range(500), len(pages))
    worlds = {"source_world": source_world, "target_world": target_world}
    moves = li.page_moves(torch.tensor(pages, dtype=torch.int64), torch.tensor(others, dtype=torch.int64), **worlds)
    found = []
    for move in moves:
        for one, other in zip(move.source_pages.tolist(), move.target_pages.tolist(), strict=True):
            found.append((one * source_world + move.source, other * target_world + move.target))
    assert sorted(found) == sorted(zip(pages, others, strict=True))
    assert [(move.source, move.target) for move in moves] == sorted({(a % source_world, b % target_world) for a, b in found})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_world": 0}, "source_world"),
        ({"source_pages": torch.tensor([1, -2])}, "source_pages: expected page ids from 0, got -2"),
        ({"target_pages": torch.tensor([3, 3])}, "target_pages: expected distinct page ids"),
        ({"target_pages": torch.tensor([3])}, "target_pages: expected shape"),
        ({"source_pages": torch.tensor([1.0, 2.0])}, "source_pages: expected dtype"),
    ],
)
def test_moves_that_cannot_be(change, message):
    call = {"source_pages": torch.tensor([1, 2]), "target_pages": torch.tensor([3, 4]), "source_world": 2, "target_world": 2}
    with pytest.raises(ValueError, match=message):
        li.page_moves(**{**call, **change})


def test_pages_that_do_not_fit():
    cache = li.IndexCache.empty(2, SPEC)
    with pytest.raises(ValueError, match="pages: expected ids below 2, got 0 to 2"):
        cache.read_pages(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"data: expected shape \[1, 8192\]"):
        cache.write_pages(torch.tensor([0]), torch.zeros(1, 4096, dtype=torch.uint8))
