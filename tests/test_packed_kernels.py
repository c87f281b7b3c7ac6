# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803 (UPPER names are compile-time constants of kernels)
"""Kernels over fp8 and NVFP4 caches, interpreted on the CPU: the bytes are packed by torch, whose reading of them has tests
of its own, and the scores compared with exact products of what they mean.

What the GPU's own conversions do instead of the arithmetic here is tested on one (test_gpu_packed.py).
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from support import NAN, UNIT_ROUNDOFF, Inputs, dot_bound, random_inputs

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled in this process: test_gpu_packed.py tests them", allow_module_level=True)

import interpreter
import triton
import triton.language as tl

import lightning_indexer as li
from lightning_indexer import reference, torch_backend, triton_backend
from lightning_indexer.kernels.decode import RECENT
from lightning_indexer.kernels.exchange import gather_kernel
from lightning_indexer.kernels.formats import WARPS, e4m3_code, e4m3_of, float_of, key_dim, key_token
from lightning_indexer.peer import FNUZ_NAN_FLIP
from lightning_indexer.spec import IndexerSpec, Shard

interpreter.install()

E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
BYTES = torch.arange(256, dtype=torch.uint8)


@dataclass(frozen=True)
class Case:
    """A cache of a format, and queries."""

    format: str
    queries: torch.dtype = torch.bfloat16
    head_dim: int = 128
    block_size: int = 128
    scaled: bool = False
    heads: int = 2
    query_len: int = 1
    tokens: tuple[int, ...] = (300, 0, 65, 600)
    topk: int = 3

    @property
    def spec(self) -> IndexerSpec:
        return IndexerSpec(num_heads=self.heads, head_dim=self.head_dim, block_size=self.block_size, topk=self.topk)

    def make(self) -> tuple[Inputs, li.IndexCache]:
        """Inputs whose pages are what the cache's bytes mean; tokens that no request holds are NaN."""
        inputs = random_inputs(self.spec, list(self.tokens), heads=self.heads, query_len=self.query_len)
        pages = inputs.pages.float()
        cache = li.IndexCache.empty(len(pages), self.spec, self.format)
        if self.scaled:
            cache = li.IndexCache.wrap(cache.data, self.spec, self.format, torch.full(pages.shape[:2], NAN))
        cache.data.view(torch.uint8).fill_(0x80 if self.format == "fp8_fnuz" else 0x7F)
        written = ~pages.isnan().any(-1)
        slots = torch.arange(written.numel()).view(written.shape)[written]
        cache.write(pages[written], slots)
        q = inputs.q.to(self.queries)
        return replace(inputs, q=q, pages=torch.where(written[..., None], cache.dequantize(), NAN)), cache


CASES = {
    "fp8": Case("fp8"),
    "fp8-e4m3": Case("fp8", E4M3, query_len=2),
    "fp8-scaled": Case("fp8", scaled=True, heads=1),
    "fp8-small": Case("fp8", head_dim=64, block_size=64),
    "fp8-fnuz": Case("fp8_fnuz"),
    "fp8-fnuz-e4m3": Case("fp8_fnuz", FNUZ, block_size=64),
    "nvfp4": Case("nvfp4"),
    "nvfp4-e4m3": Case("nvfp4", E4M3, query_len=4),
    "nvfp4-small": Case("nvfp4", head_dim=64, block_size=64),
    "nvfp4-large": Case("nvfp4", block_size=256, heads=1, tokens=(300, 0, 1100)),
}


def selection(inputs: Inputs, scores: torch.Tensor) -> torch.Tensor:
    spec, lengths = inputs.spec, reference.row_lengths(inputs.seq_lens, inputs.query_len, len(inputs.q))
    return reference.select(scores, lengths, block_size=spec.block_size, topk=spec.topk, local_blocks=spec.local_blocks)


