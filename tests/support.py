# SPDX-License-Identifier: Apache-2.0
"""Inputs and small helpers that several test files share."""

import math
from dataclasses import dataclass

import torch

import lightning_indexer as li
from lightning_indexer.spec import IndexerSpec, Shard

WORLDS = (1, 2, 4, 8)
OUT_OF_CACHE = 2**31 - 1
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNIT_ROUNDOFF = 2.0**-24  # of float32
NAN, INF = math.nan, math.inf


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def unit_queries(rows: int, heads: int = 4, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`q[row, h]` is the unit vector of dim `h`: a key's value in dim `h` is its score for head `h`."""
    return torch.eye(heads, dim, dtype=dtype).repeat(rows, 1, 1)


def planted_pages(values: torch.Tensor, *, block_size: int = 128, dim: int = 128, floor: float = -8.0) -> torch.Tensor:
    """Pages that score `values` `[pages, H]` against unit queries: token 0 holds them, all others `floor`."""
    pages = torch.full((len(values), block_size, dim), floor, dtype=torch.bfloat16)
    pages[:, 0, : values.shape[1]] = values.bfloat16()
    return pages


@dataclass(frozen=True)
class Inputs:
    """Decode arguments over pages whose unwritten tokens and unused pages are NaN."""

    spec: IndexerSpec
    q: torch.Tensor  # [T, H, D]
    pages: torch.Tensor  # [num_pages, B, D]
    block_table: torch.Tensor  # [R, max_blocks]
    seq_lens: torch.Tensor  # [R]
    query_len: int

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.pages, self.block_table, self.seq_lens

    @property
    def rules(self) -> dict:
        return {"spec": self.spec, "query_len": self.query_len}


def random_inputs(
    spec: IndexerSpec,
    tokens: list[int],
    *,
    heads: int = 2,
    query_len: int = 1,
    rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    values: str = "normal",
    spare_columns: int = 2,
) -> Inputs:
    """Requests of `tokens` tokens in shuffled pages; columns past a request's blocks hold page ids outside the cache.

    `values="ties"` draws keys and queries from few small integers, so that many blocks score the same.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [math.ceil(length / spec.block_size) for length in tokens]
    shuffled = torch.randperm(sum(counts) + 3, generator=generator)
    rows = len(tokens) * query_len if rows is None else rows

    def draw(*shape: int) -> torch.Tensor:
        if values == "ties":
            draws = torch.randint(-1, 2, shape, generator=generator)
            return (draws * (torch.rand(shape, generator=generator) < 4 / spec.head_dim)).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    pages = torch.full((len(shuffled), spec.block_size, spec.head_dim), math.nan, dtype=dtype)
    garbage = torch.tensor([-1, OUT_OF_CACHE, 123456], dtype=torch.int32)
    width = max(counts, default=0) + spare_columns
    block_table = garbage[torch.randint(3, (len(tokens), width), generator=generator)]
    taken = 0
    for request, (length, count) in enumerate(zip(tokens, counts, strict=True)):
        own = shuffled[taken : taken + count]
        taken += count
        block_table[request, :count] = own.to(torch.int32)
        position = torch.arange(length)
        pages[own[position // spec.block_size], position % spec.block_size] = draw(length, spec.head_dim)
    q = draw(rows, heads, spec.head_dim)
    return Inputs(spec, q, pages, block_table, torch.tensor(tokens, dtype=torch.int32), query_len)


def decode_sharded(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    world: int,
    spec: IndexerSpec,
    query_len: int = 1,
    **merging,
) -> torch.Tensor:
    """All heads' ids from `world` virtual ranks: each scores and selects its shard, one merge of all candidates."""
    rules = {"spec": spec, "query_len": query_len}
    keys = []
    for rank in range(world):
        shard = Shard(rank, world)
        scores = li.score_blocks(q, cache, block_table, seq_lens, shard=shard, **rules)
        keys.append(li.select_keys(scores, seq_lens, shard=shard, **rules))
    return li.merge_keys(torch.stack(keys), seq_lens, **rules, **merging)


def select_sharded(
    scores: torch.Tensor, seq_lens: torch.Tensor, *, world: int, spec: IndexerSpec, query_len: int = 1, order: str = "score"
) -> torch.Tensor:
    """Ids from dense scores `[H, T, N]` that are dealt out to `world` virtual ranks."""
    rules = {"spec": spec, "query_len": query_len}
    blocks = scores.shape[-1]
    keys = []
    for rank in range(world):
        own = torch.full((*scores.shape[:2], -(-blocks // world)), NAN)
        mine = scores[..., rank::world]
        own[..., : mine.shape[-1]] = mine
        keys.append(li.select_keys(own, seq_lens, shard=Shard(rank, world), **rules))
    return li.merge_keys(torch.stack(keys), seq_lens, order=order, **rules)


def dot_bound(inputs: Inputs) -> torch.Tensor:
    """How far a float32 dot of D terms, summed in any order, may be from the exact one: `[H, T, max_blocks]` float64.

    `gamma_D * sum |q_d k_d|` with `gamma_n = n*u / (1 - n*u)`, maximised over the visible tokens of each block: the
    maximum of perturbed values is off by no more than the largest perturbation.
    """
    dim = inputs.spec.head_dim
    gamma = dim * UNIT_ROUNDOFF / (1 - dim * UNIT_ROUNDOFF)
    rows, heads, _ = inputs.q.shape
    block = inputs.spec.block_size
    bound = torch.zeros(heads, rows, inputs.block_table.shape[1], dtype=torch.float64)
    for row in range(len(inputs.seq_lens) * inputs.query_len):
        request, token = divmod(row, inputs.query_len)
        length = max(0, int(inputs.seq_lens[request]) - inputs.query_len + token + 1)
        for b in range(math.ceil(length / block)):
            visible = inputs.pages[inputs.block_table[request, b], : length - b * block].double().abs()
            bound[:, row, b] = gamma * (inputs.q[row].double().abs() @ visible.t()).amax(dim=1)
    return bound


def chosen(ids: torch.Tensor) -> list[list[set[int]]]:
    """Sets of ids by row and head, from ids `[H, T, K]` that must be left-packed, distinct and -1 padded."""
    heads, rows, _ = ids.shape
    sets = []
    for row in range(rows):
        sets.append([])
        for head in range(heads):
            listed = ids[head, row].tolist()
            kept = [block for block in listed if block != -1]
            assert listed == kept + [-1] * (len(listed) - len(kept)), f"row {row}, head {head} not left-packed: {listed}"
            assert len(set(kept)) == len(kept), f"row {row}, head {head} repeats an id: {listed}"
            sets[row].append(set(kept))
    return sets


def owned_heads(rank: int, world: int, heads: int) -> list[int]:
    """The ownership rule, written out: equal runs of heads, or runs of ranks that share a head."""
    if world <= heads:
        return list(range(heads))[rank * (heads // world) : (rank + 1) * (heads // world)]
    return [rank // (world // heads)]
