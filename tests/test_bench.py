# SPDX-License-Identifier: Apache-2.0
"""Benchmarks without a GPU: cases, arithmetic, protocol, gate and report. No time is asserted."""

import contextlib
import dataclasses
import functools
import json
import math
import sys

import pytest
import torch
from click.testing import CliRunner
from support import INF, NAN

import lightning_indexer as li
from lightning_indexer import cli, reference, torch_backend
from lightning_indexer.bench import cases, gate, plot, report, run
from lightning_indexer.bench import inputs as drawn
from lightning_indexer.bench import timing as protocol
from lightning_indexer.bench.cases import DecodeCase, PrefillCase, RankCase, RankPrefillCase, decode_set, prefill_set
from lightning_indexer.bench.exchange import ExchangeRow
from lightning_indexer.bench.gpus import GpusResult, LinkRow, ModeRow
from lightning_indexer.bench.results import case_name, identity, parse_result
from lightning_indexer.bench.roofs import Roofs
from lightning_indexer.bench.run import Facts, Result, Row, measure, query_dtype
from lightning_indexer.bench.timing import Protocol, Rotation, Timing, plan_rotation

MIB = 1 << 20
SPEC = li.IndexerSpec()
FACTS = Facts("NVIDIA H200", "580.1", "2.11.0", "3.6.0", "0123456789abcdef", "2026-11-30", 1 << 16)
ROOFS = Roofs(read_tbps=4.0, matrix_tflops=800.0)
UNEVEN = DecodeCase(((1, 700), (2, 300)), 3, heads=2)


def silent(label: str, done: int, total: int) -> None:
    pass


def run_calls(us: float, step, rotation: Rotation) -> Timing:
    """Stands in for graph replay: every call of every graph runs once."""
    for view in range(rotation.views):
        step.call(view)
    return Timing(us, us - 1, us + 2)


def measured(*chosen, facts: Facts = FACTS, format: str = "bf16", us: float = 10.0, pool_bytes: int = 4 * MIB) -> Result:
    timer = functools.partial(run_calls, us)
    device = torch.device("cpu")
    return measure(chosen, format, device, facts, ROOFS, Protocol(), silent, timer=timer, pool_bytes=pool_bytes)


def row(case, us: float = 10.0, roof_us: float = 5.0, peer_us: float | None = None) -> Row:
    moved, flops = case.index_bytes(SPEC, 256), case.flops(SPEC)
    return Row(case, "bf16", "bf16", Timing(us, us - 1, us + 1), Rotation(57, 1, 32), moved, flops, roof_us, peer_us)


# cases


def test_default_decode_cases_are_the_peers_rows():
    shapes = [(case.groups[0], case.query_len) for case in decode_set("default", 1)]
    grid = {((b, c), q) for b in (1, 8, 32, 64) for c in (4096, 16_384, 65_536, 131_072) for q in (1, 4)}
    long = {((1, 524_288), 1), ((1, 1_048_576), 1), ((8, 1_048_576), 1)}
    assert len(shapes) == 35
    assert set(shapes) == grid | long


@pytest.mark.parametrize(
    ("batch", "context", "query_len", "us"),
    [(1, 4096, 1, 8.0), (64, 131_072, 1, 480.4), (32, 4096, 4, 16.7), (64, 65_536, 4, 275.6), (8, 1_048_576, 1, 499.2)],
)
def test_decode_peer(batch, context, query_len, us):
    assert DecodeCase(((batch, context),), query_len).peer_us("bf16", "bf16") == us


def test_default_prefill_cases_are_the_peers_rows():
    shapes = [(case.heads, case.tokens, case.prefix) for case in prefill_set()]
    chunks = [(2048, 0), (8192, 0), (8192, 32_768), (8192, 131_072), (2048, 131_072), (2048, 1_046_528)]
    assert shapes == [(heads, *chunk) for heads in (1, 4) for chunk in chunks]


@pytest.mark.parametrize(("shape", "us"), [((1, 2048, 0), 29), ((4, 8192, 131_072), 3829), ((1, 2048, 1_046_528), 11_352)])
def test_prefill_peer(shape, us):
    assert PrefillCase(*shape).peer_us("bf16", "bf16") == us


def test_peer_has_no_figure_for_other_cases():
    assert DecodeCase(((1, 4096),), 1, heads=4).peer_us("bf16", "bf16") is None
    assert DecodeCase(((1, 4097),), 1).peer_us("bf16", "bf16") is None
    assert DecodeCase(((1, 4096), (1, 4096)), 1).peer_us("bf16", "bf16") is None
    assert PrefillCase(2, 2048, 0).peer_us("bf16", "bf16") is None


