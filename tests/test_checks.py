# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: every one is a ValueError that says which argument, what was expected and what came."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from support import lengths

import lightning_indexer as li
from lightning_indexer.spec import IndexerSpec, Shard

SPEC = IndexerSpec(num_heads=4, head_dim=64, block_size=64, topk=4)
BF16 = torch.bfloat16


def decode_arguments() -> dict:
    """A right call: 2 requests of 3 rows and 1 row of padding, up to 5 blocks."""
    return {
        "q": torch.zeros(7, 4, 64, dtype=BF16),
        "cache": torch.zeros(6, 64, 64, dtype=BF16),
        "block_table": torch.zeros(2, 5, dtype=torch.int32),
        "seq_lens": lengths(300, 64),
        "spec": SPEC,
        "query_len": 3,
    }


def select_arguments() -> dict:
    return {"scores": torch.zeros(4, 7, 5), "seq_lens": lengths(300, 64), "spec": SPEC, "query_len": 3}


def merge_arguments() -> dict:
    keys = torch.zeros(2, 4, 7, 4, dtype=torch.int64)
    return {"keys": keys, "seq_lens": lengths(300, 64), "spec": SPEC, "query_len": 3}


def prefill_arguments() -> dict:
    arguments = decode_arguments()
    del arguments["query_len"]
    return {**arguments, "cu_seqlens_q": torch.tensor([0, 3, 6], dtype=torch.int32)}


OPERATORS = {
    "score": (li.score_blocks, decode_arguments),
    "select": (li.select_keys, select_arguments),
    "merge": (li.merge_keys, merge_arguments),
    "decode": (li.decode, decode_arguments),
    "prefill": (li.prefill, prefill_arguments),
}


def sparse(**changes) -> li.SparseTable:
    arguments = {
        "block_table": torch.zeros(2, 5, dtype=torch.int32),
        "block_table_out": torch.zeros(4, 7, 16, dtype=torch.int32),
        "context_lens_out": torch.zeros(4, 7, dtype=torch.int32),
        "page_size": 16,
        "page_stride": 4,
    }
    return li.SparseTable(**{**arguments, **changes})


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, 2, dtype=dtype)[..., 0]


QUERY_ERRORS = {
    "not-a-tensor": ({"q": [1.0]}, "q: expected a torch.Tensor, got list"),
    "two-dims": ({"q": torch.zeros(7, 64, dtype=BF16)}, "q: expected shape [T, H, 64], got shape [7, 64]"),
    "head-dim": ({"q": torch.zeros(7, 4, 128, dtype=BF16)}, "q: expected shape [T, H, 64], got shape [7, 4, 128]"),
    "no-heads": ({"q": torch.zeros(7, 0, 64, dtype=BF16)}, "q: expected at least one head, got shape [7, 0, 64]"),
    "dtype": ({"q": torch.zeros(7, 4, 64)}, "q: expected dtype bfloat16, got dtype float32"),
    "dtype-of-fp32-cache": ({"cache": torch.zeros(6, 64, 64)}, "q: expected dtype float32, got dtype bfloat16"),
    "device": ({"q": torch.zeros(7, 4, 64, dtype=BF16, device="meta")}, "q: expected device cpu, got device meta"),
    "strides": ({"q": strided(7, 4, 64, dtype=BF16)}, "q: expected a contiguous last dim, got strides [512, 128, 2]"),
    "spec": ({"spec": {"topk": 4}}, "spec: expected an IndexerSpec, got dict"),
}

