# SPDX-License-Identifier: Apache-2.0
"""The operators under vLLM's names against the reference. Keys and queries are small integers: exact scores, many ties."""

import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from support import NAN, Inputs, decode_sharded, lengths, owned_heads, random_inputs

import lightning_indexer as li
from lightning_indexer import reference
from lightning_indexer.verify.ranks import run_ranks
from lightning_indexer.vllm import ops

SPEC = li.IndexerSpec(topk=4, init_blocks=1, local_blocks=1)
HIGHER = li.IndexerSpec(topk=4, init_blocks=1, local_blocks=1, tie_break="higher")
FORCED = (SPEC.topk, SPEC.init_blocks, SPEC.local_blocks)
SCALE = 128**-0.5
SENTINEL = -77


def exact(tokens: list[int], **more) -> Inputs:
    return random_inputs(SPEC, tokens, values="ties", **more)


def clean(inputs: Inputs) -> torch.Tensor:
    """The pages with what was never written zeroed: the reference reads no such token, but multiplies whole tensors."""
    return inputs.pages.nan_to_num()


def reference_ids(inputs: Inputs, tie_break: str = "lower") -> torch.Tensor:
    rules = {"topk": SPEC.topk, "init_blocks": 1, "local_blocks": 1, "tie_break": tie_break}
    return reference.decode(
        inputs.q, clean(inputs), inputs.block_table, inputs.seq_lens, block_size=128, query_len=inputs.query_len, **rules
    )


def decode(inputs: Inputs, **changes) -> torch.Tensor:
    arguments = {
        "idx_q": inputs.q,
        "index_kv_cache": inputs.pages,
        "block_table": inputs.block_table,
        "seq_lens": inputs.seq_lens,
        "max_seq_len": int(inputs.seq_lens.max()),
        "topk": SPEC.topk,
        "init_blocks": SPEC.init_blocks,
        "local_blocks": SPEC.local_blocks,
        "num_kv_heads": inputs.q.shape[1],
        "decode_query_len": inputs.query_len,
        "max_decode_query_len": 4,
    }
    return ops.minimax_m3_index_decode(**{**arguments, **changes})


# Decode.


@pytest.mark.parametrize("tie_break", ["lower", "higher"])
@pytest.mark.parametrize("query_len", [1, 3])
def test_decode_selects_the_contract(query_len, tie_break):
    inputs = exact([128 * 9 - 5, 128, 0, 700], query_len=query_len)
    assert torch.equal(decode(inputs, tie_break=tie_break), reference_ids(inputs, tie_break))


def test_the_default_tie_rule_is_the_lower_id_and_the_rules_differ():
    inputs = exact([128 * 9 - 5, 700])
    assert torch.equal(decode(inputs), decode(inputs, tie_break="lower"))
    assert not torch.equal(decode(inputs), decode(inputs, tie_break="higher"))


def test_decode_writes_the_first_rows_of_a_larger_buffer_in_place():
    inputs = exact([900, 300], query_len=2)
    out = torch.full((2, 9, SPEC.topk), SENTINEL, dtype=torch.int32)
    found = decode(inputs, out=out)
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :4], reference_ids(inputs))
    assert (out[:, 4:] == SENTINEL).all()


def test_decode_takes_a_bound_beyond_the_table_and_a_completion_counter():
    inputs = exact([900, 300])
    counter = torch.zeros(2, 5, dtype=torch.int32)
    assert torch.equal(decode(inputs, max_seq_len=1 << 20, completion_counter=counter), reference_ids(inputs))
    assert not counter.any()


