# SPDX-License-Identifier: Apache-2.0
"""`lightning-indexer plan`."""

import re
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lightning_indexer.bench.plot import require_matplotlib
from lightning_indexer.checks import require
from lightning_indexer.plan import text
from lightning_indexer.plan.cost import Setup
from lightning_indexer.plan.estimate import estimate
from lightning_indexer.plan.gpus import GPUS, gpu
from lightning_indexer.plan.model import load_model
from lightning_indexer.plan.scale import scale_json, scale_report, scales
from lightning_indexer.plan.simulate import MODES, Serving, backlog, play
from lightning_indexer.plan.trace import Agents, Request, read_trace
from lightning_indexer.plan.trace_report import Mode, trace_json, trace_table, trace_verdict, write_trace_plot
from lightning_indexer.terminal import (
    OUTPUT_FILE,
    InputError,
    PlainCommand,
    Progress,
    check_writable,
    json_option,
    output_options,
    write_json,
)

GROUP = re.compile(r"(\d+)x(\d+)")
# What says nothing to a report: a trace has requests of its own, and --scale as many of --context tokens as fit.
UNUSED = {"--trace": ("requests", "batch", "context", "explain"), "--scale": ("requests", "batch", "explain")}


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
@click.option("--trace", "trace_source", metavar="FILE", help="Play requests over time: a .csv or .jsonl file, or agentic.")
@click.option("--sessions", type=int, default=64, help="Agents (--trace agentic).")
@click.option("--turns", type=int, default=20, help="Turns of each (--trace agentic).")
@click.option("--max-batch", type=int, default=128, help="Most requests at once (--trace).")
@click.option("--plot", "plot_path", type=OUTPUT_FILE, help="Draw the played trace into this PNG file.")
@click.option("--scale", is_flag=True, help="Report on 2 to 16 ranks and 1,000 GPUs instead, for this context.")
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
    trace_source: str | None,
    sessions: int,
    turns: int,
    max_batch: int,
    plot_path: Path | None,
    scale: bool,
    explain: bool,
    json_path: Path | None,
    force: bool,
    **setup: Any,
) -> None:
    """Tell what context parallelism brings for a GPU, a model and a load; needs no GPU.

    Times and bytes of the indexer per layer and step, without and with context parallelism; what the exchange costs; from
    which context on it pays; how many tokens the caches hold.

    --trace plays requests over time instead: a file with columns arrival_s, prompt_tokens, output_tokens and, if need be,
    cached_tokens and shared_tokens (of the prompt: in the prefix cache, and common to all).
    """
    check_writable(force, json_path, plot_path)
    try:
        _refuse_unused([name for name, asked in (("--trace", trace_source is not None), ("--scale", scale)) if asked])
        _refuse("with --requests", ("batch", "context") if requests else ())
        _refuse("without --trace", ("max_batch", "sessions", "turns") if trace_source is None else ())
        _refuse("with a trace from a file", ("sessions", "turns") if trace_source != "agentic" else ())
        where = gpu(gpu_name)
        if read_roof is not None:
            require(read_roof > 0, "read_roof", "TB/s > 0", read_roof)
            where = replace(where, measured_tbps=read_roof, measured_in="given")
        chosen = Setup(
            gpu=where,
            model=load_model(model_name),
            requests=parse_requests(requests) or ((batch, context),),
            memory_share=memory,
            step_us=None if step_ms is None else 1e3 * step_ms,
            **setup,
        )
        require(step_ms is None or not (trace_source or scale), "step_ms", "none where steps differ", step_ms)
        require(plot_path is None or trace_source is not None, "plot", "a trace to draw", "none")
        if plot_path is not None:
            require_matplotlib()
        told: dict[str, Any] = {}
        if trace_source is not None:
            agents = Agents(sessions, turns) if trace_source == "agentic" else None
            told |= _tell_trace(chosen, trace_source, agents, Serving(max_batch), plot_path)
        if scale:
            told |= _tell_scale(chosen, context)
        if not told:
            told = _tell_load(chosen, explain)
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    write_json(json_path, told)


def _refuse_unused(reports: list[str]) -> None:
    """Refuse options that were given and that none of the reports asked for, if any, uses."""
    unused = set.intersection(*(set(UNUSED[report]) for report in reports)) if reports else ()
    _refuse(f"with {' and '.join(reports)}", sorted(unused))


def _refuse(when: str, unused: Iterable[str]) -> None:
    """Refuse options that were given and are not used."""
    context = click.get_current_context()
    for name in unused:
        given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        require(not given, name, f"none {when}", context.params[name])


def _tell_load(setup: Setup, explain: bool) -> dict[str, Any]:
    """A step of the given load."""
    found = estimate(setup)
    parts = [text.heading(found), text.step_table(found), text.transport_table(found), text.memory_lines(found)]
    parts += [text.explanation(found)] if explain else []
    click.echo("\n\n".join([*parts, text.verdict(found)]))
    return found.as_json()


def _tell_scale(setup: Setup, context: int) -> dict[str, Any]:
    """More ranks, and a fleet."""
    found = scales(setup, context)
    click.echo(f"{setup.model.name} on {setup.gpu.name}\n\n{scale_report(found, context)}\n")
    return {"scale": scale_json(found)}


def _tell_trace(setup: Setup, source: str, agents: Agents | None, serving: Serving, plot_path: Path | None) -> dict[str, Any]:
    """A trace, played in every mode."""
    requests = read_trace(Path(source)) if agents is None else agents.draw()
    fitting = estimate(setup).fitting
    require(fitting is not None, "weights", f"some that fit on {setup.tp} GPUs", setup.weight_format)
    room = fitting[0]  # type: ignore[index]
    progress = Progress()
    try:
        modes = [_both(requests, setup, serving, mode, room, progress) for mode in MODES]
    finally:
        progress.close()
    told = source if agents is None else str(agents)
    load = sum(request.prompt_tokens for request in requests) / len(requests)
    click.echo(f"{text.model_line(setup)}, at most {serving.max_batch} requests at once")
    click.echo(textwrap.fill(f"{told}: {len(requests):,} requests, prompts of {load:,.0f} tokens on average", 80))
    click.echo(f"\n{trace_table(modes)}\n\n{trace_verdict(modes)}\n")
    if plot_path is not None:
        write_trace_plot(modes, f"{text.model_line(setup)}\n{source}", plot_path)
    return {"trace": told, "requests": len(requests), "modes": trace_json(modes)}


def _both(requests: list[Request], setup: Setup, serving: Serving, mode: str, room: int, progress: Progress) -> Mode:
    paced = play(requests, setup, serving, mode, room, progress)
    return Mode(paced, play(backlog(requests), setup, serving, mode, room, progress))