CACHE_ERRORS = {
    "not-a-tensor": ({"cache": None}, "cache: expected a torch.Tensor or an IndexCache, got NoneType"),
    "dtype": (
        {"cache": torch.zeros(6, 64, 64).double()},
        "cache: expected dtype bfloat16 or float16 or float32 or float8_e4m3fn or float8_e4m3fnuz, got dtype",
    ),
    "block-size": (
        {"cache": torch.zeros(6, 128, 64, dtype=BF16)},
        "cache: expected shape [pages, 64, 64], got shape [6, 128, 64]",
    ),
    "head-dim": (
        {"cache": torch.zeros(6, 64, 128, dtype=BF16)},
        "cache: expected shape [pages, 64, 64], got shape [6, 64, 128]",
    ),
    "dims": ({"cache": torch.zeros(6, 4096, dtype=BF16)}, "cache: expected shape [pages, 64, 64], got shape [6, 4096]"),
    "no-pages": ({"cache": torch.zeros(0, 64, 64, dtype=BF16)}, "cache: expected at least one page, got none"),
    "token-stride": (
        {"cache": torch.zeros(6, 64, 128, dtype=BF16)[..., :64]},
        "cache: expected token stride 64, got strides (8192, 128, 1)",
    ),
    "strides": (
        {"cache": strided(6, 64, 64, dtype=BF16)},
        "cache: expected a contiguous last dim, got strides [8192, 128, 2]",
    ),
    "cache-of-another-block-size": (
        {"cache": li.IndexCache.empty(6, dataclasses.replace(SPEC, block_size=128))},
        "cache: expected block_size 64 as in spec, got block_size 128",
    ),
    "cache-of-another-head-dim": (
        {"cache": li.IndexCache.empty(6, dataclasses.replace(SPEC, head_dim=128))},
        "cache: expected head_dim 64 as in spec, got head_dim 128",
    ),
}

TABLE_ERRORS = {
    "not-a-tensor": ({"block_table": [[0]]}, "block_table: expected a torch.Tensor, got list"),
    "requests": ({"block_table": int32(3, 5)}, "block_table: expected shape [2, max_blocks], got shape [3, 5]"),
    "dims": ({"block_table": int32(5)}, "block_table: expected shape [2, max_blocks], got shape [5]"),
    "dtype": ({"block_table": int32(2, 5).long()}, "block_table: expected dtype int32, got dtype int64"),
    "strides": (
        {"block_table": strided(2, 5, dtype=torch.int32)},
        "block_table: expected a contiguous last dim, got strides [10, 2]",
    ),
    "device": ({"block_table": int32(2, 5).to("meta")}, "block_table: expected device cpu, got device meta"),
    "narrower-than-max-seq-len": (
        {"max_seq_len": 321},
        "block_table: expected at least 6 columns for max_seq_len 321, got 5",
    ),
    "narrower-than-a-length": (
        {"seq_lens": lengths(64, 321)},
        "seq_lens: expected at most 320 tokens, the bound of block_table (5 columns), got 321",
    ),
    "max-seq-len-below-a-length": (
        {"max_seq_len": 299},
        "seq_lens: expected at most 299 tokens, the bound of max_seq_len, got 300",
    ),
    "max-seq-len-negative": ({"max_seq_len": -1}, "max_seq_len: expected an int >= 0, got -1"),
    "max-seq-len-float": ({"max_seq_len": 300.0}, "max_seq_len: expected an int >= 0, got 300.0"),
}

LENGTH_ERRORS = {
    "not-a-tensor": ({"seq_lens": [300, 64]}, "seq_lens: expected a torch.Tensor, got list"),
    "dtype": ({"seq_lens": lengths(300, 64).long()}, "seq_lens: expected dtype int32, got dtype int64"),
    "dims": ({"seq_lens": lengths(300, 64)[None]}, "seq_lens: expected shape [R], got shape [1, 2]"),
    "device": ({"seq_lens": lengths(300, 64).to("meta")}, "seq_lens: expected device cpu, got device meta"),
}

ROW_ERRORS = {
    "query-len-zero": ({"query_len": 0}, "query_len: expected an int >= 1, got 0"),
    "query-len-negative": ({"query_len": -3}, "query_len: expected an int >= 1, got -3"),
    "query-len-bool": ({"query_len": True}, "query_len: expected an int >= 1, got True"),
    "query-len-float": ({"query_len": 3.0}, "query_len: expected an int >= 1, got 3.0"),
    "too-few-rows": ({"query_len": 4}, "at least 8 rows for 2 requests of query_len 4, got 7 rows"),
}

