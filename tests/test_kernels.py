# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803 (UPPER names are compile-time constants of kernels)
"""The Triton kernels on CPU tensors, in Triton's interpreter: what they compute, not how fast.

A selection is right if it is the contract's, made from the kernel's own scores, bit for bit; the scores are right if they are
within what float32 allows of exact ones.
"""

import os
from dataclasses import dataclass, field, replace

import pytest
import torch
from support import (
    INF,
    NAN,
    OUT_OF_CACHE,
    UNIT_ROUNDOFF,
    Inputs,
    dot_bound,
    lengths,
    planted_pages,
    random_inputs,
    table,
    unit_queries,
)

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled in this process: test_gpu.py tests them", allow_module_level=True)

import interpreter
import triton
import triton.language as tl

import lightning_indexer as li
from lightning_indexer import key, ops, reference, torch_backend, triton_backend
from lightning_indexer.kernels import common
from lightning_indexer.kernels import key as device_key
from lightning_indexer.spec import IndexerSpec, Shard
from lightning_indexer.workspace import StepPlan, Workspace

interpreter.install()
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in add:RuntimeWarning")  # of signalling NaNs

SMALL = {"block_size": 64, "head_dim": 64}  # pages that the interpreter is quick with


def spec_of(**rules) -> IndexerSpec:
    return IndexerSpec(num_heads=1, **{**SMALL, **rules})


# The repairs of the interpreter.


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, out_dtype=tl.float32, input_precision="ieee"))