def test_decode_takes_more_blocks_than_sixteen_bits_number():
    blocks = 65_540
    pages = torch.zeros(3, 128, 128, dtype=torch.bfloat16)
    pages[1], pages[2] = 1, 2
    table = torch.zeros(1, blocks, dtype=torch.int32)
    table[0, 65_536], table[0, 65_537] = 1, 2
    q = torch.ones(1, 1, 128, dtype=torch.bfloat16)
    seq_lens = lengths(128 * blocks)
    ids = ops.minimax_m3_index_decode(q, pages, table, seq_lens, 128 * blocks, 3, 0, 1, 1, 1, 1)
    assert ids.tolist() == [[[65_539, 65_537, 65_536]]]


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("tie_break", ["lower", "higher"])
def test_decode_fills_the_sparse_table(stride, tie_break):
    inputs = exact([128 * 9 - 5, 0, 700], heads=1, query_len=2)
    pages = torch.arange(inputs.block_table.numel(), dtype=torch.int32).view_as(inputs.block_table) + 5
    out = torch.full((6, SPEC.topk * 8), SENTINEL, dtype=torch.int32)
    held = torch.full((6,), SENTINEL, dtype=torch.int32)
    ids = decode(
        inputs,
        attention_block_table=pages,
        sparse_block_table_out=out,
        sparse_context_lens_out=held,
        block_page_stride=stride,
        tie_break=tie_break,
    )
    assert torch.equal(ids, reference_ids(inputs, tie_break))
    for row, length in enumerate(reference.row_lengths(inputs.seq_lens, 2, 6)):
        numbers = pages[row // 2].tolist()
        want = reference.sparse_row(ids[0, row].tolist(), length, numbers, block_size=128, page_size=16, page_stride=stride)
        table_row = want[0] + [0] * (out.shape[1] - len(want[0]))
        assert (out[row].tolist(), int(held[row])) == (table_row, want[1])


def fused(inputs: Inputs) -> dict:
    rows = len(inputs.q)
    return {
        "attention_block_table": inputs.block_table.clamp(0, 50),
        "sparse_block_table_out": torch.zeros(rows, SPEC.topk * 8, dtype=torch.int32),
        "sparse_context_lens_out": torch.zeros(rows, dtype=torch.int32),
        "block_page_stride": 8,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_page_stride": None}, "expected all of them or none, got 3 of 4"),
        ({"attention_block_table": None, "block_page_stride": None}, "expected all of them or none, got 2 of 4"),
        ({"block_page_stride": 12}, "block_page_stride: expected 8 or 16, got 12"),
        ({"sparse_block_table_out": torch.zeros(2, 31, dtype=torch.int32)}, r"shape \[2, 32\], got shape \[2, 31\]"),
        ({"sparse_block_table_out": torch.zeros(2, 32)}, "dtype int32, got dtype float32"),
        ({"sparse_context_lens_out": torch.zeros(3, dtype=torch.int32)}, r"shape \[2\], got shape \[3\]"),
        ({"attention_block_table": torch.zeros(2, 7, dtype=torch.int32)}, "at least 8 columns, got 7"),
        ({"attention_block_table": torch.zeros(1, 9, dtype=torch.int32)}, r"shape \[2, max_blocks\], got shape \[1, 9\]"),
        ({"attention_block_table": torch.zeros(2, 9, dtype=torch.int64)}, "dtype int32, got dtype int64"),
        ({"attention_block_table": torch.zeros(2, 18, dtype=torch.int32)[:, ::2]}, "contiguous last dim"),
    ],
)
def test_a_sparse_table_that_does_not_fit_is_told(change, message):
    inputs = exact([1000, 300], heads=1)
    with pytest.raises(ValueError, match=message):
        decode(inputs, **{**fused(inputs), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decode_query_len": 0}, "decode_query_len: expected an int from 1 to 4, got 0"),
        ({"decode_query_len": 5}, "decode_query_len: expected an int from 1 to 4, got 5"),
        ({"decode_query_len": 2}, "at least 4 rows"),
        ({"num_kv_heads": 4}, r"idx_q: expected shape \[T, 4, D\], got shape \[2, 2, 128\]"),
        ({"seq_lens": lengths(900)}, "1 rows for 1 requests of 1, got 2 rows"),
        ({"out": torch.zeros(2, 1, 4, dtype=torch.int32)}, "at least 2 rows, got 1 rows"),
        ({"completion_counter": torch.zeros(2, 1, dtype=torch.int32)}, "at least 2 contiguous rows, got 1 rows"),
        ({"tie_break": "first"}, "tie_break: expected 'lower' or 'higher', got 'first'"),
        (fused(exact([1000, 300])), "sparse_block_table_out: expected one index head, got 2 heads"),
    ],
)
def test_decode_arguments_that_do_not_fit_are_told(change, message):
    with pytest.raises(ValueError, match=message):
        decode(exact([1000, 300]), **change)


