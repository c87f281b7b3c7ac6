# SPDX-License-Identifier: Apache-2.0
"""Run a case on P real ranks and compare every selection with the contract, and with the model's own blocks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

import lightning_indexer as li
from lightning_indexer import reference
from lightning_indexer.checks import require
from lightning_indexer.ranks import VirtualRank, run_virtual
from lightning_indexer.traffic import exchange_bytes, index_bytes
from lightning_indexer.verify.case import Case
from lightning_indexer.verify.ranks import run_ranks

Progress = Callable[[str, int, int], None]
Result = TypeVar("Result")
Work = Callable[[list[Case], VirtualRank | None, torch.device, str], Result]

CPU = torch.device("cpu")
UNIT = 2.0**-24  # rounding unit of float32


@dataclass(frozen=True)
class Difference:
    """A selection that is not what it should be: the first of its comparison."""

    case: str
    world: int
    rank: int
    head: int
    row: int
    against: str
    expected: list[int]
    got: list[int]
    scores: list[tuple[int, float]]  # blocks and scores around the K-th place

    def __str__(self) -> str:
        around = ", ".join(f"{block}: {score:.9g}" for block, score in self.scores)
        return (
            f"{self.case}, {self.world} ranks, rank {self.rank}, head {self.head}, row {self.row}: not {self.against}\n"
            f"  expected {self.expected}\n  got      {self.got}\n  scores around place K, block: score = {around}"
        )


@dataclass
class Outcome:
    """One line of the table: a case on a number of ranks."""

    case: str
    world: int
    rows: int
    selections: int  # per rank, head and row
    equal: int  # ... that are the unsharded selection, bit for bit
    equal_model: int | None  # ... that are the model's own blocks, near-ties included; None if the case has none
    near_ties: int  # ... of these with a block swapped for one of equal score within rounding
    differing: int  # ... that are not the unsharded selection or, with the model's own keys, the model's
    index_bytes: int  # per layer and step, what a rank reads without context parallelism
    index_bytes_cp: int  # ... and with it, on the rank that reads most
    exchange_bytes: int  # per row, what a rank receives
    overlap: float | None = None  # mean share of the blocks that the keys as given select; None if those are what is scored
    differences: list[Difference] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.differing == 0


@dataclass(frozen=True)
class Mass:
    """Share of the true attention that the selected blocks hold, over all rows and attention heads of a case."""

    case: str
    mean: float
    lowest: float


@dataclass(frozen=True)
class _Expected:
    """What a case must give: the reference's selection from the unsharded scores, and how far scores can be trusted."""

    scores: torch.Tensor  # [H, T, N] float32, unsharded
    ids: torch.Tensor  # [H, T, K]
    ids_unsharded: torch.Tensor  # [H, T, K], of the unsharded operator
    overlap: float | None  # with the selection of the keys as given, if others are scored


def compare(
    cases: list[Case],
    worlds: list[int],
    progress: Progress,
    device: torch.device = CPU,
    transport: str = "auto",
    shard_by: str = "block",
) -> Iterator[Outcome]:
    """Outcomes of every case on every number of ranks.

    Each rank gets its own heads' queries and the whole cache, as in an engine, or with `shard_by="page"` a copy of the pages
    that it holds and nothing else. Its ids must be, bit for bit and order
    included, those that the reference selects from the unsharded operator's scores; the unsharded operator must select the
    same. Against the model's own blocks sets are compared, `torch.topk` leaves ties open; where a case's keys are stored in
    another format, that is counted and no fault.

    Ranks are made by `on_ranks`.
    """
    expected = []
    for number, case in enumerate(cases):
        progress("unsharded selection and reference", number, len(cases))
        expected.append(_expect(case, device))
    for world in worlds:
        progress(f"{len(cases)} cases on {world} ranks", 0, 1)
        results = on_ranks(world, partial(_run_cases, shard_by=shard_by), cases, device, transport)
        for number, case in enumerate(cases):
            progress(f"comparing, {world} ranks", number, len(cases))
            yield _judge(case, world, expected[number], [ids[number] for ids in results], shard_by)


