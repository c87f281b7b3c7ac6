# SPDX-License-Identifier: Apache-2.0
"""`ContextParallelIndexer` on real gloo ranks: the dense answer on every rank, and an error instead of a hang."""

import dataclasses
import inspect
import itertools
import multiprocessing
from datetime import timedelta
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from support import Inputs, decode_sharded, lengths, owned_heads, random_inputs

import lightning_indexer as li
from lightning_indexer.verify.ranks import run_ranks

LIMIT = 8  # max_rows of the indexers here
GEOMETRY = {"head_dim": 64, "block_size": 64, "topk": 4}


def spec_of(heads: int, **rules) -> li.IndexerSpec:
    return li.IndexerSpec(num_heads=heads, **{**GEOMETRY, **rules})


def indexer_of(spec: li.IndexerSpec, **changes) -> li.ContextParallelIndexer:
    arguments = {"max_rows": LIMIT, "max_seq_len": 64 * 20, "device": "cpu", **changes}
    return li.ContextParallelIndexer(spec, **arguments)


def steps(spec: li.IndexerSpec) -> dict[str, Inputs]:
    """Steps that differ in shape; all fit one indexer."""

    def make(tokens, **more):
        return random_inputs(spec, tokens, heads=spec.num_heads, **more)

    return {
        "plain": make([64 * 19 - 5, 64 * 6, 30]),
        "ties": make([64 * 19 - 5, 64 * 6, 30], values="ties"),
        "Q3": make([64 * 13 + 2, 1], query_len=3),
        "rows-past-the-requests": make([700, 0, 65], query_len=2, rows=8),
        "one-block": make([40]),
        "all-empty": make([0, 0]),
        "no-requests": make([]),
        "no-requests-but-rows": make([], rows=3),
        "fp32": make([64 * 9], dtype=torch.float32),
        "fp16": make([64 * 9], dtype=torch.float16, query_len=4),
    }


def with_other_pages(inputs: Inputs, seed: int) -> Inputs:
    """The same request in other pages, with a wider table."""
    generator = torch.Generator().manual_seed(seed)
    renamed = torch.randperm(len(inputs.pages), generator=generator)
    pages = torch.empty_like(inputs.pages)
    pages[renamed] = inputs.pages
    inside = (inputs.block_table >= 0) & (inputs.block_table < len(pages))
    moved = renamed[torch.where(inside, inputs.block_table, 0).long()].to(torch.int32)
    block_table = torch.where(inside, moved, inputs.block_table)
    return dataclasses.replace(inputs, pages=pages, block_table=torch.nn.functional.pad(block_table, (0, seed), value=-1))


def dense(inputs: Inputs, **more) -> torch.Tensor:
    return li.decode(*inputs.arguments, **inputs.rules, **more)


def answer(indexer: li.ContextParallelIndexer, inputs: Inputs, heads: list[int] | None = None, **more) -> torch.Tensor:
    """The indexer's ids from the queries of `heads`, or of all."""
    q = inputs.q if heads is None else inputs.q[:, heads]
    return indexer.decode(q, *inputs.arguments[1:], query_len=inputs.query_len, **more)


