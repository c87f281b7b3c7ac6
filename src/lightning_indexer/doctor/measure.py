# SPDX-License-Identifier: Apache-2.0
"""Roofs and exchange of the GPUs here, as `bench` measures them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_indexer.bench.exchange import ExchangeRow, measure_exchange
from lightning_indexer.bench.roofs import Roofs, measure_roofs
from lightning_indexer.bench.timing import QUICK

ROWS = (1, 8, 32, 128)
HEADS = 4


@dataclass(frozen=True)
class Measured:
    """Of one GPU: its roofs, and the exchange of virtual ranks that share it, an upper bound for ranks with a GPU each."""

    roofs: Roofs
    exchange: list[ExchangeRow]


def measure_gpu(device: torch.device, world: int, progress: Callable[[str, int, int], None]) -> Measured:
    """Both, on one GPU."""
    with torch.cuda.device(device):
        progress("roofs", 0, 1)
        roofs = measure_roofs(QUICK, device)
        return Measured(roofs, measure_exchange(world, HEADS, ROWS, device, QUICK, progress))
