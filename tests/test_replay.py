# SPDX-License-Identifier: Apache-2.0
"""Recordings of decode calls: what is written, what is refused, and that a replay finds what is wrong."""

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner
from support import OUT_OF_CACHE, Inputs, lengths, random_inputs
from support import table as table_of

import lightning_indexer as li
from lightning_indexer import recording, replay
from lightning_indexer.cli import main

SPEC = li.IndexerSpec(num_heads=4, topk=4)


def call_of(inputs: Inputs, format: str = "bf16", layer: str = "layers.7") -> recording.Call:
    """The call as an engine would have recorded it; the ids are the reference operator's."""
    pages, table = recording.referenced(inputs.block_table, inputs.seq_lens, 128)
    cache = li.IndexCache.empty(len(inputs.pages), inputs.spec, format)
    cache.write(inputs.pages.nan_to_num().flatten(0, 1), torch.arange(len(inputs.pages) * 128))
    q = inputs.q.to(torch.float8_e4m3fn) if format in ("fp8", "nvfp4") else inputs.q
    ids = li.decode(q, cache, inputs.block_table, inputs.seq_lens, **inputs.rules)
    stored = recording.stored_pages(cache, pages)
    return recording.Call(layer, inputs.query_len, format, "score", q, inputs.seq_lens, table, stored, ids)


def two_calls(format: str = "bf16") -> list[recording.Call]:
    first = random_inputs(SPEC, [128 * 9 - 5, 300], heads=4, query_len=2)
    second = random_inputs(SPEC, [128 * 11, 0, 77], heads=4, seed=1)
    return [call_of(first, format, "layers.3"), call_of(second, format, "layers.4")]


@pytest.fixture
def recorded(tmp_path):
    def write(calls: list[recording.Call] | None = None):
        path = tmp_path / "calls.safetensors"
        recording.write(path, SPEC, two_calls() if calls is None else calls)
        return path

    return write


def run(*arguments):
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


# The file.