SHARD_ERRORS = {"not-a-shard": ({"shard": (0, 2)}, "shard: expected a Shard or None, got tuple")}
ORDER_ERRORS = {"order": ({"order": "blocks"}, "order: expected 'score' or 'block', got 'blocks'")}

IDS_OUT_ERRORS = {
    "out-shape": ({"out": int32(4, 7, 5)}, "out: expected shape [4, 7, 4], got shape [4, 7, 5]"),
    "out-token-major": ({"out": int32(7, 4, 4)}, "out: expected shape [4, 7, 4], got shape [7, 4, 4]"),
    "out-dtype": ({"out": int32(4, 7, 4).long()}, "out: expected dtype int32, got dtype int64"),
    "out-strides": (
        {"out": strided(4, 7, 4, dtype=torch.int32)},
        "out: expected a contiguous last dim, got strides [56, 8, 2]",
    ),
    "out-device": ({"out": int32(4, 7, 4).to("meta")}, "out: expected device cpu, got device meta"),
}

SPARSE_ERRORS = {
    "sparse-not-a-table": ({"sparse_table": int32(2, 5)}, "sparse_table: expected a SparseTable or None, got Tensor"),
    "sparse-requests": (
        {"sparse_table": sparse(block_table=int32(3, 5))},
        "sparse_table.block_table: expected shape [2, max_blocks], got shape [3, 5]",
    ),
    "sparse-table-dtype": (
        {"sparse_table": sparse(block_table=int32(2, 5).long())},
        "sparse_table.block_table: expected dtype int32, got dtype int64",
    ),
    "sparse-columns": (
        {"sparse_table": sparse(block_table=int32(2, 4))},
        "sparse_table.block_table: expected at least 5 columns, got 4",
    ),
    "sparse-out-width": (
        {"sparse_table": sparse(block_table_out=int32(4, 7, 15))},
        "sparse_table.block_table_out: expected shape [4, 7, 16], got shape [4, 7, 15]",
    ),
    "sparse-out-one-head": (
        {"sparse_table": sparse(block_table_out=int32(7, 16))},
        "sparse_table.block_table_out: expected shape [4, 7, 16], got shape [7, 16]",
    ),
    "sparse-out-dtype": (
        {"sparse_table": sparse(block_table_out=int32(4, 7, 16).long())},
        "sparse_table.block_table_out: expected dtype int32, got dtype int64",
    ),
    "sparse-lens-shape": (
        {"sparse_table": sparse(context_lens_out=int32(7, 4))},
        "sparse_table.context_lens_out: expected shape [4, 7], got shape [7, 4]",
    ),
    "sparse-lens-dtype": (
        {"sparse_table": sparse(context_lens_out=torch.zeros(4, 7))},
        "sparse_table.context_lens_out: expected dtype int32, got dtype float32",
    ),
    "sparse-page-size": (
        {"sparse_table": sparse(page_size=24)},
        "sparse_table.page_size: expected a divisor of block_size (64), got 24",
    ),
    "sparse-page-size-zero": (
        {"sparse_table": sparse(page_size=0)},
        "sparse_table.page_size: expected an int from 1 to 64, got 0",
    ),
    "sparse-page-stride": (
        {"sparse_table": sparse(page_stride=3)},
        "sparse_table.page_stride: expected an int >= 4, got 3",
    ),
}

SCORE_OUT_ERRORS = {
    "out-shape": ({"out": torch.zeros(4, 7, 4)}, "out: expected shape [4, 7, 5], got shape [4, 7, 4]"),
    "out-shape-of-a-shard": (
        {"out": torch.zeros(4, 7, 5), "shard": Shard(1, 2)},
        "out: expected shape [4, 7, 3], got shape [4, 7, 5]",
    ),
    "out-dtype": ({"out": torch.zeros(4, 7, 5, dtype=BF16)}, "out: expected dtype float32, got dtype bfloat16"),
    "out-strides": (
        {"out": strided(4, 7, 5, dtype=torch.float32)},
        "out: expected a contiguous last dim, got strides [70, 10, 2]",
    ),
}

