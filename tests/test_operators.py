# SPDX-License-Identifier: Apache-2.0
"""The operators against the reference, and the promise that a score depends on its query, its keys and `c` alone."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    DTYPES,
    INF,
    NAN,
    OUT_OF_CACHE,
    Inputs,
    decode_sharded,
    dot_bound,
    lengths,
    random_inputs,
    select_sharded,
)

import lightning_indexer as li
from lightning_indexer import dots, reference
from lightning_indexer.spec import Shard

FORCING = [(0, 0), (0, 1), (1, 0), (2, 2)]


@pytest.fixture(params=["as-found", "halving"])
def arithmetic(request, monkeypatch) -> str:
    """Both ways to compute a dot: the one that this CPU takes, and the one that works anywhere."""
    if request.param == "halving":
        monkeypatch.setattr(dots, "arithmetic", lambda device: "halving")
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def score(inputs: Inputs, **changes) -> torch.Tensor:
    return li.score_blocks(*inputs.arguments, **inputs.rules, **changes)


def reference_lengths(inputs: Inputs) -> list[int]:
    return reference.row_lengths(inputs.seq_lens, inputs.query_len, len(inputs.q))


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def spec_of(dim: int = 64, block: int = 64, topk: int = 4, **rules) -> li.IndexerSpec:
    rules.setdefault("local_blocks", 0)
    return li.IndexerSpec(head_dim=dim, block_size=block, topk=topk, **rules)


# Scores.


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("dim", [64, 128], ids=lambda dim: f"D{dim}")
@pytest.mark.parametrize("block", [64, 128, 256], ids=lambda block: f"B{block}")
@pytest.mark.parametrize("query_len", [1, 3], ids=lambda query_len: f"Q{query_len}")
def test_scores_are_within_the_bound_of_a_float32_dot(format, dim, block, query_len, arithmetic):
    spec = spec_of(dim, block)
    tokens = [5 * block + 7, 1, 3 * block, 0, 2]
    inputs = random_inputs(spec, tokens, query_len=query_len, rows=len(tokens) * query_len + 2, dtype=DTYPES[format])
    exact = reference.scores(*inputs.arguments, block_size=block, query_len=query_len, dtype=torch.float64)
    scores = score(inputs)
    assert scores.dtype == torch.float32
    assert torch.equal(scores == -INF, exact == -INF)
    seen = exact > -INF
    assert seen.sum() > 0
    assert ((scores.double() - exact).abs() <= dot_bound(inputs))[seen].all()


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("world", [2, 3, 4, 8], ids=lambda world: f"P{world}")
@pytest.mark.parametrize("query_len", [1, 4], ids=lambda query_len: f"Q{query_len}")
def test_sharded_scores_are_the_dense_ones(format, world, query_len, arithmetic):
    spec = spec_of(128, 64)
    inputs = random_inputs(spec, [64 * 13 + 5, 64 * 4, 3], query_len=query_len, dtype=DTYPES[format])
    dense = score(inputs)
    for rank in range(world):
        sharded = score(inputs, shard=Shard(rank, world))
        mine = dense[..., rank::world]
        assert sharded.shape[-1] == math.ceil(dense.shape[-1] / world)
        assert_same_bits(sharded[..., : mine.shape[-1]], mine)
        assert sharded[..., mine.shape[-1] :].eq(-INF).all()


def test_scores_do_not_depend_on_the_batch(arithmetic):
    inputs = random_inputs(spec_of(128, 128), [900, 1, 400, 1290, 128], heads=4, query_len=3)
    together = score(inputs)
    for request in range(5):
        rows = slice(3 * request, 3 * request + 3)
        alone = dataclasses.replace(
            inputs,
            q=inputs.q[rows],
            block_table=inputs.block_table[request : request + 1],
            seq_lens=inputs.seq_lens[request : request + 1],
        )
        assert_same_bits(score(alone), together[:, rows])


def test_scores_do_not_depend_on_the_rows_beside(arithmetic):
    """The last row of a step, alone, sees the same tokens."""
    inputs = random_inputs(spec_of(64, 64), [700, 450], query_len=4)
    step = score(inputs)
    alone = dataclasses.replace(inputs, q=inputs.q[3::4].contiguous(), query_len=1)
    assert_same_bits(score(alone), step[:, 3::4])


def test_scores_do_not_depend_on_the_order_of_requests(arithmetic):
    inputs = random_inputs(spec_of(64, 64), [700, 64, 333, 0, 512])
    order = torch.tensor([3, 0, 4, 2, 1])
    moved = dataclasses.replace(
        inputs, q=inputs.q[order], block_table=inputs.block_table[order], seq_lens=inputs.seq_lens[order]
    )
    assert_same_bits(score(moved), score(inputs)[:, order])


def test_scores_do_not_depend_on_the_bound(arithmetic):
    inputs = random_inputs(spec_of(64, 64), [700, 64], spare_columns=40)
    table_bound = score(inputs)
    for bound in (700, 704, 705, 2000):
        bounded = score(inputs, max_seq_len=bound)
        assert bounded.shape[-1] == math.ceil(bound / 64)
        assert_same_bits(bounded, table_bound[..., : bounded.shape[-1]])


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize(("heads", "query_len"), [(1, 1), (4, 1), (3, 5), (4, 16)], ids=lambda n: str(n))
def test_scores_do_not_depend_on_the_thread_count(format, heads, query_len, threads):
    inputs = random_inputs(spec_of(128, 128), [128 * 20 + 9, 77], heads=heads, query_len=query_len, dtype=DTYPES[format])
    threads(1)
    one = score(inputs)
    threads(2)
    assert_same_bits(score(inputs), one)


def test_scores_do_not_depend_on_the_other_heads(arithmetic):
    inputs = random_inputs(spec_of(128, 64), [900, 400], heads=8, query_len=2)
    every = score(inputs)
    for heads in ([0], [3], [7, 1], [2, 3, 4, 5, 6]):
        assert_same_bits(score(dataclasses.replace(inputs, q=inputs.q[:, heads])), every[heads])


def test_long_context_scores_do_not_depend_on_tiling(arithmetic):
    """300 blocks are scored in several tiles; a shard's tiles hold other blocks, and one row makes other tiles than 40."""
    spec = spec_of(64, 64)
    inputs = random_inputs(spec, [64 * 300 - 1], heads=2, query_len=40, values="normal")
    dense = score(inputs)
    alone = score(dataclasses.replace(inputs, q=inputs.q[-1:], query_len=1))
    assert_same_bits(alone, dense[:, -1:])
    for rank in (0, 2):
        mine = score(inputs, shard=Shard(rank, 3))
        assert_same_bits(mine[..., :100], dense[..., rank:300:3])


