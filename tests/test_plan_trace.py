# SPDX-License-Identifier: Apache-2.0
"""Traces: read, drawn, played by hand-checked steps; larger scale; what the command prints and refuses."""

import itertools
import json
import statistics

import pytest
from click.testing import CliRunner

from lightning_indexer import cli
from lightning_indexer.plan import trace_report
from lightning_indexer.plan.cost import Setup, alone_us, rank_us, rest_us, setup_exchanges
from lightning_indexer.plan.estimate import estimate
from lightning_indexer.plan.gpus import GPUS
from lightning_indexer.plan.model import MINIMAX_M3
from lightning_indexer.plan.scale import scales
from lightning_indexer.plan.simulate import Played, Serving, Step, StepCosts, backlog, play
from lightning_indexer.plan.trace import Agents, Request, read_trace

SETUP = Setup(GPUS["h200"], MINIMAX_M3, 4, ((1, 1),))
ROOM = 10**9


def silent(label: str, done: int, total: int) -> None:
    pass


def run(*arguments: str):
    return CliRunner().invoke(cli.main, ["plan", *arguments])


# reading


def test_both_file_kinds_tell_the_same(tmp_path):
    as_csv, as_jsonl = tmp_path / "a.csv", tmp_path / "a.jsonl"
    as_csv.write_text("arrival_s,prompt_tokens,output_tokens,cached_tokens\n2.5,100,10,\n1,200,20,150\n")
    rows = [{"arrival_s": 2.5, "prompt_tokens": 100, "output_tokens": 10}]
    rows.append({"arrival_s": 1, "prompt_tokens": 200, "output_tokens": 20, "cached_tokens": 150})
    as_jsonl.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert read_trace(as_csv) == [Request(1.0, 200, 20, 150), Request(2.5, 100, 10)]
    assert read_trace(as_jsonl) == read_trace(as_csv)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n", "trace: expected at least one request, got none in a.csv"),
        ("a.csv", "", "trace: expected at least one request, got none in a.csv"),
        ("a.csv", "when,prompt_tokens,output_tokens\n1,2,3\n", "trace: a.csv, line 2: arrival_s: expected a number, got none"),
        (
            "a.csv",
            "arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,x,3\n",
            "trace: a.csv, line 3: prompt_tokens: expected a number, got 'x'",
        ),
        (
            "a.csv",
            "arrival_s,prompt_tokens,output_tokens\n-1,10,5\n",
            "trace: a.csv, line 2: arrival_s: expected seconds >= 0, got -1.0",
        ),
        (
            "a.csv",
            "arrival_s,prompt_tokens,output_tokens\n0,10,0\n",
            "trace: a.csv, line 2: output_tokens: expected an int >= 1, got 0",
        ),
        (
            "a.csv",
            "arrival_s,prompt_tokens,output_tokens,cached_tokens\n0,10,1,10\n",
            "trace: a.csv, line 2: cached_tokens: expected an int from 0 to 9, got 10",
        ),
        ("a.jsonl", "[1]\n", "trace: expected a JSON object per line, got line 1 of a.jsonl"),
        ("a.jsonl", "{\n", "trace: expected a JSON object per line, got line 1 of a.jsonl"),
        ("a.txt", "", "trace: expected a .csv or .jsonl file, got a.txt"),
    ],
)
def test_bad_traces_are_one_line_and_exit_code_2(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    done = run("--trace", str(tmp_path / name))
    assert (done.exit_code, done.output) == (2, f"Error: {message}\n")


def test_binary_trace(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    done = run("--trace", str(tmp_path / "a.jsonl"))
    assert done.exit_code == 2
    assert done.output.startswith("Error: trace: expected text, got a.jsonl")


# drawing


def test_agents_have_the_stated_means():
    requests = Agents(sessions=400, turns=10).draw()
    assert len(requests) == 4000
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    assert statistics.mean(request.output_tokens for request in requests) == pytest.approx(400, rel=0.05)
    new = [request.prompt_tokens - request.cached_tokens for request in requests]
    assert statistics.mean(new) == pytest.approx(4000, rel=0.05)
    assert {request.shared_tokens for request in requests} == {24_000}
    assert requests == Agents(sessions=400, turns=10).draw()
    assert requests != Agents(sessions=400, turns=10, seed=1).draw()


def test_a_turn_has_all_of_its_session_cached():
    turns = Agents(sessions=1, turns=5).draw()
    assert turns[0].cached_tokens == 24_000
    for before, after in itertools.pairwise(turns):
        assert after.cached_tokens == before.prompt_tokens + before.output_tokens
        assert after.arrival_s >= before.arrival_s + before.output_tokens * 0.02


# playing


def test_a_decode_step_costs_what_the_plan_says():
    at = Setup(GPUS["h200"], MINIMAX_M3, 4, ((32, 65_536),))
    costs = StepCosts(SETUP)
    off, shared = costs.step_us("off", [65_536] * 32, [])
    assert not shared
    assert off == pytest.approx(57 * alone_us(at) + rest_us(at)[0])
    always, shared = costs.step_us("always", [65_536] * 32, [])
    assert shared
    assert always == pytest.approx(57 * (rank_us(at) + setup_exchanges(at, 32)[0].us) + rest_us(at)[0])
    assert costs.step_us("auto", [65_536] * 32, []) == (always, True)
    assert costs.step_us("auto", [512], []) == costs.step_us("off", [512], [])


def test_a_step_of_a_prompt_by_hand():
    """2,048 tokens behind 100,000: bound by flops, not by weights."""
    us, shared = StepCosts(SETUP).step_us("always", [], [(2048, 100_000)])
    model, rate = MINIMAX_M3, 0.5 * 989e6
    seen = 2048 * 101_024
    flops = 2 * model.weights_read(1) * 2048 / 4 + 4 * 128 * 16 * (57 * 2048 * 2048 + 3 * seen)
    assert us == pytest.approx(58 * 60 + flops / rate + 57 * 2 * 128 * seen / rate)
    assert not shared


def test_one_request_by_hand():
    """A prompt of 3,000 tokens takes two chunks, the second of which gives the first of three tokens."""
    costs = StepCosts(SETUP)
    played = play([Request(2.0, 3000, 3)], SETUP, Serving(), "off", ROOM, silent)
    chunks = [costs.step_us("off", [], [(2048, 0)])[0], costs.step_us("off", [], [(952, 2048)])[0]]
    decode = [costs.step_us("off", [3000], [])[0], costs.step_us("off", [3001], [])[0]]
    assert [step.us for step in played.steps] == [*chunks, *decode]
    assert played.first_token_s == [pytest.approx(sum(chunks) / 1e6)]
    assert played.seconds == pytest.approx(2.0 + sum(chunks + decode) / 1e6)
    assert played.mean_between_tokens_ms == pytest.approx(sum(decode) / 2 / 1e3)
    assert played.output_tokens == 3
    assert played.tokens_per_s == pytest.approx(3e6 / sum(chunks + decode))


def test_cached_prompts_are_not_computed_and_mixed_steps_do_both():
    first, second = Request(0.0, 2000, 50, 1999), Request(0.001, 5000, 2, 4000)
    played = play([first, second], SETUP, Serving(), "off", ROOM, silent)
    costs = StepCosts(SETUP)
    assert played.steps[0].us == costs.step_us("off", [], [(1, 1999)])[0]
    assert played.steps[1].us == costs.step_us("off", [2000], [(1000, 4000)])[0]
    assert played.steps[2].tokens == 2001 + 5000


def test_the_batch_and_the_cache_bound_who_runs():
    requests = [Request(0.0, 1000, 10, 900) for _ in range(4)]
    by_batch = play(requests, SETUP, Serving(max_batch=2), "off", ROOM, silent)
    by_room = play(requests, SETUP, Serving(), "off", 2 * 1010, silent)
    assert max(step.decoding for step in by_batch.steps) == 2
    assert by_room.steps == by_batch.steps
    shared = [Request(0.0, 1000, 10, 900, 800) for _ in range(4)]  # 800 once, and 210 each
    assert max(step.decoding for step in play(shared, SETUP, Serving(), "off", 800 + 3 * 210, silent).steps) == 3
    with pytest.raises(ValueError, match="requests of at most 1,000 tokens, which the cache holds, got one of 1,010"):
        play(requests, SETUP, Serving(), "off", 1000, silent)
    with pytest.raises(ValueError, match="trace: expected requests of two output tokens or more, got none"):
        play([Request(0.0, 9, 1)], SETUP, Serving(), "off", ROOM, silent)


def test_every_token_is_made_once_in_every_mode():
    requests = Agents(sessions=6, turns=4).draw()
    for mode in ("off", "always", "auto"):
        played = play(requests, SETUP, Serving(), mode, ROOM, silent)
        assert played.output_tokens == sum(request.output_tokens for request in requests)
        assert len(played.first_token_s) == len(requests)
        assert sum(step.decoding for step in played.steps) == played.output_tokens - len(requests)
        waiting = play(backlog(requests), SETUP, Serving(), mode, ROOM, silent)
        assert waiting.output_tokens == played.output_tokens
        assert waiting.seconds < played.seconds


def test_auto_is_never_slower_than_either_on_the_same_steps():
    costs = StepCosts(SETUP)
    for batch in (1, 3, 32, 128):
        for context in (100, 5_000, 20_000, 300_000):
            off, always, auto = (costs.index_us(mode, batch, batch * context)[0] for mode in ("off", "always", "auto"))
            assert auto == min(off, always)


def test_quantiles_count_tokens_not_steps():
    steps = [Step(1.0, 1000.0, 9, 0, False), Step(2.0, 5000.0, 1, 0, True), Step(3.0, 99_000.0, 0, 0, False)]
    played = Played("off", steps, [0.1], 11)
    assert played.between_tokens_ms(0.5, 0.9, 0.91, 1.0) == [1.0, 1.0, 5.0, 5.0]
    assert played.mean_between_tokens_ms == pytest.approx(1.4)
    assert played.shared == 0.5


# larger scale


def test_scale_by_hand():
    formats = {"kv_format": "fp8", "index_format": "fp8"}
    found = {each.ranks: each for each in scales(Setup(GPUS["h200"], MINIMAX_M3, 4, ((1, 131_072),), **formats), 131_072)}
    assert sorted(found) == [4, 8, 16]  # on two GPUs the fp8 weights do not fit
    pool = 0.9 * 141e9 - MINIMAX_M3.weights / 8
    eight = found[8]
    assert eight.off.batch == int(pool / 22_656) // 131_072
    assert eight.sharded.batch == int(pool / (15_360 + 7_296 / 8)) // 131_072
    assert found[16].off.hosts == 2
    step = estimate(Setup(GPUS["h200"], MINIMAX_M3, 8, ((eight.off.batch, 131_072),), **formats)).figures["step without CP"]
    assert eight.off.tokens_per_s == pytest.approx(eight.off.batch * 1e6 / step.value)


# the command


def test_command_plays_a_trace(tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    done = run("--trace", "agentic", "--sessions", "8", "--turns", "3", "--tp", "8", *files)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "8 agents of 3 turns, seed 0" in done.stdout
    assert 'dispatch="auto": ' in done.stdout
    told = json.loads((tmp_path / "a.json").read_text())["modes"]
    assert list(told) == ["off", "always", "auto"]
    assert told["auto"]["ITL mean, ms"] <= told["off"]["ITL mean, ms"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_command_reports_on_scale(tmp_path):
    done = run("--scale", "--kv", "fp8", "--index", "fp8", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    assert "A fleet of 1,000 GPUs" in done.stdout
    assert done.stdout.endswith('index cache is in the library\n(shard_by="page") and an option of its vLLM plugin.\n\n')
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [each["ranks"] for each in json.loads((tmp_path / "a.json").read_text())["scale"]] == [4, 8, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nowhere.csv"], "trace: expected a file or agentic, got 'nowhere.csv'"),
        (["--trace", "agentic", "--sessions", "0"], "sessions: expected an int >= 1, got 0"),
        (["--trace", "agentic", "--max-batch", "0"], "max_batch: expected an int >= 1, got 0"),
        (["--trace", "agentic", "--weights", "bf16"], "weights: expected some that fit on 4 GPUs, got bf16"),
        (["--trace", "agentic", "--step-ms", "9"], "step_ms: expected none where steps differ, got 9.0"),
        (["--plot", "a.png"], "plot: expected a trace to draw, got none"),
        (["--trace", "agentic", "--batch", "32"], "batch: expected none with --trace, got 32"),
        (["--trace", "agentic", "--context", "9"], "context: expected none with --trace, got 9"),
        (["--trace", "agentic", "--requests", "1x9"], "requests: expected none with --trace, got ('1x9',)"),
        (["--trace", "agentic", "--explain"], "explain: expected none with --trace, got True"),
        (["--scale", "--batch", "8"], "batch: expected none with --scale, got 8"),
        (["--requests", "1x9", "--context", "8"], "context: expected none with --requests, got 8"),
        (["--max-batch", "8"], "max_batch: expected none without --trace, got 8"),
        (["--turns", "8"], "turns: expected none without --trace, got 8"),
        (["--trace", "some.csv", "--sessions", "8"], "sessions: expected none with a trace from a file, got 8"),
        (["--scale", "--requests", "1x9"], "requests: expected none with --scale, got ('1x9',)"),
        (["--scale", "--explain"], "explain: expected none with --scale, got True"),
        (["--trace", "agentic", "--scale", "--batch", "8"], "batch: expected none with --trace and --scale, got 8"),
        (["--scale", "--gpu", "a100", "--context", "1000000000"], None),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    done = run(*arguments)
    want = message or "context: expected requests that fit on up to 16 GPUs, got 1,000,000,000 tokens"
    assert (done.exit_code, done.output) == (2, f"Error: {want}\n")


def test_table_names_every_figure():
    steps = [Step(1.0, 1000.0, 9, 0, False), Step(2.0, 5000.0, 1, 0, True)]
    mode = trace_report.Mode(Played("off", steps, [0.1], 11), Played("off", steps, [0.1], 11))
    rows = trace_report.trace_table([mode, mode]).splitlines()
    assert rows[2].split() == ["ITL", "mean,", "ms", "1.40", "1.40", "1.000"]
    assert [line.split("  ")[0] for line in rows[2:]] == list(trace_report.figures(mode))