SELECT_ERRORS = {
    "scores-dims": ({"scores": torch.zeros(7, 5)}, "scores: expected shape [H, T, L], got shape [7, 5]"),
    "scores-dtype": ({"scores": torch.zeros(4, 7, 5).half()}, "scores: expected dtype float32, got dtype float16"),
    "scores-strides": (
        {"scores": strided(4, 7, 5, dtype=torch.float32)},
        "scores: expected a contiguous last dim, got strides [70, 10, 2]",
    ),
    "scores-too-narrow": (
        {"scores": torch.zeros(4, 7, 4)},
        "seq_lens: expected at most 256 tokens, the bound of scores (4 slots), got 300",
    ),
    "scores-of-a-shard-too-narrow": (
        {"scores": torch.zeros(4, 7, 2), "shard": Shard(0, 2)},
        "seq_lens: expected at most 256 tokens, the bound of scores (2 slots), got 300",
    ),
    "out-shape": (
        {"out": torch.zeros(4, 7, 5, dtype=torch.int64)},
        "out: expected shape [4, 7, 4], got shape [4, 7, 5]",
    ),
    "out-dtype": ({"out": int32(4, 7, 4)}, "out: expected dtype int64, got dtype int32"),
}

MERGE_ERRORS = {
    "keys-dims": (
        {"keys": torch.zeros(4, 7, 4, dtype=torch.int64)},
        "keys: expected shape [P, H, T, 4], got shape [4, 7, 4]",
    ),
    "keys-topk": (
        {"keys": torch.zeros(2, 4, 7, 3, dtype=torch.int64)},
        "keys: expected shape [P, H, T, 4], got shape [2, 4, 7, 3]",
    ),
    "keys-dtype": ({"keys": int32(2, 4, 7, 4)}, "keys: expected dtype int64, got dtype int32"),
    "no-ranks": ({"keys": torch.zeros(0, 4, 7, 4, dtype=torch.int64)}, "keys: expected at least one rank, got none"),
}

PREFILL_ERRORS = {
    "cu-not-a-tensor": ({"cu_seqlens_q": [0, 3, 6]}, "cu_seqlens_q: expected a torch.Tensor, got list"),
    "cu-shape": ({"cu_seqlens_q": int32(2)}, "cu_seqlens_q: expected shape [3], got shape [2]"),
    "cu-dtype": ({"cu_seqlens_q": torch.zeros(3)}, "cu_seqlens_q: expected dtype int32 or int64, got dtype float32"),
    "cu-descends": (
        {"cu_seqlens_q": lengths(0, 4, 3)},
        "cu_seqlens_q: expected values that ascend from 0 to at most 7, the rows of q, got [0, 4, 3]",
    ),
    "cu-not-from-zero": (
        {"cu_seqlens_q": lengths(1, 3, 6)},
        "cu_seqlens_q: expected values that ascend from 0 to at most 7, the rows of q, got [1, 3, 6]",
    ),
    "cu-negative": (
        {"cu_seqlens_q": lengths(0, -1, 6)},
        "cu_seqlens_q: expected values that ascend from 0 to at most 7, the rows of q, got [0, -1, 6]",
    ),
    "cu-past-the-rows": (
        {"cu_seqlens_q": lengths(0, 3, 8)},
        "cu_seqlens_q: expected values that ascend from 0 to at most 7, the rows of q, got [0, 3, 8]",
    ),
    "max-query-len": ({"max_query_len": 2}, "cu_seqlens_q: expected chunks of at most 2 rows, got 3"),
    "max-query-len-negative": ({"max_query_len": -1}, "max_query_len: expected an int >= 0, got -1"),
    "chunk-longer-than-its-request": (
        {"seq_lens": lengths(300, 2)},
        "seq_lens: expected at least the 3 new tokens of request 1, got 2",
    ),
}

