# SPDX-License-Identifier: Apache-2.0
"""What a running engine records of its decode calls, and that it replays."""

import engines
import pytest
import torch
from click.testing import CliRunner
from engines import HEADS, Batch
from support import owned_heads

from lightning_indexer import recording
from lightning_indexer.cli import main
from lightning_indexer.verify.ranks import run_ranks

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
