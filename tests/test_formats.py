# SPDX-License-Identifier: Apache-2.0
"""fp8 and NVFP4 index-K caches: bytes packed here by hand, read and written against the types of ml_dtypes."""

import math

import pytest
import torch
from support import NAN, chosen, lengths, owned_heads, random_inputs, table

import lightning_indexer as li
from lightning_indexer.verify.ranks import run_ranks

ml_dtypes = pytest.importorskip("ml_dtypes")
np = pytest.importorskip("numpy")

SPEC = li.IndexerSpec()
SMALL = li.IndexerSpec(num_heads=2, head_dim=64, block_size=64, topk=3)
BYTES = torch.arange(256, dtype=torch.uint8)
EIGHT_BITS = {
    "fp8": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, 448.0),
    "fp8_fnuz": (torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz, 240.0),
}


def oracle_floats(codes: torch.Tensor, dtype) -> torch.Tensor:
    return torch.from_numpy(codes.numpy().view(dtype).astype(np.float32))


def oracle_bytes(values: torch.Tensor, dtype, largest: float) -> torch.Tensor:
    return torch.from_numpy(values.clamp(-largest, largest).numpy().astype(dtype).view(np.uint8))


def wild(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of all sizes, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator) * torch.randint(-12, 10, shape, generator=generator).float().exp2()
    values.view(-1)[::13] = 0.0
    values.view(-1)[5::17] = -0.0
    return values


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("format", EIGHT_BITS)
def test_every_fp8_code(format):
    dtype, oracle, _ = EIGHT_BITS[format]
    tokens = BYTES.view(2, 1, 128).repeat(1, SPEC.block_size, 1)
    cache = li.IndexCache.wrap(tokens, SPEC, format=format)
    assert cache.data.dtype == dtype
    assert cache.data.data_ptr() == tokens.data_ptr()
    assert same(cache.dequantize()[:, 3].flatten(), oracle_floats(BYTES, oracle))
    assert same(li.IndexCache.wrap(tokens.view(dtype), SPEC).dequantize(), cache.dequantize())
    assert (cache.token_bytes, cache.page_bytes) == (128, 128 * 128)


@pytest.mark.parametrize("format", EIGHT_BITS)
def test_fp8_writes_to_nearest_even_and_saturates(format):
    _, oracle, largest = EIGHT_BITS[format]
    keys = wild(300, 128)
    keys[7, :4] = torch.tensor([math.inf, -math.inf, NAN, 1e30])
    cache = li.IndexCache.empty(3, SPEC, format=format)
    cache.write(keys, torch.arange(300))
    written = cache.data.view(torch.uint8).view(-1, 128)[:300]
    expected = oracle_bytes(keys, oracle, largest)
    expected[7, 2] = written[7, 2]  # a NaN's sign is free
    assert torch.equal(written, expected)
    assert cache.dequantize()[0, 7, :4].nan_to_num(nan=0.5).tolist() == [largest, -largest, 0.5, largest]


def test_fp8_with_a_scale_per_token():
    data, scale = torch.zeros(2, 64, 64, dtype=torch.uint8), torch.full((2, 64), NAN)
    cache = li.IndexCache.wrap(data, SMALL, format="fp8", scale=scale)
    keys = wild(70, 64)
    keys[3] = 0.0
    keys[4, 2] = math.inf
    cache.write(keys, torch.arange(70))
    factors = keys.abs().amax(-1) / 448
    factors[3] = factors[4] = 1.0
    assert torch.equal(scale.flatten()[:70], factors)
    codes = oracle_bytes(keys / factors[:, None], ml_dtypes.float8_e4m3fn, 448.0)
    assert torch.equal(data.view(-1, 64)[:70], codes)
    want = oracle_floats(codes, ml_dtypes.float8_e4m3fn) * factors[:, None]
    assert torch.equal(cache.dequantize().view(-1, 64)[:70], want)
    assert cache.token_bytes == 68


