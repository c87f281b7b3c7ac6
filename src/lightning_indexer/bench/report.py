# SPDX-License-Identifier: Apache-2.0
"""A benchmark's result as text."""

import itertools
import statistics
from collections.abc import Sequence

from lightning_indexer.bench import peers
from lightning_indexer.bench.cases import RankCase
from lightning_indexer.bench.exchange import ExchangeRow
from lightning_indexer.bench.gpus import MODES, GpusResult, ModeRow
from lightning_indexer.bench.run import Result, Row
from lightning_indexer.bench.write import WriteRow
from lightning_indexer.text import table


def header(result: Result, replays: int) -> str:
    """What the table was measured on, and what its columns are."""
    facts, roofs = result.facts, result.roofs
    formats = _formats(result.rows)
    held = "one step plan and the calls of all layers" if result.planned else "the calls of all layers"
    peer = f"\n  peer      {peers.SOURCE}; x peer is ours over theirs" if _compared(result) else ""
    software = f"driver {facts.driver}, torch {facts.torch_version}, triton {facts.triton_version}"
    return f"""\
{facts.device}, {software}, commit {facts.commit[:12]}, {facts.date}
Roofs of this run: {roofs.read_tbps:.2f} TB/s read, {roofs.matrix_tflops:.0f} TFLOP/s bf16. All cases were verified.{formats}
CUDA-graph replay on a cold cache; a graph holds {held}, each on other keys.

  us        per call, median of {replays} replays; min and max of them
  MB        index keys that must be read (decode); TFLOP: what must be computed (prefill)
  % roof    least time by the read roof (decode) or the matrix roof (prefill) over ours{peer}
"""


def gpus_text(result: GpusResult, replays: int) -> str:
    """A run on several GPUs: what it was measured on, the ways to take a step, the exchange, the collectives alone."""
    facts, roofs, world = result.facts, result.roofs, result.rows[0].case.world
    thresholds = ", ".join(f"{pages:,} up to {rows} rows" for rows, pages in result.thresholds)
    links = [["collective", "B of a rank", "us"]]
    links += [[link.collective, f"{link.payload:,}", f"{link.us:.2f}"] for link in result.links]
    return f"""\
{world} x {facts.device}, driver {facts.driver}, torch {facts.torch_version}, triton {facts.triton_version}, commit \
{facts.commit[:12]}, {facts.date}
Read roof of this run, slowest GPU: {roofs.read_tbps:.2f} TB/s. All cases were verified.{_formats(result.rows)}
Microseconds per layer of the slowest rank, median of {replays} CUDA-graph replays on a cold cache.
Shared steps gather queries.
Thresholds of auto, pages from which on a step is shared: {thresholds}

  alone     each rank its own heads, no context parallelism
  % roof    bytes that the faster way with peer must read on a rank, by the read roof, over its time
  loss      auto over the better of alone and peer

{_modes_table(result.rows)}

{exchange_table(result.exchanged)}

{table(links)}
"""


def _modes_table(rows: list[ModeRow]) -> str:
    """One line per case; then from which context on peer pays, and the worst choice of auto."""
    cases: dict[RankCase, dict[tuple[str, str], ModeRow]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.transport, row.dispatch] = row
    lines = [["case", "alone", "collective", "peer", "auto", "chose", "loss", "alone / peer", "% roof"]]
    gains: dict[tuple[int, int], list[tuple[int, float]]] = {}
    losses = []
    for case, ways in cases.items():
        alone, collective, peer, auto = (ways[mode] for mode in MODES)
        best = min(alone, peer, key=lambda row: row.timing.us)
        losses.append((auto.timing.us / best.timing.us, case.name))
        times = [f"{row.timing.us:.2f}" for row in (alone, collective, peer, auto)]
        ratios = f"{losses[-1][0]:.3f}", f"{alone.timing.us / peer.timing.us:.2f}"
        lines.append([case.name, *times, auto.chosen, *ratios, f"{100 * best.roof_us / best.timing.us:.1f}"])
        batch, context = case.groups[0]
        gains.setdefault((batch, case.query_len), []).append((context, alone.timing.us - peer.timing.us))
    told = [f"batch {batch}, Q {query_len}: {_break_even(points)}" for (batch, query_len), points in gains.items()]
    worst = max(losses)
    return "\n".join(
        [table(lines), "", f"Worst choice of auto: {worst[0]:.3f} ({worst[1]})", "Peer is faster than alone"]
        + [f"  {line}" for line in told]
    )


def _formats(rows: Sequence[Row | ModeRow]) -> str:
    pairs = sorted({(row.format, row.queries) for row in rows})
    return "".join(f" Index-K cache in {format}, queries in {queries}." for format, queries in pairs)


