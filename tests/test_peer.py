# SPDX-License-Identifier: Apache-2.0
"""The `peer` exchange through Triton's interpreter: processes that write into each other's shared memory."""

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import interpreter
import pytest
import torch
import torch.distributed as dist
from support import Inputs, owned_heads, random_inputs

import lightning_indexer as li
from lightning_indexer.kernels.exchange import EMPTY
from lightning_indexer.ranks import ProcessRanks
from lightning_indexer.verify.ranks import run_ranks

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


def on_ranks(world: int, work: Callable[[SharedRanks], Any], *, batches: int = 1, timeout: float = 60.0) -> list[Any]:
    """What `work` returns on each rank, with kernels interpreted."""
    boxes = torch.full((batches, world, BOX_WORDS), EMPTY.value, dtype=torch.int64).share_memory_()

    def run(rank: int) -> Any:
        with interpreter.fake_device(PROGRAMS):
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
        "rows-past-the-requests": make([700, 0, 65], query_len=2, rows=8),
        "all-empty": make([0, 0]),
        "no-requests": make([]),
        "no-requests-but-rows": make([], rows=3),
        "not-a-number": dataclasses.replace(made := make([64 * 6, 64]), q=torch.full_like(made.q, float("nan"))),
    }


@pytest.mark.parametrize("dispatch", ["sharded", "auto"])
@pytest.mark.parametrize(("heads", "world"), [(4, 2), (4, 4), (2, 4), (3, 3), (4, 8)])
def test_every_rank_gets_the_dense_answer_of_its_heads(heads, world, dispatch):
    """Steps of all kinds one after the other, own heads and all heads, both orders; "auto" shares the longer ones."""
    rules = {"init_blocks": 1, "local_blocks": 2, "tie_break": "higher"} if world == 4 else {}
    spec = spec_of(heads, **rules)
    few = ("ties", "one-block", "all-empty", "rows-past-the-requests")
    kinds = {name: step for name, step in steps(spec).items() if world == 2 or name in few}

    def work(ranks: SharedRanks) -> dict:
        own = owned_heads(ranks.rank, world, heads)
        indexer = indexer_of(spec, ranks, dispatch=dispatch, **({"threshold": 11} if dispatch == "auto" else {}))
        indexer.warmup()
        found = {}
        for name, inputs in kinds.items():
            found[name] = (
                answer(indexer, inputs, own),
                answer(indexer, inputs, order="block"),
                answer(indexer, inputs, own, plan=plan_of(indexer, inputs)),
            )
        return found | {"steps": indexer.steps()}

    results = on_ranks(world, work)
    with interpreter.fake_device(PROGRAMS):
        for name, inputs in kinds.items():
            want, by_block = dense(inputs), dense(inputs, order="block")
            for rank, found in enumerate(results):
                own = owned_heads(rank, world, heads)
                mine, sorted_ids, planned = found[name]
                assert torch.equal(mine, want[own]), (name, rank)
                assert torch.equal(planned, want[own]), (name, rank)
                assert torch.equal(sorted_ids, by_block[own]), (name, rank)
    counted = [found["steps"] for found in results]
    assert counted == [counted[0]] * world
    assert (counted[0]["replicated"] > 0) == (dispatch == "auto")
    assert counted[0]["sharded"] > 0


def plan_of(indexer: li.ContextParallelIndexer, inputs: Inputs) -> li.StepPlan:
    bound = inputs.block_table.shape[1] * inputs.spec.block_size
    return indexer.plan_step(inputs.seq_lens, query_len=inputs.query_len, max_seq_len=bound)
