# SPDX-License-Identifier: Apache-2.0
"""An index cache that is held once by a group: each rank has its pages, and all get the ids of the whole cache."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import SPEC, allocations, cache_of, held, shards
from support import WORLDS, Inputs, lengths, owned_heads, random_inputs, table

import lightning_indexer as li
from lightning_indexer import torch_backend
from lightning_indexer.spec import Shard
from lightning_indexer.verify.ranks import run_ranks


@given(world=st.integers(1, 16), pages=st.integers(0, 200))
def test_every_page_has_one_holder(world, pages):
    every = torch.arange(pages)
    owned = [shard.owned_blocks(every) for shard in shards(world)]
    assert sorted(torch.cat(owned).tolist()) == list(range(pages))
    for shard, mine in zip(shards(world), owned, strict=True):
        assert shard.local_pages(every[mine]).tolist() == list(range(shard.pages_held(pages)))
    counts = [len(mine) for mine in owned]
    assert max(counts) - min(counts) <= 1  # pages in a row


@given(st.integers(1, 8), st.lists(st.integers(-3, 2_000), max_size=50, unique=True))
@settings(deadline=None)
def test_slots_go_to_the_holder_of_their_page(world, slots):
    given_slots = torch.tensor(slots, dtype=torch.int64)
    found = torch.stack([shard.local_slots(given_slots, 64) for shard in shards(world)])
    for place, slot in enumerate(slots):
        page, offset = divmod(slot, 64)
        want = [-1] * world
        if slot >= 0:
            want[page % world] = page // world * 64 + offset
        assert found[:, place].tolist() == want
    assert torch.equal(Shard(0, world).local_slots(given_slots, 64), given_slots)


def test_balance_of_random_pages():
    """Blocks that the fullest of 4 ranks owns of 1,024, over a fair share: what `Shard` calls about 1 / world."""
    generator = torch.Generator().manual_seed(0)
    worst = []
    for _ in range(200):
        pages = torch.randperm(1 << 16, generator=generator)[:1024]
        worst.append(max(len(shard.owned_blocks(pages)) for shard in shards(4)))
    mean = sum(worst) / len(worst) / 256
    assert 1.04 < mean < 1.07
    assert max(worst) / 256 < 1.2


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_operators_on_shards(world, format):
    """Scores of owned blocks bit for bit, nothing written elsewhere; the union of the ranks' candidates selects alike."""
    for name, inputs in allocations(world, query_len=2, rows=12).items():
        whole = cache_of(inputs, format)
        rest, rules = (inputs.block_table, inputs.seq_lens), inputs.rules
        longest = inputs.block_table.shape[1] * 64
        dense = li.score_blocks(inputs.q, whole, *rest, **rules)
        want = li.decode(inputs.q, whole, *rest, **rules)
        keys, seen = [], torch.zeros_like(dense, dtype=torch.int32)
        for shard in shards(world):
            own = held(whole, shard)
            scores = torch.full_like(dense, -77.0)
            assert li.score_blocks(inputs.q, own, *rest, **rules, shard=shard, out=scores) is scores
            written = scores != -77
            assert torch.equal(scores[written], dense[written])
            seen += written.int()
            selected = li.select_keys(scores, inputs.seq_lens, **rules, shard=shard, block_table=inputs.block_table)
            one_go = torch.empty_like(selected)
            step = (inputs.q, own, *rest, SPEC, inputs.query_len, longest, shard, "score", one_go, None, None)
            torch_backend.decode_keys(*step)
            assert torch.equal(one_go, selected)
            keys.append(selected)
        assert torch.equal(seen == 1, dense > -math.inf), name
        assert torch.equal(li.merge_keys(torch.stack(keys), inputs.seq_lens, **rules), want), name


