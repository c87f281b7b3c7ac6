# SPDX-License-Identifier: Apache-2.0
"""Time against context as a picture, with the roof."""

import importlib
from pathlib import Path
from typing import Any

from lightning_indexer.bench.cases import PrefillCase, RankCase
from lightning_indexer.bench.run import Result, Row


def require_matplotlib(what: str = "--plot") -> None:
    """Raise ImportError, saying what to install, unless matplotlib is there."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: pip install 'lightning-indexer[bench]' ({error})") from error


def write_plot(result: Result, path: Path) -> None:
    """One panel per number of query rows (decode) or heads (prefill), one line per batch or chunk; dashed: the roof.

    Batches of uneven lengths have no single context and are left out.
    """
    require_matplotlib()
    panels: dict[str, dict[str, list[tuple[int, Row]]]] = {}
    for row in result.rows:
        if len(set(row.case.seq_lens)) == 1:
            panel, line, context = _place(row)
            panels.setdefault(panel, {}).setdefault(line, []).append((context, row))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(6 * max(1, len(panels)), 5), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axis, (panel, lines) in zip(axes, panels.items(), strict=False):
        _draw_panel(axis, panel, lines)
    figure.suptitle(f"{result.facts.device}, commit {result.facts.commit[:12]}, {result.facts.date}; dashed: roof of this run")
    figure.savefig(path, format="png", dpi=120)


def _place(row: Row) -> tuple[str, str, int]:
    """Panel, line and context of a row."""
    case = row.case
    if isinstance(case, PrefillCase):
        return f"prefill, heads {case.heads}", f"{case.tokens:,} new tokens", case.prefix + case.tokens
    if isinstance(case, RankCase):
        by = ", by page" if case.shard_by == "page" else ""
        panel = f"a rank of {case.world}{by}, heads {case.heads}, query rows {case.query_len}"
        return panel, f"batch {len(case.seq_lens)}", case.seq_lens[0]
    return f"decode, heads {case.heads}, query rows {case.query_len}", f"batch {len(case.seq_lens)}", case.seq_lens[0]


def _draw_panel(axis: Any, panel: str, lines: dict[str, list[tuple[int, Row]]]) -> None:
    for label, places in lines.items():
        places = sorted(places, key=lambda place: place[0])
        contexts = [context for context, _ in places]
        (drawn,) = axis.plot(contexts, [row.timing.us for _, row in places], marker="o", label=label)
        axis.plot(contexts, [row.roof_us for _, row in places], linestyle="--", color=drawn.get_color())
    axis.set(title=panel, xscale="log", yscale="log", xlabel="context, tokens", ylabel="µs per layer")
    axis.grid(True, which="major", alpha=0.3)
    axis.legend()