GROUPS = {
    "score": (QUERY_ERRORS, CACHE_ERRORS, TABLE_ERRORS, LENGTH_ERRORS, ROW_ERRORS, SHARD_ERRORS, SCORE_OUT_ERRORS),
    "select": (LENGTH_ERRORS, ROW_ERRORS, SHARD_ERRORS, SELECT_ERRORS),
    "merge": (LENGTH_ERRORS, ROW_ERRORS, ORDER_ERRORS, SPARSE_ERRORS, IDS_OUT_ERRORS, MERGE_ERRORS),
    "decode": (
        QUERY_ERRORS,
        CACHE_ERRORS,
        TABLE_ERRORS,
        LENGTH_ERRORS,
        ROW_ERRORS,
        ORDER_ERRORS,
        SPARSE_ERRORS,
        IDS_OUT_ERRORS,
    ),
    "prefill": (QUERY_ERRORS, CACHE_ERRORS, TABLE_ERRORS, LENGTH_ERRORS, ORDER_ERRORS, IDS_OUT_ERRORS, PREFILL_ERRORS),
}
CASES = [
    pytest.param(operator, change, message, id=f"{operator}-{name}")
    for operator, groups in GROUPS.items()
    for errors in groups
    for name, (change, message) in errors.items()
]


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_arguments_that_the_cases_change_are_right(operator):
    call, arguments = OPERATORS[operator]
    extra = {"sparse_table": sparse()} if operator in ("decode", "merge") else {}
    assert call(**arguments(), **extra).shape[:2] == (4, 7)


@pytest.mark.parametrize(("operator", "change", "message"), CASES)
def test_operators_refuse(operator, change, message):
    call, arguments = OPERATORS[operator]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**{**arguments(), **change})


def test_outputs_are_untouched_by_a_refused_call():
    table = sparse()
    for out in (table.block_table_out, table.context_lens_out):
        out.fill_(-77)
    ids = torch.full((4, 7, 4), -77, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"order: expected 'score' or 'block', got 'up'"):
        li.decode(**decode_arguments(), out=ids, sparse_table=table, order="up")
    for out in (ids, table.block_table_out, table.context_lens_out):
        assert out.eq(-77).all()