@pytest.mark.parametrize("name", CASES)
def test_scores_and_selections(name):
    """Scores against exact ones; ids, candidates of ranks and a prefill's ids against the selection that the scores make."""
    case = CASES[name]
    inputs, cache = case.make()
    spec, rows, heads = inputs.spec, len(inputs.q), case.heads
    longest = inputs.block_table.shape[1] * spec.block_size
    step = (inputs.q, cache, inputs.block_table, inputs.seq_lens, spec, inputs.query_len, longest)
    wide = replace(inputs, q=inputs.q.float())
    exact = reference.scores(*wide.arguments, block_size=spec.block_size, query_len=inputs.query_len, dtype=torch.float64)
    with interpreter.fake_device(5, topk=spec.topk, vendor="amd"):
        scores = torch.full((heads, rows, inputs.block_table.shape[1]), -77.0)
        triton_backend.score_blocks(*step, Shard(), scores)
        visible = scores != -77
        seen = exact > -torch.inf
        assert torch.equal(visible, seen)
        slack = 3 if case.scaled else 1  # a key's factor is one more rounding here, and was another in the reference
        error = (scores.double() - exact).abs()[seen]
        assert (error <= slack * (dot_bound(wide)[..., : exact.shape[-1]][seen] + UNIT_ROUNDOFF * exact[seen].abs())).all()

        want = selection(inputs, scores)
        ids = torch.full((heads, rows, spec.topk), -77, dtype=torch.int32)
        plan = li.plan_step(inputs.seq_lens, spec=spec, max_seq_len=longest, cache_format=case.format)
        for planned in (None, plan):
            triton_backend.decode(*step, "score", None, ids.fill_(-77), planned, None)
            assert torch.equal(ids, want)
        for rank in range(2):
            own = scores[..., rank::2]
            keys, found = (torch.empty(heads, rows, spec.topk, dtype=torch.int64) for _ in range(2))
            torch_backend.select_keys(own, inputs.seq_lens, spec, inputs.query_len, Shard(rank, 2), keys)
            triton_backend.decode_keys(*step, Shard(rank, 2), "score", found, None, None)
            assert torch.equal(found, keys)
        # Each request's rows are a chunk behind the rest of its tokens; one that has no tokens has no rows.
        some = [r for r, length in enumerate(case.tokens) if length >= case.query_len]
        own = [row for r in some for row in range(r * case.query_len, (r + 1) * case.query_len)]
        bounds = torch.arange(len(some) + 1, dtype=torch.int32) * case.query_len
        chunk = torch.full((heads, len(own), spec.topk), -77, dtype=torch.int32)
        given = inputs.q[own], cache, inputs.block_table[some], bounds, inputs.seq_lens[some]
        triton_backend.prefill(*given, spec, longest, "score", chunk, None)
        assert torch.equal(chunk, want[:, own])


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_by_block_with_a_table(format):
    """Ascending ids: of requests that are selected whole, unscored, and of others; with the sparse table of the ids."""
    inputs, cache = Case(format, heads=1, query_len=2, tokens=(300, 0, 129, 1000)).make()
    rows, longest = len(inputs.q), inputs.block_table.shape[1] * 128
    step = (inputs.q, cache, inputs.block_table, inputs.seq_lens, inputs.spec, 2, longest)
    with interpreter.fake_device(5, topk=3, vendor="amd"):
        scores = torch.full((1, rows, inputs.block_table.shape[1]), -torch.inf)
        triton_backend.score_blocks(*step, Shard(), scores)
        keys, want = torch.empty(1, 1, rows, 3, dtype=torch.int64), torch.empty(1, rows, 3, dtype=torch.int32)
        torch_backend.select_keys(scores, inputs.seq_lens, inputs.spec, 2, Shard(), keys[0])
        attention = torch.arange(inputs.block_table.numel(), dtype=torch.int32).view(inputs.block_table.shape)
        tables = [li.SparseTable.empty(inputs.spec, 1, rows, 16, attention) for _ in range(2)]
        torch_backend.merge_keys(keys, inputs.seq_lens, inputs.spec, 2, "block", tables[0], want)
        plan = li.plan_step(inputs.seq_lens, spec=inputs.spec, max_seq_len=longest, order="block", cache_format=format)
        for planned in (None, plan):
            got = torch.full_like(want, -77)
            triton_backend.decode(*step, "block", tables[1], got, planned, None)
            assert torch.equal(got, want)
            assert torch.equal(tables[1].block_table_out, tables[0].block_table_out)
            assert torch.equal(tables[1].context_lens_out, tables[0].context_lens_out)


