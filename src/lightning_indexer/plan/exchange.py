# SPDX-License-Identifier: Apache-2.0
"""What the exchange among ranks costs per layer: queries and candidate keys, by transport.

    peer        inside the kernels, ranks of one host
    collective  torch.distributed: all-gather of queries, all-to-all of keys, a merge launch

Between measured points times lie on straight lines, past the last one on its continuation.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_indexer.plan.figure import MEASURED, MODELLED
from lightning_indexer.plan.gpus import GPUS, Gpu

Points = Sequence[tuple[float, float]]  # (rows or bytes, us)

KIB = 1024
# Two H200s of one host (NV18), in graph replay: `bench cp --gpus 2`.
TWO_GPUS_SOURCE = "cp-2gpus-h200-2026-11-30.json"
# NCCL by bytes of a rank's part.
NCCL_GATHER = ((512, 11.169), (8 * KIB, 12.067), (32 * KIB, 12.239), (128 * KIB, 12.88), (512 * KIB, 16.482))
NCCL_ALL_TO_ALL = ((512, 12.157), (8 * KIB, 13.388), (32 * KIB, 13.367), (128 * KIB, 13.484), (512 * KIB, 17.865))
# The peer transport by rows: keys and merge over the local selection, and queries.
PEER_KEYS = ((1, 2.738), (8, 2.969), (32, 2.754), (128, 2.494), (512, 10.646))
PEER_QUERIES = ((1, 4.039), (8, 4.031), (32, 4.115), (128, 6.163), (512, 6.43))
# Four MI355X, in a graph; ATOM #2229 and its comments (aiter's all-gather, RCCL's all-to-all).
RCCL_GATHER = ((8 * KIB, 11.2), (128 * KIB, 13.0), (512 * KIB, 20.2), (640 * KIB, 23.2), (1024 * KIB, 29.2))
RCCL_ALL_TO_ALL = ((8 * KIB, 22.1), (128 * KIB, 14.9), (512 * KIB, 20.6), (640 * KIB, 21.1), (1024 * KIB, 21.4))
RCCL_SOURCE = "ATOM #2229, four MI355X"
# Of copies and the merge launch that `collective` needs: up to 2.7 us over NCCL's all-to-all in that file.
MERGE_US = 2.5
# Between hosts: assumed twice a host's latency, and 50 GB/s per GPU, a network port of 400 Gbit/s.
HOPS = 2.0
NETWORK_US_PER_BYTE = 1 / 50e3

PEER, COLLECTIVE = "peer", "collective"  # transports by name


def interpolate(points: Points, at: float) -> float:
    """On straight lines through the points; the first value before them, the last slope after them."""
    if at <= points[0][0]:
        return points[0][1]
    last = min(max(1, bisect.bisect_left([place for place, _ in points], at)), len(points) - 1)
    (low, below), (high, above) = points[last - 1], points[last]
    return below + (above - below) * (at - low) / (high - low)


@dataclass(frozen=True)
class Load:
    """What is exchanged per layer.

    Args:
        rows: query rows of the step.
        query_bytes: of a rank's own heads' queries; 0 where every rank projects all heads itself.
        key_bytes: of all heads' candidates of a rank's shard.
        ranks: that exchange.
        nodes: hosts that they are on.
    """

    rows: int
    query_bytes: int
    key_bytes: int
    ranks: int
    nodes: int


@dataclass(frozen=True)
class Exchange:
    """Time per layer, and what it rests on."""

    transport: str
    us: float
    formula: str
    standing: str


def peer_exchange(gpu: Gpu, load: Load) -> Exchange:
    """In the kernels, each rank on its GPU: as on two H200s, whatever the GPU and however many ranks."""
    keys = interpolate(PEER_KEYS, load.rows)
    queries = interpolate(PEER_QUERIES, load.rows) if load.query_bytes else 0.0
    formula = f"keys and merge {keys:.1f} us + queries {queries:.1f} us for {load.rows:,} rows ({TWO_GPUS_SOURCE})"
    measured = gpu.name == GPUS["h200"].name and load.ranks == 2
    return Exchange(PEER, keys + queries, formula, MEASURED if measured else MODELLED)


def collective_exchange(gpu: Gpu, load: Load) -> Exchange:
    """Two collectives and a merge; between hosts with more latency and the network's bandwidth."""
    gather, all_to_all, source = NCCL_GATHER, NCCL_ALL_TO_ALL, TWO_GPUS_SOURCE
    if gpu.vendor == "amd":
        gather, all_to_all, source = RCCL_GATHER, RCCL_ALL_TO_ALL, RCCL_SOURCE
    far = load.nodes > 1

    def cost(points: Points, size: int) -> float:
        return HOPS * points[0][1] + size * NETWORK_US_PER_BYTE if far else interpolate(points, size)

    queries = cost(gather, load.query_bytes) if load.query_bytes else 0.0
    keys = cost(all_to_all, load.key_bytes)
    where = f"{HOPS:g} x latency + bytes / 50 GB/s; " if far else ""
    formula = f"queries {queries:.1f} us + keys {keys:.1f} us + merge {MERGE_US} us ({where}{source})"
    return Exchange(COLLECTIVE, queries + keys + MERGE_US, formula, MODELLED)


def exchanges(gpu: Gpu, load: Load) -> list[Exchange]:
    """What each transport that can serve these ranks costs, the one that the library would pick first."""
    found = [collective_exchange(gpu, load)]
    return [peer_exchange(gpu, load), *found] if load.nodes == 1 else found