# Spec and shard.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topk": 0}, "topk: expected an int from 1 to 64, got 0"),
        ({"topk": 65}, "topk: expected an int from 1 to 64, got 65"),
        ({"topk": 16.0}, "topk: expected an int from 1 to 64, got 16.0"),
        ({"topk": True}, "topk: expected an int from 1 to 64, got True"),
        ({"topk": 3, "init_blocks": 2, "local_blocks": 2}, "init_blocks + local_blocks: expected at most topk (3), got 4"),
        ({"init_blocks": -1}, "init_blocks: expected an int >= 0, got -1"),
        ({"local_blocks": -1}, "local_blocks: expected an int >= 0, got -1"),
        ({"num_heads": 0}, "num_heads: expected an int >= 1, got 0"),
        ({"num_heads": "4"}, "num_heads: expected an int >= 1, got '4'"),
        ({"head_dim": 96}, "head_dim: expected one of (64, 128), got 96"),
        ({"head_dim": 256}, "head_dim: expected one of (64, 128), got 256"),
        ({"block_size": 32}, "block_size: expected one of (64, 128, 256), got 32"),
        ({"tie_break": "first"}, "tie_break: expected 'lower' or 'higher', got 'first'"),
    ],
)
def test_spec_refuses(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        IndexerSpec(**values)


@pytest.mark.parametrize("field", ["block_size", "head_dim"])
def test_sizes_are_ints(field):
    """A float compares equal to an int, but is no size."""
    with pytest.raises(ValueError, match=rf"{field}: expected .*, got 128\.0"):
        IndexerSpec(**{field: 128.0})


@pytest.mark.parametrize("topk", [1, 2, 17, 64])
def test_spec_accepts_every_topk(topk):
    assert IndexerSpec(topk=topk, local_blocks=min(topk, 2), init_blocks=topk - min(topk, 2)).topk == topk


@pytest.mark.parametrize(("heads", "world"), [(4, 3), (4, 6), (6, 4), (3, 2), (1, 0)], ids=lambda n: str(n))
def test_heads_that_do_not_fit(heads, world):
    with pytest.raises(ValueError, match=rf"world: expected .*, got {world}"):
        IndexerSpec(num_heads=heads).owned_heads(0, world)


@pytest.mark.parametrize(
    ("heads", "world", "expected"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (4, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (3, 6, [[0], [0], [1], [1], [2], [2]]),
        (1, 3, [[0], [0], [0]]),
    ],
    ids=lambda n: str(n) if isinstance(n, int) else "",
)
def test_owned_heads(heads, world, expected):
    spec = IndexerSpec(num_heads=heads)
    assert [list(spec.owned_heads(rank, world)) for rank in range(world)] == expected
    assert spec.replicas(world) == max(len([1 for owned in expected if 0 in owned]), 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 2, "world": 2}, "rank: expected an int from 0 to 1, got 2"),
        ({"rank": -1, "world": 2}, "rank: expected an int from 0 to 1, got -1"),
        ({"rank": 0, "world": 0}, "world: expected an int >= 1, got 0"),
        ({"by": "token"}, "by: expected 'block' or 'page', got 'token'"),
    ],
)
def test_shard_refuses(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Shard(**values)


@pytest.mark.parametrize("world", [1, 2, 3, 8], ids=lambda world: f"P{world}")
def test_shards_cut_a_context_in_disjoint_parts(world):
    shards = [Shard(rank, world) for rank in range(world)]
    for blocks in range(20):
        owned = [shard.blocks(shard.count(blocks), "cpu").tolist() for shard in shards]
        assert sorted(itertools.chain(*owned)) == list(range(blocks))
        assert [block % world for blocks in owned for block in blocks] == [s.rank for s in shards for _ in owned[s.rank]]
        assert max(map(len, owned)) == shards[0].width(blocks)


# The cache.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: li.IndexCache.empty(0, SPEC), "num_pages: expected an int >= 1, got 0"),
        (lambda: li.IndexCache.empty(1, SPEC, "int3"), "format: expected 'bf16' or"),
        (lambda: li.IndexCache.wrap(torch.zeros(1, 64, 64), SPEC, "int3"), "got 'int3'"),
        (
            lambda: li.IndexCache.wrap(torch.zeros(1, 64, 64), SPEC, "bf16"),
            "cache: expected dtype bfloat16, got dtype float32",
        ),
        (
            lambda: li.IndexCache.wrap(torch.zeros(1, 64, 64), SPEC, scale=torch.ones(64)),
            "scale: expected None for format 'fp32', got",
        ),
    ],
    ids=["no-pages", "unknown-format", "wrap-unknown-format", "wrap-other-dtype", "wrap-scale"],
)
def test_cache_refuses(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("keys", "slots", "message"),
    [
        (torch.zeros(3, 65), torch.zeros(3).long(), "keys: expected shape [n, 64], got shape [3, 65]"),
        (torch.zeros(3, 64).double(), torch.zeros(3).long(), "keys: expected dtype bfloat16 or float16 or float32, got"),
        (torch.zeros(3, 64), torch.zeros(2).long(), "slot_mapping: expected shape [3], got shape [2]"),
        (torch.zeros(3, 64), int32(3), "slot_mapping: expected dtype int64, got dtype int32"),
    ],
    ids=["key-dim", "key-dtype", "slot-count", "slot-dtype"],
)
def test_cache_write_refuses(keys, slots, message):
    cache = li.IndexCache.empty(2, SPEC)
    cache.data.zero_()
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.write(keys, slots)
    assert cache.data.eq(0).all()


# Configs.

