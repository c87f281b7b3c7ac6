# SPDX-License-Identifier: Apache-2.0
"""Pictures of result files: time against context, percent of roof, break-even map, what dispatch chooses, exchange.

Each is one panel of a size that can still be read on a phone.
"""

import importlib
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lightning_indexer.bench.gpus import MODES
from lightning_indexer.bench.results import ResultFile, exchange_name, is_layer
from lightning_indexer.plan.cost import Setup, alone_us, rank_us, setup_exchanges
from lightning_indexer.plan.exchange import interpolate
from lightning_indexer.plan.gpus import Gpu, gpu_of_device
from lightning_indexer.plan.memory import INDEX_FORMATS
from lightning_indexer.plan.model import MINIMAX_M3

SIZE = (5.2, 3.9)  # inches
MARKERS = "osD^vPX*"
MAP_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MAP_CONTEXTS = tuple(1024 << step for step in range(11))  # 1K to 1M


@dataclass(frozen=True)
class Picture:
    """One panel: how it is drawn, and what it says to somebody who does not see it."""

    name: str  # of the file that it is exported to, with a number before it
    title: str
    caption: str
    draw: Callable[[Any], None]  # onto axes

    def render(self, format: str) -> bytes:
        """As "svg" or "png"."""
        matplotlib = importlib.import_module("matplotlib")
        with matplotlib.rc_context({"font.size": 11, "svg.hashsalt": self.name, "svg.fonttype": "path"}):
            figure = importlib.import_module("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
            axes = figure.subplots()
            self.draw(axes)
            axes.set_title(self.title, fontsize=12)
            told = io.BytesIO()
            figure.savefig(told, format=format, dpi=160, metadata={"Date": None} if format == "svg" else {})
        return told.getvalue()


def pictures(results: list[ResultFile]) -> list[Picture]:
    """All that the results have data for, in the order of the page."""
    found = [picture for result in results for picture in _times(result)]
    found += [*_roofs(results), *_shared_steps(results), *_ways(results), *_maps(results), *_exchanges(results)]
    return [replace(picture, name=f"{number:02}-{picture.name}") for number, picture in enumerate(found, 1)]


@dataclass(frozen=True)
class SharedStep:
    """One case measured with and without context parallelism; the exchange is added as far as it was measured."""

    row: dict[str, Any]  # of the rank
    alone_us: float
    rank_us: float
    exchange_us: float

    @property
    def shared_us(self) -> float:
        """The rank's part and the exchange."""
        return self.rank_us + self.exchange_us

    @property
    def gain(self) -> float:
        """How many times faster."""
        return self.alone_us / self.shared_us


def shared_steps(result: ResultFile) -> list[SharedStep]:
    """Uniform steps of `bench cp`, each with the step without context parallelism and the exchange of as many rows."""
    alone = {(_load(row), row["heads"]): row["us"] for row in result.rows if row["op"] == "decode"}
    found = []
    for row in result.rows:
        if row["op"] != "cp" or not is_layer(row):
            continue
        own = _load(row), max(1, row["heads"] // row["world"])
        if own in alone:
            points = sorted(
                (each["rows"], each["us"])
                for each in result.rows
                if each["op"] == "exchange" and each["world"] == row["world"] and each["transport"] == "peer"
            )
            if points:
                exchange = interpolate(points, row["batch"] * row["query_len"]) if len(points) > 1 else points[0][1]
                found.append(SharedStep(row, alone[own], row["us"], exchange))
    return found


def _load(row: dict[str, Any]) -> tuple[Any, ...]:
    return _formats(row), row["batch"], row["context"], row["query_len"], str(row.get("lengths"))


def _formats(row: dict[str, Any]) -> str:
    """Of the cache, and of the queries where these differ from it; older rows do not tell theirs."""
    queries = row.get("queries", row["format"])
    return str(row["format"]) if queries == row["format"] else f"{row['format']}, {queries} queries"


def _uniform(result: ResultFile, *ops: str) -> Iterable[dict[str, Any]]:
    return (row for row in result.rows if row["op"] in ops and "lengths" not in row and row["us"] > 0)


def _times(result: ResultFile) -> list[Picture]:
    """Time of a layer against context: a picture per operator, format, heads, query rows and ranks, of more than one context.

    Decode rows beside those of ranks are what these are compared with, and are in the picture of dispatch.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    ranks = any(row["op"] == "cp" for row in result.rows)
    for row in _uniform(result, "cp", "prefill", *(() if ranks else ("decode",))):
        if row["op"] == "cp" and not is_layer(row):
            continue
        varying = row["heads"], row.get("query_len"), row.get("world"), row.get("shard_by", "block")
        groups.setdefault((row["op"], _formats(row), *varying), []).append(row)
    found: list[Picture] = []
    for (op, format, heads, query_len, world, shard_by), rows in groups.items():
        if len({_line(row) for row in rows}) == len(rows):
            continue
        parts = [f"{op}, {format}", f"{heads} head{'s' if heads > 1 else ''}"]
        parts += [f"{query_len} row{'s' if query_len > 1 else ''}"] if query_len else []
        parts += [f"a rank of {world}" + (" by page" if shard_by == "page" else "")] if world else []
        title = ", ".join(parts)
        caption = (
            f"{title}: time of one layer, measured ({result.device}, {result.facts['date']}); dashed: the roof of that run."
        )
        found.append(Picture(f"time-{op}", title, caption, _draw_times(rows)))
    return found


def _draw_times(rows: list[dict[str, Any]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        lines: dict[str, list[tuple[int, float, float]]] = {}
        for row in rows:
            context = row["prefix"] + row["tokens"] if row["op"] == "prefill" else row["context"]
            lines.setdefault(_line(row), []).append((context, row["us"], row["us"] * row["pct_roof"] / 100))
        for marker, (label, points) in zip(MARKERS * 4, lines.items(), strict=False):
            contexts, times, floors = zip(*sorted(points), strict=True)
            (drawn,) = axes.plot(contexts, times, marker=marker, markersize=5, label=label)
            axes.plot(contexts, floors, linestyle="--", linewidth=1, color=drawn.get_color())
        axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="µs per layer")
        _plain_ticks(axes.xaxis, _tokens)
        _plain_ticks(axes.yaxis, _number)
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=9)

    return draw


def _roofs(results: list[ResultFile]) -> list[Picture]:
    """Percent of the roof against what must be read, over all results."""
    rows = [row for result in results for row in result.rows if is_layer(row) and row.get("bytes")]
    found = []
    if rows:

        def draw(axes: Any) -> None:
            series: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                where = "a rank's part" if row["op"] == "cp" else "decode"
                series.setdefault(f"{where}, {_formats(row)}, Q {row['query_len']}", []).append(row)
            for marker, (label, points) in zip(MARKERS * 4, series.items(), strict=False):
                sizes = [row["bytes"] / 1e6 for row in points]
                axes.plot(sizes, [row["pct_roof"] for row in points], marker, markersize=5, label=label)
            axes.set(xscale="log", xlabel="index keys read, MB", ylabel="% of the read roof", ylim=(0, 105))
            _plain_ticks(axes.xaxis, _number)
            axes.axhline(100, color="black", linewidth=1, linestyle="--")
            axes.grid(True, alpha=0.3)
            axes.legend(fontsize=9)

        caption = "Percent of the read roof that each case reaches, measured; few bytes are bound by latency."
        found.append(Picture("roof", "percent of the read roof", caption, draw))
    chunks = [row for result in results for row in result.rows if row["op"] == "prefill"]
    if chunks:

        def draw_prefill(axes: Any) -> None:
            ranks = [f", a rank of {row['world']}" if "world" in row else "" for row in chunks]
            sizes = [f"{row['heads']} h, {row['tokens']:,} after {row['prefix']:,}" for row in chunks]
            labels = [size + rank for size, rank in zip(sizes, ranks, strict=True)]
            axes.barh(labels, [row["pct_roof"] for row in chunks])
            axes.invert_yaxis()
            axes.tick_params(axis="y", labelsize=8)
            axes.set(xlabel="% of the matrix roof", xlim=(0, 100))
            axes.grid(True, axis="x", alpha=0.3)

        caption = "Percent of the bf16 matrix roof that prefill chunks reach, measured."
        found.append(Picture("roof-prefill", "prefill: percent of the matrix roof", caption, draw_prefill))
    return found


def _shared_steps(results: list[ResultFile]) -> list[Picture]:
    """What "auto" chooses between, over the bytes of a step."""
    steps = [step for result in results for step in shared_steps(result)]
    if not steps:
        return []

    def draw(axes: Any) -> None:
        ordered = sorted(steps, key=lambda step: step.alone_us)
        sizes = [step.row["bytes"] * step.row["world"] / 1e6 for step in ordered]
        best = [min(step.alone_us, step.shared_us) for step in ordered]
        axes.plot(sizes, best, color="0.8", linewidth=7, solid_capstyle="round", label="what auto should take")
        axes.plot(sizes, [step.alone_us for step in ordered], "o", label="without CP")
        axes.plot(sizes, [step.shared_us for step in ordered], "D", label="with CP")
        axes.plot(sizes, [step.rank_us for step in ordered], "_", markersize=11, label="with CP, no exchange")
        axes.set(xscale="log", yscale="log", xlabel="index keys of the step, MB", ylabel="µs per layer")
        _plain_ticks(axes.xaxis, _number)
        _plain_ticks(axes.yaxis, _number)
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=9)

    caption = (
        "A step without and with context parallelism, measured; with it, a rank's part and the exchange of virtual ranks "
        "that share the GPU, an upper bound. Auto should take the lower of the two."
    )
    return [Picture("dispatch", "what dispatch chooses between", caption, draw)]


def _ways(results: list[ResultFile]) -> list[Picture]:
    """Whole steps on ranks with a GPU each, in every way that they can be taken. A picture per ranks and formats."""
    found = []
    for result in results:
        groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for row in result.rows:
            if row["op"] == "cp" and not is_layer(row):
                groups.setdefault((row["world"], _formats(row)), []).append(row)
        for (world, formats), rows in groups.items():
            title = f"a step on {world} GPUs, {formats}"
            caption = (
                f"{title}: every way to take it, measured ({result.device}, {result.facts['date']}); the slowest rank's time "
                "of a layer. Auto should take the lower of the times without CP and with peer."
            )
            found.append(Picture("ways", title, caption, _draw_ways(rows)))
    return found


WAYS = dict(zip(MODES, (("without CP", "o"), ("collective", "s"), ("peer", "D"), ("auto", "_")), strict=True))


def _draw_ways(rows: list[dict[str, Any]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for way, (label, marker) in WAYS.items():
            points = [row for row in rows if (row["transport"], row["dispatch"]) == way]
            sizes = [row["batch"] * row["context"] for row in points]
            axes.plot(sizes, [row["us"] for row in points], marker, markersize=11 if way[1] == "auto" else 5, label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens of the step", ylabel="µs per layer")
        _plain_ticks(axes.xaxis, _tokens)
        _plain_ticks(axes.yaxis, _number)
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=9)

    return draw


def _maps(results: list[ResultFile]) -> list[Picture]:
    """Where sharing pays, by batch and context: modelled, with what was measured on it. A map per formats and ranks."""
    found = []
    for result in results:
        gpu = gpu_of_device(result.device)
        if gpu is None:
            continue
        groups: dict[tuple[str, int], list[SharedStep]] = {}
        for step in shared_steps(result):
            if step.row["heads"] == MINIMAX_M3.spec.num_heads and step.row["format"] in INDEX_FORMATS:
                groups.setdefault((_formats(step.row), step.row["world"]), []).append(step)
        for (formats, world), steps in groups.items():
            caption = (
                f"How many times faster a layer is with context parallelism on {world} ranks, {formats}: colour and line, "
                f"modelled for {gpu.name} with the peer transport; numbers, measured with the exchange of ranks that share a "
                "GPU. No queries are exchanged."
            )
            title = f"break-even, {formats}, {world} ranks, one row each"
            found.append(Picture("map", title, caption, _draw_map(gpu, world, steps)))
    return found


def _draw_map(gpu: Gpu, world: int, steps: list[SharedStep]) -> Callable[[Any], None]:
    format = steps[0].row["format"]

    def gain(batch: int, context: int) -> float:
        setup = Setup(gpu, MINIMAX_M3, world, ((batch, context),), index_format=format, all_heads=True)
        return alone_us(setup) / (rank_us(setup) + setup_exchanges(setup, batch)[0].us)

    def draw(axes: Any) -> None:
        gains = [[gain(batch, context) for context in MAP_CONTEXTS] for batch in MAP_BATCHES]
        colors = importlib.import_module("matplotlib.colors")
        scale = colors.TwoSlopeNorm(1.0, vmin=0.4, vmax=world)
        mesh = axes.pcolormesh(MAP_CONTEXTS, MAP_BATCHES, gains, cmap="RdBu", norm=scale, shading="nearest")
        axes.contour(MAP_CONTEXTS, MAP_BATCHES, gains, levels=[1.0], colors="black")
        for step in steps:
            if step.row["query_len"] == 1:
                box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "black", "linewidth": 0.6}
                where = step.row["context"], step.row["batch"]
                axes.annotate(f"{step.gain:.1f}", where, ha="center", va="center", fontsize=9, bbox=box)
        axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="requests")
        axes.set_yticks(MAP_BATCHES, [str(batch) for batch in MAP_BATCHES])
        axes.set_yticks([], minor=True)
        _plain_ticks(axes.xaxis, _tokens)
        axes.figure.colorbar(mesh, ax=axes, label="times faster with CP", ticks=[0.5, 1, 2, 3, 4])

    return draw


def _exchanges(results: list[ResultFile]) -> list[Picture]:
    """What exchange and merge add, by rows."""
    rows = [row for result in results for row in result.rows if row["op"] == "exchange"]
    if not rows:
        return []

    def draw(axes: Any) -> None:
        for label in sorted({exchange_name(row) for row in rows}):
            alike = [row for row in rows if exchange_name(row) == label]
            sizes, keys, queries = zip(*sorted((r["rows"], r["us"], r["us_queries"]) for r in alike), strict=True)
            axes.plot(sizes, keys, marker="o", label=f"{label}: keys, merge")
            axes.plot(sizes, queries, marker="s", linestyle=":", label=f"{label}: queries")
        axes.set(xscale="log", xlabel="query rows of the step", ylabel="µs per layer", ylim=(0, None))
        _plain_ticks(axes.xaxis, _number)
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=9)

    caption = "What the exchange adds to a layer, measured: on GPUs of their own, or on virtual ranks that share one."
    return [Picture("exchange", "the exchange", caption, draw)]


def _line(row: dict[str, Any]) -> str:
    """The line that a row is a point of."""
    return f"{row['tokens']:,} new tokens" if row["op"] == "prefill" else f"batch {row['batch']}"


def _plain_ticks(axis: Any, formatter: Callable[..., str]) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 of each ten where there is room, without exponents."""
    ticker = importlib.import_module("matplotlib.ticker")
    low, high = axis.get_view_interval()
    wide = high / low > 300
    axis.set_major_locator(ticker.LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(formatter)
    axis.set_minor_formatter(ticker.NullFormatter())


def _number(value: float, position: int | None = None) -> str:
    """A tick of anything."""
    return f"{value:,g}"


def _tokens(count: float, position: int | None = None) -> str:
    """A tick of tokens."""
    return f"{count / 1e6:g}M" if count >= 1e6 else f"{count / 1e3:g}K" if count >= 1e3 else f"{count:g}"
