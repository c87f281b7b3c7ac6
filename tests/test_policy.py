# SPDX-License-Identifier: Apache-2.0
"""How many programs share a decode step: what host and kernels each derive must agree, whatever the device."""

import pytest

from lightning_indexer.policy import DeviceFacts, decode_programs, few_programs, many_pages, most_programs

H200 = DeviceFacts("nvidia", (9, 0), 132)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("processors", [1, 3, 108, 132, 148, 170, 256, 304])
def test_programs_fit_and_agree(processors, packed):
    """A workspace has room for all that are launched; kernels derive from that number what a launch of all would have."""
    facts = DeviceFacts("nvidia", (9, 0), processors)
    most = most_programs(facts, packed)
    few = few_programs(most)
    assert 0 < few <= most <= most_programs(facts, packed=True)
    for pages in (0, 1, many_pages(most) - 1, many_pages(most), 1 << 30):
        launched = decode_programs(facts, packed, pages)
        assert launched in (few, most)
        assert few_programs(launched) == few
        assert launched == most or packed or pages < many_pages(most)


def test_programs_of_an_h200():
    """256 of 264 by the bound, and 512 of packed keys: what docs/performance.md says."""
    assert [decode_programs(H200, False, pages) for pages in (1, 15_839, 15_840, 1 << 30)] == [256, 256, 264, 264]
    assert [decode_programs(H200, True, pages) for pages in (1, 1 << 30)] == [512, 512]
