# SPDX-License-Identifier: Apache-2.0
"""Larger scale on paper: more ranks, over several hosts, and a fleet, with as many requests as the caches hold."""

from dataclasses import dataclass, replace
from typing import Any

from lightning_indexer.plan.cost import Setup
from lightning_indexer.plan.estimate import estimate
from lightning_indexer.text import table

RANKS = (2, 4, 8, 16)
FLEET = 1000  # GPUs


@dataclass(frozen=True)
class Replica:
    """One replica of the model on `ranks` GPUs, in one way of running it."""

    ranks: int
    hosts: int
    batch: int  # requests that the caches hold
    step_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Of the replica, a token per request and step."""
        return 1e3 * self.batch / self.step_ms


@dataclass(frozen=True)
class Scale:
    """A replica of `ranks` GPUs without context parallelism, with "auto", and with "auto" and a sharded index cache."""

    ranks: int
    off: Replica
    auto: Replica
    sharded: Replica

    @property
    def ways(self) -> tuple[Replica, Replica, Replica]:
        """All three."""
        return self.off, self.auto, self.sharded


def scales(setup: Setup, context: int) -> list[Scale]:
    """For each number of ranks that the model fits on, requests of `context` tokens.

    Raises:
        ValueError: the model fits on none, or not one request fits.
    """
    found = []
    for ranks in RANKS:
        try:
            at = replace(setup, tp=ranks, requests=((1, context),))
        except ValueError:  # heads that these ranks cannot share out
            continue
        fitting = estimate(at).fitting
        if fitting is None or fitting[0] < context:
            continue
        replicated, sharded = (tokens // context for tokens in fitting)
        found.append(
            Scale(
                ranks,
                _replica(at, replicated, context, "step without CP"),
                _replica(at, replicated, context, "step with auto"),
                _replica(at, sharded, context, "step with CP"),  # whose blocks no other rank could score
            )
        )
    if not found:
        raise ValueError(f"context: expected requests that fit on up to {RANKS[-1]} GPUs, got {context:,} tokens")
    return found


def _replica(setup: Setup, batch: int, context: int, step: str) -> Replica:
    found = estimate(replace(setup, requests=((batch, context),)))
    return Replica(setup.tp, setup.nodes, batch, found.figures[step].value / 1e3)


def scale_report(found: list[Scale], context: int) -> str:
    """Replicas by ranks, and a fleet of them."""
    rows = [["GPUs a replica", "hosts", "requests", "step ms", "auto", "sharded", "requests"]]
    fleet = [["GPUs a replica", "replicas", "tokens/s", "auto", "saves", "sharded", "saves"]]
    for each in found:
        times = [f"{way.step_ms:.1f}" for way in each.ways]
        rows.append([str(each.ranks), str(each.off.hosts), f"{each.off.batch:,}", *times, f"{each.sharded.batch:,}"])
        replicas = FLEET // each.ranks
        rates = [replicas * way.tokens_per_s for way in each.ways]
        cells = [f"{rates[0]:,.0f}"]
        for rate in rates[1:]:
            cells += [f"x {rate / rates[0]:.2f}", f"{FLEET * (1 - rates[0] / rate):,.0f}"]
        fleet.append([str(each.ranks), f"{replicas:,}", *cells])
    return (
        f"Requests of {context:,} tokens, as many as the caches hold; step without CP,\n"
        f'with dispatch="auto", and with a sharded index cache, which holds more:\n\n{table(rows)}\n\n'
        f"A fleet of {FLEET:,} GPUs, decode only, and how many fewer make the same tokens/s:\n\n{table(fleet)}\n\n"
        "Everything here is modelled. The sharded index cache is in the library\n"
        '(shard_by="page") and an option of its vLLM plugin.'
    )


def scale_json(found: list[Scale]) -> list[dict[str, Any]]:
    """For a result file."""
    names = ("off", "auto", "sharded")
    return [
        {
            "ranks": each.ranks,
            "hosts": each.off.hosts,
            **{
                name: {"requests": way.batch, "step_ms": way.step_ms, "tokens_per_s": way.tokens_per_s}
                for name, way in zip(names, each.ways, strict=True)
            },
        }
        for each in found
    ]