def result_table(result: Result) -> str:
    """One line per case; columns of the peer, and of the plan alone, only where there is one."""
    compared = bool(_compared(result))
    planned = any(row.plan_us is not None for row in result.rows)
    heads = ["case", "layers", "us", "min", "max", _work_unit(result), "% roof"]
    rows = [heads + (["plan us"] if planned else []) + (["peer us", "x peer"] if compared else [])]
    for row in result.rows:
        timing = row.timing
        cells = [row.case.name, str(row.rotation.layers), f"{timing.us:.2f}", f"{timing.us_min:.2f}", f"{timing.us_max:.2f}"]
        cells += [_work(row), f"{row.pct_roof:.1f}"]
        if planned:
            cells.append("-" if row.plan_us is None else f"{row.plan_us:.2f}")
        if compared:
            cells += ["-", "-"] if row.ratio is None else [f"{row.peer_us:.1f}", f"{row.ratio:.2f}"]
        rows.append(cells)
    return table(rows)


def summary(result: Result) -> str:
    """Cases without a number, then the ratio to the peer: geometric mean, worst and best case."""
    lines = [f"FAILED, not timed: {case.op} {case.name}: {why}" for case, why in result.failures]
    compared = _compared(result)
    if compared:
        worst, best = max(compared), min(compared)
        mean = statistics.geometric_mean(ratio for ratio, _ in compared)
        lines += [
            f"Ours over the peer, geometric mean of {len(compared)} cases: {mean:.3f}",
            f"Worst case: {worst[0]:.3f} ({worst[1]})",
            f"Best case: {best[0]:.3f} ({best[1]})",
        ]
    else:
        lines.append(f"No peer figures for these cases on this device (there are some of {peers.SOURCE}).")
    return "\n".join(lines)


def exchange_table(rows: list[ExchangeRow]) -> str:
    """What the exchange adds, by rows of the step."""
    lines = [["ranks", "rows", "transport", "local us", "+ exchange and merge us", "+ queries us", "B received"]]
    for row in rows:
        added = f"{row.keys_us - row.local_us:.2f}", f"{row.queries_us - row.keys_us:.2f}"
        local = f"{row.local_us:.2f}"
        ranks = f"{row.world} GPUs" if row.gpus > 1 else str(row.world)
        lines.append([ranks, f"{row.rows:,}", row.transport, local, *added, f"{row.payload_bytes:,}"])
    return table(lines)


def write_table(rows: list[WriteRow]) -> str:
    """One line per format, size, and with norm and rotation or without."""
    lines = [["format", "rows", "with", "us", "min", "max", "MB moved", "% read roof"]]
    for row in rows:
        beside = f"norm, rotation, {row.heads} heads" if row.heads else "nothing else"
        times = f"{row.timing.us:.2f}", f"{row.timing.us_min:.2f}", f"{row.timing.us_max:.2f}"
        lines.append([row.format, f"{row.rows:,}", beside, *times, f"{row.moved / 1e6:,.2f}", f"{row.pct_roof:.1f}"])
    return table(lines)


def gain_table(result: Result, exchanged: list[ExchangeRow]) -> str:
    """One rank and exchange against the rank's own heads alone, and from which context on it pays."""
    alone = {row.case: row.timing.us for row in result.rows if not isinstance(row.case, RankCase)}
    lines = [["case", "rank us", "exchange us", "sharded us", "alone us", "sharded / alone"]]
    gains: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for row in result.rows:
        if isinstance(row.case, RankCase) and row.case.own in alone:
            batch, context = row.case.groups[0]
            cost = _exchange_us(exchanged, batch * row.case.query_len)
            sharded, own = row.timing.us + cost, alone[row.case.own]
            cells = f"{row.timing.us:.2f}", f"{cost:.2f}", f"{sharded:.2f}", f"{own:.2f}", f"{sharded / own:.2f}"
            lines.append([row.case.name, *cells])
            gains.setdefault((batch, row.case.query_len), []).append((context, own - sharded))
    told = [f"batch {batch}, Q {query_len}: {_break_even(points)}" for (batch, query_len), points in gains.items()]
    return "\n".join([table(lines), "", "Sharded is faster", *(f"  {line}" for line in told)])


def _exchange_us(rows: list[ExchangeRow], wanted: int) -> float:
    """What the exchange adds to a step of `wanted` rows: of the measured sizes the next larger, or the largest."""
    fitting = [row for row in rows if row.rows >= wanted] or [max(rows, key=lambda row: row.rows)]
    best = min(fitting, key=lambda row: row.rows)
    return best.keys_us - best.local_us


def _break_even(points: list[tuple[int, float]]) -> str:
    """From which context on there is a gain, between measured contexts on a straight line."""
    points = sorted(points)
    if points[0][1] > 0:
        return f"from the shortest context measured on ({points[0][0]:,} tokens)"
    for (context, gain), (longer, more) in itertools.pairwise(points):
        if more > 0:
            return f"from about {round(context - gain * (longer - context) / (more - gain)):,} tokens on"
    return f"not up to {points[-1][0]:,} tokens"


def _compared(result: Result) -> list[tuple[float, str]]:
    return [(row.ratio, row.case.name) for row in result.rows if row.ratio is not None]


def _work_unit(result: Result) -> str:
    return "TFLOP" if any(row.case.op == "prefill" for row in result.rows) else "MB"


def _work(row: Row) -> str:
    return f"{row.index_bytes / 1e6:,.1f}" if row.case.op != "prefill" else f"{row.flops / 1e12:.3f}"
