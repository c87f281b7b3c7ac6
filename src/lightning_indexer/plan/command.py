# SPDX-License-Identifier: Apache-2.0
"""`lightning-indexer plan`."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lightning_indexer.checks import require
from lightning_indexer.plan import text
from lightning_indexer.plan.cost import Setup
from lightning_indexer.plan.estimate import estimate
from lightning_indexer.plan.gpus import GPUS, gpu
from lightning_indexer.plan.model import load_model
from lightning_indexer.terminal import InputError, PlainCommand, check_writable, json_option, output_options, write_json

GROUP = re.compile(r"(\d+)x(\d+)")


def parse_requests(values: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """`("4x131072", "28x16384")` as groups of requests and tokens of each.

    Raises:
        ValueError: another form.
    """
    groups = []
    for value in values:
        match = GROUP.fullmatch(value)
        require(match is not None, "requests", "REQUESTSxTOKENS such as 4x131072", repr(value))
        groups.append((int(match[1]), int(match[2])))  # type: ignore[index]
    return tuple(groups)


@click.command(cls=PlainCommand)
@click.option("--gpu", "gpu_name", default="h200", help=", ".join(GPUS) + ".")
@click.option("--tp", type=int, default=4, help="Tensor-parallel ranks.")
@click.option("--batch", type=int, default=32, help="Requests in a decode step.")
@click.option("--context", type=int, default=131_072, help="Tokens of each.")
@click.option("--requests", multiple=True, metavar="NxTOKENS", help="Instead of these two, repeatable: uneven lengths.")
@click.option("--query-len", type=int, default=1, help="Query rows per request: 1 + draft tokens.")
@click.option("--model", "model_name", default="minimax-m3", help="minimax-m3, or a model's config file.")
@click.option("--index", "index_format", default="bf16", help="Index keys: bf16, fp8, nvfp4.")
@click.option("--kv", "kv_format", default="bf16", help="Attention's K and V: bf16, fp8, nvfp4.")
@click.option("--weights", "weight_format", default="fp8", help="bf16, fp8, fp4.")
@click.option("--gpus-per-node", type=int, default=8, help="Ranks of one host.")
@click.option("--memory", type=float, default=0.9, help="Share of a GPU's memory for weights and caches.")
@click.option("--all-heads", is_flag=True, help="Each rank projects all heads' queries itself: none are exchanged.")
@click.option("--step-ms", type=float, help="A step's time as you measure it today.  [default: a modelled floor]")
@click.option("--read-roof", type=float, help="TB/s, from doctor --measure.  [default: the table's]")
@click.option("--exchange-us", type=float, help="Of one layer, as you measured it.  [default: by transport]")
@click.option("--explain", is_flag=True, help="Tell each number's formula, and whether it is measured or modelled.")
@output_options(json_option())
def plan(
    gpu_name: str,
    batch: int,
    context: int,
    requests: tuple[str, ...],
    model_name: str,
    memory: float,
    step_ms: float | None,
    read_roof: float | None,
    explain: bool,
    json_path: Path | None,
    force: bool,
    **setup: Any,
) -> None:
    """Tell what context parallelism brings for a GPU, a model and a load; needs no GPU.

    Times and bytes of the indexer per layer and step, without and with context parallelism; what the exchange costs; from
    which context on it pays; how many tokens the caches hold.
    """
    check_writable(force, json_path)
    try:
        where = gpu(gpu_name)
        if read_roof is not None:
            require(read_roof > 0, "read_roof", "TB/s > 0", read_roof)
            where = replace(where, measured_tbps=read_roof, measured_in="given")
        found = estimate(
            Setup(
                gpu=where,
                model=load_model(model_name),
                requests=parse_requests(requests) or ((batch, context),),
                memory_share=memory,
                step_us=None if step_ms is None else 1e3 * step_ms,
                **setup,
            )
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    parts = [text.heading(found), text.step_table(found), text.transport_table(found), text.memory_lines(found)]
    parts += [text.explanation(found)] if explain else []
    click.echo("\n\n".join([*parts, text.verdict(found)]))
    write_json(json_path, found.as_json())