@triton.jit
def round_kernel(x_ptr, out_ptr, back_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    narrow = tl.load(x_ptr + n).to(tl.bfloat16)
    tl.store(out_ptr + n, narrow)
    tl.store(back_ptr + n, narrow.to(tl.float32))


@triton.jit
def max_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    found = tl.reduce(x, AXIS, common.nan_max)
    tl.store(out_ptr + tl.arange(0, N if AXIS == 0 else M), found)


@triton.jit
def sort_kernel(x_ptr, top_ptr, sorted_ptr, own_top_ptr, own_sorted_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(top_ptr + m[:, None] * K + k[None, :], tl.topk(x, K))
    tl.store(own_top_ptr + m[:, None] * K + k[None, :], tl.standard.topk(x, K))
    tl.store(sorted_ptr + m[:, None] * N + n[None, :], tl.sort(x, dim=1))
    tl.store(own_sorted_ptr + m[:, None] * N + n[None, :], tl.standard.sort(x, dim=1))


@triton.jit
def count_kernel(count_ptr, out_ptr):
    total = 0
    for step in tl.range(0, tl.load(count_ptr), num_stages=2):
        total += step
    tl.store(out_ptr, total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("columns", [1, 16])
def test_interpreter_dot(dtype, columns):
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(64, 128, generator=generator).to(dtype), torch.randn(128, columns, generator=generator).to(dtype)
    out = torch.empty(64, columns)
    dot_kernel[(1,)](a, b, out, 64, 128, columns)
    assert torch.equal(out, (a.double() @ b.double()).float())


def test_interpreter_dot_does_not_mind_the_order_of_its_operands():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(128, 128, generator=generator).bfloat16() for _ in range(2))
    out, swapped = torch.empty(128, 128), torch.empty(128, 128)
    dot_kernel[(1,)](a, b.t().contiguous(), out, 128, 128, 128)
    dot_kernel[(1,)](b, a.t().contiguous(), swapped, 128, 128, 128)
    assert torch.equal(out, swapped.t())


def test_interpreter_rounds_to_nearest_even():
    """Every bfloat16, and what lies between it and the next: a tie, and one bit to either side."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    codes = torch.cat([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = codes.to(torch.int32).view(torch.float32)  # wraps to negative numbers
    size = triton.next_power_of_2(len(values))
    values = torch.nn.functional.pad(values, (0, size - len(values)))
    out, back = torch.empty(size, dtype=torch.bfloat16), torch.empty(size)
    round_kernel[(1,)](values, out, back, size)
    numbers = ~values.isnan()
    assert torch.equal(out.isnan(), ~numbers)
    assert torch.equal(out[numbers].view(torch.int16), values[numbers].bfloat16().view(torch.int16))
    assert torch.equal(back[numbers].view(torch.int32), values[numbers].bfloat16().float().view(torch.int32))


@pytest.mark.parametrize("axis", [0, 1])
def test_interpreter_nan_max(axis):
    values = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    values[2, 3] = NAN
    values[:, 5] = -INF
    values[7, 6] = INF
    out = torch.empty(8 if axis == 0 else 16)
    max_kernel[(1,)](values, out, 16, 8, axis)
    assert torch.equal(out.isnan(), values.isnan().any(axis))
    assert torch.equal(out.nan_to_num(7.0), values.amax(axis).nan_to_num(7.0))


@pytest.mark.parametrize("keep", [2, 16])
def test_interpreter_sorts(keep):
    """As Triton's own do, and as torch does."""
    values = torch.randint(-(2**62), 2**62, (4, 32), generator=torch.Generator().manual_seed(4))
    values[1] = values[1, 0]
    outs = [torch.empty(4, size, dtype=torch.int64) for size in (keep, 32, keep, 32)]
    sort_kernel[(1,)](values, *outs, 4, 32, keep)
    top, ascending = values.topk(keep).values, values.sort().values
    assert [torch.equal(out, want) for out, want in zip(outs, (top, ascending) * 2, strict=True)] == [True] * 4


def test_interpreter_loops_to_a_loaded_bound():
    out = torch.empty(1, dtype=torch.int32)
    count_kernel[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.item() == 10


# The key.


@triton.jit
def key_kernel(
    score_ptr, block_ptr, visible_ptr, key_ptr, id_ptr, init_blocks, local_blocks, N: tl.constexpr, HIGHER: tl.constexpr
):
    n = tl.arange(0, N)
    keys = device_key.pack_keys(
        tl.load(score_ptr + n), tl.load(block_ptr + n), tl.load(visible_ptr + n), init_blocks, local_blocks, HIGHER
    )
    tl.store(key_ptr + n, keys)
    tl.store(id_ptr + n, device_key.key_blocks(keys, HIGHER))


def float_classes() -> torch.Tensor:
    """Both signs of the edges of every class of float32, NaNs of several payloads, and random bits."""
    magnitudes = [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFE, 0x7F7FFFFF]
    magnitudes += [0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]
    edges = torch.tensor([bits | sign for bits in magnitudes for sign in (0, 1 << 31)])
    drawn = torch.randint(0, 1 << 32, (96,), generator=torch.Generator().manual_seed(4))
    return torch.cat([edges, drawn]).to(torch.int32).view(torch.float32)  # 128


@pytest.mark.parametrize("tie_break", ["lower", "higher"])
@pytest.mark.parametrize(("init", "local"), [(0, 0), (0, 1), (2, 0), (3, 2)])
def test_device_key_is_the_key(tie_break, init, local):
    scores = float_classes()
    last = key.MAX_BLOCKS - 1
    blocks = torch.tensor([0, 1, 2, 3, 77, 1 << 24, 1 << 27, last - 1, last])
    visible = torch.tensor([0, 1, 3, 80, (1 << 24) + 1, last, last + 1])
    cases = torch.cartesian_prod(torch.arange(len(scores)), blocks, visible)
    size = triton.next_power_of_2(len(cases))
    place, blocks, visible = torch.nn.functional.pad(cases, (0, 0, 0, size - len(cases))).unbind(1)
    scores, blocks, visible = scores[place], blocks.contiguous(), visible.contiguous()
    keys, ids = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.int32)
    arguments = scores, blocks.to(torch.int32), visible.to(torch.int32), keys, ids
    key_kernel[(1,)](*arguments, init, local, size, tie_break == "higher")
    want = key.pack_keys(scores, blocks, visible, init_blocks=init, local_blocks=local, tie_break=tie_break)
    assert torch.equal(keys, want)
    assert torch.equal(ids.long(), torch.where(blocks < visible, blocks, -1))


# Decode.


@dataclass(frozen=True)
class Case:
    """A decode step, and the device that it runs on."""

    tokens: list[int]
    spec: IndexerSpec
    heads: int = 1
    query_len: int = 1
    padding: int = 0  # rows past R*Q
    programs: int = 3
    order: str = "score"
    dtype: torch.dtype = torch.bfloat16
    values: str = "normal"
    table: tuple[int, int] | None = None  # page size and stride of a sparse table
    shards: list[tuple[int, int]] = field(default_factory=list)
    planned: bool = True  # with a plan and poisoned scratch, then without; else only the former

    def inputs(self) -> Inputs:
        """Rows past R*Q, unwritten tokens and unused pages are NaN; unused columns of the table are outside the cache."""
        rows = len(self.tokens) * self.query_len + self.padding
        made = random_inputs(
            self.spec,
            self.tokens,
            heads=self.heads,
            query_len=self.query_len,
            rows=rows,
            dtype=self.dtype,
            values=self.values,
            seed=len(self.tokens) + self.spec.topk,
        )
        made.q[rows - self.padding :] = NAN
        return made


CASES = {
    "one-short": Case([300], IndexerSpec(num_heads=1, topk=16), padding=1),
    "one-program": Case([700], spec_of(topk=3), programs=1),
    "k1": Case([1200, 700], spec_of(topk=1, local_blocks=0), shards=[(0, 2), (1, 3)]),
    "k2-higher-by-block": Case([64 * 9, 130], spec_of(topk=2, tie_break="higher"), heads=2, order="block", programs=6),
    "k3-fp16": Case([900, 0], spec_of(topk=3), heads=4, query_len=3, dtype=torch.float16, shards=[(3, 4)]),
    "k16-init-local": Case([64 * 40 + 1], spec_of(topk=16, init_blocks=2, local_blocks=3), heads=2, query_len=2, padding=3),
    "k64": Case([64 * 70, 90], spec_of(topk=64, init_blocks=1), table=(16, 4), order="block", shards=[(0, 1)]),
    "k64-two-tiles": Case([64 * 3], spec_of(topk=64), query_len=17, programs=2, planned=False),
    "block256": Case([256 * 7 - 3, 256], IndexerSpec(num_heads=1, block_size=256, head_dim=64, topk=5), table=(32, 8)),
    "block64-dim128": Case([64 * 8], IndexerSpec(num_heads=1, block_size=64, topk=4), heads=5, table=(32, 3)),
    "block256-dim128": Case([256 * 5], IndexerSpec(num_heads=1, block_size=256, topk=2, init_blocks=1), dtype=torch.float16),
    "columns-65": Case([64 * 6 + 5], spec_of(topk=2), heads=5, query_len=13, padding=2, planned=False, shards=[(0, 1)]),
    "columns-66-table": Case([64 * 3], spec_of(topk=3), heads=33, query_len=2, table=(16, 11), planned=False),
    "columns-48": Case([100, 64 * 30], spec_of(topk=8), heads=3, query_len=16, programs=16, planned=False),
    "many-candidates": Case([50, 64 * 100], spec_of(topk=8), programs=12, planned=False, shards=[(0, 1)]),
    "few-blocks-need-no-scores": Case(
        [64 * 3, 64 * 20, 64 * 5, 64 * 5 + 1, 0],
        spec_of(topk=5, init_blocks=1),
        heads=2,
        query_len=2,
        padding=1,
        order="block",
        table=(32, 5),
    ),
    "no-scores-at-all": Case([64 * 3, 64, 130], spec_of(topk=5, tie_break="higher"), heads=2, order="block", programs=2),
    "table-page16": Case([2500, 130, 0], IndexerSpec(num_heads=1, topk=4), table=(16, 8), padding=2),
    "table-by-block": Case([64 * 11], spec_of(topk=4, local_blocks=2), heads=2, query_len=4, table=(16, 5), order="block"),
    "zero-in-the-middle": Case([0, 500, 0, 0, 64, 0], spec_of(topk=5), heads=2, table=(32, 2), shards=[(1, 2)]),
    "all-zero": Case([0, 0, 0], spec_of(topk=5), heads=2, query_len=2, padding=1, table=(16, 4), shards=[(0, 2)]),
    "longer-query-than-request": Case([2, 1, 70], spec_of(topk=4), heads=2, query_len=4, table=(64, 1), shards=[(1, 2)]),
    "one-long-among-short": Case([40, 30, 20, 64 * 60, 10], spec_of(topk=16), programs=6, order="block", shards=[(2, 3)]),
    "as-many-requests-as-pages": Case([1] * 7, spec_of(topk=2), heads=2, programs=6, padding=1),
    "more-requests-than-looked-at-at-once": Case([5, *[0] * 127, 70, 9], spec_of(topk=2), planned=False),
    "ties-lower": Case([64 * 30, 64 * 7], spec_of(topk=5, local_blocks=0), heads=2, values="ties", shards=[(0, 3)]),
    "ties-higher": Case([64 * 30], spec_of(topk=5, tie_break="higher", init_blocks=2), heads=2, values="ties", programs=6),
}


def score(inputs: Inputs, shard: Shard = Shard(), longest: int | None = None) -> torch.Tensor:  # noqa: B008
    """Scores of the kernel `[H, T, L]`; -77 where it wrote nothing."""
    rows, heads, _ = inputs.q.shape
    longest = inputs.block_table.shape[1] * inputs.spec.block_size if longest is None else longest
    out = torch.full((heads, rows, shard.width(-(-longest // inputs.spec.block_size))), -77.0)
    cache = li.IndexCache.wrap(inputs.pages, inputs.spec)
    triton_backend.score_blocks(
        inputs.q, cache, inputs.block_table, inputs.seq_lens, inputs.spec, inputs.query_len, longest, shard, out
    )
    return out


def candidates(inputs: Inputs, shard: Shard) -> torch.Tensor:
    longest = inputs.block_table.shape[1] * inputs.spec.block_size
    cache = li.IndexCache.wrap(inputs.pages, inputs.spec)
    keys = torch.full((inputs.q.shape[1], inputs.q.shape[0], inputs.spec.topk), -77, dtype=torch.int64)
    step = (inputs.q, cache, inputs.block_table, inputs.seq_lens, inputs.spec, inputs.query_len, longest)
    triton_backend.decode_keys(*step, shard, "score", keys, None, None)
    return keys


def decode(
    inputs: Inputs,
    order: str = "score",
    sparse: li.SparseTable | None = None,
    plan: StepPlan | None = None,
    workspace: Workspace | None = None,
    longest: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, heads, _ = inputs.q.shape
    longest = inputs.block_table.shape[1] * inputs.spec.block_size if longest is None else longest
    out = torch.full((heads, rows, inputs.spec.topk), -77, dtype=torch.int32) if out is None else out
    cache = li.IndexCache.wrap(inputs.pages, inputs.spec)
    triton_backend.decode(
        inputs.q,
        cache,
        inputs.block_table,
        inputs.seq_lens,
        inputs.spec,
        inputs.query_len,
        longest,
        order,
        sparse,
        out,
        plan,
        workspace,
    )
    return out


def plan_of(inputs: Inputs, order: str = "score", longest: int | None = None) -> StepPlan:
    longest = inputs.block_table.shape[1] * inputs.spec.block_size if longest is None else longest
    return li.plan_step(inputs.seq_lens, spec=inputs.spec, max_seq_len=longest, order=order)


def rules_of(spec: IndexerSpec) -> dict:
    return {
        "block_size": spec.block_size,
        "topk": spec.topk,
        "init_blocks": spec.init_blocks,
        "local_blocks": spec.local_blocks,
        "tie_break": spec.tie_break,
    }


def selection(inputs: Inputs, scores: torch.Tensor, order: str = "score") -> torch.Tensor:
    """The contract's selection from given scores."""
    row_lengths = reference.row_lengths(inputs.seq_lens, inputs.query_len, len(inputs.q))
    return reference.select(scores, row_lengths, order=order, **rules_of(inputs.spec))


def empty_table(inputs: Inputs, page_size: int, stride: int, *, flat: bool = False) -> li.SparseTable:
    """Outputs with wild numbers; 2-D and 1-D if `flat`. Attention pages are other pages than the index cache's."""
    rows, heads, _ = inputs.q.shape
    width = inputs.spec.topk * inputs.spec.block_size // page_size
    out = torch.full((heads, rows, width), -77, dtype=torch.int32)
    held = torch.full((heads, rows), -77, dtype=torch.int32)
    pages = torch.arange(inputs.block_table.numel(), dtype=torch.int32).flip(0).view(inputs.block_table.shape)
    return li.SparseTable(pages, out[0] if flat else out, held[0] if flat else held, page_size, stride)


def assert_table(inputs: Inputs, ids: torch.Tensor, sparse: li.SparseTable) -> None:
    """Every row of the sparse table against the contract's, for given ids."""
    rows, heads, _ = inputs.q.shape
    row_lengths = reference.row_lengths(inputs.seq_lens, inputs.query_len, rows)
    out = sparse.block_table_out.view(heads, rows, -1)
    held = sparse.context_lens_out.view(heads, rows)
    for head in range(heads):
        for row, length in enumerate(row_lengths):
            request = min(row // inputs.query_len, len(inputs.seq_lens) - 1)
            pages, count = reference.sparse_row(
                ids[head, row].tolist(),
                length,
                sparse.block_table[request].tolist(),
                block_size=inputs.spec.block_size,
                page_size=sparse.page_size,
                page_stride=sparse.page_stride,
            )
            assert out[head, row].tolist() == pages + [0] * (out.shape[2] - len(pages)), f"row {row}, head {head}"
            assert held[head, row].item() == count, f"row {row}, head {head}"


def assert_same_rows(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits of `[H, T, ...]`; otherwise the first row that differs."""
    assert got.shape == want.shape
    integers = {4: torch.int32, 8: torch.int64}[got.element_size()]
    same = (got.view(integers) == want.to(got.dtype).view(integers)).flatten(2).all(-1)
    if not same.all():
        head, row = (~same).nonzero()[0].tolist()
        raise AssertionError(f"head {head}, row {row}: {got[head, row].tolist()}, expected {want[head, row].tolist()}")


def assert_scores(inputs: Inputs, scores: torch.Tensor) -> None:
    """Within float32's bound of exact scores where visible, nothing written elsewhere."""
    block = inputs.spec.block_size
    exact = reference.scores(*inputs.arguments, block_size=block, query_len=inputs.query_len, dtype=torch.float64)
    row_lengths = torch.tensor(reference.row_lengths(inputs.seq_lens, inputs.query_len, len(inputs.q)))
    visible = (torch.arange(exact.shape[-1]) < ((row_lengths + block - 1) // block)[:, None]).expand_as(exact)
    assert scores[~visible].eq(-77).all()
    assert scores[visible].isfinite().all()
    error = (scores.double() - exact).abs()[visible]
    assert (error <= dot_bound(inputs)[visible] + UNIT_ROUNDOFF * exact[visible].abs()).all()


@pytest.mark.parametrize("name", CASES)
def test_decode(name):
    """Scores, candidates of shards, and ids with the sparse table, with a plan and without."""
    case = CASES[name]
    inputs = case.inputs()
    with interpreter.fake_device(case.programs, topk=case.spec.topk):
        scores = score(inputs)
        assert_scores(inputs, scores)
        want = selection(inputs, scores, case.order)
        workspace = Workspace(case.spec, max_requests=len(case.tokens), max_columns=case.query_len * case.heads, device="cpu")
        workspace.keys.fill_(2**62 - 1)  # would win if it were looked at
        for plan, scratch in ((plan_of(inputs, case.order), workspace), (None, None))[: 2 if case.planned else 1]:
            sparse = None if case.table is None else empty_table(inputs, *case.table, flat=case.heads == 1)
            assert_same_rows(decode(inputs, case.order, sparse, plan, scratch), want)
            if sparse is not None:
                assert_table(inputs, want, sparse)
        for rank, world in case.shards:
            shard = Shard(rank, world)
            own = scores if world == 1 else score(inputs, shard)
            dense = torch.nn.functional.pad(scores, (0, world), value=-77.0)[..., rank::world][..., : own.shape[-1]]
            assert_same_rows(own, dense)
            keys = torch.empty(*own.shape[:2], inputs.spec.topk, dtype=torch.int64)
            torch_backend.select_keys(own, inputs.seq_lens, inputs.spec, inputs.query_len, shard, keys)
            assert_same_rows(candidates(inputs, shard), keys)


@triton.jit
def top_kernel(
    source_ptr, out_ptr, runs, width, stride, KEEP: tl.constexpr, FEW: tl.constexpr, SOME: tl.constexpr, MANY: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    best = common.top_of(source_ptr, runs, width, stride, KEEP, FEW, SOME, MANY, MOST)
    tl.store(out_ptr + tl.arange(0, KEEP)[None, :], best)


@pytest.mark.parametrize("runs_and_width", [
    (0, 16), (1, 1), (8, 16), (9, 15), (16, 16), (33, 16), (128, 4), (129, 4), (171, 3), (255, 4), (256, 4), (257, 4),
    (257, 2), (256, 5), (300, 8), (512, 8), (513, 8), (513, 7), (256, 16), (300, 16), (520, 16),
], ids=str)  # fmt: skip
def test_best_of_runs(runs_and_width):
    """Every way to the first 16 of so many runs of so many candidates, at the sizes that GPUs have."""
    (runs, width), keep, stride = runs_and_width, 16, 16
    generator = torch.Generator().manual_seed(runs * 16 + width)
    for empty in (0.0, 0.5, 0.99):
        keys = torch.randperm(1 << 16, generator=generator)[: runs * width].view(runs, width) + (1 << 40)
        keys = torch.where(torch.rand(runs, width, generator=generator) < empty, 0, keys)
        first = keys.argmax(1, keepdim=True)
        keys = keys.scatter(1, first, keys[:, :1]).index_copy(1, torch.tensor([0]), keys.amax(1, keepdim=True))
        source = torch.full((runs + 1, stride), 1 << 50)  # what no run has
        source[:runs, :width] = keys
        want = torch.nn.functional.pad(keys.flatten().sort(descending=True).values[:keep], (0, max(0, keep - keys.numel())))
        few, second, many, most = triton_backend.CANDIDATES
        for some in (second, few):
            out = torch.empty(keep, dtype=torch.int64)
            top_kernel[(1,)](source, out, runs, width, stride, keep, few, some, many, most)
            assert torch.equal(out, want)


# In the last two the 80 pages of the long request lie in 55 and 65 runs, which pairs do not divide: behind the 55 comes a run
# of another request, and 33 pairs are one more than two sorts take.
@pytest.mark.parametrize(
    ("topk", "programs", "values"),
    [(2, 41, "normal"), (3, 12, "ties"), (4, 41, "ties"), (4, 58, "normal"), (4, 69, "normal")],
)
def test_many_runs_of_candidates(topk, programs, values):
    """More than are sorted at once: of some runs, or pairs of them, by their largest; a long request beside short ones."""
    spec = spec_of(topk=topk)
    inputs = random_inputs(spec, [64 * 80 - 9, 1, 64 * 3], heads=2, query_len=2, values=values)
    with interpreter.fake_device(programs, topk=4):
        ids = li.decode(*inputs.arguments, **inputs.rules)
        scores = li.score_blocks(*inputs.arguments, **inputs.rules)
    assert_same_rows(ids, selection(inputs, scores))


@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize("shard", [Shard(), Shard(2, 4), Shard(1, 3, "page")], ids=str)
def test_no_column_past_the_blocks_is_read(shard, programs):
    """Of a request's row in the table a rank reads its own blocks that are seen; by page all, to know whose they are."""
    tokens = [64 * 3, 0, 64 * 5 + 1, 1, 64, 64 * 9]
    blocks = [3, 0, 6, 1, 1, 9]
    inputs = random_inputs(spec_of(topk=2), tokens)
    width, by_page = inputs.block_table.shape[1], shard.by == "page"
    every = 1 if by_page else shard.world
    seen = {r * width + block for r, count in enumerate(blocks) for block in range(shard.rank % every, count, every)}
    cache = li.IndexCache.wrap(inputs.pages, inputs.spec)
    keys = torch.empty(inputs.q.shape[1], len(inputs.q), 2, dtype=torch.int64)
    step = inputs.q, cache, inputs.block_table, inputs.seq_lens, inputs.spec, 1, width * 64, shard, "score", keys
    with interpreter.fake_device(programs), interpreter.reads_of(inputs.block_table) as read:
        plan = li.plan_step(
            inputs.seq_lens, spec=inputs.spec, max_seq_len=width * 64, shard=shard, block_table=inputs.block_table
        )
        assert read == (seen if by_page else set())
        li.score_blocks(*inputs.arguments, **inputs.rules, shard=shard)
        assert read == seen
        for planned in (plan,) if by_page else (plan, None):
            read.clear()
            triton_backend.decode_keys(*step, planned, None)
            assert read == (set() if by_page else seen)


def test_plan_is_an_even_split():
    """Shares follow each other, differ by at most a page, and begin in the request that holds their first page.

    One program of `fake_device` stays idle unless there are three pages for each.
    """
    inputs = random_inputs(spec_of(topk=2), [64 * 3, 0, 1, 64 * 20, 0, 130])
    counts = [3, 0, 1, 20, 0, 3]
    total = sum(counts)
    for programs, working in ((1, 1), (5, 5), (9, 9), (10, 9), (40, 39)):
        with interpreter.fake_device(programs):
            plan = plan_of(inputs)
        shares = plan.shares.tolist()
        assert plan.before.tolist() == [sum(counts[:request]) for request in range(7)]
        used = min(working, total)
        assert shares[0][0] == 0
        assert [share[0] for share in shares[1:used]] == [share[1] for share in shares[: used - 1]]
        assert shares[used - 1][1] == total
        sizes = [end - first for first, end, *_ in shares[:used]]
        assert max(sizes) - min(sizes) <= 1
        assert all(first == end for first, end, *_ in shares[used:programs])
        assert all(share[5] == 1 for share in shares)  # nobody shares the work
        for first, _, request, before, length, _ in shares[:used]:
            assert before == sum(counts[:request])
            assert length == inputs.seq_lens[request]
            assert before <= first < before + counts[request]


def test_plan_of_a_shard():
    inputs = random_inputs(spec_of(topk=2), [64 * 7, 1, 130, 0])
    with interpreter.fake_device(3):
        plan = li.plan_step(inputs.seq_lens, spec=inputs.spec, max_seq_len=64 * 5, shard=Shard(1, 3))
    assert plan.before.tolist() == [0, 2, 2, 3, 3]  # blocks 1 and 4; none; 1; none


@pytest.mark.parametrize("order", ["score", "block"])
def test_plan_shares_a_step_past_the_threshold(order):
    """Pages count for all ranks together; in block order a request of up to K blocks is one page."""
    tokens = [64 * 7, 1, 130, 0]
    inputs = random_inputs(spec_of(topk=3), tokens)
    work = 7 + 1 + (3 if order == "score" else 1)
    shard = Shard(1, 3)
    for threshold, ranks in ((work - 1, 3), (work, 1)):
        with interpreter.fake_device(4):
            plan = ops.make_plan(inputs.seq_lens, inputs.spec, 64 * 7, order, shard, threshold, False, None)
        counts = [2, 0, 1, 0] if ranks == 3 else [7, 1, work - 8, 0]
        assert plan.shares[:, 5].tolist() == [ranks] * 4
        assert plan.before.tolist() == [sum(counts[:request]) for request in range(5)]


def test_not_a_number_and_infinite_keys():
    inputs = random_inputs(spec_of(topk=16, local_blocks=0), [64 * 20, 64 * 3], heads=2, query_len=2)
    for block, value in enumerate((NAN, INF, -INF, NAN, INF)):
        inputs.pages[inputs.block_table[0, 2 * block + 3], 5, 7] = value
    inputs.pages[inputs.block_table[1, 0], :, 3] = -INF  # a block of nothing but infinities
    with interpreter.fake_device(6):
        scores = score(inputs)
        ids = decode(inputs)
    exact = reference.scores(*inputs.arguments, block_size=64, query_len=2)
    visible = scores != -77
    assert torch.equal(scores.isnan(), exact.isnan())
    for infinity in (INF, -INF):
        assert torch.equal((scores == infinity) & visible, (exact == infinity) & visible)
    assert_same_rows(ids, selection(inputs, scores))


def test_page_ids_outside_the_cache_are_clamped():
    inputs = random_inputs(spec_of(topk=3), [64 * 7])
    inputs.block_table[0, :7] = torch.tensor([-1, OUT_OF_CACHE, 3, -(2**31), 123456, 0, 9], dtype=torch.int32)
    inputs.pages[:] = torch.randn(inputs.pages.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    clamped = replace(inputs, block_table=inputs.block_table.clamp(0, len(inputs.pages) - 1))
    with interpreter.fake_device(3):
        assert_same_rows(score(inputs), score(clamped))
        assert_same_rows(decode(inputs), selection(clamped, score(clamped)))


@pytest.mark.parametrize("query_len", [1, 3])
def test_lengths_past_the_bound_count_as_the_bound(query_len):
    inputs = random_inputs(spec_of(topk=3), [64 * 5, 64 * 12, 70], query_len=query_len, heads=2)
    longest = 64 * 5 + 10
    bounded = replace(inputs, seq_lens=inputs.seq_lens.clamp(max=longest))
    with interpreter.fake_device(3):
        scores = score(bounded, longest=longest)
        assert_same_rows(score(inputs, longest=longest), scores)
        assert_same_rows(decode(inputs, longest=longest), selection(bounded, scores))
        planned = decode(inputs, longest=longest, plan=plan_of(inputs, longest=longest))
        assert_same_rows(planned, selection(bounded, scores))


def test_more_rows_than_requests():
    """A02: rows 6 and 7 belong to no request; row 3 of the table does not exist."""
    inputs = Inputs(
        spec=IndexerSpec(),
        q=unit_queries(8),
        pages=planted_pages(torch.tensor([1.0, 2, 3, 4])[:, None].repeat(1, 4)),
        block_table=table([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]),
        seq_lens=lengths(130, 131, 132),
        query_len=2,
    )
    inputs.q[6:] = NAN
    sparse = empty_table(inputs, 128, 1)
    with interpreter.fake_device(3):
        ids = decode(inputs, "block", sparse)
    assert ids[..., :2].tolist() == [[[0, 1]] * 6 + [[-1, -1]] * 2] * 4
    assert ids[..., 2:].eq(-1).all()
    assert sparse.context_lens_out.tolist() == [[129, 130, 130, 131, 131, 132, 0, 0]] * 4


@pytest.mark.parametrize("what", ["q", "seq_lens", "block_table", "cache", "out"])
def test_views(what):
    """A12: arguments that are slices of larger buffers give what contiguous copies give."""
    inputs = random_inputs(spec_of(topk=3), [64 * 6, 64 * 2 + 5], heads=2)
    with interpreter.fake_device(3):
        want = decode(inputs)
        out = None
        if what == "q":
            buffer = torch.full((2, 512), NAN, dtype=torch.bfloat16)
            view = buffer[:, 256:384].view(2, 2, 64)
            view.copy_(inputs.q)
            inputs = replace(inputs, q=view)
        elif what == "seq_lens":
            buffer = torch.full((2, 3), 0, dtype=torch.int32)
            buffer[:, 1] = inputs.seq_lens
            inputs = replace(inputs, seq_lens=buffer[:, 1])
        elif what == "block_table":
            buffer = torch.full((2, 13), OUT_OF_CACHE, dtype=torch.int32)
            buffer[:, 1 : 1 + inputs.block_table.shape[1]] = inputs.block_table
            inputs = replace(inputs, block_table=buffer[:, 1 : 1 + inputs.block_table.shape[1]])
        elif what == "cache":
            buffer = torch.full((len(inputs.pages), 3, 64, 64), NAN, dtype=torch.bfloat16)
            buffer[:, 1] = inputs.pages
            inputs = replace(inputs, pages=buffer[:, 1])
        else:
            out = torch.full((4, 2, 3), -77, dtype=torch.int32).transpose(0, 1)[:, :2]
        assert_same_rows(decode(inputs, out=out).contiguous(), want)


def test_workspace_is_reused():
    """Different calls, one after the other: what one leaves in the scratch does not matter to the next."""
    names = ["one-long-among-short", "k3-fp16", "zero-in-the-middle"]
    with interpreter.fake_device(6):
        workspace = Workspace(spec_of(topk=16), max_requests=6, max_columns=12, device="cpu")
        for name in [*names, names[0]]:
            case = CASES[name]
            inputs = case.inputs()
            want = selection(inputs, score(inputs), case.order)
            assert_same_rows(decode(inputs, case.order, workspace=workspace), want)


def test_no_rows_and_no_requests():
    """A20b: empty tensors stay empty; rows without any request get -1."""
    spec = spec_of(topk=3)
    nothing = random_inputs(spec, [], heads=2)
    with interpreter.fake_device(3):
        assert decode(nothing).shape == (2, 0, 3)
        padding = random_inputs(spec, [], heads=2, rows=3)
        assert decode(padding).eq(-1).all()
        assert candidates(padding, Shard()).eq(0).all()


# Selection from scores, and the merge of ranks.


def wild_scores(heads: int, rows: int, width: int, seed: int) -> torch.Tensor:
    """Numbers that often tie, infinities, zeros of both signs and NaNs of both signs."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-6, 7, (heads, rows, width), generator=generator).float()
    special = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-42, 3e38])
    where = torch.rand(scores.shape, generator=generator) < 0.2
    scores[where] = special[torch.randint(len(special), (int(where.sum()),), generator=generator)]
    return scores


SELECT = {
    "k1": ({"topk": 1, "local_blocks": 0}, [64 * 5, 64 * 3], 1, Shard()),
    "k5-two-rounds": ({"topk": 5, "init_blocks": 1}, [64 * 300, 7, 0], 1, Shard()),
    "k16-higher": ({"topk": 16, "tie_break": "higher", "local_blocks": 2}, [64 * 40], 3, Shard()),
    "k64": ({"topk": 64}, [64 * 100], 1, Shard()),
    "k3-rank-2-of-3": ({"topk": 3, "init_blocks": 2}, [64 * 50, 64, 130], 2, Shard(2, 3)),
    "k16-rank-3-of-4": ({"topk": 16}, [64 * 70, 64 * 2], 1, Shard(3, 4)),
}


@pytest.mark.parametrize("name", SELECT)
def test_select_keys(name):
    rules, tokens, query_len, shard = SELECT[name]
    spec, seq_lens = spec_of(**rules), lengths(*tokens)
    rows = len(tokens) * query_len + 1
    scores = wild_scores(2, rows, shard.width(max(tokens) // 64 + 1), seed=len(name))
    got = torch.full((2, rows, spec.topk), -77, dtype=torch.int64)
    triton_backend.select_keys(scores, seq_lens, spec, query_len, shard, got)
    want = torch.empty_like(got)
    torch_backend.select_keys(scores, seq_lens, spec, query_len, shard, want)
    assert_same_rows(got, want)
    if shard.world == 1:
        row_lengths = reference.row_lengths(seq_lens, query_len, rows)
        ids = reference.select(scores, row_lengths, **rules_of(spec))
        assert_same_rows(key.key_blocks(got, spec.tie_break).to(torch.int32), ids)


MERGE = {
    "k1": ({"topk": 1, "local_blocks": 0}, 2, 2, "score", None),
    "k3": ({"topk": 3, "init_blocks": 1}, 3, 1, "score", (16, 4)),
    "k16-by-block": ({"topk": 16}, 4, 2, "block", (32, 3)),
    "k16-eight-ranks": ({"topk": 16, "tie_break": "higher"}, 8, 1, "score", (64, 1)),
    "k64-five-ranks": ({"topk": 64, "local_blocks": 2}, 5, 1, "block", None),
    "k40-one-rank": ({"topk": 40}, 1, 2, "score", (32, 2)),
}


@pytest.mark.parametrize("name", MERGE)
def test_merge_keys(name):
    rules, world, heads, order, sparse_rules = MERGE[name]
    spec = spec_of(**rules)
    inputs = random_inputs(spec, [64 * 90 + 1, 0], heads=heads, query_len=2, rows=5)
    dense = wild_scores(heads, 5, 92, seed=heads)
    keys = torch.empty(world, heads, 5, spec.topk, dtype=torch.int64)
    for rank in range(world):
        own = torch.full((heads, 5, -(-92 // world)), NAN)
        own[..., : dense[..., rank::world].shape[-1]] = dense[..., rank::world]
        torch_backend.select_keys(own, inputs.seq_lens, spec, 2, Shard(rank, world), keys[rank])
    want = selection(inputs, dense, order)
    sparse = None if sparse_rules is None else empty_table(inputs, *sparse_rules, flat=heads == 1)
    out = torch.full((heads, 5, spec.topk), -77, dtype=torch.int32)
    triton_backend.merge_keys(keys, inputs.seq_lens, spec, 2, order, sparse, out)
    assert_same_rows(out, want)
    if sparse is not None:
        assert_table(inputs, want, sparse)


def test_merge_leaves_blocks_that_a_row_cannot_see_out_of_the_table():
    """A22f: keys made with a longer length."""
    spec = spec_of(topk=4, local_blocks=0)
    scores = torch.tensor([[[9.0, NAN, 9.0, 9.0]]])
    keys = torch.empty(1, 1, 1, 4, dtype=torch.int64)
    torch_backend.select_keys(scores, lengths(64 * 4), spec, 1, Shard(), keys[0])
    outputs = []
    for backend in (torch_backend, triton_backend):
        pages, held = torch.full((1, 1, 4), -77, dtype=torch.int32), torch.full((1, 1), -77, dtype=torch.int32)
        sparse = li.SparseTable(table([11, 4, 8, 99]), pages, held, page_size=64, page_stride=1)
        ids = torch.empty(1, 1, 4, dtype=torch.int32)
        backend.merge_keys(keys, lengths(150), spec, 1, "score", sparse, ids)
        outputs.append((ids.tolist(), pages.tolist(), held.tolist()))
    assert outputs[1] == outputs[0]
    assert outputs[0][1:] == ([[[11, 4, 8, 0]]], [[64 + 64 + 22]])


def test_a_float32_cache_is_refused():
    """Its exact products take no matrix unit."""
    spec = spec_of()
    pages = torch.zeros(2, spec.block_size, spec.head_dim)
    cache = li.IndexCache.wrap(pages, spec)
    q = torch.zeros(1, 1, spec.head_dim)
    out = torch.empty(1, 1, 2)
    with interpreter.fake_device(2), pytest.raises(ValueError, match=r"cache: expected format bf16 .* on a GPU, got fp32"):
        triton_backend.score_blocks(q, cache, table([0, 1]), lengths(100), spec, 1, 128, Shard(), out)


# Prefill.


@dataclass(frozen=True)
class Chunks:
    """Ragged chunks behind prefixes."""

    heads: int
    chunks: list[int]
    prefixes: list[int]
    rules: dict
    order: str = "score"
    padding: int = 0
    columns: int = 16
    programs: int = 6
    values: str = "normal"


PREFILL = {
    "ragged": Chunks(1, [5, 0, 20], [0, 640, 1123], {"topk": 4}, padding=3),
    "ragged-ties": Chunks(2, [3, 0, 10], [0, 640, 700], {"topk": 4}, values="ties"),
    "splits": Chunks(4, [9], [64 * 26], {"topk": 5, "init_blocks": 1}, order="block", columns=32, programs=8),
    "splits-k16": Chunks(2, [3, 1], [64 * 25, 64 * 17], {"topk": 16}, programs=9, values="ties"),
    "splits-of-few-blocks": Chunks(2, [20], [64 * 5], {"topk": 16}, columns=32, programs=16),
    "heads-do-not-divide-the-tile": Chunks(
        3, [7, 2], [30, 900], {"topk": 2, "local_blocks": 2, "tie_break": "higher"}, values="ties"
    ),
    "more-heads-than-columns": Chunks(20, [2], [64 * 17], {"topk": 4}, programs=30),
    "more-heads-than-columns-whole": Chunks(20, [2, 3], [64, 0], {"topk": 4}, programs=1, padding=2),
    "no-prefix-across-blocks": Chunks(2, [130], [0], {"topk": 2}, order="block"),
    "no-prefix-splits": Chunks(1, [250], [0], {"topk": 2}, programs=35, values="ties"),
    "empty-requests": Chunks(2, [0, 0, 4, 0], [0, 64, 60, 0], {"topk": 3}, padding=1),
    "all-padding": Chunks(2, [0, 0], [0, 100], {"topk": 3}, padding=10),
    "k64": Chunks(1, [3], [64 * 70], {"topk": 64}, programs=1),
}


def prefill(inputs: Inputs, bounds: torch.Tensor, order: str, workspace: Workspace | None = None) -> torch.Tensor:
    rows, heads, _ = inputs.q.shape
    out = torch.full((heads, rows, inputs.spec.topk), -77, dtype=torch.int32)
    cache = li.IndexCache.wrap(inputs.pages, inputs.spec)
    longest = inputs.block_table.shape[1] * inputs.spec.block_size
    arguments = (inputs.q, cache, inputs.block_table, bounds, inputs.seq_lens, inputs.spec, longest, order)
    triton_backend.prefill(*arguments, out, workspace)
    return out


@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name):
    """Each row is what decode selects for its length, bit for bit."""
    case = PREFILL[name]
    spec = spec_of(**case.rules)
    bounds = torch.tensor([sum(case.chunks[:request]) for request in range(len(case.chunks) + 1)], dtype=torch.int32)
    tokens = [chunk + prefix for chunk, prefix in zip(case.chunks, case.prefixes, strict=True)]
    rows = sum(case.chunks) + case.padding
    inputs = random_inputs(spec, tokens, heads=case.heads, rows=rows, values=case.values)
    inputs.q[rows - case.padding :] = NAN
    with interpreter.fake_device(case.programs, topk=spec.topk, prefill_columns=case.columns):
        with interpreter.reads_of(inputs.block_table) as read:
            got = prefill(inputs, bounds, case.order)
        width = inputs.block_table.shape[1]
        chunks = [(request, -(-length // 64)) for request, length in enumerate(tokens) if case.chunks[request]]
        assert read == {request * width + column for request, count in chunks for column in range(count)}
        want = torch.full_like(got, -1)
        for request, (chunk, length) in enumerate(zip(case.chunks, tokens, strict=True)):
            if chunk:
                own = slice(int(bounds[request]), int(bounds[request]) + chunk)
                step = replace(
                    inputs,
                    q=inputs.q[own],
                    block_table=inputs.block_table[request : request + 1],
                    seq_lens=lengths(length),
                    query_len=chunk,
                )
                want[:, own] = selection(step, score(step), case.order)
    assert_same_rows(got, want)
    if case.values == "ties":  # exact in any order of summation: the same as torch
        exact = li.prefill(*inputs.arguments[:3], bounds, inputs.seq_lens, spec=spec, order=case.order)
        assert_same_rows(got, exact)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_prefill_views_and_bounds(dtype):
    """Strided chunk bounds and lengths, and a length past the bound."""
    spec = spec_of(topk=2)
    inputs = random_inputs(spec, [64 * 3, 70], heads=2, rows=12)
    bounds = torch.tensor([0, 7, 12], dtype=dtype)
    with interpreter.fake_device(3):
        want = prefill(inputs, bounds, "score")
        wide_bounds = torch.full((3, 2), 5, dtype=dtype)
        wide_bounds[:, 0] = bounds
        assert_same_rows(prefill(inputs, wide_bounds[:, 0], "score"), want)
        wide_lengths = torch.full((2, 2), 64, dtype=torch.int32)
        wide_lengths[:, 0] = inputs.seq_lens
        assert_same_rows(prefill(replace(inputs, seq_lens=wide_lengths[:, 0]), bounds, "score"), want)


@pytest.mark.parametrize("max_requests", [1, 8, 60])
def test_prefill_in_a_workspace(max_requests):
    """Any workspace will do: with little room the context is not split, or split less."""
    spec = spec_of(topk=4)
    inputs = random_inputs(spec, [64 * 30, 64 * 12], heads=2, rows=6)
    bounds = torch.tensor([0, 4, 6], dtype=torch.int32)
    with interpreter.fake_device(12):
        want = prefill(inputs, bounds, "score")
        workspace = Workspace(spec, max_requests=max_requests, max_columns=8, device="cpu")
        workspace.keys.fill_(2**62 - 1)  # would win if it were looked at
        assert_same_rows(prefill(inputs, bounds, "score", workspace), want)


@pytest.mark.parametrize("argument", ["q", "cache"])
def test_misaligned_tensors_are_refused(argument):
    inputs = random_inputs(spec_of(topk=2), [100])
    if argument == "q":
        buffer = torch.zeros(65, dtype=torch.bfloat16)
        inputs = replace(inputs, q=buffer[1:].view(1, 1, 64))
    else:
        buffer = torch.zeros(len(inputs.pages), 64 * 64 + 4, dtype=torch.bfloat16)
        inputs = replace(inputs, pages=buffer[:, : 64 * 64].unflatten(1, (64, 64)))
    with interpreter.fake_device(3), pytest.raises(ValueError, match=f"{argument}: expected address and strides"):
        decode(inputs)
