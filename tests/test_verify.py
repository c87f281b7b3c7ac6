# SPDX-License-Identifier: Apache-2.0
"""The main job: it passes on what is right, and says what is wrong with what is not."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import lightning_indexer as li
from lightning_indexer import reference
from lightning_indexer.cli import main
from lightning_indexer.collective import CollectiveTransport
from lightning_indexer.traffic import exchange_bytes, index_bytes
from lightning_indexer.verify import compare, minimax_m3, report, synthetic
from lightning_indexer.verify.case import Case
from lightning_indexer.verify.ranks import run_ranks

SMALL = ["verify", "--input", "random", "--context", "3000", "--batch", "3", "--topk", "4"]


def silent(label: str, done: int, total: int) -> None:
    """No progress."""


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def test_random_input_passes(tmp_path):
    path = tmp_path / "result.json"
    result = run(*SMALL, "--world", "1,2,8", "--query-len", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "Proven: on 1, 2, 8 ranks all" in result.output
    found = json.loads(path.read_text())
    assert found["passed"] is True
    assert [row["world"] for row in found["rows"]] == [1, 2, 8]
    # 3 requests of 2 rows and 2 rows of padding; 4 heads, at 8 ranks each twice.
    assert [row["selections"] for row in found["rows"]] == [32, 32, 64]
    assert [row["equal"] for row in found["rows"]] == [32, 32, 64]
    assert all(row["differing"] == 0 and row["differences"] == [] for row in found["rows"])


def exchange_nothing(transport: CollectiveTransport, keys: torch.Tensor) -> torch.Tensor:
    """A rank's own heads on its own shard: heads are mixed with blocks."""
    own = transport.heads[dist.get_rank(transport.group)]
    mine = keys[own.start : own.stop]
    return torch.stack([mine] + [torch.zeros_like(mine)] * (transport.world - 1))


def test_a_broken_merge_fails(monkeypatch):
    monkeypatch.setattr(CollectiveTransport, "exchange_keys", exchange_nothing)
    result = run(*SMALL, "--world", "1,4")
    assert result.exit_code == 1
    assert "FAILED: selections differ in 1 of 2 comparisons" in result.output
    assert "4 ranks, rank 0, head 0, row 0: not the unsharded selection" in result.output
    for told in ("expected [", "got      [", "scores around place K"):
        assert told in result.output


