# SPDX-License-Identifier: Apache-2.0
"""What layers of an engine share, without vLLM: metadata as it makes them, our kernels through Triton's interpreter."""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import Inputs, lengths, random_inputs

import lightning_indexer as li
from lightning_indexer import calibration
from lightning_indexer.verify.ranks import run_ranks
from lightning_indexer.vllm import engine
from lightning_indexer.vllm.engine import EngineIndexer, Kind, Limits
from lightning_indexer.vllm.options import Options, Setting, asked

interpreter = pytest.importorskip("interpreter")

SPEC = li.IndexerSpec(num_heads=2, head_dim=64, block_size=64, topk=4)
COLUMNS = 16
ROWS = 8


def kind_of(**changes) -> Kind:
    facts = {
        "spec": SPEC,
        "limits": Limits(rows=ROWS, tokens=64 * COLUMNS, query_len=2, micro_batches=2),
        "device": torch.device("cpu"),
        "format": "bf16",
        "query_dtype": torch.bfloat16,
        "order": "score",
        "context_parallel": False,
        "tables": True,
        "options": Options(),
    }
    return Kind(**{**facts, **changes})


def step_of(seq_lens: torch.Tensor, block_table: torch.Tensor, query_len: int = 1) -> SimpleNamespace:
    rows = len(seq_lens) * query_len
    decode = SimpleNamespace(seq_lens=seq_lens, block_table=block_table, decode_query_len=query_len)
    return SimpleNamespace(
        num_actual_tokens=rows, num_decodes=len(seq_lens), num_decode_tokens=rows, num_prefills=0, prefill=None, decode=decode
    )


def requests(tokens: list[int], seed: int = 0, query_len: int = 1) -> Inputs:
    """Inputs whose table has all columns of the engine."""
    inputs = random_inputs(SPEC, tokens, seed=seed, query_len=query_len)
    table = torch.nn.functional.pad(inputs.block_table, (0, COLUMNS - inputs.block_table.shape[1]), value=-1)
    return Inputs(SPEC, inputs.q, inputs.pages, table, inputs.seq_lens, query_len)


def on_kernels(work, vendor: str = "nvidia", **changes):
    """Run on one rank whose CPU takes our kernels, as a GPU would."""

    def run(rank: int):
        interpreter.install()
        with interpreter.fake_device(3, topk=4, vendor=vendor), pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "backend_of", lambda device: interpreter.triton_backend)
            return work(EngineIndexer(kind_of(**changes), dist.group.WORLD))

    return run_ranks(1, run)[0]


