# SPDX-License-Identifier: Apache-2.0
"""The kernels over a cache that a group holds once, in Triton's interpreter: the lists of a step plan, and their use."""

import dataclasses
import itertools
import os
from typing import Any

import pytest
import torch
from sharded import SPEC, allocations, cache_of, held, shards
from support import OUT_OF_CACHE, Inputs, lengths, owned_heads, random_inputs

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled in this process: test_gpu_sharded.py tests them", allow_module_level=True)

import interpreter
from test_peer import SharedRanks, on_ranks

import lightning_indexer as li
from lightning_indexer import ops, triton_backend
from lightning_indexer.kernels import box, owned
from lightning_indexer.rows import Chunks
from lightning_indexer.spec import Shard

interpreter.install()

RULES = {
    "plain": {},
    "forced": {"init_blocks": 1, "local_blocks": 2},
    "higher": {"tie_break": "higher", "topk": 6, "local_blocks": 0},
}


def bound(inputs: Inputs) -> int:
    return inputs.block_table.shape[1] * inputs.spec.block_size


def with_rules(inputs: Inputs, rules: str) -> Inputs:
    return dataclasses.replace(inputs, spec=dataclasses.replace(inputs.spec, **RULES[rules]))


def dense(inputs: Inputs, cache: li.IndexCache, order: str = "score") -> torch.Tensor:
    """The ids of the same kernels over the whole cache."""
    return li.decode(inputs.q, cache, inputs.block_table, inputs.seq_lens, **inputs.rules, order=order)


# The lists.


@pytest.mark.parametrize(
    ("world", "order", "programs"), [(1, "score", 1), (2, "block", 20), (3, "score", 20), (8, "block", 1), (8, "score", 20)]
)
def test_lists(world, order, programs):
    """Every owned block once, ascending, whatever the table holds; one unit of work on one rank for what needs no scores."""
    assert (owned.CHUNK.value, owned.COUNTED.value) == (1024, 8192)  # which the lengths are about
    block, longest = SPEC.block_size, SPEC.block_size * 9_500 - 3
    blocks = [0, 1, SPEC.topk, SPEC.topk + 1, 1024, 1025, 9_500, 9_700]
    seq_lens = torch.tensor([count * block - 5 * (count > 1) for count in blocks], dtype=torch.int32)
    generator = torch.Generator().manual_seed(world)
    block_table = torch.randint(-20, 1 << 20, (len(blocks), 9_800), generator=generator).to(torch.int32)
    block_table[3] = 5 * world  # all on rank 0
    block_table[4, :5] = OUT_OF_CACHE
    block_table[5, 1000:] = world - 1
    for shard in shards(world)[:: max(1, world - 1)]:
        with interpreter.fake_device(programs):
            plan = ops.make_plan(seq_lens, SPEC, longest, order, shard, None, False, None, block_table)
            assert ops.make_plan(seq_lens, SPEC, longest, order, shard, None, False, plan, block_table) is plan
        counts = plan.before.diff().tolist()
        for request, count in enumerate(blocks):
            pages = block_table[request, : min(count, 9_500)].long()
            if order == "block" and count <= SPEC.topk:
                assert counts[request] == (count > 0 and request % world == shard.rank)
                continue
            mine = shard.owned_blocks(pages)
            assert counts[request] == len(mine)
            assert plan.owned[1, request, : len(mine)].tolist() == mine.tolist()
            assert plan.owned[0, request, : len(mine)].tolist() == shard.local_pages(pages[mine]).tolist()
            assert plan.held[request] == min(longest, len(mine) * block)


def test_shares_of_lists():
    """An even split along the lists; each share tells its first request's own length, and the pages that are listed of it."""
    inputs = random_inputs(SPEC, [64 * 20, 0, 1, 64 * 9 - 7])
    shard = Shard(1, 3, "page")
    with interpreter.fake_device(4):
        plan = li.plan_step(inputs.seq_lens, spec=SPEC, max_seq_len=bound(inputs), shard=shard, block_table=inputs.block_table)
    counts = [len(shard.owned_blocks(row[:count])) for row, count in zip(inputs.block_table, (20, 0, 1, 9), strict=True)]
    assert plan.before.tolist() == [sum(counts[:request]) for request in range(5)]
    shares = plan.shares.tolist()
    assert [share[0] for share in shares] == [0, *(share[1] for share in shares[:-1])]
    sizes = [end - first for first, end, *_ in shares if end > first]
    assert sum(sizes) == sum(counts)
    assert max(sizes) - min(sizes) <= 1
    for first, _, request, before, length, pages in shares[: len(sizes)]:
        assert before == sum(counts[:request]) <= first < before + pages
        assert (length, pages) == (inputs.seq_lens[request], counts[request])