def test_only_pages_that_requests_refer_to_are_kept_each_once():
    block_table = table_of([5, 2, 9, -1], [2, OUT_OF_CACHE, 5, 5], [OUT_OF_CACHE, -1, -1, -1])
    pages, table = recording.referenced(block_table, lengths(300, 1, 0), 128)
    assert pages.tolist() == [2, 5, 9]
    assert table.tolist() == [[1, 0, 2], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
def test_a_recording_comes_back_as_it_was_written(recorded, format):
    calls = two_calls(format)
    spec, found = recording.read(recorded(calls))
    assert spec == SPEC
    for before, after in zip(calls, found, strict=True):
        for field in dataclasses.fields(recording.Call):
            a, b = getattr(before, field.name), getattr(after, field.name)
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype
                a, b = a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
                assert torch.equal(a, b), field.name
            else:
                assert a == b, field.name


def test_a_recording_is_replaced_as_a_whole_and_leaves_nothing_behind(recorded, tmp_path, monkeypatch):
    path = recorded()
    before = path.read_bytes()
    library = recording._safetensors()

    def fail(tensors, name, metadata):
        name.write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(library.torch, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        recorded()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# Replay.


def test_a_replay_finds_the_recorded_ids_on_any_number_of_ranks(recorded, tmp_path):
    out = tmp_path / "result.json"
    result = run(recorded(), "--world", "1,2,8", "--repeat", "1", "--json", out)
    assert result.exit_code == 0, result.output
    assert "Proven: on 1, 2, 8 ranks all" in result.output
    found = json.loads(out.read_text())
    assert (found["command"], found["passed"]) == ("replay", True)
    assert [(row["world"], row["selections"], row["equal_model"]) for row in found["rows"]] == [
        (1, 16, 16),
        (1, 12, 12),
        (2, 16, 16),
        (2, 12, 12),
        (8, 32, 32),
        (8, 24, 24),
    ]
    assert [(row["world"], row["shared_ms"] is None) for row in found["times"]] == [
        (1, True),
        (1, True),
        (2, False),
        (2, False),
        (8, False),
        (8, False),
    ]
    assert all(row["alone_ms"] > 0 for row in found["times"])


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_coded_caches_are_replayed_as_they_were_recorded(recorded, format):
    path = recorded(two_calls(format))
    assert [case.keys.format.name for case in replay.cases(path)] == [format] * 2
    result = run(path, "--world", "2", "--repeat", "1")
    assert result.exit_code == 0, result.output


def test_keys_may_be_stored_in_another_format(recorded):
    path = recorded()
    result = run(path, "--world", "2", "--repeat", "1", "--cache", "nvfp4")
    assert result.exit_code == 0, result.output
    assert "overlap" in result.output
    exact = run(recorded(two_calls("fp8")), "--world", "1", "--repeat", "1", "--cache", "bf16")
    assert exact.exit_code == 0, exact.output
    assert "100.0%" in exact.output  # every e4m3 key is a bfloat16


def test_ids_that_are_not_the_selection_fail(recorded):
    calls = two_calls()
    calls[0].ids[2, 1] = torch.tensor([5, 4, 1, 0], dtype=torch.int32)
    result = run(recorded(calls), "--world", "2", "--repeat", "1")
    assert result.exit_code == 1
    assert "call 0, layers.3, 2 x 1,147, Q 2, 2 ranks, rank 1, head 2, row 1: not the model's own blocks" in result.output


# What is refused: one line, exit code 2.


def refused(result) -> str:
    assert result.exit_code == 2, result.output
    lines = [line for line in result.output.splitlines() if not line.endswith("...")]
    assert len(lines) == 1, result.output
    return lines[0]


def damage(name: str, path) -> None:
    content = path.read_bytes()
    changed = {
        "empty": b"",
        "text": b"not a recording\n" * 9,
        "cut": content[: len(content) // 2],
        "head cut": content[:40],
        "length": (2**62).to_bytes(8, "little") + content[8:],
        "head": content[:8] + b"[" + content[9:],
    }
    path.write_bytes(changed[name])


@pytest.mark.parametrize("name", ["empty", "text", "cut", "head cut", "length", "head"])
def test_a_damaged_file_is_told_in_one_line(recorded, name):
    path = recorded()
    damage(name, path)
    assert f"{path} is not a recording of decode calls that can be read: " in refused(run(path))


def test_a_file_that_is_not_there_is_told(tmp_path):
    assert "is not a recording" in refused(run(tmp_path / "none.safetensors"))


def test_another_safetensors_file_is_told(tmp_path):
    path = tmp_path / "model.safetensors"
    recording._safetensors().torch.save_file({"weight": torch.zeros(3)}, path)
    assert "recording: expected '1', got None" in refused(run(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 3, 128, dtype=torch.bfloat16)}, r"call 0: q: expected shape [4, 4, 128], got shape [4, 3, 128]"),
        ({"q": torch.zeros(4, 4, 128)}, "call 0: q: expected dtype bfloat16, got dtype float32"),
        (
            {"seq_lens": lengths(128 * 10, 300)},
            "call 0: seq_lens: expected at most 1152 tokens, what block_table holds, got 1280",
        ),
        ({"seq_lens": lengths(5)}, "call 0: q: expected shape [2, 4, 128], got shape [4, 4, 128]"),
        (
            {"block_table": torch.full((2, 9), 12, dtype=torch.int32)},
            "call 0: block_table: expected pages below 12, got others",
        ),
        ({"block_table": torch.zeros(2, 9)}, "call 0: block_table: expected dtype int32, got dtype float32"),
        ({"ids": torch.zeros(4, 4, 5, dtype=torch.int32)}, "call 0: ids: expected shape [4, 4, 4], got shape [4, 4, 5]"),
        ({"pages": torch.zeros(12, 64, 128, dtype=torch.bfloat16)}, "call 0: cache: expected shape [pages, 128, 128]"),
        ({"ids": torch.full((4, 4, 4), 9, dtype=torch.int32)}, "call 0: ids: expected blocks below 9, or -1, got others"),
        ({"seq_lens": lengths(), "q": torch.zeros(0, 4, 128)}, "call 0: seq_lens: expected at least one request, got none"),
        ({"format": "int4"}, "call 0: cache: expected 'bf16' or 'fp16'"),
        ({"order": "page"}, "call 0: order: expected 'score' or 'block', got 'page'"),
        ({"query_len": 0}, "call 0: query_len: expected an int >= 1, got 0"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_told(recorded, change, message):
    first, second = two_calls()
    path = recorded([dataclasses.replace(first, **change), second])
    assert message in refused(run(path))


def test_a_transport_that_the_device_has_not_is_told(recorded):
    assert 'transport: expected "collective" or "auto" on the CPU' in refused(run(recorded(), "--transport", "peer"))


def test_no_calls_are_told(recorded):
    assert "calls: expected at least one, got none" in refused(run(recorded([])))


def test_ranks_that_do_not_fit_the_heads_are_told(recorded):
    assert "world: expected a divisor or a multiple of num_heads (4), got 3" in refused(run(recorded(), "--world", "3"))


def test_a_result_is_not_overwritten_unless_forced(recorded, tmp_path):
    out = tmp_path / "kept.json"
    out.write_text("mine")
    path = recorded(two_calls()[1:])
    assert "exists; --force overwrites it" in refused(run(path, "--json", out))
    assert out.read_text() == "mine"
    result = run(path, "--world", "1", "--repeat", "1", "--json", out, "--force")
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["passed"]