def test_a_plan_serves_the_layers_of_one_pass_and_no_more():
    """The same metadata again, its lengths changed in place, as between draft tokens of a speculative step."""
    first, second = requests([64 * 15, 70]), requests([64 * 2, 64 * 14 + 1], seed=1)

    def work(shared: EngineIndexer):
        seq_lens, table = first.seq_lens.clone(), first.block_table.clone()
        step = step_of(seq_lens, table)
        found, addresses = [], []
        for live in (first, second, first):
            seq_lens.copy_(live.seq_lens)
            table.copy_(live.block_table)
            cache = li.IndexCache.wrap(live.pages, SPEC)
            for layer in ("layer 0", "layer 1", "layer 2"):
                ids, _ = shared.select(layer, step, live.q, cache, None)
                found.append(ids)
                made = shared._made[0]
                addresses.append((made.layer, made.plan.shares.data_ptr(), made.plan.before.data_ptr()))
        return found, addresses

    found, addresses = on_kernels(work)
    wanted = [li.decode(*live.arguments, spec=SPEC) for live in (first, second, first)]
    assert all(torch.equal(ids, wanted[number // 3]) for number, ids in enumerate(found))
    assert len(set(addresses)) == 1  # a graph that was captured finds the plan where it was
    assert addresses[0][0] == "layer 0"


def test_plans_of_other_batches_and_micro_batches_stay_where_they_are():
    """A18: after captures of many sizes, memory that nobody holds any more is filled with rubbish; then all are run again."""
    steps = {rows: requests([64 * (3 + rows), *[100] * (rows - 1)], seed=rows) for rows in (1, 2, 5, 8)}

    def work(shared: EngineIndexer):
        metadata = {rows: step_of(live.seq_lens, live.block_table) for rows, live in steps.items()}

        def run(micro_batch: int):
            found = {}
            for rows, live in steps.items():
                cache = li.IndexCache.wrap(live.pages, SPEC)
                ids, _ = shared.select("layer 0", metadata[rows], live.q, cache, None, micro_batch=micro_batch)
                found[rows] = ids
            return found

        for micro_batch in (0, 1):
            run(micro_batch)
        before = {size: plan.shares.data_ptr() for size, plan in shared._plans.items()}
        gc.collect()
        rubbish = [torch.full((size,), value, dtype=torch.int32) for size in (6, 18, 36) for value in (-1, 0x7FFFFFFF)] * 20
        again = [run(micro_batch) for micro_batch in (0, 1)]
        return (
            before == {size: plan.shares.data_ptr() for size, plan in shared._plans.items()},
            len(before),
            again,
            len(rubbish),
        )

    same, count, again, _ = on_kernels(work)
    assert same
    assert count == 2 * len(steps)
    for found in again:
        for rows, live in steps.items():
            assert torch.equal(found[rows], li.decode(*live.arguments, spec=SPEC)), rows


def test_decode_and_prefill_share_a_step_on_the_kernels():
    live = requests([64 * 9 + 1, 300, 200], query_len=1)
    rows = torch.cat((live.q[:2], random_inputs(SPEC, [1], rows=5, seed=7).q))
    chunk = SimpleNamespace(
        block_table=live.block_table[2:],
        cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=live.seq_lens[2:],
        max_query_len=5,
        max_seq_len=64 * 99,  # beyond the table
    )
    step = step_of(live.seq_lens[:2], live.block_table[:2])
    step.num_actual_tokens, step.num_prefills, step.prefill = 7, 1, chunk
    out = torch.full((9, 2, 4), -77, dtype=torch.int32)

    def work(shared: EngineIndexer):
        made = shared._workspaces
        decoded, prefilled = shared.select("layer", step, rows, li.IndexCache.wrap(live.pages, SPEC), out.transpose(0, 1))
        return decoded, prefilled, out, [workspace is not None for workspace in made]

    decoded, prefilled, written, workspaces = on_kernels(work)
    want = li.decode(rows[:2], live.pages, live.block_table[:2], live.seq_lens[:2], spec=SPEC)
    chunks = li.prefill(rows[2:], live.pages, chunk.block_table, chunk.cu_seqlens_q, chunk.seq_lens, spec=SPEC)
    assert torch.equal(decoded, want)
    assert torch.equal(prefilled, chunks)
    assert torch.equal(written[:7].transpose(0, 1), torch.cat((want, chunks), dim=1))
    assert (written[7:] == -77).all()
    assert workspaces == [True, True]


def test_draft_rows_and_sparse_tables():
    live = requests([64 * 9 + 1, 0, 70], query_len=2)

    def work(shared: EngineIndexer):
        table = li.SparseTable.empty(SPEC, 2, 6, 16, live.block_table.clamp(0, 9))
        ids, prefilled = shared.select(
            "layer", step_of(live.seq_lens, live.block_table, 2), live.q, li.IndexCache.wrap(live.pages, SPEC), None, table
        )
        return ids, prefilled, table.block_table_out, table.context_lens_out

    ids, prefilled, pages, held = on_kernels(work)
    table = li.SparseTable.empty(SPEC, 2, 6, 16, live.block_table.clamp(0, 9))
    want = li.decode(*live.arguments, **live.rules, sparse_table=table)
    assert torch.equal(ids, want)
    assert prefilled is None
    assert torch.equal(pages, table.block_table_out)
    assert torch.equal(held, table.context_lens_out)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_packed_caches_with_fp8_queries(format):
    """As vLLM has them: queries in e4m3; on the kernels that have no instruction for it, so on another vendor's."""
    first, second = requests([64 * 9 + 1, 70]), requests([64 * 3, 64 * 12], seed=1)

    def stored(live: Inputs) -> li.IndexCache:
        cache = li.IndexCache.empty(len(live.pages), SPEC, format)
        cache.write(live.pages.nan_to_num().flatten(0, 1), torch.arange(len(live.pages) * 64))
        return cache

    caches = [stored(live) for live in (first, second)]
    queries = [live.q.to(torch.float8_e4m3fn) for live in (first, second)]

    def work(shared: EngineIndexer):
        steps = [step_of(live.seq_lens, live.block_table) for live in (first, second)]
        return [shared.select("layer", *step, None)[0] for step in zip(steps, queries, caches, strict=True)]

    found = on_kernels(work, "amd", format=format, query_dtype=torch.float8_e4m3fn)
    for ids, live, q, cache in zip(found, (first, second), queries, caches, strict=True):
        assert torch.equal(ids, li.decode(q, cache, live.block_table, live.seq_lens, spec=SPEC))


@pytest.mark.parametrize("dispatch", ["sharded", "auto"])
def test_layers_of_ranks_that_exchange_inside_the_kernels(dispatch):
    """Three layers with keys of their own per pass; "auto" shares the passes that see more than 11 pages."""
    if torch.cuda.is_available():
        pytest.skip("processes of one GPU: test_gpu_peer.py")
    from test_peer import SharedRanks, on_ranks

    passes = [requests([64 * 9 + 1, 64 * 5], 10), requests([64, 64], 20), requests([64 * 12, 0], 30)]
    options = Options(transport="peer", dispatch=dispatch, threshold=11 if dispatch == "auto" else None)
    layers = range(3)

    def keys(live: Inputs, layer: int) -> torch.Tensor:
        return live.pages.roll(layer, dims=-1)

    def work(ranks: SharedRanks):
        limits = Limits(ROWS, 64 * COLUMNS, 1, 1)
        shared = EngineIndexer(kind_of(context_parallel=True, options=options, limits=limits, tables=False), ranks)
        before = shared.statistics()["steps"]  # warm and measured already
        found = []
        for live in passes:
            step = step_of(live.seq_lens, live.block_table)
            q = live.q[:, ranks.rank : ranks.rank + 1]
            for layer in layers:
                cache = li.IndexCache.wrap(keys(live, layer), SPEC)
                found.append(shared.select(f"layer {layer}", step, q, cache, None)[0])
        after = shared.statistics()
        return found, before, after["steps"], after["transport"], after["dispatch"], shared.describe()

    results = on_ranks(2, work)
    for rank, (found, before, counted, *facts, told) in enumerate(results):
        assert before == {"sharded": 0, "replicated": 0}
        assert facts == ["peer", dispatch]
        assert counted == ({"sharded": 9, "replicated": 0} if dispatch == "sharded" else {"sharded": 6, "replicated": 3})
        assert ("(shared above 11 pages up to 8 rows)" in told) == (dispatch == "auto")
        for number, live in enumerate(passes):
            for layer in layers:
                want = li.decode(live.q, keys(live, layer), live.block_table, live.seq_lens, spec=SPEC)
                assert torch.equal(found[3 * number + layer], want[rank : rank + 1]), (number, layer, rank)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_layers_of_ranks_that_hold_the_cache_once(micro_batches):
    """Decode steps, whose layers share a plan; between them one with prefill rows, beside which the plan lasts."""
    if torch.cuda.is_available():
        pytest.skip("processes of one GPU: test_gpu_peer.py")
    from test_peer import SharedRanks, on_ranks

    passes = [requests([64 * 9 + 1, 64 * 5], 10), requests([64 * 7, 3, 200], 20), requests([64 * 12, 0], 30)]
    rows = torch.cat((passes[1].q[:2], random_inputs(SPEC, [1], rows=9, seed=7).q))
    cut = {"block_table": passes[1].block_table[2:], "seq_lens": passes[1].seq_lens[2:]}
    chunk = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 9], dtype=torch.int32), max_query_len=9, max_seq_len=200, **cut)
    mixed = step_of(passes[1].seq_lens[:2], passes[1].block_table[:2])
    mixed.num_actual_tokens, mixed.num_prefills, mixed.prefill = 11, 1, chunk
    steps = [step_of(passes[0].seq_lens, passes[0].block_table), mixed, step_of(passes[2].seq_lens, passes[2].block_table)]
    queries = [passes[0].q, rows, passes[2].q]

    def keys(live: Inputs, layer: int) -> torch.Tensor:
        return live.pages.roll(layer, dims=-1)

    def work(ranks: SharedRanks):
        limits = Limits(ROWS, 64 * COLUMNS, 1, micro_batches)
        options = Options(transport="peer", shard_by="page")
        shared = EngineIndexer(kind_of(context_parallel=True, options=options, limits=limits, tables=False), ranks)
        found, made = [], []
        for number, (live, step, q) in enumerate(zip(passes, steps, queries, strict=True)):
            batch = number % micro_batches
            for layer in range(2):
                cache = li.IndexCache.wrap(keys(live, layer), SPEC).held_by(shared.indexer.shard)
                own = q[:, ranks.rank : ranks.rank + 1]
                parts = shared.select(f"layer {layer}", step, own, cache, None, micro_batch=batch)
                found.append(torch.cat([part for part in parts if part is not None], dim=1))
                plan = shared._made[batch].plan if batch in shared._made else None
                made.append(plan and (plan.owned.data_ptr(), shared._made[batch].layer))
        return found, made, shared.statistics()

    for rank, (found, made, told) in enumerate(on_ranks(2, work, batches=micro_batches)):
        assert (told["shard_by"], told["dispatch"], told["steps"]["replicated"]) == ("page", "sharded", 0)
        assert len({address for address, _ in filter(None, made[:2] + made[4:])}) == 1  # of the one micro-batch that they used
        assert made[4][1] == made[5][1] == "layer 0"
        for number, (live, step, q) in enumerate(zip(passes, steps, queries, strict=True)):
            for layer in range(2):
                pages, several = keys(live, layer), step.num_decodes
                want = li.decode(q[:several], pages, live.block_table[:several], live.seq_lens[:several], spec=SPEC)
                if step.num_prefills:
                    rest = chunk.block_table, chunk.cu_seqlens_q, chunk.seq_lens
                    want = torch.cat((want, li.prefill(q[several:], pages, *rest, spec=SPEC)), dim=1)
                assert torch.equal(found[2 * number + layer], want[rank : rank + 1]), (number, layer, rank)


