# SPDX-License-Identifier: Apache-2.0
"""Faults that other systems had in the field, as small inputs with the right answers written out.

Scores are planted: a query is the unit vector of its head's dim, so a block scores what token 0 of its page holds there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import pytest
import torch
from support import (
    DTYPES,
    INF,
    NAN,
    OUT_OF_CACHE,
    WORLDS,
    chosen,
    decode_sharded,
    lengths,
    owned_heads,
    planted_pages,
    select_sharded,
    table,
    unit_queries,
)

import lightning_indexer as li
from lightning_indexer.verify.ranks import run_ranks

HEADS = 4


@dataclass(frozen=True)
class Planted:
    """A decode step with planted scores and the sets that every row and head must get."""

    name: str
    values: torch.Tensor  # [pages, HEADS], score of each page for each head
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    expected: list[list[set[int]]]  # by row, then head
    context: list[list[int]]  # by row, then head: tokens that the selected blocks hold
    query_len: int = 1
    rules: dict = field(default_factory=dict)
    q: torch.Tensor | None = None
    edit: Callable[[torch.Tensor], None] | None = None  # of the planted pages

    @property
    def spec(self) -> li.IndexerSpec:
        return li.IndexerSpec(**self.rules)

    @property
    def queries(self) -> torch.Tensor:
        return unit_queries(len(self.seq_lens) * self.query_len, HEADS) if self.q is None else self.q

    @property
    def pages(self) -> torch.Tensor:
        pages = planted_pages(self.values)
        if self.edit is not None:
            self.edit(pages)
        return pages


def same(*scores: float) -> torch.Tensor:
    """Page scores that all heads share, `[pages, HEADS]`."""
    return torch.tensor(scores)[:, None].repeat(1, HEADS)


def each(*rows: set[int]) -> list[list[set[int]]]:
    """The same set for every head of a row."""
    return [[row] * HEADS for row in rows]


def tokens(*rows: int) -> list[list[int]]:
    return [[row] * HEADS for row in rows]


def padded_queries() -> torch.Tensor:
    q = unit_queries(8, HEADS)
    q[6:] = NAN
    return q


def straddling(pages: torch.Tensor) -> None:
    pages[1, 1, :HEADS] = 50  # token 1 of block 1, beside 9 in its token 0


def only_pages_5_2_9(pages: torch.Tensor) -> None:
    pages[[page for page in range(16) if page not in (5, 2, 9)]] = NAN


def token_major_values() -> torch.Tensor:
    values = torch.zeros(4 * 64, HEADS)
    for row in range(4):
        for head in range(HEADS):
            values[64 * row + 10 * head + row, head] = 100
    return values


def own_winner_per_head() -> torch.Tensor:
    values = torch.zeros(40, HEADS)
    for head in range(HEADS):
        values[20 + head, head] = 50
    return values


ONE_SHARD_WINS = [100.0 + block // 4 if block % 4 == 1 else 0.0 for block in range(64)]
WINNERS = {5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61, 63}

PLANTED = [
    Planted(
        "A01a-padded-rows",
        same(1, 2, 3),
        table([0, 1, 2], [0, 1, 2]),
        lengths(300, 0),
        each({0, 1, 2}, {0, 1, 2}, set(), set()),
        tokens(299, 300, 0, 0),
        query_len=2,
    ),
    Planted(
        "A01b-all-padding",
        same(1),
        torch.zeros(32, 2, dtype=torch.int32),
        torch.zeros(32, dtype=torch.int32),
        each(*[set()] * 32),
        tokens(*[0] * 32),
    ),
    Planted(
        "A02-more-rows-than-requests",
        same(1, 2, 3, 4),
        table([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]),
        lengths(130, 131, 132),
        each(*[{0, 1}] * 6, set(), set()),
        tokens(129, 130, 130, 131, 131, 132, 0, 0),
        query_len=2,
        q=padded_queries(),
    ),
    Planted(
        "A03a-garbage-behind-the-table",
        same(*range(16)),
        table([5, 2, 9, -1, OUT_OF_CACHE, 123456, -1, 7]),
        lengths(300),
        each({0, 1, 2}),
        tokens(300),
        edit=only_pages_5_2_9,
    ),
    Planted(
        "A03b-shared-pages",
        same(0, 0, 3, 0, 0, 1, 0, 0, 0, 2, 0, 0, 7),
        table([5, 2, 9], [5, 2, 12]),
        lengths(300, 300),
        each({1}, {2}),
        tokens(128, 44),
        rules={"topk": 1, "local_blocks": 0},
    ),
    Planted("A04a-fewer-blocks-than-k", same(*range(7)), table([6, 3]), lengths(129), each({0, 1}), tokens(129)),
    Planted(
        "A04b-one-block-init-and-local",
        same(1),
        table([0]),
        lengths(100),
        each({0}),
        tokens(100),
        rules={"init_blocks": 1, "local_blocks": 1},
    ),
    Planted(
        "A05-one-shard-holds-all-winners",
        same(*ONE_SHARD_WINS),
        table(list(range(64))),
        lengths(64 * 128),
        each(WINNERS),
        tokens(16 * 128),
    ),
    Planted(
        "A06-forced-by-global-id",
        same(-50, *range(1, 15), -60),
        table(list(range(16))),
        lengths(16 * 128),
        each({0, 13, 14, 15}),
        tokens(4 * 128),
        rules={"topk": 4, "init_blocks": 1, "local_blocks": 1},
        edit=lambda pages: pages[:, 1:].fill_(-80),
    ),
    Planted(
        "A09-ties-40",
        same(1),
        torch.zeros(1, 40, dtype=torch.int32),
        lengths(40 * 128),
        each({*range(15), 39}),
        tokens(16 * 128),
    ),
    Planted(
        "A13-as-many-tokens-as-heads",
        token_major_values(),
        torch.arange(4 * 64, dtype=torch.int32).view(4, 64),
        lengths(*[64 * 128] * 4),
        [
            [{0, 63}, {10, 63}, {20, 63}, {30, 63}],
            [{1, 63}, {11, 63}, {21, 63}, {31, 63}],
            [{2, 63}, {12, 63}, {22, 63}, {32, 63}],
            [{3, 63}, {13, 63}, {23, 63}, {33, 63}],
        ],
        tokens(256, 256, 256, 256),
        rules={"topk": 2},
    ),
    Planted(
        "A14a-step-straddles-a-block-edge",
        same(20, 9),
        table([0, 1]),
        lengths(130),
        each({0}, {0}, {0}, {1}),
        tokens(127, 128, 128, 2),
        query_len=4,
        rules={"topk": 1, "local_blocks": 0},
        edit=straddling,
    ),
    Planted("A14b-256", same(9, 1), table([0, 1]), lengths(256), each({1}), tokens(128), rules={"topk": 1}),
    Planted("A14b-257", same(9, 5, 1), table([0, 1, 2]), lengths(257), each({2}), tokens(1), rules={"topk": 1}),
    Planted("A14b-384", same(9, 5, 1), table([0, 1, 2]), lengths(384), each({2}), tokens(128), rules={"topk": 1}),
    Planted("A20a-one-block", same(1), table([0]), lengths(100), each({0}), tokens(100)),
    Planted("A20b-no-requests", same(1), torch.zeros(0, 1, dtype=torch.int32), lengths(), [], []),
    Planted("A20c-zero-lengths", same(1), table([0], [0]), lengths(0, 0), each(set(), set()), tokens(0, 0)),
    Planted(
        "A21-heads-keep-their-own",
        own_winner_per_head(),
        table(list(range(40))),
        lengths(40 * 128),
        [[{20, 39}, {21, 39}, {22, 39}, {23, 39}]],
        tokens(256),
        rules={"topk": 2},
    ),
]


def sparse_outputs(case: Planted, heads: int) -> li.SparseTable:
    """Wild numbers in outputs that the operators must fill: one attention page per block."""
    rows = case.queries.shape[0]
    out = torch.full((heads, rows, case.spec.topk), -77, dtype=torch.int32)
    held = torch.full((heads, rows), -77, dtype=torch.int32)
    return li.SparseTable(case.block_table, out, held, page_size=128, page_stride=1)


def assert_answer(case: Planted, ids: torch.Tensor, sparse: li.SparseTable, heads: list[int]) -> None:
    assert chosen(ids) == [[row[head] for head in heads] for row in case.expected]
    assert sparse.context_lens_out.t().tolist() == [[row[head] for head in heads] for row in case.context]
    for row, sets in enumerate(case.expected):
        for place, head in enumerate(heads):
            pages = [int(case.block_table[row // case.query_len, block]) for block in sorted(sets[head])]
            want = pages + [0] * (case.spec.topk - len(pages))
            assert sparse.block_table_out[place, row].tolist() == want


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_planted_dense(case):
    sparse = sparse_outputs(case, HEADS)
    ids = li.decode(
        case.queries,
        case.pages,
        case.block_table,
        case.seq_lens,
        spec=case.spec,
        query_len=case.query_len,
        sparse_table=sparse,
    )
    assert ids.shape == (HEADS, case.queries.shape[0], case.spec.topk)
    assert_answer(case, ids, sparse, list(range(HEADS)))


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"P{world}")
@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_planted_virtual_ranks(case, world):
    sparse = sparse_outputs(case, HEADS)
    arguments = (case.queries, case.pages, case.block_table, case.seq_lens)
    rules = {"spec": case.spec, "query_len": case.query_len}
    ids = decode_sharded(*arguments, world=world, sparse_table=sparse, **rules)
    assert_answer(case, ids, sparse, list(range(HEADS)))
    assert torch.equal(ids, li.decode(*arguments, **rules)), "the order differs from P = 1"


@lru_cache
def planted_on_ranks(world: int) -> list[dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """By rank: ids, sparse table and context lengths of every planted case, from owned-head queries."""

    def work(rank):
        answers = {}
        for case in PLANTED:
            heads = owned_heads(rank, world, HEADS)
            rows = case.queries.shape[0]
            indexer = li.ContextParallelIndexer(case.spec, max_rows=max(1, rows), max_seq_len=8192, device="cpu")
            sparse = sparse_outputs(case, len(heads))
            ids = indexer.decode(
                case.queries[:, heads],
                case.pages,
                case.block_table,
                case.seq_lens,
                query_len=case.query_len,
                sparse_table=sparse,
            )
            answers[case.name] = ids, sparse.block_table_out, sparse.context_lens_out
        return answers

    return run_ranks(world, work, timeout=60)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
@pytest.mark.parametrize("world", [2, 4, 8], ids=lambda world: f"P{world}")
def test_planted_real_ranks(case, world):
    dense = li.decode(case.queries, case.pages, case.block_table, case.seq_lens, spec=case.spec, query_len=case.query_len)
    for rank, answers in enumerate(planted_on_ranks(world)):
        ids, pages, held = answers[case.name]
        heads = owned_heads(rank, world, HEADS)
        assert_answer(case, ids, li.SparseTable(case.block_table, pages, held, page_size=128, page_stride=1), heads)
        assert torch.equal(ids, dense[heads]), f"rank {rank}: the order differs from P = 1"


def test_a03a_reads_only_its_pages():
    case = next(case for case in PLANTED if case.name.startswith("A03a"))
    scores = li.score_blocks(case.queries, case.pages, case.block_table, case.seq_lens, spec=case.spec)
    assert scores[:, 0].tolist() == [[5.0, 2.0, 9.0] + [-INF] * 5] * HEADS


def test_a03b_page_numbers_mean_nothing():
    case = next(case for case in PLANTED if case.name.startswith("A03b"))
    for seed in range(5):
        renamed = torch.randperm(13, generator=torch.Generator().manual_seed(seed))
        pages = torch.empty_like(case.pages)
        pages[renamed] = case.pages
        moved = renamed[case.block_table.long()].to(torch.int32)
        assert chosen(li.decode(case.queries, pages, moved, case.seq_lens, spec=case.spec)) == case.expected


# Cases that feed scores to the selection.

NAN_BLOCKS = [1, 2, 4, 5, 7, 9, 10, 12, 13, 15, 17, 18, 20, 21, 23, 25, 26, 28, 29, 31]


def nan_scores(bits: int) -> torch.Tensor:
    scores = torch.arange(32, dtype=torch.float32)
    scores.view(torch.int32)[NAN_BLOCKS] = torch.tensor([bits], dtype=torch.int64).to(torch.int32)
    return scores


LOW_BITS = torch.tensor([0x3F900000 | (389 * block % 1024) for block in range(1024)], dtype=torch.int32).view(torch.float32)
LAST_NUMBERS = {0, 1, 2, 3, 4, 6, 8, 11, 14, 16, 19, 22, 24, 27, 30, 31}
LOW_BIT_WINNERS = {50, 100, 179, 229, 279, 358, 408, 458, 537, 587, 637, 716, 766, 816, 895, 945}

FED = {
    "A07-above-the-sentinel": (
        torch.tensor([-1, 3, 2, 1, INF, 2e30, 10, 0]),
        {"topk": 3, "init_blocks": 1, "local_blocks": 1},
        {0, 4, 7},
    ),
    "A08-nan-positive": (nan_scores(0x7FC00000), {}, LAST_NUMBERS),
    "A08-nan-negative": (nan_scores(0xFFC00000), {}, LAST_NUMBERS),
    "A08-nan-payload": (nan_scores(0xFFFFFFFF), {}, LAST_NUMBERS),
    "A09-ties-40": (torch.ones(40), {}, {*range(15), 39}),
    "A09-ties-4096": (torch.zeros(4096), {}, {*range(15), 4095}),
    "A10-low-mantissa-bits": (LOW_BITS, {"local_blocks": 0}, LOW_BIT_WINNERS),
}


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"P{world}")
@pytest.mark.parametrize("name", FED)
def test_fed_scores(name, world):
    scores, rules, expected = FED[name]
    spec = li.IndexerSpec(num_heads=1, **rules)
    lens = lengths(len(scores) * 128)
    ids = select_sharded(scores[None, None], lens, world=world, spec=spec)
    assert chosen(ids) == [[expected]]
    assert torch.equal(ids, select_sharded(scores[None, None], lens, world=1, spec=spec))


@pytest.mark.parametrize(("blocks", "score"), [(40, 1.0), (4096, 0.0)], ids=["40", "4096"])
def test_a09_twenty_repeats(blocks, score):
    want = torch.tensor([[[blocks - 1, *range(15)]]], dtype=torch.int32)
    scores = torch.full((1, 1, blocks), score)
    for repeat in range(20):
        world = WORLDS[repeat % 4]
        assert torch.equal(select_sharded(scores, lengths(blocks * 128), world=world, spec=li.IndexerSpec()), want)


# A12: views.


def view_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(12)
    pages = torch.randn(16, 128, 128, generator=generator).bfloat16()
    block_table = torch.randperm(16, generator=generator)[:14].view(2, 7).to(torch.int32)
    q = torch.randn(2, 4, 128, generator=generator).bfloat16()
    return q, pages, block_table, lengths(7 * 128 - 3, 6 * 128 + 1)


def sliced_queries(q, pages, block_table, seq_lens):
    buffer = torch.full((2, 2048), NAN, dtype=torch.bfloat16)
    view = buffer[:, 1024:1536].view(2, 4, 128)
    view.copy_(q)
    return view, pages, block_table, seq_lens


def strided_lengths(q, pages, block_table, seq_lens):
    two_d = torch.full((2, 3), 10**6, dtype=torch.int32)
    two_d[:, 0] = seq_lens
    return q, pages, block_table, two_d[:, 0]


def strided_table(q, pages, block_table, seq_lens):
    wide = torch.full((2, 13), OUT_OF_CACHE, dtype=torch.int32)
    wide[:, :7] = block_table
    return q, pages, wide[:, :7], seq_lens


@pytest.mark.parametrize("view", [sliced_queries, strided_lengths, strided_table])
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"P{world}")
def test_a12_views(view, world):
    inputs = view_inputs()
    spec = li.IndexerSpec(topk=3)
    assert torch.equal(decode_sharded(*view(*inputs), world=world, spec=spec), li.decode(*inputs, spec=spec))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: torch.arange(16, dtype=torch.int32).view(2, 8)[:, ::2]}, r"block_table: expected a contiguous last dim, got"),
        ({2: torch.arange(8).view(2, 4)}, r"block_table: expected dtype int32, got dtype int64"),
        (
            {1: torch.zeros(16, 64, 128, dtype=torch.bfloat16)},
            r"cache: expected shape \[pages, 128, 128\], got shape \[16, 64, 128\]",
        ),
    ],
    ids=["d-strided-columns", "e-int64-table", "f-page-of-64"],
)
def test_a12_refused(change, message):
    inputs = list(view_inputs())
    inputs[3] = lengths(200, 300)
    for place, value in change.items():
        inputs[place] = value
    with pytest.raises(ValueError, match=message):
        li.decode(*inputs, spec=li.IndexerSpec())


def ragged_chunks() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(15)
    pages = torch.randn(9, 128, 128, generator=generator).bfloat16()
    q = torch.randn(133, 4, 128, generator=generator).bfloat16()
    block_table = table([4, -1, -1, -1, -1], [0, 1, 2, 3, 5], [8, 6, OUT_OF_CACHE, -1, -1])
    return q, pages, block_table, torch.tensor([0, 5, 5, 133], dtype=torch.int32), lengths(5, 640, 251)


@pytest.mark.parametrize("topk", [1, 16], ids=lambda topk: f"K{topk}")
def test_a15_ragged_prefill_is_decode_row_by_row(topk):
    q, pages, block_table, bounds, seq_lens = ragged_chunks()
    spec = li.IndexerSpec(topk=topk, local_blocks=0)
    ids = li.prefill(q, pages, block_table, bounds, seq_lens, spec=spec)
    row_lengths = [*range(1, 6), *range(124, 252)]
    for row, length in enumerate(row_lengths):
        request = 0 if row < 5 else 2
        one = li.decode(q[row : row + 1], pages, block_table[request : request + 1], lengths(length), spec=spec)
        assert torch.equal(ids[:, row : row + 1], one), f"row {row}, c = {length}"
    if topk == 16:
        assert chosen(ids) == each(*[{0}] * 10, *[{0, 1}] * 123)


def test_a16_bound_below_the_live_length():
    """No word beside the outputs changes, whether the bound is refused or right."""
    pages = torch.zeros(1, 128, 128, dtype=torch.bfloat16)
    block_table = torch.zeros(1, 32, dtype=torch.int32)
    guarded_scores = torch.full((64 + 4 * 4 * 32 + 64,), 77.0)
    guarded_ids = torch.full((64 + 4 * 4 * 16 + 64,), 77, dtype=torch.int32)
    score_out, ids_out = guarded_scores[64:-64], guarded_ids[64:-64].view(4, 4, 16)
    call = {"spec": li.IndexerSpec(), "query_len": 4}
    arguments = (unit_queries(4), pages, block_table, lengths(4096))
    message = "seq_lens: expected at most 64 tokens, the bound of max_seq_len, got 4096"
    with pytest.raises(ValueError, match=message):
        li.score_blocks(*arguments, max_seq_len=64, out=score_out[: 4 * 4].view(4, 4, 1), **call)
    with pytest.raises(ValueError, match=message):
        li.decode(*arguments, max_seq_len=64, out=ids_out, **call)
    chunk = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        li.prefill(*arguments[:3], chunk, lengths(4096), spec=li.IndexerSpec(), max_seq_len=64, out=ids_out)
    with pytest.raises(ValueError, match="seq_lens: expected at most 2560 tokens, the bound of scores"):
        li.select_keys(torch.zeros(4, 4, 20), lengths(4096), **call)
    assert guarded_scores.eq(77).all()
    assert guarded_ids.eq(77).all()
    li.score_blocks(*arguments, max_seq_len=4096, out=score_out.view(4, 4, 32), **call)
    li.decode(*arguments, max_seq_len=4096, out=ids_out, **call)
    assert score_out.eq(0).all()
    assert chosen(ids_out) == each(*[{*range(15), 31}] * 4)
    for guarded in (guarded_scores, guarded_ids):
        assert guarded[:64].eq(77).all()
        assert guarded[-64:].eq(77).all()


# A20 (d): the ranks stay in step.


def test_a20d_alternating_steps():
    spec = li.IndexerSpec(head_dim=64, block_size=64, topk=4)
    pages = planted_pages(same(1, 9), block_size=64, dim=64)
    long_table = torch.zeros(1, 600, dtype=torch.int32)
    long_table[0, [7, 300, 501]] = 1
    steps = [(table([0]), lengths(60)), (long_table, lengths(600 * 64))] * 100

    def work(rank):
        indexer = li.ContextParallelIndexer(spec, max_rows=1, max_seq_len=600 * 64, device="cpu")
        q = unit_queries(1, HEADS, 64)[:, rank : rank + 1]
        return [indexer.decode(q, pages, *step)[0, 0].tolist() for step in steps]

    assert run_ranks(4, work, timeout=30) == [[[0, -1, -1, -1], [599, 7, 300, 501]] * 100] * 4


# A22: the sparse table.

SELECTIONS = {
    "a": ([2, 0, 1], 300, [11, 4, 8], 300),
    "b": ([2, 0], 300, [11, 8], 172),
    "c": ([0, 1], 300, [11, 4], 256),
    "d": ([2, 1], 384, [4, 8], 256),
    "e": ([2], 257, [8], 1),
    "f": ([0, 2, 3], 300, [11, 8], 172),
    "g": ([], 0, [], 0),
}


@pytest.mark.parametrize("page_size", [128, 64, 16], ids=lambda size: f"page{size}")
@pytest.mark.parametrize("name", SELECTIONS)
def test_a22_sparse_table(name, page_size):
    """The selection comes as keys; in (f) block 3 is one that the row cannot see, though the table has a page for it."""
    ids, length, pages, held = SELECTIONS[name]
    spec = li.IndexerSpec(topk=4, local_blocks=0)
    scores = torch.full((1, 1, 4), NAN)
    scores[0, 0, ids] = 9.0
    longer = lengths(512 if name == "f" else length)
    keys = li.select_keys(scores, longer, spec=li.IndexerSpec(topk=max(1, len(ids)), local_blocks=0))
    keys = torch.nn.functional.pad(keys, (0, 4 - keys.shape[-1]))
    count = 128 // page_size
    out = torch.full((1, 1, 4 * count), -77, dtype=torch.int32)
    held_out = torch.full((1, 1), -77, dtype=torch.int32)
    sparse = li.SparseTable(table([11, 4, 8, 99]), out, held_out, page_size=page_size, page_stride=8)
    li.merge_keys(keys[None], lengths(length), spec=spec, sparse_table=sparse)
    want = [8 * page + part for page in pages for part in range(count)]
    assert out.flatten().tolist() == want + [0] * (4 * count - len(want))
    assert held_out.item() == held


def test_a22_garbage_ids():
    """(f) as ids: one past the visible blocks, the end mark, and an id far outside the table."""
    out = torch.full((1, 1, 8), -77, dtype=torch.int32)
    held = torch.full((1, 1), -77, dtype=torch.int32)
    sparse = li.SparseTable(table([11, 4, 8, 99]), out, held, page_size=128, page_stride=1)
    ids = torch.tensor([[[0, 2, -1, 3, OUT_OF_CACHE, -1, -1, -1]]], dtype=torch.int32)
    sparse.fill(ids, torch.tensor([300]), li.IndexerSpec(topk=8), 1)
    assert out.flatten().tolist() == [11, 8, 0, 0, 0, 0, 0, 0]
    assert held.item() == 172


# A23: slots outside the cache.


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("slots", [[5, -1, -1], [5, -1, 4 * 128]], ids=["minus-one", "past-the-end"])
def test_a23_slots_outside_the_cache(format, slots):
    spec = li.IndexerSpec()
    buffer = torch.full((64 + 4 * 128 * 128 + 64,), 77.0, dtype=DTYPES[format])
    before = buffer.clone()
    cache = li.IndexCache.wrap(buffer[64:-64].view(4, 128, 128), spec)
    keys = torch.randn(3, 128, generator=torch.Generator().manual_seed(23))
    cache.write(keys, torch.tensor(slots))
    want = before.clone()
    want[64 + 5 * 128 : 64 + 6 * 128] = keys[0].to(DTYPES[format])
    assert torch.equal(buffer.view(torch.uint8), want.view(torch.uint8))
