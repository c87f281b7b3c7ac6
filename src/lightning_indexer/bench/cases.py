# SPDX-License-Identifier: Apache-2.0
"""What is timed: shapes, what each must read and compute, and the named sets of them."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_indexer.bench import peers
from lightning_indexer.checks import check_choice, check_int
from lightning_indexer.rows import decode_lengths
from lightning_indexer.spec import IndexerSpec, Shard
from lightning_indexer.traffic import index_bytes


@dataclass(frozen=True)
class DecodeCase:
    """One layer of a decode step.

    Args:
        groups: `(requests, tokens of each)`; a uniform batch is one group.
        query_len: Q, rows per request.
        heads: index heads that are scored, on the whole context.
    """

    groups: tuple[tuple[int, int], ...]
    query_len: int
    heads: int = 1

    op = "decode"

    def __post_init__(self) -> None:
        for batch, context in self.groups:
            check_int("batch", batch, 1)
            check_int("context", context, IndexerSpec().block_size)
        check_int("query_len", self.query_len, 1)
        check_int("heads", self.heads, 1)

    @property
    def seq_lens(self) -> list[int]:
        return [context for batch, context in self.groups for _ in range(batch)]

    @property
    def name(self) -> str:
        batches = " + ".join(f"{batch} x {context:,}" for batch, context in self.groups)
        return f"{batches}, Q {self.query_len}" + (f", H {self.heads}" if self.heads > 1 else "")

    def index_bytes(self, spec: IndexerSpec, token_bytes: int) -> int:
        """Index keys that must be read, once per request whatever Q and H. Nothing else is counted."""
        return index_bytes(torch.tensor(self.seq_lens), spec, token_bytes, Shard())

    def flops(self, spec: IndexerSpec) -> int:
        """`heads * 2 * D * sum of visible tokens over rows`."""
        lengths = decode_lengths(torch.tensor(self.seq_lens), self.query_len, len(self.seq_lens) * self.query_len)
        return self.heads * 2 * spec.head_dim * int(lengths.sum())

    def peer_us(self, format: str, queries: str) -> float | None:
        """The peer's time for this case with a cache and queries in these formats, where it was measured."""
        if self.heads != 1 or len(self.groups) != 1:
            return None
        if format == "fp8":
            both = peers.DECODE_FP8.get((*self.groups[0], self.query_len))
            return None if both is None else both[queries == "fp8"]
        return peers.DECODE.get((*self.groups[0], self.query_len)) if format == "bf16" else None

    def fields(self) -> dict[str, Any]:
        """The case in a result row; `context` is the longest one, and `lengths` tells where they differ."""
        lengths = [context for _, context in self.groups]
        fields = {"batch": len(self.seq_lens), "context": max(lengths), "query_len": self.query_len}
        return fields if len(self.groups) == 1 else fields | {"lengths": [list(group) for group in self.groups]}