# Options and refusals.


def test_options_are_read_from_their_section_and_default_to_nothing():
    assert Options.read({}) == Options.read({"lightning_indexer": {}, "other": 1}) == Options()
    assert Options.read(SimpleNamespace(compute_hash=lambda: "x")) == Options()
    given = {"kernels": True, "transport": "peer", "threshold": 0, "capture": "x", "capture_tokens": 9, "timeout": 2.5}
    assert Options.read({"lightning_indexer": given}) == Options(**given)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (["kernels"], r"lightning_indexer: expected a mapping, got \['kernels'\]"),
        ({"kernel": True}, "lightning_indexer: expected some of kernels, transport, .*, got kernel"),
        ({"kernels": "yes"}, "kernels: expected true or false, got 'yes'"),
        ({"transport": "ring"}, "transport: expected 'auto' or 'collective' or 'peer', got 'ring'"),
        ({"dispatch": "always"}, "dispatch: expected 'auto' or 'sharded' or 'replicated', got 'always'"),
        ({"threshold": -1}, "threshold: expected an int >= 0, got -1"),
        ({"timeout": 0}, "timeout: expected a number of seconds > 0, got 0"),
        ({"shard_by": "token"}, "shard_by: expected 'block' or 'page', got 'token'"),
        ({"tie_break": "none"}, "tie_break: expected 'lower' or 'higher', got 'none'"),
        ({"order": "page"}, "order: expected 'auto' or 'score' or 'block', got 'page'"),
        ({"capture": ""}, "capture: expected the name of a file, got ''"),
        ({"capture_calls": 0}, "capture_calls: expected an int >= 1, got 0"),
        ({"capture_tokens": -1}, "capture_tokens: expected an int >= 0, got -1"),
        ({"capture_megabytes": 0}, "capture_megabytes: expected an int >= 1, got 0"),
    ],
)
def test_options_that_do_not_fit_are_told(section, message):
    with pytest.raises(ValueError, match=message):
        Options.read({"lightning_indexer": section})


