# SPDX-License-Identifier: Apache-2.0
"""The `peer` exchange through Triton's interpreter: processes that write into each other's shared memory."""

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import Inputs, lengths, owned_heads, planted_pages, random_inputs, table, unit_queries

import lightning_indexer as li

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled in this process: test_gpu_peer.py tests them", allow_module_level=True)

import interpreter

from lightning_indexer import peer
from lightning_indexer.kernels.box import EMPTY
from lightning_indexer.ranks import ProcessRanks
from lightning_indexer.verify.ranks import run_ranks

interpreter.install()

GEOMETRY = {"head_dim": 64, "block_size": 64, "topk": 4}
LIMIT = 8  # max_rows
BOX_WORDS = 1 << 15
PROGRAMS = 5


class SharedRanks(ProcessRanks):
    """Processes of the default group whose boxes were made before they were forked."""

    def __init__(self, boxes: torch.Tensor) -> None:
        super().__init__(dist.group.WORLD)
        self.free = list(boxes)

    def share(self, tensor: torch.Tensor, timeout: timedelta | None) -> list[torch.Tensor]:
        boxes = self.free.pop()
        assert tensor.numel() <= boxes.shape[1]
        return list(boxes)


def on_ranks(
    world: int,
    work: Callable[[SharedRanks], Any],
    *,
    batches: int = 1,
    timeout: float = 60.0,
    gpus: Sequence[int] | None = None,
) -> list[Any]:
    """What `work` returns on each rank, with kernels interpreted, as if it had the GPU of that number; None: one each."""
    numbers = range(world) if gpus is None else gpus
    boxes = torch.full((batches, world, BOX_WORDS), EMPTY.value, dtype=torch.int64).share_memory_()

    def run(rank: int) -> Any:
        with interpreter.fake_device(PROGRAMS), mock.patch.object(peer, "gpu_name", return_value=f"GPU {numbers[rank]}"):
            return work(SharedRanks(boxes))

    return run_ranks(world, run, timeout=timeout)


def spec_of(heads: int, **rules: Any) -> li.IndexerSpec:
    return li.IndexerSpec(num_heads=heads, **{**GEOMETRY, **rules})


def indexer_of(spec: li.IndexerSpec, ranks: SharedRanks, **changes: Any) -> li.ContextParallelIndexer:
    arguments = {"max_rows": LIMIT, "max_seq_len": 64 * 24, "device": "cpu", "transport": "peer", **changes}
    return li.ContextParallelIndexer(spec, ranks, **arguments)


def answer(indexer: li.ContextParallelIndexer, inputs: Inputs, heads: list[int] | None = None, **more: Any) -> torch.Tensor:
    q = inputs.q if heads is None else inputs.q[:, heads]
    return indexer.decode(q, *inputs.arguments[1:], query_len=inputs.query_len, **more)


def dense(inputs: Inputs, **more: Any) -> torch.Tensor:
    """The answer of the same kernels without ranks."""
    return li.decode(*inputs.arguments, **inputs.rules, **more)


def steps(spec: li.IndexerSpec) -> dict[str, Inputs]:
    def make(tokens: list[int], **more: Any) -> Inputs:
        return random_inputs(spec, tokens, heads=spec.num_heads, **more)

    return {
        "ties": make([64 * 8 - 5, 64 * 3, 30], values="ties"),
        "one-block": make([40]),
        "Q3": make([64 * 13 + 2, 1], query_len=3),
        "Q2-short": make([64 * 3 + 1, 130], query_len=2),
        "rows-past-the-requests": make([700, 0, 65], query_len=2, rows=8),
        "all-empty": make([0, 0]),
        "no-requests": make([]),
        "no-requests-but-rows": make([], rows=3),
        "nothing-but-ones": dataclasses.replace(
            made := make([64 * 3, 64]), q=torch.full_like(made.q, -1, dtype=torch.int16).view(torch.bfloat16)
        ),  # NaNs again, whose bits are those of an empty word
        "not-a-number": dataclasses.replace(made := make([64 * 6, 64]), q=torch.full_like(made.q, float("nan"))),
    }


