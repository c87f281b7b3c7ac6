# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every GPU that the library is for, within its shared memory, and mostly without spills."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(600)

SCRIPT = pathlib.Path(__file__).with_name("compile_kernels.py")
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
KERNELS = {"list_kernel", "plan_kernel", "select_kernel", "merge_kernel", "prefill_kernel"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What the script says of each launch; in a process of its own, for an interpreting one cannot compile."""
    folder = tmp_path_factory.mktemp("compile")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, str(SCRIPT), "--json", str(folder / "rows.json")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert (folder / "rows.json").exists(), run.stdout[-2000:] + run.stderr[-4000:]
    print(run.stdout)  # the table, with pytest -s
    return json.loads((folder / "rows.json").read_text())


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(compiled, target):
    rows = [row for row in compiled if row["target"] == target]
    assert {row["launch"].split()[0] for row in rows} >= KERNELS
    assert {row["launch"]: row["faults"] for row in rows if row["faults"]} == {}


def test_dependent_launch_only_where_the_policy_says(compiled):
    """Hopper and data-centre Blackwell; an AMD or older NVIDIA launch never asks for it."""
    assert {row["target"] for row in compiled if row["pdl"]} == {"sm_90", "sm_100"}
