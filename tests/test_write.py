# SPDX-License-Identifier: Apache-2.0
"""Keys on their way into the cache: written by slot, and normed and rotated before that. Torch, and the kernel interpreted."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from support import NAN

import lightning_indexer as li
from lightning_indexer import ops, torch_backend
from lightning_indexer.bench import write as bench_write
from lightning_indexer.bench.gate import WrongSelectionError
from lightning_indexer.bench.timing import QUICK, Timing
from lightning_indexer.bench.write import compare
from lightning_indexer.spec import IndexerSpec

SPEC = IndexerSpec()
SMALL = IndexerSpec(num_heads=2, head_dim=64, block_size=64, topk=3)
FORMATS = ["bf16", "fp16", "fp32", "fp8", "fp8_fnuz", "fp8-scaled", "nvfp4"]


def cache_of(format: str, spec: IndexerSpec, pages: int = 3) -> li.IndexCache:
    """A layer of a buffer that interleaves layers, every byte 0x5A."""
    name = format.removesuffix("-scaled")
    row = li.IndexCache.empty(1, spec, name).data
    buffer = torch.full((pages, 2, spec.block_size, row.shape[2] * row.element_size()), 0x5A, dtype=torch.uint8)
    scale = torch.full((pages, spec.block_size), NAN) if format.endswith("-scaled") else None
    return li.IndexCache.wrap(buffer[:, 1].view(row.dtype), spec, name, scale)


def contents(cache: li.IndexCache) -> list[torch.Tensor]:
    scale = [] if cache.scale is None else [cache.scale.view(torch.int32)]
    return [cache.data.contiguous().view(torch.uint8), *scale]


def wild(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of all sizes, zeros of both signs, infinities; groups that are zero, tiny and huge."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator) * torch.randint(-12, 10, shape, generator=generator).float().exp2()
    values.view(-1)[::13] = 0.0
    values.view(-1)[5::17] = -0.0
    values[3, :16], values[4, 16:32], values[5, :16] = 0.0, 1e-4, 1e6
    values[6, 2] = math.inf
    return values


def slots_of(rows: int, spec: IndexerSpec, pages: int = 3) -> torch.Tensor:
    """Distinct slots, some of them outside."""
    slots = torch.randperm(pages * spec.block_size, generator=torch.Generator().manual_seed(1))[:rows]
    slots[1], slots[rows - 1], slots[7] = -1, pages * spec.block_size, -(2**40)
    return slots


def half_dims(dim: int, rotary_dim: int) -> torch.Tensor:
    return torch.arange(rotary_dim // 2) if rotary_dim else torch.arange(0)


def by_hand(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, rules: li.NormRope, theta: float) -> torch.Tensor:
    """Norm and rotation of rows `[n, D]` in float64, pair by pair."""
    x, weight = x.double(), weight.double()
    y = x / (x.square().mean(-1, keepdim=True) + rules.eps).sqrt() * (1 + weight)
    out = y.clone()
    for d in half_dims(x.shape[-1], rules.rotary_dim).tolist():
        # The frequency is a float32 in every model that is trained with it, and the angle a float32 product.
        frequency = 1.0 / torch.tensor(theta) ** torch.tensor(2 * d / rules.rotary_dim)
        angle = (positions.float() * frequency).double()
        e = d + rules.rotary_dim // 2
        out[:, d] = y[:, d] * angle.cos() - y[:, e] * angle.sin()
        out[:, e] = y[:, e] * angle.cos() + y[:, d] * angle.sin()
    return out


def weights(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(0.3 * torch.randn(dim, generator=generator) for _ in range(2))


@pytest.mark.parametrize("rotary_dim", [0, 32, 64])
def test_norm_and_rotation_by_hand(rotary_dim):
    q_weight, k_weight = weights(64)
    rules = li.NormRope(q_weight, k_weight, eps=1e-3, rotary_dim=rotary_dim, theta=1e4)
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(9, 2, 64, generator=generator), torch.randn(9, 64, generator=generator)
    positions = torch.tensor([0, 1, 2, 100, 8_191, 131_072, 1_000_000, 5, 6])
    cache, slots = li.IndexCache.empty(1, SMALL, "fp32"), torch.arange(9)
    got = rules(q, k, cache, slots, positions)
    for head in range(2):
        want = by_hand(q[:, head], q_weight, positions, rules, 1e4)
        assert torch.allclose(got[:, head].double(), want, rtol=1e-5, atol=1e-6)
    want = by_hand(k, k_weight, positions, rules, 1e4)
    assert torch.allclose(cache.dequantize()[0, :9].double(), want, rtol=1e-5, atol=1e-6)


def test_norm_and_rotation_of_transformers():
    """MiniMax-M3's own modules, in float32."""
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    configuration = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
    theta = 5e6
    config = configuration.MiniMaxM3VLTextConfig(
        hidden_size=256,
        num_attention_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5},
    )
    embedding = modeling.MiniMaxM3VLRotaryEmbedding(config)
    norms = [modeling.MiniMaxM3VLRMSNorm(128, eps=1e-6) for _ in range(2)]
    q_weight, k_weight = weights(128)
    with torch.no_grad():
        norms[0].weight.copy_(q_weight)
        norms[1].weight.copy_(k_weight)
        generator = torch.Generator().manual_seed(4)
        q, k = torch.randn(64, 4, 128, generator=generator), torch.randn(64, 128, generator=generator)
        positions = torch.randint(0, 1 << 20, (64,), generator=generator)
        cos, sin = embedding(q, positions[None])
        own_q = norms[0](q).transpose(0, 1)[None]
        own_k = norms[1](k)[None, None]
        want_q, want_k = modeling.apply_rotary_pos_emb(own_q, own_k, cos, sin)
    rules = li.NormRope(q_weight, k_weight, rotary_dim=64, theta=theta)
    cache = li.IndexCache.empty(1, SPEC, "fp32")
    got = rules(q, k, cache, torch.arange(64), positions)
    assert torch.allclose(got, want_q[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.allclose(cache.dequantize()[0, :64], want_k[0, 0], rtol=1e-5, atol=1e-5)


def test_queries_of_eight_bits():
    """Rounded once, and saturating; the cache takes the first of its query dtypes where it is not scored with q's."""
    q_weight, k_weight = weights(64)
    rules = li.NormRope(1000 * q_weight.bfloat16(), k_weight.bfloat16())
    q, k = (torch.randn(5, *shape, generator=torch.Generator().manual_seed(5)).bfloat16() for shape in ((2, 64), (64,)))
    cache, slots, positions = li.IndexCache.empty(1, SMALL, "fp8"), torch.arange(5), torch.arange(5)
    wide = rules.apply(q, rules.query_weight, positions)
    assert wide.abs().max() > 448
    out = torch.empty(5, 2, 64, dtype=torch.float8_e4m3fn)
    assert rules(q, k, cache, slots, positions, out=out) is out
    assert torch.equal(out.float(), wide.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert rules(q, k, cache, slots, positions).dtype == torch.bfloat16
    assert rules(q.half(), k.half(), cache, slots, positions).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_dim": 48}, "rotary_dim: expected 0, or 64 divided by a power of two"),
        ({"rotary_dim": 64.0}, "rotary_dim: expected an int"),
        ({"rotary_dim": None}, "rotary_dim: expected an int"),
        ({"eps": -1.0}, "eps: expected a finite number from 0, got -1.0"),
        ({"eps": "small"}, "eps: expected a finite number from 0, got 'small'"),
        ({"eps": math.inf}, "eps"),
        ({"theta": 0.0}, "theta: expected a finite number above 0, got 0.0"),
        ({"theta": None}, "theta"),
        ({"frequency": torch.zeros(16)}, r"frequency: expected shape \[32\]"),
        ({"frequency": torch.zeros(32).double()}, "frequency: expected dtype float32"),
        ({"key_weight": torch.zeros(32)}, "key_weight"),
    ],
)
def test_rules_that_do_not_fit(change, message):
    q_weight, k_weight = weights(64)
    with pytest.raises(ValueError, match=message):
        li.NormRope(**{"query_weight": q_weight, "key_weight": k_weight, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 2, 32)}, "q: expected shape"),
        ({"k": torch.zeros(4, 64)}, "k: expected shape"),
        ({"k": torch.zeros(5, 64).half()}, "k: expected dtype float32"),
        ({"slot_mapping": torch.zeros(5, dtype=torch.int32)}, "slot_mapping: expected dtype int64"),
        ({"positions": torch.zeros(5)}, "positions: expected dtype"),
        ({"cache": torch.zeros(1, 64, 64)}, "cache: expected an IndexCache"),
        ({"cache": li.IndexCache.empty(1, SPEC)}, "query_weight: expected 128 dims"),
        ({"out": torch.zeros(5, 2, 64)}, "out: expected dtype bfloat16"),
    ],
)
def test_calls_that_do_not_fit(change, message):
    call = {
        "q": torch.zeros(5, 2, 64),
        "k": torch.zeros(5, 64),
        "cache": li.IndexCache.empty(1, SMALL),
        "slot_mapping": torch.arange(5),
        "positions": torch.arange(5),
    }
    with pytest.raises(ValueError, match=message):
        li.NormRope(*weights(64))(**{**call, **change})