@pytest.mark.parametrize(("topk", "heads", "query_len"), [(2, 1, 2), (16, 1, 1), (16, 4, 4), (64, 4, 1)])
def test_more_pages_than_are_selected_from_at_once(topk, heads, query_len):
    """Segments of 36 pages: two rounds of 16 and a rest."""
    assert RECENT.value == 16
    case = Case("fp8", head_dim=64, block_size=64, heads=heads, query_len=query_len, tokens=(4480, 90), topk=topk)
    inputs, cache = case.make()
    spec, rows = inputs.spec, len(inputs.q)
    step = (inputs.q, cache, inputs.block_table, inputs.seq_lens, spec, query_len, inputs.block_table.shape[1] * 64)
    with interpreter.fake_device(2, topk=topk, vendor="amd"):
        scores = torch.full((heads, rows, inputs.block_table.shape[1]), -77.0)
        triton_backend.score_blocks(*step, Shard(), scores)
        ids = torch.full((heads, rows, topk), -77, dtype=torch.int32)
        triton_backend.decode(*step, "score", None, ids, None, None)
    wide = replace(inputs, q=inputs.q.float())
    exact = reference.scores(*wide.arguments, block_size=64, query_len=query_len, dtype=torch.float64)
    seen = exact > -torch.inf
    assert torch.equal(scores != -77, seen)
    assert torch.allclose(scores[seen].double(), exact[seen], rtol=0, atol=1e-3)
    assert torch.equal(ids, selection(inputs, scores))


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_two_tiles_of_columns(format):
    """More query columns than one tile holds: 96."""
    inputs, cache = Case(format, heads=3, query_len=32, tokens=(290, 40)).make()
    longest = inputs.block_table.shape[1] * 128
    step = (inputs.q, cache, inputs.block_table, inputs.seq_lens, inputs.spec, 32, longest)
    with interpreter.fake_device(3, topk=3, vendor="amd"):
        scores = torch.full((3, len(inputs.q), inputs.block_table.shape[1]), -77.0)
        triton_backend.score_blocks(*step, Shard(), scores)
        ids = torch.full((3, len(inputs.q), 3), -77, dtype=torch.int32)
        triton_backend.decode(*step, "score", None, ids, None, None)
    wide = replace(inputs, q=inputs.q.float())
    exact = reference.scores(*wide.arguments, block_size=128, query_len=32, dtype=torch.float64)
    seen = exact > -torch.inf
    assert torch.equal(scores != -77, seen)
    assert torch.allclose(scores[seen].double(), exact[seen], rtol=0, atol=1e-3)
    assert torch.equal(ids, selection(inputs, scores))


