# SPDX-License-Identifier: Apache-2.0
"""Our selection against the one that MiniMax-M3's own indexer in transformers makes from the same queries and keys."""

import math
from functools import lru_cache

import pytest
import torch
from support import WORLDS, Inputs, decode_sharded, dot_bound

import lightning_indexer as li
from lightning_indexer import reference
from lightning_indexer.verify.case import Case

pytest.importorskip("transformers", minversion="5.17")

CONTEXT, STEPS, LAYERS = 2600, 4, 2  # 21 blocks: five more than are kept


@lru_cache
def cases() -> dict[str, Case]:
    from lightning_indexer.verify import minimax_m3

    reports = []
    captured = minimax_m3.capture(
        minimax_m3.default_text(),
        context=CONTEXT,
        decode_steps=STEPS,
        layers=LAYERS,
        progress=lambda *report: reports.append(report),
    )
    return {case.name: case for case in captured}


NAMES = [f"layer {layer}, {kind}" for layer in (1, 2) for kind in ("decode", "prefill rows")]


def row_lengths(case: Case) -> list[int]:
    return reference.row_lengths(case.seq_lens, case.query_len, len(case.q))


def assert_the_models_choice(case: Case, ids: torch.Tensor) -> None:
    """The same sets; a block for another one only if their exact scores are as close as two float32 dots may be wrong."""
    exact, bound, compared = None, None, 0
    for row, length in enumerate(row_lengths(case)):
        for head in range(case.spec.num_heads):
            ours = {block for block in ids[head, row].tolist() if block >= 0}
            theirs = {block for block in case.chosen[head, row].tolist() if block >= 0}
            visible = math.ceil(length / case.spec.block_size)
            assert len(ours) == len(theirs) == min(case.spec.topk, visible)
            assert visible - 1 in ours & theirs
            compared += 1
            if ours == theirs:
                continue
            if exact is None:
                inputs = Inputs(case.spec, case.q, case.pages, case.block_table, case.seq_lens, case.query_len)
                rules = {"block_size": case.spec.block_size, "query_len": case.query_len, "dtype": torch.float64}
                exact, bound = reference.scores(*inputs.arguments, **rules), dot_bound(inputs)
            for mine in ours - theirs:
                for other in theirs - ours:
                    gap = (exact[head, row, mine] - exact[head, row, other]).abs()
                    near = bound[head, row, mine] + bound[head, row, other]
                    assert gap <= near, f"row {row}, head {head}: {mine} for {other}, {gap} apart"
    assert compared == case.chosen.shape[0] * case.chosen.shape[1]


def test_the_capture_is_a_test():
    """There are rows that leave blocks out, rows that see few, and heads that choose differently."""
    assert sorted(cases()) == sorted(NAMES)
    for case in cases().values():
        lens = row_lengths(case)
        assert max(lens) > (case.spec.topk + 2) * case.spec.block_size
        sets = [[frozenset(ids) for ids in head] for head in case.chosen.tolist()]
        assert len({sets[head][-1] for head in range(case.spec.num_heads)}) > 1
    assert min(row_lengths(cases()["layer 1, prefill rows"])) < cases()["layer 1, prefill rows"].spec.block_size


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"P{world}")
@pytest.mark.parametrize("name", NAMES)
def test_decode_makes_the_models_choice(name, world):
    case = cases()[name]
    arguments = (case.q, case.pages, case.block_table, case.seq_lens)
    rules = {"spec": case.spec, "query_len": case.query_len}
    ids = decode_sharded(*arguments, world=world, **rules)
    assert_the_models_choice(case, ids)
    assert torch.equal(ids, li.decode(*arguments, **rules))


@pytest.mark.parametrize("name", NAMES)
def test_prefill_makes_the_models_choice(name):
    """Every request's rows as a chunk behind its prefix."""
    case = cases()[name]
    bounds = torch.arange(len(case.seq_lens) + 1, dtype=torch.int32) * case.query_len
    ids = li.prefill(case.q, case.pages, case.block_table, bounds, case.seq_lens, spec=case.spec)
    assert_the_models_choice(case, ids)


def test_spec_from_the_models_config():
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    config = MiniMaxM3VLTextConfig(
        index_n_heads=4, index_head_dim=128, index_block_size=128, index_topk_blocks=16, index_local_blocks=1
    )
    assert li.IndexerSpec.from_config(config) == li.IndexerSpec.minimax_m3()