def test_wrong_scores_of_a_rank_fail(monkeypatch):
    """The reference selects from the unsharded scores, so a rank whose keys are off by one block is found."""
    gather = CollectiveTransport.gather_queries
    monkeypatch.setattr(CollectiveTransport, "gather_queries", lambda self, q: gather(self, q).roll(1, dims=1))
    assert run(*SMALL, "--world", "2").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--world", "3"), "world: expected a divisor or a multiple of num_heads (4), got 3"),
        (("--world", "two"), "expected numbers of ranks such as 1,2,4,8, got 'two'"),
        (("--world", "0"), "expected numbers of ranks from 1 to 64"),
        (("--topk", "65"), "topk: expected an int from 1 to 64, got 65"),
        (("--head-dim", "96"), "head_dim: expected one of (64, 128), got 96"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_options_are_told(arguments, told):
    result = run("verify", "--input", "random", *arguments)
    assert result.exit_code != 0
    assert told in result.output


@pytest.fixture(scope="module")
def small_model() -> list[Case]:
    pytest.importorskip("transformers")
    return minimax_m3.capture(minimax_m3.default_text(), context=2400, decode_steps=3, layers=1, chunk=600, progress=silent)


def test_the_model_s_own_blocks(small_model):
    outcomes = list(compare.compare(small_model, [1, 4], silent))
    assert [outcome.case for outcome in outcomes] == ["layer 1, decode", "layer 1, prefill rows"] * 2
    for outcome in outcomes:
        assert outcome.passed
        assert outcome.equal == outcome.equal_model == outcome.selections > 0


def test_another_choice_of_the_model_fails(small_model):
    decode = small_model[0]
    chosen = decode.chosen.clone()
    seen = set(chosen[2, 1].tolist())
    chosen[2, 1, 0] = next(block for block in range(18) if block not in seen)
    outcome = next(iter(compare.compare([replace(decode, chosen=chosen)], [2], silent)))
    assert not outcome.passed
    assert (outcome.differing, outcome.equal_model) == (1, outcome.selections - 1)
    difference = outcome.differences[0]
    assert (difference.head, difference.row, difference.against) == (2, 1, "the model's own blocks")
    assert "FAILED" in report.statement([outcome])


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_keys_in_another_format(format):
    """What is scored is the cache; the selection of the keys as they came is counted against it, by hand here."""
    spec = li.IndexerSpec(num_heads=2)
    (given,) = synthetic.draw(spec, batch=3, context=20_000, query_len=2, seed=1)
    given = replace(given, chosen=torch.full((2, 8, 16), -1, dtype=torch.int32))
    case = given.stored_as(format)
    outcome = next(iter(compare.compare([case], [2], silent)))
    assert outcome.passed  # whatever the model chose
    assert outcome.equal == outcome.selections == 2 * 8
    rest = given.block_table, given.seq_lens
    before, after = (li.decode(given.q, keys, *rest, spec=spec, query_len=2) for keys in (given.pages, case.cache))
    shares = []
    for first, second in zip(before.flatten(0, 1).tolist(), after.flatten(0, 1).tolist(), strict=True):
        blocks = {block for block in first if block >= 0}
        shares += [len(blocks & set(second)) / len(blocks)] if blocks else []
    assert outcome.overlap == pytest.approx(sum(shares) / len(shares))
    assert 0.3 < outcome.overlap < 1
    assert outcome.index_bytes == index_bytes(given.seq_lens, spec, {"fp8": 128, "nvfp4": 72}[format], li.Shard())
    assert "overlap" in report.outcome_table([outcome])
    assert "model" not in report.statement([outcome])


def near_tie_case(step: float) -> Case:
    """Two blocks that compete for one place; their best products differ by `step`."""
    spec = li.IndexerSpec(num_heads=1, topk=1, local_blocks=0)
    pages = torch.zeros(2, 128, 128)
    pages[0, 0, 0], pages[1, 0, 0] = 1.0, 1.0 + step
    q = torch.zeros(1, 1, 128)
    q[0, 0, 0] = 1.0
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([256], dtype=torch.int32)
    chosen = torch.tensor([[[0]]], dtype=torch.int32)  # the model chose the lesser one
    return Case("two blocks", spec, q, pages, table, lengths, chosen=chosen)


def test_a_near_tie_is_counted_and_not_more():
    # gamma_128 is 7.6e-6, for either block: up to 1.5e-5 the two could have swapped by rounding.
    near, far = compare.compare([near_tie_case(1.0e-5), near_tie_case(2.0e-5)], [1], silent)
    assert (near.passed, near.near_ties, near.equal_model) == (True, 1, 1)
    assert (far.passed, far.near_ties, far.equal_model) == (False, 0, 0)
    assert "1 of them up to blocks whose scores are equal within float32 rounding" in report.statement([near])


def test_attention_mass_by_hand():
    """Uniform attention over 256 tokens: the one block that is kept holds half of it."""
    case = replace(near_tie_case(0.0), attention_heads=1, q=torch.zeros(1, 1, 128))
    mass = compare.attention_mass(case)
    assert mass.mean == pytest.approx(0.5)
    assert mass.lowest == pytest.approx(0.5)


def test_random_cases_are_what_they_say():
    spec = li.IndexerSpec(num_heads=2, topk=4)
    (case,) = synthetic.draw(spec, batch=4, context=5000, query_len=3, seed=1)
    assert case.seq_lens[0] == 5000
    assert case.seq_lens[-1] == 0
    assert case.q.shape == (4 * 3 + 2, 2, 128)
    lengths = reference.row_lengths(case.seq_lens, 3, len(case.q))
    assert lengths[:3] == [4998, 4999, 5000]
    assert lengths[-5:] == [0] * 5
    scores = li.score_blocks(case.q, case.pages, case.block_table, case.seq_lens, spec=spec, query_len=3)
    assert scores[0, 0, 6] == scores[0, 0, 7]  # an exact tie
    assert not scores[0, 0, :40].isnan().any()  # 5,000 tokens are 40 blocks, the last one with unwritten tokens


def test_index_bytes_by_hand():
    spec = li.IndexerSpec()
    lengths = torch.tensor([300, 0, 129], dtype=torch.int32)  # blocks of 128 + 128 + 44 and 128 + 1 tokens
    assert index_bytes(lengths, spec, 256, li.Shard()) == 429 * 256
    assert index_bytes(lengths, spec, 256, li.Shard(0, 2)) == (128 + 44 + 128) * 256
    assert index_bytes(lengths, spec, 256, li.Shard(1, 2)) == (128 + 1) * 256
    assert index_bytes(lengths, spec, 256, li.Shard(3, 4)) == 0


def test_exchange_bytes_by_hand():
    spec = li.IndexerSpec()  # 4 heads of 128, K = 16
    assert exchange_bytes(spec, 1, 2) == 0
    assert exchange_bytes(spec, 4, 2) == 3 * (16 * 8 + 128 * 2)
    assert exchange_bytes(spec, 2, 0) == 1 * 2 * 16 * 8
    assert exchange_bytes(spec, 8, 2) == 7 * (16 * 8 + 128 * 2)


def test_table_is_aligned():
    assert report.table([["case", "n"], ["a", "1"], ["long name", "20"]]).splitlines() == [
        "case        n",
        "---------  --",
        "a           1",
        "long name  20",
    ]


def test_ranks_that_hold_a_part_of_the_cache_each():
    done = run("verify", "--input", "random", "--shard-by", "page", "--world", "1,3,4", "--heads", "12", "--context", "3000")
    assert done.exit_code == 0, done.output
    assert "Proven: on 1, 3, 4 ranks" in done.output


def test_bytes_of_pages_that_are_held():
    """Three requests, the last page of each half full; ranks own what the table says."""
    spec = li.IndexerSpec(block_size=64, head_dim=64)
    block_table = torch.tensor([[0, 2, 4, 1], [3, 5, 9, 9], [7, 9, 9, 9]], dtype=torch.int32)
    seq_lens = torch.tensor([64 * 3 + 32, 64 + 32, 0], dtype=torch.int32)
    own = [index_bytes(seq_lens, spec, 10, li.Shard(rank, 2, "page"), block_table) for rank in range(2)]
    assert own == [10 * 64 * 3, 10 * (32 + 64 + 32)]
    assert sum(own) == index_bytes(seq_lens, spec, 10, li.Shard())


def rank_and_size(cases, ranks, device, transport):
    return [case.name for case in cases], dist.get_rank(), dist.get_world_size(), transport


def test_ranks_that_are_started_afresh_get_the_cases_pickled():
    """As a GPU's ranks with the collective transport are: a process that has used a GPU cannot be forked."""
    (case,) = synthetic.draw(li.IndexerSpec(), batch=1, context=200, query_len=1, seed=0)
    work = partial(compare._in_process, rank_and_size, [case], torch.device("cpu"))
    found = run_ranks(2, work, start_method="spawn")
    assert found == [([case.name], rank, 2, "collective") for rank in range(2)]
