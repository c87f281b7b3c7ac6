# SPDX-License-Identifier: Apache-2.0
"""The reference against examples small enough to work out by hand."""

import pytest
import torch
from support import INF, NAN, lengths, table

from lightning_indexer import reference

N = None  # not visible


@pytest.mark.parametrize(
    ("seq_lens", "query_len", "rows", "expected"),
    [
        ([5], 1, 1, [5]),
        ([5, 0], 1, 2, [5, 0]),
        ([5, 1, 0], 3, 9, [3, 4, 5, 0, 0, 1, 0, 0, 0]),
        ([2], 2, 5, [1, 2, 0, 0, 0]),
        ([], 1, 2, [0, 0]),
    ],
    ids=["one", "empty-request", "Q3-short-requests", "rows-past-the-requests", "no-requests"],
)
def test_row_lengths(seq_lens, query_len, rows, expected):
    assert reference.row_lengths(torch.tensor(seq_lens), query_len, rows) == expected


KEYS = torch.tensor(  # 4 pages of 2 tokens of 2 dims
    [
        [[1.0, 0.0], [0.0, 1.0]],
        [[2.0, -1.0], [-3.0, 4.0]],
        [[NAN, NAN], [NAN, NAN]],
        [[5.0, 5.0], [NAN, 6.0]],
    ]
)


@pytest.mark.parametrize(
    ("pages", "length", "query", "expected"),
    [
        ([0, 1], 4, [1.0, 2.0], [2.0, 5.0]),
        ([1, 0], 4, [1.0, 2.0], [5.0, 2.0]),
        ([0, 1], 3, [1.0, 2.0], [2.0, 0.0]),
        ([0, 1], 2, [1.0, 2.0], [2.0, N]),
        ([0, 1], 1, [1.0, 2.0], [1.0, N]),
        ([0, 1], 0, [1.0, 2.0], [N, N]),
        ([0, 3], 3, [1.0, 2.0], [2.0, 15.0]),
        ([0, 3], 4, [1.0, 2.0], [2.0, NAN]),
        ([-7, 99], 3, [1.0, 2.0], [2.0, 15.0]),
        ([0, 1], 4, [-1.0, 0.0], [0.0, 3.0]),
        ([0, 1], 4, [INF, 1.0], [NAN, INF]),
    ],
    ids=[
        "two-blocks",
        "pages-swapped",
        "partial-block",
        "whole-block",
        "one-token",
        "nothing",
        "nan-token-behind-c",
        "nan-token",
        "page-ids-clamped",
        "negative-query",
        "infinite-query",
    ],
)
def test_scores_of_one_row(pages, length, query, expected):
    scores = reference.scores(torch.tensor([[query]]), KEYS, table(pages), lengths(length), block_size=2)
    want = torch.tensor([-INF if value is N else value for value in expected])
    torch.testing.assert_close(scores[0, 0], want, rtol=0, atol=0, equal_nan=True)


def test_scores_of_a_step():
    """Two requests of two rows and one row of padding; two heads."""
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).repeat(5, 1, 1)
    q[4] = NAN
    scores = reference.scores(q, KEYS, table([1, 0], [0, 2]), lengths(3, 1), block_size=2, query_len=2)
    assert scores[0].tolist() == [[2.0, -INF], [2.0, 1.0], [-INF, -INF], [1.0, -INF], [-INF, -INF]]
    assert scores[1].tolist() == [[4.0, -INF], [4.0, 0.0], [-INF, -INF], [0.0, -INF], [-INF, -INF]]


def test_scores_in_float64():
    q, keys = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[1.0, 2.0**-30]]])
    call = (q, keys, table([0]), lengths(1))
    assert reference.scores(*call, block_size=1).item() == 1.0
    assert reference.scores(*call, block_size=1, dtype=torch.float64).item() == 1.0 + 2.0**-30