def test_frequencies_of_a_models_own():
    """Half as fast: as at half the position."""
    q, k = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(7)), torch.zeros(4, 64)
    positions, caches = torch.tensor([0, 2, 10, 5_000]), [li.IndexCache.empty(1, SMALL, "fp32") for _ in range(2)]
    plain = li.NormRope(*weights(64))
    slow = li.NormRope(*weights(64), frequency=plain.frequency / 2)
    want = plain(q, k, caches[0], torch.arange(4), positions // 2)
    assert torch.equal(slow(q, k, caches[1], torch.arange(4), positions), want)


def test_where_queries_may_go():
    """Into their own place, or elsewhere; not half onto themselves or onto the keys."""
    rules = li.NormRope(*weights(64))
    projected = torch.randn(6, 5, 64, generator=torch.Generator().manual_seed(8))
    cache, slots, positions = li.IndexCache.empty(1, SMALL, "fp32"), torch.arange(6), torch.arange(6)
    q, k = projected[:, :3], projected[:, 3]
    want = rules(q, k, cache, slots, positions)
    beside = torch.zeros(6, 7, 64)
    assert torch.equal(rules(q, k, cache, slots, positions, out=beside[:, 2:5]), want)
    for out in (projected[:, 1:4], projected[:, 2:], projected.as_strided(q.shape, (64, 320, 1))):
        with pytest.raises(ValueError, match="out: expected q itself, or memory of its own"):
            rules(q, k, cache, slots, positions, out=out)
    with pytest.raises(ValueError, match="out: expected a place of its own for every element"):
        rules(q, k, cache, slots, positions, out=torch.zeros(1, 3, 64).expand(6, -1, -1))
    assert torch.equal(rules(q, k, cache, slots, positions, out=q), want)
    assert torch.equal(projected[:, :3], want)


# The kernel, interpreted: the same bytes as torch's.

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled in this process: test_gpu_packed.py tests them"
)