def attention_mass(case: Case) -> Mass:
    """How much of `softmax(q.k / sqrt(D))` over all visible tokens the unsharded selection's blocks hold."""
    ids = li.decode(case.q, case.keys, case.block_table, case.seq_lens, spec=case.spec, query_len=case.query_len)
    block = case.spec.block_size
    shares = []
    for row, length in enumerate(reference.row_lengths(case.seq_lens, case.query_len, len(case.q))):
        pages = case.block_table[row // case.query_len, : -(-length // block)].long()
        keys = case.pages[pages].flatten(0, 1)[:length].float()
        for head in range(case.attention_heads):
            weights = torch.softmax(keys @ case.q[row, head].float() / case.spec.head_dim**0.5, dim=0)
            blocks = torch.arange(length) // block
            shares.append(weights[torch.isin(blocks, ids[head, row])].sum())
    found = torch.stack(shares)
    return Mass(case.name, float(found.mean()), float(found.min()))


def _expect(case: Case, device: torch.device) -> _Expected:
    spec, moved = case.spec, case.to(device)
    arguments = (moved.q, moved.keys, moved.block_table, moved.seq_lens)
    scores = li.score_blocks(*arguments, spec=spec, query_len=case.query_len).cpu()
    ids = reference.select(
        scores,
        reference.row_lengths(case.seq_lens, case.query_len, len(case.q)),
        block_size=spec.block_size,
        topk=spec.topk,
        init_blocks=spec.init_blocks,
        local_blocks=spec.local_blocks,
        tie_break=spec.tie_break,
    )
    unsharded = li.decode(*arguments, spec=spec, query_len=case.query_len).cpu()
    if not case.changed:
        return _Expected(scores, ids, unsharded, None)
    given = li.decode(moved.q, moved.pages, *arguments[2:], spec=spec, query_len=case.query_len).cpu()
    return _Expected(scores, ids, unsharded, _overlap(ids, given))


def _overlap(ids: torch.Tensor, given: torch.Tensor) -> float:
    """Mean share of `given`'s blocks `[H, T, K]` that `ids` has, too, over rows that have any."""
    shared = ((given[..., :, None] == ids[..., None, :]).any(dim=-1) & (given >= 0)).sum(dim=-1)
    counts = (given >= 0).sum(dim=-1)
    return float((shared[counts > 0] / counts[counts > 0]).mean())


def on_ranks(world: int, work: Work[Result], cases: list[Case], device: torch.device, transport: str) -> list[Result]:
    """What `work(cases, ranks, device, transport)` returns on each of `world` ranks; `ranks` is for virtual ones.

    On the CPU ranks are processes, with the collective transport. On a GPU they share it: with "peer" and "auto" they are
    threads, with "collective" processes that exchange over gloo.

    Args:
        work: a function of a module.
        transport: as in `ContextParallelIndexer`.

    Raises:
        ValueError: "peer" on the CPU.
    """
    if device.type == "cpu":
        require(transport != "peer", "transport", '"collective" or "auto" on the CPU', repr(transport))
        return run_ranks(world, lambda rank: work(cases, None, device, transport))
    if transport == "collective":
        return run_ranks(world, partial(_in_process, work, cases, device), start_method="spawn")
    moved = [case.to(device) for case in cases]
    return run_virtual(world, lambda ranks: _in_thread(work, moved, ranks, device))


def _in_process(work: Work[Result], cases: list[Case], device: torch.device, rank: int) -> Result:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return work([case.to(device) for case in cases], None, device, "collective")


def _in_thread(work: Work[Result], cases: list[Case], ranks: VirtualRank, device: torch.device) -> Result:
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        return work(cases, ranks, device, "peer")


def _run_cases(
    cases: list[Case], ranks: VirtualRank | None, device: torch.device, transport: str, shard_by: str = "block"
) -> list[torch.Tensor]:
    """This rank's ids for every case, `[h, T, K]` each, on the CPU."""
    found = []
    indexers: dict[li.IndexerSpec, li.ContextParallelIndexer] = {}
    most_rows = max(len(case.q) for case in cases)
    longest = max(int(case.seq_lens.max()) for case in cases)
    for case in cases:
        if case.spec not in indexers:
            indexer = li.ContextParallelIndexer(
                case.spec,
                ranks,
                max_rows=most_rows,
                max_seq_len=max(1, longest),
                device=device,
                transport=transport,
                dispatch="sharded",
                shard_by=shard_by,
            )
            indexers[case.spec] = indexer
    caches = [case.keys.held_by(indexers[case.spec].shard) for case in cases]  # before any rank waits for another on the GPU
    if device.type != "cpu":  # ranks share the GPU
        for indexer in indexers.values():
            for format in sorted({case.keys.format.name for case in cases}):
                indexer.warmup(format, query_lens=sorted({case.query_len for case in cases}))
    for case, keys in zip(cases, caches, strict=True):
        indexer = indexers[case.spec]
        heads = indexer.owned_heads
        q = case.q[:, heads.start : heads.stop]
        found.append(indexer.decode(q, keys, case.block_table, case.seq_lens, query_len=case.query_len).cpu())
        indexer.raise_if_failed()
    return found


def _judge(case: Case, world: int, expected: _Expected, results: list[torch.Tensor], shard_by: str) -> Outcome:
    spec, token_bytes = case.spec, case.keys.token_bytes
    shards = [li.Shard(rank, world, shard_by) for rank in range(world)]
    read = [index_bytes(case.seq_lens, spec, token_bytes, shard, case.block_table) for shard in shards]
    outcome = Outcome(
        case=case.name,
        world=world,
        rows=len(case.q),
        selections=0,
        equal=0,
        equal_model=None if case.chosen is None else 0,
        near_ties=0,
        differing=0,
        index_bytes=index_bytes(case.seq_lens, spec, token_bytes, li.Shard()),
        index_bytes_cp=max(read),
        exchange_bytes=exchange_bytes(spec, world, case.q.element_size()),
        overlap=expected.overlap,
    )
    near: dict[tuple[int, int], bool] = {}  # replicas of a head would ask again
    for rank, ids in enumerate(results):
        for head, found in zip(spec.owned_heads(rank, world), ids, strict=True):
            want, against = expected.ids[head], "the unsharded selection"
            wrong = (found != want).any(dim=-1) | (expected.ids_unsharded[head] != want).any(dim=-1)
            outcome.selections += len(found)
            outcome.equal += int((~wrong).sum())
            if case.chosen is not None and outcome.equal_model is not None:
                chosen = case.chosen[head]
                other = (found.sort(dim=-1).values != chosen.sort(dim=-1).values).any(dim=-1)
                own_keys = not case.changed  # other keys select other blocks, and that is no fault
                for row in other.nonzero().flatten().tolist() if own_keys else ():
                    if (head, row) not in near:
                        near[head, row] = _is_near_tie(case, head, row, chosen[row], want[row])
                    if near[head, row]:
                        outcome.near_ties += 1
                        other[row] = False
                outcome.equal_model += int((~other).sum())
                if own_keys:
                    if not wrong.any():
                        want, against = chosen, "the model's own blocks"
                    wrong |= other
            outcome.differing += int(wrong.sum())
            for row in wrong.nonzero().flatten().tolist()[:1]:
                where = (case.name, world, rank, head, row, against)
                outcome.differences.append(
                    Difference(*where, want[row].tolist(), found[row].tolist(), _around(case, head, row, expected))
                )
    return outcome


def _is_near_tie(case: Case, head: int, row: int, chosen: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether the blocks that one selection has and the other has not could have swapped places by rounding.

    A float32 dot of D terms is off by at most `gamma * sum |q_d k_d|`, `gamma = D u / (1 - D u)`, `u = 2^-24`, whatever
    the order of summation; so is a block's maximum, by the largest such sum among its tokens. Two blocks can only have
    swapped if their float64 scores differ by no more than the sum of their bounds. All pairs of swapped blocks must.
    """
    ours, theirs = set(found.tolist()), set(chosen.tolist())
    gamma = case.spec.head_dim * UNIT / (1 - case.spec.head_dim * UNIT)
    length = reference.row_lengths(case.seq_lens, case.query_len, len(case.q))[row]
    query = case.q[row, head].double()

    def exact(block: int) -> tuple[float, float]:
        if block < 0:
            return float("nan"), 0.0  # a padded place against a block is never a near-tie
        page = int(case.block_table[row // case.query_len, block])
        terms = case.pages[page, : length - block * case.spec.block_size].double() * query
        return float(terms.sum(dim=-1).max()), float(terms.abs().sum(dim=-1).max()) * gamma

    lost, gained = [exact(block) for block in theirs - ours], [exact(block) for block in ours - theirs]
    return len(lost) == len(gained) and all(abs(a - b) <= bound_a + bound_b for a, bound_a in lost for b, bound_b in gained)


def _around(case: Case, head: int, row: int, expected: _Expected) -> list[tuple[int, float]]:
    """Blocks and unsharded scores of the three places before and after the K-th."""
    spec = case.spec
    visible = -(-reference.row_lengths(case.seq_lens, case.query_len, len(case.q))[row] // spec.block_size)
    scores = expected.scores[head, row, :visible]
    ranking = reference.select_row(
        scores, topk=visible, init_blocks=spec.init_blocks, local_blocks=spec.local_blocks, tie_break=spec.tie_break
    )
    return [(block, float(scores[block])) for block in ranking[max(0, spec.topk - 3) : spec.topk + 3]]
