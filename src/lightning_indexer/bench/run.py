# SPDX-License-Identifier: Apache-2.0
"""From cases to result rows: draw, verify, time, verify what was timed."""

import dataclasses
import datetime
import importlib.metadata
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import lightning_indexer as li
from lightning_indexer.bench import peers
from lightning_indexer.bench.cases import Case, RankCase
from lightning_indexer.bench.checkout import find_commit
from lightning_indexer.bench.gate import WrongSelectionError, verify_call, verify_replays
from lightning_indexer.bench.inputs import UNWRITTEN, Step, draw_pool, layer_pages, prepare
from lightning_indexer.bench.roofs import Roofs
from lightning_indexer.bench.timing import Protocol, Rotation, Timing, plan_rotation, time_step
from lightning_indexer.cache import FORMATS, CacheFormat
from lightning_indexer.checks import check_choice
from lightning_indexer.plan.gpus import GPUS, gpu_of_device

POOL_BYTES = 32 << 30
SEED = 0
QUERY_FORMATS = {format.dtype: name for name, format in FORMATS.items() if name != "nvfp4"}

Timer = Callable[[Step, Rotation], Timing]
Progress = Callable[[str, int, int], None]  # label, cases done, cases in all


@dataclass(frozen=True)
class Facts:
    """Where and of what a result was taken."""

    device: str
    driver: str
    torch_version: str
    triton_version: str
    commit: str
    date: str
    l2_bytes: int

    @classmethod
    def read(cls, device: torch.device, commit: str | None) -> "Facts":
        """Facts of a CUDA or HIP device; without `commit` that of the checkout that the package runs from."""
        properties = torch.cuda.get_device_properties(device)
        return cls(
            device=properties.name,
            driver=driver_version(),
            torch_version=torch.__version__,
            triton_version=_version("triton"),
            commit=(find_commit("HEAD") or "unknown") if commit is None else commit,
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            l2_bytes=properties.L2_cache_size,
        )

    def as_json(self, roofs: Roofs) -> dict[str, Any]:
        """The head of a result file."""
        return {
            "device": self.device,
            "driver": self.driver,
            "torch": self.torch_version,
            "triton": self.triton_version,
            "commit": self.commit,
            "date": self.date,
            "read_roof_TBps": round(roofs.read_tbps, 3),
            "matrix_roof_TFLOPs": round(roofs.matrix_tflops, 1),
        }


@dataclass(frozen=True)
class Row:
    """One timed case."""

    case: Case
    format: str
    queries: str
    timing: Timing
    rotation: Rotation
    index_bytes: int
    flops: int
    roof_us: float  # the least time by the roof that binds the operator
    peer_us: float | None
    plan_us: float | None = None  # of a step plan that lists pages, once for all layers and in `timing` as one of their share

    @property
    def pct_roof(self) -> float:
        return 100 * self.roof_us / self.timing.us

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        return None if self.peer_us is None else self.timing.us / self.peer_us


@dataclass(frozen=True)
class Result:
    """A run: its rows, and the cases without a number with the reason."""

    facts: Facts
    roofs: Roofs
    rows: list[Row]
    failures: list[tuple[Case, str]]
    planned: bool  # a graph holds a step plan beside the layers' calls

    def as_json(self) -> dict[str, Any]:
        return self.facts.as_json(self.roofs) | {
            "rows": [_row_json(row) for row in self.rows],
            "failures": [{"op": case.op, "heads": case.heads, **case.fields(), "error": why} for case, why in self.failures],
        }