@pytest.mark.parametrize(
    ("scores", "rules", "expected"),
    [
        ([1, 3, 2], {"topk": 2}, [1, 2]),
        ([1, 3, 2], {"topk": 8}, [1, 2, 0]),
        ([2, 2, 2], {"topk": 2}, [0, 1]),
        ([2, 2, 2], {"topk": 2, "tie_break": "higher"}, [2, 1]),
        ([0.0, -0.0, 0.0], {"topk": 3}, [0, 1, 2]),
        ([0.0, -0.0, 0.0], {"topk": 3, "tie_break": "higher"}, [2, 1, 0]),
        ([NAN, -INF, -NAN, 1], {"topk": 4}, [3, 1, 0, 2]),
        ([NAN, -INF, -NAN, 1], {"topk": 4, "tie_break": "higher"}, [3, 1, 2, 0]),
        ([INF, 1, 2, 3], {"topk": 2, "init_blocks": 1}, [0, 3]),
        ([-9, 1, 2, 3], {"topk": 2, "init_blocks": 1}, [0, 3]),
        ([9, INF, 8, -9], {"topk": 2, "local_blocks": 1}, [3, 1]),
        ([9, INF, 8, NAN], {"topk": 2, "local_blocks": 1}, [3, 1]),
        ([0, 1, 2, 3], {"topk": 3, "init_blocks": 1, "local_blocks": 2}, [0, 2, 3]),
        ([0, 1, 2, 3], {"topk": 3, "init_blocks": 1, "local_blocks": 2, "tie_break": "higher"}, [0, 3, 2]),
        ([0, 9, 2, 3], {"topk": 4, "init_blocks": 2, "local_blocks": 1, "tie_break": "higher"}, [1, 0, 3, 2]),
        ([5, 6], {"topk": 4, "init_blocks": 2, "local_blocks": 2}, [0, 1]),
        ([5], {"topk": 2, "init_blocks": 1, "local_blocks": 1}, [0]),
        ([5, 6, 7], {"topk": 4, "init_blocks": 2, "local_blocks": 2}, [0, 1, 2]),
        ([], {"topk": 2, "local_blocks": 1}, []),
    ],
)
def test_select_row(scores, rules, expected):
    assert reference.select_row(torch.tensor(scores, dtype=torch.float32), **rules) == expected


def test_select_sees_only_visible_blocks():
    scores = torch.tensor([[[1.0, 5.0, 9.0], [1.0, 5.0, 9.0], [NAN, NAN, NAN]]])
    ids = reference.select(scores, [3, 6, 0], block_size=2, topk=2, local_blocks=1)
    assert ids.tolist() == [[[1, 0], [2, 1], [-1, -1]]]
    ids = reference.select(scores, [3, 6, 0], block_size=2, topk=2, local_blocks=1, order="block")
    assert ids.tolist() == [[[0, 1], [1, 2], [-1, -1]]]


def test_merge_of_shards_is_the_selection_of_the_whole():
    shards = [[(1.0, 0), (7.0, 3)], [(5.0, 1)], [(NAN, 2)], []]
    assert reference.merge(shards, topk=3) == [3, 1, 0]
    assert reference.merge(shards, topk=3, local_blocks=2) == [2, 3, 1]


def test_decode_by_hand():
    q = torch.tensor([[[1.0, 2.0]]])
    call = (q, KEYS, table([1, 0, 3]), lengths(5))
    assert reference.decode(*call, block_size=2, topk=2).tolist() == [[[2, 0]]]
    assert reference.decode(*call, block_size=2, topk=2, order="block").tolist() == [[[0, 2]]]
    assert reference.decode(*call, block_size=2, topk=4).tolist() == [[[2, 0, 1, -1]]]


def test_prefill_by_hand():
    """Chunks of 2, 0 and 1 rows behind prefixes of 2, 4 and 0 tokens; row 3 belongs to none."""
    q = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]], [[0.0, 1.0]], [[NAN, NAN]]])
    pages = table([0, 1], [1, 1], [1, 0])
    bounds = torch.tensor([0, 2, 2, 3])
    ids = reference.prefill(q, KEYS, pages, bounds, lengths(4, 4, 1), block_size=2, topk=2)
    assert ids.tolist() == [[[0, 1], [1, 0], [0, -1], [-1, -1]]]


@pytest.mark.parametrize(
    ("ids", "length", "expected"),
    [
        ([2, 0, 1], 5, ([22, 23, 8, 9, 16, 17], 5)),
        ([2, 0], 5, ([22, 23, 16, 17], 3)),
        ([2], 5, ([16, 17], 1)),
        ([0, 1], 5, ([22, 23, 8, 9], 4)),
        ([0, 2, -1, 3, 99], 5, ([22, 23, 16, 17], 3)),
        ([2, 1], 6, ([8, 9, 16, 17], 4)),
        ([], 0, ([], 0)),
    ],
)
def test_sparse_row(ids, length, expected):
    assert reference.sparse_row(ids, length, [11, 4, 8], block_size=2, page_size=1, page_stride=2) == expected