def as_bytes_of(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    return clean(inputs).to(dtype).view(torch.uint8)


@pytest.mark.parametrize("query", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("bytes_only", [False, True])
def test_decode_scores_fp8_pages_however_they_are_labelled(bytes_only, query):
    inputs = exact([1000, 300])
    pages = as_bytes_of(inputs, torch.float8_e4m3fn)
    pages = pages if bytes_only else pages.view(torch.float8_e4m3fn)
    assert torch.equal(decode(inputs, index_kv_cache=pages, idx_q=inputs.q.to(query)), reference_ids(inputs))


def test_bytes_beside_fnuz_queries_are_fnuz_and_rows_of_72_bytes_are_nvfp4():
    inputs = exact([1000, 300])
    q, pages = inputs.q.to(torch.float8_e4m3fnuz), as_bytes_of(inputs, torch.float8_e4m3fnuz)
    assert torch.equal(decode(inputs, index_kv_cache=pages, idx_q=q), reference_ids(inputs))
    cache = li.IndexCache.empty(len(inputs.pages), SPEC, "nvfp4")
    cache.write(clean(inputs).flatten(0, 1), torch.arange(len(inputs.pages) * 128))
    assert torch.equal(decode(inputs, index_kv_cache=cache.data), reference_ids(inputs))


# Prefill.


def chunks(inputs: Inputs, counts: list[int]) -> dict:
    """Ragged chunks at the end of each request: arguments that scores and selection share, and q."""
    return {
        "cu_seqlens_q": torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32),
        "prefix_lens": inputs.seq_lens - torch.tensor(counts, dtype=torch.int32),
        "max_query_len": max(counts),
    }


def prefill_scores(inputs: Inputs, counts: list[int], **changes) -> torch.Tensor:
    arguments = dict(
        idx_q=inputs.q,
        index_kv_cache=inputs.pages,
        block_table=inputs.block_table,
        seq_lens=inputs.seq_lens,
        max_seq_len=int(inputs.seq_lens.max()),
        num_kv_heads=inputs.q.shape[1],
        **chunks(inputs, counts),
    )
    return ops.minimax_m3_index_score(**{**arguments, **changes})


RAGGED = [
    pytest.param([700, 300, 128], [5, 0, 128], id="empty-in-the-middle"),
    pytest.param([640, 251, 5], [0, 128, 5], id="empty-first"),
    pytest.param([1, 130], [1, 1], id="single-rows"),
    pytest.param([900], [70], id="one-request"),
    pytest.param([130, 0, 64], [65, 0, 64], id="no-prefix"),
]


@pytest.mark.parametrize(("tokens", "counts"), RAGGED)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("padding", [0, 2])
def test_prefill_scores_are_those_of_decode_rows_of_the_same_length(tokens, counts, heads, padding):
    inputs = exact(tokens, heads=heads, rows=sum(counts) + padding)
    inputs.q[sum(counts) :] = NAN
    found = prefill_scores(inputs, counts)
    assert found.shape == (heads, len(inputs.q), math.ceil(max(tokens) / 128))
    assert found.stride(1) % 16 == 0
    row = 0
    for request, count in enumerate(counts):
        for i in range(count):
            c = tokens[request] - count + i + 1
            own = inputs.block_table[request : request + 1]
            want = reference.scores(inputs.q[row : row + 1], clean(inputs), own, lengths(c), block_size=128)
            seen = math.ceil(c / 128)
            assert torch.equal(found[:, row, :seen], want[:, 0, :seen])
            assert (found[:, row, seen:] == -math.inf).all()
            row += 1


def test_prefill_scores_do_not_depend_on_how_many_groups_are_scored_at_once(monkeypatch):
    inputs = exact([700, 300, 200], rows=150)
    whole = prefill_scores(inputs, [100, 0, 50])
    monkeypatch.setattr(ops, "GROUP_SCORES", 1)
    assert torch.equal(whole, prefill_scores(inputs, [100, 0, 50]))


@pytest.mark.parametrize(("tokens", "counts"), RAGGED)
@pytest.mark.parametrize("tie_break", ["lower", "higher"])
def test_prefill_selection_is_that_of_the_library_and_of_the_reference(tokens, counts, tie_break):
    inputs = exact(tokens, rows=sum(counts))
    spec = HIGHER if tie_break == "higher" else SPEC
    shared = chunks(inputs, counts)
    out = torch.full((2, sum(counts) + 3, SPEC.topk), SENTINEL, dtype=torch.int32)
    ids = ops.minimax_m3_index_topk(prefill_scores(inputs, counts), *shared.values(), *FORCED, out=out, tie_break=tie_break)
    bounds = shared["cu_seqlens_q"]
    assert torch.equal(ids, li.prefill(inputs.q, inputs.pages, inputs.block_table, bounds, inputs.seq_lens, spec=spec))
    rules = {"topk": SPEC.topk, "init_blocks": 1, "local_blocks": 1, "tie_break": tie_break}
    want = reference.prefill(inputs.q, clean(inputs), inputs.block_table, bounds, inputs.seq_lens, block_size=128, **rules)
    assert torch.equal(ids, want)
    assert ids.data_ptr() == out.data_ptr()
    assert (out[:, sum(counts) :] == SENTINEL).all()


def test_prefill_rows_outside_every_chunk_select_nothing():
    inputs = exact([300, 200], rows=20)
    score = prefill_scores(inputs, [7, 9])
    ids = ops.minimax_m3_index_topk(score, *chunks(inputs, [7, 9]).values(), *FORCED)
    assert (ids[:, 16:] == -1).all()
    assert (ids[:, :16, 0] >= 0).all()
    nobody = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert (ops.minimax_m3_index_topk(score, *nobody, 0, *FORCED) == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 4}, r"idx_q: expected shape \[T, 4, D\]"),
        ({"prefix_lens": torch.zeros(3, dtype=torch.int32)}, r"cu_seqlens_q: expected shape \[4\], got shape \[3\]"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int64)}, "cu_seqlens_q: expected dtype int32"),
        ({"max_seq_len": 4000}, "block_table: expected at least 32 columns, got 8"),
        ({"index_kv_cache": torch.zeros(9, 64, 128, dtype=torch.bfloat16)}, r"cache: expected shape \[pages, 128, 128\]"),
    ],
)
def test_prefill_arguments_that_do_not_fit_are_told(change, message):
    with pytest.raises(ValueError, match=message):
        prefill_scores(exact([700, 300], rows=12), [5, 7], **change)


