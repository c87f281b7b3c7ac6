# SPDX-License-Identifier: Apache-2.0
"""The doctor: on this machine, on one without Triton, and on made-up ones with GPUs."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import lightning_indexer as li
from lightning_indexer import cli
from lightning_indexer.bench.exchange import ExchangeRow
from lightning_indexer.bench.gate import WrongSelectionError
from lightning_indexer.bench.roofs import Roofs
from lightning_indexer.doctor import command, support, text
from lightning_indexer.doctor.machine import GpuFacts, Machine
from lightning_indexer.doctor.measure import Measured
from lightning_indexer.doctor.support import Support, find_support, peer_support

BARE = Machine("0.1", "3.10.1", "Linux x86_64", "2.13.0", "CUDA 13.0", "3.9.0", None, None, ())


class CompilationError(Exception):
    """Derives from nothing narrower, as Triton's errors do."""


def measured(monkeypatch, measure, works: list[bool], *options: str):
    """`doctor --measure` where `works` tells which of the GPUs do."""
    count = len(works)
    found = [Support(f"GPU {index}", each, "no Triton") for index, each in enumerate(works)]
    monkeypatch.setattr(command, "measure_gpu", measure)
    monkeypatch.setattr(command.Machine, "read", lambda: with_gpus(*[(True,) * count] * count))
    monkeypatch.setattr(command, "find_support", lambda machine: found)
    return CliRunner().invoke(cli.main, ["doctor", "--measure", "--no-test", *options])


def with_gpus(*reaches: tuple[bool, ...]) -> Machine:
    gpus = tuple(GpuFacts(index, "NVIDIA H200", "9.0", 150.1, 132, row) for index, row in enumerate(reaches))
    return dataclasses.replace(BARE, gpus=gpus, driver="580.1")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_command_tells_and_proves(no_gpu, tmp_path):
    done = CliRunner().invoke(cli.main, ["doctor", "--json", str(tmp_path / "doctor.json")])
    assert done.exit_code == 0, done.output
    assert "yes nvfp4 keys on cpu     72 B a token" in done.stdout
    assert "no  transport peer" in done.stdout
    # (3 requests x 2 rows + 2 of padding) x 4 heads, for bf16, two fp8 and nvfp4, on one rank and shared out among four
    assert "Self-test passed: 256 of 256 selections right (1, 4 ranks" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    told = json.loads((tmp_path / "doctor.json").read_text())
    assert told["self_test"]["passed"] is True
    assert [row["equal"] for row in told["self_test"]["rows"]] == [32] * 8
    assert {each["what"] for each in told["support"] if each["works"]} >= {"CPU", "bf16 keys on cpu", "transport collective"}
    assert told["machine"]["torch_version"] == torch.__version__


def test_a_wrong_selection_is_found(no_gpu, monkeypatch):
    real = li.decode

    def spoiled(*arguments, **options):
        return real(*arguments, **options).flip(-1)

    monkeypatch.setattr(li, "decode", spoiled)
    done = CliRunner().invoke(cli.main, ["doctor"])
    assert done.exit_code == 1
    assert "Self-test FAILED:" in done.stdout
    assert "not the unsharded selection" in done.stdout