def failure(call, *args, **kwargs) -> str:
    """Type and text of the error that a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# Answers.

RULES = {
    "plain": {},
    "init-local-higher": {"init_blocks": 1, "local_blocks": 2, "tie_break": "higher"},
    "unforced": {"local_blocks": 0, "topk": 3},
}
MANY_RANKS = 8  # more ranks than cores: fewer steps
CASES = [
    pytest.param(heads, world, name, id=f"H{heads}-P{world}-{name}")
    for heads, world in ((4, 1), (4, 2), (3, 3), (6, 3), (4, 4), (1, 2), (4, 8), (4, 16))
    for name in RULES
    if world < MANY_RANKS or name == "init-local-higher"
]


def steps_on(world: int, spec: li.IndexerSpec) -> dict[str, Inputs]:
    few = ("ties", "Q3", "rows-past-the-requests", "one-block", "no-requests")
    return {name: step for name, step in steps(spec).items() if world < MANY_RANKS or name in few}


def sparse_of(inputs: Inputs, heads: int) -> li.SparseTable:
    rows, width = len(inputs.q), inputs.spec.topk * 4
    numbers = torch.arange(inputs.block_table.numel(), dtype=torch.int32).view_as(inputs.block_table)
    out = torch.full((heads, rows, width), -77, dtype=torch.int32)
    return li.SparseTable(numbers, out, torch.full((heads, rows), -77, dtype=torch.int32), page_size=16, page_stride=4)


@lru_cache
def answers_on_ranks(heads: int, world: int) -> list[dict]:
    def work(rank):
        found = {}
        own = owned_heads(rank, world, heads)
        for name, rules in RULES.items():
            if world >= MANY_RANKS and name != "init-local-higher":
                continue
            spec = spec_of(heads, **rules)
            indexer = indexer_of(spec)
            replicated = indexer_of(spec, dispatch="replicated")
            for format in ("bf16", "fp16", "fp32"):
                indexer.warmup(format)
            replicated.warmup()
            for step, inputs in steps_on(world, spec).items():
                sparse = sparse_of(inputs, len(own))
                out = torch.full((len(inputs.q), len(own), spec.topk), -77, dtype=torch.int32).transpose(0, 1)
                returned = answer(indexer, inputs, own, out=out, order="block", sparse_table=sparse)
                found[name, step] = {
                    "owned heads": answer(indexer, inputs, own),
                    "all heads": answer(indexer, inputs),
                    "other pages": answer(indexer, with_other_pages(inputs, rank), own),
                    "replicated, owned heads": answer(replicated, inputs, own),
                    "replicated, all heads": answer(replicated, inputs),
                    "by block": out.clone(),
                    "replicated, by block": answer(replicated, inputs, own, order="block"),
                    "out is returned": returned is out,
                    "sparse table": (sparse.block_table_out, sparse.context_lens_out),
                }
        return found

    return run_ranks(world, work, timeout=60)


@pytest.mark.parametrize(("heads", "world", "name"), CASES)
def test_every_rank_gets_the_dense_answer_of_its_heads(heads, world, name):
    spec = spec_of(heads, **RULES[name])
    for rank, found in enumerate(answers_on_ranks(heads, world)):
        own = owned_heads(rank, world, heads)
        for step, inputs in steps_on(world, spec).items():
            got = found[name, step]
            sparse = sparse_of(inputs, heads)
            by_block = dense(inputs, order="block", sparse_table=sparse)[own]
            by_score = dense(inputs)[own]
            for way in ("owned heads", "all heads", "other pages", "replicated, owned heads", "replicated, all heads"):
                assert torch.equal(got[way], by_score), f"rank {rank}, {step}, {way}"
            for way in ("by block", "replicated, by block"):
                assert torch.equal(got[way], by_block), f"rank {rank}, {step}, {way}"
            assert got["out is returned"], f"rank {rank}, {step}"
            pages, held = got["sparse table"]
            assert torch.equal(pages, sparse.block_table_out[own]), f"rank {rank}, {step}"
            assert torch.equal(held, sparse.context_lens_out[own]), f"rank {rank}, {step}"


@pytest.mark.parametrize("dispatch", ["auto", "sharded", "replicated"])
def test_alone_without_a_group(dispatch):
    spec = spec_of(4)
    indexer = indexer_of(spec, dispatch=dispatch)
    indexer.warmup()
    for inputs in steps(spec).values():
        assert torch.equal(answer(indexer, inputs), dense(inputs))


def test_virtual_ranks_agree_with_real_ones():
    inputs = steps(spec_of(4))["ties"]
    virtual = decode_sharded(*inputs.arguments, world=4, **inputs.rules)
    real = [found["plain", "ties"]["owned heads"] for found in answers_on_ranks(4, 4)]
    assert torch.equal(torch.cat(real), virtual)


# Groups.


def test_groups_of_some_ranks():
    """Two groups at once, a group out of order, one with a hole; P and rank are those inside the group."""
    inputs = {heads: steps(spec_of(heads))["Q3"] for heads in (2, 3, 4)}

    def work(rank):
        unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
        even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
        hole = dist.new_group([0, 1, 3])
        turned = dist.new_group([3, 1, 0, 2], **unsorted)
        groups = {"pair": even if rank % 2 == 0 else odd, "hole": hole, "turned": turned, "world": None}
        heads = {"pair": 2, "hole": 3, "turned": 4, "world": 4}
        found = {}
        indexers = {}
        for name, group in groups.items():
            if name == "hole" and rank == 2:
                found[name] = failure(indexer_of, spec_of(3), group=group)
            else:
                indexers[name] = indexer_of(spec_of(heads[name]), group=group)
        for _ in range(2):  # all are alive at once
            for name, indexer in indexers.items():
                place = dist.get_rank(groups[name])
                own = owned_heads(place, dist.get_world_size(groups[name]), heads[name])
                found[name] = place, answer(indexer, inputs[heads[name]], own)
        return found

    found = run_ranks(4, work, timeout=60)
    assert found[2]["hole"] == "ValueError: group: expected a group that this process is in, got one that it is not in"
    for name, ranks, heads in (
        ("pair", [0, 2], 2),
        ("pair", [1, 3], 2),
        ("hole", [0, 1, 3], 3),
        ("turned", [0, 1, 2, 3], 4),
        ("world", [0, 1, 2, 3], 4),
    ):
        want = dense(inputs[heads])
        places = [found[rank][name][0] for rank in ranks]
        assert sorted(places) == list(range(len(ranks)))
        if name != "turned":
            assert places == list(range(len(ranks)))
        for place, rank in zip(places, ranks, strict=True):
            own = owned_heads(place, len(ranks), heads)
            assert torch.equal(found[rank][name][1], want[own]), f"{name}, rank {rank}"


# Disagreement at construction.

DIFFERENT = {
    "max_rows": ({}, {"max_rows": 9}, "max_rows: expected the same on every rank, got 8 on rank 0, 2, 9 on rank 1"),
    "max_seq_len": ({}, {"max_seq_len": 64}, "max_seq_len: expected the same on every rank, got 1280 on rank 0, 2, 64 on"),
    "dispatch": ({}, {"dispatch": "sharded"}, 'dispatch: expected the same on every rank, got "auto" on rank 0, 2, "sharded"'),
    "topk": ({"topk": 5}, {}, "topk: expected the same on every rank, got 4 on rank 0, 2, 5 on rank 1"),
    "tie_break": (
        {"tie_break": "higher"},
        {},
        'tie_break: expected the same on every rank, got "lower" on rank 0, 2, "higher"',
    ),
    "num_heads": ({"num_heads": 6}, {}, "num_heads: expected the same on every rank, got 3 on rank 0, 2, 6 on rank 1"),
    "local_blocks": (
        {"local_blocks": 0},
        {},
        "local_blocks: expected the same on every rank, got 1 on rank 0, 2, 0 on rank 1",
    ),
}
WRONG_AT_CONSTRUCTION = {
    "max_rows": ({}, {"max_rows": 0}, "max_rows: expected an int >= 1, got 0"),
    "heads": ({"num_heads": 4}, {}, "world: expected a divisor or a multiple of num_heads (4), got 3"),
    "transport": ({}, {"transport": "pigeon"}, "transport: expected 'auto' or"),
}


def test_configurations_must_agree():
    """Every rank is told the field, the ranks and the values; the group is as good as before."""

    def work(rank):
        found = {}
        for kind, cases in (("different", DIFFERENT), ("wrong", WRONG_AT_CONSTRUCTION)):
            for name, (rules, changes, _) in cases.items():
                spec = dataclasses.replace(spec_of(3), **(rules if rank == 1 else {}))
                found[kind, name] = failure(indexer_of, spec, **(changes if rank == 1 else {}))
        inputs = steps(spec_of(3))["plain"]
        return found, answer(indexer_of(spec_of(3)), inputs, [rank])

    results = run_ranks(3, work, timeout=60)
    want = dense(steps(spec_of(3))["plain"])
    for rank, (found, ids) in enumerate(results):
        for name, (_, _, message) in DIFFERENT.items():
            assert found["different", name].startswith("ValueError: ContextParallelIndexer: "), f"rank {rank}"
            assert message in found["different", name], f"rank {rank}"
        for name, (_, _, message) in WRONG_AT_CONSTRUCTION.items():
            assert found["wrong", name].startswith("ValueError"), f"rank {rank}"
            assert message in found["wrong", name], f"rank {rank}"
            assert rank == 1 or "rank 1: " in found["wrong", name], f"rank {rank}"
        assert torch.equal(ids, want[[rank]])


# Disagreement in a step.


def wrong_q(call):
    call["q"] = call["q"].float()


def wrong_heads(call):
    call["q"] = call["q"].repeat(1, 2, 1)


def wrong_table(call):
    call["block_table"] = call["block_table"].long()


def too_narrow_table(call):
    call["block_table"] = call["block_table"][:, :2]


def too_many_rows(call):
    call["q"] = call["q"].repeat(9, 1, 1)


def wrong_cache(call):
    call["cache"] = torch.zeros(4, 128, 64, dtype=torch.bfloat16)


def wrong_order(call):
    call["order"] = "sideways"


def wrong_out(call):
    call["out"] = torch.zeros(1, 3, 5, dtype=torch.int32)


def not_a_tensor(call):
    call["seq_lens"] = None


WRONG_IN_A_STEP = {
    wrong_q: "q: expected dtype bfloat16, got dtype float32",
    wrong_heads: "q: expected 1 owned or all 3 heads, got 2 heads",
    wrong_table: "block_table: expected dtype int32, got dtype int64",
    too_narrow_table: "seq_lens: expected at most 128 tokens, the bound of block_table (2 columns), got 1211",
    too_many_rows: "q: expected at most max_rows (8) rows, got 27 rows",
    wrong_cache: "cache: expected shape [pages, 64, 64], got shape [4, 128, 64]",
    wrong_order: "order: expected 'score' or 'block', got 'sideways'",
    wrong_out: "out: expected shape [1, 3, 4], got shape [1, 3, 5]",
    not_a_tensor: "seq_lens: expected a torch.Tensor, got NoneType",
}


def call_of(inputs: Inputs, heads: list[int]) -> dict:
    q, pages, block_table, seq_lens = inputs.arguments
    own = q[:, heads]
    return {"q": own, "cache": pages, "block_table": block_table, "seq_lens": seq_lens, "query_len": inputs.query_len}


def test_wrong_arguments_on_one_rank():
    """Every rank raises and the others are told who; the next step is right."""
    inputs = steps(spec_of(3))["plain"]

    def work(rank):
        indexer = indexer_of(spec_of(3))
        found = {}
        for spoil in WRONG_IN_A_STEP:
            call = call_of(inputs, [rank])
            if rank == 1:
                spoil(call)
            error = failure(indexer.decode, **call)
            found[spoil.__name__] = error, indexer.decode(**call_of(inputs, [rank]))
        call = call_of(inputs, [rank])
        if rank != 1:
            wrong_q(call)
        found["two ranks"] = failure(indexer.decode, **call), indexer.decode(**call_of(inputs, [rank]))
        return found

    want = dense(inputs)
    for rank, found in enumerate(run_ranks(3, work, timeout=20)):
        for spoil, message in WRONG_IN_A_STEP.items():
            error, ids = found[spoil.__name__]
            assert error.startswith("ValueError: "), f"rank {rank}, {spoil.__name__}: {error[:200]}"
            assert message in error, f"rank {rank}, {spoil.__name__}"
            assert rank == 1 or "decode: rank 1: " in error, f"rank {rank}, {spoil.__name__}"
            assert torch.equal(ids, want[[rank]]), f"rank {rank}, after {spoil.__name__}"
        error, ids = found["two ranks"]
        if rank == 1:
            assert "decode: rank 0: q: expected dtype bfloat16, got dtype float32; rank 2: q: expected dtype" in error
        assert torch.equal(ids, want[[rank]])


def test_a_long_foreign_error_text():
    """A text that takes several bytes a character gets through, cut short, and the ranks stay in step."""
    inputs = steps(spec_of(2))["plain"]

    def work(rank):
        indexer = indexer_of(spec_of(2))
        order = "\u9806\U0001f40c" * 1500 if rank == 1 else "score"
        error = failure(indexer.decode, **call_of(inputs, [rank]), order=order)
        return error, failure(indexer.decode, **call_of(inputs, [rank]))

    for rank, (error, afterwards) in enumerate(run_ranks(2, work, timeout=20)):
        assert error.startswith("ValueError: "), f"rank {rank}: {error[:200]}"
        assert "order: expected 'score' or 'block', got '\u9806" in error, f"rank {rank}"
        assert afterwards == "no error", f"rank {rank}"


def other_lengths(call):
    call["seq_lens"] = call["seq_lens"] - torch.tensor([0, 1, 0], dtype=torch.int32)


def other_rows(call):
    call["q"] = torch.nn.functional.pad(call["q"], (0, 0, 0, 0, 0, 1))


def other_query_len(call):
    call["q"] = call["q"].repeat(2, 1, 1)
    call["query_len"] = 2


def other_requests(call):
    call["seq_lens"], call["block_table"] = call["seq_lens"][:2], call["block_table"][:2]


def all_heads(call):
    call["q"] = call["q"].repeat(1, 3, 1)


def other_format(call):
    call["q"], call["cache"] = call["q"].float(), call["cache"].float()


DIFFERENT_IN_A_STEP = {
    other_lengths: "checksum of seq_lens: expected the same on every rank, got ",
    other_rows: "rows of q: expected the same on every rank, got 3 on rank 0, 2, 4 on rank 1",
    other_query_len: "query_len: expected the same on every rank, got 1 on rank 0, 2, 2 on rank 1",
    other_requests: "requests: expected the same on every rank, got 3 on rank 0, 2, 2 on rank 1",
    all_heads: 'heads of q: expected the same on every rank, got "owned" on rank 0, 2, "all" on rank 1',
    other_format: 'cache format: expected the same on every rank, got "bf16" on rank 0, 2, "fp32" on rank 1',
}


def test_different_steps():
    inputs = steps(spec_of(3))["plain"]

    def work(rank):
        indexer = indexer_of(spec_of(3))
        found = {}
        for change in DIFFERENT_IN_A_STEP:
            call = call_of(inputs, [rank])
            if rank == 1:
                change(call)
            found[change.__name__] = failure(indexer.decode, **call), indexer.decode(**call_of(inputs, [rank]))
        return found

    want = dense(inputs)
    for rank, found in enumerate(run_ranks(3, work, timeout=20)):
        for change, message in DIFFERENT_IN_A_STEP.items():
            error, ids = found[change.__name__]
            assert error.startswith("ValueError: decode: "), f"rank {rank}, {change.__name__}: {error[:200]}"
            assert message in error, f"rank {rank}, {change.__name__}"
            assert torch.equal(ids, want[[rank]]), f"rank {rank}, after {change.__name__}"


def test_ranks_in_different_calls():
    """One builds an indexer while the other takes a step: both are told, and the next calls fit again."""
    inputs = steps(spec_of(2))["plain"]

    def work(rank):
        indexer = indexer_of(spec_of(2))
        error = failure(indexer_of, spec_of(2)) if rank == 0 else failure(answer, indexer, inputs, [rank])
        return error, answer(indexer, inputs, [rank])

    want = dense(inputs)
    for rank, (error, ids) in enumerate(run_ranks(2, work, timeout=20)):
        assert error.startswith("ValueError: "), f"rank {rank}: {error}"
        assert torch.equal(ids, want[[rank]])


def test_default_device_and_dtype_of_an_engine():
    """Engines build their layers under a default device and dtype, and step under a default dtype."""
    spec = spec_of(2)
    inputs = steps(spec)["plain"]

    def work(rank):
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            indexer = indexer_of(spec)
            indexer.warmup()
            ids = answer(indexer, inputs, [rank])
        return ids, answer(indexer, inputs, [rank])

    want = dense(inputs)
    for rank, found in enumerate(run_ranks(2, work, timeout=20)):
        assert all(torch.equal(ids, want[[rank]]) for ids in found)


# Missing ranks.


@pytest.mark.parametrize("moment", ["construction", "step"])
@pytest.mark.parametrize("leaves", [False, True], ids=["late", "gone"])
def test_a_missing_rank_is_named(moment, leaves):
    """Rank 2 does not come, alive or not; ranks 0 and 1 learn it within the group's time-out of 3 s."""
    inputs = steps(spec_of(3))["plain"]
    done = multiprocessing.get_context("fork").Barrier(2 if leaves else 3)

    def work(rank):
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=3))
        spec = spec_of(3)
        dist.barrier()
        indexer = indexer_of(spec, group=group) if moment == "step" else None
        error = "left"
        if rank != 2 and indexer is None:
            error = failure(indexer_of, spec, group=group)
        elif rank != 2:
            error = failure(answer, indexer, inputs, [rank])
        if not (leaves and rank == 2):
            done.wait(60)
        return error

    errors = run_ranks(3, work, timeout=30)
    for rank in (0, 1):
        assert errors[rank].startswith(f"RuntimeError: rank {rank} of 3 waited in vain for rank 2 ("), errors[rank]