# Context parallelism in pieces.


def shard_scores(inputs: Inputs, rank: int, world: int, **changes) -> torch.Tensor:
    arguments = (inputs.q, inputs.pages, inputs.block_table, inputs.seq_lens)
    bound = changes.pop("max_seq_len", 128 * inputs.block_table.shape[1])
    return ops.indexer_context_scores(*arguments, bound, rank, world, inputs.query_len, SCALE, **changes)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shard_scores_are_scaled_and_leave_unseen_slots_alone(world):
    inputs = exact([128 * 9 - 5, 130], query_len=2)
    dense = reference.scores(inputs.q, clean(inputs), inputs.block_table, inputs.seq_lens, block_size=128, query_len=2)
    width = math.ceil(inputs.block_table.shape[1] / world)
    for rank in range(world):
        out = torch.full((2, 6, width + 2), 123.0)
        found = shard_scores(inputs, rank, world, out=out)
        assert found.data_ptr() == out.data_ptr()
        assert found.shape == (2, 4, width)
        for row, length in enumerate(reference.row_lengths(inputs.seq_lens, 2, 4)):
            for slot in range(width):
                block = slot * world + rank
                seen = block * 128 < length
                want = dense[:, row, block] * (SCALE / math.log(2)) if seen else torch.full((2,), 123.0)
                assert torch.equal(found[:, row, slot], want)
        assert (out[:, 4:] == 123).all()
        assert (out[..., width:] == 123).all()


