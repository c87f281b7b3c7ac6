# SPDX-License-Identifier: Apache-2.0
"""What the doctor found, as text for a terminal of 80 columns."""

import textwrap

from lightning_indexer.bench.report import exchange_table
from lightning_indexer.doctor.machine import Machine
from lightning_indexer.doctor.measure import Measured
from lightning_indexer.doctor.support import Support
from lightning_indexer.plan.gpus import GPUS, gpu_of_device
from lightning_indexer.text import table
from lightning_indexer.verify.compare import Outcome

COLUMNS = 80


def software(machine: Machine) -> str:
    """Versions."""
    parts = [f"lightning-indexer {machine.package}", f"Python {machine.python}", machine.system]
    parts += [f"torch {machine.torch_version} ({machine.toolkit})", f"Triton {machine.triton or 'not installed'}"]
    parts += [] if machine.driver is None else [f"driver {machine.driver}"]
    return textwrap.fill(", ".join(parts), COLUMNS, break_long_words=False)


def gpu_tables(machine: Machine) -> str:
    """The GPUs, and where there are several, which reach which."""
    rows = [["GPU", "name", "arch", "GB", "processors"]]
    rows += [[str(g.index), g.name, g.capability, f"{g.memory_gb:.0f}", str(g.processors)] for g in machine.gpus]
    if len(machine.gpus) < 2:
        return table(rows)
    links = [["reaches", *(str(gpu.index) for gpu in machine.gpus)]]
    links += [[f"GPU {gpu.index}", *("yes" if reached else "no" for reached in gpu.reaches)] for gpu in machine.gpus]
    return f"{table(rows)}\n\n{table(links)}"


def support_list(found: list[Support]) -> str:
    """One line per thing; formats that work on a device share one."""
    lines = []
    width = max(len(each.what) for each in found)
    for each in found:
        first = f"{'yes' if each.works else 'no':4}{each.what:{width}}  "
        lines.append(textwrap.fill(each.note, COLUMNS, initial_indent=first, subsequent_indent=" " * len(first)))
    return "\n".join(lines)


def self_test_lines(outcomes: list[Outcome], seconds: float) -> str:
    """What was compared, and the first difference of each case that has one."""
    selections = sum(outcome.selections for outcome in outcomes)
    wrong = sum(outcome.differing for outcome in outcomes)
    ranks = ", ".join(str(world) for world in sorted({outcome.world for outcome in outcomes}))
    told = f"{selections - wrong} of {selections} selections right ({ranks} ranks, {seconds:.1f} s)"
    failed = [f"  {difference}" for outcome in outcomes for difference in outcome.differences[:1]]
    return "\n".join([f"Self-test {'FAILED' if wrong else 'passed'}: {told}", *failed])


def measured_lines(measured: Measured) -> str:
    """Roofs, exchange, and how to give them to `plan`."""
    roofs = measured.roofs
    most = measured.exchange[-1]
    row = next((each for each in measured.exchange if each.rows == 32), most)
    cost = row.queries_us - row.local_us
    return (
        f"Roofs: {roofs.read_tbps:.2f} TB/s read, {roofs.matrix_tflops:.0f} TFLOP/s bf16.\n"
        f"Exchange on virtual ranks that share the GPU, an upper bound for a GPU each:\n\n"
        f"{exchange_table(measured.exchange)}\n\n"
        f"For plan: --read-roof {roofs.read_tbps:.2f} --exchange-us {max(cost, 0.1):.1f} ({row.rows} rows)"
    )


def next_step(machine: Machine) -> str:
    """The command that tells whether it is worth it here."""
    known = gpu_of_device(machine.gpus[0].name) if machine.gpus else None
    ranks = len(machine.gpus) if len(machine.gpus) in (2, 4, 8, 16) else 4
    name = next(name for name, each in GPUS.items() if each is (known or GPUS["h200"]))
    return f"Is it worth it?\n  lightning-indexer plan --gpu {name} --tp {ranks} --batch 32 --context 131072"