FLAG = SimpleNamespace(minimax_m3_indexer_cp=True)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, False),
        ({"attention_config": None, "additional_config": None}, False),
        ({"attention_config": SimpleNamespace(), "additional_config": {}}, False),
        ({"attention_config": FLAG}, True),
        ({"additional_config": {"lightning_indexer": {"kernels": True}}}, True),
        ({"additional_config": {"lightning_indexer": {"shard_by": "page"}}}, True),
    ],
)
def test_a_configuration_without_the_fields_does_not_ask(config, want):
    assert asked(SimpleNamespace(**config)) == want


SETTING = {
    "context_parallel": True,
    "platform": "cuda",
    "tensor_parallel": 4,
    "decode_context_parallel": 1,
    "cache_dtype": "bf16",
    "heads": 4,
    "head_dim": 128,
    "block_size": 128,
    "topk": 16,
    "score_type": "max",
    "query_len": 1,
    "fused_decode": False,
    "full_graphs": True,
    "sleep_mode": False,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"platform": "rocm"},
        {"platform": "cpu", "query_len": 40},
        {"tensor_parallel": 16},
        {"tensor_parallel": 1, "context_parallel": False},
        {"cache_dtype": "fp8"},
        {"query_len": 16},
        {"sleep_mode": True, "context_parallel": False},
    ],
)
def test_settings_that_are_served(change):
    assert Setting(**{**SETTING, **change}).refusals(Options()) == []


def test_sleep_takes_no_memory_that_the_collective_transport_needs():
    setting = Setting(**{**SETTING, "sleep_mode": True})
    assert setting.refusals(Options(transport="collective")) == []
    assert len(setting.refusals(Options(transport="peer"))) == 1


