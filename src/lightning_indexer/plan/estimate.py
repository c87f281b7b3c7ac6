# SPDX-License-Identifier: Apache-2.0
"""All figures of a plan, each with its formula and standing."""

from dataclasses import dataclass

from lightning_indexer.plan.cost import (
    LAUNCH_US,
    LAYER_US,
    SELECTION_US,
    SLOPE,
    Setup,
    alone_us,
    break_even_tokens,
    layer_bytes,
    rank_us,
    rest_us,
    setup_exchanges,
)
from lightning_indexer.plan.exchange import Exchange
from lightning_indexer.plan.figure import EXACT, MODELLED, PUBLISHED, Figure, weakest
from lightning_indexer.plan.memory import WEIGHT_BYTES, CacheBytes, cache_bytes

BATCHES = (1, 8, 32, 128)


@dataclass(frozen=True)
class Transport:
    """Context parallelism over one transport."""

    exchange: Figure
    layer: Figure  # a layer's time, exchange included
    gain: float  # us of a layer saved; below 0 it is slower
    break_even: dict[int, Figure]  # tokens of each request from which on it is faster, by number of requests


@dataclass(frozen=True)
class Estimate:
    """What a setup costs without context parallelism, with it by transport, and what its caches hold."""

    setup: Setup
    figures: dict[str, Figure]
    transports: dict[str, Transport]
    cache: CacheBytes
    fitting: tuple[int, int] | None  # tokens in the pool: replicated, sharded; None where not even the weights fit

    @property
    def best(self) -> Transport:
        """What the library would use: the first transport."""
        return next(iter(self.transports.values()))

    @property
    def pays(self) -> bool:
        """Whether a step of this load gets faster."""
        return self.best.gain > 0

    def as_json(self) -> dict[str, object]:
        """For a result file."""
        setup = self.setup
        told = {
            "setup": {
                "gpu": setup.gpu.name,
                "model": setup.model.name,
                "tp": setup.tp,
                "requests": [list(group) for group in setup.requests],
                "query_len": setup.query_len,
                "index_format": setup.index_format,
                "kv_format": setup.kv_format,
                "weight_format": setup.weight_format,
                "gpus_per_node": setup.gpus_per_node,
            },
            "figures": {name: figure.as_json() for name, figure in self.figures.items()},
            "transports": {
                name: {
                    "exchange": way.exchange.as_json(),
                    "layer": way.layer.as_json(),
                    "gain_us": way.gain,
                    "break_even": {batch: figure.as_json() for batch, figure in way.break_even.items()},
                }
                for name, way in self.transports.items()
            },
            "pays": self.pays,
        }
        return told


def estimate(setup: Setup) -> Estimate:
    """All figures of `setup`.

    Raises:
        ValueError: a step time is given that the index scores alone exceed.
    """
    costs = setup_exchanges(setup, setup.rows)
    figures = _layer_figures(setup)
    transports = {cost.transport: _transport(setup, cost, figures) for cost in costs}
    figures |= _step_figures(setup, figures, next(iter(transports.values())))
    cache = cache_bytes(setup.model, setup.tp, setup.kv_format, setup.index_format)
    figures |= _memory_figures(setup, cache)
    pool = figures["pool"].value
    fitting = None if pool <= 0 else (int(pool / cache.total), int(pool / cache.sharded))
    return Estimate(setup, figures, transports, cache, fitting)


def _layer_figures(setup: Setup) -> dict[str, Figure]:
    gpu, ranks, heads = setup.gpu, setup.tp, setup.model.spec.num_heads
    peak = Figure(gpu.peak_tbps, "TB/s", gpu.source, PUBLISHED)
    roof = Figure(gpu.read_tbps, "TB/s", gpu.read_formula, gpu.read_standing)
    whole, part = layer_bytes(setup, 1), layer_bytes(setup, ranks)
    bytes_formula = f"{setup.tokens:,} tokens x {whole / setup.tokens:g} B"

    def scores(heads: int, moved: int) -> str:
        selections = f"{SELECTION_US} us x {setup.rows:,} rows x heads ({heads})"
        return f"{LAUNCH_US} us + {selections} + {SLOPE} x {moved / 1e6:,.1f} MB / {gpu.read_tbps:.2f} TB/s"

    return {
        "memory bandwidth": peak,
        "read roof": roof,
        "keys per layer without CP": Figure(whole, "B", bytes_formula, EXACT),
        "keys per layer with CP": Figure(part, "B", f"those of rank 0's blocks, 1/{ranks}", EXACT),
        "layer without CP": Figure(alone_us(setup), "us", scores(setup.own_heads, whole), MODELLED),
        "rank's part with CP": Figure(rank_us(setup), "us", scores(heads, part), MODELLED),
    }