@pytest.mark.parametrize("dtype", [E4M3, FNUZ, torch.bfloat16], ids=["fn", "fnuz", "bf16"])
def test_queries_that_look_like_an_empty_box(dtype):
    """All bits set, and all NaN: what is read is NaN where NaN was sent, and else the same; -240 is a number of e4m3fnuz."""
    world, rows, dim = 2, 3, 64
    per_word = 8 // dtype.itemsize
    q = torch.randn(rows, world, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = q.view(torch.uint8).view(rows, world, -1)
    bits[0, 0, :8], bits[0, 0, 8:16], bits[1, 0, 16:24] = 0xFF, 0x80, 0x7F
    boxes = [torch.full((2 * world * rows * dim // per_word,), -1, dtype=torch.int64) for _ in range(world)]
    addresses = torch.tensor([box.data_ptr() for box in boxes])
    steps, failed, report = torch.zeros(2, dtype=torch.int32), *(torch.zeros(1, dtype=torch.int32) for _ in range(2))
    out = torch.zeros(rows, world, dim, dtype=dtype)
    for rank in range(world):  # one after the other: the first one's wait ends at once, the second one finds all there
        own = q[:, rank : rank + 1]
        gather_kernel[(1,)](
            own.view(torch.uint8),
            out.view(torch.uint8),
            addresses,
            steps,
            steps,
            failed,
            report,
            rows,
            own.stride(0) // per_word,
            own.stride(1) // per_word,
            1,
            world,
            1,
            rank,
            world,
            rows,
            0,
            world * rows * dim // per_word,
            0,
            WORDS=dim // per_word,
            FLIP=FNUZ_NAN_FLIP if dtype == FNUZ else 0,
            AUTO=False,
            PDL=False,
        )
        failed.zero_()
    nan = q.float().isnan()
    assert torch.equal(out.float()[~nan], q.float()[~nan])
    # A word of NaNs may come with one of them a number: any of the others makes the products NaN.
    words = nan.view(rows, world, -1, per_word)
    assert (out.float().isnan().view(words.shape).any(-1) == words.any(-1)).all()
    assert words.all(-1).any()


@triton.jit
def _codes(code_ptr, value_ptr, out_ptr, FNUZ: tl.constexpr, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    tl.store(value_ptr + lane, float_of(tl.load(code_ptr + lane), FNUZ))
    tl.store(out_ptr + lane, e4m3_code(tl.load(value_ptr + lane), FNUZ))


@pytest.mark.parametrize("dtype", [E4M3, FNUZ], ids=["fn", "fnuz"])
def test_every_code(dtype):
    values, back = torch.zeros(256), torch.zeros(256, dtype=torch.int32)
    _codes[(1,)](BYTES.int(), values, back, dtype == FNUZ, 256)
    want = BYTES.view(dtype).float()
    assert torch.equal(values.isnan(), want.isnan())
    assert torch.equal(values.nan_to_num(), want.nan_to_num())
    assert torch.equal(back[~want.isnan()], BYTES[~want.isnan()].int())
    assert set(back[want.isnan()].tolist()) <= ({127, 255} if dtype == E4M3 else {128})


@triton.jit
def _round(value_ptr, out_ptr, FNUZ: tl.constexpr, COUNT: tl.constexpr):
    lane = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + lane, e4m3_code(tl.load(value_ptr + lane), FNUZ))


@pytest.mark.parametrize("dtype", [E4M3, FNUZ], ids=["fn", "fnuz"])
def test_rounding_to_e4m3(dtype):
    """All sizes, every middle between two neighbours and its own neighbours, and what saturates."""
    largest = torch.finfo(dtype).max
    codes = BYTES[:127].view(dtype).float()
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middles, torch.full((), way)) for way in (0.0, 1e9)]
    random = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * torch.linspace(-14, 12, 1024).exp2()
    values = torch.cat([codes, middles, *beside, random, torch.tensor([464.0, 1e30, torch.inf, 0.0])])
    values = torch.cat([values, -values, torch.zeros(-2 * len(values) % 256)])
    out = torch.zeros(len(values), dtype=torch.int32)
    _round[(len(values) // 256,)](values, out, dtype == FNUZ, 256)
    assert torch.equal(out.to(torch.uint8), values.clamp(-largest, largest).to(dtype).view(torch.uint8))


@triton.jit
def _products(out_ptr):
    scale = tl.program_id(0)
    code = tl.arange(0, 16)
    tl.store(out_ptr + scale * 16 + code, e4m3_of(code, float_of(scale + code * 0, False)))


def test_every_e2m1_code_with_every_scale():
    out = torch.zeros(256, 16, dtype=torch.int32)
    _products[(256,)](out)
    cache = li.IndexCache.empty(4, IndexerSpec(head_dim=64, block_size=64), "nvfp4")
    pairs = torch.arange(0, 16, 2) + 16 * torch.arange(1, 16, 2)
    cache.data[..., :32] = pairs.to(torch.uint8).repeat(4)
    cache.data[..., 32:] = BYTES.view(4, 64, 1)
    want = cache.dequantize().view(256, 64)[:, :16]
    got = out.to(torch.uint8).view(E4M3).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@triton.jit
def _places(dim_ptr, token_ptr, BLOCK: tl.constexpr):
    tl.store(dim_ptr + tl.arange(0, 64), key_dim(128, "fp8"))
    tl.store(token_ptr + tl.arange(0, BLOCK), key_token(BLOCK, "fp8"))


@pytest.mark.parametrize("block", [64, 128, 256])
def test_no_key_moves_between_threads(block):
    """The places of an operand that a thread holds are the 16 dims and the rows that it loads."""
    dims, tokens = torch.zeros(64, dtype=torch.int32), torch.zeros(block, dtype=torch.int32)
    _places[(1,)](dims, tokens, block)
    assert sorted(dims.tolist()) == list(range(64))
    assert sorted(tokens.tolist()) == list(range(block))
    for place, dim in enumerate(dims.tolist()):
        assert place % 8 // 2 == dim // 16  # an operand's pairs go around four threads; each loads 16 dims in a row
    warps = WARPS.value
    for row, token in enumerate(tokens.tolist()):
        assert (row // 16 % warps, row % 8) == (token // 8 % warps, token % 8)  # warp, and row within it
