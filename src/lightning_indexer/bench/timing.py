# SPDX-License-Identifier: Apache-2.0
"""The one timing protocol: CUDA-graph replay on a cold cache.

A graph holds what a decode step does: the step plan, if the operator has one, and one call per layer. Every call reads
another layer's keys, and graphs with other layers take turns, so that more than five times the L2 is read before any key
is read again. All replays are queued at once, so a graph starts where the one before it ends and no launch from the host
is in the time. A time is that of one replay between two events divided by its layers: the plan is counted, shared out
as in a step.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

MAX_LAYERS = 57  # sparse layers of MiniMax-M3: what one step plan serves
MIN_LAYERS = 3
L2_REUSE = 5  # times the L2 that is read before a key is read again


@dataclass(frozen=True)
class Protocol:
    """How often a graph is replayed."""

    replays: int = 20
    warmup: int = 5


QUICK = Protocol(replays=5, warmup=2)


@dataclass(frozen=True)
class Rotation:
    """`graphs` graphs of `layers` calls, each call on its own view of `pages` pages of the pool."""

    layers: int
    graphs: int
    pages: int

    @property
    def views(self) -> int:
        return self.layers * self.graphs


def plan_rotation(layer_pages: int, layer_bytes: int, l2_bytes: int, max_pages: int) -> Rotation:
    """As many layers as a model has, fewer where `max_pages` pages hold no more, and graphs to exceed `L2_REUSE` L2s.

    Layers that are too large even for three to fit get smaller views, in which page ids repeat.

    Args:
        layer_pages: pages that one call reads.
        layer_bytes: bytes that one call reads, more than 0.
        l2_bytes: size of the L2.
        max_pages: pages that the pool may have.
    """
    layers = max(MIN_LAYERS, min(MAX_LAYERS, max_pages // layer_pages))
    pages = min(layer_pages, max_pages // layers)
    bytes_read = layers * layer_bytes * pages // layer_pages
    return Rotation(layers, L2_REUSE * l2_bytes // bytes_read + 1, pages)


@dataclass(frozen=True)
class Timing:
    """Time per call: median, least and most of the replays."""

    us: float
    us_min: float
    us_max: float

    @classmethod
    def of(cls, times: Iterable[float]) -> "Timing":
        times = list(times)
        return cls(statistics.median(times), min(times), max(times))


def elapsed_us(launches: Iterable[Callable[[], None]], protocol: Protocol) -> list[float]:
    """Time of each launch on the current stream after the warm-up, all queued without a pause."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(protocol.replays + 1)]  # type: ignore[no-untyped-call]
    following = iter(launches)
    for launch in itertools.islice(following, protocol.warmup):
        launch()
    events[0].record()
    for event, launch in zip(events[1:], following, strict=False):
        launch()
        event.record()
    torch.cuda.synchronize()
    return [1000 * first.elapsed_time(last) for first, last in itertools.pairwise(events)]


def time_step(call: Callable[[int], None], plan: Callable[[], None] | None, rotation: Rotation, protocol: Protocol) -> Timing:
    """Time per call of a step, whose `call(view)` and `plan()` only enqueue work; both must have run before."""
    memory = torch.cuda.graph_pool_handle()
    graphs = []
    for first in range(0, rotation.views, rotation.layers):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            if plan is not None:
                plan()
            for view in range(first, first + rotation.layers):
                call(view)
        graphs.append(graph)
    every = Protocol(protocol.replays, max(protocol.warmup, rotation.graphs))  # a first replay uploads its graph
    times = elapsed_us(itertools.cycle(graph.replay for graph in graphs), every)
    return Timing.of(time / rotation.layers for time in times)
