# SPDX-License-Identifier: Apache-2.0
"""The outcome of a verification as a table, as words and as JSON."""

import dataclasses
from typing import Any

from lightning_indexer.text import table
from lightning_indexer.verify.compare import Mass, Outcome


def outcome_table(outcomes: list[Outcome]) -> str:
    """One line per case and number of ranks."""
    heads = [
        "case",
        "ranks",
        "rows",
        "selections",
        "equal",
        "= model",
        "near-ties",
        "differ",
        "MB alone",
        "MB with CP",
        "B/row",
    ]
    stored = any(outcome.overlap is not None for outcome in outcomes)
    rows = [heads + (["overlap"] if stored else [])]
    for outcome in outcomes:
        rows.append(
            [
                outcome.case,
                str(outcome.world),
                str(outcome.rows),
                str(outcome.selections),
                str(outcome.equal),
                "-" if outcome.equal_model is None else str(outcome.equal_model),
                str(outcome.near_ties),
                str(outcome.differing),
                f"{outcome.index_bytes / 1e6:.2f}",
                f"{outcome.index_bytes_cp / 1e6:.2f}",
                f"{outcome.exchange_bytes:,}",
                *(["-" if outcome.overlap is None else f"{outcome.overlap:.1%}"] if stored else []),
            ]
        )
    return table(rows)


def mass_table(masses: list[Mass]) -> str:
    """One line per case whose queries are a trained model's own."""
    rows = [["attention kept by the selected blocks", "mean", "lowest"]]
    rows += [[mass.case, f"{mass.mean:.1%}", f"{mass.lowest:.1%}"] for mass in masses]
    return table(rows)


def statement(outcomes: list[Outcome]) -> str:
    """What was proven, or that it was not, in one sentence."""
    worlds = ", ".join(str(world) for world in sorted({outcome.world for outcome in outcomes}))
    selections = sum(outcome.selections for outcome in outcomes)
    if not all(outcome.passed for outcome in outcomes):
        failed = sum(not outcome.passed for outcome in outcomes)
        return f"FAILED: selections differ in {failed} of {len(outcomes)} comparisons; the first one of each is shown above."
    text = (
        f"Proven: on {worlds} ranks all {selections:,} selections made by context-parallel ranks are, id for id and in the"
        " same order, those of the unsharded context"
    )
    modelled = [outcome for outcome in outcomes if outcome.equal_model is not None and outcome.overlap is None]
    if modelled:
        compared = sum(outcome.selections for outcome in modelled)
        ties = sum(outcome.near_ties for outcome in modelled)
        text += f", and all {compared:,} that the model also made are the model's own blocks"
        text += f" ({ties} of them up to blocks whose scores are equal within float32 rounding)" if ties else ""
    most = max(outcomes, key=lambda outcome: outcome.world)
    if most.world > 1 and most.index_bytes:
        share = most.index_bytes_cp / most.index_bytes
        text += f"; on {most.world} ranks each reads at most {share:.1%} of the index keys that it reads alone"
    return text + "."


def as_json(outcomes: list[Outcome], masses: list[Mass], parameters: dict[str, Any]) -> dict[str, Any]:
    """Everything that the tables show, for `--json`."""
    return {
        "command": "verify",
        **parameters,
        "passed": all(outcome.passed for outcome in outcomes),
        "statement": statement(outcomes),
        "rows": [dataclasses.asdict(outcome) for outcome in outcomes],
        "attention_mass": [dataclasses.asdict(mass) for mass in masses],
    }
