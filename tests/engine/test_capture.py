# SPDX-License-Identifier: Apache-2.0
"""What a running engine records of its decode calls, and that it replays."""

import logging
import shutil

import engines
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from engines import HEADS, Batch
from support import owned_heads

import lightning_indexer as li
from lightning_indexer import recording
from lightning_indexer.cli import main
from lightning_indexer.verify.ranks import run_ranks
from lightning_indexer.vllm.capture import Recorder
from lightning_indexer.vllm.options import Options

LONG = Batch((128 * 20 - 5, 700, 128 * 17 + 1), (1, 1, 1))
SHORT = Batch((128 * 16, 90), (1, 1))  # selects everything: nothing to learn from
LAYERS = 3


def record(path, world: int, batches, **options):
    """Run the layers of an engine over some batches, with a recording on; what the ranks chose for each call, all heads."""

    def work(rank: int):
        config = engines.config_of(world, cp=world > 1, options={"kernels": True, "capture": str(path), **options})
        heads = owned_heads(rank, world, HEADS)
        chosen = []
        with engines.engine(config, rank):
            layers = [engines.layer_of(config, number, buffer=engines.buffer_of(config)) for number in range(LAYERS)]
            for seed, batch in enumerate(batches):
                inputs = batch.inputs(seed=seed)
                step = batch.metadata(config, inputs)
                for layer in layers:
                    engines.bind(layer, inputs.pages)
                    q = inputs.q[:, heads].to(layer.index_cache.dtype)
                    decoded, _ = engines.run(config, layer, step, q)
                    chosen.append(decoded.clone())
        return chosen

    ranks = run_ranks(world, work)
    step = max(1, world // HEADS)
    return [torch.cat(parts) for parts in zip(*ranks[::step], strict=True)]


@pytest.mark.parametrize("world", [1, 2, 8])
def test_calls_are_recorded_with_all_heads_and_only_their_own_pages(tmp_path, world):
    path = tmp_path / "calls.safetensors"
    batches = [SHORT, LONG, LONG]
    chosen = record(path, world, batches, capture_calls=2 * LAYERS)
    spec, calls = recording.read(path)
    assert (spec.num_heads, spec.topk) == (HEADS, 16)
    assert [call.layer for call in calls] == [f"model.layers.{n}.self_attn.attn.index_cache" for n in range(LAYERS)] * 2
    for number, call in enumerate(calls):
        seed = 1 + number // LAYERS
        inputs = batches[seed].inputs(seed=seed)
        assert torch.equal(call.ids, chosen[LAYERS + number])
        assert torch.equal(call.q, inputs.q)
        assert call.seq_lens.tolist() == list(LONG.tokens)
        assert call.format == "bf16"
        assert len(call.pages) == sum(-(-tokens // 128) for tokens in LONG.tokens)
        for request, tokens in enumerate(LONG.tokens):
            blocks = -(-tokens // 128)
            want = inputs.pages[inputs.block_table[request, :blocks].long()]
            got = call.pages[call.block_table[request, :blocks].long()]
            assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_a_recording_replays_on_other_numbers_of_ranks(tmp_path):
    path = tmp_path / "calls.safetensors"
    record(path, 4, [LONG], capture_calls=2)
    result = CliRunner().invoke(main, ["replay", str(path), "--world", "1,2", "--repeat", "1"])
    assert result.exit_code == 0, result.output
    assert "Proven: on 1, 2 ranks all" in result.output


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"capture_calls": 4}, 4),
        ({"capture_megabytes": 4}, 2),  # a call has 44 pages of 32 KiB
        ({"capture_tokens": 1}, 8),  # of 9: the file is written when their number has doubled, and when it is complete
        ({"capture_tokens": 128 * 21}, None),
    ],
)
def test_a_recording_is_bounded(tmp_path, options, count):
    path = tmp_path / "calls.safetensors"
    record(path, 1, [SHORT, LONG, LONG], **options)
    if count is None:
        assert not path.exists()
        return
    if "capture_megabytes" in options:
        assert path.stat().st_size < 4_000_000
    assert len(recording.read(path)[1]) == count


def test_without_the_option_nothing_is_recorded():
    def work(rank: int):
        config = engines.config_of(1, options={"kernels": True})
        with engines.engine(config, rank):
            return engines.layer_of(config).impl.engine.recorder

    assert run_ranks(1, work) == [None]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/calls.safetensors", "No such file or directory"),
        ("file/calls.safetensors", "Not a directory"),
        ("folder", "Is a directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_at_start_on_every_rank(tmp_path, name, reason):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    path = tmp_path / name

    def work(rank: int) -> str:
        config = engines.config_of(2, cp=True, options={"capture": str(path)})
        with engines.engine(config, rank), pytest.raises(ValueError, match="capture") as raised:
            engines.layer_of(config)
        return str(raised.value)

    told = f"capture: rank 0: expected a file that can be written, got {str(path)!r} ({reason})"
    assert run_ranks(2, work) == [told] * 2


def test_a_recording_that_is_there_stays_until_there_is_a_new_one(tmp_path):
    path = tmp_path / "calls.safetensors"
    path.write_bytes(b"earlier")
    record(path, 1, [SHORT])
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_later_ends_the_recording_and_not_the_engine(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    batch, heads = LONG, HEADS // 2

    def work(rank: int):
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("vllm.lightning_indexer").addHandler(handler)
        config = engines.config_of(2, cp=True, options={"capture": str(folder / "calls.safetensors")})
        finished, found = [], []
        with engines.engine(config, rank):
            layer = engines.layer_of(config)
            inputs = batch.inputs()
            step = batch.metadata(config, inputs)
            engines.bind(layer, inputs.pages)
            for number in range(4):
                if number == 1 and rank == 0:
                    shutil.rmtree(folder)
                found.append(engines.run(config, layer, step, inputs.q[:, rank * heads : (rank + 1) * heads])[0])
                finished.append(layer.impl.engine.recorder.finished)
        return found, finished, [text for text in messages if "no more decode calls are recorded" in text]

    want = batch.want(batch.inputs(), engines.spec_of(engines.config_of(1), local_blocks=1))
    for rank, (found, finished, told) in enumerate(run_ranks(2, work)):
        assert all(torch.equal(ids, want[rank * heads : (rank + 1) * heads]) for ids in found)
        assert finished == [False, True, True, True]
        assert len(told) == (1 if rank == 0 else 0)


def test_each_of_several_groups_has_a_file_of_its_own(tmp_path):
    def work(rank: int) -> str:
        groups = [dist.new_group([first, first + 1]) for first in (0, 2)]
        options = Options(capture=str(tmp_path / "calls.safetensors"))
        return Recorder(li.IndexerSpec(), "score", groups[rank // 2], options).path.name

    assert run_ranks(4, work) == ["calls.rank0.safetensors"] * 2 + ["calls.rank2.safetensors"] * 2