def measure(
    cases: Sequence[Case],
    format: str,
    device: torch.device,
    facts: Facts,
    roofs: Roofs,
    protocol: Protocol,
    progress: Progress,
    *,
    queries: str | None = None,
    timer: Timer | None = None,
    pool_bytes: int = POOL_BYTES,
) -> Result:
    """Verify and time each case; a case that selects wrongly gets a failure instead of a time.

    Args:
        cases: what to time, at least one.
        format: of the index-K cache.
        device: where.
        facts, roofs: of this device, measured in this run.
        protocol: replays.
        progress: is told the case and how many are done.
        queries: format of the queries, "bf16", "fp16" or "fp8"; None takes the first that the cache's format is scored with.
        timer: takes the time of a step; None replays graphs.
        pool_bytes: the most that the pool of pages may take.
    """
    take_time = timer or (lambda step, rotation: time_step(step.call, step.plan, rotation, protocol))
    spec = li.IndexerSpec()
    one = li.IndexCache.empty(1, spec, format)
    token_bytes, dtype = one.token_bytes, query_dtype(one.format, queries)
    queries = QUERY_FORMATS[dtype]
    page_bytes = spec.block_size * token_bytes
    rotations = [
        plan_rotation(layer_pages(case, spec), case.index_bytes(spec, token_bytes), facts.l2_bytes, pool_bytes // page_bytes)
        for case in cases
    ]
    generator = torch.Generator(device).manual_seed(SEED)
    pool = draw_pool(max(rotation.views * rotation.pages for rotation in rotations), spec, format, device, generator)
    rows, failures, planned = [], [], False
    for done, (case, rotation) in enumerate(zip(cases, rotations, strict=True)):
        progress(f"{case.op} {case.name}", done, len(cases))
        step = prepare(case, pool, rotation, generator, dtype)
        planned = planned or step.plan is not None
        plan_us = None
        try:
            timing = _verified_timing(step, rotation, take_time)
            if isinstance(case, RankCase) and case.shard_by == "page" and step.plan is not None:
                plan_us = take_time(_plan_alone(step, step.plan), rotation).us
        except WrongSelectionError as error:
            failures.append((case, str(error)))
            continue
        moved, flops = case.index_bytes(spec, token_bytes), case.flops(spec)
        peer = case.peer_us(format, queries) if gpu_of_device(facts.device) is GPUS[peers.GPU] else None
        roof_us = roofs.us(case.op, moved, flops)
        rows.append(Row(case, format, queries, timing, rotation, moved, flops, roof_us, peer, plan_us))
    return Result(facts, roofs, rows, failures, planned)


def query_dtype(format: CacheFormat, queries: str | None) -> torch.dtype:
    """The dtype of queries for a cache format.

    Raises:
        ValueError: the format is not scored with such queries.
    """
    names = [QUERY_FORMATS[dtype] for dtype in format.query_dtypes]
    check_choice("queries", queries or names[0], tuple(names))
    return format.query_dtypes[names.index(queries or names[0])]


def _verified_timing(step: Step, rotation: Rotation, take_time: Timer) -> Timing:
    """Time a step whose first and last view select rightly, outside the graphs and in them."""
    verified = {view: verify_call(step, view) for view in (0, rotation.views - 1)}
    step.ids.fill_(UNWRITTEN)
    timing = take_time(step, rotation)
    for view, ids in verified.items():
        verify_replays(step, view, ids)
    return timing


def _plan_alone(step: Step, plan: Callable[[], None]) -> Step:
    """A step whose layers do nothing but plan."""
    return dataclasses.replace(step, call=lambda view: plan(), plan=None)


def _row_json(row: Row) -> dict[str, Any]:
    fields = {
        "op": row.case.op,
        "format": row.format,
        "queries": row.queries,
        "heads": row.case.heads,
        **row.case.fields(),
        "us": round(row.timing.us, 3),
        "us_min": round(row.timing.us_min, 3),
        "us_max": round(row.timing.us_max, 3),
        "bytes": row.index_bytes,
        "flops": row.flops,
        "pct_roof": round(row.pct_roof, 2),
        "layers": row.rotation.layers,
    }
    measured = {"peer_us": row.peer_us, "us_plan": None if row.plan_us is None else round(row.plan_us, 3)}
    return fields | {name: value for name, value in measured.items() if value is not None}


def driver_version() -> str:
    """Of the GPU driver; on HIP that of HIP."""
    if torch.version.hip is not None:
        return f"hip {torch.version.hip}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (_output(query) or ["unknown"])[0]


def _output(command: list[str]) -> list[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
