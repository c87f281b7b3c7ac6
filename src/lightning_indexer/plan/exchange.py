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
# Two H200s of one host (NV18), NCCL in graph replay, by bytes of a rank's part; 2026-11-29. There is no result file of these.
NCCL_GATHER = ((512, 9.7), (8 * KIB, 11.2), (32 * KIB, 11.7), (128 * KIB, 12.4), (512 * KIB, 15.7))
NCCL_ALL_TO_ALL = ((512, 11.0), (8 * KIB, 11.9), (32 * KIB, 12.8), (128 * KIB, 13.0), (512 * KIB, 14.3))
NCCL_SOURCE = "NCCL on two H200s, 2026-11-29, no result file"
# Four MI355X, in a graph; ATOM #2229 and its comments (aiter's all-gather, RCCL's all-to-all).
RCCL_GATHER = ((8 * KIB, 11.2), (128 * KIB, 13.0), (512 * KIB, 20.2), (640 * KIB, 23.2), (1024 * KIB, 29.2))
RCCL_ALL_TO_ALL = ((8 * KIB, 22.1), (128 * KIB, 14.9), (512 * KIB, 20.6), (640 * KIB, 21.1), (1024 * KIB, 21.4))
RCCL_SOURCE = "ATOM #2229, four MI355X"
# A kernel that exchanges 16 keys a row between two H200s over symmetric memory, less its launch of 2.25 us; 2026-11-29. No
# result file, either.
TWO_GPUS = ((1, 2.2), (32, 2.7), (128, 3.9), (512, 5.1))
TWO_GPUS_SOURCE = "a sketch of the exchange on two H200s, 2026-11-29, no result file"
# The shipped exchange on four virtual ranks that share one H200: an upper bound, for they also take turns on that GPU.
SHARED_KEYS = ((1, 5.154), (8, 5.644), (32, 8.2), (128, 15.238), (512, 24.356))
SHARED_QUERIES = ((1, 3.665), (8, 1.415), (32, 3.866), (128, 6.09), (512, 23.271))
SHARED_SOURCE = "cp-h200-2026-11-30.json"
MERGE_US = 2.5  # assumed of the merge launch that `collective` needs
# Between hosts: assumed twice a host's latency, and 50 GB/s per GPU, a network port of 400 Gbit/s.
HOPS = 2.0
NETWORK_US_PER_BYTE = 1 / 50e3

# Transports by name; what `peer` costs lies between the two.
PEER, PEER_BOUND, COLLECTIVE = "peer", "peer, at most", "collective"


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
        nodes: hosts that the ranks are on.
    """

    rows: int
    query_bytes: int
    key_bytes: int
    nodes: int


@dataclass(frozen=True)
class Exchange:
    """Time per layer, and what it rests on."""

    transport: str
    us: float
    formula: str
    standing: str


def peer_exchange(gpu: Gpu, load: Load) -> Exchange:
    """In the kernels, each rank on its GPU: as on two GPUs, for keys and as much again for queries."""
    once = interpolate(TWO_GPUS, load.rows)
    times = 2 if load.query_bytes else 1
    return Exchange(PEER, times * once, f"{times} x {once:.1f} us for {load.rows:,} rows ({TWO_GPUS_SOURCE})", MODELLED)


def shared_peer_exchange(load: Load) -> Exchange:
    """The same kernels where four ranks share one GPU: no more than this."""
    queries = interpolate(SHARED_QUERIES, load.rows) if load.query_bytes else 0.0
    keys = interpolate(SHARED_KEYS, load.rows)
    formula = f"keys {keys:.1f} us + queries {queries:.1f} us for {load.rows:,} rows ({SHARED_SOURCE})"
    return Exchange(PEER_BOUND, keys + queries, formula, MEASURED)


def collective_exchange(gpu: Gpu, load: Load) -> Exchange:
    """Two collectives and a merge; between hosts with more latency and the network's bandwidth."""
    gather, all_to_all, source = NCCL_GATHER, NCCL_ALL_TO_ALL, NCCL_SOURCE
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
    if load.nodes == 1:
        bound = [shared_peer_exchange(load)] if gpu.name == GPUS["h200"].name else []
        found = [peer_exchange(gpu, load), *bound, *found]
    return found
