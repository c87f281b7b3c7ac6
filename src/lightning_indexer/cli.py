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
from torch.multiprocessing.spawn import ProcessException

import lightning_indexer
from lightning_indexer import replay as replaying
from lightning_indexer.bench import plot, report
from lightning_indexer.bench.baseline import (
    ROUNDS,
    against_commit,
    compare_rounds,
    comparison_table,
    measured_arguments,
)
from lightning_indexer.bench.cases import (
    DECODE_SETS,
    DecodeCase,
    PrefillCase,
    RankCase,
    RankPrefillCase,
    decode_set,
    gpus_set,
    prefill_set,
    rank_set,
)
from lightning_indexer.bench.cases import Case as BenchCase
from lightning_indexer.bench.checkout import find_commit
from lightning_indexer.bench.exchange import ExchangeRow, measure_exchange
from lightning_indexer.bench.gate import WrongSelectionError
from lightning_indexer.bench.gpus import Plan, measure_gpus
from lightning_indexer.bench.page import report_page
from lightning_indexer.bench.results import ResultFile, load_result, parse_result
from lightning_indexer.bench.roofs import measure_roofs
from lightning_indexer.bench.run import Facts, Result, measure, query_dtype
from lightning_indexer.bench.timing import QUICK, Protocol
from lightning_indexer.bench.write import measure_writes
from lightning_indexer.cache import FORMATS
from lightning_indexer.checks import require
from lightning_indexer.doctor.command import doctor
from lightning_indexer.plan.command import plan
from lightning_indexer.spec import IndexerSpec
from lightning_indexer.terminal import (
    FOLDER,
    INPUT_FILE,
    OUTPUT_FILE,
    InputError,
    PlainCommand,
    Progress,
    check_writable,
    json_option,
    output_options,
    write_json,
)
from lightning_indexer.verify import minimax_m3, smollm2, synthetic
from lightning_indexer.verify.case import Case
from lightning_indexer.verify.compare import Outcome, attention_mass, compare
from lightning_indexer.verify.report import as_json, mass_table, outcome_table, statement

MODEL_HEADS = 4  # index heads of both model inputs


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