@dataclass(frozen=True)
class RankCase(DecodeCase):
    """What one rank of `world` does of a decode step: all `heads` on its blocks, up to its keys; no exchange.

    Rank 0 is taken, which has the most blocks. With `shard_by="page"` pages lie so that each rank holds those of its blocks by
    block: what is read is the same, and the difference in time what the lists of a sharded cache cost.
    """

    world: int = 4
    shard_by: str = "block"

    op = "cp"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rank(self)

    @property
    def name(self) -> str:
        return super().name + (", by page" if self.shard_by == "page" else "")

    @property
    def own(self) -> DecodeCase:
        """The same step without context parallelism: the rank's own heads on all blocks."""
        return DecodeCase(self.groups, self.query_len, max(1, self.heads // self.world))

    def index_bytes(self, spec: IndexerSpec, token_bytes: int) -> int:
        """Index keys that the rank must read, once per request whatever Q and H. Nothing else is counted."""
        return index_bytes(torch.tensor(self.seq_lens), spec, token_bytes, Shard(0, self.world))

    def peer_us(self, format: str, queries: str) -> float | None:
        """The peer was not measured with this set of heads and ranks on this path."""
        return None

    def fields(self) -> dict[str, Any]:
        """As of a decode step, with the ranks; a rank alone has no transport."""
        return super().fields() | _rank_fields(self)


@dataclass(frozen=True)
class PrefillCase:
    """One layer of a chunk of `tokens` new tokens behind `prefix` cached ones, of one request."""

    heads: int
    tokens: int
    prefix: int

    op = "prefill"

    def __post_init__(self) -> None:
        check_int("heads", self.heads, 1)
        check_int("tokens", self.tokens, 1)
        check_int("prefix", self.prefix, 0)
        check_int("tokens + prefix", self.tokens + self.prefix, IndexerSpec().block_size)

    @property
    def seq_lens(self) -> list[int]:
        return [self.prefix + self.tokens]

    @property
    def name(self) -> str:
        return f"{self.heads} head{'s' if self.heads > 1 else ''}, {self.tokens:,} after {self.prefix:,}"

    def index_bytes(self, spec: IndexerSpec, token_bytes: int) -> int:
        """Index keys that must be read if the chunk reads them once."""
        return index_bytes(torch.tensor(self.seq_lens), spec, token_bytes, Shard())

    def flops(self, spec: IndexerSpec) -> int:
        """`heads * 2 * D * (T*prefix + T*T/2)`."""
        return self.heads * spec.head_dim * (2 * self.tokens * self.prefix + self.tokens * self.tokens)

    def peer_us(self, format: str, queries: str) -> float | None:
        """The peer's time for this case with a cache in this format, where it was measured."""
        return peers.PREFILL.get((self.heads, self.tokens, self.prefix)) if format == "bf16" else None

    def fields(self) -> dict[str, Any]:
        """The case in a result row."""
        return {"batch": 1, "tokens": self.tokens, "prefix": self.prefix}


@dataclass(frozen=True)
class RankPrefillCase(PrefillCase):
    """What one rank of `world` does of a chunk: all `heads` on its blocks, up to its keys; no exchange.

    Rank 0 is taken. `shard_by` as of `RankCase`.
    """

    world: int
    shard_by: str = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rank(self)

    @property
    def name(self) -> str:
        return f"{super().name}, a rank of {self.world}" + (" by page" if self.shard_by == "page" else "")

    @property
    def own(self) -> PrefillCase:
        """The same chunk without context parallelism: the rank's own heads on all blocks."""
        return PrefillCase(max(1, self.heads // self.world), self.tokens, self.prefix)

    def index_bytes(self, spec: IndexerSpec, token_bytes: int) -> int:
        """Index keys that the rank must read if it reads them once."""
        return index_bytes(torch.tensor(self.seq_lens), spec, token_bytes, Shard(0, self.world))

    def flops(self, spec: IndexerSpec) -> int:
        """1/P of those of all heads on all blocks."""
        return super().flops(spec) // self.world

    def peer_us(self, format: str, queries: str) -> float | None:
        """The peer has no such prefill."""
        return None

    def fields(self) -> dict[str, Any]:
        """As of a chunk, with the ranks."""
        return super().fields() | _rank_fields(self)


def _check_rank(case: RankCase | RankPrefillCase) -> None:
    IndexerSpec(num_heads=case.heads).owned_heads(0, case.world)
    check_choice("shard_by", case.shard_by, ("block", "page"))


def _rank_fields(case: RankCase | RankPrefillCase) -> dict[str, Any]:
    fields = {"world": case.world, "transport": "none", "dispatch": "sharded"}
    return fields | {"shard_by": "page"} if case.shard_by == "page" else fields


Case = DecodeCase | RankCase | PrefillCase | RankPrefillCase

MSA_BATCHES = (8, 32, 64, 128)
MSA_CONTEXTS = (1024, 4096, 5120, 10_240, 51_200, 102_400, 204_800)
SKEWED = (
    (((1, 1_048_576), (63, 4096)), 1),
    (((1, 1_048_576), (63, 4096)), 4),
    (((1, 524_288), (31, 16_384)), 1),
    (((4, 131_072), (60, 4096)), 1),
    (((4, 131_072), (60, 4096)), 4),
    (((8, 131_072), (120, 1024)), 1),
)
GPUS_CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072, 1_048_576)
DECODE_SETS = ("default", "msa", "skewed")


def decode_set(name: str, heads: int) -> list[DecodeCase]:
    """Named decode cases.

    "default": every case that the peer was measured on. "msa": the 28 of MiniMax's own protocol, Q = 8. "skewed": few
    long requests among many short ones. "all": these three.
    """
    if name == "all":
        return [case for each in DECODE_SETS for case in decode_set(each, heads)]
    if name == "default":
        return [DecodeCase(((batch, context),), query_len, heads) for batch, context, query_len in peers.DECODE]
    if name == "msa":
        return [DecodeCase(((batch, context),), 8, heads) for batch in MSA_BATCHES for context in MSA_CONTEXTS]
    return [DecodeCase(groups, query_len, heads) for groups, query_len in SKEWED]


def rank_set(world: int, heads: int, shard_by: str = "block") -> list[RankCase]:
    """The uniform batches that the peer was measured on."""
    return [RankCase(((batch, context),), query_len, heads, world, shard_by) for batch, context, query_len in peers.DECODE]


def gpus_set(world: int, heads: int) -> list[RankCase]:
    """Batch 1 to 128 by context 1K to 1M, for ranks with a GPU each."""
    return [RankCase(((batch, context),), 1, heads, world) for batch in (1, 8, 32, 128) for context in GPUS_CONTEXTS]


def prefill_set() -> list[PrefillCase]:
    """Every prefill case that the peer was measured on."""
    return [PrefillCase(heads, tokens, prefix) for heads, tokens, prefix in peers.PREFILL]