def test_a_plan_by_page_wants_the_table():
    inputs = random_inputs(SPEC, [300])
    arguments = {"spec": SPEC, "max_seq_len": 300, "shard": Shard(0, 2, "page")}
    with interpreter.fake_device(2):
        with pytest.raises(ValueError, match='block_table: expected a table, for a shard by="page", got None'):
            li.plan_step(inputs.seq_lens, **arguments)
        with pytest.raises(ValueError, match="block_table: expected at least 5 columns for max_seq_len 300, got 4"):
            li.plan_step(inputs.seq_lens, **arguments, block_table=inputs.block_table[:, :4])
        with pytest.raises(ValueError, match="block_table: expected shape"):
            li.plan_step(inputs.seq_lens, **arguments, block_table=inputs.block_table[:0])


# Scores, candidates, ids.


def candidates(inputs: Inputs, cache: li.IndexCache, shard: Shard, order: str, out: li.StepPlan | None = None) -> torch.Tensor:
    """What `decode_keys` finds on a rank, with lists and scratch that were poisoned."""
    rows, heads, _ = inputs.q.shape
    plan = li.plan_step(
        inputs.seq_lens,
        spec=inputs.spec,
        max_seq_len=bound(inputs),
        order=order,
        shard=shard,
        block_table=inputs.block_table,
        out=out,
    )
    workspace = li.Workspace(
        inputs.spec, max_requests=max(1, len(inputs.seq_lens)), max_columns=inputs.query_len * heads, device="cpu"
    )
    workspace.keys.fill_(2**62 - 1)  # would win if it were looked at
    keys = torch.full((heads, rows, inputs.spec.topk), -77, dtype=torch.int64)
    step = (inputs.q, cache, inputs.block_table, inputs.seq_lens, inputs.spec, inputs.query_len, bound(inputs))
    triton_backend.decode_keys(*step, shard, order, keys, plan, workspace)
    return keys


@pytest.mark.parametrize(
    ("world", "format", "query_len", "rules", "kinds"),
    [
        (1, "bf16", 1, "plain", ("shuffled",)),
        (2, "bf16", 1, "forced", ("shuffled", "sequential")),
        (2, "fp8", 4, "plain", ("all on one rank",)),
        (3, "bf16", 2, "higher", ("a shared prefix",)),
        (4, "bf16", 1, "plain", ("all on one rank",)),
    ],
)
def test_operators_on_shards(world, format, query_len, rules, kinds):
    """Scores of owned blocks bit for bit, nothing written elsewhere; the union of the ranks' candidates selects alike."""
    made = allocations(world, query_len=query_len, rows=5 * query_len + 2)
    for name in kinds:
        inputs = with_rules(made[name], rules)
        with interpreter.fake_device(3, topk=inputs.spec.topk):
            whole = cache_of(inputs, format)
            rest = (inputs.block_table, inputs.seq_lens)
            scored = li.score_blocks(inputs.q, whole, *rest, **inputs.rules)
            keys: dict[str, list[torch.Tensor]] = {"apart": [], "score": [], "block": []}
            seen = torch.zeros_like(scored, dtype=torch.int32)
            for shard in shards(world):
                own = held(whole, shard)
                scores = torch.full_like(scored, -77.0)
                li.score_blocks(inputs.q, own, *rest, **inputs.rules, shard=shard, out=scores)
                written = scores != -77
                assert torch.equal(scores[written], scored[written]), name
                seen += written.int()
                by_page = {"shard": shard, "block_table": inputs.block_table}
                keys["apart"].append(li.select_keys(scores, inputs.seq_lens, **inputs.rules, **by_page))
                for order in ("score", "block"):
                    keys[order].append(candidates(inputs, own, shard, order))
                assert torch.equal(keys["score"][-1], keys["apart"][-1]), name
            assert torch.equal(seen == 1, scored > -torch.inf), name
            for order, given in (("score", "apart"), ("score", "score"), ("block", "block")):
                ids = li.merge_keys(torch.stack(keys[given]), inputs.seq_lens, **inputs.rules, order=order)
                assert torch.equal(ids, dense(inputs, whole, order)), (name, given)