def test_peer_of_an_fp8_cache():
    case = DecodeCase(((32, 131_072),), 4)
    assert (case.peer_us("fp8", "bf16"), case.peer_us("fp8", "fp8")) == (197.0, 151.1)
    assert DecodeCase(((1, 4096),), 1).peer_us("fp8", "fp8") is None
    assert case.peer_us("nvfp4", "fp8") is None
    assert PrefillCase(1, 2048, 0).peer_us("fp8", "bf16") is None


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_pool_of_packed_keys(monkeypatch, format):
    """Keys near what a normal distribution gives, and the same few pages again."""
    monkeypatch.setattr(drawn, "DISTINCT_PAGES", 2)
    pool = drawn.draw_pool(5, SPEC, format, torch.device("cpu"), torch.Generator().manual_seed(0))
    keys = pool.dequantize()
    assert keys.shape == (5, 128, 128)
    assert 0.9 < keys.std() < 1.1
    assert torch.equal(keys[:2], keys[2:4])
    assert torch.equal(keys[0], keys[4])
    assert not torch.equal(keys[0], keys[1])


def test_query_formats():
    formats = {name: li.IndexCache.empty(1, SPEC, name).format for name in ("bf16", "fp8", "nvfp4")}
    assert query_dtype(formats["bf16"], None) == torch.bfloat16
    assert query_dtype(formats["fp8"], "fp8") == torch.float8_e4m3fn
    assert query_dtype(formats["nvfp4"], None) == torch.bfloat16
    with pytest.raises(ValueError, match="queries"):
        query_dtype(formats["bf16"], "fp8")