def _transport(setup: Setup, cost: Exchange, figures: dict[str, Figure]) -> Transport:
    exchange = Figure(cost.us, "us", cost.formula, cost.standing)
    part = figures["rank's part with CP"]
    layer = Figure(part.value + cost.us, "us", "the rank's part + exchange", weakest(part.standing, cost.standing))
    break_even = {}
    for batch in BATCHES:
        costs = setup_exchanges(setup, batch * setup.query_len)
        us = next(each.us for each in costs if each.transport == cost.transport)
        formula = f"({us:.1f} us + {SELECTION_US} us x rows x (H - h)) / ({SLOPE} x (1 - 1/P) x requests x B / roof)"
        break_even[batch] = Figure(break_even_tokens(setup, batch, us), "tokens", formula, weakest(cost.standing, MODELLED))
    return Transport(exchange, layer, figures["layer without CP"].value - layer.value, break_even)


def _step_figures(setup: Setup, figures: dict[str, Figure], best: Transport) -> dict[str, Figure]:
    layers = setup.model.sparse_layers
    alone, layer = figures["layer without CP"], best.layer
    rest, standing = rest_us(setup)
    floor = f"{LAYER_US:g} us x layers + (weights + KV read) / read roof"
    how = floor if setup.step_us is None else "given step - index part"
    without, auto = layers * alone.value + rest, layers * min(alone.value, layer.value) + rest
    return {
        "index part of a step without CP": Figure(layers * alone.value, "us", f"{layers} x layer", alone.standing),
        "index part of a step with CP": Figure(layers * layer.value, "us", f"{layers} x layer", layer.standing),
        "rest of a step": Figure(rest, "us", how, standing),
        "step without CP": Figure(without, "us", "index part + rest", MODELLED),
        "step with CP": Figure(layers * layer.value + rest, "us", "index part + rest", MODELLED),
        "step with auto": Figure(auto, "us", "the shorter of the two", MODELLED),
    }


def _memory_figures(setup: Setup, cache: CacheBytes) -> dict[str, Figure]:
    model, weight = setup.model, WEIGHT_BYTES[setup.weight_format]
    memory, weights = setup.gpu.memory_gb * 1e9, model.weights * weight / setup.tp
    pool = setup.memory_share * memory - weights
    heads = max(1, model.kv_heads // setup.tp)
    return {
        "KV per token": Figure(cache.kv, "B", f"{model.layers} layers x {heads} x K and V, {setup.kv_format}", EXACT),
        "index keys per token": Figure(cache.index, "B", f"{model.sparse_layers} layers x a key, {setup.index_format}", EXACT),
        "index keys per token, sharded": Figure(cache.index / setup.tp, "B", f"1/{setup.tp} of that, per rank", EXACT),
        "GPU memory": Figure(memory, "B", setup.gpu.source, PUBLISHED),
        "weights of a rank": Figure(weights, "B", f"{model.weights / 1e9:,.0f} G x {weight:g} B / {setup.tp}", EXACT),
        "pool": Figure(pool, "B", f"{setup.memory_share:g} x memory - weights", MODELLED),
        "tokens that fit": Figure(max(0.0, pool / cache.total), "tokens", "pool / (KV + index keys per token)", MODELLED),
        "tokens that fit, sharded": Figure(
            max(0.0, pool / cache.sharded), "tokens", f"pool / (KV + index keys per token / {setup.tp})", MODELLED
        ),
    }
