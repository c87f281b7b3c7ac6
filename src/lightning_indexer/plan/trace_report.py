# SPDX-License-Identifier: Apache-2.0
"""A played trace as text, as JSON and as a picture."""

import importlib
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_indexer.plan.simulate import Played
from lightning_indexer.text import table

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Mode:
    """A trace played in one mode, as it arrives and with all requests waiting from the begin."""

    paced: Played
    backlog: Played

    @property
    def name(self) -> str:
        """Of the mode."""
        return self.paced.mode


def figures(mode: Mode) -> dict[str, float]:
    """What is told of one mode."""
    played = mode.paced
    median, ninety, last = played.between_tokens_ms(*QUANTILES)
    first = statistics.quantiles(played.first_token_s, n=10) if len(played.first_token_s) > 1 else played.first_token_s * 9
    return {
        "ITL mean, ms": played.mean_between_tokens_ms,
        "ITL p50, ms": median,
        "ITL p90, ms": ninety,
        "ITL p99, ms": last,
        "first token p50, s": first[4],
        "first token p90, s": first[8],
        "steps shared, %": 100 * played.shared,
        "last token at, s": played.seconds,
        "tokens/s if all wait": mode.backlog.tokens_per_s,
    }


def trace_table(modes: list[Mode]) -> str:
    """One column per mode; the first is without context parallelism."""
    told = [figures(mode) for mode in modes]
    rows = [["", *(mode.name for mode in modes), "auto / off"]]
    for name in told[0]:
        values = [column[name] for column in told]
        digits = 0 if values[0] >= 1000 or "%" in name else 2
        ratio = f"{values[-1] / values[0]:.3f}" if values[0] and "%" not in name else ""
        rows.append([name, *(f"{value:,.{digits}f}" for value in values), ratio])
    return table(rows)


def trace_verdict(modes: list[Mode]) -> str:
    """What "auto" changes."""
    off, auto = modes[0], modes[-1]
    itl = auto.paced.mean_between_tokens_ms / off.paced.mean_between_tokens_ms - 1
    rate = auto.backlog.tokens_per_s / off.backlog.tokens_per_s - 1
    return (
        f'dispatch="auto": {itl:+.1%} time between tokens at this pace, {rate:+.1%} tokens/s if all\n'
        "requests wait. Everything here is modelled."
    )


def trace_json(modes: list[Mode]) -> dict[str, Any]:
    """For a result file."""
    return {mode.name: {**figures(mode), "timeline": mode.paced.timeline()} for mode in modes}


def write_trace_plot(modes: list[Mode], title: str, path: Path) -> None:
    """Time between tokens, and the context that a step sees, over the time."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for mode, style in zip(modes, ("-", "--", "-"), strict=True):
        seconds, between, tokens = zip(*mode.paced.timeline(), strict=True)
        above.plot(seconds, between, style, label=mode.name)
        below.plot(seconds, [count / 1e6 for count in tokens], style, label=mode.name)
    above.set(ylabel="ms between tokens", title=title)
    below.set(ylabel="context of a step, M tokens", xlabel="seconds")
    for axis in (above, below):
        axis.set_ylim(bottom=0)
        axis.grid(True, alpha=0.3)
    above.legend()
    figure.savefig(path, format="png", dpi=120)