def test_msa_cases():
    found = decode_set("msa", 1)
    assert len(found) == 28
    assert {case.query_len for case in found} == {8}
    assert {case.groups[0][0] for case in found} == {8, 32, 64, 128}
    assert {case.groups[0][1] // 1024 for case in found} == {1, 4, 5, 10, 50, 100, 200}


def test_skewed_cases_mix_lengths():
    found = decode_set("skewed", 1)
    assert found[0].seq_lens == [1_048_576] + [4096] * 63
    assert found[0].fields() == {"batch": 64, "context": 1_048_576, "query_len": 1, "lengths": [[1, 1_048_576], [63, 4096]]}
    assert all(len(set(case.seq_lens)) > 1 for case in found)


def test_all_cases():
    found = decode_set("all", 4)
    assert found == [case for name in ("default", "msa", "skewed") for case in decode_set(name, 4)]
    assert {case.heads for case in found} == {4}


def test_necessary_bytes_by_hand():
    assert DecodeCase(((32, 131_072),), 1).index_bytes(SPEC, 256) == 1_073_741_824
    assert DecodeCase(((32, 131_072),), 4, heads=4).index_bytes(SPEC, 256) == 1_073_741_824  # read once for all rows and heads
    assert UNEVEN.index_bytes(SPEC, 256) == (700 + 300 + 300) * 256
    assert PrefillCase(4, 2048, 1000).index_bytes(SPEC, 256) == 3048 * 256


def test_flops_by_hand():
    assert UNEVEN.flops(SPEC) == 2 * 2 * 128 * (698 + 699 + 700 + 2 * (298 + 299 + 300))
    # The table's floor for 4 heads, T = 8,192, prefix 131,072: 1,435 µs at 790 TFLOP/s.
    assert PrefillCase(4, 8192, 131_072).flops(SPEC) == 4 * 2 * 128 * (8192 * 131_072 + 8192 * 4096)
    assert PrefillCase(4, 8192, 131_072).flops(SPEC) / 790e12 == pytest.approx(1435e-6, rel=1e-2)
    assert PrefillCase(1, 3, 200).flops(SPEC) == 256 * 600 + 128 * 9


def test_least_time_is_that_of_the_binding_roof():
    assert ROOFS.us("decode", 4_000_000, 10**15) == 1.0
    assert ROOFS.us("prefill", 10**15, 1_600_000_000) == 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecodeCase(((0, 4096),), 1), "batch: expected an int >= 1, got 0"),
        (lambda: DecodeCase(((1, 127),), 1), "context: expected an int >= 128, got 127"),
        (lambda: DecodeCase(((1, 4096),), 0), "query_len: expected an int >= 1, got 0"),
        (lambda: PrefillCase(0, 1, 200), "heads: expected an int >= 1, got 0"),
        (lambda: PrefillCase(1, 8, 100), "tokens + prefix: expected an int >= 128, got 108"),
    ],
)
def test_bad_cases_are_refused(make, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        make()


# protocol

POOL_PAGES = 1 << 20  # 32 GiB of bf16 pages
L2 = 50 * MIB


@pytest.mark.parametrize(
    ("batch", "context", "rotation"),
    [
        (1, 4096, Rotation(57, 5, 32)),  # 57 MiB a graph
        (1, 131_072, Rotation(57, 1, 1024)),
        (32, 65_536, Rotation(57, 1, 16_384)),
        (64, 131_072, Rotation(16, 1, 65_536)),  # 2 GiB a layer
        (8, 1_048_576, Rotation(16, 1, 65_536)),
        (128, 1_048_576, Rotation(3, 1, 349_525)),  # 32 GiB a layer: page ids repeat
    ],
)
def test_layers_and_working_set(batch, context, rotation):
    layer_pages = batch * context // 128
    assert plan_rotation(layer_pages, layer_pages << 15, L2, POOL_PAGES) == rotation


@pytest.mark.parametrize("case", decode_set("all", 1) + prefill_set(), ids=lambda case: f"{case.op} {case.name}")
def test_every_case_exceeds_the_cache_five_times_and_fits_the_pool(case):
    layer_pages = sum(math.ceil(length / 128) for length in case.seq_lens)
    layer_bytes = case.index_bytes(SPEC, 256)
    found = plan_rotation(layer_pages, layer_bytes, L2, POOL_PAGES)
    assert found.views * layer_bytes > 5 * L2
    assert found.pages == layer_pages
    assert found.views * found.pages <= POOL_PAGES
    assert (8 <= found.layers <= 57) or (found.layers > 2 and layer_bytes > 4 << 30)


class FakeGpu:
    """Graphs whose replay lasts as many µs as told, on a clock that the events read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replay_us: list[float]) -> None:
        self.clock = 0.0
        self.durations = iter(replay_us)
        self.replayed: list[int] = []
        self.captured: list[list[str]] = []
        gpu = self

        class Graph:
            def __init__(self) -> None:
                self.number = len(gpu.captured)
                gpu.captured.append([])

            def replay(self) -> None:
                gpu.replayed.append(self.number)
                gpu.clock += next(gpu.durations)

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.clock

            def elapsed_time(self, end: "Event") -> float:
                return (end.at - self.at) / 1000

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def call(self, view: int) -> None:
        self.captured[-1].append(f"layer {view}")

    def plan(self) -> None:
        self.captured[-1].append("plan")


def test_graphs_hold_one_plan_and_all_layers_and_take_turns(monkeypatch):
    gpu = FakeGpu(monkeypatch, [1000.0, 1000.0, 30.0, 60.0, 45.0])
    found = protocol.time_step(gpu.call, gpu.plan, Rotation(3, 2, 8), Protocol(replays=3, warmup=1))
    assert gpu.captured == [["plan", "layer 0", "layer 1", "layer 2"], ["plan", "layer 3", "layer 4", "layer 5"]]
    assert gpu.replayed == [0, 1, 0, 1, 0]  # both graphs once before the first event
    assert (found.us, found.us_min, found.us_max) == pytest.approx((15.0, 10.0, 20.0))


def test_without_a_plan_a_graph_holds_calls_only(monkeypatch):
    gpu = FakeGpu(monkeypatch, [5.0] * 25)
    protocol.time_step(gpu.call, None, Rotation(3, 1, 8), Protocol())
    assert gpu.captured == [["layer 0", "layer 1", "layer 2"]]
    assert len(gpu.replayed) == 5 + 20


# gate


@pytest.mark.parametrize(("init", "local", "topk"), [(0, 1, 4), (2, 2, 6), (0, 0, 3), (1, 3, 16)])
def test_sorted_selection_is_the_reference(init, local, topk):
    spec = li.IndexerSpec(topk=topk, init_blocks=init, local_blocks=local)
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5])
    scores = values[torch.randint(len(values), (2, 40, 9), generator=generator)]
    lengths = torch.randint(0, 9 * 128 + 1, (40,), generator=generator)
    expected = reference.select(scores, lengths.tolist(), block_size=128, topk=topk, init_blocks=init, local_blocks=local)
    assert torch.equal(gate.sorted_selection(scores, lengths, spec), expected)


def swapped(real, *args, out, **kwargs):
    """The right blocks of row 4, head 1 in the wrong order."""
    real(*args, out=out, **kwargs)
    out[1, 4, :2] = out[1, 4, [1, 0]]


def test_wrong_selection_names_the_row(monkeypatch):
    monkeypatch.setattr(li, "decode", functools.partial(swapped, li.decode))
    timed = []
    result = measure(
        [UNEVEN], "bf16", torch.device("cpu"), FACTS, ROOFS, Protocol(), silent, timer=timed.append, pool_bytes=MIB
    )
    assert timed == []
    ((case, why),) = result.failures
    assert case == UNEVEN
    assert why.startswith("row 4, head 1 (1 of 18 rows here): expected [2, ")
    assert result.as_json()["failures"][0]["error"] == why
    assert report.summary(result).startswith("FAILED, not timed: decode 1 x 700 + 2 x 300, Q 3, H 2: row 4, head 1")


def test_other_cases_are_timed_after_a_wrong_one(monkeypatch):
    real = li.prefill

    def wrong_for_two_heads(q, *args, out, **kwargs):
        real(q, *args, out=out, **kwargs)
        if q.shape[1] == 2:
            out[0, 5, :2] = out[0, 5, [1, 0]]

    monkeypatch.setattr(li, "prefill", wrong_for_two_heads)
    result = measured(PrefillCase(2, 12, 250), PrefillCase(1, 12, 250))
    assert [found.case for found in result.rows] == [PrefillCase(1, 12, 250)]
    assert result.failures[0][1].startswith("row 5, head 0 (1 of 24 rows here)")


def test_wrong_scores_are_found(monkeypatch):
    """A selection may be right by wrong scores: those of some blocks are computed anew."""
    real = li.score_blocks
    monkeypatch.setattr(li, "score_blocks", lambda *args, **kwargs: real(*args, **kwargs) * 1.001)
    ((_, why),) = measured(DecodeCase(((2, 1000),), 1)).failures
    assert why.startswith("row 0, head 0, block 0: expected a score of ")


def test_replay_that_writes_nothing_is_found():
    device = torch.device("cpu")
    idle = lambda step, rotation: Timing(1.0, 1.0, 1.0)  # noqa: E731
    result = measure([UNEVEN], "bf16", device, FACTS, ROOFS, Protocol(), silent, timer=idle, pool_bytes=MIB)
    ((_, why),) = result.failures
    assert "row 0, head 0" in why
    assert "by the ids of the same call outside a graph, got [-7, " in why


@pytest.mark.parametrize("format", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "case",
    [UNEVEN, DecodeCase(((3, 2500),), 2, heads=4), PrefillCase(2, 21, 300), PrefillCase(1, 128, 0), PrefillCase(4, 16, 2300)],
    ids=lambda case: f"{case.op} {case.name}",
)
def test_right_selection_is_timed(case, format):
    result = measured(case, format=format)
    assert result.failures == []
    assert [(found.case, found.format, found.timing.us) for found in result.rows] == [(case, format, 10.0)]


def test_chunks_of_the_gate_name_rows_of_the_case(monkeypatch):
    monkeypatch.setattr(gate, "MAX_SCORES", 1)  # one request at a time
    assert measured(UNEVEN, PrefillCase(2, 21, 300)).failures == []
    monkeypatch.setattr(li, "decode", functools.partial(swapped, li.decode))
    assert measured(UNEVEN).failures[0][1].startswith("row 4, head 1 (1 of 6 rows here)")


def test_pages_may_repeat_where_the_pool_is_small():
    result = measured(DecodeCase(((4, 1000),), 1), pool_bytes=9 * 128 * 256)
    assert result.failures == []
    assert result.rows[0].rotation.pages == 3


# report


def test_json_of_decode():
    result = measured(DecodeCase(((2, 1000),), 2), facts=FACTS)
    assert result.as_json() == {
        "device": "NVIDIA H200",
        "driver": "580.1",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "commit": "0123456789abcdef",
        "date": "2026-11-30",
        "read_roof_TBps": 4.0,
        "matrix_roof_TFLOPs": 800.0,
        "rows": [
            {
                "op": "decode",
                "format": "bf16",
                "queries": "bf16",
                "heads": 1,
                "batch": 2,
                "context": 1000,
                "query_len": 2,
                "us": 10.0,
                "us_min": 9.0,
                "us_max": 12.0,
                "bytes": 512_000,
                "flops": 2 * 128 * 2 * 1999,
                "pct_roof": 1.28,  # 0.128 µs at 4 TB/s
                "layers": 8,
            }
        ],
        "failures": [],
    }


def test_json_of_prefill():
    (found,) = measured(PrefillCase(2, 64, 192)).as_json()["rows"]
    assert {key: found[key] for key in ("op", "heads", "batch", "tokens", "prefix")} == {
        "op": "prefill",
        "heads": 2,
        "batch": 1,
        "tokens": 64,
        "prefix": 192,
    }
    assert "context" not in found
    assert found["flops"] == 2 * 2 * 128 * (64 * 192 + 64 * 32)
    assert found["pct_roof"] == round(100 * found["flops"] / 800e12 / 10e-6, 2)


def test_peer_is_compared_on_its_device_and_format_only(monkeypatch):
    monkeypatch.setitem(cases.peers.DECODE, (1, 1000, 1), 20.0)
    case = DecodeCase(((1, 1000),), 1)
    others = [dataclasses.replace(FACTS, device=name) for name in ("NVIDIA B200", "NVIDIA GH200 480GB", "NVIDIA H200 NVL")]
    assert measured(case).as_json()["rows"][0]["peer_us"] == 20.0
    assert measured(case).rows[0].ratio == 0.5
    assert not any("peer_us" in measured(case, facts=other).as_json()["rows"][0] for other in others)
    assert "peer_us" not in measured(case, format="fp16").as_json()["rows"][0]


def test_table_with_peer():
    rows = [row(DecodeCase(((1, 4096),), 1), us=4.0, roof_us=0.2, peer_us=8.0), row(UNEVEN, us=6.0, roof_us=3.0)]
    assert report.result_table(Result(FACTS, ROOFS, rows, [], False)).split("\n") == [
        "case                         layers    us   min   max   MB  % roof  peer us  x peer",
        "---------------------------  ------  ----  ----  ----  ---  ------  -------  ------",
        "1 x 4,096, Q 1                   57  4.00  3.00  5.00  1.0     5.0      8.0    0.50",
        "1 x 700 + 2 x 300, Q 3, H 2      57  6.00  5.00  7.00  0.3    50.0        -       -",
    ]


def test_table_without_peer():
    rows = [row(PrefillCase(4, 8192, 131_072), us=2000.0, roof_us=1000.0)]
    assert report.result_table(Result(FACTS, ROOFS, rows, [], False)).split("\n") == [
        "case                          layers       us      min      max  TFLOP  % roof",
        "----------------------------  ------  -------  -------  -------  -----  ------",
        "4 heads, 8,192 after 131,072      57  2000.00  1999.00  2001.00  1.134    50.0",
    ]


def test_summary_is_mean_worst_and_best():
    ratios = {4096: 4.0, 16_384: 10.4 * 2, 65_536: 14.3}
    rows = [row(case := DecodeCase(((1, n),), 1), us=us, peer_us=case.peer_us("bf16", "bf16")) for n, us in ratios.items()]
    assert report.summary(Result(FACTS, ROOFS, rows, [], False)).split("\n") == [
        "Ours over the peer, geometric mean of 3 cases: 1.000",
        "Worst case: 2.000 (1 x 16,384, Q 1)",
        "Best case: 0.500 (1 x 4,096, Q 1)",
    ]
    assert report.summary(Result(FACTS, ROOFS, [], [], False)).startswith("No peer figures for these cases")


def test_header_says_what_was_measured():
    result = Result(FACTS, ROOFS, [row(DecodeCase(((1, 4096),), 1), peer_us=8.0)], [], False)
    text = report.header(result, 20)
    assert "NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0, commit 0123456789ab, 2026-11-30" in text
    assert "4.00 TB/s read, 800 TFLOP/s bf16" in text
    assert "Index-K cache in bf16, queries in bf16." in text
    assert "median of 20 replays" in text
    assert "vLLM 0.33.0 Triton on an H200, 2026-11-29" in text
    assert "one step plan" not in text
    assert "a graph holds one step plan and the calls of all layers" in report.header(Result(FACTS, ROOFS, [], [], True), 20)


def test_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(DecodeCase(((b, c),), q), us=float(c)) for b in (1, 8) for c in (4096, 16_384) for q in (1, 4)]
    rows += [row(UNEVEN), row(PrefillCase(4, 8192, 0))]
    plot.write_plot(Result(FACTS, ROOFS, rows, [], False), tmp_path / "plot.png")
    written = (tmp_path / "plot.png").read_bytes()
    assert written.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(written) > 10_000


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"--plot needs matplotlib: pip install 'lightning-indexer\[bench\]'"):
        plot.require_matplotlib()


# context parallelism


def test_a_rank_reads_its_blocks_with_all_heads():
    case = RankCase(((2, 1_000), (1, 129)), 2, 4, 4)
    assert case.index_bytes(SPEC, 256) == (2 * (128 + 128) + 128) * 256  # blocks 0 and 4 of 8, block 0 of 2
    assert case.flops(SPEC) == 4 * 2 * 128 * (2 * (999 + 1000) + 128 + 129)
    assert case.own == DecodeCase(((2, 1_000), (1, 129)), 2, 1)
    assert case.fields() | {"world": 4, "dispatch": "sharded"} == case.fields()
    with pytest.raises(ValueError, match="world"):
        RankCase(((1, 1_000),), 1, 4, 3)


@pytest.mark.parametrize("shard_by", ["block", "page"])
def test_a_rank_is_verified_with_the_others_part(monkeypatch, shard_by):
    case = RankCase(((1, 700), (2, 300)), 2, 4, 2, shard_by)
    result = measured(case)
    assert [found.case for found in result.rows] == [case]
    told = result.as_json()["rows"][0]
    assert told["world"] == 2
    assert told.get("shard_by", "block") == shard_by
    assert ("us_plan" in told) == (shard_by == "page")
    assert ("plan us" in report.result_table(result)) == (shard_by == "page")
    assert case.name.endswith(", by page") == (shard_by == "page")
    real = run.prepare

    def spoiled(*arguments):
        step = real(*arguments)
        merged = step.merged
        return dataclasses.replace(step, merged=lambda view: merged(view).flip(-1))

    monkeypatch.setattr(run, "prepare", spoiled)
    result = measured(case)
    assert result.rows == []
    assert "expected" in result.failures[0][1]


@pytest.mark.parametrize("shard_by", ["block", "page"])
def test_a_rank_of_a_prefill(monkeypatch, shard_by):
    case = RankPrefillCase(4, 72, 1_000, 4, shard_by)
    assert case.index_bytes(SPEC, 256) == (128 + 128 + 48) * 256  # blocks 0, 4 and 8 of 9
    assert case.flops(SPEC) == 2 * 128 * (72 * 1_000 + 72 * 36)
    assert case.own == PrefillCase(1, 72, 1_000)
    result = measured(case)
    assert [found.case for found in result.rows] == [case]
    told = result.as_json()["rows"][0]
    assert (told["op"], told["world"], told["tokens"]) == ("prefill", 4, 72)
    assert told.get("shard_by", "block") == shard_by
    assert case_name(told) == "prefill, H 4, 72 after 1,000, P 4" + (", by page" if shard_by == "page" else "")
    real = torch_backend.prefill_keys

    def forgetful(*arguments):
        real(*arguments)
        arguments[-1][:, -1] = 0

    monkeypatch.setattr(torch_backend, "prefill_keys", forgetful)
    result = measured(case)
    assert result.rows == []
    assert "row 71" in result.failures[0][1]
    with pytest.raises(ValueError, match="world"):
        RankPrefillCase(4, 72, 1_000, 3)


def test_what_the_exchange_adds_and_when_sharding_pays():
    rows = [ExchangeRow(4, 1, "peer", 5.0, 8.0, 10.0, 384), ExchangeRow(4, 8, "peer", 6.0, 10.0, 13.0, 3_072)]
    table = report.exchange_table(rows).splitlines()
    assert table[2].split() == ["4", "1", "peer", "5.00", "3.00", "2.00", "384"]
    assert rows[1].as_json() | {"us": 4.0, "us_queries": 3.0, "bytes": 3_072} == rows[1].as_json()
    ranks = [RankCase(((1, context),), 1, 4, 4) for context in (4_096, 65_536)]
    longer = RankCase(((8, 4_096),), 1, 4, 4)
    timed = [row(ranks[0], 5.0), row(ranks[1], 7.0), row(longer, 6.0)]
    timed += [row(ranks[0].own, 6.0), row(ranks[1].own, 16.0), row(longer.own, 7.0)]
    told = report.gain_table(Result(FACTS, ROOFS, timed, [], True), rows)
    cells = [line.rsplit(maxsplit=5)[1:] for line in told.splitlines()[2:5]]
    assert cells[0] == ["5.00", "3.00", "8.00", "6.00", "1.33"]
    assert cells[1] == ["7.00", "3.00", "10.00", "16.00", "0.62"]
    assert cells[2] == ["6.00", "4.00", "10.00", "7.00", "1.43"]
    assert "batch 1, Q 1: from about 19,456 tokens on" in told  # -2 us at 4,096, 6 at 65,536
    assert "batch 8, Q 1: not up to 4,096 tokens" in told


def test_ways_to_take_a_step_on_several_gpus():
    def way(case: RankCase, transport: str, dispatch: str, chosen: str, us: float) -> ModeRow:
        timing, moved = Timing(us, us - 1, us + 1), case.index_bytes(SPEC, 256)
        return ModeRow(case, "bf16", "bf16", transport, dispatch, chosen, timing, 57, moved, ROOFS.us("cp", moved, 0))

    rows = []
    for context, times in ((4_096, (6.0, 30.0, 9.0, 6.3)), (65_536, (16.0, 31.0, 10.0, 10.1))):
        case = RankCase(((8, context),), 1, 4, 2)
        chosen = "replicated" if context == 4_096 else "sharded"
        rows += [
            way(case, *names, us)
            for names, us in zip(
                (
                    ("none", "replicated", "replicated"),
                    ("collective", "sharded", "sharded"),
                    ("peer", "sharded", "sharded"),
                    ("peer", "auto", chosen),
                ),
                times,
                strict=True,
            )
        ]
    exchanged = [ExchangeRow(2, 8, "collective", 6.0, 30.0, 42.0, 1_024, gpus=2)]
    result = GpusResult(FACTS, ROOFS, [(1, 700), (128, 900)], rows, exchanged, [LinkRow(2, "all-gather", 512, 9.5)])
    told = report.gpus_text(result, 20)
    assert told.startswith(f"2 x {FACTS.device}")
    assert "700 up to 1 rows, 900 up to 128 rows" in told
    short, long = (line for line in told.splitlines() if line.startswith("8 x "))
    assert short.rsplit(maxsplit=8)[1:-1] == ["6.00", "30.00", "9.00", "6.30", "replicated", "1.050", "0.67"]
    assert long.rsplit(maxsplit=8)[1:-1] == ["16.00", "31.00", "10.00", "10.10", "sharded", "1.010", "1.60"]
    assert float(long.split()[-1]) == pytest.approx(100 * ROOFS.us("cp", 8 * 32_768 * 256, 0) / 10, abs=0.06)
    assert "Worst choice of auto: 1.050 (8 x 4,096, Q 1, H 4)" in told
    assert "batch 8, Q 1: from about 24,576 tokens on" in told  # -3 us at 4,096, 6 at 65,536
    read = parse_result(json.loads(json.dumps(result.as_json())), "told")
    assert [row["op"] for row in read.rows] == ["cp"] * 8 + ["exchange", "link"]
    assert len({identity(row) for row in read.rows}) == len(read.rows)
    assert [row["dispatch"] for row in read.rows[:4]] == ["replicated", "sharded", "sharded", "auto"]
    assert case_name(read.rows[-2]) == "exchange, collective, 2 GPUs, 8 rows"
    assert case_name(read.rows[-1]) == "all-gather, 2 ranks, 512 B each"
    assert case_name(read.rows[3]) == "cp, 8 x 4,096, Q 1, H 4, P 2, peer, auto, bf16"


def test_gpus_that_are_not_there():
    done = CliRunner().invoke(cli.main, ["bench", "cp", "--gpus", "64"])
    assert done.exit_code == 2
    assert "--gpus: expected at most the" in done.stderr


# command line


@pytest.mark.parametrize("command", ["decode", "prefill", "cp"])
def test_without_a_device(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ([], ["--device", "cpu"], ["--device", "cuda:1"]):
        done = CliRunner().invoke(cli.main, ["bench", command, *device])
        name = device[-1] if device else "cuda"
        assert (done.exit_code, done.output) == (1, f"Error: {name!r} is no CUDA or HIP device that works here\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "1,2"], "expected BATCH,CONTEXT,QUERY_LEN, got '1,2'"),
        (["--case", "1,4096,x"], "expected BATCH,CONTEXT,QUERY_LEN, got '1,4096,x'"),
        (["--case", "1,100,1"], "context: expected an int >= 128, got 100"),
        (["--device", "warp"], "expected a device such as cuda or cuda:1, got 'warp'"),
    ],
)
def test_bad_options(options, message):
    done = CliRunner().invoke(cli.main, ["bench", "decode", *options])
    assert done.exit_code != 0
    assert message in done.output


@pytest.fixture
def benched(monkeypatch):
    """`bench` on the CPU with a stand-in for the clock; returns what it was asked to measure."""
    asked = []

    def fake(chosen, format, device, facts, roofs, replays, progress, queries):
        asked.append((list(chosen), format, replays))
        timer = functools.partial(run_calls, 10.0)
        small = [DecodeCase(((2, 500),), 3, heads=2)]
        return measure(small, format, device, facts, roofs, replays, progress, timer=timer, pool_bytes=MIB)

    monkeypatch.setattr(cli, "_gpu", lambda name: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cli.Facts, "read", lambda device, commit: FACTS)
    monkeypatch.setattr(cli, "measure_roofs", lambda replays, device: ROOFS)
    monkeypatch.setattr(cli, "measure", fake)
    return asked


def test_command_prints_and_writes(benched, tmp_path):
    done = CliRunner().invoke(cli.main, ["bench", "decode", "--quick", "--json", str(tmp_path / "result.json")])
    assert done.exit_code == 0, done.output
    assert "2 x 500, Q 3" in done.stdout
    assert "decode 2 x 500, Q 3" in done.stderr
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["device"], len(written["rows"])) == ("NVIDIA H200", 1)
    assert benched == [(decode_set("default", 1), "bf16", protocol.QUICK)]


def test_command_fails_on_a_wrong_selection(benched, monkeypatch, tmp_path):
    monkeypatch.setattr(li, "decode", functools.partial(swapped, li.decode))
    done = CliRunner().invoke(cli.main, ["bench", "decode", "--json", str(tmp_path / "result.json")])
    assert done.exit_code == 1
    assert "FAILED, not timed: decode 2 x 500, Q 3, H 2: row 4, head 1" in done.stdout
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["rows"] == []
    assert written["failures"][0]["error"].startswith("row 4, head 1")


PREFILL_RANKS = [RankPrefillCase(4, case.tokens, case.prefix, 4) for case in prefill_set() if case.heads == 4]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["decode", "--case", "3,4096,2", "--heads", "4"], [DecodeCase(((3, 4096),), 2, 4)]),
        (["decode", "--cases", "msa"], decode_set("msa", 1)),
        (["decode", "--cases", "skewed", "--case", "3,4096,2"], [*decode_set("skewed", 1), DecodeCase(((3, 4096),), 2)]),
        (["prefill"], prefill_set()),
        (["prefill", "--world", "4"], [*PREFILL_RANKS, *dict.fromkeys(case.own for case in PREFILL_RANKS)]),
        (
            ["prefill", "--world", "2", "--shard-by", "page", "--case", "4,512,1024"],
            [RankPrefillCase(4, 512, 1024, 2, "page"), PrefillCase(2, 512, 1024)],
        ),
        (["prefill", "--case", "4,512,1024", "--case", "1,2,300"], [PrefillCase(4, 512, 1024), PrefillCase(1, 2, 300)]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_chosen_cases(benched, arguments, expected):
    done = CliRunner().invoke(cli.main, ["bench", *arguments, "--format", "fp16"])
    assert done.exit_code == 0, done.output
    assert benched == [(expected, "fp16", Protocol())]


def test_plot_is_refused_before_the_run(benched, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(cli.main, ["bench", "decode", "--plot", str(tmp_path / "plot.png")])
    assert done.exit_code == 1
    assert "pip install 'lightning-indexer[bench]'" in done.output
    assert benched == []


def test_command_compares_with_a_file_and_with_a_commit(benched, monkeypatch, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert CliRunner().invoke(cli.main, ["bench", "decode", "--json", str(first)]).exit_code == 0
    told = json.loads(first.read_text())
    done = CliRunner().invoke(cli.main, ["bench", "decode", "--baseline", str(first), "--json", str(second)])
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("No regression.\n")
    assert json.loads(second.read_text())["baseline"]["cases"][0]["ratio"] == 1.0

    def run(commit, arguments):
        assert (commit, arguments) == ("HEAD", ["decode", "--quick"])
        faster = {**told, "rows": [{**row, "us": row["us"] / 2} for row in told["rows"]]}
        return parse_result(faster, "before")

    monkeypatch.setattr(cli, "find_commit", lambda source: "0123abcd")
    monkeypatch.setattr(cli, "against_commit", functools.partial(cli.against_commit, run=run))
    done = CliRunner().invoke(cli.main, ["bench", "decode", "--quick", "--baseline", "HEAD", "--rounds", "2"])
    assert done.exit_code == 1
    assert done.stdout.endswith("REGRESSION\n")


def test_results_are_not_overwritten_without_force(benched, tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text("kept")
    done = CliRunner().invoke(cli.main, ["bench", "decode", "--json", str(kept)])
    assert (done.exit_code, done.output) == (2, f"Error: {kept} exists; --force overwrites it\n")
    assert benched == []
    assert CliRunner().invoke(cli.main, ["bench", "decode", "--json", str(kept), "--force"]).exit_code == 0
    assert len(json.loads(kept.read_text())["rows"]) == 1