def test_without_triton():
    """The whole command in a process that has no Triton."""
    program = """
import sys
from importlib.abc import MetaPathFinder
class Without(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Without())
import torch
torch.cuda.device_count = lambda: 0
from lightning_indexer.cli import main
main(["doctor"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Self-test passed" in done.stdout


def test_measuring_needs_a_gpu(no_gpu):
    done = CliRunner().invoke(cli.main, ["doctor", "--measure"])
    assert (done.exit_code, done.output) == (2, "Error: --measure: expected a GPU, found none\n")


def test_nothing_is_overwritten_without_force(no_gpu, tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text("kept")
    done = CliRunner().invoke(cli.main, ["doctor", "--json", str(kept)])
    assert (done.exit_code, kept.read_text()) == (2, "kept")


@pytest.mark.parametrize(
    ("machine", "usable", "works", "note"),
    [
        (BARE, 0, False, "needs a GPU that the Triton kernels run on"),
        (with_gpus((True,)), 1, True, "ranks that share this GPU: for tests"),
        (with_gpus((True, True), (True, True)), 2, True, "all 2 GPUs reach each other"),
        (with_gpus((True, False), (True, True)), 2, False, "GPUs do not reach each other's memory: 0 to 1"),
    ],
)
def test_peer_transport(machine, usable, works, note):
    assert peer_support(machine, usable) == Support("transport peer", works, note)


def test_a_gpu_that_the_kernels_do_not_run_on(monkeypatch):
    reason = "device: expected compute capability 8.0 or newer, got Tesla V100 with 7.0"

    def refuse(device):
        raise ValueError(reason)

    monkeypatch.setattr(support, "check_device", refuse)
    found = {each.what: each for each in find_support(with_gpus((True,)))}
    assert found["GPU 0"] == Support("GPU 0", False, reason)
    assert not found["transport peer"].works
    assert not any("cuda" in what for what in found)


def test_reasons_without_a_device():
    assert next(each for each in find_support(BARE) if each.what == "GPU").note == "torch (CUDA 13.0) finds no device"
    built = dataclasses.replace(BARE, toolkit="CPU")
    assert next(each for each in find_support(built) if each.what == "GPU").note == "torch is built for the CPU"


def test_tables_of_gpus():
    lines = text.gpu_tables(with_gpus((True, True), (False, True))).splitlines()
    assert lines[2].split() == ["0", "NVIDIA", "H200", "9.0", "150", "132"]
    assert lines[-1].split() == ["GPU", "1", "no", "yes"]
    assert "plan --gpu h200 --tp 2 " in text.next_step(with_gpus((True, True), (True, True)))


def test_measured_figures_go_to_plan(monkeypatch):
    rows = [ExchangeRow(4, 1, "peer", 5.0, 8.0, 10.0, 384), ExchangeRow(4, 32, "peer", 6.0, 10.0, 13.5, 12_288)]
    asked = []

    def measure(device, ranks, progress):
        asked.append(device)
        return Measured(Roofs(4.591, 780.0), rows)

    done = measured(monkeypatch, measure, [False, True])
    assert done.exit_code == 0, done.output
    assert "For plan: --read-roof 4.59 --exchange-us 7.5 (32 rows)" in done.stdout
    assert asked == [torch.device("cuda", 1)]  # the first that works


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried 4 GiB\nmore"),
            2,
            "OutOfMemoryError: CUDA out of memory. Tried 4 GiB",
        ),
        (ImportError("No module named 'triton'"), 2, "ImportError: No module named 'triton'"),
        (CompilationError("\nat 1:2:"), 2, "CompilationError: at 1:2:"),
        (WrongSelectionError("rank 0 of 4, 1 rows: not the unsharded selection"), 1, "rank 0 of 4, 1 rows: not the unsharded"),
    ],
)
def test_what_was_found_is_kept_when_measuring_fails(error, code, line, monkeypatch, tmp_path):
    def measure(device, ranks, progress):
        raise error

    done = measured(monkeypatch, measure, [True], "--json", str(tmp_path / "doctor.json"))
    assert done.exit_code == code
    assert done.stderr.splitlines()[-1].startswith(f"Error: {line}")
    assert json.loads((tmp_path / "doctor.json").read_text())["machine"]["gpus"][0]["name"] == "NVIDIA H200"


def test_measuring_needs_a_gpu_that_works(monkeypatch):
    done = measured(monkeypatch, None, [False, False])
    assert done.exit_code == 2
    assert done.stderr.endswith("Error: --measure: expected a GPU that the kernels run on, got none (no Triton)\n")


def test_a_gpu_that_selects_wrongly_is_not_measured(monkeypatch):
    real = li.decode
    monkeypatch.setattr(li, "decode", lambda *arguments, **options: real(*arguments, **options).flip(-1))
    found = [Support("bf16 keys on cpu", True, ""), Support("GPU 0", False, "")]
    monkeypatch.setattr(command.Machine, "read", lambda: with_gpus((True,)))
    monkeypatch.setattr(command, "find_support", lambda machine: found)
    monkeypatch.setattr(command, "measure_gpu", None)
    done = CliRunner().invoke(cli.main, ["doctor", "--measure"])
    assert done.exit_code == 1
    assert "Not measured, for a selection is wrong." in done.stdout


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (CompilationError("\nat 1:2:\nbody"), "CompilationError: at 1:2:"),
        (ValueError("q: expected dtype bf16, got e4m3"), "q: expected dtype bf16, got e4m3"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_format_that_does_not_compile_is_one_that_does_not_work(error, note, monkeypatch):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(li, "decode", refuse)
    found = {each.what: each for each in find_support(BARE)}
    assert found["fp8 keys on cpu"] == Support("fp8 keys on cpu", False, note)


@pytest.mark.parametrize(
    ("version", "plugin", "works", "note"),
    [
        (None, True, False, "not installed"),
        ("0.33.0", True, True, "0.33.0, with this package's plugin"),
        ("0.34.1", True, False, "0.34.1, while this package's plugin is for 0.33.*"),
        ("0.33.0", False, False, "0.33.0, this package has no plugin installed for it"),
    ],
)
def test_the_engine_works_with_our_plugin_and_a_release_that_it_knows(version, plugin, works, note, monkeypatch):
    point = SimpleNamespace(dist=SimpleNamespace(name="lightning-indexer" if plugin else "another"))
    monkeypatch.setattr(support.importlib.metadata, "entry_points", lambda group: [point])
    found = next(each for each in find_support(dataclasses.replace(BARE, vllm=version)) if each.what == "engine vLLM")
    assert (found.works, found.note) == (works, note)