def test_replicated_needs_nobody():
    """Nothing is exchanged: a rank may skip steps."""
    inputs = steps(spec_of(2))["plain"]

    def work(rank):
        indexer = indexer_of(spec_of(2), dispatch="replicated")
        return [answer(indexer, inputs, [rank]) for _ in range(3 if rank else 1)]

    want = dense(inputs)
    for rank, found in enumerate(run_ranks(2, work, timeout=20)):
        assert len(found) == (3 if rank else 1)
        assert all(torch.equal(ids, want[[rank]]) for ids in found)


def test_two_indexers_in_turn():
    """Two micro-batches, each with an indexer: what one returned stays what it was."""
    spec = spec_of(2)
    first, second = steps(spec)["plain"], steps(spec)["ties"]

    def work(rank):
        indexers = indexer_of(spec), indexer_of(spec)
        found = [answer(indexer, inputs, [rank]) for indexer, inputs in zip(indexers, (first, second), strict=True)]
        again = answer(indexers[0], second, [rank])
        return [*found, again]

    want = [dense(first), dense(second), dense(second)]
    for rank, found in enumerate(run_ranks(2, work, timeout=20)):
        assert all(torch.equal(ids, ids_of_all[[rank]]) for ids, ids_of_all in zip(found, want, strict=True))


def test_steps_of_all_lengths_in_turn():
    """Lengths around every block edge, one step after the other, without a pause."""
    spec = spec_of(2, topk=2)
    one = random_inputs(spec, [64 * 5 + 1], heads=2)
    edges = [0, 1, *itertools.chain(*([64 * n - 1, 64 * n, 64 * n + 1] for n in range(1, 6)))]
    many = [dataclasses.replace(one, seq_lens=lengths(length)) for length in edges]

    def work(rank):
        indexer = indexer_of(spec)
        return torch.stack([answer(indexer, inputs, [rank]) for inputs in many])

    want = torch.stack([dense(inputs) for inputs in many])
    for rank, found in enumerate(run_ranks(2, work, timeout=20)):
        assert torch.equal(found, want[:, [rank]])
