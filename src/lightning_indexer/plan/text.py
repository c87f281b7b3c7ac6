# SPDX-License-Identifier: Apache-2.0
"""A plan as text for a terminal of 80 columns."""

from lightning_indexer.plan.cost import Setup
from lightning_indexer.plan.estimate import Estimate
from lightning_indexer.text import table


def model_line(setup: Setup) -> str:
    """Model and GPUs."""
    where = f", {setup.nodes} hosts" if setup.nodes > 1 else ""
    return f"{setup.model.name} on {setup.tp} x {setup.gpu.name} (TP {setup.tp}{where})"


def heading(found: Estimate) -> str:
    """What is planned for."""
    setup = found.setup
    load = " + ".join(f"{batch} x {context:,}" for batch, context in setup.requests)
    return (
        f"{model_line(setup)}\n"
        f"{load} tokens, {setup.query_len} query row{'s' if setup.query_len > 1 else ''} each\n"
        f"index keys {setup.index_format}, KV {setup.kv_format}, weights {setup.weight_format}"
    )


def step_table(found: Estimate) -> str:
    """A layer and a step, without and with context parallelism."""
    figures = found.figures
    rows = [["", "without CP", "with CP", ""]]

    def row(label: str, without: str, sharded: str, scale: float, unit: str, digits: int) -> None:
        values = [figures[without].value / scale, figures[sharded].value / scale]
        rows.append([label, *(f"{value:,.{digits}f} {unit}" for value in values), f"x {values[1] / values[0]:.2f}"])

    row("index keys read per layer", "keys per layer without CP", "keys per layer with CP", 1e6, "MB", 1)
    alone, layer = figures["layer without CP"].value, found.best.layer.value
    rows.append(["indexer per layer", f"{alone:,.1f} us", f"{layer:,.1f} us", f"x {layer / alone:.2f}"])
    row("indexer per step", "index part of a step without CP", "index part of a step with CP", 1e3, "ms", 2)
    row("whole step", "step without CP", "step with CP", 1e3, "ms", 1)
    return table(rows)


def transport_table(found: Estimate) -> str:
    """What each transport costs per layer, and from which context on it pays."""
    batches = list(found.best.break_even)
    rows = [["exchange", "us", "layer us", *(f"batch {batch}" for batch in batches)]]
    for name, way in found.transports.items():
        tokens = [_short(way.break_even[batch].value) for batch in batches]
        rows.append([name, f"{way.exchange.value:.1f}", f"{way.layer.value:,.1f}", *tokens])
    return f"Faster with CP from this context on, in tokens of each request:\n\n{table(rows)}"


def memory_lines(found: Estimate) -> str:
    """Bytes per token, and what fits."""
    cache, setup = found.cache, found.setup
    lines = [
        f"Caches per token and rank: {cache.total:,.0f} B, of which index keys {cache.share:.1%}.\n"
        f"With a sharded index cache {cache.sharded:,.0f} B: {cache.gained:.2f} x the tokens."
    ]
    pool = found.figures["pool"].value / 1e9
    if found.fitting is None:
        lines.append(f"The weights alone exceed a rank's share of memory by {-pool:,.1f} GB.")
    else:
        replicated, sharded = found.fitting
        lines.append(f"{pool:,.1f} GB a rank hold {_short(replicated)} tokens; {_short(sharded)} with a sharded index cache.")
        if setup.tokens > replicated:
            lines.append(f"This load has {_short(setup.tokens)}: it fits only as far as requests share prefixes.")
    return "\n".join(lines)


def verdict(found: Estimate) -> str:
    """Whether to switch it on."""
    figures, setup = found.figures, found.setup
    before, after = figures["step without CP"].value, figures["step with CP"].value
    change = f"({(after - before) / before:+.1%}, {before / after:.2f} x the tokens per second)"
    if found.fitting is None:
        return "The model does not fit: plan for more ranks or smaller weights."
    if not found.pays:
        told = f"Do not share this load's steps: they would take {(after - before) / 1e3:.2f} ms more\n{change}."
        larger = ((batch, figure.value) for batch, figure in found.best.break_even.items() if batch > setup.batch)
        hints = (f";\nit would share from {batch} requests of {_short(tokens)} tokens on" for batch, tokens in larger)
        return f'{told} dispatch="auto" leaves them alone{next(hints, "")}.'
    losing = [name for name, way in found.transports.items() if way.gain <= 0]
    surely = f"Not with: {', '.join(losing)}." if losing else "That holds with every transport above."
    return (
        f"Switch it on: a step takes {(before - after) / 1e3:.2f} ms less {change}.\n"
        f'{surely}\ndispatch="auto" leaves shorter steps as they are.'
    )


def explanation(found: Estimate) -> str:
    """Each number with formula and standing."""
    lines = ["Each number, its formula and what it rests on:", ""]
    named = list(found.figures.items())
    named += [(f"exchange, {name}", way.exchange) for name, way in found.transports.items()]
    named += [(f"layer with CP, {name}", way.layer) for name, way in found.transports.items()]
    named += [
        (f"break-even of {batch} requests, {name}", figure)
        for name, way in found.transports.items()
        for batch, figure in way.break_even.items()
    ]
    for name, figure in named:
        value, unit = _scaled(figure.value, figure.unit)
        digits = 0 if unit in ("B", "tokens") else 2
        lines += [f"{name} = {value:,.{digits}f} {unit}  [{figure.standing}]", f"    {figure.formula}"]
    lines += [
        "",
        "exact: follows from geometry and load.  measured: in a result file of this GPU",
        "type, or by you.  published: by its maker or another project.  modelled: rests on",
        "an assumption or on figures without a result file, see docs/planning.md.",
    ]
    return "\n".join(lines)


def _scaled(value: float, unit: str) -> tuple[float, str]:
    if unit == "B" and abs(value) >= 1e9:
        return value / 1e9, "GB"
    if unit == "B" and abs(value) >= 1e6:
        return value / 1e6, "MB"
    return (value / 1e3, "ms") if unit == "us" and value >= 1e3 else (value, unit)


def _short(tokens: float) -> str:
    """A count of tokens in few characters: 940, 12.3K, 4.19M."""
    for size, suffix in ((1e6, "M"), (1e3, "K")):
        if tokens >= size:
            return f"{tokens / size:.{0 if tokens >= 100 * size else 1}f}{suffix}"
    return f"{tokens:,.0f}"
