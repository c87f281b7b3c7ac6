# SPDX-License-Identifier: Apache-2.0
"""`lightning-indexer doctor`."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

from lightning_indexer.bench.gate import WrongSelectionError
from lightning_indexer.cache import FORMATS
from lightning_indexer.checks import require
from lightning_indexer.doctor import text
from lightning_indexer.doctor.machine import Machine
from lightning_indexer.doctor.measure import measure_gpu
from lightning_indexer.doctor.selftest import self_test
from lightning_indexer.doctor.support import Support, find_support, reason
from lightning_indexer.terminal import (
    InputError,
    PlainCommand,
    Progress,
    check_writable,
    json_option,
    output_options,
    write_json,
)
from lightning_indexer.verify.compare import Outcome


@click.command(cls=PlainCommand)
@click.option("--measure", is_flag=True, help="Measure roofs and exchange on the first GPU that works, for a minute.")
@click.option("--ranks", type=click.IntRange(2, 16), default=4, help="Ranks of the exchange that is measured.")
@click.option("--no-test", is_flag=True, help="Leave out the self-test.")
@output_options(json_option())
def doctor(measure: bool, ranks: int, no_test: bool, json_path: Path | None, force: bool) -> None:
    """Tell what works on this machine and why not, and prove it in about ten seconds.

    Versions, GPUs and which reach which; cache formats, transports, engines; a self-test of every format that works, on one
    rank and on four, against the reference. Exits 1 if a selection is wrong, 2 if anything else fails; `--json` keeps what was
    found until then. Needs neither GPU nor Triton.
    """
    check_writable(force, json_path)
    machine = Machine.read()
    if measure and not machine.gpus:
        raise InputError("--measure: expected a GPU, found none")
    result: dict[str, Any] = {"machine": dataclasses.asdict(machine)}
    progress = Progress()
    try:
        progress("trying what works", 0, 1)
        support = find_support(machine)
        result["support"] = [dataclasses.asdict(each) for each in support]
        told = [text.software(machine)]
        told += [text.gpu_tables(machine)] if machine.gpus else []
        told.append(text.support_list(support))
        progress.close()
        click.echo("\n\n".join(told))
        begun = time.perf_counter()
        outcomes = [] if no_test else _self_tests(machine, {each.what for each in support if each.works}, progress)
        seconds = time.perf_counter() - begun
        progress.close()
        passed = all(outcome.passed for outcome in outcomes)
        result["self_test"] = {"passed": passed, "rows": [dataclasses.asdict(outcome) for outcome in outcomes]}
        if outcomes:
            click.echo("\n" + text.self_test_lines(outcomes, seconds))
        if measure and passed:
            measured = measure_gpu(_working_gpu(machine, support), ranks, progress)
            progress.close()
            click.echo("\n" + text.measured_lines(measured))
            result["read_roof_TBps"] = measured.roofs.read_tbps
            result["matrix_roof_TFLOPs"] = measured.roofs.matrix_tflops
            result["exchange"] = [row.as_json() for row in measured.exchange]
        elif measure:
            click.echo("\nNot measured, for a selection is wrong.")
    except WrongSelectionError as error:
        raise click.ClickException(str(error)) from error
    except Exception as error:  # out of memory, a kernel that does not compile: whatever it is, one line
        raise InputError(reason(error)) from error
    finally:
        progress.close()
        write_json(json_path, result)
    click.echo("\n" + text.next_step(machine))
    sys.exit(0 if passed else 1)


def _working_gpu(machine: Machine, support: list[Support]) -> torch.device:
    """The first GPU that the kernels run on.

    Raises:
        ValueError: there is none; tells why the first GPU is not one.
    """
    found = {each.what: each for each in support}
    tried = [(gpu.index, found[f"GPU {gpu.index}"]) for gpu in machine.gpus]
    working = [index for index, each in tried if each.works]
    require(bool(working), "--measure", "a GPU that the kernels run on", f"none ({tried[0][1].note})")
    return torch.device("cuda", working[0])


def _self_tests(machine: Machine, works: set[str], progress: Progress) -> list[Outcome]:
    """Of the CPU, and of the first GPU that the kernels run on."""
    gpus = [gpu.index for gpu in machine.gpus if f"GPU {gpu.index}" in works]
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in gpus[:1])]
    found: list[Outcome] = []
    for device in devices:
        formats = [name for name in FORMATS if f"{name} keys on {device}" in works]
        found += self_test(formats, device, progress)
    return found
