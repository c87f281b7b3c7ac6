# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every GPU that the library is for, within its shared memory, and mostly without spills."""

import pytest
from compiling import COMPILING

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(1500)

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
KERNELS = {"list_kernel", "plan_kernel", "select_kernel", "merge_kernel", "prefill_kernel"}


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> list[dict]:
    return request.config.stash[COMPILING].rows()


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(compiled, target):
    rows = [row for row in compiled if row["target"] == target]
    assert {row["launch"].split()[0] for row in rows} >= KERNELS
    assert {row["launch"]: row["faults"] for row in rows if row["faults"]} == {}


def test_dependent_launch_only_where_the_policy_says(compiled):
    """Hopper and data-centre Blackwell; an AMD or older NVIDIA launch never asks for it."""
    assert {row["target"] for row in compiled if row["pdl"]} == {"sm_90", "sm_100"}