@pytest.mark.parametrize(
    ("heads", "world", "dispatch", "sole"),
    [
        (4, 2, "sharded", True),
        (4, 2, "auto", True),
        (4, 2, "auto", False),
        (4, 4, "sharded", False),
        (2, 4, "sharded", True),
        (4, 8, "auto", True),
    ],
)
def test_every_rank_gets_the_dense_answer_of_its_heads(heads, world, dispatch, sole):
    """Steps of all kinds one after the other, own heads and all heads, both orders; "auto" shares the longer ones."""
    rules = {"init_blocks": 1, "local_blocks": 2, "tie_break": "higher"} if world == 4 else {}
    spec = spec_of(heads, **rules)
    few = ("ties", "one-block", "all-empty", "rows-past-the-requests") if world == 4 else ("ties", "one-block", "Q2-short")
    kinds = {name: step for name, step in steps(spec).items() if world == 2 or name in few}

    def work(ranks: SharedRanks) -> dict:
        own = owned_heads(ranks.rank, world, heads)
        indexer = indexer_of(spec, ranks, dispatch=dispatch, **({"threshold": 11} if dispatch == "auto" else {}))
        indexer.warmup()
        found = {}
        for name, inputs in kinds.items():
            mine = inputs
            if dispatch == "sharded" and ranks.rank % max(1, world // heads):
                mine = dataclasses.replace(inputs, q=torch.zeros_like(inputs.q))  # of replicas the first one's count
            found[name] = (
                answer(indexer, mine, own, plan=plan_of(indexer, inputs)),
                answer(indexer, inputs, order="block"),
            )
        return found | {"steps": indexer.steps()}

    results = on_ranks(world, work, gpus=None if sole else [0] * world)
    with interpreter.fake_device(PROGRAMS):
        for name, inputs in kinds.items():
            want, by_block = dense(inputs), dense(inputs, order="block")
            for rank, found in enumerate(results):
                own = owned_heads(rank, world, heads)
                mine, sorted_ids = found[name]
                assert torch.equal(mine, want[own]), (name, rank)
                assert torch.equal(sorted_ids, by_block[own]), (name, rank)
    counted = [found["steps"] for found in results]
    assert counted == [counted[0]] * world
    assert (counted[0]["replicated"] > 0) == (dispatch == "auto")
    assert counted[0]["sharded"] > 0


def test_two_of_the_ranks_share_a_gpu():
    """How queries travel is agreed on: a rank that has its GPU to itself does as the others; padded rows, three steps."""
    spec = spec_of(4)
    inputs = random_inputs(spec, [700, 0, 65], heads=4, query_len=2, rows=8)

    def work(ranks: SharedRanks) -> list[torch.Tensor]:
        indexer = indexer_of(spec, ranks)
        return [answer(indexer, inputs, [ranks.rank]) for _ in range(3)]

    results = on_ranks(4, work, gpus=[0, 1, 2, 2])
    with interpreter.fake_device(PROGRAMS):
        want = dense(inputs)
    for rank, found in enumerate(results):
        assert all(torch.equal(ids, want[rank : rank + 1]) for ids in found)


def planted(values: torch.Tensor, tokens: int) -> Inputs:
    """One request whose block `b` scores `values[b, h]` for head `h`."""
    heads = values.shape[1]
    pages = planted_pages(values, block_size=64, dim=64)
    arguments = unit_queries(1, heads, 64), pages, table(list(range(len(values)))), lengths(tokens)
    return Inputs(spec_of(heads), *arguments, 1)


def in_blocks(values: dict[int, float], count: int, heads: int = 4) -> torch.Tensor:
    scores = torch.zeros(count, heads)
    for block, value in values.items():
        scores[block] = value
    return scores


def test_field_faults():
    """A05, A06, A09, A20a and A21, on four ranks."""
    spread = {4 * m + 1: 100.0 + m for m in range(4)}
    forced = {block: float(block) for block in range(16)} | {0: -50.0, 15: -60.0}
    by_head = torch.zeros(40, 4)
    by_head[20 + torch.arange(4), torch.arange(4)] = 50
    cases = {
        "A05": (planted(in_blocks(spread, 16), 64 * 16), {"local_blocks": 0}),
        "A06": (planted(in_blocks(forced, 16), 64 * 16), {"init_blocks": 1}),
        "A09": (planted(in_blocks(dict.fromkeys(range(40), 1.0), 40), 64 * 40), {}),
        "A20a": (planted(in_blocks({}, 2), 30), {}),
        "A21": (planted(by_head, 64 * 40), {"topk": 2}),
    }
    want = {
        "A05": [{1, 5, 9, 13}] * 4,
        "A06": [{0, 13, 14, 15}] * 4,
        "A09": [{0, 1, 2, 39}] * 4,
        "A20a": [{0}] * 4,
        "A21": [{20 + head, 39} for head in range(4)],
    }

    def work(ranks: SharedRanks) -> dict[str, set[int]]:
        found = {}
        for name, (inputs, rules) in cases.items():
            indexer = indexer_of(spec_of(4, **rules), ranks, max_seq_len=64 * 40)
            ids = answer(indexer, inputs, [ranks.rank])
            found[name] = {block for block in ids.flatten().tolist() if block >= 0}
        return found

    results = on_ranks(4, work, batches=len(cases))
    for name in cases:
        assert [found[name] for found in results] == want[name], name


def test_a27_micro_batches():
    """Steps of two micro-batches, begun in turn; each has its own memory."""
    spec = spec_of(4)
    first, second = (random_inputs(spec, tokens, heads=4, seed=seed) for tokens, seed in (([64 * 9], 0), ([64 * 5, 40], 1)))

    def work(ranks: SharedRanks) -> list[torch.Tensor]:
        indexer = indexer_of(spec, ranks, micro_batches=2)
        own = owned_heads(ranks.rank, 2, 4)
        ids = [
            answer(indexer, inputs, own, micro_batch=batch) for _ in range(2) for batch, inputs in enumerate((first, second))
        ]
        with pytest.raises(ValueError, match="micro_batch: expected an int from 0 to 1"):
            answer(indexer, first, micro_batch=2)
        return ids

    results = on_ranks(2, work, batches=2)
    with interpreter.fake_device(PROGRAMS):
        want = [dense(first), dense(second)] * 2
    for rank, found in enumerate(results):
        for got, ids in zip(found, want, strict=True):
            assert torch.equal(got, ids[owned_heads(rank, 2, 4)])


def test_the_count_of_steps_may_wrap():
    spec = spec_of(4)
    inputs = random_inputs(spec, [64 * 5, 40], heads=4)

    def work(ranks: SharedRanks) -> tuple[list[torch.Tensor], int]:
        indexer = indexer_of(spec, ranks)
        indexer._batches[0].peer.steps.fill_(2**31 - 3)
        ids = [answer(indexer, inputs, owned_heads(ranks.rank, 2, 4)) for _ in range(5)]
        return ids, indexer.steps()["sharded"]

    results = on_ranks(2, work)
    with interpreter.fake_device(PROGRAMS):
        want = dense(inputs)
    for rank, (ids, count) in enumerate(results):
        assert count == -(2**31) + 2
        assert all(torch.equal(found, want[owned_heads(rank, 2, 4)]) for found in ids)


@pytest.mark.parametrize(("every_head", "sole"), [(False, False), (False, True), (True, True)])
def test_a_missing_rank_is_named(every_head, sole):
    """In the queries or in the keys: the waits end, later ones do not begin, and the next call says who was missing."""
    spec = spec_of(4)
    inputs = random_inputs(spec, [64 * 5, 40], heads=4)

    def work(ranks: SharedRanks) -> str:
        indexer = indexer_of(spec, ranks, timeout=0.0005)  # 500 looks
        indexer.ranks.gather({}, None)
        told = "nothing"
        if ranks.rank != 1:
            answer(indexer, inputs, None if every_head else [ranks.rank])
            with pytest.raises(RuntimeError) as caught:
                answer(indexer, inputs)
            told = str(caught.value)
        return told

    results = on_ranks(4, work, gpus=None if sole else [0] * 4)
    assert results[1] == "nothing"
    for rank in (0, 2, 3):
        assert f"rank {rank} of 4 waited in vain for rank 1 inside a step" in results[rank]


def plan_of(indexer: li.ContextParallelIndexer, inputs: Inputs) -> li.StepPlan:
    bound = inputs.block_table.shape[1] * inputs.spec.block_size
    return indexer.plan_step(inputs.seq_lens, query_len=inputs.query_len, max_seq_len=bound)
