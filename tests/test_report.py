# SPDX-License-Identifier: Apache-2.0
"""The report page: what it holds, that it needs nothing else, and in a browser where there is one."""

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from lightning_indexer import cli
from lightning_indexer.bench import figures
from lightning_indexer.bench.figures import pictures, shared_steps
from lightning_indexer.bench.page import render_page
from lightning_indexer.bench.results import load_result, parse_result

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
FILES = [RESULTS / f"{name}.json" for name in ("decode-h200-2026-11-30", "cp-h200-2026-11-30", "prefill-h200-2026-11-29")]
BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
VOID = ("meta", "link", "img", "br")

pytest.importorskip("matplotlib")


class Page(HTMLParser):
    """Tags that are closed in order, what is referred to, and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        told = dict(attributes)
        self.refers += [told[name] for name in ("src", "href") if name in told]
        if tag == "img":
            self.images.append(told)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page() -> str:
    results = [load_result(path) for path in FILES]
    return render_page(results, pictures(results))


def test_page_needs_nothing_else(page):
    parsed = Page(page)
    assert all(each.startswith("data:") for each in parsed.refers)
    assert "<script" not in page
    assert "url(" not in page
    assert 'name="viewport"' in page
    assert "@media print" in page


def test_images_are_drawings_with_words_for_them(page):
    images = Page(page).images
    assert len(images) == 10
    for image in images:
        assert len(image["alt"]) > 40
        root = ElementTree.fromstring(base64.b64decode(image["src"].removeprefix("data:image/svg+xml;base64,")))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 20


def test_page_tells_what_was_measured(page):
    text = Page(page).text
    told = json.loads(FILES[0].read_text())
    assert "Decode over the peer: geometric mean of 35 cases 0.81, worst 1.00." in text
    assert "Decode of 0.5 GB and more: at least 92 % of the read roof." in text
    assert "faster in 7 of 8 cases" in text
    assert "Did the promise hold?" in text
    for row in told["rows"]:
        assert f"{row['us']:.2f}" in text


def test_gain_by_hand():
    """32 x 131,072: 244.343 us alone; 67.742 us of a rank and 8.2 us of exchange for 32 rows."""
    steps = shared_steps(load_result(FILES[1]))
    assert len(steps) == 8
    step = next(step for step in steps if (step.row["batch"], step.row["context"]) == (32, 131_072))
    assert (step.alone_us, step.rank_us, step.exchange_us) == (244.343, 67.742, 8.2)
    assert step.gain == pytest.approx(244.343 / 75.942)
    between = next(step for step in steps if (step.row["batch"], step.row["query_len"]) == (64, 4))
    assert between.exchange_us == pytest.approx(15.238 + (24.356 - 15.238) * 128 / 384)  # 256 rows


def steps_of(format: str, queries: str | None, world: int, heads: int = 4) -> list[dict]:
    """Rows of `bench cp`: one rank, the step without context parallelism on a rank's own heads and on one, an exchange."""
    load = {"format": format, "batch": 8, "context": 16_384, "query_len": 1, "bytes": 1, "pct_roof": 50.0}
    load |= {} if queries is None else {"queries": queries}
    rank = {"op": "cp", **load, "heads": heads, "world": world, "transport": "none", "dispatch": "sharded", "us": 6.0}
    alone = [{"op": "decode", **load, "heads": own, "us": 10.0 * own} for own in {1, max(1, heads // world)}]
    return [rank, *alone, {"op": "exchange", "world": world, "rows": 8, "transport": "peer", "us": 3.0, "us_queries": 1.0}]


def result_of(*rows: dict):
    return parse_result({**json.loads(FILES[1].read_text()), "rows": list(rows)}, "cp.json")


@pytest.mark.parametrize(("world", "own"), [(2, 2), (4, 1), (8, 1)])
def test_a_step_is_compared_with_that_of_the_ranks_own_heads(world, own):
    (step,) = shared_steps(result_of(*steps_of("bf16", "bf16", world)))
    assert (step.alone_us, step.shared_us) == (10.0 * own, 9.0)


def test_a_step_is_compared_with_one_of_the_same_queries():
    rank, *others = steps_of("fp8", "fp8", 4)
    assert shared_steps(result_of({**rank, "queries": "bf16"}, *others)) == []
    assert len(shared_steps(result_of(rank, *others))) == 1


def test_one_map_per_formats_and_ranks_each_with_its_own_format(monkeypatch):
    asked = []
    real = figures.alone_us
    monkeypatch.setattr(figures, "alone_us", lambda setup: asked.append((setup.index_format, setup.tp)) or real(setup))
    rows = [
        *steps_of("bf16", "bf16", 2),
        *steps_of("bf16", "bf16", 4),
        *steps_of("fp8", "fp8", 4),
        *steps_of("fp8", "bf16", 4),
    ]
    rows += [*steps_of("fp16", "fp16", 4), *steps_of("bf16", "bf16", 4, heads=8)]  # that the model has nothing for
    maps = [picture for picture in pictures([result_of(*rows)]) if picture.name.endswith("map")]
    assert [picture.title for picture in maps] == [
        "break-even, bf16, 2 ranks, one row each",
        "break-even, bf16, 4 ranks, one row each",
        "break-even, fp8, 4 ranks, one row each",
        "break-even, fp8, bf16 queries, 4 ranks, one row each",
    ]
    drawn = []
    for picture in maps:
        assert picture.render("png").startswith(b"\x89PNG")
        drawn.append(set(asked))
        asked.clear()
    assert drawn == [{("bf16", 2)}, {("bf16", 4)}, {("fp8", 4)}, {("fp8", 4)}]


def test_ways_to_take_a_step_on_several_gpus():
    load = {"format": "bf16", "heads": 4, "batch": 8, "query_len": 1, "world": 2, "bytes": 6e8, "pct_roof": 1.0}
    ways = [("none", "replicated"), ("collective", "sharded"), ("peer", "sharded"), ("peer", "auto")]
    rows = [
        {"op": "cp", **load, "context": context, "transport": transport, "dispatch": dispatch, "us": us + context / 4096}
        for context in (4096, 65_536)
        for us, (transport, dispatch) in enumerate(ways, 1)
    ]
    exchange = {"op": "exchange", "world": 2, "rows": 8, "transport": "peer", "us": 3.0, "us_queries": 1.0}
    rows += [exchange, {**exchange, "rows": 32}, {**exchange, "gpus": 2}, {**exchange, "gpus": 2, "rows": 32}]
    result = result_of(*rows)
    assert shared_steps(result) == []
    drawn = pictures([result])
    assert [picture.name for picture in drawn] == ["01-ways", "02-exchange"]  # nothing here is a rank's part alone
    assert drawn[0].title == "a step on 2 GPUs, bf16"
    assert drawn[0].render("png").startswith(b"\x89PNG")
    svg = drawn[1].render("svg").decode()
    assert "peer, 2 GPUs: keys" in svg
    assert "peer, 2 ranks: keys" in svg
    assert "the read roof" not in Page(render_page([result], drawn)).text


def test_a_failed_case_and_odd_names_are_told_as_text(tmp_path):
    told = json.loads(FILES[0].read_text())
    told["failures"] = [{"op": "decode", "error": "<b>row 4</b>"}]
    told["device"] = "A GPU <&> Co"
    (tmp_path / "r.json").write_text(json.dumps(told))
    page = render_page([load_result(tmp_path / "r.json")], [])
    assert "<b>" not in page
    assert "Selected wrongly, not timed" in Page(page).text
    assert "<b>row 4</b>" in Page(page).text
    assert "A GPU <&> Co" in Page(page).text


def test_rows_of_uneven_lengths_are_listed_not_drawn():
    results = [load_result(RESULTS / "decode-h200-2026-11-29.json")]
    page = Page(render_page(results, pictures(results)))
    assert "1 x 1,048,576 + 63 x 4,096" in page.text


def test_command_writes_page_and_pictures(tmp_path):
    folder = tmp_path / "png"
    folder.mkdir()
    target = tmp_path / "report.html"
    arguments = ["bench", "report", str(FILES[1]), "--html", str(target), "--png", str(folder)]
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 0, done.output
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["01-time-cp.png", "02-roof.png", "03-dispatch.png", "04-map.png", "05-exchange.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    assert len(Page(target.read_text()).images) == 5
    target.write_text("kept")
    again = CliRunner().invoke(cli.main, arguments)
    assert (again.exit_code, again.output) == (2, f"Error: {target} exists; --force overwrites it\n")
    assert target.read_text() == "kept"


def test_corrupt_file_is_one_line(tmp_path):
    (tmp_path / "r.json").write_text('{"rows": [')
    done = CliRunner().invoke(cli.main, ["bench", "report", str(tmp_path / "r.json"), "--html", str(tmp_path / "x.html")])
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert not (tmp_path / "x.html").exists()


PROBE = """<script>
const errors = [];
addEventListener("error", event => errors.push(String(event.message)), true);
addEventListener("load", () => {
  const loaded = [...document.images].filter(image => image.complete && image.naturalWidth > 0).length;
  const outside = performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:"));
  const fits = document.documentElement.scrollWidth <= innerWidth;
  document.body.innerHTML = "<pre>" + JSON.stringify({ loaded, outside, fits, errors }) + "</pre>";
});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("width", [500, 1200])  # 500 is the narrowest window that it makes
def test_in_a_browser(page, tmp_path, width):
    target = tmp_path / "report.html"
    target.write_text(page.replace("</head>", f"{PROBE}</head>"))
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *options, f"--window-size={width},900", "--dump-dom", target.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<pre>(\{.*?\})</pre>", done.stdout)
    assert found is not None, done.stderr[-500:]
    assert json.loads(found[1]) == {"loaded": 10, "outside": [], "fits": True, "errors": []}
