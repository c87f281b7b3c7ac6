# SPDX-License-Identifier: Apache-2.0
"""The `peer` transport: ranks of one host exchange from within kernels. See `kernels.exchange` for the protocol."""

from datetime import timedelta
from typing import Any

import torch

from lightning_indexer import triton_backend
from lightning_indexer.cache import IndexCache
from lightning_indexer.kernels import box as boxes
from lightning_indexer.kernels import exchange as kernels
from lightning_indexer.policy import (
    decode_policy,
    device_facts,
    exchange_rehearsals,
    exchange_waiters,
    few_programs,
    many_pages,
    scorer_sends,
)
from lightning_indexer.ranks import Ranks, gpu_name
from lightning_indexer.rows import Chunks
from lightning_indexer.spec import IndexerSpec, Shard
from lightning_indexer.table import SparseTable
from lightning_indexer.triton_backend import MATRIX_COLUMNS, Counter, Decode, Inbox, Owner, on_its_device
from lightning_indexer.workspace import (
    DecodeTiling,
    PrefillScratch,
    StepPlan,
    Workspace,
    keys_kept,
    power_of_two,
    unscored_blocks,
)

WORD_BYTES = 8
MOST_QUERY_BYTES = 2  # of an element
FNUZ_NAN_FLIP = 0x7F7F7F7F7F7F7F7F  # turns a word of e4m3fnuz NaNs into EMPTY, and no other word
MOST_LANES = 1024  # keys of all ranks that a program merges at once
MERGED_WORDS = 512  # of several rows that it merges at once; no fewer than threads, see `await_words`
POLLS_PER_SECOND = 1_000_000  # looks at a box that is not filled yet: about a microsecond each
# Programs that send queries from within the scorer: 128 rows of two heads are a chunk for each. The first that a GPU takes on
# are there whatever else it does.
SENDERS = 16
# More rows are gathered by a launch of their own. Two H200s, 2026-11-30: 512 rows 8.5 us so, 4.4 us with the launch.
MOST_SENT_ROWS = 128
DRY = -1  # polls of a launch that neither sends nor waits