def test_page_ids_outside_the_cache():
    """Each has one owner, which clamps it: all blocks of a short request are selected, by one rank each."""
    inputs = random_inputs(SPEC, [64 * 4, 64 * 3 - 1], heads=4)
    block_table = inputs.block_table.clone()
    block_table[0, :4] = torch.tensor([-1, OUT_OF_CACHE, -(2**31), 12345])
    block_table[1, :3] = torch.tensor([-3, -2, -1])
    inputs = dataclasses.replace(inputs, block_table=block_table, pages=inputs.pages.nan_to_num())
    with interpreter.fake_device(3, topk=4):
        cache = li.IndexCache.wrap(inputs.pages, SPEC)
        keys = torch.stack([candidates(inputs, held(cache, shard), shard, "score") for shard in shards(3)])
        ids = li.merge_keys(keys, inputs.seq_lens, **inputs.rules).sort(-1).values
    assert ids[:, 0].tolist() == [[0, 1, 2, 3]] * 4
    assert ids[:, 1].tolist() == [[-1, 0, 1, 2]] * 4


def test_lengths_past_the_bound_count_as_the_bound():
    inputs = random_inputs(SPEC, [64 * 12, 64 * 5], heads=4, query_len=2)
    with interpreter.fake_device(3, topk=4):
        cache = li.IndexCache.wrap(inputs.pages, SPEC)
        short = 64 * 7 - 9
        rest = (SPEC, 2, short)
        found = []
        for shard in shards(2):
            plan = ops.make_plan(inputs.seq_lens, SPEC, short, "score", shard, None, False, None, inputs.block_table)
            keys = torch.empty(4, 4, SPEC.topk, dtype=torch.int64)
            step = (inputs.q, held(cache, shard), inputs.block_table, inputs.seq_lens, *rest)
            triton_backend.decode_keys(*step, shard, "score", keys, plan, None)
            found.append(keys)
        bounded = inputs.seq_lens.clamp(max=short)
        ids = li.merge_keys(torch.stack(found), bounded, **inputs.rules)
        want = li.decode(inputs.q, cache, inputs.block_table, bounded, **inputs.rules)
    assert torch.equal(ids, want)


# Ranks.


def indexer_of(ranks: SharedRanks, spec: li.IndexerSpec = SPEC, **changes: Any) -> li.ContextParallelIndexer:
    arguments = {"max_rows": 20, "max_seq_len": 64 * 24, "device": "cpu", "transport": "peer", "shard_by": "page", **changes}
    return li.ContextParallelIndexer(spec, ranks, **arguments)


@pytest.mark.parametrize(
    ("world", "transport", "format"),
    [(2, "peer", "nvfp4"), (4, "peer", "bf16"), (2, "collective", "fp8")],
)
def test_ranks(world, transport, format):
    """With a plan and without, own heads and all of them, both orders; a plan made anew for other tables."""
    query_len = 2 if world == 4 else 1
    kinds = allocations(world, query_len=query_len, rows=5 * query_len + 1)
    names = ("shuffled", "all on one rank") if world == 4 else ("shuffled",) if world == 8 else ("a shared prefix",)
    kinds = {name: kinds[name] for name in names}

    def work(ranks: SharedRanks) -> dict[str, list[torch.Tensor]]:
        indexer = indexer_of(ranks, transport=transport, dispatch="auto")
        assert indexer.dispatch == "sharded"
        assert indexer.thresholds == []
        indexer.warmup(format)
        found: dict[str, list[torch.Tensor]] = {}
        plan = None
        for name, inputs in kinds.items():
            cache = held(cache_of(inputs, format), indexer.shard)
            rest = (cache, inputs.block_table, inputs.seq_lens)
            plan = indexer.plan_step(inputs.seq_lens, query_len=query_len, block_table=inputs.block_table, out=plan)
            own = inputs.q[:, owned_heads(ranks.rank, world, 4)]
            found[name] = [
                indexer.decode(own, *rest, query_len=query_len, plan=plan),
                indexer.decode(inputs.q, *rest, query_len=query_len, order="block"),
            ]
        if transport == "peer":
            assert indexer.steps()["replicated"] == 0
        with pytest.raises(ValueError, match='block_table: expected a table, for a shard by="page", got None'):
            indexer.plan_step(inputs.seq_lens)
        return found

    results = on_ranks(world, work)
    with interpreter.fake_device(5):
        for name, inputs in kinds.items():
            whole = cache_of(inputs, format)
            want = [dense(inputs, whole), dense(inputs, whole, "block")]
            for rank, found in enumerate(results):
                for got, ids in zip(found[name], want, strict=True):
                    assert torch.equal(got, ids[owned_heads(rank, world, 4)]), (name, rank)