def test_pages_used_again():
    """Stale keys of a freed page are overwritten by its next holder alone, and those of the same page elsewhere stay."""
    generator = torch.Generator().manual_seed(9)
    world, first, second = 4, table([5, 8, 2]), table([2, 9, 5])
    caches = [li.IndexCache.empty(3, SPEC) for _ in range(world)]
    whole = li.IndexCache.empty(12, SPEC)
    for cache in (*caches, whole):
        cache.data.fill_(math.nan)
    q = torch.randn(1, 4, 64, generator=generator).bfloat16()
    for block_table, length in ((first, 180), (second, 150)):
        position = torch.arange(length)
        slots = block_table[0, position // 64].long() * 64 + position % 64
        keys = torch.randn(length, 64, generator=generator)
        whole.write(keys, slots)
        for shard, cache in zip(shards(world), caches, strict=True):
            cache.write(keys, shard.local_slots(slots, 64))
        candidates = []
        for shard, cache in zip(shards(world), caches, strict=True):
            out = torch.empty(4, 1, SPEC.topk, dtype=torch.int64)
            step = (q, cache, block_table, lengths(length), SPEC, 1, 192, shard, "score", out, None, None)
            torch_backend.decode_keys(*step)
            candidates.append(out)
        want = li.decode(q, whole, block_table, lengths(length), spec=SPEC)
        assert torch.equal(li.merge_keys(torch.stack(candidates), lengths(length), spec=SPEC), want)
    for shard, cache in zip(shards(world), caches, strict=True):
        assert torch.equal(cache.data.view(torch.uint8), whole.data.view(torch.uint8)[shard.rank :: world])


def test_refusals():
    inputs = random_inputs(SPEC, [300], heads=4)
    scores = torch.zeros(4, 1, 7)
    with pytest.raises(ValueError, match='block_table: expected a table, for a shard by="page", got None'):
        li.select_keys(scores, inputs.seq_lens, spec=SPEC, shard=Shard(0, 2, "page"))
    arguments = {"max_rows": 4, "max_seq_len": 640, "device": "cpu"}
    with pytest.raises(ValueError, match="shard_by: expected 'block' or 'page'"):
        li.ContextParallelIndexer(SPEC, **arguments, shard_by="token")
    with pytest.raises(ValueError, match='dispatch: expected "sharded" or "auto" where pages are sharded'):
        li.ContextParallelIndexer(SPEC, **arguments, shard_by="page", dispatch="replicated")
    indexer = li.ContextParallelIndexer(SPEC, **arguments, shard_by="page")
    with pytest.raises(ValueError, match="micro_batch: expected"):
        indexer.plan_step(lengths(1), block_table=inputs.block_table, micro_batch=1)
    with pytest.raises(ValueError, match=r"seq_lens: expected at most max_rows \(4\) requests, got 5"):
        indexer.plan_step(lengths(1, 1, 1, 1, 1), block_table=inputs.block_table.expand(5, -1), micro_batch=0)
    chunk = inputs.q, inputs.pages, inputs.block_table, torch.tensor([0, 1]), inputs.seq_lens
    with pytest.raises(ValueError, match="micro_batch: expected"):
        indexer.prefill(*chunk, micro_batch=1)


# Real ranks.


def _decode(rank: int, world: int, format: str) -> dict[str, list[torch.Tensor]]:
    found = {}
    indexer = li.ContextParallelIndexer(SPEC, max_rows=12, max_seq_len=64 * 30, device="cpu", shard_by="page")
    indexer.warmup(format)
    own = owned_heads(rank, world, 4)
    for name, inputs in allocations(world, query_len=2, rows=12).items():
        cache = held(cache_of(inputs, format), indexer.shard)
        rest = (cache, inputs.block_table, inputs.seq_lens)
        found[name] = [
            indexer.decode(inputs.q[:, own], *rest, query_len=2),
            indexer.decode(inputs.q, *rest, query_len=2, order="block"),
        ]
    return found


@pytest.mark.parametrize(("world", "format"), [*((world, "bf16") for world in WORLDS), (4, "fp8"), (4, "nvfp4")])
def test_ranks(world, format):
    found = run_ranks(world, partial(_decode, world=world, format=format))
    for name, inputs in allocations(world, query_len=2, rows=12).items():
        step = (inputs.q, cache_of(inputs, format), inputs.block_table, inputs.seq_lens)
        for place, order in enumerate(("score", "block")):
            want = li.decode(*step, **inputs.rules, order=order)
            for rank in range(world):
                assert torch.equal(found[rank][name][place], want[owned_heads(rank, world, 4)]), (name, rank)


CHUNKS, PREFIXES = [37, 0, 5, 64], [64 * 9 + 3, 100, 0, 1]


def _chunks() -> tuple[Inputs, torch.Tensor]:
    inputs = random_inputs(SPEC, [a + b for a, b in zip(CHUNKS, PREFIXES, strict=True)], heads=4, rows=sum(CHUNKS) + 2)
    return inputs, torch.tensor([0, *CHUNKS]).cumsum(0).to(torch.int32)


def _prefill(rank: int, world: int, by: str) -> list[torch.Tensor]:
    inputs, bounds = _chunks()
    arguments = {"max_rows": 16, "max_seq_len": 64 * 30, "device": "cpu", "dispatch": "sharded"}
    indexer = li.ContextParallelIndexer(SPEC, shard_by=by, **arguments)
    indexer.warmup(prefill=True)
    cache = li.IndexCache.wrap(inputs.pages, SPEC)
    cache = held(cache, indexer.shard) if by == "page" else cache
    rest = (cache, inputs.block_table, bounds, inputs.seq_lens)
    own = owned_heads(rank, world, 4)
    return [indexer.prefill(inputs.q[:, own], *rest), indexer.prefill(inputs.q, *rest, order="block")]


@pytest.mark.parametrize("by", ["page", "block"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_prefill_over_ranks(world, by):
    """Chunks longer than `max_rows`, behind prefixes and without; empty ones, and rows outside."""
    inputs, bounds = _chunks()
    found = run_ranks(world, partial(_prefill, world=world, by=by))
    for place, order in enumerate(("score", "block")):
        step = (inputs.q, inputs.pages, inputs.block_table, bounds, inputs.seq_lens)
        want = li.prefill(*step, spec=SPEC, order=order)
        for rank in range(world):
            assert torch.equal(found[rank][place], want[owned_heads(rank, world, 4)]), rank


def _prefill_alone(rank: int, dispatch: str) -> torch.Tensor | None:
    inputs, bounds = _chunks()
    arguments = {"max_rows": 16, "max_seq_len": 64 * 30, "device": "cpu", "timeout": 5.0}
    indexer = li.ContextParallelIndexer(SPEC, dispatch=dispatch, **arguments)
    indexer.warmup(prefill=True)
    if rank == 1:
        return None
    cache = li.IndexCache.wrap(inputs.pages, SPEC)
    return indexer.prefill(inputs.q[:, :2], cache, inputs.block_table, bounds, inputs.seq_lens)


@pytest.mark.parametrize("dispatch", ["auto", "replicated"])
def test_a_prefill_that_sharing_does_not_shorten_waits_for_nobody(dispatch):
    inputs, bounds = _chunks()
    found, _ = run_ranks(2, partial(_prefill_alone, dispatch=dispatch))
    want = li.prefill(inputs.q, inputs.pages, inputs.block_table, bounds, inputs.seq_lens, spec=SPEC)
    assert torch.equal(found, want[:2])


def _differs(rank: int) -> str:
    try:
        by = "page" if rank else "block"
        li.ContextParallelIndexer(SPEC, max_rows=4, max_seq_len=640, device="cpu", dispatch="sharded", shard_by=by)
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_shard_differently_are_told_so():
    for message in run_ranks(2, _differs):
        assert "shard_by" in message