def test_shard_scores_have_the_same_bits_for_any_larger_bound_and_survive_an_unpopulated_table():
    inputs = random_inputs(SPEC, [128 * 5 - 5, 130])
    few = shard_scores(inputs, 1, 2, max_seq_len=128 * 5)
    many = shard_scores(inputs, 1, 2)
    assert torch.equal(few.view(torch.int32), many[..., : few.shape[2]].contiguous().view(torch.int32))
    empty = torch.full_like(inputs.block_table, -1)
    scores = ops.indexer_context_scores(inputs.q, inputs.pages.nan_to_num(), empty, inputs.seq_lens, 640, 0, 2, 1, SCALE)
    assert scores[:, 0].isfinite().all()


@pytest.mark.parametrize("tie_break", ["lower", "higher"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_keys_of_all_shards_merge_into_the_selection(world, tie_break):
    inputs = exact([128 * 13 - 5, 130, 0], heads=1, query_len=2)
    blocks = inputs.block_table.shape[1]
    rules = {"query_len": 2, "init_blocks": 1, "local_blocks": 1, "tie_break": tie_break}
    keys = torch.zeros(world, 1, 6, SPEC.topk, dtype=torch.int64)
    for rank in range(world):
        scores = shard_scores(inputs, rank, world)
        shard = {"topk": SPEC.topk, "rank": rank, "world": world, "global_blocks": blocks}
        assert ops.local_topk_keys(scores, inputs.seq_lens, out=keys[rank], **shard, **rules) is not None
    found = torch.full((1, 6, SPEC.topk), SENTINEL, dtype=torch.int32)
    table = fused(inputs)
    assert ops.merge_topk_keys(keys, found, inputs.seq_lens, **table, **rules) is found
    assert torch.equal(found, reference_ids(inputs, tie_break))
    want = decode(inputs, tie_break=tie_break, **(other := fused(inputs)))
    assert torch.equal(want, found)
    for name in ("sparse_block_table_out", "sparse_context_lens_out"):
        assert torch.equal(table[name], other[name])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: shard_scores(i, 2, 2), "rank: expected an int from 0 to 1, got 2"),
        (lambda i: shard_scores(i, 0, 2, max_seq_len=4000), "block_table: expected at least 32 columns"),
        (lambda i: shard_scores(i, 0, 2, out=torch.zeros(2, 1, 5)), "at least 2 rows of 5 slots, got shape"),
        (lambda i: ops.indexer_context_scores(i.q, i.pages, i.block_table, i.seq_lens, 640, 0, 2, 1, 0.0), "above 0, got 0.0"),
        (
            lambda i: ops.local_topk_keys(
                torch.zeros(2, 2, 3),
                i.seq_lens,
                topk=4,
                rank=0,
                world=2,
                query_len=1,
                global_blocks=9,
                init_blocks=0,
                local_blocks=1,
                out=torch.zeros(2, 2, 4, dtype=torch.int64),
            ),
            "scores: expected at least 5 slots, got 3 slots",
        ),
        (lambda i: ops.all_gather(torch.zeros(4, 4).t(), None), "x: expected a contiguous tensor"),
    ],
)
def test_arguments_of_the_pieces_that_do_not_fit_are_told(call, message):
    with pytest.raises(ValueError, match=message):
        call(exact([1000, 300]))