@pytest.fixture
def backend():
    pytest.importorskip("triton")
    import interpreter

    interpreter.install()
    from lightning_indexer import triton_backend

    with interpreter.fake_device(4):
        yield triton_backend


@interpreted
@pytest.mark.parametrize("spec", [SPEC, SMALL], ids=["D128", "D64"])
@pytest.mark.parametrize("format", FORMATS)
def test_writer_kernel(backend, format, spec):
    rows = 90
    wanted, got = cache_of(format, spec), cache_of(format, spec)
    slots = slots_of(rows, spec)
    keys = wild(rows, spec.head_dim)
    wanted.store_tokens(keys[(inside := (slots >= 0) & (slots < 3 * spec.block_size))], slots[inside])
    backend.write(got, keys, slots)
    for one, other in zip(contents(got), contents(wanted), strict=True):
        assert torch.equal(one, other)


@interpreted
def test_middles_of_every_scale(backend):
    """Float32 keys at, just below and just above each middle between two e2m1, under every scale that a group can have."""
    scales = torch.arange(1, 127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * scales[:, None]
    up, down = (torch.nextafter(middles, torch.tensor(to)) for to in (math.inf, 0.0))
    # Sixteen keys with one of the largest, six times the scale, to fix it: seven middles, and as many of the neighbours.
    groups = [torch.cat((middles, near, scales[:, None] * torch.tensor([6.0, -6.0])), 1) for near in (up, -down)]
    keys = torch.cat(groups).flatten()
    keys = torch.cat((keys, torch.zeros(-len(keys) % 128))).view(-1, 128)
    caches = [cache_of("nvfp4", SPEC) for _ in range(2)]
    caches[0].store_tokens(keys, torch.arange(len(keys)))
    backend.write(caches[1], keys, torch.arange(len(keys)))
    assert torch.equal(caches[1].data, caches[0].data)
    codes = caches[1].data.reshape(-1, 72)[: len(keys), :64].flatten()[: 126 * 8]
    found = torch.stack((codes & 7, codes >> 4 & 7), 1).view(126, 16).tolist()
    assert found == [[0, 2, 2, 4, 4, 6, 6, 1, 2, 3, 4, 5, 6, 7, 7, 7]] * 126


@interpreted
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_writer_kernel_keeps_nan(backend, format):
    keys = torch.ones(4, 128)
    keys[1, 20] = NAN
    caches = [cache_of(format, SPEC) for _ in range(2)]
    caches[0].store_tokens(keys, torch.arange(4))
    backend.write(caches[1], keys, torch.arange(4))
    want, got = (cache.dequantize()[0, :4] for cache in caches)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@interpreted
@pytest.mark.parametrize(("format", "rotary_dim", "queries"), [("bf16", 64, None), ("fp8", 32, "e4m3"), ("nvfp4", 0, None)])
def test_norm_rope_kernel(backend, format, rotary_dim, queries):
    """Strided inputs as slices of one projection. Rounding to few bits may fall to either side of a middle."""
    rules = li.NormRope(*(weight.bfloat16() for weight in weights(64)), rotary_dim=rotary_dim)
    projected = torch.randn(37, 3, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    q, k, positions = projected[:, :2], projected[:, 2], torch.arange(37) * 1_000
    slots = torch.arange(37) + 20
    slots[5] = -1
    caches = [li.IndexCache.wrap(torch.zeros_like(cache_of(format, SMALL).data), SMALL, format) for _ in range(2)]
    dtype = torch.float8_e4m3fn if queries else torch.bfloat16
    wanted, got = (torch.zeros(37, 2, 64, dtype=dtype) for _ in range(2))
    torch_backend.norm_rope_write(q, k, caches[0], slots, positions, rules, wanted)
    backend.norm_rope_write(q, k, caches[1], slots, positions, rules, got)
    for head in range(2):
        compare(got[:, head].float(), wanted[:, head].float(), "fp8" if queries else "bf16", f"head {head}")
    compare(caches[1].dequantize().flatten(0, 1), caches[0].dequantize().flatten(0, 1), format, "keys")


@interpreted
def test_norm_rope_kernel_at_far_positions(backend):
    """Whole turns are taken off without a loss, up to 2^24 tokens, from where on a float32 position is not exact."""
    rules = li.NormRope(*weights(64))
    generator = torch.Generator().manual_seed(9)
    q, k = torch.randn(40, 2, 64, generator=generator), torch.randn(40, 64, generator=generator)
    positions = torch.cat((torch.arange(1_000_000, 1_000_020), torch.arange((1 << 24) - 20, 1 << 24)))
    caches = [li.IndexCache.empty(1, SMALL, "fp32") for _ in range(2)]
    outs = [torch.zeros_like(q) for _ in range(2)]
    for run, cache, out in zip((torch_backend, backend), caches, outs, strict=True):
        run.norm_rope_write(q, k, cache, torch.arange(40), positions, rules, out)
    assert torch.allclose(outs[1], outs[0], rtol=0, atol=1e-5)
    assert torch.allclose(caches[1].dequantize()[0, :40], caches[0].dequantize()[0, :40], rtol=0, atol=1e-5)


# The benchmark's gate.


def measured(monkeypatch, **changes):
    monkeypatch.setattr(bench_write, "time_step", lambda call, *rest: call(0) or Timing(1.0, 1.0, 1.0))
    given = {"formats": ["bf16", "fp8", "nvfp4"], "sizes": [5, 200], "heads": 2, "device": torch.device("cpu"), **changes}
    return bench_write.measure_writes(**given, l2_bytes=1 << 10, read_tbps=4.0, protocol=QUICK, progress=lambda *told: None)


def test_benchmark_of_writing(monkeypatch):
    rows = measured(monkeypatch)
    assert [(row.format, row.rows, row.heads) for row in rows] == [
        (format, size, heads) for format in ("bf16", "fp8", "nvfp4") for size in (5, 200) for heads in (0, 2)
    ]
    bf16, fused, nvfp4 = rows[0], rows[1], rows[8]
    assert bf16.moved == 5 * 2 * 256
    assert fused.moved == 5 * (2 * 256 + 2 * 2 * 256)
    assert nvfp4.moved == 5 * (256 + 72)
    assert bf16.pct_roof == pytest.approx(100 * 5 * 512 / 4e6)
    assert bf16.as_json()["op"] == "write"


def test_benchmark_lets_a_scale_and_a_code_round_to_the_other_side():
    """A group's largest falls to one of two scales, and a number is less than a quarter of one, but not of the other."""
    want, got = torch.zeros(100, 16), torch.zeros(100, 16)
    want[7, 3], got[7, 3] = 6 * 0.34375, 6 * 0.3125
    got[7, 0] = -0.5 * 0.3125
    compare(got, want, "nvfp4", "keys")
    got[7, 0] = -0.3125
    with pytest.raises(WrongSelectionError, match=r"keys: row 7, dim 0: expected 0\.0, got -0\.3125"):
        compare(got, want, "nvfp4", "keys")


def test_benchmark_refuses_a_wrong_dim(monkeypatch):
    """One of 128 dims that is wrong in every row, and one number that is far off."""
    good = torch.randn(300, 128, generator=torch.Generator().manual_seed(10))
    compare(good, good, "bf16", "keys")
    wrong = good.clone()
    wrong[:, 5] += 0.01
    with pytest.raises(WrongSelectionError, match=r"keys: expected torch's numbers, got 0.0 % of them in dim 5"):
        compare(wrong, good, "bf16", "keys")
    wrong = good.clone()
    wrong[7, 9] += 1.0
    with pytest.raises(WrongSelectionError, match="keys: row 7, dim 9: expected"):
        compare(wrong, good, "bf16", "keys")

    def shifted(q, k, cache, slots, positions, rules, out):
        torch_backend.norm_rope_write(q, k, cache, slots, positions + 1, rules, out)

    monkeypatch.setattr(ops, "backend_of", lambda device: SimpleNamespace(norm_rope_write=shifted, write=torch_backend.write))
    with pytest.raises(WrongSelectionError, match="write, bf16, query head 0"):
        measured(monkeypatch, formats=["bf16"], sizes=[5])