@pytest.mark.parametrize("special", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])
def test_special_keys(special, arithmetic):
    """A special value in a visible token shows in its block alone; behind `c` it does not."""
    inputs = random_inputs(spec_of(64, 64), [64 * 4 + 10])
    inputs.q[0, :, 7] = torch.tensor([1.0, -2.0])
    pages = inputs.pages.clone()
    pages[inputs.block_table[0, 1], 5, 7] = special
    pages[inputs.block_table[0, 4], 10, :] = special
    clean, dirty = score(inputs), score(dataclasses.replace(inputs, pages=pages))
    others = [0, 2, 3, 4, 5, 6]
    assert_same_bits(dirty[..., others], clean[..., others])
    for head, factor in enumerate([1.0, -2.0]):
        got, product = dirty[head, 0, 1].item(), special * factor
        if product == -INF:  # the other tokens of the block decide
            assert -INF < got <= clean[head, 0, 1]
        else:
            assert got == product or (math.isnan(got) and math.isnan(product))


# What a process may have set for its own purposes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(dtype):
    """Engines load and run models under `set_default_dtype`."""
    inputs = random_inputs(spec_of(64, 64, 3, local_blocks=1), [64 * 9 + 3, 70], query_len=2)
    scores, ids = score(inputs), li.decode(*inputs.arguments, **inputs.rules)
    chunks = (*inputs.arguments[:3], torch.tensor([0, 2, 4]), inputs.seq_lens)
    chunked = li.prefill(*chunks, spec=inputs.spec)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert_same_bits(score(inputs), scores)
        assert torch.equal(li.decode(*inputs.arguments, **inputs.rules), ids)
        assert torch.equal(li.prefill(*chunks, spec=inputs.spec), chunked)
    finally:
        torch.set_default_dtype(before)


