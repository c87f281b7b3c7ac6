# SPDX-License-Identifier: Apache-2.0
"""The packed key against an order written out here: integer order of keys is the total order of the selection."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import INF, NAN

from lightning_indexer.key import MAX_BLOCKS, key_blocks, pack_keys, score_image, top_keys

SPECIAL_BITS = {
    "zero": 0x00000000,
    "minus-zero": 0x80000000,
    "smallest-subnormal": 0x00000001,
    "minus-smallest-subnormal": 0x80000001,
    "largest-subnormal": 0x007FFFFF,
    "smallest-normal": 0x00800000,
    "one": 0x3F800000,
    "after-one": 0x3F800001,
    "minus-one": 0xBF800000,
    "largest": 0x7F7FFFFF,
    "minus-largest": 0xFF7FFFFF,
    "inf": 0x7F800000,
    "minus-inf": 0xFF800000,
    "nan": 0x7FC00000,
    "minus-nan": 0xFFC00000,
    "signalling-nan": 0x7F800001,
    "minus-payload-nan": 0xFFFFFFFF,
}
BITS = st.one_of(st.sampled_from(list(SPECIAL_BITS.values())), st.integers(0, 2**32 - 1))
BLOCKS = st.one_of(st.integers(0, 40), st.integers(0, MAX_BLOCKS - 1), st.integers(MAX_BLOCKS - 40, MAX_BLOCKS - 1))


def number(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def tensor_of(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def comes_before(
    a: tuple[float, int], b: tuple[float, int], *, visible: int, init_blocks: int, local_blocks: int, tie_break: str
) -> bool:
    """Whether candidate `a = (score, block)` comes before another one `b`, by the rules as they are written."""

    def kind(block: int) -> int:
        if block < init_blocks:
            return 0
        return 1 if block >= visible - local_blocks else 2

    (score_a, block_a), (score_b, block_b) = a, b
    lower_first = block_a < block_b if tie_break == "lower" else block_a > block_b
    if kind(block_a) != kind(block_b):
        return kind(block_a) < kind(block_b)
    if kind(block_a) < 2:
        return lower_first
    if math.isnan(score_a) or math.isnan(score_b):
        return lower_first if math.isnan(score_a) and math.isnan(score_b) else math.isnan(score_b)
    return lower_first if score_a == score_b else score_a > score_b


@st.composite
def candidates(draw, count=None):
    blocks = draw(st.lists(BLOCKS, min_size=count or 2, max_size=count or 12, unique=True))
    bits = draw(st.lists(BITS, min_size=len(blocks), max_size=len(blocks)))
    if draw(st.booleans()):  # ties
        bits = [bits[0]] * len(bits)
    visible = draw(st.sampled_from([max(blocks) + 1, min(max(blocks) + 3, MAX_BLOCKS), MAX_BLOCKS, *(b + 1 for b in blocks)]))
    rules = {
        "init_blocks": draw(st.integers(0, 32)),
        "local_blocks": draw(st.integers(0, 32)),
        "tie_break": draw(st.sampled_from(["lower", "higher"])),
    }
    return bits, blocks, visible, rules


def packed(bits, blocks, visible, rules):
    return pack_keys(tensor_of(bits), torch.tensor(blocks), torch.tensor([visible]), **rules)


@given(candidates(count=2))
def test_order_of_two_keys_is_the_total_order(drawn):
    bits, blocks, visible, rules = drawn
    first, second = packed(*drawn).tolist()
    a, b = ((number(image), block) for image, block in zip(bits, blocks, strict=True))
    if max(blocks) < visible:
        assert (first > second) == comes_before(a, b, visible=visible, **rules)
        assert first != second
    else:
        assert [first > 0, second > 0] == [block < visible for block in blocks]


@given(candidates())
def test_keys_of_visible_blocks_are_positive_and_name_their_block(drawn):
    _, blocks, visible, rules = drawn
    keys = packed(*drawn)
    assert key_blocks(keys, rules["tie_break"]).tolist() == [block if block < visible else -1 for block in blocks]
    for key, block in zip(keys.tolist(), blocks, strict=True):
        assert (key > 0) == (block < visible)
        assert key == 0 or block < visible


@given(candidates())
def test_top_keys_are_the_first_of_the_order(drawn):
    bits, blocks, visible, rules = drawn
    seen = [(number(image), block) for image, block in zip(bits, blocks, strict=True) if block < visible]
    order = []  # by insertion: each goes before the first that it comes before
    for candidate in seen:
        place = next(
            (i for i, other in enumerate(order) if comes_before(candidate, other, visible=visible, **rules)), len(order)
        )
        order.insert(place, candidate)
    for count in (1, 3, 16):
        best = [block for _, block in order[:count]]
        ids = key_blocks(top_keys(packed(*drawn), count), rules["tie_break"]).tolist()
        assert ids == best + [-1] * (count - len(best))


@pytest.mark.parametrize("tie_break", ["lower", "higher"])
@pytest.mark.parametrize("name", SPECIAL_BITS)
def test_every_float_class_against_every_other(name, tie_break):
    rules = {"init_blocks": 0, "local_blocks": 0, "tie_break": tie_break}
    for bits in SPECIAL_BITS.values():
        for blocks in ([0, 1], [1, 0], [0, MAX_BLOCKS - 1], [MAX_BLOCKS - 1, MAX_BLOCKS - 2]):
            first, second = packed([SPECIAL_BITS[name], bits], blocks, MAX_BLOCKS, rules).tolist()
            a, b = (number(SPECIAL_BITS[name]), blocks[0]), (number(bits), blocks[1])
            assert (first > second) == comes_before(a, b, visible=MAX_BLOCKS, **rules), f"against {bits:#010x}, {blocks}"


@pytest.mark.parametrize(
    ("score", "image"),
    [
        (NAN, 0),
        (-INF, 0x007FFFFF),
        (-1.0, 0x407FFFFF),
        (-0.0, 0x80000000),
        (0.0, 0x80000000),
        (1.0, 0xBF800000),
        (INF, 0xFF800000),
    ],
)
def test_score_image_values(score, image):
    assert score_image(torch.tensor([score])).tolist() == [image]


@pytest.mark.parametrize(
    ("tie_break", "order"),
    [("lower", [0, 1, 6, 7, 2, 4, 5, 3]), ("higher", [1, 0, 7, 6, 5, 4, 2, 3])],
)
def test_forced_blocks_and_ties_by_hand(tie_break, order):
    """Blocks 0, 1 are init and 6, 7 local; 2, 4, 5 tie; 3 is NaN."""
    scores = torch.tensor([-INF, NAN, 5.0, NAN, 5.0, 5.0, -3.0, NAN])
    keys = pack_keys(scores, torch.arange(8), torch.tensor([8]), init_blocks=2, local_blocks=2, tie_break=tie_break)
    assert key_blocks(keys.sort(descending=True).values, tie_break).tolist() == order


def test_a_block_that_is_init_and_local_counts_as_init():
    rules = {"init_blocks": 2, "local_blocks": 3, "tie_break": "lower"}
    keys = pack_keys(torch.zeros(4), torch.arange(4), torch.tensor([4]), **rules)
    assert (keys >> 60).tolist() == [3, 3, 2, 2]


@pytest.mark.parametrize("tie_break", ["lower", "higher"])
def test_visible_is_per_row(tie_break):
    visible = torch.tensor([[0], [1], [3], [5]])
    keys = pack_keys(torch.ones(4, 5), torch.arange(5), visible, init_blocks=0, local_blocks=1, tie_break=tie_break)
    assert (keys != 0).sum(dim=1).tolist() == [0, 1, 3, 5]
    assert (keys >> 60).tolist() == [[0, 0, 0, 0, 0], [2, 0, 0, 0, 0], [1, 1, 2, 0, 0], [1, 1, 1, 1, 2]]
