# SPDX-License-Identifier: Apache-2.0
"""A result against another one: which cases are slower, told apart from noise.

A case is slower or faster only if the ratio of its times lies further from 1 than 1 % and than three times its noise:

    against a file      noise^2 = sum over both of (0.075 * (us_max - us_min) / us)^2     of one run each
    against a commit    noise   = half of (largest - smallest ratio) / sqrt(rounds)       of runs that take turns

0.075 of the range is the standard error of a median of 20 normal samples (0.28 sigma; the range of 20 is 3.7 sigma). 1 % is
about twice what the same code differs by from run to run: the eight cases that decode-h200-2026-11-30.json and
cp-h200-2026-11-30.json share, of one commit, differ by up to 0.44 %. Rows that tell no range, as those of the exchange, are
only compared in turns.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_indexer.bench.checkout import unpack_sources
from lightning_indexer.bench.results import ResultFile, case_name, identity, load_result
from lightning_indexer.checks import require
from lightning_indexer.text import table

FLOOR = 0.01
MEDIAN_ERROR = 0.075
SIGMAS = 3.0
ROUNDS = 3
# Options of `bench` that say where results go or what they are called, not what is measured.
OWN_OPTIONS = ("--baseline", "--json", "--plot", "--commit", "--rounds")
OWN_FLAGS = ("--force",)


@dataclass(frozen=True)
class Compared:
    """One case: our time over the baseline's, and the noise of that ratio."""

    name: str
    base_us: float
    us: float
    ratio: float
    noise: float

    @property
    def verdict(self) -> str:
        """ "slower", "faster" or "same"."""
        if abs(self.ratio - 1) <= max(FLOOR, SIGMAS * self.noise):
            return "same"
        return "slower" if self.ratio > 1 else "faster"


@dataclass(frozen=True)
class Comparison:
    """All cases that both results have, and those that only one has."""

    source: str
    cases: list[Compared]
    only_ours: list[str]
    only_base: list[str]

    @property
    def slower(self) -> list[Compared]:
        """Cases that became slower."""
        return [case for case in self.cases if case.verdict == "slower"]

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "source": self.source,
            "cases": [
                {"case": c.name, "base_us": c.base_us, "us": c.us, "ratio": c.ratio, "noise": c.noise, "verdict": c.verdict}
                for c in self.cases
            ],
        }


def compare_rounds(pairs: Sequence[tuple[ResultFile, ResultFile]], source: str) -> Comparison:
    """Results that took turns, `(baseline, ours)` each round; a single pair may be of different days.

    Raises:
        ValueError: other devices, or no case in common.
    """
    for base, ours in pairs:
        require(base.device == ours.device, "baseline", f"a result of {ours.device}", f"one of {base.device}")
    tables = [(_by_case(base), _by_case(ours)) for base, ours in pairs]
    there, here = tables[-1]
    shared = [key for key in here if all(key in one and key in other for one, other in tables)]
    if len(pairs) == 1:
        shared = [key for key in shared if "us_max" in here[key] and "us_max" in there[key]]
    require(len(shared) > 0, "baseline", "a result with cases in common", f"none in {source}")
    cases = []
    for key in shared:
        rows = [(one[key], other[key]) for one, other in tables]
        ratios = [float(other["us"]) / float(one["us"]) for one, other in rows]
        cases.append(
            Compared(
                name=case_name(here[key]),
                base_us=statistics.median(float(one["us"]) for one, _ in rows),
                us=statistics.median(float(other["us"]) for _, other in rows),
                ratio=statistics.median(ratios),
                noise=_noise(rows, ratios),
            )
        )
    only_ours = [case_name(row) for key, row in here.items() if key not in there]
    only_base = [case_name(row) for key, row in there.items() if key not in here]
    return Comparison(source, cases, only_ours, only_base)


def _by_case(result: ResultFile) -> dict[str, dict[str, Any]]:
    return {identity(row): row for row in result.rows if row["us"] > 0}


def _noise(rows: list[tuple[dict[str, Any], dict[str, Any]]], ratios: list[float]) -> float:
    if len(ratios) > 1:
        return float((max(ratios) - min(ratios)) / 2 / len(ratios) ** 0.5)
    errors = (MEDIAN_ERROR * (row["us_max"] - row["us_min"]) / row["us"] for row in rows[0])
    return float(sum(error**2 for error in errors) ** 0.5)


def comparison_table(found: Comparison) -> str:
    """One line per case, and the verdict."""
    rows = [["case", "base us", "us", "ratio", "noise %", ""]]
    for case in found.cases:
        cells = f"{case.base_us:.2f}", f"{case.us:.2f}", f"{case.ratio:.3f}", f"{100 * case.noise:.2f}", case.verdict
        rows.append([case.name, *cells])
    counts = {verdict: sum(case.verdict == verdict for case in found.cases) for verdict in ("slower", "same", "faster")}
    mean = statistics.geometric_mean(case.ratio for case in found.cases)
    missing = [f"Only in this run: {name}" for name in found.only_ours] + [f"Only there: {name}" for name in found.only_base]
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    verdict = f"Against {found.source}: {told}; geometric mean of the ratios {mean:.3f}."
    return "\n".join([table(rows), "", *missing, verdict, "REGRESSION" if found.slower else "No regression."])


def run_commit(commit: str, arguments: Sequence[str]) -> ResultFile:
    """What `bench` of another commit measures with the same arguments, in a process of its own.

    Raises:
        ValueError: there is no such code, or it does not run; the last line that was told.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            unpack_sources(commit, Path(folder))
        except ValueError as error:
            raise ValueError(f"baseline: expected the sources of {commit}, got {error}") from error
        told = Path(folder) / "result.json"
        program = f"import sys; sys.path.insert(0, {folder!r}); from lightning_indexer.cli import main; main()"
        command = [sys.executable, "-c", program, "bench", *arguments, "--commit", commit, "--json", str(told)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not told.exists():
            lines = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
            raise ValueError(f"baseline: expected a result of {commit}, got {lines[-1]}")
        return load_result(told)


def against_commit(
    commit: str,
    arguments: Sequence[str],
    measure: Callable[[], ResultFile],
    rounds: int,
    progress: Callable[[str, int, int], None],
    run: Callable[[str, Sequence[str]], ResultFile] = run_commit,
) -> Comparison:
    """Both take turns, so that clocks and temperature are alike for both; the other commit begins.

    Raises:
        ValueError: the other commit does not run, or there is nothing to compare.
    """
    pairs = []
    for number in range(rounds):
        progress(f"baseline {commit}", number, rounds)
        base = run(commit, arguments)
        pairs.append((base, measure()))
    return compare_rounds(pairs, commit)


def measured_arguments(arguments: Sequence[str]) -> list[str]:
    """Of `bench`'s arguments those that say what is measured."""
    kept: list[str] = []
    following = iter(arguments)
    for argument in following:
        if argument in OWN_OPTIONS:
            next(following, None)
        elif argument not in OWN_FLAGS and argument.split("=")[0] not in OWN_OPTIONS:
            kept.append(argument)
    return kept
