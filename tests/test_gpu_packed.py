# SPDX-License-Identifier: Apache-2.0
"""fp8 and NVFP4 caches on a GPU. Bytes are packed by torch, and the scores compared with exact products of what they mean."""

import math
from dataclasses import replace

import pytest
import torch
from support import NAN, OUT_OF_CACHE, Inputs, lengths
from test_gpu import SKEWED, assert_same_rows, assert_scores, row_lengths, torch_selection
from test_gpu_peer import Virtual
from test_write import FORMATS, cache_of, contents, slots_of, wild

import lightning_indexer as li
from lightning_indexer import ops, torch_backend
from lightning_indexer.policy import converts_e4m3, device_facts
from lightning_indexer.spec import IndexerSpec, Shard

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SPEC = IndexerSpec()
BLOCK, DIM, TOPK = SPEC.block_size, SPEC.head_dim, SPEC.topk
POOL = 1_024
QUERIES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _has_e4m3():
    if not converts_e4m3(device_facts(torch.device(DEVICE, torch.cuda.current_device()))):
        pytest.skip("the GPU has no e4m3")


def pool_of(format: str, spec: IndexerSpec = SPEC, scaled: bool = False) -> li.IndexCache:
    keys = torch.randn(POOL * spec.block_size, spec.head_dim, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    cache = li.IndexCache.empty(POOL, spec, format, DEVICE)
    if scaled:
        scale = torch.empty(POOL, spec.block_size, device=DEVICE)
        cache = li.IndexCache.wrap(cache.data, spec, format, scale)
    cache.write(keys, torch.arange(len(keys), device=DEVICE))
    return cache


@pytest.fixture(scope="module")
def pools() -> dict[str, li.IndexCache]:
    return {format: pool_of(format) for format in ("fp8", "nvfp4")}


def inputs_of(
    cache: li.IndexCache, tokens: list[int], queries: str, heads: int = 4, query_len: int = 1, padding: int = 0
) -> Inputs:
    """Requests over shared pages, which the inputs hold as what they mean."""
    generator = torch.Generator().manual_seed(len(tokens) + heads * query_len)
    block = cache.spec.block_size
    width = max(math.ceil(length / block) for length in tokens) + 3
    block_table = torch.randint(POOL, (len(tokens), width), generator=generator).to(torch.int32)
    for request, length in enumerate(tokens):
        block_table[request, math.ceil(length / block) :] = OUT_OF_CACHE
    q = torch.randn(len(tokens) * query_len + padding, heads, cache.spec.head_dim, generator=generator)
    q[len(tokens) * query_len :] = NAN
    q, pages = q.to(QUERIES[queries]).to(DEVICE), cache.dequantize()
    return Inputs(cache.spec, q, pages, block_table.to(DEVICE), lengths(*tokens).to(DEVICE), query_len)


def arguments(inputs: Inputs, cache: li.IndexCache) -> tuple:
    return inputs.q, cache, inputs.block_table, inputs.seq_lens


@pytest.mark.parametrize("queries", QUERIES)
def test_every_fp8_code(queries):
    """Each key is read out by a query that is a unit vector: one token of one block."""
    cache = li.IndexCache.wrap(BYTES.view(2, 1, DIM).repeat(1, BLOCK, 1).to(DEVICE), SPEC, "fp8")
    q = torch.eye(DIM).view(2, 64, DIM).to(QUERIES[queries]).to(DEVICE)
    table = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32, device=DEVICE)
    scores = li.score_blocks(q, cache, table, lengths(256, 256).to(DEVICE), spec=SPEC)  # [64, 2, 2 blocks]
    got = scores.permute(2, 1, 0).reshape(2, DIM)
    # A NaN anywhere in a key makes all of its products NaN.
    finite = BYTES.view(torch.float8_e4m3fn).float()
    assert finite.isnan().sum() == 2
    assert got.isnan().all()
    for code in range(0, 256, 128):
        some = BYTES[code : code + 128].clone()
        some[-1] = 0
        cache = li.IndexCache.wrap(some.view(1, 1, DIM).repeat(1, BLOCK, 1).to(DEVICE), SPEC, "fp8")
        scores = li.score_blocks(q, cache, table[:, :1] * 0, lengths(128, 128).to(DEVICE), spec=SPEC)
        assert torch.equal(scores[..., 0].t().reshape(DIM).cpu(), some.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("queries", QUERIES)
def test_every_nvfp4_code_with_every_scale(queries):
    """Page p has scale code p in all groups; products past 448 and negative scales are among them."""
    codes = (torch.arange(DIM) % 16).view(-1, 2)
    rows = torch.cat([(codes[:, 0] + 16 * codes[:, 1]).to(torch.uint8).repeat(256, 1), BYTES[:, None].repeat(1, 8)], dim=1)
    cache = li.IndexCache.wrap(rows[:, None].repeat(1, BLOCK, 1).to(DEVICE), SPEC, "nvfp4")
    q = torch.eye(DIM).view(2, 64, DIM).to(QUERIES[queries]).to(DEVICE)
    table = torch.arange(256, dtype=torch.int32, device=DEVICE).repeat(2, 1)
    scores = li.score_blocks(q, cache, table, lengths(256 * BLOCK, 256 * BLOCK).to(DEVICE), spec=SPEC)
    got = scores.permute(2, 1, 0).reshape(256, DIM)
    want = cache.dequantize()[:, 0]
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
@pytest.mark.parametrize(("heads", "query_len"), [(1, 1), (4, 1), (1, 4), (4, 16)], ids=lambda value: str(value))
def test_skewed_lengths(pools, format, queries, heads, query_len):
    """Scores; ids with a plan and without; candidates of ranks; and a prefill of the same rows, bit for bit."""
    cache = pools[format]
    inputs = inputs_of(cache, SKEWED, queries, heads, query_len, padding=3)
    rules, longest = inputs.rules, inputs.block_table.shape[1] * BLOCK
    scores = li.score_blocks(*arguments(inputs, cache), **rules)
    assert_scores(inputs, scores)
    want = torch_selection(inputs, scores)
    assert_same_rows(li.decode(*arguments(inputs, cache), **rules), want)
    plan = li.plan_step(inputs.seq_lens, spec=SPEC, max_seq_len=longest, cache_format=format)
    assert_same_rows(li.decode(*arguments(inputs, cache), **rules, plan=plan), want)
    plan = li.plan_step(inputs.seq_lens, spec=SPEC, max_seq_len=longest)  # made for another format: as right
    assert_same_rows(li.decode(*arguments(inputs, cache), **rules, plan=plan), want)
    keys = []
    for rank in range(3):
        own = li.score_blocks(*arguments(inputs, cache), **rules, shard=Shard(rank, 3))
        dense = torch.nn.functional.pad(scores, (0, 3), value=-math.inf)[..., rank::3][..., : own.shape[-1]]
        assert_same_rows(own, dense)
        keys.append(li.select_keys(own, inputs.seq_lens, **rules, shard=Shard(rank, 3)))
        found = torch.empty_like(keys[-1])
        step = (*arguments(inputs, cache), SPEC, query_len, longest)
        ops.backend_of(inputs.q.device).decode_keys(*step, Shard(rank, 3), "score", found, None, None)
        assert_same_rows(found, keys[-1])
    assert_same_rows(li.merge_keys(torch.stack(keys), inputs.seq_lens, **rules), want)

    some = [request for request, length in enumerate(SKEWED) if length >= query_len]
    rows = [row for request in some for row in range(request * query_len, (request + 1) * query_len)]
    bounds = torch.arange(len(some) + 1, dtype=torch.int32, device=DEVICE) * query_len
    chunk = inputs.q[rows], cache, inputs.block_table[some], bounds, inputs.seq_lens[some]
    assert_same_rows(li.prefill(*chunk, spec=SPEC), want[:, rows])


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_long_chunk(pools, format, queries):
    """Tiles of 128 columns, whose keys come through shared memory, against decode."""
    cache, tokens = pools[format], 700
    q = torch.randn(tokens, 4, DIM, generator=torch.Generator().manual_seed(1)).to(QUERIES[queries]).to(DEVICE)
    table = torch.randint(POOL, (1, 80), generator=torch.Generator().manual_seed(2)).int().to(DEVICE)
    ends = torch.arange(9_001, 9_001 + tokens, dtype=torch.int32, device=DEVICE)
    got = li.prefill(q, cache, table, torch.tensor([0, tokens], device=DEVICE), ends[-1:].clone(), spec=SPEC)
    assert_same_rows(got, li.decode(q, cache, table.expand(tokens, -1), ends, spec=SPEC))


@pytest.mark.parametrize(
    ("format", "spec"),
    [
        ("fp8", IndexerSpec(head_dim=64, block_size=64)),
        ("nvfp4", IndexerSpec(head_dim=64, block_size=64)),
        ("nvfp4", IndexerSpec(block_size=256)),
    ],
    ids=["fp8-64", "nvfp4-64", "nvfp4-256"],
)
def test_other_geometries(format, spec):
    cache = pool_of(format, spec)
    inputs = inputs_of(cache, [5_000, 0, 77, 1], "bf16")
    scores = li.score_blocks(*arguments(inputs, cache), **inputs.rules)
    assert_scores(inputs, scores)
    want = torch_selection(inputs, scores)
    assert_same_rows(li.decode(*arguments(inputs, cache), **inputs.rules), want)
    bounds = torch.tensor([0, 1, 2, 3], device=DEVICE)
    some = [0, 2, 3]
    chunk = inputs.q[some], cache, inputs.block_table[some], bounds, inputs.seq_lens[some]
    assert_same_rows(li.prefill(*chunk, spec=spec), want[:, some])


def test_a_scale_per_token():
    cache = pool_of("fp8", scaled=True)
    inputs = inputs_of(cache, SKEWED, "bf16")
    scores = li.score_blocks(*arguments(inputs, cache), **inputs.rules)
    # The factor is applied to the dot product here, and to each key in `pages`: two roundings more.
    plain = replace(inputs, pages=cache.format.load(cache.data).double() * cache.scale.double()[..., None])
    assert_scores(plain, scores)
    assert_same_rows(li.decode(*arguments(inputs, cache), **inputs.rules), torch_selection(inputs, scores))


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_poison(format):
    """NaN in unwritten tokens and unused pages; an interleaved layer's view of a buffer."""
    tokens = [3_000, 0, 129, 20_000, 1]
    blocks = [math.ceil(length / BLOCK) for length in tokens]
    row = li.IndexCache.empty(1, SPEC, format).data.shape[-1]
    buffer = torch.full((sum(blocks) + 9, 3, BLOCK, row), 0x7F, dtype=torch.uint8, device=DEVICE)
    cache = li.IndexCache.wrap(buffer[:, 1], SPEC, format)
    generator = torch.Generator().manual_seed(3)
    pages = torch.randperm(len(buffer), generator=generator)[: sum(blocks)].split(blocks)
    table = torch.full((len(tokens), max(blocks) + 1), -1, dtype=torch.int32)
    for request, (own, length) in enumerate(zip(pages, tokens, strict=True)):
        table[request, : len(own)] = own.int()
        position = torch.arange(length)
        slots = own[position // BLOCK] * BLOCK + position % BLOCK if length else position
        cache.write(torch.randn(length, DIM, generator=generator).to(DEVICE), slots.to(DEVICE))
    q = torch.randn(7, 4, DIM, generator=generator).bfloat16()
    q[5:] = NAN
    inputs = Inputs(SPEC, q.to(DEVICE), cache.dequantize(), table.to(DEVICE), lengths(*tokens).to(DEVICE), 1)
    scores = li.score_blocks(*arguments(inputs, cache), **inputs.rules)
    seen = torch.arange(table.shape[1]) < ((row_lengths(inputs) + BLOCK - 1) // BLOCK)[:, None]
    assert scores.isfinite().cpu().equal(seen.expand(4, -1, -1))
    assert_scores(inputs, scores)
    assert_same_rows(li.decode(*arguments(inputs, cache), **inputs.rules), torch_selection(inputs, scores))


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_graph(pools, format):
    """Captured on tiny lengths, replayed with long ones."""
    cache = pools[format]
    inputs = inputs_of(cache, SKEWED, "e4m3")
    li.warmup(SPEC, device=DEVICE, cache_format=format)
    workspace = li.Workspace(SPEC, max_requests=len(SKEWED), max_columns=4, device=DEVICE)
    lens = torch.ones_like(inputs.seq_lens)
    table, q = torch.zeros_like(inputs.block_table), torch.zeros_like(inputs.q)
    out = torch.full((4, len(SKEWED), TOPK), -77, dtype=torch.int32, device=DEVICE)
    bound = table.shape[1] * BLOCK
    plan = li.plan_step(lens, spec=SPEC, max_seq_len=bound, cache_format=format)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        li.plan_step(lens, spec=SPEC, max_seq_len=bound, cache_format=format, out=plan)
        li.decode(q, cache, table, lens, spec=SPEC, plan=plan, workspace=workspace, out=out)
    lens.copy_(inputs.seq_lens)
    table.copy_(inputs.block_table)
    q.view(torch.uint8).copy_(inputs.q.view(torch.uint8))
    graph.replay()
    assert_same_rows(out, li.decode(*arguments(inputs, cache), **inputs.rules))


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_virtual_ranks(pools, format, queries):
    """The peer transport: a shared step and one that is not, with the heads gathered and without."""
    cache, world = pools[format], 4
    ranks = Virtual(world, dispatch="auto", threshold=200, warm={"cache_format": format})
    for tokens in (SKEWED, [300, 1, 0, 4_000, 128, 129, 7, 2_000]):
        inputs = inputs_of(cache, tokens, queries)
        want = li.decode(*arguments(inputs, cache), **inputs.rules)
        # `pages` of the inputs takes the cache's place in the call.
        for every_head in (False, True):
            ids = ranks.decode(replace(inputs, pages=cache), every_head=every_head)
            ranks.finish()
            for rank in range(world):
                assert_same_rows(ids[rank], want[ranks.own(rank)])


@pytest.mark.parametrize("spec", [SPEC, IndexerSpec(head_dim=64, block_size=64)], ids=["D128", "D64"])
@pytest.mark.parametrize("format", FORMATS)
def test_writer(format, spec):
    """The bytes that torch writes: wild numbers out of a strided projection, slots outside, few rows and many."""
    for rows in (90, 5_000):
        pages = -(-rows // spec.block_size)
        slots = slots_of(rows, spec, pages).to(DEVICE)
        projected = wild(rows, 3 * spec.head_dim).view(rows, 3, spec.head_dim).to(DEVICE)
        caches = []
        for keys in (projected[:, 1], projected.half()[:, 1], projected.bfloat16()[:, 1]):
            pair = []
            for _ in range(2):
                cache = cache_of(format, spec, pages)
                scale = None if cache.scale is None else cache.scale.to(DEVICE)
                pair.append(li.IndexCache.wrap(cache.data.to(DEVICE), spec, cache.format.name, scale))
            inside = (slots >= 0) & (slots < pages * spec.block_size)
            pair[0].store_tokens(keys[inside], slots[inside])
            pair[1].write(keys, slots)
            caches.append(pair)
        for wanted, got in caches:
            for one, other in zip(contents(got), contents(wanted), strict=True):
                assert torch.equal(one, other)


def test_nvfp4_of_every_bf16():
    """The bytes that torch writes: under every scale all bf16 from an eighth of it on; every bf16 as a group's largest."""
    every = torch.arange(0x8000, dtype=torch.int16).view(torch.bfloat16)  # infinity and NaN, too
    groups = []
    for scale in torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float():
        below = every[(every >= scale / 8) & (every <= 6 * scale)]
        below = torch.cat((below, torch.zeros(-len(below) % 15))).view(-1, 15).bfloat16()
        groups.append(torch.cat(((6 * scale).expand(len(below), 1).bfloat16(), below), 1))
    shares = torch.linspace(0, 1, 16)
    groups.append((every.float()[:, None] * shares).bfloat16())
    groups.append(torch.where(shares < 1, (shares - 0.5) * 100, every.float()[:, None]).bfloat16())
    keys = torch.cat(groups)
    keys[:, 1::2] = -keys[:, 1::2]
    keys = torch.cat((keys, torch.zeros(-len(keys) % (BLOCK * DIM // 16), 16))).view(-1, DIM).bfloat16().to(DEVICE)
    slots = torch.arange(len(keys), device=DEVICE)
    wanted, got = (li.IndexCache.empty(len(keys) // BLOCK, SPEC, "nvfp4", DEVICE) for _ in range(2))
    wanted.store_tokens(keys, slots)
    got.write(keys, slots)
    assert torch.equal(got.data, wanted.data)


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
def test_norm_and_rotation(format, queries):
    """torch's numbers but for those that fall to the other side of a middle; in a graph, in place where dtypes agree."""
    if format == "bf16" and queries == "e4m3":
        pytest.skip("bf16 caches are scored with bf16")
    rows, generator = 300, torch.Generator().manual_seed(8)
    rules = li.NormRope(*(0.3 * torch.randn(2, DIM, generator=generator)).bfloat16().to(DEVICE))
    projected = torch.randn(rows, 5, DIM, generator=generator).bfloat16().to(DEVICE)
    q, k = projected[:, :4], projected[:, 4]
    positions = torch.randint(1 << 20, (rows,), generator=generator).to(DEVICE)
    slots = torch.randperm(384, generator=generator)[:rows].to(DEVICE)
    caches = [li.IndexCache.empty(3, SPEC, format, DEVICE) for _ in range(2)]
    for cache in caches:
        cache.data.view(torch.uint8).zero_()
    wanted, got = (torch.empty(q.shape, dtype=QUERIES[queries], device=DEVICE) for _ in range(2))
    torch_backend.norm_rope_write(q, k, caches[0], slots, positions, rules, wanted)
    rules(q, k, caches[1], slots, positions, out=got)
    for one, other, step in (
        (got.float(), wanted.float(), 2**-3 if queries == "e4m3" else 2**-7),
        (caches[1].dequantize(), caches[0].dequantize(), {"bf16": 2**-7, "fp8": 2**-3, "nvfp4": 0.7}[format]),
    ):
        assert ((one - other).abs() <= step * other.abs() + 2**-4 * (format == "nvfp4") + 2**-9).all()
        assert (one == other).float().mean() > 0.99
    first = got.clone()
    again = q.clone() if queries == "bf16" else got.zero_()
    graph = torch.cuda.CUDAGraph()
    caches[1].data.view(torch.uint8).zero_()
    with torch.cuda.graph(graph):
        rules(again if queries == "bf16" else q, k, caches[1], slots, positions, out=again)
    graph.replay()
    assert torch.equal(again.view(torch.uint8), first.view(torch.uint8))


def test_refusals():
    spec = SPEC
    data = torch.zeros(2, BLOCK, DIM, dtype=torch.uint8, device=DEVICE)
    table, lens = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), lengths(5).to(DEVICE)
    q = torch.zeros(1, 4, DIM, dtype=torch.bfloat16, device=DEVICE)
    if torch.version.hip is None:
        with pytest.raises(ValueError, match=r"cache: expected format fp8 \(e4m3fn\) on an NVIDIA GPU, got fp8_fnuz"):
            li.decode(q, li.IndexCache.wrap(data, spec, "fp8_fnuz"), table, lens, spec=spec)
    with pytest.raises(ValueError, match="cache: expected format fp8 or fp8_fnuz or nvfp4 for bytes"):
        li.decode(q, data, table, lens, spec=spec)
    shifted = torch.zeros(2 * BLOCK * DIM + 8, dtype=torch.uint8, device=DEVICE)[8:].view(2, BLOCK, DIM)
    with pytest.raises(ValueError, match="cache: expected address and strides"):
        li.decode(q, li.IndexCache.wrap(shifted, spec, "fp8"), table, lens, spec=spec)
