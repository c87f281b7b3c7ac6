# SPDX-License-Identifier: Apache-2.0
"""What is indexed and who owns it: the indexer's geometry, block shards, head ownership.

Dimensions, in the whole package:

    R  requests                      H  index heads of the model       N  blocks a row can see
    Q  query rows per request        h  index heads a rank owns        L  blocks of one rank's shard
    T  query rows, T >= R*Q          D  index head dim                 P  ranks of the group
    B  block = page, tokens          K  blocks kept (top-k)
"""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_indexer.checks import check_choice, check_int, require
from lightning_indexer.rows import Count

HEAD_DIMS = (64, 128)
BLOCK_SIZES = (64, 128, 256)
MAX_TOPK = 64


@dataclass(frozen=True)
class IndexerSpec:
    """Geometry and rules of one lightning indexer.

    Args:
        num_heads: H, index heads in the model (what `ContextParallelIndexer` counts; the operators take it from `q`).
        head_dim: D, 64 or 128.
        block_size: B, tokens per block; a block is one cache page. 64, 128 or 256.
        topk: K, blocks kept per row and head. Any int from 1 to 64.
        init_blocks: first blocks that are always kept.
        local_blocks: last visible blocks that are always kept; `init_blocks + local_blocks <= topk`.
        tie_break: of blocks with equal scores the "lower" or the "higher" block id comes first.

    Raises:
        ValueError: a value outside these limits.
    """

    num_heads: int = 4
    head_dim: int = 128
    block_size: int = 128
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    tie_break: str = "lower"

    def __post_init__(self) -> None:
        check_int("num_heads", self.num_heads, 1)
        check_int("head_dim", self.head_dim, 1)
        check_int("block_size", self.block_size, 1)
        require(self.head_dim in HEAD_DIMS, "head_dim", f"one of {HEAD_DIMS}", repr(self.head_dim))
        require(self.block_size in BLOCK_SIZES, "block_size", f"one of {BLOCK_SIZES}", repr(self.block_size))
        check_int("topk", self.topk, 1, MAX_TOPK)
        check_int("init_blocks", self.init_blocks, 0)
        check_int("local_blocks", self.local_blocks, 0)
        forced = self.init_blocks + self.local_blocks
        require(forced <= self.topk, "init_blocks + local_blocks", f"at most topk ({self.topk})", forced)
        check_choice("tie_break", self.tie_break, ("lower", "higher"))

    @classmethod
    def minimax_m3(cls) -> "IndexerSpec":
        """MiniMax-M3: 4 heads of 128, blocks of 128 tokens, top-16, the newest block forced."""
        return cls()

    @classmethod
    def from_config(cls, config: Any) -> "IndexerSpec":
        """Read a model's config: an object or a mapping, in transformers' or vLLM's spelling.

        transformers writes `index_n_heads`, `index_head_dim`, `index_block_size`, `index_topk_blocks` and
        `index_local_blocks`; checkpoints and vLLM nest `sparse_num_index_heads`, `sparse_index_dim`,
        `sparse_block_size`, `sparse_topk_blocks`, `sparse_init_block` and `sparse_local_block` in
        `sparse_attention_config`. A multimodal config is followed into its `text_config`. Blocks to force default to
        those of `IndexerSpec`.

        Raises:
            ValueError: a name is missing, or the score is not the block maximum.
        """
        text = _get(config, "text_config")
        config = config if text is None else text
        nested = _get(config, "sparse_attention_config")
        score_type = _first(config, nested, ("sparse_score_type",))
        require(score_type in (None, "max"), "sparse_score_type", "'max'", repr(score_type))
        values = {field: _first(config, nested, names) for field, names in _CONFIG_NAMES.items()}
        for field in ("num_heads", "head_dim", "block_size", "topk"):
            names = " or ".join(_CONFIG_NAMES[field])
            require(values[field] is not None, "config", f"a value for {names}", f"none in {type(config).__name__}")
        return cls(**{field: value for field, value in values.items() if value is not None})

    def owned_heads(self, rank: int, world: int) -> range:
        """Heads that `rank` of `world` owns: `H/P` neighbouring ones, or with `P > H` one head per `P/H` ranks.

        Raises:
            ValueError: neither `H % P == 0` nor `P % H == 0`.
        """
        check_int("world", world, 1)
        check_int("rank", rank, 0, world - 1)
        heads = self.num_heads
        fits = heads % world == 0 or world % heads == 0
        require(fits, "world", f"a divisor or a multiple of num_heads ({heads})", world)
        first = rank * heads // world
        return range(first, first + max(1, heads // world))

    def replicas(self, world: int) -> int:
        """Ranks that own the same head: `max(1, P/H)`."""
        return max(1, world // self.num_heads)


def check_spec(spec: Any) -> IndexerSpec:
    """`spec`, which must be an `IndexerSpec`."""
    require(isinstance(spec, IndexerSpec), "spec", "an IndexerSpec", type(spec).__name__)
    checked: IndexerSpec = spec
    return checked


_CONFIG_NAMES = {
    "num_heads": ("index_n_heads", "sparse_num_index_heads"),
    "head_dim": ("index_head_dim", "sparse_index_dim"),
    "block_size": ("index_block_size", "sparse_block_size"),
    "topk": ("index_topk_blocks", "sparse_topk_blocks"),
    "init_blocks": ("index_init_blocks", "sparse_init_block"),
    "local_blocks": ("index_local_blocks", "sparse_local_block"),
}


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _first(config: Any, nested: Any, names: tuple[str, ...]) -> Any:
    found = (_get(source, name) for name in names for source in (config, nested) if source is not None)
    return next((value for value in found if value is not None), None)


@dataclass(frozen=True)
class Shard:
    """The blocks of one rank. `Shard()` is the whole context.

    `by="block"`: logical block `b` belongs to rank `b % world`, as its local block `b // world`. Every rank holds the whole
    cache.

    `by="page"`: physical page `p` belongs to rank `p % world`, which holds it as its local page `p // world`; no other rank
    does. Whoever allocates pages needs to know nothing of it: prefixes may be shared between requests and pages used again.
    Of a request a rank may own any number of blocks: with pages taken at random about a share of 1 / world, with pages in a
    row the same number but for one; at worst, where all its pages are multiples of `world`, one rank owns them all.

    Raises:
        ValueError: `rank` outside `[0, world)`, or another rule.
    """

    rank: int = 0
    world: int = 1
    by: str = "block"

    def __post_init__(self) -> None:
        check_int("world", self.world, 1)
        check_int("rank", self.rank, 0, self.world - 1)
        check_choice("by", self.by, ("block", "page"))

    def width(self, blocks: int) -> int:
        """L, local slots for scores of a context of up to `blocks` blocks, the same on every rank.

        By block `ceil(blocks / world)`, slot `l` for block `l * world + rank`; by page one for each block.
        """
        return blocks if self.by == "page" else -(-blocks // self.world)

    def count(self, visible: Count) -> Count:
        """By block: how many of the first `visible` logical blocks this rank owns: of an int or elementwise of a tensor."""
        return (visible - self.rank + self.world - 1) // self.world

    def blocks(self, width: int, device: torch.device | str) -> torch.Tensor:
        """By block: logical block ids of the local slots `0 .. width-1`: `local * world + rank`. `[width]` int64."""
        return torch.arange(width, device=device) * self.world + self.rank

    def holds(self, pages: torch.Tensor) -> torch.Tensor:
        """By page: which pages this rank holds, elementwise."""
        return pages % self.world == self.rank

    def owned_blocks(self, pages: torch.Tensor) -> torch.Tensor:
        """Logical blocks of a request that this rank owns, ascending: pages `[n]` of its blocks to `[owned]` int64."""
        if self.by == "page":
            return self.holds(pages).nonzero().squeeze(1)
        return self.blocks(self.count(len(pages)), pages.device)

    def local_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Page ids of owned blocks as this rank's own cache numbers them."""
        return pages // self.world if self.by == "page" else pages

    def pages_held(self, num_pages: int) -> int:
        """Of `num_pages` pages, those that this rank holds; by block all of them."""
        return self.count(num_pages) if self.by == "page" else num_pages

    def local_slots(self, slot_mapping: torch.Tensor, block_size: int) -> torch.Tensor:
        """Slots `page * B + offset` as this rank's own cache numbers them, -1 for those of other ranks: `[n]` int64.

        The same for all layers of a step. With it `IndexCache.write` and `NormRope` store the keys of the rank's pages, and
        ignore the others.
        """
        if self.by == "block":
            return slot_mapping
        page = slot_mapping // block_size
        own = (slot_mapping >= 0) & self.holds(page)
        # Not `where`, which may bring its -1 from the host: a graph captures this.
        return (self.local_pages(page) * block_size + slot_mapping % block_size).masked_fill(~own, -1)