TRANSFORMERS = {
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 2,
}
NESTED = {
    "sparse_num_index_heads": 4,
    "sparse_index_dim": 128,
    "sparse_block_size": 128,
    "sparse_topk_blocks": 16,
    "sparse_init_block": 1,
    "sparse_local_block": 2,
    "sparse_score_type": "max",
}
FLAT_SPEC = IndexerSpec(4, 128, 128, 16, init_blocks=0, local_blocks=2)
NESTED_SPEC = IndexerSpec(4, 128, 128, 16, init_blocks=1, local_blocks=2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SimpleNamespace(**TRANSFORMERS), FLAT_SPEC),
        (TRANSFORMERS, FLAT_SPEC),
        (SimpleNamespace(sparse_attention_config=NESTED), NESTED_SPEC),
        (SimpleNamespace(sparse_attention_config=SimpleNamespace(**NESTED)), NESTED_SPEC),
        ({"sparse_attention_config": NESTED, "hidden_size": 1}, NESTED_SPEC),
        (SimpleNamespace(text_config=SimpleNamespace(**TRANSFORMERS), index_n_heads=9), FLAT_SPEC),
        ({"text_config": {"sparse_attention_config": NESTED}}, NESTED_SPEC),
        (SimpleNamespace(text_config={"sparse_attention_config": NESTED}), NESTED_SPEC),
        ({k: v for k, v in TRANSFORMERS.items() if "local" not in k}, IndexerSpec(4, 128, 128, 16)),
        ({**TRANSFORMERS, "index_local_blocks": 0}, IndexerSpec(4, 128, 128, 16, local_blocks=0)),
        ({**TRANSFORMERS, "sparse_score_type": "max"}, FLAT_SPEC),
    ],
    ids=[
        "transformers-object",
        "transformers-dict",
        "vllm-nested-dict",
        "vllm-nested-object",
        "vllm-dict-of-dict",
        "text-config-object",
        "text-config-dict",
        "text-config-mixed",
        "local-by-default",
        "local-zero-is-a-value",
        "score-type-max",
    ],
)
def test_from_config(config, expected):
    assert IndexerSpec.from_config(config) == expected


@pytest.mark.parametrize("missing", ["index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks"])
def test_from_config_names_what_is_missing(missing):
    config = {name: value for name, value in TRANSFORMERS.items() if name != missing}
    with pytest.raises(ValueError, match=rf"config: expected a value for {missing} or sparse_\w+, got none in dict"):
        IndexerSpec.from_config(config)


