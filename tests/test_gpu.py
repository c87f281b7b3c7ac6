# SPDX-License-Identifier: Apache-2.0
"""The public operators on a GPU: large inputs, memory, graphs. Inputs are drawn on the CPU and moved.

A selection is right if it is the torch operators' from the kernel's own scores, bit for bit; scores are right if they are
within what float32 allows of exact ones. Few geometries, for every new one is a compilation.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import (
    DTYPES,
    NAN,
    OUT_OF_CACHE,
    UNIT_ROUNDOFF,
    Inputs,
    chosen,
    decode_sharded,
    lengths,
    planted_pages,
    random_inputs,
    table,
    unit_queries,
)

import lightning_indexer as li
from lightning_indexer import ops, reference, torch_backend
from lightning_indexer.spec import IndexerSpec, Shard
from lightning_indexer.workspace import Workspace

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SPEC = IndexerSpec()  # MiniMax-M3's
BLOCK, DIM, TOPK = SPEC.block_size, SPEC.head_dim, SPEC.topk
SKEWED = [131_072, 1, 5_000, 0, 128, 77_777, 300, 129]
POOL = 2_048  # pages; requests share them, so that equal scores abound


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def moved(inputs: Inputs) -> Inputs:
    names = ("q", "pages", "block_table", "seq_lens")
    return replace(inputs, **{name: getattr(inputs, name).to(DEVICE) for name in names})


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    return torch.randn(POOL, BLOCK, DIM, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)


def large_inputs(pool: torch.Tensor, tokens: list[int], heads: int = 4, query_len: int = 1, padding: int = 0) -> Inputs:
    """Requests over shared pages; unused columns of the table are outside the cache, rows past R*Q are NaN."""
    generator = torch.Generator().manual_seed(len(tokens) + heads * query_len)
    width = max(math.ceil(length / BLOCK) for length in tokens) + 3
    block_table = torch.randint(POOL, (len(tokens), width), generator=generator).to(torch.int32)
    for request, length in enumerate(tokens):
        block_table[request, math.ceil(length / BLOCK) :] = OUT_OF_CACHE
    q = torch.randn(len(tokens) * query_len + padding, heads, DIM, generator=generator).bfloat16()
    q[len(tokens) * query_len :] = NAN
    return Inputs(SPEC, q.to(DEVICE), pool, block_table.to(DEVICE), lengths(*tokens).to(DEVICE), query_len)


def row_lengths(inputs: Inputs) -> torch.Tensor:
    return torch.tensor(reference.row_lengths(inputs.seq_lens.cpu(), inputs.query_len, len(inputs.q)))


def exact_scores(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores `[H, T, N]` in float64, -inf where not visible, and how far float32 sums in any order may be from them."""
    rows, heads, dim = inputs.q.shape
    block = inputs.spec.block_size
    exact = torch.full((heads, rows, inputs.block_table.shape[1]), -math.inf, dtype=torch.float64, device=DEVICE)
    bound = torch.zeros_like(exact)
    gamma = dim * UNIT_ROUNDOFF / (1 - dim * UNIT_ROUNDOFF)
    causal = row_lengths(inputs).to(DEVICE)
    for request, length in enumerate(inputs.seq_lens.tolist()):
        own = slice(request * inputs.query_len, (request + 1) * inputs.query_len)
        queries = inputs.q[own].reshape(-1, dim).double()
        for first in range(0, math.ceil(length / block), 512):
            blocks = torch.arange(first, min(first + 512, math.ceil(length / block)), device=DEVICE)
            keys = inputs.pages[inputs.block_table[request, blocks].long()].double()
            positions = blocks[:, None] * block + torch.arange(block, device=DEVICE)
            hidden = (positions[..., None] >= causal[own])[..., None]  # [blocks, B, Q, 1]
            for out, left, right, fill in (
                (exact, keys, queries, -math.inf),
                (bound, keys.abs(), queries.abs(), 0.0),
            ):
                dots = (left.view(-1, dim) @ right.t()).view(len(blocks), block, inputs.query_len, heads)
                out[:, own, blocks] = dots.masked_fill(hidden, fill).amax(1).permute(2, 1, 0)
    return exact, gamma * bound