def test_autocast_changes_nothing(arithmetic):
    """Autocast would turn the products into bf16 ones without a word."""
    inputs = random_inputs(spec_of(64, 64, 3), [64 * 9 + 3, 70], query_len=2)
    scores = score(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(score(inputs), scores)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_matmul_precision_changes_nothing(precision):
    inputs = random_inputs(spec_of(128, 64, 3), [64 * 9 + 3, 70], query_len=2, dtype=torch.float32)
    scores = score(inputs)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert_same_bits(score(inputs), scores)
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_default_device_changes_nothing():
    inputs = random_inputs(spec_of(64, 64, 3), [64 * 9 + 3, 70], query_len=2)
    scores, ids = score(inputs), li.decode(*inputs.arguments, **inputs.rules)
    dots._matmul_is_chain.cache_clear()
    with torch.device("meta"):
        assert_same_bits(score(inputs), scores)
        assert torch.equal(li.decode(*inputs.arguments, **inputs.rules), ids)


def test_no_gradient_is_recorded():
    """A selection has no gradient, and a cache that recorded one would grow from step to step."""
    inputs = random_inputs(spec_of(64, 64, 3), [64 * 4])
    inputs.q.requires_grad_()
    assert not score(inputs).requires_grad
    assert not li.decode(*inputs.arguments, **inputs.rules).requires_grad
    cache = li.IndexCache.wrap(inputs.pages, inputs.spec)
    cache.write(torch.ones(1, 64, requires_grad=True), torch.tensor([5]))
    assert not cache.data.requires_grad
    assert cache.data[0, 5].eq(1).all()


# Selection.


@pytest.mark.parametrize("dim", [64, 128], ids=lambda dim: f"D{dim}")
@pytest.mark.parametrize("block", [64, 128, 256], ids=lambda block: f"B{block}")
@pytest.mark.parametrize("topk", [1, 5, 16, 64], ids=lambda topk: f"K{topk}")
@pytest.mark.parametrize("query_len", [1, 3, 16], ids=lambda query_len: f"Q{query_len}")
def test_decode_selects_as_the_reference_does_from_the_same_scores(dim, block, topk, query_len):
    blocks = 67 if topk == 64 and block == 64 else 19
    for format, values in (("bf16", "ties"), ("fp16", "normal"), ("fp32", "ties")):
        plain = spec_of(dim, block, topk)
        tokens = [blocks * block - 3, 2 * block + 1]
        inputs = random_inputs(plain, tokens, query_len=query_len, dtype=DTYPES[format], values=values)
        scores = score(inputs)
        for (init, local), tie in itertools.product(FORCING, ("lower", "higher")):
            if init + local > topk:
                continue
            rules = {"topk": topk, "init_blocks": init, "local_blocks": local, "tie_break": tie}
            spec = dataclasses.replace(plain, **rules)
            for order in ("score", "block"):
                ids = li.decode(*inputs.arguments, spec=spec, query_len=query_len, order=order)
                want = reference.select(scores, reference_lengths(inputs), block_size=block, order=order, **rules)
                assert torch.equal(ids, want), f"{format}, init {init}, local {local}, {tie}, {order}"
                assert ids.dtype == torch.int32


@pytest.mark.parametrize("world", [1, 2, 4, 8], ids=lambda world: f"P{world}")
@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize("tie_break", ["lower", "higher"])
def test_sharded_decode_is_dense_decode(world, order, tie_break, arithmetic):
    spec = spec_of(64, 64, 6, init_blocks=1, local_blocks=2, tie_break=tie_break)
    for values in ("ties", "normal"):
        inputs = random_inputs(spec, [64 * 19 - 2, 64 * 5, 30, 0], heads=3, query_len=3, values=values)
        sharded = decode_sharded(*inputs.arguments, world=world, order=order, **inputs.rules)
        assert torch.equal(sharded, li.decode(*inputs.arguments, order=order, **inputs.rules))


@st.composite
def selections(draw):
    topk = draw(st.integers(1, 20))
    init = draw(st.integers(0, topk))
    spec = li.IndexerSpec(
        topk=topk,
        init_blocks=init,
        local_blocks=draw(st.integers(0, topk - init)),
        block_size=64,
        tie_break=draw(st.sampled_from(["lower", "higher"])),
    )
    query_len = draw(st.integers(1, 5))
    seq_lens = draw(st.lists(st.integers(0, 64 * 40), min_size=0, max_size=4))
    rows = len(seq_lens) * query_len + draw(st.integers(0, 2))
    choices = torch.tensor(draw(st.lists(st.sampled_from([0.0, -0.0, 1.0, -2.5, INF, -INF, NAN, -NAN, 2e30]), min_size=1)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    heads = draw(st.integers(1, 3))
    scores = choices[torch.randint(len(choices), (heads, rows, 40 + draw(st.integers(0, 3))), generator=generator)]
    return spec, query_len, torch.tensor(seq_lens, dtype=torch.int32), scores


@given(selections(), st.integers(1, 17), st.sampled_from(["score", "block"]))
def test_sharded_selection_is_the_reference_selection(drawn, world, order):
    spec, query_len, seq_lens, scores = drawn
    want = reference.select(
        scores,
        reference.row_lengths(seq_lens, query_len, scores.shape[1]),
        block_size=spec.block_size,
        topk=spec.topk,
        init_blocks=spec.init_blocks,
        local_blocks=spec.local_blocks,
        tie_break=spec.tie_break,
        order=order,
    )
    for ranks in (1, world):
        ids = select_sharded(scores, seq_lens, world=ranks, spec=spec, query_len=query_len, order=order)
        assert torch.equal(ids, want), f"P = {ranks}"


def test_merge_takes_ranks_in_any_order():
    spec = spec_of(topk=5, local_blocks=1)
    inputs = random_inputs(spec, [64 * 19], values="ties")
    keys = torch.stack([li.select_keys(score(inputs, shard=s), inputs.seq_lens, shard=s, spec=spec) for s in shards(4)])
    want = li.decode(*inputs.arguments, **inputs.rules)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        assert torch.equal(li.merge_keys(keys[order], inputs.seq_lens, spec=spec), want)


def test_merge_ignores_what_is_left_in_rows_that_see_nothing():
    """Key buffers are reused: rows without a visible token, and rows past the requests, may hold an older step's keys."""
    spec = spec_of(topk=3)
    scores = torch.ones(2, 4, 8)
    keys = li.select_keys(scores, lengths(512, 512), spec=spec, query_len=2)
    keys[:, 1] = li.select_keys(scores, lengths(1), spec=spec, query_len=2)[:, 1]
    ids = li.merge_keys(keys[None], lengths(1), spec=spec, query_len=2)
    assert ids.tolist() == [[[-1, -1, -1], [0, -1, -1], [-1, -1, -1], [-1, -1, -1]]] * 2


def shards(world: int) -> list[Shard]:
    return [Shard(rank, world) for rank in range(world)]


# Prefill.


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize("bound_dtype", [torch.int32, torch.int64], ids=["cu-int32", "cu-int64"])
def test_prefill_is_decode_row_by_row(format, order, bound_dtype, arithmetic):
    """Chunks of 70, 0, 1 and 9 rows; rows 80 and 81 belong to none."""
    spec = spec_of(64, 64, 3, local_blocks=1)
    chunks, totals = [70, 0, 1, 9], [64 * 9 + 20, 64, 1, 130]
    inputs = random_inputs(spec, totals, rows=82, dtype=DTYPES[format])
    bounds = torch.tensor([0, *itertools.accumulate(chunks)], dtype=bound_dtype)
    q, pages, block_table, seq_lens = inputs.arguments
    ids = li.prefill(q, pages, block_table, bounds, seq_lens, spec=spec, order=order)
    row = 0
    for request, (chunk, total) in enumerate(zip(chunks, totals, strict=True)):
        for length in range(total - chunk + 1, total + 1):
            own = block_table[request : request + 1]
            one = li.decode(q[row : row + 1], pages, own, lengths(length), spec=spec, order=order)
            assert torch.equal(ids[:, row : row + 1], one), f"row {row}"
            row += 1
    assert row == 80
    assert ids[:, 80:].eq(-1).all()


def test_prefill_in_several_tiles(monkeypatch):
    """Small tiles change nothing."""
    spec = spec_of(64, 64, 3, local_blocks=1)
    inputs = random_inputs(spec, [64 * 9], rows=100)
    q, pages, block_table, seq_lens = inputs.arguments
    call = (q, pages, block_table, torch.tensor([0, 100]), seq_lens)
    whole = li.prefill(*call, spec=spec)
    monkeypatch.setattr("lightning_indexer.torch_backend.TILE_PRODUCTS", 64 * 2 * 7)
    monkeypatch.setattr("lightning_indexer.torch_backend.TILE_TOKENS", 128)
    monkeypatch.setattr("lightning_indexer.torch_backend.TILE_SCORES", 200)
    assert torch.equal(li.prefill(*call, spec=spec), whole)
    rules = {"block_size": 64, "topk": 3, "local_blocks": 1}
    lens = list(range(64 * 9 - 99, 64 * 9 + 1))
    scores = torch.stack(
        [
            li.score_blocks(q[row : row + 1], pages, block_table, lengths(length), spec=spec)[:, 0]
            for row, length in enumerate(lens)
        ],
        dim=1,
    )
    assert torch.equal(whole, reference.select(scores, lens, **rules))


@pytest.mark.parametrize("max_query_len", [None, 5, 100])
def test_prefill_bounds_change_nothing(max_query_len):
    spec = spec_of(64, 64, 2)
    inputs = random_inputs(spec, [300, 64], rows=8)
    call = (*inputs.arguments[:3], torch.tensor([0, 5, 8]), inputs.seq_lens)
    want = li.prefill(*call, spec=spec)
    assert torch.equal(li.prefill(*call, spec=spec, max_query_len=max_query_len, max_seq_len=300), want)
    assert want[:, :5, 1].ge(0).all()


# Layouts.


def test_renumbered_pages_change_nothing():
    spec = spec_of(topk=5)
    inputs = random_inputs(spec, [64 * 9 + 3, 64 * 12], query_len=2, values="ties")
    want = li.decode(*inputs.arguments, **inputs.rules)
    for seed in range(3):
        renamed = torch.randperm(len(inputs.pages), generator=torch.Generator().manual_seed(seed))
        pages = torch.empty_like(inputs.pages)
        pages[renamed] = inputs.pages
        block_table = inputs.block_table.clone()
        for request, length in enumerate(inputs.seq_lens.tolist()):
            own = slice(math.ceil(length / 64))
            block_table[request, own] = renamed[block_table[request, own].long()].to(torch.int32)
        moved = dataclasses.replace(inputs, pages=pages, block_table=block_table)
        assert_same_bits(score(moved), score(inputs))
        assert torch.equal(li.decode(*moved.arguments, **inputs.rules), want)


def test_page_ids_outside_the_cache_are_clamped():
    """The page before the first is the first, every page behind the last is the last; neighbours stay NaN guards."""
    spec = spec_of(topk=3)
    buffer = torch.full((6, 64, 64), NAN, dtype=torch.bfloat16)
    pages = buffer[1:5]
    pages.copy_(torch.arange(1.0, 5.0)[:, None, None].expand(4, 64, 64))
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    q[..., 0] = 1
    block_table = torch.tensor([[-1, 4, OUT_OF_CACHE, -(2**31), 2]], dtype=torch.int32)
    scores = li.score_blocks(q, pages, block_table, lengths(5 * 64), spec=spec)
    assert scores.tolist() == [[[1.0, 4.0, 4.0, 1.0, 3.0]]]
    assert li.decode(q, pages, block_table, lengths(5 * 64), spec=spec).tolist() == [[[1, 2, 4]]]


def interleaved_layers(inputs: Inputs) -> Inputs:
    pages = inputs.pages
    buffer = torch.full((len(pages), 5, *pages.shape[1:]), NAN, dtype=pages.dtype)
    buffer[:, 3] = pages
    return dataclasses.replace(inputs, pages=buffer[:, 3])


def sliced_queries(inputs: Inputs) -> Inputs:
    rows, heads, dim = inputs.q.shape
    buffer = torch.full((rows, heads + 3, dim + 32), NAN, dtype=inputs.q.dtype)
    buffer[:, 2:-1, 16:-16] = inputs.q
    return dataclasses.replace(inputs, q=buffer[:, 2:-1, 16:-16])


def head_major_queries(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1))


def column_of_lengths(inputs: Inputs) -> Inputs:
    two_d = torch.full((len(inputs.seq_lens), 4), -5, dtype=torch.int32)
    two_d[:, 1] = inputs.seq_lens
    return dataclasses.replace(inputs, seq_lens=two_d[:, 1])


def rows_of_a_wide_table(inputs: Inputs) -> Inputs:
    wide = torch.full((2 * len(inputs.seq_lens), inputs.block_table.shape[1] + 9), OUT_OF_CACHE, dtype=torch.int32)
    wide[::2, : inputs.block_table.shape[1]] = inputs.block_table
    return dataclasses.replace(inputs, block_table=wide[::2, : inputs.block_table.shape[1]])


VIEWS = [interleaved_layers, sliced_queries, head_major_queries, column_of_lengths, rows_of_a_wide_table]


@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_answer_of_copies(view, arithmetic):
    spec = spec_of(64, 64, 5, local_blocks=1)
    inputs = random_inputs(spec, [64 * 9 + 3, 64 * 4], heads=3, query_len=2)
    seen = view(inputs)
    assert_same_bits(score(seen), score(inputs))
    assert torch.equal(li.decode(*seen.arguments, **inputs.rules), li.decode(*inputs.arguments, **inputs.rules))
    bounds = torch.tensor([0, 2, 4])
    chunked = [li.prefill(i.q, i.pages, i.block_table, bounds, i.seq_lens, spec=spec) for i in (seen, inputs)]
    assert torch.equal(*chunked)


# Outputs.


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
def test_out_is_written_in_place_and_returned(layout):
    spec = spec_of(64, 64, 5, local_blocks=1)
    inputs = random_inputs(spec, [64 * 9 + 1, 0, 64 * 4], heads=3, query_len=2, rows=8)  # row 0 sees a block less than row 1

    def make(heads, rows, width, dtype, fill):
        if layout == "transposed":
            return torch.full((rows, heads, width), fill, dtype=dtype).transpose(0, 1)
        if layout == "slice":
            return torch.full((heads + 2, rows + 1, width + 7), fill, dtype=dtype)[1:-1, 1:, 3:-4]
        return torch.full((heads, rows, width), fill, dtype=dtype)

    scores = score(inputs)
    score_out = make(*scores.shape, torch.float32, 77.0)
    assert score(inputs, out=score_out) is score_out
    visible = scores > -INF
    assert_same_bits(score_out[visible], scores[visible])
    assert score_out[~visible].eq(77).all(), "a slot that no row sees was written"

    keys = li.select_keys(scores, inputs.seq_lens, **inputs.rules)
    key_out = make(*keys.shape, torch.int64, 77)
    assert li.select_keys(score_out, inputs.seq_lens, out=key_out, **inputs.rules) is key_out
    assert torch.equal(key_out, keys)

    ids = li.merge_keys(keys[None], inputs.seq_lens, **inputs.rules)
    calls = {
        "merge": lambda out: li.merge_keys(key_out[None], inputs.seq_lens, out=out, **inputs.rules),
        "decode": lambda out: li.decode(*inputs.arguments, out=out, **inputs.rules),
    }
    for name, call in calls.items():
        out = make(*ids.shape, torch.int32, 77)
        assert call(out) is out, name
        assert torch.equal(out, ids), name
    assert torch.equal(ids, reference.select(scores, reference_lengths(inputs), block_size=64, topk=5, local_blocks=1))

    bounds = torch.tensor([0, 2, 2, 5])
    arguments = (*inputs.arguments[:3], bounds, inputs.seq_lens)
    out = make(*ids.shape, torch.int32, 77)
    assert li.prefill(*arguments, spec=spec, out=out) is out
    assert torch.equal(out, li.prefill(*arguments, spec=spec))


@pytest.mark.parametrize("heads", [1, 3], ids=lambda heads: f"H{heads}")
@pytest.mark.parametrize("page_size", [8, 16, 64], ids=lambda size: f"page{size}")
@pytest.mark.parametrize("order", ["score", "block"])
def test_sparse_table_is_the_reference_table(heads, page_size, order):
    spec = spec_of(64, 64, 4, local_blocks=1)
    inputs = random_inputs(spec, [64 * 9 + 3, 0, 64 * 4, 5], heads=heads, query_len=3, rows=14)
    generator = torch.Generator().manual_seed(1)
    attention_pages = torch.randint(0, 1000, (4, 11), generator=generator).to(torch.int32)
    stride, width = 64 // page_size + 3, 4 * 64 // page_size
    shape = (14,) if heads == 1 else (heads, 14)
    out = torch.full((*shape, width), -77, dtype=torch.int32)
    held = torch.full(shape, -77, dtype=torch.int32)
    sparse = li.SparseTable(attention_pages, out, held, page_size=page_size, page_stride=stride)
    ids = li.decode(*inputs.arguments, order=order, sparse_table=sparse, **inputs.rules)
    out, held = out.view(heads, 14, width), held.view(heads, 14)
    for head, row in itertools.product(range(heads), range(14)):
        pages = attention_pages[row // 3].tolist() if row < 12 else []
        want, tokens = reference.sparse_row(
            ids[head, row].tolist(),
            reference_lengths(inputs)[row],
            pages,
            block_size=64,
            page_size=page_size,
            page_stride=stride,
        )
        assert out[head, row].tolist() == want + [0] * (width - len(want)), f"head {head}, row {row}"
        assert held[head, row] == tokens, f"head {head}, row {row}"


# Nothing to do.


@pytest.mark.parametrize("tokens", [[], [0], [0, 0, 0], [-3]], ids=["no-requests", "one-empty", "all-empty", "negative"])
@pytest.mark.parametrize("query_len", [1, 3], ids=lambda query_len: f"Q{query_len}")
@pytest.mark.parametrize("padding", [0, 2], ids=lambda padding: f"padding{padding}")
def test_empty_steps_select_nothing_and_read_nothing(tokens, query_len, padding):
    spec = spec_of(topk=3, local_blocks=1)
    rows = len(tokens) * query_len + padding
    q = torch.full((rows, 2, 64), NAN, dtype=torch.bfloat16)
    pages = torch.full((1, 64, 64), NAN, dtype=torch.bfloat16)
    block_table = torch.full((len(tokens), 2), OUT_OF_CACHE, dtype=torch.int32)
    inputs = Inputs(spec, q, pages, block_table, torch.tensor(tokens, dtype=torch.int32), query_len)
    none = torch.full((2, rows, 3), -1, dtype=torch.int32)
    assert torch.equal(score(inputs), torch.full((2, rows, 2), -INF))
    for world in (1, 4):
        assert torch.equal(decode_sharded(*inputs.arguments, world=world, **inputs.rules), none)
    assert torch.equal(li.decode(*inputs.arguments, **inputs.rules), none)
    bounds = torch.zeros(len(tokens) + 1, dtype=torch.int32)
    if min(tokens, default=0) >= 0:
        assert torch.equal(li.prefill(q, pages, block_table, bounds, inputs.seq_lens, spec=spec), none)


def test_a_table_without_columns_serves_empty_requests():
    spec = spec_of(topk=3)
    q = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    pages = torch.zeros(1, 64, 64, dtype=torch.bfloat16)
    ids = li.decode(q, pages, torch.empty(2, 0, dtype=torch.int32), lengths(0, 0), spec=spec)
    assert ids.eq(-1).all()
    assert ids.shape == (1, 2, 3)


# The cache.


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("keys_dtype", DTYPES.values(), ids=[f"keys-{name}" for name in DTYPES])
def test_cache_write_and_dequantize(format, keys_dtype):
    spec = spec_of(64, 64)
    cache = li.IndexCache.empty(4, spec, format)
    cache.data.fill_(7)
    keys = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).to(keys_dtype)
    slots = torch.tensor([200, 0, -1, 255, 4 * 64])
    cache.write(keys, slots)
    want = torch.full((4 * 64, 64), 7.0)
    for i, slot in ((0, 200), (1, 0), (3, 255)):
        want[slot] = keys[i].to(DTYPES[format]).float()
    seen = cache.dequantize()
    assert seen.dtype == torch.float32
    assert torch.equal(seen, want.view(4, 64, 64))
    assert cache.data.dtype == DTYPES[format]
    assert cache.format.name == format


def test_cache_wrap_is_a_view_and_scores_as_the_tensor():
    spec = spec_of(64, 64, 3)
    inputs = random_inputs(spec, [64 * 6])
    interleaved = interleaved_layers(inputs).pages
    for tensor in (inputs.pages, interleaved):
        cache = li.IndexCache.wrap(tensor, spec)
        assert cache.data.data_ptr() == tensor.data_ptr()
        assert torch.equal(
            li.decode(inputs.q, cache, inputs.block_table, inputs.seq_lens, spec=spec),
            li.decode(*inputs.arguments, spec=spec),
        )
    key = torch.arange(64.0)
    li.IndexCache.wrap(interleaved, spec, format="bf16").write(key[None], torch.tensor([70]))
    assert torch.equal(interleaved[1, 6].float(), key)


def test_written_keys_are_scored():
    spec = spec_of(64, 64, 2)
    cache = li.IndexCache.empty(4, spec)
    cache.data.zero_()
    key = torch.zeros(1, 64)
    key[0, 9] = 3.0
    cache.write(key, torch.tensor([2 * 64 + 63]))
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    q[..., 9] = 2.0
    block_table = torch.tensor([[0, 2, 1]], dtype=torch.int32)
    assert li.score_blocks(q, cache, block_table, lengths(192), spec=spec).tolist() == [[[0.0, 6.0, 0.0]]]
    assert li.score_blocks(q, cache, block_table, lengths(127), spec=spec).tolist() == [[[0.0, 0.0, -INF]]]


# The dot product.


@pytest.mark.parametrize("dim", [64, 128], ids=lambda dim: f"D{dim}")
def test_fixed_dots_do_not_depend_on_shape(dim, arithmetic):
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(64 * 7, dim, generator=generator)
    queries = torch.randn(37, dim, generator=generator)
    every = dots.fixed_dots(keys, queries)
    assert every.shape == (64 * 7, 37)
    for rows, columns in ((slice(0, 64), slice(0, 1)), (slice(64, 320), slice(3, 20)), (slice(128, 448), slice(36, 37))):
        assert_same_bits(dots.fixed_dots(keys[rows], queries[columns]), every[rows, columns])


@pytest.mark.parametrize("count", [1, 2], ids=lambda count: f"threads{count}")
def test_fixed_dots_at_the_largest_shapes(count, threads):
    """A tile of 8,192 tokens for few columns, and one block for a chunk of 4,096 rows and 4 heads."""
    threads(count)
    generator = torch.Generator().manual_seed(6)
    keys = torch.randn(8192, 128, generator=generator)
    queries = torch.randn(4 * 4096, 128, generator=generator)
    threads(1)
    small = dots.fixed_dots(keys[128:256], queries[160:176])
    threads(count)
    assert_same_bits(dots.fixed_dots(keys, queries[160:176])[128:256], small)
    assert_same_bits(dots.fixed_dots(keys[128:256], queries)[:, 160:176], small)


def test_halving_is_the_written_sum():
    """Dim d with dim d + D/2, and so on: 2^24 + 1 is lost or kept by who meets whom."""
    keys = torch.zeros(64, 64)
    keys[:, 0], keys[:, 32], keys[:, 1], keys[:, 33] = 2.0**24, -(2.0**24), 1.0, 1.0
    queries = torch.ones(1, 64)
    expected = torch.full((64,), 2.0)
    assert torch.equal(torch.stack([dots._halving_dot(keys, query) for query in queries], dim=1)[:, 0], expected)
    keys[:, 32], keys[:, 1] = 1.0, -(2.0**24)
    assert torch.equal(dots._halving_dot(keys, queries[0]), torch.ones(64))
