# SPDX-License-Identifier: Apache-2.0
"""The command line: reads options, calls the work, prints."""

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

import lightning_indexer
from lightning_indexer import replay as replaying
from lightning_indexer.bench import plot, report
from lightning_indexer.bench.cases import DECODE_SETS, DecodeCase, PrefillCase, RankCase, decode_set, prefill_set, rank_set
from lightning_indexer.bench.cases import Case as BenchCase
from lightning_indexer.bench.exchange import ExchangeRow, measure_exchange
from lightning_indexer.bench.gate import WrongSelectionError
from lightning_indexer.bench.roofs import measure_roofs
from lightning_indexer.bench.run import Facts, measure
from lightning_indexer.bench.timing import QUICK, Protocol
from lightning_indexer.cache import FORMATS
from lightning_indexer.spec import IndexerSpec
from lightning_indexer.verify import minimax_m3, smollm2, synthetic
from lightning_indexer.verify.case import Case
from lightning_indexer.verify.compare import Outcome, attention_mass, compare
from lightning_indexer.verify.report import as_json, mass_table, outcome_table, statement

INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
MODEL_HEADS = 4  # index heads of both model inputs
OUTPUT_FILE = click.Path(dir_okay=False, path_type=Path)


class Progress:
    """One line on stderr that says what is going on: rewritten on a terminal, else one line per kind of work."""

    def __init__(self) -> None:
        self.label = ""

    def __call__(self, label: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\033[K{label} {done}/{total}", nl=False, err=True)
        elif label != self.label:
            click.echo(f"{label} ...", err=True)
        self.label = label

    def close(self) -> None:
        if sys.stderr.isatty():
            click.echo("\r\033[K", nl=False, err=True)


def _worlds(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        worlds = [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"expected numbers of ranks such as 1,2,4,8, got {value!r}") from error
    if not all(1 <= world <= 64 for world in worlds):
        raise click.BadParameter(f"expected numbers of ranks from 1 to 64, got {value!r}")
    return worlds


@click.group(context_settings={"show_default": True})
@click.version_option(lightning_indexer.__version__, package_name="lightning-indexer")
def main() -> None:
    """Exact, context-parallel block selection for MiniMax-M3 and its kin."""
    # Before CUDA starts: ranks that share a GPU wait for each other, so no two of their streams may share a hardware queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@main.command()
@click.option("--input", "source", type=click.Choice(["minimax-m3", "smollm2", "random"]), default="minimax-m3")
@click.option("--world", "worlds", default="1,2,4,8", callback=_worlds, help="Numbers of ranks, comma-separated.")
@click.option("--context", type=click.IntRange(1), help="Tokens.  [default: 8192; smollm2: 4096]")
@click.option("--text", type=INPUT_FILE, help="What the model reads.  [default: a long English text that Python ships]")
@click.option("--decode-steps", type=click.IntRange(1), default=64, help="Decode steps after the prefill (models).")
@click.option("--layers", type=click.IntRange(1), default=4, help="Sparse layers (minimax-m3).")
@click.option("--heads", type=int, default=4, help="Index heads (random).")
@click.option("--head-dim", type=int, default=128, help="Index head dim (random).")
@click.option("--block-size", type=int, default=128, help="Tokens per block (random).")
@click.option("--topk", type=int, default=16, help="Blocks kept (random).")
@click.option("--query-len", type=click.IntRange(1), default=1, help="Query rows per request (random).")
@click.option("--batch", type=click.IntRange(1), default=4, help="Requests (random).")
@click.option("--seed", type=int, default=0, help="Of weights, random input and page shuffling.")
@click.option(
    "--cache", "format", type=click.Choice(list(FORMATS)), help="Format to store the keys in.  [default: as they come]"
)
@click.option("--device", default="cpu", help="cpu: ranks are processes, over gloo; cuda: threads that share the GPU.")
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the result to this file, too.")
def verify(
    source: str,
    worlds: list[int],
    context: int | None,
    text: Path | None,
    json_path: Path | None,
    seed: int,
    device: str,
    format: str | None,
    **options: Any,
) -> None:
    """Show that context-parallel ranks select what one rank selects, and what the model itself selects.

    Starts ranks, gives each its heads' queries, and compares every id that they return with the unsharded
    selection (bit for bit, order included) and with the model's own blocks (as sets). Exits 1 on any difference.
    """
    progress = Progress()
    try:
        heads = options["heads"] if source == "random" else MODEL_HEADS
        for world in worlds:
            IndexerSpec(num_heads=heads).owned_heads(0, world)
        where = torch.device("cpu") if device == "cpu" else _gpu(device)
        cases = _cases(source, context, text, seed, progress, **options)
        if format is not None:
            cases = [case.stored_as(format) for case in cases]
        outcomes = list(compare(cases, worlds, progress, where))
        masses = [attention_mass(case) for case in cases if case.attention_heads]
    except (ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        progress.close()
    _print(outcomes, source)
    if masses:
        click.echo("\n" + mass_table(masses))
    click.echo("\n" + statement(outcomes))
    if json_path is not None:
        parameters: dict[str, Any] = {"input": source, "worlds": worlds, "version": lightning_indexer.__version__}
        parameters |= {
            "device": device,
            "cache": format,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        json_path.write_text(json.dumps(as_json(outcomes, masses, parameters), indent=1) + "\n")
    sys.exit(0 if all(outcome.passed for outcome in outcomes) else 1)


def _cases(source: str, context: int | None, text: Path | None, seed: int, progress: Progress, **options: Any) -> list[Case]:
    if source == "random":
        spec = IndexerSpec(
            num_heads=options["heads"],
            head_dim=options["head_dim"],
            block_size=options["block_size"],
            topk=options["topk"],
        )
        length = 8192 if context is None else context
        return synthetic.draw(spec, batch=options["batch"], context=length, query_len=options["query_len"], seed=seed)
    read = minimax_m3.default_text() if text is None else text.read_bytes()
    steps = options["decode_steps"]
    if source == "smollm2":
        length = 4096 if context is None else context
        return smollm2.capture(read, context=length, decode_steps=steps, seed=seed, progress=progress)
    length = 8192 if context is None else context
    layers = options["layers"]
    return minimax_m3.capture(read, context=length, decode_steps=steps, layers=layers, seed=seed, progress=progress)


def _print(outcomes: list[Outcome], source: str) -> None:
    click.echo(
        f"""
Input: {source}. One line per case and number of ranks; a selection is the blocks of one rank, head and row.
  equal     selections that are the unsharded context's, id for id and in the same order
  = model   ... that are the model's own blocks; near-ties of these differ in blocks of equal score within rounding
  MB alone  index keys that a rank reads per layer and step without context parallelism; MB with CP: with it
  B/row     bytes that a rank receives in the exchange, per query row
  overlap   with --cache: mean share of the blocks that the keys as they came select
"""
    )
    click.echo(outcome_table(outcomes))
    for outcome in outcomes:
        for difference in outcome.differences[:1]:
            click.echo(f"\n{difference}")


def _triples(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[int, int, int]]:
    triples = []
    for value in values:
        try:
            first, second, third = (int(part) for part in value.split(","))
        except ValueError as error:
            raise click.BadParameter(f"expected {parameter.metavar}, got {value!r}") from error
        triples.append((first, second, third))
    return triples


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"expected numbers such as 1,8,32, got {value!r}") from error
    if min(numbers) < 1:
        raise click.BadParameter(f"expected numbers from 1, got {value!r}")
    return numbers


def _bench_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every benchmark."""
    options = [
        click.option("--format", type=click.Choice(["bf16", "fp16"]), default="bf16", help="Of the index-K cache."),
        click.option("--quick", is_flag=True, help="Fewer replays."),
        click.option("--device", default="cuda", help="A CUDA or HIP device."),
        click.option("--commit", help="What is measured.  [default: HEAD of the checkout]"),
        click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the result to this file, too."),
        click.option("--plot", "plot_path", type=OUTPUT_FILE, help="Draw time against context into this PNG file."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


class BadInput(click.ClickException):
    """A file or option that cannot be used: one line, exit code 2."""

    exit_code = 2


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--world", "worlds", default="1,2,4", callback=_worlds, help="Numbers of ranks, comma-separated.")
@click.option(
    "--cache",
    "format",
    type=click.Choice(replaying.CACHE_FORMATS),
    help="Format to store the keys in.  [default: as recorded]",
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "collective", "peer"]),
    default="auto",
    help="collective: processes, over gloo; peer: threads that share a GPU.  [auto: peer on a GPU]",
)
@click.option("--repeat", type=click.IntRange(1), default=5, help="Times that a call is timed.")
@click.option("--device", default="cpu", help="cpu, or a GPU, which the ranks share.")
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the result to this file, too.")
@click.option("--force", is_flag=True, help="Overwrite that file.")
def replay(
    file: Path,
    worlds: list[int],
    format: str | None,
    transport: str,
    repeat: int,
    device: str,
    json_path: Path | None,
    force: bool,
) -> None:
    """Run decode calls that an engine recorded on any number of ranks; compare and time them.

    Every id must be the unsharded selection's, and the blocks those that the engine's ranks chose, unless the keys are stored
    in another format. Exits 1 on any difference, 2 if FILE is no recording.
    """
    progress = Progress()
    try:
        if json_path is not None and json_path.exists() and not force:
            raise BadInput(f"{json_path} is there already: --force overwrites it")
        cases = replaying.cases(file, format)
        for world in worlds:
            cases[0].spec.owned_heads(0, world)
        where = torch.device("cpu") if device == "cpu" else _gpu(device)
        outcomes = list(compare(cases, worlds, progress, where, transport))
        times = replaying.time_calls(cases, worlds, repeat, progress, where, transport)
    except (ValueError, ImportError) as error:
        raise BadInput(str(error)) from error
    finally:
        progress.close()
    _print(outcomes, str(file))
    click.echo(f"\nMilliseconds a call, median of {repeat}, slowest rank; ranks share this machine.\n")
    click.echo(replaying.time_table(times))
    click.echo("\n" + statement(outcomes))
    if json_path is not None:
        parameters: dict[str, Any] = {"command": "replay", "file": str(file), "worlds": worlds, "device": device}
        parameters |= {"cache": format, "transport": transport}
        told = as_json(outcomes, [], {**parameters, "version": lightning_indexer.__version__, "torch": torch.__version__})
        told["times"] = [dataclasses.asdict(row) for row in times]
        json_path.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(0 if all(outcome.passed for outcome in outcomes) else 1)


@main.group()
def bench() -> None:
    """Time the operators on a GPU, against roofs measured in the same run.

    Each case is verified before it is timed. Exits 1 if a case selects wrongly; that case gets no time.
    """


@bench.command("decode")
@click.option(
    "--cases",
    "named",
    type=click.Choice([*DECODE_SETS, "all"]),
    multiple=True,
    help="Named cases, repeatable: the peer's, MiniMax's protocol, uneven lengths.  [default: default, unless --case]",
)
@click.option(
    "--case", "shapes", multiple=True, callback=_triples, metavar="BATCH,CONTEXT,QUERY_LEN", help="A case, repeatable."
)
@click.option("--heads", type=click.IntRange(1), default=1, help="Index heads scored; 1 is a rank of four.")
@_bench_options
def bench_decode(named: tuple[str, ...], shapes: list[tuple[int, int, int]], heads: int, **options: Any) -> None:
    """Time one layer of a decode step."""
    names = named or (() if shapes else ("default",))
    try:
        cases = [DecodeCase(((batch, context),), query_len, heads) for batch, context, query_len in shapes]
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    _bench([*(case for name in names for case in decode_set(name, heads)), *cases], **options)


@bench.command("prefill")
@click.option(
    "--case",
    "shapes",
    multiple=True,
    callback=_triples,
    metavar="HEADS,TOKENS,PREFIX",
    help="A case, repeatable: a chunk of tokens behind a cached prefix.  [default: those of the peer's figures]",
)
@_bench_options
def bench_prefill(shapes: list[tuple[int, int, int]], **options: Any) -> None:
    """Time one layer of a prefill chunk of one request."""
    try:
        cases = [PrefillCase(heads, tokens, prefix) for heads, tokens, prefix in shapes]
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    _bench(cases or prefill_set(), **options)


@bench.command("cp")
@click.option("--world", type=click.IntRange(2, 16), default=4, help="Ranks.")
@click.option("--heads", type=click.IntRange(1), default=4, help="Index heads of all ranks together.")
@click.option(
    "--case",
    "shapes",
    multiple=True,
    callback=_triples,
    metavar="BATCH,CONTEXT,QUERY_LEN",
    help="A case, repeatable.  [default: those of the peer's figures]",
)
@click.option("--rows", default="1,8,32,128,512", callback=_numbers, help="Rows of the steps that are exchanged.")
@_bench_options
def bench_cp(world: int, heads: int, shapes: list[tuple[int, int, int]], rows: list[int], **options: Any) -> None:
    """Time one rank of a context-parallel decode step against the step without it, and the exchange.

    A rank's kernels (all heads on its blocks) and the unsharded step (its own heads on all blocks) are timed alone, exchange
    and merge on virtual ranks that share the GPU. "sharded" is the sum of the first and the last: what a step takes where
    every rank has a GPU and the exchange costs what it costs here.
    """
    try:
        given = [RankCase(((batch, context),), query_len, heads, world) for batch, context, query_len in shapes]
        ranks = given or rank_set(world, heads)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    alone = [case.own for case in ranks]
    exchange = partial(measure_exchange, world, heads, rows)
    _bench([*ranks, *alone], **options, exchange=exchange)


def _bench(
    cases: Sequence[BenchCase],
    format: str,
    quick: bool,
    device: str,
    commit: str | None,
    json_path: Path | None,
    plot_path: Path | None,
    exchange: Callable[..., list[ExchangeRow]] | None = None,
) -> None:
    where = _gpu(device)
    protocol = QUICK if quick else Protocol()
    progress = Progress()
    try:
        if plot_path is not None:
            plot.require_matplotlib()
        with torch.cuda.device(where):
            facts = Facts.read(where, commit)
            progress("roofs", 0, 1)
            roofs = measure_roofs(protocol, where)
            result = measure(cases, format, where, facts, roofs, protocol, progress)
            exchanged = [] if exchange is None else exchange(where, protocol, progress)
    except (ValueError, ImportError, WrongSelectionError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        progress.close()
    click.echo(f"\n{report.header(result, protocol.replays)}\n{report.result_table(result)}\n\n{report.summary(result)}")
    told = result.as_json()
    if exchange is not None:
        click.echo(f"\n{report.exchange_table(exchanged)}\n\n{report.gain_table(result, exchanged)}")
        told["rows"] += [row.as_json() for row in exchanged]
    if json_path is not None:
        json_path.write_text(json.dumps(told, indent=1) + "\n")
    if plot_path is not None:
        plot.write_plot(result, plot_path)
    sys.exit(1 if result.failures else 0)


def _gpu(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise click.BadParameter(f"expected a device such as cuda or cuda:1, got {name!r}", param_hint="--device") from error
    if device.type != "cuda" or not torch.cuda.is_available():
        raise click.ClickException(f"{name!r} is no CUDA or HIP device that works here")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