def torch_selection(inputs: Inputs, scores: torch.Tensor, order: str = "score", sparse=None) -> torch.Tensor:
    """Ids that the torch operators make of given scores."""
    heads, rows, _ = scores.shape
    keys = torch.zeros(1, heads, rows, inputs.spec.topk, dtype=torch.int64, device=DEVICE)
    torch_backend.select_keys(scores, inputs.seq_lens, inputs.spec, inputs.query_len, Shard(), keys[0])
    ids = torch.zeros(heads, rows, inputs.spec.topk, dtype=torch.int32, device=DEVICE)
    torch_backend.merge_keys(keys, inputs.seq_lens, inputs.spec, inputs.query_len, order, sparse, ids)
    return ids


def assert_same_rows(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits of `[H, T, ...]`; otherwise the first row that differs."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    integers = {4: torch.int32, 8: torch.int64}[got.element_size()]
    same = (got.contiguous().view(integers) == want.contiguous().view(integers)).flatten(2).all(-1)
    if not bool(same.all()):
        head, row = (~same).nonzero()[0].tolist()
        place = int((got[head, row] != want[head, row]).nonzero()[0])
        around = slice(max(0, place - 2), place + 6)
        got_there, want_there = got[head, row, around].tolist(), want[head, row, around].tolist()
        raise AssertionError(f"head {head}, row {row}, from {around.start}: {got_there}, expected {want_there}")


def assert_scores(inputs: Inputs, scores: torch.Tensor) -> None:
    exact, bound = exact_scores(inputs)
    visible = exact > -math.inf
    assert torch.equal(scores > -math.inf, visible)
    error = torch.where(visible, (scores.double() - exact).abs(), 0.0)
    allowed = torch.where(visible, bound + UNIT_ROUNDOFF * exact.abs(), 0.0)
    wrong = error > allowed
    assert not bool(wrong.any()), f"head, row, block {wrong.nonzero()[0].tolist()}: off by {error[wrong][0].item()}"


def score(inputs: Inputs, **options: Any) -> torch.Tensor:
    return li.score_blocks(*inputs.arguments, **inputs.rules, **options)


def decode(inputs: Inputs, **options: Any) -> torch.Tensor:
    return li.decode(*inputs.arguments, **inputs.rules, **options)


# Scores and selections.


@pytest.mark.parametrize("heads", [1, 4], ids=lambda heads: f"H{heads}")
@pytest.mark.parametrize("query_len", [1, 4, 16], ids=lambda rows: f"Q{rows}")
def test_skewed_lengths(pool, heads, query_len):
    inputs = large_inputs(pool, SKEWED, heads, query_len, padding=3)
    scores = score(inputs)
    assert_scores(inputs, scores)
    assert_same_rows(decode(inputs), torch_selection(inputs, scores))


def test_selection_against_the_reference(pool):
    """Rows of a large case that the one-row-at-a-time reference can do as well."""
    inputs = large_inputs(pool, [40_000, 129, 0, 2_500])
    scores = score(inputs)
    rules = {"block_size": BLOCK, "topk": TOPK, "local_blocks": SPEC.local_blocks}
    want = reference.select(scores.cpu(), row_lengths(inputs).tolist(), **rules)
    assert_same_rows(decode(inputs).cpu(), want)


def bound_of(inputs: Inputs) -> int:
    return inputs.block_table.shape[1] * inputs.spec.block_size


def test_batch_of_64(pool):
    generator = torch.Generator().manual_seed(64)
    tokens = (65_536 * torch.rand(64, generator=generator) ** 6).int().tolist()
    inputs = large_inputs(pool, tokens)
    scores = score(inputs)
    assert_scores(inputs, scores)
    for order in ("score", "block"):
        plan = li.plan_step(inputs.seq_lens, spec=SPEC, max_seq_len=bound_of(inputs), order=order)
        want = torch_selection(inputs, scores, order)
        assert_same_rows(decode(inputs, order=order), want)
        assert_same_rows(decode(inputs, order=order, plan=plan), want)


@pytest.mark.parametrize("more", [[], [700_000, 5, 300_001]])
def test_a_million_tokens(pool, more):
    """The second is a step of so many pages that all programs share them."""
    inputs = large_inputs(pool, [1_048_576, *more])
    scores = score(inputs)
    assert_scores(inputs, scores)
    want = torch_selection(inputs, scores)
    assert_same_rows(decode(inputs), want)
    assert_same_rows(decode(inputs, plan=li.plan_step(inputs.seq_lens, spec=SPEC, max_seq_len=bound_of(inputs))), want)


@pytest.mark.parametrize("world", [2, 3, 8], ids=lambda world: f"P{world}")
def test_ranks(pool, world):
    """Scores of a shard are the dense ones; so are the ids, from candidates made with scores and without."""
    inputs = large_inputs(pool, SKEWED, padding=2)
    dense = torch.nn.functional.pad(score(inputs), (0, world), value=-math.inf)
    ids = decode(inputs)
    keys = []
    for rank in range(world):
        shard = Shard(rank, world)
        own = score(inputs, shard=shard)
        assert_same_rows(own, dense[..., rank::world][..., : own.shape[-1]])
        selected = li.select_keys(own, inputs.seq_lens, shard=shard, **inputs.rules)
        backend = ops.backend_of(inputs.q.device)
        longest = inputs.block_table.shape[1] * BLOCK
        cache = li.IndexCache.wrap(inputs.pages, SPEC)
        one_go = torch.empty_like(selected)
        step = (inputs.q, cache, inputs.block_table, inputs.seq_lens, SPEC, inputs.query_len, longest)
        backend.decode_keys(*step, shard, "score", one_go, None, None)
        assert_same_rows(one_go, selected)
        keys.append(selected)
    assert_same_rows(li.merge_keys(torch.stack(keys), inputs.seq_lens, **inputs.rules), ids)


def test_one_rank_indexer_is_decode(pool):
    inputs = large_inputs(pool, SKEWED)
    indexer = li.ContextParallelIndexer(SPEC, max_rows=len(SKEWED), max_seq_len=131_072, device=DEVICE)
    indexer.warmup()
    got = indexer.decode(*inputs.arguments)
    assert_same_rows(got, decode(inputs))


@pytest.mark.parametrize("order", ["score", "block"])
def test_sparse_table(pool, order):
    inputs = large_inputs(pool, SKEWED, padding=2)
    rows = len(inputs.q)
    attention = torch.randint(1 << 20, inputs.block_table.shape, generator=torch.Generator().manual_seed(6))

    def outputs() -> li.SparseTable:
        out = torch.full((4, rows, TOPK * 8), -77, dtype=torch.int32, device=DEVICE)
        held = torch.full((4, rows), -77, dtype=torch.int32, device=DEVICE)
        return li.SparseTable(attention.to(DEVICE, torch.int32), out, held, page_size=16, page_stride=11)

    got, want = outputs(), outputs()
    assert_same_rows(decode(inputs, order=order, sparse_table=got), torch_selection(inputs, score(inputs), order, want))
    assert_same_rows(got.block_table_out, want.block_table_out)
    assert torch.equal(got.context_lens_out, want.context_lens_out)


# The bits depend on a row's own query, keys and length alone.


def test_twenty_runs(pool):
    inputs = large_inputs(pool, SKEWED)
    scores, ids = score(inputs), decode(inputs)
    for _ in range(20):
        assert_same_rows(score(inputs), scores)
        assert_same_rows(decode(inputs), ids)


def test_order_of_requests(pool):
    inputs = large_inputs(pool, SKEWED)
    order = torch.randperm(len(SKEWED), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    other = replace(
        inputs, q=inputs.q[order], block_table=inputs.block_table[order], seq_lens=inputs.seq_lens[order].contiguous()
    )
    assert_same_rows(score(other), score(inputs)[:, order])
    assert_same_rows(decode(other), decode(inputs)[:, order])


def test_requests_alone(pool):
    inputs = large_inputs(pool, SKEWED)
    scores, ids = score(inputs), decode(inputs)
    for request in range(len(SKEWED)):
        own = slice(request, request + 1)
        alone = replace(inputs, q=inputs.q[own], block_table=inputs.block_table[own], seq_lens=inputs.seq_lens[own])
        assert_same_rows(score(alone), scores[:, own])
        assert_same_rows(decode(alone), ids[:, own])


def test_bounds(pool):
    """Eight times the bound, with garbage in the columns; and rows past R*Q."""
    inputs = large_inputs(pool, SKEWED)
    scores, ids = score(inputs), decode(inputs)
    width = inputs.block_table.shape[1]
    block_table = torch.full((len(SKEWED), 8 * width), -1, dtype=torch.int32, device=DEVICE)
    block_table[:, :width] = inputs.block_table
    q = torch.full((3 * len(inputs.q), 4, DIM), NAN, dtype=torch.bfloat16, device=DEVICE)
    q[: len(inputs.q)] = inputs.q
    wide = replace(inputs, block_table=block_table, q=q)
    assert_same_rows(score(wide)[:, : len(inputs.q), :width], scores)
    assert_same_rows(score(wide, max_seq_len=131_072)[:, : len(inputs.q), :1024], scores[..., :1024])
    assert_same_rows(decode(wide)[:, : len(inputs.q)], ids)
    assert decode(wide)[:, len(inputs.q) :].eq(-1).all()


def test_lengths_past_the_bound_count_as_the_bound(pool):
    inputs = large_inputs(pool, SKEWED)
    bounded = replace(inputs, seq_lens=inputs.seq_lens.clamp(max=6_000))
    assert_same_rows(decode(inputs, max_seq_len=6_000), decode(bounded))
    assert_same_rows(score(inputs, max_seq_len=6_000), score(bounded)[..., :47])


def test_poison():
    """NaN in unwritten tokens and unused pages, wild scratch, wild table columns: nothing of it shows."""
    tokens = [3_000, 0, 129, 20_000, 1]
    inputs = random_inputs(SPEC, tokens, heads=4, rows=7)
    inputs.q[5:] = NAN
    rules = {"block_size": BLOCK, "topk": TOPK, "local_blocks": SPEC.local_blocks}
    causal, on_gpu = row_lengths(inputs).tolist(), moved(inputs)
    scores = score(on_gpu)
    assert_scores(on_gpu, scores)
    want = reference.select(scores.cpu(), causal, **rules)
    workspace = Workspace(SPEC, max_requests=5, max_columns=4, device=DEVICE)
    for poison in (2**62 - 1, -1):
        workspace.keys.fill_(poison)
        assert_same_rows(decode(on_gpu, workspace=workspace).cpu(), want)


def test_views(pool):
    """A12: strided lengths, queries, tables and outputs."""
    inputs = large_inputs(pool, SKEWED)
    rows, width = inputs.block_table.shape
    ids = decode(inputs)
    two_d = torch.full((rows, 3), 77, dtype=torch.int32, device=DEVICE)
    two_d[:, 1] = inputs.seq_lens
    wide = torch.full((rows, width + 13), OUT_OF_CACHE, dtype=torch.int32, device=DEVICE)
    wide[:, 5 : 5 + width] = inputs.block_table
    buffer = torch.full((rows, 2048), NAN, dtype=torch.bfloat16, device=DEVICE)
    queries = buffer[:, 1024:1536].view(rows, 4, DIM)
    queries.copy_(inputs.q)
    out = torch.full((rows, 4, TOPK), -77, dtype=torch.int32, device=DEVICE)
    strided = replace(inputs, q=queries, seq_lens=two_d[:, 1], block_table=wide[:, 5 : 5 + width])
    decode(strided, out=out.transpose(0, 1))
    assert_same_rows(out.transpose(0, 1), ids)


# Prefill.


@pytest.mark.parametrize(
    ("chunks", "prefixes"),
    [([5, 0, 48], [0, 640, 30_000]), ([400, 130, 1], [0, 5_000, 131_000]), ([16], [1_000_000])],
    ids=["short", "long", "million"],
)
def test_prefill_is_decode_row_by_row(pool, chunks, prefixes):
    tokens = [chunk + prefix for chunk, prefix in zip(chunks, prefixes, strict=True)]
    bounds = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    inputs = large_inputs(pool, tokens)
    q = torch.randn(sum(chunks) + 2, 4, DIM, generator=torch.Generator().manual_seed(8)).bfloat16().to(DEVICE)
    q[sum(chunks) :] = NAN
    ids = li.prefill(q, pool, inputs.block_table, bounds.to(DEVICE), inputs.seq_lens, spec=SPEC)
    assert ids[:, sum(chunks) :].eq(-1).all()
    for request in range(len(chunks)):
        own = slice(int(bounds[request]), int(bounds[request + 1]))
        for first in range(own.start, own.stop, 16):  # as decode steps of up to 16 rows
            last = min(first + 16, own.stop)
            length = inputs.seq_lens[request : request + 1] - (own.stop - last)
            padded = torch.zeros(16, 4, DIM, dtype=torch.bfloat16, device=DEVICE)
            padded[16 - (last - first) :] = q[first:last]
            rows = li.decode(padded, pool, inputs.block_table[request : request + 1], length, spec=SPEC, query_len=16)
            assert_same_rows(ids[:, first:last], rows[:, 16 - (last - first) :])


def test_prefill_in_a_workspace(pool):
    """Nothing is allocated; the 48 MiB for prefill, and the little of a decode step, select the same."""
    inputs = large_inputs(pool, [40_000], query_len=2)
    q = torch.randn(300, 4, DIM, generator=torch.Generator().manual_seed(8)).bfloat16().to(DEVICE)
    bounds = torch.tensor([0, 300], dtype=torch.int32, device=DEVICE)
    arguments = (q, pool, inputs.block_table, bounds, inputs.seq_lens)
    want = li.prefill(*arguments, spec=SPEC)
    out = torch.empty_like(want)
    for room in (True, False):
        workspace = Workspace(SPEC, max_requests=1, max_columns=4, device=DEVICE, prefill=room)
        workspace.keys.fill_(2**62 - 1)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        li.prefill(*arguments, spec=SPEC, out=out.fill_(-77), workspace=workspace)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert_same_rows(out, want)


# Memory far away.


@pytest.mark.parametrize("far", [131_072, 131_071, 65_536, 65_535])
def test_a11a_offsets_past_32_bits(far):
    """Bytes past 2^31 and 2^32, elements past 2^31; pages that are not used are NaN."""
    pages = torch.full((131_080, BLOCK, DIM), NAN, dtype=torch.bfloat16, device=DEVICE)
    values = torch.tensor([5.0, 1.0])[:, None].repeat(1, 4)
    pages[[far, 3]] = planted_pages(values).to(DEVICE)
    arguments = unit_queries(1).to(DEVICE), pages, table([far, 3]).to(DEVICE), lengths(256).to(DEVICE)
    assert li.score_blocks(*arguments, spec=SPEC)[:, 0].tolist() == [[5.0, 1.0]] * 4
    assert li.decode(*arguments, spec=SPEC)[:, 0, :3].tolist() == [[1, 0, -1]] * 4
    bounds = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    ids = li.prefill(*arguments[:3], bounds, arguments[3], spec=SPEC)
    assert ids[:, 0, :3].tolist() == [[1, 0, -1]] * 4


def test_a11b_layers_interleaved():
    """A layer's view of a buffer of 57 layers: page 2300 lies past 2^31 elements."""
    buffer = torch.full((2_304, 57, BLOCK, DIM), NAN, dtype=torch.bfloat16, device=DEVICE)
    layer = buffer[:, 56]
    values = torch.tensor([5.0, 1.0, 7.0])[:, None].repeat(1, 4)
    layer[[2_300, 2_299, 3]] = planted_pages(values).to(DEVICE)
    arguments = unit_queries(1).to(DEVICE), layer, table([2_300, 2_299, 3]).to(DEVICE), lengths(384).to(DEVICE)
    assert li.score_blocks(*arguments, spec=SPEC)[:, 0].tolist() == [[5.0, 1.0, 7.0]] * 4
    assert li.decode(*arguments, spec=SPEC)[:, 0, :4].tolist() == [[2, 0, 1, -1]] * 4


def test_a_million_blocks():
    """A table of 1,000,000 blocks over four pages: a short row, and one of 128,000,000 tokens."""
    pages = planted_pages(torch.tensor([0.0, 9.0, 8.0, 7.0])[:, None].repeat(1, 4)).to(DEVICE)
    block_table = torch.zeros(1, 1_000_000, dtype=torch.int32)
    block_table[0, [500_000, 999_998, 123_456]] = torch.tensor([1, 2, 3], dtype=torch.int32)
    arguments = unit_queries(1).to(DEVICE), pages, block_table.to(DEVICE)
    short = li.decode(*arguments, lengths(300).to(DEVICE), spec=SPEC)
    assert short[:, 0, :4].tolist() == [[2, 0, 1, -1]] * 4
    long = lengths(128_000_000 - 5).to(DEVICE)
    want = [999_999, 500_000, 999_998, 123_456, *range(12)]
    assert li.decode(*arguments, long, spec=SPEC)[:, 0].tolist() == [want] * 4
    scores = li.score_blocks(*arguments, long, spec=SPEC)
    assert scores[:, 0, [0, 123_456, 500_000, 999_998, 999_999]].tolist() == [[0.0, 7.0, 9.0, 8.0, 0.0]] * 4
    assert (scores != 0).sum().item() == 3 * 4
    assert li.merge_keys(li.select_keys(scores, long, spec=SPEC)[None], long, spec=SPEC)[:, 0].tolist() == [want] * 4


@pytest.mark.parametrize("format", DTYPES)
def test_a23_slots_outside_the_cache(format):
    buffer = torch.full((64 + 4 * BLOCK * DIM + 64,), 77.0, dtype=DTYPES[format])
    want = buffer.clone()
    keys = torch.randn(4, DIM, generator=torch.Generator().manual_seed(23))
    want[64 + 5 * DIM : 64 + 6 * DIM] = keys[0].to(DTYPES[format])
    on_gpu = buffer.to(DEVICE)
    cache = li.IndexCache.wrap(on_gpu[64:-64].view(4, BLOCK, DIM), SPEC)
    cache.write(keys.to(DEVICE), torch.tensor([5, -1, -1, 4 * BLOCK]).to(DEVICE))
    assert torch.equal(on_gpu.cpu().view(torch.uint8), want.view(torch.uint8))


# What is refused.


def test_misaligned_queries_are_refused(pool):
    inputs = large_inputs(pool, [300])
    buffer = torch.zeros(4 * DIM + 1, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="q: expected address and strides that are multiples of 16 bytes"):
        decode(replace(inputs, q=buffer[1:].view(1, 4, DIM)))


@pytest.mark.parametrize("name", ["q", "pages", "block_table", "seq_lens"])
def test_tensors_on_different_devices_are_refused(pool, name):
    inputs = large_inputs(pool[:4], [300])
    elsewhere = replace(inputs, **{name: getattr(inputs, name).cpu()})
    with pytest.raises(ValueError, match=r"expected device"):
        decode(elsewhere)
    with pytest.raises(ValueError, match=r"expected device"):
        score(elsewhere)


# Graphs.


@dataclass
class Captured:
    """A captured call and its static inputs."""

    inputs: Inputs
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor

    def replay(self, inputs: Inputs) -> torch.Tensor:
        """The output for new values of queries, table and lengths."""
        for name in ("q", "block_table", "seq_lens"):
            getattr(self.inputs, name).copy_(getattr(inputs, name))
        self.out.fill_(-77)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out.clone()


def capture(dummy: Inputs, call: Callable[[Inputs, torch.Tensor], Any], *, warm: bool = True) -> Captured:
    """Capture `call`, which writes ids into the tensor it is given, on copies of `dummy`."""
    static = replace(dummy, **{name: getattr(dummy, name).clone() for name in ("q", "block_table", "seq_lens")})
    out = torch.full((dummy.q.shape[1], dummy.q.shape[0], TOPK), -77, dtype=torch.int32, device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if warm:
            call(static, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(static, out)
    return Captured(static, graph, out)


def plain(inputs: Inputs, out: torch.Tensor) -> None:
    decode(inputs, out=out)


def planned(inputs: Inputs, out: torch.Tensor) -> None:
    """Plan, then two layers with it."""
    plan = li.plan_step(inputs.seq_lens, spec=inputs.spec, max_seq_len=bound_of(inputs))
    decode(inputs, plan=plan)
    decode(inputs, out=out, plan=plan)


def two_ranks(inputs: Inputs, out: torch.Tensor) -> None:
    out.copy_(decode_sharded(*inputs.arguments, world=2, **inputs.rules))


@pytest.mark.parametrize("call", [plain, planned, two_ranks])
def test_a17_captured_on_tiny_dummies(call):
    pages = planted_pages(torch.tensor([0.0, 90.0])[:, None].repeat(1, 4)).to(DEVICE)
    block_table = torch.zeros(4, 512, dtype=torch.int32)
    dummy = Inputs(SPEC, unit_queries(4).to(DEVICE), pages, block_table.to(DEVICE), lengths(1, 1, 1, 1).to(DEVICE), 1)
    captured = capture(dummy, call)
    live_table = block_table.clone()
    live_table[0, 500] = live_table[3, 310] = 1
    live = replace(dummy, block_table=live_table.to(DEVICE), seq_lens=lengths(65_536, 300, 0, 40_000).to(DEVICE))
    want = [{*range(14), 500, 511}, {0, 1, 2}, set(), {*range(14), 310, 312}]
    for _ in range(3):
        ids = captured.replay(live)
        assert chosen(ids.cpu()) == [[row] * 4 for row in want]
        assert_same_rows(ids, decode(live))
        nothing = captured.replay(replace(live, seq_lens=torch.zeros_like(live.seq_lens)))
        assert nothing.eq(-1).all()  # A01b: the batch has drained


@pytest.mark.parametrize("call", [plain, planned])
def test_a01_padded_rows(call):
    values = torch.tensor([1.0, 2, 3])[:, None].repeat(1, 4)
    pages = planted_pages(values).to(DEVICE)
    block_table = table([0, 1, 2], [0, 1, 2]).to(DEVICE)
    dummy = Inputs(SPEC, unit_queries(4).to(DEVICE), pages, block_table, lengths(0, 0).to(DEVICE), 2)
    captured = capture(dummy, call)
    live = replace(dummy, seq_lens=lengths(300, 0).to(DEVICE))
    sets = [[{0, 1, 2}] * 4] * 2 + [[set()] * 4] * 2
    assert chosen(captured.replay(live).cpu()) == sets
    assert chosen(captured.replay(dummy).cpu()) == [[set()] * 4] * 4
    assert chosen(decode(live).cpu()) == sets


# Every program has pages, most have none, none has any.
@pytest.mark.parametrize("tokens", [[9_000, 130, 70_000, 1], [9_000, 130, 300, 1], [0, 0, 0, 0]], ids=["many", "few", "none"])
@pytest.mark.parametrize("with_plan", [False, True])
def test_what_the_kernels_right_before_write(pool, with_plan, tokens):
    """Queries, keys and, without a plan, lengths come late, from kernels that let the next one in early.

    Who reads them before its wait gets those of the layer before; what follows a layer must find them written, too.
    """
    from late_kernel import copy_late

    layers, fresh = 5, 8  # pages that every layer's keys are written to
    generator = torch.Generator().manual_seed(5)
    static = large_inputs(pool, [max(length, 1) for length in tokens], query_len=2)
    own = static.block_table[0, :fresh]
    own.copy_(torch.arange(len(own), dtype=torch.int32))
    static = replace(static, q=static.q.clone(), pages=pool.clone())
    queries = torch.randn(layers, *static.q.shape, generator=generator).bfloat16().to(DEVICE)
    keys = (3 * torch.randn(layers, fresh, BLOCK, DIM, generator=generator)).bfloat16().to(DEVICE)
    seq_lens = lengths(*tokens).to(DEVICE)
    changed = torch.stack([(seq_lens - layer).clamp(min=0) for layer in range(layers)])  # without a plan, from layer to layer
    if with_plan:
        changed = seq_lens.expand(layers, -1).contiguous()
    out = torch.empty(layers, 4, len(static.q), TOPK, dtype=torch.int32, device=DEVICE)
    found = torch.empty_like(queries)

    def step() -> None:
        plan = li.plan_step(static.seq_lens, spec=SPEC, max_seq_len=bound_of(static)) if with_plan else None
        for layer in range(layers):
            if not with_plan:
                copy_late(static.seq_lens, changed[layer])
            for page in range(fresh):
                copy_late(static.pages[page], keys[layer, page])
            copy_late(static.q, queries[layer])
            decode(static, out=out[layer], plan=plan)
            found[layer].copy_(static.q)

    def reset() -> None:
        static.pages.copy_(pool)
        static.q.fill_(NAN)
        static.seq_lens.copy_(changed[0])
        out.fill_(-77)

    want = []
    reset()
    for layer in range(layers):
        static.pages[:fresh] = keys[layer]
        live = replace(static, q=queries[layer], seq_lens=changed[layer])
        torch.cuda.synchronize()
        want.append(torch_selection(live, score(live)))
    reset()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        reset()
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, queries)
        for layer in range(layers):
            assert_same_rows(out[layer], want[layer])


def test_a02_more_rows_than_requests():
    values = torch.tensor([1.0, 2, 3, 4])[:, None].repeat(1, 4)
    q = unit_queries(8)
    q[6:] = NAN
    block_table = table([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]).to(DEVICE)
    seq_lens = lengths(130, 131, 132).to(DEVICE)
    live = Inputs(SPEC, q.to(DEVICE), planted_pages(values).to(DEVICE), block_table, seq_lens, 2)
    out = torch.full((4, 8, TOPK), -77, dtype=torch.int32, device=DEVICE)
    held = torch.full((4, 8), -77, dtype=torch.int32, device=DEVICE)
    sparse = li.SparseTable(block_table, out, held, page_size=128, page_stride=1)
    want = [[{0, 1}] * 4] * 6 + [[set()] * 4] * 2
    assert chosen(decode(live, sparse_table=sparse).cpu()) == want
    assert held.tolist() == [[129, 130, 130, 131, 131, 132, 0, 0]] * 4
    captured = capture(replace(live, seq_lens=torch.zeros_like(seq_lens)), plain)
    assert chosen(captured.replay(live).cpu()) == want


@pytest.mark.parametrize("call", [plain, planned, two_ranks])
def test_a18_helpers_are_gone(pool, call):
    """Buckets captured one after the other; whatever they made is dropped and its memory, if free, overwritten."""
    buckets = [1, 2, 3, 8, 33, 64]
    generator = torch.Generator().manual_seed(18)
    captured, live = [], []
    for size in buckets:
        tokens = (20_000 * torch.rand(size, generator=generator) ** 3).int().tolist()
        made = large_inputs(pool, [20_000, *tokens[1:]])
        live.append(made)
        captured.append(capture(replace(made, seq_lens=torch.ones_like(made.seq_lens)), call))
        gc.collect()
        poison(generator)
    junk = poison(generator)
    for graph, made in zip(captured, live, strict=True):
        ids = graph.replay(made)
        assert_same_rows(ids, torch_selection(made, score(made)))
    assert len(junk) > 0


def poison(generator: torch.Generator) -> list[torch.Tensor]:
    """Fill blocks of many sizes with wild integers, as an allocator may hand out what was freed."""
    blocks = []
    for size in (1, 16, 64, 257, 265, 1_060, 4_096, 1 << 16, 1 << 20, 1 << 22):
        for value in (-1, 0x7FFFFFFF):
            blocks.append(torch.full((size,), value, dtype=torch.int32, device=DEVICE))
        drawn = torch.randint(-(2**31), 2**31, (min(size, 4096),), generator=generator).to(torch.int32)
        blocks.append(drawn.to(DEVICE).repeat(-(-size // 4096)))
    return blocks


def test_a19_nothing_is_compiled_after_the_warmup(pool):
    """The library's warm-up, then captures of any batch."""
    import triton

    li.warmup(SPEC, device=DEVICE, query_lens=(1, 4))
    compiled = []

    def hook(*_: Any, **what: Any) -> None:
        compiled.append(what.get("repr"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
        for size in (1, 2, 16, 17, 33):
            for query_len in (1, 4):
                for call in (plain, planned):
                    live = large_inputs(pool, [65_536, *[300] * (size - 1)], query_len=query_len)
                    captured = capture(replace(live, seq_lens=torch.ones_like(live.seq_lens)), call, warm=False)
                    assert compiled == []
                    assert_same_rows(captured.replay(live), decode(live))
    for rows in (1, 17, 8_192):
        live = large_inputs(pool, [rows])
        q = torch.ones(rows, 4, DIM, dtype=torch.bfloat16, device=DEVICE)
        bounds = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
        li.prefill(q, pool, live.block_table, bounds, live.seq_lens, spec=SPEC)
    assert compiled == []
