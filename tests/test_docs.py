# SPDX-License-Identifier: Apache-2.0
"""The documents: their code runs, their links lead somewhere, their numbers of the plan are the plan's."""

import re
from pathlib import Path

import pytest
import torch

import lightning_indexer as li
from lightning_indexer.plan.cost import LAUNCH_US, LAYER_US, SELECTION_US, SLOPE
from lightning_indexer.plan.gpus import GPUS, READABLE

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("document", [ROOT / "README.md", ROOT / "docs" / "index.md"], ids=lambda path: path.name)
def test_quickstart_runs_and_selects_what_it_says(document):
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict = {}
    torch.manual_seed(0)
    exec(blocks[0], names)
    whole = names["ids"]
    assert whole.shape == (4, 2, 16)
    exec(blocks[1], names)  # a group of one owns all heads
    assert torch.equal(names["ids"], whole)
    visible = [-(-length // 128) for length in names["seq_lens"].tolist()]
    assert (whole[:, 0] >= 0).all()
    assert ((whole[:, 1] >= 0).sum(dim=-1) == visible[1]).all()
    assert isinstance(names["indexer"], li.ContextParallelIndexer)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    for target in LINK.findall(document.read_text()):
        if not target.startswith(("http://", "https://", "#")):
            path = (document.parent / target.split("#")[0]).resolve()
            assert path.is_file(), f"{document.name}: {target}"


def test_site_has_every_document():
    site = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r": (\S+\.md)$", site, re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_table_of_gpus_is_the_one_in_use():
    told = (ROOT / "docs" / "planning.md").read_text()
    for name, gpu in GPUS.items():
        published = f"| {name} | {gpu.memory_gb} | {gpu.peak_tbps} | {gpu.matrix_tflops} | {gpu.source} |"
        assert f"{published} {gpu.read_tbps:.2f} {gpu.read_standing} |" in told
    assert len(re.findall(r"data sheet, \d{4} \|", told)) == len(GPUS)


def test_constants_of_the_model_are_those_of_its_document():
    told = (ROOT / "docs" / "planning.md").read_text()
    assert f"= {LAUNCH_US} us + {SELECTION_US} us x rows x heads + {SLOPE} x bytes / read roof" in told
    assert f"= {LAYER_US:g} us x layers + " in told
    assert f"is {READABLE} of its published bandwidth" in told