@pytest.mark.parametrize("score_type", ["mean", "lse"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_from_config_refuses_other_scores(score_type, nested):
    sparse_config = {**NESTED, "sparse_score_type": score_type}
    config = {"sparse_attention_config": sparse_config} if nested else {**TRANSFORMERS, "sparse_score_type": score_type}
    with pytest.raises(ValueError, match=f"sparse_score_type: expected 'max', got '{score_type}'"):
        IndexerSpec.from_config(config)


def test_from_config_checks_the_values():
    with pytest.raises(ValueError, match="topk: expected an int from 1 to 64, got 512"):
        IndexerSpec.from_config({**TRANSFORMERS, "index_topk_blocks": 512})


def test_minimax_m3():
    assert IndexerSpec.minimax_m3() == IndexerSpec(4, 128, 128, 16, 0, 1, "lower")


# The context-parallel indexer, alone.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": None}, "spec: expected an IndexerSpec, got NoneType"),
        ({"max_rows": 0}, "max_rows: expected an int >= 1, got 0"),
        ({"max_seq_len": 0}, "max_seq_len: expected an int >= 1, got 0"),
        ({"transport": "pigeon"}, "transport: expected 'auto' or"),
        ({"dispatch": "never"}, "dispatch: expected 'auto' or"),
    ],
    ids=["spec", "max-rows", "max-seq-len", "transport", "dispatch"],
)
def test_indexer_refuses_at_construction(change, message):
    arguments = {"spec": SPEC, "max_rows": 7, "max_seq_len": 320, "device": "cpu", **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        li.ContextParallelIndexer(**arguments)


INDEXER_ERRORS = {
    **{name: case for name, case in QUERY_ERRORS.items() if name not in ("two-dims", "head-dim", "no-heads", "spec")},
    **CACHE_ERRORS,
    **{
        name: case
        for name, case in TABLE_ERRORS.items()
        if not name.startswith("max-seq-len") and "max_seq_len" not in case[0]
    },
    **LENGTH_ERRORS,
    **ROW_ERRORS,
    **ORDER_ERRORS,
    **SPARSE_ERRORS,
    **IDS_OUT_ERRORS,
    "heads": ({"q": torch.zeros(7, 3, 64, dtype=BF16)}, "q: expected 4 owned or all 4 heads, got 3 heads"),
    "head-dim": ({"q": torch.zeros(7, 4, 128, dtype=BF16)}, "q: expected shape [T, heads, 64], got shape [7, 4, 128]"),
    "above-max-rows": ({"q": torch.zeros(9, 4, 64, dtype=BF16)}, "q: expected at most max_rows (8) rows, got 9 rows"),
    "above-max-seq-len": (
        {"block_table": int32(2, 9), "seq_lens": lengths(64, 321)},
        "seq_lens: expected at most 320 tokens, the bound of max_seq_len, got 321",
    ),
}


@pytest.mark.parametrize(("change", "message"), INDEXER_ERRORS.values(), ids=INDEXER_ERRORS)
def test_indexer_refuses(change, message):
    indexer = li.ContextParallelIndexer(SPEC, max_rows=8, max_seq_len=320, device="cpu")
    arguments = {**decode_arguments(), **change}
    del arguments["spec"]
    with pytest.raises(ValueError, match=re.escape(message)):
        indexer.decode(**arguments)


def test_indexer_warmup_refuses_an_unknown_format():
    indexer = li.ContextParallelIndexer(SPEC, max_rows=8, max_seq_len=320, device="cpu")
    with pytest.raises(ValueError, match=r"cache_format: expected 'bf16' or .*, got 'int3'"):
        indexer.warmup("int3")


def test_a_plan_is_for_one_bound_order_and_batch():
    spec = li.IndexerSpec()
    cache, q = torch.zeros(4, 128, 128, dtype=torch.bfloat16), torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    table, lens = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([300], dtype=torch.int32)

    def call(**options: object) -> torch.Tensor:
        return li.decode(q, cache, table, lens, spec=spec, **options)

    plan = li.plan_step(lens, spec=spec, max_seq_len=512)
    assert torch.equal(call(plan=plan), call())
    with pytest.raises(ValueError, match="plan: expected one for max_seq_len 400, got one for 512"):
        call(plan=plan, max_seq_len=400)
    with pytest.raises(ValueError, match="plan: expected one for order 'block' and topk 16"):
        call(plan=plan, order="block")
    with pytest.raises(ValueError, match="max_seq_len: expected an int >= 0, got -1"):
        li.plan_step(lens, spec=spec, max_seq_len=-1)
    with pytest.raises(ValueError, match="plan: expected a StepPlan or None, got int"):
        call(plan=3)
    with pytest.raises(ValueError, match="workspace: expected a Workspace or None, got int"):
        call(workspace=3)


def test_devices_and_specs_are_checked():
    with pytest.raises(ValueError, match="device: expected a GPU, got cpu"):
        li.Workspace(li.IndexerSpec(), max_requests=1, max_columns=1, device="cpu")
    with pytest.raises(ValueError, match="device: expected an available device, got 'nowhere'"):
        li.ContextParallelIndexer(li.IndexerSpec(), max_rows=1, max_seq_len=128, device="nowhere")
    with pytest.raises(ValueError, match="spec: expected an IndexerSpec, got NoneType"):
        li.IndexCache.empty(1, None)
    with pytest.raises(ValueError, match="page_size: expected an int from 1 to 128, got 0"):
        li.warmup(li.IndexerSpec(), device="cpu", page_size=0)
