# SPDX-License-Identifier: Apache-2.0
"""What this device can do at most, measured in the run that quotes it: reading memory, and multiplying bf16 matrices."""

import importlib
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_indexer.bench.timing import Protocol, elapsed_us

READ_BYTES = 8 << 30
READ_SHAPES = (  # (programs per processor, elements per tile, warps)
    (4, 8192, 8),
    (8, 4096, 4),
    (8, 4096, 8),
    (16, 2048, 4),
    (64, 4096, 4),
    (64, 8192, 8),
)
MATRIX_SIZE = 8192


@dataclass(frozen=True)
class Roofs:
    """Terabytes read and bf16 teraflops done per second."""

    read_tbps: float
    matrix_tflops: float

    def us(self, op: str, index_bytes: int, flops: int) -> float:
        """The least time: of decode by the bytes that it must read, of prefill by what it must compute."""
        return flops / self.matrix_tflops / 1e6 if op == "prefill" else index_bytes / self.read_tbps / 1e6


def measure_roofs(protocol: Protocol, device: torch.device) -> Roofs:
    """Both roofs, each the median of the replays; of the read kernel's launch shapes the fastest."""
    roofs = Roofs(_read_roof(protocol, device), _matrix_roof(protocol, device))
    torch.cuda.empty_cache()
    return roofs


def _median_us(launch: Callable[[], Any], protocol: Protocol) -> float:
    return statistics.median(elapsed_us(itertools.repeat(launch), protocol))


def _read_roof(protocol: Protocol, device: torch.device) -> float:
    kernel = importlib.import_module("lightning_indexer.bench.read_kernel").read_kernel
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    data = torch.ones(READ_BYTES // 4, dtype=torch.int32, device=device)
    best = 0.0
    for per_processor, tile, warps in READ_SHAPES:
        programs = processors * per_processor
        sums = torch.empty(programs, dtype=torch.int32, device=device)

        def launch(programs: int = programs, sums: torch.Tensor = sums, tile: int = tile, warps: int = warps) -> None:
            kernel[(programs,)](data, sums, data.numel() // tile, TILE=tile, num_warps=warps)

        us = _median_us(launch, protocol)
        if int(sums.long().sum()) != data.numel():
            raise RuntimeError(f"the read kernel summed {int(sums.long().sum())} ones, expected {data.numel()}")
        best = max(best, READ_BYTES / us / 1e6)
    return best


def _matrix_roof(protocol: Protocol, device: torch.device) -> float:
    size = (MATRIX_SIZE, MATRIX_SIZE)
    left = torch.randn(size, dtype=torch.bfloat16, device=device)
    right = torch.randn(size, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(left)
    us = _median_us(lambda: torch.mm(left, right, out=out), protocol)
    return 2 * MATRIX_SIZE**3 / us / 1e6