def nvfp4_oracle(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e4m3(e2m1 * scale): codes `[n, D]` of 4 bits, scale bytes `[n, D / 16]`."""
    values = oracle_floats(codes.to(torch.uint8), ml_dtypes.float4_e2m1fn)
    products = values.double() * oracle_floats(scales, ml_dtypes.float8_e4m3fn).double().repeat_interleave(16, -1)
    return oracle_floats(oracle_bytes(products.float(), ml_dtypes.float8_e4m3fn, 448.0), ml_dtypes.float8_e4m3fn)


def packed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """72 bytes a token: pairs of codes, the even dim in the low nibble, then the scales."""
    return torch.cat([(codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), scales], dim=1)


def test_every_nvfp4_code_with_every_scale():
    """Negative and NaN scales, and products past 448, too."""
    codes = (torch.arange(128) % 16).repeat(256, 1)
    scales = BYTES[:, None].repeat(1, 8)
    cache = li.IndexCache.wrap(packed(codes, scales).view(2, 128, 72), SPEC, format="nvfp4")
    assert same(cache.dequantize().view(256, 128), nvfp4_oracle(codes, scales))
    assert (cache.token_bytes, cache.page_bytes) == (72, 9216)
    assert cache.dequantize()[0, 0x7E].max() == 448  # 6 * 448, saturated


@pytest.mark.parametrize("spec", [SPEC, SMALL], ids=["D128", "D64"])
def test_nvfp4_writes_scales_and_codes(spec):
    dim = spec.head_dim
    keys = wild(2 * spec.block_size, dim, seed=1)
    keys[5] = 0.0
    keys[6, :16] = 1e-4  # amax / 6 rounds to no scale at all
    keys[7, :16] = 1e6  # and here to the largest
    scales = oracle_bytes(keys.view(-1, dim // 16, 16).abs().amax(-1) / 6, ml_dtypes.float8_e4m3fn, 448.0)
    divisor = oracle_floats(scales, ml_dtypes.float8_e4m3fn).repeat_interleave(16, -1)
    quotients = torch.where(divisor == 0, torch.zeros(()).copysign(keys), keys / divisor)
    codes = torch.from_numpy(quotients.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)) & 15
    cache = li.IndexCache.empty(2, spec, format="nvfp4")
    cache.write(keys, torch.arange(len(keys)))
    assert torch.equal(cache.data.view(len(keys), -1), packed(codes.long(), scales))
    assert same(cache.dequantize().view(len(keys), dim), nvfp4_oracle(codes, scales))


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
def test_nothing_to_write(format):
    cache = li.IndexCache.empty(1, SMALL, format=format)
    before = cache.data.view(torch.uint8).clone()
    cache.write(torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64))
    cache.write(torch.ones(2, 64), torch.tensor([-1, 64]))
    assert torch.equal(cache.data.view(torch.uint8), before)


def test_nvfp4_middles_go_to_the_even_code():
    """One group whose scale is 1: the middles between neighbouring values, and what lies just beside them."""
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    keys = torch.zeros(3, 64)
    for token, offset in enumerate((-1e-3, 0.0, 1e-3)):
        keys[token, :7] = torch.tensor(middles) + offset
        keys[token, 15] = -6.0
    cache = li.IndexCache.empty(1, SMALL, format="nvfp4")
    cache.write(keys, torch.arange(3))
    assert cache.dequantize()[0, 0, :7].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert cache.dequantize()[0, 1, :7].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert cache.dequantize()[0, 2, :7].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]


def test_nvfp4_of_a_key_that_is_no_number():
    keys = torch.ones(1, 64)
    keys[0, 20], keys[0, 40] = NAN, math.inf
    cache = li.IndexCache.empty(1, SMALL, format="nvfp4")
    cache.write(keys, torch.zeros(1, dtype=torch.int64))
    read = cache.dequantize()[0, 0]
    assert read[:16].tolist() == [1.0] * 16
    assert read[16:32].isnan().all()
    assert read[32:48].tolist() == [0.0] * 8 + [448.0] + [0.0] * 7


def test_the_example_of_the_documents():
    token = bytes.fromhex("214365f7") * 8 + bytes.fromhex("40") * 4
    page = torch.zeros(64, 36, dtype=torch.uint8)
    page[0] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
    cache = li.IndexCache.wrap(page[None], SMALL, format="nvfp4")
    assert cache.dequantize()[0, 0].tolist() == [1, 2, 3, 4, 6, 8, 12, -12] * 8


# field_faults.md


@pytest.mark.parametrize("format", ["fp8", "fp8_fnuz", "nvfp4"])
def test_a23_padding_slots(format):
    pool = torch.full((6, 128, li.IndexCache.empty(1, SPEC, format).data.shape[2]), 0x5A, dtype=torch.uint8)
    cache = li.IndexCache.wrap(pool[1:5], SPEC, format=format)
    before = pool.clone()
    cache.write(torch.ones(4, 128), torch.tensor([5, -1, -1, 4 * 128]))
    changed = (pool != before).any(-1).nonzero().tolist()
    assert changed == [[1, 5]]
    assert cache.dequantize()[0, 5].tolist() == [1.0] * 128


def test_a25_fp8_under_the_wrong_label():
    first = torch.eye(1, 128, dtype=torch.bfloat16)[:, None]
    spec = li.IndexerSpec(num_heads=1, topk=1, local_blocks=0)

    def scores(codes: list[tuple[int, int]], format: str) -> list[float]:
        pages = torch.zeros(len(codes), 128, 128, dtype=torch.uint8)
        for page, (token, others) in zip(pages, codes, strict=True):
            page[:, 0] = others
            page[0, 0] = token
        cache = li.IndexCache.wrap(pages, spec, format=format)
        rows = first, cache, table(list(range(len(codes)))), lengths(128 * len(codes))
        return li.score_blocks(*rows, spec=spec)[0, 0].tolist()

    assert scores([(0x38, 0x38), (0xB8, 0xB8)], "fp8") == [1.0, -1.0]
    assert scores([(0x78, 0xC0), (0x7E, 0x80), (0x30, 0xC0), (0x80, 0x80)], "fp8") == [256.0, 448.0, 0.5, 0.0]
    read = scores([(0x78, 0xC0), (0x7E, 0x80), (0x30, 0xC0), (0x80, 0x80)], "fp8_fnuz")
    assert [math.isnan(value) for value in read] == [False, True, False, True]
    pages = torch.zeros(1, 128, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="q: expected dtype bfloat16 or float8_e4m3fn, got dtype float8_e4m3fnuz"):
        li.decode(first.to(torch.float8_e4m3fnuz), pages, table([0]), lengths(9), spec=spec)


def test_a26_nibbles_and_scales():
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 15]).repeat(128, 16)
    tokens, groups = torch.arange(128)[:, None], torch.arange(8)
    scales = oracle_bytes(2.0 ** ((tokens + 3 * groups) % 5 - 2), ml_dtypes.float8_e4m3fn, 448.0)
    cache = li.IndexCache.wrap(packed(codes, scales)[None], SPEC, format="nvfp4")
    q = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    q[0, 0, 33] = 1
    found = [float(li.score_blocks(q, cache, table([0]), lengths(length), spec=SPEC)) for length in range(1, 6)]
    assert found == [0.5, 1, 2, 4, 4]
    again = li.IndexCache.empty(1, SPEC, format="nvfp4")
    again.write(cache.dequantize()[0], torch.arange(128))
    assert torch.equal(again.dequantize(), cache.dequantize())


# Through the operators.


@pytest.mark.parametrize("format", ["fp8", "fp8_fnuz", "nvfp4"])
def test_selection_is_that_of_the_dequantised_keys(format):
    """Decode and prefill, from a layer's view of a pool, queries in bf16 and, where there are such, in fp8."""
    inputs = random_inputs(SMALL, [64 * 7 - 3, 0, 130], heads=2, query_len=2)
    keys = torch.nan_to_num(inputs.pages.float())
    row = li.IndexCache.empty(1, SMALL, format).data.shape[2]
    pool = torch.full((len(keys), 3, 64, row), 0x7F, dtype=torch.uint8)
    cache = li.IndexCache.wrap(pool[:, 1], SMALL, format=format)
    cache.write(keys.view(-1, 64), torch.arange(keys.shape[0] * 64))
    read = cache.dequantize()
    for dtype in cache.format.query_dtypes:
        q = torch.nan_to_num(inputs.q.float()).to(dtype)
        want = li.decode(q.float(), read, *inputs.arguments[2:], **inputs.rules)
        assert torch.equal(li.decode(q, cache, *inputs.arguments[2:], **inputs.rules), want)
        bounds = torch.tensor([0, 2, 2, 4])
        chunks = (bounds, inputs.seq_lens)
        got = li.prefill(q, cache, inputs.block_table, *chunks, spec=SMALL)
        assert torch.equal(got, li.prefill(q.float(), read, inputs.block_table, *chunks, spec=SMALL))


def test_ranks_with_fp8_queries():
    """They travel as bytes."""
    inputs = random_inputs(SMALL, [64 * 7 - 3, 130], heads=2)
    caches = {}
    for format in ("fp8", "nvfp4"):
        caches[format] = li.IndexCache.empty(len(inputs.pages), SMALL, format)
        caches[format].write(torch.nan_to_num(inputs.pages.float()).view(-1, 64), torch.arange(len(inputs.pages) * 64))
    q = inputs.q.to(torch.float8_e4m3fn)

    def work(rank: int) -> dict[str, torch.Tensor]:
        indexer = li.ContextParallelIndexer(SMALL, max_rows=4, max_seq_len=64 * 9, device="cpu")
        own = owned_heads(rank, 2, 2)
        found = {}
        for format, cache in caches.items():
            indexer.warmup(format)
            mine = q.view(torch.uint8)[:, own].view(q.dtype)
            found[format] = indexer.decode(mine, cache, *inputs.arguments[2:])
        return found

    for rank, found in enumerate(run_ranks(2, work, timeout=60)):
        for format, ids in found.items():
            want = li.decode(q, caches[format], *inputs.arguments[2:], spec=SMALL)
            assert torch.equal(ids, want[owned_heads(rank, 2, 2)])
            assert chosen(ids) == chosen(want[owned_heads(rank, 2, 2)])


@pytest.mark.parametrize(
    ("tensor", "changes", "message"),
    [
        (torch.zeros(1, 128, 128, dtype=torch.uint8), {}, "format fp8 or fp8_fnuz or nvfp4 for bytes, got dtype uint8"),
        (torch.zeros(1, 128, 72, dtype=torch.uint8), {"format": "fp8"}, "cache: expected shape"),
        (torch.zeros(1, 128, 128, dtype=torch.uint8), {"format": "nvfp4"}, "cache: expected shape"),
        (torch.zeros(1, 128, 128, dtype=torch.float8_e4m3fn), {"format": "fp8_fnuz"}, "dtype float8_e4m3fnuz"),
        (torch.zeros(1, 128, 128, dtype=torch.bfloat16), {"scale": torch.ones(1, 128)}, "scale: expected None"),
        (torch.zeros(1, 128, 72, dtype=torch.uint8), {"format": "nvfp4", "scale": torch.ones(1, 128)}, "scale: expected None"),
        (torch.zeros(1, 128, 128, dtype=torch.uint8), {"format": "fp8", "scale": torch.ones(1, 64)}, "scale: expected shape"),
    ],
)
def test_what_does_not_fit(tensor, changes, message):
    with pytest.raises(ValueError, match=message):
        li.IndexCache.wrap(tensor, SPEC, **changes)
