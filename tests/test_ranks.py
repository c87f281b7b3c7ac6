# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks, the calibration's arithmetic, and how an indexer picks its transport."""

from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_indexer as li
from lightning_indexer.calibration import ALWAYS, NEVER, Line, crossing
from lightning_indexer.ranks import run_virtual, virtual_ranks

SPEC = li.IndexerSpec()


def test_messages_arrive_by_rank_round_by_round():
    def work(ranks):
        return [[message["said"] for message in ranks.gather({"said": (ranks.rank, turn)}, None)] for turn in range(20)]

    assert run_virtual(5, work) == [[[(rank, turn) for rank in range(5)] for turn in range(20)]] * 5


def test_tensors_are_shared_themselves():
    def work(ranks):
        mine = torch.full((3,), -1)
        boxes = ranks.share(mine, None)
        boxes[(ranks.rank + 1) % 3][ranks.rank] = ranks.rank
        ranks.gather({}, None)
        return mine.tolist()

    assert run_virtual(3, work) == [[-1, -1, 2], [0, -1, -1], [-1, 1, -1]]


def test_a_missing_rank_is_named():
    first, _, third, _ = virtual_ranks(4)
    with pytest.raises(RuntimeError, match="rank 0 of 4 waited in vain for rank 1, 2, 3"):
        first.gather({}, timedelta(milliseconds=10))
    with pytest.raises(RuntimeError, match="rank 2 of 4 waited in vain for rank 1, 3"):
        third.gather({}, timedelta(milliseconds=10))


def test_the_error_of_a_rank_is_raised():
    def work(ranks):
        if ranks.rank == 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(2, work)
    with pytest.raises(ValueError, match="world"):
        virtual_ranks(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transport": "peer"}, 'transport: expected "collective" or "auto" on the CPU, got \'peer\''),
        ({"transport": "smoke"}, "transport: expected"),
        ({"dispatch": "both"}, "dispatch: expected"),
        ({"threshold": -1}, "threshold: expected an int >= 0, got -1"),
        ({"micro_batches": 0}, "micro_batches: expected an int >= 1, got 0"),
        ({"group": "world"}, "group: expected a process group, a virtual rank or None, got str"),
        ({"group": virtual_ranks(2)[0], "transport": "collective"}, 'transport: expected "peer" for virtual ranks'),
    ],
)
def test_bad_arguments(changes, message):
    group = changes.pop("group", None)
    if group is not None and not isinstance(group, str):
        other = virtual_ranks(2)

        def work(ranks):
            with pytest.raises(ValueError, match=message):
                li.ContextParallelIndexer(SPEC, ranks, max_rows=4, max_seq_len=1024, device="cpu", **changes)

        assert run_virtual(len(other), work) == [None, None]
        return
    with pytest.raises(ValueError, match=message):
        li.ContextParallelIndexer(SPEC, group, max_rows=4, max_seq_len=1024, device="cpu", **changes)


def test_crossing_of_two_lines():
    """Alone 5 + n/100, shared 9 + n/400: equal at 533.3 pages."""
    few, many = 8, 2048
    alone, shared = Line(5 + few / 100, 5 + many / 100), Line(9 + few / 400, 9 + many / 400)
    assert crossing(shared, alone, few, many) == 533


@given(
    *(st.floats(1, 1000) for _ in range(4)),
    st.integers(1, 100),
    st.integers(101, 5000),
)
def test_crossing_is_where_sharing_begins_to_pay(alone_few, alone_many, shared_few, shared_many, few, many):
    alone, shared = Line(alone_few, alone_many), Line(shared_few, shared_many)
    pages = crossing(shared, alone, few, many)
    gain = ((alone.many - alone.few) - (shared.many - shared.few)) / (many - few)
    if pages == ALWAYS:
        assert shared.few <= alone.few
    elif pages == NEVER:
        assert gain * (NEVER - few) <= shared.few - alone.few
    else:
        behind = shared.few - alone.few - gain * (pages + 1 - few)
        before = shared.few - alone.few - gain * (pages - few)
        assert behind <= 1e-6 * (alone.few + shared.few)
        assert before >= -1e-6 * (alone.few + shared.few) - gain
