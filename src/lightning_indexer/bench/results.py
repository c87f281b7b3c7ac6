# SPDX-License-Identifier: Apache-2.0
"""Result files of `bench`, read back and checked."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_indexer.checks import require

FACTS = ("device", "driver", "torch", "triton", "commit", "date")
ROOFS = ("read_roof_TBps", "matrix_roof_TFLOPs")
# What a row measures or derives; all else tells which case it is.
MEASURED = frozenset(
    (
        *("us", "us_min", "us_max", "us_queries", "us_local", "us_plan", "bytes", "flops", "pct_roof", "peer_us", "layers"),
        *("error", "chosen"),
    )
)


@dataclass(frozen=True)
class ResultFile:
    """One run of `bench`: where and when, its roofs, and its rows as they stand in the file."""

    name: str
    facts: dict[str, str]
    read_tbps: float
    matrix_tflops: float
    rows: list[dict[str, Any]]
    failures: list[dict[str, Any]]

    @property
    def device(self) -> str:
        """Name of the GPU."""
        return self.facts["device"]


def load_result(path: Path) -> ResultFile:
    """A result file.

    Raises:
        ValueError: not a result of `bench`: names the file and what is wrong.
    """
    try:
        told = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected the JSON of a bench result, got {str(error).splitlines()[0]}") from error
    return parse_result(told, path.name)


def parse_result(told: Any, name: str) -> ResultFile:
    """A result as `bench` tells it, from a file or at hand.

    Raises:
        ValueError: as `load_result`.
    """
    require(isinstance(told, dict), name, "a bench result", type(told).__name__)
    for key in (*FACTS, *ROOFS, "rows"):
        require(key in told, name, f"a bench result with {key!r}", "none")
    for key in ROOFS:
        require(_positive(told[key]), name, f"{key} > 0", repr(told[key]))
    rows = told["rows"]
    require(isinstance(rows, list), name, "a list of rows", type(rows).__name__)
    for number, row in enumerate(rows):
        fits = isinstance(row, dict) and isinstance(row.get("op"), str) and _number(row.get("us"))
        require(fits, name, "rows with op and us", f"row {number} {str(row)[:60]}")
    facts = {key: str(told[key]) for key in FACTS}
    return ResultFile(name, facts, float(told[ROOFS[0]]), float(told[ROOFS[1]]), rows, told.get("failures", []))


def is_layer(row: dict[str, Any]) -> bool:
    """Whether a row is of one GPU's kernels alone: a decode layer, or a rank's part of one."""
    rank = row["op"] == "cp" and row.get("transport") == "none" and row.get("dispatch") == "sharded"
    return row["op"] == "decode" or rank


def exchange_name(row: dict[str, Any]) -> str:
    """Who exchanges in a row of the exchange, and how."""
    return f"{row['transport']}, {row['world']} {'GPUs' if 'gpus' in row else 'ranks'}"


def identity(row: dict[str, Any]) -> str:
    """Which case a row is of, whatever it measured. Queries in the cache's format go without saying, as in older files."""
    told = {key: value for key, value in row.items() if key not in MEASURED}
    if told.get("queries") == told.get("format"):
        told.pop("queries", None)
    return json.dumps(told, sort_keys=True)


def case_name(row: dict[str, Any]) -> str:
    """A row's case for people."""
    op = row["op"]
    if op == "exchange":
        return f"exchange, {exchange_name(row)}, {row['rows']} rows"
    if op == "link":
        return f"{row['collective']}, {row['world']} ranks, {row['payload']:,} B each"
    if op == "write":
        beside = f", norm and rotation, H {row['heads']}" if row["heads"] else ""
        return f"write, {row['rows']:,} rows, {row['format']}{beside}"
    if op == "prefill":
        ranks = f", P {row['world']}{', by page' if row.get('shard_by') == 'page' else ''}" if "world" in row else ""
        return f"prefill, H {row['heads']}, {row['tokens']:,} after {row['prefix']:,}{ranks}"
    if "lengths" in row:
        load = " + ".join(f"{batch} x {context:,}" for batch, context in row["lengths"])
    else:
        load = f"{row['batch']} x {row['context']:,}" if "context" in row else str(row.get("batch", ""))
    parts = [op, load, f"Q {row['query_len']}" if "query_len" in row else ""]
    parts += [f"H {row['heads']}" if row.get("heads", 1) > 1 else "", f"P {row['world']}" if "world" in row else ""]
    if row.get("transport", "none") != "none" or row.get("dispatch") == "replicated":
        parts += [row["transport"] if row["transport"] != "none" else "", row["dispatch"]]
    parts += ["by page" if row.get("shard_by") == "page" else "", row.get("format", "")]
    return ", ".join(part for part in parts if part)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> bool:
    return _number(value) and value > 0
