# SPDX-License-Identifier: Apache-2.0
"""No time is taken of an operator that selects wrongly: its ids against a selection made here by sorting.

The sort shares nothing with the kernels: no packed keys, no tiles. The scores are those of `score_blocks`, as the contract
demands the same bits of every path; they are compared with float64 products on some blocks.
"""

from collections.abc import Iterator

import torch

import lightning_indexer as li
from lightning_indexer.bench.inputs import Step
from lightning_indexer.rows import decode_lengths, visible_blocks

MAX_SCORES = 1 << 25  # scores looked at at once: 128 MiB, and some 2 GiB to sort them
SAMPLED_BLOCKS = 32
UNIT_ROUNDOFF = 2.0**-23  # of float32 that is truncated, not rounded, as matrix units may

INIT, LOCAL, SCORED, NAN, UNSEEN = range(5)


class WrongSelectionError(Exception):
    """The operator's ids are not the selection."""


def sorted_selection(scores: torch.Tensor, lengths: torch.Tensor, spec: li.IndexerSpec) -> torch.Tensor:
    """First K blocks by (forced, score descending, lower id): scores `[H, T, N]`, lengths `[T]` to `[H, T, K]` int32."""
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    visible = visible_blocks(lengths, spec.block_size)[:, None]
    kind = torch.where(scores.isnan(), NAN, SCORED)
    kind = torch.where(blocks >= visible - spec.local_blocks, LOCAL, kind)
    kind = torch.where(blocks < spec.init_blocks, INIT, kind)
    kind = torch.where(blocks < visible, kind, UNSEEN).to(torch.int8)
    comparable = torch.where(kind == SCORED, scores + 0.0, 0.0)  # -0.0 + 0.0 is +0.0
    by_score = comparable.sort(dim=-1, descending=True, stable=True).indices
    by_kind = kind.gather(-1, by_score).sort(dim=-1, stable=True).indices
    ids = by_score.gather(-1, by_kind)[..., : spec.topk]
    ids = torch.where(kind.gather(-1, ids) == UNSEEN, -1, ids).to(torch.int32)
    return torch.nn.functional.pad(ids, (0, spec.topk - ids.shape[-1]), value=-1)


def verify_call(step: Step, view: int) -> torch.Tensor:
    """Run the operator on one layer and return a copy of what it wrote, `[H, T, K]`, once its selection is known to be right.

    Raises:
        WrongSelectionError: they differ from the selection, or a score is not the block's maximum; names the first row.
    """
    if step.plan is not None:
        step.plan()
    step.call(view)
    found = step.ids[view].clone()
    selected = found if step.merged is None else step.merged(view)
    for requests in _request_chunks(step):
        rows = slice(requests.start * step.query_len, requests.stop * step.query_len)
        table, seq_lens = step.block_table[requests], step.seq_lens[requests]
        lengths = decode_lengths(seq_lens, step.query_len, rows.stop - rows.start)
        scores = li.score_blocks(step.q[rows], step.caches[view], table, seq_lens, spec=step.spec, query_len=step.query_len)
        for row in (0, len(lengths) - 1):
            page_ids = table[row // step.query_len]
            _check_scores(step, view, rows.start + row, scores[:, row], page_ids, int(lengths[row]))
        _compare("li.score_blocks' order", sorted_selection(scores, lengths, step.spec), selected[:, rows], rows.start)
    return found


def verify_replays(step: Step, view: int, verified: torch.Tensor) -> None:
    """Require that the replayed graph wrote the verified ids, too; `step.ids` must have been overwritten before it ran."""
    _compare("the ids of the same call outside a graph", verified, step.ids[view], 0)


def _request_chunks(step: Step) -> Iterator[slice]:
    requests, columns = step.block_table.shape
    scores_per_request = step.q.shape[1] * step.query_len * columns
    count = max(1, MAX_SCORES // scores_per_request)
    for first in range(0, requests, count):
        yield slice(first, min(first + count, requests))


def _check_scores(step: Step, view: int, row: int, scores: torch.Tensor, page_ids: torch.Tensor, length: int) -> None:
    """Compare scores `[H, N]` of one row with exact ones, within the rounding of a float32 dot product."""
    block = step.spec.block_size
    visible = visible_blocks(length, block)
    if visible == 0:
        return
    blocks = torch.linspace(0, visible - 1, min(visible, SAMPLED_BLOCKS), device=scores.device).long()
    keys = step.caches[view].load_pages(page_ids[blocks]).double()  # [blocks, B, D]
    query = step.q[row].double()  # [H, D]
    unseen = blocks[:, None] * block + torch.arange(block, device=blocks.device) >= length
    exact = (keys @ query.t()).masked_fill(unseen[..., None], -torch.inf).amax(dim=1).t()
    terms = (keys.abs() @ query.abs().t()).masked_fill(unseen[..., None], 0).amax(dim=1).t()
    bound = step.spec.head_dim * UNIT_ROUNDOFF * terms
    right = (scores[:, blocks].double() - exact).abs() <= bound
    if not right.all():
        head, column = (~right).nonzero()[0].tolist()
        got, want = float(scores[head, blocks[column]]), float(exact[head, column])
        where = f"row {row}, head {head}, block {int(blocks[column])}"
        raise WrongSelectionError(f"{where}: expected a score of {want}, li.score_blocks gives {got}")


def _compare(source: str, expected: torch.Tensor, found: torch.Tensor, first_row: int) -> None:
    differs = (expected != found).any(dim=-1)
    if differs.any():
        head, row = differs.nonzero()[0].tolist()
        want, got = expected[head, row].tolist(), found[head, row].tolist()
        where = f"row {first_row + row}, head {head} ({int(differs.sum())} of {differs.numel()} rows here)"
        raise WrongSelectionError(f"{where}: expected {want} by {source}, got {got}")