def test_what_only_ends_sharing_is_told_apart_from_what_ends_service():
    change = {"tensor_parallel": 1, "sleep_mode": True, "decode_context_parallel": 2, "fused_decode": True}
    setting = Setting(**{**SETTING, **change})
    unshared, unserved = setting.unshared(Options()), setting.unserved(Options())
    assert [told.split(":")[0] for told in unshared] == ["tensor_parallel_size", "enable_sleep_mode"]
    assert [told.split(":")[0] for told in unserved] == ["decode_context_parallel_size", "kernel_config.monokernel"]
    assert setting.refusals(Options()) == unshared + unserved


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensor_parallel": 1}, "tensor_parallel_size: expected more than 1 "),
        ({"platform": "xpu"}, "platform: expected cuda or rocm or cpu, got xpu"),
        (
            {"decode_context_parallel": 2},
            "decode_context_parallel_size: expected 1: every rank holds the whole index cache, got 2",
        ),
        ({"cache_dtype": "nvfp4"}, "indexer_kv_dtype: expected bf16 or fp8 or fp8_e4m3, got 'nvfp4'"),
        ({"score_type": "sum"}, "sparse_score_type: expected 'max', got 'sum'"),
        ({"fused_decode": True}, "kernel_config.monokernel: expected one that takes its blocks from the indexer: false"),
        ({"tensor_parallel": 3}, "world: expected a divisor or a multiple of num_heads (4), got 3"),
        ({"block_size": 16}, "block_size: expected one of (64, 128, 256), got 16"),
        (
            {"sleep_mode": True},
            'enable_sleep_mode: expected false, or transport "collective": "peer" exchanges through memory that must stay',
        ),
        ({"query_len": 17}, "num_speculative_tokens: expected at most 15, got 16"),
    ],
)
def test_settings_that_are_refused(change, reason):
    (told,) = Setting(**{**SETTING, **change}).refusals(Options())
    assert told.startswith(reason)


@pytest.mark.parametrize(
    ("change", "options", "name"),
    [
        ({"context_parallel": False}, {}, "minimax_m3_indexer_cp"),
        ({}, {"dispatch": "replicated"}, "dispatch"),
        ({"full_graphs": False}, {"capture": "x"}, "capture"),
        ({"kv_connector": "NixlConnector"}, {}, "kv_transfer_config"),
        ({"hisparse": True}, {}, "hisparse_config"),
    ],
)
def test_a_cache_that_is_held_once_is_neither_moved_nor_recorded_nor_replicated(change, options, name):
    setting = Setting(**{**SETTING, **change})
    (told,) = setting.refusals(Options(shard_by="page", **options))
    assert told.startswith(f"{name}: expected ")
    assert setting.refusals(Options(**options)) == []
    assert Setting(**SETTING).refusals(Options(shard_by="page")) == []


def test_a_recording_needs_a_decode_that_python_sees():
    (told,) = Setting(**SETTING).refusals(Options(capture="x"))
    assert told.startswith("cudagraph_mode: expected a decode that is not replayed as a whole (--enforce-eager, or ")
    assert Setting(**{**SETTING, "full_graphs": False}).refusals(Options(capture="x")) == []


def test_an_engine_without_sharing_tells_so():
    def work(rank: int):
        return EngineIndexer(kind_of(), dist.group.WORLD).describe()

    assert run_ranks(2, work)[0] == (
        f"lightning-indexer {li.__version__}: 1 of 2 heads on a rank, each over the whole context; index cache bf16,"
        " queries bfloat16, top 4, ids by score"
    )


def test_thresholds_are_told_by_rows():
    found = [(1, calibration.ALWAYS), (4, 1200), (16, calibration.NEVER)]
    told = " (shared always up to 1 rows, above 1,200 pages up to 4 rows, never up to 16 rows)"
    assert engine.told_thresholds(found) == told
    assert engine.told_thresholds([]) == ""


def test_lengths_that_no_indexer_takes_are_told_on_every_rank():
    live = requests([64 * 15, 70])

    def work(rank: int) -> str:
        shared = EngineIndexer(kind_of(context_parallel=True, limits=Limits(ROWS, 64, 1, 1)), dist.group.WORLD)
        with pytest.raises(ValueError, match="seq_lens") as raised:
            shared.select(
                "layer", step_of(lengths(960, 70), live.block_table), live.q[:, :1], li.IndexCache.wrap(live.pages, SPEC), None
            )
        return str(raised.value)

    assert len(set(run_ranks(2, work))) == 1