class Coordinator:
    """A group as vLLM holds it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.device_group = group


@pytest.mark.parametrize("world", [2, 4, 8])
def test_cp_decode_on_real_ranks_selects_what_one_rank_selects(world):
    inputs = exact([128 * 13 - 5, 300], heads=4, query_len=2)
    want = decode_sharded(*inputs.arguments, world=1, **inputs.rules)

    def work(rank: int):
        group = dist.group.WORLD if world == 2 else Coordinator(dist.group.WORLD)
        decoder = ops.IndexerCPDecode(
            total_heads=4,
            rank=rank,
            world_size=world,
            max_tokens=8,
            max_seq_len=128 * 14,
            topk=SPEC.topk,
            init_blocks=1,
            local_blocks=1,
            group=group,
            device="cpu",
        )
        own = slice(decoder.head_offset, decoder.head_offset + decoder.local_heads)
        out = torch.full((decoder.local_heads, 4, SPEC.topk), SENTINEL, dtype=torch.int32)
        step = (inputs.q[:, own], inputs.pages, inputs.block_table, inputs.seq_lens, 2, out)
        tables = fused(inputs) if decoder.local_heads == 1 else {}
        same = decoder(*step, scale=SCALE, **tables) is out
        held = tables.get("sparse_context_lens_out")
        gathered = ops.all_gather(torch.full((2, 3), rank, dtype=torch.int64), group)
        fp8 = ops.all_gather(torch.full((4,), float(rank)).to(torch.float8_e4m3fn), group)
        return same, list(range(own.start, own.stop)), decoder.replicas, out, held, gathered, fp8.float()

    for rank, (same, heads, replicas, out, held, gathered, fp8) in enumerate(run_ranks(world, work)):
        assert same
        assert heads == owned_heads(rank, world, 4)
        assert replicas == max(1, world // 4)
        assert torch.equal(out, want[heads])
        if held is not None:
            tables = fused(inputs)
            one = Inputs(SPEC, inputs.q[:, heads], inputs.pages, inputs.block_table, inputs.seq_lens, 2)
            decode(one, **tables)
            assert torch.equal(held, tables["sparse_context_lens_out"])
        assert torch.equal(gathered, torch.arange(world)[:, None, None].expand(world, 2, 3))
        assert torch.equal(fp8, torch.arange(world, dtype=torch.float32)[:, None].expand(world, 4))


def test_cp_decode_tells_of_a_rank_that_is_not_the_groups():
    def work(rank: int) -> str:
        limits = {"max_tokens": 1, "max_seq_len": 128, "topk": 1, "init_blocks": 0, "local_blocks": 1}
        with pytest.raises(ValueError, match=f"rank {rank} of 2, as in group, got rank 1 of 4") as raised:
            ops.IndexerCPDecode(total_heads=4, rank=1, world_size=4, group=dist.group.WORLD, device="cpu", **limits)
        return str(raised.value)

    assert len(run_ranks(2, work)) == 2


def test_importing_the_operators_imports_no_vllm():
    code = "import sys, lightning_indexer.vllm.ops; print([name for name in sys.modules if name.split('.')[0] == 'vllm'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")
def test_the_operators_on_the_kernels_agree_with_the_library_there():
    """Through Triton's interpreter: strided score buffers, row-wise lengths, forced blocks, both halves of the exchange."""
    interpreter = pytest.importorskip("interpreter")
    interpreter.install()
    inputs = exact([128 * 3 - 5, 0, 260], rows=12)
    counts = [5, 0, 7]
    one = exact([128 * 5 - 5, 130], heads=1, query_len=2)
    with interpreter.fake_device(3):
        shared = chunks(inputs, counts)
        ids = ops.minimax_m3_index_topk(prefill_scores(inputs, counts), *shared.values(), *FORCED)
        arguments = (inputs.q, inputs.pages, inputs.block_table, shared["cu_seqlens_q"], inputs.seq_lens)
        assert torch.equal(ids, li.prefill(*arguments, spec=SPEC))
        keys = torch.zeros(2, 1, 4, SPEC.topk, dtype=torch.int64)
        rules = {"query_len": 2, "init_blocks": 1, "local_blocks": 1}
        for rank in range(2):
            out = torch.full((1, 6, 9), 123.0)
            scores = shard_scores(one, rank, 2, out=out)
            shard = {"topk": SPEC.topk, "rank": rank, "world": 2, "global_blocks": one.block_table.shape[1]}
            ops.local_topk_keys(scores, one.seq_lens, out=keys[rank], **shard, **rules)
        found = torch.full((1, 4, SPEC.topk), SENTINEL, dtype=torch.int32)
        ops.merge_topk_keys(keys, found, one.seq_lens, **rules)
        assert torch.equal(found, decode(one))
    assert torch.equal(found, reference_ids(one))
    assert torch.equal(ids, li.prefill(*arguments, spec=SPEC))