main.add_command(doctor)
main.add_command(plan)


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
@click.option(
    "--shard-by",
    type=click.Choice(["block", "page"]),
    default="block",
    help="page: each rank holds 1/P of the pages, and nothing of the others.",
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
    shard_by: str,
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
        outcomes = list(compare(cases, worlds, progress, where, shard_by=shard_by))
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
            "shard_by": shard_by,
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


class BenchCommand(click.Command):
    """A benchmark, which knows its arguments as they were given, for another commit to get them, too."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        context.obj = [str(self.name), *arguments]
        return super().parse_args(context, arguments)


def _bench_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every benchmark."""
    options = [
        click.option(
            "--format", type=click.Choice(["bf16", "fp16", "fp8", "nvfp4"]), default="bf16", help="Of the index-K cache."
        ),
        click.option(
            "--queries", type=click.Choice(["bf16", "fp16", "fp8"]), help="Of the queries.  [default: the cache's, or bf16]"
        ),
        click.option("--quick", is_flag=True, help="Fewer replays."),
        click.option("--device", default="cuda", help="A CUDA or HIP device."),
        click.option("--commit", help="What is measured.  [default: HEAD of the checkout]"),
        click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the result to this file, too."),
        click.option("--plot", "plot_path", type=OUTPUT_FILE, help="Draw time against context into this PNG file."),
        click.option("--baseline", help="Compare with this result file, or with this commit, measured in turns."),
        click.option("--rounds", type=click.IntRange(1), default=ROUNDS, help="Turns with --baseline COMMIT."),
        click.option("--force", is_flag=True, help="Overwrite files that exist."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command(cls=PlainCommand)
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
@output_options(json_option())
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
    check_writable(force, json_path)
    progress = Progress()
    try:
        cases = replaying.cases(file, format)
        for world in worlds:
            cases[0].spec.owned_heads(0, world)
        where = torch.device("cpu") if device == "cpu" else _gpu(device)
        outcomes = list(compare(cases, worlds, progress, where, transport))
        times = replaying.time_calls(cases, worlds, repeat, progress, where, transport)
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    finally:
        progress.close()
    _print(outcomes, str(file))
    click.echo(f"\nMilliseconds a call, median of {repeat}, slowest rank; ranks share this machine.\n")
    click.echo(replaying.time_table(times))
    click.echo("\n" + statement(outcomes))
    parameters: dict[str, Any] = {"command": "replay", "file": str(file), "worlds": worlds, "device": device}
    parameters |= {"cache": format, "transport": transport}
    told = as_json(outcomes, [], {**parameters, "version": lightning_indexer.__version__, "torch": torch.__version__})
    write_json(json_path, {**told, "times": [dataclasses.asdict(row) for row in times]})
    sys.exit(0 if all(outcome.passed for outcome in outcomes) else 1)


@main.group()
def bench() -> None:
    """Time the operators on a GPU, against roofs measured in the same run.

    Each case is verified before it is timed. Exits 1 if a case selects wrongly; that case gets no time.
    """


@bench.command("report", cls=PlainCommand)
@click.argument("files", type=INPUT_FILE, nargs=-1, required=True)
@click.option("--html", "html_path", type=OUTPUT_FILE, default="report.html", help="The page.")
@click.option("--png", "png_folder", type=FOLDER, help="Write each picture into this folder, too.")
@output_options()
def bench_report(files: tuple[Path, ...], html_path: Path, png_folder: Path | None, force: bool) -> None:
    """Make one HTML page of result FILES, with pictures, that needs no network: for a phone, a mail, a printer.

    Time against context, percent of the roof, what dispatch chooses between, the break-even map, and what plan promised.
    """
    try:
        plot.require_matplotlib("report")
        results = [load_result(path) for path in files]
        text, drawn = report_page(results)
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    pictures = [] if png_folder is None else [(png_folder / f"{picture.name}.png", picture) for picture in drawn]
    check_writable(force, html_path, *(path for path, _ in pictures))
    html_path.write_text(text)
    for path, picture in pictures:
        path.write_bytes(picture.render("png"))
    told = f" and {len(pictures)} pictures in {png_folder}" if pictures else ""
    click.echo(f"{html_path}: {len(drawn)} pictures of {len(results)} results{told}")


@bench.command("decode", cls=BenchCommand)
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


@bench.command("prefill", cls=BenchCommand)
@click.option(
    "--case",
    "shapes",
    multiple=True,
    callback=_triples,
    metavar="HEADS,TOKENS,PREFIX",
    help="A case, repeatable: a chunk of tokens behind a cached prefix.  [default: those of the peer's figures]",
)
@click.option("--world", type=click.IntRange(2, 16), help="Ranks, one of which is timed beside its own heads alone.")
@click.option(
    "--shard-by",
    type=click.Choice(["block", "page"]),
    default="block",
    help="With --world. page: over a cache that the group holds once.",
)
@_bench_options
def bench_prefill(shapes: list[tuple[int, int, int]], world: int | None, shard_by: str, **options: Any) -> None:
    """Time one layer of a prefill chunk of one request.

    With --world one rank's kernels (all heads on its blocks, up to its keys) and the unshared chunk (its own heads on all
    blocks) are timed; the exchange is not. Default cases are then the peer's with four heads.
    """
    try:
        require(world is not None or shard_by == "block", "--shard-by", "block without --world", shard_by)
        cases = [PrefillCase(heads, tokens, prefix) for heads, tokens, prefix in shapes] or prefill_set()
        if world is not None:
            whole = cases if shapes else [case for case in cases if case.heads > 1]
            ranks = [RankPrefillCase(case.heads, case.tokens, case.prefix, world, shard_by) for case in whole]
            cases = [*ranks, *dict.fromkeys(case.own for case in ranks)]
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    _bench(cases, **options)


@bench.command("cp", cls=BenchCommand)
@click.option("--world", type=click.IntRange(2, 16), default=4, help="Ranks that share a GPU.")
@click.option("--gpus", type=click.IntRange(2, 64), help="Ranks with a GPU of this host each, instead.")
@click.option("--heads", type=click.IntRange(1), default=4, help="Index heads of all ranks together.")
@click.option(
    "--case",
    "shapes",
    multiple=True,
    callback=_triples,
    metavar="BATCH,CONTEXT,QUERY_LEN",
    help="A case, repeatable.  [default: those of the peer's figures; --gpus: batch 1 to 128 by 1K to 1M tokens]",
)
@click.option("--rows", default="1,8,32,128,512", callback=_numbers, help="Rows of the steps that are exchanged.")
@click.option(
    "--shard-by",
    type=click.Choice(["block", "page"]),
    default="block",
    help="page: the rank's kernels over a cache that the group holds once.",
)
@_bench_options
def bench_cp(
    world: int,
    gpus: int | None,
    heads: int,
    shapes: list[tuple[int, int, int]],
    rows: list[int],
    shard_by: str,
    **options: Any,
) -> None:
    """Time one rank of a context-parallel decode step against the step without it, and the exchange.

    A rank's kernels (all heads on its blocks) and the unsharded step (its own heads on all blocks) are timed alone, exchange
    and merge on virtual ranks that share the GPU. "sharded" is the sum of the first and the last: what a step takes where
    every rank has a GPU and the exchange costs what it costs here.

    With --gpus every rank is a process with a GPU, and whole steps are timed: without context parallelism, sharded with each
    transport, and as "auto" chooses; then the exchange and the collectives alone. The slowest rank counts.
    """
    world = gpus or world
    try:
        require(gpus is None or shard_by == "block", "--shard-by", "block with --gpus", shard_by)
        given = [RankCase(((batch, context),), query_len, heads, world, shard_by) for batch, context, query_len in shapes]
        ranks = given or (rank_set(world, heads, shard_by) if gpus is None else gpus_set(world, heads))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if gpus is not None:
        _bench_gpus(world, heads, ranks, rows, **options)
        return
    alone = [case.own for case in ranks]
    exchange = partial(measure_exchange, world, heads, rows)
    _bench([*ranks, *alone], **options, exchange=exchange)


def _bench_gpus(
    world: int,
    heads: int,
    cases: Sequence[RankCase],
    rows: list[int],
    format: str,
    queries: str | None,
    quick: bool,
    device: str,
    commit: str | None,
    json_path: Path | None,
    plot_path: Path | None,
    baseline: str | None,
    rounds: int,
    force: bool,
) -> None:
    check_writable(force, json_path)
    before = _baseline(baseline)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        require(found >= world, "--gpus", f"at most the {found} GPUs that are here", str(world))
        require(device == "cuda", "--device", "none with --gpus, which takes the first ones", device)
        require(plot_path is None, "--plot", "none with --gpus; `bench report` draws the result", str(plot_path))
        require(not isinstance(before, str), "--baseline", "a result file with --gpus", repr(before))
        query_dtype(FORMATS[format], queries)
    except ValueError as error:
        raise InputError(str(error)) from error
    protocol = QUICK if quick else Protocol()
    try:
        result = measure_gpus(Plan(world, heads, cases, rows, format, queries, protocol, commit))
    except ProcessException as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"\n{report.gpus_text(result, protocol.replays)}")
    told = result.as_json()
    compared = None
    if isinstance(before, ResultFile):
        compared = compare_rounds([(before, parse_result(told, "this run"))], before.name)
        click.echo(comparison_table(compared))
        told["baseline"] = compared.as_json()
    write_json(json_path, told)
    sys.exit(1 if compared is not None and compared.slower else 0)


@bench.command("write", cls=BenchCommand)
@click.option(
    "--format", "formats", type=click.Choice(["bf16", "fp8", "nvfp4"]), multiple=True, help="Repeatable.  [default: all]"
)
@click.option("--rows", default="128,4096,65536", callback=_numbers, help="Keys of a layer.")
@click.option("--heads", type=click.IntRange(0), default=4, help="Of queries that are normed and rotated beside the keys.")
@click.option("--quick", is_flag=True, help="Fewer replays.")
@click.option("--device", default="cuda", help="A CUDA or HIP device.")
@click.option("--commit", help="What is measured.  [default: HEAD of the checkout]")
@output_options(json_option())
def bench_write(
    formats: tuple[str, ...],
    rows: list[int],
    heads: int,
    quick: bool,
    device: str,
    commit: str | None,
    json_path: Path | None,
    force: bool,
) -> None:
    """Time writing the keys of one layer: by slot alone, then with norm and rotation of keys and queries."""
    check_writable(force, json_path)
    where = _gpu(device)
    protocol = QUICK if quick else Protocol()
    progress = Progress()
    try:
        with torch.cuda.device(where):
            facts = Facts.read(where, commit)
            progress("roofs", 0, 1)
            roofs = measure_roofs(protocol, where)
            chosen = formats or ("bf16", "fp8", "nvfp4")
            written = measure_writes(chosen, rows, heads, where, facts.l2_bytes, roofs.read_tbps, protocol, progress)
    except (ValueError, WrongSelectionError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        progress.close()
    result = Result(facts, roofs, [], [], False)
    click.echo(f"\n{report.header(result, protocol.replays)}\n{report.write_table(written)}")
    told = result.as_json()
    told["rows"] = [row.as_json() for row in written]
    write_json(json_path, told)


def _bench(
    cases: Sequence[BenchCase],
    format: str,
    queries: str | None,
    quick: bool,
    device: str,
    commit: str | None,
    json_path: Path | None,
    plot_path: Path | None,
    baseline: str | None,
    rounds: int,
    force: bool,
    exchange: Callable[..., list[ExchangeRow]] | None = None,
) -> None:
    check_writable(force, json_path, plot_path)
    before = _baseline(baseline)
    where = _gpu(device)
    protocol = QUICK if quick else Protocol()
    progress = Progress()

    def run() -> tuple[Result, list[ExchangeRow], dict[str, Any]]:
        with torch.cuda.device(where):
            facts = Facts.read(where, commit)
            progress("roofs", 0, 1)
            roofs = measure_roofs(protocol, where)
            result = measure(cases, format, where, facts, roofs, protocol, progress, queries=queries)
            exchanged = [] if exchange is None else exchange(where, protocol, progress)
        told = result.as_json()
        told["rows"] += [row.as_json() for row in exchanged]
        return result, exchanged, told

    compared = None
    try:
        if plot_path is not None:
            plot.require_matplotlib()
        if isinstance(before, str):
            runs = []

            def measure_ours() -> ResultFile:
                runs.append(run())
                torch.cuda.empty_cache()
                return parse_result(runs[-1][2], "this run")

            arguments = measured_arguments(click.get_current_context().obj)
            compared = against_commit(before, arguments, measure_ours, rounds, progress)
            result, exchanged, told = runs[-1]
        else:
            result, exchanged, told = run()
            if before is not None:
                compared = compare_rounds([(before, parse_result(told, "this run"))], before.name)
    except (ValueError, ImportError, WrongSelectionError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        progress.close()
    click.echo(f"\n{report.header(result, protocol.replays)}\n{report.result_table(result)}\n\n{report.summary(result)}")
    if exchange is not None:
        click.echo(f"\n{report.exchange_table(exchanged)}\n\n{report.gain_table(result, exchanged)}")
    if compared is not None:
        click.echo(f"\n{comparison_table(compared)}")
        told["baseline"] = compared.as_json()
    write_json(json_path, told)
    if plot_path is not None:
        plot.write_plot(result, plot_path)
    sys.exit(1 if result.failures or (compared is not None and compared.slower) else 0)


def _baseline(source: str | None) -> ResultFile | str | None:
    """A result file, read before anything is measured, or the name of a commit."""
    if source is None:
        return None
    try:
        if Path(source).is_file():
            return load_result(Path(source))
        known = find_commit(source) is not None
        require(known, "baseline", "a result file, or a commit of the checkout that this runs from", repr(source))
    except ValueError as error:
        raise InputError(str(error)) from error
    return source


def _gpu(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise click.BadParameter(f"expected a device such as cuda or cuda:1, got {name!r}", param_hint="--device") from error
    if device.type != "cuda" or not torch.cuda.is_available():
        raise click.ClickException(f"{name!r} is no CUDA or HIP device that works here")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