class PeerTransport:
    """Boxes of the ranks of one host, and the launches that use them. One step at a time.

    Args:
        spec: geometry; `spec.num_heads` counts the heads of the whole group.
        ranks: the group.
        max_rows: most rows of a step or of a prefill.
        device: this rank's GPU.
        timeout: how long a program waits for another rank.
        setup_timeout: how long to wait for the others here; None takes the group's own.
        micro_batches: how many transports there are for the same ranks.

    Raises:
        UnmappedError: on every rank: memory of one cannot be mapped by another.
        RuntimeError: a rank did not come in time.
    """

    name = "peer"

    def __init__(
        self,
        spec: IndexerSpec,
        ranks: Ranks,
        max_rows: int,
        device: torch.device,
        timeout: timedelta,
        setup_timeout: timedelta | None,
        micro_batches: int = 1,
    ) -> None:
        self.spec, self.ranks, self.max_rows, self.device = spec, ranks, max_rows, device
        self.owned = spec.owned_heads(ranks.rank, ranks.world)
        self.polls = min(int(timeout.total_seconds() * POLLS_PER_SECOND), 2**31 - 1)
        heads = len(self.owned)
        self.query_words = 2 * ranks.world * heads * max_rows * spec.topk  # the keys lie before the queries
        self.query_half = ranks.world * heads * max_rows * spec.head_dim * MOST_QUERY_BYTES // WORD_BYTES
        self.box = torch.full((self.query_words + 2 * self.query_half,), boxes.EMPTY.value, dtype=torch.int64, device=device)
        _finish(device)  # nobody may write before it is empty
        self.boxes = ranks.share(self.box, setup_timeout)
        self.addresses = torch.tensor([box.data_ptr() for box in self.boxes], dtype=torch.int64, device=device)
        self.queries = torch.zeros(max_rows * spec.num_heads * spec.head_dim, dtype=torch.int16, device=device)
        # Of a prefill. Never EMPTY, so that no rank waits for a row that is in no tile, whatever its bounds were.
        self.keys = torch.zeros(spec.num_heads * max_rows * spec.topk, dtype=torch.int64, device=device)
        self.steps = torch.zeros(3, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        self.report = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        mine, facts = gpu_name(device), device_facts(device)
        names = [message["device"] for message in ranks.gather({"device": mine}, setup_timeout)]
        self.waiters = exchange_waiters(facts, names.count(mine) * micro_batches)
        # Of all ranks alike: who sends from the scorer must be who is awaited there.
        self.sole = len(set(names)) == len(names) and micro_batches == 1
        self.most_sent = MOST_SENT_ROWS if self.sole and scorer_sends(facts) else 0  # rows whose queries the scorer sends

    def raise_if_failed(self) -> None:
        """Raise RuntimeError if a program of an earlier step has waited in vain, as far as it is known without waiting."""
        missed = int(self.report[0])
        if missed:
            raise RuntimeError(
                f"rank {self.ranks.rank} of {self.ranks.world} waited in vain for rank {missed - 1} inside a step; "
                "selections since then are void, and the indexer must be made anew"
            )

    def decode(self, q: torch.Tensor, *step: Any) -> None:
        """Ids of the own heads into `out` `[h, T, K]`.

        Args:
            q: `[T, h, D]` or `[T, H, D]`, at least one row.
            step: cache, block_table, seq_lens, spec, query_len, longest, order, sparse_table, out, plan and workspace as
                `triton_backend.decode` takes them, and whether to load the kernels only, and neither send nor wait.
        """
        _decode(q, self, *step)

    def prefill(self, q: torch.Tensor, *step: Any) -> None:
        """Ids of the own heads of chunks of at most `max_rows` rows into `out` `[h, T, K]`, shared by all ranks.

        Args:
            q: as in `decode`.
            step: cache, block_table, chunks, shard and scratch as `triton_backend.prefill_keys` takes them, order, out, and
                whether to load the kernels only.
        """
        _prefill(q, self, *step)


@on_its_device
def _decode(
    q: torch.Tensor,
    transport: PeerTransport,
    cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: IndexerSpec,
    query_len: int,
    longest: int,
    order: str,
    sparse_table: SparseTable | None,
    out: torch.Tensor,
    plan: StepPlan,
    workspace: Workspace,
    dry: bool,
) -> None:
    inbox = _inbox(q, transport, query_len, dry)
    if q.shape[1] != spec.num_heads and inbox is None:
        q = _gather_queries(q, transport, len(seq_lens) * query_len, plan, dry)
    owner = Owner(transport.owned.start, len(transport.owned), transport.steps, not dry, inbox)
    free = unscored_blocks(spec, order)
    step = Decode(q, cache, block_table, seq_lens, spec, query_len, longest, free, plan.shard, plan, workspace, owner)
    step.score(None)
    _exchange(step, transport, plan, order, sparse_table, out, dry)


@on_its_device
def _prefill(
    q: torch.Tensor,
    transport: PeerTransport,
    cache: IndexCache,
    block_table: torch.Tensor,
    chunks: Chunks,
    shard: Shard,
    scratch: PrefillScratch | None,
    order: str,
    out: torch.Tensor,
    dry: bool,
) -> None:
    spec, rows = transport.spec, len(q)
    if q.shape[1] != spec.num_heads:
        q = _gather_queries(q, transport, rows, None, dry)
    keys = transport.keys[: spec.num_heads * rows * spec.topk].view(spec.num_heads, rows, spec.topk)
    counter = Counter(transport.steps, not dry)
    triton_backend.prefill_keys(q, cache, block_table, chunks, spec, shard, keys, scratch, counter)
    _exchange_rows(keys, transport, order, out, dry)


def _inbox(q: torch.Tensor, transport: PeerTransport, query_len: int, dry: bool) -> Inbox | None:
    """How the other heads' queries come to the scorer itself; None where all are given, or `gather_kernel` brings them."""
    spec, ranks = transport.spec, transport.ranks
    words = spec.head_dim * q.element_size() // WORD_BYTES
    policy = decode_policy(device_facts(q.device), 0)
    columns = DecodeTiling.of(spec, query_len, spec.num_heads).columns
    # Wider tiles have no registers for it. The second: see `await_words`.
    fits = columns <= MATRIX_COLUMNS and words * MATRIX_COLUMNS >= policy.num_warps * policy.warp_threads
    given = q.shape[1] == spec.num_heads
    if given or not fits or q.shape[0] > transport.most_sent:
        return None
    # Half as long as the exchange: a rank that waits here has sent no keys, and must not be taken for the missing one.
    polls = transport.polls // 2
    return Inbox(
        transport.addresses,
        transport.failed,
        transport.report,
        words,
        transport.query_words,
        transport.query_half,
        ranks.rank,
        ranks.world,
        spec.replicas(ranks.world),
        transport.max_rows,
        DRY if dry else polls,
        SENDERS,
    )


def _gather_queries(q: torch.Tensor, transport: PeerTransport, live: int, plan: StepPlan | None, dry: bool) -> torch.Tensor:
    """Own queries `[T, h, D]` of every rank to `[T, H, D]`: the first `live` rows, for the others are padding.

    In a step that its plan does not share only the own heads are filled.
    """
    shares = None if plan is None else plan.shares
    rows, owned, dim = q.shape
    heads = transport.spec.num_heads
    per_word = WORD_BYTES // q.element_size()
    gathered = transport.queries.view(q.dtype)[: rows * heads * dim].view(rows, heads, dim)
    chunks = -(-live * owned * dim // (per_word * boxes.CHUNK.value))
    words = q.stride(0) // per_word, q.stride(1) // per_word
    policy = decode_policy(device_facts(q.device), 0)
    kernels.gather_kernel[(min(chunks, transport.waiters),)](
        _words(q),
        _words(gathered),
        transport.addresses,
        transport.steps if shares is None else shares[:, -1],
        transport.steps,
        transport.failed,
        transport.report,
        live,
        *words,
        owned,
        heads,
        transport.spec.replicas(transport.ranks.world),
        transport.ranks.rank,
        transport.ranks.world,
        transport.max_rows,
        transport.query_words,
        transport.query_half,
        DRY if dry else transport.polls,
        WORDS=dim // per_word,
        FLIP=FNUZ_NAN_FLIP if q.dtype == torch.float8_e4m3fnuz else 0,
        AUTO=plan is not None and plan.threshold is not None,
        PDL=policy.pdl,
        **policy.select_options(),
    )
    return gathered


def _words(q: torch.Tensor) -> torch.Tensor:
    """Queries as a tensor of a dtype that every Triton has."""
    return q.view(torch.int16 if q.element_size() == 2 else torch.uint8)


def _exchange(
    step: Decode,
    transport: PeerTransport,
    plan: StepPlan,
    order: str,
    sparse_table: SparseTable | None,
    out: torch.Tensor,
    dry: bool,
) -> None:
    """Select from the candidates of `step`, exchange, and merge."""
    assert plan.shares is not None
    spec, world = step.spec, transport.ranks.world
    rows, owned = out.shape[1], len(transport.owned)
    waiters = min(rows * owned, transport.waiters)
    tiling = step.tiling
    kernels.exchange_kernel[(rows * (spec.num_heads - owned) + waiters,)](
        step.workspace.keys,
        step.seq_lens,
        step.seq_lens.stride(0),
        plan.before,
        transport.addresses,
        plan.shares[:, -1],
        transport.steps,
        transport.failed,
        transport.report,
        out,
        *triton_backend.table_pointers(sparse_table, step.seq_lens),
        step.requests,
        rows,
        step.longest,
        step.free,
        step.query_len,
        spec.num_heads,
        transport.owned.start,
        owned,
        spec.replicas(world),
        tiling.columns,
        step.own_tiling.columns,
        spec.topk,
        transport.ranks.rank,
        world,
        step.programs,
        few_programs(step.programs),
        many_pages(step.programs),
        transport.max_rows,
        waiters,
        exchange_rehearsals(device_facts(out.device)),
        transport.query_words,
        transport.query_half,
        DRY if dry else transport.polls,
        *out.stride()[:2],
        *triton_backend.table_strides(sparse_table),
        BLOCK=spec.block_size,
        KEEP=tiling.keep,
        FEW=triton_backend.CANDIDATES[0],
        SOME=triton_backend.CANDIDATES[1],
        MANY=triton_backend.CANDIDATES[2],
        MOST=triton_backend.CANDIDATES[3],
        LANES=max(tiling.keep, step.policy.select_threads, min(MOST_LANES, power_of_two(world * spec.topk))),
        HIGHER=spec.tie_break == "higher",
        BY_BLOCK=order == "block",
        PARTS=triton_backend.table_parts(sparse_table, spec),
        AUTO=plan.threshold is not None,
        SOLE=transport.sole,
        EMPTIED=0 if step.inbox is None else step.inbox.words,
        LISTED=step.listed,
        PDL=step.policy.pdl,
        **step.policy.select_options(),
    )


def _exchange_rows(keys: torch.Tensor, transport: PeerTransport, order: str, out: torch.Tensor, dry: bool) -> None:
    """Exchange candidates `[H, T, K]` of many rows, and merge."""
    spec, world = transport.spec, transport.ranks.world
    heads, rows, topk = keys.shape
    owned, keep = len(transport.owned), keys_kept(topk)
    policy = decode_policy(device_facts(out.device), 0)
    counts = spec.replicas(world), topk, transport.ranks.rank, world, transport.max_rows
    sent = 0 if dry else rows
    kernels.send_rows_kernel[(-(-rows * topk // boxes.CHUNK.value), heads)](
        keys,
        transport.addresses,
        transport.steps,
        sent,
        owned,
        *counts,
        PDL=policy.pdl,
        **policy.select_options(),
    )
    lanes = max(keep, min(MOST_LANES, power_of_two(world * topk)))
    together = max(1, MERGED_WORDS // lanes)
    kernels.merge_rows_kernel[(min(owned * -(-rows // together), transport.waiters),)](
        transport.addresses,
        transport.steps,
        transport.failed,
        transport.report,
        out,
        rows,
        owned,
        *counts[1:],
        DRY if dry else transport.polls,
        *out.stride()[:2],
        KEEP=keep,
        ROWS=together,
        LANES=lanes,
        HIGHER=spec.tie_break == "higher",
        BY_BLOCK=order == "block",
        PDL=policy.pdl,
        **policy.select_options(),
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
