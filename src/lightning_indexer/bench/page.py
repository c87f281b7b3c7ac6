# SPDX-License-Identifier: Apache-2.0
"""Result files as one HTML page that needs nothing else: pictures inside, no script, readable on a phone and on paper."""

import base64
import statistics
from html import escape

from lightning_indexer.bench.figures import Picture, pictures, shared_steps
from lightning_indexer.bench.results import ResultFile, case_name, identity, is_layer
from lightning_indexer.plan.cost import select_us
from lightning_indexer.plan.gpus import gpu_of_device

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; margin: 0 auto; padding: 1rem; max-width: 70rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; break-inside: avoid; } img { width: 100%; height: auto; display: block; }
figcaption { font-size: .85rem; color: #444; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #888; }
.bad { color: #a40000; font-weight: 600; }
@media print { body { font-size: 10pt; padding: 0; max-width: none; } .wide { overflow: visible; } tr { break-inside: avoid; }
  .grid { grid-template-columns: 1fr 1fr; } a { color: inherit; } table { font-size: 8pt; } td, th { padding: .1rem .3rem; } }
"""


def render_page(results: list[ResultFile], drawn: list[Picture]) -> str:
    """The page."""
    devices = ", ".join(sorted({result.device for result in results}))
    title = f"Lightning Indexer on {devices}"
    parts = [f"<h1>{escape(title)}</h1>", _runs(results), _failures(results), _summary(results)]
    parts.append("<h2>Pictures</h2>\n<div class=grid>" + "\n".join(_figure(picture) for picture in drawn) + "</div>")
    parts += [_shared(results), _promise(results), *(_rows(result) for result in results)]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def report_page(results: list[ResultFile]) -> tuple[str, list[Picture]]:
    """The page, and its pictures for export."""
    drawn = pictures(results)
    return render_page(results, drawn), drawn


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    lines = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>"


def _figure(picture: Picture) -> str:
    image = base64.b64encode(picture.render("svg")).decode()
    told = escape(picture.caption, quote=True)
    return f'<figure><img alt="{told}" src="data:image/svg+xml;base64,{image}"><figcaption>{told}</figcaption></figure>'


def _runs(results: list[ResultFile]) -> str:
    heads = ["result", "GPU", "date", "commit", "driver", "torch", "triton", "read roof TB/s", "matrix roof TFLOP/s"]
    rows = []
    for result in results:
        facts = result.facts
        software = [facts["driver"], facts["torch"], facts["triton"]]
        roofs = [f"{result.read_tbps:.2f}", f"{result.matrix_tflops:.0f}"]
        rows.append([result.name, facts["device"], facts["date"], facts["commit"][:12], *software, *roofs])
    return _table(heads, rows)


def _failures(results: list[ResultFile]) -> str:
    failed = [f"{result.name}: {failure}" for result in results for failure in result.failures]
    return "".join(f'<p class="bad">Selected wrongly, not timed: {escape(each)}</p>' for each in failed)


def _summary(results: list[ResultFile]) -> str:
    """What there is to know first."""
    told = []
    for op in ("decode", "prefill"):
        rows = (row for result in results for row in result.rows if row["op"] == op and row.get("peer_us"))
        if ratios := list({identity(row): row["us"] / row["peer_us"] for row in rows}.values()):
            mean = statistics.geometric_mean(ratios)
            told.append(
                f"{op} over the peer: geometric mean of {len(ratios)} cases {mean:.2f}, worst {max(ratios):.2f}.".capitalize()
            )
    large = [row for result in results for row in result.rows if is_layer(row) and row.get("bytes", 0) >= 5e8]
    if large:
        least = min(row["pct_roof"] for row in large)
        told.append(f"Decode of 0.5 GB and more: at least {least:.0f} % of the read roof.")
    steps = [step for result in results for step in shared_steps(result)]
    if steps:
        best, faster = max(steps, key=lambda step: step.gain), sum(step.gain > 1 for step in steps)
        told.append(
            f"With context parallelism: up to {best.gain:.1f} times faster ({case_name(best.row)}), faster in {faster} of "
            f"{len(steps)} cases."
        )
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in told) + "</ul>" if told else ""


def _shared(results: list[ResultFile]) -> str:
    """With against without context parallelism."""
    rows = []
    for step in (step for result in results for step in shared_steps(result)):
        times = [step.alone_us, step.rank_us, step.exchange_us, step.shared_us]
        rows.append([case_name(step.row), *(f"{us:.1f}" for us in times), f"{step.gain:.2f}"])
    if not rows:
        return ""
    heads = ["case", "without CP us", "rank us", "exchange us", "with CP us", "times faster"]
    return f"<h2>With and without context parallelism</h2>\n{_table(heads, rows)}"


def _promise(results: list[ResultFile]) -> str:
    """What `plan` would have told of the measured cases."""
    rows = []
    for result in results:
        gpu = gpu_of_device(result.device)
        for row in result.rows if gpu is not None else []:
            if is_layer(row) and row["us"] > 0:
                told = select_us(gpu, row["bytes"], row["batch"] * row["query_len"] * row["heads"])  # type: ignore[arg-type]
                rows.append([case_name(row), f"{told:.1f}", f"{row['us']:.1f}", f"{row['us'] / told:.2f}"])
    if not rows:
        return ""
    heads = ["case", "plan us (modelled)", "us (measured)", "measured / modelled"]
    return f"<h2>Did the promise hold?</h2>\n<p>Times that <code>plan</code> tells, against these.</p>\n{_table(heads, rows)}"


def _rows(result: ResultFile) -> str:
    """Every row of a file."""
    rows = []
    for row in result.rows:
        spread = f"{row['us_min']:.2f} to {row['us_max']:.2f}" if "us_min" in row else ""
        size = f"{row['bytes'] / 1e6:,.1f}" if row.get("bytes", 0) >= 1e5 else ""
        ratio = f"{row['us'] / row['peer_us']:.2f}" if row.get("peer_us") else ""
        share = f"{row['pct_roof']:.1f}" if "pct_roof" in row else ""
        rows.append([case_name(row), f"{row['us']:.2f}", spread, size, share, ratio])
    heads = ["case", "us", "range", "MB", "% of roof", "over the peer"]
    return f"<h2>{escape(result.name)}</h2>\n{_table(heads, rows)}"
