# SPDX-License-Identifier: Apache-2.0
"""Requests over time: read from a file, or drawn for agents that work in turns."""

import csv
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_indexer.checks import check_int, require

NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("cached_tokens", "shared_tokens")


@dataclass(frozen=True)
class Request:
    """One request.

    Args:
        arrival_s: seconds from the begin of the trace.
        prompt_tokens: of the whole prompt.
        output_tokens: that it generates.
        cached_tokens: of the prompt that the prefix cache holds when it arrives, which are not computed again.
        shared_tokens: of these, a prefix common to all requests, which takes memory once.

    Raises:
        ValueError: a count out of range, or a time that is none.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        require(math.isfinite(self.arrival_s) and self.arrival_s >= 0, "arrival_s", "seconds >= 0", self.arrival_s)
        check_int("prompt_tokens", self.prompt_tokens, 1)
        check_int("output_tokens", self.output_tokens, 1)
        check_int("cached_tokens", self.cached_tokens, 0, self.prompt_tokens - 1)
        check_int("shared_tokens", self.shared_tokens, 0, self.cached_tokens)

    @property
    def own_tokens(self) -> int:
        """That it holds in the end, without the shared prefix."""
        return self.prompt_tokens - self.shared_tokens + self.output_tokens


@dataclass(frozen=True)
class Agents:
    """Agents whose prompts grow turn by turn behind a prefix that all share.

    Sessions begin one after the other at random (Poisson). Each turn's prompt is all of the session so far and what a tool
    returned, log-normal; then a log-normal number of tokens is generated. Between a turn's last token, at the assumed pace,
    and the next turn lies the tool's time, exponential. Prefixes and the session's earlier turns are cached.
    """

    sessions: int = 64
    turns: int = 20
    prefix_tokens: int = 24_000
    tool_tokens: int = 4_000  # mean per turn
    output_tokens: int = 400  # mean per turn
    spread: float = 0.8  # sigma of both logarithms
    tool_s: float = 6.0  # mean
    pace_s: float = 0.02  # per token
    begin_s: float = 2.0  # mean between two sessions' begins
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("sessions", self.sessions, 1)
        check_int("turns", self.turns, 1)

    def __str__(self) -> str:
        return (
            f"{self.sessions} agents of {self.turns} turns, seed {self.seed}: {self.prefix_tokens:,} tokens shared by all; "
            f"a turn adds {self.tool_tokens:,} tokens from tools and {self.output_tokens:,} generated (means, log-normal, "
            f"sigma {self.spread}), {self.tool_s:g} s between turns; a session every {self.begin_s:g} s"
        )

    def draw(self) -> list[Request]:
        """The requests, by arrival."""
        generator = random.Random(self.seed)

        def tokens(mean: int) -> int:
            location = math.log(mean) - self.spread**2 / 2  # whose log-normal has this mean
            return max(1, round(generator.lognormvariate(location, self.spread)))

        requests, begin = [], 0.0
        for _ in range(self.sessions):
            begin += generator.expovariate(1 / self.begin_s)
            arrival, cached = begin, self.prefix_tokens
            for _ in range(self.turns):
                prompt, output = cached + tokens(self.tool_tokens), tokens(self.output_tokens)
                requests.append(Request(arrival, prompt, output, cached, self.prefix_tokens))
                cached = prompt + output
                arrival += output * self.pace_s + generator.expovariate(1 / self.tool_s)
        return sorted(requests, key=lambda request: request.arrival_s)


def read_trace(path: Path) -> list[Request]:
    """Requests of a CSV file with a header, or of a JSONL file with an object per line, by arrival.

    Raises:
        ValueError: no such file, another suffix, nothing in it, or a line that is no request (names it).
    """
    require(path.is_file(), "trace", "a file or agentic", repr(str(path)))
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows}
    require(path.suffix in readers, "trace", "a .csv or .jsonl file", path.name)
    requests = []
    try:
        for line, row in readers[path.suffix](path):
            try:
                requests.append(_request(row))
            except ValueError as error:
                raise ValueError(f"trace: {path.name}, line {line}: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"trace: expected text, got {path.name} ({error.reason})") from error
    require(len(requests) > 0, "trace", "at least one request", f"none in {path.name}")
    return sorted(requests, key=lambda request: request.arrival_s)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            yield reader.line_num, dict(row)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    row = None
                require(isinstance(row, dict), "trace", "a JSON object per line", f"line {number} of {path.name}")
                yield number, row


def _request(row: dict[str, Any]) -> Request:
    values = {name: _number(name, row.get(name), name in NEEDED) for name in (*NEEDED, *OPTIONAL)}
    arrival = values.pop("arrival_s")
    require(all(value == int(value) for value in values.values()), "tokens", "whole numbers", values)
    return Request(arrival, **{name: int(value) for name, value in values.items()})


def _number(name: str, value: Any, needed: bool) -> float:
    """The value as a finite number; 0 where there need not be one and is none."""
    if value in (None, ""):
        require(not needed, name, "a number", "none")
        return 0.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    require(math.isfinite(number), name, "a number", repr(value))
    return number