def test_steps_without_requests():
    inputs = random_inputs(SPEC, [], heads=4, rows=3)
    empty = random_inputs(SPEC, [0, 0], heads=4)

    def work(ranks: SharedRanks) -> list[torch.Tensor]:
        indexer = indexer_of(ranks)
        cache = li.IndexCache.wrap(torch.zeros(1, 64, 64).bfloat16(), SPEC)
        return [indexer.decode(step.q, cache, step.block_table, step.seq_lens) for step in (inputs, empty)]

    for found in on_ranks(2, work):
        assert all((ids == -1).all() for ids in found)


# Prefill.

CHUNKS, PREFIXES = [35, 0, 5, 1], [64 * 3 + 3, 100, 0, 64 * 2]


def test_parts_of_chunks():
    """Each row of a part is a row of its request's chunk, and sees what that row sees; other requests have no length."""
    bounds = torch.tensor([0, *CHUNKS]).cumsum(0)
    total = int(bounds[-1])
    seq_lens = lengths(*(a + b for a, b in zip(CHUNKS, PREFIXES, strict=True)))
    for size in (1, 7, 35, 36, total + 2):
        seen = {}
        for first in range(0, total + 2, size):
            part = Chunks(bounds, seq_lens, 64 * 12).part(first, min(size, total + 2 - first))
            for request, (start, end) in enumerate(itertools.pairwise(part.bounds.tolist())):
                assert (part.seq_lens[request] > 0) == (end > start)
                for row in range(start, end):
                    seen[first + row] = request, int(part.seq_lens[request]) - (end - row) + 1
        rows = [(request, row) for request, chunk in enumerate(CHUNKS) for row in range(chunk)]
        assert [seen[row] for row in range(total)] == [(request, PREFIXES[request] + row + 1) for request, row in rows]
        assert len(seen) == total
    clipped = Chunks(bounds, seq_lens, 200).part(30, 5)
    assert clipped.seq_lens.tolist() == [200, 0, 0, 0]


@pytest.mark.parametrize(
    ("world", "heads", "changes", "rules"),
    [
        (1, 4, {}, {}),
        (2, 4, {}, {"local_blocks": 0}),  # so that the score of a block that is seen in part counts
        (2, 4, {"shard_by": "block", "transport": "collective", "dispatch": "sharded"}, {}),
        (
            4,
            2,
            {"shard_by": "block"},
            {"topk": 5, "tie_break": "higher", "init_blocks": 1},
        ),
    ],
)
def test_prefill_over_ranks(world, heads, changes, rules):
    """Chunks longer than `max_prefill_rows`, with prefixes and without; empty ones, rows outside; decode between."""
    spec = dataclasses.replace(SPEC, num_heads=heads, **rules)
    tokens = [a + b for a, b in zip(CHUNKS, PREFIXES, strict=True)]
    inputs = random_inputs(spec, tokens, heads=heads, rows=sum(CHUNKS) + 2)
    bounds = torch.tensor([0, *CHUNKS]).cumsum(0).to(torch.int32)

    def work(ranks: SharedRanks) -> list[torch.Tensor]:
        indexer = indexer_of(ranks, spec=spec, max_rows=5, max_prefill_rows=34, **changes)
        cache = li.IndexCache.wrap(inputs.pages, spec)
        cache = held(cache, indexer.shard) if indexer.shard.by == "page" else cache
        rest = (cache, inputs.block_table, bounds, inputs.seq_lens)
        own = owned_heads(ranks.rank, world, heads)
        empty = indexer.prefill(inputs.q[:3], cache, inputs.block_table[:0], bounds[:1], inputs.seq_lens[:0])
        assert (empty == -1).all()
        found = [indexer.prefill(inputs.q[:, own], *rest)]
        found.append(indexer.decode(inputs.q[:4, own], cache, inputs.block_table, inputs.seq_lens))
        found.append(indexer.prefill(inputs.q, *rest, order="block"))
        if indexer.transport == "peer":
            assert (indexer._batches[0].peer.box == box.EMPTY.value).all()
            assert indexer.steps() == {"sharded": 1 + 2 + 1 + 2, "replicated": 0}
        return found

    results = on_ranks(world, work)
    with interpreter.fake_device(5):
        step = (inputs.q, inputs.pages, inputs.block_table)
        chunks = (*step, bounds, inputs.seq_lens)
        want = [li.prefill(*chunks, spec=spec), None, li.prefill(*chunks, spec=spec, order="block")]
        want[1] = li.decode(inputs.q[:4], *step[1:], inputs.seq_lens, spec=spec)
        for rank, found in enumerate(results):
            for got, ids in zip(found, want, strict=True):
                assert torch.equal(got, ids[owned_heads(rank, world, heads)]), rank
